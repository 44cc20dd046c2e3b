"""Table 8: the configuration of every stage of a plan in words, beside the paper's."""

from __future__ import annotations

import pandas as pd

from dblast.reproduction.plans import DataConfig, Plan, Profile, Variant
from dblast.reproduction.tables import OBJECTIVE_NAMES, Table, read_paper
from dblast.training import TrainingConfig

#: Where prompts come from; anything else is a file.
_PROMPTS = {"synthetic": "beginnings of synthetic texts", "bundled": "seeded generator", "hub": "Tulu 3 SFT mixture"}


def _words(values) -> str:
    return ", ".join(map(str, values))


def _optimizer(config: TrainingConfig) -> str:
    """Optimiser, peak rates and schedule; the schedule's form is :func:`dblast.training.learning_rate_factor`'s."""
    rate = f"AdamW, learning rate {config.learning_rate:g}"
    if config.optimizer == "muon":
        rate = f"Muon for matrices, learning rate {config.matrix_learning_rate:g}; {rate}, for the rest"
    return (
        f"{rate}; no weight decay, linear warm-up, warmup ratio {config.warmup_ratio:g}, cosine decay to zero, "
        f"gradient max-norm {config.max_norm:g}"
    )


def _batch(config: TrainingConfig) -> str:
    return f"{config.sequences} sequences x {config.anchors} anchors"


def _precision(config: TrainingConfig) -> str:
    return "float32" if config.precision == "float32" else f"{config.precision} autocast of float32 weights"


def _responses(data: DataConfig) -> str:
    return (
        f"{data.training_prompts:,} target-sampled responses of up to {data.training_tokens} tokens, "
        f"setting {data.training_setting}; {data.batch_size} at a time, seed {data.seed}"
    )


def _prompts(data: DataConfig) -> str:
    return f"{_PROMPTS.get(data.prompts, data.prompts)}; tasks: {_words(data.tasks) if data.tasks else 'all'}"


def _variant(variant: Variant) -> str:
    # The construction means nothing for other losses.
    construction = f", {variant.construction.replace('_', ' ')}" if variant.loss == "AL" else ""
    return f"K = {variant.K} {variant.loss}{construction}"


def _start(plan: Plan) -> str:
    """Shape of the drafter and what its weights were before any training."""
    shape = plan.drafter
    layers = f"layers {_words(shape.start_layers)}" if shape.start_layers else "last layers"
    start = {"random": "random weights", "target": f"the target's {layers}", "shipped": f"the target's {layers}, then pre-trained"}
    taps = _words(shape.taps) if shape.taps else "the default ones"
    return (
        f"{shape.layers} layers from {start.get(shape.start, shape.start)}; taps after target layers: {taps}; "
        f"mask token {'of the target' if shape.mask_token_id is None else shape.mask_token_id}; seed {shape.seed}"
    )


def _pretraining(plan: Plan) -> dict[str, str]:
    """How the drafter that all variants start from was trained, here or before it was shipped."""
    config, data = plan.pretrain, plan.pretrain_data or plan.data
    if not (plan.drafter.pretrained_here or plan.drafter.start == "shipped"):
        return {"pre-training": f"none here: the published weights of {plan.drafter.start}"}
    blocks = config.steps * config.blocks_per_step
    if config.loss in ("AL", "TRUNC"):
        settings = f" (tau {config.tau:g}, {config.construction.replace('_', ' ')})"
    else:
        settings = ""
    return {
        "pre-training": f"{OBJECTIVE_NAMES.get(config.loss, config.loss)}{settings}; "
        + ("its result is the shipped checkpoint" if plan.drafter.start == "shipped" else "in this run"),
        "pre-training responses": f"{_responses(data)}; prompts: {_prompts(data)}",
        "pre-training optimizer": _optimizer(config),
        "pre-training batch size": _batch(config),
        "pre-training duration": f"{config.steps:,} steps ({blocks:,} blocks), seed {config.seed}",
        "pre-training precision": _precision(config),
    }


def configuration_rows(plan: Plan) -> dict[str, str]:
    """One plan in the words of the paper's Table 8, every stage of it: item to text."""
    data, fine, shape, points = plan.data, plan.finetune, plan.drafter, plan.diagnosis
    rows = {"targets": f"{plan.target}, {plan.precision}"}
    if tiny := plan.tiny:
        rows["target training"] = (
            f"{tiny.steps} steps of {tiny.batch_size} synthetic texts, AdamW, learning rate {tiny.learning_rate:g}, seed {tiny.seed}"
        )
    rows |= {
        "drafter initialisation": _start(plan),
        "draft block length b": str(shape.block_length),
        "draft vocabulary": f"{shape.draft_vocabulary:,} tokens" if shape.draft_vocabulary else "all tokens of the target",
        **_pretraining(plan),
        "training prompts": _prompts(data),
        "training responses": _responses(data),
        "categories K": _words(sorted({variant.K for variant in plan.variants})),
        "variants": "; ".join(map(_variant, plan.variants)),
        "AL threshold tau": f"{fine.tau:g}",
        "optimizer": _optimizer(fine),
        "global batch size": _batch(fine),
        "duration": f"{fine.steps:,} steps ({fine.steps * fine.blocks_per_step:,} blocks), seeds {_words(plan.seeds)}",
        "training precision": _precision(fine),
        "evaluation": f"settings {_words(data.settings)}; up to {data.evaluation_tokens} new tokens, accepted length excludes the "
        "bonus token, by replay",
        "evaluation prompts": f"{data.evaluation_per_task or 'all'} per task ({data.prompts})",
        "category temperature": f"{_words(plan.category_temperatures)}; chosen on {100 * data.calibration_fraction:g} % of the prompts",
        "Figure 1 training data": f"{points.training_prompts:,} responses to {_words(points.training_tasks or (points.task,))} prompts, "
        f"setting {points.setting}, {fine.steps:,} steps; {points.points:,} truncations of these and as many of held-out {points.task} "
        f"prompts; M = {points.continuations}, Z_T = {points.category_temperature:g}, seed {points.seed}",
        "best single block": f"{points.oracle_prefixes} truncations a setting, {points.oracle_continuations} continuations of each",
        "rejections": "every anchor" if points.rejection_anchors == 1 else f"one anchor in {points.rejection_anchors}",
    }
    return rows


def table8(profile: Profile) -> Table:
    """Table 8: the training configuration that ran, beside the paper's."""
    paper = read_paper("table8_training").set_index("item")["value"].rename("paper")
    columns = [pd.Series(configuration_rows(plan), name=plan.label) for plan in profile.plans]
    # In the order of the first plan that has an item, what only the paper has at the end.
    items = list(dict.fromkeys(item for column in (*columns, paper) for item in column.index))
    both = pd.concat([*columns, paper], axis=1).reindex(items).fillna("")
    both.index.name = "item"
    return Table(
        "table8",
        "Table 8",
        f"Training configuration of profile {profile.name} beside the paper's.",
        both.reset_index(),
        both,
    )
