"""Anchors of stored trajectories, packed into drafter passes.

After a response tokens have been emitted, the anchor is the last emitted token
(the prompt's last one for a = 0), at position P + a - 1, and its block is
x_{a} .. x_{a+b-1}: slot k is labelled with the k-th token after the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter, DraftOutput
from dblast.replay import block_index
from dblast.trajectories import Trajectory, widen_supports


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


#: Anchors of one trajectory that attend in one packed row when all are scored. The mask hides blocks from each
#: other, but their attention is computed all the same, and grows with the square of this number.
ANCHORS_PER_ROW = 24


def pack_first(trajectory: Trajectory, count: int, block_length: int, every: int = 1) -> AnchorBatch:
    """The first ``count`` anchors of one trajectory as one pass; the last is repeated to fill the pass's rows.

    With ``every`` above 1 they are the anchors after 0, ``every``, 2 ``every``, ... emitted tokens.

    What the pass gives holds the wanted anchors in its first ``count`` blocks.
    """
    rows = -(-count // ANCHORS_PER_ROW)
    anchors = torch.arange(rows * -(-count // rows)).clamp(max=count - 1).view(rows, -1) * every
    return pack([trajectory] * rows, list(anchors), block_length)


class AnchorSampler:
    """Draws training batches: trajectories uniformly over passes, anchors uniformly inside each.

    Every pass visits each trajectory once in a fresh order. All randomness comes
    from the one generator, whose state a checkpoint can store together with
    :meth:`state`.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        *,
        block_length: int,
        sequences: int,
        anchors: int,
        generator: torch.Generator,
        with_support: bool = False,
    ):
        # Kept as given: a list in memory is fast, a TrajectorySet reads rows from disk as they are drawn.
        self.trajectories = trajectories
        self.block_length, self.sequences, self.anchors = block_length, sequences, anchors
        self.generator, self.with_support = generator, with_support
        self._order: list[int] = []

    def state(self) -> dict:
        return {"order": list(self._order), "generator": self.generator.get_state()}

    def load_state(self, state: dict) -> None:
        self._order = list(state["order"])
        self.generator.set_state(state["generator"])

    def next(self) -> AnchorBatch:
        while len(self._order) < self.sequences:
            self._order += torch.randperm(len(self.trajectories), generator=self.generator).tolist()
        chosen, self._order = self._order[: self.sequences], self._order[self.sequences :]
        trajectories = [self.trajectories[i] for i in chosen]
        anchors = []
        for trajectory in trajectories:
            n = len(trajectory.response_ids)
            order = torch.randperm(n, generator=self.generator)
            # Short responses repeat anchors rather than shrink the whole batch.
            repeats = -(-self.anchors // n)
            anchors.append(order.repeat(repeats)[: self.anchors])
        return pack(trajectories, anchors, self.block_length, self.with_support)
