"""Files that say what they are: where they are kept, their checksums, the manifest of a drafter, the record of shards."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dblast.errors import ArtefactError


def cache_folder() -> Path:
    """Where models, trajectories and checkpoints are kept: ``DBLAST_CACHE``, or the user's cache folder."""
    if chosen := os.environ.get("DBLAST_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dblast"


#: Files hashed by this process: path to what identified the file then, and its SHA-256.
_HASHED: dict[Path, tuple[tuple[int, ...], str]] = {}


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, hexadecimal; read once per process for as long as its size and times stay the same."""
    path = Path(path).absolute()
    before = path.stat()
    identity = (before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino)
    known = _HASHED.get(path)
    if known and known[0] == identity:
        return known[1]
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    # A file as young as this may change once more without its time moving on.
    if abs(time.time_ns() - before.st_mtime_ns) > 2_000_000_000:
        _HASHED[path] = (identity, found)
    return found


# -- a saved drafter: its folder's files beside ``config.json`` and ``model.safetensors`` -------------------

#: SHA-256 of every other file, and an account of the training.
MANIFEST, RECORD = "manifest.json", "training.json"


def json_value(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have, and plain numbers for NumPy's."""
    if isinstance(value, dict):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_manifest(folder: Path) -> None:
    """Note what the files of a finished folder are."""
    hashes = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"sha256": hashes}, indent=1), encoding="utf-8")


def check_manifest(folder: Path) -> Path:
    """Compare a saved drafter with its manifest; returns the folder.

    Raises:
        ArtefactError: a file is missing or its content is not the one that was written.
    """
    advice = "take it again from where it came, or train it again"
    try:
        expected = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        kind = type(error).__name__
        raise ArtefactError(f"the manifest in {folder} is missing or damaged ({kind}); {advice}") from None
    for name in {"config.json", "model.safetensors"} | expected.keys():
        path = folder / name
        if not path.is_file() or sha256_file(path) != expected.get(name):
            raise ArtefactError(f"{path} is missing or damaged; {advice}")
    return folder


# -- shards: ``shards.json`` has what determines them all, and the SHA-256 of each that is finished --------


def _hashes(shard: Path) -> list[str]:
    return [sha256_file(path) for path in (sorted(shard.iterdir()) if shard.is_dir() else [shard])]


class Shards:
    """The record of a folder, written shard by shard so that a killed run goes on; damage and mixtures are refused.

    ``made_by``, all that determines the shards, counts by its ``repr``; without it a finished folder is read.
    """

    def __init__(self, folder: Path, made_by: object = None, **counts: int):
        self.path = folder / "shards.json"
        ours = hashlib.sha256(repr(made_by).encode()).hexdigest()
        self.record = {"made_by": ours, **counts, "sha256": {}}
        if made_by is None or self.path.exists():
            try:
                self.record = json.loads(self.path.read_text(encoding="utf-8"))
                found, _, _ = self.record["made_by"], dict(self.record["sha256"]), int(self.record["shards"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ArtefactError(f"shards in {folder} are missing or damaged ({error}); delete it and rerun") from None
            if made_by is not None and found != ours:
                raise ArtefactError(f"shards in {folder} are another run's; delete it, or choose another folder")

    def has(self, shard: Path) -> bool:
        """Whether a shard is finished, and intact."""
        if (known := self.record["sha256"].get(shard.name)) and shard.exists() and _hashes(shard) != known:
            raise ArtefactError(f"{shard} is damaged; delete it and rerun")
        return bool(known) and shard.exists()

    def paths(self, form: str) -> list[Path]:
        """All shards, checked, by the form of their names."""
        paths = [self.path.with_name(form.format(index)) for index in range(self.record["shards"])]
        if absent := [path for path in paths if not self.has(path)]:
            raise ArtefactError(f"{absent[0].name} is missing")
        return paths

    def add(self, shard: Path, write: Callable[[Path], None]) -> None:
        """Write a shard, whatever a killed run left of it, and note it."""
        scratch, record = self.path.with_name("shard.part"), self.path.with_name("shards.json.part")
        for left in (scratch, shard):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write(scratch)
        self.record["sha256"][shard.name] = _hashes(scratch)
        record.write_text(json.dumps(self.record, indent=1), encoding="utf-8")
        scratch.replace(shard)
        record.replace(self.path)
