"""The front pages' tables are those of the kept results, and the Korean page keeps step with the English one."""

import re

import pytest

from dblast.errors import DBlastError
from dblast.reproduction.paths import ROOT
from dblast.reproduction.profiles import PROFILES
from dblast.reproduction.readme import korean_claim, made_tables, markdown_rows, refreshed

ENGLISH, KOREAN = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))
#: A number in Korean that is a word in English.
ZERO = r"0(?=보다 크면)|0(?=을 포함하면)"


def test_making_the_tables_again_changes_nothing():
    for page, tables in zip((ENGLISH, KOREAN), made_tables().values(), strict=True):
        assert refreshed(page, tables) == page
        lengths, claims = map(markdown_rows, tables.values())
        assert len(lengths) == 7 and len(claims) > 30


def test_a_page_without_its_markers_and_a_claim_without_korean_words_are_refused():
    assert (
        refreshed("a\n<!-- begin: x -->\nold\n<!-- end -->\nb", {"x": "| new |"})
        == "a\n<!-- begin: x -->\n| new |\n<!-- end -->\nb"
    )
    for page in ("", "<!-- begin: x -->\nold", 2 * "<!-- begin: x -->\n<!-- end -->\n"):
        with pytest.raises(DBlastError, match="no one place for x"):
            refreshed(page, {"x": ""})
    with pytest.raises(DBlastError, match="no Korean words for the claim 'This is new'"):
        korean_claim("This is new")


def _side_by_side() -> list[tuple[str, str]]:
    """Paragraphs of both pages, English and Korean, the made tables left out."""
    english, korean = (re.split(r"\n\s*\n", page.strip()) for page in (ENGLISH, KOREAN))
    return [pair for pair in zip(english, korean, strict=True) if not pair[0].startswith("<!--")]


def test_the_korean_page_has_the_numbers_commands_links_and_names_of_the_english_one_in_their_order():
    def numbers(text):
        """Without the digits of names such as SmolLM2."""
        return re.findall(r"(?<![A-Za-z\d])(?<!\d\.)\d+(?:\.\d+)?", text)

    def commands(text):
        blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        return [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]

    compared = 0
    for english, korean in _side_by_side():
        assert numbers(re.sub(ZERO, "", korean)) == numbers(english), english[:60]
        assert commands(korean) == commands(english)
        # The link from each page to the other one differs.
        if not english.startswith("[한국어]"):
            assert re.findall(r"\]\(([^)]+)\)", korean) == re.findall(r"\]\(([^)]+)\)", english)
        assert sorted(re.findall(r"`[^`\n]+`", korean)) == sorted(re.findall(r"`[^`\n]+`", english))
        compared += len(numbers(english))
    assert compared > 30 and set(re.findall(r"SmolLM\d*|smollm\d*", KOREAN)) == {"SmolLM2", "smollm2"}


@pytest.mark.parametrize(
    ("text", "cpu", "smoke"),
    [
        (ENGLISH, r"\(about (\d+) minutes on two cores", r"from scratch in (\d+) minutes"),
        (KOREAN, r"코어 두 개에서 약 (\d+)분", r"처음부터 (\d+)분"),
    ],
    ids=["English", "Korean"],
)
def test_minutes_are_those_of_the_profiles(text, cpu, smoke):
    assert float(re.search(cpu, text)[1]) == PROFILES["cpu"].minutes
    assert float(re.search(smoke, text)[1]) == PROFILES["smoke"].minutes
