"""What counts as the code of a result: all that its function reaches, wherever it stands, and nothing else."""

import sys

import pytest

from dblast.reproduction import experiments, fingerprint
from dblast.reproduction.stages import Stage

MATHS = '''"""Module."""

FACTORS = {"two": 2}
FACTORS.update(three=3)


class Doubler:
    def twice(self, x):
        return helper(x) * FACTORS["two"]


def helper(x):
    """x itself."""
    # an explanation
    if x < 0:
        raise ValueError("negative")
    return x


def beside(x):
    return -x
'''
START = '''from toycode import tables
from toycode.maths import Doubler


def start(x):
    from toycode.late import offset
    return Doubler().twice(x) + tables.BASE + offset(x)
'''
FILES = {"maths": MATHS, "start": START, "tables": "BASE = 1\nOTHER = 2\n", "late": "def offset(x):\n    return 0\n"}


@pytest.fixture
def fingerprint_of(tmp_path, monkeypatch):
    """Fingerprint of ``toycode.start.start`` with some files changed."""
    monkeypatch.setattr(fingerprint, "PACKAGE", "toycode")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "toycode").mkdir()
    (tmp_path / "toycode" / "__init__.py").write_text("")

    def of(**changed: str) -> str:
        for name, text in (FILES | changed).items():
            (tmp_path / "toycode" / f"{name}.py").write_text(text, encoding="utf-8")
        clear()
        return fingerprint.code_fingerprint("toycode.start.start")

    yield of
    clear()


def clear():
    for name in [name for name in sys.modules if name.startswith("toycode")]:
        del sys.modules[name]
    for function in (fingerprint.code_fingerprint, fingerprint._read, fingerprint._source):
        function.cache_clear()


@pytest.mark.parametrize(
    "old, new",
    [
        ("# an explanation", "# another one"),
        ('"""x itself."""', '"""The same x."""'),
        ('    """x itself."""\n', ""),
        ('"""Module."""', '"""What this module is about."""'),
        ("return x\n", "return   (x)\n"),
        ('"negative"', '"below zero"'),
        ('"""Module."""\n', "import math\n"),
        ("return -x", "return x"),  # of a function that nothing here calls
    ],
)
def test_what_determines_no_result_does_not_count(fingerprint_of, old, new):
    assert old in MATHS
    assert fingerprint_of() == fingerprint_of(maths=MATHS.replace(old, new))


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("start", "+ tables", "- tables"),
        ("maths", "return x\n", "return 2 * x\n"),
        ("maths", '"two": 2', '"two": 4'),
        ("maths", "three=3", "three=4"),
        ("maths", "x < 0", "x < 1"),
        ("tables", "BASE = 1", "BASE = 2"),
        ("late", "return 0", "return 1"),
    ],
)
def test_what_is_reached_counts(fingerprint_of, file, old, new):
    assert old in FILES[file]
    assert fingerprint_of() != fingerprint_of(**{file: FILES[file].replace(old, new)})


def test_a_neighbour_in_an_imported_module_does_not_count(fingerprint_of):
    assert fingerprint_of() == fingerprint_of(tables="BASE = 1\nOTHER = 3\n")


def test_a_function_may_move_to_another_module(fingerprint_of):
    start = START.replace("toycode.late", "toycode.elsewhere")
    assert fingerprint_of() == fingerprint_of(start=start, late="", elsewhere=FILES["late"])


def test_other_code_is_another_artefact():
    assert Stage("kind", {}, fingerprint.reached).key != Stage("kind", {}, fingerprint.code_fingerprint).key
    assert Stage("kind", {}, fingerprint.reached).key == Stage("kind", {}, fingerprint.reached).key


@pytest.mark.parametrize(
    "stage, names",
    [
        (experiments.prepare_target, ("train_tiny_target", "encode")),
        (experiments.prepare_trajectories, ("sample_batch", "SamplingSettings", "tap_features", "wrap_target")),
        (experiments.prepare_pretrained, ("train", "block_index", "chunked_log_q", "start_from_target", "DraftAttention")),
        (experiments.prepare_variant, ("score", "expected_passes", "agreeing_log_q", "soft_conditional", "acceptance_length_loss")),
    ],
)
def test_stages_see_the_code_that_makes_them(stage, names):
    """Labels of blocks, loading of targets and the stage functions themselves once had no say."""
    reached = {name for _, name in fingerprint.reached(stage)}
    assert {stage.__name__, *names} <= reached
    # How results are drawn and kept has none.
    assert not reached & {"Stage", "save_figure", "progress", "custom_generate", "BlockDecoder"}


def test_losses_of_other_papers_count_though_they_are_found_by_name():
    reached = {name for _, name in fingerprint.reached(experiments._OTHER_LOSSES)}
    assert {"distribution_loss", "chain_loss", "Loss"} <= reached
