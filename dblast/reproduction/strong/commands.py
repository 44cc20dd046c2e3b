"""Commands of a drafter made over several sittings."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from dblast.errors import DBlastError


def text(
    tokens: Annotated[int, typer.Option(help="Response tokens that the text shall have.")] = 4_000_000,
    minutes: Annotated[float | None, typer.Option(help="Stop after this time; the same command goes on.")] = None,
    keep_states: Annotated[
        bool, typer.Option("--keep-states", help="Keep tapped states beside the text: training starts sooner, 9 GB a million tokens.")
    ] = False,
    first: Annotated[int, typer.Option(help="Number of the first shard: another machine makes others from, say, 10000 on.")] = 0,
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


def register(app: typer.Typer) -> None:
    app.command()(text)
