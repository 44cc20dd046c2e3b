"""What a drafter reaches on two sets of evaluation prompts: the bundled ones, and ones written in another style."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import torch

from dblast.drafter import DBlastDrafter
from dblast.replay import score
from dblast.reproduction.estimates import accepted_length, ratio_with_influence, standard_error
from dblast.reproduction.experiments import prepare_trajectories
from dblast.reproduction.paths import DATA
from dblast.reproduction.plans import Plan
from dblast.reproduction.profiles import SMOLLM2
from dblast.reproduction.prompts.own import keep, prompt_ids
from dblast.reproduction.prompts.plan import calibration_ids
from dblast.reproduction.prompts.sources import read_prompts
from dblast.targets import Target
from dblast.trajectories import EncodedPrompt, Trajectory

#: 38 messages as people type them, and 6 beginnings of texts; nothing in them comes from a template.
OTHER_STYLE = DATA / "prompts" / "other_style.jsonl"
CURVE_TRAJECTORIES = 12


def evaluation_plans(target: Target) -> dict[str, Plan]:
    """The evaluation sets by name: bundled prompts as every profile scores them, and other people's style."""
    encoded = [EncodedPrompt(p.id, p.task, tuple(prompt_ids(p, target))) for p in read_prompts(OTHER_STYLE)]
    # By content, so that it does not matter where the checkout lies.
    other = replace(SMOLLM2.data, prompts=keep(encoded, []), evaluation_per_task=0)
    return {"bundled": SMOLLM2, "other style": replace(SMOLLM2, label="smollm2-other-style", data=other)}


def curve_trajectories(plan: Plan) -> dict[str, list[Trajectory]]:
    """A few calibration responses of every setting, for a curve while training."""
    chosen = calibration_ids(plan)
    rows = {setting: prepare_trajectories(plan, setting) for setting in plan.data.settings}
    return {
        setting: [t for t in stored if t.prompt_id in chosen][:CURVE_TRAJECTORIES] for setting, stored in rows.items()
    }


def score_sets(drafter: DBlastDrafter, plans: dict[str, Plan]) -> pd.DataFrame:
    """Greedy drafts replayed on every set and setting.

    Returns:
        ``evaluation, split, setting, accepted_length, standard_error, per_anchor, per_anchor_error, n``: draft tokens per
        target pass of the online loop, and expected accepted tokens per anchor with a full block, with standard errors
        over n prompts. The set in another style is held out as a whole.
    """
    rows = []
    for name, plan in plans.items():
        calibration = calibration_ids(plan) if name == "bundled" else set()
        for setting in plan.data.settings:
            stored = prepare_trajectories(plan, setting)
            table = score(drafter, stored, precision=torch.bfloat16, description=f"{name} {setting}")
            for split, part in table.groupby(
                table.prompt_id.isin(calibration).map({True: "calibration", False: "held out"})
            ):
                loop = accepted_length(part)
                # A ratio of means, as the accepted length is (accepted + passes to passes, without the pass's own token).
                anchored, influence = ratio_with_influence(part.anchor_accepted.to_numpy(), part.anchors.to_numpy())
                rows.append(
                    {
                        "evaluation": name,
                        "split": split,
                        "setting": setting,
                        "accepted_length": loop.value,
                        "standard_error": loop.standard_error,
                        "per_anchor": anchored,
                        "per_anchor_error": standard_error(influence),
                        "n": loop.n,
                    }  # fmt: skip
                )
    return pd.DataFrame(rows)
