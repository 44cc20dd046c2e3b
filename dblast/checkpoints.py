"""Drafters that this repository ships in ``data/checkpoints/``, each with a manifest that loading checks.

A checkpoint is a folder with ``config.json`` and bfloat16 ``model.safetensors`` in the
format of published DFlash checkpoints, ``training.json`` (how it was made, and what it
reaches) and ``manifest.json`` (SHA-256 of the others).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from dblast.errors import ArtefactError, DBlastError
from dblast.paths import DATA
from dblast.targets import sha256_file

if TYPE_CHECKING:
    from dblast.drafter import DBlastDrafter

CHECKPOINTS = DATA / "checkpoints"
MANIFEST, RECORD = "manifest.json", "training.json"

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
    return check_checkpoint(CHECKPOINTS / SHIPPED[target])


def check_checkpoint(folder: Path) -> Path:
    """Compare a checkpoint with its manifest; returns the folder.

    Raises:
        ArtefactError: a file is missing or its content is not the one that was written.
    """
    advice = "restore it with git, or make it again with `python -m dblast pretrain`"
    try:
        expected = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"the manifest in {folder} is missing or damaged ({type(error).__name__}); {advice}") from None
    for name in {"config.json", "model.safetensors", RECORD} | expected.keys():
        path = folder / name
        if not path.is_file() or sha256_file(path) != expected.get(name):
            raise ArtefactError(f"{path} is missing or damaged; {advice}")
    return folder


def write_checkpoint(drafter: DBlastDrafter, record: dict, folder: Path) -> Path:
    """Save a drafter in bfloat16 with its record and manifest; the folder appears whole or not at all.

    Args:
        record: JSON-like account of the training.

    Raises:
        DBlastError: the folder exists already.
    """
    import torch

    from dblast.progress import quiet_loading

    if folder.exists():
        raise DBlastError(f"{folder} exists already; move it away, or choose another folder")
    scratch = folder.with_name(folder.name + ".part")
    shutil.rmtree(scratch, ignore_errors=True)
    with quiet_loading():
        copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(scratch)
    (scratch / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    hashes = {path.name: sha256_file(path) for path in sorted(scratch.iterdir())}
    (scratch / MANIFEST).write_text(json.dumps({"sha256": hashes}, indent=1), encoding="utf-8")
    os.replace(scratch, folder)
    return folder
