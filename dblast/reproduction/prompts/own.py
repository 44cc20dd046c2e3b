"""Prompts of one's own: read from JSONL or a data set's column, split, encoded, and kept by their content.

A plan names them ``own:<hash>`` in ``DataConfig.prompts``. The hash is that of the token ids, and the ids
themselves lie in the cache: what was sampled from them is found again whatever becomes of the file, and a
changed file, chat template or chat option makes other trajectories.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dblast.errors import ArtefactError
from dblast.reproduction.names import TABLE_FILES
from dblast.reproduction.prompts.sources import Prompt, PromptError, chat_messages, normalised, read_prompts
from dblast.reproduction.stages import Stage, digest
from dblast.support.files import cache_folder
from dblast.trajectories import EncodedPrompt

if TYPE_CHECKING:
    from dblast.targets import Target

OWN = "own:"
#: Fewest evaluation prompts of a task: one chooses Z_T, and an interval needs a few more.
FEWEST = 4
#: Share of a single file's prompts that evaluates, and the most prompts of one task that do.
EVALUATION_SHARE, MOST_EVALUATED = 0.2, 64
#: Rows of a data set that are read at most.
COLUMN_LIMIT = 20_000


# -- reading ---------------------------------------------------------------------------------------


def read_own(source: str) -> list[Prompt]:
    """Prompts of a JSONL file, or of ``data set:column``.

    Raises:
        PromptError: neither is there, or a line or row cannot be read.
    """
    name, _, column = source.rpartition(":")
    if name and not Path(source).exists() and (Path(name).is_dir() or "/" in name) and not name.endswith(".jsonl"):
        return read_column(name, column)
    return read_prompts(Path(source))


def read_source(source: str) -> list[Prompt]:
    """As :func:`read_own`, and of ``file:column`` where the file is a Parquet, CSV or JSONL table.

    Raises:
        PromptError: as there.
    """
    import pandas as pd

    name, _, column = source.rpartition(":")
    read = (pd.read_parquet, pd.read_csv, partial(pd.read_json, lines=True))
    reader = dict(zip(TABLE_FILES, read, strict=True)).get(Path(name).suffix)
    if reader is None or Path(source).exists() or not Path(name).is_file():
        return read_own(source)
    try:
        table = reader(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise PromptError(f"{name} cannot be read as a table ({reason[:200]})") from None
    if column not in table.columns:
        raise PromptError(f"{name} has no column {column!r}; its columns are {', '.join(map(str, table.columns))}")
    # Lists are arrays here, and empty cells None or NaN.
    cells = (x.tolist() if getattr(x, "ndim", 0) else "" if x is None or x != x else x for x in table[column])
    return _column_prompts(cells, name, column)


def read_column(name: str, column: str) -> list[Prompt]:
    """The first rows of a data set's column, from the hub (``owner/name``) or a folder.

    A row is a text, a list of texts (turns) or a list of messages with ``role`` and ``content``;
    all are for the chat template.

    Raises:
        PromptError: the data set or the column is not there, or a row is none of these.
    """

    def cells() -> Iterator[Any]:
        for row in _rows(name):
            if column not in row:
                raise PromptError(f"{name} has no column {column!r}; its columns are {', '.join(row)}")
            yield row[column]

    return _column_prompts(cells(), name, column)


def _column_prompts(cells: Iterable[Any], name: str, column: str) -> list[Prompt]:
    """The prompts in the first cells of a column; empty ones, common in public sets, are no reason to give up the others."""
    prompts = []
    for number, cell in enumerate(islice(cells, COLUMN_LIMIT), start=1):
        turns, where = _turns(cell), f"{name}, row {number}"
        if turns is None:
            raise PromptError(f"{where}: column {column!r} holds neither text nor turns nor messages")
        if turns and turns[0].strip():
            prompts.append(Prompt(f"chat-row{number}", "chat", turns, where=where))
    if not prompts:
        raise PromptError(f"{name}: column {column!r} holds no prompts")
    return prompts


def _rows(name: str) -> Iterator[dict[str, Any]]:
    import datasets

    from dblast.support.progress import quiet_loading

    try:  # the hub client, HTTP and file layers raise unrelated exception types
        with quiet_loading():
            folder = Path(name)
            if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
                loaded = datasets.load_from_disk(name)
            else:
                loaded = datasets.load_dataset(name, streaming=not folder.is_dir())
        if hasattr(loaded, "keys"):
            loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
        yield from loaded
    except Exception as error:
        reason = " ".join(str(error).split())
        raise PromptError(
            f"{name} could not be loaded ({type(error).__name__}: {reason[:200]}); give a data set's folder, "
            "a hub id that can be reached, or a JSONL file"
        ) from error


def _turns(value: Any) -> tuple[str, ...] | None:
    """User turns of a row; None for something else."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(turn, str) for turn in value):
        return tuple(value)
    if isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in value):
        return tuple(message["content"] for message in value if message.get("role", "user") == "user")
    return None


# -- splitting -------------------------------------------------------------------------------------


def _key(prompt: Prompt) -> tuple[str, bool]:
    # Later turns are never sampled from.
    return normalised(prompt.turns[0]), prompt.raw


def without_repeats(prompts: Iterable[Prompt], taken: Iterable[Prompt] = ()) -> list[Prompt]:
    """The prompts whose text is neither that of an earlier one nor of one in ``taken``."""
    seen, kept = {_key(prompt) for prompt in taken}, []
    for prompt in prompts:
        if _key(prompt) not in seen:
            seen.add(_key(prompt))
            kept.append(prompt)
    return kept


def by_task(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts of every task, tasks in order of appearance."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.task, []).append(prompt)
    return groups


def check_enough(evaluation: Sequence[Prompt], source: str) -> None:
    """Refuse an evaluation set with too few distinct prompts of a task."""
    for task, rows in by_task(evaluation).items():
        if len(rows) < FEWEST:
            raise PromptError(
                f"{source} has {len(rows)} distinct prompt{'s' if len(rows) > 1 else ''} of task {task!r}; an "
                f"evaluation needs {FEWEST} of every task: add some, or give them another task's name"
            )


def divide(prompts: Sequence[Prompt], source: str, seed: int = 0) -> tuple[list[Prompt], list[Prompt]]:
    """One list for both purposes: (evaluation, training), task by task, no text on both sides.

    A task gives :data:`EVALUATION_SHARE` of its prompts to evaluation, at least :data:`FEWEST` and at most
    :data:`MOST_EVALUATED`.

    Raises:
        PromptError: a task with too few distinct prompts.
    """
    evaluation, training = [], []
    for task, rows in by_task(without_repeats(prompts)).items():
        if len(rows) <= FEWEST:
            raise PromptError(
                f"{source} has {len(rows)} distinct prompt{'s' if len(rows) > 1 else ''} of task {task!r}; a file that "
                f"is split needs more than {FEWEST} of every task: add some, or give --train-prompts a file of its own"
            )
        rows = shuffled(rows, seed)
        count = min(max(round(EVALUATION_SHARE * len(rows)), FEWEST), MOST_EVALUATED, len(rows) - 1)
        evaluation += rows[:count]
        training += rows[count:]
    return evaluation, shuffled(training, seed)


def shuffled(prompts: Sequence[Prompt], seed: int = 0) -> list[Prompt]:
    """In an order that does not depend on the file's: files are often sorted."""
    rows = sorted(prompts, key=lambda prompt: (prompt.turns, prompt.id))
    random.Random(f"own-{seed}").shuffle(rows)
    return rows


# -- encoding and keeping --------------------------------------------------------------------------


def encode_own(prompts: Sequence[Prompt], target: Target, new_tokens: int, option: str) -> list[EncodedPrompt]:
    """Token ids of every prompt, refused by file and line if it and its answer do not fit the target.

    Args:
        new_tokens: the longest answer.
        option: the option that sets it, for the message.

    Raises:
        PromptError: a prompt too long, without tokens, or that the chat template refuses.
    """
    limit = getattr(target.model.config, "max_position_embeddings", None)
    encoded = []
    for prompt in prompts:
        where = prompt.where or prompt.id
        try:
            ids = prompt_ids(prompt, target)
        except Exception as error:  # templates raise what they like
            reason = " ".join(str(error).split())
            raise PromptError(
                f"{where}: the target's tokenizer or chat template refuses this prompt ({reason[:200]})"
            ) from error
        if not ids:
            raise PromptError(f"{where}: this prompt has no tokens for the target; leave it out")
        if limit and len(ids) + new_tokens > limit:
            raise PromptError(
                f"{where}: a prompt of {len(ids)} tokens and an answer of {new_tokens} pass the target's context limit "
                f"of {limit}; shorten the prompt or lower {option}"
            )
        encoded.append(EncodedPrompt(prompt.id, prompt.task, tuple(ids)))
    return encoded


def prompt_ids(prompt: Prompt, target: Target) -> list[int]:
    """Token ids of one prompt: through the chat template, or as it stands."""
    if prompt.raw:
        return list(target.tokenizer(prompt.turns[0])["input_ids"])
    return list(target.encode_chat(chat_messages(prompt)))


def keep(evaluation: Sequence[EncodedPrompt], training: Sequence[EncodedPrompt]) -> str:
    """Put encoded prompts into the cache; returns the name for ``DataConfig.prompts``."""
    splits = {"evaluation": evaluation, "training": training}
    content = {name: [[p.prompt_id, p.task, list(p.ids)] for p in rows] for name, rows in splits.items()}
    stage = Stage("prompts", {name: digest(rows) for name, rows in content.items()})

    def write(folder: Path) -> None:
        for name, rows in content.items():
            lines = (json.dumps(dict(zip(("id", "task", "ids"), row, strict=True))) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    stage.run(write)
    return OWN + stage.key


def own_file(name: str, split: str) -> Path:
    """Where :func:`keep` put the prompts of a split ("evaluation" or "training")."""
    return cache_folder() / "prompts" / name.removeprefix(OWN) / f"{split}.jsonl"


def open_own(name: str, split: str) -> list[EncodedPrompt]:
    """The encoded prompts of a split.

    Raises:
        ArtefactError: they are missing or damaged.
    """
    path = own_file(name, split)
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [EncodedPrompt(row["id"], row["task"], tuple(row["ids"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(
            f"{path} is missing or damaged ({type(error).__name__}); run the command again with the prompt file"
        ) from None
