"""Target-sampled trajectories: tokens, their log p and the tapped hidden states, all from one pass.

A trajectory is what the target would have written. The distribution that a token
was drawn from and the features are recorded in the very pass that sampled it: in bfloat16 a later prefill
gives slightly different logits, enough to push a sampled token out of the
recomputed top-k.

Stored as an Arrow dataset, one shard a batch; each shard has its own seed, so a
killed run goes on at the next shard and ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import StaticCache

from dblast.drafter import DBlastDrafter, DraftOutput
from dblast.errors import ArtefactError, DBlastError
from dblast.sampling import SamplingSettings
from dblast.support.checks import check_whole
from dblast.support.files import Shards
from dblast.support.progress import progress, quiet_loading
from dblast.targets import Target, last_position, tap_features

#: Tokens of each step's distribution that are recorded at most; the paper's settings keep 20 (more only in ties).
SUPPORT_LIMIT = 32


@dataclass
class Trajectory:
    """One prompt with one sampled response.

    Attributes:
        prompt_id, task: where the prompt came from.
        prompt_ids: (P,) int64 token ids.
        response_ids: (n,) int64 sampled ids, the end-of-sequence token included if it was reached.
        log_p: (n,) float32, log p(x_j | y, x_<j) under the sampling settings.
        entropy: (n,) float32, entropy of p at that step, nats.
        p_max: (n,) float32, largest probability of p at that step.
        support: (n, W) int64, the tokens that x_j was drawn from; the likeliest :data:`SUPPORT_LIMIT` if there were more.
        support_log_p: (n, W) float32, their log-probabilities, -inf where padded.
        features: (P + n - 1, m * H) bfloat16 tapped states of every token that went through the target.
    """

    prompt_id: str
    task: str
    prompt_ids: Tensor
    response_ids: Tensor
    log_p: Tensor
    entropy: Tensor
    p_max: Tensor
    support: Tensor
    support_log_p: Tensor
    features: Tensor

    @property
    def tokens(self) -> Tensor:
        """(P + n,) prompt and response."""
        return torch.cat([self.prompt_ids, self.response_ids])


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids, with the name its rows carry."""

    prompt_id: str
    task: str
    ids: tuple[int, ...]


def left_padded(rows: Sequence[Sequence[int] | Tensor], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token sequences as one left-padded batch.

    Returns:
        ``(ids, pad, positions)``: (B, W) int64 tokens, (B,) padded places before each
        sequence, and (B, W) positions counted from its first token (0 where padded).
    """
    lengths = torch.tensor([len(row) for row in rows], device=device)
    width = int(lengths.max())
    pad = width - lengths
    ids = torch.zeros(len(rows), width, dtype=torch.long, device=device)
    for i, row in enumerate(rows):
        ids[i, int(pad[i]) :] = torch.as_tensor(row, device=device)
    return ids, pad, (torch.arange(width, device=device) - pad.unsqueeze(1)).clamp(min=0)


def widen_supports(parts: Sequence[dict[str, Tensor]]) -> None:
    """Pad ``support`` and ``support_log_p`` (..., W) of steps or shards to one W, in place; filters keep what they keep."""
    widest = max(part["support"].shape[-1] for part in parts)
    for part in parts:
        for name, fill in (("support", 0), ("support_log_p", float("-inf"))):
            part[name] = torch.nn.functional.pad(part[name], (0, widest - part[name].shape[-1]), value=fill)


@torch.no_grad()
def sample_batch(
    target: Target,
    prompts: Sequence[EncodedPrompt],
    settings: SamplingSettings,
    *,
    max_new_tokens: int,
    taps: list[int],
    generator: torch.Generator,
) -> list[Trajectory]:
    """Sample one response per prompt in one left-padded batch over a preallocated cache.

    Args:
        prompts: encoded prompts, each at least one token.
        max_new_tokens: budget; a response also ends at any of the target's EOS ids.
        taps: target layers to record.
        generator: on the target's device.

    Raises:
        DBlastError: empty prompt, budget below 1, or the context limit would be passed.
    """
    check_whole("max_new_tokens", max_new_tokens, 1)
    if any(not prompt.ids for prompt in prompts):
        raise DBlastError("a prompt has no tokens")
    model, device = target.model, target.device
    ids, pad, positions = left_padded([prompt.ids for prompt in prompts], device)
    batch, width = ids.shape
    lengths = width - pad
    total = width + max_new_tokens
    if total > model.config.max_position_embeddings:
        raise DBlastError(
            f"prompt of {width} tokens plus {max_new_tokens} new ones passes the target's context limit "
            f"of {model.config.max_position_embeddings}; shorten the prompt or lower max_new_tokens"
        )
    # Ones beyond the written part are harmless: the causal mask hides the future.
    mask = (torch.arange(total, device=device) >= pad.unsqueeze(1)).long()
    cache = StaticCache(config=model.config, max_cache_len=total)
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        output_hidden_states=True,
        logits_to_keep=last_position(ids),
    )
    prompt_features = tap_features(out.hidden_states, taps).to(torch.bfloat16)
    eos = torch.tensor(target.eos_token_ids, device=device, dtype=torch.long)
    tokens, statistics, supports, step_features = [], [], [], []
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    count = torch.zeros(batch, dtype=torch.long, device=device)
    for step in range(max_new_tokens):
        support, log_p = settings.support(out.logits[:, -1])
        drawn = torch.multinomial(log_p.exp(), 1, generator=generator)
        token = support.gather(-1, drawn).squeeze(-1)
        tokens.append(token)
        entropy = torch.special.entr(log_p.exp()).sum(-1)
        statistics.append(torch.stack([log_p.gather(-1, drawn).squeeze(-1), entropy, log_p.amax(-1).exp()], -1))
        if log_p.shape[-1] > SUPPORT_LIMIT:
            log_p, likeliest = log_p.topk(SUPPORT_LIMIT, dim=-1)
            support = support.gather(-1, likeliest)
        supports.append({"support": support, "support_log_p": log_p})
        count += alive
        alive = alive & ~torch.isin(token, eos)
        if step + 1 == max_new_tokens or not alive.any():
            break
        out = model(
            input_ids=token.unsqueeze(1),
            attention_mask=mask,
            position_ids=(lengths + step).unsqueeze(1),
            cache=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        step_features.append(tap_features(out.hidden_states, taps)[:, 0].to(torch.bfloat16))
    tokens, statistics = torch.stack(tokens, 1).cpu(), torch.stack(statistics, 1).cpu()
    widen_supports(supports)
    support, support_log_p = (torch.stack([s[name] for s in supports], 1).cpu() for name in supports[0])
    later = torch.stack(step_features, 1).cpu() if step_features else prompt_features[:, :0].cpu()
    prompt_features = prompt_features.cpu()
    rows = []
    for row, prompt in enumerate(prompts):
        n = int(count[row])
        features = torch.cat([prompt_features[row, int(pad[row]) :], later[row, : n - 1]])
        log_p, entropy, p_max = statistics[row, :n].unbind(-1)
        ids_row = torch.tensor(prompt.ids)
        rows.append(
            Trajectory(
                prompt_id=prompt.prompt_id,
                task=prompt.task,
                prompt_ids=ids_row,
                response_ids=tokens[row, :n],
                log_p=log_p,
                entropy=entropy,
                p_max=p_max,
                support=support[row, :n],
                support_log_p=support_log_p[row, :n],
                features=features,
            )
        )
    return rows


def _save_shard(rows: list[Trajectory], folder: Path) -> None:
    from datasets import Dataset

    columns = {
        "prompt_id": [row.prompt_id for row in rows],
        "task": [row.task for row in rows],
        "prompt_ids": [row.prompt_ids.numpy().astype(np.int32) for row in rows],
        "response_ids": [row.response_ids.numpy().astype(np.int32) for row in rows],
        **{name: [getattr(row, name).numpy() for row in rows] for name in ("log_p", "entropy", "p_max")},
        "support": [row.support.numpy().astype(np.int32).ravel() for row in rows],
        "support_log_p": [row.support_log_p.numpy().ravel() for row in rows],
        "support_width": [row.support.shape[1] for row in rows],
        # Arrow has no bfloat16: the bits travel as int16.
        "features": [row.features.view(torch.int16).numpy().ravel() for row in rows],
        "feature_width": [row.features.shape[1] for row in rows],
    }
    with quiet_loading():
        Dataset.from_dict(columns).save_to_disk(folder)


def shard_generator(seed: int, shard: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one shard: independent of the shards before it."""
    state = np.random.SeedSequence([seed, shard]).generate_state(1, dtype=np.uint64)[0]
    return torch.Generator(device=device).manual_seed(int(state) & (2**63 - 1))


def sample_trajectories(
    target: Target,
    prompts: Sequence[EncodedPrompt],
    settings: SamplingSettings,
    folder: Path,
    *,
    max_new_tokens: int,
    taps: list[int],
    seed: int,
    batch_size: int = 64,
    description: str = "sampling",
    key: str = "",
) -> TrajectorySet:
    """Sample a response to every prompt into ``folder``, batched by length; continues where a killed run stopped.

    A folder begun with other arguments is refused; ``key`` is what they do not tell, such as a hash of the target.

    Raises:
        DBlastError: no prompts; the folder holds damaged shards, or another run's.
    """
    if not prompts:
        raise DBlastError("there are no prompts to sample responses to")
    check_whole("batch_size", batch_size, 1)
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    made_by = [key, settings, max_new_tokens, list(taps), seed, batch_size, list(prompts)]
    shards = Shards(folder, made_by, shards=len(batches), rows=len(prompts))
    with progress(len(prompts) * max_new_tokens, description, unit="token") as bar:
        for index, batch in enumerate(batches):
            shard = folder / f"shard-{index:05d}"
            if not shards.has(shard):
                rows = sample_batch(
                    target,
                    [prompts[i] for i in batch],
                    settings,
                    max_new_tokens=max_new_tokens,
                    taps=taps,
                    generator=shard_generator(seed, index, target.device),
                )
                shards.add(shard, lambda path, rows=rows: _save_shard(rows, path))
            bar.update(len(batch) * max_new_tokens)
    return TrajectorySet(folder)


class TrajectorySet:
    """Read access to stored trajectories, memory-mapped; ``set[i]`` is a :class:`Trajectory`.

    Raises:
        ArtefactError: shards are missing or damaged.
    """

    def __init__(self, folder: Path):
        from datasets import concatenate_datasets, load_from_disk

        self.folder = Path(folder)
        stored = Shards(self.folder)
        try:
            shards = [load_from_disk(path) for path in stored.paths("shard-{:05d}")]
            self._data = concatenate_datasets(shards).with_format("arrow")
            if len(self._data) != stored.record["rows"]:
                raise ArtefactError(f"{len(self._data)} rows, expected {stored.record['rows']}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtefactError(f"trajectories in {folder} are missing or damaged ({error}); delete it and rerun") from None

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Trajectory:
        row = self._data[int(index)]

        def one(name: str):
            return row.column(name)[0].as_py()

        def tensor(name: str, dtype: type) -> Tensor:
            # Arrow's own buffer, copied once: a list of Python numbers would take a hundred times longer.
            values = row.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
            return torch.from_numpy(np.array(values, dtype=dtype))

        width, support_width = int(one("feature_width")), int(one("support_width"))
        return Trajectory(
            prompt_id=one("prompt_id"),
            task=one("task"),
            prompt_ids=tensor("prompt_ids", np.int64),
            response_ids=tensor("response_ids", np.int64),
            **{name: tensor(name, np.float32) for name in ("log_p", "entropy", "p_max")},
            support=tensor("support", np.int64).view(-1, support_width),
            support_log_p=tensor("support_log_p", np.float32).view(-1, support_width),
            features=tensor("features", np.int16).view(torch.bfloat16).view(-1, width),
        )

    def __iter__(self) -> Iterator[Trajectory]:
        return (self[i] for i in range(len(self)))

    @property
    def nbytes(self) -> int:
        """Size of the stored rows in bytes."""
        return self._data.data.nbytes

    def labels(self) -> list[tuple[str, str]]:
        """Task and prompt id of every trajectory, without reading the features."""
        rows = self._data.with_format(None)
        return list(zip(rows["task"], rows["prompt_id"], strict=True))

    def prompts(self) -> list[tuple[int, ...]]:
        """Prompt token ids of every trajectory, without reading the features."""
        return [tuple(ids) for ids in self._data.with_format(None)["prompt_ids"]]

    def response_lengths(self) -> list[int]:
        """Number of response tokens per trajectory, without reading the features."""
        return [len(ids) for ids in self._data.with_format(None)["response_ids"]]


# -- anchors, packed into drafter passes -----------------------------------------------------------


def block_index(length: int, block_length: int) -> tuple[Tensor, Tensor]:
    """Which trajectory position each slot of each anchor's block is.

    Args:
        length: n, number of response tokens.
        block_length: b.

    Returns:
        ``(index, valid)`` of shape (n, b): the block drafted after a response
        tokens covers positions a .. a + b - 1; ``valid`` is False past the end.
    """
    index = torch.arange(length).unsqueeze(1) + torch.arange(block_length)
    valid = index < length
    return index.clamp(max=length - 1), valid


@dataclass
class AnchorBatch:
    """Packed blocks of several trajectories; B sequences, A anchors each, b slots, S context positions.

    Attributes:
        anchor_tokens, anchor_positions: (B, A).
        features: (B, S, m * H) tapped states, zero-padded.
        context_lengths: (B,) real context positions.
        tokens: (B * A, b) realised tokens after each anchor.
        log_p: (B * A, b) their log-probability under the target.
        valid: (B * A, b) False past the end of the trajectory.
        support, support_log_p: (B * A, b, W) what each token was drawn from (-inf: padding); None unless asked for.
    """

    anchor_tokens: Tensor
    anchor_positions: Tensor
    features: Tensor
    context_lengths: Tensor
    tokens: Tensor
    log_p: Tensor
    valid: Tensor
    support: Tensor | None = None
    support_log_p: Tensor | None = None

    def run(self, drafter: DBlastDrafter) -> DraftOutput:
        """The drafter's pass over these blocks."""
        return drafter(self.anchor_tokens, self.anchor_positions, self.features, self.context_lengths)

    def to(self, device: torch.device | str) -> AnchorBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if value is not None}
        return AnchorBatch(**moved)


def pack(
    trajectories: Sequence[Trajectory], anchors: Sequence[Tensor], block_length: int, with_support: bool = False
) -> AnchorBatch:
    """Pack chosen anchors of several trajectories into one pass.

    Args:
        trajectories: B of them.
        anchors: B index tensors of equal length A, numbers of emitted response tokens (0 <= a < n).
        block_length: b.
        with_support: also the distributions that the tokens were drawn from.
    """
    # Context of the furthest anchor: nothing at or after it is ever attended to.
    needed = [len(t.prompt_ids) + int(a.max()) - 1 for t, a in zip(trajectories, anchors, strict=True)]
    width = max(1, *needed)
    features = torch.zeros(len(trajectories), width, trajectories[0].features.shape[1], dtype=torch.bfloat16)
    supports = []
    rows = {name: [] for name in ("anchor_tokens", "anchor_positions", "tokens", "log_p", "valid")}
    for row, (trajectory, chosen) in enumerate(zip(trajectories, anchors, strict=True)):
        features[row, : needed[row]] = trajectory.features[: needed[row]]
        positions = len(trajectory.prompt_ids) + chosen - 1
        index, valid = block_index(len(trajectory.response_ids), block_length)
        rows["anchor_tokens"].append(trajectory.tokens[positions])
        rows["anchor_positions"].append(positions)
        rows["tokens"].append(trajectory.response_ids[index[chosen]])
        rows["log_p"].append(trajectory.log_p[index[chosen]])
        rows["valid"].append(valid[chosen])
        if with_support:
            names = ("support", "support_log_p")
            supports.append({name: getattr(trajectory, name)[index[chosen]] for name in names})
    if with_support:
        widen_supports(supports)
    return AnchorBatch(
        anchor_tokens=torch.stack(rows["anchor_tokens"]),
        anchor_positions=torch.stack(rows["anchor_positions"]),
        features=features,
        context_lengths=torch.tensor(needed),
        tokens=torch.cat(rows["tokens"]),
        log_p=torch.cat(rows["log_p"]),
        valid=torch.cat(rows["valid"]),
        **({name: torch.cat([part[name] for part in supports]) for name in supports[0]} if with_support else {}),
    )


def pack_first(trajectory: Trajectory, count: int, block_length: int, every: int = 1) -> AnchorBatch:
    """The first ``count`` anchors of one trajectory as one pass.

    With ``every`` above 1 they are the anchors after 0, ``every``, 2 ``every``, ... emitted tokens.
    """
    return pack([trajectory], [torch.arange(count) * every], block_length)
