"""Progress bars that can be seen from a batch run.

In a terminal or in JupyterLab the bar appears where the work was called. A
batch run (``python -m dblast reproduce``) sets ``DBLAST_PROGRESS`` to a file
that it copies to its own terminal, so the bars of notebook kernels and worker
processes are seen there and executed notebooks stay clean.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dblast.support.progress import INTERVAL, VARIABLE


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
    """For worker processes: their bars would overwrite each other, the parent shows one for all; and they end with it."""
    os.environ[VARIABLE] = os.devnull
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent cannot stop its workers, which would wait for their next job for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
