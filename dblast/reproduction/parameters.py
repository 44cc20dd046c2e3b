"""Parameters that papermill injects into a notebook: unknown ones are refused, and errors there are one line."""

from __future__ import annotations

import ast
from types import TracebackType

from IPython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from dblast.errors import DBlastError

#: How papermill begins the cell that it puts after a notebook's own parameters.
_INJECTED = "# Parameters"
#: Types that fit an annotation beside itself, and annotations in words.
_FITTING = {"float": ("float", "int")}
_WORDS = {"bool": "True or False", "int": "a whole number", "float": "a number", "str": "text"}


def check_parameters() -> None:
    """For the cell after a notebook's parameters: refuse injected names that are none of them, and values of another type.

    From here on bad input of any cell is shown in one line, without a traceback. Outside a notebook nothing happens.

    Raises:
        DBlastError: papermill was given a name that the notebook does not have, of which it only warns, or a value that
            is no such thing.
    """
    shell = get_ipython()
    if shell is None:
        return
    shell.set_custom_exc((DBlastError,), _one_line)
    known, given = parameter_names(shell.user_ns.get("In", []))
    for name in given:
        if name not in known:
            raise DBlastError(f"this notebook has no parameter {name!r}; it has {', '.join(known)}")
        kind, value = known[name], shell.user_ns[name]
        # Whole numbers are numbers, truths are not; any word would be a truth.
        if type(value).__name__ not in _FITTING.get(kind, (kind,)):
            raise DBlastError(f"parameter {name!r} must be {_WORDS.get(kind, kind)}, got {value!r}")


def parameter_names(cells: list[str]) -> tuple[dict[str, str], list[str]]:
    """Annotated names of a notebook's cells with their types, and names that papermill's cell sets.

    Args:
        cells: sources of the cells that ran so far.
    """
    known: dict[str, str] = {}
    given: list[str] = []
    for source in cells:
        try:
            body = ast.parse(source).body
        except SyntaxError:  # magics
            continue
        own = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        known |= {node.target.id: ast.unparse(node.annotation) for node in own}
        if source.lstrip().startswith(_INJECTED):
            targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
            given += [target.id for target in targets if isinstance(target, ast.Name)]
    return known, given


def _one_line(
    shell: InteractiveShell,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    tb_offset: int | None = None,
) -> list[str]:
    line = [f"dblast: {error}"]
    shell._showtraceback(kind, error, line)
    return line
