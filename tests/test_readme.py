"""The front page shows what the last run left, and the Korean one keeps step with it."""

import re

from dblast.paths import FIGURES, ROOT

ENGLISH, KOREAN = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))


def _tables(text: str) -> list[list[list[str]]]:
    """Markdown tables as rows of cells."""
    tables, inside = [], False
    for line in text.splitlines():
        if line.startswith("|"):
            if not inside:
                tables.append([])
            tables[-1].append([cell.strip() for cell in line.strip().strip("|").split("|")])
        inside = line.startswith("|")
    return [[row for row in table if not set("".join(row)) <= set("-: ")] for table in tables]


def _commands(text: str) -> set[str]:
    """Shell lines of console blocks without their comments, and commands in the running text."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = {line.split("#")[0].strip() for block in blocks for line in block.splitlines()}
    return (lines | set(re.findall(r"`((?:make|python -m|conda) [^`]+)`", text))) - {""}


def test_the_front_page_shows_the_claims_as_the_last_run_left_them():
    (made,) = _tables((FIGURES / "cpu" / "tables" / "claims.md").read_text(encoding="utf-8"))
    assert made in _tables(ENGLISH)
    assert len(made) > 30


def test_the_korean_page_keeps_step_with_the_english_one():
    """The same tables but for words, the same numbers in them, and no command that the English page lacks."""
    english, korean = _tables(ENGLISH), _tables(KOREAN)
    results = [table for table in english if table[0][0] in ("target", "claim")]
    assert len(korean) == len(results) == 2
    for theirs, ours in zip(results, korean, strict=True):
        assert len(theirs) == len(ours)
        words = {"yes": "예", "no": "아니요", "open": "미정"}
        first = 1 if theirs[0][0] == "claim" else 0
        for row, translated in zip(theirs[1:], ours[1:], strict=True):
            expected = [re.sub(r"\b(yes|no|open)$", lambda match: words[match[1]], cell) for cell in row[first:]]
            assert translated[first:] == expected
    commands = _commands(KOREAN)
    assert {"make reproduce", "make test", "make lab"} <= commands <= _commands(ENGLISH)
    minutes = re.search(r"about (\d+) minutes", ENGLISH)[1], re.search(r"# pytest.*\((\d+) minutes\)", ENGLISH)[1]
    assert minutes == (re.search(r"약 (\d+)분", KOREAN)[1], re.search(r"# pytest.*\((\d+)분\)", KOREAN)[1])


def test_numbers_of_the_korean_text_are_those_of_the_english_one():
    """Outside tables, and per cents of the results in the same order."""
    texts = [re.sub(r"(?m)^[|].*", "", text) for text in (ENGLISH, KOREAN)]
    english, korean = (set(re.findall(r"\d+(?:\.\d+)?", text)) for text in texts)
    assert korean <= english
    results = (re.search(start + r".*", text)[0] for start, text in zip(("Four branches", "브랜치 네 개"), texts, strict=True))
    theirs, ours = (re.findall(r"(?<![\d.])\d+(?=[\d ,~to and]*%)", re.sub(r"\]\([^)]*\)", "", text)) for text in results)
    assert theirs == ours and len(theirs) >= 8
