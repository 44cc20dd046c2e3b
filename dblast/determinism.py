"""The paper's Figure 1: accepted length of one draft step by how decided the target is (early determinism, eq. 24)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dblast.anchors import pack
from dblast.continuations import Continuations
from dblast.drafter import DBlastDrafter, log_category_prior
from dblast.replay import expected_accepted
from dblast.trajectories import Trajectory
from dblast.verifier import greedy_branch_acceptance

#: Edges of the paper's five bins of D_b.
EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@torch.no_grad()
def draft_at(
    drafter: DBlastDrafter,
    trajectories: Sequence[Trajectory],
    row: Tensor,
    emitted: Tensor,
    category_temperature: float,
    precision: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """What a drafter offers at chosen truncation points.

    Args:
        row, emitted: (P,) trajectory and number of response tokens before the draft.

    Returns:
        ``(branches, log_prior)``: (P, K, b) greedy blocks as target ids and (P, K), on the CPU.
    """
    drafter.eval()
    device = drafter.device
    branches: dict[int, Tensor] = {}
    priors: dict[int, Tensor] = {}
    for r in row.unique().tolist():
        places = (row == r).nonzero().squeeze(-1)
        batch = pack([trajectories[r]], [emitted[places]], drafter.config.block_length).to(device)
        with torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32):
            out = batch.run(drafter)
            tokens = drafter.greedy_tokens(out.branch_hidden).cpu()
        prior = log_category_prior(out.prior_logits, category_temperature).float().cpu()
        for i, place in enumerate(places.tolist()):
            branches[place], priors[place] = tokens[i], prior[i]
    order = range(len(row))
    return torch.stack([branches[i] for i in order]), torch.stack([priors[i] for i in order])


def accepted_over(continuations: Continuations, branches: Tensor, log_prior: Tensor) -> Tensor:
    """Expected accepted length of one draft step at every prefix, averaged over its M continuations: (P,).

    Args:
        branches: (P, K, b).
        log_prior: (P, K).
    """
    count, m, b = continuations.tokens.shape
    acceptance = greedy_branch_acceptance(
        branches.repeat_interleave(m, dim=0),
        log_prior.repeat_interleave(m, dim=0),
        continuations.tokens.view(-1, b),
        continuations.log_p.view(-1, b),
    )
    return expected_accepted(acceptance, continuations.valid.view(-1, b)).view(count, m).mean(-1)


def _clustered_mean(values: np.ndarray, clusters: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean over points, and every cluster's influence on it (sums over clusters, scaled to a mean over clusters)."""
    frame = pd.DataFrame({"cluster": clusters, "value": values}).groupby("cluster").value.agg(["sum", "size"])
    mean = frame["sum"].sum() / frame["size"].sum()
    return float(mean), ((frame["sum"] - mean * frame["size"]) / frame["size"].mean()).to_numpy()


def _error(influence: np.ndarray) -> float:
    n = len(influence)
    return float(np.std(influence, ddof=1) / np.sqrt(n)) if n > 1 else float("nan")


def determinism_bins(points: pd.DataFrame, edges: Sequence[float] = EDGES) -> pd.DataFrame:
    """Figure 1 and Table 5: accepted length by bin of D_b, baseline against dependent drafts.

    Points of one prompt are not independent of each other: standard errors are
    over prompts (clusters), and the gain's is paired.

    Args:
        points: one row per truncation point, seed and method: ``target, split,
            prompt_id, point, determinism, method, seed, accepted_length``, methods
            "DFlash" and "DBlast"; seeds are averaged point by point.

    Returns:
        Per target, split and bin that holds at least one point: ``bin_low,
        bin_high, n`` (points), ``prompts, dflash, dflash_error, dblast,
        dblast_error, gain, gain_error`` (per cent; NaN errors for a single prompt).
    """
    rows = []
    for (target, split), part in points.groupby(["target", "split"], observed=True, sort=False):
        wide = part.pivot_table(index=["prompt_id", "point"], columns="method", values="accepted_length", aggfunc="mean")
        wide["determinism"] = part.groupby(["prompt_id", "point"]).determinism.first()
        wide = wide.reset_index()
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            # The last bin holds D_b = 1 itself.
            inside = wide[(wide.determinism >= low) & ((wide.determinism < high) | (high == edges[-1]))]
            if inside.empty:
                continue
            clusters = inside.prompt_id.to_numpy()
            base, base_influence = _clustered_mean(inside.DFlash.to_numpy(), clusters)
            ours, our_influence = _clustered_mean(inside.DBlast.to_numpy(), clusters)
            gain = (our_influence - (ours / base) * base_influence) / base if base > 0 else our_influence * np.nan
            rows.append(
                {
                    "target": target,
                    "split": split,
                    "bin_low": low,
                    "bin_high": high,
                    "n": len(inside),
                    "prompts": len(base_influence),
                    "dflash": base,
                    "dflash_error": _error(base_influence),
                    "dblast": ours,
                    "dblast_error": _error(our_influence),
                    "gain": 100 * (ours / base - 1) if base > 0 else float("nan"),
                    "gain_error": 100 * _error(gain),
                }
            )
    return pd.DataFrame(rows)
