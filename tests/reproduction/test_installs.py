"""What the command line says where only the package is installed: no extra, no checkout."""

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dblast.errors import DBlastError
from dblast.reproduction import cli, paths
from dblast.reproduction.checkpoints import shipped_drafter
from dblast.reproduction.paths import ROOT
from dblast.reproduction.prompts import sources
from tests.method.test_package import DISTRIBUTIONS


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["dblast", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capsys.readouterr().err


def test_modules_of_the_extra_are_those_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    declared = {canonicalize_name(Requirement(line).name) for line in extras["reproduction"]}
    assert {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in cli.STUDY_MODULES} == declared


@pytest.mark.parametrize("missing", ["scipy.special", "papermill"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch, capsys, missing):
    def lacking(*_, **__):
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(cli, "app", lacking)
    code, text = run(monkeypatch, capsys, "train")
    assert code == 2 and len(text.strip().splitlines()) == 1
    assert f'needs {missing.split(".")[0]}, which is not installed: pip install "dblast[reproduction]"' in text


def test_another_missing_module_is_an_error_with_its_place(monkeypatch):
    def broken(*_, **__):
        raise ModuleNotFoundError("No module named 'dblast.nothing'", name="dblast.nothing")

    monkeypatch.setattr(cli, "app", broken)
    monkeypatch.setattr(sys, "argv", ["dblast", "train"])
    with pytest.raises(ModuleNotFoundError):
        cli.main()


@pytest.mark.parametrize("command", cli.CHECKOUT_COMMANDS)
def test_outside_a_checkout_nothing_is_written_beside_the_package(monkeypatch, capsys, tmp_path, command):
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path / "notebooks")
    code, text = run(monkeypatch, capsys, command, "--profile", "smoke")
    assert code == 2 and len(text.strip().splitlines()) == 1
    assert f"{command} needs a checkout of dblast's repository" in text and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--help"], ["reproduce", "--help"]])
def test_help_loads_no_library(arguments):
    script = (
        "import sys; sys.argv = ['dblast', *sys.argv[1:]]\n"
        "from dblast.reproduction.cli import main\n"
        "try:\n    main()\nfinally:\n    print('loaded:', *(n for n in ('torch', 'transformers', 'pandas', 'IPython') if n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and re.search(r"loaded:\s*$", done.stdout)


def test_without_the_repositorys_data_one_line_says_where_a_drafter_comes_from(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(paths, "PAPER", tmp_path / "paper")
    code, text = run(monkeypatch, capsys, "generate", "--prompt", "Hi")
    assert code == 2 and len(text.strip().splitlines()) == 1
    assert "part of dblast's repository" in text and "give --drafter FOLDER" in text
    with pytest.raises(DBlastError, match="the shipped drafter is part of dblast's repository"):
        shipped_drafter("smollm2")


def test_without_the_repositorys_data_prompts_of_ones_own_are_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "DATA", tmp_path / "data")
    monkeypatch.setattr(sources, "EVALUATION_FILE", tmp_path / "data" / "evaluation.jsonl")
    with pytest.raises(DBlastError, match="bundled prompts are part of dblast's repository.* --prompts FILE"):
        sources.load_prompts("bundled")
