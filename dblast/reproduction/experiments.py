"""From a plan to artefacts: target, trajectories, pre-trained drafter, fine-tuned and scored variants.

Every function returns a finished :class:`~dblast.reproduction.stages.Stage` or what it holds;
calling it again finds the artefact instead of the work.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dblast.backbone import DBlastConfig, default_taps
from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.replay import score
from dblast.reproduction.branch_health import drafter_health
from dblast.reproduction.checkpoints import shipped_drafter
from dblast.reproduction.estimates import choose_category_temperature
from dblast.reproduction.identity import check_commit, model_identity
from dblast.reproduction.initialise import start_drafter
from dblast.reproduction.language import synthetic
from dblast.reproduction.language.tiny import train_tiny_target
from dblast.reproduction.own.requirements import check_memory
from dblast.reproduction.plans import Plan, Variant
from dblast.reproduction.progress import silence_worker
from dblast.reproduction.prompts.plan import (
    calibration_ids,
    check_evaluation_prompts,
    evaluation_prompts,
    prompt_spec,
    training_prompt_ids,
)
from dblast.reproduction.stages import RUN, Stage
from dblast.sampling import get_setting
from dblast.support.files import MANIFEST, RECORD, sha256_file
from dblast.support.progress import progress, quiet_loading
from dblast.targets import Target, load_target, propose_mask_token, wrap_target
from dblast.training import train
from dblast.trajectories import Trajectory, TrajectorySet, sample_trajectories

#: Losses of other papers are found by name, so that no function is seen to call them.
_OTHER_LOSSES = "dblast.reproduction.objectives.OBJECTIVES"

#: Trajectories of the calibration split that training curves are measured on.
CURVE_TRAJECTORIES = 12
#: As many of them show whether the branches are alive.
HEALTH_TRAJECTORIES = 4


# -- target -----------------------------------------------------------------------------------


def target_stage(plan: Plan) -> Stage | None:
    """The trained tiny target; None for targets that are loaded, not trained."""
    if plan.target != "tiny":
        return None
    return Stage("tiny-target", {"tiny": asdict(plan.tiny)}, prepare_target)


def prepare_target(plan: Plan) -> Path | None:
    """Train the tiny target if the plan needs one; returns its folder."""
    stage = target_stage(plan)
    if stage is None:
        return None

    def compute(folder: Path) -> None:
        with progress(plan.tiny.steps, "tiny target", unit="step") as bar:

            def show(row: dict) -> None:
                bar.set_postfix(held_out_loss=f"{row['held_out_loss']:.3f}", refresh=False)
                bar.update(row["step"] - bar.n)

            model, history = train_tiny_target(
                seed=plan.tiny.seed,
                steps=plan.tiny.steps,
                batch_size=plan.tiny.batch_size,
                learning_rate=plan.tiny.learning_rate,
                progress=show,
                record_every=max(1, plan.tiny.steps // 20),
            )
        with quiet_loading():
            model.save_pretrained(folder)
        synthetic.tokenizer().save_pretrained(folder)
        (folder / "history.json").write_text(json.dumps(history))

    return stage.run(compute)


def open_target(plan: Plan) -> Target:
    """The plan's target, loaded and frozen."""
    if plan.target != "tiny":
        precision = getattr(torch, plan.precision)
        mask = plan.drafter.mask_token_id
        target = load_target(plan.target, dtype=precision, device=default_device(), mask_token_id=mask)
        check_commit(plan.target, target.model.config)
        return target
    folder = prepare_target(plan)
    with quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    return wrap_target("tiny", model, AutoTokenizer.from_pretrained(folder), synthetic.MASK_TOKEN_ID)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -- trajectories ------------------------------------------------------------------------------


def taps(plan: Plan, target: Target) -> list[int]:
    """The tapped target layers."""
    return list(plan.drafter.taps or default_taps(target.model.config.num_hidden_layers, plan.drafter.layers))


def trajectory_stage(plan: Plan, split: str) -> Stage:
    """Trajectories of ``split``: "training", or the name of an evaluation setting."""
    training = split == "training"
    upstream = target_stage(plan)
    spec = {
        "target": upstream.key if upstream else model_identity(plan.target),
        "prompts": prompt_spec(plan.data, training),
        "taps": [plan.drafter.taps, plan.drafter.layers],
        "split": split,
        "sampling": asdict(get_setting(plan.data.training_setting if training else split)),
        "precision": plan.precision,
    }
    return Stage("trajectories", spec, prepare_trajectories)


def prepare_trajectories(plan: Plan, split: str, target: Target | None = None) -> TrajectorySet:
    """Sample (or find) the trajectories of a split."""
    stage = trajectory_stage(plan, split)

    def compute(folder: Path) -> None:
        nonlocal target
        target = target or open_target(plan)
        training = split == "training"
        prompts = training_prompt_ids(plan, target) if training else evaluation_prompts(plan, target)
        sample_trajectories(
            target,
            prompts,
            get_setting(plan.data.training_setting if training else split),
            folder,
            max_new_tokens=plan.data.training_tokens if training else plan.data.evaluation_tokens,
            taps=taps(plan, target),
            # Training and evaluation at the same setting must not share random numbers.
            seed=plan.data.seed + (1_000_003 if training else 0),
            batch_size=plan.data.batch_size,
            description=f"{plan.label} {split} trajectories",
            key=stage.key,
        )

    return TrajectorySet(stage.run(compute))


# -- drafters -----------------------------------------------------------------------------------


def pretrain_stage(plan: Plan) -> Stage:
    """The DFlash drafter all variants start from."""
    plan = on_pretraining_data(plan)
    if not plan.drafter.pretrained_here:
        # Where it lies does not count.
        spec = {"drafter": asdict(plan.drafter) | {"start": _given(plan)}}
        return Stage("pretrained", spec, prepare_pretrained, _OTHER_LOSSES)
    spec = {
        "trajectories": trajectory_stage(plan, "training").key,
        "curve": trajectory_stage(plan, plan.data.training_setting).key,
        # Curves are measured on calibration prompts.
        "calibration_fraction": plan.data.calibration_fraction,
        "drafter": asdict(plan.drafter),
        "pretrain": asdict(plan.pretrain),
    }
    return Stage("pretrained", spec, prepare_pretrained, _OTHER_LOSSES)


def _given(plan: Plan) -> str | dict[str, str]:
    """What determines a drafter that was trained elsewhere."""
    if plan.drafter.start == "shipped":
        return sha256_file(shipped_drafter(plan.target) / MANIFEST)
    return model_identity(plan.drafter.start)


def on_pretraining_data(plan: Plan) -> Plan:
    """The plan as pre-training sees it: variants may be fine-tuned on other data."""
    return replace(plan, data=plan.pretrain_data or plan.data, pretrain_data=None)


def open_drafter(folder: Path, target: Target) -> DBlastDrafter:
    """A saved drafter, float32, attached to its target."""
    return DBlastDrafter.load(folder, dtype=torch.float32).to(target.device).attach(target)


def for_decoding(drafter: DBlastDrafter, target: Target) -> DBlastDrafter:
    """The drafter in the target's precision, in which the decoding loop runs both."""
    return drafter.to(target.model.dtype).attach(target).eval()


#: Training sets up to this size are held in memory; larger ones are read from disk as they are drawn.
MEMORY_LIMIT_BYTES = 4 * 2**30


def _held(stored: TrajectorySet) -> Sequence[Trajectory]:
    return list(stored) if stored.nbytes < MEMORY_LIMIT_BYTES else stored


def check_target(plan: Plan) -> None:
    """Refuse a target that the plan's drafter cannot serve, before anything is sampled from it.

    Raises:
        DBlastError: mask token unset or out of range, taps that do not exist, a drafter to start from that is damaged
            or of another shape; more memory than there is.
    """
    target, shape = open_target(plan), plan.drafter
    check_memory(plan, target.model.config, plan.data.training_tokens)
    check_evaluation_prompts(plan, target)
    if not shape.pretrained_here:
        start_drafter(shape, target, [], taps(plan, target))
        return
    if target.mask_token_id is None:
        idea = propose_mask_token(target.tokenizer, target.model.config.vocab_size)
        advice = "" if idea is None else f"; {idea} looks unused"
        raise DBlastError(
            f"no mask token is known for {target.name}: give one that its text never has, --mask-token-id ID{advice}"
        )
    DBlastConfig.for_target(
        target, num_layers=shape.layers, block_length=shape.block_length, target_layer_ids=taps(plan, target)
    )


def training_curve(plan: Plan) -> Callable[[DBlastDrafter], dict]:
    """What training curves show on calibration prompts: mean expected accepted length per anchor at Z_T = 1, and
    whether the branches are alive (:mod:`dblast.reproduction.branch_health`)."""
    chosen = calibration_ids(plan)
    rows = prepare_trajectories(plan, plan.data.training_setting)
    rows = [t for t in rows if t.prompt_id in chosen][:CURVE_TRAJECTORIES]
    precision = getattr(torch, plan.finetune.precision)

    def evaluate(drafter: DBlastDrafter) -> dict:
        table = score(drafter, rows, (1.0,), precision=precision, description=None)
        point = {"accepted_per_anchor": table.anchor_accepted.sum() / max(1, table.anchors.sum())}
        if drafter.config.num_categories > 1:
            point |= drafter_health(drafter, rows[:HEALTH_TRAJECTORIES], precision)
        return point

    return evaluate


def prepare_pretrained(plan: Plan) -> Path:
    """Pre-train the DFlash drafter, without category heads: every variant adds its own, K = 1 included."""
    plan = on_pretraining_data(plan)

    def compute(folder: Path) -> None:
        target = open_target(plan)
        if not plan.drafter.pretrained_here:
            history = []
            if plan.drafter.start == "shipped":
                history = json.loads((shipped_drafter(plan.target) / RECORD).read_text(encoding="utf-8"))["history"]
            drafter = start_drafter(plan.drafter, target, [], taps(plan, target))
            check_commit(plan.drafter.start, drafter.config)
            _finish(drafter, history, folder)
            return
        stored = prepare_trajectories(plan, "training", target)
        drafter = start_drafter(plan.drafter, target, stored, taps(plan, target))
        history = train(
            drafter,
            _held(stored),
            plan.pretrain,
            folder / RUN,
            evaluate=training_curve(plan),
            description=f"{plan.label} pre-training",
            key=stage.key,
        )
        _finish(drafter, history, folder)

    if plan.drafter.pretrained_here:
        prepare_trajectories(plan, plan.data.training_setting)
    stage = pretrain_stage(plan)
    return stage.run(compute)


def _finish(drafter: DBlastDrafter, history: list[dict], folder: Path) -> None:
    with quiet_loading():
        drafter.save_pretrained(folder)
    (folder / "history.json").write_text(json.dumps(history))


def variant_stage(plan: Plan, variant: Variant, seed: int) -> Stage:
    """One fine-tuned variant with its scores at every evaluation setting."""
    spec = {
        "pretrained": pretrain_stage(plan).key,
        "trajectories": trajectory_stage(plan, "training").key,
        "curve": trajectory_stage(plan, plan.data.training_setting).key,
        "evaluation": [trajectory_stage(plan, setting).key for setting in plan.data.settings],
        "calibration_fraction": plan.data.calibration_fraction,
        "variant": asdict(variant),
        "training": asdict(plan.finetune_config(variant, seed)),
        "category_temperatures": plan.category_temperatures,
    }
    return Stage("variants", spec, prepare_variant, _OTHER_LOSSES)


def prepare_variant(plan: Plan, variant: Variant, seed: int, threads: int | None = None) -> Path:
    """Fine-tune one variant from the pre-trained drafter and score it by replay.

    Args:
        threads: torch threads for this process (worker processes use one each).
    """
    if threads:
        torch.set_num_threads(threads)
    name = f"{plan.label} K={variant.K} {variant.loss} seed {seed}"

    def compute(folder: Path) -> None:
        target = open_target(plan)
        pretrained = open_drafter(prepare_pretrained(plan), target)
        drafter = pretrained.with_categories(variant.K, seed)
        history = train(
            drafter,
            _held(prepare_trajectories(plan, "training")),
            plan.finetune_config(variant, seed),
            folder / RUN,
            evaluate=training_curve(plan),
            description=name,
            key=stage.key,
        )
        chosen = calibration_ids(plan)
        tables = []
        for setting in plan.data.settings:
            table = score(
                drafter,
                prepare_trajectories(plan, setting),
                plan.category_temperatures,
                precision=getattr(torch, plan.finetune.precision),
                description=f"{name} scoring {setting}",
            )
            table.insert(0, "setting", setting)
            tables.append(table)
        scores = pd.concat(tables, ignore_index=True)
        scores["split"] = scores.prompt_id.isin(chosen).map({True: "calibration", False: "held_out"})
        scores.to_parquet(folder / "scores.parquet")
        _finish(drafter, history, folder)

    stage = variant_stage(plan, variant, seed)
    return stage.run(compute)


def prepare_variants(plan: Plan) -> None:
    """Fine-tune and score every variant and seed of a plan, side by side where the plan says so.

    A result does not depend on how many run side by side: each uses one thread.
    """
    # Everything that the variants share is made before they start side by side.
    for split in (*plan.data.settings, "training"):
        prepare_trajectories(plan, split)
    prepare_pretrained(plan)
    jobs = [(variant, seed) for seed in plan.seeds for variant in plan.variants]
    # Longest first, so that the last ones to finish are short.
    missing = sorted((job for job in jobs if not variant_stage(plan, *job).done), key=lambda job: -job[0].K)
    side_by_side(prepare_variant, [(plan, *job) for job in missing], plan.parallel, f"{plan.label} variants")


def side_by_side(work: Callable, jobs: Sequence[tuple], parallel: bool, description: str) -> None:
    """``work(*job)`` for every job, one after the other, or on a CPU several at once with ``work(*job, threads=1)``.

    Raises:
        DBlastError: a worker process was ended from outside.
    """
    if not jobs:
        return
    with progress(len(jobs), description, unit="variant") as bar:
        if not parallel or default_device().type == "cuda":
            for job in jobs:
                work(*job)
                bar.update()
            return
        context = multiprocessing.get_context("spawn")
        workers = min(len(jobs), os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, mp_context=context, initializer=silence_worker) as pool:
            futures = [pool.submit(work, *job, threads=1) for job in jobs]
            try:
                for future in as_completed(futures):
                    future.result()
                    bar.update()
            except BrokenProcessPool as error:
                raise DBlastError(
                    "a worker process was ended from outside, most likely for want of memory; run the same command "
                    "again to go on, with more memory or on fewer cores"
                ) from error
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def collect_scores(plan: Plan) -> pd.DataFrame:
    """Scores of all variants and seeds, one row per trajectory and Z_T, with the columns that name them."""
    prepare_variants(plan)
    tables = []
    for variant in plan.variants:
        for seed in plan.seeds:
            table = pd.read_parquet(variant_stage(plan, variant, seed).folder / "scores.parquet")
            names = {
                "target": plan.label,
                "method": variant.method,
                "K": variant.K,
                "loss": variant.loss,
                "construction": variant.construction,
                "seed": seed,
            }
            for place, (column, value) in enumerate(names.items()):
                table.insert(place, column, value)
            tables.append(table)
    return pd.concat(tables, ignore_index=True)


def export_drafter(plan: Plan, variant: Variant, seed: int, output: Path) -> Path:
    """Write a finished variant to a new folder, with what it was made by, of and for, and its calibrated Z_T.

    Raises:
        DBlastError: the folder exists already.
    """
    folder = prepare_variant(plan, variant, seed)
    scores = collect_scores(replace(plan, variants=(variant,), seeds=(seed,)))
    chosen = choose_category_temperature(scores).set_index("setting").category_temperature.dropna()
    recipe = {"drafter": asdict(plan.drafter), "variant": asdict(variant), "seed": seed}
    recipe |= {"training": asdict(plan.finetune_config(variant, seed)), "data": asdict(plan.data)}
    drafter = DBlastDrafter.load(folder)
    drafter.config.category_temperatures, drafter.config.recipe = chosen.to_dict(), recipe
    history = json.loads((folder / "history.json").read_text(encoding="utf-8"))
    return drafter.save(output, recipe | {"target": plan.target, "history": history})
