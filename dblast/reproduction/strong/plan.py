"""What SmolLM2's drafter is made from: its text."""

from __future__ import annotations

from functools import partial

from dblast.reproduction.identity import model_identity
from dblast.reproduction.strong.prompts import shard_prompts
from dblast.reproduction.strong.text import TextRecipe, TextStore, grow, text_folder
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

    return grow(store(recipe), recipe, lambda: load_target(TARGET), prompts, tokens, TAPS if keep_states else None, first, minutes)
