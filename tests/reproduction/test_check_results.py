"""Kept results against new ones: verdicts of single cells, false alarms over many, tables, the command."""

import re
import shutil

import numpy as np
import pandas as pd
import pytest

from dblast.reproduction import check_results as module
from dblast.reproduction.check_results import (
    BEYOND,
    FEW,
    MISSING,
    NEW,
    SAME,
    WITHIN,
    check_results,
    compare,
    describe,
    failed,
    read_cells,
)
from dblast.errors import DBlastError
from dblast.reproduction.paths import FIGURES


def table(values, errors, counts=np.nan, names=None, verdict=""):
    names = [f"cell {i}" for i in range(len(values))] if names is None else names
    cells = {"table": "toy", "quantity": "length", "cell": names, "value": values, "error": errors}
    return pd.DataFrame(cells | {"n": counts, "verdict": verdict})


def one(kept, new):
    """The row of a comparison of one cell, given as (value, error) or (value, error, count)."""
    (row,) = compare(*(table([side[0]], [side[1]], *side[2:]) for side in (kept, new))).itertuples()
    return row


# -- single cells -------------------------------------------------------------------------------


def test_rounding_is_the_same():
    assert one((0.3, 0.0), (0.3 + 1e-6, 0.0)).verdict == SAME
    assert one((0.3, 0.0), (0.3 + 1e-5, 0.0)).verdict == BEYOND
    assert one((0.3, 0.01), (0.3 + 1e-5, 0.01)).verdict == WITHIN


def test_errors_add_as_independent_ones_and_z_is_in_their_units():
    row = one((2.0, 0.3), (2.25, 0.4))
    assert row.z == pytest.approx(0.5) and row.verdict == WITHIN
    # One cell alone: the usual two-sided 5 %.
    assert row.threshold == pytest.approx(1.96, abs=0.001)
    assert one((2.0, 0.3), (2.97, 0.4)).verdict == WITHIN
    assert one((2.0, 0.3), (2.99, 0.4)).verdict == one((2.0, 0.3), (1.01, 0.4)).verdict == BEYOND


def test_the_threshold_grows_with_the_cells_that_can_be_judged():
    kept = table(np.zeros(1000), np.ones(1000))
    assert compare(kept, kept).threshold.unique() == pytest.approx([4.0556], abs=1e-3)
    more = pd.concat([kept, table([1.0] * 500, [0.0] * 500, names=[f"exact {i}" for i in range(500)])])
    assert compare(more, kept).threshold.min() == pytest.approx(4.0556, abs=1e-3)


def test_freedom_is_welchs_and_of_one_error_that_stands_for_both():
    # Two-sided 5 % quantiles (R: qt(0.975, df)).
    assert one((1.0, 0.2, 11), (1.0, 0.2, 11)).threshold == pytest.approx(2.086, abs=1e-3)
    assert one((1.0, 0.2, 11), (1.0, 0.2)).threshold == pytest.approx(2.086, abs=1e-3)
    assert one((1.0, 0.2, 11), (1.0, 0.0, 11)).threshold == pytest.approx(2.228, abs=1e-3)
    row = one((1.0, np.nan), (1.5, 0.1))
    assert row.z == pytest.approx(0.5 / (0.1 * 2**0.5)) and row.verdict == BEYOND


def test_cells_of_one_side_are_missing_or_new():
    kept = table([1.0, 2.0, np.nan], [0.1, 0.1, 0.1], names=["b", "c", "a"])
    result = compare(kept, table([2.0, 5.0, 1.0], [0.1, 0.1, 0.1], names=["c", "d", "a"])).set_index("cell").verdict
    assert result.to_dict() == {"b": MISSING, "c": SAME, "d": NEW, "a": NEW}


def test_a_movement_without_any_error_is_not_judged_and_zero_errors_are_exact():
    row = one((1.0, np.nan), (100.0, np.nan))
    assert row.verdict == WITHIN and not row.judged and np.isnan(row.z)
    assert one((1.5, 0.0), (1.4, 0.0)).verdict == BEYOND and one((0.0, 0.0), (0.1, 0.1)).verdict == WITHIN
    assert one((1.5, 0.1), (np.inf, 0.1)).verdict == BEYOND


# -- many cells ---------------------------------------------------------------------------------


def runs(cells, prompts, rng):
    """Two independent runs of the same cells: means over skewed prompts with their estimated errors."""
    level = rng.uniform(0.1, 5, (cells, 1))
    draws = [level * rng.gamma(2, size=(cells, prompts)) for _ in range(2)]
    return [table(side.mean(1), side.std(1, ddof=1) / prompts**0.5, prompts) for side in draws]


@pytest.mark.parametrize("prompts", [FEW, 50])
def test_many_unchanged_cells_raise_no_false_alarms(prompts):
    """The chance that any of 200 cells is reported; its own standard error over 150 runs is 1.8 %."""
    rng = np.random.default_rng(prompts)
    alarms = [(compare(*runs(200, prompts, rng)).verdict == BEYOND).any() for _ in range(150)]
    assert np.mean(alarms) <= 0.08


def test_a_planted_shift_is_found_among_many_cells_and_nothing_else():
    kept, new = runs(400, 50, np.random.default_rng(1))
    planted = np.zeros(400)
    planted[[7, 300]] = [8, -8]
    result = compare(kept, new.assign(value=new.value + planted * np.hypot(kept.error, new.error)))
    assert set(result.cell[result.verdict == BEYOND]) == {"cell 7", "cell 300"}
    assert set(result.verdict) == {BEYOND, WITHIN}


# -- the outcome --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "new", "status"),
    [
        (table([1.0], [0.1]), table([1.1], [0.1]), False),
        (table([1.0], [0.1]), table([2.0], [0.1]), True),
        (table([1.0], [np.nan]), table([2.0], [np.nan]), False),
        (table([1.0, 1.0], 0.1), table([1.0], [0.1]), True),
        (table([1.0, 1.0], [0.1, np.nan]), table([1.0], [0.1]), False),
        (table([1.0], [0.1]), table([1.0, 1.0], 0.1), False),
        (table([1.0], [0.1], verdict="reproduced"), table([1.0], [0.1], verdict="undecided"), False),
        (table([1.0], [0.1], verdict="reproduced"), table([1.0], [0.1], verdict="not reproduced"), True),
    ],
)
def test_moved_gone_and_reversed_fail_the_check(kept, new, status):
    assert failed(compare(kept, new)) == status


def test_the_summary_counts_and_shows_what_moved_largest_first():
    kept = table([1.0] * 5, [0.1, 0.1, 0.1, 0.1, np.nan], verdict="reproduced")
    new = kept.assign(value=[1.0, 2.0, 4.0, 1.05, 1.2], verdict=["undecided", *["reproduced"] * 4])
    text = re.sub(r"\x1b\[\d+m", "", describe(compare(kept, new)))
    for line in ("1 same", "2 moved within errors", "2 moved beyond errors", "0 missing"):
        assert re.search(rf"^ +{line}$", text, re.MULTILINE)
    assert text.index("cell 2: 1 -> 4 (z = +21.2)") < text.index("cell 1: 1 -> 2") < text.index("cell 3: 1 -> 1.05")
    assert "they count as within errors): 1" in text and "Another verdict: reproduced -> undecided: cell 0" in text
    assert "Not compared: timings" in text and text.endswith("Results moved beyond errors.")
    assert "and 1 more" in describe(compare(kept, new), shown=1)


# -- the tables of a profile --------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["cpu", "losses", "sweeps", "beyond"])
def test_every_table_with_errors_has_cells_that_do_not_move_against_themselves(profile):
    cells = read_cells(FIGURES / profile)
    assert set(compare(cells, cells).verdict) == {SAME}
    known = {path.stem for path in FIGURES.glob(f"{profile}/**/*.csv") if "error" in path.read_text().split("\n")[0]}
    assert set(cells.table) >= known
    assert not cells.cell.str.contains("of an iteration").any()


def test_a_column_that_moved_is_reported_where_it_moved_and_few_prompts_give_no_error(tmp_path):
    shutil.copytree(FIGURES / "cpu", tmp_path / "cpu")
    path = tmp_path / "cpu/tables/table2_smollm2.csv"
    rows, kept = pd.read_csv(path), read_cells(FIGURES / "cpu")
    hit = (rows.setting == "low") & (rows.method == "DBlast") & (rows.seed == "all")
    rows.assign(accepted_length=rows.accepted_length.where(~hit, 2 * rows.accepted_length)).to_csv(path, index=False)
    result = compare(kept, read_cells(tmp_path / "cpu"))
    moved = result[result.verdict != SAME]
    assert len(moved) == hit.sum() == 5 and set(moved.verdict) == {BEYOND} and set(moved.table) == {"table2_smollm2"}
    rows.assign(n=FEW - 1).to_csv(path, index=False)
    few = read_cells(tmp_path / "cpu")
    assert few[few.table == "table2_smollm2"].error.isna().all()
    assert (kept[kept.table == "table1"].error == 0).all() and kept[kept.table == "claims"].error.notna().sum() > 50
    means = pd.read_csv(FIGURES / "cpu/determinism.csv").query("target == 'tiny' and setting == 'low'").entropy
    (cell,) = kept[(kept.quantity == "entropy") & (kept.cell == "tiny, low")].itertuples()
    assert (cell.value, cell.error, cell.n) == pytest.approx((means.mean(), means.sem(), len(means)))


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def rerun(tmp_path, monkeypatch):
    """The command without the work: a rerun copies the kept tables, after a change."""
    monkeypatch.setattr(module, "RUNS", tmp_path)
    calls = []

    def run(command, env, **_):
        calls.append(command)
        folder = tmp_path / "check-cpu"
        assert env["DBLAST_OUTPUT"] == str(folder) and not (folder / "data/results/cpu").exists()
        shutil.copytree(FIGURES / "cpu", folder / "figures/cpu")
        run.change(folder / "figures/cpu")
        return run

    run.change, run.returncode, run.calls = lambda folder: None, 0, calls
    monkeypatch.setattr(module.subprocess, "run", run)
    return run


def test_the_command_compares_a_rerun_and_can_compare_again(rerun, tmp_path, capsys):
    assert check_results("cpu", fresh=True) == 0 and rerun.calls[0][-1] == "--fresh"
    assert set(pd.read_csv(tmp_path / "check-cpu/cells.csv").verdict) == {SAME}
    assert "Nothing moved beyond errors" in capsys.readouterr().out
    rerun.change = lambda folder: (folder / "figure1.csv").unlink()
    assert check_results("cpu") == 1 and check_results("cpu", compare_only=True) == 1 and len(rerun.calls) == 2


def test_a_rerun_that_failed_is_not_compared(rerun):
    rerun.returncode = 2
    with pytest.raises(DBlastError, match="the rerun of profile 'cpu' failed"):
        check_results("cpu")
    with pytest.raises(DBlastError, match="there is no finished rerun; run .*check-results --profile cpu"):
        check_results("cpu", compare_only=True)


def test_what_cannot_be_checked_is_refused_before_anything_runs(rerun, tmp_path, monkeypatch):
    with pytest.raises(DBlastError, match="--compare-only"):
        check_results("cpu", fresh=True, compare_only=True)
    with pytest.raises(DBlastError, match="unknown profile"):
        check_results("nope")
    with pytest.raises(DBlastError, match="reproduce the profile first"):
        check_results("qwen3-4b")
    monkeypatch.setattr("dblast.reproduction.results.sha256_file", lambda path: "other")
    with pytest.raises(DBlastError, match="is damaged"):
        check_results("cpu")
    assert not rerun.calls
