"""Every path of the project, in one place."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
NOTEBOOKS = ROOT / "notebooks"
FIGURES = ROOT / "figures"
RUNS = ROOT / "runs"
PAPER = DATA / "paper"
RESULTS = DATA / "results"


def cache_folder() -> Path:
    """Where models, trajectories and checkpoints are kept: ``DBLAST_CACHE``, or the user's cache folder."""
    if chosen := os.environ.get("DBLAST_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dblast"
