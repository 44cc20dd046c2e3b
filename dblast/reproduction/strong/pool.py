"""Shards of text as training data: rows with their tapped states, a few shards in memory at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from dblast.errors import DBlastError
from dblast.reproduction.strong.text import Text, TextStore
from dblast.support.checks import check_whole
from dblast.targets import Target, tap_features
from dblast.training import AnchorSampler
from dblast.trajectories import AnchorBatch, Trajectory

#: Rows of one shard at most: position i of shard s is number ``s * ROWS + i``.
ROWS = 2**20
#: Texts that pass through the target together when states are recomputed.
TEXTS_AT_ONCE = 16


def _split(flat: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    return flat.split(lengths.tolist())


@torch.no_grad()
def tapped_states(target: Target, text: Text, taps: list[int]) -> Tensor:
    """States of every token but each row's last, (P + N - R, m * H) bfloat16, as sampling would have kept them.

    In bfloat16 they differ from those of the sampling pass by rounding.
    """
    prompts, responses = _split(text.prompts, text.prompt_lengths), _split(text.responses, text.response_lengths)
    rows = [torch.cat([p, r])[:-1].long() for p, r in zip(prompts, responses, strict=True)]
    states: list[Tensor | None] = [None] * len(rows)
    for some in torch.tensor([len(row) for row in rows]).argsort().split(TEXTS_AT_ONCE):
        chosen = [rows[i] for i in some.tolist()]
        # What is padded on the right is never seen.
        ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True).to(target.device)
        out = target.model.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        tapped = tap_features(out.hidden_states, taps).bfloat16().cpu()
        for i, features in zip(some.tolist(), tapped, strict=True):
            states[i] = features[: len(rows[i])]
    return torch.cat(states)


def trajectories(text: Text, states: Tensor, names: Sequence[str]) -> list[Trajectory]:
    """Rows of a shard; ``names`` are their prompt ids, "kind-...", ``states`` as in :func:`tapped_states`."""
    width = int(text.support_sizes.max())
    there = torch.arange(width) < text.support_sizes.unsqueeze(1)
    support = torch.zeros(there.shape, dtype=torch.long)
    log_p = torch.full(there.shape, float("-inf"))
    support[there], log_p[there] = text.support.long(), text.support_log_p
    n, p = text.response_lengths, text.prompt_lengths
    entropy, peak = torch.special.entr(log_p.exp()).sum(-1), log_p.amax(-1).exp()
    parts = (_split(value, n) for value in (text.responses.long(), text.log_p, entropy, peak, support, log_p))
    columns = zip(names, _split(text.prompts.long(), p), _split(states, n + p - 1), *parts, strict=True)
    return [
        Trajectory(name, name.split("-")[0], prompt, response, own, h, top, tokens, values, features)
        for name, prompt, features, response, own, h, top, tokens, values in columns
    ]


class Responses(Sequence[Trajectory]):
    """Rows of chosen shards by number (see :data:`ROWS`); as many shards are held in memory as ``window`` says."""

    def __init__(self, store: TextStore, shards: Sequence[int], target: Target, taps: list[int], window: int = 4):
        if not shards:
            raise DBlastError(f"no text in {store.folder}; sample some with `python -m dblast text`")
        check_whole("window", window, 1)
        self.store, self.shards, self.target, self.taps, self.window = store, list(shards), target, taps, window
        self.sizes = {shard: store.header(shard)["responses"] for shard in self.shards}
        self._held: OrderedDict[int, list[Trajectory]] = OrderedDict()

    def __len__(self) -> int:
        return sum(self.sizes.values())

    def shard(self, shard: int) -> list[Trajectory]:
        """All rows of a shard."""
        if shard not in self._held:
            header, text = self.store.read(shard)
            while len(self._held) >= self.window:
                self._held.popitem(last=False)
            states = self.store.states(shard, self.taps)
            states = tapped_states(self.target, text, self.taps) if states is None else states
            self._held[shard] = trajectories(text, states, header["ids"])
        return self._held[shard]

    def __getitem__(self, number: int) -> Trajectory:
        shard, row = divmod(number, ROWS)
        return self.shard(shard)[row]


class WindowSampler(AnchorSampler):
    """Training batches from a few shards at a time: every shard is opened once a pass, and each of its rows drawn
    ``visits`` times, with fresh anchors, while it is in memory."""

    def __init__(self, responses: Responses, *, visits: int, block_length: int, sequences: int, anchors: int,
                 generator: torch.Generator, with_support: bool):  # fmt: skip
        # The base class would read every row for its length; none is empty here.
        check_whole("visits", visits, 1)
        self.trajectories, self.visits = responses, visits
        self.block_length, self.sequences, self.anchors = block_length, sequences, anchors
        self.generator, self.with_support = generator, with_support
        self._order: list[int] = []
        if min(responses.sizes.values()) * visits < sequences:
            raise DBlastError(
                f"a shard of {min(responses.sizes.values())} responses is too small for steps of {sequences}"
            )

    def next(self) -> AnchorBatch:
        # Numbers of rows to draw, then shards still to open in this pass, as -1 - shard.
        while len(self._order) < self.sequences or self._order[self.sequences - 1] < 0:
            self._open()
        return super().next()

    def _open(self) -> None:
        waiting = [number for number in self._order if number < 0]
        if not waiting:
            shards = self.trajectories.shards
            waiting = [-1 - shards[i] for i in torch.randperm(len(shards), generator=self.generator).tolist()]
        opened, waiting = waiting[: self.trajectories.window], waiting[self.trajectories.window :]
        rows = [(-1 - s) * ROWS + i for s in opened for i in range(self.trajectories.sizes[-1 - s])]
        # Rows that did not fill a step are dropped: with the next ones, more shards would be open than fit.
        drawn = [
            rows[i] for _ in range(self.visits) for i in torch.randperm(len(rows), generator=self.generator).tolist()
        ]
        self._order = drawn + waiting
