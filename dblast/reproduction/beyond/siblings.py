"""Does dependence help after a sibling? How often the drafter is right after its own likeliest token was not the text's.

In a tree of independent marginals the tokens below a sibling are those below the likeliest token: what the sibling says
of the continuation is lost. In a mixture q(x_i | y, x_<i) = sum_z q(z | y, x_<i) q_i(x_i | y, z) (eq. 12) it moves the
weights of the branches.

Shapes: B anchors, K branches, b draft positions, V' columns of the draft vocabulary (or the target's).
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from dblast.drafter import DBlastDrafter
from dblast.proposals import check_output
from dblast.reproduction.beyond.scores import choose_temperatures, collect_proposals, variant_names
from dblast.reproduction.captions import sizes
from dblast.reproduction.estimates import ratio_with_influence, standard_error
from dblast.reproduction.experiments import (
    open_drafter,
    open_target,
    prepare_trajectories,
    prepare_variant,
    side_by_side,
    trajectory_stage,
    variant_stage,
)
from dblast.reproduction.plans import Plan, Variant
from dblast.reproduction.prompts.plan import calibration_ids
from dblast.reproduction.stages import Stage
from dblast.reproduction.tables import Table
from dblast.trajectories import Trajectory, pack_first
from dblast.trees import TREE_LOGITS

#: A sibling is one of so many tokens after the likeliest.
SIBLINGS = 3
#: Size of the tree, in blocks, whose chosen Z_T weighs the branches.
BLOCKS = 4


def prefix_ranks(position_log_q: Tensor, log_prior: Tensor, columns: Tensor) -> Tensor:
    """Rank of every token of a text in q(. | y, x_<i), the mixture's conditional after the tokens before it.

    Args:
        position_log_q: (B, K, b, V') log q_i(. | y, z).
        log_prior: (B, K) log q(z | y).
        columns: (B, b) column of the text's tokens, negative for those that are never drafted.

    Returns:
        (B, b) number of tokens that are likelier, 0 for the likeliest; V' at and after a token that is never drafted.
    """
    weight, vocabulary, ranks = log_prior.double().exp(), position_log_q.shape[-1], []
    gone = torch.zeros(len(columns), dtype=torch.bool, device=columns.device)
    for slot, column in enumerate(columns.unbind(1)):
        q = position_log_q[:, :, slot].double().exp()
        mixture = torch.einsum("bk,bkv->bv", weight, q)
        index = column.clamp(min=0).unsqueeze(1)
        gone = gone | (column < 0) | (mixture.gather(1, index).squeeze(1) <= 0)
        rank = (mixture > mixture.gather(1, index)).sum(1)
        ranks.append(rank.masked_fill(gone, vocabulary))
        weight = weight * q.gather(2, index.unsqueeze(1).expand(-1, q.shape[1], -1)).squeeze(2)
    return torch.stack(ranks, dim=1)


def continuations(ranks: Tensor, valid: Tensor, siblings: int = SIBLINGS) -> dict[str, int]:
    """How often the likeliest next token is the text's, after the drafter's spine and after its first sibling.

    The spine are the tokens that are likeliest each; a first sibling is a token of rank 1 to ``siblings`` after a
    (possibly empty) spine.

    Args:
        ranks: (B, b) from :func:`prefix_ranks`.
        valid: (B, b) False from the end of the text on.

    Returns:
        ``spine, spine_right, sibling, sibling_right``: places with a token after them, and those where it is right.
    """
    right = ranks == 0
    spine = right.long().cumprod(1).bool()
    before = torch.cat([torch.ones_like(spine[:, :1]), spine[:, :-1]], dim=1)
    sibling = before & (ranks >= 1) & (ranks <= siblings)
    counts = {}
    for name, here in (("spine", spine), ("sibling", sibling)):
        asked = here[:, :-1] & valid[:, 1:]
        counts |= {name: int(asked.sum()), f"{name}_right": int((asked & right[:, 1:]).sum())}
    return counts


@torch.no_grad()
def trajectory_continuations(
    drafter: DBlastDrafter, trajectory: Trajectory, category_temperature: float, precision: torch.dtype
) -> dict[str, int]:
    """:func:`continuations` over all anchors of a stored text, a block starting after every token."""
    n, config = len(trajectory.response_ids), drafter.config
    batch = pack_first(trajectory, n, config.block_length).to(drafter.device)
    totals: dict[str, int] = {}
    with drafter.in_precision(precision):
        out = batch.run(drafter)
        check_output(out)
        columns = drafter.draft_slot[batch.tokens] if config.draft_vocab_size else batch.tokens
        width = config.draft_vocab_size or config.vocab_size
        rows = max(1, TREE_LOGITS // (out.branch_hidden[0, ..., 0].numel() * width))
        prior = out.log_prior(category_temperature)
        for parts in zip(*(x.split(rows) for x in (out.branch_hidden, prior, columns, batch.valid)), strict=True):
            hidden, log_prior, column, valid = parts
            ranks = prefix_ranks(drafter.logits(hidden).log_softmax(-1), log_prior, column.masked_fill(~valid, -1))
            for name, count in continuations(ranks, valid).items():
                totals[name] = totals.get(name, 0) + count
    return totals


def prepare_siblings(
    plan: Plan, variant: Variant, seed: int, temperatures: dict[str, float], threads: int | None = None
) -> Path:
    """Counts of :func:`trajectory_continuations` on the held-out texts of every setting, at its Z_T."""
    if threads:
        torch.set_num_threads(threads)

    def compute(folder: Path) -> None:
        drafter = open_drafter(prepare_variant(plan, variant, seed, threads), open_target(plan))
        calibration, precision, rows = calibration_ids(plan), getattr(torch, plan.finetune.precision), []
        for setting, temperature in temperatures.items():
            for t in prepare_trajectories(plan, setting):
                if t.prompt_id not in calibration:
                    names = {"setting": setting, "task": t.task, "prompt_id": t.prompt_id}
                    rows.append(names | trajectory_continuations(drafter, t, temperature, precision))
        pd.DataFrame(rows).to_parquet(folder / "counts.parquet")

    return _stage(plan, variant, seed, temperatures).run(compute)


def _stage(plan: Plan, variant: Variant, seed: int, temperatures: dict[str, float]) -> Stage:
    spec = {
        "variant": variant_stage(plan, variant, seed).key,
        "evaluation": {setting: trajectory_stage(plan, setting).key for setting in temperatures},
        "temperatures": temperatures,
    }
    return Stage("siblings", spec, prepare_siblings)


def collect_siblings(plan: Plan) -> pd.DataFrame:
    """Accuracy after spine and sibling for every variant, with the Z_T of its tree of :data:`BLOCKS` * b nodes.

    Returns:
        ``target, method, K, loss, construction, seed, setting, task, prompt_id`` and the counts of :func:`continuations`.
    """
    chosen = choose_temperatures(collect_proposals(plan))
    trees = chosen[(chosen.proposal == "tree") & (chosen.nodes == BLOCKS * plan.drafter.block_length)]
    jobs = []
    for variant in plan.variants:
        mine = trees[(trees[["method", "construction"]] == [variant.method, variant.construction]).all(axis=1)]
        found = mine.set_index("setting").category_temperature.fillna(1.0)
        temperatures = {setting: float(found[setting]) for setting in plan.data.settings}
        jobs += [(plan, variant, seed, temperatures) for seed in plan.seeds]
    missing = [job for job in jobs if not _stage(*job).done]
    side_by_side(prepare_siblings, missing, plan.parallel, f"{plan.label} after siblings")
    tables = []
    for job in jobs:
        table = pd.read_parquet(prepare_siblings(*job) / "counts.parquet")
        for place, (column, value) in enumerate((variant_names(plan, job[1]) | {"seed": job[2]}).items()):
            table.insert(place, column, value)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def accuracy_rows(counts: pd.DataFrame) -> pd.DataFrame:
    """Share of right continuations by variant and setting, seeds pooled prompt by prompt.

    Returns:
        ``target, setting, method, K, loss``, ``spine``, ``sibling`` (per cent) and each with ``_error`` over prompts,
        ``siblings`` (how many places) and ``n`` prompts.
    """
    rows = []
    for names, part in counts.groupby(["target", "setting", "method", "K", "loss"], sort=False):
        sums = part.groupby("prompt_id")[["spine", "spine_right", "sibling", "sibling_right"]].sum()
        row = dict(zip(("target", "setting", "method", "K", "loss"), names, strict=True))
        for name in ("spine", "sibling"):
            value, influence = ratio_with_influence(sums[f"{name}_right"].to_numpy(float), sums[name].to_numpy(float))
            row |= {name: 100 * value, f"{name}_error": 100 * standard_error(influence)}
        rows.append(row | {"siblings": int(sums.sibling.sum()), "n": len(sums)})
    return pd.DataFrame(rows)


def accuracy_table(rows: pd.DataFrame) -> Table:
    """:func:`accuracy_rows` with the settings side by side."""
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows.to_dict("records"):
        line = lines.setdefault((row["target"], f"K = {row['K']}, {row['loss']}"), {})
        for name in ("spine", "sibling"):
            line[f"{row['setting']}: {name}"] = f"{row[name]:.1f} ± {row[f'{name}_error']:.1f}"
    display = pd.DataFrame.from_dict(lines, orient="index")
    display.index = pd.MultiIndex.from_tuples(display.index, names=["target", "drafter"])
    return Table(
        "siblings",
        "After a sibling",
        f"How often the drafter's likeliest next token is the text's, in %, after tokens that were its likeliest each (spine) and "
        f"after one of its next {SIBLINGS} instead (sibling), all places of held-out texts ({_counts(rows)}); ± one standard error "
        "over prompts.",
        rows,
        display,
    )


def _counts(rows: pd.DataFrame) -> str:
    return sizes({target: part.n.max() for target, part in rows.groupby("target", sort=False)})
