"""The project's own files: pins that agree, notebooks that are papers and not programs, results that match the plans."""

import json
import re
import subprocess
import sys
import tomllib

import nbformat
import pandas as pd
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dblast.reproduction import cli
from dblast.reproduction.paths import NOTEBOOKS, ROOT
from dblast.reproduction.profiles import PROFILES, get_profile
from dblast.reproduction.reproduce import notebook_paths, parse_parameters
from dblast.reproduction.results import BEYOND_TABLES, TABLES, plan_digest, read_provenance, results_folder
from dblast.support.files import sha256_file

NOTEBOOK_FILES = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def _pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def _direct():
    """What the tested environment has: the method's needs, and those of study and tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(line) for line in (*project["dependencies"], *extras["reproduction"], *extras["test"])]


def _optional():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for lines in project["optional-dependencies"].values() for line in lines]


def test_constraints_pin_every_direct_dependency_inside_its_range():
    """Those of extras too, which environment.yml leaves out."""
    pins = _pins()
    for requirement in _direct() + _optional():
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_environment_repeats_the_pins_of_the_direct_dependencies():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [item for item in environment["dependencies"] if isinstance(item, str)]
    assert "python=3.11" in conda
    (pip,) = (item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    assert pip[:2] == ["--constraint constraints.txt", "--editable .[reproduction,test]"]
    pins = _pins()
    expected = {canonicalize_name(r.name): pins[canonicalize_name(r.name)] for r in _direct()}
    assert {canonicalize_name(n): v for n, v in (line.split("==") for line in pip[2:])} == expected


def test_a_tour_and_numbered_notebooks_each_in_its_profile():
    assert [path.name[:2] for path in NOTEBOOK_FILES] == ["00", "01", "02", "03", "04", "05", "06", "07", "08"]
    # The tour makes no figure or table: a batch run leaves it out.
    assert notebook_paths(get_profile("cpu")) == notebook_paths(get_profile("smoke")) == NOTEBOOK_FILES[1:6]
    assert notebook_paths(get_profile("losses")) == NOTEBOOK_FILES[6:7]
    assert notebook_paths(get_profile("sweeps")) == NOTEBOOK_FILES[7:8]
    assert notebook_paths(get_profile("beyond")) == NOTEBOOK_FILES[8:]


def test_every_committed_json_is_json():
    """Python's own reader takes NaN and Infinity, which JSON does not have; other readers refuse the file."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    listed = subprocess.run(["git", "ls-files", "*.json", "*.jsonl", "*.ipynb"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split()
    assert len(names) > 10
    for name in names:
        text = (ROOT / name).read_text(encoding="utf-8")
        for part in text.splitlines() if name.endswith("l") else [text]:
            json.loads(part, parse_constant=refuse)


@pytest.mark.parametrize("path", NOTEBOOK_FILES, ids=lambda path: path.stem)
class TestNotebook:
    def test_is_small_and_uses_the_plain_kernel_name(self, path):
        assert path.stat().st_size < 300_000
        assert nbformat.read(path, 4).metadata.kernelspec.name == "python3"

    def test_has_one_parameters_cell_of_annotated_literals(self, path):
        cells = [c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])]
        assert len(cells) == 1
        for line in cells[0].source.splitlines():
            assert re.fullmatch(r"\w+: \w+ = (\"[^\"\\]+\"|True|False|[\d.]+)  # .+", line), line

    def test_defines_no_long_function_and_names_no_absolute_path(self, path):
        source = "\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code")
        assert "def " not in source and "class " not in source
        assert not re.search(r"[\"'](/|~|[A-Z]:\\\\)", source)

    def test_outputs_hold_no_error_and_no_progress_bar(self, path):
        for cell in nbformat.read(path, 4).cells:
            for output in cell.get("outputs", []):
                assert output.output_type != "error"
                assert output.get("name") != "stderr", output.get("text", "")[:200]
                assert "it/s" not in json.dumps(output.get("text", ""))

    def test_was_committed_executed(self, path):
        counts = [c.execution_count for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
        assert counts == list(range(1, len(counts) + 1))


def test_no_code_cell_stands_in_two_notebooks():
    seen = {}
    for path in NOTEBOOK_FILES:
        for cell in nbformat.read(path, 4).cells:
            lines = [line for line in cell.source.splitlines() if not line.startswith(("import ", "from "))]
            if cell.cell_type == "code" and len(lines) >= 6:
                assert seen.setdefault(cell.source, path) == path, f"{path.name} repeats a cell of {seen[cell.source].name}"


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("cpu", tuple(set(TABLES) - set(BEYOND_TABLES))),
        ("losses", ("scores",)),
        ("sweeps", ("scores",)),
        ("beyond", ("proposals", "siblings")),
    ],
)
def test_committed_results_are_those_of_their_profile(name, tables):
    profile = PROFILES[name]
    record = read_provenance(name)
    for plan in profile.plans:
        for table in tables:
            if table == "target" and plan.tiny is None:
                continue  # only a target that the project trains has a training curve
            file = f"{plan.label}-{table}.parquet"
            assert record[file]["plan"] == plan_digest(plan, table), f"{file} was made by another plan"
            assert record[file]["sha256"] == sha256_file(results_folder(name) / file)


def test_tiny_target_of_the_committed_results_is_close_to_its_language():
    last = pd.read_parquet(results_folder("cpu") / "tiny-target.parquet").iloc[-1]
    assert last.entropy - 0.01 < last.held_out_loss < last.entropy + 0.03


@pytest.fixture
def dblast(monkeypatch, capsys):
    """The command line in this process: exit status, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["dblast", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reproduce", "--profile", "smoke", "-p", "nonsense=1"], "no parameter 'nonsense'"),
        (["reproduce", "--profile", "smoke", "-p", "nonsense"], "NAME=VALUE"),
        (["reproduce", "--profile", "smoke", "-p", "profile=cpu"], "--profile cpu"),
        (["reproduce", "--profile", "smoke", "-p", "recompute=[1"], "'recompute=[1' cannot be read"),
        (["reproduce", "--profile", "smoke", "-p", "recompute=3"], "is of type bool, got 3"),
        (["train", "--layers", "0"], "--layers must be at least 1"),
        (["train", "--mask-token-id", "5"], "is for loaded targets"),
        (["reproduce", "--profile", "smoke", "--only", "09"], "no notebook of profile 'smoke' starts with '09'"),
        (["train", "--target", "nope"], "no target 'nope'"),
        (["train", "--tasks", "poems"], "unknown task 'poems'"),
        (["train", "-K", "0"], "--categories must be at least 1"),
        (["train", "--block-length", "0"], "--block-length must be at least 1"),
        (["train", "--steps", "0"], "steps must be at least 1"),
        (["train", "--learning-rate", "-1"], "--learning-rate must be positive"),
        (["train", "--target", "smollm2", "--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gives_one_clear_line_and_a_non_zero_exit(dblast, arguments, words):
    code, _, text = dblast(*arguments)
    assert code == 2
    assert len(text.strip().splitlines()) == 1 and words in text


def test_ctrl_c_is_not_success(dblast, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.typer, "echo", interrupted)
    code, _, text = dblast("profiles")
    assert code == 130 and "interrupted" in text


def test_no_placeholder_is_left_in_the_documentation():
    for path in [ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("data/*/README.md")]:
        assert not re.search(r"@[A-Z0-9]+@", path.read_text(encoding="utf-8")), path.name


def test_an_unreadable_prompt_line_is_named(dblast, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"task": "chat", "turns": ["Hello?"]}\n{"task": "chat"\n')
    code, _, text = dblast("train", "--target", "smollm2", "--prompts", str(path))
    assert code == 2 and "mine.jsonl:2:" in text


def test_profiles_listed_by_the_command_line_are_those_that_exist(dblast):
    code, text, _ = dblast("profiles")
    assert code == 0 and [line.split()[0] for line in text.splitlines()] == list(PROFILES)


def test_parameter_values_are_numbers_truths_or_words():
    read = parse_parameters(["a=1e-3", "b=-2E4", "c=0.5", "d=3", "e=true", "f=1e", "g=high"])
    assert read == {"a": 1e-3, "b": -2e4, "c": 0.5, "d": 3, "e": True, "f": "1e", "g": "high"}
    assert isinstance(read["a"], float) and isinstance(read["d"], int)
