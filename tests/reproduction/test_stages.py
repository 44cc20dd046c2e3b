"""Artefacts addressed by what determines them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from dblast.reproduction import stages
from dblast.errors import ArtefactError
from dblast.reproduction.stages import RECORD, Stage, digest
from tests.checks import one_line


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


def test_fresh_computes_again_from_nothing(work):
    stage = Stage("kind", {})
    (stage.run(work) / "stray.txt").write_text("left over")
    folder = stage.run(work, fresh=True)
    assert work.calls == 2 and not (folder / "stray.txt").exists()


def test_fresh_repairs_a_damaged_artefact(work):
    stage = Stage("kind", {})
    (stage.run(work) / "a.txt").write_text("changed")
    assert (stage.run(work, fresh=True) / "a.txt").read_text() == "alpha"


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
    with pytest.raises(ArtefactError) as error:
        stage.run(work)
    one_line(error, str(path), "delete", str(stage.folder))
    assert work.calls == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "kind"}', '{"files": 3}', "null"])
def test_an_unreadable_record_is_refused(work, text):
    stage = Stage("kind", {})
    (stage.run(work) / RECORD).write_text(text)
    with pytest.raises(ArtefactError) as error:
        stage.run(work)
    one_line(error, RECORD, "delete")
    assert work.calls == 1


def test_record_with_broken_encoding_is_refused(work):
    stage = Stage("kind", {})
    (stage.run(work) / RECORD).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtefactError):
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


def test_the_order_of_keys_does_not_count():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_the_order_of_a_list_counts():
    assert digest([1, 2]) != digest([2, 1])


def test_digests_are_stable_across_runs():
    text = '{"a": [1, 2.5, null, "x"]}'
    assert digest({"a": [1, 2.5, None, "x"]}) == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), Outer])
def test_what_has_no_canonical_text_is_not_hashed(value):
    with pytest.raises(TypeError):
        digest({"value": value})


def test_a_dataclass_spec_is_recorded_as_json(work):
    stage = Stage("kind", {"config": Outer()})
    stage.run(work)
    assert stage.record()["spec"] == {"config": {"name": "n", "inner": {"rate": 0.5}}}


def test_the_record_is_valid_json_for_other_tools(work):
    stage = Stage("kind", {"config": Outer()})
    assert json.loads((stage.run(work) / RECORD).read_text(encoding="utf-8"))["kind"] == "kind"
