"""Verification: proposals to acceptance, residual and bonus, as pure functions (eq. 12, 21).

Shapes: N blocks, K categories, b draft positions, V vocabulary, W support size.
Everything is float32 (float64 inputs stay float64, which is for tests); p is the
target after temperature, top-k and top-p, q the drafter.

The target's distribution comes as its *support*: ``tokens`` (..., W) and their
probabilities ``p`` (..., W). Whatever lies outside has p = 0, is never accepted
and cannot be a replacement, so q is only ever needed on the support. The dense
case is ``tokens = arange(V)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dblast.errors import DBlastError
from dblast.proposals import Proposal, greedy_branch_conditional, real, soft_conditional


def acceptance_given_emitted(q: Tensor, log_p: Tensor) -> Tensor:
    """P(draft token accepted | emitted token is x_j) = min(1, q(x_j) / p(x_j)), elementwise.

    The identity behind replay: a step emits x with probability p(x) and accepts
    it as the draft with probability min(p(x), q(x)).
    """
    return torch.exp(torch.log(real(q)) - real(log_p).clamp(min=-60.0)).clamp(max=1.0)


def greedy_branch_acceptance(branch_tokens: Tensor, log_prior: Tensor, tokens: Tensor, log_p: Tensor) -> Tensor:
    """Acceptance along a realised block for the paper's proposal, (N, b): q of eq. 20 over p, at most 1."""
    return acceptance_given_emitted(greedy_branch_conditional(branch_tokens, log_prior, tokens), log_p)


def soft_acceptance(log_q: Tensor, log_prior: Tensor, log_p: Tensor) -> Tensor:
    """Acceptance along a realised block when tokens are sampled inside the branch (eq. 12), (N, b).

    Args:
        log_q: (N, K, b) log q_i(x_i | y, z) of the realised tokens.
        log_prior: (N, K).
        log_p: (N, b).
    """
    return acceptance_given_emitted(soft_conditional(log_q, log_prior), log_p)


def accept_ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) of drafted tokens, elementwise; zero where p(x) is zero, whatever q says."""
    ratio = (p_x / q_x.clamp(min=torch.finfo(p_x.dtype).tiny)).clamp(max=1.0)
    return torch.where(p_x > 0, ratio, torch.zeros_like(ratio))


def residual_distribution(p: Tensor, q: Tensor) -> Tensor:
    """norm([p - q]_+) over the last dimension, the law of the replacement token after a rejection.

    Where nothing is left (p = q), a rejection cannot happen; p itself is returned
    so that the row stays a distribution.
    """
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total == 0, p, rest / total.clamp(min=torch.finfo(p.dtype).tiny))


def probability_on_support(tokens: Tensor, p: Tensor, x: Tensor) -> Tensor:
    """p(x) read off a support, zero outside: (..., W), (..., W) and (...,) to (...,)."""
    return (p * (tokens == x.unsqueeze(-1))).sum(-1)


def leading_accepts(acceptance: Tensor, uniform: Tensor) -> Tensor:
    """How many leading tokens of each block are accepted: (N, b), (N, b) to (N,).

    A token is accepted when its uniform number in [0, 1) lies strictly below its
    acceptance probability: never at probability 0, always at 1.
    """
    return (uniform < acceptance).long().cumprod(-1).sum(-1)


# -- whole blocks, as the decoding loop verifies them ------------------------------------------


@dataclass
class BlockOutcome:
    """What verification made of N blocks.

    Attributes:
        accepted: (N,) number of accepted draft tokens, 0..d.
        token: (N,) the target's own token after them: replacement, or bonus after d accepted ones.
        acceptance: (N, d) acceptance probability of every drafted token given its drafted predecessors.
    """

    accepted: Tensor
    token: Tensor
    acceptance: Tensor


def _check_range(what: str, values: Tensor, low: float, high: float) -> None:
    # Written so that NaN fails.
    if not bool(((values >= low) & (values <= high)).all()):
        raise DBlastError(f"{what} must lie between {low:g} and {high:g}; it holds NaN, or is no probability")


def verify_block(
    proposal: Proposal,
    tokens: Tensor,
    p: Tensor,
    generator: torch.Generator | None = None,
    uniform: Tensor | None = None,
) -> BlockOutcome:
    """Token verification of whole blocks (Algorithm 1): accept, replace, or add the bonus token.

    Draft token i is accepted with probability min(1, p / q). At the first
    rejection the replacement comes from norm([p - q]_+); after d accepted tokens
    the bonus comes from p, which is the same formula with q = 0.

    Args:
        proposal: N blocks of d drafted tokens and their q.
        tokens, p: (N, d + 1, W) the target's support and probabilities at every slot.
        generator: on the device of p, for the uniform numbers and the last draw.
        uniform: (N, d) in [0, 1), instead of numbers drawn from ``generator``.

    Raises:
        DBlastError: p or q that is no probability, or a uniform number outside [0, 1).
    """
    # A thousandth of room: these are sums in float32.
    _check_range("p, summed over the support,", p.sum(-1), 0.999, 1.001)
    _check_range("q of the drafted tokens", proposal.q_drafted, 0.0, 1.001)
    if uniform is None:
        uniform = torch.rand(proposal.drafted.shape, generator=generator, device=p.device)
    elif not bool(((uniform >= 0) & (uniform < 1)).all()):
        raise DBlastError("uniform numbers must lie in [0, 1)")
    p_drafted = probability_on_support(tokens[:, :-1], p[:, :-1], proposal.drafted)
    acceptance = accept_ratio(p_drafted, proposal.q_drafted)
    accepted = leading_accepts(acceptance, uniform)
    rows = torch.arange(len(accepted), device=accepted.device)
    candidates, p_here = tokens[rows, accepted], p[rows, accepted]
    law = residual_distribution(p_here, proposal.q(accepted, candidates))
    _check_range("the law of the replacement, summed,", law.sum(-1), 0.999, 1.001)
    drawn = torch.multinomial(law, 1, generator=generator)
    return BlockOutcome(accepted, candidates.gather(-1, drawn).squeeze(-1), acceptance)
