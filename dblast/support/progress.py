"""Bars of long work, and the silence of libraries that show their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

VARIABLE = "DBLAST_PROGRESS"


#: Seconds between two updates of a bar; a batch run without a terminal sets it higher to keep its log short.
INTERVAL = "DBLAST_PROGRESS_SECONDS"


@contextmanager
def progress(total: int, description: str | None, unit: str = "step", initial: int = 0) -> Iterator[tqdm]:
    """A tqdm bar with rate and time left, on stderr or in the file that ``DBLAST_PROGRESS`` names; None hides it."""
    path = os.environ.get(VARIABLE)
    file = open(path, "a", encoding="utf-8") if path else sys.stderr  # noqa: SIM115
    try:
        with tqdm(
            total=total,
            desc=description,
            disable=description is None,
            unit=unit,
            unit_scale=total > 10_000,
            initial=initial,
            file=file,
            mininterval=float(os.environ.get(INTERVAL, 1.0)),
            dynamic_ncols=not path,
            ncols=100 if path else None,
        ) as bar:
            yield bar
    finally:
        if path:
            file.close()


@contextmanager
def quiet_loading(report: bool = True) -> Iterator[None]:
    """Hide the loading bars of transformers and datasets, which take a second here and fill notebooks.

    Args:
        report: False also hides what transformers logs about weights that do not fit, where the caller refuses them.
    """
    from datasets.utils import logging as datasets_logging
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled(), datasets_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    datasets_logging.disable_progress_bar()
    if not report:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown[0]:
            transformers_logging.enable_progress_bar()
        if shown[1]:
            datasets_logging.enable_progress_bar()
