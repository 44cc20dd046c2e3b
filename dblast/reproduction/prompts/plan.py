"""Which prompts a plan evaluates and trains on: synthetic, bundled, from the hub or from a file."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from dblast.errors import DBlastError
from dblast.reproduction.language import synthetic
from dblast.reproduction.profiles import DataConfig, Plan
from dblast.reproduction.prompts.own import OWN, open_own, own_file, prompt_ids
from dblast.reproduction.prompts.sources import (
    EVALUATION_FILE,
    TASKS,
    Prompt,
    load_prompts,
    split_prompts,
    training_prompts,
)
from dblast.reproduction.stages import digest
from dblast.support.files import sha256_file
from dblast.targets import Target
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
    if plan.data.prompts.startswith(OWN):
        return _own_evaluation(plan.data)
    return _encode(_evaluation_texts(plan), target)


def check_evaluation_prompts(plan: Plan, target: Target) -> None:
    """Refuse prompts that with their answers pass the target's context limit, before anything is sampled.

    Raises:
        DBlastError: see above; it names the prompt.
    """
    limit, tokens = getattr(target.model.config, "max_position_embeddings", None), plan.data.evaluation_tokens
    for prompt in evaluation_prompts(plan, target):
        if limit and len(prompt.ids) + tokens > limit:
            raise DBlastError(
                f"{plan.data.prompts}: prompt {prompt.prompt_id!r} has {len(prompt.ids)} tokens, which with an answer "
                f"of {tokens} pass the target's context limit of {limit}; shorten it or leave it out"
            )


def _own_evaluation(data: DataConfig) -> list[EncodedPrompt]:
    """Encoded prompts of one's own: the first ``evaluation_per_task`` of every task."""
    rows = open_own(data.prompts, "evaluation")
    return _first_of_every_task(rows, data.evaluation_per_task)


def _first_of_every_task(rows: list, count: int) -> list:
    """The first ``count`` of every task (all, if 0), task by task: the paper's in their order, then the others."""
    tasks = dict.fromkeys((*TASKS, *(row.task for row in rows)))
    groups = ([row for row in rows if row.task == task] for task in tasks)
    return [row for group in groups for row in (group[:count] if count else group)]


def _synthetic_evaluation(data: DataConfig, all_kinds: bool = False) -> list[EncodedPrompt]:
    """Synthetic evaluation prompts. Those of one kind are the same whichever kinds a plan evaluates."""
    rows = _synthetic_prompts(_EVALUATION_DOCUMENTS, data.evaluation_per_task, synthetic.KINDS)
    return [row for row in rows if all_kinds or row.task in (data.tasks or synthetic.KINDS)]


def _evaluation_texts(plan: Plan) -> list[Prompt]:
    """The first ``evaluation_per_task`` prompts of every task, task by task."""
    return _first_of_every_task(load_prompts(plan.data.prompts, plan.data.tasks), plan.data.evaluation_per_task)


def _encode(prompts: list[Prompt], target: Target) -> list[EncodedPrompt]:
    return [EncodedPrompt(p.id, p.task, tuple(prompt_ids(p, target))) for p in prompts]


def training_prompt_ids(plan: Plan, target: Target) -> list[EncodedPrompt]:
    """Encoded training prompts; none of them is an evaluation prompt."""
    count = plan.data.training_prompts
    if plan.data.prompts == "synthetic":
        # Of all kinds: drafters of a plan for one kind are also scored on prompts of the whole plan.
        exclude = frozenset(p.ids for p in _synthetic_evaluation(plan.data, all_kinds=True))
        kinds = plan.data.tasks or synthetic.KINDS
        return _synthetic_prompts(_TRAINING_DOCUMENTS, -(-count // len(kinds)), kinds, exclude)[:count]
    if plan.data.prompts.startswith(OWN):
        # More responses than prompts: every prompt is answered several times.
        rows = open_own(plan.data.prompts, "training")
        again = [(rows[i % len(rows)], i // len(rows)) for i in range(count)]
        return [replace(row, prompt_id=f"{row.prompt_id}-{turn}") for row, turn in again]
    source = "hub" if plan.data.prompts == "hub" else "bundled"
    # Tasks that only one's own evaluation file knows have no training prompts here: those of all tasks serve.
    tasks = tuple(task for task in plan.data.tasks or TASKS if task in TASKS) or TASKS
    return _encode(training_prompts(count, plan.data.seed, tasks, source), target)


def calibration_ids(plan: Plan) -> set[str]:
    """Prompt ids that only choose Z_T; all others are held out for reporting."""
    if plan.data.prompts == "synthetic" or plan.data.prompts.startswith(OWN):
        encoded = _own_evaluation(plan.data) if plan.data.prompts.startswith(OWN) else _synthetic_evaluation(plan.data)
        rows = [Prompt(prompt.prompt_id, prompt.task, ()) for prompt in encoded]
    else:
        rows = _evaluation_texts(plan)

    calibration, _ = split_prompts(rows, plan.data.calibration_fraction)
    return {prompt.id for prompt in calibration}


def prompt_spec(data: DataConfig, training: bool) -> dict:
    """All that determines the prompts of a split and how much is sampled for each; part of its stage's address.

    A prompt file counts by its content, so editing it makes new trajectories.
    """
    spec = {"prompts": data.prompts, "tasks": data.tasks, "seed": data.seed, "batch_size": data.batch_size}
    if data.prompts.startswith(OWN):
        # Evaluation prompts do not determine what is trained on, nor the other way round.
        spec["prompts"] = OWN
        spec["file"] = sha256_file(own_file(data.prompts, "training" if training else "evaluation"))
    elif data.prompts not in ("synthetic", "hub"):
        path = EVALUATION_FILE if data.prompts == "bundled" else Path(data.prompts)
        # A data set's column counts by its texts.
        spec["file"] = sha256_file(path) if path.is_file() else digest([p.turns for p in load_prompts(data.prompts)])
    if training:
        spec |= {"training_prompts": data.training_prompts, "tokens": data.training_tokens}
        # Synthetic training prompts avoid the evaluation prompts.
        return spec | {"avoided": data.evaluation_per_task if data.prompts == "synthetic" else None}
    return spec | {"evaluation_per_task": data.evaluation_per_task, "tokens": data.evaluation_tokens}
