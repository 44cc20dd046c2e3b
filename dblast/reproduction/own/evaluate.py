"""``python -m dblast evaluate``: a drafter on prompts of one's own, from its folder or id."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from dblast.backbone import DBlastConfig
from dblast.drafter import DBlastDrafter
from dblast.errors import DBlastError
from dblast.proposals import check_mode
from dblast.replay import PROPOSALS
from dblast.reproduction.experiments import prepare_trajectories
from dblast.reproduction.own.evaluation import (
    DEFAULT_PROPOSALS,
    accepted_lengths,
    readable,
    score_proposals,
)
from dblast.reproduction.own.pairs import open_pair
from dblast.reproduction.own.plots import evaluation_figure
from dblast.reproduction.own.requirements import check_memory
from dblast.reproduction.plans import DataConfig, DrafterConfig, Plan
from dblast.reproduction.profiles import SMOLLM2
from dblast.reproduction.prompts import own
from dblast.reproduction.prompts.plan import calibration_ids
from dblast.reproduction.prompts.sources import Prompt, load_prompts
from dblast.reproduction.stages import digest
from dblast.sampling import SETTINGS, get_setting
from dblast.targets import Target
from dblast.trajectories import EncodedPrompt

#: What ``drafter`` leaves beside the weights: hashes of the prompts it trained on and calibrated with.
USED_PROMPTS = "prompts.json"


def evaluate_drafter(
    name: str,
    source: str,
    target_name: str | None = None,
    *,
    proposals: Sequence[str] | None = None,
    settings: Sequence[str] | None = None,
    per_task: int = 48,
    response_tokens: int | None = None,
    chat_options: dict[str, Any] | None = None,
    csv: Path | None = None,
    plot: Path | None = None,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> pd.DataFrame:
    """Sample answers to the prompts, replay the drafter along them, show the table.

    Args:
        name: folder or id of the drafter.
        source: prompts, as :func:`dblast.reproduction.prompts.own.read_source` takes them, or "bundled".
        target_name: its target; None takes the one that it remembers.
        csv, plot: files to write.

    Returns:
        :func:`dblast.reproduction.own.evaluation.accepted_lengths`' table.

    Raises:
        DBlastError: what cannot work, before anything is sampled.
    """
    proposals, settings = list(proposals or DEFAULT_PROPOSALS), list(settings or SETTINGS)
    if per_task < own.FEWEST:
        raise DBlastError(
            f"--per-task must be at least {own.FEWEST}: one prompt chooses Z_T, and an interval needs more"
        )
    for proposal in proposals:
        if proposal not in PROPOSALS:
            raise DBlastError(f"unknown --proposal {proposal!r}; known: {', '.join(PROPOSALS)}")
    for setting in settings:
        get_setting(setting)
    prompts = own.without_repeats(load_prompts("bundled") if source == "bundled" else own.read_source(source))
    own.check_enough(prompts, source)
    target, config = open_pair(name, target_name, chat_options)
    plan = _plan(target, config, settings, per_task, response_tokens, seed)
    encoded = _without_used(name, _first(prompts, per_task, target, plan, seed), say)
    plan = replace(plan, data=replace(plan.data, prompts=own.keep(encoded, [])))
    width = max(len(prompt.ids) for prompt in encoded) + plan.data.evaluation_tokens
    check_memory(plan, target.model.config, width)
    for proposal in proposals:
        if proposal != "branches":
            check_mode(proposal, config.num_categories)
    drafter = DBlastDrafter.load(name, dtype=torch.float32).to(target.device).attach(target)
    texts = {setting: list(prepare_trajectories(plan, setting, target)) for setting in settings}
    scores = score_proposals(
        drafter,
        texts,
        Path(name).name or name,
        calibration_ids(plan),
        known=config.category_temperatures,
        proposals=proposals,
        precision=getattr(torch, plan.finetune.precision),
    )
    table = accepted_lengths(scores)
    say(readable(table).to_string(index=False))
    say("accepted draft tokens per target pass, without the pass's own token: mean ± standard error [95 % interval]")
    if csv is not None:
        table.round(6).to_csv(csv, index=False)
        say(f"table in {csv}")
    if plot is not None:
        evaluation_figure(table).savefig(plot, dpi=200)
        say(f"figure in {plot}")
    return table


def _plan(
    target: Target, config: DBlastConfig, settings: list[str], per_task: int, response_tokens: int | None, seed: int
) -> Plan:
    """What sampling the answers needs of a plan."""
    limit = getattr(target.model.config, "max_position_embeddings", None) or 512
    tokens = response_tokens or min(128, max(8, limit // 2))
    return replace(
        SMOLLM2,
        target=target.name,
        label=Path(target.name).name or target.name,
        data=DataConfig(
            evaluation_per_task=per_task, evaluation_tokens=tokens, settings=tuple(settings), batch_size=64, seed=seed
        ),
        drafter=DrafterConfig(
            layers=config.num_hidden_layers,
            taps=tuple(config.target_layer_ids),
            block_length=config.block_length,
            draft_vocabulary=config.draft_vocab_size,
            mask_token_id=config.mask_token_id,
        ),
        pretrain_data=None,
    )


def _first(prompts: list[Prompt], per_task: int, target: Target, plan: Plan, seed: int) -> list[EncodedPrompt]:
    """Some prompts of every task, encoded, each text once."""
    chosen = [prompt for rows in own.by_task(own.shuffled(prompts, seed)).values() for prompt in rows[:per_task]]
    encoded = own.encode_own(chosen, target, plan.data.evaluation_tokens, "--response-tokens")
    return list({prompt.ids: prompt for prompt in encoded}.values())


def _without_used(name: str, prompts: list[EncodedPrompt], say: Callable[[str], None]) -> list[EncodedPrompt]:
    """The prompts that the drafter was neither trained on nor calibrated with, as far as it remembers."""
    path = Path(name) / USED_PROMPTS
    if not path.is_file():
        return prompts
    try:
        used = {one for hashes in json.loads(path.read_text(encoding="utf-8")).values() for one in hashes}
    except (ValueError, AttributeError, TypeError):
        raise DBlastError(
            f"{path} is damaged; delete it if the prompts are other ones than the drafter's own"
        ) from None
    left = [prompt for prompt in prompts if prompt_hash(prompt.ids) not in used]
    if len(left) < len(prompts):
        say(f"{len(prompts) - len(left)} of {len(prompts)} prompts trained or calibrated this drafter and are left out")
    fewest = min((sum(p.task == task for p in left) for task in {p.task for p in prompts}), default=0)
    if fewest < 2:
        raise DBlastError(f"too few prompts are left that {name} has not seen ({len(left)}); give --prompts others")
    return left


def prompt_hash(ids: tuple[int, ...]) -> str:
    """Short hash of a prompt's token ids, by which a drafter remembers what it was trained on."""
    return digest(list(ids))
