"""The report: self-contained, in order, escaped, deterministic; what is missing or too large is said."""

import base64
import json
import os
import re

import nbformat
import pytest

from dblast.reproduction import report
from dblast.reproduction.claims import COLUMNS
from dblast.errors import DBlastError

EVIL = "<script>alert(1)</script> & <b>bold</b>"
#: One pixel.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def make_notebook(path, *cells):
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells)), path)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A run of the smoke profile: two claims, figures, tables and notebooks, one of these committed only."""
    for name in ("FIGURES", "NOTEBOOKS", "RESULTS", "RUNS"):
        monkeypatch.setattr(report, name, tmp_path / ("data/results" if name == "RESULTS" else name.lower()))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    figures, results = tmp_path / "figures/smoke", tmp_path / "data/results/smoke"
    (figures / "tables").mkdir(parents=True)
    results.mkdir(parents=True)
    rows = [["It helps, " + EVIL, "tiny", "5.2", "1.7", "0.1", "3.3", "reproduced", "3", "9"]]
    rows += [["It does not", "tiny", "1", "-2", "-3", "-1", "not reproduced", "1", "9"]]
    lines = [",".join(COLUMNS), *(",".join(f'"{cell}"' for cell in row) for row in rows)]
    (figures / "claims.csv").write_text("\n".join(lines) + "\n")
    for name in ("gains", "figure2_tiny"):
        (figures / f"{name}.png").write_bytes(base64.b64decode(PNG))
        (figures / f"{name}.txt").write_text(f'Caption of {name}: "{EVIL}"\n')
    table = "| text   |   length |\n|:-------|---------:|\n| a\\|b   |     1.50 |\n| **c**  |     2.00 |\n"
    (figures / "tables/table9_tiny.md").write_text(f"**Table 9 (tiny).** Texts, {EVIL}\n\n{table}")
    (figures / "tables/table8.md").write_text(f"**Table 8.** What ran.\n\n{table}")
    entry = {"git": "0123456789abcdef+", "date": "2026-01-02", "python": "3.11", "packages": {"torch": "2.9"}}
    entry |= {"machine": "Linux x86_64, 2 cores", "seconds": 1.25, "configuration": {}}
    (results / "provenance.json").write_text(json.dumps({"tiny-scores.parquet": entry}))
    html = (
        "<style scoped>td {background: url(https://example.org/x.png)}</style>"
        '<script src="https://example.org/x.js"></script><img src="https://example.org/y.png" onerror="alert(1)">'
        '<table id="T_1"><tr><td style="color:red;background:url(https://example.org/z)">7</td>'
        '<td style="background:rgba(0,1,2,0.5)">8</td></tr></table>'
    )
    outputs = [
        nbformat.v4.new_output("stream", text=f"{tmp_path}/runs: {EVIL}\n"),
        nbformat.v4.new_output("execute_result", {"text/html": html, "text/plain": "no"}),
        nbformat.v4.new_output("display_data", {"image/png": PNG}),
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=["\x1b[31mValueError\x1b[0m: <bad>"]),
    ]
    text = f"# 01 · First\n\nOf $\\mathbb E_{{x\\sim p}}\\frac1b$ and $\\frac{{$, {EVIL}; see [two](02_second.ipynb), "
    text += (
        "[data](../data/README.md), [site](https://example.org), ![picture](https://example.org/a.png) and **bold**."
    )
    cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell("x = '<i>'", outputs=outputs)]
    make_notebook(tmp_path / "runs/smoke/01_first.ipynb", *cells)
    make_notebook(tmp_path / "notebooks/01_first.ipynb", nbformat.v4.new_markdown_cell("# Not shown"))
    make_notebook(tmp_path / "notebooks/00_tour.ipynb", nbformat.v4.new_markdown_cell("# Not shown"))
    make_notebook(tmp_path / "notebooks/02_second.ipynb", nbformat.v4.new_markdown_cell("# 02 · Second\n\nHello."))
    return tmp_path


def test_the_page_is_self_contained_in_order_escaped_and_the_same_again(project, tmp_path):
    page = report.build_report("smoke").read_text(encoding="utf-8")
    # Nothing is loaded from elsewhere, and every link leads somewhere.
    assert not re.search(r"<(script|link|iframe|object|embed|base)\b|url\(|@import|srcset|onerror=", page)
    images = re.findall("<img [^>]+>", page)
    assert len(images) == 3 and all(
        'src="data:image/png;base64,' in image and re.search('alt="[^"]', image) for image in images
    )
    links, anchors = set(re.findall(r'href="([^"]+)"', page)), re.findall(r'\bid="([^"]+)"', page)
    assert {link for link in links if link[0] != "#"} == {"https://arxiv.org/abs/2608.05448", "https://example.org"}
    assert {link[1:] for link in links if link[0] == "#"} <= set(anchors) and len(anchors) == len(set(anchors))
    # Claims first; figures of the paper before others.
    names = (
        "claims",
        "figures",
        "figure-figure2_tiny",
        "figure-gains",
        "tables",
        "configuration",
        "provenance",
        "notebooks",
    )
    assert (places := [page.index(f' id="{name}"') for name in names]) == sorted(places)
    assert page.index("What ran.") > places[5]
    assert '<span class="verdict yes">✓ reproduced</span>' in page and "+1.70 [+0.10,\u00a0+3.30]" in page
    # A claim, two captions twice, a table's caption, a notebook's text and what it printed.
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;b&gt;") >= 8 and "<b>bold" not in page
    assert re.findall(r"<td>([^<]*)</td>", page[places[4] : places[5]]) == ["a|b", "1.50", "**c**", "2.00"]
    for words in ("0123456789ab+", "2026-01-02", "1.2", "2.9 (1)", "Linux x86_64, 2 cores (1)"):
        assert words in page[places[6] : places[7]]
    notebooks = page[places[7] :]
    assert (
        "runs/smoke/01_first.ipynb</code>: the copy" in notebooks
        and "02_second.ipynb</code>: as committed" in notebooks
    )
    assert '<a href="#02_second">two</a>, data, <a href="https://example.org">site</a>, picture' in notebooks
    assert "<strong>bold</strong>" in notebooks and "𝔼" in notebooks and "<mfrac>" in notebooks
    assert "<code>\\frac{</code>" in notebooks and "ValueError" in notebooks
    # HTML of cells keeps tables and colours only.
    assert '<td style="background:rgba(0,1,2,0.5);">8</td>' in page and "<td>7</td>" in page and "T_1" not in page
    assert "example.org/z" not in page and "Not shown" not in page and str(project) not in page
    assert report.build_report("smoke", tmp_path / "elsewhere/page.html").read_text(encoding="utf-8") == page


@pytest.mark.parametrize(("results", "shown"), [(2000, True), (4000, False)])
def test_a_run_is_shown_unless_the_results_are_younger_than_its_last_notebook(project, results, shown):
    make_notebook(project / "runs/smoke/02_second.ipynb", nbformat.v4.new_markdown_cell("# 02 · Of the run"))
    for name, seconds in (("01_first", 1000), ("02_second", 3000)):
        os.utime(project / f"runs/smoke/{name}.ipynb", (seconds, seconds))
    os.utime(project / "data/results/smoke/provenance.json", (results, results))
    page = report.build_report("smoke").read_text(encoding="utf-8")
    assert ("Of the run" in page) == shown and ("Not shown" in page) != shown


INPUTS = [
    *("figures/smoke/claims.csv", "figures/smoke/gains.txt", "figures/smoke/tables/table8.md"),
    "data/results/smoke/provenance.json",
]


@pytest.mark.parametrize("pattern", [*INPUTS, "figures/smoke/*.png", "figures/smoke/tables/*.md", "*/**/*.ipynb"])
def test_a_missing_input_says_what_to_run(project, pattern):
    for path in project.glob(pattern):
        path.unlink()
    with pytest.raises(DBlastError, match=r"is missing; run `make reproduce PROFILE=smoke` first") as caught:
        report.build_report("smoke")
    assert "*" in pattern or pattern in str(caught.value)


@pytest.mark.parametrize("name", [INPUTS[0], *INPUTS[2:], "runs/smoke/01_first.ipynb"])
def test_an_unreadable_input_is_named(project, name):
    (project / name).write_text("{")
    with pytest.raises(DBlastError, match="cannot be read .*run `make reproduce PROFILE=smoke` again") as caught:
        report.build_report("smoke")
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_other_mistakes_are_refused(project, monkeypatch):
    before = report.build_report("smoke").read_bytes()
    monkeypatch.setattr(report, "LIMIT", len(before) - 1)
    with pytest.raises(DBlastError, match="MB, above"):
        report.build_report("smoke")
    assert (project / "figures/smoke/report.html").read_bytes() == before
    for profile, words in (("../smoke", "unknown profile"), ("losses", "makes no table of claims")):
        with pytest.raises(DBlastError, match=words):
            report.build_report(profile)
    with pytest.raises(DBlastError, match="is a folder; give the report a file name"):
        report.build_report("smoke", project)
