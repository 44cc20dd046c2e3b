"""Attention for sampling on a CPU: queries of one key-value head as rows of one product.

``scaled_dot_product_attention`` in bfloat16 repeats keys and values for every query head and takes ten times as long
for one query each of a large batch. Products here are in the model's dtype and the softmax in float32, as in
transformers' own eager attention. Keys past the mask, which a preallocated cache has, are left out (and copied, which
is nothing beside many queries; a single query's mask better covers them).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

NAME = "dblast_grouped"


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """(B, heads, Q, D) queries on (B, kv heads, S, D) keys under (B, 1, Q, S') bool, S' <= S; gives (B, Q, heads, D)."""
    batch, heads, length, size = query.shape
    groups, seen = key.shape[1], attention_mask.shape[-1]
    rows = query.reshape(batch, groups, heads // groups * length, size)
    scores = (rows @ key[:, :, :seen].transpose(-1, -2)).view(batch, groups, -1, length, seen).float() * scaling
    weights = scores.masked_fill_(~attention_mask.unsqueeze(2), float("-inf")).softmax(-1).to(query.dtype)
    out = weights.view(batch, groups, -1, seen) @ value[:, :, :seen]
    return out.view(batch, heads, length, size).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model attends by :func:`attend`; masks must be (B, 1, Q, S') bool."""
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
