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
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dblast.errors import ArtefactError, DBlastError, storage_reason
from dblast.reproduction.fingerprint import code_fingerprint
from dblast.support.files import cache_folder, sha256_file

RECORD = "stage.json"
#: Subfolder for what only a resumed run needs; it is no part of the artefact and goes when that is finished.
RUN = "run"


def digest(value: Any) -> str:
    """Short hash of any JSON-like value; dataclasses count by their fields."""

    def plain(item: Any) -> Any:
        if is_dataclass(item) and not isinstance(item, type):
            return asdict(item)
        raise TypeError(f"cannot hash {type(item).__name__}")

    text = json.dumps(value, sort_keys=True, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path, waiting_for: str) -> Iterator[None]:
    """One process at a time; a second one says that it waits. A killed one frees the lock."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=1)
    except Timeout:
        sys.stderr.write(f"waiting for another process that {waiting_for}\n")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def write_json(path: Path, value: Any) -> None:
    """Write JSON that is there whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(value, indent=1, sort_keys=True, default=asdict) + "\n", encoding="utf-8")
    os.replace(scratch, path)


class Stage:
    """One artefact: a kind, what determines it, and the folder that holds it.

    Args:
        kind: folder name under the cache, e.g. ``"trajectories"``.
        spec: JSON-like description (dataclasses allowed), including the keys of upstream stages.
        code: functions whose code, with all that it reaches in dblast, determines the result; or their full names.
    """

    def __init__(self, kind: str, spec: dict, *code: Callable | str):
        self.kind, self.spec, self.code = kind, spec, code
        self.key = digest({"kind": kind, "spec": spec, "code": code_fingerprint(*code)})
        self.folder = cache_folder() / kind / self.key

    @property
    def done(self) -> bool:
        return (self.folder / RECORD).exists()

    def record(self) -> dict:
        """What ``stage.json`` says.

        Raises:
            ArtefactError: it is missing, damaged, or of another artefact.
        """
        return _read_record(self.folder)

    def check(self) -> None:
        """Compare every file with the record; a file is read once per process for as long as it stays the same.

        Raises:
            ArtefactError: a file is missing, changed, or the record is unreadable or of another artefact.
        """
        _check_files(self.folder, self.record())

    def run(self, compute: Callable[[Path], None]) -> Path:
        """The finished folder: reused if present and intact, computed otherwise.

        Raises:
            ArtefactError: it is damaged, or the cache cannot be written.
        """
        if self.done:
            self.check()
            return self.folder
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder.with_suffix(".lock"), f"makes {self.kind}/{self.key}"):
                # Another process may have finished it while this one waited.
                if self.done:
                    self.check()
                else:
                    self._compute(compute)
        except Exception as error:
            reason = storage_reason(error)
            if isinstance(error, DBlastError) or reason is None:
                raise
            raise ArtefactError(
                f"{getattr(error, 'filename', None) or self.folder} cannot be written: {reason}; make room, or set "
                "DBLAST_CACHE to another folder, and run the same command again"
            ) from error
        return self.folder

    def _compute(self, compute: Callable[[Path], None]) -> None:
        start = time.monotonic()
        compute(self.folder)
        # What runs that were killed while they wrote have left.
        for path in [*self.folder.rglob("*.part")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        paths = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        names = {path.relative_to(self.folder): path for path in paths}
        record = {
            "kind": self.kind,
            "key": self.key,
            "spec": self.spec,
            "code": [name if isinstance(name, str) else f"{name.__module__}.{name.__qualname__}" for name in self.code],
            # Of this run only: a resumed stage does not know how long its earlier runs took.
            "seconds": time.monotonic() - start,
            "files": {name.as_posix(): sha256_file(path) for name, path in names.items() if name.parts[0] != RUN},
        }
        write_json(self.folder / RECORD, record | {"digest": digest(record)})
        shutil.rmtree(self.folder / RUN, ignore_errors=True)


def _read_record(folder: Path) -> dict:
    advice = f"delete {folder} and rerun"
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        stated, kind, key, _ = record.pop("digest"), record["kind"], record["key"], dict(record["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(f"{folder / RECORD} is missing or damaged ({type(error).__name__}); {advice}") from error
    if digest(record) != stated:
        raise ArtefactError(f"{folder / RECORD} is damaged; {advice}")
    if (kind, key) != (folder.parent.name, folder.name):
        raise ArtefactError(f"{folder / RECORD} is that of {kind}/{key}, another artefact; {advice}")
    return record


def _check_files(folder: Path, record: dict) -> None:
    for name, expected in record["files"].items():
        path = folder / name
        if not path.is_file() or sha256_file(path) != expected:
            raise ArtefactError(f"{path} is missing or damaged; delete {folder} and rerun")


# -- the cache as a whole ---------------------------------------------------------------------------

_KEY = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Stored:
    """One folder of the cache.

    Attributes:
        size: bytes of all its files.
        changed: when the last of them was written, seconds since 1970.
        state: "finished"; "unfinished", a run goes on with it; "damaged", its record cannot be used; or "outdated",
            made by code, or from an artefact, that is no longer this one, so that nothing finds it any more.
    """

    kind: str
    key: str
    folder: Path
    size: int
    changed: float
    state: str


def list_stages() -> list[Stored]:
    """What the cache holds, by kind and key; no file's content is read but the records'."""
    folders = [folder for folder in sorted(cache_folder().glob("*/*")) if _KEY.fullmatch(folder.name) and folder.is_dir()]
    records: dict[Path, dict | str] = {}
    for folder in folders:
        try:
            records[folder] = _read_record(folder) if (folder / RECORD).exists() else "unfinished"
        except ArtefactError:
            records[folder] = "damaged"
    outdated = {folder for folder, record in records.items() if isinstance(record, dict) and _is_outdated(record)}
    # What was made from an outdated artefact is outdated, too.
    while more := {
        folder
        for folder, record in records.items()
        if isinstance(record, dict) and folder not in outdated and _keys(record["spec"]) & {f.name for f in outdated}
    }:
        outdated |= more
    found = []
    for folder, record in records.items():
        stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
        state = record if isinstance(record, str) else "outdated" if folder in outdated else "finished"
        changed = max((stat.st_mtime for stat in stats), default=folder.stat().st_mtime)
        size = sum(stat.st_size for stat in stats)
        found.append(Stored(folder.parent.name, folder.name, folder, size, changed, state))
    return found


def _is_outdated(record: dict) -> bool:
    code = code_fingerprint(*record["code"])
    return digest({"kind": record["kind"], "spec": record["spec"], "code": code}) != record["key"]


def _keys(spec: Any) -> set[str]:
    """All keys of other artefacts in a description."""
    if isinstance(spec, str):
        return {spec} if _KEY.fullmatch(spec) else set()
    parts = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ()
    return set().union(*map(_keys, parts))


def check_all() -> Iterator[tuple[Stored, str | None]]:
    """Every finished artefact with what is wrong with it, or None; reads all files that this process did not read yet."""
    for stored in list_stages():
        if stored.state == "unfinished":
            continue
        try:
            _check_files(stored.folder, _read_record(stored.folder))
            yield stored, None
        except ArtefactError as error:
            yield stored, str(error)


def clean(stages: list[Stored]) -> list[Stored]:
    """Delete artefacts; returns those that no other process was at work on."""
    removed = []
    for stored in stages:
        lock = FileLock(stored.folder.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        try:
            # The record first: what is killed in between must not look finished.
            (stored.folder / RECORD).unlink(missing_ok=True)
            shutil.rmtree(stored.folder)
            removed.append(stored)
        finally:
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)
    return removed
