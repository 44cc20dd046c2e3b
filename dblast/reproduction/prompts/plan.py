"""Which prompts a plan evaluates and trains on: synthetic, bundled, from the hub or from a file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from dblast.errors import DBlastError
from dblast.reproduction.language import synthetic
from dblast.reproduction.profiles import DataConfig, Plan
from dblast.reproduction.prompts.sources import (
    EVALUATION_FILE,
    TASKS,
    Prompt,
    chat_messages,
    load_prompts,
    split_prompts,
    training_prompts,
)
from dblast.targets import Target, sha256_file
from dblast.trajectories import EncodedPrompt

#: Seeds of the synthetic documents whose beginnings are evaluation and training prompts.
_EVALUATION_DOCUMENTS, _TRAINING_DOCUMENTS = 2_000_003, 3_000_017


@cache
def _synthetic_prompts(
    documents_seed: int, per_task: int, kinds: tuple[str, ...], exclude: frozenset = frozenset()
) -> list[EncodedPrompt]:
    """Beginnings of synthetic documents, distinct from ``exclude`` (and, for evaluation, from each other)."""
    found: dict[str, list[EncodedPrompt]] = {kind: [] for kind in kinds}
    taken = set(exclude)
    for attempt in range(200):
        for document in synthetic.documents(1000, documents_seed + attempt, kinds):
            ids = tuple(synthetic.encode(document.tokens[: document.prompt_length]))
            rows = found[document.kind]
            if len(rows) >= per_task or ids in taken:
                continue
            if not exclude:
                taken.add(ids)
            rows.append(EncodedPrompt(f"{document.kind}-{len(rows):04d}", document.kind, ids))
        if all(len(rows) >= per_task for rows in found.values()):
            return [row for rows in zip(*found.values(), strict=True) for row in rows]
    raise DBlastError(f"the synthetic language did not give {per_task} prompts per kind")


def evaluation_prompts(plan: Plan, target: Target) -> list[EncodedPrompt]:
    """Encoded evaluation prompts of the plan, calibration split included."""
    if plan.data.prompts == "synthetic":
        return _synthetic_evaluation(plan.data)
    return _encode(_evaluation_texts(plan), target)


def _synthetic_evaluation(data: DataConfig, all_kinds: bool = False) -> list[EncodedPrompt]:
    """Synthetic evaluation prompts. Those of one kind are the same whichever kinds a plan evaluates."""
    rows = _synthetic_prompts(_EVALUATION_DOCUMENTS, data.evaluation_per_task, synthetic.KINDS)
    return [row for row in rows if all_kinds or row.task in (data.tasks or synthetic.KINDS)]


def _evaluation_texts(plan: Plan) -> list[Prompt]:
    """The first ``evaluation_per_task`` prompts of every task, task by task."""
    prompts, count = load_prompts(plan.data.prompts, plan.data.tasks), plan.data.evaluation_per_task
    by_task = ([prompt for prompt in prompts if prompt.task == task] for task in TASKS)
    return [prompt for rows in by_task for prompt in (rows[:count] if count else rows)]


def _encode(prompts: list[Prompt], target: Target) -> list[EncodedPrompt]:
    return [EncodedPrompt(p.id, p.task, tuple(target.encode_chat(chat_messages(p)))) for p in prompts]


def training_prompt_ids(plan: Plan, target: Target) -> list[EncodedPrompt]:
    """Encoded training prompts; none of them is an evaluation prompt."""
    count = plan.data.training_prompts
    if plan.data.prompts == "synthetic":
        # Of all kinds: drafters of a plan for one kind are also scored on prompts of the whole plan.
        exclude = frozenset(p.ids for p in _synthetic_evaluation(plan.data, all_kinds=True))
        kinds = plan.data.tasks or synthetic.KINDS
        return _synthetic_prompts(_TRAINING_DOCUMENTS, -(-count // len(kinds)), kinds, exclude)[:count]
    source = "hub" if plan.data.prompts == "hub" else "bundled"
    return _encode(training_prompts(count, plan.data.seed, plan.data.tasks or TASKS, source), target)


def calibration_ids(plan: Plan) -> set[str]:
    """Prompt ids that only choose Z_T; all others are held out for reporting."""
    if plan.data.prompts == "synthetic":
        rows = [Prompt(prompt.prompt_id, prompt.task, ()) for prompt in _synthetic_evaluation(plan.data)]
    else:
        rows = _evaluation_texts(plan)

    calibration, _ = split_prompts(rows, plan.data.calibration_fraction)
    return {prompt.id for prompt in calibration}


def prompt_spec(data: DataConfig, training: bool) -> dict:
    """All that determines the prompts of a split and how much is sampled for each; part of its stage's address.

    A prompt file counts by its content, so editing it makes new trajectories.
    """
    spec = {"prompts": data.prompts, "tasks": data.tasks, "seed": data.seed, "batch_size": data.batch_size}
    if data.prompts not in ("synthetic", "hub"):
        path = EVALUATION_FILE if data.prompts == "bundled" else Path(data.prompts)
        spec["file"] = sha256_file(path)
    if training:
        spec |= {"training_prompts": data.training_prompts, "tokens": data.training_tokens}
        # Synthetic training prompts avoid the evaluation prompts.
        return spec | {"avoided": data.evaluation_per_task if data.prompts == "synthetic" else None}
    return spec | {"evaluation_per_task": data.evaluation_per_task, "tokens": data.evaluation_tokens}
