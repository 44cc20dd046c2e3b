"""Where figures and tables are written: the kept ones change only when a run is asked to make them anew."""

from dblast.reproduction.paths import FIGURES, REGENERATE, RUNS, figures_folder


def test_without_being_asked_the_kept_figures_are_left_alone():
    assert figures_folder("cpu") == RUNS / "figures" / "cpu"


def test_a_run_that_is_asked_writes_the_kept_figures(monkeypatch):
    monkeypatch.setenv(REGENERATE, "1")
    assert figures_folder("cpu") == FIGURES / "cpu"
