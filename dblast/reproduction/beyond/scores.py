"""Replay scores of every proposal for every trained variant.

Calibration prompts are scored at every pair of category and draft temperature. The pair with the largest accepted
length in the loop, fine-tuning seeds pooled, is chosen for every variant, setting, proposal and size; held-out prompts
are scored at that pair alone, as trees are dear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch

from dblast.replay import score
from dblast.reproduction.estimates import VARIANT_COLUMNS
from dblast.reproduction.experiments import (
    open_drafter,
    open_target,
    prepare_trajectories,
    prepare_variant,
    prepare_variants,
    side_by_side,
    trajectory_stage,
    variant_stage,
)
from dblast.reproduction.plans import Plan, Variant
from dblast.reproduction.prompts.plan import calibration_ids
from dblast.reproduction.stages import Stage

#: T_d of sampled drafts (0 is the greedy branch), and their top-k.
DRAFT_TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0, 1.3, 1.6, 2.0)
DRAFT_TOP_K = 20
#: Sizes of the trees, in blocks of b tokens.
TREE_BLOCKS = (1, 2, 4, 8)
#: What the plan does not say and the kept table depends on.
GRID = {"draft_temperatures": DRAFT_TEMPERATURES, "draft_top_k": DRAFT_TOP_K, "tree_blocks": TREE_BLOCKS}

TEMPERATURES = ["category_temperature", "draft_temperature"]
#: What a pair of temperatures is chosen for; ``nodes`` are the tokens that a pass may verify.
CELL = [*VARIANT_COLUMNS, "proposal", "nodes"]
#: Prompt of the rows that sum a calibration split.
ALL_PROMPTS = "all"

#: One call of :func:`dblast.replay.score`: its options.
Call = dict[str, object]


def variant_names(plan: Plan, variant: Variant) -> dict[str, object]:
    """The columns that name a variant in result tables."""
    names = {"target": plan.label, "method": variant.method, "K": variant.K, "loss": variant.loss}
    return names | {"construction": variant.construction}


def every_call(plan: Plan, variant: Variant) -> list[Call]:
    """All proposals at all temperatures."""
    temperatures = list(plan.category_temperatures)
    nodes = [blocks * plan.drafter.block_length for blocks in TREE_BLOCKS]
    calls: list[Call] = [
        {"proposal": "greedy_branch", "category_temperatures": temperatures},
        {
            "proposal": "soft",
            "category_temperatures": temperatures,
            "draft_temperatures": list(DRAFT_TEMPERATURES),
            "draft_top_k": DRAFT_TOP_K,
        },
        {"proposal": "tree", "category_temperatures": temperatures, "nodes": nodes},
    ]
    if variant.K > 1:
        calls.append({"proposal": "branches", "category_temperatures": temperatures})
    return calls


def chosen_calls(chosen: pd.DataFrame) -> list[Call]:
    """The proposals of one variant and setting at their chosen temperatures; trees of one Z_T are scored together."""
    calls: list[Call] = []
    # K = 1 has no Z_T; any number stands for it.
    rows = chosen.assign(category_temperature=chosen.category_temperature.fillna(1.0))
    for (proposal, z), part in rows.groupby(["proposal", "category_temperature"]):
        call: Call = {"proposal": proposal, "category_temperatures": [float(z)]}
        if proposal == "tree":
            call["nodes"] = sorted(int(n) for n in part.nodes)
        if proposal == "soft":
            call |= {"draft_temperatures": [float(part.draft_temperature.iloc[0])], "draft_top_k": DRAFT_TOP_K}
        calls.append(call)
    return calls


def proposal_scores(drafter, rows: Sequence, calls: Sequence[Call], precision: torch.dtype) -> pd.DataFrame:
    """:func:`dblast.replay.score` for several proposals as one table.

    Returns:
        Its rows with ``proposal`` before them; ``nodes`` and ``drafted`` are b for blocks, ``draft_temperature`` is NaN
        where no token is drawn.
    """
    b, tables = drafter.config.block_length, []
    for call in calls:
        table = score(drafter, rows, precision=precision, **call)
        table.insert(0, "proposal", call["proposal"])
        blank = {"nodes": b, "drafted": float(b), "draft_temperature": float("nan")}
        tables.append(table.assign(**{name: value for name, value in blank.items() if name not in table}))
    return pd.concat(tables, ignore_index=True)


def _stage(plan: Plan, variant: Variant, seed: int, split: str, calls: dict[str, list[Call]]) -> Stage:
    spec = {
        "variant": variant_stage(plan, variant, seed).key,
        "evaluation": {setting: trajectory_stage(plan, setting).key for setting in calls},
        "split": split,
        "calls": calls,
    }
    return Stage("proposals", spec, prepare_proposals)


def prepare_proposals(
    plan: Plan, variant: Variant, seed: int, split: str, calls: dict[str, list[Call]], threads: int | None = None
) -> Path:
    """Score one trained variant on a split's stored texts.

    Args:
        split: "calibration" or "held_out".
        calls: what to score, by setting.
        threads: torch threads for this process (worker processes use one each).
    """
    if threads:
        torch.set_num_threads(threads)

    def compute(folder: Path) -> None:
        drafter = open_drafter(prepare_variant(plan, variant, seed, threads), open_target(plan))
        calibration, tables = calibration_ids(plan), []
        for setting, wanted in calls.items():
            rows = [
                row
                for row in prepare_trajectories(plan, setting)
                if (row.prompt_id in calibration) == (split == "calibration")
            ]
            table = proposal_scores(drafter, rows, wanted, getattr(torch, plan.finetune.precision))
            table.insert(0, "setting", setting)
            tables.append(table)
        pd.concat(tables, ignore_index=True).to_parquet(folder / "scores.parquet")

    return _stage(plan, variant, seed, split, calls).run(compute)


def _gather(plan: Plan, split: str, calls: Callable[[Variant], dict[str, list[Call]]]) -> pd.DataFrame:
    """A split's scores of all variants and seeds, computed side by side where the plan says so."""
    jobs = [(plan, variant, seed, split, calls(variant)) for seed in plan.seeds for variant in plan.variants]
    missing = sorted((job for job in jobs if not _stage(*job).done), key=lambda job: -job[1].K)
    side_by_side(prepare_proposals, missing, plan.parallel, f"{plan.label} proposals, {split.replace('_', ' ')}")
    tables = []
    for job in jobs:
        table = pd.read_parquet(prepare_proposals(*job) / "scores.parquet")
        names = variant_names(plan, job[1]) | {"seed": job[2], "split": split}
        for place, (column, value) in enumerate(names.items()):
            table.insert(place, column, value)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def choose_temperatures(scores: pd.DataFrame) -> pd.DataFrame:
    """(Z_T, T_d) of every :data:`CELL`: the pair with the largest accepted length on the calibration split.

    Seeds are pooled, ties go to the smaller Z_T, then the smaller T_d; what has no such temperature keeps NaN.
    """
    rows = scores[scores.split == "calibration"]
    sums = rows.groupby([*CELL, *TEMPERATURES], dropna=False, observed=True)[["emitted", "passes"]].sum().reset_index()
    sums["value"] = (sums.emitted - sums.passes) / sums.passes
    best = sums.sort_values(["value", *TEMPERATURES], ascending=[False, True, True], kind="stable")
    return best.drop_duplicates(CELL)[[*CELL, *TEMPERATURES]].sort_values(CELL).reset_index(drop=True)


def collect_proposals(plan: Plan) -> pd.DataFrame:
    """Scores of every proposal: calibration prompts summed at every temperature, held-out ones at the chosen.

    Returns:
        ``target, method, K, loss, construction, seed, split, setting, proposal``, what :func:`dblast.replay.score`
        says, ``nodes, drafted, draft_temperature``; rows of the calibration split are sums over its prompts of a
        task, with ``prompt_id`` :data:`ALL_PROMPTS`.
    """
    prepare_variants(plan)
    calibration = _gather(
        plan, "calibration", lambda variant: dict.fromkeys(plan.data.settings, every_call(plan, variant))
    )
    chosen = choose_temperatures(calibration)

    def calls(variant: Variant) -> dict[str, list[Call]]:
        mine = chosen[(chosen[["method", "construction"]] == [variant.method, variant.construction]).all(axis=1)]
        return {setting: chosen_calls(mine[mine.setting == setting]) for setting in plan.data.settings}

    held_out = _gather(plan, "held_out", calls)
    keys = [
        name
        for name in calibration
        if name not in ("prompt_id", "emitted", "passes", "anchor_accepted", "anchors", "drafted")
    ]
    totals = {"emitted": "sum", "passes": "sum", "anchor_accepted": "sum", "anchors": "sum", "drafted": "mean"}
    sums = calibration.groupby(keys, dropna=False, sort=False).agg(totals).reset_index().assign(prompt_id=ALL_PROMPTS)
    return pd.concat([sums[list(held_out)], held_out], ignore_index=True)
