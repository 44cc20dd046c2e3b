"""Tables of an evaluation: ratios, intervals, and prompts that have no part in both choosing and counting."""

import numpy as np
import pandas as pd
import pytest

from dblast.errors import DBlastError
from dblast.reproduction.own.evaluation import accepted_lengths, at_calibrated_temperature, readable
from dblast.reproduction.own.plots import curves_figure, evaluation_figure, png


def scores(temperatures=(0.0, 1.0), categories=4, prompts=10):
    rows = []
    for setting in ("high", "low"):
        for i in range(prompts):
            for temperature in temperatures if categories > 1 else (float("nan"),):
                # Z_T = 1 is better on every prompt but the first.
                passes = 20.0 + i + (5 if (temperature == 0.0) != (i == 0) else 0)
                rows.append(
                    {
                        "drafter": "mine",
                        "K": categories,
                        "proposal": "greedy_branch",
                        "setting": setting,
                        "prompt_id": f"p{i}",
                        "task": "chat" if i % 2 else "haiku",
                        "category_temperature": temperature,
                        "emitted": 60,
                        "passes": passes,
                        "anchor_accepted": 2.5 * 54,
                        "anchors": 54,
                    }
                )
    return pd.DataFrame(rows)


def test_the_temperature_is_chosen_on_other_prompts_than_those_that_count():
    chosen = at_calibrated_temperature(scores(), {"p0"})
    assert set(chosen.category_temperature) == {0.0} and "p0" not in set(chosen.prompt_id)
    chosen = at_calibrated_temperature(scores(), {"p1", "p2"})
    assert set(chosen.category_temperature) == {1.0} and chosen.prompt_id.nunique() == 8


def test_a_known_temperature_counts_on_all_prompts():
    chosen = at_calibrated_temperature(scores(), {"p1"}, {"high": 0.0})
    by_setting = chosen.groupby("setting").agg(t=("category_temperature", "first"), n=("prompt_id", "nunique"))
    assert by_setting.t.to_dict() == {"high": 0.0, "low": 1.0}
    assert by_setting.n.to_dict() == {"high": 10, "low": 9}


def test_no_prompts_are_left():
    with pytest.raises(DBlastError, match="no prompts are left to evaluate"):
        at_calibrated_temperature(scores(), {f"p{i}" for i in range(10)})
    with pytest.raises(DBlastError, match="to choose the category temperature"):
        at_calibrated_temperature(scores(), set())


def test_both_averages_and_their_intervals():
    rows = at_calibrated_temperature(scores(categories=1), {"p0"})
    table = accepted_lengths(rows)
    overall = table[(table.task == "all") & (table.setting == "high")].iloc[0]
    part = rows[rows.setting == "high"]
    ratio = (part.emitted.sum() - part.passes.sum()) / part.passes.sum()
    assert overall.in_loop == pytest.approx(ratio) and overall.per_anchor == pytest.approx(2.5)
    influence = (part.emitted - part.passes - ratio * part.passes) / part.passes.mean()
    assert overall.in_loop_error == pytest.approx(influence.std(ddof=1) / 3)
    assert overall.in_loop_low < ratio < overall.in_loop_high and overall.n == 9
    assert np.isnan(overall.category_temperature)
    # Responses shorter than a block have no anchor.
    short = accepted_lengths(rows.assign(anchors=0, anchor_accepted=0.0))
    assert short.per_anchor.isna().all() and "–" in set(readable(short)["per anchor"])


def test_tables_and_figures_for_people():
    table = accepted_lengths(at_calibrated_temperature(scores(), {"p1"}))
    shown = readable(table)
    assert list(shown.setting.unique()) == ["high", "low"] and list(shown.task[:3]) == ["haiku", "chat", "all"]
    assert set(shown.Z_T) == {"1"} and shown["in the loop"].str.match(r"[\d.]+ ± [\d.]+ \[[\d.]+, [\d.]+\]").all()
    first = png(evaluation_figure(table))
    assert first == png(evaluation_figure(table)) and first.startswith(b"\x89PNG")
    history = [{"step": i, "loss": 1.0 / (i + 1), "accepted_per_anchor": i} for i in range(3)]
    assert png(curves_figure({"fine-tuning": history, "pre-training": []}))
