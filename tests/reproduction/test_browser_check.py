"""The browser check's own reasoning: what a saved notebook says, and refusals in one line. No browser is needed."""

import json
import sys

import pytest

from tests.browser import check as module
from tests.browser.check import CheckError, State, copy_notebooks, find_chromium, load_playwright, main, state_of
from tests.checks import one_line


def code(source, count=None, *outputs, **fields):
    return {"cell_type": "code", "source": source, "execution_count": count, "outputs": list(outputs), **fields}


def document(*cells):
    return {"cells": [{"cell_type": "markdown", "source": "# Title"}, *cells], "nbformat": 4}


def stream(text):
    return {"output_type": "stream", "name": "stdout", "text": text}


def failure(name, value):
    return {"output_type": "error", "ename": name, "evalue": value, "traceback": []}


def test_a_notebook_is_done_when_every_code_cell_has_its_count():
    assert state_of(document(code("1", 1), code(["a = 1\n", "a"], 2, stream("1")))) == State(2, 2, None)
    assert state_of(document(code("1", 1), code("2", 2))).done


def test_cells_that_wait_or_run_are_unfinished():
    state = state_of(document(code("1", 1), code("2", None, stream("half-way")), code("3")))
    assert state == State(1, 3, None) and not state.done


def test_empty_cells_are_not_waited_for():
    assert state_of(document(code("1", 1), code(""), code([" \n", "\n"]))) == State(1, 1, None)


def test_the_first_error_is_named_in_one_line():
    broken = code("f()", 2, stream("before"), failure("ValueError", "\nno good\nsecond line"), id="f0-1")
    state = state_of(document(code("1", 1), broken, code("g()", 3, failure("KeyError", "later"))))
    assert state.error == "code cell 2 (id f0-1): ValueError: no good"
    # Cells after an error never run: the state is not done, but there is something to say.
    assert not state_of(document(broken, code("1"))).done


def test_an_error_without_words_or_cell_id_is_named_too():
    state = state_of(document(code("f()", 1, failure("AssertionError", ""))))
    assert state.error == "code cell 1 (id none): AssertionError"


def test_copies_start_without_outputs_and_originals_stay(tmp_path):
    source, folder = tmp_path / "notebooks", tmp_path / "copy"
    source.mkdir()
    texts = {}
    for name in ("run.ipynb", "other.ipynb"):
        texts[name] = json.dumps(document(code("1", 1, stream("old"))))
        (source / name).write_text(texts[name])
    copy_notebooks(source, ["run.ipynb"], folder)
    copied = json.loads((folder / "run.ipynb").read_text())
    assert copied == document(code("1")) and state_of(copied) == State(0, 1, None)
    assert {path.name: path.read_text() for path in source.iterdir()} == texts
    assert (folder / "other.ipynb").read_text() == texts["other.ipynb"]


def test_an_unknown_notebook_is_refused(tmp_path):
    (tmp_path / "notebooks").mkdir()
    with pytest.raises(CheckError) as error:
        copy_notebooks(tmp_path / "notebooks", ["nope.ipynb"], tmp_path / "copy")
    one_line(error, "no notebook nope.ipynb")


def test_missing_playwright_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "playwright", None)
    with pytest.raises(CheckError) as error:
        load_playwright()
    one_line(error, "pip install playwright")


class TestChromium:
    @pytest.fixture(autouse=True)
    def path(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CHROMIUM", raising=False)
        return tmp_path

    def executable(self, path):
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    def test_is_found_on_the_path(self, path):
        expected = self.executable(path / "chromium")
        assert find_chromium() == expected

    def test_chosen_by_the_variable_comes_first(self, path, monkeypatch):
        self.executable(path / "chromium")
        monkeypatch.setenv("CHROMIUM", self.executable(path / "mine"))
        assert find_chromium() == str(path / "mine")

    def test_missing_says_what_to_do(self):
        with pytest.raises(CheckError) as error:
            find_chromium()
        one_line(error, "apt-get install chromium", "CHROMIUM=")

    def test_that_cannot_be_run_is_named(self, monkeypatch):
        monkeypatch.setenv("CHROMIUM", "/missing/chromium")
        with pytest.raises(CheckError) as error:
            find_chromium()
        one_line(error, "CHROMIUM=/missing/chromium")


@pytest.mark.parametrize(
    ("raised", "status", "words"),
    [(CheckError("00.ipynb, code cell 2"), 1, "00.ipynb, code cell 2"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_failure_and_ctrl_c_give_one_line_and_their_exit_status(monkeypatch, capsys, raised, status, words):
    def check(*_):
        raise raised

    monkeypatch.setattr(module, "check", check)
    monkeypatch.setattr(module, "end_on_signals", lambda: None)
    assert main([]) == status
    assert capsys.readouterr().err == f"browser-check: {words}\n"
