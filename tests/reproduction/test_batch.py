"""The batch run on small notebooks that go wrong: which notebook and cell, in one line, and no kernel left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from dblast.errors import DBlastError
from dblast.reproduction import reproduce, stages
from dblast.reproduction.paths import ROOT
from dblast.reproduction.plans import Profile
from dblast.reproduction.reproduce import check_kernel, execute, parse_parameters
from dblast.reproduction.stages import RECORD, Stage, write_json

#: The first cell says which process to look for afterwards.
WRITE_PID = "import os, pathlib\npathlib.Path('pid').write_text(str(os.getpid()))"


def write(folder: Path, *sources: str) -> Path:
    cells = [new_code_cell("value: float = 1.0  # any number", metadata={"tags": ["parameters"]})]
    notebook = new_notebook(cells=cells + [new_code_cell(source) for source in (WRITE_PID, *sources)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path = folder / "01_scratch.ipynb"
    nbformat.write(notebook, path)
    return path


def is_running(pid: int) -> bool:
    try:
        # A zombie waits for its parent alone.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kernel_ended(folder: Path, seconds: float = 20.0) -> bool:
    pid = int((folder / "pid").read_text())
    limit = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < limit:
        time.sleep(0.1)
    return not is_running(pid)


def refused(folder: Path, *sources: str) -> str:
    """The one line with which a notebook of these cells fails."""
    with pytest.raises(DBlastError) as error:
        execute(write(folder, *sources), folder / "copy.ipynb", {"value": 2.0}, folder)
    assert kernel_ended(folder)
    (line,) = str(error.value).splitlines()
    return line


def test_a_notebook_runs_in_its_folder_with_its_parameters_and_its_kernel_ends(tmp_path, monkeypatch):
    # What decides how idle threads wait reaches the kernel before it loads torch.
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    read = "pathlib.Path('policy').write_text(os.environ['OMP_WAIT_POLICY'])"
    path = write(tmp_path, "pathlib.Path('made').write_text(str(value))", read)
    before = path.read_bytes()
    execute(path, tmp_path / "copy.ipynb", {"value": 2.0}, tmp_path)
    assert (tmp_path / "made").read_text() == "2.0" and path.read_bytes() == before
    assert (tmp_path / "policy").read_text() == "passive"
    json.loads((tmp_path / "copy.ipynb").read_text(), parse_constant=pytest.fail)
    assert kernel_ended(tmp_path)


def test_a_cell_that_raises_is_named_in_one_line_with_the_copy(tmp_path):
    # Cells 1 and 2 hold the parameters as written and as given, 3 the process.
    line = refused(tmp_path, "x = 1", "raise ValueError('first\\nsecond')")
    assert line.startswith("01_scratch.ipynb failed in cell 5: ValueError: first second")
    assert line.endswith("(executed copy: " + str(tmp_path / "copy.ipynb") + ")")


def test_a_kernel_that_is_killed_is_named_with_its_cell_and_nothing_hangs(tmp_path):
    began = time.monotonic()
    line = refused(tmp_path, "x = 1", "import signal; os.kill(os.getpid(), signal.SIGKILL)", "x = 2")
    assert line.startswith("01_scratch.ipynb failed in cell 5: its kernel was killed, as happens when memory runs out")
    assert time.monotonic() - began < 120


def test_a_figure_that_cannot_be_saved_is_one_line(tmp_path):
    (tmp_path / "figures").touch()
    line = refused(tmp_path, "(pathlib.Path('figures') / 'figure1.pdf').write_bytes(b'')")
    assert "failed in cell 4: NotADirectoryError" in line and "figure1.pdf" in line


def test_a_copy_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(DBlastError, match=r"01_scratch.ipynb: .*runs.* cannot be written: a part of its path is a file") as error:
        execute(write(tmp_path), tmp_path / "runs" / "copy.ipynb", {"value": 2.0}, tmp_path)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_kernel(tmp_path, number):
    path = write(tmp_path, "import time; time.sleep(600)")
    script = (
        "import sys; from pathlib import Path\n"
        "from dblast.reproduction.reproduce import execute\n"
        "source, copy, folder = map(Path, sys.argv[1:]); execute(source, copy, {'value': 2.0}, folder)"
    )
    command = [sys.executable, "-c", script, *map(str, (path, tmp_path / "copy.ipynb", tmp_path))]
    # A shell's background jobs, and so tests among them, ignore interrupts and hand that down.
    heard = signal.signal(number, signal.default_int_handler)
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    signal.signal(number, heard)
    try:
        limit = time.monotonic() + 240
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert run.poll() is None and time.monotonic() < limit
            time.sleep(0.2)
        run.send_signal(number)
        assert run.wait(60) != 0
        assert kernel_ended(tmp_path)
    finally:
        run.kill()
        run.wait()


class Specs:
    """Stands in for Jupyter's list of kernels."""

    def __init__(self, interpreter=None):
        self.argv = [interpreter]

    def __call__(self):
        return self

    def get_kernel_spec(self, name):
        if self.argv == [None]:
            raise reproduce.NoSuchKernel(name)
        return self


@pytest.mark.parametrize(
    ("specs", "words"),
    [(Specs(), "Jupyter has no kernel 'python3'"), (Specs("/missing/python"), "wants /missing/python, which is not there")],
    ids=["none", "without its python"],
)
def test_without_a_kernel_nothing_is_started(monkeypatch, specs, words):
    monkeypatch.setattr(reproduce, "KernelSpecManager", specs)
    with pytest.raises(DBlastError, match=words) as error:
        check_kernel()
    assert "ipykernel install" in str(error.value) and len(str(error.value).splitlines()) == 1


def test_this_environment_has_its_kernel():
    check_kernel()


@pytest.mark.parametrize("value", ["nan", "NaN", ".nan", "inf", "-inf", ".inf", "-.Inf", "+Infinity", "1e999", "-1e999"])
def test_a_parameter_that_is_no_finite_number_is_refused(value):
    with pytest.raises(DBlastError, match="is no finite number"):
        parse_parameters([f"temperature={value}"])


def test_words_that_begin_like_numbers_stay_words():
    assert parse_parameters(["a=nano", "b=information"]) == {"a": "nano", "b": "information"}


def test_the_time_of_a_run_is_told_by_notebook_and_by_stage(tmp_path, monkeypatch):
    """What was there before the run, or is unfinished, has no part in it."""
    monkeypatch.setenv("DBLAST_CACHE", str(tmp_path))
    monkeypatch.setattr(stages, "code_fingerprint", lambda *_: "")
    made = [Stage("texts", {"n": n}) for n in range(3)] + [Stage("drafters", {"n": 0})]
    for stage in made:
        stage.run(lambda folder: (folder / "file").touch())
    (tmp_path / "drafters" / ("0" * 16)).mkdir()
    for stage, seconds in zip(made, (1000.0, 20.4, 30.4, 99.6), strict=True):
        record = json.loads((stage.folder / RECORD).read_text()) | {"seconds": seconds}
        record.pop("digest")
        write_json(stage.folder / RECORD, record | {"digest": stages.digest(record)})
        os.utime(stage.folder / RECORD, (500.0, 500.0) if seconds == 1000 else (2000.0, 2000.0))
    table = reproduce.time_table({"01_a.ipynb": 100.2, "02_b.ipynb": 59.0}, start=1000.0)
    assert [line.rsplit(maxsplit=1) for line in table.split("\n")[1:]] == [
        ["time", "seconds"],
        ["01_a.ipynb", "100"],
        ["02_b.ipynb", "59"],
        ["all notebooks", "159"],
        ["stages: drafters (1)", "100"],
        ["stages: texts (2)", "51"],
    ]


def test_a_run_ends_with_its_times(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DBLAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(reproduce, "RUNS", tmp_path)
    monkeypatch.setattr(reproduce, "execute", lambda path, copy, values: None)
    monkeypatch.setattr(reproduce, "_report", lambda profile, start: print("report"))
    reproduce._execute(Profile("tried", ()), [Path("01_a.ipynb"), Path("02_b.ipynb")], {})
    said = capsys.readouterr().out
    assert said.partition("report")[2].split() == "time seconds 01_a.ipynb 0 02_b.ipynb 0 all notebooks 0".split()
