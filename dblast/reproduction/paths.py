"""Every path of the project, in one place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dblast.errors import DBlastError, storage_reason
from dblast.targets import cache_folder

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data"
NOTEBOOKS = ROOT / "notebooks"
FIGURES = ROOT / "figures"
RUNS = ROOT / "runs"
PAPER = DATA / "paper"
RESULTS = DATA / "results"


def use_empty_cache(folder: Path) -> None:
    """Make ``folder`` an empty cache, for this process and those it starts; fetched targets are shared with the usual one."""
    targets = cache_folder() / "targets"
    try:
        targets.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "targets").symlink_to(targets.resolve(), target_is_directory=True)
    except OSError as error:
        reason = storage_reason(error) or error.strerror
        raise DBlastError(f"{error.filename} cannot be written: {reason}; set DBLAST_CACHE to another folder") from error
    os.environ["DBLAST_CACHE"] = str(folder)
