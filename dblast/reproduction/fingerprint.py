"""What code a result depends on: every definition in dblast that a function reaches, followed name by name.

The hash of that code is part of a stage's address, so that editing what made a result makes a new one. It sees
definitions, not files: comments, docstrings, imports and error messages do not count, and neither does the
module that a function lives in, nor a function beside it that nothing here calls.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "dblast"
#: What is reached but determines no result: bars and messages, the bookkeeping of stages and shards, and plans and
#: identities, whose values are in every stage's description.
IGNORED = tuple(
    f"{PACKAGE}.{name}"
    for name in (
        "errors", "show", "support.checks", "support.files", "support.progress", "reproduction.identity",
        "reproduction.plans", "reproduction.profiles", "reproduction.progress", "reproduction.stages",
    )
)  # fmt: skip


class _Bare(ast.NodeTransformer):
    """A definition without what does not determine its results: docstrings, imports, what an error says."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body.pop(0)
        return node

    def visit_Import(self, node: ast.Import) -> None:
        return None

    visit_ImportFrom = visit_Import

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        return ast.Raise()


class _Module:
    """Top-level definitions of one module, and what its imports of dblast bind."""

    def __init__(self, path: Path):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.imports = _imports(tree)
        self.definitions: dict[str, list[ast.AST]] = {}
        for node in tree.body:
            for name in _bound_names(node):
                self.definitions.setdefault(name, []).append(node)


def _bound_names(node: ast.stmt) -> list[str]:
    """Names that a top-level statement defines or, as in ``TABLE.update(...)``, changes."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        targets = [node.value.func.value]
    return [name.id for target in targets if target is not None for name in ast.walk(target) if isinstance(name, ast.Name)]


def _imports(tree: ast.AST) -> dict[str, tuple[str, str]]:
    """``local name -> (module, name)`` of all ``from dblast... import name``, those inside functions included."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                bound[alias.asname or alias.name] = (node.module, alias.name)
    return bound


@cache
def _source(module: str) -> Path | None:
    """File of a dblast module; None if there is none of that name."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and spec.origin else None


@cache
def _read(module: str) -> _Module:
    return _Module(_source(module))


def _uses(node: ast.AST) -> set[tuple[str, str | None]]:
    """(name, attribute) pairs that a definition reads; attribute None for a name that stands alone."""
    found = {(n.id, None) for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {
        (n.value.id, n.attr) for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    }


def reached(*starts: Callable | str) -> dict[tuple[str, str], str]:
    """Every definition of dblast that functions, or things named "module.name", reach: ``(module, name)`` to its code."""
    waiting = [
        tuple(start.rsplit(".", 1)) if isinstance(start, str) else (start.__module__, start.__qualname__)
        for start in starts
    ]
    found: dict[tuple[str, str], str] = {}
    seen = set()
    while waiting:
        module, name = waiting.pop()
        if (module, name) in seen or module in IGNORED:
            continue
        seen.add((module, name))
        source = _read(module)
        if name in source.imports and name not in source.definitions:
            waiting.append(source.imports[name])
            continue
        bare = [_Bare().visit(copy.deepcopy(node)) for node in source.definitions.get(name, [])]
        # Not ast.dump, whose form differs between versions of Python.
        found[module, name] = "\n".join(map(ast.unparse, bare))
        for used, attribute in set().union(*map(_uses, bare)):
            if used in source.definitions:
                waiting.append((module, used))
            elif used in source.imports:
                home, original = source.imports[used]
                inner = f"{home}.{original}"
                if _source(inner) is None:
                    waiting.append((home, original))
                elif attribute:
                    waiting.append((inner, attribute))
    return found


@cache
def code_fingerprint(*starts: Callable | str) -> str:
    """Short hash of all that :func:`reached` finds; where a definition stands does not count."""
    parts = sorted(f"{name} {code}" for (_, name), code in reached(*starts).items() if code)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
