"""What a run for one's own target takes: forecast from measured speeds, and counted afterwards."""

from __future__ import annotations

import pandas as pd

from dblast.reproduction.experiments import on_pretraining_data
from dblast.reproduction.own.budget import Speeds
from dblast.reproduction.own.requirements import check_memory, free_memory, size, token_bytes
from dblast.reproduction.plans import Plan
from dblast.reproduction.prompts.own import open_own
from dblast.reproduction.prompts.plan import evaluation_prompts
from dblast.reproduction.stages import Stage
from dblast.targets import Target


def sample_sets(plan: Plan, target: Target) -> list[dict]:
    """Every set of answers of a plan: what it is for, how many, and its expected size."""
    count = len(evaluation_prompts(plan, target))
    wide = token_bytes(target.model.config.hidden_size, len(plan.drafter.taps))
    width = {split: _mean_length(open_own(plan.data.prompts, split)) for split in ("evaluation", "training")}
    rows = [
        {
            "what": f"answers, evaluation, {setting}",
            "plan": plan,
            "split": setting,
            "answers": count,
            "width": width["evaluation"],
        }
        for setting in plan.data.settings
    ]
    sets = [("fine-tuning", plan)]
    if plan.drafter.pretrained_here:
        sets.insert(0, ("pre-training", on_pretraining_data(plan)))
    for name, one in sets:
        answers = one.data.training_prompts
        rows.append(
            {
                "what": f"answers, {name}",
                "plan": one,
                "split": "training",
                "answers": answers,
                "width": width["training"],
            }
        )
    for row in rows:
        row["tokens"] = row["answers"] * plan.data.training_tokens
        row["bytes"] = wide * (row["tokens"] + row["answers"] * row["width"])
    return rows


def _mean_length(prompts: list) -> float:
    return sum(len(prompt.ids) for prompt in prompts) / max(1, len(prompts))


def forecast(plan: Plan, target: Target, speeds: Speeds, timed_tokens: int) -> tuple[pd.DataFrame, float]:
    """What every stage will take: tokens at most, anchors, disk, memory and time; and the minutes of all."""
    config = target.model.config
    memory = check_memory(plan, config, plan.data.training_tokens)
    sampling, training = memory.target + memory.sampling, memory.target + memory.drafter + memory.training
    rows = []
    samples = sample_sets(plan, target)
    for row in samples:
        line = {"stage": row["what"], "tokens": f"{row['tokens']:,}", "anchors": "", "disk": size(row["bytes"])}
        rows.append(line | {"memory": size(sampling), "minutes": row["tokens"] * speeds.token / 60})
    trainings = [("fine-tuning", plan.finetune, speeds.finetuning)]
    if plan.drafter.pretrained_here:
        trainings.insert(0, ("pre-training", plan.pretrain, speeds.pretraining))
    for name, one, step in trainings:
        anchors = one.steps * one.blocks_per_step
        line = {"stage": f"{name}, {one.steps} steps", "tokens": "", "anchors": f"{anchors:,}", "disk": ""}
        rows.append(line | {"memory": size(training), "minutes": one.steps * step / 60})
    scored = sum(row["tokens"] for row in samples if row["split"] != "training")
    line = {"stage": "evaluation", "tokens": "", "anchors": "", "disk": "", "memory": size(training)}
    rows.append(line | {"minutes": 3 * scored * speeds.scoring / 60})
    empty = {"tokens": "", "anchors": "", "disk": "", "memory": ""}
    for name, seconds in (("timing", timed_tokens * speeds.timing), ("measuring", speeds.start)):
        rows.append({"stage": name} | empty | {"minutes": seconds / 60})
    minutes = sum(row["minutes"] for row in rows)
    total = {"stage": f"all ({size(free_memory())} of memory free)"} | empty
    total |= {"disk": size(sum(row["bytes"] for row in samples)), "minutes": minutes}
    table = pd.DataFrame([*rows, total])
    table["minutes"] = table.minutes.map("{:.1f}".format)
    return table, minutes


def with_total(table: pd.DataFrame, seconds: float) -> pd.DataFrame:
    """Costs of stages with what all starts took beside them, and the sum."""
    minutes = max(0.0, seconds / 60 - table.minutes.sum())
    rest = {"what": "loading, measuring, evaluation, timing", "tokens": 0, "anchors": 0, "disk": 0, "minutes": minutes}
    sums = {"what": "all", "minutes": seconds / 60} | {
        name: table[name].sum() for name in ("tokens", "anchors", "disk")
    }
    return pd.concat([table, pd.DataFrame([rest, sums])], ignore_index=True)


def stage_cost(what: str, stage: Stage, tokens: int = 0, anchors: int = 0) -> dict:
    """Costs of one finished stage; its minutes are those of its last start."""
    disk = sum(path.stat().st_size for path in stage.folder.rglob("*") if path.is_file())
    return {"what": what, "tokens": tokens, "anchors": anchors, "disk": disk, "minutes": stage.record()["seconds"] / 60}
