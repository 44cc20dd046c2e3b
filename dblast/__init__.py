"""DBLAST: dependent block drafting for stochastic speculative decoding.

The names below are loaded on first use, so that ``import dblast`` costs nothing.
"""

from importlib import import_module
from typing import Any

_LAZY = {
    "DBlastDrafter": ("dblast.drafter", "DBlastDrafter"),
    "SamplingSettings": ("dblast.sampling", "SamplingSettings"),
    "custom_generate": ("dblast.generate", "custom_generate"),
    "load_target": ("dblast.targets", "load_target"),
    "show_blocks": ("dblast.show", "show_blocks"),
}

__all__ = [*sorted(_LAZY), "generate"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "generate":
        # Module and function at once: `dblast.generate(...)` and `from dblast.generate import ...` both work.
        return import_module("dblast.generate")
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'dblast' has no attribute {name!r}")
