"""Exactly solvable examples of the mismatch between independent drafts and sampled text.

A two-mode chain: the first token picks a mode, every later token tends to repeat
it. Its 2^b blocks are enumerated, so marginals, proposals and expected accepted
lengths are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from dblast.replay import expected_accepted
from dblast.verifier import greedy_branch_acceptance, soft_acceptance

#: What each proposal is called in tables and plots.
PROPOSALS = (
    "independent, sampled",
    "independent, greedy",
    "K = 2, greedy branch",
    "K = 2, sampled",
    "true joint",
)


def two_mode_chain(
    temperature: float, block_length: int = 7, preference: float = 0.5, coherence: float = 3.0
) -> tuple[Tensor, Tensor]:
    """All blocks of the chain with their conditional log-probabilities.

    The first token is 0 with logit ``preference`` against 1; each later token
    equals the one before with logit ``coherence``. Logits are divided by
    ``temperature``.

    Returns:
        ``(blocks, log_p)``, (2^b, b) int64 and float32: log p(x_i | x_<i) of every block.
    """
    grids = torch.meshgrid(*[torch.arange(2)] * block_length, indexing="ij")
    blocks = torch.stack([grid.flatten() for grid in grids], dim=-1)
    first = torch.tensor([preference, 0.0]).div(temperature).log_softmax(0)
    change, stay = torch.tensor([0.0, coherence]).div(temperature).log_softmax(0)
    log_p = torch.empty(blocks.shape)
    log_p[:, 0] = first[blocks[:, 0]]
    log_p[:, 1:] = torch.where(blocks[:, 1:] == blocks[:, :-1], stay, change)
    return blocks, log_p


def marginals(blocks: Tensor, log_p: Tensor, given_first: int | None = None) -> Tensor:
    """Exact per-position marginals, (b, 2); with ``given_first``, conditional on the first token."""
    weight = log_p.double().sum(-1).exp()
    if given_first is not None:
        weight = weight * (blocks[:, 0] == given_first)
        weight = weight / weight.sum()
    ones = (weight.unsqueeze(-1) * blocks).sum(0).clamp(0.0, 1.0)  # rounding may leave the interval
    return torch.stack([1 - ones, ones], dim=-1).float()


def accepted_by_proposal(blocks: Tensor, log_p: Tensor) -> dict[str, float]:
    """Exact expected accepted length of one draft step for each of :data:`PROPOSALS`.

    Every number is E_{x~p} sum_l prod_{j<=l} min(1, q / p) over the enumerated
    blocks, q being the proposal's conditional given the accepted prefix.
    """
    weight = log_p.double().sum(-1).exp()
    count, b = blocks.shape
    position = torch.arange(b)
    overall = marginals(blocks, log_p)
    by_mode = torch.stack([marginals(blocks, log_p, mode) for mode in (0, 1)])
    prior = overall[0].log().expand(count, 2)

    def expectation(acceptance: Tensor) -> float:
        return float((weight * expected_accepted(acceptance).double()).sum())

    def log_q(per_branch: Tensor) -> Tensor:
        return per_branch[:, position, blocks].log().transpose(0, 1)

    def greedy(per_branch: Tensor) -> Tensor:
        return per_branch.argmax(-1).expand(count, -1, -1)

    one = torch.zeros(count, 1)
    return {
        "independent, sampled": expectation(soft_acceptance(log_q(overall.unsqueeze(0)), one, log_p)),
        "independent, greedy": expectation(greedy_branch_acceptance(greedy(overall.unsqueeze(0)), one, blocks, log_p)),
        "K = 2, greedy branch": expectation(greedy_branch_acceptance(greedy(by_mode), prior, blocks, log_p)),
        "K = 2, sampled": expectation(soft_acceptance(log_q(by_mode), prior, log_p)),
        "true joint": expectation(torch.ones_like(log_p)),
    }


def mismatch_table(temperatures: Sequence[float], **chain: float) -> pd.DataFrame:
    """Expected accepted length by temperature and proposal.

    Returns:
        ``temperature, entropy`` (of a whole block, nats)``, determinism`` (D_b, eq. 24)``,
        proposal, accepted_length``.
    """
    rows = []
    for temperature in temperatures:
        blocks, log_p = two_mode_chain(temperature, **chain)
        joint = log_p.double().sum(-1)
        weight = joint.exp()
        head = {
            "temperature": temperature,
            "entropy": float(-(weight * joint).sum()),
            "determinism": float((weight * log_p.double().cumsum(-1).exp().mean(-1)).sum()),
        }
        for proposal, value in accepted_by_proposal(blocks, log_p).items():
            rows.append(head | {"proposal": proposal, "accepted_length": value})
    return pd.DataFrame(rows)
