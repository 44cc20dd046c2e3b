"""The command ``cache``: what stages and sittings have left there, checked and cleaned."""

from __future__ import annotations

from typing import Annotated

import typer

from dblast.reproduction.own.requirements import size


def cache(
    check: Annotated[
        bool, typer.Option("--check", help="Compare every file with its record (exit status 1 if any is damaged).")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Delete what is unfinished, damaged or outdated; with --yes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Really delete.")] = False,
) -> None:
    """List what the cache holds: kind, key, size, date and state; outdated is what other code made and nothing finds."""
    import time

    from dblast.reproduction.stages import check_all, list_stages
    from dblast.reproduction.stages import clean as remove
    from dblast.support.files import cache_folder

    stages = list_stages()
    for stored in stages:
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(stored.changed))
        typer.echo(f"{stored.kind:14s} {stored.key}  {size(stored.size):>9s}  {date}  {stored.state}")
    typer.echo(f"artefacts: {len(stages)}, {size(sum(stored.size for stored in stages))}, in {cache_folder()}")
    for folder in sorted(folder for kind in ("text", "sittings") for folder in cache_folder().glob(f"{kind}/*/")):
        held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        typer.echo(f"{folder.parent.name:14s} {folder.name}  {size(held):>9s}  made in sittings, never cleaned")
    if check:
        problems = [problem for _, problem in check_all() if problem]
        for problem in problems:
            typer.secho(problem, fg=typer.colors.RED)
        typer.echo(f"checked: {len(problems) or 'none'} damaged")
        if problems:
            raise typer.Exit(1)
    if clean:
        useless = [stored for stored in stages if stored.state != "finished"]
        gone = remove(useless) if yes else useless
        done = "deleted" if yes else "would be deleted; add --yes to do it"
        typer.echo(f"artefacts: {len(gone)}, {size(sum(stored.size for stored in gone))}: {done}")
        if len(gone) < len(useless):
            typer.echo(f"{len(useless) - len(gone)} left alone: another process is at work on them")
