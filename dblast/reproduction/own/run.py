"""The run behind ``python -m dblast drafter``: measure, choose sizes, sample, train, evaluate, write."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open

from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.reproduction.branch_health import drafter_health
from dblast.reproduction.experiments import (
    on_pretraining_data,
    open_drafter,
    prepare_pretrained,
    prepare_trajectories,
    prepare_variant,
    pretrain_stage,
    trajectory_stage,
    variant_stage,
)
from dblast.reproduction.own.budget import Sizes, Speeds, choose_sizes, measure, with_sizes
from dblast.reproduction.own.costs import forecast, sample_sets, stage_cost, with_total
from dblast.reproduction.own.evaluate import USED_PROMPTS, prompt_hash
from dblast.reproduction.own.evaluation import accepted_lengths, score_proposals
from dblast.reproduction.own.report import configuration_in_words, write_report
from dblast.reproduction.own.requirements import free_disk, size, sole_writer, token_bytes
from dblast.reproduction.own.speed import TIMED_PROMPTS, decoding_speed
from dblast.reproduction.own.target import Prepared, Request, check_request, prepare
from dblast.reproduction.plans import Plan
from dblast.reproduction.prompts.own import FEWEST, open_own
from dblast.reproduction.prompts.plan import calibration_ids, evaluation_prompts
from dblast.reproduction.stages import RUN, Stage, write_json
from dblast.support.files import cache_folder

#: Trajectories on which the branches are looked at.
HEALTH_TRAJECTORIES = 16
OURS, START = "this drafter", "start drafter"


def make_drafter(request: Request, out: Path, say: Callable[[str], None] = print) -> Path:
    """Do all of it; called again after a kill it goes on where it was.

    Raises:
        DBlastError: what cannot work, before anything is sampled.
    """
    check_request(request, out)
    with sole_writer(out):
        prepared = prepare(request)
        for note in prepared.notes:
            say(note)
        work = Work(prepared, request.hours, say)
        with work.clock():
            plan = work.sized_plan()
            work.train(plan)
            work.evaluate(plan)
        work.write(plan, request, out)
    say(f"drafter and report in {out}")
    return out


class Work:
    """One run's folder in the cache: its sizes, and the minutes it took over all its starts."""

    def __init__(self, prepared: Prepared, hours: float, say: Callable[[str], None]):
        self.target, self.bare, self.hours, self.say = prepared.target, prepared.plan, hours, say
        self.sizes = Stage("sizes", prepared.key)
        self.seconds = cache_folder() / "minutes" / f"{self.sizes.key}.json"
        self.seconds.parent.mkdir(parents=True, exist_ok=True)
        self.drafter: DBlastDrafter | None = None
        self.accepted = self.speed = pd.DataFrame()
        self.health: dict[str, dict[str, float]] = {}

    # -- time ---------------------------------------------------------------------------------

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Count seconds every few seconds, so that a killed start counts too."""
        stop, before, begin = threading.Event(), self.spent(), time.monotonic()

        def note() -> None:
            spent = before["seconds"] + time.monotonic() - begin
            write_json(self.seconds, {"seconds": spent, "starts": before["starts"] + 1})

        def count() -> None:
            while not stop.wait(5.0):
                note()

        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            note()

    # -- sizes --------------------------------------------------------------------------------

    def sized_plan(self) -> Plan:
        """The plan with the sizes that this run was first started with, or with new ones; says what will happen."""
        if self.sizes.done:
            self.say("going on with the sizes that were chosen when this run first started")
        stored = json.loads((self.sizes.run(self._choose_sizes) / "sizes.json").read_text(encoding="utf-8"))
        sizes, speeds = Sizes(**stored["sizes"]), Speeds(**stored["speeds"])
        plan = with_sizes(self.bare, sizes)
        plan.check()
        self.timed_tokens = sizes.timed_tokens
        table, minutes = forecast(plan, self.target, speeds, sizes.timed_tokens)
        self.say(table.to_string(index=False))
        if minutes > 60 * self.hours:
            self.say(
                f"this is more than the {60 * self.hours:.1f} minutes of --hours: however short the time, "
                f"{FEWEST} prompts of every task are evaluated, and {TIMED_PROMPTS} decoded at every setting"
            )
        return plan

    def _choose_sizes(self, folder: Path) -> None:
        self.say("measuring sampling and training for some seconds ...")
        speeds = measure(self.bare, self.target)
        need = token_bytes(self.target.model.config.hidden_size, len(self.bare.drafter.taps))
        sizes = choose_sizes(self.bare, self.target, speeds, 3600 * self.hours, free_disk(folder), need)
        self._check_disk(with_sizes(self.bare, sizes))
        write_json(folder / "sizes.json", {"sizes": asdict(sizes), "speeds": asdict(speeds)})

    def spent(self) -> dict:
        """Seconds of all starts of this run, and how many there were."""
        if not self.seconds.exists():
            return {"seconds": 0.0, "starts": 0}
        return json.loads(self.seconds.read_text(encoding="utf-8"))

    def _check_disk(self, plan: Plan) -> None:
        need, free = sum(row["bytes"] for row in sample_sets(plan, self.target)), free_disk(cache_folder())
        if need > free:
            raise DBlastError(
                f"the text takes about {size(need)} of disk and {size(free)} are free; free some, set DBLAST_CACHE to "
                "a larger disk, or lower --hours or --response-tokens"
            )

    # -- work ---------------------------------------------------------------------------------

    def train(self, plan: Plan) -> None:
        """Sample, pre-train and fine-tune; each says where it goes on."""
        for setting in plan.data.settings:
            self._stage(f"answers to evaluate on, {setting}", trajectory_stage(plan, setting))
            prepare_trajectories(plan, setting, self.target)
        if plan.drafter.pretrained_here:
            first = on_pretraining_data(plan)
            self._stage("answers for pre-training", trajectory_stage(first, "training"))
            prepare_trajectories(first, "training", self.target)
            self._stage("pre-training", pretrain_stage(plan), plan.pretrain.steps)
        prepare_pretrained(plan)
        self._stage("answers for fine-tuning", trajectory_stage(plan, "training"))
        prepare_trajectories(plan, "training", self.target)
        (variant,), (seed,) = plan.variants, plan.seeds
        self._stage("fine-tuning", variant_stage(plan, variant, seed), plan.finetune.steps)
        prepare_variant(plan, variant, seed)

    def _stage(self, name: str, stage: Stage, steps: int | None = None) -> None:
        """Say what comes next, and from where."""
        if stage.done:
            self.say(f"{name}: done before")
            return
        state = stage.folder / RUN / "state.safetensors"
        shards = len(list(stage.folder.glob("shard-?????")))
        if steps is not None and state.exists():
            self.say(f"{name}: resuming at step {stored_step(state)} of {steps}")
        elif shards:
            self.say(f"{name}: resuming after {shards} stored parts")
        else:
            self.say(f"{name} ...")

    def evaluate(self, plan: Plan) -> None:
        """Score the start drafter and ours as it will be saved, look at its branches, time it."""
        (variant,), (seed,) = plan.variants, plan.seeds
        precision = getattr(torch, plan.finetune.precision)
        texts = {setting: list(prepare_trajectories(plan, setting, self.target)) for setting in plan.data.settings}
        calibration = calibration_ids(plan)
        self.say("evaluation ...")
        start = open_drafter(prepare_pretrained(plan), self.target)
        ours = open_drafter(variant_stage(plan, variant, seed).folder, self.target)
        # As it is saved.
        ours = ours.to(torch.bfloat16).float()
        options = {"precision": precision}
        parts = [
            score_proposals(start, texts, START, calibration, proposals=("greedy_branch",), **options),
            score_proposals(
                ours, texts, OURS, calibration, category_temperatures=plan.category_temperatures, **options
            ),
        ]
        table = accepted_lengths(pd.concat(parts, ignore_index=True))
        self.accepted = table
        if variant.K > 1:
            self.health = {
                setting: drafter_health(ours, rows[:HEALTH_TRAJECTORIES], precision) for setting, rows in texts.items()
            }
        timed, tokens = self._timed(plan), self.timed_tokens
        self.speed = pd.concat(
            [
                decoding_speed(self.target, drafter, timed, chosen, tokens).assign(drafter=name)
                for name, drafter, chosen in ((START, start, {}), (OURS, ours, temperatures(table)))
            ],
            ignore_index=True,
        )
        ours.float()  # timing ran it in the target's precision; the weights are rounded to bfloat16 already
        self.drafter = ours

    def _timed(self, plan: Plan) -> list[list[int]]:
        calibration = calibration_ids(plan)
        rows = [p for p in evaluation_prompts(plan, self.target) if p.prompt_id not in calibration]
        return [list(prompt.ids) for prompt in rows[:: max(1, len(rows) // TIMED_PROMPTS)][:TIMED_PROMPTS]]

    # -- what comes out -----------------------------------------------------------------------

    def write(self, plan: Plan, request: Request, out: Path) -> None:
        """Weights, report and prompt hashes in ``out``, which appears whole or not at all."""
        drafter, table = self.drafter, self.accepted
        costs = self._costs(plan)
        config = drafter.config
        config.remember(self.target)
        config.category_temperatures = temperatures(table)
        config.recipe = {"start": plan.drafter.start, "variant": asdict(plan.variants[0]), "data": asdict(plan.data)}
        if plan.drafter.pretrained_here:
            config.recipe |= {"pretraining": asdict(plan.pretrain)}
        config.recipe |= {"finetuning": asdict(plan.finetune), "hours": request.hours}
        record = {
            "request": asdict(request),
            "plan": asdict(plan),
            "costs": costs.to_dict("records"),
            "accepted_lengths": json.loads(table.to_json(orient="records")),
        }
        scratch = out.with_name(out.name + ".part")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            drafter.save(scratch, record, dtype=torch.bfloat16)
            used = {"training": open_own(plan.data.prompts, "training"), "calibration": self._calibrating(plan)}
            hashes = {name: sorted({prompt_hash(p.ids) for p in rows}) for name, rows in used.items()}
            (scratch / USED_PROMPTS).write_text(json.dumps(hashes, indent=0), encoding="utf-8")
            self._report(plan, request, costs, scratch)
            os.replace(scratch, out)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    def _report(self, plan: Plan, request: Request, costs: pd.DataFrame, folder: Path) -> None:
        mask = plan.drafter.mask_token_id
        word = self.target.tokenizer.convert_ids_to_tokens(mask)
        counts = len(evaluation_prompts(plan, self.target)), len(calibration_ids(plan))
        words = configuration_in_words(plan, f"{mask} ({word or 'a row that no token uses'})", request, *counts)
        write_report(
            folder,
            name=request.target,
            accepted=self.accepted,
            health=self.health,
            speed=self.speed,
            costs=costs,
            starts=self.spent()["starts"],
            histories=self._histories(plan),
            configuration=words,
        )

    def _calibrating(self, plan: Plan) -> list:
        chosen = calibration_ids(plan)
        return [prompt for prompt in evaluation_prompts(plan, self.target) if prompt.prompt_id in chosen]

    def _histories(self, plan: Plan) -> dict[str, list[dict]]:
        (variant,), (seed,) = plan.variants, plan.seeds
        setting = plan.data.training_setting
        stages = {
            "pre-training (high)": pretrain_stage(plan),
            f"fine-tuning ({setting})": variant_stage(plan, variant, seed),
        }
        return {name: json.loads((stage.folder / "history.json").read_text()) for name, stage in stages.items()}

    def _costs(self, plan: Plan) -> pd.DataFrame:
        (variant,), (seed,) = plan.variants, plan.seeds
        rows = []
        for row in sample_sets(plan, self.target):
            stored = prepare_trajectories(row["plan"], row["split"], self.target)
            rows.append(
                stage_cost(
                    row["what"], trajectory_stage(row["plan"], row["split"]), tokens=sum(stored.response_lengths())
                )
            )
        if plan.drafter.pretrained_here:
            rows.append(
                stage_cost(
                    "pre-training", pretrain_stage(plan), anchors=plan.pretrain.steps * plan.pretrain.blocks_per_step
                )
            )
        anchors = plan.finetune.steps * plan.finetune.blocks_per_step
        rows.append(stage_cost("fine-tuning", variant_stage(plan, variant, seed), anchors=anchors))
        return with_total(pd.DataFrame(rows), self.spent()["seconds"])


def stored_step(state: Path) -> int:
    """The step that a stored training state is of; 0 for one that cannot be read, which training itself refuses."""
    try:
        with safe_open(state, "pt") as file:
            return int(json.loads(file.metadata()["state"].split(" ", 1)[1])["step"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError):
        return 0


def temperatures(table: pd.DataFrame) -> dict[str, float]:
    """Calibrated Z_T by setting, of our drafter's greedy branches."""
    rows = table[(table.drafter == OURS) & (table.proposal == "greedy_branch") & table.category_temperature.notna()]
    return {setting: float(part.category_temperature.iloc[0]) for setting, part in rows.groupby("setting", sort=False)}
