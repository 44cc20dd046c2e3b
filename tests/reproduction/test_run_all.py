"""`make test` runs every stage, whatever failed before, and says so."""

import subprocess

from tests.run_all import checkout, command, is_unchanged, machine, notebooks, run_stages


def test_a_failed_stage_does_not_stop_the_next_ones(capfd):
    ran = []
    stages = {name: lambda name=name: ran.append(name) or name != "second" for name in ("first", "second", "third")}
    assert run_stages(stages) == 1
    assert ran == ["first", "second", "third"]
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("ok") and "third" in line for line in lines)
    assert any(line.startswith("FAILED") and "second" in line for line in lines)
    assert lines[-1] == "stages that failed: second"
    assert machine().splitlines()[0] in lines


def test_without_a_failure_the_status_is_zero_and_no_machine_is_described(capfd):
    assert run_stages({"only": lambda: True}) == 0
    assert "processor:" not in capfd.readouterr().out


def test_a_command_fails_by_its_exit_status_and_its_output_is_shown(capfd):
    assert command("platform")()
    assert capfd.readouterr().out.strip()
    assert not command("no_such_module")()
    assert "no_such_module" in capfd.readouterr().err


def test_only_numbered_notebooks_are_checked(tmp_path):
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in ("00_a.ipynb", "07_b.ipynb", "scratch.ipynb", ".ipynb_checkpoints/00_a-checkpoint.ipynb"):
        (tmp_path / name).touch()
    assert notebooks(tmp_path) == [str(tmp_path / "00_a.ipynb"), str(tmp_path / "07_b.ipynb")]
    assert len(notebooks()) == 9


def git(folder, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_changed_checkout_is_noticed(tmp_path, capfd):
    git(tmp_path, "init")
    (tmp_path / "kept").write_text("1")
    git(tmp_path, "add", "kept")
    git(tmp_path, "commit", "-m", "kept")
    clean = checkout(tmp_path)
    assert is_unchanged(clean, checkout(tmp_path))
    (tmp_path / "kept").write_text("2")
    dirty = checkout(tmp_path)
    assert not is_unchanged(clean, dirty) and "M kept" in capfd.readouterr().out
    # A second change of the same file, which git's status alone does not show.
    (tmp_path / "kept").write_text("3")
    assert not is_unchanged(dirty, checkout(tmp_path))
    (tmp_path / "new").write_text("")
    assert not is_unchanged(clean, checkout(tmp_path)) and "?? new" in capfd.readouterr().out


def test_outside_a_checkout_nothing_is_compared(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert checkout(tmp_path) is None
    assert is_unchanged(checkout(tmp_path), None) and "not compared" in capfd.readouterr().out
