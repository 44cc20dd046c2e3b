"""The report: self-contained, in order, escaped, deterministic; what is missing or too large is said."""

import base64
import json
import os
import re
from html.parser import HTMLParser
from io import BytesIO

import nbformat
import pytest
from PIL import Image, ImageDraw

from dblast.reproduction import report
from dblast.reproduction.claims import COLUMNS
from dblast.errors import DBlastError

EVIL = "<script>alert(1)</script> & <b>bold</b>"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;b&gt;bold&lt;/b&gt;"


class Elements(HTMLParser):
    """All start tags of a page, with their attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def of(self, *names):
        return [attributes for tag, attributes in self.tags if tag in names]


def png(width: int, scale: int = 1) -> bytes:
    """A drawing of 240 x 160 pixels, at ``scale`` times its size."""
    image = Image.new("RGB", (240 * scale, 160 * scale), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle([x * scale for x in (20, 20, 20 + width, 100)], fill=(0, 114, 178))
    draw.line([x * scale for x in (0, 150, 230, 10)], fill="black", width=3 * scale)
    made = BytesIO()
    image.save(made, format="png")
    return made.getvalue()


def picture(data: bytes):
    return nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(data).decode("ascii")})


def make_notebook(path, *cells):
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    # Random by default; the same inputs are to be the same bytes.
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell{number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A run of the smoke profile: two claims, figures, tables and notebooks, one of these committed only."""
    for name in ("FIGURES", "NOTEBOOKS", "RESULTS", "RUNS"):
        folder = "data/results" if name == "RESULTS" else name.lower()
        monkeypatch.setattr(report, name, tmp_path / folder)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    figures = tmp_path / "figures" / "smoke"
    (figures / "tables").mkdir(parents=True)
    rows = [["It helps, " + EVIL, "tiny", "5.2", "1.7", "0.1", "3.3", "reproduced", "3"]]
    rows += [["It does not", "tiny", "1", "-2", "-3", "-1", "not reproduced", "1"]]
    lines = [",".join(COLUMNS), *(",".join(f'"{cell}"' for cell in row) for row in rows)]
    (figures / "claims.csv").write_text("\n".join(lines) + "\n")
    for name, width in (("gains", 60), ("figure2_tiny", 180)):
        (figures / f"{name}.png").write_bytes(png(width, scale=2))
        (figures / f"{name}.txt").write_text(f'Caption of {name}: "{EVIL}"\n')
    table = "| text   |   length |\n|:-------|---------:|\n| a|b    |     1.50 |\n| **c**  |     2.00 |\n"
    (figures / "tables" / "table9_tiny.md").write_text(f"**Table 9 (tiny).** Texts, {EVIL}\n\n{table}")
    (figures / "tables" / "table8.md").write_text(f"**Table 8.** What ran.\n\n{table}")
    entry = {"git": "0123456789abcdef+", "date": "2026-01-02", "python": "3.11", "packages": {"torch": "2.9"}}
    entry |= {"machine": "Linux x86_64, 2 cores", "seconds": 1.25, "configuration": {}}
    (tmp_path / "data/results/smoke").mkdir(parents=True)
    (tmp_path / "data/results/smoke/provenance.json").write_text(json.dumps({"tiny-scores.parquet": entry}))
    table_html = (
        "<style scoped>td {background: url(https://example.org/x.png)}</style>"
        '<script src="https://example.org/x.js"></script>'
        '<img src="https://example.org/y.png" onerror="alert(1)"><table id="T_1" class="dataframe"><tr>'
        '<td style="color:red;background:url(https://example.org/z)">7</td>'
        '<td style="background:rgba(0,1,2,0.5)">8</td></tr></table>'
    )
    outputs = [
        nbformat.v4.new_output("stream", text=f"{tmp_path}/runs: {EVIL}\n"),
        nbformat.v4.new_output("execute_result", {"text/html": table_html, "text/plain": "no"}),
        picture(png(60)),
        picture(png(120)),
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=["\x1b[31mValueError\x1b[0m: <bad>"]),
    ]
    text = f"# 01 · First\n\nOf $\\mathbb E_{{x\\sim p}}\\frac1b$ and $\\nosuch{{x}}$, {EVIL}; see "
    text += "[two](02_second.ipynb), [data](../data/README.md), [site](https://example.org), "
    text += "![picture](https://example.org/a.png) and **bold**."
    cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell("x = '<i>'", outputs=outputs)]
    make_notebook(tmp_path / "runs/smoke/01_first.ipynb", *cells)
    make_notebook(tmp_path / "notebooks/01_first.ipynb", nbformat.v4.new_markdown_cell("# Not shown"))
    # A tour, no part of the batch run.
    make_notebook(tmp_path / "notebooks/00_tour.ipynb", nbformat.v4.new_markdown_cell("# Not shown"))
    make_notebook(tmp_path / "notebooks/02_second.ipynb", nbformat.v4.new_markdown_cell("# 02 · Second\n\nHello."))
    return tmp_path


@pytest.fixture
def page(project):
    path = report.build_report("smoke")
    assert path == project / "figures/smoke/report.html"
    return path.read_text(encoding="utf-8")


def test_nothing_is_loaded_from_elsewhere(page):
    elements = Elements(page)
    assert not elements.of("script", "link", "iframe", "object", "embed", "video", "audio", "base")
    for image in elements.of("img", "source"):
        assert image["src"].startswith("data:image/png;base64,")
    assert not re.search(r"url\(|@import|srcset|onerror=", page)
    addresses = {attributes["href"] for attributes in elements.of("a") if not attributes["href"].startswith("#")}
    assert addresses == {"https://arxiv.org/abs/2608.05448", "https://example.org"}


def test_every_link_in_the_page_leads_somewhere_and_anchors_are_unique(page):
    elements = Elements(page)
    anchors = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(anchors) == len(set(anchors))
    links = {attributes["href"][1:] for attributes in elements.of("a") if attributes["href"].startswith("#")}
    assert links <= set(anchors)
    # The contents name every section and part.
    assert links == set(anchors)


def test_the_same_inputs_give_the_same_bytes(project, tmp_path):
    first = report.build_report("smoke").read_bytes()
    report._equation.cache_clear()
    assert report.build_report("smoke", tmp_path / "elsewhere" / "page.html").read_bytes() == first
    assert str(project).encode() not in first


def test_claims_come_before_figures_before_tables_before_provenance_before_notebooks(page):
    names = ("claims", "figures", "tables", "configuration", "provenance", "notebooks")
    places = [page.index(f'<section id="{name}">') for name in names]
    assert places == sorted(places)
    configuration = page[places[3] : places[4]]
    assert "What ran." in configuration and "What ran." not in page[: places[3]]
    # Figures that have a number in the paper come first.
    assert page.index('<article id="figure-figure2_tiny">') < page.index('<article id="figure-gains">')


def test_verdicts_are_spelled_out_and_counted(page):
    assert '<span class="verdict yes">✓ reproduced</span>' in page
    assert '<span class="verdict no">✕ not reproduced</span>' in page
    assert "+1.70 [+0.10,\u00a0+3.30]" in page
    counts = page[page.index('<article id="claims-count">') : page.index('<article id="claims-all">')]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", counts) == ["tiny", "1", "0", "1"]


def test_text_is_escaped(page):
    assert "<script" not in page and "<b>bold</b>" not in page
    # A claim, two captions, a table's caption, a notebook's text and what it printed.
    assert page.count(ESCAPED) >= 6
    assert "ValueError: &lt;bad&gt;" in page
    assert "&lt;i&gt;" in page


def test_every_image_has_an_alternative_text(page):
    images = Elements(page).of("img")
    assert len(images) == 3 and all(image["alt"].strip() for image in images)
    assert any(image["alt"].startswith("Figure 2 (tiny): Caption of figure2_tiny") for image in images)
    assert all(drawing["aria-label"] for drawing in Elements(page).of("svg"))


def test_a_figure_that_a_notebook_shows_again_is_a_link(page):
    notebooks = page[page.index('<section id="notebooks">') :]
    assert notebooks.count("Shown above:") == 1
    assert 'Shown above: <a href="#figure-gains">Gains</a>' in notebooks
    assert notebooks.count("<img") == 1


def test_table_cells_are_taken_as_they_are(page):
    table = page[page.index('<article id="table-table9_tiny">') : page.index('<section id="configuration">')]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", table) == ["a|b", "1.50", "**c**", "2.00"]
    assert re.search('<td class="right"[^>]*>1.50<', table)


def test_provenance_names_revision_versions_and_seconds(page):
    text = page[page.index('<section id="provenance">') : page.index('<section id="notebooks">')]
    for words in ("0123456789ab+", "2026-01-02", "1.2", "2.9 (1 of 1 tables)", "Linux x86_64, 2 cores"):
        assert words in text


def test_notebooks_are_folded_and_say_where_they_come_from(page):
    notebooks = page[page.index('<section id="notebooks">') :]
    assert notebooks.count("<details>") == 2
    assert "runs/smoke/01_first.ipynb</code>: the copy of this profile&#39;s last run; its code is" in notebooks
    assert "notebooks/02_second.ipynb</code>: as committed" in notebooks
    assert "Not shown" not in notebooks
    assert '<a href="#02_second">two</a>, data, <a href="https://example.org">site</a>, picture' in notebooks
    assert "<strong>bold</strong>" in notebooks


def _age(project, run, results):
    """Times of the run's copies, in the order of its notebooks, and of the kept results."""
    for name, seconds in zip(("01_first", "02_second"), run, strict=True):
        path = project / f"runs/smoke/{name}.ipynb"
        if not path.exists():
            make_notebook(path, nbformat.v4.new_markdown_cell("# 02 · Of the run"))
        os.utime(path, (seconds, seconds))
    os.utime(project / "data/results/smoke/provenance.json", (results, results))


def test_a_run_that_ended_after_the_results_were_written_is_shown(project):
    # The results of its second notebook are younger than the copy of its first.
    _age(project, run=(1000, 3000), results=2000)
    page = report.build_report("smoke").read_text(encoding="utf-8")
    assert page.count("<code>runs/smoke/") == 2 and "Of the run" in page and "older than" not in page


def test_a_run_older_than_the_results_gives_way_to_the_committed_notebooks(project):
    _age(project, run=(1000, 3000), results=4000)
    page = report.build_report("smoke").read_text(encoding="utf-8")
    notebooks = page[page.index('<section id="notebooks">') :]
    assert "<code>runs/smoke/" not in page and "Of the run" not in page and "Not shown" in notebooks
    assert notebooks.count("the last run, in runs/smoke, is older than the kept results and not shown") == 2
    # Nothing committed: better none than those of another run.
    for path in (project / "notebooks").glob("*"):
        path.unlink()
    with pytest.raises(DBlastError, match="is missing; run `make reproduce PROFILE=smoke` first"):
        report.build_report("smoke")


def test_html_of_cells_keeps_tables_and_colours_only(page):
    assert '<td style="background:rgba(0,1,2,0.5);">8</td>' in page
    assert "<td>7</td>" in page and 'id="T_1"' not in page
    assert "example.org/z" not in page and "scoped" not in page


def test_equations_are_drawn_or_stay_as_source(page):
    assert page.count("<svg") == 1
    assert '<code>\\nosuch{x}</code>' in page


@pytest.mark.parametrize(
    "missing",
    [
        "figures/smoke/claims.csv",
        "figures/smoke/gains.txt",
        "figures/smoke/tables/table8.md",
        "data/results/smoke/provenance.json",
    ],
)
def test_a_missing_input_says_what_to_run(project, missing):
    (project / missing).unlink()
    with pytest.raises(DBlastError, match=r"is missing; run `make reproduce PROFILE=smoke` first") as caught:
        report.build_report("smoke")
    assert missing in str(caught.value)


@pytest.mark.parametrize("pattern", ["figures/smoke/*.png", "figures/smoke/tables/*.md", "*/**/*.ipynb"])
def test_missing_kinds_of_files_say_what_to_run(project, pattern):
    for path in project.glob(pattern):
        path.unlink()
    with pytest.raises(DBlastError, match="is missing; run `make reproduce PROFILE=smoke` first"):
        report.build_report("smoke")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("figures/smoke/claims.csv", "claim,target\nx,y\n"),
        ("figures/smoke/gains.png", "no picture"),
        ("figures/smoke/tables/table8.md", "no table\n"),
        ("data/results/smoke/provenance.json", '{"a": {}}'),
        ("runs/smoke/01_first.ipynb", "{"),
    ],
)
def test_an_unreadable_input_is_named(project, name, text):
    (project / name).write_text(text)
    with pytest.raises(DBlastError, match="cannot be read .*run `make reproduce PROFILE=smoke` again") as caught:
        report.build_report("smoke")
    assert name.removesuffix(".png") in str(caught.value) and "\n" not in str(caught.value)


def test_a_page_above_the_limit_is_refused_and_its_largest_parts_are_named(project, monkeypatch):
    # Small enough for a mail.
    assert report.LIMIT <= 5_000_000
    before = report.build_report("smoke").read_bytes()
    monkeypatch.setattr(report, "LIMIT", len(before))
    report.build_report("smoke")
    monkeypatch.setattr(report, "LIMIT", len(before) - 1)
    with pytest.raises(DBlastError, match=r"MB, above .*; shrink 01 · First \(01_first\) .* MB, "):
        report.build_report("smoke")
    assert (project / "figures/smoke/report.html").read_bytes() == before
    assert not list(project.rglob("*.part"))


def test_other_mistakes_are_refused(project):
    with pytest.raises(DBlastError, match="unknown profile '../smoke'"):
        report.build_report("../smoke")
    with pytest.raises(DBlastError, match="profile 'losses' makes no table of claims"):
        report.build_report("losses")
    with pytest.raises(DBlastError, match="is a folder; give the report a file name"):
        report.build_report("smoke", project)
