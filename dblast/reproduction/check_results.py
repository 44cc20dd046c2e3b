"""Do the kept results come out again? A profile rerun, and its tables compared cell by cell with those that are kept.

A cell is a number that comes with its error, in the CSV files of a profile's figures and tables; :data:`NOT_COMPARED`
says what has none. The two runs are treated as independent: the error of a difference is the root of the summed
squares. That is too large for what the runs share, their prompts; the noise of training is in the errors of gains and
claims only. Of many cells some move far by chance: the threshold keeps the chance that any of them is reported in an
unchanged result at :data:`FAMILY_WISE` (Bonferroni), by Student's quantile for the number of prompts.

The rerun writes to ``runs/check-<profile>/`` and leaves ``data/results`` and ``figures`` alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import typer
from scipy.stats import t as student

from dblast.errors import DBlastError
from dblast.reproduction.paths import FIGURES, RESULTS, RUNS
from dblast.reproduction.profiles import get_profile
from dblast.reproduction.results import TABLES, open_table

#: Chance that any cell of an unchanged result is called moved beyond its error.
FAMILY_WISE = 0.05
#: An error estimated from fewer prompts says little, and a bin with fewer may be empty in another run.
FEW = 10
#: Differences up to ABSOLUTE + RELATIVE * value are another machine's rounding, or that of the CSV files.
RELATIVE, ABSOLUTE = 1e-6, 2e-6
#: Columns that name a row; the category temperature only where it was not chosen.
NAMES = (
    *("claim", "target", "split", "bin_low", "bin_high", "trained", "b", "tau", "proposal", "nodes", "method", "K", "loss"),
    *("construction", "setting", "task", "seed", "position", "source"),
)
KEYS = ["table", "quantity", "cell"]
#: Counts, which have no error.
EXACT = "added (millions)"
SAME, WITHIN, BEYOND, MISSING, NEW = VERDICTS = ("same", "moved within errors", "moved beyond errors", "missing", "new")
COLOURS = dict(zip(VERDICTS, ("green", "yellow", "red", "magenta", "cyan"), strict=True))
#: The claim on time.
TIMED = "of an iteration"
NOT_COMPARED = (
    "Not compared: timings (Tables 6 and 7 and their claim; notebook 08's), which are the machine's; training curves and the health of "
    "the branches in training; example texts (Table 9); what captions tell of online decoding."
)


def read_cells(folder: Path) -> pd.DataFrame:
    """All cells of a profile's figures and tables: ``table, quantity, cell, value, error, n, verdict`` (of claims).

    The error is zero for an exact number, and NaN if from fewer than :data:`FEW` prompts or if one prompt decides it.
    """
    cells = []
    # What stands beside a figure and in a table under one name is the same.
    for path in {path.stem: path for path in sorted(folder.rglob("*.csv"))}.values():
        table = pd.read_csv(path)
        if "p_max" in table:
            means = table.groupby(["target", "setting"])[["entropy", "p_max"]]
            table = means.mean().join(means.sem().add_suffix("_error")).assign(n=means.size()).reset_index()
        if "ours" in table:
            table = table[~table.claim.str.contains(TIMED)]
            above, below = table.ci_high - table.ours, table.ours - table.ci_low
            # Of an interval that a bootstrap found on a grid there is no error.
            table = table.assign(ours_error=(above / 1.96).where(np.isclose(above, below)), n=np.nan)
        if EXACT in table:
            table[f"{EXACT}_error"] = 0.0
        errors = {name: f"{name}_error" for name in table if f"{name}_error" in table}
        if "standard_error" in table:
            measured = ("accepted_length", "conditional_acceptance")
            errors |= {name: "standard_error" for name in measured if name in table}
        names = [name for name in NAMES if name in table]
        if errors and table.duplicated(names).any() and "category_temperature" in table:
            names.append("category_temperature")
        count = next((table[name] for name in ("prompts", "n") if name in table), pd.Series(np.nan, table.index))
        for quantity, error_name in errors.items():
            error = table[error_name]
            row = {"table": path.stem, "quantity": quantity, "cell": table[names].astype(str).agg(", ".join, axis=1)}
            row |= {"value": table[quantity], "n": count, "verdict": table.get("verdict", "")}
            cells.append(pd.DataFrame(row | {"error": error.where(count.isna() | ((count >= FEW) & (error > 0)))}))
    if not cells:
        raise DBlastError(f"no tables in {folder}; reproduce the profile first")
    return pd.concat(cells, ignore_index=True)


def compare(kept: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Which cells of ``new`` are not those of ``kept``: ``KEYS, kept, new, z, threshold, verdict, flip``.

    Where one side has no error the other's stands for both; where neither has one a movement cannot be judged and
    counts as within errors. ``flip`` tells a claim's other verdict, if it has one.
    """
    both = kept.merge(new, on=KEYS, how="outer", suffixes=("_kept", "_new"), validate="one_to_one")
    a, b = both.value_kept, both.value_new
    errors = both.error_kept.fillna(both.error_new), both.error_new.fillna(both.error_kept)
    counts = both.n_kept.fillna(both.n_new), both.n_new.fillna(both.n_kept)
    spread, difference = np.hypot(*errors), b - a
    with np.errstate(all="ignore"):
        # Welch's degrees of freedom; an error that is known and not estimated adds no doubt.
        doubt = sum(error**4 / (n.fillna(np.inf) - 1) for error, n in zip(errors, counts, strict=True))
        freedom = (spread**4 / doubt).where(doubt > 0, np.inf)
        z = (difference / spread).where(difference != 0, 0.0)
    judged = int((spread > 0).sum())
    threshold = pd.Series(student.isf(FAMILY_WISE / (2 * max(judged, 1)), freedom), both.index).where(spread > 0)
    moved = difference.abs() > ABSOLUTE + RELATIVE * np.minimum(a.abs(), b.abs())
    cases = [a.isna() & b.isna(), b.isna(), a.isna(), ~moved, (spread == 0) | (z.abs() > threshold)]
    verdict = np.select(cases, [SAME, MISSING, NEW, SAME, BEYOND], WITHIN)
    flip = (both.verdict_kept + " -> " + both.verdict_new).where(both.verdict_kept != both.verdict_new, "").fillna("")
    columns = {"kept": a, "new": b, "z": z, "threshold": threshold, "verdict": verdict, "flip": flip}
    return both[KEYS].assign(**columns, judged=both.error_kept.notna() | both.error_new.notna())


def failed(cells: pd.DataFrame) -> bool:
    """Whether a number moved beyond its error or (unless it has none) is gone, or a claim was reversed."""
    reversed_claim = (cells.flip != "") & ~cells.flip.str.contains("undecided")
    return bool(((cells.verdict == BEYOND) | ((cells.verdict == MISSING) & cells.judged) | reversed_claim).any())


def describe(cells: pd.DataFrame, shown: int = 20) -> str:
    """Counts, then the cells that moved, largest |z| first, and claims with another verdict."""
    counts = cells.verdict.value_counts().reindex(VERDICTS, fill_value=0)
    lines = [typer.style(f"{count:6d} {name}", fg=COLOURS[name] if count else None) for name, count in counts.items()]
    lines.append(f"Beyond errors: |z| above {cells.threshold.min():.2f}, more where prompts are few.")
    if unjudged := int(((cells.verdict == WITHIN) & ~cells.judged).sum()):
        lines.append(f"Moved, but without an error to judge by (they count as within errors): {unjudged}")
    for verdict in (BEYOND, MISSING, NEW, WITHIN):
        part = cells[cells.verdict == verdict].sort_values("z", key=np.abs, ascending=False, kind="stable")
        lines += [typer.style(f"\n{verdict.capitalize()}:", bold=True, fg=COLOURS[verdict])] if len(part) else []
        for row in part.head(shown).itertuples():
            line = f"  {row.table}: {row.quantity}, {row.cell}: {row.kept:.7g} -> {row.new:.7g} (z = {row.z:+.1f})"
            lines.append(typer.style(line, fg=COLOURS[verdict]))
        lines += [f"  and {len(part) - shown} more"] if len(part) > shown else []
    lines += [f"Another verdict: {row.flip}: {row.cell}" for row in cells[cells.flip != ""].itertuples()]
    last = "Results moved beyond errors." if failed(cells) else "Nothing moved beyond errors."
    return "\n".join([*lines, f"\n{NOT_COMPARED}", typer.style(last, bold=True)])


def check_results(profile_name: str, *, fresh: bool = False, compare_only: bool = False) -> int:
    """Rerun a profile beside its kept results, print what moved and write ``runs/check-<profile>/cells.csv``.

    Args:
        fresh: start from an empty cache; otherwise stages whose code and settings are unchanged are reused.
        compare_only: compare with the tables of the last rerun.

    Returns:
        1 if results moved (:func:`failed`), else 0.

    Raises:
        DBlastError: unknown profile; kept results that are missing, damaged or of another plan (before anything runs);
            a rerun that failed or, with ``compare_only``, has not come to its end.
    """
    if fresh and compare_only:
        raise DBlastError("a comparison alone reruns nothing: give either --fresh or --compare-only")
    profile = get_profile(profile_name)
    for plan in profile.plans:
        for name in TABLES:
            if (RESULTS / profile.name / f"{plan.label}-{name}.parquet").exists():
                open_table(profile, plan.label, name)
    kept, folder = read_cells(FIGURES / profile.name), RUNS / f"check-{profile.name}"
    done = folder / "done"
    if not compare_only:
        shutil.rmtree(folder, ignore_errors=True)
        # A profile may read what others have kept.
        shutil.copytree(RESULTS, folder / "data/results", ignore=shutil.ignore_patterns(profile.name))
        command = [sys.executable, "-m", "dblast", "reproduce", "--profile", profile.name, *["--fresh"] * fresh]
        if subprocess.run(command, env=os.environ | {"DBLAST_OUTPUT": str(folder)}, check=False).returncode:
            raise DBlastError(f"the rerun of profile {profile.name!r} failed; see above")
        done.touch()
    if not done.exists():
        raise DBlastError(f"there is no finished rerun; run `python -m dblast check-results --profile {profile.name}`")
    cells = compare(kept, read_cells(folder / "figures" / profile.name))
    cells.to_csv(folder / "cells.csv", index=False)
    typer.echo(f"Profile {profile.name}: {len(cells)} cells, new against kept\n{describe(cells)}")
    typer.echo(f"all cells: {folder / 'cells.csv'}")
    return int(failed(cells))
