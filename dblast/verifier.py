"""Verification: proposals to acceptance, residual and bonus, as pure functions (eq. 12, 18-21).

Shapes: N blocks, K categories, b draft positions, V vocabulary. Everything is
float32; p is the target after temperature, top-k and top-p, q the drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dblast.losses import conditional_log_q


def agreement(branch_tokens: Tensor, tokens: Tensor) -> Tensor:
    """Which branches agree with a realised block so far.

    Args:
        branch_tokens: (N, K, b) greedy token of every branch.
        tokens: (N, b) realised tokens.

    Returns:
        (N, K, b + 1) bool: entry j is True while the branch equals the first j tokens (entry 0 always is).
    """
    equal = (branch_tokens == tokens.unsqueeze(1)).int().cumprod(-1).bool()
    return torch.cat([torch.ones_like(equal[..., :1]), equal], dim=-1)


def greedy_branch_conditional(branch_tokens: Tensor, log_prior: Tensor, tokens: Tensor) -> Tensor:
    """q_greedy(x_i | y, x_<i) of realised tokens, category summed out (eq. 20).

    Args:
        branch_tokens: (N, K, b) greedy token of every branch.
        log_prior: (N, K) log q(z | y), already at the wanted category temperature.
        tokens: (N, b) realised tokens.

    Returns:
        (N, b) float32; zero after a prefix that no branch has.
    """
    agree = agreement(branch_tokens, tokens)
    mass = (log_prior.float().exp().unsqueeze(-1) * agree).sum(1)
    before, after = mass[:, :-1], mass[:, 1:]
    return torch.where(before > 0, after / before.clamp(min=torch.finfo(torch.float32).tiny), 0.0)


def acceptance_given_emitted(q: Tensor, log_p: Tensor) -> Tensor:
    """P(draft token accepted | emitted token is x_j) = min(1, q(x_j) / p(x_j)), elementwise.

    The identity behind replay: a step emits x with probability p(x) and accepts
    it as the draft with probability min(p(x), q(x)).
    """
    return torch.exp(torch.log(q.float()) - log_p.float().clamp(min=-60.0)).clamp(max=1.0)


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
    return acceptance_given_emitted(conditional_log_q(log_q, log_prior).exp(), log_p)


def greedy_branch_distribution(branch_tokens: Tensor, log_prior: Tensor, prefix: Tensor, vocab_size: int) -> Tensor:
    """The whole conditional q_greedy(. | y, prefix) as a vector (eq. 20).

    Args:
        branch_tokens: (K, b) greedy blocks of one anchor.
        log_prior: (K,) at the category temperature in use.
        prefix: (i,) accepted tokens, i < b.
        vocab_size: V.

    Returns:
        (V,) float32 distribution over the next draft token; all zero if no branch has this prefix.
    """
    i = len(prefix)
    agree = (branch_tokens[:, :i] == prefix).all(-1)
    mass = log_prior.float().exp() * agree
    q = torch.zeros(vocab_size, dtype=torch.float32, device=log_prior.device)
    q.scatter_add_(0, branch_tokens[:, i], mass)
    return q / mass.sum() if mass.sum() > 0 else q


def soft_distribution(position_log_q: Tensor, log_prior: Tensor, prefix: Tensor) -> Tensor:
    """The whole conditional of the soft mixture, q(. | y, prefix) (eq. 12).

    Args:
        position_log_q: (K, b, V) log q_i(. | y, z).
        log_prior: (K,).
        prefix: (i,) accepted tokens, i < b.

    Returns:
        (V,) float32.
    """
    i = len(prefix)
    seen = position_log_q[:, torch.arange(i), prefix].sum(-1) if i else torch.zeros_like(log_prior)
    posterior = (log_prior.float() + seen).softmax(-1)
    return (posterior.unsqueeze(-1) * position_log_q[:, i].float().exp()).sum(0)


def acceptance_probability(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) of a drafted token x; zero where p(x) is zero, whatever q says.

    Args:
        p, q: (..., V).
        token: (...,) drafted token.
    """
    p_x = p.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    q_x = q.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    ratio = (p_x / q_x.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
    return torch.where(p_x > 0, ratio, torch.zeros_like(ratio))


def residual_distribution(p: Tensor, q: Tensor) -> Tensor:
    """norm([p - q]_+) over the last dimension, the law of the replacement token after a rejection.

    Where nothing is left (p = q), a rejection cannot happen; p itself is returned
    so that the row stays a distribution.
    """
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)
