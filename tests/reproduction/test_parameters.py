"""Parameters that papermill injects by hand, and profiles of which nothing is kept."""

import pytest

from dblast.errors import DBlastError
from dblast.reproduction import results
from dblast.reproduction.parameters import check_parameters, parameter_names
from dblast.reproduction.profiles import get_profile

OWN = 'profile: str = "cpu"  # which\nrecompute: bool = False\n'


def test_injected_names_are_told_from_the_notebooks_own():
    cells = ["import torch", OWN, "# Parameters\nprofil = 'smoke'\nrecompute = True\n", "%magic", "x = 1"]
    assert parameter_names(cells) == ({"profile": "str", "recompute": "bool"}, ["profil", "recompute"])


def test_an_unknown_parameter_is_refused_in_a_notebook(monkeypatch):
    class Shell:
        user_ns = {"In": ["", OWN, "# Parameters\nprofil = 1\n"]}

        def set_custom_exc(self, kinds, handler):
            assert kinds == (DBlastError,)

    monkeypatch.setattr("dblast.reproduction.parameters.get_ipython", Shell)
    with pytest.raises(DBlastError, match="no parameter 'profil'; it has profile, recompute"):
        check_parameters()
    Shell.user_ns["In"].pop()
    check_parameters()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("recompute", "maybe", "must be True or False, got 'maybe'"), ("recompute", 1, "True or False"),
     ("profile", 7, "must be text, got 7"), ("hours", True, "must be a number"), ("steps", 1.5, "a whole number")],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(monkeypatch, name, value, words):
    own = OWN + "hours: float = 0.5\nsteps: int = 3\n"

    class Shell:
        user_ns = {"In": [own, f"# Parameters\n{name} = {value!r}\nhours = 2\n"], "hours": 2, name: value}

        def set_custom_exc(self, kinds, handler):
            pass

    monkeypatch.setattr("dblast.reproduction.parameters.get_ipython", Shell)
    with pytest.raises(DBlastError, match=f"parameter '{name}' {'.*' + words}"):
        check_parameters()
    Shell.user_ns["In"] = [own, "# Parameters\nhours = 2\n"]
    Shell.user_ns["hours"] = 2
    check_parameters()


def test_outside_a_notebook_nothing_happens():
    check_parameters()


def test_a_profile_without_kept_results_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    with pytest.raises(DBlastError, match="python -m dblast reproduce --profile smoke"):
        results.open_table(get_profile("smoke"), "tiny", "scores")
