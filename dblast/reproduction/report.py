"""The report: one HTML page from what a run left behind, readable without Jupyter and without a network.

Everything is read from files and executed notebooks, nothing is computed anew. The page loads nothing from elsewhere,
and the same files give the same bytes: no dates, random names or absolute paths are written.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import pandas as pd
from latex2mathml.converter import convert
from markupsafe import Markup, escape
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbconvert.preprocessors.sanitize import SanitizeHTML
from pygments.formatters import HtmlFormatter

from dblast.errors import DBlastError
from dblast.reproduction.claims import COLUMNS, VERDICT_RULE
from dblast.reproduction.paths import FIGURES, NOTEBOOKS, RESULTS, ROOT, RUNS
from dblast.reproduction.profiles import get_profile

#: Bytes that the page may have: small enough to mail, and to open on a phone.
LIMIT = 5_000_000


def build_report(profile: str, output: Path | None = None) -> Path:
    """Write the report of a profile's last run, by default to ``figures/<profile>/report.html``; returns its path.

    Raises:
        DBlastError: unknown profile or one that makes no table of claims, a missing or unreadable input, or a page of
            more than :data:`LIMIT` bytes (the page of an earlier call is then left as it was).
    """
    if "05" not in get_profile(profile).notebooks:
        raise DBlastError(f"profile {profile!r} makes no table of claims, with which a report begins; try cpu")
    target = FIGURES / profile / "report.html" if output is None else Path(output)
    if target.is_dir():
        raise DBlastError(f"{target} is a folder; give the report a file name")

    def read(make: Callable[[Path], Any], path: Path) -> Any:
        """What goes wrong with an input becomes one line that names the file and says what to do."""
        try:
            return make(path)
        except FileNotFoundError as error:
            name = Path(error.filename).relative_to(ROOT)
            raise DBlastError(f"{name} is missing; run `make reproduce PROFILE={profile}` first") from error
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            name, why = path.relative_to(ROOT), " ".join(str(error).split())[:200]
            raise DBlastError(f"{name} cannot be read ({why}); run `make reproduce PROFILE={profile}` again") from error

    def read_all(make: Callable[[Path], Any], folder: Path, pattern: str) -> list:
        # Those with a number in the paper come first, in its order.
        paths = sorted(folder.glob(pattern), key=lambda path: (not re.match(r"(figure|table)\d", path.stem), path.stem))
        return [read(make, path) for path in paths or [folder / pattern]]

    tables = read_all(_table, FIGURES / profile / "tables", "*.md")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template("report.html.j2").render(
        profile=profile,
        rule=VERDICT_RULE,
        claims=read(_claims, FIGURES / profile / "claims.csv"),
        figures=read_all(_figure, FIGURES / profile, "*.png"),
        # The page begins with the claims, and what ran stands behind what came out.
        tables=[table for table in tables if table["name"] not in ("claims", "table8")],
        configuration=[read(_table, FIGURES / profile / "tables" / "table8.md")],
        provenance=read(_provenance, RESULTS / profile / "provenance.json"),
        notebooks=[read(_notebook, path) for path in _executed(profile)],
        highlighting=HtmlFormatter().get_style_defs(".highlight"),
    )
    # A model's text may hold halves of characters, which UTF-8 cannot write.
    page = text.encode("utf-8", "replace")
    if len(page) > LIMIT:
        raise DBlastError(f"the report would be {len(page) / 1e6:.1f} MB, above {LIMIT / 1e6:g}; make figures smaller")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(page)
    return target


def _claims(path: Path) -> pd.DataFrame:
    """Claims, ours with its interval in words."""
    claims = pd.read_csv(path, dtype={"paper": str})[COLUMNS]
    cells = claims[["ours", "ci_low", "ci_high"]].map(lambda value: "–" if value != value else f"{value:+.2f}")
    return claims.assign(shown=cells.ours + " [" + cells.ci_low + ",\u00a0" + cells.ci_high + "]")


def _figure(path: Path) -> dict[str, str]:
    title = re.sub(r"(?<=Figure)(?=\d)", " ", path.stem.replace("_", " ").capitalize())
    caption = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return {"name": path.stem, "title": title, "caption": caption, "data": data}


def _table(path: Path) -> dict:
    """A table from what :meth:`dblast.reproduction.tables.Table.save` wrote; cells are text as it is: a token may be an asterisk."""
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    title, caption = re.fullmatch(r"\*\*(.+?)\.\*\* *(.*)", first).groups()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    head, _, *rows = [[cell.strip().replace(r"\|", "|") for cell in row] for row in rows]
    return {"name": path.stem, "title": title, "caption": caption, "head": head, "rows": rows}


def _provenance(path: Path) -> dict:
    """What made the result tables: versions and machines with the number of tables, then each table's own record."""
    record = json.loads(path.read_text(encoding="utf-8"))
    made = [{"machine": entry["machine"], "python": entry["python"], **entry["packages"]} for entry in record.values()]
    versions = {item: Counter(entry.get(item) for entry in made) for item in made[0]}
    rows = [[name, *map(entry.get, ("git", "date", "seconds"))] for name, entry in sorted(record.items())]
    return {"versions": versions, "rows": rows}


def _executed(profile: str) -> list[Path]:
    """The batch run's notebooks, and the committed ones where it has none.

    A run that ended before the kept results were last written is not shown, so that the page never mixes two runs.
    """
    copies, committed = (
        {path.name: path for number in get_profile(profile).notebooks for path in folder.glob(f"{number}_*.ipynb")}
        for folder in (RUNS / profile, NOTEBOOKS)
    )
    kept = (RESULTS / profile / "provenance.json").stat().st_mtime
    stale = max((path.stat().st_mtime for path in copies.values()), default=0.0) < kept
    paths = committed if stale else committed | copies
    return [paths[name] for name in sorted(paths)] or [RUNS / profile / "01_*.ipynb"]


class _Renderer(IPythonRenderer):
    """Markdown of a cell: text escaped, formulas as MathML, headings below the page's own, links that work here."""

    def heading(self, text: str, level: int, **attrs) -> str:
        return f"<h{min(level + 3, 6)}>{text}</h{min(level + 3, 6)}>\n"

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if notebook := re.fullmatch(r"(?:.*/)?(0[1-9]_\w+)\.ipynb", url):
            return f'<a href="#{notebook[1]}">{text}</a>'
        return super().link(text, url, title) if re.match("https?://", url) else text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return str(escape(text))

    def block_math(self, body: str) -> str:
        return _formula(body, "block")

    def inline_math(self, body: str) -> str:
        return _formula(body, "inline")


def _formula(tex: str, display: str) -> str:
    """A formula as MathML, its source if that cannot be."""
    try:
        # Of a letter without braces it makes an attribute that browsers no longer read.
        return convert(re.sub(r"\\mathbb +(\w)", r"\\mathbb{\1}", tex.strip()), display=display)
    except Exception:  # the package has no common class of its errors
        return str(Markup("<code>{}</code>").format(tex.strip()))


#: For HTML that cells made: tables and coloured text stay, whatever could run or load something goes.
_CLEANER = SanitizeHTML(
    tags="b br caption code div em i li ol p pre small span strong sub sup table tbody td tfoot th thead tr ul".split(),
    attributes=lambda tag, name, value: (
        name in ("class", "colspan", "rowspan", "style") and not re.search(r"(?i)url|\\", value)
    ),
    styles="background border-radius color font-family font-weight margin-right padding text-align".split(),
    strip=True,
)
_MARKDOWN = MarkdownWithMath(_Renderer(escape=True, allow_harmful_protocols=False))
_EXPORTER = HTMLExporter(
    template_name="basic",
    filters={"markdown2html": _MARKDOWN.render},
    exclude_input_prompt=True,
    exclude_output_prompt=True,
)


def _notebook(path: Path) -> dict:
    """An executed notebook as HTML."""
    notebook = nbformat.read(path, as_version=4)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.metadata["alt"] = f"Output of cell {number}"
        # Two notebooks may have cells of one name.
        cell.id = f"{path.stem}-{number}"
        for output in cell.get("outputs", []):
            if html := output.get("data", {}).get("text/html"):
                # Of these the cleaner would leave what stands between the tags.
                output.data["text/html"] = re.sub(r"(?is)<(style|script)\b.*?</\1\s*>", "", html)
        if cell.cell_type == "code":
            cell.outputs = _CLEANER.sanitize_code_outputs(cell.outputs)
    title = notebook.cells[0].source.split("\n")[0].removeprefix("# ")
    # Paths as seen from the checkout, without the folders of the machine.
    body = Markup(_EXPORTER.from_notebook_node(notebook)[0].replace(f"{ROOT}/", ""))
    file, run = path.relative_to(ROOT), RUNS in path.parents
    return {"name": path.stem, "title": title, "file": file, "run": run, "body": body}
