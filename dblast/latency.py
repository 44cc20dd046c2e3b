"""What a speculative iteration costs, by number of categories and by part (the paper's tables 6 and 7).

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

from dblast.bootstrap import Resampled
from dblast.decoding_cache import BlockDecoder
from dblast.drafter import DBlastDrafter
from dblast.experiments import for_decoding, open_drafter, open_target, prepare_pretrained
from dblast.generate import target_support
from dblast.initialise import add_categories
from dblast.plan_prompts import evaluation_prompts
from dblast.plans import Plan
from dblast.progress import progress
from dblast.proposals import propose
from dblast.sampling import SamplingSettings, get_setting
from dblast.tables import Table, read_paper
from dblast.targets import Target
from dblast.verifier import verify_block

PARTS = ("draft", "propose", "target", "p", "verify", "commit")
#: Categories that are timed; 0 is the drafter without expander and prior.
CATEGORIES = (0, 1, 2, 4, 8)
#: Prompts (at most half as many as a task has), and as many repeats that each of the above and the bare pass comes
#: first equally often.
PROMPTS, REPEATS = 12, 12
#: The name of the bare target pass among the parts.
BARE = "bare"


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
    outcome = verify_block(made.drafted, made.q_drafted, made.q_at, tokens, p, generator=generator)
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
    drafters = {k: add_categories(pretrained, k, 0) if k else pretrained for k in CATEGORIES}
    drafters = {k: for_decoding(drafter, target) for k, drafter in drafters.items()}
    size = plan.drafter.block_length + 1
    prompts = [torch.tensor(p.ids) for p in evaluation_prompts(plan, target) if len(p.ids) > size]
    count = min(PROMPTS, max(1, (plan.data.evaluation_per_task or 2 * PROMPTS) // 2))
    chosen = prompts[:: max(1, len(prompts) // count)][:count]
    table = measure(target, drafters, chosen, get_setting("medium"), REPEATS, f"{plan.label} latency")
    table.insert(0, "target", plan.label)
    return table


def _by_prompt(latency: pd.DataFrame, part: str) -> pd.DataFrame:
    """Milliseconds with a row for every prompt and a column for every K."""
    return latency[latency.part == part].pivot(index="prompt", columns="K", values="milliseconds").sort_index()


def overhead(latency: pd.DataFrame, k: int, base: int = 0, *, replicates: int = 2000) -> Resampled:
    """By how many per cent a step with k categories is slower than one with ``base``: median over prompts.

    The interval is a paired bootstrap over prompts, which were measured one after the other: it tells
    how steady the machine was, not what another machine would do.

    Args:
        latency: of one target, from :func:`collect_latency`.
    """
    steps = _by_prompt(latency, "step")
    # Prompt by prompt: contexts of other lengths take other times.
    more = 100 * (steps[k] / steps[base] - 1).to_numpy()
    drawn = np.random.default_rng(0).integers(len(more), size=(replicates, len(more)))
    low, high = np.quantile(np.median(more[drawn], axis=1), (0.025, 0.975))
    return Resampled(float(np.median(more)), float(low), float(high), len(more), 1)


def latency_rows(latency: pd.DataFrame) -> pd.DataFrame:
    """Tables 6 and 7 of one target.

    Returns:
        ``target, K, step`` (ms, median over prompts), ``overhead, ci_low, ci_high`` (per cent over K = 0),
        ``over_bare`` (step over the bare target pass), every part as ``"<part> (ms)"``, and ``n`` prompts.
    """
    bare = _by_prompt(latency, BARE)[-1].median()
    rows = []
    for k in sorted(set(latency.K) - {-1}):
        step, more = _by_prompt(latency, "step")[k].median(), overhead(latency, k)
        rows.append(
            {
                "target": latency.target.iloc[0],
                "K": k,
                "step": step,
                "overhead": more.value,
                "ci_low": more.low,
                "ci_high": more.high,
                "over_bare": step / bare,
                **{f"{part} (ms)": _by_prompt(latency, part)[k].median() for part in PARTS},
                "n": more.n,
            }
        )
    return pd.DataFrame(rows)


def latency_table(latency: pd.DataFrame) -> Table:
    """Tables 6 and 7 of one target: a step by number of categories, and its parts, beside the paper's overhead."""
    rows = latency_rows(latency)
    paper = read_paper("table6_7_latency").query("target == 'Qwen3-4B'")
    names = {0: "DFlash (no expander)", 1: "DFlash (with expander)"}
    printed = dict(zip(paper.method.where(paper.K == 1, "K = " + paper.K.astype(str)), paper.overhead_percent, strict=True))
    lines = []
    for row in rows.to_dict("records"):
        drafter = names.get(row["K"], f"K = {row['K']}")
        line = {"drafter": drafter, "step (ms)": f"{row['step']:.1f}", "over the bare pass": f"{row['over_bare']:.2f}"}
        more = f"{row['overhead']:+.1f} [{row['ci_low']:+.1f}, {row['ci_high']:+.1f}]"
        line["over no expander (%)"] = more if row["K"] else ""
        line["paper (%)"] = f"{printed[drafter]:+.1f}" if row["K"] and drafter in printed else ""
        lines.append(line | {name: f"{row[name]:.2f}" for name in (f"{part} (ms)" for part in PARTS)})
    return Table(
        f"table6_7_{rows.target[0]}",
        f"Tables 6 and 7 ({rows.target[0]})",
        f"Time of one speculative step for a single sequence, median over {rows.n.max()} prompts of the median of {REPEATS} "
        "steps, all drafters in turn; over the target alone on as many tokens, and in per cent over the drafter without "
        "expander with 95 % intervals (paired bootstrap over prompts: this machine's steadiness, not another machine's time); "
        "paper: Qwen3-4B on a GPU.",
        rows,
        pd.DataFrame(lines).set_index("drafter"),
    )
