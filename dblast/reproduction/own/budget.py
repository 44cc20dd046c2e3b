"""How much text and how many steps fit into a time: measured for some seconds, then reckoned."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.replay import score
from dblast.reproduction.experiments import taps as tapped_layers
from dblast.reproduction.initialise import start_drafter
from dblast.reproduction.own.evaluation import DEFAULT_PROPOSALS
from dblast.reproduction.own.speed import TIMED_PROMPTS, TIMED_TOKENS, decoding_speed
from dblast.reproduction.plans import Plan
from dblast.reproduction.prompts.own import FEWEST
from dblast.reproduction.prompts.plan import evaluation_prompts, training_prompt_ids
from dblast.sampling import SETTINGS, get_setting
from dblast.targets import Target
from dblast.training import Trainer, TrainingConfig
from dblast.trajectories import sample_batch, shard_generator

#: Shares of the time: evaluation (sampling and scoring), pre-training and its text, fine-tuning and its text.
#: What is left over is for loading, checkpoints and the report.
EVALUATION, PRETRAINING, FINETUNING = 0.15, 0.60, 0.17
#: Share of the time to time decoding, and the fewest tokens of an answer that tell something.
TIMING, FEWEST_TIMED = 0.05, 8
#: Anchors trained on for every sampled token: as many as made the drafters of this repository.
PRETRAINING_ANCHORS, FINETUNING_ANCHORS = 1.75, 1.0
#: A budget is refused below this many steps of either training and answers to train on.
FEWEST_STEPS, FEWEST_ANSWERS = 10, 16
#: Text of a training set is worth this many passes at most, whatever the time left.
MOST_ANSWERS = 200_000
#: Seconds of work that a kill may cost.
CHECKPOINT_SECONDS = 20.0
#: Of this, the share of the free disk that trajectories may take.
DISK_SHARE = 0.6


@dataclass(frozen=True)
class Speeds:
    """Seconds that this machine takes.

    Attributes:
        token: per token of an answer's budget, many answers at a time.
        pretraining, finetuning: per optimiser step.
        scoring: per token replayed, all proposals at one category temperature.
        start: once, for these measurements.
        timing: per token of the answers that are decoded to time it, with the drafters and without, all of them.
    """

    token: float
    pretraining: float
    finetuning: float
    scoring: float
    start: float
    timing: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """What a run does; stored when it first starts, so that it goes on with the same after a kill."""

    pretraining_answers: int
    pretraining_steps: int
    finetuning_answers: int
    finetuning_steps: int
    evaluation_per_task: int
    pretraining_checkpoint: int
    finetuning_checkpoint: int
    timed_tokens: int = TIMED_TOKENS


def _timed_steps(drafter: DBlastDrafter, rows: list, config: TrainingConfig, steps: int = 2) -> float:
    """Seconds of a training step, after one to warm up."""
    trainer = Trainer(drafter, rows, config)
    trainer.advance()
    start = time.perf_counter()
    for _ in range(steps):
        trainer.advance()
    return (time.perf_counter() - start) / steps


def measure(plan: Plan, target: Target, tokens: int = 32) -> Speeds:
    """Sample a little, train a little, score a little."""
    begin = time.perf_counter()
    settings = get_setting(plan.data.training_setting)
    prompts = training_prompt_ids(replace(plan, data=replace(plan.data, training_prompts=plan.data.batch_size)), target)
    layers = tapped_layers(plan, target)
    tokens = min(tokens, plan.data.training_tokens)

    def sample(count: int) -> list:
        generator = shard_generator(plan.data.seed, 2**20, target.device)
        return sample_batch(target, prompts, settings, max_new_tokens=count, taps=layers, generator=generator)

    sample(2)
    start = time.perf_counter()
    rows = sample(tokens)
    # Every step runs all rows, those that have ended included.
    steps = max(len(row.response_ids) for row in rows)
    token = (time.perf_counter() - start) / (steps * len(rows))
    # Answers that end at once have nothing to train on.
    rows = [row for row in rows if len(row.response_ids) > 1] or rows
    drafter = start_drafter(plan.drafter, target, rows, layers)
    pretraining = _timed_steps(drafter, rows, plan.pretrain) if plan.drafter.pretrained_here else 0.0
    variant = plan.variants[0]
    ours = drafter.with_categories(variant.K, 0)
    finetuning = _timed_steps(ours, rows, plan.finetune_config(variant, 0))
    some, precision = rows[:4], getattr(torch, plan.finetune.precision)
    score(ours, some[:1], proposal="tree", precision=precision)  # warms up
    start = time.perf_counter()
    for proposal in DEFAULT_PROPOSALS:
        score(ours, some, proposal=proposal, precision=precision)
    scoring = (time.perf_counter() - start) / sum(len(row.response_ids) for row in some)
    timed = decoding_speed(target, ours, [list(prompts[0].ids)], {}, min(tokens, 8), names=("medium",)).iloc[0]
    # The start drafter and ours.
    timing = 2 * len(SETTINGS) * TIMED_PROMPTS * (1 / timed.drafted + 1 / timed.plain)
    return Speeds(token, pretraining, finetuning, scoring, time.perf_counter() - begin, timing)


def _training(
    seconds: float, speeds: Speeds, config: TrainingConfig, step: float, tokens: int, per_token: float, most: int
) -> tuple[int, int]:
    """Answers and steps that fill a time together, at ``per_token`` anchors for every token."""
    per_answer = tokens * (speeds.token + per_token * step / config.blocks_per_step)
    answers = int(min(seconds / per_answer, most))
    return answers, round(answers * tokens * per_token / config.blocks_per_step)


def choose_sizes(plan: Plan, target: Target, speeds: Speeds, seconds: float, disk: float, token_bytes: int) -> Sizes:
    """Sizes that fill ``seconds``.

    A short time is exceeded, rather than more than half of it kept from training: :data:`FEWEST` prompts of every
    task are evaluated, and some decoded to time it, whatever the time.

    Args:
        disk: bytes that the trajectories may take.

    Raises:
        DBlastError: the time or the disk is too short for anything worth having.
    """
    data, prompts = plan.data, evaluation_prompts(plan, target)
    prompt = max(1, sum(len(p.ids) for p in prompts) // max(1, len(prompts)))
    answer_bytes = token_bytes * (data.training_tokens + prompt)
    most = min(MOST_ANSWERS, int(DISK_SHARE * disk / answer_bytes))
    tasks = len({p.task for p in prompts})
    # Sampled once for every setting; scored at one category temperature, a tenth at all of them, the start drafter too.
    per_prompt = len(data.settings) * data.evaluation_tokens * (speeds.token + 3 * speeds.scoring)
    fewest = FEWEST * tasks * per_prompt
    timed = int(
        min(max(TIMING * seconds / max(speeds.timing, 1e-9), FEWEST_TIMED), TIMED_TOKENS, data.evaluation_tokens)
    )
    fixed = speeds.start + timed * speeds.timing + max(0.0, fewest - EVALUATION * seconds)
    left = max(seconds - fixed, seconds / 2)
    begin = PRETRAINING if plan.drafter.pretrained_here else 0.0
    shares = PRETRAINING + FINETUNING - begin
    answers, steps = (0, 0)
    if begin:
        answers, steps = _training(
            begin * left, speeds, plan.pretrain, speeds.pretraining, data.training_tokens, PRETRAINING_ANCHORS, most
        )
    fine_answers, fine_steps = _training(
        shares * left,
        speeds,
        plan.finetune,
        speeds.finetuning,
        data.training_tokens,
        FINETUNING_ANCHORS,
        max(1, most // 4),
    )
    per_task = max(FEWEST, int(EVALUATION * left / per_prompt / tasks))
    if min(fine_steps, steps if begin else FEWEST_STEPS) < FEWEST_STEPS or fine_answers < FEWEST_ANSWERS:
        if fine_answers >= max(1, most // 4) or (begin and answers >= most):
            raise DBlastError(
                f"the cache has room for {most} answers only; free some disk, or set DBLAST_CACHE to a larger one"
            )
        factor = FEWEST_STEPS / max(1, min(fine_steps, steps if begin else fine_steps))
        need = left * max(factor, FEWEST_ANSWERS / max(1, fine_answers))
        need = min(2 * need, need + speeds.start + timed * speeds.timing + fewest)
        raise DBlastError(
            f"{seconds / 3600:g} hours are too short on this machine for {FEWEST_STEPS} steps and {FEWEST_ANSWERS} "
            f"answers to train on; give at least --hours {max(1.2 * need, 60) / 3600:.2g}"
        )
    return Sizes(
        pretraining_answers=answers,
        pretraining_steps=steps,
        finetuning_answers=fine_answers,
        finetuning_steps=fine_steps,
        evaluation_per_task=min(per_task, 10_000),
        timed_tokens=timed,
        pretraining_checkpoint=max(1, round(CHECKPOINT_SECONDS / max(speeds.pretraining, 1e-6))) if begin else 1,
        finetuning_checkpoint=max(1, round(CHECKPOINT_SECONDS / max(speeds.finetuning, 1e-6))),
    )


def with_sizes(plan: Plan, sizes: Sizes) -> Plan:
    """The plan that does what the sizes say."""
    data = replace(plan.data, training_prompts=sizes.finetuning_answers, evaluation_per_task=sizes.evaluation_per_task)
    pretrain, pretrain_data = plan.pretrain, None
    if plan.drafter.pretrained_here:
        pretrain_data = replace(data, training_setting="high", training_prompts=sizes.pretraining_answers)
        pretrain = _with_steps(plan.pretrain, sizes.pretraining_steps, sizes.pretraining_checkpoint)
    finetune = _with_steps(plan.finetune, sizes.finetuning_steps, sizes.finetuning_checkpoint)
    return replace(plan, data=data, pretrain_data=pretrain_data, pretrain=pretrain, finetune=finetune)


def _with_steps(config: TrainingConfig, steps: int, checkpoint: int) -> TrainingConfig:
    return replace(config, steps=steps, evaluate_every=max(1, steps // 10), checkpoint_every=checkpoint)
