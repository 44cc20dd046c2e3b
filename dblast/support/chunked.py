"""log q of given tokens without the table of all logits.

The log-probability of a few tokens needs their logits and one log-sum-exp, the
gradient needs the softmax once more. Both are computed tile by tile over rows
and vocabulary, so that no softmax of all rows is ever held. Where the logits are
few enough to be kept, in the dtype of the product, the backward pass reads them;
elsewhere no (R, V) tensor exists at all, and it multiplies a second time instead.

Shapes: R rows (N blocks * K branches * b positions), H hidden size, V tokens of
the (draft) vocabulary, W tokens asked for in every row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dblast.errors import DBlastError

#: Rows, and tokens, of one tile of logits. On a CPU a float32 tile takes 16 MiB: the C library
#: reuses memory of that size, while it maps (and the kernel clears) anything over 32 MiB anew each time.
CPU_CHUNK = 2048
#: Elsewhere: 256 MiB a tile, large enough that the launch of a kernel costs little beside its work.
DEVICE_CHUNK = 8192
#: Logits that are kept for the backward pass: 128 MiB in bfloat16. A third of the products is saved.
KEPT_LOGITS = 2**26


def chunked_log_q(
    hidden: Tensor,
    head: Tensor,
    index: Tensor,
    *,
    rows_per_chunk: int | None = None,
    tokens_per_chunk: int | None = None,
) -> Tensor:
    """log softmax(hidden @ head.T) at the given tokens, in nats, differentiable in ``hidden``.

    The product is taken in the dtype that autocast prescribes where it is on, in
    that of the hidden states elsewhere; the softmax in float32 (float64 for float64
    states). The chosen logit is read from the very product that enters the
    log-sum-exp and not recomputed as a dot product: in bfloat16 the two would be
    rounded differently, and log q could exceed 0. As it is, log q <= 0 holds exactly.

    Two kinds of rows cost no product: rows whose tokens all lie outside the
    vocabulary, in both passes, and rows whose incoming gradient is exactly zero
    (masked positions, prefixes past the end of a loss), in the backward pass. Their
    gradient is exactly zero, even where their hidden state is not finite. On an
    accelerator, checking the index and finding these rows waits for the device.

    Args:
        hidden: (R, H), any strides.
        head: (V, H) frozen output table; gets no gradient.
        index: (R,) or (R, W) int64 or int32, rows of ``head``; -1 is a token outside the
            vocabulary. A token may stand in a row more than once.
        rows_per_chunk, tokens_per_chunk: size of a tile of logits; None suits the device.
            Memory grows with their product, results do not depend on them beyond rounding.

    Returns:
        float32 (float64 for float64 inputs) in the shape of ``index``; -inf, without gradient, where it is -1.

    Raises:
        DBlastError: shapes, dtypes or token numbers that do not fit, an empty tile, or a head that requires gradient.
    """
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1] or not len(head):
        raise DBlastError(
            f"hidden states must be (R, H) and the head (V, H), got {tuple(hidden.shape)} and {tuple(head.shape)}"
        )
    if index.ndim not in (1, 2) or len(index) != len(hidden):
        raise DBlastError(f"the index must be ({len(hidden)},) or ({len(hidden)}, W), got {tuple(index.shape)}")
    if index.dtype not in (torch.int64, torch.int32):
        raise DBlastError(f"the index must be int64 or int32, got {index.dtype}")
    if head.requires_grad:
        raise DBlastError("the head gets no gradient here; pass head.detach()")
    if ((index < -1) | (index >= len(head))).any():
        raise DBlastError(
            f"the index must lie in -1..{len(head) - 1}, got values in {int(index.min())}..{int(index.max())}"
        )
    chunk = CPU_CHUNK if hidden.device.type == "cpu" else DEVICE_CHUNK
    rows_per_chunk = chunk if rows_per_chunk is None else rows_per_chunk
    tokens_per_chunk = chunk if tokens_per_chunk is None else tokens_per_chunk
    if rows_per_chunk < 1 or tokens_per_chunk < 1:
        raise DBlastError(f"a chunk must be at least 1, got {rows_per_chunk} rows and {tokens_per_chunk} tokens")
    table = index.long() if index.ndim == 2 else index.long().unsqueeze(1)
    log_q = _ChunkedLogQ.apply(hidden, head, table, product_dtype(hidden, head), (rows_per_chunk, tokens_per_chunk))
    return log_q.view(index.shape)


def product_dtype(hidden: Tensor, head: Tensor) -> torch.dtype:
    """The dtype in which ``hidden @ head.T`` is computed here: autocast's where it is on, else that of ``hidden``.

    The head may be stored in another one: bfloat16 rows beside float32 states lose nothing by being converted.

    Raises:
        DBlastError: one of them does not hold floating-point numbers.
    """
    if not hidden.dtype.is_floating_point or not head.dtype.is_floating_point:
        raise DBlastError(f"hidden states and head must have a floating dtype, got {hidden.dtype} and {head.dtype}")
    device = hidden.device.type
    # Autocast leaves float64 alone, as it does in a plain product.
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax, log q and accumulated gradient for products in ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def _members(wanted: Tensor) -> Tensor | slice:
    """What selects the True rows of (R,) ``wanted``; a slice, hence no copy, where that is all of them."""
    return slice(None) if wanted.all() else wanted.nonzero().squeeze(1)


def _spans(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _tiles(
    hidden: Tensor, head: Tensor, index: Tensor, chunks: tuple[int, int], kept: list[Tensor] | None = None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Tiles of the logits, at most ``chunks`` rows and tokens large; together they cover all rows and tokens.

    Args:
        hidden: (R, H) contiguous, in the dtype of the product.
        head: (V, H), any floating dtype; converted piece by piece, never as a whole.
        index: (R, W) in -1..V - 1.
        kept: an empty list to be filled with the products, (R, v) of every part of the head; None keeps none.

    Yields:
        For r rows and v tokens: the rows (slice), the (v, H) part of the head, the (r, v) logits in the
        dtype of the statistics (a tensor of its own, to be overwritten), the (r, W) columns of the
        tokens asked for, and (r, W) bool, True where those lie in this tile (elsewhere the column is arbitrary).
    """
    rows_per_chunk, tokens_per_chunk = chunks
    # Tokens outside, rows inside: every part of the head, much the largest operand, is read and converted once.
    for tokens in _spans(len(head), tokens_per_chunk):
        part = head[tokens].to(hidden.dtype).contiguous()
        if kept is not None:
            kept.append(hidden.new_empty(len(hidden), len(part)))
        for rows in _spans(len(hidden), rows_per_chunk):
            # Two dimensions and contiguous operands: anything else falls into a batched product, many times slower.
            if kept is None:
                logits = hidden[rows] @ part.T
            else:
                logits = torch.mm(hidden[rows], part.T, out=kept[-1][rows])
            logits = logits.to(_statistics_dtype(hidden.dtype), copy=kept is not None)
            yield rows, part, logits, *_place(index[rows], tokens, part)


def _kept_tiles(
    kept: list[Tensor], wanted: Tensor | slice, head: Tensor, index: Tensor, chunks: tuple[int, int]
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """:func:`_tiles` of the ``wanted`` rows, from products that it kept of all; ``index`` is that of these rows alone."""
    for tokens, table in zip(_spans(len(head), chunks[1]), kept, strict=True):
        part = head[tokens].to(table.dtype).contiguous()
        table = table[wanted]
        for rows in _spans(len(table), chunks[0]):
            logits = table[rows].to(_statistics_dtype(table.dtype), copy=True)
            yield rows, part, logits, *_place(index[rows], tokens, part)


def _place(index: Tensor, tokens: slice, part: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of the tokens asked for in a part of the head, and whether they lie in it."""
    column = index - tokens.start
    inside = (column >= 0) & (column < len(part))
    return column.clamp(0, len(part) - 1), inside


def _read(
    hidden: Tensor, head: Tensor, index: Tensor, chunks: tuple[int, int], kept: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Logits at ``index``, (R, W), -inf at -1, and log-sum-exp of all, (R,); arguments of :func:`_tiles`."""
    dtype = _statistics_dtype(hidden.dtype)
    chosen = hidden.new_full(index.shape, float("-inf"), dtype=dtype)
    log_sum = hidden.new_full((len(hidden),), float("-inf"), dtype=dtype)
    for rows, _, logits, column, inside in _tiles(hidden, head, index, chunks, kept):
        chosen[rows] = torch.where(inside, logits.gather(1, column), chosen[rows])
        peak = logits.amax(1, keepdim=True)
        # In place: torch.logsumexp would allocate the tile twice more. The largest logit adds exp(0) = 1
        # to a sum of non-negative terms, so the logarithm is never negative and log q never positive.
        part = logits.sub_(peak).exp_().sum(1).log_() + peak.squeeze(1)
        log_sum[rows] = torch.logaddexp(log_sum[rows], part)
    return chosen, log_sum


def _pull_back(
    tiles: Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]], hidden: Tensor, log_sum: Tensor, grad: Tensor
) -> Tensor:
    """Gradient for the hidden states, (R, H) in the dtype of the statistics, from :func:`_tiles`.

    sum_w g_w (onehot(index_w) - softmax) @ head, with ``grad`` (R, W) zero wherever the index is -1.
    """
    # Not the product's dtype: rounding after every tile would add up.
    grad_hidden = torch.zeros_like(hidden, dtype=_statistics_dtype(hidden.dtype))
    total = grad.sum(1, keepdim=True)
    log_sum = log_sum.unsqueeze(1)
    for rows, part, logits, column, inside in tiles:
        grad_logits = logits.sub_(log_sum[rows]).exp_().mul_(-total[rows])
        # One-hot and softmax meet before the sum is rounded to the dtype of the product: they
        # nearly cancel where the drafter is sure. Adding, because a token may stand in a row twice.
        grad_logits.scatter_add_(1, column, grad[rows].masked_fill(~inside, 0.0))
        grad_hidden[rows] += grad_logits.to(part.dtype) @ part
    return grad_hidden


class _ChunkedLogQ(torch.autograd.Function):
    """:func:`chunked_log_q` on checked arguments; keeps ``hidden`` (in the dtype of the product), ``head``, ``index``,
    the log-sum-exp and, if they are few enough, the logits for the backward pass."""

    @staticmethod
    def forward(ctx, hidden, head, index, dtype, chunks):
        flat = hidden.to(dtype).contiguous()
        rows = _members((index >= 0).any(1))
        log_q = flat.new_full(index.shape, float("-inf"), dtype=_statistics_dtype(dtype))
        log_sum = log_q.new_zeros(len(flat))
        ctx.kept = [] if ctx.needs_input_grad[0] and len(flat) * len(head) <= KEPT_LOGITS else None
        chosen, log_sum[rows] = _read(flat[rows], head, index[rows], chunks, ctx.kept)
        log_q[rows] = chosen - log_sum[rows].unsqueeze(1)
        ctx.save_for_backward(flat, head, index, log_sum)
        ctx.chunks, ctx.hidden_dtype = chunks, hidden.dtype
        return log_q

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        flat, head, index, log_sum = ctx.saved_tensors
        # A constant -inf has no gradient, and whatever comes in there (often NaN) must not spread.
        grad = grad.masked_fill(index < 0, 0.0)
        rows = _members((grad != 0).any(1))
        grad_hidden = flat.new_zeros(flat.shape, dtype=ctx.hidden_dtype)
        # The dtypes are those of the forward pass, whatever autocast says where backward() is called.
        with torch.autocast(flat.device.type, enabled=False):
            some, chosen = flat[rows], index[rows]
            if ctx.kept is None:
                tiles = _tiles(some, head, chosen, ctx.chunks)
            else:
                # Kept are the rows of the forward pass, of which these are some.
                place = rows if isinstance(rows, slice) else ((index >= 0).any(1).cumsum(0) - 1)[rows]
                tiles = _kept_tiles(ctx.kept, place, head, chosen, ctx.chunks)
            pulled = _pull_back(tiles, some, log_sum[rows], grad[rows])
        grad_hidden[rows] = pulled.to(ctx.hidden_dtype)
        return grad_hidden, None, None, None, None
