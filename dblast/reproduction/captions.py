"""Words that captions of figures and tables share: how many, and what an error is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def seeds_in_words(seeds: int) -> str:
    """``1 fine-tuning seed``, ``3 fine-tuning seeds``."""
    return f"{seeds} fine-tuning seed{'s' if seeds > 1 else ''}"


def over_prompts(seeds: int, paired: bool = False) -> str:
    """What an error is over: prompts, and fine-tuning seeds only where there are several, since one has no spread."""
    prompts = "prompts (paired)" if paired else "prompts"
    return f"{prompts} and fine-tuning seeds" if seeds > 1 else prompts


def error_words(seeds: int) -> str:
    """What ± is in a table of accepted lengths and gains from so many fine-tuning seeds."""
    return f"± one standard error: over prompts for lengths, over {over_prompts(seeds, paired=True)} for gains."


def sizes(numbers: Mapping[str, object]) -> str:
    """``tiny n = 116, smollm2 n = 88``."""
    return ", ".join(f"{name} n = {number}" for name, number in numbers.items())


def span(numbers: Iterable[int]) -> str:
    """``96``, or ``65 to 72`` where numbers differ."""
    low, high = min(numbers := list(numbers)), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
