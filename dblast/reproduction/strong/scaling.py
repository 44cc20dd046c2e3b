"""What text and training buy: a row for the shipped drafter and for every sitting that has ended."""

from __future__ import annotations

import json

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from dblast.reproduction.checkpoints import shipped_drafter
from dblast.reproduction.plotting import STYLE, TWO_COLUMNS
from dblast.reproduction.strong.sittings import DRAFTER, SCORES
from dblast.support.files import RECORD, cache_folder

#: How a sitting's rows are told apart beside its name.
COLUMNS = ("tokens", "anchors", "layers", "start")


def history_rows(name: str, sittings: list[dict], tokens: int = 0, anchors: int = 0) -> dict:
    """Tokens of the largest text and anchors of all the sittings that made a drafter, beside what it began with."""
    trained = sum(s["training"]["steps"] * s["training"]["sequences"] * s["training"]["anchors"] for s in sittings)
    first = sittings[0] if sittings else {"start": "target", "layers": 3}
    if first["start"] != "shipped":
        tokens = anchors = 0
    seen = max((sum(s["shards"].values()) for s in sittings), default=0)
    counts = {"tokens": tokens + seen, "anchors": anchors + trained}
    return {"name": name} | counts | {"layers": first["layers"], "start": first["start"]}


def scaling_table(target: str, shipped_scores: pd.DataFrame) -> pd.DataFrame:
    """Scores of the shipped drafter and of every sitting, in the order of tokens and anchors.

    Returns:
        ``name, tokens, anchors, layers, start`` and the columns of :func:`dblast.reproduction.strong.scoring.score_sets`;
        tokens and anchors of a drafter that started from the shipped one include those of that.
    """
    made = json.loads((shipped_drafter(target) / RECORD).read_text(encoding="utf-8"))
    base = {"tokens": made["training_tokens"], "anchors": made["anchors"]}
    shipped = {"name": "shipped", "layers": 3, "start": "target"} | base
    tables = [shipped_scores.assign(**shipped)]
    for folder in sorted((cache_folder() / "sittings").glob("*/" + SCORES)):
        record = json.loads((folder.parent / DRAFTER / RECORD).read_text(encoding="utf-8"))
        row = history_rows(folder.parent.name, record["sittings"], **base)
        tables.append(pd.read_csv(folder).assign(**row))
    table = pd.concat(tables, ignore_index=True)
    names = ["name", *COLUMNS]
    table = table[[*names, *(column for column in table if column not in names)]]
    first = (table.name != "shipped").rename("later")
    return table.assign(later=first).sort_values(["later", "tokens", "anchors"], kind="stable").drop(columns="later")


def scaling_figure(table: pd.DataFrame) -> Figure:
    """Accepted length in the loop on held-out prompts against tokens of text, with 95 % intervals over prompts."""
    held_out = table[table.split == "held out"]
    settings = list(dict.fromkeys(held_out.setting))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(TWO_COLUMNS, 2.4), layout="constrained")
        for panel, setting in zip(figure.subplots(1, len(settings), squeeze=False)[0], settings, strict=True):
            for marker, (name, rows) in zip(
                "osD^", held_out[held_out.setting == setting].groupby("evaluation"), strict=False
            ):
                label = f"{name} (n = {rows.n.iloc[0]})"
                errors = 1.96 * rows.standard_error
                panel.errorbar(rows.tokens / 1e6, rows.accepted_length, yerr=errors, fmt=marker, capsize=2, label=label)
            panel.set_title(setting)
            panel.set_xscale("log")
            panel.set_xlabel("million tokens of text")
            panel.set_ylim(bottom=0)
        figure.axes[0].set_ylabel("accepted length in the loop")
        figure.axes[0].legend()
    return figure
