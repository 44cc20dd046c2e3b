"""Figures of notebook 01: proposals on a solvable process, oracle proposals, Figure 1, where acceptance is lost."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dblast.reproduction.plotting import (
    K_COLOURS,
    K_MARKERS,
    MATH_SIZE,
    METHOD_COLOURS,
    REFERENCE_COLOUR,
    SETTING_LABELS,
    SMALLEST,
    legend_below,
    name_settings,
    panel_grid,
)
from dblast.reproduction.tables import METHODS, SETTINGS_ORDER, read_paper

_MARKERS = ("o", "s", "D", "^", "v")

#: Causes of a rejection: column, what it is, colour and hatch. From dark to light, so that grey print keeps them apart.
CAUSES = (
    ("underweighted", "offered, with too little probability", "#00735C", ""),
    ("other_branch", "only in a branch already contradicted", "#CC79A7", "xxxx"),
    ("not_offered", "among the drafter's top 4, in no branch", "#8CCBEF", "////"),
    ("unknown", "not among the drafter's top 4", "#F4F4F4", "...."),
)

#: A bin of Figure 1 with fewer points gets no gain written above it.
FEW_POINTS = 5


def mismatch_figure(table: pd.DataFrame, block_length: int) -> Figure:
    """Accepted length of every proposal on the solvable process against temperature: sampled left, greedy right."""
    figure, panels = panel_grid(1, 2, 2.8, sharey=True)
    for axes, decoding, title in zip(
        panels[0], ("sampled", "greedy branch"), ("tokens sampled in the branch", "greedy branch"), strict=True
    ):
        joint = table[table.decoding == "joint"]
        axes.plot(joint.temperature, joint.accepted_length, color=REFERENCE_COLOUR, ls=":", lw=1.4, label="true joint")
        rows = table[table.decoding == decoding]
        for proposal in dict.fromkeys(rows.proposal):
            part = rows[rows.proposal == proposal]
            independent, k = proposal.startswith("independent"), int(part.K.iloc[0])
            axes.plot(
                part.temperature,
                part.accepted_length,
                color=REFERENCE_COLOUR if independent else K_COLOURS[k],
                ls="--" if independent else "-",
                marker="^" if independent else K_MARKERS[k],
                ms=3.5,
                lw=1.4,
                label="independent, true marginals" if independent else f"K = {k}",
            )
        axes.set(title=title, xlabel="target temperature", ylim=(0, block_length * 1.05))
    legend_below(figure, panels[0, 0])
    panels[0, 0].set_ylabel(f"expected accepted length\n(tokens of b = {block_length})")
    return figure


def oracle_figure(summary: pd.DataFrame, block_length: int) -> Figure:
    """Accepted length of oracle proposals by setting, one panel a target; error bars ±1 SEM over prompts.

    Args:
        summary: from :func:`dblast.reproduction.diagnosis.tables.oracle_summary`.
    """
    targets = list(dict.fromkeys(summary.target))
    figure, panels = panel_grid(1, len(targets), 3.0, sharey=True)
    for axes, target in zip(panels[0], targets, strict=True):
        rows = summary[summary.target == target]
        settings = [s for s in SETTINGS_ORDER if s in set(rows.setting)]
        for i, proposal in enumerate(dict.fromkeys(rows.proposal)):
            part = rows[rows.proposal == proposal].set_index("setting").loc[settings]
            independent = proposal.startswith("independent")
            k = None if independent else int(proposal.split()[1])
            axes.errorbar(
                np.arange(len(settings)) + 0.04 * (i - 2),
                part.accepted_length,
                part.standard_error,
                color=REFERENCE_COLOUR if independent else K_COLOURS[k],
                ls=("--", ":")[i % 2] if independent else "-",
                marker=("^", "v")[i % 2] if independent else K_MARKERS[k],
                ms=4,
                lw=1.3,
                elinewidth=0.9,
                label=proposal,
            )
        name_settings(axes, settings)
        axes.set(title=f"{target} (n = {rows.prefixes.iloc[0]} prefixes each)", xlabel="determinism", ylim=(0, block_length))
        axes.margins(x=0.08)
    panels[0, 0].set_ylabel(f"expected accepted length\n(tokens of b = {block_length})")
    legend_below(figure, panels[0, 0], None if len(targets) > 1 else 2)
    return figure


def figure1(bins: pd.DataFrame) -> Figure:
    """Figure 1: accepted length by early determinism, DFlash against DBlast, ±1 SEM; gain and count at every bin.

    Args:
        bins: from :func:`dblast.reproduction.diagnosis.determinism.determinism_bins`.
    """
    panels = list(bins.groupby(["target", "split"], sort=False, observed=True))
    columns = len(set(bins.split))
    rows = -(-len(panels) // columns)
    figure, grid = panel_grid(rows, columns + 1, 2.4 * rows + 0.3)
    for (target, split), axes in zip([key for key, _ in panels], grid[:, :columns].flat, strict=True):
        part = bins[(bins.target == target) & (bins.split == split)]
        middle = (part.bin_low + part.bin_high) / 2
        for offset, name, column in ((-0.02, "DFlash", "dflash"), (0.02, "DBlast", "dblast")):
            axes.errorbar(
                middle + offset,
                part[column],
                part[f"{column}_error"],
                fmt="s" if name == "DFlash" else "o",
                ms=4,
                lw=1.0,
                color=METHOD_COLOURS[name],
                label={"DFlash": "independent (K = 1, NLL)", "DBlast": "dependent (K = 4, AL)"}[name],
            )
        tops = np.fmax(part.dflash + part.dflash_error.fillna(0), part.dblast + part.dblast_error.fillna(0))
        _bin_axis(axes, middle, part.n, part.gain, tops)
        axes.set(title=f"{target}, {split.replace('_', '-')} prompts")
    paper = read_paper("figure1_table5_determinism")
    for axes in grid[1:, columns]:
        axes.axis("off")
    axes = grid[0, columns]
    middle = (paper.bin_low + paper.bin_high) / 2
    axes.plot(middle - 0.02, paper.dflash_read_off, "s", ms=4, color=METHOD_COLOURS["DFlash"])
    axes.plot(middle + 0.02, paper.dblast_read_off, "o", ms=4, color=METHOD_COLOURS["DBlast"])
    _bin_axis(axes, middle, paper.samples, paper.relative_gain_percent, paper.dblast_read_off)
    axes.set(title="paper (read off its figure)")
    for axes in grid[:, 0]:
        axes.set_ylabel("accepted length (tokens)")
    legend_below(figure, grid[0, 0])
    return figure


def _bin_axis(axes, middle: pd.Series, counts: pd.Series, gains: pd.Series, tops: pd.Series) -> None:
    axes.set_xticks(np.linspace(0, 1, 6))
    # A second line of labels under the bins between the ticks.
    axes.set_xticks(middle, [str(n) for n in counts], minor=True)
    axes.tick_params(axis="x", which="minor", length=0, pad=14, labelsize=SMALLEST)
    axes.annotate("n =", (0, 0), (-2, -14), textcoords="offset points", ha="right", va="top", fontsize=SMALLEST)
    for m, count, gain, top in zip(middle, counts, gains, tops, strict=True):
        # A ratio of so few points would draw the eye to nothing.
        text = "" if np.isnan(gain) or count < FEW_POINTS else f"{round(gain):+d}%"
        axes.annotate(text, (m, top), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=SMALLEST)
    axes.set(xlim=(0, 1), ylim=(0, max(tops) * 1.3))
    axes.set_xlabel("early determinism $D_b$", fontsize=MATH_SIZE)


#: Positions that a smaller share of the blocks reaches are not drawn: a ratio over a handful of blocks, errors included, says nothing.
LEAST_REACHED = 0.01


def rejections_figure(summary: pd.DataFrame, target: str) -> Figure:
    """Conditional acceptance by position (top) and what ends a block (bottom), one column a setting.

    Above, only positions that at least :data:`LEAST_REACHED` of the blocks reach.

    Args:
        summary: from :func:`dblast.reproduction.diagnosis.rejections.summarise_rejections` by target, setting and method.
    """
    rows = summary[summary.target == target]
    settings = [s for s in SETTINGS_ORDER if s in set(rows.setting)]
    figure, grid = panel_grid(2, len(settings), 4.8, sharey="row")
    methods = [m for m in METHODS if m in set(rows.method)]
    for column, setting in enumerate(settings):
        top, bottom = grid[:, column]
        for marker, method in zip(_MARKERS, methods, strict=False):
            part = rows[(rows.setting == setting) & (rows.method == method)].sort_values("position")
            part = part[part.reached >= LEAST_REACHED]
            top.errorbar(
                part.position,
                part.conditional_acceptance,
                part.standard_error,
                color=METHOD_COLOURS[method],
                marker=marker,
                ms=3.5,
                lw=1.3,
                elinewidth=0.8,
                label=method,
            )
        floor = np.zeros(len(methods))
        for cause, label, colour, hatch in CAUSES:
            share = np.array(
                [100 * rows[(rows.setting == setting) & (rows.method == m)][cause].sum() for m in methods]
            )
            bottom.bar(
                range(len(methods)), share, 0.7, bottom=floor, color=colour, hatch=hatch, ec="#333333", lw=0.4, label=label
            )  # fmt: skip
            floor += share
        top.set(title=SETTING_LABELS[setting].replace("\n", " "), xlabel="position in the block", ylim=(0, 1.02))
        top.set_xlim(0.7, summary.position.max() + 0.3)
        bottom.set_xticks(range(len(methods)), [method.replace("+", "\n+") for method in methods])
        bottom.set_ylim(0, 100)
    grid[0, 0].set_ylabel("P(accepted | reached)")
    grid[1, 0].set_ylabel("blocks ended by (%)")
    grid[0, -1].legend()
    figure.suptitle(f"{target}, n = {rows.n.max()} prompts")
    legend_below(figure, grid[1, 0], 2)
    return figure
