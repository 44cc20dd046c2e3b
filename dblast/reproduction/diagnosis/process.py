"""An exactly solvable example of the mismatch between independent drafts and sampled text.

A writer picks one of a few phrases and now and then mistypes a token. The V^b
blocks of this *phrase process* are enumerated, so its marginals, its best
proposals and their expected accepted lengths carry no sampling noise.

Shapes: N = V^b blocks in lexicographic order, K categories, b tokens per block,
V tokens in the alphabet. Everything is float64 except the acceptances, which
come from :mod:`dblast.verifier` in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dblast.errors import DBlastError
from dblast.replay import expected_accepted
from dblast.reproduction.diagnosis.block_cover import best_blocks
from dblast.verifier import greedy_branch_acceptance, soft_acceptance

#: Sampling temperatures of the default table.
TEMPERATURES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)

#: Numbers of categories of the default table.
CATEGORIES = (1, 2, 4)

#: More blocks than this are slow to enumerate.
MAX_BLOCKS = 100_000

#: Stands for log 0 where it is multiplied by zero; exp of it is still a positive float64.
LOG_FLOOR = -700.0

#: Gradient ascent starts with no log-probability below this: a softmax has no slope at probability zero.
START_FLOOR = -6.0


def proposal_names(categories: Sequence[int] = CATEGORIES) -> tuple[str, ...]:
    """What the proposals of :func:`mismatch_table` are called, in the order of its rows."""
    sampled = [f"K = {k}, sampled" for k in categories]
    greedy = [f"K = {k}, greedy branch" for k in categories]
    return ("independent, sampled", "independent, greedy", *sampled, *greedy, "true joint")


#: The proposals of the default table.
PROPOSALS = proposal_names()


@dataclass(frozen=True)
class PhraseProcess:
    """A writer who picks a phrase and mistypes each of its tokens with a small probability.

    Attributes:
        phrases: token strings of equal length b over 0..V-1.
        weights: positive chances of the phrases, up to a common factor.
        slip: probability that a token is mistyped, in (0, 1); it is then any other token, uniformly.
        vocab_size: V, at least 2; V^b may not exceed :data:`MAX_BLOCKS`.

    Raises:
        DBlastError: a parameter is outside these ranges.
    """

    # Six phrases, so that four branches are not enough; two pairs share a beginning,
    # so that the text also branches inside the block.
    phrases: tuple[tuple[int, ...], ...] = (
        (0, 1, 2, 3, 0, 1),
        (0, 1, 3, 0, 2, 2),
        (1, 2, 0, 3, 3, 0),
        (2, 3, 1, 1, 0, 2),
        (2, 3, 0, 2, 1, 3),
        (3, 0, 1, 2, 2, 1),
    )
    weights: tuple[float, ...] = (0.26, 0.20, 0.18, 0.14, 0.12, 0.10)
    slip: float = 0.03
    vocab_size: int = 4

    def __post_init__(self) -> None:
        if not self.phrases or not self.phrases[0] or len({len(phrase) for phrase in self.phrases}) != 1:
            raise DBlastError("phrases must be non-empty and of equal length")
        if self.vocab_size < 2 or not all(0 <= v < self.vocab_size for phrase in self.phrases for v in phrase):
            raise DBlastError(f"phrases need tokens 0..V-1 and V of at least 2, got V = {self.vocab_size}")
        if len(self.weights) != len(self.phrases) or not all(0 < w < math.inf for w in self.weights):
            raise DBlastError("need one positive weight per phrase")
        if not 0 < self.slip < 1:
            raise DBlastError(f"slip must lie strictly between 0 and 1, got {self.slip}")
        if self.vocab_size**self.block_length > MAX_BLOCKS:
            raise DBlastError(f"V^b = {self.vocab_size}^{self.block_length} blocks are more than {MAX_BLOCKS}")

    @property
    def block_length(self) -> int:
        """b, tokens per block."""
        return len(self.phrases[0])

    def law(self, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """All blocks with their conditional log-probabilities at a sampling temperature.

        At temperature 1, p(x_i | x_<i) mixes the phrases' token distributions by the
        posterior of the phrase given x_<i, so the process is autoregressive as a
        language model is. Any other temperature T acts as in sampling from one:
        every conditional becomes p^(1/T), renormalised. The tempered process is no
        longer a mixture of phrases with independent slips.

        Returns:
            ``(blocks, log_p)``: (N, b) int64 and (N, b) float64, log p(x_i | x_<i).

        Raises:
            DBlastError: the temperature is not positive.
        """
        if not 0 < temperature < math.inf:
            raise DBlastError(f"temperature must be positive, got {temperature}")
        v, b = self.vocab_size, self.block_length
        typed = one_hot(torch.tensor(self.phrases), v).double()
        emission = (typed * (1 - self.slip) + (1 - typed) * self.slip / (v - 1)).log()  # (phrases, b, V)
        alive = torch.tensor(self.weights, dtype=torch.float64).log().log_softmax(0).unsqueeze(-1)
        columns = []
        for i in range(b):
            # alive: log p(phrase, prefix) of every prefix of length i, (phrases, V^i).
            longer = alive.unsqueeze(-1) + emission[:, i].unsqueeze(1)
            conditional = (longer.logsumexp(0) - alive.logsumexp(0).unsqueeze(-1)).div(temperature).log_softmax(-1)
            columns.append(conditional.flatten().repeat_interleave(v ** (b - i - 1)))
            alive = longer.flatten(1)
        return torch.cartesian_prod(*[torch.arange(v)] * b).view(-1, b), torch.stack(columns, dim=-1)


#: The process of the default table.
DEFAULT_PROCESS = PhraseProcess()


def marginals(blocks: Tensor, log_p: Tensor) -> Tensor:
    """Exact distribution of every position: the independent proposal of largest likelihood (eq. 7).

    Args:
        blocks, log_p: as :meth:`PhraseProcess.law` returns them.

    Returns:
        (b, V) float64, V the largest token plus one.
    """
    return _position_counts(one_hot(blocks).double(), _weight(log_p).unsqueeze(0))[0]


def entropy(log_p: Tensor) -> float:
    """Entropy of the whole block, in nats, from (N, b) conditionals of all blocks."""
    joint = log_p.double().sum(-1)
    return float(-(joint.exp() * joint).sum())


def early_determinism(log_p: Tensor) -> float:
    """D_b = E_x (1/b) sum_j prod_{i<=j} p(x_i | x_<i), in (0, 1], from (N, b) conditionals of all blocks (eq. 24)."""
    return float((_weight(log_p) * log_p.double().cumsum(-1).exp().mean(-1)).sum())


def estimate_determinism(log_p: Tensor, valid: Tensor | None = None) -> Tensor:
    """Early determinism D_b from M sampled blocks (eq. 24): mean over blocks and positions of prod_{i<=j} p(x_i).

    Args:
        log_p: (..., M, b) log p(x_i | y, x_<i) of the sampled tokens.
        valid: (..., M, b), False after an end of sequence; such positions are left out of a block's mean.

    Returns:
        (...,) float64 in [0, 1]; where all positions are valid its expectation is :func:`early_determinism`.

    Raises:
        DBlastError: no samples, or no tokens.
    """
    if log_p.ndim < 2 or 0 in log_p.shape[-2:]:
        raise DBlastError(f"need (..., M, b) log-probabilities with M, b >= 1, got {tuple(log_p.shape)}")
    prefix = log_p.double().cumsum(-1).exp()
    if valid is None:
        return prefix.mean(dim=(-1, -2))
    return ((prefix * valid).sum(-1) / valid.sum(-1).clamp(min=1)).mean(-1)


def _weight(log_p: Tensor) -> Tensor:
    """Probability of every block, (N,)."""
    return log_p.double().sum(-1).exp()


def _position_counts(tokens: Tensor, share: Tensor) -> Tensor:
    """Distribution of every position (..., b, V), the one-hot blocks (N, b, V) being weighted by ``share`` (..., N)."""
    counts = (share @ tokens.flatten(1)).unflatten(-1, tokens.shape[1:])
    total = counts.sum(-1, keepdim=True)
    # A category that lost all its blocks has no say; any table will do.
    return torch.where(total > 0, counts / total, 1 / tokens.shape[-1])


def em_step(tokens: Tensor, weight: Tensor, log_prior: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One EM step for a mixture of independent tables on weighted blocks.

    Args:
        tokens: (N, b, V) float64, the blocks one-hot.
        weight: (N,) probabilities.
        log_prior: (..., K) log q(z); leading dimensions are separate fits.
        log_q: (..., K, b, V) log q_i(. | z).

    Returns:
        ``(log_prior, log_q, log_likelihood)``: the new parameters, and the expected log-likelihood
        (...,) of the *old* ones in nats per block (minus eq. 8), which EM never lowers.
    """
    log_tables = log_q.clamp(min=LOG_FLOOR).flatten(-2)
    joint = log_prior.clamp(min=LOG_FLOOR).unsqueeze(-1) + log_tables @ tokens.flatten(1).T
    log_likelihood = joint.logsumexp(-2)
    share = (joint - log_likelihood.unsqueeze(-2)).exp() * weight  # (..., K, N)
    prior = share.sum(-1)
    prior = prior / prior.sum(-1, keepdim=True)
    return prior.log(), _position_counts(tokens, share).log(), (log_likelihood * weight).sum(-1)


def fit_mixture(
    blocks: Tensor, weight: Tensor, count: int, generator: torch.Generator, restarts: int = 24, iterations: int = 200
) -> tuple[Tensor, Tensor]:
    """The mixture of K independent tables with the largest likelihood that EM finds (eq. 5 and 8, no network).

    Each restart draws K different blocks by their weight, mixes each with the
    marginals half and half, and iterates EM; the best likelihood is kept. K = 1
    gives the marginals.

    Args:
        blocks, weight: (N, b) int64 and (N,) probabilities; V is the largest token plus one.
        count: K.
        generator: for the starting blocks.
        restarts: number of starts, at least 1.
        iterations: most EM steps; EM ends earlier when no start gains 1e-9 nats.

    Returns:
        ``(log_prior, log_q)``: (K,) and (K, b, V) float64.

    Raises:
        DBlastError: K is below 1 or above the number of blocks with positive weight.
    """
    keep = weight > 0
    tokens, weight = one_hot(blocks)[keep].double(), weight.double()[keep]
    if not 1 <= count <= len(weight):
        raise DBlastError(f"K must lie between 1 and {len(weight)}, the blocks with positive weight, got {count}")
    weight = weight / weight.sum()
    seeds = torch.multinomial(weight.expand(restarts, -1), count, generator=generator)
    log_q = (0.5 * tokens[seeds] + 0.5 * _position_counts(tokens, weight)).log()
    log_prior = torch.full((restarts, count), -math.log(count), dtype=torch.float64)
    last = torch.full((restarts,), -torch.inf, dtype=torch.float64)
    for _ in range(iterations):
        log_prior, log_q, likelihood = em_step(tokens, weight, log_prior, log_q)
        if bool((likelihood - last < 1e-9).all()):
            break
        last = likelihood
    best = int(em_step(tokens, weight, log_prior, log_q)[2].argmax())
    return log_prior[best], log_q[best]


def improve_mixture(
    log_p: Tensor, log_prior: Tensor, log_q: Tensor, steps: int = 80, learning_rate: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Gradient ascent (Adam on logits) of a mixture's exact expected accepted length, from a given mixture.

    The best iterate is kept, the given mixture included, so the result is never
    worse. The step size falls linearly to zero.

    Args:
        log_p: (V^b, b) conditionals of all blocks, in the order of :meth:`PhraseProcess.law`.
        log_prior, log_q: (..., K) and (..., K, b, V); leading dimensions are separate starts.

    Returns:
        ``(log_prior, log_q)`` of the same shapes.
    """
    best_prior, best_q = log_prior.detach(), log_q.detach()
    best = accepted_by_mixture(log_p, best_prior, best_q)
    logits = [x.clamp(min=START_FLOOR).requires_grad_() for x in (best_prior, best_q)]
    optimiser = torch.optim.Adam(logits, maximize=True)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = learning_rate * (1 - step / steps)
        prior, tables = (x.log_softmax(-1) for x in logits)
        value = accepted_by_mixture(log_p, prior, tables)
        optimiser.zero_grad()
        value.sum().backward()
        better = value.detach() > best
        best = torch.where(better, value.detach(), best)
        best_prior = torch.where(better[..., None], prior.detach(), best_prior)
        best_q = torch.where(better[..., None, None, None], tables.detach(), best_q)
        optimiser.step()
    return best_prior, best_q


def accepted_by_mixture(log_p: Tensor, log_prior: Tensor, log_q: Tensor) -> Tensor:
    """Exact expected accepted length of sampling from a mixture, differentiable.

    The same number as :func:`accepted_sampled` in float64 and without the repeated
    prefixes of the blocks: sum over all prefixes u of p(u) prod_j min(1, q / p).

    Args:
        log_p: (V^b, b) conditionals of all blocks, in the order of :meth:`PhraseProcess.law`.
        log_prior, log_q: (..., K) and (..., K, b, V).

    Returns:
        (...) tokens per draft step.

    Raises:
        DBlastError: ``log_p`` does not hold the V^b blocks of the tables.
    """
    b, v = log_q.shape[-2:]
    if log_p.shape != (v**b, b):
        raise DBlastError(f"need conditionals of all {v}^{b} blocks, got shape {tuple(log_p.shape)}")
    tables, mass = log_q.exp(), log_prior.exp().unsqueeze(-1)  # mass: q(z, prefix), (..., K, V^i)
    reach = torch.ones((), dtype=torch.float64)  # (..., V^i): p(prefix) prod min(1, q / p)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(b):
        # Blocks are in lexicographic order: every V^(b-i-1)-th one starts a new prefix of length i + 1.
        p = log_p[:: v ** (b - i - 1), i].exp().view(-1, v)
        longer = mass.unsqueeze(-1) * tables[..., i, :].unsqueeze(-2)  # (..., K, V^i, V)
        q = longer.sum(-3) / mass.sum(-2).clamp(min=torch.finfo(mass.dtype).tiny).unsqueeze(-1)
        reach = (reach.unsqueeze(-1) * torch.minimum(p, q)).flatten(-2)
        total = total + reach.sum(-1)
        mass = longer.flatten(-2)
    return total


def accepted_sampled(blocks: Tensor, log_p: Tensor, log_prior: Tensor, log_q: Tensor) -> float:
    """Exact expected accepted length when tokens are sampled inside the drawn branch (eq. 12), tokens per step.

    E_{x~p} sum_l prod_{j<=l} min(1, q / p) over the enumerated blocks, q being the
    mixture's conditional given the accepted prefix.

    Args:
        blocks, log_p: (N, b), all blocks and their conditionals.
        log_prior, log_q: (K,) and (K, b, V).
    """
    realised = log_q[:, torch.arange(blocks.shape[1]), blocks].transpose(0, 1)  # (N, K, b)
    return _expectation(log_p, soft_acceptance(realised, log_prior.expand(len(blocks), -1), log_p))


def accepted_greedy(blocks: Tensor, log_p: Tensor, log_prior: Tensor, branches: Tensor) -> float:
    """Exact expected accepted length of greedy-branch drafting (eq. 18-20), tokens per step.

    Args:
        blocks, log_p: (N, b), all blocks and their conditionals.
        log_prior, branches: (K,) and (K, b).
    """
    drafted, prior = branches.expand(len(blocks), -1, -1), log_prior.expand(len(blocks), -1)
    return _expectation(log_p, greedy_branch_acceptance(drafted, prior, blocks, log_p))


def _expectation(log_p: Tensor, acceptance: Tensor) -> float:
    return float((_weight(log_p) * expected_accepted(acceptance.double())).sum())


def mismatch_table(
    temperatures: Sequence[float] = TEMPERATURES,
    process: PhraseProcess = DEFAULT_PROCESS,
    categories: Sequence[int] = CATEGORIES,
    seed: int = 0,
    restarts: int = 24,
    iterations: int = 200,
    steps: int = 80,
) -> pd.DataFrame:
    """Exact expected accepted length of one draft step, by temperature and proposal.

    * *independent*: the true marginals of every position, sampled, or the likeliest
      token of each (greedy). Sampled marginals may recover at high temperatures: the
      flatter the conditionals, the nearer the process is to uniform independent
      tokens, for which an independent draft is exact. Greedy ones do not recover.
    * *K = k, sampled*: the best mixture of k tables found, by EM and by gradient ascent
      of the accepted length from there and from the best k branches. A lower bound on
      what k categories can do. Sampling from tables that are point masses *is*
      greedy-branch drafting, so this row is never below the next one.
    * *K = k, greedy branch*: the best k branches with their best prior
      (:mod:`dblast.reproduction.diagnosis.block_cover`); no other k greedy branches accept more.
    * *true joint*: q = p, so everything is accepted.

    Returns:
        One row per temperature and proposal: ``temperature, entropy`` (nats per block)``,
        determinism`` (D_b, eq. 24)``, proposal, K`` (missing for the true joint)``, decoding``
        ("sampled", "greedy branch" or "joint")``, accepted_length`` (tokens, no bonus token).
        A row depends on its own temperature and K only.

    Raises:
        DBlastError: a temperature is not positive, or K is out of range.
    """
    rows = []
    for temperature in temperatures:
        blocks, log_p = process.law(temperature)
        weight, table, one = _weight(log_p), marginals(blocks, log_p), torch.zeros(1, dtype=torch.float64)
        sampled, greedy = [], []
        for k in categories:
            branches, branch_prior = best_blocks(blocks, weight, k)
            greedy.append((k, "greedy branch", accepted_greedy(blocks, log_p, branch_prior, branches)))
            fitted = fit_mixture(blocks, weight, k, torch.Generator().manual_seed(seed), restarts, iterations)
            fixed = branch_prior, one_hot(branches, process.vocab_size).double().log()
            starts = (torch.stack(pair) for pair in zip(fitted, fixed, strict=True))
            improved = zip(*improve_mixture(log_p, *starts, steps=steps), strict=True)
            sampled.append((k, "sampled", max(accepted_sampled(blocks, log_p, *mixture) for mixture in improved)))
        values = [
            (1, "sampled", accepted_sampled(blocks, log_p, one, table.log().unsqueeze(0))),
            (1, "greedy branch", accepted_greedy(blocks, log_p, one, table.argmax(-1).unsqueeze(0))),
            *sampled,
            *greedy,
            (pd.NA, "joint", _expectation(log_p, torch.ones_like(log_p))),
        ]
        head = {"temperature": temperature, "entropy": entropy(log_p), "determinism": early_determinism(log_p)}
        for name, (k, decoding, value) in zip(proposal_names(categories), values, strict=True):
            rows.append(head | {"proposal": name, "K": k, "decoding": decoding, "accepted_length": value})
    return pd.DataFrame(rows).astype({"K": "Int64"})
