"""The state of a decoding run: both models' key/value caches, each sequence at its own length.

A buffer column is a token position. A rejected token is rolled back by moving
its sequence's length: what lies at or beyond it is hidden by the attention mask
and overwritten by the next write. So sequences of one batch may accept different
numbers of tokens in the same pass.

Shapes: N sequences, b draft positions, d <= b of them scored, m tapped layers,
H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from dblast.drafter import DBlastDrafter, DraftOutput
from dblast.errors import DBlastError
from dblast.support.checks import check_finite
from dblast.targets import attention_mask, check_supported, last_position, tap_features

if TYPE_CHECKING:
    from dblast.trees import Tree


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, (N, heads, capacity, head_dim), written at every sequence's own position."""

    is_sliding = False

    def __init__(self, cache: RowCache):
        super().__init__()
        self.cache = cache

    def _reserve(self, like: Tensor, columns: int) -> None:
        """Room for ``columns`` positions. Zeros: hidden columns get weight 0, which only finite values survive."""
        if self.is_initialized and self.keys.shape[0] == like.shape[0] and self.keys.shape[2] >= columns:
            return
        old = (self.keys, self.values) if self.is_initialized and self.keys.shape[0] == like.shape[0] else ()
        shape = (*like.shape[:2], max(columns, self.cache.capacity), like.shape[3])
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        for source, room in zip(old, (self.keys, self.values), strict=False):
            room[:, :, : source.shape[2]] = source
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write (N, heads, L, head_dim) at the cache's start positions; returns all columns up to the last written."""
        cache, length = self.cache, key_states.shape[2]
        width = max(cache.starts) + length
        self._reserve(key_states, width)
        if cache.level:
            start = cache.starts[0]
            self.keys[:, :, start:width] = key_states
            self.values[:, :, start:width] = value_states
        else:
            rows = torch.arange(len(cache.starts), device=key_states.device).unsqueeze(1)
            columns = cache.columns(length, key_states.device)
            self.keys[rows, :, columns] = key_states.transpose(1, 2)
            self.values[rows, :, columns] = value_states.transpose(1, 2)
        return self.keys[:, :, :width], self.values[:, :, :width]

    def read(self, width: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, :width], self.values[:, :, :width]

    def move(self, source: Tensor, columns: Tensor) -> None:
        """Copy columns ``source`` (N, L) of every sequence to ``columns`` (N, L)."""
        rows = torch.arange(len(source), device=source.device).unsqueeze(1)
        for buffer in (self.keys, self.values):
            buffer[rows, :, columns] = buffer[rows, :, source]

    def keep(self, rows: Tensor) -> None:
        """Forget all sequences but these."""
        self.keys, self.values = self.keys[rows], self.values[rows]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._reserve(key_states, key_states.shape[2])

    def get_seq_length(self) -> int:
        return max(self.cache.starts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.cache.starts) + query_length, 0

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """A key/value cache whose next write starts at ``starts[i]`` in sequence i.

    Args:
        layers: number of layers.
    """

    def __init__(self, layers: int):
        super().__init__(layers=[RowLayer(self) for _ in range(layers)])
        self.starts: list[int] = [0]
        self.capacity = 0

    @property
    def level(self) -> bool:
        """Whether all sequences write at the same position."""
        return min(self.starts) == max(self.starts)

    def columns(self, length: int, device: torch.device) -> Tensor:
        """(N, length) positions of the next write."""
        start = torch.tensor(self.starts, device=device)
        return start.unsqueeze(1) + torch.arange(length, device=device)

    def clear(self) -> None:
        """Zeros in all columns: whatever an earlier run left there, NaN above all, would outlive a weight of zero."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys.zero_()
                layer.values.zero_()

    def keep(self, rows: list[int]) -> None:
        for layer in self.layers:
            if layer.is_initialized:
                layer.keep(torch.tensor(rows, device=layer.keys.device))


#: Rotary embeddings that turn a position by the same angle however long the text, and whatever else is in the batch.
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")


def _check_attention(model: PreTrainedModel) -> None:
    """Refuse a target that plain decoding and this cache would not read alike."""
    config = model.config
    check_supported(config)
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in FIXED_ROTARY:
        raise DBlastError(f"rope type {rotary!r} is not supported: its angles depend on the text's length")
    # Mistral has one window for all its layers, whatever a list of layers says.
    if config.model_type == "mistral" and getattr(config, "sliding_window", None):
        raise DBlastError(
            f"this target's layers see {config.sliding_window} tokens at most; if no text will be longer, "
            "load it with sliding_window=None"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise DBlastError(
            f"attention {config._attn_implementation!r} takes no mask per sequence; "
            "load the target with attn_implementation='sdpa'"
        )
    if model.training and getattr(config, "attention_dropout", 0):
        raise DBlastError("the target is in training mode, with dropout; call model.eval() first")


def _fits(model: PreTrainedModel, drafter: DBlastDrafter) -> None:
    """Refuse a pair of models that cannot decode together.

    Raises:
        DBlastError: sizes, device or dtype do not fit, the drafter is not attached or lacks its draft
            vocabulary, or the target has an attention that this cache does not serve.
    """
    for name, given, kind in (("target", model, PreTrainedModel), ("drafter", drafter, DBlastDrafter)):
        if not isinstance(given, kind):
            raise DBlastError(f"the {name} must be a {kind.__name__}, got {type(given).__name__}")
    _check_attention(model)
    ours, theirs = drafter.config, model.config
    if (ours.hidden_size, ours.vocab_size, ours.num_target_layers) != (
        theirs.hidden_size,
        theirs.vocab_size,
        theirs.num_hidden_layers,
    ):
        raise DBlastError("the drafter was made for another target; use the target it was trained with")
    if drafter.device != model.device:
        raise DBlastError(f"the drafter is on {drafter.device}, the target on {model.device}; move one of them")
    drafter._table("embedding")
    if not drafter.draft_vocabulary_is_set:
        raise DBlastError("the draft vocabulary is not set; call drafter.set_draft_vocabulary(token_ids) and attach()")


class BlockDecoder:
    """Target and drafter in the middle of decoding N sequences.

    The last committed token of a sequence, its *anchor*, has not been through the
    target yet; both caches hold the positions before it. A step is
    :meth:`draft`, :meth:`score`, then :meth:`commit`. :meth:`start` begins anew
    and may be called again with other prompts.

    Args:
        model: the target, a causal language model with full attention.
        drafter: attached to it.

    Raises:
        DBlastError: the two do not fit each other.
    """

    def __init__(self, model: PreTrainedModel, drafter: DBlastDrafter):
        _fits(model, drafter)
        self.model, self.drafter = model, drafter
        self.device = model.device
        self.target_cache = RowCache(model.config.num_hidden_layers)
        self.draft_cache = RowCache(drafter.config.num_hidden_layers)
        #: Committed tokens of every sequence, the anchor included.
        self.lengths: list[int] = []
        self.anchor = torch.empty(0, dtype=torch.long)
        self._features: Tensor | None = None

    @property
    def context_limit(self) -> int | None:
        """Positions the target was made for; None if it does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @torch.no_grad()
    def start(self, prompts: Sequence[Tensor], reserve: int = 0) -> None:
        """Prefill both caches with all but the last token of every prompt.

        Args:
            prompts: N tensors (P_i,) of token ids, each at least one token.
            reserve: number of tokens to come, so that buffers are allocated once.
        """
        self.lengths = [len(prompt) for prompt in prompts]
        self.anchor = torch.stack([prompt[-1] for prompt in prompts]).to(self.device)
        width = max(self.lengths) - 1
        for cache in (self.target_cache, self.draft_cache):
            cache.clear()
            cache.starts = [0] * len(prompts)
            cache.capacity = width + reserve + self.drafter.config.block_size
        # Columns past a sequence's own end hold padding that nothing attends to before it is overwritten.
        ids = torch.zeros(len(prompts), width, dtype=torch.long, device=self.device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt) - 1] = prompt[:-1].to(self.device)
        if width == 0:
            taps = self.drafter.config.target_layer_ids
            empty = torch.zeros(len(prompts), 0, len(taps) * self.drafter.config.hidden_size)
            self._write_context(empty.to(self.device, self.drafter.dtype))
            return
        _, features = self._pass(ids, last_logits_only=True)
        self._write_context(features)

    def _pass(
        self, ids: Tensor, last_logits_only: bool = False, tree: Tree | None = None
    ) -> tuple[Tensor, Tensor]:
        """One target pass over (N, L) tokens at the cache's start positions: logits and tapped states (N, L, m * H).

        With ``tree`` the tokens are an anchor and the nodes of its tree: a node sees itself, its ancestors and what
        stood before, and its position is the anchor's plus its depth, while its column is its place in the tree.
        """
        cache = self.target_cache
        positions = cache.columns(ids.shape[1], self.device)
        width = max(cache.starts) + ids.shape[1]
        every = torch.arange(width, device=self.device)
        if tree is None:
            mask = every <= positions.unsqueeze(-1)
        else:
            start = positions[:, :1]
            place = (every - start).unsqueeze(1)  # 0 the anchor, n + 1 node n
            among = torch.nn.functional.pad(tree.ancestors, (1, 0, 1, 0))
            nodes = place.clamp(0, ids.shape[1] - 1).expand(-1, ids.shape[1], -1)
            mask = (place <= 0) | (among.gather(2, nodes) & (place < ids.shape[1]))
            positions = torch.cat([start, start + tree.depth], dim=1)
        mask = attention_mask(self.model, mask.unsqueeze(1))
        if self.context_limit:
            # Only slots that a shorter budget discards can lie beyond it.
            positions = positions.clamp(max=self.context_limit - 1)
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=last_position(ids) if last_logits_only else 0,
        )
        return out.logits, tap_features(out.hidden_states, self.drafter.config.target_layer_ids)

    def _write_context(self, features: Tensor) -> None:
        """Project (N, L, m * H) tapped states and append them to the drafter's context.

        Raises:
            DBlastError: NaN or infinity in them.
        """
        check_finite(features, "the target's hidden states")
        positions = self.draft_cache.columns(features.shape[1], self.device)
        for layer, pair in zip(self.draft_cache.layers, self.drafter.context_cache(features, positions), strict=True):
            layer.update(*pair)

    @torch.no_grad()
    def draft(self) -> DraftOutput:
        """One drafter pass over the anchors' blocks: :class:`DraftOutput` over N blocks."""
        size = self.drafter.config.block_size
        before = torch.tensor(self.lengths, device=self.device) - 1
        width = max(self.lengths) - 1
        mask = None
        if min(self.lengths) != max(self.lengths):
            visible = torch.arange(width + size, device=self.device)
            visible = (visible < before.unsqueeze(1)) | (visible >= width)
            mask = visible[:, None, None].expand(-1, 1, size, -1)
        context = [layer.read(width) for layer in self.draft_cache.layers]
        hidden = self.drafter.block_hidden(self.anchor.unsqueeze(1), before.unsqueeze(1), context, mask)
        return self.drafter.heads(hidden)

    @torch.no_grad()
    def score(self, drafted: Tensor, tree: Tree | None = None) -> Tensor:
        """The target pass of a step.

        Args:
            drafted: (N, d) draft tokens, d = 0 for a plain decoding step.
            tree: N trees of which these are the nodes' tokens; None for a block.

        Returns:
            (N, d + 1, V) logits: entry i is the distribution after the anchor and i draft tokens,
            so the last one is the bonus token's; with trees after the anchor, then after every node.
            The tapped states stay here for :meth:`commit`.
        """
        self.target_cache.starts = [length - 1 for length in self.lengths]
        logits, self._features = self._pass(torch.cat([self.anchor.unsqueeze(1), drafted], dim=1), tree=tree)
        return logits

    @torch.no_grad()
    def commit(self, accepted: Sequence[int], token: Tensor, path: Tensor | None = None) -> None:
        """Keep the anchor and the accepted drafts of the last pass, roll the rest back on both sides.

        Args:
            accepted: N numbers of accepted draft tokens.
            token: (N,) the token that follows them, the next anchor.
            path: after trees, (N, d) nodes that were accepted, anything after the last.
        """
        if path is not None:
            self._straighten(path[:, : max(accepted)].clamp(min=0) + 1)
        self.draft_cache.starts = [length - 1 for length in self.lengths]
        self._write_context(self._features[:, : max(accepted) + 1])
        self.lengths = [length + count + 1 for length, count in zip(self.lengths, accepted, strict=True)]
        self.anchor = token
        self._features = None

    def _straighten(self, places: Tensor) -> None:
        """Bring keys, values and tapped states at (N, L) places after the anchor to 1..L, where accepted drafts stand.

        Keys carry the position of their depth already. What a shorter path moves too far lies beyond its length.
        """
        columns = self.target_cache.columns(places.shape[1] + 1, self.device)
        source = columns[:, :1] + places
        if not torch.equal(source, columns[:, 1:]):
            for layer in self.target_cache.layers:
                layer.move(source, columns[:, 1:])
        order = torch.nn.functional.pad(places, (1, 0)).unsqueeze(2)
        self._features = self._features.gather(1, order.expand(-1, -1, self._features.shape[2]))

    def keep(self, rows: list[int]) -> None:
        """Go on with these sequences only, between :meth:`commit` and :meth:`draft`."""
        self.lengths = [self.lengths[row] for row in rows]
        self.anchor = self.anchor[torch.tensor(rows, device=self.device)]
        for cache in (self.target_cache, self.draft_cache):
            cache.keep(rows)
