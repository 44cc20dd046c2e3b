"""All stages of ``make test``, one after the other: a stage that fails does not stop the next ones.

Run from the repository's root: ``python -m tests.run_all``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: A stage is called and says whether all went well.
Stage = Callable[[], bool]


def notebooks(folder: Path = ROOT / "notebooks") -> list[str]:
    """The numbered notebooks by name: copies that an editor left in hidden folders are no part of the project."""
    return [str(path) for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))]


def command(*arguments: str) -> Stage:
    """A stage that runs ``python -m ...``; what it prints is shown as it is."""

    def run() -> bool:
        # The child, and notebooks' kernels, test this checkout, and leave its kept figures alone.
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        environment.pop("DBLAST_REGENERATE", None)
        return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, env=environment).returncode == 0

    return run


def checkout(root: Path = ROOT) -> str | None:
    """The checkout as git sees it: changed and new files, then a digest of the changes; None where git has none."""
    try:
        status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, check=True).stdout
        # A file that was changed before and is changed again has the same line in the status.
        changes = subprocess.run(["git", "diff", "HEAD"], cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{status.decode()}{hashlib.sha256(changes).hexdigest()}"


def is_unchanged(before: str | None, after: str | None) -> bool:
    """Whether the stages left the checkout as it was; says what they changed."""
    if before is None or after is None:
        print("no git checkout: what the tests leave behind is not compared")
        return True
    if before != after:
        new = [line for line in after.splitlines()[:-1] if line not in before.splitlines()]
        print("the tests changed the checkout:", *(new or ["files that were changed before"]), sep="\n  ")
    return before == after


def machine() -> str:
    """What a report of a failure needs: processor, torch, threads, Python."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return "\n".join(
        [
            f"processor: {models[0] if models else platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            f"torch: {torch.__version__}, kernels for {torch.backends.cpu.get_cpu_capability()}, "
            f"{torch.get_num_threads()} threads (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')})",
            f"Python: {platform.python_version()}, {platform.platform()}",
        ]
    )


def run_stages(stages: dict[str, Stage]) -> int:
    """Run every stage, then say how long each took and which failed; returns the exit status."""
    lines, failed = [], []
    for name, stage in stages.items():
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        passed = stage()
        lines.append(f"{'ok' if passed else 'FAILED':8}{name} ({time.monotonic() - began:.0f} s)")
        if not passed:
            failed.append(name)
    print("\n== stages", *lines, sep="\n")
    if failed:
        print(f"\n{machine()}\n\nstages that failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def main() -> int:
    before = checkout()
    return run_stages(
        {
            "pytest": command("pytest"),
            "notebooks against their outputs": command("pytest", "--nbval", "--nbval-current-env", *notebooks()),
            "smoke reproduction": command("dblast", "reproduce", "--profile", "smoke", "--fresh"),
            "what the smoke reproduction left": command("pytest", "tests/after_smoke"),
            "checkout left as it was": lambda: is_unchanged(before, checkout()),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
