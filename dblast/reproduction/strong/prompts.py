"""Prompts of one shard of text: chat of many kinds, second turns, system messages, and openings continued as they stand."""

from __future__ import annotations

import random
import re
from functools import cache

from dblast.reproduction.prompts import templates
from dblast.reproduction.prompts.sources import load_prompts, normalised
from dblast.reproduction.strong import openings
from dblast.reproduction.strong.shapes import BEGINNINGS, FOLLOW_UPS, SHAPES, SYSTEMS, TOPICS
from dblast.targets import Target
from dblast.trajectories import EncodedPrompt

#: Kinds of prompts and their shares: the paper's four tasks, broader chat, a second turn, a system message, raw text.
KINDS = {"tasks": 0.3, "chat": 0.3, "second": 0.12, "system": 0.08, "raw": 0.2}
#: A prompt is left out if this many words in a row are those of an evaluation prompt.
SHARED_WORDS = 8
LONGEST = 320


@cache
def _evaluation_runs() -> frozenset[str]:
    return frozenset(run for prompt in load_prompts() for turn in prompt.turns for run in _runs(turn))


def _runs(text: str) -> set[str]:
    words = normalised(text).split()
    return {" ".join(words[i : i + SHARED_WORDS]) for i in range(max(1, len(words) - SHARED_WORDS + 1))}


def resembles_evaluation(text: str) -> bool:
    """Whether a text shares :data:`SHARED_WORDS` words in a row with a bundled evaluation prompt, or is a shorter one."""
    return bool(_runs(text) & _evaluation_runs())


def _filled(shape: str, rng: random.Random) -> str:
    """Slots first, so that nothing in a passage is taken for one; now and then in the lower case of hasty typing."""
    text = templates.fill(shape, rng)
    if rng.random() < 0.1:
        text = text.lower()
    makers = {
        "topic": lambda: rng.choice(TOPICS),
        "passage": lambda: openings.prose(rng),
        "code": lambda: openings.code(rng),
    }
    return re.sub(r"\{(topic|passage|code)\}", lambda match: makers[match[1]](), text)


def _message(tasks: bool, rng: random.Random) -> str:
    if tasks:
        return templates.fill(rng.choice(templates.SHAPES[rng.choice(list(templates.SHAPES))]), rng)
    return _filled(rng.choice(SHAPES), rng)


def draw_prompt(rng: random.Random) -> tuple[str, str | list[dict[str, str]]]:
    """Kind and content of a prompt: text to be continued, or the messages of a conversation."""
    kind = rng.choices(list(KINDS), KINDS.values())[0]
    if kind == "raw":
        text = _filled(rng.choice(BEGINNINGS), rng)
        # Passages end anywhere.
        words = text.split(" ")
        return kind, " ".join(words[: rng.randint(min(8, len(words)), len(words))])
    tasks = kind == "tasks" or (kind != "chat" and rng.random() < 0.4)
    messages = [{"role": "user", "content": _message(tasks, rng)}]
    if kind == "system":
        messages.insert(0, {"role": "system", "content": _filled(rng.choice(SYSTEMS), rng)})
    if kind == "second":
        answer = openings.prose(rng) if rng.random() < 0.7 else openings.code(rng)
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": _filled(rng.choice(FOLLOW_UPS), rng)})
    return kind, messages


def shard_prompts(target: Target, seed: int, block: int, count: int) -> list[EncodedPrompt]:
    """``count`` prompts of at most :data:`LONGEST` tokens, shortest first, none of which resembles an evaluation prompt."""
    rng = random.Random(f"text-{seed}-{block}")
    prompts: list[EncodedPrompt] = []
    while len(prompts) < count:
        kind, content = draw_prompt(rng)
        texts = [content] if isinstance(content, str) else [message["content"] for message in content]
        if any(map(resembles_evaluation, texts)):
            continue
        ids = target.tokenizer(content)["input_ids"] if isinstance(content, str) else target.encode_chat(content)
        if 0 < len(ids) <= LONGEST:
            prompts.append(EncodedPrompt(f"{kind}-{block:04d}-{len(prompts):03d}", kind, tuple(ids)))
    return sorted(prompts, key=lambda prompt: len(prompt.ids))
