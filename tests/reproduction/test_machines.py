"""The tests under another machine's conditions: what children are told, and what is counted."""

import itertools
import os
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.machines import CHEAP, cheap_tests, main, run_tests

CHILD = '''
import os
import pytest

def test_environment():
    assert os.environ["ATEN_CPU_CAPABILITY"] == "default" and os.environ["PYTHONHASHSEED"] == "5"

def test_that_fails():
    assert False

@pytest.fixture
def broken():
    raise ValueError

def test_with_a_broken_fixture(broken):
    pass
'''


def test_failures_and_errors_under_a_condition_are_counted(tmp_path):
    file = tmp_path / "test_child.py"
    file.write_text(CHILD)
    before = dict(os.environ)
    result = run_tests([str(file)], {"ATEN_CPU_CAPABILITY": "default"}, seed=5)
    assert result["tests"] == 3 and result["status"] == 1
    assert [name.split("::")[1] for name in result["failed"]] == ["test_that_fails", "test_with_a_broken_fixture"]
    assert dict(os.environ) == before


def test_every_cheap_test_exists():
    assert len(cheap_tests()) == len(CHEAP)


def test_a_condition_that_does_not_exist_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["machines", "--only", "no such"])
    with pytest.raises(SystemExit):
        main()
    assert "two threads" in capsys.readouterr().err


def test_a_seed_shuffles_files_and_their_tests_and_loses_none(monkeypatch):
    kept = [SimpleNamespace(path=file, name=i) for file in ("a", "b", "c") for i in range(20)]
    items = list(kept)
    monkeypatch.delenv("DBLAST_TEST_ORDER_SEED", raising=False)
    pytest_collection_modifyitems(items)
    assert items == kept
    orders = []
    for seed in ("1", "2", "1"):
        monkeypatch.setenv("DBLAST_TEST_ORDER_SEED", seed)
        items = list(kept)
        pytest_collection_modifyitems(items)
        assert sorted((item.path, item.name) for item in items) == [(item.path, item.name) for item in kept]
        # A file's tests stay together.
        assert len(list(itertools.groupby(items, key=lambda item: item.path))) == 3
        orders.append(items)
    assert orders[0] == orders[2] != orders[1]
