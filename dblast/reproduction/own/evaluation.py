"""Accepted lengths of any drafter on any prompts: every proposal, task and setting, with intervals.

Two averages are shown. *In the loop*: draft tokens accepted per target pass of the online decoding loop, which
stands at a surprising place after every rejection. *Per anchor*: the mean over all places of a text, which is
higher. Neither counts the pass's own token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.replay import score
from dblast.reproduction.estimates import Estimate, ratio_with_influence, standard_error
from dblast.reproduction.plans import CATEGORY_TEMPERATURES
from dblast.trajectories import Trajectory
from dblast.trees import TREE_NODES

#: What is scored unless something else is asked for; the tree has :data:`dblast.trees.TREE_NODES` nodes.
DEFAULT_PROPOSALS = ("greedy_branch", "soft", "tree")
#: How proposals are called where people read them.
PROPOSAL_NAMES = {
    "greedy_branch": "greedy branch",
    "tree": f"tree of {TREE_NODES} nodes",
    "branches": "tree of the greedy branches",
}
#: Columns that name what was scored.
NAMES = ["drafter", "K", "proposal", "setting"]
#: The row over all tasks, weighted by their text.
ALL = "all"
#: How the table's columns are called where people read them.
HEADINGS = {
    "category_temperature": "Z_T",
    "in_loop": "in the loop",
    "per_anchor": "per anchor",
    "n": "prompts",
}


def score_proposals(
    drafter: DBlastDrafter,
    trajectories: Mapping[str, Sequence[Trajectory]],
    name: str,
    calibration: set[str],
    *,
    known: Mapping[str, float] | None = None,
    proposals: Sequence[str] = DEFAULT_PROPOSALS,
    category_temperatures: Sequence[float] = CATEGORY_TEMPERATURES,
    precision: torch.dtype = torch.float32,
) -> pd.DataFrame:
    """Replay scores of one drafter, each proposal at its category temperature, on prompts that did not choose it.

    Args:
        trajectories: by sampling setting.
        name: what the rows call the drafter.
        calibration: prompts that choose Z_T: the one with the largest accepted length in the loop (ties: the smallest).
        known: Z_T by setting that greedy branches were calibrated with elsewhere; they then count on all prompts.

    Returns:
        :func:`dblast.replay.score`'s rows with :data:`NAMES` before them.

    Raises:
        DBlastError: no prompt is left to choose with, or to count.
    """
    tables = []
    for setting, rows in trajectories.items():
        for proposal in proposals:
            options = {"proposal": proposal, "precision": precision}
            title = f"{name}: {PROPOSAL_NAMES.get(proposal, proposal)}, {setting}"
            counted = [row for row in rows if row.prompt_id not in calibration]
            temperature = 1.0  # without effect on a single block
            if drafter.config.num_categories > 1:
                temperature = (known or {}).get(setting) if proposal == "greedy_branch" else None
                if temperature is not None:
                    counted = list(rows)
                else:
                    # Trees cost much at every temperature, so that only these prompts see all of them.
                    choosing = [row for row in rows if row.prompt_id in calibration]
                    temperature = _best_temperature(drafter, choosing, category_temperatures, options)
            if not counted:
                raise DBlastError(f"no prompts are left to evaluate {proposal} at setting {setting}; give more of them")
            table = score(drafter, counted, [temperature], description=title, **options)
            values = (name, drafter.config.num_categories, proposal, setting)
            for place, (column, value) in enumerate(zip(NAMES, values, strict=True)):
                table.insert(place, column, value)
            tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _best_temperature(
    drafter: DBlastDrafter, rows: Sequence[Trajectory], temperatures: Sequence[float], options: dict
) -> float:
    if not rows:
        raise DBlastError("no prompts are left to choose the category temperature with; give more of them")
    sums = score(drafter, rows, temperatures, **options).groupby("category_temperature")[["emitted", "passes"]].sum()
    # idxmax takes the first of equals, and the index is sorted.
    return float((sums.emitted / sums.passes).idxmax())


def _ratio(rows: pd.DataFrame, top: str, bottom: str) -> Estimate:
    """Ratio of sums over prompts with its standard error; NaN where nothing is counted."""
    sums = rows.groupby("prompt_id")[[top, bottom]].sum()
    if not sums[bottom].sum() > 0:
        return Estimate(float("nan"), float("nan"), 0, freedom=float("nan"))
    value, influence = ratio_with_influence(sums[top].to_numpy(float), sums[bottom].to_numpy(float))
    return Estimate(value, standard_error(influence), len(sums), freedom=len(sums) - 1)


def _columns(estimate: Estimate, name: str) -> dict[str, float]:
    # An interval from few prompts reaches below zero; no length does.
    columns = estimate.columns(name)
    return columns | {f"{name}_low": float(np.maximum(columns[f"{name}_low"], 0.0))}


def accepted_lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """The table: one row per drafter, proposal, setting and task, and :data:`ALL` tasks together.

    Args:
        rows: from :func:`score_proposals`.

    Returns:
        :data:`NAMES`, ``task, category_temperature, n``, then ``in_loop`` and ``per_anchor``, each with ``_error``
        (standard error over prompts), ``_low`` and ``_high`` (95 % interval).
    """
    rows = rows.assign(accepted=rows.emitted - rows.passes)
    table = []
    for names, group in rows.groupby(NAMES, sort=False):
        tasks = [(task, part) for task, part in group.groupby("task", sort=False)]
        for task, part in [*tasks, (ALL, group)] if len(tasks) > 1 else tasks:
            head = dict(zip(NAMES, names, strict=True)) | {"task": task}
            loop, anchor = _ratio(part, "accepted", "passes"), _ratio(part, "anchor_accepted", "anchors")
            table.append(
                head
                | {"category_temperature": part.category_temperature.iloc[0], "n": loop.n}
                | _columns(loop, "in_loop")
                | _columns(anchor, "per_anchor")
            )
    return pd.DataFrame(table)


def _with_interval(row: pd.Series, name: str) -> str:
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if not np.isfinite(value):
        return "–"
    interval = f" [{low:.2f}, {high:.2f}]" if np.isfinite(low) and np.isfinite(high) else ""
    return f"{value:.2f} ± {row[f'{name}_error']:.2f}{interval}" if interval else f"{value:.2f}"


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table as text: value ± standard error [95 % interval]."""
    shown = table[["setting", "task", "drafter", "K", "proposal"]].copy()
    # Without category heads there is one block, as with one category.
    shown["K"] = table.K.clip(lower=1)
    shown["proposal"] = table.proposal.map(lambda name: PROPOSAL_NAMES.get(name, name))
    shown["Z_T"] = [f"{value:g}" if np.isfinite(value) else "" for value in table.category_temperature]
    for name in ("in_loop", "per_anchor"):
        shown[HEADINGS[name]] = [_with_interval(row, name) for _, row in table.iterrows()]
    shown["prompts"] = table.n
    return shown.sort_values(["setting", "task"], key=_in_order, kind="stable").reset_index(drop=True)


def _in_order(column: pd.Series) -> pd.Series:
    """Settings from high to low, tasks as they come with all of them last."""
    known = [name for name in ("high", "medium", "low") if name in set(column)]
    order = [*known, *(name for name in dict.fromkeys(column) if name not in (*known, ALL)), ALL]
    return column.map({name: place for place, name in enumerate(order)})
