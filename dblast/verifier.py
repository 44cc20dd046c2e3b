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


def residual_distribution(p: Tensor, q: Tensor, weight: float | Tensor = 1.0) -> Tensor:
    """norm([w p - q]_+) over the last dimension, the law of the replacement token after a rejection.

    ``weight`` is 1 in token verification. Where nothing is left (p = q), a rejection
    cannot happen; p itself is returned so that the row stays a distribution.
    """
    rest = (weight * p - q).clamp(min=0.0)
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


def trailing_accepts(acceptance: Tensor, uniform: Tensor) -> Tensor:
    """The last token of each block whose uniform number lies below its probability, 0 if none: (N, b) twice to (N,)."""
    place = torch.arange(1, acceptance.shape[1] + 1, device=acceptance.device)
    return torch.nn.functional.pad((uniform < acceptance) * place, (1, 0)).amax(1)


def block_weights(p_drafted: Tensor, q_drafted: Tensor) -> Tensor:
    """w_i = min(1, w_{i-1} p(x_i) / q(x_i)), w_0 = 1: how far the target backs the first i drafted tokens.

    (N, b) and (N, b) to (N, b + 1); zero from a token with p = 0 on.
    """
    weight = [p_drafted.new_ones(len(p_drafted))]
    for p_x, q_x in zip(p_drafted.unbind(1), q_drafted.unbind(1), strict=True):
        weight.append(accept_ratio(weight[-1] * p_x, q_x))
    return torch.stack(weight, dim=1)


def block_acceptance(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Probability of keeping at least the first i drafted tokens if the block is cut back to them, i = 0..b.

    s_i / (s_i + 1 - w_i) with s_i = sum_v [w_i p(v) - q(v)]_+, what the target still wants after them. At i = b
    nothing is drafted, q = 0, and this is w_b.

    Args:
        weight: (N, b + 1) from :func:`block_weights`.
        p, q: (N, b + 1, W) on the target's support, given the first i drafted tokens.
    """
    wanted = (weight.unsqueeze(-1) * p - q).clamp(min=0.0).sum(-1)
    total = wanted + (1 - weight)
    # Zero over zero: p = q and all of the prefix is kept.
    return torch.where(total > 0, wanted / total.clamp(min=torch.finfo(p.dtype).tiny), torch.ones_like(total))


# -- whole blocks, as the decoding loop verifies them ------------------------------------------


#: Ways to verify a block.
VERIFICATIONS = ("token", "block")


def check_verification(verification: str) -> None:
    """Refuse an unknown way to verify, with DBlastError."""
    if verification not in VERIFICATIONS:
        raise DBlastError(f"unknown verification {verification!r}; blocks are verified by {' or '.join(VERIFICATIONS)}")


@dataclass
class BlockOutcome:
    """What verification made of N blocks.

    Attributes:
        accepted: (N,) number of accepted draft tokens, 0..d.
        token: (N,) the target's own token after them: replacement, or bonus after d accepted ones.
        acceptance: (N, d) by token, acceptance probability of every drafted token given its drafted predecessors;
            by block, :func:`block_acceptance` of the first 1..d tokens.
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
    *,
    verification: str = "token",
) -> BlockOutcome:
    """Verify whole blocks: accept, replace, or add the bonus token.

    By token (Algorithm 1), draft token i is accepted with probability min(1, p / q).
    At the first rejection the replacement comes from norm([p - q]_+); after d accepted
    tokens the bonus comes from p, which is the same formula with q = 0.

    By block (arXiv 2403.10444), the first i tokens are kept for the largest i whose
    uniform number lies below :func:`block_acceptance`, and the replacement comes from
    norm([w_i p - q]_+) with w_i of :func:`block_weights`: a late token may make up for
    an early one. Just as exact, and never fewer tokens on average.

    Args:
        proposal: N blocks of d drafted tokens and their q.
        tokens, p: (N, d + 1, W) the target's support and probabilities at every slot.
        generator: on the device of p, for the uniform numbers and the last draw.
        uniform: (N, d) in [0, 1), instead of numbers drawn from ``generator``.
        verification: one of :data:`VERIFICATIONS`.

    Raises:
        DBlastError: unknown verification, p or q that is no probability, or a uniform number outside [0, 1).
    """
    check_verification(verification)
    # A thousandth of room: these are sums in float32.
    _check_range("p, summed over the support,", p.sum(-1), 0.999, 1.001)
    _check_range("q of the drafted tokens", proposal.q_drafted, 0.0, 1.001)
    if uniform is None:
        uniform = torch.rand(proposal.drafted.shape, generator=generator, device=p.device)
    elif not bool(((uniform >= 0) & (uniform < 1)).all()):
        raise DBlastError("uniform numbers must lie in [0, 1)")
    p_drafted = probability_on_support(tokens[:, :-1], p[:, :-1], proposal.drafted)
    rows = torch.arange(len(p), device=p.device)
    if verification == "block":
        weight = block_weights(p_drafted, proposal.q_drafted)
        slots = [torch.full_like(rows, slot) for slot in range(p.shape[1])]
        q = torch.stack([proposal.q(slot, tokens[:, i]) for i, slot in enumerate(slots)], dim=1)
        acceptance = block_acceptance(weight, p, q)[:, 1:]
        accepted = trailing_accepts(acceptance, uniform)
        here = weight[rows, accepted].unsqueeze(-1)
    else:
        acceptance, here = accept_ratio(p_drafted, proposal.q_drafted), 1.0
        accepted = leading_accepts(acceptance, uniform)
    candidates = tokens[rows, accepted]
    law = residual_distribution(p[rows, accepted], proposal.q(accepted, candidates), here)
    _check_range("the law of the replacement, summed,", law.sum(-1), 0.999, 1.001)
    drawn = torch.multinomial(law, 1, generator=generator)
    return BlockOutcome(accepted, candidates.gather(-1, drawn).squeeze(-1), acceptance)
