"""Notebook 01's measurements on a plan's target: oracle proposals, Figure 1, Table 9, where acceptance is lost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch

from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.reproduction.diagnosis.continuations import (
    Continuations,
    draw_prefixes,
    load_continuations,
    store_continuations,
)
from dblast.reproduction.diagnosis.determinism import accepted_over, draft_at
from dblast.reproduction.diagnosis.oracle import oracle_table
from dblast.reproduction.diagnosis.process import estimate_determinism
from dblast.reproduction.diagnosis.rejections import score_rejections
from dblast.reproduction.estimates import choose_category_temperature
from dblast.reproduction.experiments import (
    collect_scores,
    open_drafter,
    open_target,
    prepare_trajectories,
    prepare_variants,
    trajectory_stage,
    variant_stage,
)
from dblast.reproduction.plans import FIGURE1, MAIN, Plan, Variant
from dblast.reproduction.prompts.plan import calibration_ids
from dblast.reproduction.stages import Stage
from dblast.sampling import get_setting
from dblast.targets import Target
from dblast.trajectories import TrajectorySet

#: Prompts whose truncation points Figure 1 uses: those its drafters were trained on (as in the paper), and new ones.
SPLITS = ("training", "held_out")
#: Random streams of their own: trajectories are sampled with seeds near the plan's.
_ORACLE_SEED, _FIGURE1_SEEDS = 2_000_003, {"training": 3_000_017, "held_out": 4_000_037}
#: Target samples shown beside the branches in Table 9.
SHOWN_SAMPLES = 6


# -- continuations ------------------------------------------------------------------------------


def _continue(plan: Plan, upstream: Stage, rows: list[int], spec: dict, stored: TrajectorySet) -> Continuations:
    """Truncation points drawn from ``rows`` of stored trajectories, each continued M times."""
    b = plan.drafter.block_length
    spec = spec | {"trajectories": upstream.key, "rows": rows, "b": b, "precision": plan.precision}
    stage = Stage("continuations", spec, _continue)

    def compute(folder: Path) -> None:
        generator = torch.Generator().manual_seed(spec["seed"])
        row, emitted = draw_prefixes(stored.response_lengths(), rows, spec["points"], b, generator)
        store_continuations(
            open_target(plan),
            stored,
            row,
            emitted,
            get_setting(spec["setting"]),
            folder,
            continuations=spec["continuations"],
            block_length=b,
            seed=spec["seed"],
            description=f"{plan.label} continuations",
            key=stage.key,
        )

    return load_continuations(stage.run(compute))


def oracle_continuations(plan: Plan, setting: str) -> tuple[TrajectorySet, Continuations]:
    """Continuations of evaluation texts at one setting, all tasks."""
    d = plan.diagnosis
    stored = prepare_trajectories(plan, setting)
    spec = {"setting": setting, "points": d.oracle_prefixes, "continuations": d.oracle_continuations}
    spec["seed"] = d.seed + _ORACLE_SEED
    return stored, _continue(plan, trajectory_stage(plan, setting), list(range(len(stored))), spec, stored)


def figure1_continuations(plan: Plan, split: str) -> tuple[TrajectorySet, Continuations]:
    """Continuations for Figure 1, of training texts or of held-out evaluation texts of its task."""
    d = plan.diagnosis
    if split == "training":
        owner, name = plan.figure1(), "training"
    else:
        owner, name = plan, d.setting
    stored = prepare_trajectories(owner, name)
    rows = list(range(len(stored)))
    if split != "training":
        calibration = calibration_ids(plan)
        rows = [i for i, (task, prompt_id) in enumerate(stored.labels()) if task == d.task and prompt_id not in calibration]
    spec = {"setting": d.setting, "points": d.points, "continuations": d.continuations}
    spec["seed"] = d.seed + _FIGURE1_SEEDS[split]
    return stored, _continue(plan, trajectory_stage(owner, name), rows, spec, stored)


# -- tables -------------------------------------------------------------------------------------


def collect_oracle(plan: Plan) -> pd.DataFrame:
    """Oracle proposals: ``target, setting, task, prompt_id, emitted, determinism, proposal, accepted_length``."""
    tables = []
    for setting in plan.data.settings:
        stored, continuations = oracle_continuations(plan, setting)
        table = oracle_table(continuations)
        names = stored.labels()
        table.insert(0, "prompt_id", [names[r][1] for r in table.row])
        table.insert(0, "task", [names[r][0] for r in table.row])
        table.insert(0, "setting", setting)
        tables.append(table.drop(columns="row"))
    result = pd.concat(tables, ignore_index=True)
    result.insert(0, "target", plan.label)
    return result


def _precision(plan: Plan) -> torch.dtype:
    return getattr(torch, plan.finetune.precision)


def _figure1_drafter(plan: Plan, variant: Variant, seed: int, target: Target) -> DBlastDrafter:
    return open_drafter(variant_stage(plan.figure1(), variant, seed).folder, target)


def collect_figure1(plan: Plan) -> pd.DataFrame:
    """Figure 1's points: ``target, split, prompt_id, point, determinism, method, K, loss, seed, accepted_length``."""
    prepare_variants(plan.figure1())
    target = open_target(plan)
    tables = []
    for split in SPLITS:
        stored, continuations = figure1_continuations(plan, split)
        places = continuations.row, continuations.emitted
        # Training prompts repeat; errors are over distinct ones, named by the first that has the text.
        first: dict[tuple[int, ...], str] = {}
        prompts = [
            first.setdefault(ids, prompt_id)
            for ids, (_, prompt_id) in zip(stored.prompts(), stored.labels(), strict=True)
        ]
        points = {"target": plan.label, "split": split, "prompt_id": [prompts[r] for r in continuations.row.tolist()]}
        points["point"] = range(len(continuations))
        points["determinism"] = estimate_determinism(continuations.log_p, continuations.valid).tolist()
        for variant in FIGURE1:
            for seed in plan.seeds:
                drafter = _figure1_drafter(plan, variant, seed, target)
                offered = draft_at(drafter, stored, *places, plan.diagnosis.category_temperature, _precision(plan))
                names = {"method": variant.method, "K": variant.K, "loss": variant.loss, "seed": seed}
                accepted = accepted_over(continuations, *offered).tolist()
                tables.append(pd.DataFrame(points | names | {"accepted_length": accepted}))
    return pd.concat(tables, ignore_index=True)


def example_point(continuations: Continuations) -> int:
    """Which truncation point Table 9 shows: the one whose D_b is the (lower) median, a rule that no taste enters."""
    order = estimate_determinism(continuations.log_p, continuations.valid).argsort(stable=True)
    return int(order[(len(order) - 1) // 2])


def collect_branches(plan: Plan) -> pd.DataFrame:
    """Table 9: what the target would write, and what two drafters offer, after one held-out prefix.

    Returns:
        ``target, prompt_id, kind, number, prior, accepted_length, tokens, share``: kind is "prefix", "target sample",
        "K = 1" or "branch"; ``tokens`` lists the text that each token adds and ``share``, for each of them, the share of the M
        continuations that begin with the row's tokens up to it; accepted length is that of a draft step with this
        drafter (its branches share one value).
    """
    prepare_variants(plan.figure1())
    target = open_target(plan)
    stored, continuations = figure1_continuations(plan, "held_out")
    chosen = example_point(continuations)
    row, emitted = continuations.row[chosen : chosen + 1], continuations.emitted[chosen : chosen + 1]
    trajectory = stored[int(row)]
    here = Continuations(**{name: value[chosen : chosen + 1] for name, value in vars(continuations).items()})

    def pieces(ids: list[int]) -> list[str]:
        # One by one, tokens would lose the spaces between words and break characters that span several.
        texts = ["", *(target.tokenizer.decode(ids[: i + 1]) for i in range(len(ids)))]
        return [after[len(before) :] for before, after in zip(texts, texts[1:], strict=False)]

    def share(ids: list[int]) -> list[float]:
        agree = (here.tokens[0, :, : len(ids)] == torch.tensor(ids)) & here.valid[0, :, : len(ids)]
        return agree.long().cumprod(-1).float().mean(0).tolist()

    rows = []

    def add(kind: str, number: int, prior: float, accepted: float, ids: list[int]) -> None:
        rows.append(
            {
                "target": plan.label,
                "prompt_id": trajectory.prompt_id,
                "kind": kind,
                "number": number,
                "prior": prior,
                "accepted_length": accepted,
                "tokens": pieces(ids),
                "share": [] if kind == "prefix" else share(ids),
            }
        )

    nothing = float("nan")
    add("prefix", 0, nothing, nothing, trajectory.response_ids[: int(emitted)].tolist())
    for m in range(min(SHOWN_SAMPLES, here.tokens.shape[1])):
        valid = here.valid[0, m]
        add("target sample", m + 1, nothing, nothing, here.tokens[0, m][valid].tolist())
    for variant in FIGURE1:
        drafter = _figure1_drafter(plan, variant, plan.seeds[0], target)
        offered = draft_at(drafter, stored, row, emitted, plan.diagnosis.category_temperature, _precision(plan))
        accepted = float(accepted_over(here, *offered))
        kind = "K = 1" if variant.K == 1 else "branch"
        for z in range(variant.K):
            add(kind, z + 1, float(offered[1][0, z].exp()), accepted, offered[0][0, z].tolist())
    return pd.DataFrame(rows)


def collect_rejections(plan: Plan) -> pd.DataFrame:
    """Where acceptance is lost: the main variants (first seed) at their calibrated Z_T, held-out prompts, by position."""
    main = [variant for variant in MAIN if variant in plan.variants]
    if not main:
        raise DBlastError("this plan trains none of the main variants")
    chosen = choose_category_temperature(collect_scores(plan))
    target, calibration = open_target(plan), calibration_ids(plan)
    tables = []
    for setting in plan.data.settings:
        stored = [t for t in prepare_trajectories(plan, setting) if t.prompt_id not in calibration]
        for variant in main:
            row = chosen[
                (chosen.setting == setting)
                & (chosen.K == variant.K)
                & (chosen.loss == variant.loss)
                & (chosen.construction == variant.construction)
            ]
            temperature = float(row.category_temperature.iloc[0]) if variant.K > 1 else 1.0
            drafter = open_drafter(variant_stage(plan, variant, plan.seeds[0]).folder, target)
            table = score_rejections(
                drafter,
                stored,
                temperature,
                every=plan.diagnosis.rejection_anchors,
                precision=_precision(plan),
                description=f"{plan.label} {variant.method} {setting}: rejections",
            )
            names = {"target": plan.label, "setting": setting, **asdict(variant), "method": variant.method}
            for column, value in reversed(names.items()):
                table.insert(0, column, value)
            tables.append(table)
    return pd.concat(tables, ignore_index=True)
