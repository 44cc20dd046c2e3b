"""From a drafter pass to a drafted block and its q, in one of three proposal modes.

* ``greedy_branch``: draw a category, draft its greedy tokens; q is eq. 20 (the paper's proposal).
* ``soft``: draw a category, sample every position inside it; q is eq. 12.
* ``independent``: K = 1 only, sample every position from its marginal, as DFlash does when it samples.

Shapes: N blocks, K categories, d drafted positions, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter, DraftOutput
from dblast.errors import DBlastError
from dblast.names import MODES
from dblast.verifier import greedy_branch_at, greedy_branch_conditional, soft_at, soft_block_conditional


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
