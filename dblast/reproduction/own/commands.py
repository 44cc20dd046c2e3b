"""The commands ``drafter`` and ``evaluate``: their options, and the checks that need no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dblast.errors import DBlastError
from dblast.reproduction.names import PROPOSALS, SETTINGS, one_of

Prompts = Annotated[
    str,
    typer.Option(
        help='A JSONL file of {"turns": [...]} or {"prompt": "..."} lines, a column as file.parquet:column or owner/name:column, or bundled.'
    ),
]
EnableThinking = Annotated[
    bool | None,
    typer.Option("--enable-thinking/--no-enable-thinking", help="Of chat templates that know it (default: no)."),
]
ChatOption = Annotated[
    list[str] | None, typer.Option("--chat-option", help="NAME=VALUE for the chat template; may be repeated.")
]
MaskTokenId = Annotated[
    int | None, typer.Option(help="Token of the draft slots, one that the target never writes (default: proposed).")
]
ResponseTokens = Annotated[int | None, typer.Option(help="Tokens of an answer at most (default: 128).")]
Seed = Annotated[int, typer.Option(help="Random seed.")]


def drafter(
    target: Annotated[str, typer.Option(help="Your target: a folder, a Hugging Face id or smollm2.")],
    out: Annotated[Path, typer.Option(help="New folder for the drafter and its report.")],
    prompts: Prompts = "bundled",
    train_prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompts to train on, in the same forms (default: --prompts is split; bundled with bundled)."
        ),
    ] = None,
    hours: Annotated[float, typer.Option(help="Time to spend; sizes are chosen so that all of it fits.")] = 2.0,
    start: Annotated[
        str | None,
        typer.Option(
            help="A DFlash checkpoint of this target (folder or id), or target, random, shipped (default: target)."
        ),
    ] = None,
    categories: Annotated[int, typer.Option("--categories", "-K", help="Number of categories K.")] = 4,
    loss: Annotated[str, typer.Option(help="Loss of fine-tuning: NLL, AL, KD, LK, NLA or another of `train`.")] = "AL",
    construction: Annotated[
        str, typer.Option(help="AL loss: all_prefixes, one_prefix or whole_block.")
    ] = "all_prefixes",
    training_setting: Annotated[
        str, typer.Option(help="Sampling of the text for fine-tuning: high, medium or low determinism.")
    ] = "low",
    block_length: Annotated[
        int | None, typer.Option(help="Draft block length b (default: 7, or the start drafter's).")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Draft layers (default: 3).")] = None,
    draft_vocabulary: Annotated[
        int | None, typer.Option(help="Tokens the drafter may propose, 0 for all (default: the 8192 most frequent).")
    ] = None,
    mask_token_id: MaskTokenId = None,
    response_tokens: ResponseTokens = None,
    enable_thinking: EnableThinking = None,
    chat_option: ChatOption = None,
    seed: Seed = 0,
) -> None:
    """Make a drafter for your own target: sample, pre-train, fine-tune, evaluate, report. Killed, it resumes."""
    from dblast.reproduction.own.target import Request, check_request, parse_chat_options

    request = Request(
        target=target,
        prompts=prompts,
        train_prompts=train_prompts,
        start=start,
        hours=hours,
        categories=categories,
        loss=loss,
        construction=construction,
        training_setting=training_setting,
        block_length=block_length,
        layers=layers,
        draft_vocabulary=draft_vocabulary,
        mask_token_id=mask_token_id,
        response_tokens=response_tokens,
        chat_options=parse_chat_options(chat_option, enable_thinking),
        seed=seed,
    )
    check_request(request, out)

    from dblast.reproduction.own.run import make_drafter

    make_drafter(request, out, typer.echo)


def evaluate(
    drafter: Annotated[
        str, typer.Option(help="A drafter: a folder or a Hugging Face id; ours, or a DFlash checkpoint.")
    ],
    prompts: Prompts = "bundled",
    target: Annotated[str | None, typer.Option(help="Its target (default: the one it remembers).")] = None,
    proposal: Annotated[
        list[str] | None,
        typer.Option(
            help="greedy_branch, soft, tree, branches; independent for K = 1; may be repeated (default: three).",
            callback=one_of(PROPOSALS, "proposal", "proposals"),
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="high, medium or low; may be repeated (default: all).", callback=one_of(SETTINGS, "setting", "settings")
        ),
    ] = None,
    per_task: Annotated[int, typer.Option(help="Prompts of every task at most.")] = 48,
    response_tokens: ResponseTokens = None,
    enable_thinking: EnableThinking = None,
    chat_option: ChatOption = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table to this file as well.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file (png, pdf, svg).")] = None,
    seed: Seed = 0,
) -> None:
    """Accepted length of a drafter by task, setting and proposal, with 95 % intervals, on answers sampled for it."""
    from dblast.reproduction.own.requirements import check_cache, check_numbers
    from dblast.reproduction.own.target import check_prompt_source, parse_chat_options

    options = parse_chat_options(chat_option, enable_thinking)
    check_numbers(per_task=per_task, response_tokens=response_tokens, seed=seed)
    check_prompt_source("--prompts", prompts)
    for option, path in (("--csv", csv), ("--plot", plot)):
        _check_file(option, path)
    check_cache()

    from dblast.reproduction.own.evaluate import evaluate_drafter

    evaluate_drafter(
        drafter,
        prompts,
        target,
        proposals=proposal,
        settings=setting,
        per_task=per_task,
        response_tokens=response_tokens,
        chat_options=options,
        csv=csv,
        plot=plot,
        seed=seed,
        say=typer.echo,
    )


def _check_file(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written at the end."""
    import os

    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise DBlastError(f"{option} {path} cannot be written; give a file in a folder that exists and is writable")
    if option == "--plot" and path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise DBlastError(f"--plot {path}: the name must end in .png, .pdf or .svg")


def register(app: typer.Typer) -> None:
    """Add both commands to the command line."""
    app.command()(drafter)
    app.command()(evaluate)
