"""DFlash's block backbone: layers whose keys and values come from the target's context and the block itself.

Shapes: B sequences, A anchors a sequence, S context positions, L queries, H hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dblast.config import DBlastConfig


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
