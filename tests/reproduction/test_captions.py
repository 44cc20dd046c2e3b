"""What captions say: the words they share, and unit, n and errors in every committed one."""

import re

import pytest

from dblast.reproduction.captions import sizes, span
from dblast.reproduction.paths import FIGURES

CAPTIONS = sorted(path for profile in ("cpu", "losses", "sweeps", "beyond") for path in (FIGURES / profile).glob("*.txt"))


def test_sizes_and_ranges():
    assert sizes({"tiny": 116, "smollm2": 88}) == "tiny n = 116, smollm2 n = 88"
    assert span([96, 96]) == "96" and span([72, 65, 66]) == "65 to 72"


def test_there_are_captions():
    assert {path.parent.name for path in CAPTIONS} == {"cpu", "losses", "sweeps", "beyond"}


@pytest.mark.parametrize("path", CAPTIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_caption_names_unit_n_and_error_bars(path):
    text = path.read_text(encoding="utf-8")
    if path.stem == "figure3":
        return  # a drawing
    assert re.search(r"\b(in|per) (tokens?|nats|ms)\b|in %", text), "no unit"
    assert re.search(r"\bn = \d+|\bno n\b", text), "no n"
    assert re.search(r"standard error|\bintervals?\b|\b[Nn]o error bars", text), "no word on error bars"
    if re.search(r"\b1 fine-tuning seed\b", text):
        assert "and fine-tuning seeds" not in text
