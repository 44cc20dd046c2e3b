"""LaTeX tables fit a page: small ones as they are, wide ones smaller, running text in lines; pdflatex agrees."""

import re
import shutil
import subprocess

import pandas as pd
import pytest

from dblast.reproduction.latex import escape, latex_table
from dblast.reproduction.paths import FIGURES

NUMBERS = pd.DataFrame([["+26.7 [+24.5, +28.8]"] * 9] * 3, columns=[f"gain (%): seed spread {i}" for i in range(9)])
SENTENCE = "Sampling the category beats its argmax, <medium> | determinism (tokens)"
TEXTS = pd.DataFrame([[SENTENCE] * 3] * 60, columns=list("abc"))


def test_running_text_is_broken_into_lines_and_other_tables_are_shrunk_if_too_wide():
    wide, text = (latex_table(display, "A caption.", "tab:any") for display in (NUMBERS, TEXTS))
    assert (
        r"\resizebox{\ifdim" in wide
        and r"\begin{table}" in wide
        and r"\shortstack[l]{gain (\%): seed\\spread 0}" in wide
    )
    assert r"\begin{longtable}{>{\raggedright" in text and text.count(r"\caption") == 1 and "resizebox" not in text
    shares = re.findall(r"dimexpr ([\d.]+)\\textwidth-2\\tabcolsep", text)
    assert len(shares) == 4 and sum(map(float, shares)) == pytest.approx(1, abs=0.002)


@pytest.mark.parametrize("display", [NUMBERS, TEXTS], ids=["numbers", "texts"])
def test_the_first_line_names_every_package_that_is_used(display):
    first, body = latex_table(display, "A caption.", "tab:any").split("\n", 1)
    needs = {"booktabs": r"\toprule", "array": "arraybackslash", "graphicx": r"\resizebox", "longtable": "{longtable}"}
    named = set(re.fullmatch(r"% needs the packages (.+)", first)[1].split(", "))
    assert named == {package for package, command in needs.items() if command in body}


def test_repeated_labels_of_an_outer_index_are_left_out_and_inner_ones_never():
    index = pd.MultiIndex.from_tuples([("high", "a"), ("high", "a"), ("low", "a")], names=["setting", "method"])
    lines = latex_table(pd.DataFrame({"x": [1.5, 2.0, 3.0]}, index=index), "", "tab:any").splitlines()
    body = lines[lines.index(r"\toprule") + 1 : lines.index(r"\bottomrule")]
    assert (
        body[0::2] == [r"setting & method & x \\", r"high & a & 1.5 \\", r"low & a & 3.0 \\"]
        and body[3] == r" & a & 2.0 \\"
    )


def test_letters_that_the_old_encoding_lacks_are_commands():
    assert escape("a<b>|c\\d{e}^~") == (
        r"a\textless{}b\textgreater{}\textbar{}c\textbackslash{}d\{e\}\textasciicircum{}\textasciitilde{}"
    )
    assert escape("Z_T ± τ of x_y") == r"$Z_T$ $\pm$ $\tau$ of x\_y"


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex")
def test_pdflatex_finds_nothing_overfull_in_the_committed_tables(tmp_path):
    """More than 5 points would be seen in the margin; a float taller than the page is not placed."""
    for path in sorted(FIGURES.glob("*/tables/*.tex")):
        text = path.read_text(encoding="utf-8")
        packages = re.match(r"% needs the packages (.+)", text)[1]
        page = rf"\usepackage[textwidth=455pt,textheight=650pt]{{geometry}}\usepackage{{{packages}}}"
        (tmp_path / "page.tex").write_text(rf"\documentclass{{article}}{page}\begin{{document}}{text}\end{{document}}")
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, f"{path.name}: {done.stdout[-600:]}"
        log = (tmp_path / "page.log").read_text(encoding="utf-8", errors="replace")
        wide = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt", log)]
        assert max(wide, default=0) <= 5, f"{path.name}: {wide}"
        assert "Float too large" not in log and "Missing character" not in log, path.name
