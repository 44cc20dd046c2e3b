"""Parameters that papermill injects into a notebook: unknown ones are refused, and errors there are one line."""

from __future__ import annotations

import ast
from types import TracebackType

from IPython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from dblast.errors import DBlastError

#: How papermill begins the cell that it puts after a notebook's own parameters.
_INJECTED = "# Parameters"


def check_parameters() -> None:
    """For the cell after a notebook's parameters: refuse injected names that are none of them.

    From here on bad input of any cell is shown in one line, without a traceback. Outside a notebook nothing happens.

    Raises:
        DBlastError: papermill was given a name that the notebook does not have; it only warns of it.
    """
    shell = get_ipython()
    if shell is None:
        return
    shell.set_custom_exc((DBlastError,), _one_line)
    known, given = parameter_names(shell.user_ns.get("In", []))
    unknown = [name for name in given if name not in known]
    if unknown:
        raise DBlastError(f"this notebook has no parameter {unknown[0]!r}; it has {', '.join(known)}")


def parameter_names(cells: list[str]) -> tuple[list[str], list[str]]:
    """Annotated names of a notebook's cells, and names that papermill's cell sets.

    Args:
        cells: sources of the cells that ran so far.
    """
    known: list[str] = []
    given: list[str] = []
    for source in cells:
        try:
            body = ast.parse(source).body
        except SyntaxError:  # magics
            continue
        known += [
            node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
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
