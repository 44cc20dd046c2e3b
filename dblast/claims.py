"""The paper's claims as rows: its number, ours with a 95 % interval, and a verdict that the interval decides."""

from __future__ import annotations

import math

import pandas as pd

from dblast.estimates import Estimate, accepted_length, difference, gain, held_out_at_chosen
from dblast.tables import SETTINGS_ORDER, paper_gains, read_paper

COLUMNS = ["claim", "target", "paper", "ours", "ci_low", "ci_high", "verdict"]


def verdict(estimate: Estimate) -> str:
    """For a claim of the form "this quantity is positive": the 95 % interval above zero, below it, or across it."""
    low, high = estimate.interval
    if math.isnan(low):
        return "undecided"
    if low > 0:
        return "reproduced"
    return "not reproduced" if high < 0 else "undecided"


def _row(claim: str, target: str, paper: str, estimate: Estimate) -> dict:
    low, high = estimate.interval
    values = [claim, target, paper, estimate.value, low, high, verdict(estimate)]
    return dict(zip(COLUMNS, values, strict=True))


def _minus(a: Estimate, b: Estimate) -> Estimate:
    """Difference of two estimates from different trajectories, errors added in squares."""
    return Estimate(a.value - b.value, math.hypot(a.standard_error, b.standard_error), min(a.n, b.n))


def _paper_fall() -> str:
    """The paper's DFlash averages, high minus low determinism, mean over its two targets."""
    rows = read_paper("table2_main").query("task == 'Average' and method == 'DFlash'")
    means = rows.groupby("setting").accepted_length.mean()
    return f"{means['high'] - means['low']:.2f}"


def claims_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Claims that replay scores can decide, per target; quantities are stated so that the claim means positive.

    Returns:
        ``claim, target, paper, ours, ci_low, ci_high, verdict``.
    """
    paper = paper_gains().groupby(["setting", "method"]).gain.mean()
    rows = []
    for target in dict.fromkeys(scores.target):
        mine = scores[scores.target == target]
        chosen = held_out_at_chosen(mine)

        def pick(setting, k, loss, construction="all_prefixes", table=chosen):
            return table[
                (table.setting == setting)
                & (table.K == k)
                & (table.loss == loss)
                & (table.construction == construction)
            ]

        settings = [s for s in SETTINGS_ORDER if s in set(mine.setting)]
        lengths = [accepted_length(pick(s, 1, "NLL"), macro=True) for s in (settings[0], settings[-1])]
        rows.append(
            _row("Independent drafts lose accepted length as determinism falls: DFlash, high minus low (tokens)",
                 target, _paper_fall(), _minus(*lengths))
        )  # fmt: skip
        gains = {}
        for s in settings:
            base = pick(s, 1, "NLL")
            for method, k, loss in (("DFlash+AL", 1, "AL"), ("DFlash+DS", 4, "NLL"), ("DBlast", 4, "AL")):
                gains[s, method] = gain(pick(s, k, loss), base, macro=True)
                rows.append(
                    _row(f"{method} over DFlash, {s} determinism (%)", target, f"{paper[s, method]:.1f}",
                         gains[s, method])
                )  # fmt: skip
            for other, k, loss in (("DFlash+AL", 1, "AL"), ("DFlash+DS", 4, "NLL")):
                estimate = gain(pick(s, 4, "AL"), pick(s, k, loss), macro=True)
                printed = 100 * ((1 + paper[s, "DBlast"] / 100) / (1 + paper[s, other] / 100) - 1)
                rows.append(_row(f"DBlast over {other}, {s} determinism (%)", target, f"{printed:.1f}", estimate))
        low, high = settings[-1], settings[0]
        rows.append(
            _row("The gain of DBlast grows as determinism falls: low minus high (points)", target,
                 f"{paper[low, 'DBlast'] - paper[high, 'DBlast']:.1f}",
                 _minus(gains[low, "DBlast"], gains[high, "DBlast"]))
        )  # fmt: skip
        for s in settings:
            zero = mine[(mine.split == "held_out") & (mine.category_temperature == 0.0)]
            estimate = difference(pick(s, 4, "AL"), pick(s, 4, "AL", table=zero), macro=True)
            printed = read_paper("figure2_category_temperature").query("loss == 'AL'").set_index("setting")
            value = printed.peak_read_off[s] - printed.at_zero_read_off[s]
            rows.append(
                _row(f"Sampling the category beats its argmax: chosen Z_T minus Z_T = 0, DBlast, {s} (tokens)",
                     target, f"{value:.2f}", estimate)
            )  # fmt: skip
        if {2, 8} <= set(mine.K):
            for loss in ("NLL", "AL"):
                table3 = read_paper("table3_categories").query("loss == @loss").set_index("K").accepted_length
                first = gain(pick(low, 4, loss), pick(low, 1, loss), macro=True)
                more = gain(pick(low, 8, loss), pick(low, 4, loss), macro=True)
                printed = 100 * (table3[4] / table3[1] - table3[8] / table3[4])
                rows.append(
                    _row(f"Returns diminish beyond K = 4, {loss}: gain 1 to 4 minus gain 4 to 8 (points)",
                         target, f"{printed:.1f}", _minus(first, more))
                )  # fmt: skip
        if "whole_block" in set(mine.construction):
            table4 = read_paper("table4_al_construction").set_index(["K", "variant"]).accepted_length
            fixed = mine[(mine.split == "held_out") & ((mine.K == 1) | (mine.category_temperature == 1.0))]
            for k in (1, 4):
                for better, worse in (("all_prefixes", "one_prefix"), ("one_prefix", "whole_block")):
                    estimate = gain(
                        pick(low, k, "AL", better, fixed), pick(low, k, "AL", worse, fixed), macro=True
                    )
                    printed = 100 * (table4[k, better] / table4[k, worse] - 1)
                    names = f"{better} over {worse}".replace("_", " ")
                    rows.append(_row(f"AL loss: {names}, K = {k} (%)", target, f"{printed:.1f}", estimate))
    return pd.DataFrame(rows, columns=COLUMNS)
