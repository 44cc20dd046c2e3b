"""Accepted lengths with errors: hand-made scores with known answers."""

import numpy as np
import pandas as pd
import pytest

from dblast.claims import verdict
from dblast.errors import DBlastError
from dblast.estimates import (
    Estimate,
    accepted_length,
    accepted_length_rows,
    choose_category_temperature,
    difference,
    gain,
    held_out_at_chosen,
    seed_spread,
)


def scores(passes, *, emitted=40, method="DFlash", k=1, loss="NLL", temperature=np.nan, seed=0, split="held_out", task=None):
    """One row per prompt with given expected passes."""
    n = len(passes)
    return pd.DataFrame(
        {
            "target": "toy",
            "method": method,
            "K": k,
            "loss": loss,
            "construction": "all_prefixes",
            "seed": seed,
            "setting": "low",
            "split": split,
            "prompt_id": [f"p{i}" for i in range(n)],
            "task": task or ["a" if i < n // 2 else "b" for i in range(n)],
            "category_temperature": temperature,
            "emitted": emitted,
            "passes": passes,
        }
    )


def test_accepted_length_is_a_ratio_of_sums_without_the_bonus_token():
    rows = scores([10.0, 30.0])
    assert accepted_length(rows).value == pytest.approx((80 - 40) / 40)


def test_macro_average_weighs_tasks_equally():
    rows = scores([10.0, 10.0, 10.0, 20.0], task=["a", "a", "a", "b"])
    assert accepted_length(rows, macro=True).value == pytest.approx((3.0 + 1.0) / 2)


def test_macro_standard_error_is_that_of_independent_task_means():
    rng = np.random.default_rng(0)
    rows = scores(rng.uniform(8, 20, 60), task=["a"] * 20 + ["b"] * 40)
    parts = [accepted_length(part).standard_error for _, part in rows.groupby("task")]
    assert accepted_length(rows, macro=True).standard_error == pytest.approx(np.hypot(*parts) / 2, rel=0.05)


def test_several_trajectories_of_a_prompt_are_one_unit():
    rows = scores([10.0, 20.0, 15.0, 12.0])
    doubled = pd.concat([rows, rows])
    assert accepted_length(doubled).n == 4
    assert accepted_length(doubled).standard_error == pytest.approx(accepted_length(rows).standard_error)


def test_paired_error_drops_what_the_variants_share():
    rng = np.random.default_rng(1)
    base = rng.uniform(8, 30, 80)
    ours, theirs = scores(base * 0.9), scores(base)
    paired = gain(ours, theirs)
    unpaired = np.hypot(accepted_length(ours).standard_error, accepted_length(theirs).standard_error)
    assert difference(ours, theirs).standard_error < 0.3 * unpaired
    assert paired.value > 0 and paired.interval[0] > 0


def test_gain_agrees_with_a_bootstrap_over_prompts():
    rng = np.random.default_rng(2)
    base = rng.uniform(8, 30, 100)
    ours, theirs = scores(base * rng.uniform(0.8, 1.0, 100)), scores(base)
    estimate = gain(ours, theirs)
    draws = []
    for _ in range(2000):
        index = rng.integers(0, 100, 100)
        a, b = ours.passes.to_numpy()[index].sum(), theirs.passes.to_numpy()[index].sum()
        draws.append(100 * ((4000 - a) / a / ((4000 - b) / b) - 1))
    assert estimate.standard_error == pytest.approx(np.std(draws), rel=0.15)


def test_different_prompts_cannot_be_paired():
    with pytest.raises(DBlastError, match="same prompts"):
        difference(scores([10.0, 20.0]), scores([10.0, 20.0, 30.0]))


def _sweep(split, best):
    """K = 4 scores whose passes are fewest at Z_T = ``best``."""
    return pd.concat(
        [
            scores([20 + 5 * abs(t - best)] * 4, method="DBlast", k=4, loss="AL", temperature=t, split=split)
            for t in (0.0, 0.4, 0.8)
        ]
    )


def test_category_temperature_comes_from_the_calibration_split_alone():
    rows = pd.concat([_sweep("calibration", 0.4), _sweep("held_out", 0.8)])
    assert choose_category_temperature(rows).category_temperature.tolist() == [0.4]
    kept = held_out_at_chosen(rows)
    assert set(kept.split) == {"held_out"} and set(kept.category_temperature) == {0.4}


def test_single_category_rows_survive_the_choice():
    rows = pd.concat([scores([20.0] * 4, split=split) for split in ("calibration", "held_out")])
    kept = held_out_at_chosen(rows)
    assert len(kept) == 4 and kept.category_temperature.isna().all()


def test_seed_spread_is_apart_from_prompt_noise():
    rows = pd.concat([scores([20.0] * 4, seed=0), scores([16.0] * 4, seed=1)])
    assert seed_spread(rows) == pytest.approx(np.std([1.0, 1.5], ddof=1))
    assert accepted_length(rows).standard_error == pytest.approx(0, abs=1e-12)
    assert np.isnan(seed_spread(scores([20.0] * 4)))


def test_result_rows_carry_n_and_error_for_every_task_and_seed():
    rows = accepted_length_rows(pd.concat([scores([20.0, 18, 25, 16], seed=s) for s in (0, 1)]))
    assert set(rows.task) == {"a", "b", "average"} and set(rows.seed) == {"all", "0", "1"}
    assert rows.standard_error.notna().all() and (rows.n >= 2).all()


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (Estimate(1.0, 0.1, 9), "reproduced"),
        (Estimate(-1.0, 0.1, 9), "not reproduced"),
        (Estimate(0.1, 0.1, 9), "undecided"),
        (Estimate(1.0, float("nan"), 1), "undecided"),
    ],
)
def test_the_interval_alone_decides_a_verdict(estimate, expected):
    assert verdict(estimate) == expected
