"""Oracle proposals: the best that independent tokens, or K fixed blocks, could do, with no drafter at all.

From M sampled continuations of a prefix, one half gives the proposal and the
other half is what it must predict. Fitting and scoring on the same half would
reward memory: a block is always found among the samples it was chosen from.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from dblast.block_cover import best_blocks
from dblast.continuations import Continuations
from dblast.diagnosis import estimate_determinism
from dblast.errors import DBlastError
from dblast.replay import expected_accepted
from dblast.verifier import greedy_branch_acceptance

INDEPENDENT_SAMPLED = "independent, sampled"
INDEPENDENT_GREEDY = "independent, greedy"


def _marginal_probability(fit: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Estimated marginal q_i of given tokens: (S, b).

    Averages the target's whole distribution p(. | y, x_<i) over the fitting
    continuations, which is less noisy than counting their tokens.
    """
    columns = []
    for i in range(tokens.shape[-1]):
        p = fit["support_log_p"][:, i].exp()
        hit = fit["support"][:, i].unsqueeze(0) == tokens[:, i].view(-1, 1, 1)
        columns.append((hit * p).sum(-1).mean(-1))
    return torch.stack(columns, dim=-1)


def _marginal_argmax(fit: dict[str, Tensor]) -> Tensor:
    """The likeliest token of every estimated marginal, (b,); ties to the smaller id."""
    best = []
    for i in range(fit["support"].shape[1]):
        tokens, place = fit["support"][:, i].reshape(-1).unique(return_inverse=True)
        mass = torch.zeros(len(tokens)).index_add_(0, place, fit["support_log_p"][:, i].exp().reshape(-1))
        best.append(tokens[mass.argmax()])
    return torch.stack(best)


def oracle_accepted(fit: dict[str, Tensor], score: dict[str, Tensor], counts: Sequence[int]) -> dict[str, float]:
    """Expected accepted length of one draft step for each oracle proposal at one prefix.

    Args:
        fit, score: tensors of :class:`~dblast.continuations.Continuations` at one prefix, (M', b) each
            (and (M', b, W) supports): the proposal is made from ``fit`` and meets ``score``.
        counts: numbers of branches K; ``"best K blocks"`` covers the fitting continuations best.

    Returns:
        Mean over the scored continuations of sum_l prod_{j<=l} min(1, q / p), by proposal.
    """
    tokens, log_p, valid = score["tokens"], score["log_p"], score["valid"]

    def value(acceptance: Tensor) -> float:
        return float(expected_accepted(acceptance, valid).mean())

    def blocks(branches: Tensor, log_prior: Tensor) -> float:
        size = (len(tokens), *branches.shape)
        prior = log_prior.float().expand(len(tokens), -1)
        return value(greedy_branch_acceptance(branches.expand(size), prior, tokens, log_p))

    q = _marginal_probability(fit, tokens)
    out = {
        INDEPENDENT_SAMPLED: value((q.log() - log_p).exp().clamp(max=1.0)),
        INDEPENDENT_GREEDY: blocks(_marginal_argmax(fit).unsqueeze(0), torch.zeros(1)),
    }
    weight = torch.full((len(fit["tokens"]),), 1.0 / len(fit["tokens"]))
    for count in counts:
        out[f"best {count} block{'s' if count > 1 else ''}"] = blocks(*best_blocks(fit["tokens"], weight, count))
    return out


def split_halves(count: int) -> list[tuple[Tensor, Tensor]]:
    """Index pairs (fit, score) of M continuations: first against second half, then the other way round.

    Raises:
        DBlastError: fewer than two continuations.
    """
    if count < 2:
        raise DBlastError(f"splitting needs at least two continuations, got {count}")
    first, second = torch.arange(count // 2), torch.arange(count // 2, count)
    return [(first, second), (second, first)]


def oracle_table(stored: Continuations, counts: Sequence[int] = (1, 2, 4)) -> pd.DataFrame:
    """Oracle accepted lengths at every prefix, averaged over both ways of splitting its continuations.

    Returns:
        One row per prefix and proposal: ``row, emitted, determinism, proposal, accepted_length``.
    """
    rows = []
    determinism = estimate_determinism(stored.log_p, stored.valid)
    for i in range(len(stored)):
        here = {name: getattr(stored, name)[i] for name in ("tokens", "log_p", "valid", "support", "support_log_p")}
        # What was drawn after an end of sequence was never written: no token stands for it.
        here["tokens"] = here["tokens"].masked_fill(~here["valid"], -1)
        halves = split_halves(len(here["tokens"]))
        sums: dict[str, float] = {}
        for fit, score in halves:
            parts = ({name: value[index] for name, value in here.items()} for index in (fit, score))
            for name, value in oracle_accepted(*parts, counts).items():
                sums[name] = sums.get(name, 0.0) + value / len(halves)
        for name, value in sums.items():
            rows.append(
                {
                    "row": int(stored.row[i]),
                    "emitted": int(stored.emitted[i]),
                    "determinism": float(determinism[i]),
                    "proposal": name,
                    "accepted_length": value,
                }
            )
    return pd.DataFrame(rows)
