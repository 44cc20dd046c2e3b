"""What a call of Hugging Face's ``generate`` asks of the decoding loop: every option is read, or refused by name.

transformers (seen in 5.24) merges arguments, ``generation_config`` and the model's own defaults into one configuration,
builds logits processors and stopping criteria from it, adds the caller's, and hands all of them to a callable. What it
does not hand on to a callable can be neither honoured nor refused: ``streamer``, ``assistant_model``, ``tokenizer``,
``synced_gpus`` and, without guidance, ``negative_prompt_ids``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from dblast.errors import DBlastError
from dblast.sampling import SamplingSettings
from dblast.support.checks import token_ids

#: Options that are honoured, or that say nothing about the tokens (the last line).
READ = {
    *("do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id"),
    *("max_length", "max_new_tokens", "num_return_sequences", "return_dict_in_generate"),
    *("bos_token_id", "disable_compile", "transformers_version"),
}
#: Values that ask for nothing; of every other option None, False and 0 do.
NEUTRAL = {
    "use_cache": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "length_penalty": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}
ADVICE = "leave it out (temperature, top_k, top_p, EOS ids and the budget are used)"


def _check_config(config: GenerationConfig) -> None:
    # min_length last: transformers derives it from min_new_tokens, which is what the caller knows.
    for name in sorted(vars(config), key=lambda name: name == "min_length"):
        value = getattr(config, name)
        if name in READ or name.startswith("_") or value is None:
            continue
        asks = value != NEUTRAL[name] if name in NEUTRAL else value is not False and value != 0
        if asks:
            raise DBlastError(f"speculative decoding does not use {name}={value!r:.60}; {ADVICE}")


def _check_list(items: Sequence, expected: list[tuple[type, str, Any]], advice: str) -> None:
    """Refuse anything but what the configuration alone builds: (class, attribute, its value) in this order."""
    for item in items:
        if type(item) not in [kind for kind, *_ in expected]:
            raise DBlastError(f"speculative decoding does not use {type(item).__name__}; {advice}")
    found = [(type(item), name, getattr(item, name, None)) for item, (_, name, _) in zip(items, expected, strict=False)]
    found = [(kind, name, value.tolist() if isinstance(value, Tensor) else value) for kind, name, value in found]
    if len(items) != len(expected) or found != expected:
        names = ", ".join(type(item).__name__ for item in items)
        raise DBlastError(f"speculative decoding uses none of its own among {names}; {advice}")


def _check_model_kwargs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    for name, value in model_kwargs.items():
        known = ("attention_mask", "position_ids", "cache", "logits_to_keep", "use_cache")
        if name not in known and value is not None and value is not False:
            raise DBlastError(f"speculative decoding does not use {name}; {ADVICE}")
    if model_kwargs.get("logits_to_keep", 1) != 1:
        raise DBlastError(f"speculative decoding does not use logits_to_keep; {ADVICE}")
    past = model_kwargs.get("cache")
    if past is not None and (getattr(past, "_is_user_defined", False) or past.get_seq_length()):
        raise DBlastError("speculative decoding keeps its own caches; call generate without one")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and (mask.shape != input_ids.shape or not bool(((mask == 0) | (mask == 1)).all())):
        raise DBlastError("the attention mask must hold a 0 or 1 for every token of the prompts")
    if positions is not None:
        seen = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
        expected = (seen.cumsum(-1) - 1).masked_fill(seen == 0, 0)
        positions = positions.to(input_ids.device).masked_fill(seen == 0, 0) if positions.ndim == 2 else positions
        if positions.shape != expected.shape or not torch.equal(positions, expected):
            raise DBlastError(f"speculative decoding does not use position_ids other than those of the mask; {ADVICE}")


def read_options(
    config: GenerationConfig,
    input_ids: Tensor,
    vocab_size: int,
    logits_processor: Sequence | None,
    stopping_criteria: Sequence | None,
    model_kwargs: dict[str, Any],
) -> dict[str, Any]:
    """What :func:`dblast.decoding.generate` is to be called with.

    Args:
        config: merged from everything that the caller set.
        input_ids: (N, L) prompts, padded on either side.
        logits_processor, stopping_criteria: as ``generate`` hands them over, the caller's own among them; None from a
            direct call.
        model_kwargs: whatever else it hands over.

    Returns:
        ``prompts, settings, do_sample, max_new_tokens, eos_token_ids``.

    Raises:
        DBlastError: an option that block verification does not use.
    """
    _check_config(config)
    _check_model_kwargs(input_ids, model_kwargs)
    width = input_ids.shape[1]
    if config.max_new_tokens is None and config.max_length is None:
        raise DBlastError("no budget; give max_new_tokens")
    budget = config.max_length - width if config.max_new_tokens is None else config.max_new_tokens
    eos = token_ids(config.eos_token_id, vocab_size, "eos_token_id")
    expected: list[tuple[type, str, Any]] = []
    settings = None
    if config.do_sample:
        temperature = 1.0 if config.temperature is None else config.temperature
        settings = SamplingSettings(temperature, config.top_k, 1.0 if config.top_p is None else config.top_p)
        expected += [(TemperatureLogitsWarper, "temperature", temperature)] if temperature != 1 else []
        expected += [(TopKLogitsWarper, "top_k", settings.top_k)] if settings.top_k else []
        expected += [(TopPLogitsWarper, "top_p", settings.top_p)] if settings.top_p < 1 else []
    if logits_processor is not None:
        _check_list(logits_processor, expected, "give temperature, top_k and top_p to generate, no processors")
    if stopping_criteria is not None:
        ends = [(EosTokenCriteria, "eos_token_id", [*eos])] if eos else []
        expected = [(MaxLengthCriteria, "max_length", width + budget), *ends]
        _check_list(stopping_criteria, expected, "give max_new_tokens and eos_token_id to generate, and no criterion")
    mask = model_kwargs.get("attention_mask")
    prompts = list(input_ids) if mask is None else [ids[keep.bool()] for ids, keep in zip(input_ids, mask, strict=True)]
    return {
        "prompts": prompts,
        "settings": settings,
        "do_sample": bool(config.do_sample),
        "max_new_tokens": budget,
        "eos_token_ids": eos,
    }
