"""Pre-training as a command: run a plan's recipe, score what it gives, write it as a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import torch
import transformers

from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.replay import score
from dblast.reproduction.estimates import accepted_length
from dblast.reproduction.experiments import (
    check_target,
    on_pretraining_data,
    open_drafter,
    open_target,
    prepare_pretrained,
    prepare_trajectories,
    pretrain_stage,
)
from dblast.reproduction.plans import Plan
from dblast.reproduction.prompts.plan import calibration_ids


def pretraining_plan(plan: Plan) -> Plan:
    """The plan whose drafter is pre-trained rather than taken from ``data/checkpoints``.

    Raises:
        DBlastError: it starts from a finished drafter.
    """
    if plan.drafter.start == "shipped":
        plan = replace(plan, drafter=replace(plan.drafter, start="target"))
    if not plan.drafter.pretrained_here:
        raise DBlastError(f"nothing to pre-train from {plan.drafter.start!r}; start from 'target' or 'random'")
    return on_pretraining_data(plan)


def score_pretrained(plan: Plan, drafter: DBlastDrafter) -> pd.DataFrame:
    """Accepted length of a drafter on the plan's held-out prompts, by setting.

    Returns:
        ``setting, accepted_length, standard_error, per_anchor, n``: by replay of the online loop, and the mean
        over anchors with a full block; n prompts.
    """
    calibration, rows = calibration_ids(plan), []
    for setting in plan.data.settings:
        held_out = [t for t in prepare_trajectories(plan, setting) if t.prompt_id not in calibration]
        table = score(
            drafter, held_out, precision=getattr(torch, plan.pretrain.precision), description=f"scoring {setting}"
        )
        estimate = accepted_length(table)
        rows.append(
            {
                "setting": setting,
                "accepted_length": estimate.value,
                "standard_error": estimate.standard_error,
                "per_anchor": table.anchor_accepted.sum() / max(1, table.anchors.sum()),
                "n": estimate.n,
            }
        )
    return pd.DataFrame(rows)


def pretrain(plan: Plan, output: Path | None = None) -> tuple[Path, pd.DataFrame]:
    """Run the plan's pre-training (it resumes where it was stopped) and score it; write a checkpoint to ``output``.

    Returns:
        The drafter's folder and :func:`score_pretrained`'s table.

    Raises:
        DBlastError: what :func:`~dblast.reproduction.experiments.check_target` refuses; ``output`` exists.
    """
    if output is not None and output.exists():
        raise DBlastError(f"{output} exists already; give --output a new folder")
    plan = pretraining_plan(plan)
    check_target(plan)
    for setting in plan.data.settings:
        prepare_trajectories(plan, setting)
    folder = prepare_pretrained(plan)
    drafter = open_drafter(folder, open_target(plan))
    if output is None:
        return folder, score_pretrained(plan, drafter)
    stored = prepare_trajectories(plan, "training")
    record = {
        "target": plan.target,
        "drafter": asdict(plan.drafter),
        "training": asdict(plan.pretrain),
        "data": asdict(plan.data),
        "training_tokens": sum(stored.response_lengths()),
        "anchors": plan.pretrain.steps * plan.pretrain.blocks_per_step,
        # Of its last run, if it was stopped in between.
        "minutes": round(pretrain_stage(plan).record()["seconds"] / 60, 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "history": json.loads((folder / "history.json").read_text(encoding="utf-8")),
    }
    # Scored as it is shipped: rounded to bfloat16.
    scores = score_pretrained(plan, drafter.to(torch.bfloat16).float())
    record["held_out"] = scores.to_dict("records")
    return drafter.save(output, record, dtype=torch.bfloat16), scores
