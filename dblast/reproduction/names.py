"""Names that a user chooses among, apart from what they mean: the command line shows them before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dblast.errors import DBlastError

#: See :mod:`dblast.reproduction.profiles`.
PROFILES = ("smoke", "cpu", "losses", "sweeps", "beyond", "qwen3-4b", "qwen3-8b")
#: The targets of each, by the label of their plan.
TARGETS = {name: ("tiny", "smollm2") for name in ("smoke", "cpu", "losses", "beyond")} | {
    "sweeps": (
        *("tiny", "tiny-tau0", "tiny-tau0.01", "tiny-tau0.03", "tiny-tau0.3", "tiny-tau1"),
        *("smollm2", "tiny-low", "smollm2-low", "tiny-b3", "tiny-b11", "tiny-b15"),
    ),
    **{name: (name,) for name in ("qwen3-4b", "qwen3-8b")},
}
#: Losses of the paper and of DFlash, see :mod:`dblast.losses`.
LOSSES = ("NLL", "AL", "CE")
#: Other papers' objectives, see :mod:`dblast.reproduction.objectives`; names that end in 1 use the sampled token alone.
OBJECTIVES = ("DPACE", "TRUNC", "FOCAL", "CHAIN", "L2R", "EAL", "TV1", "NLA1", "LK1", "TV", "NLA", "LK", "KD")
#: What the AL loss sums over.
AL_CONSTRUCTIONS = ("all_prefixes", "one_prefix", "whole_block")
#: Of determinism, see :data:`dblast.sampling.SETTINGS`.
SETTINGS = ("high", "medium", "low")
#: How blocks are drafted, see :mod:`dblast.verifier`.
MODES = ("greedy_branch", "soft", "independent", "tree")
#: How they are scored, see :data:`dblast.replay.PROPOSALS`, and verified.
PROPOSALS = (*MODES, "branches")
VERIFICATIONS = ("token", "block")
#: Tasks of the tiny target's language, and of the bundled prompts.
TASKS = {"synthetic": ("story", "maths", "code", "chat"), "bundled": ("maths", "chat", "code", "creative")}
#: Prompts that are no file, see :func:`dblast.reproduction.prompts.sources.load_prompts`.
PROMPT_SOURCES = ("bundled", "hub")
#: Ends of the names of files that hold a table, of which a column may be prompts.
TABLE_FILES = (".parquet", ".csv", ".jsonl")
#: What a drafter starts from if not from a checkpoint's folder or id, see :class:`dblast.reproduction.plans.DrafterConfig`.
STARTS = ("shipped", "target", "random")


def one_of(names: tuple[str, ...], kind: str, plural: str) -> Callable:
    """A callback that refuses words that name nothing, before torch is imported; an option that is not given passes."""

    def check(value: str | list[str] | None) -> str | list[str] | None:
        for word in value if isinstance(value, list) else [value]:
            if word is not None and word not in names:
                raise DBlastError(f"unknown {kind} {word!r}; known {plural}: {', '.join(names)}")
        return value

    return check


def check_plan_names(
    profile: str, target: str, model: str | None, prompts: str | None, tasks: str | None, start: str | None
) -> None:
    """Refuse names in the options of ``train`` and ``pretrain`` that no plan can use, before torch is imported.

    Raises:
        DBlastError: a target that the profile does not have, prompts that are no file, an unknown task of prompts that
            are not one's own, a start that is nothing of what it may be.
    """
    from dblast.reproduction.demo import check_model_name

    if target not in TARGETS[profile]:
        raise DBlastError(f"profile {profile!r} has no target {target!r}; its targets: {', '.join(TARGETS[profile])}")
    if prompts is not None and prompts not in PROMPT_SOURCES and ":" not in prompts and not Path(prompts).is_file():
        raise DBlastError(f"{prompts}: no such prompt file; give a JSONL file, 'bundled' or 'hub'")
    if prompts is None or prompts in PROMPT_SOURCES:
        known = TASKS["synthetic" if model is None and prompts is None and target.startswith("tiny") else "bundled"]
        for task in tasks.split(",") if tasks else ():
            if task.strip() not in known:
                raise DBlastError(f"unknown task {task.strip()!r}; the tasks are {', '.join(known)}")
    if start is not None and start not in STARTS:
        check_model_name(start, f"--start takes a drafter's folder or id, or {', '.join(STARTS)}", prefix="--start: ")
