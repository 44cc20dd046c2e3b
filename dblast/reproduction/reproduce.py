"""The batch run: all notebooks in order with papermill, progress on the terminal, executed copies under ``runs/``."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import time
from pathlib import Path

import nbformat
import papermill
import typer
import yaml
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from dblast.errors import DBlastError, storage_reason
from dblast.reproduction.paths import FIGURES, NOTEBOOKS, OUTPUT, REGENERATE, RESULTS, RUNS, use_empty_cache
from dblast.reproduction.profiles import Profile, get_profile
from dblast.reproduction.progress import relay
from dblast.reproduction.stages import RECORD, list_stages, locked
from dblast.support.bundled import fetch_smollm2


def notebook_paths(profile: Profile, only: str | None = None) -> list[Path]:
    """The profile's notebooks in order, or those whose name starts with ``only``; 00, a tour, makes nothing."""
    paths = [path for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")) if path.name[:2] in profile.notebooks]
    chosen = [path for path in paths if path.name.startswith(only or "")]
    if not chosen:
        raise DBlastError(f"no notebook of profile {profile.name!r} starts with {only!r}; there are {', '.join(p.stem for p in paths)}")
    return chosen


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_NO_NUMBERS = {"nan", *(sign + word for sign in ("", "-", "+") for word in ("inf", "infinity"))}


def parse_parameters(pairs: list[str]) -> dict:
    """``NAME=VALUE`` pairs; values are read as YAML scalars."""
    parsed = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise DBlastError(f"parameter {pair!r} is not of the form NAME=VALUE")
        if name == "profile":
            chosen = value if value.isidentifier() else "NAME"
            raise DBlastError(f"the profile is chosen with --profile {chosen}, not as a parameter")
        try:
            parsed[name] = yaml.safe_load(value)
            # YAML takes a number without a point, such as 1e-3, for a word.
            if isinstance(parsed[name], str) and _EXPONENT.fullmatch(value.strip()):
                parsed[name] = float(value)
            if not isinstance(parsed[name], bool | int | float | str | None):
                raise ValueError(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise DBlastError(
                f"the value of parameter {pair[:200]!r} cannot be read; give a number, true, false or a word"
            ) from None
        # Notebooks record their parameters as JSON, which has neither; YAML's spellings, and the usual ones, which
        # are words to YAML.
        if value.strip().lower() in _NO_NUMBERS or (isinstance(parsed[name], float) and not math.isfinite(parsed[name])):
            raise DBlastError(f"the value of parameter {pair!r} is no finite number")
    return parsed


def check_parameters(path: Path, parameters: dict) -> None:
    """Refuse parameters that a notebook does not have, or of another type; papermill itself only warns."""
    known = papermill.inspect_notebook(str(path))
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise DBlastError(f"{path.name} has no parameter {unknown[0]!r}; it has {', '.join(sorted(known))}")
    types = {"bool": bool, "float": (int, float), "int": int, "str": str}
    for name, value in parameters.items():
        kind = known[name]["inferred_type_name"]
        if kind not in types:
            continue
        if not isinstance(value, types[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise DBlastError(f"parameter {name!r} of {path.name} is of type {kind}, got {value!r}")


def check_kernel(name: str = "python3") -> None:
    """Refuse to start where Jupyter has no kernel that could run."""
    advice = "run `python -m ipykernel install --sys-prefix` in dblast's environment"
    try:
        interpreter = KernelSpecManager().get_kernel_spec(name).argv[0]
    except NoSuchKernel:
        raise DBlastError(f"Jupyter has no kernel {name!r}; {advice}") from None
    if shutil.which(interpreter) is None:
        raise DBlastError(f"Jupyter's kernel {name!r} wants {interpreter}, which is not there; {advice}")


def _last_cell(copy: Path) -> int:
    """Number, as in ``In [3]``, of the last cell that was begun: a kernel that dies does not say which."""
    cells = [cell for cell in nbformat.read(copy, 4).cells if cell.cell_type == "code" and cell.source.strip()]
    return sum(cell.metadata.papermill.start_time is not None for cell in cells)


def execute(path: Path, copy: Path, values: dict, folder: Path = NOTEBOOKS) -> None:
    """Run one notebook in ``folder``; its executed copy shows how far it came. Its kernel ends with it, whatever happens.

    Raises:
        DBlastError: a cell that raised, a kernel that died or did not start, or a copy that cannot be written.
    """
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    shown = copy.relative_to(OUTPUT) if copy.is_relative_to(OUTPUT) else copy
    try:
        papermill.execute_notebook(
            str(path),
            str(copy),
            parameters=values,
            kernel_name="python3",
            cwd=str(folder),
            progress_bar=False,
            # A loaded machine takes its time.
            start_timeout=300,
            # What goes wrong is said below; an interrupted kernel would add how its sockets were closed.
            extra_arguments=["--log-level=CRITICAL"],
        )
    except PapermillExecutionError as error:
        reason = " ".join(f"{error.ename}: {error.evalue}".split())
        raise DBlastError(f"{path.name} failed in cell {error.exec_count}: {reason} (executed copy: {shown})") from error
    except DeadKernelError as error:
        raise DBlastError(
            f"{path.name} failed in cell {_last_cell(copy)}: its kernel was killed, as happens when memory runs out "
            f"(executed copy: {shown})"
        ) from error
    except OSError as error:
        if not (reason := storage_reason(error)):
            raise
        raise DBlastError(f"{path.name}: {error.filename or shown} cannot be written: {reason}") from error
    except RuntimeError as error:
        # What Jupyter raises when a kernel ends, or stays silent, before its first cell.
        if "ernel" not in str(error):
            raise
        raise DBlastError(f"{path.name}: its kernel did not start: {' '.join(str(error).split())}") from error


def reproduce(
    profile_name: str, *, only: str | None = None, fresh: bool = False, parameters: list[str] | None = None
) -> None:
    """Execute the notebooks of a profile and say what came out.

    Raises:
        DBlastError: unknown profile, notebook or parameter (before anything runs), or a cell that failed.
    """
    profile = get_profile(profile_name)
    for plan in profile.plans:
        plan.check()
    values = {"profile": profile.name, "recompute": True} | parse_parameters(parameters or [])
    paths = notebook_paths(profile, only)
    for path in paths:
        check_parameters(path, values)
    check_kernel()
    if any(plan.target == "smollm2" for plan in profile.plans):
        fetch_smollm2()
    expected = f"about {profile.minutes:.0f} minutes on two cores" if profile.minutes else "not measured yet"
    typer.secho(f"Reproducing profile {profile.name}: {len(paths)} notebooks, {expected}.", bold=True)
    typer.echo("Stages already in the cache are reused; a killed run goes on where it stopped.")
    # For the kernels, which inherit it.
    os.environ[REGENERATE] = "1"
    run = RUNS / profile.name
    run.mkdir(parents=True, exist_ok=True)
    # Two runs of a profile write the same notebooks, tables and figures: one after the other.
    with locked(run / "run.lock", f"reproduces profile {profile.name}"):
        if fresh:
            use_empty_cache(run / "cache")
        _execute(profile, paths, values)


def _execute(profile: Profile, paths: list[Path], values: dict) -> None:
    """Run notebooks one after the other and say what they made."""
    run, start = RUNS / profile.name, time.time()
    seconds = {}
    with relay(run / "progress.log"):
        for path in paths:
            typer.secho(f"\n{path.name}", fg=typer.colors.CYAN)
            began = time.monotonic()
            execute(path, run / path.name, values)
            seconds[path.name] = time.monotonic() - began
            typer.echo(f"{path.name} done in {seconds[path.name]:.0f} s")
    _report(profile, start)
    typer.echo(time_table(seconds, start))


def time_table(notebooks: dict[str, float], start: float) -> str:
    """Where the time of a run went: seconds of every notebook, and of what was made for the cache since ``start``, by kind.

    Stages of one kind add up, those that were made side by side as well, and what one makes for itself counts in both.
    """
    made: dict[str, list[float]] = {}
    for stored in list_stages():
        path = stored.folder / RECORD
        # Of this run alone: what another one left has no part in it.
        if path.is_file() and path.stat().st_mtime >= start and stored.state != "damaged":
            made.setdefault(stored.kind, []).append(json.loads(path.read_text(encoding="utf-8"))["seconds"])
    rows = [*notebooks.items(), ("all notebooks", sum(notebooks.values()))]
    rows += [(f"stages: {kind} ({len(times)})", sum(times)) for kind, times in sorted(made.items(), key=lambda x: -sum(x[1]))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["", f"{'time':{width}}  seconds", *(f"{name:{width}}  {value:7.0f}" for name, value in rows)])


def _report(profile: Profile, start: float) -> None:
    """What was produced, and where."""
    folders = (FIGURES / profile.name, RESULTS / profile.name)
    made = [p for folder in folders for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_mtime >= start]
    figures = [path for path in made if path.suffix == ".pdf"]
    tables = [path for path in made if path.suffix == ".md"]
    minutes = (time.time() - start) / 60
    typer.secho(f"\nDone in {minutes:.1f} minutes.", bold=True)
    for title, paths in (("figures", figures), ("tables", tables)):
        names = ", ".join(path.stem for path in paths)
        where = paths[0].parent.relative_to(OUTPUT) if paths else "nowhere"
        typer.echo(f"{len(paths)} {title} in {where}: {names}")
    typer.echo(f"results in {folders[1].relative_to(OUTPUT)}, executed notebooks in {(RUNS / profile.name).relative_to(OUTPUT)}")
