"""Targets: the bundled SmolLM2, a local folder or a Hugging Face id, in one place.

The tiny target is trained by :mod:`dblast.reproduction.language.tiny` and loaded from its folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dblast.errors import ArtefactError, DBlastError
from dblast.support.bundled import fetch_smollm2
from dblast.support.checks import token_ids
from dblast.support.files import sha256_file
from dblast.support.progress import quiet_loading

#: `<empty_output>`: a token of SmolLM2's notebook corpus that instruct text never contains.
SMOLLM2_MASK_TOKEN_ID = 16
QWEN3_MASK_TOKEN_ID = 151669
#: The paper's targets answer at once; a template without this option passes over it.
CHAT_OPTIONS = {"enable_thinking": False}

#: Families whose layers a drafter can be shaped like and started from: RMSNorm before attention and feed-forward,
#: grouped-query attention without biases, SwiGLU, and RoPE on whole heads. A target may scale its RoPE (Llama 3.1
#: does); the drafter's own stays unscaled, which its training makes up for.
FAMILIES = ("llama", "mistral", "qwen3")


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse a target whose layers are not those of a drafter; its configuration is enough to tell.

    Raises:
        DBlastError: what it has that no drafter has, and what is supported.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    found = {
        "hidden_act": (getattr(config, "hidden_act", "silu"), "silu"),
        "attention_bias": (bool(getattr(config, "attention_bias", False)), False),
        "mlp_bias": (bool(getattr(config, "mlp_bias", False)), False),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
    }
    wrong = [f"{name} = {value!r}" for name, (value, only) in found.items() if value != only]
    if config.model_type not in FAMILIES:
        wrong.insert(0, f"model_type = {config.model_type!r}")
    layers = getattr(config, "layer_types", None)
    if set(layers or ()) - {"full_attention"} or not layers and getattr(config, "sliding_window", None):
        wrong.append("layers with a sliding window")
    if wrong:
        raise DBlastError(
            f"this target is not supported ({', '.join(wrong)}): a drafter needs a model of the families "
            f"{', '.join(FAMILIES)} with SiLU, no biases, RoPE on whole heads and full attention"
        )


def shape_identity(config: PreTrainedConfig) -> dict[str, str | int]:
    """What tells targets apart without their tokenizer: family and sizes."""
    return {
        "family": config.model_type,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "target_layers": config.num_hidden_layers,
    }


@dataclass
class Target:
    """A target model with what decoding needs beside it.

    Attributes:
        name: short name used in result tables.
        model: causal language model in evaluation mode, parameters frozen.
        tokenizer: its tokenizer.
        mask_token_id: token that fills the draft slots; None if nobody chose one.
        eos_token_ids: any of these ends a sequence.
        chat_options: what the chat template is given beside the messages.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    mask_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default_factory=tuple)
    chat_options: dict[str, Any] = field(default_factory=lambda: dict(CHAT_OPTIONS))

    @property
    def device(self) -> torch.device:
        return self.model.device

    def identity(self) -> dict[str, str | int]:
        """:func:`shape_identity` and a hash of the tokenizer's vocabulary; fine-tuning the weights keeps both."""
        words = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return shape_identity(self.model.config) | {"tokenizer": hashlib.sha256(words.encode()).hexdigest()[:16]}

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the target's answer; plain text if it has no chat template."""
        if self.tokenizer.chat_template is None:
            return self.tokenizer("\n".join(message["content"] for message in messages))["input_ids"]
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, **self.chat_options
        )
        return list(encoded["input_ids"])


def last_position(ids: Tensor) -> Tensor:
    """``logits_to_keep`` for the last of the (B, S) positions alone.

    As an index, and not as the number 1: the slice that this would cut is not contiguous, and its product with the
    head then runs as a batched one that copies the head for every row, longer than the whole pass.
    """
    return torch.tensor([ids.shape[1] - 1], device=ids.device)


def attention_mask(model: PreTrainedModel, allowed: Tensor) -> Tensor:
    """(N, 1, Q, S) bool, True where a query may attend, as the model's attention takes it."""
    if model.config._attn_implementation != "eager":
        return allowed
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(allowed.shape, dtype=model.dtype, device=allowed.device).masked_fill(~allowed, lowest)


def tap_features(hidden_states: tuple[Tensor, ...], taps: list[int]) -> Tensor:
    """Concatenate tapped layers: tap L is ``hidden_states[L + 1]``; (B, S, H) each to (B, S, m * H)."""
    return torch.cat([hidden_states[tap + 1] for tap in taps], dim=-1)


def load_target(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    mask_token_id: int | None = None,
    chat_options: dict[str, Any] | None = None,
) -> Target:
    """Load a target and freeze it.

    Args:
        name: ``"smollm2"`` (fetched on first use), a local folder, or a Hugging Face id. A folder that happens to be
            called smollm2 is given as ``./smollm2``.
        dtype: default bfloat16.
        mask_token_id: overrides the token used for draft slots. Default: the known one of SmolLM2 and of Qwen3 with
            its own vocabulary, else None; :func:`propose_mask_token` has a suggestion.
        chat_options: see :class:`Target`; default :data:`CHAT_OPTIONS`.

    Raises:
        DBlastError: the folder is not a model, its family is not supported, or the hub cannot be reached.
    """
    path = name
    if name == "smollm2":
        folder = fetch_smollm2()
        if sha256_file(folder / "model.safetensors") != (folder / "SHA256").read_text().strip():
            raise ArtefactError(f"{folder} is damaged; run `python -m dblast fetch --force`")
        path, mask_token_id = str(folder), SMOLLM2_MASK_TOKEN_ID if mask_token_id is None else mask_token_id
    try:
        with quiet_loading():
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            # Before gigabytes are read, or downloaded.
            check_supported(config)
            if mask_token_id is None and config.model_type == "qwen3" and QWEN3_MASK_TOKEN_ID < config.vocab_size:
                mask_token_id = QWEN3_MASK_TOKEN_ID
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype or torch.bfloat16,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        if info["missing_keys"]:
            # transformers would draw them at random and only say so.
            raise DBlastError(f"its weights lack {min(info['missing_keys'])}")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, DBlastError):
            raise DBlastError(f"target {name!r}: {reason}") from None
        raise DBlastError(
            f"could not load target {name!r}: {' '.join(str(error).split())[:200] or reason} "
            "(give 'smollm2', a folder with a saved model, or a reachable Hugging Face id)"
        ) from error
    return wrap_target(name, model.to(device), tokenizer, mask_token_id, chat_options)


def wrap_target(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    mask_token_id: int | None,
    chat_options: dict[str, Any] | None = None,
) -> Target:
    """Freeze a loaded model and collect its end-of-sequence ids."""
    if mask_token_id is not None and not 0 <= mask_token_id < model.config.vocab_size:
        raise DBlastError(f"mask token id {mask_token_id} is outside the vocabulary of {model.config.vocab_size} tokens")
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    options = dict(CHAT_OPTIONS if chat_options is None else chat_options)
    return Target(name, model.eval().requires_grad_(False), tokenizer, mask_token_id, token_ids(eos), options)


#: What makers call the tokens that they keep for later.
_RESERVED = re.compile(r"reserved|unused|placeholder|control_\d|extra_\d", re.IGNORECASE)
#: Letters, signs and symbols of which some are missing from any tokenizer that cannot spell everything.
_ODD_TEXT = "z\u00f6 \u4e2d\u6587 \u0950 \ue000 \U0001f9ff \u2603"


def propose_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int | None:
    """A token for the draft slots that the target's text never contains, or None.

    In this order: the tokenizer's own mask token; the first row of the embedding table that no token uses (tables are
    padded: Qwen3's 151669 is such a row); a token whose name says that it is reserved; a special token that the chat
    template does not write; the unknown token of a tokenizer that can spell everything.

    Args:
        vocab_size: rows of the target's embedding table.
    """
    words = tokenizer.get_vocab()
    used, ends = set(words.values()), {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    special = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    reserved = sorted(id_ for word, id_ in special.items() if _RESERVED.search(word))
    template = str(tokenizer.chat_template or "")
    idle = sorted(id_ for word, id_ in special.items() if word not in template and id_ not in ends)
    unknown = tokenizer.unk_token_id
    idle = [id_ for id_ in idle if id_ != unknown]
    if unknown not in ends and unknown not in tokenizer(_ODD_TEXT)["input_ids"]:
        idle.append(unknown)
    unused = [id_ for id_ in range(vocab_size) if id_ not in used][:1]
    candidates = [tokenizer.mask_token_id, *unused, *reserved, *idle]
    return next((id_ for id_ in candidates if id_ is not None and 0 <= id_ < vocab_size), None)


