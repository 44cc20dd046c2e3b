"""Passages of documentation and of code from packages that the project installs anyway, as openings of sampled text.

All are under permissive licences (:data:`LIBRARIES`), and none of their text is kept but in the prompts that a shard
records. A passage depends on the installed version; shards say what they were sampled from, so that does not matter.
"""

from __future__ import annotations

import ast
import random
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

#: Package to licence; every one is pinned in ``constraints.txt``.
LIBRARIES = {
    "networkx": "BSD-3-Clause",
    "scipy": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "pandas": "BSD-3-Clause",
    "seaborn": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "mpmath": "BSD-3-Clause",
    "nbconvert": "BSD-3-Clause",
    "click": "BSD-3-Clause",
    "pygments": "BSD-2-Clause",
    "requests": "Apache-2.0",
    "tornado": "Apache-2.0",
    "transformers": "Apache-2.0",
    "datasets": "Apache-2.0",
    "rich": "MIT",
    "attr": "MIT",
    "pydantic": "MIT",
    "fontTools": "MIT",
    "lark": "MIT",
}
#: Files of more bytes than this take longer to parse than they are worth.
_LARGEST_FILE = 120_000


@lru_cache
def _files(library: str) -> list[Path]:
    """Source files of a library, its tests left out; none if it is not installed."""
    spec = find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0])
    files = sorted(root.rglob("*.py"))
    return [
        f for f in files if "test" not in f.relative_to(root).as_posix() and 2_000 < f.stat().st_size < _LARGEST_FILE
    ]


@lru_cache(maxsize=64)
def _passages(file: Path) -> tuple[list[str], list[str]]:
    """Paragraphs of prose in a file's docstrings, and its functions."""
    source = file.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return [], []
    prose, code, lines = [], [], source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
            words = paragraph.split()
            # Prose, not a table of parameters, an example or mark-up.
            if len(words) >= 15 and not any(
                sign in paragraph for sign in (">>>", "---", "::", ":math:", "===", "    ")
            ):
                prose.append(" ".join(words).replace("``", "`"))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 5:
            code.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return prose, code


def _draw(rng: random.Random, kind: int) -> str:
    while True:
        files = _files(rng.choice(list(LIBRARIES)))
        found = _passages(rng.choice(files))[kind] if files else []
        if found:
            return rng.choice(found)


def prose(rng: random.Random, most_words: int = 90) -> str:
    """A paragraph of documentation."""
    return " ".join(_draw(rng, 0).split()[:most_words])


def code(rng: random.Random, most_lines: int = 18) -> str:
    """The beginning of a function."""
    return "\n".join(_draw(rng, 1).split("\n")[:most_lines])
