"""Accepted lengths with errors, gains with paired errors, and the choice of Z_T, from replay scores.

``scores`` has one row per trajectory (see :func:`dblast.replay.score`). The
accepted length of a set of trajectories is a ratio of sums, (emitted - passes) /
passes; standard errors are over prompts, and variants scored on the same prompts
are compared prompt by prompt. :func:`with_seed_noise` adds the noise of training
seeds to any of these estimates; :mod:`dblast.reproduction.bootstrap` has intervals that are
resampled instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from dblast.errors import DBlastError


def ratio_with_influence(accepted: np.ndarray, passes: np.ndarray) -> tuple[float, np.ndarray]:
    """Ratio of sums and each unit's influence on it.

    The influence values have mean zero; their standard deviation over sqrt(n)
    is the standard error of the ratio (delta method), and that of a difference
    of two scores on the same units is the paired standard error.
    """
    if len(accepted) == 0:
        raise DBlastError("no trajectories to score")
    ratio = accepted.sum() / passes.sum()
    return float(ratio), (accepted - ratio * passes) / passes.mean()


def standard_error(influence: np.ndarray) -> float:
    """Standard error of a mean from its influence values; NaN for fewer than two units."""
    n = len(influence)
    return float(np.std(influence, ddof=1) / np.sqrt(n)) if n > 1 else float("nan")


#: Columns that name a trained variant at an evaluation setting.
VARIANT_COLUMNS = ["target", "method", "K", "loss", "construction", "setting"]


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error over n prompts.

    ``seeds`` is set by :func:`with_seed_noise`: the fine-tuning seeds whose spread is part of
    the error. With 1 there is no spread to see; None is an error over prompts alone.
    ``freedom``: degrees of freedom of the error; infinite for one that is known.
    """

    value: float
    standard_error: float
    n: int
    seeds: int | None = None
    freedom: float = float("inf")

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval with Student's quantile, see :func:`half_width`."""
        half = half_width(self.standard_error, self.freedom)
        return self.value - half, self.value + half

    def columns(self, name: str) -> dict[str, float]:
        """``name, name_error, name_low, name_high``: value, standard error and the ends of the 95 % interval."""
        low, high = self.interval
        return {name: self.value, f"{name}_error": self.standard_error, f"{name}_low": low, f"{name}_high": high}


def half_width(standard_error: float, freedom: float) -> float:
    """Half of a 95 % interval: the error times Student's quantile, 1.96 for infinite and 4.30 for 2 degrees of freedom."""
    return float(standard_error * stdtrit(freedom, 0.975))


def decided(low: float, high: float) -> str:
    """Whether an interval is above zero ("better"), below ("worse"), or neither or not known ("undecided")."""
    return "better" if low > 0 else "worse" if high < 0 else "undecided"


def joint_error(*parts: tuple[float, float]) -> tuple[float, float]:
    """Independent errors together: root of the summed squares, and its degrees of freedom (Welch and Satterthwaite).

    An approximation: intervals from three seeds and many prompts hold the true value in 92 to 95 % of cases,
    by the share that the seeds have.

    Args:
        parts: (standard error, degrees of freedom) of each.
    """
    squares = np.array([error**2 for error, _ in parts])
    freedom = np.array([f for _, f in parts], dtype=float)
    doubt = float((squares**2 / freedom).sum())
    return float(np.sqrt(squares.sum())), float(squares.sum() ** 2 / doubt) if doubt else float("inf")


def per_prompt(scores: pd.DataFrame) -> pd.DataFrame:
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
    prompts = per_prompt(scores)
    parts = [prompts] if not macro else [rows for _, rows in prompts.groupby(level="task")]
    values, influences = [], []
    for rows in parts:
        value, influence = ratio_with_influence(rows.accepted.to_numpy(), rows.passes.to_numpy())
        values.append(value)
        scale = len(prompts) / (len(parts) * len(rows))
        influences.append(pd.Series(influence * scale, index=rows.index))
    return float(np.mean(values)), pd.concat(influences)


def _estimate(value: float, influence: pd.Series) -> Estimate:
    return Estimate(float(value), standard_error(influence.to_numpy()), len(influence), freedom=len(influence) - 1)


def accepted_length(scores: pd.DataFrame, macro: bool = False) -> Estimate:
    """Accepted length of all rows together (without bonus token), seeds pooled prompt by prompt."""
    return _estimate(*_influence(scores, macro))


def combination(terms: Sequence[tuple[float, pd.DataFrame]], macro: bool = False) -> Estimate:
    """Linear combination of accepted lengths with its paired error: ``terms`` are (coefficient, scores).

    Raises:
        DBlastError: no terms, or terms that were not scored on the same prompts.
    """
    sides = _paired([scores for _, scores in terms], macro)
    parts = [(factor * value, factor * influence) for (factor, _), (value, influence) in zip(terms, sides, strict=True)]
    return _estimate(sum(value for value, _ in parts), sum(influence for _, influence in parts))


def difference(ours: pd.DataFrame, base: pd.DataFrame, macro: bool = False) -> Estimate:
    """Paired difference of accepted lengths, ours minus base.

    Raises:
        DBlastError: the two were not scored on the same prompts.
    """
    return combination([(1, ours), (-1, base)], macro)


def gain(ours: pd.DataFrame, base: pd.DataFrame, macro: bool = False) -> Estimate:
    """Relative gain in per cent of ours over base, with its paired standard error (delta method)."""
    return _estimate(*_relative(*_paired([ours, base], macro)))


def gain_difference(
    ours: pd.DataFrame, base: pd.DataFrame, other: pd.DataFrame, other_base: pd.DataFrame, macro: bool = False
) -> Estimate:
    """The gain of ours over base minus that of other over other_base, in points, paired by prompt.

    The two gains may be of different settings: their texts differ, the prompts do not.
    """
    sides = _paired([ours, base, other, other_base], macro)
    (first, influence), (second, other_influence) = _relative(*sides[:2]), _relative(*sides[2:])
    return _estimate(first - second, influence - other_influence)


def _relative(ours: tuple[float, pd.Series], base: tuple[float, pd.Series]) -> tuple[float, pd.Series]:
    """Gain in per cent and the influence of every prompt on it; NaN over a base that accepts nothing."""
    (a, influence_a), (b, influence_b) = ours, base
    if b <= 0:
        return float("nan"), influence_b * float("nan")
    return 100 * (a / b - 1), 100 * (influence_a - (a / b) * influence_b) / b


def _paired(tables: Sequence[pd.DataFrame], macro: bool) -> list[tuple[float, pd.Series]]:
    if not tables:
        raise DBlastError("nothing to compare: give at least one table of scores")
    sides = [_influence(scores, macro) for scores in tables]
    if not all(influence.index.equals(sides[0][1].index) for _, influence in sides):
        raise DBlastError("the variants were not scored on the same prompts")
    return sides


def common_seeds(*tables: pd.DataFrame) -> list[pd.DataFrame]:
    """The tables without the fine-tuning seeds that only some of them have.

    Raises:
        DBlastError: a table is empty, or no seed is in all of them.
    """
    if any(table.empty for table in tables):
        raise DBlastError("no scores for this selection")
    shared = set.intersection(*(set(table.seed) for table in tables))
    if not shared:
        raise DBlastError("the variants have no fine-tuning seed in common")
    return [table[table.seed.isin(shared)] for table in tables]


def with_seed_noise(estimate: Callable[..., Estimate], *tables: pd.DataFrame, macro: bool = False) -> Estimate:
    """``estimate(*tables, macro=macro)`` with the noise of fine-tuning seeds in its error.

    The estimate is made anew from the rows of every seed, all sides of one seed together;
    the standard deviation of these values over sqrt(number of seeds) is the seed part.
    It and the error over prompts add as a root of squares. A seed part from two or
    three seeds is rough, so that the interval widens with its share of the error
    (:func:`joint_error`); one seed has none.

    Args:
        estimate: :func:`accepted_length`, :func:`difference`, :func:`gain` or a function like them.
        tables: its scores, all with the same seeds (see :func:`common_seeds`).

    Raises:
        DBlastError: the tables differ in their seeds.
    """
    seeds = sorted(set(tables[0].seed))
    if any(set(table.seed) != set(seeds) for table in tables):
        raise DBlastError("the variants were not trained with the same seeds; compare those in common_seeds(...)")
    pooled = replace(estimate(*tables, macro=macro), seeds=len(seeds))
    if len(seeds) < 2:
        return pooled
    values = [estimate(*(table[table.seed == seed] for table in tables), macro=macro).value for seed in seeds]
    seed_part = np.std(values, ddof=1) / np.sqrt(len(seeds))
    error, freedom = joint_error((pooled.standard_error, pooled.freedom), (seed_part, len(seeds) - 1))
    return replace(pooled, standard_error=error, freedom=freedom)


def seed_spread(scores: pd.DataFrame, macro: bool = False) -> float:
    """Standard deviation of the accepted length over fine-tuning seeds; NaN for one seed."""
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
