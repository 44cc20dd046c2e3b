"""Runs that are killed, run side by side, or find no room: each must end with the tables of an undisturbed one.
Runs with one and with two threads must lead to the same conclusions.

Optional, not part of ``make test``; run from the repository's root, for instance

    python -m tests.interrupt kills --kills 30 --seed 0
    python -m tests.interrupt pairs
    python -m tests.interrupt storage        (as root on Linux: it mounts small file systems)
    python -m tests.interrupt threads

``--profile small`` (the default) is a plan of a minute, defined here; any profile of the project works. All tables but
the timings are made, by the same functions that the notebooks call.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
#: Stages in the order of a run, and the tables at its end.
KINDS = ("tiny-target", "trajectories", "pretrained", "variants", "continuations", "tables")


def small_profile(name: str, parallel: bool):
    """The tiny target through every stage in a minute; "other" shares all but fine-tuning with "small"."""
    from dblast.reproduction.plans import Profile, TinyTargetConfig
    from dblast.reproduction.profiles import MAIN, TINY

    plan = replace(
        TINY,
        tiny=TinyTargetConfig(steps=10, batch_size=8),
        data=replace(
            TINY.data,
            training_prompts=64,
            training_tokens=32,
            evaluation_per_task=4,
            evaluation_tokens=24,
            batch_size=16,
        ),
        pretrain=replace(TINY.pretrain, steps=12, evaluate_every=6, checkpoint_every=2, sequences=4),
        finetune=replace(
            TINY.finetune, steps=8 if name == "small" else 6, evaluate_every=4, checkpoint_every=2, sequences=4
        ),
        variants=MAIN,
        seeds=(0,),
        category_temperatures=(0.0, 1.0),
        parallel=parallel,
        diagnosis=replace(
            TINY.diagnosis,
            oracle_prefixes=8,
            oracle_continuations=8,
            training_prompts=32,
            points=16,
            continuations=8,
            rejection_anchors=8,
        ),
    )
    return Profile(name, (plan,))


def make_tables(name: str, output: Path, parallel: bool) -> None:
    """What a child process does: every table of a profile, kept in ``output``."""
    from dblast.reproduction import results
    from dblast.reproduction.profiles import PROFILES

    results.RESULTS = output
    profile = small_profile(name, parallel) if name in ("small", "other") else PROFILES[name]
    for plan in profile.plans:
        plan.check()
        for table in results.TABLES:
            if table != "latency" and not (table == "target" and plan.tiny is None):
                results.open_table(profile, plan.label, table, recompute=True)


class Run:
    """One profile in a child process group of its own, on a given cache."""

    def __init__(
        self, profile: str, cache: Path, output: Path, parallel: bool = False, log: Path | None = None, threads: int = 1
    ):
        self.output, self.log = output, log or output.with_name(output.name + ".log")
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.interrupt", "child", "--profile", profile, "--output", str(output)]
        environment = os.environ | {"DBLAST_CACHE": str(cache), "PYTHONPATH": str(ROOT), "DBLAST_PROGRESS": os.devnull}
        environment |= {"OMP_NUM_THREADS": str(threads)}
        self.began = time.monotonic()
        with self.log.open("a") as lines:
            self.process = subprocess.Popen(
                command + ["--parallel"] * parallel,
                cwd=ROOT,
                env=environment,
                stdout=lines,
                stderr=lines,
                start_new_session=True,
            )

    def kill(self, group: bool) -> None:
        """``kill -9`` of the process, alone (its workers must notice) or with its workers."""
        (os.killpg if group else os.kill)(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self, limit: float = 1800) -> float:
        """Wait; returns the seconds it took."""
        status = self.process.wait(limit)
        if status:
            sys.exit(f"{self.output.name} ended with status {status}:\n{self.log.read_text()[-3000:]}")
        return time.monotonic() - self.began


def compare(expected: Path, found: Path) -> int:
    """Exit unless both folders hold the same tables to the last digit; returns how many."""
    names = sorted(path.relative_to(expected) for path in expected.rglob("*.parquet"))
    for name in names:
        # How long an online run took is no result; everything else is.
        tables = [
            pd.read_parquet(folder / name).drop(columns="seconds", errors="ignore") for folder in (expected, found)
        ]
        pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert names and not list(found.rglob("*.part"))
    return len(names)


def at_work(cache: Path, output: Path, since: float) -> str | None:
    """What a run is doing: the kind of the innermost stage whose lock it holds, or "tables" once it has written one."""
    for kind in KINDS:
        for lock in cache.glob(f"{kind}/*.lock"):
            with lock.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return kind
    written = (path.stat().st_mtime for path in output.rglob("*.parquet"))
    return "tables" if any(moment > since for moment in written) else None


def kills(profile: str, count: int, seed: int, folder: Path) -> None:
    """Kill runs at random moments of every kind of stage, until ``count`` kills are done; each is then finished."""
    rng = random.Random(seed)
    whole = Run(profile, folder / "whole cache", folder / "whole")
    spent: dict[str, float] = collections.defaultdict(float)
    last = time.monotonic()
    while whole.process.poll() is None:
        kind = at_work(folder / "whole cache", folder / "whole", 0)
        now = time.monotonic()
        if kind:
            spent[kind] += now - last
        last = now
        time.sleep(0.02)
    total = whole.finish()
    print(f"undisturbed: {total:.0f} s, in stages: {', '.join(f'{k} {s:.1f} s' for k, s in spent.items())}", flush=True)
    done: collections.Counter[str] = collections.Counter()
    finished = 0
    while done.total() < count:
        cache, output, parallel = folder / f"cache {finished}", folder / f"round-{finished}", finished % 2 == 1
        # Through the stages in their order, one or two kills each; a stage that is passed too soon is left out.
        for wanted in [kind for kind in KINDS if spent[kind] for _ in range(rng.randint(1, 2))]:
            run = Run(profile, cache, output, parallel)
            if killed := _kill_in(wanted, run, cache, output, rng, spent):
                done[killed] += 1
                print(f"kill {done.total()}: {dict(done)}", flush=True)
            if done.total() == count:
                break
        Run(profile, cache, output, parallel).finish()
        print(f"round {finished}: {compare(folder / 'whole', output)} tables are equal to the last digit", flush=True)
        finished += 1


def _kill_in(
    wanted: str, run: Run, cache: Path, output: Path, rng: random.Random, spent: dict[str, float]
) -> str | None:
    """Kill a run at a random moment after it enters a kind of stage; what it was doing, None if it ended before."""
    delay, began, entered = rng.uniform(0, spent[wanted]), time.time(), None
    while run.process.poll() is None:
        kind, now = at_work(cache, output, began), time.monotonic()
        if entered is None and kind is not None and KINDS.index(kind) >= KINDS.index(wanted):
            entered = now
        if entered is not None and now - entered >= delay:
            run.kill(group=rng.random() < 0.5)
            return kind or "between stages"
        time.sleep(0.01)
    run.finish()
    return None


def pairs(profile: str, folder: Path) -> None:
    """Two runs at once on one cache, of the same profile and of two that share most stages."""
    for name in (profile, "other"):
        Run(name, folder / f"alone {name}", folder / "alone" / name).finish()
    for second in (profile, "other"):
        cache = folder / f"both {profile} {second}"
        # Beside each other in one folder of results, as two batch runs of one checkout are.
        runs = [
            Run(profile, cache, folder / f"both-{second}" / "a"),
            Run(second, cache, folder / f"both-{second}" / "b"),
        ]
        for run in runs:
            run.finish()
        equal = compare(folder / "alone" / profile, runs[0].output), compare(folder / "alone" / second, runs[1].output)
        print(f"{profile} and {second} at once: {equal} tables are equal to the last digit", flush=True)
    cache, output = folder / "same output", folder / "same" / "output"
    runs = [Run(profile, cache, output), Run(profile, cache, output)]
    for run in runs:
        run.finish()
    print(
        f"{profile} twice into one folder: {compare(folder / 'alone' / profile, output)} tables are equal", flush=True
    )


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def refused(run: Run, *words: str) -> None:
    """The run ends with one line that holds the words."""
    status = run.process.wait(1800)
    lines = [line for line in run.log.read_text().splitlines() if line.strip()]
    assert status == 2 and len(lines) == 1 and all(word in lines[0] for word in words), (status, lines[-5:])
    print(f"  {lines[0]}", flush=True)
    run.log.unlink()


def storage(profile: str, folder: Path) -> None:
    """No room, no permission, odd paths, files in the way; the run goes on when the cause is gone."""
    whole, output = folder / "whole", folder / "output"
    Run(profile, folder / "whole cache", whole).finish()
    size = sum(path.stat().st_size for path in (folder / "whole cache").rglob("*") if path.is_file())
    for share in (0.02, 0.2, 0.5, 0.7, 0.9):
        place, cache = folder / "full", folder / "full" / "cache"
        with mounted(place, "-t", "tmpfs", "-o", f"size={int(share * size) // 4096 * 4096}", "tmpfs"):
            refused(Run(profile, cache, output), "the disk is full", "same command again")
            subprocess.run(["mount", "-o", f"remount,size={4 * size}", str(place)], check=True)
            Run(profile, cache, output).finish()
        print(f"disk full at {100 * share:.0f} %: {compare(whole, output)} tables are equal afterwards", flush=True)
    cache = folder / "read-only"
    with mounted(cache, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        refused(Run(profile, cache, output), "read-only", "DBLAST_CACHE")
        subprocess.run(["mount", "-o", "remount,rw", str(cache)], check=True)
        Run(profile, cache, output).finish()
        subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
        Run(profile, cache, folder / "again").finish()
    print(f"read-only and finished: {compare(whole, folder / 'again')} tables are read from it", flush=True)
    odd = folder / "Bücher und 한국어 (2) 'x' \"y\""
    Run(profile, odd / "a b", odd / "résultats").finish()
    print(f"odd path: {compare(whole, odd / 'résultats')} tables are equal", flush=True)
    (folder / "file").write_text("not a folder")
    refused(Run(profile, folder / "file", output), "file", "DBLAST_CACHE")
    refused(Run(profile, folder / "file" / "below", output), "file", "DBLAST_CACHE")
    Run(profile, folder / "does" / "not" / "exist" / "yet", output).finish()
    print(f"missing folder: {compare(whole, output)} tables are equal", flush=True)
    results_full(profile, folder, whole, folder / "whole cache", size)


def results_full(profile: str, folder: Path, whole: Path, cache: Path, size: int) -> None:
    """Room for everything but the tables."""
    place, log = folder / "results full", folder / "results.log"
    with mounted(place, "-t", "tmpfs", "-o", "size=16384", "tmpfs"):
        refused(Run(profile, cache, place / "output", log=log), "the disk is full", "same command again")
        subprocess.run(["mount", "-o", f"remount,size={4 * size}", str(place)], check=True)
        Run(profile, cache, place / "output", log=log).finish()
        print(f"no room for results: {compare(whole, place / 'output')} tables are equal afterwards", flush=True)


def threads(profile: str, folder: Path) -> None:
    """One thread and two: differences of every variant's accepted length within 4.5 paired errors of its prompts."""
    from dblast.reproduction.estimates import VARIANT_COLUMNS, difference

    for count in (1, 2):
        seconds = Run(profile, folder / f"cache {count}", folder / str(count), threads=count).finish()
        print(f"{count} threads: {seconds:.0f} s", flush=True)
    for path in sorted((folder / "1").rglob("*-scores.parquet")):
        one, two = (pd.read_parquet(folder / count / path.relative_to(folder / "1")) for count in "12")
        for name, rows in one.groupby(VARIANT_COLUMNS):
            moved = difference(two[(two[VARIANT_COLUMNS] == list(name)).all(axis=1)], rows)
            print(
                f"  {', '.join(map(str, name))}: moved by {moved.value:.1e} +- {moved.standard_error:.1e}", flush=True
            )
            # Equal bits have no error; NaN fails.
            assert moved.value == 0 or abs(moved.value) < 4.5 * moved.standard_error
        numbers = one.select_dtypes("number").columns
        print(
            f"{path.stem}: {int((one[numbers] != two[numbers]).to_numpy().sum())} of {one[numbers].size} numbers differ"
        )


def child(arguments: argparse.Namespace) -> None:
    """Errors become one line, as the command line makes them."""
    from dblast.errors import DBlastError

    try:
        make_tables(arguments.profile, arguments.output, arguments.parallel)
    except DBlastError as error:
        print(f"dblast: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "pairs", "storage", "threads", "child"))
    parser.add_argument("--profile", default="small", help="small, other or a profile of the project")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parallel", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "child":
        child(arguments)
        return
    work: dict[str, Callable[[Path], None]] = {
        "kills": lambda folder: kills(arguments.profile, arguments.kills, arguments.seed, folder),
        "pairs": lambda folder: pairs(arguments.profile, folder),
        "storage": lambda folder: storage(arguments.profile, folder),
        "threads": lambda folder: threads(arguments.profile, folder),
    }
    with tempfile.TemporaryDirectory(prefix="dblast-") as folder:
        work[arguments.what](Path(folder))


if __name__ == "__main__":
    main()
