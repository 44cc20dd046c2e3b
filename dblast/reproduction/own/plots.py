"""Figures of an evaluation and of a training run."""

from __future__ import annotations

from io import BytesIO

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from dblast.reproduction.own.evaluation import ALL, PROPOSAL_NAMES
from dblast.reproduction.plotting import STYLE, TWO_COLUMNS, interval_bars

#: Okabe and Ito's palette without black.
_COLOURS = ("#555555", "#D55E00", "#0072B2", "#E69F00", "#009E73", "#CC79A7")


def evaluation_figure(table: pd.DataFrame) -> Figure:
    """Accepted length in the loop by task, a panel for every setting, with 95 % intervals.

    Args:
        table: from :func:`dblast.reproduction.own.evaluation.accepted_lengths`.
    """
    settings, tasks = list(dict.fromkeys(table.setting)), list(dict.fromkeys(table.task))
    tasks = [task for task in tasks if task != ALL] + [ALL] * (ALL in tasks)
    series = list(dict.fromkeys(zip(table.drafter, table.proposal, strict=True)))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(TWO_COLUMNS, 2.6), layout="constrained")
        panels = figure.subplots(1, len(settings), squeeze=False, sharey=True)[0]
        width = 0.8 / len(series)
        for panel, setting in zip(panels, settings, strict=True):
            for i, (drafter, proposal) in enumerate(series):
                chosen = (table.setting == setting) & (table.drafter == drafter) & (table.proposal == proposal)
                rows = table[chosen].set_index("task").reindex(tasks).reset_index()
                places = [x + width * (i - (len(series) - 1) / 2) for x in range(len(tasks))]
                bars = [side.fillna(0) for side in interval_bars(rows, "in_loop")]
                panel.bar(
                    places,
                    rows.in_loop,
                    width,
                    color=_COLOURS[i % len(_COLOURS)],
                    label=f"{drafter}, {PROPOSAL_NAMES.get(proposal, proposal)}",
                )
                panel.errorbar(places, rows.in_loop, yerr=bars, fmt="none", ecolor="black", elinewidth=0.8)
            panel.set_xticks(range(len(tasks)), tasks, rotation=20 if len(tasks) > 3 else 0)
            panel.set_title(setting)
        panels[0].set_ylim(bottom=0)
        panels[0].set_ylabel("accepted length in the loop\n(tokens per target pass)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)))
    return figure


def curves_figure(histories: dict[str, list[dict]]) -> Figure:
    """Loss and accepted length per anchor against steps, a column for every stage of training."""
    histories = {name: history for name, history in histories.items() if len(history) > 1}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(TWO_COLUMNS, 3.2), layout="constrained")
        if not histories:
            return figure
        panels = figure.subplots(2, len(histories), squeeze=False, sharex="col")
        for column, (name, history) in enumerate(histories.items()):
            rows = pd.DataFrame(history)
            panels[0, column].plot(rows.step, rows.loss, color=_COLOURS[0], marker=".")
            panels[1, column].plot(rows.step, rows.accepted_per_anchor, color=_COLOURS[1], marker=".")
            panels[0, column].set_title(name)
            panels[1, column].set_xlabel("steps")
        panels[0, 0].set_ylabel("training loss")
        panels[1, 0].set_ylabel("accepted per anchor\n(calibration prompts)")
    return figure


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure as PNG, the same bytes for the same figure."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()
