"""Tokens per second of decoding with a drafter and without, on real prompts."""

from __future__ import annotations

import time

import pandas as pd
import torch

from dblast.decoding import generate
from dblast.drafter import DBlastDrafter
from dblast.reproduction.demo import plain_speed
from dblast.reproduction.experiments import for_decoding
from dblast.sampling import SETTINGS
from dblast.targets import Target

#: Tokens of a timed answer at most.
TIMED_TOKENS = 64


def decoding_speed(
    target: Target,
    drafter: DBlastDrafter,
    prompts: list[list[int]],
    chosen: dict[str, float],
    tokens: int,
    seed: int = 0,
) -> pd.DataFrame:
    """Tokens per second of decoding with the drafter and without, one prompt at a time, by setting.

    Returns:
        ``setting, drafted, plain, ratio, accepted_length, prompts``.
    """
    drafter, tokens = for_decoding(drafter, target), min(tokens, TIMED_TOKENS)
    rows = []
    for name, settings in SETTINGS.items():
        temperature = chosen.get(name, 1.0)
        count = passes = 0
        seconds = plain_seconds = 0.0
        for number, ids in enumerate([prompts[0], *prompts]):
            rng = torch.Generator(device=target.device).manual_seed(seed + number)
            begin = time.perf_counter()
            result = generate(
                target, drafter, [ids], settings, max_new_tokens=tokens, category_temperature=temperature, generator=rng
            )
            spent = time.perf_counter() - begin
            plain = plain_speed(target, ids, settings, tokens, seed + number)
            if number == 0:  # the first warms up
                continue
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
