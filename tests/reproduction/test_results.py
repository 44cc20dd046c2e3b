"""Kept result tables and their provenance: written by several runs at once, refused where they do not belong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pandas as pd
import pytest

from dblast.errors import ArtefactError
from dblast.reproduction import cli, progress, results
from dblast.reproduction.paths import ROOT, use_empty_cache
from dblast.reproduction.profiles import get_profile
from dblast.reproduction.results import open_table, read_provenance
from tests.checks import one_line, refused

PROFILE = get_profile("smoke")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Result tables that cost nothing, kept in a folder of their own."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for number, name in enumerate(results.TABLES):
        monkeypatch.setitem(results.TABLES, name, lambda plan, number=number: pd.DataFrame({"x": [number] * 3}))
    return tmp_path / "smoke"


def test_a_table_is_read_back_and_not_computed_again(folder, monkeypatch):
    made = open_table(PROFILE, "tiny", "scores", recompute=True)
    monkeypatch.setitem(results.TABLES, "scores", lambda plan: pytest.fail("computed again"))
    pd.testing.assert_frame_equal(open_table(PROFILE, "tiny", "scores"), made)
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["provenance.json", "tiny-scores.parquet"]


def test_runs_that_write_at_once_lose_no_provenance(folder, monkeypatch):
    """Each once read the record, added its entry and wrote it back over the other's."""
    read = results.read_provenance

    def slow(profile: str) -> dict:
        record = read(profile)
        time.sleep(0.05)
        return record

    monkeypatch.setattr(results, "read_provenance", slow)
    jobs = [(plan.label, name) for plan in PROFILE.plans for name in ("scores", "oracle", "figure1", "online")]
    threads = [threading.Thread(target=open_table, args=(PROFILE, *job, True)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read("smoke")) == {f"{label}-{name}.parquet" for label, name in jobs}
    for label, name in jobs:
        open_table(PROFILE, label, name)


def test_a_table_of_another_plan_is_refused(folder):
    open_table(PROFILE, "tiny", "scores", recompute=True)
    plan = PROFILE.plan("tiny")
    other = replace(PROFILE, plans=(replace(plan, seeds=(7,)),))
    with refused("tiny-scores.parquet", "another configuration", "recompute=True", kind=ArtefactError):
        open_table(other, "tiny", "scores")


def test_a_table_without_provenance_is_refused(folder):
    open_table(PROFILE, "tiny", "scores", recompute=True)
    (folder / "provenance.json").unlink()
    with refused("tiny-scores.parquet", "no provenance", "recompute=True", kind=ArtefactError):
        open_table(PROFILE, "tiny", "scores")


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '"x"'])
def test_damaged_provenance_is_refused_before_anything_is_computed(folder, monkeypatch, text):
    open_table(PROFILE, "tiny", "scores", recompute=True)
    (folder / "provenance.json").write_text(text)
    monkeypatch.setitem(results.TABLES, "scores", lambda plan: pytest.fail("computed"))
    with refused("provenance.json", "damaged", "restore it with git", kind=ArtefactError):
        open_table(PROFILE, "tiny", "scores", recompute=True)


def test_committed_provenance_is_that_of_its_configuration():
    """Entries of the kept tables hold the plan they are the hash of."""
    for profile in ("cpu", "losses", "sweeps", "beyond"):
        for name, entry in read_provenance(profile).items():
            values = json.loads(json.dumps(entry["configuration"]))
            if not any(name.endswith(f"-{table}.parquet") for table in results.DIAGNOSIS_TABLES):
                values.pop("diagnosis")
            if any(name.endswith(f"-{table}.parquet") for table in results.BEYOND_TABLES):
                values["grid"] = json.loads(json.dumps(results.GRID))
            assert results.digest(values) == entry["plan"], name


def test_no_room_for_a_table_is_one_line_and_leaves_the_earlier_one(folder, monkeypatch):
    open_table(PROFILE, "tiny", "scores", recompute=True)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_parquet", full)
        with pytest.raises(ArtefactError) as error:
            open_table(PROFILE, "tiny", "scores", recompute=True)
    one_line(error, "tiny-scores.parquet", "the disk is full", "same command again")
    open_table(PROFILE, "tiny", "scores")


# -- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize("number, words", [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "it is read-only")])
def test_what_cannot_be_written_is_one_line(monkeypatch, capsys, number, words):
    def failing(*_, **__):
        raise OSError(number, os.strerror(number), "figures/figure1.pdf")

    monkeypatch.setattr(sys, "argv", ["dblast", "profiles"])
    monkeypatch.setattr(cli.typer, "echo", failing)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"dblast: figures/figure1.pdf cannot be written: {words}\n"


def test_a_cache_that_is_a_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DBLAST_CACHE", str(tmp_path / "file"))
    with refused(str(tmp_path / "file"), "DBLAST_CACHE"):
        use_empty_cache(tmp_path / "fresh")


# -- worker processes ----------------------------------------------------------------------------

_PARENT = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from dblast.reproduction.progress import silence_worker

def work(seconds):
    time.sleep(seconds)
    return os.getpid()

if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"), initializer=silence_worker) as pool:
        print(*{pool.submit(work, 1).result() for _ in range(2)}, flush=True)
        pool.submit(work, 600).result()
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_workers_end_with_a_killed_parent(tmp_path):
    """They once waited for their next job for ever."""
    (tmp_path / "parent.py").write_text(_PARENT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert workers and all(map(alive, workers))
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not any(map(alive, workers)):
            break
        time.sleep(0.1)
    assert not any(map(alive, workers))


def test_a_process_that_is_no_worker_is_left_alone():
    progress._end_with_parent()
