"""A drafter and its target: which belongs to which, told from their configurations before weights are read."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from dblast.backbone import DBlastConfig
from dblast.errors import DBlastError
from dblast.reproduction.checkpoints import shipped_drafter
from dblast.reproduction.demo import check_model_name, check_target_name
from dblast.sampling import SETTINGS, SamplingSettings
from dblast.targets import CHAT_OPTIONS, Target, check_supported, load_target

#: Sizes of the bundled target, known without fetching it.
SMOLLM2_SHAPE = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}


def read_target_config(name: str) -> PreTrainedConfig:
    """Configuration of a target (of smollm2 its sizes alone), refused if no drafter can serve it.

    Raises:
        DBlastError: it cannot be read, or its family is not supported.
    """
    if name == "smollm2":
        return PreTrainedConfig(**SMOLLM2_SHAPE)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DBlastError(
            f"could not load target {name!r}: {reason}; give --target a folder or id of a model"
        ) from None
    try:
        check_supported(config)
    except DBlastError as error:
        raise DBlastError(f"target {name!r}: {error}") from None
    return config


def read_drafter_config(path: str) -> DBlastConfig:
    """Configuration of a saved drafter; "shipped" is SmolLM2's.

    Raises:
        DBlastError: there is none.
    """
    try:
        return DBlastConfig.from_pretrained(str(shipped_drafter("smollm2")) if path == "shipped" else path)
    except DBlastError as error:
        raise DBlastError(f"{path}: {error}") from None
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DBlastError(f"{path} holds no drafter ({reason}); give a saved drafter, or a DFlash checkpoint") from None


def check_fits(config: DBlastConfig, target: PreTrainedConfig, name: str) -> None:
    """Refuse a drafter of another target, by configurations alone.

    Raises:
        DBlastError: see above.
    """
    sizes = {
        "hidden size": (config.hidden_size, target.hidden_size),
        "vocabulary": (config.vocab_size, target.vocab_size),
        "number of layers": (config.num_target_layers, target.num_hidden_layers),
    }
    for what, (ours, theirs) in sizes.items():
        if ours != theirs:
            made = config.target_name or "a target"
            raise DBlastError(
                f"{name} was made for {made} with {what} {ours}, this target has {theirs}; give its own target"
            )


def open_pair(
    name: str, target_name: str | None = None, chat_options: dict[str, Any] | None = None
) -> tuple[Target, DBlastConfig]:
    """A drafter's target, loaded in bfloat16, and the drafter's configuration.

    A target of another shape is refused by its configuration, before its weights are read or downloaded.

    Args:
        name: folder or id of the drafter.
        target_name: None takes the one that the drafter remembers.
        chat_options: put over those that it remembers.
    """
    import torch

    check_model_name(name, "give --drafter a folder or a Hugging Face id", prefix="--drafter: ")
    config = read_drafter_config(name)
    if target_name is None and config.target_name is None:
        raise DBlastError(f"{name} does not remember its target; give --target")
    try:
        check_target_name(target_name or config.target_name)
    except DBlastError:
        if target_name is not None:
            raise
        # A folder is remembered as it was named, from where it was named.
        raise DBlastError(
            f"{name} remembers its target as {config.target_name!r}, which is not here; give --target"
        ) from None
    target_name = target_name or config.target_name
    check_fits(config, read_target_config(target_name), name)
    target = load_target(
        target_name,
        dtype=torch.bfloat16,
        device="cuda" if torch.cuda.is_available() else "cpu",
        mask_token_id=config.mask_token_id,
        chat_options=CHAT_OPTIONS | (config.chat_options or {}) | (chat_options or {}),
    )
    check_fits(config, target.model.config, name)
    return target, config


def nearest_setting(settings: SamplingSettings | None) -> str:
    """The paper's setting that sampling is closest to, by temperature and top-p; greedy decoding is like "high"."""
    if settings is None:
        return "high"

    def distance(name: str) -> float:
        other = SETTINGS[name]
        return abs(settings.temperature - other.temperature) + abs(settings.top_p - other.top_p)

    return min(SETTINGS, key=distance)
