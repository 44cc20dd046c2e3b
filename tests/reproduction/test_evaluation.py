"""Tables of an evaluation: ratios, intervals, and prompts that have no part in both choosing and counting."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from dblast.errors import DBlastError
from dblast.reproduction.own import evaluation
from dblast.reproduction.own.evaluation import accepted_lengths, readable, score_proposals
from dblast.reproduction.own.plots import curves_figure, evaluation_figure, png


def drafter(categories):
    return SimpleNamespace(config=SimpleNamespace(num_categories=categories))


def texts(prompts=10):
    return {
        setting: [SimpleNamespace(prompt_id=f"p{i}", number=i) for i in range(prompts)] for setting in ("high", "low")
    }


@pytest.fixture(autouse=True)
def replay(monkeypatch):
    """Scores by formula: Z_T = 1 is better on every prompt but the first. Gives the calls: prompts and temperatures."""
    calls = []

    def score(drafter, rows, temperatures, *, proposal, precision, description=None):
        calls.append(([row.prompt_id for row in rows], list(temperatures)))
        single = drafter.config.num_categories <= 1
        return pd.DataFrame(
            {
                "prompt_id": row.prompt_id,
                "task": "chat" if row.number % 2 else "haiku",
                "category_temperature": float("nan") if single else temperature,
                "emitted": 60,
                "passes": 20.0 + row.number + (5 if (temperature == 0.0) != (row.number == 0) else 0),
                "anchor_accepted": 2.5 * 54,
                "anchors": 54,
            }
            for row in rows
            for temperature in temperatures
        )

    monkeypatch.setattr(evaluation, "score", score)
    return calls


def scored(calibration, categories=4, **options):
    options = {"proposals": ("greedy_branch",), "category_temperatures": (0.0, 1.0)} | options
    return score_proposals(drafter(categories), texts(), "mine", calibration, **options)


def test_no_interval_of_a_length_reaches_below_zero():
    few = pd.DataFrame({"prompt_id": ["a", "b", "c"], "task": "chat", "emitted": [10, 10, 12], "passes": [10.0] * 3,
                        "anchor_accepted": [0.0, 0.0, 2.0], "anchors": 9, "category_temperature": 1.0, "drafter": "d",
                        "K": 4, "proposal": "soft", "setting": "high"})  # fmt: skip
    (row,) = accepted_lengths(few).to_dict("records")
    assert row["in_loop_low"] == row["per_anchor_low"] == 0.0 < row["in_loop"] < row["in_loop_high"]
    assert "[0.00, " in readable(accepted_lengths(few)).iloc[0]["in the loop"]


def test_the_temperature_is_chosen_on_other_prompts_than_those_that_count(replay):
    rows = scored({"p0"})
    assert set(rows.category_temperature) == {0.0} and "p0" not in set(rows.prompt_id)
    assert replay[:2] == [(["p0"], [0.0, 1.0]), ([f"p{i}" for i in range(1, 10)], [0.0])]
    rows = scored({"p1", "p2"})
    assert set(rows.category_temperature) == {1.0} and rows.prompt_id.nunique() == 8


def test_a_known_temperature_counts_on_all_prompts():
    rows = scored({"p1"}, known={"high": 0.4})
    by_setting = rows.groupby("setting").agg(t=("category_temperature", "first"), n=("prompt_id", "nunique"))
    assert by_setting.t.to_dict() == {"high": 0.4, "low": 1.0}
    assert by_setting.n.to_dict() == {"high": 10, "low": 9}


def test_no_prompts_are_left():
    with pytest.raises(DBlastError, match="no prompts are left to evaluate"):
        scored({f"p{i}" for i in range(10)})
    with pytest.raises(DBlastError, match="to choose the category temperature"):
        scored(set())


def test_both_averages_and_their_intervals():
    rows = scored({"p0"}, categories=1)
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
    table = accepted_lengths(scored({"p1"}))
    shown = readable(table)
    assert list(shown.setting.unique()) == ["high", "low"] and list(shown.task[:3]) == ["haiku", "chat", "all"]
    assert set(shown.Z_T) == {"1"} and shown["in the loop"].str.match(r"[\d.]+ ± [\d.]+ \[[\d.]+, [\d.]+\]").all()
    first = png(evaluation_figure(table))
    assert first == png(evaluation_figure(table)) and first.startswith(b"\x89PNG")
    history = [{"step": i, "loss": 1.0 / (i + 1), "accepted_per_anchor": i} for i in range(3)]
    assert png(curves_figure({"fine-tuning": history, "pre-training": []}))
