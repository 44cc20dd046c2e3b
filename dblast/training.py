"""Training a drafter on stored trajectories: optimiser, schedule, checkpoints and resume."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dblast.anchors import AnchorBatch, AnchorSampler
from dblast.drafter import DBlastDrafter
from dblast.errors import ArtefactError, DBlastError
from dblast.losses import AL_CONSTRUCTIONS, LOSSES, training_loss
from dblast.objectives import OBJECTIVES, REALISED
from dblast.progress import progress
from dblast.trajectories import Trajectory


OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that determines a training run, given its data and its start.

    Attributes:
        loss: "CE" (DFlash's decayed cross-entropy), "NLL", "AL", or one of
            :data:`dblast.objectives.OBJECTIVES`, other papers' objectives.
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
        if self.loss not in (*LOSSES, *OBJECTIVES):
            raise DBlastError(f"unknown loss {self.loss!r}; known losses: {', '.join((*LOSSES, *OBJECTIVES))}")
        if self.construction not in AL_CONSTRUCTIONS:
            raise DBlastError(f"unknown AL construction {self.construction!r}; known: {', '.join(AL_CONSTRUCTIONS)}")
        if self.precision not in ("float32", "bfloat16"):
            raise DBlastError(f"precision must be float32 or bfloat16, got {self.precision!r}")
        if self.optimizer not in OPTIMIZERS:
            raise DBlastError(f"unknown optimizer {self.optimizer!r}; known optimizers: {', '.join(OPTIMIZERS)}")
        for name in ("steps", "sequences", "anchors", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise DBlastError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "matrix_learning_rate"):
            if not getattr(self, name) > 0:
                raise DBlastError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def blocks_per_step(self) -> int:
        """Draft blocks (anchors) of one step."""
        return self.sequences * self.anchors

    @property
    def distills(self) -> bool:
        """Whether the loss compares whole distributions, recorded in the trajectories, rather than the sampled tokens."""
        return self.loss in OBJECTIVES and self.loss not in REALISED


def learning_rate_factor(step: int, config: TrainingConfig) -> float:
    """Linear warm-up over ``warmup_ratio`` of the steps, then cosine to zero."""
    warmup = max(1, round(config.warmup_ratio * config.steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, config.steps - warmup)))


def batch_loss(drafter: DBlastDrafter, batch: AnchorBatch, config: TrainingConfig) -> torch.Tensor:
    """The configured objective on one packed batch, a scalar with gradient."""
    with drafter.in_precision(getattr(torch, config.precision)):
        out = batch.run(drafter)
        tokens = batch.tokens
        if config.distills:
            # One product for the sampled token and for all that it was drawn from.
            tokens = torch.cat([tokens.unsqueeze(-1), batch.support], dim=-1)
        log_q = drafter.log_q(out.branch_hidden, tokens)
    settings = {"tau": config.tau, "construction": config.construction}
    if config.distills:
        settings |= {"log_q_candidates": log_q[..., 1:], "log_p_candidates": batch.support_log_p}
        log_q = log_q[..., 0]
    inputs = (log_q, out.log_prior(), batch.log_p, batch.valid)
    if config.loss in OBJECTIVES:
        return OBJECTIVES[config.loss](*inputs, **settings)
    return training_loss(config.loss, *inputs, **settings)


def _write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    scratch = path.with_name(path.name + ".part")
    write(scratch)
    os.replace(scratch, path)


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

    def __init__(self, drafter: DBlastDrafter, trajectories: Sequence[Trajectory], config: TrainingConfig):
        self.drafter, self.config, self.step = drafter, config, 0
        self.optimizers = make_optimizers(drafter, config)
        self.sampler = AnchorSampler(
            trajectories,
            block_length=drafter.config.block_length,
            sequences=config.sequences,
            anchors=config.anchors,
            generator=torch.Generator().manual_seed(config.seed),
            with_support=config.distills,
        )
        self.history: list[dict] = []
        self.recent: list[float] = []  # losses since the last point of the history

    def advance(self) -> float:
        """One optimiser step; returns the loss."""
        factor = learning_rate_factor(self.step, self.config)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * factor
        self.drafter.train()
        loss = batch_loss(self.drafter, self.sampler.next().to(self.drafter.device), self.config)
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
        return loss.item()

    def save(self, path: Path) -> None:
        """Store everything a later run needs to go on as if it had never stopped."""
        state = {
            "config": json.dumps(dataclasses.asdict(self.config), sort_keys=True),
            "step": self.step,
            "model": self.drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "sampler": self.sampler.state(),
            "history": self.history,
            "recent": self.recent,
        }
        _write_atomically(path, lambda scratch: torch.save(state, scratch))

    def load(self, path: Path) -> None:
        """Restore :meth:`save`'s state.

        Raises:
            ArtefactError: the file is damaged or belongs to another configuration or drafter.
        """
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:  # torch raises many kinds for a cut-off file
            raise ArtefactError(f"checkpoint {path} is damaged ({type(error).__name__}); delete it and rerun") from error
        ours = json.dumps(dataclasses.asdict(self.config), sort_keys=True)
        if not isinstance(state, dict) or state.get("config") != ours:
            raise ArtefactError(f"checkpoint {path} belongs to another training configuration; use another folder")
        try:
            self.drafter.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ArtefactError(f"checkpoint {path} is of a drafter of another shape; use another folder") from error
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        self.sampler.load_state(state["sampler"])
        self.step, self.history, self.recent = state["step"], state["history"], state["recent"]

    def record(self, evaluate: Callable[[DBlastDrafter], dict] | None) -> None:
        """Add a point to the history."""
        mean = sum(self.recent) / len(self.recent) if self.recent else float("nan")
        # Plain numbers: NumPy's would be stored as objects, which loading a checkpoint refuses.
        measured = {name: float(value) for name, value in (evaluate(self.drafter) if evaluate else {}).items()}
        self.history.append({"step": self.step, "loss": mean, **measured})
        self.recent = []


def train(
    drafter: DBlastDrafter,
    trajectories: Sequence[Trajectory],
    config: TrainingConfig,
    folder: Path,
    *,
    evaluate: Callable[[DBlastDrafter], dict] | None = None,
    stop_after: int | None = None,
    description: str = "training",
) -> list[dict]:
    """Train in place; resumes from ``folder/state.pt`` if it is there.

    Args:
        drafter: attached to its target.
        trajectories: training data, held in memory.
        evaluate: called every ``evaluate_every`` steps and at both ends; its
            entries join that point of the history.
        stop_after: stop (and store) after this many steps in all, to be resumed later.

    Returns:
        The history: dicts with ``step``, ``loss`` (mean since the last point) and what ``evaluate`` gave.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "state.pt"
    trainer = Trainer(drafter, trajectories, config)
    if state.exists():
        trainer.load(state)
    last = config.steps if stop_after is None else min(stop_after, config.steps)

    if not trainer.history:
        trainer.record(evaluate)
    blocks = config.blocks_per_step
    with progress(config.steps * blocks, description, unit="anchor", initial=trainer.step * blocks) as bar:
        while trainer.step < last:
            trainer.recent.append(trainer.advance())
            bar.update(blocks)
            bar.set_postfix(loss=f"{trainer.recent[-1]:.3f}", refresh=False)
            if trainer.step % config.evaluate_every == 0 or trainer.step == config.steps:
                trainer.record(evaluate)
            if trainer.step % config.checkpoint_every == 0 and trainer.step < last:
                trainer.save(state)
    trainer.save(state)
    drafter.eval()
    return trainer.history
