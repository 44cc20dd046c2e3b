"""Do the kept results come out again? A profile rerun from its stages, compared cell by cell with what is kept.

A cell is one number of a result (:mod:`dblast.reproduction.result_cells`); :data:`NOT_COMPARED` says what has none. The two runs
are treated as independent: the error of a difference is the root of the summed squares. That is too large for what
the runs share, their prompts; the noise of training is in the errors of Figure 1 and the claims only. Of many cells
some move far by chance: the threshold keeps the chance that any of them is reported in an unchanged result at
:data:`FAMILY_WISE` (Bonferroni), with Student's tails where a cell comes with its number of prompts.

Nothing here writes to ``data/results`` or ``figures``: the new tables go to ``runs/check-<profile>/``.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pandas as pd
import typer

from dblast.errors import ArtefactError, DBlastError
from dblast.reproduction.paths import RUNS, use_empty_cache
from dblast.reproduction.profiles import Plan, Profile, get_profile
from dblast.reproduction.result_cells import CHECKED, KEYS, result_cells
from dblast.reproduction.results import TABLES, plan_digest, results_folder
from dblast.targets import fetch_smollm2, sha256_file

#: Chance that any cell of an unchanged result is called moved beyond its error.
FAMILY_WISE = 0.05
#: Differences up to ABSOLUTE + RELATIVE * value are another machine's rounding.
RELATIVE, ABSOLUTE = 1e-6, 1e-9

SAME, WITHIN, BEYOND, MISSING, NEW = VERDICTS = ("same", "moved within errors", "moved beyond errors", "missing", "new")
COLOURS = dict(zip(VERDICTS, ("green", "yellow", "red", "magenta", "cyan"), strict=True))
#: What has no cells, for the reader of the report.
NOT_COMPARED = (
    "Not compared: timings (Tables 6 and 7 and their claim), which are the machine's; training curves and the health of the "
    "branches in training; example texts (Table 9)."
)


# -- comparison ---------------------------------------------------------------------------------


def compare_tables(
    kept: pd.DataFrame, new: pd.DataFrame, keys: Sequence[str], value: str, error: str, count: str | None = None
) -> pd.DataFrame:
    """Which cells of ``new`` are not those of ``kept``, given their errors.

    An error of zero is that of an exact number. Where one side has no error (NaN) the other's stands for both;
    where neither has one a movement cannot be judged: it is called "moved within errors", and ``note`` says so.
    Whole numbers are compared without a tolerance, and a cell without a number (NaN) is as good as absent.

    Args:
        keys: columns that name a cell; each name at most once in a table.
        value, error: columns with the numbers and their standard errors.
        count: column with the number of units (prompts) behind each error; NaN, or no column, if errors are
            known and not estimated.

    Returns:
        One row per cell in either table, in the order of ``kept``: ``keys, kept, new, difference, standard_error, z,
        threshold, verdict, note``. ``standard_error`` is that of the difference; |z| above ``threshold`` is beyond it.

    Raises:
        DBlastError: a column is missing, a cell is there twice, or an error is negative.
    """
    sides = [_side(table, list(keys), value, error, count) for table in (kept, new)]
    index = sides[0].index.append(sides[1].index).unique()
    (a, error_a, n_a), (b, error_b, n_b) = (side.reindex(index).to_numpy(float).T for side in sides)
    no_a, no_b = np.isnan(error_a), np.isnan(error_b)
    spread = np.hypot(np.where(no_a, error_b, error_a), np.where(no_b, error_a, error_b))
    difference = b - a
    exact, judged = spread == 0, spread > 0

    whole = (a == np.round(a)) & (b == np.round(b))
    tolerance = np.where(whole, 0.0, ABSOLUTE + RELATIVE * np.minimum(np.abs(a), np.abs(b)))
    moved = np.abs(difference) > tolerance
    with np.errstate(all="ignore"):
        z = np.where(exact & ~moved, 0.0, difference / spread)
    freedom = np.where(no_a, n_b - 1, np.where(no_b, n_a - 1, _welch(error_a, n_a, error_b, n_b)))
    threshold = np.where(judged, _threshold(freedom, int((judged & ~np.isnan(difference)).sum())), np.nan)

    absent_a, absent_b = np.isnan(a), np.isnan(b)
    cases = [absent_a & absent_b, absent_b, absent_a, ~moved, exact | (np.abs(z) > threshold)]
    verdict = np.select(cases, [SAME, MISSING, NEW, SAME, BEYOND], WITHIN)
    notes = {
        "no number on either side": absent_a & absent_b,
        "no error known": (absent_b & no_a) | (absent_a & no_b),
        "": absent_a | absent_b,
        "no error on either side: not judged": no_a & no_b & moved,
        "no error on either side": no_a & no_b,
        "no kept error: the new one stands for both": no_a,
        "no new error: the kept one stands for both": no_b,
        "both errors are zero: exact": exact,
        "one error is zero": (error_a == 0) | (error_b == 0),
    }
    columns = {"kept": a, "new": b, "difference": difference, "standard_error": spread, "z": z, "threshold": threshold}
    note = np.select(list(notes.values()), list(notes), "")
    return index.to_frame(index=False).assign(**columns, verdict=verdict, note=note)


def _side(table: pd.DataFrame, keys: list[str], value: str, error: str, count: str | None) -> pd.DataFrame:
    """One table checked: value, error and count (NaN if there is none), indexed by its keys."""
    columns = [value, error, *([count] if count else [])]
    if absent := [name for name in [*keys, *columns] if name not in table.columns]:
        raise DBlastError(f"the table to compare has no column {', '.join(absent)}")
    if (twice := table.duplicated(keys)).any():
        cell = ", ".join(map(str, table.loc[twice, keys].iloc[0]))
        raise DBlastError(f"the cell {cell} is there twice; give keys that name every row")
    if (table[error] < 0).any():
        raise DBlastError(f"column {error} holds negative standard errors")
    side = table.set_index(keys)[columns]
    return side if count else side.assign(count=np.nan)


def _welch(error_a: np.ndarray, n_a: np.ndarray, error_b: np.ndarray, n_b: np.ndarray) -> np.ndarray:
    """Degrees of freedom of a difference's error; a side whose count is not known (NaN) adds no doubt."""
    with np.errstate(all="ignore"):
        parts = [np.where(e > 0, np.nan_to_num(e**4 / (n - 1)), 0) for e, n in ((error_a, n_a), (error_b, n_b))]
        return (error_a**2 + error_b**2) ** 2 / sum(parts)


def _threshold(freedom: np.ndarray, tests: int) -> np.ndarray:
    """The |z| that by chance any of ``tests`` cells exceeds with probability :data:`FAMILY_WISE` at most.

    Student's quantile from the normal one by Wallace's approximation, which is too large rather than too small
    for very few degrees of freedom; NaN and infinite ones give the normal quantile, zero an infinite threshold.
    """
    normal = NormalDist().inv_cdf(1 - FAMILY_WISE / (2 * max(tests, 1)))
    with np.errstate(all="ignore"):
        stretched = normal * (8 * freedom + 3) / (8 * freedom + 1)
        student = np.sqrt(freedom * np.expm1(stretched**2 / freedom))
    return np.select([freedom <= 0, np.isfinite(freedom)], [np.inf, student], normal)


# -- claims and the report -----------------------------------------------------------------------


def claim_flips(kept: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Claims with another verdict, ``target, claim, kept, new, reversed``: whether the change is one of sign."""
    both = kept.merge(new, on=["target", "claim"], suffixes=("_kept", "_new"))
    flips = both[both.verdict_kept != both.verdict_new].rename(columns={"verdict_kept": "kept", "verdict_new": "new"})
    turned = (flips.kept != "undecided") & (flips.new != "undecided")
    return flips[["target", "claim", "kept", "new"]].assign(reversed=turned).reset_index(drop=True)


@dataclass(frozen=True)
class Report:
    """What moved in a profile: ``cells`` from :func:`compare_tables`, ``flips`` from :func:`claim_flips`."""

    profile: str
    cells: pd.DataFrame
    flips: pd.DataFrame

    @property
    def status(self) -> int:
        """1 if a number moved beyond its error or (unless it has none) is gone, or a claim was reversed; else 0."""
        gone = (self.cells.verdict == MISSING) & (self.cells.note == "")
        return int((self.cells.verdict == BEYOND).any() or gone.any() or self.flips.reversed.any())

    def text(self, shown: int = 20) -> str:
        """Counts, then the cells that moved, largest |z| first; words and ANSI colours."""
        cells = self.cells
        lines = [typer.style(f"Profile {self.profile}: {len(cells)} cells, new against kept", bold=True)]
        counts = cells.verdict.value_counts().reindex(VERDICTS, fill_value=0)
        lines += [typer.style(f"{n:6d} {name}", fg=COLOURS[name] if n else None) for name, n in counts.items()]
        lines.append(f"Beyond errors: |z| above {cells.threshold.min():.2f}, more where prompts are few.")
        if unjudged := int(cells.note.str.endswith("not judged").sum()):
            lines.append(f"Moved, but without an error to judge by (they count as within errors): {unjudged}")
        for verdict in (BEYOND, MISSING, NEW, WITHIN):
            part = cells[cells.verdict == verdict].sort_values("z", key=np.abs, ascending=False, kind="stable")
            if len(part):
                lines.append(typer.style(f"\n{verdict.capitalize()}:", bold=True, fg=COLOURS[verdict]))
                lines += [_line(row) for row in part.head(shown).itertuples()]
            if len(part) > shown:
                lines.append(f"  and {len(part) - shown} more")
        if len(self.flips):
            lines.append(typer.style("\nClaims with another verdict:", bold=True))
        for row in self.flips.itertuples():
            line = f"  {row.target:8s} {row.kept} -> {row.new}{' (reversed)' if row.reversed else ''}: {row.claim}"
            lines.append(typer.style(line, fg=COLOURS[BEYOND if row.reversed else WITHIN]))
        lines.append(f"\n{NOT_COMPARED}")
        last = "Results moved beyond errors." if self.status else "Nothing moved beyond errors."
        return "\n".join([*lines, typer.style(f"\n{last}", bold=True, fg=COLOURS[BEYOND if self.status else SAME])])


def _line(row) -> str:
    """One cell that is not the same, in words."""
    z = "" if row.z != row.z else f" (z = {row.z:+.1f})"
    note = f" [{row.note}]" if row.note else ""
    words = f"  {row.target:8s} {row.table}: {row.quantity}, {row.cell}: {row.kept:.7g} -> {row.new:.7g}{z}{note}"
    return typer.style(words, fg=COLOURS[row.verdict])


# -- files --------------------------------------------------------------------------------------


def read_tables(
    folder: Path, plan: Plan, remedy: str, names: Sequence[str] = CHECKED
) -> tuple[dict[str, pd.DataFrame], dict[str, str]]:
    """The checked tables of one target in a folder of results, and their SHA-256, by name.

    "target" is left out for a target that was not trained here.

    Raises:
        ArtefactError: a table is missing, damaged or made by another plan; ``remedy`` is what to do.
    """
    try:
        record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtefactError(f"{folder / 'provenance.json'} is missing or damaged; {remedy}") from error
    tables, sums = {}, {}
    for name in _of_plan(names, plan):
        path = folder / f"{plan.label}-{name}.parquet"
        if not path.exists():
            raise ArtefactError(f"{path} is missing; {remedy}")
        entry = record.get(path.name, {})
        sums[name] = sha256_file(path)
        if entry.get("sha256") != sums[name]:
            raise ArtefactError(f"{path} is damaged: its checksum is not the one in provenance.json; {remedy}")
        if entry.get("plan") != plan_digest(plan, name):
            raise ArtefactError(f"{path} was made by another plan than that of this profile; {remedy}")
        tables[name] = pd.read_parquet(path)
    return tables, sums


def _of_plan(names: Sequence[str], plan: Plan) -> list[str]:
    return [name for name in names if name != "target" or plan.tiny is not None]


def _checked(profile: Profile) -> tuple[str, ...]:
    """The tables that a profile's notebooks make: without 01 to 05, scores alone."""
    return CHECKED if "01" in profile.notebooks else ("scores",)


def _remedy(command: str, profile: Profile) -> str:
    return f"run `python -m dblast {command} --profile {profile.name}`"


def check(kept_folder: Path, new_folder: Path, profile: Profile) -> Report:
    """Compare two folders of result tables of one profile, e.g. ``data/results/cpu`` and a rerun's; errors as above."""
    made = []
    for plan in profile.plans:
        kept, kept_sums = read_tables(kept_folder, plan, _remedy("reproduce", profile), _checked(profile))
        new, new_sums = read_tables(new_folder, plan, _remedy("check-results", profile), _checked(profile))
        cells = result_cells(kept)
        # The same files have the same cells.
        made.append((*cells, *(cells if new_sums == kept_sums else result_cells(new))))
    kept_cells, kept_claims, new_cells, new_claims = map(pd.concat, zip(*made, strict=True))
    table = compare_tables(kept_cells, new_cells, KEYS, "value", "error", "n")
    return Report(profile.name, table, claim_flips(kept_claims, new_claims))


def rerun(profile: Profile, folder: Path) -> None:
    """Collect the checked tables from the stages into a new folder, with checksums; ``folder`` is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = {}
    for plan in profile.plans:
        for name in _of_plan(_checked(profile), plan):
            began = time.monotonic()
            path = folder / f"{plan.label}-{name}.parquet"
            TABLES[name](plan).to_parquet(path, index=False, compression="zstd")
            record[path.name] = {"plan": plan_digest(plan, name), "sha256": sha256_file(path)}
            typer.echo(f"{path.stem} done in {time.monotonic() - began:.0f} s")
    # Last, so that an interrupted rerun is not compared.
    (folder / "provenance.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def check_results(profile_name: str, *, fresh: bool = False, compare_only: bool = False) -> int:
    """Rerun a profile beside its kept results, print what moved and write ``runs/check-<profile>/cells.csv``.

    Stages in the cache whose code and settings are unchanged are reused, as in a reproduction.

    Args:
        fresh: start from an empty cache, under ``runs/check-<profile>/``.
        compare_only: compare with the tables of the last rerun.

    Returns:
        The exit status, see :attr:`Report.status`.

    Raises:
        DBlastError: unknown profile; kept tables that are missing, damaged or of another plan (before anything runs).
    """
    if fresh and compare_only:
        raise DBlastError("a comparison alone reruns nothing: give either --fresh or --compare-only")
    profile = get_profile(profile_name)
    for plan in profile.plans:
        plan.check()
        read_tables(results_folder(profile.name), plan, _remedy("reproduce", profile), _checked(profile))
    folder = RUNS / f"check-{profile.name}"
    if not compare_only:
        if "smollm2" in {plan.target for plan in profile.plans}:
            fetch_smollm2()
        if fresh:
            use_empty_cache(folder / "cache")
        typer.secho(f"Rerunning profile {profile.name} into {folder}.", bold=True)
        rerun(profile, folder / "results")
    report = check(results_folder(profile.name), folder / "results", profile)
    report.cells.to_csv(folder / "cells.csv", index=False)
    typer.echo(f"{report.text()}\nall cells: {folder / 'cells.csv'}")
    return report.status
