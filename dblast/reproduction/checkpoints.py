"""Drafters that this repository ships in ``data/checkpoints/``, each with a manifest that loading checks.

A checkpoint is a folder with ``config.json`` and bfloat16 ``model.safetensors`` in the
format of published DFlash checkpoints, ``training.json`` (how it was made, and what it
reaches) and ``manifest.json`` (SHA-256 of the others).
"""

from __future__ import annotations

from pathlib import Path

from dblast.errors import DBlastError
from dblast.reproduction.paths import DATA, check_data
from dblast.support.files import check_manifest

CHECKPOINTS = DATA / "checkpoints"

#: Shipped DFlash drafters (no category heads) by target.
SHIPPED = {"smollm2": "smollm2-135m-dflash-b8"}


def shipped_drafter(target: str) -> Path:
    """Checked folder of the drafter shipped for a target.

    Raises:
        DBlastError: none is shipped for it.
        ArtefactError: the checkpoint is missing or damaged.
    """
    if target not in SHIPPED:
        raise DBlastError(
            f"no drafter is shipped for {target!r}, only for {', '.join(SHIPPED)}; start from 'target' or 'random' instead"
        )
    check_data("the shipped drafter is", "train one (`python -m dblast drafter --help`) and give its folder")
    return check_manifest(CHECKPOINTS / SHIPPED[target])
