"""Finished tables: the paper's two kinds of error in their own columns, and LaTeX that is escaped."""

import re

import numpy as np
import pandas as pd
import pytest

from dblast.reproduction.bootstrap import Resampled, bootstrap_gain
from dblast.reproduction.estimates import VARIANT_COLUMNS, accepted_length, gain, held_out_at_chosen, seed_spread
from dblast.reproduction.latex import escape
from dblast.reproduction.profiles import get_profile
from dblast.reproduction.results import open_table
from dblast.reproduction.tables import Table, bracketed, gain_spread, main_variants, plus_minus, table2, table3, table4


@pytest.fixture(scope="module")
def scores():
    return open_table(get_profile("cpu"), "tiny", "scores")


def test_table_2_has_prompt_intervals_and_seed_spread_apart(scores):
    table = table2(scores, "tiny", "A footnote.")
    assert table.caption.endswith(" A footnote.") and "95 %" in table.caption and "bootstrap" in table.caption
    chosen = main_variants(scores)
    base = chosen[(chosen.setting == "low") & (chosen.method == "DFlash")]
    ours = chosen[(chosen.setting == "low") & (chosen.method == "DBlast")]
    line = table.display.loc[("low", "DBlast")]
    assert line["average"] == plus_minus(accepted_length(ours, macro=True))
    assert line["gain (%)"] == bracketed(bootstrap_gain(ours, base, macro=True))
    by_seed = [gain(ours[ours.seed == s], base[base.seed == s], macro=True).value for s in (0, 1, 2)]
    assert line["gain (%): seed spread"] == f"{np.std(by_seed, ddof=1):.1f}"
    assert line["seed spread"] == f"{seed_spread(ours, macro=True):.3f}"
    assert list(table.display.columns[-5:]) == ["average", "seed spread", "gain (%)", "gain (%): seed spread", "Z_T"]
    first = table.display.loc[("low", "DFlash")]
    assert first["gain (%)"] == first["gain (%): seed spread"] == first["Z_T"] == ""


@pytest.mark.parametrize("make", [table2, table3, table4])
def test_the_tidy_rows_carry_the_gains_that_are_shown(scores, make):
    table = make(scores, "tiny")
    name = next(column for column in table.display.columns if column.startswith("gain"))
    rows = table.rows[table.rows.gain.notna()]
    assert (rows.task == "average").all() and (rows.seed == "all").all()
    shown = [f"{row.gain:+.1f} [{row.gain_low:+.1f}, {row.gain_high:+.1f}]" for row in rows.itertuples()]
    assert sorted(shown) == sorted(cell for cell in table.display[name] if cell)
    spreads = sorted(f"{spread:.1f}" for spread in rows.gain_seed_spread)
    assert spreads == sorted(cell for cell in table.display[f"{name}: seed spread"] if cell)
    assert len(table.rows) == len(table.rows.drop_duplicates([*VARIANT_COLUMNS, "task", "seed"]))


def test_one_seed_has_no_spread(scores):
    table = table2(scores[scores.seed == 1], "tiny")
    assert (table.display["seed spread"] == "one seed").all()
    assert set(table.display["gain (%): seed spread"]) == {"", "one seed"}
    chosen = held_out_at_chosen(scores[scores.seed == 1])
    assert np.isnan(gain_spread(chosen[chosen.K == 4], chosen[chosen.K == 1]))


@pytest.mark.parametrize("make", [table3, table4])
def test_ablation_tables_begin_with_what_they_compare_to(scores, make):
    display = make(scores, "tiny").display
    name = next(column for column in display.columns if column.startswith("gain over"))
    assert list(display.columns) == ["accepted length", name, f"{name}: seed spread", "paper", "paper gain"]
    first = display.groupby(level=0, sort=False).head(1)
    assert (first[name] == "").all() and (display.drop(first.index)[name].str.contains(r"\[.*, .*\]")).all()


def test_brackets_show_signs_and_a_dash_for_nothing():
    assert bracketed(Resampled(1.04, -0.26, 2.3, 9, 1)) == "+1.0 [-0.3, +2.3]"
    nothing = float("nan")
    assert bracketed(Resampled(nothing, nothing, nothing, 9, 1)) == "–"


def test_latex_has_minus_signs_where_numbers_are_negative():
    assert escape("+1.0 [-0.3, +2.3]") == "+1.0 [$-$0.3, +2.3]" and escape("-0.6 ± 1.0") == r"$-$0.6 $\pm$ 1.0"
    assert escape("layers 3-5, b-7, K-way") == "layers 3-5, b-7, K-way"


def test_latex_escapes_cells_and_caption():
    display = pd.DataFrame({"gain (%)": ["1 % & more", "– ± τ"]}, index=pd.Index(["a_b", "Z_T"], name="what #"))
    display["odd"] = ["<eos>|", "{x}\\n"]
    table = Table("any_name", "Title $1", "K * H^2 in 95 % of ~3, D_b < 0.2 at τ ± 1", display, display)
    text = table.latex()
    needs, body = text.split("\n", 1)
    assert needs == "% needs the packages booktabs, graphicx" and r"\toprule" in body and "multirow" not in body
    body = body.replace(r"\label{tab:any_name}", "").replace("{%\n", "{").replace(r"\ifdim\width>", "")
    assert not re.search(r"(?<!\\)[%#]", body) and body.count(r"\%") == 3
    assert not re.search(r"[^\x00-\x7f]", body)
    # What is left of these letters is mathematics, or separates columns.
    outside = re.sub(r"(?<!\\)\$[^$]*(?<!\\)\$", "", body)
    assert not re.search(r"(?<!\\)[_^~$]", outside)
    assert body.count("&") - body.count(r"\&") == 6 and r"Title \$1" in body
    # OT1 has other characters in their places.
    assert r"\textless{}eos\textgreater{}\textbar{}" in body and r"$D_b$ \textless{} 0.2" in body
    assert not re.search("[<>|]", body) and r"\{x\}\textbackslash{}n" in body
