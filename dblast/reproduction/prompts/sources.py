"""Prompts: the bundled evaluation set, the paper's sets on the hub, JSONL files, columns of data sets.

Training prompts are made by a seeded generator with the same four tasks and
styles (``dblast.reproduction.prompts.templates``), or read from the Tulu 3 SFT mixture.
"""

from __future__ import annotations

import hashlib
import json
import random
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dblast.errors import DBlastError
from dblast.reproduction.paths import DATA
from dblast.reproduction.prompts.templates import SHAPES, fill
from dblast.support.checks import is_whole

TASKS = ("maths", "chat", "code", "creative")

EVALUATION_FILE = DATA / "prompts" / "evaluation.jsonl"
#: Of its lines, whatever ends them in this checkout.
EVALUATION_SHA256 = "cd7134b491525e067d2babd5f3c8d5591142365038e695f0ba71554d6fcb3f6a"

# Most training prompts that the templates promise for one task.
TRAINING_LIMIT_PER_TASK = 10_000
# Fresh draws in a row that may repeat earlier prompts before a task counts as used up.
_MAX_REPEATS = 1_000

GSM8K_REVISION = "e53f048856ff4f594e959d75785d2c2d37b678ee"
HUMANEVAL_REVISION = "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544"
TULU3_REVISION = "b14afda60f1bbebe55d5d2fa1e4df5042f97f8be"
# No public source names a full commit of this one, so it follows the hub.
MT_BENCH_REVISION = "main"
# The benchmark's authors publish their prompts in a git repository, not on the hub.
CREATIVE_WRITING_URL = (
    "https://raw.githubusercontent.com/EQ-bench/creative-writing-bench/"
    "c7c3ceef54c40a8ae02dc1c2e1a5e40970fe5c0b/data/creative_writing_prompts_v3.json"
)


class PromptError(DBlastError):
    """Prompts that cannot be read, made or split; the message says what to do."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: a unique id, its task and its user turns, first one first.

    ``raw``: the one turn is text to be continued as it stands, without a chat template.
    ``where``: file and line it was read from, for messages.
    """

    id: str
    task: str
    turns: tuple[str, ...]
    raw: bool = False
    where: str = field(default="", compare=False, repr=False)


def normalised(text: str) -> str:
    """Return the text casefolded with every run of white space as one space; for comparing prompts."""
    return " ".join(text.casefold().split())


def chat_messages(prompt: Prompt) -> list[dict[str, str]]:
    """Return the messages for a chat template: one user message, the prompt's first turn.

    Later turns are left out: they would need the model's answer to the first,
    which differs between runs, and every trajectory here is a single response.
    """
    return [{"role": "user", "content": prompt.turns[0]}]


def load_prompts(source: str | Path = "bundled", tasks: Iterable[str] | None = None) -> list[Prompt]:
    """Return the evaluation prompts of ``tasks`` (all four by default) in the source's order.

    Args:
        source: ``"bundled"``, the project's own set; ``"hub"``, the paper's sets
            (GSM8K test, MT-Bench, HumanEval, EQ-Bench creative writing v3); or prompts
            of one's own: a JSONL file (:func:`read_prompts`) or a column of a data set
            (:func:`dblast.reproduction.prompts.own.read_column`).
        tasks: names out of ``TASKS``; for prompts of one's own, those that they carry.

    Raises:
        PromptError: an unknown task, no tasks or no prompts; a missing or empty file; an
            unreadable line (named as ``file:line number``); two prompts with one
            id; the hub cannot be reached.
    """
    if source in ("bundled", "hub"):
        wanted = _checked_tasks(tasks)
        if source == "hub":
            return [prompt for task in wanted for prompt in _HUB_LOADERS[task]()]
        prompts = _bundled()
    else:
        from dblast.reproduction.prompts.own import read_own, without_repeats

        # One text under two ids could stand on both sides of a split.
        prompts = without_repeats(read_own(str(source)))
        wanted = _checked_tasks(tasks, tuple(dict.fromkeys(prompt.task for prompt in prompts)))
    chosen = [prompt for prompt in prompts if prompt.task in wanted]
    if not chosen:
        raise PromptError(f"{source}: no prompts for {', '.join(wanted)}; choose other tasks or another file")
    return chosen


def _bundled() -> list[Prompt]:
    """The bundled evaluation set, if it is the one that this version comes with."""
    data = EVALUATION_FILE.read_bytes() if EVALUATION_FILE.is_file() else b""
    if hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest() != EVALUATION_SHA256:
        raise PromptError(
            f"{EVALUATION_FILE} is missing or changed; restore it with git, or give your own prompts as a JSONL file"
            if DATA.is_dir()
            else "the bundled prompts are part of dblast's repository, not of the installed package: clone it, or give "
            "--prompts FILE with your own as JSON lines"
        )
    return read_prompts(EVALUATION_FILE)


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a JSONL file in file order; blank lines are skipped.

    A line is ``{"turns": ["..."]}``, user turns for the target's chat template, or
    ``{"prompt": "..."}``, text to be continued as it stands. Both may carry a ``"task"`` of
    any name (otherwise "chat" and "text") and an ``"id"`` (otherwise ``<task>-line<number>``).

    Raises:
        PromptError: as for ``load_prompts`` with a path.
    """
    if not path.is_file():
        raise PromptError(f"{path}: no such prompt file; give a JSONL file, 'bundled' or 'hub'")
    prompts: list[Prompt] = []
    first_line: dict[str, int] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise PromptError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse_line(line, number, f"{path}:{number}")
        except PromptError as error:
            raise PromptError(f"{path}:{number}: {error}") from None
        if prompt.id in first_line:
            raise PromptError(f"{path}:{number}: id {prompt.id!r} was used before on line {first_line[prompt.id]}")
        first_line[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptError(f"{path}: the file holds no prompts")
    return prompts


def training_prompts(
    n: int, seed: int, tasks: Sequence[str] = TASKS, source: str = "bundled"
) -> list[Prompt]:
    """Return ``n`` distinct training prompts; the first m of them do not depend on n.

    Args:
        n: how many prompts.
        seed: the same ``(n, seed, tasks, source)`` gives the same list.
        tasks: the tasks to interleave, one prompt each in turn.
        source: ``"bundled"`` makes prompts from templates, at most
            ``TRAINING_LIMIT_PER_TASK`` a task and never an evaluation prompt;
            ``"hub"`` streams user turns of the Tulu 3 SFT mixture in a shuffled
            order. The mixture does not say which prompts are creative, so these
            carry the task ``"chat"``, and they are not interleaved.

    Raises:
        PromptError: an unknown task or source, n below 1, more prompts than the
            source has, or the hub cannot be reached.
    """
    wanted = _checked_tasks(tasks)
    if not (is_whole(n) and n >= 1):
        raise PromptError(f"n must be an integer of at least 1, not {n}")
    if source == "hub":
        return _tulu_prompts(n, seed, wanted)
    if source != "bundled":
        raise PromptError(f"unknown source {source!r} of training prompts; choose 'bundled' or 'hub'")
    limit = TRAINING_LIMIT_PER_TASK * len(wanted)
    if n > limit:
        raise PromptError(
            f"{n} training prompts were asked for, but the templates give at most {limit} for "
            f"{', '.join(wanted)}; ask for fewer or use source='hub'"
        )
    evaluation = {normalised(turn) for prompt in _bundled() for turn in prompt.turns}
    streams = {task: _generated(task, seed, evaluation) for task in wanted}
    return [next(streams[wanted[i % len(wanted)]]) for i in range(n)]


def split_prompts(
    prompts: Sequence[Prompt], calibration_fraction: float = 0.1, seed: int = 0
) -> tuple[list[Prompt], list[Prompt]]:
    """Return (calibration, held out): disjoint, together all prompts, each in the given order.

    Each task gives ``calibration_fraction`` of its prompts, rounded, to the
    calibration part, but always at least one to either part. Prompts that a
    target sees as one text (:func:`normalised` first turn, whatever the id or the
    task) fall on the same side and count once, for the one with the first id.

    Raises:
        PromptError: a fraction not strictly between 0 and 1, no prompts, a
            repeated id, or a task with fewer than two prompts of its own.
    """
    if not 0.0 < calibration_fraction < 1.0:
        raise PromptError(f"calibration_fraction must lie strictly between 0 and 1, not {calibration_fraction}")
    if not prompts:
        raise PromptError("there are no prompts to split")
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise PromptError("prompt ids are repeated; split prompts before sampling from them")
    ids_by_task: dict[str, list[str]] = {prompt.task: [] for prompt in prompts}
    same: dict[str, str] = {}
    first: dict[str, str] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.id):
        # Prompts of the synthetic language have no text here, and are distinct.
        text = normalised(prompt.turns[0]) if prompt.turns else f"\n{prompt.id}"
        same[prompt.id] = first.setdefault(text, prompt.id)
        if same[prompt.id] == prompt.id:
            ids_by_task[prompt.task].append(prompt.id)
    chosen: set[str] = set()
    for task, ids in ids_by_task.items():
        if len(ids) < 2:
            raise PromptError(f"task {task!r} has {'a single' if ids else 'no'} prompt of its own; a split needs at least two")
        size = min(max(round(calibration_fraction * len(ids)), 1), len(ids) - 1)
        chosen.update(random.Random(f"split-{seed}-{task}").sample(ids, size))
    calibration = [prompt for prompt in prompts if same[prompt.id] in chosen]
    held_out = [prompt for prompt in prompts if same[prompt.id] not in chosen]
    return calibration, held_out


def _checked_tasks(tasks: Iterable[str] | None, known: tuple[str, ...] = TASKS) -> tuple[str, ...]:
    wanted = known if tasks is None else (tasks,) if isinstance(tasks, str) else tuple(dict.fromkeys(tasks))
    if not wanted:
        raise PromptError(f"no tasks were given; choose among {', '.join(known)}")
    for task in wanted:
        if task not in known:
            raise PromptError(f"unknown task {task!r}; the tasks are {', '.join(known)}")
    return wanted


def _parse_line(line: bytes, number: int, where: str) -> Prompt:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise PromptError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise PromptError(f"not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise PromptError(f"JSON that cannot be read ({type(error).__name__})") from None
    if not isinstance(record, dict):
        raise PromptError('not an object such as {"task": ..., "turns": [...]} or {"prompt": "..."}')
    raw = "prompt" in record
    if raw == ("turns" in record):
        raise PromptError("give either 'turns' (a list of user turns) or 'prompt' (text to be continued)")
    if raw and not isinstance(record["prompt"], str):
        raise PromptError("'prompt' must be a string")
    turns = [record["prompt"]] if raw else record["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise PromptError("'turns' must be a list of strings")
    if not turns or not all(turn.strip() for turn in turns):
        raise PromptError(f"'{'prompt' if raw else 'turns'}' is empty or holds an empty string")
    task = record.get("task", "text" if raw else "chat")
    if not isinstance(task, str) or not task.strip():
        raise PromptError("'task' must be a string that is not empty")
    identifier = record.get("id", f"{task}-line{number}")
    if not isinstance(identifier, str) or not identifier:
        raise PromptError("'id' must be a string that is not empty")
    try:
        "".join((identifier, task, *turns)).encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError("a text holds half of a character (a lone surrogate such as \\ud800)") from None
    return Prompt(identifier, task, tuple(turns), raw, where)


def _generated(task: str, seed: int, excluded: set[str]) -> Iterator[Prompt]:
    """Distinct prompts of one task, without end, from a random stream of the task's own."""
    rng = random.Random(f"training-{seed}-{task}")
    seen = set(excluded)
    number = repeats = 0
    while repeats < _MAX_REPEATS:
        text = fill(rng.choice(SHAPES[task]), rng)
        key = normalised(text)
        if key in seen:
            repeats += 1
            continue
        seen.add(key)
        repeats, number = 0, number + 1
        yield Prompt(f"train{seed}-{task}-{number:05d}", task, (text,))
    raise PromptError(f"the templates for {task!r} are used up after {number} prompts; ask for fewer")


def _unreachable(name: str, error: Exception) -> PromptError:
    reason = " ".join(str(error).split())
    return PromptError(
        f"{name} could not be loaded ({type(error).__name__}: {reason}); "
        "use source='bundled' or the path of a JSONL file where there is no network"
    )


def _hub_rows(name: str, *config: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Rows of a hub dataset; whatever fails on the way is reported as one PromptError."""
    import datasets  # slow to import, and not needed for bundled prompts

    try:  # the hub client, HTTP and file layers raise unrelated exception types
        yield from datasets.load_dataset(name, *config, **options)
    except Exception as error:
        raise _unreachable(name, error) from error


def _gsm8k() -> list[Prompt]:
    rows = _hub_rows("openai/gsm8k", "main", split="test", revision=GSM8K_REVISION)
    return [Prompt(f"gsm8k-{i:04d}", "maths", (row["question"],)) for i, row in enumerate(rows)]


def _mt_bench() -> list[Prompt]:
    rows = _hub_rows("HuggingFaceH4/mt_bench_prompts", split="train", revision=MT_BENCH_REVISION)
    return [Prompt(f"mt-bench-{row['prompt_id']}", "chat", tuple(row["prompt"])) for row in rows]


def _humaneval() -> list[Prompt]:
    rows = _hub_rows("openai/openai_humaneval", split="test", revision=HUMANEVAL_REVISION)
    return [Prompt(row["task_id"], "code", (row["prompt"],)) for row in rows]


def _creative_writing() -> list[Prompt]:
    """The benchmark's prompts, each with the first of its seed modifiers.

    One modifier a prompt keeps calibration and held-out prompts truly different.
    """
    try:
        with urllib.request.urlopen(CREATIVE_WRITING_URL, timeout=30) as response:
            records = json.loads(response.read())
    except (OSError, ValueError) as error:
        raise _unreachable("EQ-Bench creative writing v3", error) from error
    return [
        Prompt(
            f"creative-writing-{key}",
            "creative",
            (record["writing_prompt"].replace("<SEED>", record["seed_modifiers"][0]),),
        )
        for key, record in records.items()
    ]


_HUB_LOADERS = {"maths": _gsm8k, "chat": _mt_bench, "code": _humaneval, "creative": _creative_writing}


def _tulu_prompts(n: int, seed: int, tasks: tuple[str, ...]) -> list[Prompt]:
    if tasks == ("creative",):
        raise PromptError("the Tulu 3 mixture does not mark creative prompts; add 'chat' or use source='bundled'")
    rows = _tulu_rows(seed)
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for row in rows:
        turns = tuple(m["content"] for m in row["messages"] if m["role"] == "user" and m["content"].strip())
        task = _tulu_task(row.get("source", ""))
        key = normalised(turns[0]) if turns else ""
        if not key or key in seen or task not in tasks:
            continue
        seen.add(key)
        prompts.append(Prompt(f"tulu3-{row['id']}", task, turns))
        if len(prompts) == n:
            return prompts
    raise PromptError(f"{n} training prompts were asked for, but the Tulu 3 mixture has {len(prompts)} that fit")


def _tulu_rows(seed: int) -> Iterator[dict[str, Any]]:
    import datasets

    name = "allenai/tulu-3-sft-mixture"
    try:
        stream = datasets.load_dataset(name, split="train", streaming=True, revision=TULU3_REVISION)
        yield from stream.shuffle(seed=seed, buffer_size=10_000)
    except Exception as error:
        raise _unreachable(name, error) from error


def _tulu_task(source: str) -> str:
    """The task of a row, judged by the name of the set it was mixed from."""
    name = source.casefold()
    if "math" in name or "gsm" in name or "algebra" in name:
        return "maths"
    return "code" if "code" in name else "chat"
