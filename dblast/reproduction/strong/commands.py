"""Commands of a drafter made over several sittings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dblast.errors import DBlastError


def text(
    tokens: Annotated[int, typer.Option(help="Response tokens that the text shall have.")] = 4_000_000,
    minutes: Annotated[float | None, typer.Option(help="Stop after this time; the same command goes on.")] = None,
    keep_states: Annotated[
        bool,
        typer.Option(
            "--keep-states", help="Keep tapped states beside the text: training starts sooner, 9 GB a million tokens."
        ),
    ] = False,
    first: Annotated[int, typer.Option(help="Number of the first shard: another machine begins at 10000, say.")] = 0,
) -> None:
    """Sample text from SmolLM2 to train a drafter on, shard by shard. Kill it and rerun: it goes on where it was."""
    for name, value in (("--tokens", tokens), ("--minutes", minutes)):
        if value is not None and not value > 0:
            raise DBlastError(f"{name} must be above 0, got {value}")
    if not 0 <= first < 100_000:
        raise DBlastError(f"--first must lie in 0..99999, got {first}")

    from dblast.reproduction.strong.plan import RECIPE, grow_text, store

    done = grow_text(RECIPE, tokens, keep_states, first, math.inf if minutes is None else minutes)
    typer.echo(f"{done:,} tokens in {len(store().indices())} shards in {store().folder}")


def sitting(
    name: Annotated[str, typer.Option(help="Name of the sitting; the same name goes on with it.")],
    start: Annotated[str, typer.Option(help="shipped, target, or the name of a sitting that has ended.")] = "shipped",
    tokens: Annotated[
        int | None, typer.Option(help="Train on so much of the text (default: all that is there).")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps; the rate falls to zero over them.")] = 1000,
    minutes: Annotated[
        float | None, typer.Option(help="As many steps as fit into this time, from a short measurement, instead.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Responses of a step, 32 anchors each.")] = 16,
    layers: Annotated[int, typer.Option(help="Draft layers, if it starts from the target.")] = 3,
    vocabulary: Annotated[int, typer.Option(help="Tokens it may draft: the most frequent ones of the text.")] = 8192,
    blocks: Annotated[
        str, typer.Option(help="Block lengths of the steps in turn, as 3,3,7 (default: the drafter's own).")
    ] = "",
    loss: Annotated[str, typer.Option(help="Training loss: KD, NLA, LK, CE and others.")] = "KD",
    rate: Annotated[
        float, typer.Option(help="Peak learning rate of weight matrices (Muon); others get a twentieth.")
    ] = 0.02,
) -> None:
    """Train SmolLM2's drafter for one sitting on the text that is there, and score it. Kill it and rerun: it goes on."""
    lengths = [word.strip() for word in blocks.split(",") if word.strip()]
    if not all(word.isdecimal() for word in lengths):
        raise DBlastError(f"--blocks must be whole numbers with commas, got {blocks!r}")

    from dblast.reproduction.strong.plan import run
    from dblast.reproduction.strong.sittings import Sitting

    base = Sitting()
    training = replace(
        base.training, steps=steps, sequences=sequences, loss=loss, matrix_learning_rate=rate, learning_rate=rate / 20
    )
    wanted = replace(base, start=start, tokens=tokens, layers=layers, draft_vocabulary=vocabulary, training=training)
    scores = run(name, replace(wanted, blocks=tuple(map(int, lengths))), minutes)
    typer.echo(scores.round(3).to_string(index=False))


def scaling(
    csv: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a figure here, .png or .pdf.")] = None,
) -> None:
    """What text and training bought: accepted length of the shipped drafter and of every sitting."""
    from dblast.reproduction.strong import plan
    from dblast.reproduction.strong.scaling import scaling_figure

    table = plan.scaling()
    typer.echo(table.round(3).to_string(index=False))
    if csv is not None:
        table.to_csv(csv, index=False)
    if plot is not None:
        scaling_figure(table).savefig(plot, dpi=200)


def register(app: typer.Typer) -> None:
    for command in (text, sitting, scaling):
        app.command()(command)
