"""Online decoding of some held-out prompts beside replay of the same: Table 2's footnote."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pandas as pd
import torch

from dblast.decoding import generate
from dblast.errors import DBlastError
from dblast.reproduction.estimates import choose_category_temperature, ratio_with_influence, standard_error
from dblast.reproduction.experiments import collect_scores, for_decoding, open_drafter, open_target, variant_stage
from dblast.reproduction.plans import FIGURE1, Plan
from dblast.reproduction.prompts.plan import calibration_ids, evaluation_prompts
from dblast.sampling import get_setting
from dblast.support.progress import progress

#: Held-out prompts of every task that are decoded; of a target trained here, whose passes take milliseconds, all.
PROMPTS_PER_TASK = 6
#: Random numbers of their own: trajectories are sampled with seeds near the plan's.
_STREAM = 4_000_037


def collect_online(plan: Plan) -> pd.DataFrame:
    """Decode with DFlash and DBlast of the first fine-tuning seed, at the calibrated Z_T, one new text a prompt.

    Returns:
        ``target, method, setting, task, prompt_id, category_temperature, emitted, passes`` (whole numbers, of the new
        text) and ``replay_emitted, replay_passes`` (its stored text's expectation).

    Raises:
        DBlastError: the plan does not train them.
    """
    variants = [variant for variant in FIGURE1 if variant in plan.variants]
    if len(variants) < len(FIGURE1):
        raise DBlastError("online decoding compares DFlash (K = 1, NLL) with DBlast (K = 4, AL); this plan does not train both")
    scores = collect_scores(plan)
    chosen = choose_category_temperature(scores)
    target, calibration = open_target(plan), calibration_ids(plan)
    prompts = _subset([p for p in evaluation_prompts(plan, target) if p.prompt_id not in calibration], plan)
    tables = []
    with progress(len(variants) * len(plan.data.settings), f"{plan.label} online decoding", unit="cell") as bar:
        for number, setting in enumerate(plan.data.settings):
            for variant in variants:
                names = {"method": variant.method, "setting": setting}
                mine = {**asdict(variant), "setting": setting}
                temperature = chosen[(chosen[list(mine)] == pd.Series(mine)).all(axis=1)].category_temperature.iloc[0]
                drafter = open_drafter(variant_stage(plan, variant, plan.seeds[0]).folder, target)
                result = generate(
                    target,
                    for_decoding(drafter, target),
                    [prompt.ids for prompt in prompts],
                    get_setting(setting),
                    max_new_tokens=plan.data.evaluation_tokens,
                    # With one category there is nothing to draw.
                    category_temperature=1.0 if variant.K == 1 else float(temperature),
                    generator=torch.Generator(target.device).manual_seed(plan.data.seed + _STREAM + number),
                )
                rows = scores[(scores.seed == plan.seeds[0]) & (scores[list(mine)] == pd.Series(mine)).all(axis=1)]
                if variant.K > 1:
                    rows = rows[rows.category_temperature == temperature]
                rows = rows.set_index("prompt_id").loc[[prompt.prompt_id for prompt in prompts]]
                table = pd.DataFrame(
                    {
                        "target": plan.label,
                        **names,
                        "task": [prompt.task for prompt in prompts],
                        "prompt_id": [prompt.prompt_id for prompt in prompts],
                        "category_temperature": temperature,
                        "emitted": [len(tokens) for tokens in result.tokens],
                        "passes": [len(steps) for steps in result.steps],
                        "replay_emitted": rows.emitted.to_numpy(),
                        "replay_passes": rows.passes.to_numpy(),
                    }
                )
                tables.append(table)
                bar.update()
    return pd.concat(tables, ignore_index=True)


def _subset(prompts: list, plan: Plan) -> list:
    if plan.tiny is not None:
        return prompts
    kept: dict[str, list] = {}
    for prompt in prompts:
        kept.setdefault(prompt.task, []).append(prompt)
    return [prompt for rows in kept.values() for prompt in rows[:PROMPTS_PER_TASK]]


def online_rows(online: pd.DataFrame) -> pd.DataFrame:
    """Online and replayed accepted length of every target, setting and method, and their difference.

    Returns:
        ``target, setting, method, online, online_error, replay, replay_error, difference, difference_error, n``: errors
        over prompts, the difference's paired by prompt (the texts are two independent ones).
    """
    rows = []
    for (target, setting, method), part in online.groupby(["target", "setting", "method"], sort=False):
        sides = []
        for before in ("", "replay_"):
            emitted, passes = part[f"{before}emitted"].to_numpy(), part[f"{before}passes"].to_numpy()
            sides.append(ratio_with_influence((emitted - passes).astype(float), passes.astype(float)))
        (ours, influence), (replay, replay_influence) = sides
        rows.append(
            {
                "target": target,
                "setting": setting,
                "method": method,
                "online": ours,
                "online_error": standard_error(influence),
                "replay": replay,
                "replay_error": standard_error(replay_influence),
                "difference": ours - replay,
                "difference_error": standard_error(np.asarray(influence) - np.asarray(replay_influence)),
                "n": len(part),
            }
        )
    return pd.DataFrame(rows)


def online_footnote(online: pd.DataFrame, target: str) -> str:
    """What online decoding says of replay, in a sentence, for the caption of one target's Table 2."""
    mine = online[online.target == target]
    rows = online_rows(mine)
    per_task = mine.groupby("task").prompt_id.nunique()
    which = f" (the first {PROMPTS_PER_TASK} of every task)" if (per_task == PROMPTS_PER_TASK).all() else ""
    ratio = (rows.difference / rows.difference_error).abs()
    # The largest in units of its own error: the one that would give a disagreement away.
    worst = rows.loc[ratio.idxmax()]
    return (
        f"Online decoding of {rows.n.max()} of these prompts{which} "
        f"with DFlash and DBlast (first seed, a new text each): its {len(rows)} accepted lengths differ from replay's by "
        f"{rows.difference.mean():+.3f} on average; the difference furthest from zero in its own errors is "
        f"{worst.difference:+.2f} ± {worst.difference_error:.2f} ({worst.method}, {worst.setting})."
    )
