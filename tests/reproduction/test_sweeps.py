"""Notebook 07's tables: which plan has which value, gains that can be computed by hand, and what is refused."""

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from dblast.errors import DBlastError
from dblast.reproduction.plans import Profile
from dblast.reproduction.profiles import MAIN, SMOLLM2, SWEPT_BLOCK_LENGTHS, SWEPT_TAU, TINY, get_profile
from dblast.reproduction.sweeps import (
    block_length,
    loss_gains,
    sweep_figure,
    sweep_rows,
    sweep_table,
    swept,
    threshold,
    training_setting,
    training_setting_figure,
    training_setting_rows,
    verdict_counts,
    with_verdicts,
)
from tests.helpers import assert_close, macro_length, toy_scores

METHOD = {(1, "NLL"): "DFlash", (1, "AL"): "DFlash+AL", (4, "NLL"): "DFlash+DS", (4, "AL"): "DBlast"}


def sweep_scores(factors, methods=METHOD, **options):
    """Scores of every label in ``factors``; its passes are the factor, times 0.9 at K = 4, of the same prompts'."""
    variants = []
    for label, factor in factors.items():
        for k, loss in methods:
            names = {"target": label, "method": METHOD[k, loss], "K": k, "loss": loss}
            variants.append((names, factor * (0.9 if k > 1 else 1.0)))
    return toy_scores(variants, **options)


def test_the_profile_of_sweeps_varies_one_value_at_a_time():
    profile = get_profile("sweeps")
    taus = swept(profile, "tiny", threshold)
    assert list(taus) == sorted({*SWEPT_TAU, TINY.finetune.tau}) and taus[TINY.finetune.tau] == "tiny"
    assert list(swept(profile, "tiny", block_length)) == sorted({*SWEPT_BLOCK_LENGTHS, 7})
    for target in ("tiny", "smollm2"):
        assert swept(profile, target, training_setting) == {"high": target, "low": f"{target}-low"}
    for plan in profile.plans:
        base = profile.plan("smollm2" if plan.target == "smollm2" else "tiny")
        changed = [read(plan) != read(base) for read in (threshold, block_length, training_setting)]
        assert sum(changed) == (plan.label != base.label)
        # Undone, nothing else is left of the difference, save which variants a threshold can matter to.
        undone = replace(
            plan,
            label=base.label,
            variants=base.variants,
            finetune=replace(plan.finetune, tau=base.finetune.tau),
            drafter=replace(plan.drafter, block_length=base.drafter.block_length),
            data=replace(plan.data, training_setting=base.data.training_setting),
            pretrain_data=base.pretrain_data,
        )
        assert undone == base
        # What is fine-tuned on other text starts from the same drafter.
        assert (plan.pretrain_data or plan.data) == (base.pretrain_data or base.data)


def test_sweeps_vary_around_the_drafters_of_table_2():
    profile = get_profile("sweeps")
    for plan in (TINY, SMOLLM2):
        base = profile.plan(plan.label)
        assert replace(base, variants=plan.variants) == plan and base.variants == MAIN


def test_lengths_and_gains_are_those_computed_macro_length():
    factors = {"toy": 1.0, "toy-b3": 1.1, "toy-b9": 0.8}
    scores, passes = sweep_scores(factors)
    rows = sweep_rows(scores, {3: "toy-b3", 7: "toy", 9: "toy-b9"}, 7, "b").set_index(["b", "setting", "method"])
    for value, factor in ((3, 1.1), (7, 1.0), (9, 0.8)):
        for method in METHOD.values():
            row, saved = rows.loc[value, "low", method], 0.9 if method in ("DFlash+DS", "DBlast") else 1.0
            length = macro_length(passes, factor * saved)
            assert_close(row.accepted_length, length)
            assert row.n == 8 and row.seeds == 1
            if value == 7:
                assert np.isnan(row.over_base)
            else:
                assert_close(row.over_base, 100 * (length / macro_length(passes, saved) - 1))
            if method == "DFlash":
                assert np.isnan(row.gain)
            else:
                assert_close(row.gain, 100 * (length / macro_length(passes, factor) - 1))
    assert (rows.xs("DBlast", level="method").category_temperature == 1.0).all()


def test_gains_are_paired_by_prompt():
    # Prompts differ by a third, the values by 2 % on every prompt alike.
    scores, _ = sweep_scores({"toy": 1.0, "toy-b3": 1.02})
    rows = sweep_rows(scores, {3: "toy-b3", 7: "toy"}, 7, "b")
    row = rows[(rows.b == 3) & (rows.method == "DFlash") & (rows.setting == "low")].iloc[0]
    assert row.over_base_error < 0.2 * 100 * row.standard_error / row.accepted_length


def test_seeds_add_their_noise_and_a_sweep_without_dflash_has_no_gain_over_it():
    scores, _ = sweep_scores({"toy": 1.0, "toy-b3": 1.1}, seeds=(0, 1, 2), noise=0.05, methods=[(1, "AL"), (4, "AL")])
    rows = sweep_rows(scores, {3: "toy-b3", 7: "toy"}, 7, "b")
    assert rows.gain.isna().all() and set(rows.method) == {"DFlash+AL", "DBlast"} and (rows.seeds == 3).all()
    one = sweep_rows(scores[scores.seed == 0], {3: "toy-b3", 7: "toy"}, 7, "b")
    # A value with one seed is compared with that seed of the others alone.
    fewer = scores[(scores.target == "toy") | (scores.seed == 0)]
    pd.testing.assert_frame_equal(sweep_rows(fewer, {3: "toy-b3", 7: "toy"}, 7, "b"), one)
    assert one.seed_spread.isna().all() and (rows.seed_spread > 0).all()


def test_the_al_loss_is_compared_with_nll_at_the_same_k_and_value():
    scores, passes = sweep_scores({"toy": 1.0, "toy-b3": 1.1})
    better = (scores.loss == "AL") & (scores.target == "toy-b3") & (scores.K == 4)
    scores = scores.assign(passes=scores.passes.where(~better, 0.95 * scores.passes))
    rows = loss_gains(scores, {3: "toy-b3", 7: "toy"}, "b").set_index(["b", "K", "setting"])
    nll = 1.1 * 0.9
    assert_close(rows.gain[3, 4, "low"], 100 * (macro_length(passes, 0.95 * nll) / macro_length(passes, nll) - 1))
    assert (rows.gain.drop((3, 4)) == 0).all() and (rows.n == 8).all() and len(rows) == 8
    half = loss_gains(scores[(scores.K == 4) | (scores.loss == "NLL")], {7: "toy"}, "b")
    assert set(half.K) == {4}


def test_tables_and_figures_name_the_value_and_n():
    scores, _ = sweep_scores({"toy": 1.0, "toy-b3": 1.1})
    rows = sweep_rows(scores, {3: "toy-b3", 7: "toy"}, 7, "b")
    table = sweep_table(rows, "block_length_toy", "Block length (toy)", "over DFlash", "gain")
    assert "n = 8" in table.caption and table.display.index.names == ["block length b", "method"]
    # The plan has one fine-tuning seed: no error has a part of seeds.
    assert "1 fine-tuning seed," in table.caption and "and fine-tuning seeds" not in table.caption
    more = sweep_table(rows.assign(seeds=3), "block_length_toy", "Block length (toy)", "over DFlash", "gain")
    assert "3 fine-tuning seeds," in more.caption and "(paired) and fine-tuning seeds for gains" in more.caption
    assert table.display.loc[(3, "DFlash"), "low: over DFlash"] == ""
    assert table.display.loc[(7, "DBlast"), "low: over DFlash"].startswith("+")
    for even in (False, True):
        figure = sweep_figure(rows, "block length b (tokens)", even)
        assert len(figure.axes) == 2 and [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["3", "7"]
        assert figure.axes[0].get_xlabel() == "block length b (tokens)" and "n = 8" in figure._suptitle.get_text()
        plt.close(figure)


def test_training_settings_of_two_targets_in_one_figure():
    profile = Profile(
        "toys",
        tuple(
            replace(plan, label=label, data=replace(plan.data, training_setting=setting))
            for plan, name in ((TINY, "one"), (SMOLLM2, "two"))
            for label, setting in ((name, "high"), (f"{name}-low", "low"))
        ),
    )
    scores, passes = sweep_scores({"one": 1.0, "one-low": 0.9, "two": 1.0, "two-low": 1.1})
    rows = training_setting_rows(scores, profile, ["one", "two"], "high")
    picked = rows[(rows.method == "DFlash") & (rows.setting == "low") & (rows.trained == "low")].set_index("target").over_base
    assert_close(picked["one"], 100 * (macro_length(passes, 0.9) / macro_length(passes, 1.0) - 1))
    assert picked["two"] < 0
    figure = training_setting_figure(rows, "low")
    assert len(figure.axes) == 2 and "low" in figure.axes[0].get_ylabel()
    plt.close(figure)
    told = with_verdicts(rows)
    assert set(told[told.target == "one"].verdict) == {"better"} and set(told[told.target == "two"].verdict) == {"worse"}
    assert len(told) == len(rows) / 2
    counts = verdict_counts(told, "target")
    assert counts.loc["one"].tolist() == [8, 0, 0] and counts.loc["two"].tolist() == [0, 0, 8]


def test_what_is_refused():
    profile = get_profile("sweeps")
    with pytest.raises(DBlastError, match="varies this value"):
        swept(profile, "tiny", lambda plan: plan.data.seed)
    twice = Profile("twice", (TINY, *(replace(TINY, label=x, drafter=replace(TINY.drafter, block_length=3)) for x in "ab")))
    with pytest.raises(DBlastError, match="two plans"):
        swept(twice, "tiny", block_length)
    scores, _ = sweep_scores({"toy": 1.0})
    with pytest.raises(DBlastError, match="no scores of 'toy-b3'"):
        sweep_rows(scores, {3: "toy-b3", 7: "toy"}, 7, "b")
    apart, _ = sweep_scores({"toy-b3": 1.0}, seeds=(1,))
    with pytest.raises(DBlastError, match="no fine-tuning seed in common"):
        sweep_rows(pd.concat([scores, apart]), {3: "toy-b3", 7: "toy"}, 7, "b")
    with pytest.raises(DBlastError, match="not a value"):
        sweep_rows(scores, {7: "toy"}, 5, "b")
