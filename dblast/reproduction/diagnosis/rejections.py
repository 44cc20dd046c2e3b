"""Where in the draft block acceptance is lost, and why, for the greedy-branch proposal (eq. 18-20).

Along a target-sampled block x_1 .. x_b, with A_j = P(draft token j accepted | emitted token is x_j):

* ``reached_j`` = prod_{i<j} A_i: slot j's draft token is looked at;
* ``accepted_j`` = reached_j A_j, whose sum over j is the expected accepted length;
* lost_j = reached_j (1 - A_j), split by the first of these causes that holds of the emitted token x_j:

  1. ``underweighted``: some branch that agrees with the accepted prefix offers x_j, so q > 0, but q < p;
  2. ``other_branch``: none of those does, but a branch that the prefix has already contradicted offers x_j here;
  3. ``not_offered``: no branch offers it, yet it is among the drafter's k likeliest tokens at this position
     under the branch-averaged marginal q_i(v | y) = sum_z pi_z q_i(v | y, z);
  4. ``unknown``: it is not among those either.

The first three are losses of a token that the drafter knew and did not use. A
branch of prior zero is never drawn: it offers nothing, so at Z_T = 0 a drafter
of any K is split like the one branch it drafts.

The replay identity behind A_j is that of :mod:`dblast.replay`. Averages are
uniform over the anchors whose whole block was emitted, as ``anchor_accepted`` of
:func:`dblast.replay.score` is (or over every second one, say); they are not the online loop's.

Shapes: N blocks, K categories, b draft positions, V' draft vocabulary, k candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter, log_category_prior, most_likely
from dblast.errors import DBlastError
from dblast.proposals import greedy_branch_conditional
from dblast.reproduction.estimates import ratio_with_influence, standard_error
from dblast.support.progress import progress
from dblast.trajectories import Trajectory, pack_first
from dblast.verifier import acceptance_given_emitted

#: Why a drafted token was lost, in the order of the tests.
CAUSES = ("underweighted", "other_branch", "not_offered", "unknown")

#: What is known of every slot; accepted and the causes add up to reached.
QUANTITIES = ("reached", "accepted", *CAUSES)

#: Most logits (N, K, b, V') that exist at once while candidates are chosen: 8 MB of float32; much more is slower.
LOGITS_AT_ONCE = 2**21


def rejection_split(
    branches: Tensor,
    log_prior: Tensor,
    candidates: Tensor,
    tokens: Tensor,
    log_p: Tensor,
    valid: Tensor | None = None,
) -> dict[str, Tensor]:
    """What happens at every slot of realised blocks, and why acceptance is lost there.

    Args:
        branches: (N, K, b) greedy token of every branch.
        log_prior: (N, K) log q(z | y), already at the wanted category temperature; -inf is a prior of zero.
        candidates: (N, b, k) the drafter's likeliest tokens at every slot, in any order.
        tokens: (N, b) emitted tokens.
        log_p: (N, b) their log-probability under the target.
        valid: (N, b) bool, True on the leading slots that exist; everything is zero on the others.

    Returns:
        :data:`QUANTITIES` by name, each (N, b) float32 in [0, 1]: probabilities
        given that the emitted tokens are these, hence expected tokens per block.
    """
    q = greedy_branch_conditional(branches, log_prior.float(), tokens)
    accept = acceptance_given_emitted(q, log_p.float())
    if valid is not None:
        accept = accept * valid
    accepted = accept.cumprod(-1)
    reached = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=-1)
    if valid is not None:
        reached = reached * valid
    lost = reached - accepted

    drawn = log_prior > float("-inf")
    offered_by_any = ((branches == tokens.unsqueeze(1)) & drawn.unsqueeze(-1)).any(1)
    likely = (candidates == tokens.unsqueeze(-1)).any(-1)
    split = {"reached": reached, "accepted": accepted}
    open_cases = torch.ones_like(offered_by_any)
    for cause, holds in zip(CAUSES, (q > 0, offered_by_any, likely, torch.ones_like(likely)), strict=True):
        split[cause] = lost * (open_cases & holds)
        open_cases = open_cases & ~holds
    return split


@torch.no_grad()
def branches_and_candidates(
    drafter: DBlastDrafter, branch_hidden: Tensor, log_prior: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Greedy branches, and the k likeliest tokens of every slot under q_i(v | y) = sum_z pi_z q_i(v | y, z).

    Args:
        branch_hidden: (N, K, b, H).
        log_prior: (N, K) at the wanted category temperature.
        k: 1..V'.

    Returns:
        (N, K, b) as :meth:`DBlastDrafter.greedy_tokens` gives them, and (N, b, k), likeliest first: target token ids.

    Raises:
        DBlastError: k below 1, or more than the drafter's vocabulary has tokens.
    """
    size = drafter.config.draft_vocab_size or drafter.config.vocab_size
    if k < 1:
        raise DBlastError(f"the number of candidates k must be at least 1, got {k}")
    if k > size:
        raise DBlastError(f"the number of candidates k must not exceed the {size} tokens that can be drafted, got {k}")
    blocks = max(1, LOGITS_AT_ONCE // (branch_hidden.shape[1] * branch_hidden.shape[2] * size))
    greedy, likeliest = [], []
    for hidden, prior in zip(branch_hidden.split(blocks), log_prior.split(blocks), strict=True):
        logits = drafter.logits(hidden)
        greedy.append(most_likely(logits))
        # In place, as this is the largest tensor; in logs, as small probabilities would underflow into ties.
        logits += (prior.unsqueeze(-1) - logits.logsumexp(-1)).unsqueeze(-1)
        likeliest.append(logits.logsumexp(1).topk(k, dim=-1).indices)
    both = torch.cat(greedy), torch.cat(likeliest)
    return tuple(drafter.draft_token_ids[best] for best in both) if drafter.config.draft_vocab_size else both


@torch.no_grad()
def _split_sums(
    drafter: DBlastDrafter, trajectory: Trajectory, category_temperature: float, k: int, every: int, precision: torch.dtype
) -> tuple[int, dict[str, Tensor]]:
    """Number of chosen anchors (all with a full block), and :data:`QUANTITIES` summed over them, each (b,) float64."""
    b = drafter.config.block_length
    anchors = len(range(0, len(trajectory.response_ids) - b + 1, every))
    if anchors == 0:
        return 0, {name: torch.zeros(b, dtype=torch.float64) for name in QUANTITIES}
    device = drafter.device
    batch = pack_first(trajectory, anchors, b, every).to(device)
    with drafter.in_precision(precision):
        out = batch.run(drafter)
        prior = log_category_prior(out.prior_logits, category_temperature)
        branches, candidates = branches_and_candidates(drafter, out.branch_hidden, prior, k)
    split = rejection_split(branches, prior, candidates, batch.tokens, batch.log_p)
    return anchors, {name: value.cpu().double().sum(0) for name, value in split.items()}


def score_rejections(
    drafter: DBlastDrafter,
    trajectories: Iterable[Trajectory],
    category_temperature: float,
    *,
    k: int = 4,
    every: int = 1,
    precision: torch.dtype = torch.float32,
    description: str | None = None,
) -> pd.DataFrame:
    """Replay a drafter's greedy-branch proposal on trajectories, slot by slot.

    A bar is shown if ``description`` is given.

    Args:
        category_temperature: Z_T of the prior; without effect at K = 1.
        k: candidates of the marginal that count as known; the same for every K
            that is to be compared.
        every: only the anchors after 0, ``every``, 2 ``every``, ... emitted tokens.
            Neighbouring blocks overlap, so half of them say nearly as much as all.
        precision: of the drafter's pass.

    Returns:
        One row per trajectory and slot with ``prompt_id, task, position`` (1..b),
        ``anchors`` (number of those chosen with a full block) and :data:`QUANTITIES`, expected
        tokens summed over those anchors. A response shorter than b has none: its
        rows are zero.

    Raises:
        DBlastError: Z_T negative or not a number at K > 1; k outside 1..V'; ``every`` below 1.
    """
    if every < 1:
        raise DBlastError(f"every (the step between anchors) must be at least 1, got {every}")
    drafter.eval()
    trajectories = list(trajectories)
    if drafter.config.num_categories <= 1:
        category_temperature = 1.0  # result tables write NaN there
    elif not category_temperature >= 0:
        raise DBlastError(f"category temperature must be a number that is not negative, got {category_temperature}")
    rows = []
    with progress(len(trajectories), description, unit="trajectory") as bar:
        for trajectory in trajectories:
            anchors, sums = _split_sums(drafter, trajectory, category_temperature, k, every, precision)
            for i in range(drafter.config.block_length):
                names = {"prompt_id": trajectory.prompt_id, "task": trajectory.task}
                names |= {"position": i + 1, "anchors": anchors}
                rows.append(names | {name: float(value[i]) for name, value in sums.items()})
            bar.update()
    return pd.DataFrame(rows, columns=["prompt_id", "task", "position", "anchors", *QUANTITIES])


def summarise_rejections(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Average rows of :func:`score_rejections` over trajectories, group by group and slot by slot.

    Trajectories without anchors do not count, and a group of nothing else has no row.

    Args:
        rows: from :func:`score_rejections`, with whatever columns name the groups.
        by: those columns; empty pools everything. NaN is a group of its own.

    Returns:
        ``by``, ``position``, then :data:`QUANTITIES` in tokens per anchor,
        ``conditional_acceptance`` (accepted over reached, both summed) with its
        ``standard_error`` over prompts, and ``n``, the number of prompts. The
        trajectories of a prompt in a group are one unit. Where no slot was ever
        reached the conditional acceptance is NaN.

    Raises:
        DBlastError: a column is missing, or no trajectory has an anchor with a full block.
    """
    groups = [*by, "position"]
    needed = [*groups, "task", "prompt_id", "anchors", *QUANTITIES]
    if missing := [name for name in needed if name not in rows.columns]:
        raise DBlastError(f"the rejection rows have no column {', '.join(missing)}")
    rows = rows[rows.anchors > 0]
    if rows.empty:
        raise DBlastError("no rejections to summarise: no trajectory has an anchor with a full block")
    table = []
    for names, group in rows.groupby(groups, observed=True, dropna=False):
        prompts = group.groupby(["task", "prompt_id"], observed=True)[["anchors", *QUANTITIES]].sum()
        conditional = error = float("nan")
        if prompts.reached.sum() > 0:
            conditional, influence = ratio_with_influence(prompts.accepted.to_numpy(), prompts.reached.to_numpy())
            error = standard_error(influence)
        table.append(
            dict(zip(groups, names, strict=True))
            | {name: prompts[name].sum() / prompts.anchors.sum() for name in QUANTITIES}
            | {"conditional_acceptance": conditional, "standard_error": error, "n": len(prompts)}
        )
    return pd.DataFrame(table)
