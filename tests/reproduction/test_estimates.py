"""Accepted lengths with errors: hand-made scores with known answers."""

import itertools

import numpy as np
import pandas as pd
import pytest

from dblast.reproduction.bootstrap import Resampled, best_category_temperature_shift, bootstrap_gain
from dblast.reproduction.claims import verdict
from dblast.errors import DBlastError
from dblast.reproduction.estimates import (
    Estimate,
    accepted_length,
    accepted_length_rows,
    choose_category_temperature,
    combination,
    common_seeds,
    difference,
    gain,
    gain_difference,
    half_width,
    held_out_at_chosen,
    joint_error,
    seed_spread,
    with_seed_noise,
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
    two, three = scores([10.0, 20.0]), scores([10.0, 20.0, 30.0])
    for call in (
        lambda: difference(two, three),
        lambda: combination([(1.5, two), (-0.5, two), (-1, three)]),
        lambda: gain_difference(two, two, three, three),
    ):
        with pytest.raises(DBlastError, match="same prompts"):
            call()
    with pytest.raises(DBlastError, match="at least one table"):
        combination([])


def test_combination_adds_values_and_influences_with_their_coefficients():
    # Accepted lengths 1, 1, 1; influences (1, -1), (0, 0), (-1, 1).
    rising, flat, falling = scores([10.0, 30.0]), scores([20.0, 20.0]), scores([30.0, 10.0])
    estimate = combination([(1.5, rising), (-0.5, flat), (-1, falling)])
    assert estimate.value == pytest.approx(0)
    assert estimate.standard_error == pytest.approx(2.5)
    # Errors added in squares would be sqrt(1.5^2 + 1); signs of the influences would be lost.
    same = combination([(1.5, rising), (-0.5, flat), (-1, rising)])
    assert same.standard_error == pytest.approx(0.5)
    assert (same.n, same.seeds) == (2, None)


@pytest.mark.parametrize("macro", [False, True])
def test_difference_is_a_combination(macro):
    rng = np.random.default_rng(3)
    ours, base = scores(rng.uniform(8, 30, 12)), scores(rng.uniform(8, 30, 12))
    one, two = difference(ours, base, macro), combination([(1, ours), (-1, base)], macro)
    assert (one.value, one.standard_error) == pytest.approx((two.value, two.standard_error)) and one.n == two.n
    twice = combination([(2, ours)], macro)
    assert twice.standard_error == pytest.approx(2 * accepted_length(ours, macro).standard_error)


def test_gain_difference_is_paired_by_prompt():
    rng = np.random.default_rng(5)
    base, other_base = rng.uniform(8, 30, 80), rng.uniform(8, 30, 80)
    noise = rng.uniform(0.8, 1.0, 80)
    pairs = [scores(base * noise), scores(base), scores(other_base * noise), scores(other_base)]
    estimate = gain_difference(*pairs)
    assert estimate.value == pytest.approx(gain(*pairs[:2]).value - gain(*pairs[2:]).value)
    draws = []
    for _ in range(2000):
        index = rng.integers(0, 80, 80)
        a, b, c, d = (3200 / rows.passes.to_numpy()[index].sum() - 1 for rows in pairs)
        draws.append(100 * (a / b - c / d))
    assert estimate.standard_error == pytest.approx(np.std(draws), rel=0.15)
    assert gain_difference(*pairs[:2], *pairs[:2]).standard_error == pytest.approx(0, abs=1e-9)


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


def _seeds(*passes, **names):
    return pd.concat([scores(rows, seed=seed, **names) for seed, rows in enumerate(passes)])


def test_seed_noise_adds_to_the_error_over_prompts_in_squares():
    # Lengths 1.0 and 1.5, the same for all prompts: no noise of prompts, 0.25 of seeds.
    estimate = with_seed_noise(accepted_length, _seeds([20.0] * 4, [16.0] * 4))
    assert estimate.value == pytest.approx(160 / 144 * 2 - 1)
    assert estimate.standard_error == pytest.approx(0.25)
    assert (estimate.n, estimate.seeds) == (4, 2)
    rows = _seeds([10.0, 30, 20, 18], [11.0, 25, 14, 14], [12.0, 20, 20, 20])
    lengths = [accepted_length(part).value for _, part in rows.groupby("seed")]
    expected = np.hypot(accepted_length(rows).standard_error, np.std(lengths, ddof=1) / np.sqrt(3))
    assert with_seed_noise(accepted_length, rows).standard_error == pytest.approx(expected)


def test_one_seed_leaves_the_error_over_prompts_and_says_so():
    rows = scores([10.0, 30, 20, 18])
    estimate = with_seed_noise(accepted_length, rows, macro=True)
    assert estimate.standard_error == pytest.approx(accepted_length(rows, macro=True).standard_error)
    assert estimate.seeds == 1


def test_seed_noise_that_both_sides_share_cancels():
    """Seeds compared one by one: a mutant that adds the two sides' spreads finds 0.25 here."""
    base = _seeds([20.0] * 4, [16.0] * 4)
    # Accepted length larger by 0.5 in each seed.
    ours = _seeds([16.0] * 4, [40 / 3] * 4)
    assert [seed_spread(rows) for rows in (ours, base)] == pytest.approx([np.std([1, 1.5], ddof=1)] * 2)
    assert with_seed_noise(difference, ours, base).standard_error == pytest.approx(0, abs=1e-9)
    assert with_seed_noise(gain, ours, base).standard_error == pytest.approx(100 * (1 / 2 - 1 / 3) / 2)


def test_few_seeds_widen_the_interval_by_students_quantile():
    assert half_width(1.0, np.inf) == pytest.approx(1.959964) and half_width(2.0, 2) == pytest.approx(2 * 4.302653)
    assert joint_error((0.3, 2)) == pytest.approx((0.3, 2)) and joint_error((0.3, np.inf), (0.4, np.inf)) == (0.5, np.inf)
    # Two equal parts have as many degrees as both together; one that is next to nothing changes nothing.
    assert joint_error((1.0, 2), (1.0, 2))[1] == pytest.approx(4)
    assert joint_error((1.0, 2), (1e-6, 50)) == pytest.approx((1.0, 2)) and joint_error((0.0, 5)) == (0.0, np.inf)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_intervals_from_three_seeds_cover_what_they_promise(share):
    """Errors of which a share is the seeds': 92 to 95 % of the intervals hold zero; with 1.96 it would be down to 85 %.

    One standard error of these shares, of 4000 intervals each, is 0.3 to 0.6 points: the limits are over four away.
    """
    rng = np.random.default_rng(int(10 * share))
    prompts = rng.normal(size=(4000, 60)) * np.sqrt((1 - share) * 60)
    seeds = rng.normal(size=(4000, 3)) * np.sqrt(share * 3)
    values = prompts.mean(1) + seeds.mean(1)
    covered = normal = 0
    for value, p, s in zip(values, prompts.std(1, ddof=1) / np.sqrt(60), seeds.std(1, ddof=1) / np.sqrt(3), strict=True):
        error, freedom = joint_error((p, 59), (s, 2))
        covered += abs(value) < half_width(error, freedom)
        normal += abs(value) < 1.96 * error
    assert 0.90 < covered / 4000 < 0.97
    assert share < 0.9 or normal / 4000 < 0.88


def test_seed_noise_wants_the_same_seeds_and_common_seeds_finds_them():
    three, one = _seeds([20.0] * 4, [16.0] * 4, [10.0] * 4), _seeds([18.0] * 4)
    with pytest.raises(DBlastError, match="same seeds"):
        with_seed_noise(difference, three, one)
    shared = common_seeds(three, one)
    assert [set(rows.seed) for rows in shared] == [{0}, {0}]
    estimate = with_seed_noise(difference, *shared)
    assert estimate.seeds == 1 and estimate.value == pytest.approx(1 - 40 / 18 + 1)
    with pytest.raises(DBlastError, match="no fine-tuning seed in common"):
        common_seeds(three, scores([18.0] * 4, seed=7))
    with pytest.raises(DBlastError, match="no scores"):
        common_seeds(three, one[:0])


TEMPERATURES = (0.0, 0.4, 0.8)


def _grid(*passes_by_temperature, seed=0, **names):
    """DBlast scores with given passes at every Z_T."""
    parts = zip(TEMPERATURES, passes_by_temperature, strict=True)
    return pd.concat([scores(p, method="DBlast", k=4, loss="AL", temperature=t, seed=seed, **names) for t, p in parts])


def test_a_clear_shift_of_the_best_temperature_is_certain():
    low, high = _grid([22.0] * 6, [21.0] * 6, [20.0] * 6), _grid([20.0] * 6, [21.0] * 6, [22.0] * 6)
    estimate = best_category_temperature_shift(low, high)
    assert (estimate.value, *estimate.interval) == (0.8, 0.8, 0.8)
    assert verdict(estimate) == "reproduced" and (estimate.n, estimate.seeds) == (6, 1)
    assert verdict(best_category_temperature_shift(high, low)) == "not reproduced"
    still = best_category_temperature_shift(low, low)
    assert (still.value, *still.interval) == (0, 0, 0) and verdict(still) == "undecided"


def test_temperature_ties_go_to_the_smaller_one_as_in_the_choice():
    tied, flat = _grid([22.0] * 4, [20.0] * 4, [20.0] * 4), _grid([20.0] * 4, [20.0] * 4, [20.0] * 4)
    assert best_category_temperature_shift(tied, flat).value == 0.4


def test_prompts_that_disagree_leave_the_shift_undecided():
    mixed = _grid([20.0, 22] * 6, [21.0, 21] * 6, [22.0, 19.9] * 6)
    low, high = best_category_temperature_shift(mixed, _grid([20.0] * 12, [21.0] * 12, [22.0] * 12)).interval
    assert (low, high) == (0.0, 0.8)


def test_seeds_that_disagree_leave_the_shift_undecided():
    seeds = [_grid([20.0] * 6, [21.0] * 6, [22.0] * 6, seed=0), _grid([22.0] * 6, [21.0] * 6, [19.0] * 6, seed=1)]
    fixed = _grid([20.0] * 6, [21.0] * 6, [22.0] * 6)
    both = best_category_temperature_shift(pd.concat(seeds), pd.concat([fixed, fixed.assign(seed=1)]))
    assert both.seeds == 2 and both.value == 0.8 and both.interval == (0.0, 0.8)


def test_the_bootstrap_draws_prompts_once_for_both_sides():
    """Against a loop over the same draws."""
    rng = np.random.default_rng(6)
    hard = rng.uniform(14, 26, 10)
    sides = [_grid(*(hard + rng.uniform(-1, 1, (3, 10)))) for _ in range(2)]
    again = np.random.default_rng(7)
    again.multinomial(1, [1.0], size=40)
    shifts = []
    for weights in again.multinomial(10, np.full(10, 0.1), size=40):
        best = []
        for side in sides:
            # Prompts in the order of the estimate: by task and name.
            tables = [side[side.category_temperature == t].sort_values(["task", "prompt_id"]) for t in TEMPERATURES]
            passes = [(weights * table.passes.to_numpy()).sum() for table in tables]
            best.append(TEMPERATURES[int(np.argmin(passes))])
        shifts.append(best[0] - best[1])
    estimate = best_category_temperature_shift(*sides, replicates=40, generator=np.random.default_rng(7))
    assert estimate.interval == (np.sort(shifts)[0], np.sort(shifts)[39])
    # The same side twice never moves, whatever is drawn: two draws would.
    assert best_category_temperature_shift(sides[0], sides[0]).interval == (0, 0)
    assert len(set(shifts)) > 2


def test_the_bootstrap_repeats_itself_and_leaves_the_global_random_state_alone():
    rng = np.random.default_rng(8)
    sides = [_grid(*rng.uniform(18, 22, (3, 10))) for _ in range(2)]
    state = np.random.get_state()[1].tolist()
    assert best_category_temperature_shift(*sides) == best_category_temperature_shift(*sides)
    assert np.random.get_state()[1].tolist() == state


def test_temperature_shift_refuses_what_cannot_be_compared():
    grid = _grid([20.0] * 4, [21.0] * 4, [22.0] * 4)
    gap, one = pd.concat([grid, grid[grid.prompt_id != "p0"].assign(seed=1)]), scores([20.0] * 4)
    for sides, message in (
        ((grid, grid[grid.category_temperature > 0]), "same prompts, seeds and category temperatures"),
        ((grid, grid.assign(prompt_id="other-" + grid.prompt_id)), "same prompts, seeds and category temperatures"),
        ((grid, grid[1:]), "every seed and category temperature"),
        ((gap, gap), "every seed and category temperature"),
        ((one, one), "no category temperatures"),
    ):
        with pytest.raises(DBlastError, match=message):
            best_category_temperature_shift(*sides)


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
        (Resampled(0.4, 0.2, 0.6, 9, 1), "reproduced"),
        (Resampled(0.4, 0.0, 0.6, 9, 1), "undecided"),
        (Resampled(-0.4, -0.6, -0.2, 9, 1), "not reproduced"),
    ],
)
def test_the_interval_alone_decides_a_verdict(estimate, expected):
    assert verdict(estimate) == expected


def test_bootstrap_intervals_are_the_quantiles_of_every_way_to_draw_prompts():
    """Three prompts in one task and two in the other: all 27 x 4 draws, counted, against 20,000 replicates."""
    task = ["a", "a", "a", "b", "b"]
    ours, base = scores([10.0, 14.0, 30.0, 12.0, 21.0], task=task), scores([13.0, 20.0, 24.0, 18.0, 22.0], task=task)

    def length(passes, drawn):
        groups = [np.array(passes)[list(part)] for part in drawn]
        return np.mean([(40 * len(part) - part.sum()) / part.sum() for part in groups])

    every = []
    for a in itertools.product(range(3), repeat=3):
        for b in itertools.product((3, 4), repeat=2):
            every.append(100 * (length(ours.passes, (a, b)) / length(base.passes, (a, b)) - 1))
    found = bootstrap_gain(ours, base, macro=True, replicates=20_000)
    assert found.value == pytest.approx(gain(ours, base, macro=True).value)
    steps = np.sort(every)
    for quantile, end in ((0.025, found.low), (0.975, found.high)):
        # A discrete law: the drawn quantile lies at one of the values next to the exact one.
        near = np.flatnonzero(np.isclose(steps, end, atol=0.3))
        assert len(near) and np.abs(near / (len(steps) - 1) - quantile).min() < 0.02


def test_bootstrap_intervals_agree_with_the_delta_method_on_many_prompts_and_pair_them():
    rng = np.random.default_rng(3)
    passes = rng.uniform(10, 35, 300)
    base, ours = scores(passes), scores(passes * rng.uniform(0.85, 0.95, 300))
    for macro in (False, True):
        # One standard error of an end is 0.06 of the gain's at 2000 replicates, 0.03 at 8000.
        found, exact = bootstrap_gain(ours, base, macro=macro, replicates=8000), gain(ours, base, macro)
        assert np.allclose(found.interval, exact.interval, atol=0.1 * 1.96 * exact.standard_error)
        assert found.n == 300 and found.seeds == 1
    # Without pairing, the prompts' own differences would make it several times as wide.
    shuffled = bootstrap_gain(ours, base.assign(passes=rng.permutation(base.passes)), macro=False)
    assert (shuffled.high - shuffled.low) > 3 * (found.high - found.low)


def test_bootstrap_intervals_are_of_prompts_alone_and_the_same_every_time():
    passes = np.random.default_rng(1).uniform(20, 30, 15)
    base = pd.concat([scores(passes, seed=s) for s in (0, 1)])
    ours = pd.concat([scores(passes * factor, seed=s) for s, factor in ((0, 0.8), (1, 0.9))])
    found = bootstrap_gain(ours, base)
    assert found.seeds == 2 and found.interval == pytest.approx(bootstrap_gain(ours, base).interval)
    other = bootstrap_gain(ours, base, generator=np.random.default_rng(5))
    assert other.value == pytest.approx(found.value) and abs(other.low - found.low) > 1e-6
    # Both seeds' passes are pooled, so that their spread (14 % of the accepted length) is no part of it.
    assert found.high - found.low < 15
    assert bootstrap_gain(base, base).interval == (0, 0)


def test_a_bootstrap_over_nothing_accepted_is_undecided_and_other_prompts_are_refused():
    nothing = bootstrap_gain(scores([20.0] * 4), scores([40.0] * 4))
    assert np.isnan(nothing.interval).all() and verdict(nothing) == "undecided"
    with pytest.raises(DBlastError, match="same prompts"):
        bootstrap_gain(scores([20.0] * 4), scores([20.0] * 5))
