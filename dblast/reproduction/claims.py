"""The paper's claims as rows: its number, ours with a 95 % interval, and a verdict that the interval decides.

A verdict is about the sign alone. Every quantity is stated so that the claim means
"positive": *reproduced* says that ours is, not that it has the paper's size, which
stands beside it for the reader to compare.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from dblast.reproduction.bootstrap import Resampled, best_category_temperature_shift
from dblast.reproduction.diagnosis.determinism import gain_by_determinism
from dblast.reproduction.estimates import (
    Estimate,
    combination,
    common_seeds,
    decided,
    difference,
    gain,
    gain_difference,
    held_out_at_chosen,
    with_seed_noise,
)
from dblast.reproduction.latency_tables import overhead
from dblast.reproduction.plans import MAIN
from dblast.reproduction.tables import SETTINGS_ORDER, Table, paper_gains, read_paper

COLUMNS = ["claim", "target", "paper", "ours", "ci_low", "ci_high", "verdict", "seeds", "n"]

#: How to read the verdicts, in a sentence.
VERDICT_RULE = (
    "The 95 % interval decides the sign and nothing else: all above zero is 'reproduced', all below zero "
    "'not reproduced', across zero 'undecided'; whether the size agrees is to be read from 'ours' beside 'paper'. "
    "Intervals are over prompts and, where 'seeds' is above 1, over fine-tuning seeds too, with Student's quantile: few seeds "
    "make them wide."
)

#: K and loss of the paper's methods.
_METHODS = {variant.method: (variant.K, variant.loss) for variant in MAIN}

#: What "a few" is taken to be.
FEW_PER_CENT = 5

#: The cells of Table 2 that go against the paper's own story, at high determinism:
#: its benchmark, our task, the method that comes out ahead, the one it beats.
_EXCEPTIONS = (("HumanEval", "code", "DFlash", "DFlash+DS"), ("MT-Bench", "chat", "DFlash+AL", "DBlast"))


def verdict(estimate: Estimate | Resampled) -> str:
    """For a claim of the form "this quantity is positive": the 95 % interval above zero, below it, or across it.

    "reproduced" means the sign and says nothing about the size (see :data:`VERDICT_RULE`).
    """
    return {"better": "reproduced", "worse": "not reproduced", "undecided": "undecided"}[decided(*estimate.interval)]


def _per_doubling(one: pd.DataFrame, four: pd.DataFrame, eight: pd.DataFrame, macro: bool = False) -> Estimate:
    """Tokens gained per doubling of K from 1 to 4 (two doublings), minus those from 4 to 8 (one)."""
    return combination([(1.5, four), (-0.5, one), (-1.0, eight)], macro)


class _Target:
    """One target: its scores, picked by variant, and the rows made from them."""

    def __init__(self, name: str, scores: pd.DataFrame) -> None:
        self.name = name
        self.scores = scores
        self.held_out = scores[scores.split == "held_out"]
        self.chosen = held_out_at_chosen(scores)
        self.settings = [s for s in SETTINGS_ORDER if s in set(scores.setting)]
        self.rows: list[dict] = []

    def pick(self, setting, k, loss, construction="all_prefixes", table=None) -> pd.DataFrame:
        """One variant at one setting, held out at its chosen Z_T unless another table is given."""
        rows = self.chosen if table is None else table
        rows = rows[(rows.setting == setting) & (rows.K == k) & (rows.loss == loss)]
        return rows[rows.construction == construction]

    def method(self, setting: str, name: str) -> pd.DataFrame:
        return self.pick(setting, *_METHODS[name])

    def compare(self, claim: str, paper: str, estimate: Callable[..., Estimate], *tables: pd.DataFrame) -> None:
        """A row from a macro-averaged estimate, on the fine-tuning seeds that all sides have and with their noise."""
        self.add(claim, paper, with_seed_noise(estimate, *common_seeds(*tables), macro=True))

    def add(self, claim: str, paper: str, estimate: Estimate | Resampled) -> None:
        low, high = estimate.interval
        values = [claim, self.name, paper, estimate.value, low, high, verdict(estimate), estimate.seeds, estimate.n]
        self.rows.append(dict(zip(COLUMNS, values, strict=True)))


def _main_claims(mine: _Target) -> None:
    """Table 2's averages: what determinism costs, and what each part of the method brings."""
    high, low = mine.settings[0], mine.settings[-1]
    averages = read_paper("table2_main").query("task == 'Average' and method == 'DFlash'")
    averages = averages.groupby("setting").accepted_length.mean()
    mine.compare(
        "Independent drafts lose accepted length as determinism falls: DFlash, high minus low (tokens)",
        f"{averages[high] - averages[low]:.2f}",
        difference,
        mine.method(high, "DFlash"),
        mine.method(low, "DFlash"),
    )
    paper = paper_gains().groupby(["setting", "method"]).gain.mean()
    for s in mine.settings:
        for method in ("DFlash+AL", "DFlash+DS", "DBlast"):
            sides = mine.method(s, method), mine.method(s, "DFlash")
            mine.compare(f"{method} over DFlash, {s} determinism (%)", f"{paper[s, method]:.1f}", gain, *sides)
        for other in ("DFlash+AL", "DFlash+DS"):
            printed = 100 * ((1 + paper[s, "DBlast"] / 100) / (1 + paper[s, other] / 100) - 1)
            sides = mine.method(s, "DBlast"), mine.method(s, other)
            mine.compare(f"DBlast over {other}, {s} determinism (%)", f"{printed:.1f}", gain, *sides)
    mine.compare(
        "The gain of DBlast grows as determinism falls: low minus high (points)",
        f"{paper[low, 'DBlast'] - paper[high, 'DBlast']:.1f}",
        gain_difference,
        *(mine.method(s, method) for s in (low, high) for method in ("DBlast", "DFlash")),
    )


def _exceptions(mine: _Target) -> None:
    """The two cells of the paper's Table 2 where a part of the method does not help."""
    if "high" not in mine.settings:
        return
    table2 = read_paper("table2_main").query("setting == 'high'")
    for benchmark, task, ahead, behind in _EXCEPTIONS:
        sides = [rows[rows.task == task] for rows in (mine.method("high", ahead), mine.method("high", behind))]
        if sides[0].empty:
            continue
        cells = table2[table2.task == benchmark].pivot(index="target", columns="method", values="accepted_length")
        printed = 100 * (cells[ahead] / cells[behind] - 1).mean()
        claim = f"Against the paper's trend ({benchmark}, T = 0.7): {ahead} over {behind}, {task}, high determinism (%)"
        mine.compare(claim, f"{printed:.1f}", gain, *sides)


def _temperature_claims(mine: _Target) -> None:
    """Figure 2: sampling the category is worth it, the more of it the less determined the target is."""
    high, low = mine.settings[0], mine.settings[-1]
    zero = mine.held_out[mine.held_out.category_temperature == 0.0]
    printed = read_paper("figure2_category_temperature").query("loss == 'AL'").set_index("setting")
    for s in mine.settings:
        mine.compare(
            f"Sampling the category beats its argmax: chosen Z_T minus Z_T = 0, DBlast, {s} (tokens)",
            f"{printed.peak_read_off[s] - printed.at_zero_read_off[s]:.2f}",
            difference,
            mine.pick(s, 4, "AL"),
            mine.pick(s, 4, "AL", table=zero),
        )
    peaks = printed.peak_category_temperature
    sides = common_seeds(*(mine.pick(s, 4, "AL", table=mine.scores) for s in (low, high)))
    mine.add(
        "The best Z_T moves up as determinism falls: low minus high, DBlast, all prompts",
        f"{float(peaks[low]) - float(peaks[high]):.1f}",
        best_category_temperature_shift(*sides),
    )


def _ablation_claims(mine: _Target) -> None:
    """Tables 3 and 4, at low determinism, if the target has these variants."""
    low = mine.settings[-1]
    if {2, 8} <= set(mine.scores.K):
        for loss in ("NLL", "AL"):
            table3 = read_paper("table3_categories").query("loss == @loss").set_index("K").accepted_length
            printed = (table3[4] - table3[1]) / 2 - (table3[8] - table3[4])
            mine.compare(
                f"Returns diminish beyond K = 4, {loss}: gain per doubling, 1 to 4 minus 4 to 8 (tokens)",
                f"{printed:.2f}",
                _per_doubling,
                *(mine.pick(low, k, loss) for k in (1, 4, 8)),
            )
    if "whole_block" in set(mine.scores.construction):
        table4 = read_paper("table4_al_construction").set_index(["K", "variant"]).accepted_length
        fixed = mine.held_out[(mine.held_out.K == 1) | (mine.held_out.category_temperature == 1.0)]
        for k in (1, 4):
            for better, worse in (("all_prefixes", "one_prefix"), ("one_prefix", "whole_block")):
                names = f"{better} over {worse}".replace("_", " ")
                printed = 100 * (table4[k, better] / table4[k, worse] - 1)
                sides = (mine.pick(low, k, "AL", construction, fixed) for construction in (better, worse))
                mine.compare(f"AL loss: {names}, K = {k} (%)", f"{printed:.1f}", gain, *sides)


def _figure1_claims(name: str, points: pd.DataFrame) -> list[dict]:
    """Figure 1: dependent drafts gain most where the target is least decided."""
    paper = read_paper("figure1_table5_determinism")
    rest = paper[paper.bin_low > 0]
    base, ours = (np.average(rest[f"{m}_read_off"], weights=rest.samples) for m in ("dflash", "dblast"))
    printed = paper.relative_gain_percent.iloc[0] - 100 * (ours / base - 1)
    rows = []
    for row in gain_by_determinism(points[points.target == name]).itertuples():
        claim = f"Dependent drafts gain most where the target is least decided: D_b < 0.2 minus the rest, {row.split} prompts (points)"
        estimate = Estimate(row.difference, row.standard_error, row.n, row.seeds, row.freedom)
        values = [claim.replace("held_out", "held-out"), name, f"{printed:.0f}", estimate.value, *estimate.interval]
        rows.append(dict(zip(COLUMNS, [*values, verdict(estimate), row.seeds, row.n], strict=True)))
    return rows


def _latency_claims(mine: _Target, latency: pd.DataFrame) -> None:
    """Tables 6 and 7: an iteration with four categories costs a few per cent more than one without expander."""
    paper = read_paper("table6_7_latency").query("K == 4").overhead_percent.mean()
    more = overhead(latency[latency.target == mine.name], 4)
    mine.add(
        f"K = 4 costs a few per cent of an iteration: {FEW_PER_CENT} minus what it adds to the drafter without expander (points)",
        f"{FEW_PER_CENT - paper:.1f}",
        Resampled(FEW_PER_CENT - more.value, FEW_PER_CENT - more.high, FEW_PER_CENT - more.low, more.n, more.seeds),
    )


def claims_table(
    scores: pd.DataFrame, points: pd.DataFrame | None = None, latency: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Claims that replay scores can decide (and Figure 1's points and step times, if given), per target; quantities are
    stated so that the claim means positive.

    Errors are paired by prompt. Where the variants have several fine-tuning seeds in common
    (column ``seeds``), the seeds' noise is part of the interval; with one it is not known.

    Returns:
        ``claim, target, paper, ours, ci_low, ci_high, verdict, seeds, n`` (prompts); see :data:`VERDICT_RULE`.
    """
    rows = []
    for name in dict.fromkeys(scores.target):
        mine = _Target(name, scores[scores.target == name])
        for add in (_main_claims, _exceptions, _temperature_claims, _ablation_claims):
            add(mine)
        if latency is not None:
            _latency_claims(mine, latency)
        rows += mine.rows
        if points is not None:
            rows += _figure1_claims(name, points)
    return pd.DataFrame(rows, columns=COLUMNS)


#: Verdicts in a column that asks "does it hold?".
_SHORT = {"reproduced": "yes", "not reproduced": "no", "undecided": "open"}


def claims_display(claims: pd.DataFrame) -> Table:
    """One row a claim, the targets side by side: our number, its 95 % interval, and whether the claim's sign holds.

    Args:
        claims: from :func:`claims_table`. Numbers in tokens get two decimals, those in per cent or points one.
    """

    def cell(row) -> str:
        digits = 1 if row.claim.endswith(("(%)", "(points)")) else 2
        # An end that rounds to zero would not show on which side it lies.
        digits += any(round(end, digits) == 0 != end for end in (row.ci_low, row.ci_high))
        # Adding zero turns a rounded -0.0 into 0.0.
        ours, low, high = (f"{round(x, digits) + 0.0:.{digits}f}" for x in (row.ours, row.ci_low, row.ci_high))
        return f"{ours} [{low}, {high}] {_SHORT[row.verdict]}"

    cells = claims.assign(cell=[cell(row) for row in claims.itertuples()])
    columns = {name: part.set_index("claim").cell for name, part in cells.groupby("target", sort=False)}
    first = claims.drop_duplicates("claim").set_index("claim")
    display = pd.DataFrame({"paper": first.paper.astype(str), **columns}, index=first.index).fillna("")
    return Table(
        "claims",
        "Claims",
        "Each number is positive if the claim holds: ours with its 95 % interval (over prompts and fine-tuning seeds; the cost "
        "of K = 4 over prompts), then whether the whole interval is above zero (yes), below (no) or neither (open). The sizes "
        "are for the reader to compare; the paper's are means over Qwen3-4B and 8B where it has both. The two rows against the paper's trend are "
        "cells where a part of the method does not help in the paper: 'no' there is a part that does help here.",
        claims,
        display,
    )


def verdict_lines(claims: pd.DataFrame, *words: str) -> list[str]:
    """Claims whose text holds one of ``words``, each as a line to print: target, verdict, our number with its interval.

    Profiles that train fewer variants have fewer claims.
    """
    chosen = claims[claims.claim.map(lambda claim: any(word in claim for word in words)).astype(bool)]
    return [
        f"{row.target:8s} {row.verdict:15s} {row.claim}: {row.ours:+.2f} [{row.ci_low:+.2f}, {row.ci_high:+.2f}], paper {row.paper}"
        for row in chosen.itertuples()
    ]
