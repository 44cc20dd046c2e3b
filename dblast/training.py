"""Training a drafter on stored trajectories: optimiser, schedule, checkpoints and resume."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dblast.backbone import DBlastConfig
from dblast.drafter import DBlastDrafter
from dblast.errors import ArtefactError, DBlastError
from dblast.losses import AL_CONSTRUCTIONS, get_loss
from dblast.support.checks import check_number, check_whole
from dblast.support.progress import progress
from dblast.support.states import below, read_state, write_state
from dblast.targets import Target
from dblast.trajectories import AnchorBatch, Trajectory, TrajectorySet, pack


def new_drafter(config: DBlastConfig, target: Target, seed: int) -> DBlastDrafter:
    """A random float32 drafter on its target's device, not attached yet; the global seed is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = DBlastDrafter(config)
    return drafter.to(device=target.device, dtype=torch.float32)


def tap_scales(trajectories: Iterable[Trajectory], taps: int, positions: int = 4096) -> torch.Tensor:
    """Median root-mean-square of every tapped layer over positions, (m,).

    The median, because a sequence's first token is orders of magnitude larger; of the positions that have
    a size, because a padding token's embedding is zero, and so may be all of its states.

    Raises:
        DBlastError: a tap is zero everywhere, or infinite at most positions.
    """
    rows, seen = [], 0
    for trajectory in trajectories:
        rows.append(trajectory.features.float().view(len(trajectory.features), taps, -1).square().mean(-1).sqrt())
        seen += len(trajectory.features)
        if seen >= positions:
            break
    sizes = torch.cat(rows)
    scales = sizes.masked_fill(sizes == 0, float("nan")).nanmedian(dim=0).values
    if not torch.isfinite(scales).all():
        raise DBlastError(f"tapped states have no usable size (medians {scales.tolist()}); choose other taps or check the target")
    return scales


def start_from_target(
    drafter: DBlastDrafter, target: Target, scales: torch.Tensor, layers: Sequence[int] | None = None
) -> DBlastDrafter:
    """Copy target layers and final norm into the drafter and let ``fc`` average the scaled taps.

    Args:
        scales: (m,) typical size of every tap, from :func:`tap_scales`; taps
            enter the average at unit size.
        layers: target layers to copy, one per draft layer (default: the last ones).

    Raises:
        DBlastError: layer shapes differ, or a layer does not exist.
    """
    config = drafter.config
    base = target.model.model
    count = len(base.layers)
    layers = list(layers or range(count - config.num_hidden_layers, count))
    if len(layers) != config.num_hidden_layers or any(not 0 <= i < count for i in layers):
        raise DBlastError(f"need {config.num_hidden_layers} target layers in 0..{count - 1} to start from, got {layers}")
    with torch.no_grad():
        for ours, index in zip(drafter.layers, layers, strict=True):
            source = {name: value.float() for name, value in base.layers[index].state_dict().items()}
            try:
                missing = ours.load_state_dict(source, strict=False)
            except RuntimeError as error:
                reason = str(error).splitlines()[-1].strip()
                raise DBlastError(f"target layer {index} does not fit the drafter: {reason}") from error
            if missing.unexpected_keys:
                raise DBlastError(f"target layer {index} has parameters the drafter lacks: {missing.unexpected_keys}")
        drafter.norm.weight.copy_(base.norm.weight)
        h, taps = config.hidden_size, len(config.target_layer_ids)
        eye = torch.eye(h, device=drafter.fc.weight.device)
        drafter.fc.weight.copy_(torch.cat([eye / (taps * scale) for scale in scales.tolist()], dim=1))
    return drafter


def frequent_tokens(trajectories: Iterable[Trajectory], size: int, vocab_size: int) -> torch.Tensor:
    """The ``size`` most frequent response tokens, ascending ids: a draft vocabulary.

    Ties, and places left when fewer tokens occur, go to the smaller id.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for trajectory in trajectories:
        counts += torch.bincount(trajectory.response_ids, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


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
        if isinstance(trajectories, TrajectorySet):
            lengths = trajectories.response_lengths()
        else:
            lengths = [len(trajectory.response_ids) for trajectory in trajectories]
        #: Trajectories that have an anchor.
        self._usable = [i for i, length in enumerate(lengths) if length]
        if not self._usable:
            what = f"all {len(lengths)} responses are empty" if lengths else "there are no trajectories"
            raise DBlastError(f"nothing to train on: {what}; sample some with sample_trajectories")

    def state(self) -> dict:
        return {"order": list(self._order), "generator": self.generator.get_state()}

    def load_state(self, state: dict) -> None:
        self._order = list(state["order"])
        self.generator.set_state(state["generator"])

    def next(self) -> AnchorBatch:
        while len(self._order) < self.sequences:
            shuffled = torch.randperm(len(self._usable), generator=self.generator).tolist()
            self._order += [self._usable[i] for i in shuffled]
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


OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that determines a training run, given its data and its start.

    Attributes:
        loss: one of :data:`dblast.losses.LOSSES`.
        construction, tau: of the AL loss (Table 4, eq. 15), and of "TRUNC".
        steps: optimiser steps.
        optimizer: "adamw" (the paper's Adam), or "muon": orthogonalised momentum
            (Jordan et al., 2024) for weight matrices, AdamW for everything else.
        learning_rate, warmup_ratio, max_norm: AdamW without weight decay, linear
            warm-up, cosine decay to zero, gradient clipping (Table 8).
        matrix_learning_rate: Muon's, on the same schedule.
        sequences, anchors: trajectories per step and anchors per trajectory.
        seed: order of data.
        precision: "float32", or "bfloat16" for autocast (losses stay float32).
        evaluate_every, checkpoint_every: steps between curve points and between checkpoints.

    Raises:
        DBlastError: unknown loss, construction or precision, or a count below one.
    """

    loss: str = "NLL"
    construction: str = "all_prefixes"
    tau: float = 0.1
    steps: int = 400
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    matrix_learning_rate: float = 0.02
    warmup_ratio: float = 0.04
    max_norm: float = 1.0
    sequences: int = 4
    anchors: int = 32
    seed: int = 0
    precision: str = "float32"
    evaluate_every: int = 100
    checkpoint_every: int = 25

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, str) and not isinstance(value, str):
                raise DBlastError(f"{field.name} must be a word, got {value!r:.60}")
            if isinstance(value, np.generic):  # which JSON does not know
                object.__setattr__(self, field.name, value.item())
        get_loss(self.loss)
        if self.construction not in AL_CONSTRUCTIONS:
            raise DBlastError(f"unknown AL construction {self.construction!r}; known: {', '.join(AL_CONSTRUCTIONS)}")
        if self.precision not in ("float32", "bfloat16"):
            raise DBlastError(f"precision must be float32 or bfloat16, got {self.precision!r}")
        if self.optimizer not in OPTIMIZERS:
            raise DBlastError(f"unknown optimizer {self.optimizer!r}; known optimizers: {', '.join(OPTIMIZERS)}")
        for name in ("steps", "sequences", "anchors", "evaluate_every", "checkpoint_every"):
            check_whole(name, getattr(self, name), 1)
        check_whole("seed", self.seed, 0)
        for name in ("learning_rate", "matrix_learning_rate", "max_norm"):
            check_number(name, getattr(self, name))
            if getattr(self, name) <= 0:
                raise DBlastError(f"{name} must be positive, got {getattr(self, name)}")
        check_number("tau", self.tau, 0)
        check_number("warmup_ratio", self.warmup_ratio, 0)
        if self.warmup_ratio > 1:
            raise DBlastError(f"warmup_ratio must be at most 1, got {self.warmup_ratio}")

    @property
    def blocks_per_step(self) -> int:
        """Draft blocks (anchors) of one step."""
        return self.sequences * self.anchors


def learning_rate_factor(step: int, config: TrainingConfig) -> float:
    """Linear warm-up over ``warmup_ratio`` of the steps, then cosine to zero."""
    warmup = max(1, round(config.warmup_ratio * config.steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, config.steps - warmup)))


def batch_loss(
    drafter: DBlastDrafter, batch: AnchorBatch, config: TrainingConfig, loss: Callable[..., torch.Tensor] | None = None
) -> torch.Tensor:
    """The configured loss (or ``loss``, see :func:`train`) on one packed batch, a scalar with gradient."""
    return loss_and_coverage(drafter, batch, config, loss)[0]


def loss_and_coverage(
    drafter: DBlastDrafter, batch: AnchorBatch, config: TrainingConfig, loss: Callable[..., torch.Tensor] | None = None
) -> tuple[torch.Tensor, float]:
    """:func:`batch_loss`, and the share of the batch's positions that it is over.

    A block ends before the first token that the drafter cannot draft (one outside its draft vocabulary): no
    prefix with that token is ever accepted, and no parameter changes that. It is left out of every loss.
    """
    settings = {} if loss else {"tau": config.tau, "construction": config.construction}
    loss = loss or get_loss(config.loss)
    distills = getattr(loss, "needs_support", False)
    # (N, b): all branches have one vocabulary.
    drafted = (batch.valid & drafter.drafts(batch.tokens)).cumprod(-1).bool()
    tokens = batch.tokens.unsqueeze(-1)
    if distills:
        # One product for the sampled token and for all that it was drawn from.
        tokens = torch.cat([tokens, batch.support], dim=-1)
    with drafter.in_precision(getattr(torch, config.precision)):
        out = batch.run(drafter)
        # Slots that no loss is over never reach the head; their log q stands as 0.
        hidden = out.branch_hidden.transpose(1, 2)[drafted].unsqueeze(2)
        log_q = drafter.log_q(hidden, tokens[drafted].unsqueeze(1)).squeeze(2)
    filled = log_q.new_zeros(*drafted.shape, *log_q.shape[1:]).index_put((drafted,), log_q).transpose(1, 2)
    if distills:
        settings |= {"log_q_candidates": filled[..., 1:], "log_p_candidates": batch.support_log_p}
    value = loss(filled[..., 0], out.log_prior(), batch.log_p, drafted, **settings)
    return value, drafted.sum().item() / batch.valid.sum().item()


def make_optimizers(drafter: DBlastDrafter, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """The run's optimisers; each group remembers its peak rate as ``peak``."""
    parameters = list(drafter.parameters())
    matrices = [p for p in parameters if p.ndim == 2] if config.optimizer == "muon" else []
    taken = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in taken]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=config.learning_rate, weight_decay=0.0, fused=True)]
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=config.matrix_learning_rate, weight_decay=0.0))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


class Trainer:
    """One run: model, optimiser, schedule and data order, with a state that can be stored and restored."""

    def __init__(
        self,
        drafter: DBlastDrafter,
        trajectories: Sequence[Trajectory],
        config: TrainingConfig,
        loss: Callable[..., torch.Tensor] | None = None,
    ):
        self.drafter, self.config, self.loss, self.step = drafter, config, loss, 0
        self.optimizers = make_optimizers(drafter, config)
        self.sampler = AnchorSampler(
            trajectories,
            block_length=drafter.config.block_length,
            sequences=config.sequences,
            anchors=config.anchors,
            generator=torch.Generator().manual_seed(config.seed),
            with_support=getattr(loss or get_loss(config.loss), "needs_support", False),
        )
        self.history: list[dict] = []
        self.recent: list[tuple[float, float]] = []  # loss and coverage of the steps since the last point of the history

    def advance(self) -> float:
        """One optimiser step; returns the loss."""
        factor = learning_rate_factor(self.step, self.config)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * factor
        self.drafter.train()
        batch = self.sampler.next().to(self.drafter.device)
        loss, coverage = loss_and_coverage(self.drafter, batch, self.config, self.loss)
        self.drafter.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.max_norm)
        if not torch.isfinite(norm):
            raise DBlastError(
                f"gradient is not finite at step {self.step} (loss {loss.item():.3g}); lower the learning rate"
            )
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.recent.append((loss.item(), coverage))
        return loss.item()

    def save(self, path: Path, key: str = "") -> None:
        """Store everything a later run needs to go on as if it had never stopped."""
        tensors = {f"model.{name}": value for name, value in self.drafter.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, entries in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{name}": value for name, value in entries.items()}
        order, generator = self.sampler.state().values()
        tensors |= {"sampler.order": torch.tensor(order, dtype=torch.long), "sampler.generator": generator}
        header = {"config": dataclasses.asdict(self.config), "key": key, "step": self.step}
        write_state(path, header | {"history": self.history, "recent": self.recent}, tensors)

    def load(self, path: Path, key: str = "") -> None:
        """Restore :meth:`save`'s state.

        Raises:
            ArtefactError: the file is damaged or belongs to another configuration, drafter or ``key``.
        """
        header, tensors = read_state(path)
        if header["config"] != dataclasses.asdict(self.config):
            raise ArtefactError(f"checkpoint {path} belongs to another training configuration; use another folder")
        if header["key"] != key:
            raise ArtefactError(f"checkpoint {path} belongs to another run; delete it and rerun")
        try:
            self.drafter.load_state_dict(below("model.", tensors))
        except RuntimeError as error:
            raise ArtefactError(f"checkpoint {path} is of a drafter of another shape; use another folder") from error
        for number, optimizer in enumerate(self.optimizers):
            state: dict[int, dict] = {}
            for name, value in below(f"optimizer.{number}.", tensors).items():
                index, entry = name.split(".", 1)
                state.setdefault(int(index), {})[entry] = value
            # Groups follow from the configuration.
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        self.sampler.load_state({"order": tensors["sampler.order"].tolist(), "generator": tensors["sampler.generator"]})
        self.step, self.history, self.recent = header["step"], header["history"], header["recent"]

    def record(self, evaluate: Callable[[DBlastDrafter], dict] | None) -> None:
        """Add a point to the history."""
        # Plain means over steps; NaN before the first one.
        loss, coverage = (sum(v) / len(v) for v in zip(*self.recent, strict=True)) if self.recent else (math.nan,) * 2
        # Plain numbers: NumPy's are no JSON.
        measured = {name: float(value) for name, value in (evaluate(self.drafter) if evaluate else {}).items()}
        if self.drafter.config.draft_vocab_size:
            measured["coverage"] = coverage
        self.history.append({"step": self.step, "loss": loss, **measured})
        self.recent = []


def train(
    drafter: DBlastDrafter,
    trajectories: Sequence[Trajectory],
    config: TrainingConfig,
    folder: Path,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    evaluate: Callable[[DBlastDrafter], dict] | None = None,
    stop_after: int | None = None,
    description: str = "training",
    key: str = "",
) -> list[dict]:
    """Train in place; resumes from ``folder/state.safetensors`` if it is there.

    Args:
        drafter: attached to its target.
        trajectories: training data, held in memory.
        loss: a loss of one's own instead of ``config.loss``: ``loss(log_q, log_prior, log_p, valid)`` as in
            :mod:`dblast.losses`; with an attribute ``needs_support`` that is True it is also handed the candidates.
        evaluate: called every ``evaluate_every`` steps and at both ends; its
            entries join that point of the history.
        stop_after: stop (and store) after this many steps in all, to be resumed later.
        key: what tells this run from others of the same configuration; a state of another one is refused.

    Returns:
        The history: dicts with ``step``, ``loss`` (mean since the last point) and what ``evaluate`` gave; with a
        draft vocabulary also ``coverage``, the share of positions that the loss is over.
    """
    trainer = Trainer(drafter, trajectories, config, loss)
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "state.safetensors"
    if state.exists():
        trainer.load(state, key)
    last = config.steps if stop_after is None else min(stop_after, config.steps)

    if not trainer.history:
        trainer.record(evaluate)
    blocks = config.blocks_per_step
    with progress(config.steps * blocks, description, unit="anchor", initial=trainer.step * blocks) as bar:
        while trainer.step < last:
            value = trainer.advance()
            bar.update(blocks)
            bar.set_postfix(loss=f"{value:.3f}", refresh=False)
            if trainer.step % config.evaluate_every == 0 or trainer.step == config.steps:
                trainer.record(evaluate)
            if trainer.step % config.checkpoint_every == 0 and trainer.step < last:
                trainer.save(state, key)
    trainer.save(state, key)
    drafter.eval()
    return trainer.history
