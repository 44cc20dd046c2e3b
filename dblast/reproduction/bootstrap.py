"""Intervals from resampled prompts: of paired gains, and of the best Z_T, which has no delta method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from dblast.errors import DBlastError
from dblast.reproduction.estimates import gain, per_prompt


@dataclass(frozen=True)
class Resampled:
    """A number with a 95 % percentile interval from a bootstrap over n prompts (and fine-tuning seeds, if several)."""

    value: float
    low: float
    high: float
    n: int
    seeds: int

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high


def bootstrap_gain(
    ours: pd.DataFrame,
    base: pd.DataFrame,
    *,
    macro: bool = False,
    replicates: int = 2000,
    generator: np.random.Generator | None = None,
) -> Resampled:
    """:func:`dblast.reproduction.estimates.gain` with a paired bootstrap interval over prompts.

    A replicate draws as many prompts as there are, within every task if ``macro``, the same
    ones for both sides; fine-tuning seeds stay as they are, so that the interval is of prompts
    alone and the spread over seeds can be shown beside it.

    Args:
        ours, base: replay scores on the same prompts, all fine-tuning seeds together.
        macro: average tasks with equal weight.
        generator: default: one with a fixed seed.

    Raises:
        DBlastError: the two were not scored on the same prompts.
    """
    rng = np.random.default_rng(0) if generator is None else generator
    value = gain(ours, base, macro)  # refuses sides that are not paired
    sides = [per_prompt(scores) for scores in (ours, base)]
    tasks = sides[0].index.get_level_values("task")
    groups = [np.flatnonzero(tasks == task) for task in sorted(set(tasks))] if macro else [np.arange(len(tasks))]
    lengths = np.zeros((2, replicates))
    for group in groups:
        weights = rng.multinomial(len(group), np.full(len(group), 1 / len(group)), size=replicates)
        for side, sums in enumerate(sides):
            part = sums.iloc[group]
            lengths[side] += weights @ part.accepted.to_numpy() / (weights @ part.passes.to_numpy()) / len(groups)
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = 100 * (lengths[0] / lengths[1] - 1)
    low, high = np.quantile(gains, (0.025, 0.975)) if np.isfinite(gains).all() else (np.nan, np.nan)
    return Resampled(value.value, float(low), float(high), value.n, ours.seed.nunique())


def best_category_temperature_shift(
    after: pd.DataFrame,
    before: pd.DataFrame,
    *,
    replicates: int = 200,
    generator: np.random.Generator | None = None,
) -> Resampled:
    """How far the best Z_T lies higher in ``after`` than in ``before``, e.g. one variant at two settings.

    The best Z_T is the one with the largest accepted length on all rows given (give both
    splits), ties to the smaller, as in :func:`choose_category_temperature`. An argmax has
    no delta method: every replicate draws prompts, and fine-tuning seeds, with replacement,
    the same ones for both sides. The interval ends on values that were drawn, the outer ones.

    Args:
        generator: default: one with a fixed seed.

    Raises:
        DBlastError: the sides differ in prompts, seeds or temperatures, or have no Z_T (K = 1).
    """
    rng = np.random.default_rng(0) if generator is None else generator
    sides = [_temperature_sums(scores) for scores in (after, before)]
    if not all(a.equals(b) for a, b in zip(sides[0].axes, sides[1].axes, strict=True)):
        raise DBlastError("the two sides do not have the same prompts, seeds and category temperatures")
    seeds = sides[0].index.get_level_values("seed").nunique()
    n = len(sides[0]) // seeds
    draws = [rng.multinomial(size, np.full(size, 1 / size), size=replicates) for size in (seeds, n)]
    # The first row has every seed and prompt once: the estimate itself.
    seed_weights, prompt_weights = (np.vstack([np.ones(rows.shape[1]), rows]) for rows in draws)
    best = []
    for side in sides:
        totals = {}
        for name in ("accepted", "passes"):
            values = side[name].to_numpy().reshape(seeds, n, -1)
            totals[name] = np.einsum("rs,rn,snz->rz", seed_weights, prompt_weights, values, optimize=True)
        grid = side["passes"].columns.to_numpy()
        best.append(grid[np.argmax(totals["accepted"] / totals["passes"], axis=1)])
    shifts = best[0] - best[1]
    low = np.quantile(shifts[1:], 0.025, method="lower")
    high = np.quantile(shifts[1:], 0.975, method="higher")
    return Resampled(float(shifts[0]), float(low), float(high), n, seeds)


def _temperature_sums(scores: pd.DataFrame) -> pd.DataFrame:
    """Accepted tokens and passes by (seed, prompt) and Z_T, without gaps."""
    rows = scores.assign(accepted=scores.emitted - scores.passes)
    keys = ["seed", "task", "prompt_id", "category_temperature"]
    sums = rows.groupby(keys, observed=True)[["accepted", "passes"]].sum().unstack("category_temperature").sort_index()
    if sums.empty:
        raise DBlastError("no category temperatures to choose from in this selection")
    prompts = {tuple(part.index.droplevel("seed")) for _, part in sums.groupby(level="seed")}
    if len(prompts) > 1 or sums.isna().any(axis=None):
        raise DBlastError("some prompts were not scored with every seed and category temperature")
    return sums
