"""LaTeX tables fit a page: narrow ones as they are, wide ones broken, set smaller or scaled; measured by pdflatex where it is."""

import re
import shutil
import subprocess

import matplotlib
import pandas as pd
import pytest
from matplotlib.ft2font import FT2Font, LoadFlags

from dblast.reproduction.claims import claims_display, claims_table
from dblast.reproduction.configuration import table8
from dblast.reproduction.latex import LEAST, PAGE_LINES, TEXT_WIDTH, escape, latex_table, layout, width
from dblast.reproduction.profiles import get_profile
from dblast.reproduction.results import open_table
from dblast.reproduction.tables import table2, table3, table4

SENTENCE = "Sampling the category beats its argmax: chosen Z_T minus Z_T = 0, DBlast, <medium> | determinism (tokens)"


def numbers(columns, rows=3, heading="gain (%) over whole block: seed spread", cell="+26.7 [+24.5, +28.8]"):
    names = [f"{heading} {i}" for i in range(columns)]
    return pd.DataFrame([[cell] * columns] * rows, columns=names, index=pd.Index(range(rows), name="K"))


def texts(columns, rows=4):
    names = [f"column {i}" for i in range(columns)]
    return pd.DataFrame([[SENTENCE] * columns] * rows, columns=names, index=pd.Index(range(rows), name="line"))


#: Tables in every layout: as they are, stacked headings, smaller, broken, over several pages, scaled.
SHAPES = {
    "narrow": numbers(2, heading="gain"),
    "stacked": numbers(3),
    "smaller": numbers(4, cell="+26.7 [+24.5, +28.8] yes"),
    "broken": texts(2),
    "long": texts(3, 40),
    "scaled": numbers(9),
    "scaled text": texts(16, 1),
}


def written(display):
    return latex_table(display, "A caption.", "tab:any")


def used(text):
    return set(re.findall(r"\\(normalsize|small|footnotesize|shortstack|resizebox|raggedright|begin\{longtable\})", text))


def test_each_shape_has_its_remedy():
    made = {name: used(written(display)) for name, display in SHAPES.items()}
    assert made["narrow"] == set()
    assert made["stacked"] == {"shortstack"}
    assert made["smaller"] == {"footnotesize", "shortstack"}
    assert made["broken"] == {"footnotesize", "raggedright"}
    assert made["long"] == {"footnotesize", "raggedright", "begin{longtable}"}
    assert "resizebox" in made["scaled"] and "resizebox" in made["scaled text"]


@pytest.mark.parametrize("name", SHAPES)
def test_the_first_line_names_every_package_that_is_used(name):
    text = written(SHAPES[name])
    needs = {"booktabs": r"\toprule", "array": "arraybackslash", "graphicx": r"\resizebox", "longtable": "{longtable}"}
    first, body = text.split("\n", 1)
    named = set(re.fullmatch(r"% needs the packages? (.+)", first)[1].split(", "))
    assert named == {package for package, command in needs.items() if command in body}


def test_a_layout_that_does_not_scale_adds_up_to_the_text_width_at_most():
    for count in range(1, 14):
        for display in (numbers(count), numbers(count, heading="x"), texts(count)):
            columns = [[name, *display[name]] for name in display]
            fit = layout(columns)
            if fit.scaled:
                assert r"\resizebox{\textwidth}" in written(display)
                continue
            factor = {r"\normalsize": 1.0, r"\small": 0.93, r"\footnotesize": 0.85}[fit.size]
            taken = 12.0 * count
            for share, column in zip(fit.broken, columns, strict=True):
                cells = max(map(width, column[1:] if fit.stacked else column))
                taken += factor * cells if share is None else share * TEXT_WIDTH
            assert taken <= TEXT_WIDTH + 1


def test_lines_are_counted_and_short_text_keeps_room_beside_long_text():
    fit = layout([["a", "x " * 40], ["b", SENTENCE * 60]])
    assert fit.lines > PAGE_LINES and fit.broken[0] * TEXT_WIDTH == pytest.approx(LEAST, abs=1)


def test_widths_are_those_of_computer_modern_or_a_little_more():
    font = FT2Font(f"{matplotlib.get_data_path()}/fonts/ttf/cmr10.ttf")
    font.set_size(10, 72)

    def measured(text):
        return sum(font.load_char(ord(letter), flags=LoadFlags.NO_HINTING).linearHoriAdvance / 65536 for letter in text)

    assert measured("m") == pytest.approx(8.33, abs=0.1)
    for text in ("+26.7 [+24.5, +28.8]", "accepted length", "Sampling the category beats its argmax", "DBlast, DFlash+AL, K = 4"):
        assert 0.98 * measured(text) <= width(text) <= 1.15 * measured(text), text


def test_repeated_labels_of_an_outer_index_are_left_out_and_inner_ones_never():
    index = pd.MultiIndex.from_tuples([("high", "a"), ("high", "a"), ("low", "a")], names=["setting", None])
    lines = written(pd.DataFrame({"x": [1.5, 2.0, 3.0]}, index=index)).splitlines()
    body = lines[lines.index(r"\toprule") + 1 : lines.index(r"\bottomrule")]
    assert body == [r"setting &  & x \\", r"\midrule", r"high & a & 1.5 \\", r" & a & 2.0 \\", r"low & a & 3.0 \\"]


def test_letters_that_the_old_encoding_lacks_are_commands():
    assert escape("a<b>|c\\d{e}^~") == (
        r"a\textless{}b\textgreater{}\textbar{}c\textbackslash{}d\{e\}\textasciicircum{}\textasciitilde{}"
    )
    assert escape("Z_T ± τ of x_y") == r"$Z_T$ $\pm$ $\tau$ of x\_y"


@pytest.fixture(scope="module")
def real():
    scores = open_table(get_profile("cpu"), "tiny", "scores")
    made = [table8(get_profile("cpu")), table2(scores, "tiny"), table3(scores, "tiny"), table4(scores, "tiny")]
    return {table.name: table.latex() for table in [*made, claims_display(claims_table(scores))]}


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex")
def test_pdflatex_finds_nothing_overfull(real, tmp_path):
    """More than 5 points would be seen in the margin; a float taller than the page is not placed."""
    for name, text in (real | {name: written(display) for name, display in SHAPES.items()}).items():
        packages = text.split("\n")[0].split(None, 4)[-1].replace(" ", "")
        page = rf"\usepackage[textwidth={TEXT_WIDTH}pt,textheight=650pt]{{geometry}}\usepackage{{{packages}}}"
        (tmp_path / "page.tex").write_text(rf"\documentclass{{article}}{page}\begin{{document}}{text}\end{{document}}")
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, f"{name}: {done.stdout[-600:]}"
        log = (tmp_path / "page.log").read_text(encoding="utf-8", errors="replace")
        wide = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt", log)]
        assert max(wide, default=0) <= 5, f"{name}: {wide}"
        assert "Float too large" not in log and "Missing character" not in log, name
