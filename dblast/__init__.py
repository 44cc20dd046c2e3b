"""DBLAST: dependent block drafting for stochastic speculative decoding.

The method. The names below are loaded on first use, so that ``import dblast`` costs nothing;
:mod:`dblast.losses`, :mod:`dblast.proposals` and :mod:`dblast.verifier` hold what their names say. The study of the
paper, its figures and tables, is :mod:`dblast.reproduction`.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "backbone": ("DBlastConfig",),
    "decoding": ("custom_generate", "generate"),
    "drafter": ("DBlastDrafter",),
    "errors": ("ArtefactError", "DBlastError"),
    "replay": ("expected_passes", "score"),
    "sampling": ("SETTINGS", "SamplingSettings"),
    "show": ("show_blocks", "show_tree"),
    "targets": ("Target", "load_target"),
    "trees": ("Tree", "draft_tree", "walk"),
    "training": ("TrainingConfig", "train"),
    "trajectories": ("TrajectorySet", "sample_trajectories"),
}
_LAZY = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_LAZY)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dblast' has no attribute {name!r}")
    return getattr(import_module(f"dblast.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
