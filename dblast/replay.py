"""Replay: exact scores of a drafter on stored target trajectories, without running the target.

In any exact speculative step P(emit v) = p(v) and P(emit v, and it was the
accepted draft) = min(p(v), q(v)). A target-sampled trajectory is therefore a
sample of the decoder's output, and the accept/reject events along it are
independent coin flips with probability min(1, q / p). Two numbers follow:

* the expected accepted length of one draft step at an anchor, and
* by a backward recursion over positions, the expected number of target passes
  that the online loop needs to emit the whole trajectory.

Accepted length counts draft tokens per target pass without the bonus or
replacement token: (emitted - passes) / passes. A pass that ends the sequence
with an accepted token emits no bonus; that last token then counts as the pass's
own, so that accepted + passes = emitted always holds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dblast.errors import DBlastError


def block_index(length: int, block_length: int) -> tuple[Tensor, Tensor]:
    """Which trajectory position each slot of each anchor's block is.

    Args:
        length: n, number of response tokens.
        block_length: b.

    Returns:
        ``(index, valid)`` of shape (n, b): the block drafted after a response
        tokens covers positions a .. a + b - 1; ``valid`` is False past the end.
    """
    index = torch.arange(length).unsqueeze(1) + torch.arange(block_length)
    valid = index < length
    return index.clamp(max=length - 1), valid


def expected_accepted(acceptance: Tensor, valid: Tensor | None = None) -> Tensor:
    """Expected accepted length of one draft step: sum_l prod_{j<=l} a_j over the last dimension."""
    if valid is not None:
        acceptance = acceptance * valid
    return acceptance.cumprod(-1).sum(-1)


def expected_passes(acceptance: Tensor, length: Tensor | None = None) -> Tensor:
    """Expected target passes of the online loop along each trajectory.

    Args:
        acceptance: (T, n, b); entry [t, a, j] is the probability that the draft
            token for position a + j is accepted, given that the loop anchors
            after a tokens and that the earlier tokens of the block were accepted.
            Entries at or past a trajectory's length may hold any finite number.
        length: (T,) real lengths (default n).

    Returns:
        (T,) float64.
    """
    count, n, b = acceptance.shape
    length = torch.full((count,), n) if length is None else length
    reach = acceptance.double().cumprod(-1)
    ones = torch.ones(count, n, 1, dtype=torch.float64)
    reach = torch.cat([ones, reach, torch.zeros(count, n, 1, dtype=torch.float64)], dim=-1)
    stop = reach[..., :-1] - reach[..., 1:]  # P(exactly l accepted), l = 0..b
    # left[a]: expected passes still needed after a emitted tokens; zero at and past the end.
    left = torch.zeros(count, n + b + 1, dtype=torch.float64)
    for a in range(n - 1, -1, -1):
        # l accepted tokens and one of the target's own move the anchor on by l + 1.
        step = 1 + (stop[:, a] * left[:, a + 1 : a + b + 2]).sum(-1)
        left[:, a] = torch.where(a < length, step, 0.0)
    return left[:, 0]


def ratio_with_influence(accepted: np.ndarray, passes: np.ndarray) -> tuple[float, np.ndarray]:
    """Ratio of sums and each unit's influence on it.

    The influence values have mean zero; their standard deviation over sqrt(n)
    is the standard error of the ratio (delta method), and that of a difference
    of two scores on the same units is the paired standard error.
    """
    if len(accepted) == 0:
        raise DBlastError("no trajectories to score")
    ratio = accepted.sum() / passes.sum()
    return float(ratio), (accepted - ratio * passes) / passes.mean()


def standard_error(influence: np.ndarray) -> float:
    """Standard error of a mean from its influence values; NaN for fewer than two units."""
    n = len(influence)
    return float(np.std(influence, ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
