"""What a saved drafter's folder holds beside ``config.json`` and ``model.safetensors``, and the check of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dblast.errors import ArtefactError
from dblast.targets import sha256_file

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
