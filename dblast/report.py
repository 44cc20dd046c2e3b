"""The report: one HTML page from what a run left behind, readable without Jupyter and without a network.

Claims, figures, tables, configuration and provenance are read from their files and the notebooks from their
executed copies; nothing is computed anew. The page loads nothing from elsewhere, and the same files give the same
bytes: no dates, random names or absolute paths are written.
"""

from __future__ import annotations

import base64
import csv
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import jinja2
import nbformat
import numpy as np
from markupsafe import Markup, escape
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from nbconvert.filters import Highlight2HTML, strip_ansi
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbconvert.preprocessors.sanitize import SanitizeHTML
from PIL import Image
from pygments.formatters import HtmlFormatter

from dblast.claims import COLUMNS, VERDICT_RULE
from dblast.errors import DBlastError
from dblast.paths import FIGURES, NOTEBOOKS, RESULTS, ROOT, RUNS
from dblast.profiles import get_profile

#: Bytes that the page may have: small enough to mail, and to open on a phone.
LIMIT = 5_000_000
#: Verdict: its class and a sign, so that colour is never the only difference.
VERDICTS = {"reproduced": ("yes", "✓"), "undecided": ("open", "?"), "not reproduced": ("no", "✕")}


@dataclass(frozen=True)
class Part:
    """A piece of the page: its anchor, its heading and its finished HTML."""

    anchor: str
    title: str
    body: Markup


def build_report(profile: str, output: Path | None = None) -> Path:
    """Write the report of a profile's last run, by default to ``figures/<profile>/report.html``; returns its path.

    Raises:
        DBlastError: unknown profile, a missing or unreadable input, or a page above :data:`LIMIT` bytes
            (the page of an earlier call is then left as it was).
    """
    get_profile(profile)
    path = FIGURES / profile / "report.html" if output is None else Path(output)
    if path.is_dir():
        raise DBlastError(f"{path} is a folder; give the report a file name")
    claims = _claims(profile)
    images = {image.stem: image for image in _found(FIGURES / profile, "*.png", profile)}
    figures = [_figure(image, profile) for image in images.values()]
    tables = [_table(table, profile) for table in _found(FIGURES / profile / "tables", "*.md", profile)]
    configuration = [part for part in tables if part.anchor == "table-table8"]
    if not configuration:
        raise _missing(f"figures/{profile}/tables/table8.md", profile)
    provenance = _provenance(profile)
    views = {stem: _view(image.read_bytes()) for stem, image in images.items()}
    notebooks = [_notebook(name, profile, views) for name in _notebook_names(profile)]
    sections = [
        ("claims", "What became of the paper's claims", claims),
        ("figures", "Figures", figures),
        ("tables", "Tables", [part for part in tables if part not in configuration]),
        ("configuration", "Configuration", configuration),
        ("provenance", "Provenance", [provenance]),
        ("notebooks", "Executed notebooks", notebooks),
    ]
    colours = HtmlFormatter(style="default").get_style_defs(".highlight")
    text = _template("page").render(profile=profile, sections=sections, style=Markup(_STYLE + colours))
    # Text of a model may hold halves of characters, which UTF-8 cannot write.
    page = text.encode("utf-8", "replace")
    if len(page) > LIMIT:
        sizes = {f"{part.title} ({part.anchor})": len(part.body.encode("utf-8", "replace")) for *_, s in sections for part in s}
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        raise DBlastError(
            f"the report would have {len(page) / 1e6:.1f} MB, more than {LIMIT / 1e6:g}; make its largest parts smaller: "
            + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in largest)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(page)
    os.replace(scratch, path)
    return path


# -- inputs --------------------------------------------------------------------------------------


def _missing(name: str, profile: str) -> DBlastError:
    return DBlastError(f"{name} is missing; run `make reproduce PROFILE={profile}` first")


def _found(folder: Path, pattern: str, profile: str) -> list[Path]:
    """Files of a folder, those with a number in the paper first and in its order."""

    def order(path: Path) -> tuple[int, int, str]:
        number = re.match(r"(?:figure|table)(\d+)", path.stem)
        return (0, int(number[1]), path.stem) if number else (1, 0, path.stem)

    if paths := sorted(folder.glob(pattern), key=order):
        return paths
    raise _missing(f"{folder.relative_to(FIGURES.parent).as_posix()}/{pattern}", profile)


@contextmanager
def _reading(name: str, profile: str) -> Iterator[None]:
    """What goes wrong with an input becomes one line that names the file and says what to do."""
    try:
        yield
    except DBlastError:
        raise
    except FileNotFoundError as error:
        raise _missing(name, profile) from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DBlastError(f"{name} cannot be read ({error}); run `make reproduce PROFILE={profile}` again") from error


def _rows(head: list[str], rows: list[list], right: tuple[int, ...] = (), kind: str = "") -> Markup:
    """A table as HTML; ``right`` are the columns of numbers."""
    return Markup(_template("table").render(head=head, rows=rows, right=right, kind=kind))


def _claims(profile: str) -> list[Part]:
    """The verdicts counted by target, then every claim with the paper's number and ours."""
    name = f"figures/{profile}/claims.csv"
    with _reading(name, profile):
        with open(FIGURES / profile / "claims.csv", encoding="utf-8", newline="") as file:
            claims = list(csv.DictReader(file))
        if not claims or set(COLUMNS) - set(claims[0]):
            raise DBlastError(f"{name} lacks claims or columns; run `make reproduce PROFILE={profile}` again")
        rows = []
        for claim in claims:
            ours, low, high = ("–" if value != value else f"{value:+.2f}" for value in _floats(claim, "ours", "ci_low", "ci_high"))
            kind, sign = VERDICTS.get(claim["verdict"], ("open", ""))
            verdict = Markup('<span class="verdict {}">{} {}</span>').format(kind, sign, claim["verdict"])
            rows.append([claim["claim"], claim["target"], claim["paper"], f"{ours} [{low}, {high}]", verdict, claim["seeds"]])
    counts: dict[str, Counter] = {}
    for claim in claims:
        counts.setdefault(claim["target"], Counter())[claim["verdict"]] += 1
    names = [*VERDICTS, *sorted({claim["verdict"] for claim in claims} - set(VERDICTS))]
    summary = [[target, *(count[verdict] for verdict in names)] for target, count in counts.items()]
    head = ["Claim", "Target", "Paper", "Ours [95 % interval]", "Verdict", "Training seeds"]
    return [
        Part("claims-count", "Verdicts", _rows(["Target", *names], summary, tuple(range(1, len(names) + 1)))),
        Part("claims-all", "Every claim", Markup("<p>{}</p>").format(VERDICT_RULE) + _rows(head, rows, (2, 5), "cards")),
    ]


def _floats(row: dict[str, str], *names: str) -> list[float]:
    return [float(row[name] or "nan") for name in names]


def _title(name: str, profile: str) -> str:
    """A heading from a file name: ``figure2_tiny`` is "Figure 2 (tiny)"."""
    target = next((plan.label for plan in get_profile(profile).plans if name.endswith(f"_{plan.label}")), None)
    words = name.removesuffix(f"_{target}").replace("_", " ").capitalize()
    return re.sub(r"(?<=[a-z])(\d)", r" \1", words) + (f" ({target})" if target else "")


def _figure(path: Path, profile: str) -> Part:
    """A figure with its caption; the PNG with a palette, a third of the size."""
    name = f"figures/{profile}/{path.name}"
    with _reading(f"{name.removesuffix('.png')}.txt", profile):
        caption = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
    title = _title(path.stem, profile)
    with _reading(name, profile):
        image = _image(path.read_bytes(), f"{title}: {caption}")
    body = Markup("<figure>{}<figcaption>{} <code>{}</code></figcaption></figure>").format(image, caption, name)
    return Part(f"figure-{path.stem}", title, body)


def _table(path: Path, profile: str) -> Part:
    """A table in its display form, from the Markdown that :meth:`dblast.tables.Table.save` wrote.

    Cells are text as it is, not Markdown: a drafted token may well be an asterisk or a bar.
    """
    name = f"figures/{profile}/tables/{path.name}"
    with _reading(name, profile):
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        head, rule, *rows = [line for line in lines if line.startswith("|")]
        title, caption = re.fullmatch(r"\*\*(.+?)\.\*\* *(.*)", first).groups()
        # A cell that holds a bar itself: the rule's bars say where the columns end.
        bars = [place for place, character in enumerate(rule) if character == "|"]
        cells = [line[1:-1].split("|") for line in (head, *rows)]
        for i, line in enumerate((head, *rows)):
            if len(cells[i]) != len(bars) - 1:
                cells[i] = [line[left + 1 : right] for left, right in zip(bars, bars[1:], strict=False)]
        cells = [[cell.strip() for cell in row] for row in cells]
        right = tuple(i for i, cell in enumerate(rule[1:-1].split("|")) if cell.endswith(":"))
    rows_behind = name.removesuffix(".md") + ".csv"
    body = Markup("<p>{} <code>{}</code></p>").format(caption, rows_behind) + _rows(cells[0], cells[1:], right)
    return Part(f"table-{path.stem}", title, body)


def _provenance(profile: str) -> Part:
    """What made the result tables: revision, date, seconds of each, and the versions and machines all of them share."""
    name = f"data/results/{profile}/provenance.json"
    with _reading(name, profile):
        record = json.loads((RESULTS / profile / "provenance.json").read_text(encoding="utf-8"))
        rows, shared = [], {}
        for file, entry in sorted(record.items()):
            revision = entry["git"][:12] + ("+" if entry["git"].endswith("+") else "")
            rows.append([file, Markup("<code>{}</code>").format(revision), entry["date"], f"{entry['seconds']:.1f}"])
            for item, value in {"python": entry["python"], **entry["packages"], "machine": entry["machine"]}.items():
                shared.setdefault(item, Counter())[str(value)] += 1
    if not rows:
        raise _missing(name, profile)
    many = {item: counts if len(counts) > 1 else list(counts) for item, counts in shared.items()}
    lines = [[i, ", ".join(v if len(many[i]) == 1 else f"{v} ({shared[i][v]} tables)" for v in many[i])] for i in many]
    note = (
        "A + behind a revision: the code differed from it. Seconds are those of the last making of a table, "
        "in which stages already in the cache cost nothing."
    )
    head = ["Result table", "Git revision", "Date", "Seconds"]
    body = _rows(["Made with", "Version"], lines) + Markup("<p>{}</p>").format(note) + _rows(head, rows, (3,))
    return Part("provenance-tables", "Result tables", body)


# -- images and equations ------------------------------------------------------------------------


def _image(data: bytes, alt: str, colours: int = 64) -> Markup:
    """An image as part of the page: on white, with a palette, at most 1600 pixels wide or high."""
    image = Image.open(BytesIO(data)).convert("RGBA")
    page = Image.new("RGBA", image.size, "white")
    page.alpha_composite(image)
    page.thumbnail((1600, 1600))
    small = BytesIO()
    page.convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    source = base64.b64encode(small.getvalue()).decode("ascii")
    size = Markup('width="{}" height="{}"').format(*page.size)
    return Markup('<img src="data:image/png;base64,{}" alt="{}" {}>').format(source, alt, size)


def _view(data: bytes) -> tuple[float, np.ndarray]:
    """An image as the eye compares it: width over height, and 48 x 48 shades of grey from 0 to 255."""
    image = Image.open(BytesIO(data)).convert("L")
    return image.width / image.height, np.asarray(image.resize((48, 48), Image.Resampling.BOX), dtype=float)


def _same_figure(data: bytes, views: dict[str, tuple[float, np.ndarray]]) -> str | None:
    """The figure that an image of a notebook shows at another resolution, or None.

    Two resolutions of one figure differ by up to 4.3 shades on average, other figures by more than 5 from it and
    by more than 7 from each other; the same plot of older results is another figure.
    """
    shape, grey = _view(data)
    near = sorted((abs(grey - other).mean(), stem) for stem, (ratio, other) in views.items() if abs(shape / ratio - 1) < 0.02)
    if not near or near[0][0] > 4.5:
        return None
    return near[0][1] if len(near) == 1 or near[0][0] < near[1][0] / 2 else None


#: What matplotlib's mathtext does not know, in words that it knows.
_MATHTEXT = (
    (r"\s+", " "),
    (r"\\mathbb +(\w)", r"\\mathbb{\1}"),
    (r"\\frac *(\w)(\w)", r"\\frac{\1}{\2}"),
    (r"\\(le|ge)(?![a-zA-Z])", r"\\\1q"),
    (r"\\[bB]igg?l?(\(|\[|\\\{)", r"\\left\1"),
    (r"\\[bB]igg?r?(\)|\]|\\\})", r"\\right\1"),
)


@lru_cache(maxsize=None)
def _equation(tex: str) -> Markup:
    """An equation drawn as SVG in the size of the text around it; its TeX source where mathtext cannot read it."""
    known = tex.strip()
    for pattern, words in _MATHTEXT:
        known = re.sub(pattern, words, known)
    try:
        path = TextPath((0, 0), f"${known}$", size=100, prop=FontProperties(math_fontfamily="cm"))
    except (ValueError, RuntimeError):
        return Markup("<code>{}</code>").format(tex.strip())
    if not len(path.vertices):
        return Markup("<code>{}</code>").format(tex.strip())
    letters = {path.MOVETO: "M", path.LINETO: "L", path.CURVE3: "Q", path.CURVE4: "C", path.CLOSEPOLY: "Z"}
    drawn = "".join(
        letters[code] + ("" if code == path.CLOSEPOLY else " ".join(str(round(x)) for x in points * np.resize([1, -1], points.shape)))
        for points, code in path.iter_segments(simplify=False)
    )
    box = path.get_extents()
    left, top = int(box.x0) - 4, -int(box.y1) - 4
    width, height = int(box.x1) + 4 - left, -int(box.y0) + 4 - top
    # Computer Modern is small beside a sans serif: 100 units are 1.15 em.
    em = [f"{1.15 * value / 100:.3f}em" for value in (width, height, -height - top)]
    style = Markup("width:{};height:{};vertical-align:{}").format(*em)
    start = Markup('<svg role="img" aria-label="{}" viewBox="{} {} {} {}" style="{}">')
    return start.format(tex.strip(), left, top, width, height, style) + Markup('<path d="{}"/></svg>').format(drawn)


# -- notebooks -----------------------------------------------------------------------------------


class _Renderer(IPythonRenderer):
    """Markdown of a cell: text escaped, equations drawn, headings below the page's own, only links that work here."""

    def heading(self, text: str, level: int, **attrs) -> str:
        return f"<h{min(level + 3, 6)}>{text}</h{min(level + 3, 6)}>\n"

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if notebook := re.fullmatch(r"(?:.*/)?(\d\d_\w+)\.ipynb", url):
            return f'<a href="#{notebook[1]}">{text}</a>'
        return super().link(text, url, title) if re.match("https?://", url) else text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return str(escape(text))

    def block_math(self, body: str) -> str:
        return Markup('<span class="math">{}</span>').format(_equation(body))

    def inline_math(self, body: str) -> str:
        return _equation(body)

    def latex_environment(self, name: str, body: str) -> str:
        return Markup(r'<code class="math">\begin{{{0}}}{1}\end{{{0}}}</code>').format(name, body)


def _markdown(source: str) -> Markup:
    return Markup(MarkdownWithMath(_Renderer(escape=True, allow_harmful_protocols=False)).render(source))


def _clean_html(source: str) -> Markup:
    """HTML that a cell made: tables and coloured text stay, whatever could run or load something goes."""
    allowed = {"class", "colspan", "rowspan", "scope", "style", "title"}
    cleaner = SanitizeHTML(
        tags=[*"b br code div em h3 h4 i li ol p pre small span strong sub sup".split()]
        + [*"table caption thead tbody tfoot tr th td ul".split()],
        attributes=lambda tag, name, value: name in allowed and not re.search(r"url|\\", value, re.IGNORECASE),
        styles=[*"background background-color border-radius color font-family font-style font-weight".split()]
        + [*"margin-right padding text-align white-space".split()],
        strip=True,
    )
    # Only the tags would be stripped, not what stands between them.
    source = re.sub(r"<(style|script)\b.*?</\1\s*>", "", source, flags=re.DOTALL | re.IGNORECASE)
    return Markup('<div class="scroll">{}</div>').format(Markup(cleaner.sanitize_html_tags(source)))


def _notebook_names(profile: str) -> list[str]:
    pattern = "[0-9][0-9]_*.ipynb"
    names = {path.name for folder in (RUNS / profile, NOTEBOOKS) for path in folder.glob(pattern)}
    if not names:
        raise _missing(f"runs/{profile}/{pattern}", profile)
    return sorted(names)


def _sources(notebook: nbformat.NotebookNode) -> list[str]:
    """The cells' text, without the cell of parameters that a batch run adds."""
    return [cell.source for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]


def _notebook(name: str, profile: str, views: dict[str, tuple[float, np.ndarray]]) -> Part:
    """A notebook as it was executed, collapsed: the run's copy, or the committed one where the run has none."""
    run, committed = RUNS / profile / name, NOTEBOOKS / name
    shown = f"runs/{profile}/{name}" if run.exists() else f"notebooks/{name}"
    with _reading(shown, profile):
        notebook = nbformat.read(run if run.exists() else committed, as_version=4)
        if not run.exists():
            note = "the committed copy; its outputs are those of the profile that its parameters name"
        elif committed.exists() and _sources(notebook) != _sources(nbformat.read(committed, as_version=4)):
            note = "executed by this profile's last run, in another version than the committed one"
        else:
            note = "executed by this profile's last run"
        heading = next((re.match(r"# +(.+)", text) for text in _sources(notebook) if text.startswith("# ")), None)
        title = heading[1].strip() if heading else name.removesuffix(".ipynb")
        cells = [_cell(cell, f"{title}, cell {i + 1}", views, profile) for i, cell in enumerate(notebook.cells)]
    start = Markup("<details><summary>{}</summary><p><code>{}</code>: {}.</p>").format(title, shown, note)
    return Part(name.removesuffix(".ipynb"), title, start + Markup("\n").join(cells) + Markup("</details>"))


def _cell(cell: nbformat.NotebookNode, where: str, views: dict, profile: str) -> Markup:
    """A cell's text, or its code and what came out."""
    if cell.cell_type == "markdown":
        return _markdown(cell.source)
    if cell.cell_type != "code":
        return Markup("<pre>{}</pre>").format(cell.source)
    code = Markup(Highlight2HTML()(cell.source)) if cell.source.strip() else Markup("")
    return code + Markup("").join(_output(output, where, views, profile) for output in cell.outputs)


def _output(output: nbformat.NotebookNode, where: str, views: dict, profile: str) -> Markup:
    """What a cell printed or showed; an image that is a figure of the page becomes a link to it."""
    if output.output_type == "stream":
        return Markup("<pre>{}</pre>").format(_relative(strip_ansi(output.text)))
    if output.output_type == "error":
        return Markup("<pre>{}</pre>").format(_relative(strip_ansi("\n".join(output.traceback))))
    data = output.data
    if picture := data.get("image/png") or data.get("image/jpeg"):
        raw = base64.b64decode(picture)
        if stem := _same_figure(raw, views):
            return Markup('<p>Shown above: <a href="#figure-{}">{}</a></p>').format(stem, _title(stem, profile))
        return _image(raw, f"Output of {where}")
    if "text/html" in data:
        return _clean_html(_relative(data["text/html"]))
    if "text/markdown" in data:
        return _markdown(_relative(data["text/markdown"]))
    return Markup("<pre>{}</pre>").format(_relative(strip_ansi(data.get("text/plain", ""))))


def _relative(text: str) -> str:
    """Paths as seen from the checkout, without the folders of the machine that ran the notebook."""
    return text.replace(f"{ROOT}/", "").replace(f"{Path.home()}/", "~/")


# -- the page ------------------------------------------------------------------------------------

_STYLE = """
:root{color-scheme:light}
body{font:1rem/1.55 system-ui,sans-serif;color:#1a1a1a;background:#fff;max-width:62rem;margin:0 auto;padding:1rem;overflow-wrap:anywhere}
h1,h2,h3,h4,h5,h6{line-height:1.25;margin:1.6em 0 .5em}h2{border-bottom:2px solid #0072b2;padding-bottom:.2em}
a{color:#005a8c}nav{background:#f4f6f8;padding:.6rem 1rem;border-radius:6px;font-size:.92rem}nav ol{margin:.2rem 0;padding-left:1.4rem}
nav li li{display:inline-block;margin-right:1rem}nav li>ol{list-style:none;padding-left:0}
.scroll{overflow-x:auto;margin:.6rem 0}table{border-collapse:collapse;font-size:.88rem;overflow-wrap:normal}
th,td{padding:.3rem .6rem;border-bottom:1px solid #d5d9dd;text-align:left;vertical-align:top}th{background:#f4f6f8}
.right{text-align:right;font-variant-numeric:tabular-nums}
.verdict{white-space:nowrap;padding:.1rem .5rem;border-left:4px solid;border-radius:3px;font-weight:600}
.yes{border-color:#0072b2;background:#dcebf5;color:#003f63}.open{border-color:#777;background:#eee;color:#333}
.no{border-color:#d55e00;background:#fae3d5;color:#6b2f00}
img{max-width:100%;height:auto}figure{margin:.5rem 0}figcaption{font-size:.92rem;color:#333}
pre,code{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.86rem}figcaption code,p code{color:#555}
pre{background:#f7f7f7;padding:.6rem;border-radius:4px;overflow-x:auto;overflow-wrap:normal;line-height:1.4}
svg{fill:currentColor;max-width:100%}.math{display:block;overflow-x:auto;margin:.6rem 0}.math svg{max-width:none}
details{border:1px solid #d5d9dd;border-radius:6px;padding:.5rem .9rem;margin:.6rem 0}summary{cursor:pointer;font-weight:600}
@media(max-width:40rem){body{padding:.7rem}.cards thead{display:none}.cards tr{display:block;border-bottom:2px solid #0072b2;padding:.4rem 0}
.cards td{display:block;border:0;padding:.1rem 0;text-align:left}.cards td:first-child{font-weight:600}
.cards td:not(:first-child)::before{content:attr(data-label) ": ";color:#555}}
@media print{body{max-width:none;font-size:9.5pt;padding:0}nav,.scroll[tabindex]:focus{break-after:page}a{color:inherit;text-decoration:none}
h2,h3{break-after:avoid}figure,tr,.highlight{break-inside:avoid}thead{display:table-header-group}pre{white-space:pre-wrap}
.verdict,th{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""

_TEMPLATES = {
    "table": """<div class="scroll" tabindex="0"><table{% if kind %} class="{{ kind }}"{% endif %}><thead><tr>
{% for cell in head %}<th{% if loop.index0 in right %} class="right"{% endif %} scope="col">{{ cell }}</th>{% endfor %}
</tr></thead><tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td{% if loop.index0 in right %} class="right"{% endif %}
{%- if kind %} data-label="{{ head[loop.index0] }}"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
""",
    "page": """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>DBLAST, reproduced: profile {{ profile }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>DBLAST, reproduced: profile {{ profile }}</h1>
<p>What came out of <code>make reproduce PROFILE={{ profile }}</code>, the reproduction of <a
href="https://arxiv.org/abs/2608.05448">DBLAST: Dependent Block Drafting for Stochastic Speculative Decoding</a>, on one
page: first each claim of the paper with the verdict of our measurements, then every figure and table, what ran and on
which machine, and at the end the executed notebooks, folded. Accepted length counts draft tokens per target pass,
without the bonus or replacement token. Nothing here is loaded from elsewhere.</p>
<nav aria-label="Contents"><ol>
{% for anchor, title, parts in sections %}
<li><a href="#{{ anchor }}">{{ title }}</a>{% if parts|length > 1 %}<ol>
{% for part in parts %}<li><a href="#{{ part.anchor }}">{{ part.title }}</a></li>{% endfor %}</ol>{% endif %}</li>
{% endfor %}
</ol></nav>
<main>
{% for anchor, title, parts in sections %}
<section id="{{ anchor }}">
<h2>{{ title }}</h2>
{% for part in parts %}
<article id="{{ part.anchor }}">
{% if anchor != "notebooks" %}<h3>{{ part.title }}</h3>{% endif %}
{{ part.body }}
</article>
{% endfor %}
</section>
{% endfor %}
</main>
</body>
</html>
""",
}


@lru_cache(maxsize=None)
def _template(name: str) -> jinja2.Template:
    loader = jinja2.DictLoader(_TEMPLATES)
    options = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(loader=loader, autoescape=True, **options).get_template(name)
