"""A plan with the changes that a command line asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dblast.backbone import DBlastConfig
from dblast.errors import DBlastError
from dblast.reproduction.plans import Plan

#: What ``--start`` means as a word; a folder of such a name is given as ``./target``.
STARTS = ("shipped", "target", "random")


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _shape_of(folder: Path) -> dict[str, Any]:
    """What a saved drafter fixes of a plan's drafter."""
    try:
        config = DBlastConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise DBlastError(f"{folder} holds no drafter ({reason}); give a saved one") from None
    return {
        "layers": config.num_hidden_layers,
        "taps": tuple(config.target_layer_ids),
        "block_length": config.block_length,
        "draft_vocabulary": config.draft_vocab_size,
    }


def customise(
    plan: Plan,
    *,
    model: str | None = None,
    mask_token_id: int | None = None,
    start: str | None = None,
    layers: int | None = None,
    block_length: int | None = None,
    prompts: str | None = None,
    tasks: str | None = None,
    training_prompts: int | None = None,
    pretraining_prompts: int | None = None,
    pretrain_steps: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
) -> Plan:
    """Change what is not None; the meaning of every option is that of the command line.

    Another ``model`` gets the default taps of its own depth and is pre-trained, as
    nothing is shipped for it; so is any drafter with other ``layers``. A folder as
    ``start`` brings its taps, layers, block length and draft vocabulary. Words come
    before folders of their name, for ``start`` as for ``model``.

    Raises:
        DBlastError: a model or mask token of one's own on a plan for a target that is trained here, or a start without
            a drafter.
    """
    if model is not None:
        if plan.tiny is not None:
            raise DBlastError("--model needs a plan for loaded targets; add --target smollm2")
        if model == "tiny":
            raise DBlastError("'tiny' is the target that profiles train: give --target tiny, or ./tiny for a folder")
        plan = replace(plan, target=model, label=Path(model).resolve().name or "model")
    if mask_token_id is not None and plan.tiny is not None:
        raise DBlastError("--mask-token-id is for loaded targets, the tiny one has its own; add --target smollm2")
    if (model is not None or layers is not None) and plan.drafter.start == "shipped":
        start = start or "target"
    # What comes later counts.
    changes: dict[str, Any] = {"taps": None} if model is not None or layers is not None else {}
    if start and start not in STARTS and Path(start).is_dir():
        changes |= _shape_of(Path(start))
    changes |= _given(start=start, layers=layers, block_length=block_length, mask_token_id=mask_token_id)
    common = _given(prompts=prompts, tasks=tasks and tuple(name.strip() for name in tasks.split(",")))
    data = replace(plan.data, **common, **_given(training_prompts=training_prompts))
    pretrain_data = plan.pretrain_data and replace(
        plan.pretrain_data, **common, **_given(training_prompts=pretraining_prompts)
    )
    return replace(
        plan,
        data=data,
        pretrain_data=pretrain_data,
        drafter=replace(plan.drafter, **changes),
        finetune=replace(plan.finetune, **_given(steps=steps, learning_rate=learning_rate)),
        pretrain=replace(plan.pretrain, **_given(steps=pretrain_steps)),
    )
