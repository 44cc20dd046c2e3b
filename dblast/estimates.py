"""Accepted lengths with errors, gains with paired errors, and the choice of Z_T, from replay scores.

``scores`` has one row per trajectory (see :func:`dblast.scoring.score`). The
accepted length of a set of trajectories is a ratio of sums, (emitted - passes) /
passes; standard errors are over prompts, and two variants scored on the same
trajectories are compared prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dblast.errors import DBlastError
from dblast.replay import ratio_with_influence, standard_error

#: Columns that name a trained variant at an evaluation setting.
VARIANT_COLUMNS = ["target", "method", "K", "loss", "construction", "setting"]


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error over n prompts."""

    value: float
    standard_error: float
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval, normal approximation."""
        half = 1.96 * self.standard_error
        return self.value - half, self.value + half


def _per_prompt(scores: pd.DataFrame) -> pd.DataFrame:
    """Accepted tokens and passes summed over the trajectories (and seeds) of every prompt, ordered by prompt."""
    sums = scores.groupby(["task", "prompt_id"], observed=True)[["emitted", "passes"]].sum().sort_index()
    return sums.assign(accepted=sums.emitted - sums.passes)


def _influence(scores: pd.DataFrame, macro: bool) -> tuple[float, pd.Series]:
    """Accepted length and the influence of every prompt on it.

    ``macro`` averages tasks with equal weight; the influences are scaled so that
    their standard error is that of the macro-average.
    """
    if scores.empty:
        raise DBlastError("no scores for this selection")
    prompts = _per_prompt(scores)
    parts = [prompts] if not macro else [rows for _, rows in prompts.groupby(level="task")]
    values, influences = [], []
    for rows in parts:
        value, influence = ratio_with_influence(rows.accepted.to_numpy(), rows.passes.to_numpy())
        values.append(value)
        scale = len(prompts) / (len(parts) * len(rows))
        influences.append(pd.Series(influence * scale, index=rows.index))
    return float(np.mean(values)), pd.concat(influences)


def accepted_length(scores: pd.DataFrame, macro: bool = False) -> Estimate:
    """Accepted length of all rows together (without bonus token), seeds pooled prompt by prompt."""
    value, influence = _influence(scores, macro)
    return Estimate(value, standard_error(influence.to_numpy()), len(influence))


def difference(ours: pd.DataFrame, base: pd.DataFrame, macro: bool = False) -> Estimate:
    """Paired difference of accepted lengths, ours minus base.

    Raises:
        DBlastError: the two were not scored on the same prompts.
    """
    (a, influence_a), (b, influence_b) = _paired(ours, base, macro)
    return Estimate(a - b, standard_error((influence_a - influence_b).to_numpy()), len(influence_a))


def gain(ours: pd.DataFrame, base: pd.DataFrame, macro: bool = False) -> Estimate:
    """Relative gain in per cent of ours over base, with its paired standard error (delta method)."""
    (a, influence_a), (b, influence_b) = _paired(ours, base, macro)
    influence = (influence_a - (a / b) * influence_b) / b
    return Estimate(100 * (a / b - 1), 100 * standard_error(influence.to_numpy()), len(influence))


def _paired(ours: pd.DataFrame, base: pd.DataFrame, macro: bool) -> list[tuple[float, pd.Series]]:
    sides = [_influence(scores, macro) for scores in (ours, base)]
    if not sides[0][1].index.equals(sides[1][1].index):
        raise DBlastError("the two variants were not scored on the same prompts")
    return sides


def seed_spread(scores: pd.DataFrame, macro: bool = False) -> float:
    """Standard deviation of the accepted length over training seeds; NaN for one seed."""
    values = [_influence(rows, macro)[0] for _, rows in scores.groupby("seed")]
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def choose_category_temperature(scores: pd.DataFrame) -> pd.DataFrame:
    """Z_T per variant and setting: the one with the largest accepted length on the calibration split.

    Seeds are pooled, ties go to the smaller Z_T; K = 1 has none (NaN).

    Returns:
        :data:`VARIANT_COLUMNS` and ``category_temperature``.
    """
    calibration = scores[scores.split == "calibration"]
    columns = [*VARIANT_COLUMNS, "category_temperature"]
    sums = calibration.groupby(columns, observed=True, dropna=False)[["emitted", "passes"]].sum().reset_index()
    sums["value"] = (sums.emitted - sums.passes) / sums.passes
    best = sums.sort_values(["value", "category_temperature"], ascending=[False, True], kind="stable")
    return best.drop_duplicates(VARIANT_COLUMNS)[columns].sort_values(VARIANT_COLUMNS).reset_index(drop=True)


def held_out_at_chosen(scores: pd.DataFrame) -> pd.DataFrame:
    """Held-out rows at the category temperature that calibration chose for each variant and setting."""
    chosen = choose_category_temperature(scores)
    merged = scores[scores.split == "held_out"].merge(chosen, on=[*VARIANT_COLUMNS, "category_temperature"])
    if merged.empty:
        raise DBlastError("no held-out scores at the chosen category temperatures")
    return merged


def accepted_length_rows(
    scores: pd.DataFrame, by: Sequence[str] = VARIANT_COLUMNS, per_seed: bool = True
) -> pd.DataFrame:
    """Tidy result rows: every group by task and macro-averaged ("average"), seeds pooled ("all") and one by one.

    Returns:
        ``by``, ``task, seed, category_temperature, accepted_length, standard_error, n, seed_spread``.
    """
    rows = []
    for names, group in scores.groupby(list(by), observed=True, sort=True, dropna=False):
        head = dict(zip(by, names, strict=True))
        if "category_temperature" not in by:
            head["category_temperature"] = group.category_temperature.iloc[0]
        seeds = [("all", group)]
        if per_seed:
            seeds += [(str(seed), rows_) for seed, rows_ in group.groupby("seed")]
        for seed, part in seeds:
            tasks = [(task, rows_, False) for task, rows_ in part.groupby("task", observed=True)]
            for task, rows_, macro in [*tasks, ("average", part, True)]:
                estimate = accepted_length(rows_, macro)
                rows.append(
                    head
                    | {
                        "task": task,
                        "seed": seed,
                        "accepted_length": estimate.value,
                        "standard_error": estimate.standard_error,
                        "n": estimate.n,
                        "seed_spread": seed_spread(rows_, macro) if seed == "all" else float("nan"),
                    }
                )
    return pd.DataFrame(rows)
