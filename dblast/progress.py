"""Progress bars that can be seen from a batch run.

In a terminal or in JupyterLab the bar appears where the work was called. A
batch run (``python -m dblast reproduce``) sets ``DBLAST_PROGRESS`` to a file
that it copies to its own terminal, so the bars of notebook kernels and worker
processes are seen there and executed notebooks stay clean.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
def quiet_loading() -> Iterator[None]:
    """Hide the loading bars of transformers and datasets, which take a second here and fill notebooks."""
    from datasets.utils import logging as datasets_logging
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled(), datasets_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    datasets_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown[0]:
            transformers_logging.enable_progress_bar()
        if shown[1]:
            datasets_logging.enable_progress_bar()


@contextmanager
def relay(path: Path) -> Iterator[None]:
    """Copy what is appended to ``path`` to this process's stderr until the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    stop = threading.Event()

    def follow() -> None:
        with path.open("rb") as source:
            while True:
                done = stop.is_set()
                if chunk := source.read():
                    sys.stderr.write(chunk.decode("utf-8", "replace"))
                    sys.stderr.flush()
                if done:
                    return
                time.sleep(0.2)

    thread = threading.Thread(target=follow, daemon=True)
    before = {name: os.environ.get(name) for name in (VARIABLE, INTERVAL)}
    os.environ[VARIABLE] = str(path.resolve())
    if not sys.stderr.isatty():
        os.environ[INTERVAL] = "30"
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def silence_worker() -> None:
    """For worker processes: their bars would overwrite each other; the parent shows one for all."""
    os.environ[VARIABLE] = os.devnull
