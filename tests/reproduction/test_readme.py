"""The front page shows what the last run left, and the Korean one keeps step with it."""

import re

import pytest

from dblast.reproduction.paths import FIGURES, ROOT
from dblast.reproduction.profiles import PROFILES

ENGLISH, KOREAN = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))

#: Where the English page goes on alone; the Korean one ends with a paragraph that says so.
ENGLISH_ONLY = "## What is in the box"
#: Claims as the English page words them, and the same in Korean.
CLAIMS = {
    r"Independent drafts lose accepted length as determinism falls: DFlash, high minus low \(tokens\)": (
        "독립 초안은 결정성이 낮아질수록 수락 길이를 잃는다: DFlash, 높음 − 낮음 (토큰)"
    ),
    r"(\S+) over (\S+), (\w+) determinism \(%\)": "{} 대 {}, {} 결정성 (%)",
    r"The gain of (\S+) grows as determinism falls: low minus high \(points\)": (
        "결정성이 낮아질수록 {}의 이득이 커진다: 낮음 − 높음 (%p)"
    ),
    r"Against the paper's trend \((\S+), T = ([\d.]+)\): (\S+) over (\S+), (\w+), (\w+) determinism \(%\)": (
        "논문의 흐름과 반대인 칸 ({}, T = {}): {} 대 {}, {}, {} 결정성 (%)"
    ),
    r"Sampling the category beats its argmax: chosen Z_T minus Z_T = ([\d.]+), (\S+), (\w+) \(tokens\)": (
        "카테고리를 뽑는 것이 argmax보다 낫다: 고른 Z_T − Z_T = {}, {}, {} 결정성 (토큰)"
    ),
    r"The best Z_T moves up as determinism falls: low minus high, (\S+), all prompts": (
        "결정성이 낮아질수록 최적 Z_T가 올라간다: 낮음 − 높음, {}, 전체 프롬프트"
    ),
    r"Returns diminish beyond K = (\d), (\w+): gain per doubling, (\d) to (\d) minus (\d) to (\d) \(tokens\)": (
        "K = {}를 넘으면 이득이 줄어든다, {}: K를 두 배로 할 때의 이득, {}→{} − {}→{} (토큰)"
    ),
    r"AL loss: (\w+ \w+) over (\w+ \w+), K = (\d) \(%\)": "AL 손실: {} 대 {}, K = {} (%)",
    r"K = (\d) costs a few per cent of an iteration: (\d) minus what it adds to the drafter without expander \(points\)": (
        "K = {}는 한 반복의 몇 퍼센트만 더 든다: {} − 확장기 없는 드래프터에 더하는 비율 (%p)"
    ),
    r"Dependent drafts gain most where the target is least decided: D_b < ([\d.]+) minus the rest, (\S+) prompts \(points\)": (
        "타깃이 가장 불확실한 곳에서 의존 초안의 이득이 가장 크다: D_b < {} − 나머지, {} 프롬프트 (%p)"
    ),
}
#: What stands in a claim's gaps; names and numbers are the same in both languages.
WORDS = {
    "high": "높은", "medium": "중간", "low": "낮은", "code": "코드", "chat": "대화", "training": "학습", "held-out": "평가",
    "all prefixes": "모든 접두사", "one prefix": "접두사 하나", "whole block": "블록 전체",
}  # fmt: skip
#: Korean phrases whose numbers are words in English, or stand in another order there; the replacement is compared.
ALLOWED = {
    r"0(?=보다 크면)|0(?=을 포함하면)": "",
}


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


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text.strip())


def _side_by_side() -> list[tuple[str, str]]:
    """Paragraphs that both pages have, English and Korean."""
    return list(zip(_paragraphs(ENGLISH.split(ENGLISH_ONLY)[0]), _paragraphs(KOREAN)[:-1], strict=True))


def _numbers(text: str) -> list[str]:
    """Numbers in order, without the digits of names such as SmolLM2."""
    return re.findall(r"(?<![A-Za-z\d])(?<!\d\.)\d+(?:\.\d+)?", text)


def _commands(text: str) -> list[str]:
    """Shell lines of console blocks without their comments, and commands in the running text."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line] + re.findall(r"`((?:make|python -m|conda) [^`]+)`", text)


def _korean_claim(claim: str) -> str:
    """A claim's label in Korean; one that no pattern knows is an error here, to be added above."""
    matches = [(match, words) for pattern, words in CLAIMS.items() if (match := re.fullmatch(pattern, claim))]
    assert len(matches) == 1, f"no Korean words for the claim {claim!r}"
    match, words = matches[0]
    return words.format(*(WORDS.get(group, group) for group in match.groups()))


def test_the_front_page_shows_the_claims_as_the_last_run_left_them():
    (made,) = _tables((FIGURES / "cpu" / "tables" / "claims.md").read_text(encoding="utf-8"))
    assert made in _tables(ENGLISH)
    assert len(made) > 30


def test_the_korean_tables_are_the_english_ones_but_for_words():
    english, korean = _tables(ENGLISH.split(ENGLISH_ONLY)[0]), _tables(KOREAN)
    (results, claims), (our_results, our_claims) = english, korean
    assert our_results[0] == ["타깃", "결정성", *results[0][2:]] and our_results[1:] == results[1:]
    assert our_claims[0] == ["주장", "논문", *claims[0][2:]]
    verdicts = {"yes": "예", "no": "아니요", "open": "미정"}
    for row in claims[1:]:
        row[0] = _korean_claim(row[0])
        row[1:] = [re.sub(r"\b(yes|no|open)$", lambda match: verdicts[match[1]], cell) for cell in row[1:]]
    assert our_claims[1:] == claims[1:]


def test_the_korean_page_has_the_numbers_of_the_english_one_in_their_order():
    """Paragraph by paragraph; tables are compared cell by cell above."""
    compared = 0
    for english, korean in _side_by_side():
        if english.startswith("|"):
            continue
        for pattern, replacement in ALLOWED.items():
            korean = re.sub(pattern, replacement, korean)
        assert _numbers(korean) == _numbers(english), english[:60]
        compared += len(_numbers(english))
    assert compared > 30
    assert set(re.findall(r"SmolLM\d*|smollm\d*", KOREAN)) == {"SmolLM2", "smollm2"}


def test_the_korean_page_has_the_commands_links_and_names_of_the_english_one():
    for english, korean in _side_by_side():
        assert _commands(korean) == _commands(english)
        # The link from each page to the other one differs.
        if not english.startswith("[한국어]"):
            assert re.findall(r"\]\(([^)]+)\)", korean) == re.findall(r"\]\(([^)]+)\)", english)
        assert sorted(re.findall(r"`[^`\n]+`", korean)) == sorted(re.findall(r"`[^`\n]+`", english))
    assert {"make reproduce", "make test", "make lab"} <= {command.split(" PROFILE")[0] for command in _commands(KOREAN)}
    assert "[English](README.md)" in KOREAN and "[영어판](README.md)" in _paragraphs(KOREAN)[-1]


def test_the_pages_end_where_the_korean_one_refers_to_the_english_one():
    assert _paragraphs(ENGLISH.split(ENGLISH_ONLY)[0])[-1].startswith("| claim")
    assert not _numbers(_paragraphs(KOREAN)[-1])


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
