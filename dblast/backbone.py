"""DFlash's block backbone: layers whose keys and values come from the target's context and the block itself.

Shapes: B sequences, A anchors a sequence, S context positions, L queries, H hidden size.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from dblast.errors import DBlastError

if TYPE_CHECKING:
    from dblast.targets import Target

#: What a stored configuration must say, because no default of ours need be the one it was trained with.
REQUIRED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "rms_norm_eps", "num_target_layers",
)  # fmt: skip
#: Keys that change what a drafter computes, and the values that are computed here (none: the key itself is too much).
#: They are read at the top of a configuration and in ``dflash_config``, as DFlash's own code reads them.
COMPUTED: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "projector_type": ("dflash",),
    "attention_mode": ("gqa", "mha"),
    **dict.fromkeys(("attention_bias", "mlp_bias", "is_causal", "use_swa", "fc_layernorm"), (False,)),
    **dict.fromkeys(("attention_sink_bias", "add_swa_attention_sink_bias"), (False,)),
    **dict.fromkeys(("attention_dropout", "final_logit_softcapping", "markov_rank"), (0,)),
    **dict.fromkeys(("attention_value_scale", "partial_rotary_factor", "output_multiplier"), (1,)),
    "input_embedding_scale": (1,),
    # DFlash 2's convolutions and candidate selector, other projects' formats, packed weights.
    **dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), ()),
    **dict.fromkeys(("speculators_model_type", "transformer_layer_config", "aux_hidden_state_layer_ids"), ()),
    "quantization_config": (),
}
#: Keys of published configurations that change nothing here, beside those of every transformers configuration.
WITHOUT_EFFECT = {
    "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "max_window_layers",
    "model_type", "name_or_path", "torch_dtype", "use_cache", "use_sliding_window", "swa_window_size",
    "sliding_window", "layer_types", "tie_word_embeddings", "num_anchors", "loss_decay_gamma", "attn_implementation",
}  # fmt: skip


def default_taps(target_layers: int, draft_layers: int) -> list[int]:
    """Target layers whose outputs feed the drafter: evenly spread from 1 to n - 3 (n // 2 for one layer)."""
    if draft_layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    if last - first + 1 < draft_layers:
        # Targets of a few layers have no room between 1 and n - 3: use all that lie below the last.
        first, last = 0, max(target_layers - 2, draft_layers - 1)
    return [round(first + i * (last - first) / (draft_layers - 1)) for i in range(draft_layers)]


class DBlastConfig(PreTrainedConfig):
    """Configuration of a :class:`DBlastDrafter`.

    Key names follow the public DFlash checkpoints: ``block_size`` is b + 1,
    ``dflash_config`` holds ``target_layer_ids`` and ``mask_token_id``. DBLAST
    adds ``num_categories`` (K; 0 means no category heads, as in a plain DFlash
    checkpoint), ``use_qk_norm`` and ``draft_vocab_size`` (0: the target's whole
    vocabulary), and what a drafter remembers, each None in older files:

    * ``target_name`` and ``target_identity`` (:func:`dblast.targets.identity`) of the target it was made for,
    * ``chat_options`` under which that target's text was sampled,
    * ``category_temperatures``, the calibrated Z_T by setting,
    * ``recipe``, a JSON-like account of its training.

    Raises:
        DBlastError: a key that would change what is computed has a value that is not computed here.
    """

    model_type = "dblast"

    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 2
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int | None = None
    vocab_size: int = 256
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    block_size: int = 8
    num_target_layers: int = 4
    dflash_config: dict | None = None
    num_categories: int = 0
    use_qk_norm: bool = True
    draft_vocab_size: int = 0
    initializer_range: float = 0.02
    target_name: str | None = None
    target_identity: dict | None = None
    chat_options: dict | None = None
    category_temperatures: dict[str, float] | None = None
    recipe: dict | None = None

    def __post_init__(self, **kwargs):
        """What transformers calls once these fields are set, with the keys of a configuration that are none of them."""
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.rope_theta = _rope_theta(kwargs, self.rope_theta)
        self.dflash_config = dict(self.dflash_config or {})
        self.dflash_config.setdefault("target_layer_ids", default_taps(self.num_target_layers, self.num_hidden_layers))
        _refuse_other_mathematics(kwargs | self.dflash_config, self)
        # Published files say whether the target ties its tables; the drafter has none to tie, and one kind of layers.
        kwargs = {key: value for key, value in kwargs.items() if key != "layer_types"} | {"tie_word_embeddings": False}
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, *args, **kwargs) -> tuple[dict, dict]:
        """As transformers reads it. A published file names the family of its layers as its type: no mistake."""
        stored, kwargs = super().get_config_dict(*args, **kwargs)
        if not isinstance(stored, dict):
            raise DBlastError(f"a drafter's configuration must be a JSON object, got {type(stored).__name__}")
        return {key: value for key, value in stored.items() if key != "model_type"}, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> DBlastConfig:
        """A stored configuration, with nothing left to a guess.

        Raises:
            DBlastError: it lacks what fixes the computation, or contradicts itself.
        """
        stored = dict(config_dict)
        inner = stored["dflash_config"] = dict(stored.get("dflash_config") or {})
        # DFlash's code takes these from either place, those inside first.
        for key in ("target_layer_ids", "mask_token_id"):
            if stored.get(key) is not None:
                inner.setdefault(key, stored[key])
            stored.pop(key, None)
        size = inner.pop("block_size", None)
        if size is not None and stored.setdefault("block_size", size) != size:
            raise DBlastError(f"the drafter's configuration has two block sizes, {stored['block_size']} and {size}")
        rope = stored.get("rope_parameters") or {}
        missing = [key for key in (*REQUIRED, "block_size") if stored.get(key) is None]
        missing += ["target_layer_ids"] * (inner.get("target_layer_ids") is None)
        missing += ["rope_theta"] * (rope.get("rope_theta") is None and stored.get("rope_theta") is None)
        if missing:
            raise DBlastError(f"the drafter's configuration lacks {', '.join(missing)}; add what it was trained with")
        return super().from_dict(stored, **kwargs)

    @property
    def block_length(self) -> int:
        """b, the number of drafted tokens."""
        return self.block_size - 1

    @property
    def target_layer_ids(self) -> list[int]:
        return list(self.dflash_config["target_layer_ids"])

    @property
    def mask_token_id(self) -> int | None:
        return self.dflash_config.get("mask_token_id")

    def check(self) -> None:
        """Refuse settings that cannot work, with what to change.

        Raises:
            DBlastError: block size or K too small, taps outside the target, mask token unset or out of range.
        """
        if self.block_size < 2:
            raise DBlastError(f"block_size is b + 1 and must be at least 2, got {self.block_size}")
        if self.num_categories < 0:
            raise DBlastError(f"num_categories (K) must not be negative, got {self.num_categories}")
        mask = self.mask_token_id
        if mask is None:
            raise DBlastError("mask_token_id is not set; give the id of a token that the target's text never contains")
        if not 0 <= mask < self.vocab_size:
            raise DBlastError(f"mask_token_id {mask} is outside the vocabulary of {self.vocab_size} tokens")
        bad = [tap for tap in self.target_layer_ids if not 0 <= tap < self.num_target_layers]
        if bad or not self.target_layer_ids:
            raise DBlastError(f"target_layer_ids {bad or '[]'} do not fit a target of {self.num_target_layers} layers")

    @classmethod
    def for_target(
        cls,
        target: Target | PreTrainedConfig,
        *,
        num_layers: int,
        block_length: int,
        mask_token_id: int | None = None,
        num_categories: int = 1,
        target_layer_ids: Sequence[int] | None = None,
        use_qk_norm: bool | None = None,
        draft_vocab_size: int = 0,
    ) -> DBlastConfig:
        """A drafter shaped like the target's own layers, so that it can start from them.

        Args:
            target: a loaded target, which the drafter then remembers and whose mask token it takes; or a bare
                configuration.
            num_categories: K; 0 leaves the category heads out (a plain DFlash drafter).
            use_qk_norm: None follows the target's family: Qwen3 has query/key norms, the Llama family has none.

        Raises:
            DBlastError: see :meth:`check`.
        """
        if block_length < 1:
            raise DBlastError(f"block length b must be at least 1, got {block_length}")
        shape = target if isinstance(target, PreTrainedConfig) else target.model.config
        if shape is not target and mask_token_id is None:
            mask_token_id = target.mask_token_id
        rope = getattr(shape, "rope_parameters", None) or {}
        taps = list(target_layer_ids or default_taps(shape.num_hidden_layers, num_layers))
        config = cls(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=getattr(shape, "head_dim", None),
            vocab_size=shape.vocab_size,
            rms_norm_eps=shape.rms_norm_eps,
            rope_theta=rope.get("rope_theta", getattr(shape, "rope_theta", 10000.0)),
            block_size=block_length + 1,
            num_target_layers=shape.num_hidden_layers,
            dflash_config={"target_layer_ids": taps, "mask_token_id": mask_token_id},
            num_categories=num_categories,
            use_qk_norm="qwen3" in shape.model_type if use_qk_norm is None else use_qk_norm,
            draft_vocab_size=draft_vocab_size,
        )
        config.check()
        if shape is not target:
            config.remember(target)
        return config

    def remember(self, target: Target) -> None:
        """Note which target the drafter is for: :meth:`DBlastDrafter.attach` then refuses others."""
        self.target_name, self.target_identity = target.name, target.identity()
        self.chat_options = dict(target.chat_options)


_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def _rope_theta(settings: dict, given: float) -> float:
    """The base of RoPE, taken out of what is left of a configuration; transformers 5 writes it in ``rope_parameters``.

    Raises:
        DBlastError: positions are scaled, or part of a head is not rotated.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = {key: value for key, value in (settings.pop(name, None) or {}).items() if value is not None}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise DBlastError(f"rope type {kind!r} is not supported by the drafter; use 'default'")
        if rope.get("partial_rotary_factor", 1) != 1 or set(rope) - _ROPE_KEYS:
            raise DBlastError(f"{name} = {rope} is not supported by the drafter; it rotates whole heads, unscaled")
        given = rope.get("rope_theta", given)
    return float(given)


def _refuse_other_mathematics(settings: dict, config: DBlastConfig) -> None:
    """Refuse what :data:`COMPUTED` rules out; name, in one warning, the keys that nothing here knows.

    Args:
        settings: keys and values that are no fields of ``config``.
    """
    same = {"v_head_dim": (config.head_dim,), "target_hidden_size": (config.hidden_size,)}
    for key, allowed in (COMPUTED | same).items():
        value = settings.get(key)
        if value is not None and value not in allowed:
            only = f"only {' or '.join(map(repr, allowed))} is" if allowed else "this format is not"
            raise DBlastError(f"the drafter's configuration has {key} = {value!r}; {only} supported")
    layers = settings.get("layer_types")
    other = set(layers or ()) - {"full_attention"}
    # Without a list of layers a window counts wherever it is not switched off.
    window = not layers and settings.get("use_sliding_window") is not False and settings.get("sliding_window")
    if other or window:
        found = f"layer_types with {min(other)!r}" if other else f"sliding_window = {window}"
        raise DBlastError(f"the drafter's configuration has {found}; only full attention is supported")
    known = {*COMPUTED, *same, *WITHOUT_EFFECT, *PreTrainedConfig().to_dict(), "target_layer_ids", "mask_token_id"}
    unknown = sorted(key for key in settings if key not in known and not key.startswith("_"))
    if unknown:
        names = ", ".join(unknown)
        warnings.warn(f"the drafter's configuration has keys that mean nothing here: {names}", stacklevel=4)


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in float32 (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE for integer positions (B, L): two (B, 1, L, head_dim) float32 tensors."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions[:, None, :, None].float() / theta**exponent
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to (B, heads, L, head_dim), half-split pairing as in Llama and Qwen."""
    cos, sin = cos_sin
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class DraftAttention(nn.Module):
    """Grouped-query attention: queries from the block, keys and values from context and block."""

    def __init__(self, config: DBlastConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        h = config.hidden_size
        self.q_proj = nn.Linear(h, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(h, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(h, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, h, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.use_qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.use_qk_norm else nn.Identity()

    def keys_values(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of (B, L, H) inputs: two (B, kv_heads, L, head_dim) tensors."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return rotate(keys, cos_sin), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        queries = self.q_norm(self.q_proj(x).view(*x.shape[:2], self.heads, self.head_dim)).transpose(1, 2)
        queries = rotate(queries, cos_sin)
        keys, values = self.keys_values(x, cos_sin)
        keys = torch.cat([context[0], keys], dim=2)
        values = torch.cat([context[1], values], dim=2)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftMLP(nn.Module):
    """SwiGLU feed-forward (Shazeer, 2020)."""

    def __init__(self, config: DBlastConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: DBlastConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(self, x, cos_sin, context, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def packed_mask(
    anchor_positions: Tensor, context_length: int, block_size: int, context_lengths: Tensor | None = None
) -> Tensor:
    """Attention mask of a packed pass, (B, 1, A * size, S + A * size) bool, True = may attend.

    A query of the block anchored at position a sees context positions < a (and
    inside the sequence's real length) and the slots of its own block.
    """
    batch, anchors = anchor_positions.shape
    device = anchor_positions.device
    query_anchor = anchor_positions.repeat_interleave(block_size, dim=1)
    key_position = torch.arange(context_length, device=device)
    see_context = key_position < query_anchor.unsqueeze(-1)
    if context_lengths is not None:
        see_context = see_context & (key_position < context_lengths[:, None, None])
    block = torch.arange(anchors, device=device).repeat_interleave(block_size)
    see_block = (block[:, None] == block[None, :]).expand(batch, -1, -1)
    return torch.cat([see_context, see_block], dim=-1).unsqueeze(1)
