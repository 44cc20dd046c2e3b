"""Stage artefacts: folders addressed by a hash of all that determines them.

A stage's folder is filled in place, so that work which saves its progress can
go on after a kill; ``stage.json`` is written last and atomically, and lists the
SHA-256 of every file. A finished artefact is reused; one whose files do not
match its record is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dblast.errors import ArtefactError
from dblast.reproduction.fingerprint import code_fingerprint
from dblast.targets import cache_folder, sha256_file

RECORD = "stage.json"


def digest(value: Any) -> str:
    """Short hash of any JSON-like value; dataclasses count by their fields."""

    def plain(item: Any) -> Any:
        if is_dataclass(item) and not isinstance(item, type):
            return asdict(item)
        raise TypeError(f"cannot hash {type(item).__name__}")

    text = json.dumps(value, sort_keys=True, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Stage:
    """One artefact: a kind, what determines it, and the folder that holds it.

    Args:
        kind: folder name under the cache, e.g. ``"trajectories"``.
        spec: JSON-like description (dataclasses allowed), including the keys of upstream stages.
        code: functions whose code, with all that it reaches in dblast, determines the result.
    """

    def __init__(self, kind: str, spec: dict, *code: Callable):
        self.kind, self.spec = kind, spec
        self.key = digest({"kind": kind, "spec": spec, "code": code_fingerprint(*code)})
        self.folder = cache_folder() / kind / self.key

    @property
    def done(self) -> bool:
        return (self.folder / RECORD).exists()

    def record(self) -> dict:
        return json.loads((self.folder / RECORD).read_text(encoding="utf-8"))

    def check(self) -> None:
        """Compare every file with the record.

        Raises:
            ArtefactError: a file is missing, changed, or the record is unreadable.
        """
        try:
            files = dict(self.record()["files"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArtefactError(f"{self.folder / RECORD} is damaged; delete {self.folder} and rerun") from error
        for name, expected in files.items():
            path = self.folder / name
            if not path.exists() or sha256_file(path) != expected:
                raise ArtefactError(f"{path} is missing or damaged; delete {self.folder} and rerun")

    def run(self, compute: Callable[[Path], None], fresh: bool = False) -> Path:
        """The finished folder: reused if present and intact, computed otherwise."""
        if fresh and self.folder.exists():
            shutil.rmtree(self.folder)
        if self.done:
            self.check()
            return self.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock():
            # Another process may have finished it while this one waited.
            if self.done:
                self.check()
            else:
                self._compute(compute)
        return self.folder

    def _lock(self) -> FileLock:
        """One process at a time fills a stage's folder; a second one says that it waits. A killed one frees it."""
        lock = FileLock(self.folder.with_suffix(".lock"))
        try:
            lock.acquire(timeout=1)
        except Timeout:
            sys.stderr.write(f"waiting for another process that makes {self.kind}/{self.key}\n")
            lock.acquire()
        return lock

    def _compute(self, compute: Callable[[Path], None]) -> None:
        start = time.monotonic()
        compute(self.folder)
        scratch = self.folder / (RECORD + ".part")
        files = {
            str(path.relative_to(self.folder)): sha256_file(path)
            for path in sorted(self.folder.rglob("*"))
            # A run killed while it wrote the record leaves the scratch file behind.
            if path.is_file() and path.name not in (RECORD, scratch.name)
        }
        # Time of this run only: a resumed stage does not know how long its earlier runs took.
        record = {"kind": self.kind, "spec": self.spec, "seconds": time.monotonic() - start, "files": files}
        scratch.write_text(json.dumps(record, indent=1, default=asdict), encoding="utf-8")
        os.replace(scratch, self.folder / RECORD)
