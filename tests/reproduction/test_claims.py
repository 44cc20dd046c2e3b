"""The table of claims: which rows it has, what the paper prints for them, which seeds and errors they use."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t

from dblast.reproduction.bootstrap import best_category_temperature_shift
from dblast.reproduction.claims import COLUMNS, VERDICT_RULE, claims_display, claims_table, verdict_lines
from dblast.reproduction.estimates import accepted_length, difference, gain, gain_difference, held_out_at_chosen
from dblast.reproduction.profiles import CATEGORY_ABLATION, CONSTRUCTION_ABLATION, MAIN

TASKS = ("maths", "chat", "code")
SETTINGS = ("high", "medium", "low")
TEMPERATURES = (0.0, 0.5, 1.0)
#: Passes for 60 tokens of an average prompt, by setting; K and the AL loss save some of them.
PASSES = {"high": 20.0, "medium": 26.0, "low": 32.0}


def variant_scores(variant, seed, prompts):
    """Scores of one variant and seed: prompts differ a lot, variants and seeds a little."""
    rng = np.random.default_rng([seed, variant.K, len(variant.loss), len(variant.construction)])
    hardness = np.random.default_rng(0).uniform(0.6, 1.4, prompts * len(TASKS))
    tasks = np.repeat(TASKS, prompts)
    parts = []
    for setting in SETTINGS:
        saved = 0.06 * np.log2(variant.K) ** 0.7 + 0.03 * (variant.loss == "AL") + rng.normal(0, 0.01)
        for temperature in TEMPERATURES if variant.K > 1 else (np.nan,):
            # Z_T = 0.5 is best at high determinism, 1.0 at low.
            off = 0.05 * abs(temperature - {"high": 0.5, "medium": 0.5, "low": 1.0}[setting]) if variant.K > 1 else 0
            noise = rng.normal(1, 0.02, len(tasks))
            parts.append(
                pd.DataFrame(
                    {
                        "setting": setting,
                        "prompt_id": [f"p{i:03d}" for i in range(len(tasks))],
                        "task": tasks,
                        "category_temperature": temperature,
                        "emitted": 60,
                        "passes": PASSES[setting] * hardness * noise * (1 - saved + off),
                        "split": np.where(np.arange(len(tasks)) % prompts < prompts // 4, "calibration", "held_out"),
                    }
                )
            )
    names = {"target": "toy", "method": variant.method, "K": variant.K, "loss": variant.loss}
    return pd.concat(parts).assign(**names, construction=variant.construction, seed=seed)


def target_scores(main_seeds=(0, 1, 2), ablation_seeds=(0,), ablations=True, prompts=16):
    jobs = [(variant, seed) for variant in MAIN for seed in main_seeds]
    if ablations:
        jobs += [(v, seed) for v in CATEGORY_ABLATION + CONSTRUCTION_ABLATION for seed in ablation_seeds]
    return pd.concat([variant_scores(variant, seed, prompts) for variant, seed in jobs], ignore_index=True)


@pytest.fixture(scope="module")
def scores():
    return target_scores()


@pytest.fixture(scope="module")
def table(scores):
    return claims_table(scores).set_index("claim")


def _row(table, words):
    (name,) = [claim for claim in table.index if words in claim]
    return table.loc[name]


def _pick(rows, setting, k, loss):
    rows = rows[(rows.setting == setting) & (rows.K == k) & (rows.loss == loss)]
    return rows[rows.construction == "all_prefixes"]


def test_columns_are_the_required_ones_then_the_seeds_and_the_prompts(scores, table):
    required = ["claim", "target", "paper", "ours", "ci_low", "ci_high", "verdict"]
    assert COLUMNS == [*required, "seeds", "n"] and claims_table(scores).columns.tolist() == COLUMNS
    assert pd.api.types.is_integer_dtype(table.seeds) and (table.n > 1).all()
    assert table.index.is_unique and table.drop(columns="paper").notna().all(axis=None)
    assert ((table.ci_low <= table.ours) & (table.ours <= table.ci_high)).all()


def test_the_verdict_is_that_of_the_interval_and_the_rule_says_sign_only(table):
    signs = np.select([table.ci_low > 0, table.ci_high < 0], ["reproduced", "not reproduced"], "undecided")
    assert (table.verdict == signs).all()
    assert "sign" in VERDICT_RULE and "size" in VERDICT_RULE and "\n" not in VERDICT_RULE


@pytest.mark.parametrize(
    ("words", "paper"),
    [
        # Table 3: (4.10 - 4.00) / 2 - (4.13 - 4.10) and (4.39 - 4.17) / 2 - (4.41 - 4.39).
        ("diminish beyond K = 4, NLL", "0.02"),
        ("diminish beyond K = 4, AL", "0.09"),
        # Table 2 at T = 0.7: mean of 4.84 / 4.82 and 5.03 / 4.99, of 3.14 / 3.10 and 2.99 / 2.98.
        ("DFlash over DFlash+DS, code", "0.6"),
        ("DFlash+AL over DBlast, chat", "0.8"),
        ("best Z_T", "1.0"),
        ("Independent drafts", "0.69"),
        ("DBlast over DFlash, high", "5.7"),
    ],
)
def test_printed_values_are_the_papers(table, words, paper):
    assert _row(table, words).paper == paper


def test_main_variants_use_all_their_seeds_and_ablations_those_that_both_sides_have(table):
    ablation = table.index.str.contains("diminish|AL loss:", regex=True)
    assert ablation.sum() == 6 and (table.seeds[ablation] == 1).all()
    assert (table.seeds[~ablation] == 3).all()


def test_ablations_with_two_seeds_are_compared_on_two():
    table = claims_table(target_scores(main_seeds=(0, 1, 2), ablation_seeds=(1, 2), prompts=8)).set_index("claim")
    assert sorted(table.seeds.unique()) == [2, 3]
    assert _row(table, "diminish beyond K = 4, AL").seeds == 2


def test_one_seed_everywhere_is_said_and_widens_nothing():
    rows = target_scores(main_seeds=(0,), ablations=False, prompts=8)
    table = claims_table(rows).set_index("claim")
    assert (table.seeds == 1).all() and not table.index.str.contains("diminish|AL loss:", regex=True).any()
    chosen = held_out_at_chosen(rows)
    estimate = gain(_pick(chosen, "low", 4, "AL"), _pick(chosen, "low", 1, "NLL"), macro=True)
    row = _row(table, "DBlast over DFlash, low")
    assert (row.ours, row.ci_low, row.ci_high) == pytest.approx((estimate.value, *estimate.interval))


def test_diminishing_returns_compare_one_doubling_with_one_doubling(scores, table):
    chosen = held_out_at_chosen(scores[scores.seed == 0])
    one, four, eight = (accepted_length(_pick(chosen, "low", k, "AL"), macro=True) for k in (1, 4, 8))
    row = _row(table, "diminish beyond K = 4, AL")
    # Z_T of K = 4 was chosen with three seeds; here it is the same.
    assert row.ours == pytest.approx((four.value - one.value) / 2 - (eight.value - four.value))
    unpaired = np.sqrt(2.25 * four.standard_error**2 + 0.25 * one.standard_error**2 + eight.standard_error**2)
    assert row.ci_high - row.ci_low < 0.5 * 2 * 1.96 * unpaired


def test_intervals_hold_the_noise_of_seeds(scores, table):
    """Seed by seed and paired: wider than prompts alone, by the spread of the per-seed gains."""
    chosen = held_out_at_chosen(scores)
    ours, base = _pick(chosen, "low", 4, "AL"), _pick(chosen, "low", 1, "NLL")
    pooled = gain(ours, base, macro=True)
    each = [gain(ours[ours.seed == s], base[base.seed == s], macro=True).value for s in (0, 1, 2)]
    parts = pooled.standard_error, np.std(each, ddof=1) / np.sqrt(3)
    error = np.hypot(*parts)
    freedom = error**4 / (parts[0] ** 4 / (pooled.n - 1) + parts[1] ** 4 / 2)
    row = _row(table, "DBlast over DFlash, low")
    assert row.ours == pytest.approx(pooled.value)
    assert row.ci_high - row.ci_low == pytest.approx(2 * t.ppf(0.975, freedom) * error)
    assert error > 1.1 * pooled.standard_error and freedom < 10


def test_settings_are_compared_prompt_by_prompt():
    rows = target_scores(main_seeds=(0,), ablations=False)
    table = claims_table(rows).set_index("claim")
    chosen = held_out_at_chosen(rows)
    high, low = (_pick(chosen, setting, 1, "NLL") for setting in ("high", "low"))
    fall = difference(high, low, macro=True)
    assert _row(table, "Independent drafts")[["ci_low", "ci_high"]].tolist() == pytest.approx(list(fall.interval))
    growth = gain_difference(_pick(chosen, "low", 4, "AL"), low, _pick(chosen, "high", 4, "AL"), high, macro=True)
    assert _row(table, "gain of DBlast grows").ours == pytest.approx(growth.value)
    assert _row(table, "gain of DBlast grows").ci_low == pytest.approx(growth.interval[0])


def test_the_best_temperature_is_compared_on_all_prompts(scores, table):
    row = _row(table, "best Z_T")
    assert row.ours == 0.5 and row.verdict == "reproduced"
    # At low determinism the calibration prompts insist on Z_T = 1, the held-out ones prefer 0.5.
    rows = scores[(scores.seed == 0) & scores.K.isin([1, 4])].copy()
    ours = (rows.setting == "low") & (rows.K == 4) & (rows.loss == "AL") & (rows.construction == "all_prefixes")
    rows.loc[ours & (rows.split == "calibration") & (rows.category_temperature == 1.0), "passes"] *= 0.5
    rows.loc[ours & (rows.split == "held_out") & (rows.category_temperature == 0.5), "passes"] *= 0.9
    sides = [_pick(rows, setting, 4, "AL") for setting in ("low", "high")]
    assert best_category_temperature_shift(*(side[side.split == "held_out"] for side in sides)).value == 0
    estimate = best_category_temperature_shift(*sides)
    row = _row(claims_table(rows).set_index("claim"), "best Z_T")
    assert estimate.n == 48 and row.ours == estimate.value == 0.5
    assert (row.ci_low, row.ci_high) == estimate.interval


def test_the_papers_exceptions_are_cells_of_one_task_at_high_determinism(scores, table):
    chosen = held_out_at_chosen(scores)
    chat = chosen[chosen.task == "chat"]
    estimate = gain(_pick(chat, "high", 1, "AL"), _pick(chat, "high", 4, "AL"))
    row = _row(table, "DFlash+AL over DBlast, chat")
    assert row.ours == pytest.approx(estimate.value) and row.verdict == "not reproduced"
    # Tasks that a study does not have leave no row.
    fewer = claims_table(target_scores(main_seeds=(0,), ablations=False, prompts=8).query("task != 'code'"))
    assert not fewer.claim.str.contains("HumanEval").any() and fewer.claim.str.contains("MT-Bench").any()


def test_a_drafter_that_accepts_nothing_leaves_its_claims_undecided(scores):
    nothing = scores.assign(passes=scores.emitted.astype(float))
    rows = claims_table(nothing)
    gains = rows[rows.claim.str.contains("over DFlash") & rows.claim.str.endswith("(%)")]
    assert len(gains) and gains.ours.isna().all() and set(gains.verdict) == {"undecided"}


def test_figure_1_becomes_a_claim_where_its_points_are_given(scores):
    rng = np.random.default_rng(1)
    target = scores.target.iloc[0]
    points = []
    for prompt in range(30):
        for place, d in enumerate((0.1, 0.6)):
            base = 1.0 + rng.uniform(0, 0.2)
            for method, value in (("DFlash", base), ("DBlast", base * (2.0 if d < 0.2 else 1.1))):
                head = {"target": target, "split": "held_out", "prompt_id": f"p{prompt}", "point": 2 * prompt + place}
                points.append(head | {"determinism": d, "method": method, "seed": 0, "accepted_length": value})
    table = claims_table(scores, pd.DataFrame(points))
    row = table[table.claim.str.contains("least decided")].iloc[0]
    assert row.ours == pytest.approx(90.0) and row.verdict == "reproduced" and row.target == target
    assert "held-out prompts" in row.claim
    flat = pd.DataFrame(points)
    flat.loc[flat.method == "DBlast", "accepted_length"] = 1.1 * flat[flat.method == "DFlash"].accepted_length.to_numpy()
    row = claims_table(scores, flat).query("claim.str.contains('least decided')").iloc[0]
    assert row.ours == pytest.approx(0.0, abs=1e-9) and row.verdict != "reproduced"


def test_verdict_lines_hold_the_chosen_claims_with_their_intervals(scores):
    table = claims_table(scores)
    lines = verdict_lines(table, "Returns diminish")
    assert len(lines) == 2 * table.target.nunique() and all("[" in line and "paper" in line for line in lines)
    assert verdict_lines(table, "no such claim") == []



def test_claims_side_by_side_keep_every_number_and_verdict(scores):
    both = pd.concat([scores, target_scores(ablations=False).assign(target="other")], ignore_index=True)
    rows = claims_table(both)
    table = claims_display(rows)
    assert list(table.display) == ["paper", "toy", "other"] and table.display.index.is_unique
    words = {"reproduced": "yes", "not reproduced": "no", "undecided": "open"}
    for row in rows.itertuples():
        value, low, high, word = table.display.loc[row.claim, row.target].replace("[", "").replace("]", "").replace(",", "").split()
        digits = 2 if "(tokens)" in row.claim or "best Z_T" in row.claim else 1
        assert [float(x) for x in (value, low, high)] == [round(x, digits) for x in (row.ours, row.ci_low, row.ci_high)]
        assert {len(x.split(".")[1]) for x in (value, low, high)} == {digits}
        assert word == words[row.verdict] and table.display.paper[row.claim] == row.paper
    # The other target trained no ablations.
    assert (table.display.other == "").sum() == sum("diminish" in c or "AL loss" in c for c in table.display.index) > 0


def test_a_rounded_zero_has_no_sign(scores):
    rows = claims_table(scores).head(2).assign(ours=-0.001, ci_low=-0.04, ci_high=0.0)
    assert claims_display(rows).display.toy.str.startswith(("-0.00 ", "-0.0 ")).sum() == 0
    assert "-0.04" in claims_display(rows).display.toy.iloc[0]
