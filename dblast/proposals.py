"""Proposals: from a drafter pass to a drafted block and its q (eq. 5, 12, 18-20).

A proposal is a mixture over K branches. After accepted tokens x_<i the next draft token has the law

    q(v | y, x_<i) = sum_z q(z | y, x_<i) q_i(v | y, z),
    q(z | y, x_<i) proportional to q(z | y) prod_{j<i} q_j(x_j | y, z),

which is eq. 12 where branches are distributions, and eq. 20 where each can only draft its greedy token. Verification
and replay read q here and nowhere else.

Shapes: N blocks, K categories, b draft positions (d of them in use), V vocabulary, V' columns of the draft vocabulary
(or the target's), W candidate tokens. Everything is float32; float64 inputs stay float64, which is for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter, DraftOutput
from dblast.errors import DBlastError
from dblast.support.checks import check_finite, check_number, check_whole

#: What can be drafted: the greedy block of one branch (the paper's), tokens sampled inside a branch, the same of a
#: drafter with a single branch, and a tree (:mod:`dblast.trees`).
MODES = ("greedy_branch", "soft", "independent", "tree")
#: Those that draw the draft's tokens, at a draft temperature.
SAMPLED = ("soft", "independent")


def real(x: Tensor) -> Tensor:
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
    joint = torch.cat([real(log_prior).unsqueeze(-1), real(log_q)], dim=-1).cumsum(-1)
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
    return (branch_posterior(log_q, log_prior)[..., :-1] * real(log_q).exp()).sum(1)


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


# -- drafted blocks -------------------------------------------------------------------------------


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
        return real(here.gather(-1, index)).exp() * (column >= 0).unsqueeze(1)


def check_mode(mode: str, num_categories: int) -> None:
    """Refuse an unknown mode, or independent sampling with K > 1."""
    if mode not in MODES:
        raise DBlastError(f"unknown proposal mode {mode!r}; the modes are {', '.join(MODES)}")
    if mode == "independent" and num_categories > 1:
        raise DBlastError(f"independent proposals need a drafter with K = 1, not {num_categories}; use 'soft'")


def check_drafting(
    drafter: DBlastDrafter,
    mode: str,
    category_temperature: float = 1.0,
    draft_temperature: float = 1.0,
    draft_top_k: int = 0,
) -> None:
    """Refuse arguments of :func:`propose` that this drafter cannot work with, or that the mode would ignore."""
    check_mode(mode, drafter.config.num_categories)
    check_number("the category temperature", category_temperature, least=0)
    check_number("the draft temperature", draft_temperature, least=0)
    check_whole("draft_top_k (0 for no limit)", draft_top_k, 0)
    if mode not in SAMPLED and (draft_temperature != 1 or draft_top_k):
        raise DBlastError(f"draft temperature and top-k are for sampled proposals ({', '.join(SAMPLED)}), not {mode}")


def check_output(output: DraftOutput) -> None:
    """Refuse a drafter pass that came out as NaN or infinity: compared with p, it would accept or reject at random."""
    check_finite(output.branch_hidden, "the drafter's hidden states")
    check_finite(output.prior_logits, "the drafter's category logits")


def draw_category(log_prior: Tensor, generator: torch.Generator | None) -> Tensor:
    """z ~ q(z | y) of every block: (N, K) to (N,). K = 1 draws nothing."""
    if log_prior.shape[1] == 1:
        return torch.zeros(len(log_prior), dtype=torch.long, device=log_prior.device)
    return torch.multinomial(log_prior.exp(), 1, generator=generator).squeeze(-1)


def branch_log_q(logits: Tensor, draft_temperature: float = 1.0, draft_top_k: int = 0) -> Tensor:
    """log q_i(v | y, z) = log softmax(logits / T_d) on a branch's own top-k_d columns, -inf on the others.

    Columns tied with the k-th all stay.

    Args:
        logits: (..., V').
        draft_temperature: T_d > 0. Its limit 0 is the greedy branch (eq. 18), which is no density.
        draft_top_k: k_d, 0 for all columns.

    Raises:
        DBlastError: NaN or infinity among the largest logits, which a tiny T_d makes of any.
    """
    scores = logits / draft_temperature
    check_finite(scores.amax(-1), "the drafter's logits (over the draft temperature)")
    if 0 < draft_top_k < scores.shape[-1]:
        least = scores.topk(draft_top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    return scores.log_softmax(-1)


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
    draft_temperature: float = 1.0,
    draft_top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Proposal:
    """Draft the first ``length`` positions of every block.

    Args:
        mode: one of :data:`MODES` but ``"tree"``.
        category_temperature: Z_T >= 0, of the category's draw.
        draft_temperature, draft_top_k: T_d >= 0 and k_d of the tokens' draw inside the branch (:func:`branch_log_q`),
            for ``"soft"`` and ``"independent"``; at T_d = 0 they are ``"greedy_branch"``.

    Raises:
        DBlastError: arguments that :func:`check_drafting` refuses, or a drafter whose states or logits are not finite.
    """
    check_drafting(drafter, mode, category_temperature, draft_temperature, draft_top_k)
    if mode == "tree":
        raise DBlastError("a tree is no block of one branch; draft it with dblast.trees.draft_tree")
    check_output(output)
    hidden, log_prior = output.branch_hidden[:, :, :length], output.log_prior(category_temperature)
    category = draw_category(log_prior, generator)
    if mode == "greedy_branch" or draft_temperature == 0:
        return greedy_branch_proposal(drafter.greedy_tokens(hidden), log_prior, category)
    token_ids = columns = None
    if drafter.config.draft_vocab_size:
        token_ids = drafter.draft_token_ids
        columns = torch.full((drafter.config.vocab_size,), -1, device=token_ids.device)
        columns[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    position_log_q = branch_log_q(drafter.logits(hidden), draft_temperature, draft_top_k)
    column = draw_columns(position_log_q, category, generator)
    return soft_proposal(position_log_q, log_prior, category, column, token_ids, columns)
