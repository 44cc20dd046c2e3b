"""The report: one HTML page from what a run left behind, readable without Jupyter and without a network.

Everything is read from files and executed notebooks, nothing is computed anew. The page loads nothing from elsewhere,
and the same files give the same bytes: no dates, random names or absolute paths are written.
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
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

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

from dblast.errors import DBlastError
from dblast.reproduction.claims import COLUMNS, VERDICT_RULE
from dblast.reproduction.paths import FIGURES, NOTEBOOKS, RESULTS, ROOT, RUNS
from dblast.reproduction.profiles import get_profile

#: Bytes that the page may have: small enough to mail, and to open on a phone.
LIMIT = 5_000_000
#: Verdict: its class and a sign, so that colour is never the only difference.
VERDICTS = {"reproduced": ("yes", "✓"), "undecided": ("open", "?"), "not reproduced": ("no", "✕")}

_SCROLLED = Markup('<div class="scroll" tabindex="0">{}</div>')
#: Name of a figure: width over height, and 48 x 48 shades of grey from 0 to 255.
Views = dict[str, tuple[float, np.ndarray]]


class Part(NamedTuple):
    """A piece of the page: its anchor, its heading and its finished HTML."""

    anchor: str
    title: str
    body: Markup


def build_report(profile: str, output: Path | None = None) -> Path:
    """Write the report of a profile's last run, by default to ``figures/<profile>/report.html``; returns its path.

    Raises:
        DBlastError: unknown profile or one that makes no table of claims, a missing or unreadable input, or a page above :data:`LIMIT` bytes
            (the page of an earlier call is then left as it was).
    """
    if "05" not in get_profile(profile).notebooks:
        raise DBlastError(f"profile {profile!r} makes no table of claims, with which a report begins; take another, such as cpu")
    target = FIGURES / profile / "report.html" if output is None else Path(output)
    if target.is_dir():
        raise DBlastError(f"{target} is a folder; give the report a file name")
    images = _found(f"figures/{profile}", "*.png", profile)
    tables = [_table(table, profile) for table in _found(f"figures/{profile}/tables", "*.md", profile)]
    # The page begins with the claims, row by row.
    tables = [part for part in tables if part.anchor != "table-claims"]
    configuration = [part for part in tables if part.anchor == "table-table8"]
    if not configuration:
        raise _missing(f"figures/{profile}/tables/table8.md", profile)
    sections = [
        ("claims", "What became of the paper's claims", _claims(profile)),
        ("figures", "Figures", [_figure(image, profile) for image in images]),
        ("tables", "Tables", [part for part in tables if part not in configuration]),
        ("configuration", "Configuration", configuration),
        ("provenance", "Provenance", [_provenance(profile)]),
        ("notebooks", "Executed notebooks", _notebooks(profile, {path.stem: _view(path) for path in images})),
    ]
    style = _STYLE + HtmlFormatter().get_style_defs(".highlight")
    text = _PAGE.render(profile=profile, sections=sections, style=style)
    # A model's text may hold halves of characters, which UTF-8 cannot write.
    page = text.encode("utf-8", "replace")
    if len(page) > LIMIT:
        sizes = [(len(part.body) / 1e6, part.title, part.anchor) for *_, parts in sections for part in parts]
        largest = ", ".join(f"{title} ({anchor}) {size:.1f} MB" for size, title, anchor in sorted(sizes)[:-4:-1])
        raise DBlastError(f"the report would be {len(page) / 1e6:.1f} MB, above {LIMIT / 1e6:g}; shrink {largest}")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(target.name + ".part")
    scratch.write_bytes(page)
    os.replace(scratch, target)
    return target


def _missing(name: str, profile: str) -> DBlastError:
    return DBlastError(f"{name} is missing; run `make reproduce PROFILE={profile}` first")


def _found(folder: str, pattern: str, profile: str) -> list[Path]:
    """Files in a folder of ``figures``, those with a number in the paper first and in its order."""
    if not (paths := list((FIGURES.parent / folder).glob(pattern))):
        raise _missing(f"{folder}/{pattern}", profile)
    return sorted(paths, key=lambda path: (not re.match(r"(figure|table)\d", path.stem), path.stem))


@contextmanager
def _reading(name: str, profile: str) -> Iterator[None]:
    """What goes wrong with an input becomes one line that names the file and says what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise _missing(name, profile) from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DBlastError(f"{name} cannot be read ({reason}); run `make reproduce PROFILE={profile}` again") from error


def _rows(head: list[str], rows: list[list], right: tuple[int, ...] = (), kind: str = "plain") -> Markup:
    """A table as HTML; ``right`` are the columns of numbers."""

    def line(cells: list, tag: str) -> Markup:
        cell = Markup('<{0} class="{1}" data-label="{2}">{3}</{0}>')
        made = (cell.format(tag, "right" if i in right else "left", head[i], cells[i]) for i in range(len(head)))
        return Markup("<tr>{}</tr>\n").format(Markup("").join(made))

    body = Markup("").join(line(row, "td") for row in rows)
    table = Markup('<table class="{}"><thead>{}</thead><tbody>{}</tbody></table>').format(kind, line(head, "th"), body)
    return _SCROLLED.format(table)


def _claims(profile: str) -> list[Part]:
    """The verdicts counted by target, then every claim with the paper's number and ours."""
    rows, counts = [], {}
    with _reading(f"figures/{profile}/claims.csv", profile):
        with open(FIGURES / profile / "claims.csv", encoding="utf-8", newline="") as file:
            claims = list(csv.DictReader(file))
        if not claims or set(COLUMNS) - set(claims[0]):
            raise ValueError(f"no claims, or not the columns {', '.join(COLUMNS)}")
        for claim in claims:
            values = [float(claim[name] or "nan") for name in ("ours", "ci_low", "ci_high")]
            ours, low, high = ("–" if value != value else f"{value:+.2f}" for value in values)
            word, target = claim["verdict"], claim["target"]
            shown = Markup('<span class="verdict {}">{} {}</span>').format(*VERDICTS[word], word)
            rows.append([claim["claim"], target, claim["paper"], f"{ours} [{low},\u00a0{high}]", shown, claim["seeds"]])
            counts.setdefault(target, Counter())[word] += 1
    summary = [[target, *(count[verdict] for verdict in VERDICTS)] for target, count in counts.items()]
    head = ["Claim", "Target", "Paper", "Ours [95 % interval]", "Verdict", "Seeds"]
    every = Markup("<p>{}</p>{}").format(VERDICT_RULE, _rows(head, rows, (2, 5), "cards"))
    counted = _rows(["Target", *VERDICTS], summary, (1, 2, 3))
    return [Part("claims-count", "Verdicts", counted), Part("claims-all", "Every claim", every)]


def _title(name: str, profile: str) -> str:
    """A heading from a file name: ``figure2_tiny`` is "Figure 2 (tiny)"."""
    target = next((plan.label for plan in get_profile(profile).plans if name.endswith(f"_{plan.label}")), None)
    words = name.removesuffix(f"_{target}").replace("_", " ").capitalize()
    return re.sub(r"(?<=[a-z])(\d)", r" \1", words) + (f" ({target})" if target else "")


def _figure(path: Path, profile: str) -> Part:
    """A figure with its caption."""
    name, title = f"figures/{profile}/{path.stem}", _title(path.stem, profile)
    with _reading(f"{name}.txt or .png", profile):
        caption = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
        image = _image(path.read_bytes(), f"{title}: {caption}")
    body = Markup("<figure>{}<figcaption>{} <code>{}.pdf</code></figcaption></figure>").format(image, caption, name)
    return Part(f"figure-{path.stem}", title, body)


def _table(path: Path, profile: str) -> Part:
    """A table in its display form, from the Markdown that :meth:`dblast.reproduction.tables.Table.save` wrote.

    Cells are text as it is, not Markdown: a drafted token may well be an asterisk or a bar.
    """
    name = f"figures/{profile}/tables/{path.stem}"
    with _reading(f"{name}.md", profile):
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        title, caption = re.fullmatch(r"\*\*(.+?)\.\*\* *(.*)", first).groups()
        head, rule, *rows = [line for line in lines if line.startswith("|")]
        # Where a cell holds a bar itself, the rule under the head says where the columns end.
        bars = [place for place, character in enumerate(rule) if character == "|"]
        cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in (head, *rows)]
        for i, line in enumerate((head, *rows)):
            if len(cells[i]) != len(bars) - 1:
                cells[i] = [line[a + 1 : b].strip() for a, b in zip(bars, bars[1:], strict=False)]
        right = tuple(i for i, cell in enumerate(rule[1:-1].split("|")) if cell.endswith(":"))
    body = Markup("<p>{} <code>{}.csv</code></p>").format(caption, name) + _rows(cells[0], cells[1:], right)
    return Part(f"table-{path.stem}", title, body)


def _provenance(profile: str) -> Part:
    """What made the result tables: versions and machines, then revision, date and seconds of each."""
    name = f"data/results/{profile}/provenance.json"
    rows, versions = [], {}
    with _reading(name, profile):
        record = json.loads((RESULTS / profile / "provenance.json").read_text(encoding="utf-8"))
        for file, entry in sorted(record.items()):
            revision = entry["git"][:12] + "+" * entry["git"].endswith("+")
            rows.append([file, revision, entry["date"], f"{entry['seconds']:.1f}"])
            for item, value in {"machine": entry["machine"], "python": entry["python"], **entry["packages"]}.items():
                versions.setdefault(item, Counter())[value] += 1
        if not rows:
            raise ValueError("it lists no result table")
    shares = {item: (f"{value} ({n} of {len(rows)} tables)" for value, n in c.items()) for item, c in versions.items()}
    used = _rows(["Made with", "Version"], [[item, ", ".join(texts)] for item, texts in shares.items()])
    note = "A + behind a revision: the code differed from it. Seconds leave out stages that were in the cache already."
    tables = _rows(["Result table", "Git revision", "Date", "Seconds"], rows, (3,))
    return Part("provenance-tables", "Result tables", Markup("{}<p>{}</p>{}").format(used, note, tables))


def _image(data: bytes, alt: str, colours: int = 64) -> Markup:
    """An image as part of the page, at most 1600 pixels wide or high; a palette makes it a third of the size."""
    image, small = Image.open(BytesIO(data)).convert("RGB"), BytesIO()
    image.thumbnail((1600, 1600))
    image.quantize(colours, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    code = base64.b64encode(small.getvalue()).decode("ascii")
    return Markup('<img src="data:image/png;base64,{}" alt="{}" width="{}" height="{}">').format(code, alt, *image.size)


def _view(source: Path | BytesIO) -> tuple[float, np.ndarray]:
    image = Image.open(source).convert("L")
    return image.width / image.height, np.asarray(image.resize((48, 48), Image.Resampling.BOX), dtype=float)


def _same_figure(data: bytes, views: Views) -> str | None:
    """The figure that an image of a notebook shows at another resolution, or None.

    Two resolutions of one figure differ by up to 4.3 shades on average, figures of different results by 5 and more.
    """
    shape, grey = _view(BytesIO(data))
    alike = {name: other for name, (ratio, other) in views.items() if abs(shape / ratio - 1) < 0.02}
    near = sorted((abs(grey - other).mean(), name) for name, other in alike.items())
    clear = near and near[0][0] < 4.5 and (len(near) == 1 or near[0][0] < near[1][0] / 2)
    return near[0][1] if clear else None


#: TeX that matplotlib's mathtext does not know, and the same in words that it knows.
_MATHTEXT = (
    (r"\s+", " "), (r"\\mathbb +(\w)", r"\\mathbb{\1}"), (r"\\frac *(\w)(\w)", r"\\frac{\1}{\2}"),
    (r"\\(le|ge)(?![a-zA-Z])", r"\\\1q"), (r"\\(sum|prod)", r"\\;\\\1"), (r"(?<=\w)\\(min|log)", r"\\,\\\1"),
    (r"\\[bB]igg?l?(\(|\[|\\\{)", r"\\left\1"), (r"\\[bB]igg?r?(\)|\]|\\\})", r"\\right\1"),
)  # fmt: skip


@lru_cache(maxsize=None)
def _equation(tex: str) -> str:
    """An equation as inline SVG, as large as the text around it; its TeX source where mathtext cannot read it."""
    known = tex.strip()
    for pattern, words in _MATHTEXT:
        known = re.sub(pattern, words, known)
    try:
        path = TextPath((0, 0), f"${known}$", size=100, prop=FontProperties(math_fontfamily="cm"))
        box = path.get_extents().padded(4)
        left, bottom, right, top = (round(float(value)) for value in box.extents)
    except (ValueError, RuntimeError, IndexError):
        return Markup("<code>{}</code>").format(tex.strip())
    drawn = ""
    for points, code in path.iter_segments(simplify=False):
        turned = (str(round(float(x))) for x in points * np.resize([1, -1], points.shape))
        drawn += " MLQC"[code] + " ".join(turned) if code != path.CLOSEPOLY else "Z"
    # Computer Modern is small beside a sans serif: 100 units are 1.15 em.
    width, height, lift = (f"{0.0115 * value:.3f}em" for value in (right - left, top - bottom, bottom))
    style = f"width:{width};height:{height};vertical-align:{lift}"
    svg = Markup('<svg role="img" aria-label="{}" viewBox="{} {} {} {}" style="{}"><path d="{}"/></svg>')
    return svg.format(tex.strip(), left, -top, right - left, top - bottom, style, drawn)


class _Renderer(IPythonRenderer):
    """Markdown of a cell: text escaped, equations drawn, headings below the page's own, only links that work here."""

    def heading(self, text: str, level: int, **attrs) -> str:
        return f"<h{min(level + 3, 6)}>{text}</h{min(level + 3, 6)}>\n"

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if notebook := re.fullmatch(r"(?:.*/)?(0[1-9]_\w+)\.ipynb", url):
            return f'<a href="#{notebook[1]}">{text}</a>'
        return super().link(text, url, title) if re.match("https?://", url) else text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return str(escape(text))

    def block_math(self, body: str) -> str:
        return f'<span class="math">{_equation(body)}</span>'

    def inline_math(self, body: str) -> str:
        return str(_equation(body))


_MARKDOWN = MarkdownWithMath(_Renderer(escape=True, allow_harmful_protocols=False))
#: For HTML that cells made: tables and coloured text stay, whatever could run or load something goes.
_CLEANER = SanitizeHTML(
    tags="b br caption code div em i li ol p pre small span strong sub sup table tbody td tfoot th thead tr ul".split(),
    attributes=lambda tag, name, value: (
        name in ("class", "colspan", "rowspan", "style") and not re.search(r"url|\\", value, re.IGNORECASE)
    ),
    styles="background border-radius color font-family font-weight margin-right padding text-align".split(),
    strip=True,
)


def _is_stale(copies: list[Path], profile: str) -> bool:
    """Whether a batch run ended before the kept results were last written: then another run made what the page shows.

    A run's own results are older than the last of its notebooks, though not than the first.
    """
    results = RESULTS / profile / "provenance.json"
    return bool(copies) and max(path.stat().st_mtime for path in copies) < results.stat().st_mtime


def _notebooks(profile: str, views: Views) -> list[Part]:
    """The batch run's notebooks as executed, collapsed: its copies, or the committed ones where the run has none.

    A run that is older than the kept results is not shown, so that the page never mixes two runs.
    """
    numbers = get_profile(profile).notebooks
    of_folder = {
        folder: {path.name: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")) if path.name[:2] in numbers}
        for folder in (NOTEBOOKS, RUNS / profile)
    }
    stale = _is_stale(list(of_folder[RUNS / profile].values()), profile)
    paths = of_folder[NOTEBOOKS] | ({} if stale else of_folder[RUNS / profile])
    if not paths:
        raise _missing(f"runs/{profile}/01_*.ipynb", profile)
    as_committed = "as committed, of the profile that its parameters name"
    if stale:
        as_committed += f"; the last run, in runs/{profile}, is older than the kept results and not shown"
    parts = []
    for name, path in sorted(paths.items()):
        run, stem, committed = path.parent == RUNS / profile, path.stem, NOTEBOOKS / name
        shown = f"runs/{profile}/{name}" if run else f"notebooks/{name}"
        note = "the copy of this profile's last run" if run else as_committed
        with _reading(shown, profile):
            cells = nbformat.read(path, as_version=4).cells
            if committed.exists() and _code(cells) != _code(nbformat.read(committed, as_version=4).cells):
                note += "; its code is that of another version than the committed notebook's"
            first = cells[0].source if cells else ""
            title = first.splitlines()[0].removeprefix("# ") if first.startswith("# ") else stem
            made = (_cell(cell, f"{title}, cell {i + 1}", profile, views) for i, cell in enumerate(cells))
            body = Markup("\n").join(made)
        page = Markup("<details><summary>{}</summary><p><code>{}</code>: {}.</p>{}</details>")
        parts.append(Part(stem, title, page.format(title, shown, note, body)))
    return parts


def _code(cells: list[nbformat.NotebookNode]) -> list[str]:
    """The code of a notebook, without the parameters that a batch run puts in."""
    code = (cell for cell in cells if cell.cell_type == "code")
    return [cell.source for cell in code if "injected-parameters" not in cell.metadata.get("tags", [])]


def _cell(cell: nbformat.NotebookNode, where: str, profile: str, views: Views) -> Markup:
    """A cell's text, or its code and what came out."""
    if cell.cell_type == "markdown":
        return Markup(_MARKDOWN.render(cell.source))
    code = Markup(Highlight2HTML()(cell.source)) if cell.source.strip() else Markup("")
    return code + Markup("").join(_output(output, where, profile, views) for output in cell.get("outputs", []))


def _output(output: nbformat.NotebookNode, where: str, profile: str, views: Views) -> Markup:
    """What a cell printed or showed; an image that is a figure of the page becomes a link to it."""
    data = output.get("data", {})
    if picture := data.get("image/png") or data.get("image/jpeg"):
        if name := _same_figure(base64.b64decode(picture), views):
            return Markup('<p>Shown above: <a href="#figure-{}">{}</a></p>').format(name, _title(name, profile))
        return _image(base64.b64decode(picture), f"Output of {where}")
    printed = output.get("text") or "\n".join(output.get("traceback", []))
    kind = next((kind for kind in ("text/html", "text/markdown", "text/plain") if kind in data), None)
    # Paths as seen from the checkout, without the folders of the machine.
    text = strip_ansi(data.get(kind, printed)).replace(f"{ROOT}/", "")
    if kind == "text/html":
        # Of these the cleaner would leave what stands between the tags.
        text = re.sub(r"(?is)<(style|script)\b.*?</\1\s*>", "", text)
        return _SCROLLED.format(Markup(_CLEANER.sanitize_html_tags(text)))
    return Markup(_MARKDOWN.render(text)) if kind == "text/markdown" else Markup("<pre>{}</pre>").format(text)


_STYLE = """
body{font:1rem/1.5 system-ui,sans-serif;color:#1a1a1a;max-width:62rem;margin:auto;padding:1rem;overflow-wrap:anywhere}
h1,h2,h3,h4,h5,h6{line-height:1.25;margin:1.5em 0 .5em}h2{border-bottom:2px solid #0072b2}a{color:#005a8c}
nav,th{background:#f4f6f8}nav{padding:.5rem 1rem}nav ol ol{padding:0}nav li li{display:inline-block;margin-right:1rem}
img{max-width:100%;height:auto}figure{margin:0}.scroll,.math{overflow-x:auto;margin:.6rem 0}.math{display:block}
table{border-collapse:collapse;font-size:.88rem;overflow-wrap:normal}.right,.dataframe td{text-align:right}
th,td{padding:.3rem .6rem;border-bottom:1px solid #d5d9dd;vertical-align:top}.left{text-align:left}
.verdict{white-space:nowrap;padding:.1rem .5rem;border-left:4px solid;font-weight:600}.open{background:#eee}
.yes{border-color:#0072b2;background:#dcebf5}.no{border-color:#d55e00;background:#fae3d5}summary{font-weight:600}
pre,code{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.86rem}figcaption code,p code{color:#555}
pre{background:#f7f7f7;padding:.6rem;overflow-x:auto}details{border:1px solid #ccc;padding:.5rem 1rem}
@media(max-width:40rem){.cards thead{display:none}.cards td{display:block;text-align:left;border:0;padding:.15rem 0}
.cards td:first-child{font-weight:600;padding-top:.7rem}.cards td+td::before{content:attr(data-label) ": "}}
@media print{body{max-width:none;font-size:9pt;padding:0}nav{display:none}a{color:inherit}h2,h3{break-after:avoid}
figure,tr{break-inside:avoid}.scroll{overflow:visible}pre{white-space:pre-wrap}.verdict{print-color-adjust:exact}}
"""

_ENVIRONMENT = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
_PAGE = _ENVIRONMENT.from_string("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>DBLAST, reproduced: profile {{ profile }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>{{ style | safe }}</style></head>
<body><h1>DBLAST, reproduced: profile {{ profile }}</h1>
<p>What came out of <code>make reproduce PROFILE={{ profile }}</code>, the reproduction of
<a href="https://arxiv.org/abs/2608.05448">DBLAST: Dependent Block Drafting for Stochastic Speculative Decoding</a>, on
one page: each claim of the paper with the verdict of our measurements, then every figure and table, what ran and on
which machine, and at the end the executed notebooks, folded. Accepted length counts draft tokens per target pass,
without the bonus or replacement token. Nothing here is loaded from elsewhere.</p>
<nav aria-label="Contents"><ol>
{% for anchor, title, parts in sections %}
<li><a href="#{{ anchor }}">{{ title }}</a><ol>
{% for part in parts %}<li><a href="#{{ part.anchor }}">{{ part.title }}</a></li> {% endfor %}</ol></li>
{% endfor %}
</ol></nav><main>
{% for anchor, title, parts in sections %}
<section id="{{ anchor }}"><h2>{{ title }}</h2>
{% for part in parts %}
<article id="{{ part.anchor }}">
{% if anchor != "notebooks" %}<h3>{{ part.title }}</h3>{% endif %}{{ part.body }}</article>
{% endfor %}</section>
{% endfor %}</main></body></html>
""")
