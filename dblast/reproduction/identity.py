"""What a model is, whatever it is called: the content of its files, or the commit that its hub id stands for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from transformers import PretrainedConfig

from dblast.errors import DBlastError
from dblast.support.bundled import SMOLLM2_SHA256
from dblast.support.files import sha256_file

#: Files of a saved model that loading it reads: configurations and tokenizers, weights, word lists, chat templates.
_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")


def model_identity(name: str) -> str | dict[str, str]:
    """What determines a target or drafter; part of the address of all that is made from it.

    Args:
        name: ``"smollm2"``, a folder (then its files count, not its name) or a Hugging Face id.

    Raises:
        DBlastError: a Hugging Face id that neither the hub nor the local cache of it knows.
    """
    if name == "smollm2":
        return SMOLLM2_SHA256
    if not Path(name).is_dir():
        return {"hub": name, "commit": hub_commit(name)}
    files = (path for path in sorted(Path(name).iterdir()) if path.suffix in _SUFFIXES and path.is_file())
    return {path.name: sha256_file(path) for path in files}


@cache
def hub_commit(name: str) -> str:
    """The commit that a Hugging Face id stands for: the hub's latest, or without a network the one in the local cache."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        return HfApi().model_info(name, timeout=10).sha
    except Exception as error:  # the hub client and the layers below raise unrelated types
        reason = type(error).__name__
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:
        found = None
    if isinstance(found, str):
        return Path(found).parent.name
    raise DBlastError(
        f"{name!r} is no folder, the hub does not give it ({reason}) and it was never downloaded here; "
        "give a folder with a saved model, or a reachable Hugging Face id"
    )


def check_commit(name: str, config: PretrainedConfig) -> None:
    """Refuse a model from the hub that is of another commit than the one its artefacts are kept under."""
    loaded = getattr(config, "_commit_hash", None)
    if loaded and name != "smollm2" and not Path(name).is_dir() and loaded != hub_commit(name):
        raise DBlastError(f"{name} was changed on the hub while this ran; run the same command again")
