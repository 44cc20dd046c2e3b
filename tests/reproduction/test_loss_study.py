"""Notebook 06's tables: numbers that can be computed by hand, pairing, and what is refused."""

import matplotlib.pyplot as plt
import pytest

from dblast.errors import DBlastError
from dblast.reproduction.loss_study import LOSSES, loss_descriptions, loss_figure, loss_rows, loss_table, paired_losses
from dblast.reproduction.objectives import OBJECTIVES
from dblast.reproduction.profiles import OTHER_LOSSES, get_profile
from tests.helpers import assert_close, macro_length, toy_scores

#: Passes for 60 tokens of a prompt; every loss saves a share of them, the same for all prompts.
SAVED = {"NLL": 0.0, "AL": 0.1, "TRUNC": -0.1, "KD": 0.0}


def loss_scores(**options):
    variants = []
    for loss, saved in SAVED.items():
        for k in (1, 4):
            method = "DFlash" if (k, loss) == (1, "NLL") else f"{loss} {k}"
            names = {"target": "toy", "method": method, "K": k, "loss": loss}
            variants.append((names, 1 - saved - 0.05 * (k > 1)))
    return toy_scores(variants, **options)


def test_lengths_and_gains_are_those_computed_macro_length():
    scores, passes = loss_scores()
    rows = loss_rows(scores, "toy").set_index(["setting", "loss", "K"])
    assert list(dict.fromkeys(rows.index.get_level_values("setting"))) == ["high", "low"]
    dflash = macro_length(passes, 1.0)
    for loss, saved in SAVED.items():
        for k in (1, 4):
            row = rows.loc["low", loss, k]
            length, nll = macro_length(passes, 1 - saved - 0.05 * (k > 1)), macro_length(passes, 1 - 0.05 * (k > 1))
            assert_close([row.accepted_length, row.gain, row.over_nll], [length, 100 * (length / dflash - 1), 100 * (length / nll - 1)])
            assert row.n == 8
    assert rows.loc["low", "NLL", 1].gain_error == 0
    assert (rows.xs(4, level="K").category_temperature == 1.0).all()


def test_gains_are_paired_and_carry_the_noise_of_seeds():
    """Prompts differ by tens of per cent, losses by a fixed factor: paired errors are far below those of the lengths."""
    scores, _ = loss_scores(noise=0.002)
    row = loss_rows(scores, "toy").set_index(["setting", "loss", "K"]).loc["low", "AL", 1]
    assert 0 < row.gain_error < 0.2 * 100 * row.standard_error / row.accepted_length
    noisy, _ = loss_scores(seeds=(0, 1, 2))
    noisy.loc[(noisy.loss == "AL") & (noisy.seed == 2), "passes"] *= 0.9
    spread = loss_rows(noisy, "toy").set_index(["setting", "loss", "K"]).loc["low", "AL", 1]
    assert spread.seed_spread > 0.1 and spread.gain_error > 1


def test_the_table_shows_every_loss_at_both_k_and_no_gain_of_nll_over_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("dblast.reproduction.paths.RUNS", tmp_path)
    scores, _ = loss_scores()
    table = loss_table(scores, "toy")
    assert [loss for k, loss in table.display.index if k == 4] == ["NLL", "AL", "TRUNC", "KD"]
    assert table.display.loc[(4, "NLL"), "low over NLL"] == ""
    assert table.display.loc[(1, "AL"), "low over NLL"].startswith("+") and "%" in table.display.loc[(1, "AL"), "low over NLL"]
    assert {path.suffix for path in table.save("any")} == {".csv", ".md", ".tex"}
    several = loss_table(loss_scores(noise=0.01, seeds=(0, 1))[0], "toy").caption
    assert "1 fine-tuning seed," in table.caption and "and fine-tuning seeds" not in table.caption
    assert "2 fine-tuning seeds," in several and "(paired) and fine-tuning seeds for gains" in several


def test_verdicts_follow_the_intervals():
    scores, passes = loss_scores(noise=0.001)
    rows = paired_losses(scores, "toy", [("AL", "TRUNC"), ("TRUNC", "NLL")])
    assert len(rows) == 2 * 2 * 2
    assert set(rows[rows.loss == "AL"].verdict) == {"better"} and set(rows[rows.loss == "TRUNC"].verdict) == {"worse"}
    exact = paired_losses(loss_scores()[0], "toy", [("AL", "TRUNC")]).query("K == 1 and setting == 'low'").iloc[0]
    assert_close(exact.difference, macro_length(passes, 0.9) - macro_length(passes, 1.1))
    same, _ = loss_scores(noise=0.05)
    assert "undecided" in set(paired_losses(same, "toy", [("KD", "NLL")]).verdict)


def test_a_loss_that_was_not_trained_is_refused():
    with pytest.raises(DBlastError, match="'LK' was not trained on toy"):
        paired_losses(loss_scores()[0], "toy", [("LK", "NLL")])
    scores, _ = loss_scores()
    with pytest.raises(DBlastError, match="no description of loss 'ODD'"):
        loss_rows(scores.assign(loss="ODD"), "toy")


def test_the_figure_has_a_line_for_every_loss_and_a_panel_for_every_setting():
    figure = loss_figure(loss_rows(loss_scores()[0], "toy"))
    assert len(figure.axes) == 2
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["NLL", "AL", "TRUNC", "KD"]
    for axes in figure.axes:
        assert [len(container.lines[0].get_xdata()) for container in axes.containers] == [4, 4]
    plt.close(figure)


def test_the_profile_trains_every_loss_that_is_described():
    assert {"NLL", "AL", *OTHER_LOSSES} == set(LOSSES) == set(loss_descriptions().index)
    # What the realised token alone says of a distribution is a stand-in for those that see all of it.
    assert set(OBJECTIVES) - set(LOSSES) == {"TV1", "NLA1", "LK1"}
    for plan in get_profile("losses").plans:
        plan.check()
        for k in (1, 4):
            assert {variant.loss for variant in plan.variants if variant.K == k} == set(LOSSES)
