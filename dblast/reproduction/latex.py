r"""LaTeX of the tables, by pandas' Styler: cells that pdflatex can set, in a layout that fits the text width."""

from __future__ import annotations

import re
import textwrap

import pandas as pd

#: A table with a cell of more letters than these holds running text: its columns are broken into lines.
RUNNING_TEXT = 60

#: Letters that mean something to LaTeX, or that its old encoding OT1 lacks; pandas escapes neither "<" nor captions.
_LETTERS = str.maketrans(
    {letter: f"\\{letter}" for letter in "%_&#${}"}
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}"}
    | {">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$", "τ": r"$\tau$", "–": "--", "—": "---", "−": "$-$"}
    | {"×": r"$\times$", "→": r"$\to$"}
)
#: What is mathematics: the sign of a number (no hyphen, no range), and names with an index.
_MATHEMATICS = ((r"(?<![\w.)-])-(?=\d)", "$-$"), (r"\b([ZD])\\_([Tb])\b", r"$\1_\2$"))
#: Makes a table smaller if it is too wide, and no table larger.
_SHRINK = r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%" + "\n"


def escape(text: str) -> str:
    """Text as LaTeX prints it."""
    text = text.translate(_LETTERS)
    for pattern, replacement in _MATHEMATICS:
        text = re.sub(pattern, replacement, text)
    return text


def _heading(name: str, cells: pd.Series) -> str:
    """A column's name in lines that are no wider than its cells, or than its longest word."""
    lines = textwrap.wrap(name, max(cells.str.len().max(), 1), break_long_words=False, break_on_hyphens=False)
    stacked = r"\\".join(map(escape, lines))
    return rf"\shortstack[l]{{{stacked}}}" if len(lines) > 1 else stacked


def latex_table(display: pd.DataFrame, caption: str, label: str) -> str:
    """A finished table as LaTeX that fits the text width; its first line names the packages it needs."""
    # What an outer index repeats is left out, but never the innermost label.
    shown, outer = display.reset_index().astype(str), list(range(display.index.nlevels - 1))
    same = [shown.iloc[:, : i + 1].eq(shown.shift().iloc[:, : i + 1]).all(axis=1) for i in outer]
    for i in outer:
        shown.isetitem(i, shown.iloc[:, i].mask(same[i], ""))
    shown.columns = [_heading(name, shown[name]) for name in shown]
    lengths = shown.map(len).max()
    styler = shown.style.format(escape).hide(axis="index")
    options = {"hrules": True, "caption": escape(caption), "label": label}
    if lengths.max() > RUNNING_TEXT:
        # The square root keeps room for short text beside long; over several pages, if need be.
        shares = lengths.clip(lower=9) ** 0.5
        column = r">{{\raggedright\arraybackslash}}p{{\dimexpr {:.3f}\textwidth-2\tabcolsep}}"
        form = "".join(map(column.format, shares / shares.sum()))
        text = styler.to_latex(environment="longtable", column_format=form, **options)
        # The caption is long: once is enough.
        text = re.sub(r"\n\\caption\[\].*", "", text)
        begin = "{\\footnotesize\\setlength{\\LTcapwidth}{\\textwidth}\n"
        return f"% needs the packages array, booktabs, longtable\n{begin}{text}}}\n"
    text = styler.to_latex(position_float="centering", **options)
    text = text.replace(r"\begin{tabular}", _SHRINK + r"\begin{tabular}").replace(r"\end{tabular}", r"\end{tabular}}")
    return f"% needs the packages booktabs, graphicx\n{text}"
