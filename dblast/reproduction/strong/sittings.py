"""Training in sittings: each goes on from a drafter, on the text that is there, and ends with its rate at zero.

A sitting is a folder by name. Its plan, written when it begins, holds every number and the shards it trains on, so that
a killed one goes on as it was although the text has grown; its drafter and scores are there when it has ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pandas as pd
import torch

from dblast.drafter import DBlastDrafter
from dblast.errors import ArtefactError, DBlastError
from dblast.replay import score
from dblast.reproduction.initialise import start_drafter
from dblast.reproduction.plans import DrafterConfig, Plan
from dblast.reproduction.stages import digest, locked, write_json
from dblast.reproduction.strong.pool import Responses, WindowSampler
from dblast.reproduction.strong.scoring import curve_trajectories, score_sets
from dblast.reproduction.strong.text import TextStore
from dblast.support.checks import check_whole
from dblast.support.files import MANIFEST, cache_folder, check_manifest, sha256_file
from dblast.support.progress import progress
from dblast.targets import Target
from dblast.training import Trainer, TrainingConfig

PLAN, SCORES, DRAFTER, STATE = "plan.json", "scores.csv", "drafter", "state.safetensors"


@dataclass(frozen=True)
class Sitting:
    """One sitting.

    Attributes:
        start: "shipped", "target" (its last layers), or the name of a sitting that has ended.
        layers: of a drafter that starts from the target.
        draft_vocabulary: number of tokens that it may draft, chosen anew in every sitting.
        tokens: of the text at most, the lowest shards first (None: all that is there).
        visits: how often a response is drawn while its shard is open.
        blocks: block lengths of the steps, in turn (empty: the drafter's own). A pass costs as many positions as its
            blocks have, while the first slots, which every pass needs, are learnt from as much by short ones.
        training: steps, rates and loss; the default is the best recipe known.
        shards: numbers and tokens of what it trains on; filled in when it begins.
    """

    start: str = "shipped"
    layers: int = 3
    draft_vocabulary: int = 8192
    tokens: int | None = None
    visits: int = 4
    window: int = 4
    blocks: tuple[int, ...] = ()
    training: TrainingConfig = TrainingConfig(
        loss="KD", optimizer="muon", steps=1000, learning_rate=1e-3, matrix_learning_rate=0.02, sequences=16, anchors=32,
        precision="bfloat16", evaluate_every=100,
    )  # fmt: skip
    shards: dict[int, int] = field(default_factory=dict)


def sitting_folder(name: str) -> Path:
    """Where a sitting lies; not a stage, so that cleaning the cache does not take it for unfinished work.

    Raises:
        DBlastError: a name that is no file's.
    """
    if not name or Path(name).name != name or name in ("shipped", "target"):
        raise DBlastError(f"--name must be a plain word other than 'shipped' and 'target', got {name!r}")
    return cache_folder() / "sittings" / name


def check(name: str, wanted: Sitting, store: TextStore) -> None:
    """Refuse what cannot work, before a target is loaded.

    Raises:
        DBlastError: a name that is no file's, a count below one, a start that is not there, or no text.
    """
    sitting_folder(name)
    check_whole("layers", wanted.layers, 1)
    check_whole("vocabulary", wanted.draft_vocabulary, 1)
    for block in wanted.blocks:
        check_whole("blocks: a block length", block, 1)
    if wanted.tokens is not None:
        check_whole("tokens", wanted.tokens, 1)
    if wanted.start not in ("shipped", "target") and not (sitting_folder(wanted.start) / DRAFTER).exists():
        raise DBlastError(f"--start must be shipped, target or a sitting that has ended, got {wanted.start!r}")
    if not store.indices():
        raise DBlastError(f"no text in {store.folder}; sample some with `python -m dblast text`")


def begin(name: str, wanted: Sitting, store: TextStore) -> Sitting:
    """The sitting of that name: as it was begun, or begun now.

    Raises:
        DBlastError: it was begun with other numbers; there is no text.
        ArtefactError: its plan is damaged.
    """
    path = sitting_folder(name) / PLAN
    if path.exists():
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            shards = {int(shard): tokens for shard, tokens in fields.pop("shards").items()}
            fields |= {
                "training": TrainingConfig(**fields["training"]),
                "shards": shards,
                "blocks": tuple(fields["blocks"]),
            }
            known = Sitting(**fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtefactError(f"{path} is damaged ({type(error).__name__}); delete {path.parent} and rerun") from None
        changed = [key for key, value in asdict(wanted).items() if key != "shards" and value != asdict(known)[key]]
        if changed:
            raise DBlastError(
                f"sitting {name!r} was begun with another {changed[0]}; give it as it was, or another --name"
            )
        return known
    check(name, wanted, store)
    shards, total = {}, 0
    for shard in store.indices():
        if wanted.tokens is None or total < wanted.tokens:
            shards[shard] = store.header(shard)["tokens"]
            total += shards[shard]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(wanted) | {"shards": shards})
    return begin(name, wanted, store)


def vocabulary(store: TextStore, shards: list[int], size: int, vocab_size: int) -> torch.Tensor:
    """The ``size`` most frequent response tokens of shards, ascending; ties go to the smaller id."""
    counts = sum(torch.bincount(store.read(shard)[1].responses, minlength=vocab_size) for shard in shards)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def start_of(sitting: Sitting, target: Target, responses: Responses) -> tuple[DBlastDrafter, list[dict]]:
    """The drafter that a sitting starts from, float32 and attached, and the sittings that it has had, oldest first."""
    first = responses.shard(responses.shards[0])
    if sitting.start in ("shipped", "target"):
        shape = DrafterConfig(
            layers=sitting.layers,
            taps=tuple(responses.taps),
            draft_vocabulary=sitting.draft_vocabulary,
            start=sitting.start,
        )
        drafter, past = start_drafter(shape, target, first, responses.taps), []
    else:
        folder = check_manifest(sitting_folder(sitting.start) / DRAFTER)
        drafter = DBlastDrafter.load(folder, dtype=torch.float32).to(target.device)
        past = json.loads((folder / "training.json").read_text(encoding="utf-8"))["sittings"]
    # The head is the target's own: other words, and more of them, cost no training.
    size = drafter.config.draft_vocab_size = min(sitting.draft_vocabulary, drafter.config.vocab_size)
    drafter.register_buffer("draft_token_ids", torch.full((size,), -1, device=drafter.device))
    drafter.set_draft_vocabulary(vocabulary(responses.store, responses.shards, size, drafter.config.vocab_size))
    return drafter.attach(target), past


def start_identity(sitting: Sitting) -> str:
    """What a start is, for the key of its training state."""
    if sitting.start in ("shipped", "target"):
        return sitting.start
    return sha256_file(sitting_folder(sitting.start) / DRAFTER / MANIFEST)


def run_sitting(
    name: str, sitting: Sitting, store: TextStore, target: Target, taps: list[int], plans: dict[str, Plan]
) -> pd.DataFrame:
    """Train, save and score one sitting; called again after a kill it goes on, and when it has ended it says its scores."""
    folder = sitting_folder(name)
    if (folder / SCORES).exists():
        return pd.read_csv(folder / SCORES)
    with locked(folder.with_suffix(".lock"), f"runs sitting {name}"):
        responses = Responses(store, list(sitting.shards), target, taps, sitting.window)
        drafter, past = start_of(sitting, target, responses)
        curve = curve_trajectories(next(iter(plans.values())))
        if not (folder / DRAFTER).exists():
            _train(folder, sitting, drafter, responses, _curve(curve), past)
        scores = score_sets(
            DBlastDrafter.load(folder / DRAFTER, dtype=torch.float32).to(target.device).attach(target), plans
        )
        scores.to_csv(folder / (SCORES + ".part"), index=False)
        os.replace(folder / (SCORES + ".part"), folder / SCORES)
        (folder / STATE).unlink(missing_ok=True)
    return scores


def _curve(rows: dict) -> Callable[[DBlastDrafter], dict]:
    def evaluate(drafter: DBlastDrafter) -> dict:
        tables = {setting: score(drafter, part, precision=torch.bfloat16) for setting, part in rows.items()}
        return {setting: table.anchor_accepted.sum() / table.anchors.sum() for setting, table in tables.items()}

    return evaluate


def _trainer(sitting: Sitting, drafter: DBlastDrafter, responses: Responses) -> Trainer:
    config = sitting.training
    # The trainer's own sampler would hold every row.
    trainer = Trainer(drafter, responses.shard(responses.shards[0])[:1], config)
    trainer.sampler = WindowSampler(
        responses, visits=sitting.visits, block_length=drafter.config.block_length, sequences=config.sequences,
        anchors=config.anchors, generator=torch.Generator().manual_seed(config.seed),
        with_support=trainer.sampler.with_support,
    )  # fmt: skip
    return trainer


def _advance(trainer: Trainer, sitting: Sitting) -> None:
    """One step, with the block length whose turn it is."""
    config = trainer.drafter.config
    own = config.block_size
    length = sitting.blocks[trainer.step % len(sitting.blocks)] if sitting.blocks else own - 1
    config.block_size, trainer.sampler.block_length = length + 1, length
    try:
        trainer.advance()
    finally:
        config.block_size = own


def for_minutes(
    name: str, sitting: Sitting, minutes: float, store: TextStore, target: Target, taps: list[int]
) -> Sitting:
    """The sitting with as many steps as fit into a time here and now; those of its plan, if it was begun already.

    Scoring, and recomputing states that are not kept, come on top.
    """
    if not minutes > 0:
        raise DBlastError(f"--minutes must be above 0, got {minutes}")
    path = sitting_folder(name) / PLAN
    if path.exists():
        steps = json.loads(path.read_text(encoding="utf-8"))["training"]["steps"]
    else:
        responses = Responses(store, store.indices()[: sitting.window], target, taps, sitting.window)
        drafter, _ = start_of(sitting, target, responses)
        trainer = _trainer(sitting, drafter, responses)
        # The first step reads the shards; then a turn of all block lengths, twice.
        _advance(trainer, sitting)
        start, turns = time.monotonic(), 2 * max(1, len(sitting.blocks))
        for _ in range(turns):
            _advance(trainer, sitting)
        steps = max(1, int(60 * minutes / (time.monotonic() - start) * turns))
    return replace(sitting, training=replace(sitting.training, steps=steps))


def _train(
    folder: Path, sitting: Sitting, drafter: DBlastDrafter, responses: Responses,
    evaluate: Callable[[DBlastDrafter], dict], past: list[dict],
) -> None:  # fmt: skip
    config, start, key = sitting.training, time.monotonic(), digest([asdict(sitting), start_identity(sitting)])
    trainer = _trainer(sitting, drafter, responses)
    if (folder / STATE).exists():
        trainer.load(folder / STATE, key)
    if not trainer.history:
        trainer.record(evaluate)
    blocks = config.blocks_per_step
    with progress(config.steps * blocks, f"sitting {folder.name}", unit="anchor", initial=trainer.step * blocks) as bar:
        while trainer.step < config.steps:
            _advance(trainer, sitting)
            bar.update(blocks)
            if trainer.step % config.evaluate_every == 0 or trainer.step == config.steps:
                trainer.record(evaluate)
                bar.write(
                    f"{folder.name}: " + ", ".join(f"{key} {value:.3f}" for key, value in trainer.history[-1].items())
                )
            if trainer.step % config.checkpoint_every == 0:
                trainer.save(folder / STATE, key)
    record = asdict(sitting) | {"name": folder.name, "history": trainer.history}
    record |= {"minutes of the last run": round((time.monotonic() - start) / 60, 1)}
    drafter.eval().save(folder / DRAFTER, {"sittings": [*past, record]})
