"""The browser check's own reasoning: what a saved notebook says. No browser is needed."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.browser.check import copy_without_outputs, main, progress_of


def code(source, count=None, *outputs):
    return new_code_cell(source, execution_count=count, outputs=list(outputs))


def saved(path, *cells):
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Title"), *cells]), path)
    return path


def test_progress_counts_cells_with_code_and_names_the_first_error(tmp_path):
    path = tmp_path / "a.ipynb"
    assert progress_of(saved(path, code("1", 1), code("2", 2), code(" \n"))) == (2, 2, None)
    error = new_output("error", ename="ValueError", evalue="\nno good\nmore", traceback=[])
    finished, total, what = progress_of(saved(path, code("1", 1), code("f()", 2, error), code("3")))
    assert (finished, total) == (2, 3) and "code cell 2: ValueError" in what and "no good" in what


def test_copies_start_without_outputs_and_originals_stay(tmp_path):
    source = saved(tmp_path / "a.ipynb", code("1", 1, new_output("stream", text="old")))
    before = source.read_bytes()
    copy_without_outputs(source, tmp_path / "b.ipynb")
    assert progress_of(tmp_path / "b.ipynb") == (0, 1, None) and source.read_bytes() == before


def test_a_missing_browser_says_what_to_do(monkeypatch):
    monkeypatch.setattr("sys.argv", ["check.py"])
    monkeypatch.setattr("tests.browser.check.BROWSERS", ("/missing/chromium",))
    with pytest.raises(SystemExit, match="apt-get install chromium"):
        main()
