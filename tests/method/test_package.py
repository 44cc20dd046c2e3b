"""The method stands alone: what it imports, how large it is, what `import dblast` costs and offers."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dblast

PACKAGE = Path(dblast.__file__).parent
METHOD = sorted(PACKAGE.glob("*.py"))
SUPPORT = sorted((PACKAGE / "support").glob("*.py"))
STUDY = sorted((PACKAGE / "reproduction").rglob("*.py"))
#: Import names that differ from the name of what pip installs.
DISTRIBUTIONS = {"yaml": "pyyaml", "IPython": "ipython", "PIL": "pillow"}


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


@pytest.mark.parametrize("path", METHOD + SUPPORT, ids=lambda path: path.name)
def test_the_method_imports_nothing_of_the_study(path):
    # The command line belongs to the study; `python -m dblast` is where it starts.
    if path.name != "__main__.py":
        assert not [name for name in imports(path) if name.startswith("dblast.reproduction")]


def test_the_method_is_compact():
    read = [path for path in METHOD if len(path.read_text(encoding="utf-8").splitlines()) > 45]
    assert len(read) <= 14, [path.name for path in read]
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 470 for path in METHOD + SUPPORT + STUDY)


def test_imports_of_the_method_have_no_circle():
    """Each module can be the first one imported."""
    names = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in METHOD + SUPPORT}
    below = {
        name: {other for other in names.values() if any(i.removeprefix("dblast.").startswith(other) for i in imports(path))}
        for path, name in names.items()
    }
    # Type annotations alone: show writes about what decoding and trees return.
    below["show"] -= {"decoding", "trees"}
    done: set[str] = set()
    while left := {name for name in below if name not in done}:
        free = {name for name in left if below[name] & set(below) <= done}
        assert free, f"circle among {sorted(left)}"
        done |= free


def _declared(*extras: str) -> set[str]:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def _third_party(paths: list[Path]) -> set[str]:
    roots = {name.split(".")[0] for path in paths for name in imports(path)}
    roots -= {*sys.stdlib_module_names, "dblast"}
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in roots}


def test_everything_imported_is_declared():
    assert _third_party(METHOD + SUPPORT) <= _declared()
    assert _third_party(STUDY) <= _declared("reproduction")
    assert not _declared() & {"jupyterlab", "papermill", "pytest", "nbval", "ipywidgets"}


def test_importing_the_package_costs_nothing():
    code = """
import sys, time
start = time.perf_counter()
import dblast
assert time.perf_counter() - start < 0.3
assert not {"torch", "transformers", "numpy", "pandas"} & set(sys.modules)
dblast.show_blocks
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_public_names_are_those_of_their_modules():
    for name, module in dblast._LAZY.items():
        assert getattr(dblast, name) is getattr(importlib.import_module(f"dblast.{module}"), name)
    assert set(dblast.__all__) <= set(dir(dblast))
    with pytest.raises(AttributeError, match="nothing"):
        dblast.nothing  # noqa: B018
