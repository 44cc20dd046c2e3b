"""Every path of the project, in one place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dblast.errors import DBlastError, storage_reason
from dblast.support.files import cache_folder

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data"
NOTEBOOKS = ROOT / "notebooks"
PAPER = DATA / "paper"
#: What runs write goes into the checkout, or into another folder, to leave what is kept alone.
OUTPUT = Path(os.environ.get("DBLAST_OUTPUT", ROOT)).resolve()
FIGURES = OUTPUT / "figures"
RUNS = OUTPUT / "runs"
RESULTS = OUTPUT / "data" / "results"

#: Environment variable that asks for the kept figures and tables to be written anew; batch runs set it.
REGENERATE = "DBLAST_REGENERATE"


def check_data(what: str, advice: str) -> None:
    """Refuse what needs the repository's own data where only the package is installed.

    Raises:
        DBlastError: there is no data; the message begins with ``what`` is missing and ends with ``advice``.
    """
    if not PAPER.is_dir():
        raise DBlastError(f"{what} part of dblast's repository (data/), not of the installed package: clone it, or {advice}")


def figures_folder(profile: str) -> Path:
    """Where a profile's figures and tables are written: ``figures/<profile>`` by a batch run.

    A notebook that is only opened or tested leaves those as they are and writes to ``runs/figures/<profile>``.
    """
    return (FIGURES if os.environ.get(REGENERATE) else RUNS / "figures") / profile


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
