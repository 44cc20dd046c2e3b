"""Timing a speculative iteration by number of categories and by part; :mod:`dblast.reproduction.latency_tables` makes tables 6 and 7.

A step is everything between two target passes of the loop: draft, proposal, target pass over
b + 1 tokens with the tapped states, p, verification, and the commit to both caches. The bare pass
is the target alone over b + 1 tokens on a cache of the same context. All measurements are
interleaved, their order turning, so that a slow spell of the machine hits every one of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from transformers import DynamicCache

from dblast.cache import BlockDecoder
from dblast.decoding import target_support
from dblast.drafter import DBlastDrafter
from dblast.proposals import propose
from dblast.reproduction.experiments import for_decoding, open_drafter, open_target, prepare_pretrained
from dblast.reproduction.latency_tables import BARE, PARTS, REPEATS
from dblast.reproduction.plans import Plan
from dblast.reproduction.prompts.plan import evaluation_prompts
from dblast.sampling import SamplingSettings, get_setting
from dblast.support.progress import progress
from dblast.targets import Target
from dblast.verifier import verify_block

#: Categories that are timed; 0 is the drafter without expander and prior.
CATEGORIES = (0, 1, 2, 4, 8)
#: Prompts that are timed, at most half as many as a task has; of the tiny target, whose steps take a tenth of the time
#: and are the less steady for it, more.
PROMPTS, TINY_PROMPTS = 12, 60


class Clock:
    """Wall times in milliseconds by name; waits for the device before every reading."""

    def __init__(self, device: torch.device):
        self.device, self.times = device, defaultdict(list)
        self.last = 0.0

    def start(self) -> None:
        self.last = self._now()

    def lap(self, name: str) -> None:
        now = self._now()
        self.times[name].append(1000 * (now - self.last))
        self.last = now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@torch.no_grad()
def timed_step(decoder: BlockDecoder, settings: SamplingSettings, generator: torch.Generator, clock: Clock) -> None:
    """One step of the loop with a lap after each part."""
    clock.start()
    output = decoder.draft()
    clock.lap("draft")
    made = propose(decoder.drafter, output, decoder.drafter.config.block_length, generator=generator)
    clock.lap("propose")
    logits = decoder.score(made.drafted)
    clock.lap("target")
    tokens, p = target_support(logits, settings)
    clock.lap("p")
    outcome = verify_block(made, tokens, p, generator=generator)
    accepted = outcome.accepted.tolist()
    clock.lap("verify")
    decoder.commit(accepted, outcome.token)
    clock.lap("commit")
    clock.times["step"].append(sum(clock.times[part][-1] for part in PARTS))


@torch.no_grad()
def bare_pass(target: Target, ids: torch.Tensor, cache: DynamicCache, clock: Clock) -> None:
    """The target alone over a block on a filled cache, which is put back afterwards."""
    clock.start()
    target.model(input_ids=ids, cache=cache, use_cache=True)
    clock.lap(BARE)
    cache.crop(-ids.shape[1])


@torch.no_grad()
def measure(
    target: Target,
    drafters: dict[int, DBlastDrafter],
    prompts: Sequence[torch.Tensor],
    settings: SamplingSettings,
    repeats: int,
    description: str | None = None,
) -> pd.DataFrame:
    """Time steps of several drafters beside the bare target pass.

    Args:
        drafters: by number of categories, attached to the target and in its dtype.
        prompts: token ids, each longer than a block.
        repeats: steps of every drafter and prompt.

    Returns:
        ``K`` (-1 for the bare pass), ``prompt``, ``part`` (:data:`PARTS`, their sum "step", :data:`BARE`) and
        ``milliseconds``, the median over repeats; the first prompt was run once before, as a warm-up.
    """
    device, rows = target.device, []
    decoders = {k: BlockDecoder(target.model, drafter) for k, drafter in drafters.items()}
    generators = {k: torch.Generator(device=device).manual_seed(0) for k in drafters}
    size = next(iter(drafters.values())).config.block_size
    with progress(len(prompts) + 1, description, unit="prompt") as bar:
        for number, ids in enumerate([prompts[0], *prompts]):
            clocks = {k: Clock(device) for k in (-1, *drafters)}
            cache = DynamicCache(config=target.model.config)
            target.model(input_ids=ids[:-1].unsqueeze(0).to(device), cache=cache, use_cache=True, logits_to_keep=1)
            block = ids[-size:].unsqueeze(0).to(device)
            for decoder in decoders.values():
                decoder.start([ids], reserve=repeats * size)
            order = [-1, *decoders]
            for _ in range(repeats):
                for k in order:
                    if k == -1:
                        bare_pass(target, block, cache, clocks[-1])
                    else:
                        timed_step(decoders[k], settings, generators[k], clocks[k])
                # What comes after what matters: another cache was in use just before.
                order.append(order.pop(0))
            for k, clock in clocks.items() if number else ():
                for part, times in clock.times.items():
                    rows.append({"K": k, "prompt": number, "part": part, "milliseconds": float(np.median(times))})
            bar.update()
    return pd.DataFrame(rows)


def collect_latency(plan: Plan) -> pd.DataFrame:
    """:func:`measure` for the plan's drafter with 0 to 8 categories, with a column ``target``.

    The heads are fresh: what a pass costs does not depend on their weights.
    """
    target = open_target(plan)
    pretrained = open_drafter(prepare_pretrained(plan), target)
    drafters = {k: pretrained.with_categories(k, 0) if k else pretrained for k in CATEGORIES}
    drafters = {k: for_decoding(drafter, target) for k, drafter in drafters.items()}
    size = plan.drafter.block_length + 1
    prompts = [torch.tensor(p.ids) for p in evaluation_prompts(plan, target) if len(p.ids) > size]
    count = min(PROMPTS, max(1, (plan.data.evaluation_per_task or 2 * PROMPTS) // 2))
    if plan.tiny is not None:
        count = min(TINY_PROMPTS, len(prompts) // 2)
    chosen = prompts[:: max(1, len(prompts) // count)][:count]
    table = measure(target, drafters, chosen, get_setting("medium"), REPEATS, f"{plan.label} latency")
    table.insert(0, "target", plan.label)
    return table
