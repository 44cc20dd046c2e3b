"""Oracle proposals: what independent tokens, or K fixed blocks, could reach with no drafter at all.

From M sampled continuations of a prefix. Independent proposals are estimated
from one half of them and scored on the other: on the same half they would be
rewarded for having seen what they must predict. Blocks need no such care. The
target's probability p(u) of every sampled prefix u was recorded, K greedy blocks
are worth sum_u p(u) over their prefixes (:mod:`dblast.reproduction.diagnosis.block_cover`), and that is
exact whichever sample they were chosen from. It is a lower bound on the best K
blocks, since only sampled ones are candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from dblast.errors import DBlastError
from dblast.replay import expected_accepted
from dblast.reproduction.diagnosis.block_cover import best_blocks, cover_value
from dblast.reproduction.diagnosis.continuations import Continuations
from dblast.reproduction.diagnosis.process import estimate_determinism
from dblast.verifier import greedy_branch_acceptance

INDEPENDENT_SAMPLED = "independent, sampled"
INDEPENDENT_GREEDY = "independent, greedy"


def _marginal_probability(fit: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Estimated marginal q_i of given tokens: (S, b).

    Averages the target's whole distribution p(. | y, x_<i) over the fitting
    continuations that reached position i, which is less noisy than counting their tokens.
    """
    columns = []
    for i in range(tokens.shape[-1]):
        p = fit["support_log_p"][:, i].exp()
        hit = fit["support"][:, i].unsqueeze(0) == tokens[:, i].view(-1, 1, 1)
        alive = fit["valid"][:, i].sum().clamp(min=1)  # continuations that had not ended before this position
        columns.append((hit * p).sum((-1, -2)) / float(alive))
    return torch.stack(columns, dim=-1)


def marginal_block(fit: dict[str, Tensor]) -> Tensor:
    """The likeliest token of every estimated marginal, (b,); ties to the smaller id."""
    best = []
    for i in range(fit["support"].shape[1]):
        tokens, place = fit["support"][:, i].reshape(-1).unique(return_inverse=True)
        mass = torch.zeros(len(tokens)).index_add_(0, place, fit["support_log_p"][:, i].exp().reshape(-1))
        best.append(tokens[mass.argmax()])
    return torch.stack(best)


def independent_accepted(fit: dict[str, Tensor], score: dict[str, Tensor]) -> dict[str, float]:
    """Expected accepted length of one draft step of the independent proposals made from ``fit``, met by ``score``.

    Args:
        fit, score: tensors of :class:`~dblast.reproduction.diagnosis.continuations.Continuations` at one prefix, (M', b) each
            (and (M', b, W) supports).

    Returns:
        Mean over the scored continuations of sum_l prod_{j<=l} min(1, q / p): marginals sampled, and greedy.
    """
    tokens, log_p, valid = score["tokens"], score["log_p"], score["valid"]
    q = _marginal_probability(fit, tokens)
    block = marginal_block(fit).expand(len(tokens), 1, -1)
    greedy = greedy_branch_acceptance(block, torch.zeros(len(tokens), 1), tokens, log_p)
    values = {INDEPENDENT_SAMPLED: (q.log() - log_p).exp().clamp(max=1.0), INDEPENDENT_GREEDY: greedy}
    return {name: float(expected_accepted(accept, valid).mean()) for name, accept in values.items()}


def blocks_accepted(here: dict[str, Tensor], counts: Sequence[int]) -> dict[str, float]:
    """Expected accepted length of the best K sampled blocks under their best prior: exact for these blocks."""
    # Nothing is written after an end of sequence: such prefixes have no probability.
    weight = here["log_p"].double().cumsum(-1).exp() * here["valid"]
    values = {}
    for count in counts:
        branches, _ = best_blocks(here["tokens"], weight, count)
        values[f"best {count} block{'s' if count > 1 else ''}"] = cover_value(branches, here["tokens"], weight)
    return values


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
    """Oracle accepted lengths at every prefix; independent proposals averaged over both ways of splitting.

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
        values: dict[str, float] = {}
        for fit, score in halves:
            parts = ({name: value[index] for name, value in here.items()} for index in (fit, score))
            for name, value in independent_accepted(*parts).items():
                values[name] = values.get(name, 0.0) + value / len(halves)
        for name, value in (values | blocks_accepted(here, counts)).items():
            rows.append((int(stored.row[i]), int(stored.emitted[i]), float(determinism[i]), name, value))
    return pd.DataFrame(rows, columns=["row", "emitted", "determinism", "proposal", "accepted_length"])
