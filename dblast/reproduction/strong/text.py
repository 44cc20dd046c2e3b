"""Text of a target that grows shard by shard, over sittings and machines, and trains a drafter at any size.

A shard is one file: which prompts, what the target answered under one sampling setting, and the distributions that
every token was drawn from. Shard i is determined by the recipe, the target and i alone, so shards may be made in any
order, anywhere, and those that exist are a training set. Tapped states (SmolLM2: 5.8 kB a token against 0.15) may be
kept in a file beside it, of the very pass that sampled, and be deleted at any time:
:mod:`dblast.reproduction.strong.pool` recomputes them.

The folder is named by what the text is (target, recipe, format), not by the code that draws it: an edit of a template
or of the sampler changes later shards and leaves the hours spent on earlier ones alone. Every shard says in its header
what made it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from dblast.errors import ArtefactError
from dblast.reproduction.stages import digest, locked
from dblast.reproduction.strong.attention import grouped_attention
from dblast.sampling import get_setting
from dblast.support.files import cache_folder, sha256_file
from dblast.support.progress import progress
from dblast.support.states import read_state, write_state
from dblast.targets import Target, last_position, tap_features
from dblast.trajectories import EncodedPrompt, left_padded, shard_generator, widen_supports

#: Changes when files of the old one can no longer be read.
FORMAT = 1
#: Prompts that pass through the target together: more of them only make temporaries too large for the allocator to keep.
PROMPTS_AT_ONCE = 16
_NAME = re.compile(r"shard-(\d{5})\.safetensors")


@dataclass(frozen=True)
class TextRecipe:
    """What a text is.

    Attributes:
        settings, budgets: of shard i the i-th, in turn; the lengths of the two have no common factor, nor has either
            with ``quarters``, so that all combinations occur equally often.
        quarters: prompts are drawn for this many shards together and dealt by length, so that little is padding.
        responses: of a shard.
    """

    settings: tuple[str, ...] = ("low", "medium", "high")
    budgets: tuple[int, ...] = (128, 192, 96, 256, 160)
    quarters: int = 4
    responses: int = 128
    seed: int = 0


@dataclass
class Text:
    """Prompts with sampled responses, flat; R rows, N response tokens, S entries of supports, P prompt tokens.

    Attributes:
        prompts, responses: (P,) and (N,) int32 token ids, row after row.
        prompt_lengths, response_lengths: (R,).
        log_p: (N,) float32, log p of the drawn token.
        support, support_log_p: (S,) tokens that could have been drawn, and their log p, position after position.
        support_sizes: (N,).
    """

    prompts: Tensor
    prompt_lengths: Tensor
    responses: Tensor
    response_lengths: Tensor
    log_p: Tensor
    support: Tensor
    support_log_p: Tensor
    support_sizes: Tensor


def text_folder(recipe: TextRecipe, target_identity: object, label: str) -> Path:
    """Where shards of a text lie; not a stage, so that cleaning the cache does not take it for unfinished work."""
    key = digest({"format": FORMAT, "recipe": asdict(recipe), "target": target_identity})
    return cache_folder() / "text" / f"{label}-{key}"


@torch.no_grad()
def sample_responses(
    target: Target,
    prompts: Sequence[EncodedPrompt],
    setting: str,
    budget: int,
    generator: torch.Generator,
    taps: list[int] | None = None,
    advance: Callable[[int], object] | None = None,
) -> tuple[Text, Tensor | None]:
    """One response to each prompt, of at most ``budget`` tokens; rows that have ended leave the batch.

    Returns:
        The text and, with ``taps``, the bfloat16 states of every token that went through the target, row after row:
        of each row all of the prompt and all of the response but its last token, (P + N - R, m * H).
    """
    settings, model, device = get_setting(setting), target.model, target.device
    ids, pad, positions = left_padded([prompt.ids for prompt in prompts], device)
    count, width = ids.shape
    total = width + budget
    seen = torch.arange(total, device=device) >= pad.unsqueeze(1)
    eos = torch.tensor(target.eos_token_ids, device=device, dtype=torch.long)
    rows, lengths = torch.arange(count, device=device), width - pad
    alive = torch.ones(count, dtype=torch.bool, device=device)
    steps: list[dict[str, Tensor]] = []
    states: list[list[Tensor]] = [[] for _ in range(count)]
    with grouped_attention(model):
        cache, logits = _read_prompts(model, ids, positions, seen[:, :width], total, taps, states)
        for step in range(budget):
            support, log_p = settings.support(logits)
            choice = torch.multinomial(log_p.exp(), 1, generator=generator)
            token = support.gather(-1, choice).squeeze(-1)
            entry = {"row": rows, "response": token, "log_p": log_p.gather(-1, choice).squeeze(-1)}
            entry |= {"support": support, "support_log_p": log_p}
            steps.append({name: value[alive].cpu() for name, value in entry.items()})
            if advance:
                advance(int(alive.sum()))
            alive = alive & ~torch.isin(token, eos)
            if step + 1 == budget or not alive.any():
                break
            # Moving the cache costs about as much as a step, so not for a single row that has ended.
            if alive.sum() <= 7 / 8 * len(rows):
                keep = alive.nonzero().squeeze(1)
                rows, token, seen, lengths, alive = (value[keep] for value in (rows, token, seen, lengths, alive))
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[keep], layer.values[keep]
            # Of the whole cache: a slice of it would be copied.
            mask = (seen & (torch.arange(total, device=device) <= width + step))[:, None, None]
            out = model(
                input_ids=token.unsqueeze(1), attention_mask=mask, position_ids=(lengths + step).unsqueeze(1), cache=cache,
                output_hidden_states=taps is not None,
            )  # fmt: skip
            logits = out.logits[:, -1]
            if taps is not None:
                tapped = tap_features(out.hidden_states, taps).bfloat16().cpu()
                for place in alive.nonzero().squeeze(1).tolist():
                    states[int(rows[place])].append(tapped[place])
    widen_supports(steps)
    flat = {name: torch.cat([entry[name] for entry in steps]) for name in steps[0]}
    # Step after step becomes row after row.
    order = flat["row"].argsort(stable=True)
    flat = {name: value[order] for name, value in flat.items()}
    kept = flat["support_log_p"] > float("-inf")
    text = Text(
        prompts=torch.cat([torch.tensor(prompt.ids) for prompt in prompts]).int(),
        prompt_lengths=torch.tensor([len(prompt.ids) for prompt in prompts]).int(),
        responses=flat["response"].int(),
        response_lengths=torch.bincount(flat["row"], minlength=count).int(),
        log_p=flat["log_p"].float(),
        support=flat["support"][kept].int(),
        support_log_p=flat["support_log_p"][kept].float(),
        support_sizes=kept.sum(1).int(),
    )
    return text, None if taps is None else torch.cat([part for row in states for part in row])


def _read_prompts(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    seen: Tensor,
    total: int,
    taps: list[int] | None,
    states: list[list[Tensor]],
) -> tuple[StaticCache, Tensor]:
    """Cache of ``total`` places, the first W filled with (B, W) left-padded prompts, and the (B, V) logits after them;
    the tapped states of every prompt join its list."""
    width = ids.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
    # A padded query sees itself, or its softmax would be of nothing.
    mask = (seen[:, None] & causal) | torch.eye(width, dtype=torch.bool, device=ids.device)
    caches, logits = [], []
    for rows in torch.arange(len(ids), device=ids.device).split(PROMPTS_AT_ONCE):
        caches.append(StaticCache(config=model.config, max_cache_len=total))
        out = model(
            input_ids=ids[rows], attention_mask=mask[rows].unsqueeze(1), position_ids=positions[rows], cache=caches[-1],
            logits_to_keep=last_position(ids), output_hidden_states=taps is not None,
        )  # fmt: skip
        logits.append(out.logits[:, -1])
        if taps is not None:
            tapped = tap_features(out.hidden_states, taps).bfloat16().cpu()
            for row, features in zip(rows.tolist(), tapped, strict=True):
                states[row].append(features[seen[row].cpu()])
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layers[0].keys = torch.cat([layer.keys for layer in layers])
        layers[0].values = torch.cat([layer.values for layer in layers])
    return caches[0], torch.cat(logits)


class TextStore:
    """The shards of a text in a folder.

    Args:
        folder: see :func:`text_folder`; need not exist yet.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def path(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}.safetensors"

    def indices(self) -> list[int]:
        """Numbers of the shards that are there."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.glob("shard-*"))
        return sorted(int(match[1]) for match in found if match)

    def header(self, index: int) -> dict[str, Any]:
        """What a shard says of itself, its checksum not compared; ``tokens`` and ``responses`` are its counts.

        Raises:
            ArtefactError: it cannot be read.
        """
        try:
            with safe_open(self.path(index), "pt") as file:
                return json.loads(file.metadata()["state"].split(" ", 1)[1])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ArtefactError(
                f"{self.path(index)} is damaged ({type(error).__name__}); delete it and rerun"
            ) from error

    def tokens(self) -> int:
        """Response tokens of all shards."""
        return sum(self.header(index)["tokens"] for index in self.indices())

    def read(self, index: int) -> tuple[dict[str, Any], Text]:
        """Header and content of a shard.

        Raises:
            ArtefactError: it is damaged, or of another format.
        """
        header, tensors = read_state(self.path(index))
        if header.get("format") != FORMAT:
            raise ArtefactError(
                f"{self.path(index)} has format {header.get('format')}, not {FORMAT}; delete it and rerun"
            )
        return header, Text(**tensors)

    def states_path(self, index: int) -> Path:
        return self.folder / f"states-{index:05d}.safetensors"

    def states(self, index: int, taps: list[int]) -> Tensor | None:
        """Tapped states kept beside a shard (see :func:`sample_responses`); None if there are none of these taps."""
        if not self.states_path(index).exists():
            return None
        header, tensors = read_state(self.states_path(index))
        # Of a shard that was made again, they are another text's.
        return tensors["states"] if header == {"taps": taps, "shard": sha256_file(self.path(index))} else None

    def write(
        self, index: int, header: dict[str, Any], text: Text, taps: list[int] | None, states: Tensor | None
    ) -> None:
        counts = {
            "tokens": len(text.responses),
            "responses": len(text.response_lengths),
            "prompt_tokens": len(text.prompts),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_state(self.path(index), {"format": FORMAT, "index": index} | counts | header, vars(text))
        if states is not None:
            shard = {"taps": taps, "shard": sha256_file(self.path(index))}
            write_state(self.states_path(index), shard, {"states": states})


def make_shard(
    store: TextStore,
    recipe: TextRecipe,
    target: Target,
    index: int,
    prompts: Callable[[int, int], list[EncodedPrompt]],
    taps: list[int] | None = None,
    advance: Callable[[int], object] | None = None,
) -> None:
    """Sample one shard.

    Args:
        prompts: block and count to that many prompts, shortest first; a block serves ``recipe.quarters`` shards.
        taps: target layers whose states are kept beside it.
        advance: told how many tokens every step gave.
    """
    start = time.monotonic()
    block, quarter = divmod(index, recipe.quarters)
    drawn = prompts(block, recipe.quarters * recipe.responses)[quarter * recipe.responses :][: recipe.responses]
    setting, budget = recipe.settings[index % len(recipe.settings)], recipe.budgets[index % len(recipe.budgets)]
    generator = shard_generator(recipe.seed, index, target.device)
    text, states = sample_responses(target, drawn, setting, budget, generator, taps, advance)
    header = {
        "recipe": asdict(recipe), "setting": setting, "budget": budget, "precision": str(target.model.dtype),
        "ids": [prompt.prompt_id for prompt in drawn], "seconds": round(time.monotonic() - start, 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip
    store.write(index, header, text, taps, states)


def grow(
    store: TextStore,
    recipe: TextRecipe,
    open_target: Callable[[], Target],
    prompts: Callable[[Target], Callable[[int, int], list[EncodedPrompt]]],
    tokens: int,
    taps: list[int] | None = None,
    first: int = 0,
    minutes: float = math.inf,
) -> int:
    """Add shards, from number ``first`` on, until the text has that many tokens or the time is over; returns its tokens.

    Goes on wherever it was stopped; at most one unfinished shard is lost.
    """
    store.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    with locked(store.folder / "sampling.lock", f"samples text into {store.folder}"):
        done = store.tokens()
        if done >= tokens:
            return done
        target = open_target()
        draw = prompts(target)
        with progress(tokens, "text", unit="token", initial=done) as bar:
            for index in itertools.count(first):
                if done >= tokens or time.monotonic() > end:
                    return done
                if not store.path(index).exists():
                    make_shard(store, recipe, target, index, draw, taps, bar.update)
                    done += store.header(index)["tokens"]
                    bar.set_postfix(shards=index + 1)
    return done
