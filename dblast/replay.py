"""Replay: exact scores of a drafter on stored target trajectories, without running the target.

In any exact speculative step P(emit v) = p(v) and P(emit v, and it was the
accepted draft) = min(p(v), q(v)). A target-sampled trajectory is therefore a
sample of the decoder's output, and the accept/reject events along it are
independent coin flips with probability min(1, q / p). Two numbers follow:

* the expected accepted length of one draft step at an anchor, and
* by a backward recursion over positions, the expected number of target passes
  that the online loop needs to emit the whole trajectory.

A tree (:mod:`dblast.trees`) accepts as far as the stored text runs inside it: no coin
is tossed, and the passes along a stored text are a number, not an expectation.

Accepted length counts draft tokens per target pass without the bonus or
replacement token: (emitted - passes) / passes. A pass that ends the sequence
with an accepted token emits no bonus; that last token then counts as the pass's
own, so that accepted + passes = emitted always holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter, log_category_prior
from dblast.errors import DBlastError
from dblast.proposals import MODES, SAMPLED, branch_log_q, check_drafting, check_output
from dblast.support.checks import check_number, check_whole
from dblast.support.progress import progress
from dblast.trajectories import Trajectory, pack_first
from dblast.trees import TREE_NODES, branch_trie, draft_trees
from dblast.verifier import acceptance_given_emitted, soft_acceptance


def _check_acceptance(acceptance: Tensor) -> None:
    # Written so that NaN fails.
    if not bool(((acceptance >= 0) & (acceptance <= 1)).all()):
        raise DBlastError("acceptance probabilities must lie between 0 and 1; these hold NaN or another number")


def expected_accepted(acceptance: Tensor, valid: Tensor | None = None) -> Tensor:
    """Expected accepted length of one draft step: sum_l prod_{j<=l} a_j over the last dimension.

    ``valid``, of the same shape, is False from the end of a trajectory on.

    Raises:
        DBlastError: an acceptance that is NaN or outside [0, 1], before the end.
    """
    if valid is not None:
        acceptance = acceptance.masked_fill(~valid.bool(), 0.0)
    _check_acceptance(acceptance)
    return acceptance.cumprod(-1).sum(-1)


def expected_passes(acceptance: Tensor, length: Tensor | None = None) -> Tensor:
    """Expected target passes of the online loop along each trajectory.

    Args:
        acceptance: (T, n, b); entry [t, a, j] is the probability that the draft
            token for position a + j is accepted, given that the loop anchors
            after a tokens and that the earlier tokens of the block were accepted.
            Entries at or past a trajectory's length may hold anything.
        length: (T,) real lengths, 0..n (default n).

    Returns:
        (T,) float64.

    Raises:
        DBlastError: an acceptance that is NaN or outside [0, 1] before the end, or a length outside 0..n.
    """
    count, n, b = acceptance.shape
    length = torch.full((count,), n) if length is None else length
    if length.shape != (count,) or not bool(((length >= 0) & (length <= n)).all()):
        raise DBlastError(f"lengths must be one number from 0 to {n} for each of the {count} trajectories")
    position = torch.arange(n).unsqueeze(-1) + torch.arange(b)
    acceptance = acceptance.masked_fill(position >= length[:, None, None], 0.0)
    _check_acceptance(acceptance)
    reach = acceptance.double().cumprod(-1)
    ones = torch.ones(count, n, 1, dtype=torch.float64)
    reach = torch.cat([ones, reach, torch.zeros(count, n, 1, dtype=torch.float64)], dim=-1)
    stop = reach[..., :-1] - reach[..., 1:]  # P(exactly l accepted), l = 0..b
    # left[a]: expected passes still needed after a emitted tokens; zero at and past the end.
    left = torch.zeros(count, n + b + 1, dtype=torch.float64)
    for a in range(n - 1, -1, -1):
        # l accepted tokens and one of the target's own move the anchor on by l + 1.
        step = 1 + (stop[:, a] * left[:, a + 1 : a + b + 2]).sum(-1)
        left[:, a] = torch.where(a < length, step, 0.0)
    return left[:, 0]


#: Methods of turning branches into a draft: the paper's, sampling inside the branch (eq. 12), and the trees of the
#: heaviest prefixes and of the K greedy branches.
PROPOSALS = (*MODES, "branches")
#: Logits (anchors * K * b * V') that :func:`sampled_log_q` holds at once: 16 MiB in float32.
DRAFT_LOGITS = 2**22
#: Sampled drafts are scored as far as a slot is reached with this probability (:func:`reached_log_q`).
LEAST_REACH = 1e-6


def _check_proposal(
    drafter: DBlastDrafter, proposal: str, draft_temperatures: Sequence[float] = (1.0,), draft_top_k: int = 0
) -> None:
    if proposal not in PROPOSALS:
        raise DBlastError(f"unknown proposal {proposal!r}; replay knows {', '.join(PROPOSALS)}")
    for draft_temperature in draft_temperatures:
        mode = "tree" if proposal == "branches" else proposal
        check_drafting(drafter, mode, draft_temperature=draft_temperature, draft_top_k=draft_top_k)
    if not drafter.draft_vocabulary_is_set:
        raise DBlastError("the draft vocabulary is not set; call drafter.set_draft_vocabulary(token_ids) and attach()")


def _temperatures(name: str, values: Sequence[float]) -> list[float]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise DBlastError(f"{name} must be a list of numbers, got {values!r}")
    values = list(values)
    if not values:
        raise DBlastError(f"{name} holds no temperature; give at least one")
    for value in values:
        check_number(name, value, least=0)
    return values


def sampled_log_q(
    drafter: DBlastDrafter,
    branch_hidden: Tensor,
    tokens: Tensor,
    draft_temperatures: Sequence[float] = (1.0,),
    draft_top_k: int = 0,
) -> list[Tensor]:
    """log q_i(x_i | y, z) of realised tokens at every draft temperature, from one product with the head.

    Args:
        branch_hidden: (N, K, b, H).
        tokens: (N, b) target token ids.
        draft_temperatures, draft_top_k: T_d > 0 and k_d of :func:`dblast.proposals.branch_log_q`.

    Returns:
        (N, K, b) each; -inf where a branch does not draft the token.
    """
    if not draft_top_k and all(temperature == 1 for temperature in draft_temperatures):
        return [drafter.log_q(branch_hidden, tokens)] * len(draft_temperatures)
    columns = drafter.draft_slot[tokens] if drafter.config.draft_vocab_size else tokens
    columns = columns.unsqueeze(1).expand(branch_hidden.shape[:-1])
    width = drafter.config.draft_vocab_size or drafter.config.vocab_size
    rows = max(1, DRAFT_LOGITS // (branch_hidden[0, ..., 0].numel() * width))
    parts = []
    for some, column in zip(branch_hidden.split(rows), columns.split(rows), strict=True):
        logits, index = drafter.logits(some), column.clamp(min=0).unsqueeze(-1)
        laws = (branch_log_q(logits, temperature, draft_top_k) for temperature in draft_temperatures)
        parts.append([law.gather(-1, index).squeeze(-1).masked_fill(column < 0, float("-inf")) for law in laws])
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


def agreeing_log_q(drafter: DBlastDrafter, branch_hidden: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
    """log q_i(x_i | y, z) of greedy branches, (N, K, b), as far as each agrees with the stored text.

    0 while it does and -inf from its first other token on, or past the end: what a branch would have drafted after
    that token has no weight in eq. 20. So no other rows than these go through the head, slot by slot.

    Args:
        branch_hidden: (N, K, b, H).
        tokens, valid: (N, b) stored tokens, and which exist.
    """
    log_q = torch.full(branch_hidden.shape[:-1], float("-inf"), device=tokens.device)
    alive = torch.ones(branch_hidden.shape[:2], dtype=torch.bool, device=tokens.device)
    for slot in range(tokens.shape[1]):
        anchor, branch = (alive & valid[:, slot, None]).nonzero(as_tuple=True)
        if not len(anchor):
            break
        agrees = drafter.greedy_tokens(branch_hidden[anchor, branch, slot]) == tokens[anchor, slot]
        alive = torch.zeros_like(alive)
        alive[anchor[agrees], branch[agrees]] = True
        log_q[..., slot].masked_fill_(alive, 0.0)
    return log_q


def reached_log_q(
    drafter: DBlastDrafter,
    branch_hidden: Tensor,
    tokens: Tensor,
    valid: Tensor,
    log_p: Tensor,
    draft_temperatures: Sequence[float] = (1.0,),
    draft_top_k: int = 0,
) -> list[Tensor]:
    """:func:`sampled_log_q` as far as a block may be accepted with probability :data:`LEAST_REACH`, and -inf after that.

    q of a mixture is at most that of its best branch, so that slot j is reached with probability at most
    prod_{i<j} max_z min(1, q_i(x_i | y, z) / p(x_i)), whatever Z_T is. Where this is below LEAST_REACH at every draft
    temperature, slots from j on count as rejected. The expected accepted length of a draft falls by less than
    (b - 1) LEAST_REACH. Along a text of n tokens, a loop with the same coins goes another way with a chance below
    LEAST_REACH a pass, and is then at most n passes off: expected passes move by less than n LEAST_REACH of themselves.

    Args:
        tokens, valid, log_p: (N, b) stored tokens, which exist, and their log-probabilities.
    """
    log_q = [torch.full(branch_hidden.shape[:-1], float("-inf"), device=tokens.device) for _ in draft_temperatures]
    reach = torch.ones(len(draft_temperatures), len(tokens), device=tokens.device)
    for slot in range(tokens.shape[1]):
        # Written so that NaN goes on, to be refused.
        rows = (valid[:, slot] & ~(reach < LEAST_REACH).all(0)).nonzero().squeeze(1)
        if not len(rows):
            break
        hidden, here = branch_hidden[rows, :, slot, None], tokens[rows, slot, None]
        for i, table in enumerate(sampled_log_q(drafter, hidden, here, draft_temperatures, draft_top_k)):
            log_q[i][rows, :, slot] = table[..., 0]
            reach[i, rows] *= acceptance_given_emitted(table[..., 0].amax(1).exp(), log_p[rows, slot])
    return log_q


@torch.no_grad()
def trajectory_acceptance(
    drafter: DBlastDrafter,
    trajectory: Trajectory,
    category_temperatures: Sequence[float],
    proposal: str = "greedy_branch",
    precision: torch.dtype = torch.float32,
    draft_temperatures: Sequence[float] = (1.0,),
    draft_top_k: int = 0,
) -> torch.Tensor:
    """Acceptance along a trajectory for every anchor, category temperature and draft temperature.

    Args:
        proposal: one of :data:`PROPOSALS` that draft no trees.
        draft_temperatures, draft_top_k: T_d >= 0 and k_d of sampled proposals; 0 is the greedy branch.

    Returns:
        (Z * D, n, b) float32, draft temperatures innermost: entry [., a, j] is P(draft accepted | emitted is
        the stored token) for slot j of the block anchored after a tokens; zero past the end.

    Raises:
        DBlastError: an unknown proposal, a temperature that is negative or not finite, a drafter without its draft
            vocabulary, or NaN or infinity in the drafter's pass or the trajectory's log-probabilities.
    """
    _check_proposal(drafter, proposal, draft_temperatures, draft_top_k)
    if proposal in ("tree", "branches"):
        raise DBlastError(f"acceptance in a tree is not a coin flip; {proposal!r} is for tree_acceptance()")
    if not bool((trajectory.log_p <= 1e-3).all()):
        raise DBlastError(f"trajectory {trajectory.prompt_id!r} has log-probabilities that are NaN or above zero")
    n = len(trajectory.response_ids)
    device = drafter.device
    batch = pack_first(trajectory, n, drafter.config.block_length).to(device)
    with drafter.in_precision(precision):
        out = batch.run(drafter)
        check_output(out)
        hidden, tokens, valid, log_p = out.branch_hidden, batch.tokens, batch.valid, batch.log_p
        # A draft temperature of zero is the greedy branch.
        temperatures = draft_temperatures if proposal in SAMPLED else [0.0]
        warm = [temperature for temperature in temperatures if temperature]
        log_q = dict(zip(warm, reached_log_q(drafter, hidden, tokens, valid, log_p, warm, draft_top_k), strict=True))
        if len(warm) < len(temperatures):
            log_q[0.0] = agreeing_log_q(drafter, hidden, tokens, valid)
    rows = []
    for temperature in category_temperatures:
        prior = log_category_prior(out.prior_logits, temperature)
        rows += [soft_acceptance(log_q[draft], prior, log_p) * valid for draft in temperatures]
    accept = torch.stack(rows).cpu()
    _check_acceptance(accept)
    return accept


@torch.no_grad()
def tree_acceptance(
    drafter: DBlastDrafter,
    trajectory: Trajectory,
    category_temperatures: Sequence[float],
    nodes: Sequence[int] = (TREE_NODES,),
    proposal: str = "tree",
    precision: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of a trajectory lie inside the tree of every anchor: one drafter pass for all sizes.

    Returns:
        (Z, S, n, b) float32, 1 while the stored text runs inside the tree of that size anchored after a tokens, and
        (Z, S) the mean number of nodes of those trees; S = 1 for ``"branches"``, at most K * b nodes each.

    Raises:
        DBlastError: a proposal that drafts no trees, or a drafter whose pass holds NaN or infinity.
    """
    _check_proposal(drafter, proposal)
    if proposal not in ("tree", "branches"):
        raise DBlastError(f"{proposal!r} drafts no trees; it is for trajectory_acceptance()")
    n = len(trajectory.response_ids)
    batch = pack_first(trajectory, n, drafter.config.block_length).to(drafter.device)
    with drafter.in_precision(precision):
        out = batch.run(drafter)
        check_output(out)
        if proposal == "tree":
            trees = draft_trees(drafter, out, max(nodes), category_temperatures)
        else:
            branches = drafter.greedy_tokens(out.branch_hidden)
            trees = [branch_trie(branches, out.log_prior(temperature)) for temperature in category_temperatures]
            nodes = [branches.shape[1] * branches.shape[2]]
    # The tree of n nodes is the first n of a larger one.
    sizes = torch.tensor(list(nodes), device=drafter.device)
    inside, drafted = [], []
    for tree in trees:
        places = tree.follow(batch.tokens.masked_fill(~batch.valid, -1))
        places = places.masked_fill(places == tree.nodes, max(nodes))
        inside.append(places < sizes.view(-1, 1, 1))
        drafted.append(torch.minimum(tree.valid.sum(1), sizes.unsqueeze(1)).double().mean(1))
    return torch.stack(inside).float().cpu(), torch.stack(drafted).cpu()


def score(
    drafter: DBlastDrafter,
    trajectories: Iterable[Trajectory],
    category_temperatures: Sequence[float] = (1.0,),
    *,
    proposal: str = "greedy_branch",
    nodes: Sequence[int] = (TREE_NODES,),
    draft_temperatures: Sequence[float] = (1.0,),
    draft_top_k: int = 0,
    precision: torch.dtype = torch.float32,
    description: str | None = None,
) -> pd.DataFrame:
    """Replay a drafter on trajectories.

    A bar is shown if ``description`` is given.

    Args:
        proposal: one of :data:`PROPOSALS`.
        nodes: sizes of the trees that ``"tree"`` scores, all in one pass.
        draft_temperatures, draft_top_k: T_d >= 0, crossed with the category temperatures, and k_d of the
            sampled proposals, all in one pass; T_d = 0 is the greedy branch, k_d = 0 sets no limit.

    Returns:
        One row per trajectory and category temperature (and size of tree, or draft temperature) with ``prompt_id, task,
        category_temperature, emitted`` (response tokens), ``passes`` (expected
        target passes of the online loop), ``anchor_accepted`` and ``anchors``
        (sum of expected accepted lengths over anchors with a full block, and
        their number). With K = 1 the temperature has no effect and one row is
        written with temperature NaN. Trees add ``nodes`` (their size; K * b for
        ``"branches"``) and ``drafted`` (mean number of nodes that they really had), sampled
        proposals ``draft_temperature``.

    Raises:
        DBlastError: unknown proposal, trees without nodes, no temperature, or what
            :func:`trajectory_acceptance` refuses.
    """
    temperatures = _temperatures("category_temperatures", category_temperatures)
    draft_temperatures = _temperatures("draft_temperatures", draft_temperatures)
    _check_proposal(drafter, proposal, draft_temperatures, draft_top_k)
    if isinstance(nodes, str) or not isinstance(nodes, Iterable) or not (nodes := list(nodes)):
        raise DBlastError(f"nodes must be a list of tree sizes, got {nodes!r}")
    for size in nodes:
        check_whole("the nodes of a draft tree", size, 1)
    drafter.eval()
    trajectories = list(trajectories)
    single = drafter.config.num_categories <= 1
    temperatures = [1.0] if single else temperatures
    b = drafter.config.block_length
    trees = proposal in ("tree", "branches")
    if proposal == "branches":
        nodes = (max(1, drafter.config.num_categories) * b,)
    rows = []
    with progress(len(trajectories), description, unit="trajectory") as bar:
        for trajectory in trajectories:
            cells = [{"category_temperature": float("nan") if single else temperature} for temperature in temperatures]
            if trees:
                accept, drafted = tree_acceptance(drafter, trajectory, temperatures, nodes, proposal, precision)
                accept = accept.flatten(0, 1)
                cells = [
                    {**cell, "nodes": size, "drafted": float(mean)}
                    for cell, means in zip(cells, drafted, strict=True)
                    for size, mean in zip(nodes, means, strict=True)
                ]
            else:
                accept = trajectory_acceptance(
                    drafter, trajectory, temperatures, proposal, precision, draft_temperatures, draft_top_k
                )
            if proposal in SAMPLED:
                cells = [{**cell, "draft_temperature": value} for cell in cells for value in draft_temperatures]
            n = accept.shape[1]
            passes = expected_passes(accept)
            per_anchor = expected_accepted(accept[:, : max(0, n - b + 1)])
            for i, cell in enumerate(cells):
                rows.append(
                    {
                        "prompt_id": trajectory.prompt_id,
                        "task": trajectory.task,
                        **cell,
                        "emitted": n,
                        "passes": float(passes[i]),
                        "anchor_accepted": float(per_anchor[i].double().sum()),
                        "anchors": per_anchor.shape[1],
                    }
                )
            bar.update()
    return pd.DataFrame(rows)
