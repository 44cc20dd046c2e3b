"""Whether the K branches of a drafter are alive: different from each other, and used.

Shapes: N blocks, K categories, b draft positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.trajectories import Trajectory, pack_first


def branch_health(branches: Tensor, log_prior: Tensor) -> dict[str, float]:
    """How much of a K-way mixture is in use.

    Args:
        branches: (N, K, b) greedy token of every branch.
        log_prior: (N, K) log q(z | y).

    Returns:
        * ``effective_branches``: exponential of the entropy of the prior's mean over blocks, 1..K. A branch
          that no block ever uses lowers it; blocks that each use one of K branches do not.
        * ``branches_per_block``: mean over blocks of the exponential of the prior's entropy, 1..K.
        * ``first_tokens``, ``blocks``: mean number of distinct first tokens, and of distinct blocks, among the branches.
        * ``wins_1`` .. ``wins_K``: share of blocks in which that branch has the largest prior (the first one, in a tie).

    Raises:
        DBlastError: no blocks, or shapes that do not fit.
    """
    if branches.ndim != 3 or not len(branches) or log_prior.shape != branches.shape[:2]:
        raise DBlastError(
            f"branches must be (N, K, b) and log_prior (N, K), got {tuple(branches.shape)} and {tuple(log_prior.shape)}"
        )
    prior = log_prior.double().exp()
    count = prior.shape[1]
    wins = torch.bincount(prior.argmax(-1), minlength=count) / len(prior)
    return {
        "effective_branches": _perplexity(prior.mean(0)).item(),
        "branches_per_block": _perplexity(prior).mean().item(),
        "first_tokens": _distinct(branches[..., :1]).mean().item(),
        "blocks": _distinct(branches).mean().item(),
        **{f"wins_{z + 1}": wins[z].item() for z in range(count)},
    }


def _perplexity(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum(-1).exp()


def _distinct(branches: Tensor) -> Tensor:
    """Number of different rows among the K branches of every block, (N,) float64."""
    same = (branches.unsqueeze(2) == branches.unsqueeze(1)).all(-1)  # (N, K, K)
    # A branch counts unless an earlier one is the same.
    earlier = same.tril(diagonal=-1).any(-1)
    return (~earlier).double().sum(-1)


@torch.no_grad()
def drafter_health(
    drafter: DBlastDrafter, trajectories: Sequence[Trajectory], precision: torch.dtype = torch.float32
) -> dict[str, float]:
    """:func:`branch_health` of a drafter over all anchors of some trajectories, at Z_T = 1."""
    drafter.eval()
    device = drafter.device
    branches, priors = [], []
    for trajectory in trajectories:
        n = len(trajectory.response_ids)
        batch = pack_first(trajectory, n, drafter.config.block_length).to(device)
        with drafter.in_precision(precision):
            out = batch.run(drafter)
            branches.append(drafter.greedy_tokens(out.branch_hidden).cpu())
        priors.append(out.log_prior().cpu())
    if not branches:
        raise DBlastError("no trajectories to look at")
    return branch_health(torch.cat(branches), torch.cat(priors))
