"""Many sampled continuations of the same prefix: what a target would have written next, M times.

A prefix is a stored trajectory cut after some response tokens. It goes through
the target once; its cache is then shared by its M continuations of one block
each. Stored as safetensors shards with a seed each, so a killed run goes on at
the next shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from dblast.errors import ArtefactError, DBlastError
from dblast.sampling import SamplingSettings
from dblast.support.checks import check_whole
from dblast.support.files import Shards
from dblast.support.progress import progress
from dblast.targets import Target, attention_mask, last_position
from dblast.trajectories import Trajectory, left_padded, shard_generator, widen_supports


@dataclass
class Continuations:
    """M sampled continuations of b tokens for each of P prefixes.

    Attributes:
        row: (P,) int64, which trajectory the prefix was cut from.
        emitted: (P,) int64, response tokens before the cut.
        tokens: (P, M, b) int64 sampled tokens; after an end of sequence any.
        log_p: (P, M, b) float32, log p(x_j | y, x_<j), recorded in the pass that sampled; 0 after the end.
        valid: (P, M, b) bool, False after an end of sequence.
        support: (P, M, b, W) int64, tokens of the distribution that x_j was drawn from.
        support_log_p: (P, M, b, W) float32, their log-probabilities, -inf where padded or after the end.
    """

    row: Tensor
    emitted: Tensor
    tokens: Tensor
    log_p: Tensor
    valid: Tensor
    support: Tensor
    support_log_p: Tensor

    def __len__(self) -> int:
        return len(self.row)


def draw_prefixes(
    response_lengths: Sequence[int], rows: Sequence[int], count: int, block_length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Truncation points, uniform over all places of the chosen trajectories that leave room for a block.

    Args:
        response_lengths: response tokens of every trajectory.
        rows: trajectories to cut.
        count: P, drawn without repetition.

    Returns:
        ``(row, emitted)``, both (P,), in order of rows.

    Raises:
        DBlastError: there are fewer such places than asked for.
    """
    places = [(r, a) for r in rows for a in range(response_lengths[r] - block_length + 1)]
    if len(places) < count:
        raise DBlastError(
            f"{count} truncation points were asked for, but only {len(places)} places leave room for "
            f"{block_length} tokens; ask for fewer or sample longer responses"
        )
    chosen = sorted(torch.randperm(len(places), generator=generator)[:count].tolist())
    return tuple(torch.tensor(column) for column in zip(*(places[i] for i in chosen), strict=True))


@torch.no_grad()
def sample_continuations(
    target: Target,
    prefixes: Sequence[Tensor],
    settings: SamplingSettings,
    *,
    continuations: int,
    block_length: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Continue every prefix M times; one left-padded prefill, then b - 1 steps of P * M tokens.

    Args:
        prefixes: P token-id tensors, prompt included, each at least one token.
        continuations: M.
        generator: on the target's device.

    Returns:
        ``tokens, log_p, valid, support, support_log_p`` as in :class:`Continuations`.

    Raises:
        DBlastError: a count below one, an empty prefix, or the context limit would be passed.
    """
    check_whole("number of continuations", continuations, 1)
    check_whole("block length b", block_length, 1)
    if any(len(prefix) == 0 for prefix in prefixes):
        raise DBlastError("a prefix has no tokens")
    model, device, count = target.model, target.device, len(prefixes)
    ids, pad, positions = left_padded(prefixes, device)
    width = ids.shape[1]
    lengths = width - pad
    if width + block_length > model.config.max_position_embeddings:
        raise DBlastError(
            f"a prefix of {width} tokens and a block of {block_length} pass the target's context limit of "
            f"{model.config.max_position_embeddings}"
        )
    mask = torch.arange(width, device=device) >= pad.unsqueeze(1)
    cache = DynamicCache(config=model.config)
    out = model(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=last_position(ids),
    )
    # The M continuations are M tokens of one row, side by side: each step of theirs attends to the prefix, which
    # is neither computed nor stored again, and to the steps of its own continuation.
    logits = out.logits[:, -1:].expand(-1, continuations, -1)
    allowed = mask.view(count, 1, 1, width).expand(-1, -1, continuations, -1)
    own = torch.eye(continuations, dtype=torch.bool, device=device).expand(count, 1, -1, -1)
    eos = torch.tensor(target.eos_token_ids, device=device, dtype=torch.long)
    alive = torch.ones(count, continuations, dtype=torch.bool, device=device)
    steps: list[dict[str, Tensor]] = []
    for step in range(block_length):
        support, support_log_p = settings.support(logits)
        drawn = torch.multinomial(support_log_p.exp().flatten(0, 1), 1, generator=generator).view(count, -1, 1)
        token = support.gather(-1, drawn).squeeze(-1)
        steps.append(
            {
                "tokens": token,
                "log_p": support_log_p.gather(-1, drawn).squeeze(-1).masked_fill(~alive, 0.0),
                "valid": alive,
                "support": support,
                "support_log_p": support_log_p.masked_fill(~alive.unsqueeze(-1), float("-inf")),
            }
        )
        alive = alive & ~torch.isin(token, eos)
        if step + 1 == block_length:
            break
        allowed = torch.cat([allowed, own], dim=-1)
        out = model(
            input_ids=token,
            attention_mask=attention_mask(model, allowed),
            position_ids=(lengths + step).unsqueeze(1).expand(-1, continuations),
            cache=cache,
            use_cache=True,
        )
        logits = out.logits
    widen_supports(steps)
    return {name: torch.stack([part[name] for part in steps], dim=2).cpu() for name in steps[0]}


def store_continuations(
    target: Target,
    trajectories: Sequence[Trajectory],
    row: Tensor,
    emitted: Tensor,
    settings: SamplingSettings,
    folder: Path,
    *,
    continuations: int,
    block_length: int,
    seed: int,
    rows_per_pass: int = 2048,
    description: str = "continuations",
    key: str = "",
) -> Continuations:
    """Continue chosen truncation points into ``folder``; goes on where a killed run stopped.

    Args:
        row, emitted: (P,) from :func:`draw_prefixes`.
        rows_per_pass: continuations of one pass at most, P * M, but at least one prefix.
        key: what else tells this run from others, such as a hash of the target.

    Raises:
        DBlastError: what :func:`sample_continuations` refuses; damaged shards in the folder, or those of a run with
            other arguments.
    """
    prefixes = [trajectories[r].tokens for r in row.tolist()]
    prompts = [len(trajectories[r].prompt_ids) for r in row.tolist()]
    length = [n + a for n, a in zip(prompts, emitted.tolist(), strict=True)]
    # Prefixes of like length share a pass; the order is undone when the shards are read.
    order = sorted(range(len(row)), key=lambda i: (length[i], i))
    batches: list[list[int]] = []
    for i in order:
        if not batches or (len(batches[-1]) + 1) * continuations > rows_per_pass:
            batches.append([])
        batches[-1].append(i)
    made_by = [key, settings, continuations, block_length, seed, row.tolist(), [p.tolist() for p in prefixes], length]
    shards = Shards(folder, made_by, shards=len(batches), prefixes=len(row))
    with progress(len(row) * continuations * block_length, description, unit="token") as bar:
        for index, batch in enumerate(batches):
            path = folder / f"shard-{index:05d}.safetensors"
            if not shards.has(path):
                made = sample_continuations(
                    target,
                    [prefixes[i][: length[i]] for i in batch],
                    settings,
                    continuations=continuations,
                    block_length=block_length,
                    generator=shard_generator(seed, index, target.device),
                )
                made |= {"row": row[batch], "emitted": emitted[batch], "order": torch.tensor(batch)}
                made = {name: value.contiguous() for name, value in made.items()}
                shards.add(path, lambda path, made=made: save_file(made, path))
            bar.update(len(batch) * continuations * block_length)
    return load_continuations(folder)


def load_continuations(folder: Path) -> Continuations:
    """Read what :func:`store_continuations` wrote, prefixes in their original order.

    Raises:
        ArtefactError: shards are missing or damaged.
    """
    stored = Shards(folder)
    try:
        shards = [load_file(path) for path in stored.paths("shard-{:05d}.safetensors")]
        widen_supports(shards)
        order = torch.cat([shard["order"] for shard in shards]).argsort()
        if len(order) != stored.record["prefixes"]:
            raise ArtefactError(f"{len(order)} prefixes, expected {stored.record['prefixes']}")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ArtefactError(f"continuations in {folder} are missing or damaged ({error}); delete it and rerun") from None
    names = [field.name for field in fields(Continuations)]
    return Continuations(**{name: torch.cat([shard[name] for shard in shards])[order] for name in names})
