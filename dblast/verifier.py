"""Verification: proposals to acceptance, residual and bonus, as pure functions (eq. 12, 18-21).

Shapes: N blocks, K categories, b draft positions, V vocabulary, W support size.
Everything is float32 (float64 inputs stay float64, which is for tests); p is the
target after temperature, top-k and top-p, q the drafter.

The target's distribution comes as its *support*: ``tokens`` (..., W) and their
probabilities ``p`` (..., W). Whatever lies outside has p = 0, is never accepted
and cannot be a replacement, so q is only ever needed on the support. The dense
case is ``tokens = arange(V)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter, DraftOutput
from dblast.errors import DBlastError
from dblast.losses import conditional_log_q


def _real(x: Tensor) -> Tensor:
    """At least float32: half precision is widened, float64 kept."""
    return x if x.dtype == torch.float64 else x.float()


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
        (N, b); zero after a prefix that no branch has.
    """
    agree = agreement(branch_tokens, tokens)
    mass = (_real(log_prior).exp().unsqueeze(-1) * agree).sum(1)
    before, after = mass[:, :-1], mass[:, 1:]
    return torch.where(before > 0, after / before.clamp(min=torch.finfo(mass.dtype).tiny), 0.0)


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
        (V,) distribution over the next draft token; all zero if no branch has this prefix.
    """
    i = len(prefix)
    agree = (branch_tokens[:, :i] == prefix).all(-1)
    mass = _real(log_prior).exp() * agree
    q = torch.zeros(vocab_size, dtype=mass.dtype, device=log_prior.device)
    q.scatter_add_(0, branch_tokens[:, i], mass)
    return q / mass.sum() if mass.sum() > 0 else q


def soft_distribution(position_log_q: Tensor, log_prior: Tensor, prefix: Tensor) -> Tensor:
    """The whole conditional of the soft mixture, q(. | y, prefix) (eq. 12).

    Args:
        position_log_q: (K, b, V) log q_i(. | y, z).
        log_prior: (K,).
        prefix: (i,) accepted tokens, i < b.

    Returns:
        (V,).
    """
    i = len(prefix)
    seen = position_log_q[:, torch.arange(i), prefix].sum(-1) if i else torch.zeros_like(log_prior)
    posterior = (_real(log_prior) + _real(seen)).softmax(-1)
    return (posterior.unsqueeze(-1) * _real(position_log_q[:, i]).exp()).sum(0)


def accept_ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) elementwise; zero where p(x) is zero, whatever q says."""
    ratio = (p_x / q_x.clamp(min=torch.finfo(p_x.dtype).tiny)).clamp(max=1.0)
    return torch.where(p_x > 0, ratio, torch.zeros_like(ratio))


def acceptance_probability(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p(x) / q(x)) of a drafted token x; zero where p(x) is zero, whatever q says.

    Args:
        p, q: (..., V).
        token: (...,) drafted token.
    """
    index = token.unsqueeze(-1)
    return accept_ratio(p.gather(-1, index).squeeze(-1), q.gather(-1, index).squeeze(-1))


def residual_distribution(p: Tensor, q: Tensor) -> Tensor:
    """norm([p - q]_+) over the last dimension, the law of the replacement token after a rejection.

    Where nothing is left (p = q), a rejection cannot happen; p itself is returned
    so that the row stays a distribution.
    """
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(p.dtype).tiny), p)


# -- whole blocks, as the decoding loop verifies them ------------------------------------------


def probability_on_support(tokens: Tensor, p: Tensor, x: Tensor) -> Tensor:
    """p(x) read off a support, zero outside: (..., W), (..., W) and (...,) to (...,)."""
    return (p * (tokens == x.unsqueeze(-1))).sum(-1)


def soft_block_conditional(log_q: Tensor, log_prior: Tensor) -> Tensor:
    """q(x_i | y, x_<i) of a drafted block under the soft mixture, category summed out (eq. 12).

    The same quantity as ``conditional_log_q(...).exp()``, as a sum over the
    posterior of the category: exact for K = 1 and without differences of sums.

    Args:
        log_q: (N, K, b) log q_i(x_i | y, z).
        log_prior: (N, K).

    Returns:
        (N, b).
    """
    return (soft_posterior(log_q, log_prior)[..., :-1] * _real(log_q).exp()).sum(1)


def soft_posterior(log_q: Tensor, log_prior: Tensor) -> Tensor:
    """q(z | y, x_{<=i}) after every number i = 0..b of drafted tokens: (N, K, b), (N, K) to (N, K, b + 1)."""
    seen = torch.cat([_real(log_prior).unsqueeze(-1), _real(log_q)], dim=-1).cumsum(-1)
    return seen.softmax(1)


def greedy_branch_at(
    branch_tokens: Tensor, log_prior: Tensor, drafted: Tensor, slot: Tensor, candidates: Tensor
) -> Tensor:
    """q_greedy(v | y, x_<i) of candidate tokens at one slot of every block (eq. 20).

    Args:
        branch_tokens: (N, K, b) greedy token of every branch.
        log_prior: (N, K) at the category temperature in use.
        drafted: (N, b) drafted blocks, each one of its branches.
        slot: (N,) number of accepted tokens, 0..b.
        candidates: (N, W) tokens.

    Returns:
        (N, W); zero everywhere for slot = b, where nothing is drafted.
    """
    rows = torch.arange(len(slot), device=slot.device)
    alive = agreement(branch_tokens, drafted)[rows, :, slot]
    mass = _real(log_prior).exp() * alive
    posterior = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    inside = slot < branch_tokens.shape[-1]
    next_tokens = branch_tokens[rows, :, slot.clamp(max=branch_tokens.shape[-1] - 1)]
    match = next_tokens.unsqueeze(-1) == candidates.unsqueeze(1)
    return (posterior.unsqueeze(-1) * match).sum(1) * inside.unsqueeze(-1)


def soft_at(position_log_q: Tensor, log_prior: Tensor, log_q: Tensor, slot: Tensor, candidates: Tensor) -> Tensor:
    """q(v | y, x_<i) of candidate tokens at one slot of every block, soft mixture (eq. 12).

    Args:
        position_log_q: (N, K, b, V') log q_i(. | y, z).
        log_prior: (N, K).
        log_q: (N, K, b) the same of the drafted tokens.
        slot: (N,) number of accepted tokens, 0..b.
        candidates: (N, W) columns of ``position_log_q``; negative ones have q = 0.

    Returns:
        (N, W); zero everywhere for slot = b.
    """
    rows = torch.arange(len(slot), device=slot.device)
    posterior = soft_posterior(log_q, log_prior)[rows, :, slot]
    length = position_log_q.shape[2]
    index = candidates.clamp(min=0)
    here = position_log_q[rows, :, slot.clamp(max=length - 1)]
    here = here.gather(-1, index.unsqueeze(1).expand(-1, here.shape[1], -1))
    q = (posterior.unsqueeze(-1) * _real(here).exp()).sum(1)
    return q * ((candidates >= 0) & (slot < length).unsqueeze(-1))


def leading_accepts(acceptance: Tensor, uniform: Tensor) -> Tensor:
    """How many leading tokens of each block are accepted: (N, b), (N, b) to (N,).

    A token is accepted when its uniform number in [0, 1) lies strictly below its
    acceptance probability: never at probability 0, always at 1.
    """
    return (uniform < acceptance).long().cumprod(-1).sum(-1)


@dataclass
class BlockOutcome:
    """What verification made of N blocks.

    Attributes:
        accepted: (N,) number of accepted draft tokens, 0..b.
        token: (N,) the target's own token after them: replacement, or bonus after b accepted ones.
        acceptance: (N, b) acceptance probability of every drafted token given its drafted predecessors.
    """

    accepted: Tensor
    token: Tensor
    acceptance: Tensor


def verify_block(
    drafted: Tensor,
    q_drafted: Tensor,
    q_at: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    p: Tensor,
    generator: torch.Generator | None = None,
    uniform: Tensor | None = None,
) -> BlockOutcome:
    """Token verification of whole blocks (Algorithm 1): accept, replace, or add the bonus token.

    Draft token i is accepted with probability min(1, p / q). At the first
    rejection the replacement comes from norm([p - q]_+); after b accepted tokens
    the bonus comes from p, which is the same formula with q = 0.

    Args:
        drafted: (N, b) drafted tokens.
        q_drafted: (N, b) q(x_i | y, x_<i) of those, category summed out.
        q_at: maps (slot (N,), candidates (N, W)) to q(. | y, drafted prefix of that
            length) as (N, W), zero for slot = b: :func:`greedy_branch_at` or
            :func:`soft_at` with all but their last two arguments given.
        tokens, p: (N, b + 1, W) the target's support and probabilities at every slot.
        generator: on the device of p, for the uniform numbers and the last draw.
        uniform: (N, b) in [0, 1), instead of numbers drawn from ``generator``.
    """
    if uniform is None:
        uniform = torch.rand(drafted.shape, generator=generator, device=p.device)
    acceptance = accept_ratio(probability_on_support(tokens[:, :-1], p[:, :-1], drafted), q_drafted)
    accepted = leading_accepts(acceptance, uniform)
    rows = torch.arange(len(accepted), device=accepted.device)
    candidates, p_here = tokens[rows, accepted], p[rows, accepted]
    law = residual_distribution(p_here, q_at(accepted, candidates))
    drawn = torch.multinomial(law, 1, generator=generator)
    return BlockOutcome(accepted, candidates.gather(-1, drawn).squeeze(-1), acceptance)


# -- proposals: from a drafter pass to a drafted block and its q ---------------------------------


MODES = ("greedy_branch", "soft", "independent", "tree")


@dataclass
class Proposal:
    """Drafted blocks, with what verification needs to know of q.

    Attributes:
        drafted: (N, d) target token ids.
        category: (N,) drawn category z.
        q_drafted: (N, d) float32 q(x_i | y, x_<i) of the drafted tokens, category summed out.
        q_at: (slot (N,), candidates (N, W)) to q after that many drafted tokens, (N, W) float32.
    """

    drafted: Tensor
    category: Tensor
    q_drafted: Tensor
    q_at: Callable[[Tensor, Tensor], Tensor]


def check_mode(mode: str, num_categories: int) -> None:
    """Refuse an unknown mode, or independent sampling with K > 1.

    Raises:
        DBlastError: see above.
    """
    if mode not in MODES:
        raise DBlastError(f"unknown proposal mode {mode!r}; the modes are {', '.join(MODES)}")
    if mode == "independent" and num_categories > 1:
        raise DBlastError(f"independent proposals need a drafter with K = 1, not {num_categories}; use mode='soft'")


def draw_category(log_prior: Tensor, generator: torch.Generator | None) -> Tensor:
    """z ~ q(z | y) of every block: (N, K) to (N,). K = 1 draws nothing."""
    if log_prior.shape[1] == 1:
        return torch.zeros(len(log_prior), dtype=torch.long, device=log_prior.device)
    return torch.multinomial(log_prior.exp(), 1, generator=generator).squeeze(-1)


def greedy_branch_proposal(branch_tokens: Tensor, log_prior: Tensor, category: Tensor) -> Proposal:
    """The whole greedy block of one branch (eq. 18-20).

    Args:
        branch_tokens: (N, K, d) greedy token of every branch.
        log_prior: (N, K) at the category temperature in use.
        category: (N,) drawn from it.
    """
    drafted = branch_tokens[torch.arange(len(category), device=category.device), category]

    def q_at(slot: Tensor, candidates: Tensor) -> Tensor:
        return greedy_branch_at(branch_tokens, log_prior, drafted, slot, candidates)

    return Proposal(drafted, category, greedy_branch_conditional(branch_tokens, log_prior, drafted), q_at)


def draw_columns(position_log_q: Tensor, category: Tensor, generator: torch.Generator | None) -> Tensor:
    """One column per position, each from its own q_i(. | y, z): (N, K, d, V') and (N,) to (N, d)."""
    chosen = position_log_q[torch.arange(len(category), device=category.device), category]
    return torch.multinomial(chosen.exp().flatten(0, 1), 1, generator=generator).view(chosen.shape[:2])


def soft_proposal(
    position_log_q: Tensor,
    log_prior: Tensor,
    category: Tensor,
    column: Tensor,
    token_ids: Tensor | None = None,
    columns: Tensor | None = None,
) -> Proposal:
    """A block sampled inside one branch (eq. 12). With K = 1 this is the independent proposal.

    Args:
        position_log_q: (N, K, d, V') log q_i(. | y, z).
        log_prior: (N, K) at the category temperature in use.
        category: (N,) drawn from it.
        column: (N, d) from :func:`draw_columns`.
        token_ids: (V',) target id of every column; None if columns are target ids.
        columns: (V,) column of every target id, -1 for ids that are never drafted.
    """
    index = column[:, None, :, None].expand(*position_log_q.shape[:3], 1)
    log_q = position_log_q.gather(-1, index).squeeze(-1)

    def q_at(slot: Tensor, candidates: Tensor) -> Tensor:
        candidates = candidates if columns is None else columns[candidates]
        return soft_at(position_log_q, log_prior, log_q, slot, candidates)

    drafted = column if token_ids is None else token_ids[column]
    return Proposal(drafted, category, soft_block_conditional(log_q, log_prior), q_at)


def propose(
    drafter: DBlastDrafter,
    output: DraftOutput,
    length: int,
    *,
    mode: str = "greedy_branch",
    category_temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Proposal:
    """Draft the first ``length`` positions of every block.

    Raises:
        DBlastError: negative category temperature.
    """
    hidden, log_prior = output.branch_hidden[:, :, :length], output.log_prior(category_temperature)
    category = draw_category(log_prior, generator)
    if mode == "greedy_branch":
        return greedy_branch_proposal(drafter.greedy_tokens(hidden), log_prior, category)
    token_ids = columns = None
    if drafter.config.draft_vocab_size:
        token_ids = drafter.draft_token_ids
        columns = torch.full((drafter.config.vocab_size,), -1, device=token_ids.device)
        columns[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    position_log_q = drafter.logits(hidden).log_softmax(-1)
    column = draw_columns(position_log_q, category, generator)
    return soft_proposal(position_log_q, log_prior, category, column, token_ids, columns)
