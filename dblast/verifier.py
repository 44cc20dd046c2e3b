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

from dataclasses import dataclass

import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter, DraftOutput
from dblast.errors import DBlastError
from dblast.support.checks import check_finite, check_number


def _real(x: Tensor) -> Tensor:
    """At least float32: half precision is widened, float64 kept."""
    return x if x.dtype == torch.float64 else x.float()


def branch_posterior(log_q: Tensor, log_prior: Tensor) -> Tensor:
    """q(z | y, x_<=i), what the first i tokens of a block say of its branch, for every i = 0..b.

    Proportional to q(z | y) prod_{j<=i} q_j(x_j | y, z).

    Args:
        log_q: (N, K, b) log q_i(x_i | y, z) of the block's tokens; -inf is a probability of zero.
        log_prior: (N, K) log q(z | y), already at the wanted category temperature.

    Returns:
        (N, K, b + 1); zero for every branch after a prefix that none can draft.
    """
    joint = torch.cat([_real(log_prior).unsqueeze(-1), _real(log_q)], dim=-1).cumsum(-1)
    top = joint.amax(1, keepdim=True)
    weight = (joint - top.masked_fill(top == float("-inf"), 0.0)).exp()
    # The likeliest branch weighs exactly one: the sum is below that only where no branch is left.
    return weight / weight.sum(1, keepdim=True).clamp(min=1.0)


def soft_conditional(log_q: Tensor, log_prior: Tensor) -> Tensor:
    """q(x_i | y, x_<i) of a block's tokens, category summed out: sum_z q(z | y, x_<i) q_i(x_i | y, z) (eq. 12).

    Args:
        log_q: (N, K, b) log q_i(x_i | y, z).
        log_prior: (N, K) log q(z | y).

    Returns:
        (N, b); zero at and after a token that no branch can draft.
    """
    return (branch_posterior(log_q, log_prior)[..., :-1] * _real(log_q).exp()).sum(1)


def point_masses(branch_tokens: Tensor, tokens: Tensor) -> Tensor:
    """log q_i(x_i | y, z) of branches that can only draft their greedy token: 0 where it is x_i, else -inf (eq. 18).

    (N, K, b) and (N, b) to (N, K, b).
    """
    return torch.zeros(branch_tokens.shape, device=tokens.device).masked_fill(
        branch_tokens != tokens.unsqueeze(1), float("-inf")
    )


def greedy_branch_conditional(branch_tokens: Tensor, log_prior: Tensor, tokens: Tensor) -> Tensor:
    """q_greedy(x_i | y, x_<i) of realised tokens: eq. 12 with point masses for branches, which is eq. 20.

    Args:
        branch_tokens: (N, K, b) greedy token of every branch.
        log_prior: (N, K) log q(z | y), already at the wanted category temperature.
        tokens: (N, b) realised tokens.

    Returns:
        (N, b); zero after a prefix that no branch has.
    """
    return soft_conditional(point_masses(branch_tokens, tokens), log_prior)


def acceptance_given_emitted(q: Tensor, log_p: Tensor) -> Tensor:
    """P(draft token accepted | emitted token is x_j) = min(1, q(x_j) / p(x_j)), elementwise.

    The identity behind replay: a step emits x with probability p(x) and accepts
    it as the draft with probability min(p(x), q(x)).
    """
    return torch.exp(torch.log(_real(q)) - _real(log_p).clamp(min=-60.0)).clamp(max=1.0)


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


# -- proposals: from a drafter pass to a drafted block and its q ---------------------------------


MODES = ("greedy_branch", "soft", "independent", "tree")


@dataclass
class Proposal:
    """Drafted blocks with what verification needs to know of q; as it stands, one of no tokens.

    Attributes:
        drafted: (N, d) target token ids.
        category: (N,) drawn category z, -1 where nothing was drafted.
        posterior: (N, K, d + 1) q(z | y, x_<=i) given the drafted tokens, from :func:`branch_posterior`.
        q_drafted: (N, d) q(x_i | y, x_<i) of the drafted tokens, category summed out.
    """

    drafted: Tensor
    category: Tensor
    posterior: Tensor
    q_drafted: Tensor

    def branch_q(self, slot: Tensor, candidates: Tensor) -> Tensor:
        """q_i(v | y, z) of candidate tokens at one slot of every block: (N,) in 0..d - 1, (N, W) to (N, K, W)."""
        raise NotImplementedError

    def q(self, slot: Tensor, candidates: Tensor) -> Tensor:
        """q(v | y, x_<i) = sum_z q(z | y, x_<i) q_i(v | y, z) of candidate tokens (eq. 12, eq. 20).

        Args:
            slot: (N,) number of drafted tokens before, 0..d.
            candidates: (N, W) target token ids.

        Returns:
            (N, W); zero for slot = d, where nothing is drafted.
        """
        length = self.drafted.shape[1]
        if length == 0:
            return torch.zeros(candidates.shape, device=candidates.device)
        weight = self.posterior[torch.arange(len(slot), device=slot.device), :, slot] * (slot < length).unsqueeze(-1)
        return (weight.unsqueeze(-1) * self.branch_q(slot.clamp(max=length - 1), candidates)).sum(1)


@dataclass
class GreedyProposal(Proposal):
    """Every branch can only draft its greedy token: ``branch_tokens`` (N, K, d)."""

    branch_tokens: Tensor

    def branch_q(self, slot: Tensor, candidates: Tensor) -> Tensor:
        rows = torch.arange(len(slot), device=slot.device)
        return self.branch_tokens[rows, :, slot].unsqueeze(-1) == candidates.unsqueeze(1)


@dataclass
class SoftProposal(Proposal):
    """Every branch drafts from its own distribution.

    Attributes:
        position_log_q: (N, K, d, V') log q_i(. | y, z).
        columns: (V,) column of every target id, -1 for ids that are never drafted; None if columns are target ids.
    """

    position_log_q: Tensor
    columns: Tensor | None = None

    def branch_q(self, slot: Tensor, candidates: Tensor) -> Tensor:
        column = candidates if self.columns is None else self.columns[candidates]
        here = self.position_log_q[torch.arange(len(slot), device=slot.device), :, slot]
        index = column.clamp(min=0).unsqueeze(1).expand(-1, here.shape[1], -1)
        return _real(here.gather(-1, index)).exp() * (column >= 0).unsqueeze(1)


def check_mode(mode: str, num_categories: int) -> None:
    """Refuse an unknown mode, or independent sampling with K > 1.

    Raises:
        DBlastError: see above.
    """
    if mode not in MODES:
        raise DBlastError(f"unknown proposal mode {mode!r}; the modes are {', '.join(MODES)}")
    if mode == "independent" and num_categories > 1:
        raise DBlastError(f"independent proposals need a drafter with K = 1, not {num_categories}; use 'soft'")


def check_drafting(drafter: DBlastDrafter, mode: str, category_temperature: float) -> None:
    """Refuse arguments of :func:`propose` that this drafter cannot work with.

    Raises:
        DBlastError: see above.
    """
    check_mode(mode, drafter.config.num_categories)
    check_number("the category temperature", category_temperature, least=0)


def check_output(output: DraftOutput) -> None:
    """Refuse a drafter pass that came out as NaN or infinity: compared with p, it would accept or reject at random.

    Raises:
        DBlastError: see above.
    """
    check_finite(output.branch_hidden, "the drafter's hidden states")
    check_finite(output.prior_logits, "the drafter's category logits")


def draw_category(log_prior: Tensor, generator: torch.Generator | None) -> Tensor:
    """z ~ q(z | y) of every block: (N, K) to (N,). K = 1 draws nothing."""
    if log_prior.shape[1] == 1:
        return torch.zeros(len(log_prior), dtype=torch.long, device=log_prior.device)
    return torch.multinomial(log_prior.exp(), 1, generator=generator).squeeze(-1)


def draw_columns(position_log_q: Tensor, category: Tensor, generator: torch.Generator | None) -> Tensor:
    """One column per position, each from its own q_i(. | y, z): (N, K, d, V') and (N,) to (N, d)."""
    chosen = position_log_q[torch.arange(len(category), device=category.device), category]
    return torch.multinomial(chosen.exp().flatten(0, 1), 1, generator=generator).view(chosen.shape[:2])


def nothing_drafted(anchor: Tensor) -> Proposal:
    """The proposal of no tokens for N blocks: verifying it is a plain decoding step. ``anchor`` is (N,)."""
    nothing = torch.empty(len(anchor), 0, device=anchor.device)
    return Proposal(nothing.long(), torch.full_like(anchor, -1), nothing.unsqueeze(1), nothing)


def greedy_branch_proposal(branch_tokens: Tensor, log_prior: Tensor, category: Tensor) -> GreedyProposal:
    """The whole greedy block of one branch (eq. 18-20).

    Args:
        branch_tokens: (N, K, d) greedy token of every branch.
        log_prior: (N, K) at the category temperature in use.
        category: (N,) drawn from it.
    """
    drafted = branch_tokens[torch.arange(len(category), device=category.device), category]
    log_q = point_masses(branch_tokens, drafted)
    posterior, q_drafted = branch_posterior(log_q, log_prior), soft_conditional(log_q, log_prior)
    return GreedyProposal(drafted, category, posterior, q_drafted, branch_tokens)


def soft_proposal(
    position_log_q: Tensor,
    log_prior: Tensor,
    category: Tensor,
    column: Tensor,
    token_ids: Tensor | None = None,
    columns: Tensor | None = None,
) -> SoftProposal:
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
    drafted = column if token_ids is None else token_ids[column]
    posterior, q_drafted = branch_posterior(log_q, log_prior), soft_conditional(log_q, log_prior)
    return SoftProposal(drafted, category, posterior, q_drafted, position_log_q, columns)


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
        DBlastError: unknown mode, a category temperature that is negative or not finite, or a drafter whose states or
            logits are not finite.
    """
    check_drafting(drafter, mode, category_temperature)
    if mode == "tree":
        raise DBlastError("a tree is no block of one branch; draft it with dblast.trees.draft_tree")
    check_output(output)
    hidden, log_prior = output.branch_hidden[:, :, :length], output.log_prior(category_temperature)
    category = draw_category(log_prior, generator)
    if mode == "greedy_branch":
        return greedy_branch_proposal(drafter.greedy_tokens(hidden), log_prior, category)
    token_ids = columns = None
    if drafter.config.draft_vocab_size:
        token_ids = drafter.draft_token_ids
        columns = torch.full((drafter.config.vocab_size,), -1, device=token_ids.device)
        columns[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    logits = drafter.logits(hidden)
    check_finite(logits.amax(-1), "the drafter's logits")
    position_log_q = logits.log_softmax(-1)
    column = draw_columns(position_log_q, category, generator)
    return soft_proposal(position_log_q, log_prior, category, column, token_ids, columns)


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
