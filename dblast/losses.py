"""Every training objective, as pure functions over log-probabilities.

Shapes: N anchors, K categories, b draft positions. A block is the b tokens
after its anchor, taken from a target-sampled trajectory (x ~ p).

* ``log_q`` (N, K, b): log q_i(x_i | y, z), the realised token under branch z.
* ``log_prior`` (N, K): log q(z | y) at category temperature 1.
* ``log_p`` (N, b): log p(x_i | y, x_<i) under the trajectory's own settings.
* ``valid`` (N, b) bool, optional: True on the leading positions of a block that
  exist; blocks that reach past the end of a trajectory are shorter than b.

Equation numbers are those of arXiv 2608.05448.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dblast.errors import DBlastError

#: Log-probabilities are clamped here before they enter a ratio: exp(-60) is far below
#: any probability that float32 sampling can produce, and everything stays finite.
LOG_FLOOR = -60.0

AL_CONSTRUCTIONS = ("all_prefixes", "one_prefix", "whole_block")

#: gamma of DFlash's decayed cross-entropy, by block size (b + 1).
DFLASH_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def masked_log(log_values: Tensor, valid: Tensor | None) -> Tensor:
    """Clamp at LOG_FLOOR; positions that do not exist contribute a factor of one."""
    clamped = log_values.float().clamp(min=LOG_FLOOR)
    return clamped if valid is None else clamped.masked_fill(~valid, 0.0)


def _expand(valid: Tensor | None) -> Tensor | None:
    return None if valid is None else valid.unsqueeze(-2)


def prefix_log_q(log_q: Tensor, log_prior: Tensor, valid: Tensor | None = None) -> Tensor:
    """log q_dep(x_{1:l} | y) of every prefix of the block (eq. 5).

    Returns (N, b): entry l - 1 is the log-probability of the first l tokens with
    the category summed out.
    """
    per_branch = masked_log(log_q, _expand(valid)).cumsum(-1)
    return torch.logsumexp(log_prior.float().unsqueeze(-1) + per_branch, dim=-2)


def conditional_log_q(log_q: Tensor, log_prior: Tensor, valid: Tensor | None = None) -> Tensor:
    """log q(x_i | y, x_<i) of the soft mixture, (N, b): differences of :func:`prefix_log_q` (eq. 12).

    The form for training: clamped at LOG_FLOOR, so that gradients stay finite where no branch can draft x_i, and zero
    where the block has ended. Decoding and replay use :func:`dblast.proposals.soft_conditional`, which clamps nothing.
    """
    prefix = prefix_log_q(log_q, log_prior, valid)
    return torch.cat([prefix[..., :1], prefix[..., 1:] - prefix[..., :-1]], dim=-1)


def nll_loss(log_q: Tensor, log_prior: Tensor, valid: Tensor | None = None) -> Tensor:
    """Joint negative log-likelihood of the block, nats per block, mean over anchors (eq. 7 for K = 1, eq. 8)."""
    return -prefix_log_q(log_q, log_prior, valid)[..., -1].mean()


def block_gamma(block_length: int) -> float:
    """Decay constant of DFlash's position weights, in positions.

    DFlash publishes it for block sizes b + 1 of 8, 10 and 16; half the block size,
    the rule that fits the two smaller ones, fills the gaps.
    """
    return DFLASH_GAMMA.get(block_length + 1, (block_length + 1) / 2)


def position_mean(values: Tensor, valid: Tensor | None = None, gamma: float | None = None) -> Tensor:
    """Mean of (N, b) values over the positions that exist, weighted by exp(-(k - 1) / gamma).

    ``gamma`` is in positions; None takes DFlash's for this block length, ``math.inf`` weights evenly.

    Raises:
        DBlastError: gamma is not positive.
    """
    b = values.shape[-1]
    gamma = block_gamma(b) if gamma is None else gamma
    if not gamma > 0:
        raise DBlastError(f"gamma must be positive, got {gamma}")
    weights = torch.exp(-torch.arange(b, device=values.device) / gamma).expand_as(values)
    if valid is not None:
        weights = weights * valid
    return (weights * values).sum() / weights.sum()


def decayed_cross_entropy(
    log_q: Tensor, log_prior: Tensor, valid: Tensor | None = None, gamma: float | None = None
) -> Tensor:
    """DFlash's pre-training loss: per-position cross-entropy weighted by exp(-(k - 1) / gamma).

    The weights are normalised by their sum over all positions that exist. The
    marginal of each position is that of the mixture, so K = 1 is plain
    cross-entropy. Nats per token.
    """
    marginal = torch.logsumexp(log_prior.float().unsqueeze(-1) + log_q.float().clamp(min=LOG_FLOOR), dim=-2)
    return -position_mean(marginal, valid, gamma)


def acceptance_terms(
    log_q: Tensor, log_prior: Tensor, log_p: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The ingredients of eq. 14-16, each (N, b): log r_l, log prod_{j<=l} A_j and log S_l.

    A_j = min(1, p / q) with the soft mixture's conditionals, r_l = q / p of the
    prefix, S_l = sum_{i<=l} prod_{j<=i} A_j.
    """
    prefix = prefix_log_q(log_q, log_prior, valid)
    conditional = torch.cat([prefix[..., :1], prefix[..., 1:] - prefix[..., :-1]], dim=-1)
    log_p = masked_log(log_p, valid)
    log_r = prefix - log_p.cumsum(-1)
    log_accept = (log_p - conditional).clamp(max=0.0).cumsum(-1)
    summand = log_accept if valid is None else log_accept.masked_fill(~valid, LOG_FLOOR * (log_p.shape[-1] + 1))
    return log_r, log_accept, torch.logcumsumexp(summand, dim=-1)


def stopping_prefix(log_r: Tensor, tau: float, valid: Tensor | None = None) -> Tensor:
    """l_tau = min({l : r_l < tau} or b), (N,) in 1..b: the first failing prefix is kept (eq. 15)."""
    b = log_r.shape[-1]
    if tau < 0:
        raise DBlastError(f"tau must not be negative, got {tau}")
    log_tau = torch.log(torch.tensor(tau, dtype=log_r.dtype, device=log_r.device))
    failing = log_r.detach() < log_tau
    length = torch.full(log_r.shape[:-1], b, device=log_r.device) if valid is None else valid.sum(-1)
    first = torch.where(failing.any(-1), failing.int().argmax(-1) + 1, b)
    return torch.minimum(first, length)


def prefix_members(log_r: Tensor, tau: float, construction: str, valid: Tensor | None = None) -> Tensor:
    """Which prefixes a construction of Table 4 sums over, (N, b) bool, decided without gradient.

    Raises:
        DBlastError: unknown construction or negative tau.
    """
    if construction not in AL_CONSTRUCTIONS:
        raise DBlastError(f"unknown AL construction {construction!r}; known: {', '.join(AL_CONSTRUCTIONS)}")
    # No prefix fails at tau = 0: the whole block is the last one.
    last = stopping_prefix(log_r, 0.0 if construction == "whole_block" else tau, valid).unsqueeze(-1)
    length = torch.arange(1, log_r.shape[-1] + 1, device=log_r.device)
    return length <= last if construction == "all_prefixes" else length == last


def acceptance_length_loss(
    log_q: Tensor,
    log_prior: Tensor,
    log_p: Tensor,
    valid: Tensor | None = None,
    *,
    tau: float = 0.1,
    construction: str = "all_prefixes",
) -> Tensor:
    """The acceptance-length loss, mean over anchors (eq. 16; the constructions of Table 4).

    ``all_prefixes`` sums -(log r_l + log S_l) over l = 1..l_tau, ``one_prefix``
    keeps only l = l_tau and ``whole_block`` only l = b. Which prefixes belong is
    decided without gradient.

    Raises:
        DBlastError: unknown construction or negative tau.
    """
    log_r, _, log_s = acceptance_terms(log_q, log_prior, log_p, valid)
    term = -(log_r + log_s)
    member = prefix_members(log_r, tau, construction, valid)
    return torch.where(member, term, torch.zeros_like(term)).sum(-1).mean()


# -- by name -----------------------------------------------------------------------------------

_CANDIDATES = ("log_q_candidates", "log_p_candidates")
#: Keywords that every loss by name accepts; those that it has no use for are ignored.
INPUTS = ("tau", "construction", *_CANDIDATES)


@dataclass(frozen=True)
class Loss:
    """A loss as training calls it: ``loss(log_q, log_prior, log_p, valid, **inputs)`` with :data:`INPUTS`, a scalar.

    Attributes:
        function: of ``log_q, log_prior, log_p, valid`` and the keywords that it takes.
        takes: which of "tau" and "construction" it is handed.
        needs_support: it compares whole distributions: ``log_q_candidates`` (N, K, b, W) and ``log_p_candidates``
            (N, b, W), the log-probabilities of the tokens that each x_i was drawn from.

    Raises:
        DBlastError: when called, for an input that no loss has, or candidates that are missing.
    """

    function: Callable[..., Tensor]
    takes: tuple[str, ...] = ()
    needs_support: bool = False

    def __call__(
        self, log_q: Tensor, log_prior: Tensor, log_p: Tensor, valid: Tensor | None = None, **inputs: object
    ) -> Tensor:
        for name in inputs.keys() - {*INPUTS}:
            raise DBlastError(f"unknown input {name!r}; known: {', '.join(INPUTS)}")
        wanted = (*self.takes, *(_CANDIDATES if self.needs_support else ()))
        given = {name: value for name, value in inputs.items() if name in wanted and value is not None}
        if self.needs_support and not given.keys() >= {*_CANDIDATES}:
            raise DBlastError(f"this loss compares whole distributions and needs {' and '.join(_CANDIDATES)}")
        return self.function(log_q, log_prior, log_p, valid, **given)


#: Every loss by name; :mod:`dblast.reproduction.objectives` adds those of other papers.
LOSSES: dict[str, Loss] = {
    "NLL": Loss(lambda log_q, log_prior, log_p, valid: nll_loss(log_q, log_prior, valid)),
    "AL": Loss(acceptance_length_loss, takes=("tau", "construction")),
    "CE": Loss(lambda log_q, log_prior, log_p, valid: decayed_cross_entropy(log_q, log_prior, valid)),
}


def get_loss(name: str) -> Loss:
    """A loss by name; DBlastError lists the known ones."""
    if name not in LOSSES:
        raise DBlastError(f"unknown loss {name!r}; known losses: {', '.join(LOSSES)}")
    return LOSSES[name]
