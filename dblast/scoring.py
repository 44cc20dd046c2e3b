"""Scoring a drafter on stored trajectories: one parallel pass over all anchors, then replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
import torch

from dblast.anchors import pack_first
from dblast.drafter import DBlastDrafter, log_category_prior
from dblast.progress import progress
from dblast.replay import expected_accepted, expected_passes
from dblast.trajectories import Trajectory
from dblast.verifier import greedy_branch_acceptance, soft_acceptance

#: Methods of turning branches into a draft: the paper's, and sampling inside the branch (eq. 12).
PROPOSALS = ("greedy_branch", "soft")


@torch.no_grad()
def trajectory_acceptance(
    drafter: DBlastDrafter,
    trajectory: Trajectory,
    category_temperatures: Sequence[float],
    proposal: str = "greedy_branch",
    precision: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Acceptance along a trajectory for every anchor and category temperature.

    Returns:
        (Z, n, b) float32: entry [., a, j] is P(draft accepted | emitted is the
        stored token) for slot j of the block anchored after a tokens; zero past the end.
    """
    n = len(trajectory.response_ids)
    device = drafter.device
    batch = pack_first(trajectory, n, drafter.config.block_length).to(device)
    with drafter.in_precision(precision):
        out = batch.run(drafter)
        if proposal == "greedy_branch":
            branches = drafter.greedy_tokens(out.branch_hidden)
        else:
            log_q = drafter.log_q(out.branch_hidden, batch.tokens)
    rows = []
    for temperature in category_temperatures:
        prior = log_category_prior(out.prior_logits, temperature)
        if proposal == "greedy_branch":
            accept = greedy_branch_acceptance(branches, prior, batch.tokens, batch.log_p)
        else:
            accept = soft_acceptance(log_q, prior, batch.log_p)
        rows.append((accept * batch.valid)[:n])
    return torch.stack(rows).cpu()


def score(
    drafter: DBlastDrafter,
    trajectories: Iterable[Trajectory],
    category_temperatures: Sequence[float] = (1.0,),
    *,
    proposal: str = "greedy_branch",
    precision: torch.dtype = torch.float32,
    description: str | None = None,
) -> pd.DataFrame:
    """Replay a drafter on trajectories.

    A bar is shown if ``description`` is given.

    Returns:
        One row per trajectory and category temperature with ``prompt_id, task,
        category_temperature, emitted`` (response tokens), ``passes`` (expected
        target passes of the online loop), ``anchor_accepted`` and ``anchors``
        (sum of expected accepted lengths over anchors with a full block, and
        their number). With K = 1 the temperature has no effect and one row is
        written with temperature NaN.
    """
    drafter.eval()
    trajectories = list(trajectories)
    single = drafter.config.num_categories <= 1
    temperatures = [1.0] if single else list(category_temperatures)
    b = drafter.config.block_length
    rows = []
    with progress(len(trajectories), description, unit="trajectory") as bar:
        for trajectory in trajectories:
            accept = trajectory_acceptance(drafter, trajectory, temperatures, proposal, precision)
            n = accept.shape[1]
            passes = expected_passes(accept)
            per_anchor = expected_accepted(accept[:, : max(0, n - b + 1)])
            for i, temperature in enumerate(temperatures):
                rows.append(
                    {
                        "prompt_id": trajectory.prompt_id,
                        "task": trajectory.task,
                        "category_temperature": float("nan") if single else temperature,
                        "emitted": n,
                        "passes": float(passes[i]),
                        "anchor_accepted": float(per_anchor[i].double().sum()),
                        "anchors": per_anchor.shape[1],
                    }
                )
            bar.update()
    return pd.DataFrame(rows)
