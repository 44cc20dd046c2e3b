"""What a node of a draft tree costs, how many to verify, and what that makes of tokens per second.

Measured on the machine at hand: the target alone by the number of tokens it reads at once, whole steps of the loop by
size of the tree, and decoding end to end. All are interleaved, their order turning, as in
:mod:`dblast.reproduction.latency`. For a GPU there is arithmetic alone: :func:`roofline`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache

from dblast.cache import BlockDecoder
from dblast.decoding import generate, target_support
from dblast.reproduction.beyond.scores import DRAFT_TOP_K, TREE_BLOCKS, choose_temperatures, collect_proposals
from dblast.reproduction.demo import plain_run
from dblast.reproduction.experiments import for_decoding, open_drafter, open_target, prepare_variant
from dblast.reproduction.latency import Clock, bare_pass, timed_step
from dblast.reproduction.plans import Plan, Variant
from dblast.reproduction.prompts.plan import calibration_ids, evaluation_prompts
from dblast.sampling import SamplingSettings, get_setting
from dblast.support.progress import progress
from dblast.trees import draft_tree, walk

#: Parts of a step with a tree.
TREE_PARTS = ("draft", "tree", "target", "p", "walk", "commit")
#: Prompts and steps of each that are timed, and the drafter that drafts.
PROMPTS, REPEATS, TIMED = 12, 12, Variant(4, "NLL")
#: Decoded against each other: K, loss, proposal, blocks of b tokens; and how many prompts of every task.
CONTENDERS = (
    *((k, loss, "greedy_branch", 1) for k, loss in ((1, "NLL"), (4, "AL"))),
    *((k, loss, "soft", 1) for k, loss in ((1, "NLL"), (4, "AL"))),
    *((k, "NLL", "tree", blocks) for k in (1, 4) for blocks in (1, 2, 4)),
)
PROMPTS_PER_TASK = 3


@torch.no_grad()
def timed_tree_step(
    decoder: BlockDecoder, nodes: int, settings: SamplingSettings, generator: torch.Generator, clock: Clock
) -> None:
    """One step of the loop with a tree of N nodes, with a lap after each part."""
    clock.start()
    output = decoder.draft()
    clock.lap("draft")
    tree = draft_tree(decoder.drafter, output, nodes)
    clock.lap("tree")
    logits = decoder.score(tree.tokens, tree)
    clock.lap("target")
    tokens, p = target_support(logits, settings)
    clock.lap("p")
    outcome = walk(tree, tokens, p, generator=generator)
    accepted = outcome.accepted.tolist()
    clock.lap("walk")
    decoder.commit(accepted, outcome.token, outcome.path)
    clock.lap("commit")
    clock.times["step"].append(sum(clock.times[part][-1] for part in TREE_PARTS))


@torch.no_grad()
def measure_widths(target, drafter, prompts: Sequence[Tensor], sizes: Sequence[int], repeats: int) -> pd.DataFrame:
    """Time the target alone on 1, b + 1 and N + 1 tokens, the step with a block, and steps with trees of N nodes.

    Args:
        drafter: attached, in the target's dtype.
        prompts: token ids, each longer than the largest tree.
        sizes: N of every tree.

    Returns:
        ``proposal`` ("none", the target alone; "greedy_branch"; "tree"), ``nodes`` drafted, ``prompt``, ``part`` and
        ``milliseconds``, the median over repeats; the first prompt was run once before, as a warm-up.
    """
    b, settings, rows = drafter.config.block_length, get_setting("medium"), []
    jobs = [("none", n) for n in sorted({0, b, *sizes})] + [("greedy_branch", b)] + [("tree", n) for n in sizes]
    decoders = {job: BlockDecoder(target.model, drafter) for job in jobs if job[0] != "none"}
    generators = {job: torch.Generator(device=target.device).manual_seed(0) for job in decoders}
    for number, ids in enumerate([prompts[0], *prompts]):
        clocks = {job: Clock(target.device) for job in jobs}
        cache = DynamicCache(config=target.model.config)
        context = ids[:-1].unsqueeze(0).to(target.device)
        target.model(input_ids=context, cache=cache, use_cache=True, logits_to_keep=1)
        for job, decoder in decoders.items():
            decoder.start([ids], reserve=repeats * (b + 1) + job[1])
        order = list(jobs)
        for _ in range(repeats):
            for job in order:
                kind, nodes = job
                if kind == "none":
                    bare_pass(target, context[:, -nodes - 1 :], cache, clocks[job])
                elif kind == "tree":
                    timed_tree_step(decoders[job], nodes, settings, generators[job], clocks[job])
                else:
                    timed_step(decoders[job], settings, generators[job], clocks[job])
            order.append(order.pop(0))
        for (kind, nodes), clock in clocks.items() if number else ():
            for part, times in clock.times.items():
                names = {"proposal": kind, "nodes": nodes, "prompt": number, "part": part}
                rows.append(names | {"milliseconds": float(np.median(times))})
    return pd.DataFrame(rows)


def collect_widths(plan: Plan) -> pd.DataFrame:
    """:func:`measure_widths` for the plan's drafter with four categories, with a column ``target``."""
    target = open_target(plan)
    drafter = for_decoding(open_drafter(prepare_variant(plan, TIMED, plan.seeds[0]), target), target)
    sizes = [blocks * plan.drafter.block_length for blocks in TREE_BLOCKS]
    texts = [torch.tensor(p.ids) for p in evaluation_prompts(plan, target)]
    # Repeated until they are longer than the largest tree.
    texts = [ids.repeat(1 + (max(sizes) + 1) // len(ids)) for ids in texts]
    table = measure_widths(target, drafter, texts[:: max(1, len(texts) // PROMPTS)][:PROMPTS], sizes, REPEATS)
    table.insert(0, "target", plan.label)
    return table


def width_rows(widths: pd.DataFrame) -> pd.DataFrame:
    """Median milliseconds over prompts: ``target, proposal, nodes, milliseconds`` (of the whole step) and ``relative`` to the
    target alone on one token."""
    whole = widths[widths.part.isin(["step", "bare"])]
    rows = whole.groupby(["target", "proposal", "nodes"], sort=False).milliseconds.median().reset_index()
    one = rows[(rows.proposal == "none") & (rows.nodes == 0)].set_index("target").milliseconds
    return rows.assign(relative=rows.milliseconds / rows.target.map(one))


def best_fixed_size(accepted: Mapping[int, float], cost: Mapping[int, float]) -> int:
    """The size with the largest (1 + accepted length) / cost; the smallest of equals."""
    return max(sorted(cost), key=lambda size: (1 + accepted[size]) / cost[size])


def roofline(parameters: float, width: int, bandwidth: float, flops: float, bytes_each: float = 2) -> float:
    """Seconds of a target pass over ``width`` tokens, by arithmetic: the slower of reading all weights and multiplying.

    Attention, launches and caches are left out, which is most of the time of a small model.

    Args:
        parameters: of the target.
        bandwidth: of the memory, bytes/s.
        flops: operations/s that the products reach; each weight costs two a token.
        bytes_each: bytes of a weight.
    """
    return max(parameters * bytes_each / bandwidth, 2 * parameters * width / flops)


def collect_speed(plan: Plan) -> pd.DataFrame:
    """Decode some held-out prompts with every contender and plainly, in turn, and time it.

    Returns:
        ``target, setting, task, prompt_id, method, proposal, nodes, tokens, seconds, passes``; plain sampling by the
        target's own ``generate`` has method "plain" and as many passes as tokens.
    """
    target, calibration = open_target(plan), calibration_ids(plan)
    chosen = choose_temperatures(collect_proposals(plan))
    kept: dict[str, list] = {}
    for prompt in evaluation_prompts(plan, target):
        if prompt.prompt_id not in calibration:
            kept.setdefault(prompt.task, []).append(prompt)
    prompts = [prompt for rows in kept.values() for prompt in rows[:PROMPTS_PER_TASK]]
    jobs = [job for job in CONTENDERS if Variant(job[0], job[1]) in plan.variants]
    variants = {(k, loss): Variant(k, loss) for k, loss, *_ in jobs}
    decoders = {}
    for key, variant in variants.items():
        drafter = open_drafter(prepare_variant(plan, variant, plan.seeds[0]), target)
        decoders[key] = BlockDecoder(target.model, for_decoding(drafter, target))
    rows = []
    with progress(len(prompts) * len(plan.data.settings), f"{plan.label} speed", unit="prompt") as bar:
        for setting in plan.data.settings:
            options = {job: _options(chosen, plan, setting, *job) for job in jobs}
            order = [None, *jobs]
            for number, prompt in enumerate([prompts[0], *prompts]):  # the first one is a warm-up
                for job in order:
                    names = {
                        "target": plan.label,
                        "setting": setting,
                        "task": prompt.task,
                        "prompt_id": prompt.prompt_id,
                    }
                    names |= _timed(plan, target, prompt.ids, setting, number, job, decoders, options, variants)
                    if number:
                        rows.append(names)
                order.append(order.pop(0))
                bar.update(int(number > 0))
    return pd.DataFrame(rows)


def _options(chosen: pd.DataFrame, plan: Plan, setting: str, k: int, loss: str, proposal: str, blocks: int) -> dict:
    """Arguments of ``generate`` at the calibrated temperatures."""
    nodes = blocks * plan.drafter.block_length
    rows = chosen[(chosen.K == k) & (chosen.loss == loss) & (chosen.construction == "all_prefixes")]
    rows = rows[(rows.setting == setting) & (rows.proposal == proposal) & (rows.nodes == nodes)]
    z, warm = rows[["category_temperature", "draft_temperature"]].iloc[0]
    options = {"mode": proposal, "category_temperature": 1.0 if k == 1 else float(z)}
    if proposal == "tree":
        options["nodes"] = nodes
    if proposal == "soft":
        options |= {"draft_temperature": float(warm), "draft_top_k": DRAFT_TOP_K}
    return options


def _timed(plan, target, ids, setting, seed, job, decoders, options, variants) -> dict:
    settings, budget = get_setting(setting), plan.data.evaluation_tokens
    if job is None:
        tokens, seconds = plain_run(target, list(ids), settings, budget, seed)
        names = {"method": "plain", "proposal": "none", "nodes": 0}
        return names | {"tokens": tokens, "seconds": seconds, "passes": tokens}
    k, loss, proposal, blocks = job
    decoder, rng = decoders[k, loss], torch.Generator(device=target.device).manual_seed(seed)
    start = time.perf_counter()
    result = generate(
        target, decoder.drafter, [list(ids)], settings, max_new_tokens=budget, generator=rng, decoder=decoder, **options[job]
    )  # fmt: skip
    seconds, nodes = time.perf_counter() - start, blocks * plan.drafter.block_length
    names = {"method": variants[k, loss].method, "proposal": proposal, "nodes": nodes}
    return names | {"tokens": len(result.tokens[0]), "seconds": seconds, "passes": result.passes}


def speed_rows(speed: pd.DataFrame, replicates: int = 2000) -> pd.DataFrame:
    """Tokens per second of every contender, and over plain sampling with a 95 % interval (paired bootstrap over prompts).

    Returns:
        ``target, setting, method, proposal, nodes, accepted_length, tokens_per_second, over_plain, ci_low, ci_high, n``.
    """
    rows = []
    for (target, setting), part in speed.groupby(["target", "setting"], sort=False):
        plain = part[part.method == "plain"].set_index("prompt_id")
        drawn = np.random.default_rng(0).integers(len(plain), size=(replicates, len(plain)))
        sides = {"plain": (plain.tokens.to_numpy(float), plain.seconds.to_numpy())}
        for names, mine in part[part.method != "plain"].groupby(["method", "proposal", "nodes"], sort=False):
            mine = mine.set_index("prompt_id").loc[plain.index]
            ours = mine.tokens.to_numpy(float), mine.seconds.to_numpy()
            rate = {
                side: values[0][drawn].sum(1) / values[1][drawn].sum(1)
                for side, values in (sides | {"ours": ours}).items()
            }
            low, high = np.quantile(rate["ours"] / rate["plain"], (0.025, 0.975))
            whole, base = ours[0].sum() / ours[1].sum(), sides["plain"][0].sum() / sides["plain"][1].sum()
            row = dict(
                zip(("target", "setting", "method", "proposal", "nodes"), (target, setting, *names), strict=True)
            )
            row |= {"accepted_length": (mine.tokens.sum() - mine.passes.sum()) / mine.passes.sum()}
            row |= {"tokens_per_second": whole, "over_plain": whole / base, "ci_low": low, "ci_high": high}
            rows.append(row | {"n": len(plain)})
    return pd.DataFrame(rows)


#: GPUs for :func:`roofline`: bytes/s of memory, 16-bit operations/s of dense products; from the makers' data sheets.
GPUS = {"A100 80 GB": (2.0e12, 312e12), "H100 SXM": (3.35e12, 989e12)}
#: Parameters of targets that the arithmetic is done for.
TARGETS = {"SmolLM2-135M": 135e6, "Qwen3-4B": 4.0e9, "Qwen3-8B": 8.2e9}


def roofline_table(sizes: Sequence[int]) -> pd.DataFrame:
    """By arithmetic: a pass over an anchor and N nodes as a multiple of a pass over one token, and the width at which products
    begin to take longer than reading the weights (the same for every target)."""
    rows = {}
    for name, (bandwidth, flops) in GPUS.items():
        for target, parameters in TARGETS.items():
            one = roofline(parameters, 1, bandwidth, flops)
            row = {f"{n + 1} tokens": round(roofline(parameters, n + 1, bandwidth, flops) / one, 2) for n in sizes}
            rows[name, target] = (
                {"one token (ms)": round(1000 * one, 2)} | row | {"free up to (tokens)": int(flops / bandwidth)}
            )
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["GPU", "target"])


def cost_rows(widths: pd.DataFrame, scores: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second that replay's accepted length and the measured steps make, by size of the tree, and the best size.

    Args:
        widths: of all targets, from :func:`collect_widths`.
        scores: rows of :func:`dblast.reproduction.beyond.study.proposal_rows`.

    Returns:
        ``target, setting, method, nodes, accepted_length, milliseconds, tokens_per_second, over_plain`` and ``best``.
    """
    steps, rows = width_rows(widths).set_index(["target", "proposal", "nodes"]), []
    for (target, setting, method), part in scores[scores.proposal == "tree"].groupby(
        ["target", "setting", "method"], sort=False
    ):
        plain, lengths = steps.milliseconds[target, "none", 0], part.set_index("nodes").accepted_length.to_dict()
        cost = {nodes: steps.milliseconds[target, "tree", nodes] for nodes in lengths}
        best = best_fixed_size(lengths, cost)
        for nodes, length in lengths.items():
            names = {"target": target, "setting": setting, "method": method, "nodes": nodes, "accepted_length": length}
            rate = 1000 * (1 + length) / cost[nodes]
            names |= {"milliseconds": cost[nodes], "tokens_per_second": rate, "over_plain": rate * plain / 1000}
            rows.append(names | {"best": nodes == best})
    return pd.DataFrame(rows)
