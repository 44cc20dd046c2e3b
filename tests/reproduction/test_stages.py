"""Artefacts addressed by what determines them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from dblast import sampling
from dblast.errors import ArtefactError
from dblast.reproduction import stages
from dblast.reproduction.cli import app
from dblast.reproduction.stages import RECORD, RUN, Stage, check_all, clean, digest, list_stages
from tests.checks import refused


class Work:
    """Writes two files and counts how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "inner").mkdir(exist_ok=True)
        (folder / "a.txt").write_text("alpha")
        (folder / "inner" / "b.txt").write_text("beta")


@pytest.fixture
def work() -> Work:
    return Work()


# -- running -------------------------------------------------------------------------------------


def test_a_stage_is_computed_once(cache_folder, work):
    folder = Stage("kind", {"x": 1}).run(work)
    assert folder == Stage("kind", {"x": 1}).run(work) and work.calls == 1
    assert folder.parent == cache_folder / "kind" and (folder / "inner" / "b.txt").read_text() == "beta"


def test_a_stage_is_done_when_its_record_is_written(work):
    stage = Stage("kind", {})
    assert not stage.done

    def compute(folder: Path) -> None:
        work(folder)
        assert not stage.done

    stage.run(compute)
    assert stage.done


def test_the_record_says_what_was_made(work):
    stage = Stage("kind", {"x": [1, 2]})
    stage.run(work)
    record = stage.record()
    assert record["kind"] == "kind" and record["spec"] == {"x": [1, 2]} and record["seconds"] >= 0
    assert set(record["files"]) == {"a.txt", str(Path("inner", "b.txt"))}
    assert all(len(checksum) == 64 for checksum in record["files"].values())


@pytest.mark.parametrize("other", [("kind", {"x": 2}), ("other", {"x": 1}), ("kind", {"x": 1, "y": 0})])
def test_another_kind_or_spec_is_another_artefact(work, other):
    folder = Stage("kind", {"x": 1}).run(work)
    assert Stage(*other).run(work) != folder and work.calls == 2


def test_an_unfinished_folder_is_continued_in_place():
    stage = Stage("kind", {})

    def killed(folder: Path) -> None:
        (folder / "first").write_text("1")
        raise KeyboardInterrupt

    def finish(folder: Path) -> None:
        assert (folder / "first").read_text() == "1"
        (folder / "second").write_text("2")

    with pytest.raises(KeyboardInterrupt):
        stage.run(killed)
    assert not stage.done
    stage.run(finish)
    assert set(stage.record()["files"]) == {"first", "second"}


def test_a_kill_while_the_record_is_written_can_be_continued(work, monkeypatch):
    stage = Stage("kind", {})

    def killed(source, destination):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stages.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            stage.run(work)
    assert not stage.done
    stage.run(work)
    stage.check()
    assert set(stage.record()["files"]) == {"a.txt", str(Path("inner", "b.txt"))}


def test_what_only_a_resumed_run_needs_is_no_part_of_the_artefact(work):
    stage = Stage("kind", {})

    def compute(folder: Path) -> None:
        work(folder)
        (folder / RUN).mkdir()
        (folder / RUN / "state").write_text("half way")
        (folder / "b.part").write_text("a killed run's")
        (folder / "c.part").mkdir()

    folder = stage.run(compute)
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "inner", RECORD]
    assert set(stage.record()["files"]) == {"a.txt", "inner/b.txt"}


def test_the_lock_is_free_again_even_while_a_failure_is_looked_at(work):
    stage = Stage("kind", {})

    def failing(folder: Path) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError) as error:
        stage.run(failing)
    assert error.traceback  # which keeps every frame alive, and with it what the frames hold
    with FileLock(stage.folder.with_suffix(".lock"), timeout=0):
        pass
    stage.run(work)


# -- hashing -------------------------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that were read to be hashed."""
    names, digest_of = [], hashlib.file_digest

    def counting(file, algorithm):
        names.append(Path(file.name).name)
        return digest_of(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", counting)
    return names


def aged(path: Path) -> None:
    """Make a file older than the moments in which a change might leave its time as it is."""
    os.utime(path, (time.time() - 60,) * 2)


def test_a_file_is_hashed_once_however_often_its_artefact_is_opened(work, hashed):
    folder = Stage("kind", {}).run(work)
    for name in ("a.txt", "inner/b.txt"):
        aged(folder / name)
    hashed.clear()
    for _ in range(5):
        Stage("kind", {}).run(work)
    assert sorted(hashed) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_changed_file_is_hashed_again_though_size_and_time_may_be_the_same(work, keep_time):
    stage = Stage("kind", {})
    path = stage.run(work) / "a.txt"
    aged(path)
    stage.check()
    before = path.stat()
    path.write_text("alphb")
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ArtefactError, match="a.txt"):
        stage.check()


# -- refusing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "inner/b.txt"])
@pytest.mark.parametrize("damage", ["changed", "missing", "empty"])
def test_a_damaged_artefact_is_refused(work, name, damage):
    stage = Stage("kind", {})
    path = stage.run(work) / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_text("" if damage == "empty" else "changed")
    with refused(str(path), "delete", str(stage.folder), kind=ArtefactError):
        stage.run(work)
    assert work.calls == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"kind": "kind"}', b'{"files": 3}', b"null", b"\xff\xfe\x00"])
def test_an_unreadable_record_is_refused(work, content):
    stage = Stage("kind", {})
    (stage.run(work) / RECORD).write_bytes(content)
    with refused(RECORD, "delete", kind=ArtefactError):
        stage.run(work)
    assert work.calls == 1


def test_the_record_of_another_artefact_is_refused(work):
    one, other = Stage("kind", {"x": 1}), Stage("kind", {"x": 2})
    one.run(work), other.run(work)
    shutil.rmtree(other.folder)
    shutil.copytree(one.folder, other.folder)
    with refused(RECORD, one.key, "another artefact", f"delete {other.folder}", kind=ArtefactError):
        other.run(work)
    assert work.calls == 2


@pytest.mark.parametrize("change", [{"seconds": 1e9}, {"spec": {"x": 2}}, {"code": ["a.b"]}])
def test_a_changed_record_is_refused(work, change):
    stage = Stage("kind", {"x": 1})
    path = stage.run(work) / RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(RECORD, "delete", kind=ArtefactError):
        stage.run(work)


# -- digests -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str = "n"
    inner: Inner = Inner()


def test_a_dataclass_counts_by_its_fields():
    assert digest(Outer()) == digest({"name": "n", "inner": {"rate": 0.5}})
    assert digest({"spec": Outer()}) != digest({"spec": Outer(inner=Inner(0.25))})


def test_digests_are_stable_and_know_the_order_of_lists_but_not_of_keys():
    text = '{"a": [1, 2.5, null, "x"], "b": 1}'
    assert digest({"b": 1, "a": [1, 2.5, None, "x"]}) == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert digest([1, 2]) != digest([2, 1])


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), Outer])
def test_what_has_no_canonical_text_is_not_hashed(value):
    with pytest.raises(TypeError):
        digest({"value": value})


def test_a_dataclass_spec_is_recorded_as_json(work):
    stage = Stage("kind", {"config": Outer()})
    stage.run(work)
    assert stage.record()["spec"] == {"config": {"name": "n", "inner": {"rate": 0.5}}}
    assert json.loads((stage.folder / RECORD).read_text(encoding="utf-8"))["kind"] == "kind"


# -- the cache as a whole ----------------------------------------------------------------------------


def states() -> dict[str, str]:
    return {stored.key: stored.state for stored in list_stages()}


@pytest.fixture
def mixed(work, cache_folder):
    """One artefact of every state; the outdated ones were made by code that is no more, or from such an artefact."""
    made = {name: Stage("kind", {"x": name}, sampling.get_setting) for name in ("finished", "damaged", "old")}
    for stage in made.values():
        stage.run(work)
    made["child"] = Stage("other", {"upstream": [{"old": made["old"].key}]})
    made["child"].run(work)
    made["grandchild"] = Stage("other", {"upstream": made["child"].key})
    made["grandchild"].run(work)
    path = made["old"].folder / RECORD
    record = json.loads(path.read_text())
    record["code"] = ["dblast.sampling.gone"]
    record.pop("digest")
    path.write_text(json.dumps(record | {"digest": digest(record)}))
    (made["damaged"].folder / "a.txt").write_text("changed")
    made["unfinished"] = Stage("kind", {"x": "unfinished"})
    made["unfinished"].folder.mkdir(parents=True)
    (cache_folder / "targets" / "smollm2").mkdir(parents=True)
    return made


def test_the_cache_is_listed_with_sizes_and_states(mixed):
    assert states() == {
        mixed["finished"].key: "finished",
        mixed["damaged"].key: "finished",  # that takes reading the files
        mixed["old"].key: "outdated",
        mixed["child"].key: "outdated",
        mixed["grandchild"].key: "outdated",
        mixed["unfinished"].key: "unfinished",
    }
    stored = next(stored for stored in list_stages() if stored.key == mixed["finished"].key)
    assert stored.size == sum(p.stat().st_size for p in mixed["finished"].folder.rglob("*") if p.is_file())
    assert (stored.kind, stored.folder) == ("kind", mixed["finished"].folder) and abs(stored.changed - time.time()) < 60


def test_all_artefacts_are_checked(mixed):
    found = {stored.key: problem for stored, problem in check_all()}
    assert mixed["unfinished"].key not in found
    assert found[mixed["finished"].key] is None
    assert str(mixed["damaged"].folder / "a.txt") in found.pop(mixed["damaged"].key)
    assert set(found.values()) == {None}


def test_cleaning_leaves_what_another_process_works_on(mixed):
    with FileLock(mixed["unfinished"].folder.with_suffix(".lock")):
        gone = clean([stored for stored in list_stages() if stored.state != "finished"])
    assert {stored.key for stored in gone} == {mixed[name].key for name in ("old", "child", "grandchild")}
    assert set(states()) == {mixed[name].key for name in ("finished", "damaged", "unfinished")}


def test_the_cache_command(mixed, cache_folder):
    run = CliRunner().invoke
    listed = run(app, ["cache"])
    assert listed.exit_code == 0 and listed.output.count("outdated") == 3 and str(cache_folder) in listed.output
    checked = run(app, ["cache", "--check"])
    assert checked.exit_code == 1 and "a.txt is missing or damaged" in checked.output
    asked = run(app, ["cache", "--clean"])
    assert "artefacts: 4" in asked.output and "--yes" in asked.output and len(states()) == 6
    done = run(app, ["cache", "--clean", "--yes"])
    assert done.exit_code == 0 and set(states()) == {mixed["finished"].key, mixed["damaged"].key}
    assert not list(cache_folder.glob("*/*.lock")) or all(p.stem in states() for p in cache_folder.glob("*/*.lock"))
    assert (cache_folder / "targets" / "smollm2").is_dir()


def test_an_empty_cache_is_listed(cache_folder):
    shutil.rmtree(cache_folder)
    assert list_stages() == []
    assert "artefacts: 0" in CliRunner().invoke(app, ["cache"]).output
