"""Configuration of a drafter: DFlash's keys, plus K."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from dblast.errors import DBlastError


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
    vocabulary).
    """

    model_type = "dblast"

    def __init__(
        self,
        hidden_size: int = 192,
        intermediate_size: int = 512,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 6,
        num_key_value_heads: int = 2,
        head_dim: int | None = None,
        vocab_size: int = 256,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        block_size: int = 8,
        num_target_layers: int = 4,
        dflash_config: dict | None = None,
        num_categories: int = 1,
        use_qk_norm: bool = True,
        draft_vocab_size: int = 0,
        initializer_range: float = 0.02,
        **kwargs,
    ):
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.vocab_size = vocab_size
        self.rms_norm_eps = rms_norm_eps
        # transformers 5 writes the base inside rope_parameters; both spellings are read.
        parameters = kwargs.pop("rope_parameters", None) or kwargs.pop("rope_scaling", None) or {}
        if parameters.get("rope_type", "default") != "default":
            raise DBlastError(f"rope type {parameters['rope_type']!r} is not supported by the drafter; use 'default'")
        self.rope_theta = float(parameters.get("rope_theta", rope_theta))
        self.block_size = block_size
        self.num_target_layers = num_target_layers
        self.dflash_config = dict(dflash_config or {})
        self.dflash_config.setdefault("target_layer_ids", default_taps(num_target_layers, num_hidden_layers))
        self.num_categories = num_categories
        self.use_qk_norm = use_qk_norm
        self.draft_vocab_size = draft_vocab_size
        self.initializer_range = initializer_range
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

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
            raise DBlastError(f"num_categories (K) must be at least 1, got {self.num_categories}")
        mask = self.mask_token_id
        if mask is None:
            raise DBlastError("mask_token_id is not set; give dflash_config={'mask_token_id': ...}, an unused token id")
        if not 0 <= mask < self.vocab_size:
            raise DBlastError(f"mask_token_id {mask} is outside the vocabulary of {self.vocab_size} tokens")
        bad = [tap for tap in self.target_layer_ids if not 0 <= tap < self.num_target_layers]
        if bad or not self.target_layer_ids:
            raise DBlastError(f"target_layer_ids {bad or '[]'} do not fit a target of {self.num_target_layers} layers")

    @classmethod
    def for_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        num_layers: int,
        block_length: int,
        mask_token_id: int | None,
        num_categories: int = 1,
        target_layer_ids: Sequence[int] | None = None,
        use_qk_norm: bool | None = None,
        draft_vocab_size: int = 0,
    ) -> DBlastConfig:
        """A drafter shaped like the target's own layers, so that it can start from them.

        ``use_qk_norm=None`` follows the target's family: Qwen3 has query/key
        norms, the Llama family has none.
        """
        if block_length < 1:
            raise DBlastError(f"block length b must be at least 1, got {block_length}")
        if num_categories < 1:
            raise DBlastError(f"number of categories K must be at least 1, got {num_categories}")
        rope = getattr(target_config, "rope_parameters", None) or {}
        taps = list(target_layer_ids or default_taps(target_config.num_hidden_layers, num_layers))
        config = cls(
            hidden_size=target_config.hidden_size,
            intermediate_size=target_config.intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=target_config.num_attention_heads,
            num_key_value_heads=target_config.num_key_value_heads,
            head_dim=getattr(target_config, "head_dim", None),
            vocab_size=target_config.vocab_size,
            rms_norm_eps=target_config.rms_norm_eps,
            rope_theta=rope.get("rope_theta", getattr(target_config, "rope_theta", 10000.0)),
            block_size=block_length + 1,
            num_target_layers=target_config.num_hidden_layers,
            dflash_config={"target_layer_ids": taps, "mask_token_id": mask_token_id},
            num_categories=num_categories,
            use_qk_norm="qwen3" in target_config.model_type if use_qk_norm is None else use_qk_norm,
            draft_vocab_size=draft_vocab_size,
        )
        config.check()
        return config
