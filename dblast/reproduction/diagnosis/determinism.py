"""The paper's Figure 1: accepted length of one draft step by how decided the target is (early determinism, eq. 24)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter, log_category_prior
from dblast.replay import expected_accepted
from dblast.reproduction.diagnosis.continuations import Continuations
from dblast.reproduction.estimates import Estimate, joint_error, ratio_with_influence
from dblast.trajectories import Trajectory, pack
from dblast.verifier import greedy_branch_acceptance

#: Edges of the paper's five bins of D_b.
EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

#: Trajectories that share one drafter pass.
ROWS_PER_PASS = 32


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
    # A pass takes trajectories that are cut equally often.
    cuts: dict[int, list[Tensor]] = {}
    for r in row.unique().tolist():
        places = (row == r).nonzero().squeeze(-1)
        cuts.setdefault(len(places), []).append(places)
    passes = [group[i : i + ROWS_PER_PASS] for group in cuts.values() for i in range(0, len(group), ROWS_PER_PASS)]
    for group in passes:
        chosen = [trajectories[int(row[places[0]])] for places in group]
        batch = pack(chosen, [emitted[places] for places in group], drafter.config.block_length).to(device)
        with drafter.in_precision(precision):
            out = batch.run(drafter)
            tokens = drafter.greedy_tokens(out.branch_hidden).cpu()
        prior = log_category_prior(out.prior_logits, category_temperature).float().cpu()
        for i, place in enumerate(torch.cat(group).tolist()):
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


def _contributions(values: np.ndarray, clusters: np.ndarray) -> tuple[float, pd.Series]:
    """Mean over points, and what every cluster contributes to its error: the squares add up to the variance."""
    frame = pd.DataFrame({"cluster": clusters, "value": values}).groupby("cluster").value.agg(["sum", "size"])
    mean, influence = ratio_with_influence(frame["sum"].to_numpy(), frame["size"].to_numpy())
    n = len(frame)
    # So scaled, their squares add up to the squared standard error of the mean influence.
    return mean, pd.Series(influence, index=frame.index) / (np.sqrt(n * (n - 1)) if n > 1 else np.nan)


def _compare(points: pd.DataFrame) -> dict[str, tuple[float, pd.Series]]:
    """Baseline, dependent drafts and relative gain (per cent) over the given points, with contributions by prompt."""
    clusters = points.prompt_id.to_numpy()
    (base, base_part), (ours, our_part) = (
        _contributions(points[name].to_numpy(), clusters) for name in ("DFlash", "DBlast")
    )
    if base > 0:
        gain = 100 * (ours / base - 1), 100 * (our_part - (ours / base) * base_part) / base
    else:
        gain = float("nan"), base_part * np.nan
    return {"dflash": (base, base_part), "dblast": (ours, our_part), "gain": gain}


def _wide(points: pd.DataFrame) -> pd.DataFrame:
    """One row per truncation point: ``prompt_id, point, determinism, DFlash, DBlast``, seeds averaged."""
    index = ["prompt_id", "point", "determinism"]
    return points.pivot_table(index=index, columns="method", values="accepted_length", aggfunc="mean").reset_index()


def _with_seeds(
    points: pd.DataFrame, statistic: Callable[[pd.DataFrame], float], contributions: pd.Series
) -> tuple[float, float]:
    """Standard error over prompts and fine-tuning seeds, and its degrees of freedom.

    The seeds' part is that of the statistic made anew from every seed's points.
    """
    prompts = float(np.sqrt((contributions**2).sum(skipna=False))), len(contributions) - 1
    seeds = sorted(points.seed.unique())
    if len(seeds) < 2:
        return prompts
    values = [statistic(_wide(points[points.seed == seed])) for seed in seeds]
    return joint_error(prompts, (np.std(values, ddof=1) / np.sqrt(len(seeds)), len(seeds) - 1))


def _inside(points: pd.DataFrame, low: float, high: float) -> pd.DataFrame:
    # The last bin holds D_b = 1 itself.
    return points[(points.determinism >= low) & ((points.determinism < high) | (high >= 1.0))]


def determinism_bins(points: pd.DataFrame, edges: Sequence[float] = EDGES) -> pd.DataFrame:
    """Figure 1 and Table 5: accepted length by bin of D_b, baseline against dependent drafts.

    Points of one prompt are not independent of each other: standard errors are
    over prompts (clusters), paired for the gain, and include the noise of
    fine-tuning seeds where there are several.

    Args:
        points: one row per truncation point, seed and method: ``target, split,
            prompt_id, point, determinism, method, seed, accepted_length``, methods
            "DFlash" and "DBlast"; seeds are averaged point by point.

    Returns:
        Per target, split and bin that holds at least one point: ``bin_low,
        bin_high, n`` (points), ``prompts, seeds`` and ``dflash, dblast, gain`` (per
        cent), each with ``_error`` and the ends of its 95 % interval, ``_low, _high``
        (NaN gain where the baseline accepts nothing, NaN errors for a single prompt).
    """
    rows = []
    for (target, split), part in points.groupby(["target", "split"], observed=True, sort=False):
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            inside = _inside(part, low, high)
            if inside.empty:
                continue
            wide = _wide(inside)
            row = {"target": target, "split": split, "bin_low": low, "bin_high": high, "n": len(wide)}
            row |= {"prompts": wide.prompt_id.nunique(), "seeds": inside.seed.nunique()}
            for name, (value, contributions) in _compare(wide).items():
                error, freedom = _with_seeds(inside, lambda w, name=name: _compare(w)[name][0], contributions)
                row |= Estimate(value, error, row["prompts"], row["seeds"], freedom).columns(name)
            rows.append(row)
    return pd.DataFrame(rows)


def gain_by_determinism(points: pd.DataFrame, threshold: float = EDGES[1]) -> pd.DataFrame:
    """Figure 1's claim as one number: relative gain where D_b < threshold minus that everywhere else, in points.

    Returns:
        Per target and split: ``low, rest`` (gains in per cent), ``difference, standard_error, freedom, n`` (prompts), ``seeds``.
    """

    def shift(wide: pd.DataFrame) -> tuple[float, float, pd.Series, pd.Series]:
        left, right = (_compare(_inside(wide, *span))["gain"] for span in ((0.0, threshold), (threshold, 1.0)))
        return left[0], right[0], left[1], right[1]

    rows = []
    for (target, split), part in points.groupby(["target", "split"], observed=True, sort=False):
        wide = _wide(part)
        if _inside(wide, 0.0, threshold).empty or _inside(wide, threshold, 1.0).empty:
            continue
        low, rest, low_part, rest_part = shift(wide)
        # A prompt may have points on both sides.
        both = low_part.subtract(rest_part, fill_value=0.0)
        error, freedom = _with_seeds(part, lambda w: shift(w)[0] - shift(w)[1], both)
        names = {"target": target, "split": split, "low": low, "rest": rest, "difference": low - rest}
        rows.append(names | {"standard_error": error, "freedom": freedom, "n": wide.prompt_id.nunique(), "seeds": part.seed.nunique()})
    return pd.DataFrame(rows)
