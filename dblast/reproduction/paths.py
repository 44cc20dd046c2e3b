"""Every path of the project, in one place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dblast.targets import cache_folder

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data"
NOTEBOOKS = ROOT / "notebooks"
PAPER = DATA / "paper"
#: What runs write goes into the checkout, or into another folder, to leave what is kept alone.
OUTPUT = Path(os.environ.get("DBLAST_OUTPUT", ROOT)).resolve()
FIGURES = OUTPUT / "figures"
RUNS = OUTPUT / "runs"
RESULTS = OUTPUT / "data" / "results"


def use_empty_cache(folder: Path) -> None:
    """Make ``folder`` an empty cache, for this process and those it starts; fetched targets are shared with the usual one."""
    targets = cache_folder() / "targets"
    targets.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "targets").symlink_to(targets.resolve(), target_is_directory=True)
    os.environ["DBLAST_CACHE"] = str(folder)
