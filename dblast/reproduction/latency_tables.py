"""What a speculative iteration costs (the paper's tables 6 and 7), from the times that :mod:`dblast.reproduction.latency` took."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dblast.reproduction.bootstrap import Resampled
from dblast.reproduction.tables import Table, read_paper

#: The parts of a step, in order, and the name of the bare target pass among them.
PARTS = ("draft", "propose", "target", "p", "verify", "commit")
BARE = "bare"
#: Steps of every prompt and drafter: so many that each of the five, and the bare pass, comes first equally often.
REPEATS = 12


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
        "expander: median over prompts of each prompt's ratio (so not the ratio of the medians) with 95 % intervals (paired "
        "bootstrap over prompts: this machine's steadiness, not another machine's time). Parts: draft, the drafter's pass; "
        "propose, the branches' greedy tokens and the draw of one; target, its pass over the block; p, its filtered "
        "probabilities; verify, acceptance and the target's own token; commit, both caches. Paper: Qwen3-4B on a GPU.",
        rows,
        pd.DataFrame(lines).set_index("drafter"),
    )
