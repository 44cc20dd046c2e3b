"""What SmolLM2's drafter is made from: its text, its sittings, what they reach."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
import torch

from dblast.drafter import DBlastDrafter
from dblast.reproduction.checkpoints import shipped_drafter
from dblast.reproduction.identity import model_identity
from dblast.reproduction.stages import Stage
from dblast.reproduction.strong.prompts import shard_prompts
from dblast.reproduction.strong.scaling import scaling_table
from dblast.reproduction.strong.scoring import OTHER_STYLE, evaluation_plans, score_sets
from dblast.reproduction.strong.sittings import Sitting, begin, check, for_minutes, run_sitting
from dblast.reproduction.strong.text import TextRecipe, TextStore, grow, text_folder
from dblast.support.files import MANIFEST, sha256_file
from dblast.targets import load_target

TARGET = "smollm2"
RECIPE = TextRecipe()
#: Tapped layers, those of the shipped drafter.
TAPS = [1, 8, 14, 21, 27]


def store(recipe: TextRecipe = RECIPE) -> TextStore:
    """The text's shards in the cache."""
    return TextStore(text_folder(recipe, model_identity(TARGET), TARGET))


def grow_text(recipe: TextRecipe, tokens: int, keep_states: bool, first: int, minutes: float) -> int:
    """Sample until the text has ``tokens`` response tokens or ``minutes`` are over; returns how many it has."""

    def prompts(target):
        return partial(shard_prompts, target, recipe.seed)

    return grow(
        store(recipe),
        recipe,
        lambda: load_target(TARGET),
        prompts,
        tokens,
        TAPS if keep_states else None,
        first,
        minutes,
    )


def run(name: str, sitting: Sitting, minutes: float | None = None) -> pd.DataFrame:
    """Begin or go on with a sitting, of as many steps as fit into ``minutes`` if they are given; returns its scores."""
    check(name, sitting, store())
    target = load_target(TARGET)
    if minutes is not None:
        sitting = for_minutes(name, sitting, minutes, store(), target, TAPS)
    sitting = begin(name, sitting, store())
    return run_sitting(name, sitting, store(), target, TAPS, evaluation_plans(target))


def shipped_scores() -> pd.DataFrame:
    """Scores of the shipped drafter; a stage, since nothing about it is made in sittings."""
    spec = {"drafter": sha256_file(shipped_drafter(TARGET) / MANIFEST), "prompts": sha256_file(OTHER_STYLE)}
    stage = Stage("shipped-scores", spec, score_sets)

    def compute(folder: Path) -> None:
        target = load_target(TARGET)
        drafter = DBlastDrafter.load(shipped_drafter(TARGET), dtype=torch.float32).attach(target)
        score_sets(drafter, evaluation_plans(target)).to_csv(folder / "scores.csv", index=False)

    return pd.read_csv(stage.run(compute) / "scores.csv")


def scaling() -> pd.DataFrame:
    """The scaling table."""
    return scaling_table(TARGET, shipped_scores())
