"""Training states on disk: tensors and JSON in one safetensors file that knows its own checksum."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dblast.errors import ArtefactError


def write_state(path: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a state that is there whole or not at all."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps(header)
    scratch = path.with_name(path.name + ".part")
    # One entry: of several, safetensors does not keep the order.
    save_file(tensors, scratch, {"state": f"{_digest(text, tensors)} {text}"})
    os.replace(scratch, path)


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a state.

    Raises:
        ArtefactError: it is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            stated, text = file.metadata()["state"].split(" ", 1)
        header = json.loads(text)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"checkpoint {path} is damaged ({type(error).__name__}); delete it and rerun") from error
    if _digest(text, tensors) != stated:
        raise ArtefactError(f"checkpoint {path} is damaged (another checksum); delete it and rerun")
    return header, tensors


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        found.update(tensors[name].reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()
