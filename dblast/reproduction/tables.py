"""The paper's tables from result tables, ours beside the paper's, as CSV, Markdown and LaTeX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dblast.errors import DBlastError
from dblast.reproduction.bootstrap import Resampled, bootstrap_gain
from dblast.reproduction.captions import seeds_in_words
from dblast.reproduction.estimates import (
    VARIANT_COLUMNS,
    Estimate,
    accepted_length,
    accepted_length_rows,
    common_seeds,
    difference,
    gain,
    held_out_at_chosen,
    seed_spread,
    with_seed_noise,
)
from dblast.reproduction.latex import latex_table
from dblast.reproduction.paper_shapes import parameters_at_paper_scale
from dblast.reproduction.paths import PAPER, figures_folder

#: Pre-training objectives in words.
OBJECTIVE_NAMES = {"CE": "decayed cross-entropy", "KD": "distillation"}
METHODS = ("DFlash", "DFlash+AL", "DFlash+DS", "DBlast")
SETTINGS_ORDER = ("high", "medium", "low")


@dataclass
class Table:
    """A finished table: tidy rows, a display form, and the sentence that explains it."""

    name: str
    title: str
    caption: str
    rows: pd.DataFrame
    display: pd.DataFrame

    def save(self, profile: str) -> list[Path]:
        """Write ``tables/<name>.{csv,md,tex}`` under :func:`~dblast.reproduction.paths.figures_folder`; returns the paths."""
        folder = figures_folder(profile) / "tables"
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.name}.{suffix}" for suffix in ("csv", "md", "tex")]
        self.rows.round(6).to_csv(paths[0], index=False)
        # A token may be a bar, which would end its cell.
        shown = self.display.reset_index().map(lambda cell: cell.replace("|", r"\|") if isinstance(cell, str) else cell)
        text = shown.to_markdown(index=False, disable_numparse=True)
        paths[1].write_text(f"**{self.title}.** {self.caption}\n\n{text}\n", encoding="utf-8")
        paths[2].write_text(self.latex(), encoding="utf-8")
        return paths

    def latex(self) -> str:
        """The display form as a LaTeX table that fits a page; its first line says which packages it needs."""
        return latex_table(self.display, f"{self.title}. {self.caption}", f"tab:{self.name}")


def read_paper(name: str) -> pd.DataFrame:
    """A table of numbers the paper reports, from ``data/paper``."""
    path = PAPER / f"{name}.csv"
    if not path.exists():
        raise DBlastError(f"no such file {path.name} in data/paper; known: {[p.stem for p in sorted(PAPER.glob('*.csv'))]}")
    return pd.read_csv(path)


def plus_minus(estimate: Estimate) -> str:
    """A length with its standard error."""
    return f"{estimate.value:.2f} ± {estimate.standard_error:.2f}"


def per_cent(estimate: Estimate) -> str:
    """A gain with its standard error; a dash where there is none."""
    if math.isnan(estimate.value):
        return "–"
    return f"{estimate.value:+.1f} ± {estimate.standard_error:.1f} %"


def bracketed(interval: Resampled) -> str:
    """A gain in per cent with its bootstrap interval; a dash where there is none."""
    if math.isnan(interval.value):
        return "–"
    return f"{interval.value:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"


def gain_spread(ours: pd.DataFrame, base: pd.DataFrame) -> float:
    """Standard deviation over fine-tuning seeds of the macro-averaged gain in per cent; NaN for one seed in common."""
    ours, base = common_seeds(ours, base)
    seeds = sorted(set(ours.seed))
    values = [gain(ours[ours.seed == seed], base[base.seed == seed], macro=True).value for seed in seeds]
    return float(np.std(values, ddof=1)) if len(seeds) > 1 else float("nan")


class _Gains:
    """Gains of tables 2 to 4: cells to show, and the same numbers as columns of the tidy rows."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.numbers: list[dict] = []

    def cells(self, ours: pd.DataFrame, base: pd.DataFrame) -> dict[str, str]:
        """A gain with its paired bootstrap interval over prompts, and apart from it its spread over fine-tuning seeds."""
        interval = bootstrap_gain(*common_seeds(ours, base), macro=True)
        spread = gain_spread(ours, base)
        # One variant at one setting: whatever names it is the same in all its rows.
        names = ours[VARIANT_COLUMNS].iloc[0].to_dict() | {"task": "average", "seed": "all"}
        numbers = {"gain": interval.value, "gain_low": interval.low, "gain_high": interval.high, "gain_seed_spread": spread}
        self.numbers.append(names | numbers)
        told = "one seed" if math.isnan(spread) else f"{spread:.1f}"
        return {self.shown: bracketed(interval), f"{self.shown}: seed spread": told}

    def beside(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The tidy rows, with the gains of macro-averages over all seeds in columns of their own."""
        keys = [*VARIANT_COLUMNS, "task", "seed"]
        numbers = ["gain", "gain_low", "gain_high", "gain_seed_spread"]
        return rows.merge(pd.DataFrame(self.numbers, columns=[*keys, *numbers]), on=keys, how="left")


#: What the brackets of tables 2 to 4 are.
BRACKETS = (
    "gains in % with 95 % intervals over prompts alone (paired bootstrap), and beside them their standard deviation over "
    "fine-tuning seeds (points); the claims' intervals hold both"
)


def paired_gain(ours: pd.DataFrame, base: pd.DataFrame) -> Estimate:
    """Macro-averaged gain on the seeds both have, paired by prompt, with the noise of fine-tuning seeds."""
    return with_seed_noise(gain, *common_seeds(ours, base), macro=True)


def paired_difference(ours: pd.DataFrame, base: pd.DataFrame) -> Estimate:
    """The same as :func:`paired_gain` in tokens."""
    return with_seed_noise(difference, *common_seeds(ours, base), macro=True)


def length_columns(ours: pd.DataFrame) -> dict[str, float]:
    """What tables of many drafters say of one: its Z_T, macro-averaged accepted length, errors and prompts."""
    length = accepted_length(ours, macro=True)
    return {
        "category_temperature": ours.category_temperature.iloc[0],
        "accepted_length": length.value,
        "standard_error": length.standard_error,
        "seed_spread": seed_spread(ours, macro=True),
        "n": length.n,
    }


def main_variants(scores: pd.DataFrame) -> pd.DataFrame:
    """Held-out scores of Table 2's four variants at their calibrated Z_T."""
    rows = held_out_at_chosen(scores)
    return rows[rows.K.isin([1, 4]) & (rows.construction == "all_prefixes")]


def table2(scores: pd.DataFrame, target: str, footnote: str = "") -> Table:
    """Table 2: four variants by task and setting, gain over DFlash in per cent with paired intervals.

    Args:
        footnote: ends the caption, e.g. :func:`dblast.reproduction.online.online_footnote`.
    """
    chosen = main_variants(scores[scores.target == target])
    gains = _Gains("gain (%)")
    lines = []
    for setting in [s for s in SETTINGS_ORDER if s in set(chosen.setting)]:
        base = chosen[(chosen.setting == setting) & (chosen.method == "DFlash")]
        for method in METHODS:
            ours = chosen[(chosen.setting == setting) & (chosen.method == method)]
            line = {"determinism": setting, "method": method}
            for task, part in ours.groupby("task", observed=True):
                line[task] = f"{accepted_length(part).value:.2f}"
            line["average"] = plus_minus(accepted_length(ours, macro=True))
            spread = seed_spread(ours, macro=True)
            line["seed spread"] = "one seed" if math.isnan(spread) else f"{spread:.3f}"
            if method != "DFlash":
                line |= gains.cells(ours, base)
            temperature = ours.category_temperature.iloc[0]
            line["Z_T"] = "" if math.isnan(temperature) else f"{temperature:.1f}"
            lines.append(line)
    n = chosen.prompt_id.nunique()
    return Table(
        f"table2_{target}",
        f"Table 2 ({target})",
        f"Accepted length without bonus token, held-out prompts (n = {n}), {seeds_in_words(chosen.seed.nunique())}; "
        "± one standard error over prompts (those of single tasks are in the CSV file), seed spread: standard deviation over "
        f"fine-tuning seeds (tokens); {BRACKETS}. {footnote}".strip(),
        gains.beside(accepted_length_rows(chosen)),
        # The first line has no gain, which would put those columns last.
        pd.DataFrame(lines).fillna("").set_index(["determinism", "method"])[
            [*sorted(set(chosen.task)), "average", "seed spread", "gain (%)", "gain (%): seed spread", "Z_T"]
        ],
    )


def table2_gains(scores: pd.DataFrame, target: str) -> pd.DataFrame:
    """Paired gains over DFlash (macro-average): ``setting, method``, ``difference`` (tokens) and ``gain`` (per cent) with
    the columns of :meth:`dblast.reproduction.estimates.Estimate.columns`, ``seeds, n``."""
    chosen = main_variants(scores[scores.target == target])
    rows = []
    for setting in [s for s in SETTINGS_ORDER if s in set(chosen.setting)]:
        base = chosen[(chosen.setting == setting) & (chosen.method == "DFlash")]
        for method in METHODS[1:]:
            ours = chosen[(chosen.setting == setting) & (chosen.method == method)]
            absolute, relative = paired_difference(ours, base), paired_gain(ours, base)
            rows.append(
                {
                    "target": target,
                    "setting": setting,
                    "method": method,
                    **absolute.columns("difference"),
                    **relative.columns("gain"),
                    "seeds": relative.seeds,
                    "n": relative.n,
                }
            )
    return pd.DataFrame(rows)


def paper_gains() -> pd.DataFrame:
    """The paper's Table 2 averages as gains over DFlash: ``target, setting, method, gain``."""
    paper = read_paper("table2_main")
    rows = paper[paper.task == "Average"].pivot(index=["target", "setting"], columns="method", values="accepted_length")
    gains = 100 * (rows.div(rows["DFlash"], axis=0) - 1)
    return gains.drop(columns="DFlash").reset_index().melt(["target", "setting"], var_name="method", value_name="gain")


class _Ablation:
    """Lines of tables 3 and 4: every variant beside the paper's, with its gain over the one it is compared with."""

    def __init__(self, gain: str) -> None:
        self.gains, self.lines = _Gains(gain), []

    def add(self, names: dict, ours: pd.DataFrame, base: pd.DataFrame, printed: float, printed_base: float) -> None:
        line = names | {"accepted length": plus_minus(accepted_length(ours, macro=True))}
        gain = ""
        if not ours.equals(base):
            line |= self.gains.cells(ours, base)
            gain = f"{100 * (printed / printed_base - 1):+.1f} %"
        self.lines.append(line | {"paper": f"{printed:.2f}", "paper gain": gain})

    def display(self, names: list[str]) -> pd.DataFrame:
        # The first line has no gain, which would put those columns last.
        shown = self.gains.shown
        columns = ["accepted length", shown, f"{shown}: seed spread", "paper", "paper gain"]
        return pd.DataFrame(self.lines).fillna("").set_index(names)[columns]


def table3(scores: pd.DataFrame, target: str) -> Table:
    """Table 3: number of categories by loss at the low-determinism setting, gain over K = 1 of the same loss."""
    rows = held_out_at_chosen(scores[scores.target == target])
    rows = rows[(rows.setting == "low") & (rows.construction == "all_prefixes")]
    paper = read_paper("table3_categories")
    ablation = _Ablation("gain over K = 1 (%)")
    for loss in ("NLL", "AL"):
        base = rows[(rows.loss == loss) & (rows.K == 1)]
        printed = paper[paper.loss == loss].set_index("K").accepted_length
        for k in sorted(rows.K.unique()):
            ours = rows[(rows.loss == loss) & (rows.K == k)]
            ablation.add({"loss": loss, "K": k}, ours, base, printed[k], printed[1])
    return Table(
        f"table3_{target}",
        f"Table 3 ({target})",
        f"Accepted length by number of categories, low determinism, held-out prompts (n = {rows.prompt_id.nunique()}), "
        f"{seeds_in_words(rows.seed.nunique())}, Z_T chosen on the calibration split; ± one standard error over prompts; {BRACKETS}; "
        "paper: Qwen3-4B.",
        ablation.gains.beside(accepted_length_rows(rows)),
        ablation.display(["loss", "K"]),
    )


def table4(scores: pd.DataFrame, target: str, category_temperature: float = 1.0) -> Table:
    """Table 4: constructions of the AL loss at the low setting and Z_T = 1, as the paper fixes it."""
    rows = scores[(scores.target == target) & (scores.setting == "low") & (scores.split == "held_out")]
    rows = rows[(rows.loss == "AL") & rows.K.isin([1, 4])]
    rows = rows[(rows.K == 1) | (rows.category_temperature == category_temperature)]
    paper = read_paper("table4_al_construction").set_index(["K", "variant"]).accepted_length
    ablation = _Ablation("gain over whole block (%)")
    for k in (1, 4):
        base = rows[(rows.K == k) & (rows.construction == "whole_block")]
        for construction in ("whole_block", "one_prefix", "all_prefixes"):
            ours = rows[(rows.K == k) & (rows.construction == construction)]
            names = {"K": k, "construction": construction.replace("_", " ")}
            ablation.add(names, ours, base, paper[k, construction], paper[k, "whole_block"])
    return Table(
        f"table4_{target}",
        f"Table 4 ({target})",
        f"Accepted length by construction of the AL loss, low determinism, Z_T = {category_temperature}, held-out prompts "
        f"(n = {rows.prompt_id.nunique()}), {seeds_in_words(rows.seed.nunique())}; ± one standard error over prompts; {BRACKETS}; "
        "paper: Qwen3-8B on GSM8K.",
        ablation.gains.beside(accepted_length_rows(rows)),
        ablation.display(["K", "construction"]),
    )


def table1(parameters: pd.DataFrame) -> Table:
    """Table 1: parameters that the category heads add, counted from real modules (the paper's shapes too), beside its counts."""
    paper = read_paper("table1_parameters").rename(columns={"added_parameters_millions": "added (millions)"})
    counted = pd.concat([parameters, parameters_at_paper_scale()], ignore_index=True)
    ours = counted.assign(**{"added (millions)": counted.added_parameters / 1e6}).assign(source="counted")
    columns = ["target", "hidden_size", "K", "added (millions)", "percent_of_drafter", "source"]
    both = pd.concat([ours[columns], paper.assign(source="paper")[columns]], ignore_index=True)
    display = both.assign(
        **{
            "added (millions)": both["added (millions)"].map("{:.2f}".format),
            "percent_of_drafter": both.percent_of_drafter.map("{:.1f}".format),
        }
    )
    return Table(
        "table1",
        "Table 1",
        "Parameters added by the category heads, K * H^2 + 2 * K * H + K; per cent of the drafter without them "
        "(embedding and head are the target's and not counted). The paper's shapes are counted on modules without "
        "weights; its per cents are of its own count of the drafter.",
        both,
        display.set_index(["target", "K"]),
    )


def figure2_rows(scores: pd.DataFrame, target: str) -> pd.DataFrame:
    """Figure 2's data: accepted length against Z_T for K = 4, each loss and setting, held-out prompts."""
    rows = scores[(scores.target == target) & (scores.K == 4) & (scores.construction == "all_prefixes")]
    rows = rows[rows.split == "held_out"]
    table = accepted_length_rows(
        rows, by=["target", "method", "K", "loss", "setting", "category_temperature"], per_seed=False
    )
    return table[table.task == "average"].reset_index(drop=True)


def category_temperature_gain(scores: pd.DataFrame, target: str) -> pd.DataFrame:
    """What the calibrated Z_T is worth against Z_T = 0 (argmax), K = 4: paired differences on held-out prompts."""
    rows = scores[(scores.target == target) & (scores.K == 4) & (scores.construction == "all_prefixes")]
    lines = []
    for (loss, setting), part in held_out_at_chosen(rows).groupby(["loss", "setting"], observed=True):
        zero = rows[(rows.loss == loss) & (rows.setting == setting) & (rows.category_temperature == 0.0)]
        zero = zero[zero.split == "held_out"]
        estimate = paired_difference(part, zero)
        low, high = estimate.interval
        lines.append(
            {
                "loss": loss,
                "setting": setting,
                "chosen Z_T": part.category_temperature.iloc[0],
                "difference": estimate.value,
                "standard_error": estimate.standard_error,
                "ci_low": low,
                "ci_high": high,
                "n": estimate.n,
            }
        )
    order = pd.CategoricalDtype(SETTINGS_ORDER, ordered=True)
    return pd.DataFrame(lines).astype({"setting": order}).sort_values(["loss", "setting"]).reset_index(drop=True)
