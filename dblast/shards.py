"""``shards.json`` beside shards: what determines them all, and the SHA-256 of each one that is finished."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from dblast.errors import ArtefactError
from dblast.targets import sha256_file


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
