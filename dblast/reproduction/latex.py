r"""LaTeX of the tables: letters that pdflatex can set, and a layout that fits the text width.

A table's width is estimated from the widths of Computer Modern's letters, since pdflatex may not be there. One that is
too wide gets headings of several lines and smaller letters; where that is not enough, columns of running text are
broken into lines; only what is still too wide is scaled as a whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pandas as pd

#: Text width in points that tables are made for (article class, A4 paper with margins of 2.5 cm has 455).
TEXT_WIDTH = 455.0
#: Space on both sides of a column, LaTeX's \tabcolsep twice.
COLUMN_SPACE = 12.0
#: Sizes to try, with the width of their letters over those of 10 points: small letters are wider than in proportion.
SIZES = {r"\normalsize": 1.0, r"\small": 0.93, r"\footnotesize": 0.85}
#: Cells above so many points are running text, which is broken into lines if need be.
BROKEN = 110.0
#: What such a column keeps at least.
LEAST = 65.0
#: Lines that a page holds in the smallest of the sizes; a longer table runs over several pages.
PAGE_LINES = 58

#: Letters of cmr10 by their width in points; all others count as the widest digit or small letter.
_POINTS = {
    2.78: "ijl.,:;'![]", 3.33: "- ", 3.9: "frst()", 4.5: "ecz", 5.0: "ago0123456789*/\"", 5.3: "kvxyI",
    7.0: "BCEFLPSJT", 7.8: "ADGHKNOQRUVXYZw+=<>±−τ&_", 8.4: "%m", 10.3: "MW—",
}  # fmt: skip
_WIDTHS = {letter: width for width, letters in _POINTS.items() for letter in letters}

_ESCAPED = {letter: f"\\{letter}" for letter in "%_&#${}"} | {
    "\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$", "τ": r"$\tau$", "–": "--", "—": "---", "−": "$-$",
    "×": r"$\times$", "→": r"$\to$",
}  # fmt: skip
#: A number's sign, not a hyphen or a range.
_MINUS = re.compile(r"(?<![\w.)-])-(?=\d)")
#: Names that are mathematics.
_NAMES = {r"Z\_T": "$Z_T$", r"D\_b": "$D_b$"}


def escape(text: str) -> str:
    """Text as LaTeX prints it, in the old OT1 encoding too, whose "<", ">" and "|" are other characters."""
    escaped = "".join(_ESCAPED.get(letter, letter) for letter in text)
    escaped = _MINUS.sub("$-$", escaped)
    for name, mathematics in _NAMES.items():
        escaped = escaped.replace(name, mathematics)
    return escaped


def width(text: str) -> float:
    """Width of a line of text in points at 10 points, rather a little too large."""
    return sum(_WIDTHS.get(letter, 5.6) for letter in _MINUS.sub("−", text))


@dataclass(frozen=True)
class Layout:
    """How a table fits: its size, its columns, and whether it is still to be scaled.

    Attributes:
        stacked: whether headings are broken into lines as wide as the cells below them.
        broken: share of the text width of every column; None for one that is as wide as its cells.
        total: estimated width in points.
        lines: estimated lines, the heading included.
    """

    size: str
    stacked: bool
    broken: tuple[float | None, ...]
    total: float
    lines: int

    @property
    def scaled(self) -> bool:
        """Whether the whole table must be made smaller than its letters allow."""
        return self.total > TEXT_WIDTH


def layout(columns: list[list[str]]) -> Layout:
    """The largest size in which a table fits, with text broken into lines only if it fits in none.

    Args:
        columns: every column's heading and cells.
    """
    cells, whole = [max(map(width, column[1:])) for column in columns], (None,) * len(columns)
    headings = [width(column[0]) for column in columns]
    words = [max(map(width, column[0].split()), default=0.0) for column in columns]
    space, height = COLUMN_SPACE * len(columns), max(map(len, columns))
    for size, factor in SIZES.items():
        for stacked in (False, True):
            total = space + factor * sum(map(max, cells, words if stacked else headings))
            if total <= TEXT_WIDTH:
                return Layout(size, stacked, whole, total, height)
    # The smallest size, and as wide as fits: columns of text share what the others leave.
    natural = [factor * max(pair) for pair in zip(cells, words, strict=True)]
    texts = [i for i, points in enumerate(natural) if points > BROKEN]
    if not texts:
        return Layout(size, True, whole, total, height)
    left = TEXT_WIDTH - space - sum(points for i, points in enumerate(natural) if i not in texts)
    least = {i: max(LEAST, *(factor * width(word) for cell in columns[i] for word in cell.split())) for i in texts}
    if sum(least.values()) > left:
        return Layout(size, True, whole, total, height)
    # By how much text there is, which keeps the table low.
    widths = _shares({i: sum(map(width, columns[i])) for i in texts}, least, left)
    broken = tuple(round(widths[i] / TEXT_WIDTH, 3) if i in widths else None for i in range(len(columns)))
    # Ragged lines end before the margin.
    rows = zip(*([factor * width(cell) / (0.85 * widths.get(i, 1e9)) for cell in column] for i, column in enumerate(columns)), strict=True)
    return Layout(size, True, broken, TEXT_WIDTH, sum(1 + int(max(row)) for row in rows))


def _shares(weights: dict[int, float], least: dict[int, float], left: float) -> dict[int, float]:
    """Widths that add up to ``left`` in proportion to ``weights``, but for those that would get less than their least."""
    widths, free = {}, dict(weights)
    while free:
        factor = (left - sum(widths.values())) / sum(free.values())
        if not (short := [i for i, weight in free.items() if factor * weight < least[i]]):
            return widths | {i: factor * weight for i, weight in free.items()}
        widths |= {i: least[i] for i in short}
        free = {i: weight for i, weight in free.items() if i not in short}
    return widths


def _stack(heading: str, room: float) -> str:
    """A heading in lines no wider than ``room`` points, or than its longest word."""
    lines: list[str] = []
    for word in heading.split():
        if lines and width(f"{lines[-1]} {word}") <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    stacked = r"\\".join(map(escape, lines))
    return rf"\shortstack[l]{{{stacked}}}" if len(lines) > 1 else stacked


def _cells(display: pd.DataFrame) -> list[list[str]]:
    """Lines of cells, headings first, index columns on the left; what an index repeats is left out."""
    names = ["" if name is None else str(name) for name in display.index.names]
    lines = [[*names, *map(str, display.columns)]]
    before: tuple[str, ...] = ()
    for key, row in zip(display.index, display.itertuples(index=False), strict=True):
        labels = tuple(map(str, key if isinstance(key, tuple) else (key,)))
        same = 0
        # The innermost label is never left out.
        while same < len(labels) - 1 and labels[: same + 1] == before[: same + 1]:
            same += 1
        lines.append([*("" for _ in range(same)), *labels[same:], *map(str, row)])
        before = labels
    return lines


def latex_table(display: pd.DataFrame, caption: str, label: str) -> str:
    """A finished table as LaTeX that fits :data:`TEXT_WIDTH`; its first line names the packages it needs."""
    lines = _cells(display)
    columns = [list(column) for column in zip(*lines, strict=True)]
    fit = layout(columns)
    kinds = [
        "l" if share is None else rf">{{\raggedright\arraybackslash}}p{{{share:.3f}\textwidth}}" for share in fit.broken
    ]
    rows = [list(map(escape, line)) for line in lines]
    if fit.stacked:
        rooms = [max(map(width, column[1:])) for column in columns]
        rooms = [max(room, *map(width, column[0].split())) if column[0] else room for room, column in zip(rooms, columns, strict=True)]
        rows[0] = [
            _stack(column[0], room) if share is None else escape(column[0])
            for column, room, share in zip(columns, rooms, fit.broken, strict=True)
        ]
    head, *body = [" & ".join(row) + r" \\" for row in rows]
    caption, packages = escape(caption), ["booktabs"]
    if any(share is not None for share in fit.broken):
        packages.append("array")
    form = f"{{{''.join(kinds)}}}"
    if fit.lines > PAGE_LINES and not fit.scaled:
        packages.append("longtable")
        text = [
            rf"{{{fit.size}", rf"\begin{{longtable}}{form}", rf"\caption{{{caption}}}\label{{{label}}} \\",
            r"\toprule", head, r"\midrule", r"\endfirsthead", r"\toprule", head, r"\midrule", r"\endhead",
            r"\bottomrule", r"\endfoot", *body, r"\end{longtable}", "}",
        ]  # fmt: skip
    else:
        rows = [rf"\begin{{tabular}}{form}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
        if fit.scaled:
            packages.append("graphicx")
            rows = [r"\resizebox{\textwidth}{!}{%", *rows[:-1], rows[-1] + "}"]
        top = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\label{{{label}}}"]
        text = [*top, *([] if fit.size == r"\normalsize" else [fit.size]), *rows, r"\end{table}"]
    needs = f"% needs the package{'s' if len(packages) > 1 else ''} {', '.join(packages)}"
    return "\n".join([needs, *text]) + "\n"
