"""Kept results against new ones: verdicts of single cells, false alarms over many, whole folders of results."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dblast import check_results as module
from dblast import result_cells
from dblast.paths import cache_folder as current_cache
from dblast.check_results import (
    BEYOND,
    MISSING,
    NEW,
    SAME,
    VERDICTS,
    WITHIN,
    Report,
    check,
    check_results,
    claim_flips,
    compare_tables,
    rerun,
)
from dblast.claims import claims_table
from dblast.errors import ArtefactError, DBlastError
from dblast.estimates import VARIANT_COLUMNS, accepted_length_rows, held_out_at_chosen
from dblast.profiles import Profile, get_profile
from dblast.rejections import CAUSES
from dblast.result_cells import FEW
from dblast.results import plan_digest, results_folder
from dblast.tables import figure2_rows, table4
from dblast.targets import sha256_file
from tests.checks import one_line
from tests.helpers import ERRORS, frequency_error

CPU = get_profile("cpu")
SMOLLM2 = Profile("cpu", (CPU.plan("smollm2"),))


def table(values, errors, names=None, counts=None):
    names = [f"cell {i}" for i in range(len(values))] if names is None else names
    rows = pd.DataFrame({"name": names, "value": values, "error": errors})
    return rows if counts is None else rows.assign(n=counts)


def compare(kept, new):
    count = "n" if "n" in kept else None
    return compare_tables(kept, new, ["name"], "value", "error", count)


def one(kept, new):
    """The row of a comparison of one cell, given as (value, error) or (value, error, count)."""
    sides = [table([side[0]], [side[1]], counts=None if len(side) < 3 else [side[2]]) for side in (kept, new)]
    (row,) = compare(*sides).itertuples()
    return row


# -- single cells -------------------------------------------------------------------------------


def test_identical_tables_have_only_cells_that_are_the_same():
    kept = table([1.5, 2.0, np.nan, 0.0], [0.1, 0.0, np.nan, np.nan])
    result = compare(kept, kept.copy())
    assert set(result.verdict) == {SAME}
    assert list(result.columns) == [
        "name", "kept", "new", "difference", "standard_error", "z", "threshold", "verdict", "note"
    ]  # fmt: skip
    assert result.z.tolist()[:2] == [0, 0]


def test_rounding_of_another_machine_is_the_same():
    assert one((0.3, 0.0), (0.3 * (1 + 1e-7), 0.0)).verdict == SAME
    assert one((0.3, 0.0), (0.3 * (1 + 1e-5), 0.0)).verdict == BEYOND
    assert one((0.3, 0.01), (0.3 * (1 + 1e-5), 0.01)).verdict == WITHIN


def test_errors_add_as_independent_ones_and_z_is_in_their_units():
    row = one((2.0, 0.3), (2.25, 0.4))
    assert row.standard_error == pytest.approx(0.5) and row.difference == pytest.approx(0.25)
    assert row.z == pytest.approx(0.5) and row.verdict == WITHIN and row.note == ""
    # One cell alone: the usual two-sided 5 %.
    assert row.threshold == pytest.approx(1.96, abs=0.001)
    assert one((2.0, 0.3), (2.97, 0.4)).verdict == WITHIN
    assert one((2.0, 0.3), (2.99, 0.4)).verdict == BEYOND
    assert one((2.0, 0.3), (1.01, 0.4)).verdict == BEYOND


def test_the_threshold_grows_with_the_number_of_cells():
    kept = table(np.zeros(1000), np.ones(1000))
    assert compare(kept, kept).threshold.unique() == pytest.approx([4.0556], abs=1e-3)
    # Exact cells, and cells of one side, test nothing.
    more = pd.concat([kept, table([1.0] * 500, [0.0] * 500, [f"exact {i}" for i in range(500)])])
    assert compare(more, kept).threshold.min() == pytest.approx(4.0556, abs=1e-3)


def test_cells_of_one_side_are_missing_or_new_and_keep_the_order():
    kept = table([1.0, 2.0, 3.0], [0.1, 0.1, np.nan], ["b", "c", "a"])
    new = table([2.0, 5.0], [0.1, 0.1], ["c", "aa"])
    result = compare(kept, new)
    assert result.name.tolist() == ["b", "c", "a", "aa"]
    assert result.verdict.tolist() == [MISSING, SAME, MISSING, NEW]
    assert result.note.tolist() == ["", "", "no error known", ""]
    assert result.difference.isna().tolist() == [True, False, True, True]
    assert compare(kept, new.iloc[:0]).verdict.tolist() == [MISSING] * 3


def test_a_number_that_is_not_defined_is_as_good_as_absent():
    assert one((1.0, 0.1), (np.nan, np.nan)).verdict == MISSING
    assert one((np.nan, np.nan), (1.0, 0.1)).verdict == NEW
    assert one((np.nan, np.nan), (np.nan, np.nan)).note == "no number on either side"


def test_an_infinite_number_is_not_the_rounding_of_a_finite_one():
    assert one((1.5, 0.1), (np.inf, 0.1)).verdict == BEYOND
    assert one((1.5, 0.0), (np.inf, 0.0)).verdict == BEYOND


def test_where_one_side_has_no_error_the_other_stands_for_both():
    row = one((1.0, np.nan), (1.5, 0.1))
    assert row.standard_error == pytest.approx(0.1 * 2**0.5) and row.verdict == BEYOND
    assert row.note == "no kept error: the new one stands for both"
    row = one((1.0, 0.1), (1.2, np.nan))
    assert row.verdict == WITHIN and row.note == "no new error: the kept one stands for both"


def test_a_movement_without_any_error_is_not_judged_and_says_so():
    row = one((1.0, np.nan), (100.0, np.nan))
    assert row.verdict == WITHIN and row.note == "no error on either side: not judged" and np.isnan(row.z)
    row = one((1.0, np.nan), (1.0, np.nan))
    assert row.verdict == SAME and row.note == "no error on either side"


def test_zero_errors_are_those_of_exact_numbers():
    row = one((1.5, 0.0), (1.4, 0.0))
    assert row.verdict == BEYOND and row.z == -np.inf and row.note == "both errors are zero: exact"
    row = one((0.0, 0.0), (0.1, 0.1))
    assert row.verdict == WITHIN and row.standard_error == 0.1 and row.note == "one error is zero"


def test_whole_numbers_have_no_tolerance():
    counts = [297_992, 1_331_716]
    kept = pd.DataFrame({"name": ["a", "b"], "value": counts, "error": 0})
    assert set(compare(kept, kept).verdict) == {SAME}
    # Far below the relative tolerance of other numbers.
    result = compare(kept, kept.assign(value=[297_992, 1_331_717]))
    assert result.verdict.tolist() == [SAME, BEYOND] and result.z.tolist() == [0, np.inf]


def test_several_keys_name_a_cell():
    kept = pd.DataFrame({"K": [1, 1, 4], "loss": ["NLL", "AL", "AL"], "length": [1.0, 2.0, 3.0], "sd": 0.1})
    new = kept[::-1].assign(length=[3.0, 9.0, 1.0])
    result = compare_tables(kept, new, ["K", "loss"], "length", "sd").set_index(["K", "loss"])
    assert result.verdict.to_dict() == {(1, "NLL"): SAME, (1, "AL"): BEYOND, (4, "AL"): SAME}


def test_tables_that_cannot_be_compared_are_refused():
    kept = table([1.0, 2.0], [0.1, 0.1])
    with pytest.raises(DBlastError) as caught:
        compare(kept, kept.drop(columns="error"))
    one_line(caught, "no column error")
    with pytest.raises(DBlastError) as caught:
        compare(kept.assign(name="x"), kept)
    one_line(caught, "the cell x is there twice", "keys")
    with pytest.raises(DBlastError) as caught:
        compare(kept, kept.assign(error=[0.1, -0.1]))
    one_line(caught, "negative standard errors")


# -- many cells ---------------------------------------------------------------------------------


def runs(cells, prompts, rng):
    """Two independent runs of the same cells: means over skewed prompts with their estimated errors."""
    level = rng.uniform(0.1, 5, (cells, 1))
    draws = [level * rng.gamma(2, size=(cells, prompts)) for _ in range(2)]
    return [table(side.mean(1), side.std(1, ddof=1) / prompts**0.5, counts=prompts) for side in draws]


@pytest.mark.parametrize("prompts", [FEW, 50])
def test_many_unchanged_cells_raise_no_false_alarms(prompts):
    """The chance that any of 200 cells is reported is 5 % at most, estimated from 400 runs."""
    rng = np.random.default_rng(prompts)
    alarms = [(compare(*runs(200, prompts, rng)).verdict == BEYOND).any() for _ in range(400)]
    assert np.mean(alarms) <= 0.05 + ERRORS * frequency_error(0.05, 400)


def test_without_the_number_of_prompts_a_few_of_them_would_raise_false_alarms():
    rng = np.random.default_rng(0)
    pairs = [runs(200, 5, rng) for _ in range(40)]
    counted = [(compare(*pair).verdict == BEYOND).any() for pair in pairs]
    known = [(compare(*(side.drop(columns="n") for side in pair)).verdict == BEYOND).any() for pair in pairs]
    # Without it, two runs in three do.
    assert np.mean(counted) <= 0.05 + ERRORS * frequency_error(0.05, 40) and np.mean(known) > 0.3


def test_a_planted_shift_is_found_among_many_cells_and_hardly_another():
    rng = np.random.default_rng(1)
    kept, new = runs(400, 50, rng)
    planted = np.zeros(400)
    planted[[7, 300]] = [10, -10]
    result = compare(kept, new.assign(value=new.value + planted * np.hypot(kept.error, new.error)))
    found = set(result.index[result.verdict == BEYOND])
    # Any other cell is reported in 5 % of the runs, three of them in one of 50,000.
    assert {7, 300} <= found and len(found) <= 4
    assert set(result.verdict) == {BEYOND, WITHIN}


def test_threshold_is_near_students_quantile():
    # Two-sided 5 % over 500 cells: t quantiles at 1 - 0.00005 (R: qt(0.99995, df)).
    for freedom, exact in ((9, 6.594), (20, 4.837), (48, 4.234), (np.inf, 3.891)):
        (threshold,) = module._threshold(np.array([float(freedom)]), 500)
        assert threshold == pytest.approx(exact, rel=0.02)
    assert module._threshold(np.array([0.0]), 500)[0] == np.inf


def test_freedom_is_welchs_and_of_one_error_that_stands_for_both():
    assert module._welch(*(np.array([x]) for x in (0.2, 11.0, 0.2, 11.0)))[0] == pytest.approx(20)
    assert module._welch(*(np.array([x]) for x in (0.2, 11.0, 0.0, 11.0)))[0] == pytest.approx(10)
    (alone,) = compare(table([1.0], [np.nan], counts=[1]), table([1.0], [0.1], counts=[11])).threshold
    assert alone == pytest.approx(module._threshold(np.array([10.0]), 1)[0])
    # A single unit with an error of its own says nothing.
    assert one((1.0, 0.1, 1), (9.0, 0.1, 1)).verdict == WITHIN


# -- claims and the report ----------------------------------------------------------------------


def claims(*verdicts):
    return pd.DataFrame({"target": "toy", "claim": [f"claim {i}" for i in range(len(verdicts))], "verdict": verdicts})


def test_flipped_verdicts_are_told_and_reversed_ones_marked():
    kept = claims("reproduced", "undecided", "not reproduced", "reproduced")
    flips = claim_flips(kept, claims("reproduced", "reproduced", "reproduced", "undecided"))
    assert flips.claim.tolist() == ["claim 1", "claim 2", "claim 3"]
    assert flips.kept.tolist() == ["undecided", "not reproduced", "reproduced"]
    assert flips.reversed.tolist() == [False, True, False]
    assert claim_flips(kept, kept).empty


def report(*pairs, kept=claims(), new=claims()):
    """A report on cells given as ((value, error), (value, error)); None on a side leaves the cell out."""
    sides = []
    for side in range(2):
        rows = [(i, pair[side]) for i, pair in enumerate(pairs) if pair[side] is not None]
        names = {"table": "scores", "quantity": "accepted length", "target": "toy"}
        cells = [names | {"cell": f"cell {i}", "value": v, "error": e, "n": 30} for i, (v, e) in rows]
        sides.append(pd.DataFrame(cells, columns=[*module.KEYS, "value", "error", "n"]))
    cells = compare_tables(*sides, module.KEYS, "value", "error", "n")
    return Report("toy", cells, claim_flips(kept, new))


@pytest.mark.parametrize(
    ("pairs", "status"),
    [
        ([((1.0, 0.1), (1.0, 0.1))], 0),
        ([((1.0, 0.1), (1.1, 0.1))], 0),
        ([((1.0, 0.1), (2.0, 0.1))], 1),
        ([((1.0, np.nan), (2.0, np.nan))], 0),
        ([((1.0, 0.1), None), ((1.0, 0.1), (1.0, 0.1))], 1),
        ([((1.0, np.nan), None), ((1.0, 0.1), (1.0, 0.1))], 0),
        ([(None, (1.0, 0.1)), ((1.0, 0.1), (1.0, 0.1))], 0),
        ([((5, 0.0), (6, 0.0))], 1),
    ],
)
def test_exit_status(pairs, status):
    assert report(*pairs).status == status


def test_only_a_reversed_claim_fails_the_check():
    cell = ((1.0, 0.1), (1.0, 0.1))
    assert report(cell, kept=claims("reproduced"), new=claims("undecided")).status == 0
    assert report(cell, kept=claims("reproduced"), new=claims("not reproduced")).status == 1


def test_the_summary_counts_and_shows_what_moved_largest_first_and_in_colours():
    pairs = [((1.0, 0.1), (value, 0.1)) for value in (1.0, 2.0, 4.0, 1.05)] + [((1.0, np.nan), (1.2, np.nan))]
    made = report(*pairs, kept=claims("reproduced"), new=claims("undecided"))
    text = made.text()
    plain = re.sub(r"\x1b\[\d+m", "", text)
    assert "5 cells" in plain
    counts = dict(zip(VERDICTS, (1, 2, 2, 0, 0), strict=True))
    for verdict, count in counts.items():
        assert re.search(rf"^ +{count} {verdict}$", plain, re.MULTILINE)
    assert plain.index("cell 2: 1 -> 4 (z = +21.2)") < plain.index("cell 1: 1 -> 2") < plain.index("cell 3: 1 -> 1.05")
    assert "Not compared: timings" in plain and "training curves" in plain and "example texts" in plain
    assert "they count as within errors): 1" in plain and "not judged" in plain
    assert "toy      reproduced -> undecided: claim 0" in plain
    assert plain.endswith("Results moved beyond errors.")
    assert "\x1b[31m" in text and "\x1b[33m" in text
    assert "and 1 more" in re.sub(r"\x1b\[\d+m", "", made.text(shown=1))


# -- folders of results -------------------------------------------------------------------------


def sign(folder, profile):
    """Provenance of a folder of tables, as a rerun writes it."""
    record = {}
    for plan in profile.plans:
        for path in folder.glob(f"{plan.label}-*.parquet"):
            name = path.stem.removeprefix(f"{plan.label}-")
            record[path.name] = {"plan": plan_digest(plan, name), "sha256": sha256_file(path)}
    (folder / "provenance.json").write_text(json.dumps(record))


def copy_of_cpu(folder, **changes):
    """The committed results, some tables changed by a function, with a record that fits them."""
    shutil.copytree(results_folder("cpu"), folder)
    for name, change in changes.items():
        path = folder / f"smollm2-{name}.parquet"
        change(pd.read_parquet(path)).to_parquet(path, index=False)
    sign(folder, CPU)
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return copy_of_cpu(tmp_path_factory.mktemp("kept") / "cpu")


@pytest.fixture(scope="module")
def same(kept):
    return check(kept, kept, CPU)


def test_the_committed_results_do_not_move_against_themselves(same):
    assert set(same.cells.verdict) == {SAME} and same.flips.empty and same.status == 0
    assert "Nothing moved" in same.text()


def test_every_kind_of_cell_is_there(kept, same):
    cells = same.cells.groupby(["table", "target"]).size()
    for plan in CPU.plans:
        tables, _ = module.read_tables(kept, plan, "")
        scores, rejections = tables["scores"], tables["rejections"]
        # Tasks and their average.
        variants = len(scores.drop_duplicates(VARIANT_COLUMNS))
        assert cells["scores", plan.label] == variants * (scores.task.nunique() + 1)
        assert cells["oracle", plan.label] == len(tables["oracle"].drop_duplicates(["setting", "proposal"]))
        groups = len(rejections.drop_duplicates(["setting", "method"]))
        assert cells["rejections", plan.label] == groups * (plan.drafter.block_length + len(CAUSES))
        assert cells["online", plan.label] == 2 * scores.setting.nunique()
        assert cells["parameters", plan.label] == 2 * len(tables["parameters"])
        assert cells["claims", plan.label] == len(claims_table(scores, tables["figure1"]))
        assert cells["determinism", plan.label] == 2 * scores.setting.nunique()
        # DFlash+DS and DBlast at every Z_T.
        assert cells["figure2", plan.label] == 2 * scores.setting.nunique() * len(plan.category_temperatures)
        constructions = scores[(scores.K == 4) & (scores.loss == "AL")].construction.nunique()
        expected = constructions * (scores.task.nunique() + 1) if constructions > 1 else 0
        assert cells.get(("table4", plan.label), 0) == expected
        assert cells.get(("target", plan.label), 0) == (plan.target == "tiny")
    # Constructions, tasks and their average.
    assert cells["table4", "tiny"] == 3 * 5
    # Splits, bins, quantities: the tiny target has points everywhere.
    assert cells["figure1", "tiny"] == 2 * 5 * 3
    assert not same.cells.duplicated(module.KEYS).any()
    # Nearly everything can be judged.
    assert (same.cells.note == "no error on either side").mean() < 0.1


def test_a_profile_without_the_paper_s_notebooks_is_checked_by_its_scores(kept, same, tmp_path):
    scores_only = replace(CPU, notebooks=("06",))
    for path in kept.glob("*"):
        if "scores" in path.name or path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    report = check(tmp_path, tmp_path, scores_only)
    assert set(report.cells.table) == {"scores", "figure2", "table4", "claims"} and report.status == 0
    assert (report.cells.table == "scores").sum() == (same.cells.table == "scores").sum()
    with pytest.raises(ArtefactError, match="is missing"):
        check(tmp_path, tmp_path, CPU)


def test_cells_hold_the_numbers_and_errors_of_the_tables(kept):
    tables, _ = module.read_tables(kept, CPU.plan("smollm2"), "")
    cells, _ = module.result_cells(tables)
    rows = accepted_length_rows(held_out_at_chosen(tables["scores"]), per_seed=False)
    rows = rows[(rows.method == "DBlast") & (rows.K == 4) & (rows.construction == "all_prefixes")]
    (row,) = rows[(rows.setting == "low") & (rows.task == "average")].itertuples()
    cell = cells[cells.cell == "DBlast, K = 4, AL, all_prefixes, low, average, seeds all"].iloc[0]
    assert (cell.value, cell.error, cell.n) == (row.accepted_length, row.standard_error, row.n)
    # Per slot and per block, the causes count the same tokens.
    rejections = tables["rejections"]
    part = rejections[(rejections.method == "DFlash") & (rejections.setting == "high")]
    share = part.unknown.sum() / part[part.position == 1].anchors.sum()
    assert cells.set_index("cell").value["DFlash, high, unknown"] == pytest.approx(share)
    assert cells[cells.n < FEW].error.isna().all()


def test_figure_2_table_4_and_determinism_are_their_tables_numbers(kept):
    tables, _ = module.read_tables(kept, CPU.plan("tiny"), "")
    cells = module.result_cells(tables)[0].set_index(["table", "quantity", "cell"])
    curve = figure2_rows(tables["scores"], "tiny")
    (row,) = curve[(curve.method == "DFlash+DS") & (curve.setting == "medium") & (curve.category_temperature == 0.6)].itertuples()
    cell = cells.loc["figure2", "accepted length", "DFlash+DS, medium, Z_T = 0.6"]
    assert (cell.value, cell.error, cell.n) == (row.accepted_length, row.standard_error, row.n)
    rows = table4(tables["scores"], "tiny").display
    for construction in ("whole_block", "one_prefix", "all_prefixes"):
        cell = cells.loc["table4", "accepted length", f"K = 4, {construction}, average, Z_T = 1"]
        assert rows.loc[(4, construction.replace("_", " ")), "accepted length"] == f"{cell.value:.2f} ± {cell.error:.2f}"
    low = tables["determinism"].query("setting == 'low'")
    cell = cells.loc["determinism", "entropy (nats)", "low"]
    assert cell.value == pytest.approx(low.entropy.mean()) and cell.error == pytest.approx(low.entropy.sem()) and cell.n == len(low)
    assert cells.loc["determinism", "largest probability", "low"].value == pytest.approx(low.p_max.mean())


def test_entropy_that_moved_is_reported(kept, tmp_path):
    def more(rows):
        return rows.assign(entropy=rows.entropy + 0.5 * (rows.setting == "high"))

    result = check(kept, copy_of_cpu(tmp_path / "new", determinism=more), SMOLLM2)
    (moved,) = result.cells[result.cells.verdict != SAME].itertuples()
    assert (moved.table, moved.cell, moved.verdict) == ("determinism", "high", BEYOND) and result.status == 1


def test_few_prompts_and_a_single_one_that_decides_give_no_error_to_judge_by():
    rows = pd.DataFrame({"target": "toy", "setting": list("abc"), "x": 1.0, "e": [0.1, 0.1, 0.0], "n": [FEW, 9, 50]})
    cells = result_cells._cells(rows, "scores", "length", "{setting} of {n}", "x", "e", "n")
    assert cells.cell.tolist() == ["a of 10", "b of 9", "c of 50"]
    assert cells.error.tolist() == pytest.approx([0.1, np.nan, np.nan], nan_ok=True)


def test_claims_have_the_errors_of_their_intervals_but_for_bootstraps():
    rows = pd.DataFrame({"target": "toy", "claim": list("abc"), "ours": [1.0, 0.4, 0.4]})
    rows = rows.assign(ci_low=[1 - 0.196, 0.0, 0.4], ci_high=[1 + 0.196, 0.6, 0.4])
    assert result_cells._claim_cells(rows).error.tolist() == pytest.approx([0.1, np.nan, np.nan], nan_ok=True)


def test_a_shifted_column_is_reported_where_it_was_shifted(kept, tmp_path):
    def fewer_passes(scores):
        hit = (scores.setting == "low") & (scores.method == "DBlast") & (scores.K == 4)
        hit &= scores.construction == "all_prefixes"
        return scores.assign(passes=scores.passes.where(~hit, 0.8 * scores.passes))

    result = check(kept, copy_of_cpu(tmp_path / "new", scores=fewer_passes), SMOLLM2)
    moved = result.cells[result.cells.verdict != SAME]
    lengths = moved[moved.table == "scores"]
    assert len(lengths) == 5 and (lengths.verdict == BEYOND).all() and (lengths.difference > 0).all()
    assert lengths.cell.str.startswith("DBlast, K = 4, AL, all_prefixes, low").all()
    # Every point of one curve.
    curve = moved[moved.table == "figure2"]
    assert len(curve) == 8 and curve.cell.str.startswith("DBlast, low, Z_T = ").all() and (curve.verdict == BEYOND).all()
    # Of the constructions that are compared, one is this.
    assert set(moved.table) == {"scores", "figure2", "table4", "claims"}
    assert result.status == 1
    assert "DBlast, K = 4, AL, all_prefixes, low, average, seeds all" in result.text()


def test_counts_that_change_by_one_and_bins_that_vanish_are_reported(kept, tmp_path):
    def one_more(parameters):
        return parameters.assign(added_parameters=parameters.added_parameters + (parameters.K == 4))

    def no_large(points):
        return points[points.determinism < 0.2]

    result = check(kept, copy_of_cpu(tmp_path / "new", parameters=one_more, figure1=no_large), SMOLLM2)
    moved = result.cells[result.cells.verdict != SAME].set_index("quantity")
    assert moved.verdict["added parameters"] == BEYOND and moved.cell["added parameters"] == "K = 4"
    gone = result.cells[result.cells.verdict == MISSING]
    assert gone.cell.str.contains("D_b 0.2 to 0.4").any()
    assert not gone.cell.str.contains("D_b 0.0 to 0.2").any()
    assert result.status == 1


def test_damaged_missing_and_foreign_tables_are_refused(kept, tmp_path):
    def broken(name):
        return copy_of_cpu(tmp_path / name)

    folder = broken("gone")
    (folder / "smollm2-oracle.parquet").unlink()
    with pytest.raises(ArtefactError) as caught:
        check(folder, kept, SMOLLM2)
    one_line(caught, "smollm2-oracle.parquet is missing", "python -m dblast reproduce --profile cpu")

    folder = broken("no determinism")
    (folder / "smollm2-determinism.parquet").unlink()
    with pytest.raises(ArtefactError, match="smollm2-determinism.parquet is missing"):
        check(folder, kept, SMOLLM2)

    folder = broken("damaged")
    with (folder / "smollm2-scores.parquet").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ArtefactError) as caught:
        check(kept, folder, SMOLLM2)
    one_line(caught, "smollm2-scores.parquet is damaged", "python -m dblast check-results --profile cpu")

    plan = replace(CPU.plan("smollm2"), seeds=(0, 1))
    with pytest.raises(ArtefactError) as caught:
        check(kept, kept, Profile("cpu", (plan,)))
    one_line(caught, "another plan", "reproduce")

    folder = broken("unsigned")
    (folder / "provenance.json").write_text("{")
    with pytest.raises(ArtefactError) as caught:
        check(folder, kept, SMOLLM2)
    one_line(caught, "provenance.json is missing or damaged")


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def project(kept, tmp_path, monkeypatch):
    """A project whose cpu profile has one target, whose stages give what is kept; its only cells are parameters."""
    shutil.copytree(kept, tmp_path / "results" / "cpu")

    def collect(name):
        return lambda plan: pd.read_parquet(kept / f"{plan.label}-{name}.parquet")

    def counts(tables):
        cells = tables["parameters"].assign(table="parameters", quantity="count", error=0.0, n=np.nan)
        cells = cells.assign(cell=cells.K.astype(str), value=cells.drafter_parameters)
        return cells[[*module.KEYS, "value", "error", "n"]], claims("reproduced")

    monkeypatch.setattr(module, "TABLES", {name: collect(name) for name in module.CHECKED})
    # The numbers themselves are for the tests above.
    monkeypatch.setattr(module, "result_cells", counts)
    monkeypatch.setattr(module, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(module, "results_folder", lambda name: tmp_path / "results" / name)
    monkeypatch.setattr(module, "get_profile", {"cpu": SMOLLM2}.__getitem__)
    monkeypatch.setattr(module, "fetch_smollm2", lambda: None)
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_command_leaves_the_kept_results_alone_and_writes_all_cells(project, capsys):
    before = contents(project / "results" / "cpu")
    assert check_results("cpu") == 0
    assert contents(project / "results" / "cpu") == before
    cells = pd.read_csv(project / "runs" / "check-cpu" / "cells.csv")
    assert set(cells.verdict) == {SAME} and {*module.KEYS, "kept", "new", "z"} <= set(cells.columns)
    assert {path.name for path in (project / "runs" / "check-cpu").iterdir()} == {"results", "cells.csv"}
    assert "Nothing moved beyond errors" in capsys.readouterr().out


def test_a_change_in_the_stages_is_found_again_without_a_rerun(project, monkeypatch):
    collect = module.TABLES["parameters"]
    monkeypatch.setitem(module.TABLES, "parameters", lambda plan: collect(plan).assign(drafter_parameters=1))
    assert check_results("cpu") == 1
    monkeypatch.setattr(module, "rerun", lambda *_: pytest.fail("this ran the stages again"))
    assert check_results("cpu", compare_only=True) == 1


def test_a_fresh_run_has_a_cache_of_its_own_and_shares_the_targets(project, cache_folder, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "rerun", lambda *values: seen.append(current_cache()) or rerun(*values))
    left = project / "runs" / "check-cpu" / "cache" / "left over"
    left.mkdir(parents=True)
    assert check_results("cpu", fresh=True) == 0
    assert seen == [project / "runs" / "check-cpu" / "cache"] and not left.exists()
    assert (seen[0] / "targets").resolve() == (cache_folder / "targets").resolve()


def test_kept_results_are_checked_before_anything_runs(project, monkeypatch):
    monkeypatch.setattr(module, "rerun", lambda *_: pytest.fail("this ran the stages"))
    (project / "results" / "cpu" / "smollm2-figure1.parquet").unlink()
    with pytest.raises(ArtefactError, match="smollm2-figure1.parquet is missing"):
        check_results("cpu")


def test_an_interrupted_rerun_is_not_compared(project, monkeypatch):
    assert check_results("cpu") == 0

    def interrupt(plan):
        raise KeyboardInterrupt

    monkeypatch.setitem(module.TABLES, "oracle", interrupt)
    with pytest.raises(KeyboardInterrupt):
        check_results("cpu")
    with pytest.raises(ArtefactError, match="check-results --profile cpu"):
        check_results("cpu", compare_only=True)


def test_two_options_that_contradict_are_refused():
    with pytest.raises(DBlastError, match="--compare-only"):
        check_results("cpu", fresh=True, compare_only=True)


def test_an_unknown_profile_is_refused():
    with pytest.raises(DBlastError, match="unknown profile"):
        check_results("nope")


def test_a_rerun_writes_a_record_that_its_tables_pass(project):
    folder = project / "tables"
    rerun(SMOLLM2, folder)
    tables, sums = module.read_tables(folder, SMOLLM2.plans[0], "")
    assert set(tables) == set(sums) == set(module.CHECKED) - {"target"}
    assert {path.stem for path in folder.iterdir()} == {f"smollm2-{name}" for name in tables} | {"provenance"}
