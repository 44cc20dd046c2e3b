"""What the stages of a run cost, as ratios within one run, and how drafting, training and replay grow.

    python benchmarks/stage_costs.py                        # SmolLM2's shapes: about 20 minutes on a quiet machine
    python benchmarks/stage_costs.py --parts ways growth    # leave out what needs a quiet machine
    python benchmarks/stage_costs.py --small                # a toy shape, for a test of the script

Random weights, texts and states: what is timed does not depend on them, except for how far drafts agree with the
text, which is set by ``--agreement``. Ways and growth are processor time of one thread, the least of several
repetitions that take turns; every cell runs in a process of its own, whose peak memory (above that at its start) is
its own. The busy machine is wall time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import pandas as pd  # noqa: E402
import torch  # noqa: E402

from dblast import drafter as drafter_module  # noqa: E402
from dblast import replay  # noqa: E402
from dblast.backbone import DBlastConfig  # noqa: E402
from dblast.drafter import DBlastDrafter  # noqa: E402
from dblast.proposals import point_masses  # noqa: E402
from dblast.support import chunked  # noqa: E402
from dblast.training import Trainer, TrainingConfig  # noqa: E402
from dblast.trajectories import Trajectory  # noqa: E402

PARTS = ("ways", "busy", "growth")


@dataclass(frozen=True)
class Sizes:
    """Shapes of the drafter and of a training step, and the values that growth is measured at."""

    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    kv_heads: int = 3
    layers: int = 3
    taps: int = 5
    vocabulary: int = 49152
    draft_vocabulary: int = 8192
    sequences: int = 4
    anchors: int = 32
    response: int = 64
    context: int = 128
    repetitions: int = 3
    precision: str = "bfloat16"
    categories: tuple[int, ...] = (1, 2, 4, 8, 16)
    block_lengths: tuple[int, ...] = (3, 7, 15, 31)
    contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4096)


SMALL = Sizes(
    hidden=16, intermediate=32, heads=2, kv_heads=1, layers=1, taps=2, vocabulary=60, draft_vocabulary=40, sequences=2,
    anchors=4, response=10, context=8, repetitions=1, precision="float32", categories=(1, 4), block_lengths=(3, 7),
    contexts=(8, 32),
)  # fmt: skip


def make_drafter(sizes: Sizes, categories: int = 4, block_length: int = 7) -> DBlastDrafter:
    """Random weights and tables of these shapes."""
    torch.manual_seed(0)
    config = DBlastConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocabulary,
        block_size=block_length + 1,
        num_target_layers=sizes.taps,
        dflash_config={"target_layer_ids": list(range(sizes.taps)), "mask_token_id": 0},
        num_categories=categories,
        draft_vocab_size=sizes.draft_vocabulary,
    )
    drafter = DBlastDrafter(config)
    drafter.set_draft_vocabulary(torch.arange(sizes.draft_vocabulary))
    dtype = getattr(torch, sizes.precision)
    # Logits of the size that a language model's have: much larger ones make denormal numbers, which are slow.
    tables = (0.1 * torch.randn(sizes.vocabulary, sizes.hidden) for _ in range(2))
    return drafter.attach_tables(*(table.to(dtype) for table in tables))


def make_text(sizes: Sizes, context: int) -> Trajectory:
    """A random text after a prompt of ``context`` tokens."""
    n, rng = sizes.response, torch.Generator().manual_seed(1)
    ids = torch.randint(sizes.draft_vocabulary, (context + n,), generator=rng)
    features = torch.randn(context + n - 1, sizes.taps * sizes.hidden, generator=rng).to(torch.bfloat16)
    log_p = -2 * torch.rand(n, generator=rng)
    alone = ids[context:].unsqueeze(-1), log_p.unsqueeze(-1)
    return Trajectory("r", "random", ids[:context], ids[context:], log_p, -log_p, log_p.exp(), *alone, features)


def training(sizes: Sizes, loss: str, categories: int = 4, block_length: int = 7, context: int | None = None) -> Callable:
    """One step of training."""
    config = TrainingConfig(
        loss=loss, steps=1000, sequences=sizes.sequences, anchors=sizes.anchors, precision=sizes.precision
    )
    rows = [make_text(sizes, context or sizes.context)] * sizes.sequences
    return Trainer(make_drafter(sizes, categories, block_length), rows, config).advance


def scoring(sizes: Sizes, agreement: float, categories: int = 4, block_length: int = 7, context: int | None = None) -> Callable:
    """Replay of one text at eight category temperatures, of which drafts get each token right with this probability."""
    drafter, text = make_drafter(sizes, categories, block_length).eval(), make_text(sizes, context or sizes.context)
    rng = torch.Generator().manual_seed(2)
    greedy = drafter.greedy_tokens

    def some(hidden: torch.Tensor) -> torch.Tensor:
        """The head's work, then tokens that are the stored ones as often as was asked for."""
        return torch.where(torch.rand(hidden.shape[:-1], generator=rng) < agreement, 1, greedy(hidden))

    drafter.greedy_tokens = some
    text.response_ids = torch.ones_like(text.response_ids)
    temperatures = [0.2 * i for i in range(8)]
    return lambda: replay.trajectory_acceptance(drafter, text, temperatures, precision=getattr(torch, sizes.precision))


def drafting(sizes: Sizes, categories: int = 4, block_length: int = 7, context: int | None = None) -> Callable:
    """One draft after a context whose keys and values are there."""
    drafter, length = make_drafter(sizes, categories, block_length).eval(), context or sizes.context
    features = torch.randn(1, length, sizes.taps * sizes.hidden)
    anchor, place = torch.tensor([[1]]), torch.tensor([[length]])

    @torch.no_grad()
    def run() -> None:
        hidden = drafter.block_hidden(anchor, place, cache, None)
        drafter.greedy_tokens(drafter.heads(hidden).branch_hidden)

    with torch.no_grad():
        cache = drafter.context_cache(features, torch.arange(length)[None])
    return run


def full_table(drafter, hidden, tokens, valid):
    """Every slot of every branch, as replay once scored."""
    return point_masses(drafter.greedy_tokens(hidden), tokens)


def processor_time(run: Callable) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def apart(function: Callable, *arguments) -> dict:
    """What a function returns, in a forked process, with ``GiB``: its peak memory above that at its start."""

    def work(sender) -> None:
        torch.set_num_threads(1)
        page = os.sysconf("SC_PAGE_SIZE")
        before = int(Path("/proc/self/statm").read_text().split()[1]) * page
        result = function(*arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        sender.send(result | {"GiB": max(0, peak - before) / 2**30})

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work, args=(sender,))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


# -- the parts ---------------------------------------------------------------------------------------


def ways(sizes: Sizes, agreement: float) -> pd.DataFrame:
    """Processor time of every stage done in the way that it was, over the time of the way that it is done."""
    earlier = {
        "logits multiplied twice": lambda: mock.patch.object(chunked, "KEPT_LOGITS", 0),
        "32 anchors a row": lambda: mock.patch.object(drafter_module, "ANCHORS_PER_ROW", 32),
        "every slot of every branch": lambda: mock.patch.object(replay, "agreeing_log_q", full_table),
    }
    rows = []
    for categories in (1, 4):
        stages = {
            "training, NLL": (lambda: training(sizes, "NLL", categories), list(earlier)[:2]),
            "training, AL": (lambda: training(sizes, "AL", categories), list(earlier)[:2]),
            "replay": (lambda: scoring(sizes, agreement, categories), list(earlier)[1:]),
        }
        for stage, (make, names) in stages.items():

            def measured() -> dict:
                run, least = make(), {}
                run()
                for _ in range(sizes.repetitions):
                    for name in (None, *names):
                        with earlier[name]() if name else mock.patch.dict({}):
                            least[name] = min(processor_time(run), least.get(name, math.inf))
                return {str(name): value for name, value in least.items()}

            times = apart(measured)
            for name in names:
                ratio = times[name] / times["None"]
                rows.append({"stage": stage, "K": categories, "way": name, "seconds": times["None"], "ratio": ratio})
    return pd.DataFrame(rows)


def speed(sizes: Sizes, threads: int, seconds: float) -> float:
    """Anchors per second of training, by the clock."""
    torch.set_num_threads(threads)
    run = training(sizes, "NLL")
    run()
    began, steps = time.perf_counter(), 0
    while steps < 1 or time.perf_counter() - began < seconds:
        run()
        steps += 1
    return steps * sizes.sequences * sizes.anchors / (time.perf_counter() - began)


def busy(small: bool, seconds: float) -> pd.DataFrame:
    """Training with one and two threads, alone and beside one process that never rests, by the way idle threads wait."""
    rows = []
    for threads in (1, 2):
        for policy in ("passive", "active"):
            found = []
            for spinning in (False, True):
                environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": policy}
                beside = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if spinning else None
                try:
                    command = [sys.executable, str(Path(__file__).resolve()), "--cell", json.dumps([small, threads, seconds])]
                    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                finally:
                    if beside:
                        beside.kill()
                        beside.wait()
                found.append(json.loads(done.stdout.splitlines()[-1]))
            alone, loaded = found
            rows.append({"threads": threads, "wait policy": policy, "alone": alone, "beside": loaded, "kept": loaded / alone})
    return pd.DataFrame(rows)


#: How time and memory may grow at most, as a power: everything is a sum of terms in which each of these stands once,
#: but for attention inside a packed row, which is quadratic in b (and small up to b = 31).
EXPECTED = {"K": 1.0, "b": 1.0, "context": 1.0}
#: By how much a measured power may be above it: caches, and the quadratic term.
SLACK = 0.3


def growth(sizes: Sizes, agreement: float) -> pd.DataFrame:
    """Seconds and GiB of a draft, a training step and a replayed text by K, b and context."""
    swept = {"K": sizes.categories, "b": sizes.block_lengths, "context": sizes.contexts}
    keyword = {"K": "categories", "b": "block_length", "context": "context"}
    stages = {
        "drafting": lambda **given: drafting(sizes, **given),
        "training": lambda **given: training(sizes, "NLL", **given),
        "replay": lambda **given: scoring(sizes, agreement, **given),
    }
    rows = []
    for stage, make in stages.items():
        for name, values in swept.items():
            for value in values:

                def measured() -> dict:
                    run = make(**{keyword[name]: value})
                    run()
                    return {"seconds": min(processor_time(run) for _ in range(sizes.repetitions))}

                rows.append({"stage": stage, "over": name, "value": value} | apart(measured))
    return pd.DataFrame(rows)


def steepest(values: list[float], costs: list[float]) -> float:
    """The largest power between neighbours, log(cost ratio) / log(value ratio); nothing grows from less than nothing."""
    pairs = zip(zip(values, costs, strict=True), zip(values[1:], costs[1:], strict=True), strict=False)
    return max(math.log(max(d, 1e-12) / max(c, 1e-12)) / math.log(y / x) for (x, c), (y, d) in pairs)


def powers(table: pd.DataFrame) -> pd.DataFrame:
    """The steepest growth of every stage, and whether it stays below what is expected; memory above 16 MiB alone counts."""
    rows = []
    for (stage, over), part in table.groupby(["stage", "over"], sort=False):
        values = part.value.tolist()
        if over == "b":  # b + 1 positions are computed
            values = [value + 1 for value in values]
        time_power = steepest(values, part.seconds.tolist())
        memory = steepest(values, part.GiB.clip(lower=2**-6).tolist())
        within = max(time_power, memory) <= EXPECTED[over] + SLACK
        rows.append({"stage": stage, "over": over, "expected at most": EXPECTED[over], "time": time_power, "memory": memory,
                     "within": "yes" if within else "NO"})  # fmt: skip
    return pd.DataFrame(rows)


def figure(table: pd.DataFrame, path: Path) -> None:
    """Time and memory on logarithmic axes, with a line of the expected power through the last point."""
    overs = list(EXPECTED)
    canvas, axes = plt.subplots(2, len(overs), figsize=(10, 6), constrained_layout=True)
    for column, over in enumerate(overs):
        for row, (quantity, unit) in enumerate((("seconds", "seconds"), ("GiB", "memory (GiB)"))):
            axis = axes[row, column]
            for stage, part in table[table.over == over].groupby("stage", sort=False):
                (line,) = axis.loglog(part.value, part[quantity].clip(lower=2**-10), marker="o", label=stage)
                x, y = part.value.to_numpy(float), part[quantity].clip(lower=2**-10).to_numpy()
                expected = y[-1] * (x / x[-1]) ** EXPECTED[over]
                axis.loglog(x, expected, color=line.get_color(), linestyle=":", linewidth=1)
            axis.set_xlabel(over)
            axis.set_ylabel(unit)
    axes[0, 0].legend(title="dotted: expected", fontsize=8)
    canvas.savefig(path)
    plt.close(canvas)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--agreement", type=float, default=0.3, help="chance that a branch drafts the stored token")
    parser.add_argument("--seconds", type=float, default=10, help="of every cell of the busy machine")
    parser.add_argument("--figure", type=Path, help="where to draw the growth")
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cell:
        small, threads, seconds = options.cell
        print(json.dumps(speed(SMALL if small else Sizes(), threads, seconds)))
        return
    torch.set_num_threads(1)
    sizes = SMALL if options.small else Sizes()
    if "ways" in options.parts:
        print(ways(sizes, options.agreement).to_markdown(index=False, floatfmt=".3g"), flush=True)
    if "busy" in options.parts:
        print("", busy(options.small, options.seconds).to_markdown(index=False, floatfmt=".3g"), sep="\n", flush=True)
    if "growth" in options.parts:
        table = growth(sizes, options.agreement)
        print("", table.to_markdown(index=False, floatfmt=".3g"), sep="\n")
        print("", powers(table).to_markdown(index=False, floatfmt=".2f"), sep="\n", flush=True)
        if options.figure:
            figure(table, options.figure)


if __name__ == "__main__":
    main()
