"""Tokens per second of decoding with a drafter and without, on real prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pandas as pd
import torch

from dblast.decoding import generate
from dblast.drafter import DBlastDrafter
from dblast.reproduction.demo import plain_speed
from dblast.reproduction.experiments import for_decoding
from dblast.sampling import SETTINGS
from dblast.targets import Target

#: Prompts decoded at every setting to time it, and tokens of a timed answer at most.
TIMED_PROMPTS, TIMED_TOKENS = 4, 64


def decoding_speed(
    target: Target,
    drafter: DBlastDrafter,
    prompts: list[list[int]],
    chosen: dict[str, float],
    tokens: int,
    seed: int = 0,
    names: Sequence[str] = tuple(SETTINGS),
) -> pd.DataFrame:
    """Tokens per second of decoding with the drafter and without, one prompt at a time, by setting.

    Args:
        chosen: category temperatures by setting; 1 where there is none.
        names: of the settings.

    Returns:
        ``setting, drafted, plain, ratio, accepted_length, prompts``.
    """
    drafter, tokens = for_decoding(drafter, target), min(tokens, TIMED_TOKENS)
    rows = []
    for name in names:
        settings, temperature = SETTINGS[name], chosen.get(name, 1.0)
        count = passes = 0
        seconds = plain_seconds = 0.0
        if not rows:  # the first passes are slower than all others
            rng = torch.Generator(device=target.device).manual_seed(seed)
            generate(target, drafter, prompts[:1], settings, max_new_tokens=4, generator=rng)
            plain_speed(target, prompts[0], settings, 4, seed)
        for number, ids in enumerate(prompts):
            rng = torch.Generator(device=target.device).manual_seed(seed + number)
            begin = time.perf_counter()
            result = generate(
                target, drafter, [ids], settings, max_new_tokens=tokens, category_temperature=temperature, generator=rng
            )
            spent = time.perf_counter() - begin
            plain = plain_speed(target, ids, settings, tokens, seed + number)
            new = len(result.tokens[0])
            count, passes = count + new, passes + result.passes
            seconds, plain_seconds = seconds + spent, plain_seconds + new / plain
        drafted, plain = count / seconds, count / plain_seconds
        rows.append(
            {
                "setting": name,
                "drafted": drafted,
                "plain": plain,
                "ratio": drafted / plain,
                "accepted_length": (count - passes) / passes,
                "prompts": len(prompts),
            }
        )
    return pd.DataFrame(rows)
