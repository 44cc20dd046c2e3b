"""Result tables: collected from stages, kept in ``data/results/<profile>/`` with their provenance.

Opening a table reads the kept file if it was made by the very same plan;
``recompute=True`` goes back to the stages (which reuse their own artefacts).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from dblast.errors import ArtefactError, DBlastError, storage_reason
from dblast.reproduction.beyond.cost import collect_speed, collect_widths
from dblast.reproduction.beyond.scores import GRID, collect_proposals
from dblast.reproduction.beyond.siblings import collect_siblings
from dblast.reproduction.diagnosis.stages import collect_branches, collect_figure1, collect_oracle, collect_rejections
from dblast.reproduction.experiments import (
    collect_scores,
    open_drafter,
    open_target,
    prepare_pretrained,
    prepare_target,
    prepare_trajectories,
    prepare_variants,
    pretrain_stage,
    variant_stage,
)
from dblast.reproduction.language import synthetic
from dblast.reproduction.latency import collect_latency
from dblast.reproduction.online import collect_online
from dblast.reproduction.paper_shapes import parameter_row
from dblast.reproduction.paths import RESULTS, ROOT
from dblast.reproduction.plans import Plan, Profile
from dblast.reproduction.stages import digest, locked, write_json
from dblast.support.files import sha256_file

PACKAGES = ("torch", "transformers", "datasets", "numpy", "pandas")


def collect_history(plan: Plan) -> pd.DataFrame:
    """Training curves: pre-training (seed -1, K 0) and every variant, with anchors seen."""
    prepare_variants(plan)
    runs = [
        ({"stage": "pretrain", "K": 0, "loss": plan.pretrain.loss, "seed": -1}, pretrain_stage(plan), plan.pretrain)
    ]
    for variant in plan.variants:
        for seed in plan.seeds:
            names = {"stage": "finetune", "K": variant.K, "loss": variant.loss, "seed": seed}
            names["construction"] = variant.construction
            runs.append((names, variant_stage(plan, variant, seed), plan.finetune))
    rows = []
    for names, stage, config in runs:
        for point in json.loads((stage.folder / "history.json").read_text()):
            # "loss" names the objective; its value gets a column of its own.
            point["training_loss"] = point.pop("loss")
            rows.append(names | point | {"anchors": point["step"] * config.blocks_per_step})
    table = pd.DataFrame(rows)
    table.insert(0, "target", plan.label)
    return table


def collect_determinism(plan: Plan) -> pd.DataFrame:
    """How decided the target is: entropy and largest probability of every sampled token's distribution.

    One row per prompt and setting: means over the response, and its length.
    """
    rows = []
    for setting in plan.data.settings:
        for t in prepare_trajectories(plan, setting):
            rows.append(
                {
                    "target": plan.label,
                    "setting": setting,
                    "task": t.task,
                    "prompt_id": t.prompt_id,
                    "entropy": float(t.entropy.mean()),
                    "p_max": float(t.p_max.mean()),
                    "tokens": len(t.response_ids),
                }
            )
    return pd.DataFrame(rows)


def collect_target(plan: Plan) -> pd.DataFrame:
    """The tiny target beside its language: held-out loss by step and the language's entropy, nats per token."""
    folder = prepare_target(plan)
    if folder is None:
        return pd.DataFrame(columns=["step", "loss", "held_out_loss", "entropy", "entropy_error"])
    table = pd.DataFrame(json.loads((folder / "history.json").read_text()))
    table["entropy"], table["entropy_error"] = synthetic.entropy_per_token()
    return table


def collect_parameters(plan: Plan) -> pd.DataFrame:
    """Table 1 for this plan's drafter, counted on real modules: added parameters for each K."""
    target = open_target(plan)
    drafter = open_drafter(prepare_pretrained(plan), target)
    counts = sorted({variant.K for variant in plan.variants})
    return pd.DataFrame([parameter_row(plan.label, drafter.with_categories(k, 0)) for k in counts])


# -- the kept files ------------------------------------------------------------------------------

TABLES: dict[str, Callable[[Plan], pd.DataFrame]] = {
    "scores": collect_scores,
    "training": collect_history,
    "determinism": collect_determinism,
    "target": collect_target,
    "parameters": collect_parameters,
    "oracle": collect_oracle,
    "figure1": collect_figure1,
    "branches": collect_branches,
    "rejections": collect_rejections,
    "online": collect_online,
    "latency": collect_latency,
    "proposals": collect_proposals,
    "siblings": collect_siblings,
    "widths": collect_widths,
    "speed": collect_speed,
}
#: Tables of notebook 08, which depend on what is scored there beside the plan.
BEYOND_TABLES = ("proposals", "siblings", "widths", "speed")
#: Tables that the plan's diagnosis sizes determine; the others do not depend on them.
DIAGNOSIS_TABLES = ("oracle", "figure1", "branches", "rejections")


def plan_digest(plan: Plan, name: str) -> str:
    """Hash of all of a plan that determines a result table."""
    values = asdict(plan)
    if name in BEYOND_TABLES:
        values["grid"] = GRID
    if name not in DIAGNOSIS_TABLES:
        values.pop("diagnosis")
    return digest(values)


def results_folder(profile: str) -> Path:
    """``data/results/<profile>``."""
    return RESULTS / profile


def open_table(profile: Profile, label: str, name: str, recompute: bool = False) -> pd.DataFrame:
    """A result table of one target.

    Args:
        profile: from :func:`dblast.reproduction.profiles.get_profile`.
        label: the target's name, e.g. ``"tiny"``.
        name: one of :data:`TABLES`.
        recompute: ignore the kept file.

    Raises:
        DBlastError: unknown target or table, or nothing was ever kept of this profile.
        ArtefactError: the kept file is damaged, or was made by another plan.
    """
    plan = profile.plan(label)
    if name not in TABLES:
        raise DBlastError(f"unknown result table {name!r}; known tables: {', '.join(TABLES)}")
    path = results_folder(profile.name) / f"{label}-{name}.parquet"
    # Before any work: a new table's provenance is added to what is there.
    entry = read_provenance(profile.name).get(path.name)
    if path.exists() and not recompute:
        if reason := _refusal(entry, path, plan, name):
            raise ArtefactError(f"{path.name} of profile {profile.name!r} {reason}; open it with recompute=True")
        return pd.read_parquet(path)
    if not recompute and not any(results_folder(profile.name).glob("*.parquet")):
        # A notebook opened by hand would start to sample and train.
        raise DBlastError(
            f"profile {profile.name!r} has no kept results; make them with `python -m dblast reproduce --profile {profile.name}`, "
            "or set recompute to True here"
        )
    start = time.monotonic()
    table = TABLES[name](plan)
    _keep(table, path, profile.name, plan, plan_digest(plan, name), time.monotonic() - start)
    return table


def _refusal(entry: object, path: Path, plan: Plan, name: str) -> str | None:
    """Why a kept file cannot be used, judged by its entry in the provenance."""
    if not isinstance(entry, dict):
        return "has no provenance"
    if entry.get("sha256") != sha256_file(path):
        return "is damaged"
    if entry.get("plan") != plan_digest(plan, name):
        return "was made by another configuration"
    # Entries of older runs have none.
    stated = entry.pop("digest", None)
    return "has a damaged provenance" if stated and stated != digest(entry) else None


def open_tables(profile: Profile, name: str, recompute: bool = False) -> pd.DataFrame:
    """One result table over all targets of a profile, in the profile's order."""
    tables = (open_table(profile, plan.label, name, recompute) for plan in profile.plans)
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def open_timings(profile: Profile, name: str, recompute: bool = False) -> pd.DataFrame | None:
    """Timings of all targets of a profile; None if none were kept: a notebook that is opened by hand takes no times."""
    kept = [results_folder(profile.name) / f"{plan.label}-{name}.parquet" for plan in profile.plans]
    return open_tables(profile, name, recompute) if recompute or all(path.exists() for path in kept) else None


def read_provenance(profile: str) -> dict:
    """What made each kept file: plan hash and configuration, checksum, versions, revision, machine, wall time.

    Raises:
        ArtefactError: the file is damaged.
    """
    path = results_folder(profile) / "provenance.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (ValueError, TypeError) as error:
        raise ArtefactError(
            f"{path} is damaged ({type(error).__name__}); restore it with git, or delete it and run the profile again"
        ) from None


def _keep(table: pd.DataFrame, path: Path, profile: str, plan: Plan, made_by: str, seconds: float) -> None:
    """Write a table and note where it comes from; runs that write at once do so one after the other."""
    entry = {
        "plan": made_by,
        "configuration": asdict(plan),
        "seconds": round(seconds, 1),
        "date": time.strftime("%Y-%m-%d"),
        "git": git_revision(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(".lock"), f"writes results of profile {profile}"):
            # Before anything is replaced: what cannot be read cannot be added to.
            record = read_provenance(profile)
            scratch = path.with_suffix(".part")
            table.to_parquet(scratch, index=False, compression="zstd")
            entry["sha256"] = sha256_file(scratch)
            record[path.name] = entry | {"digest": digest(entry)}
            os.replace(scratch, path)
            write_json(path.with_name("provenance.json"), record)
    except OSError as error:
        if (reason := storage_reason(error)) is None:
            raise
        raise ArtefactError(f"{path} cannot be written: {reason}; make room, and run the same command again") from error


def git_revision() -> str:
    """The checkout's commit, with ``+`` if anything but results differs from it; "unknown" outside git."""
    try:
        git = ["git", "-C", str(ROOT)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        # What a run writes itself does not make its code another one.
        code = ["--", ":/", ":!/data/results", ":!/figures"]
        status = [*git, "status", "--porcelain", "-uno", *code]
        changed = subprocess.run(status, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed.stdout.strip() else "")
