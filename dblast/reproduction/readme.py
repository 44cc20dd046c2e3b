"""The tables of the front pages, from the figures and tables that are kept: ``python -m dblast readme``.

A table stands between ``<!-- begin: NAME -->`` and ``<!-- end -->``; all other text is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from dblast.errors import DBlastError
from dblast.reproduction.paths import FIGURES, ROOT
from dblast.reproduction.tables import METHODS, SETTINGS_ORDER

TABLES = FIGURES / "cpu" / "tables"
METHOD_COLUMNS = ["DFlash (K = 1, NLL)", "+ AL", "+ DS (K = 4, NLL)", "DBlast (K = 4, AL)"]
#: Claims as :mod:`dblast.reproduction.claims` words them, and the same in Korean.
KOREAN_CLAIMS = {
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
#: What stands in a claim's gaps, and verdicts; names and numbers are the same in both languages.
KOREAN_WORDS = {
    "high": "높은", "medium": "중간", "low": "낮은", "code": "코드", "chat": "대화", "training": "학습", "held-out": "평가",
    "all prefixes": "모든 접두사", "one prefix": "접두사 하나", "whole block": "블록 전체",
    "yes": "예", "no": "아니요", "open": "미정",
}  # fmt: skip


def markdown_rows(text: str) -> list[list[str]]:
    """Cells of the lines of a Markdown table, the rule left out."""
    lines = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines]
    return [row for row in rows if not set("".join(row)) <= set("-:")]


def korean_claim(claim: str) -> str:
    """A claim's label in Korean; DBlastError for one without words in :data:`KOREAN_CLAIMS`."""
    for pattern, words in KOREAN_CLAIMS.items():
        if match := re.fullmatch(pattern, claim):
            return words.format(*(KOREAN_WORDS.get(group, group) for group in match.groups()))
    raise DBlastError(f"no Korean words for the claim {claim!r}; add them to KOREAN_CLAIMS")


def _plain(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, *rows)).replace("\n", f"\n|{'---|' * len(head)}\n", 1)


def made_tables() -> dict[str, dict[str, str]]:
    """For each front page the Markdown of its tables by name."""
    lengths = []
    for target in ("tiny", "smollm2"):
        rows = pd.read_csv(TABLES / f"table2_{target}.csv", dtype={"seed": str})
        cells = rows.query("task == 'average' and seed == 'all'").set_index(["setting", "method"])
        for setting in SETTINGS_ORDER:
            line = [cells.loc[(setting, method)] for method in METHODS]
            lengths.append([target, setting, *(f"{c.accepted_length:.2f} ± {c.standard_error:.2f}" for c in line)])
    english = (TABLES / "claims.md").read_text(encoding="utf-8").split("\n\n", 1)[1].strip()
    head, *claims = markdown_rows(english)

    def korean(cell: str) -> str:
        return re.sub(r"\b(yes|no|open)$", lambda match: KOREAN_WORDS[match[1]], cell)

    korean_claims = [[korean_claim(claim), *map(korean, cells)] for claim, *cells in claims]
    return {
        "README.md": {"table2": _plain(["target", "determinism", *METHOD_COLUMNS], lengths), "claims": english},
        "README.ko.md": {
            "table2": _plain(["타깃", "결정성", *METHOD_COLUMNS], lengths),
            "claims": _plain(["주장", "논문", *head[2:]], korean_claims),
        },
    }


def refreshed(text: str, tables: dict[str, str]) -> str:
    """A page with its tables replaced."""
    for name, table in tables.items():
        begin, end = f"<!-- begin: {name} -->\n", "\n<!-- end -->"
        if text.count(begin) != 1 or end not in text.split(begin)[1]:
            raise DBlastError(f"the page has no one place for {name}, between {begin.strip()} and {end.strip()}")
        before, after = text.split(begin)
        text = before + begin + table + end + after.split(end, 1)[1]
    return text


def refresh() -> list[Path]:
    """Write the tables into both front pages; returns the pages that changed."""
    changed = []
    for name, tables in made_tables().items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        if (after := refreshed(before, tables)) != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed
