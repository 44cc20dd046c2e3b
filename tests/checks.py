"""Checks that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dblast.errors import DBlastError


def one_line(error: pytest.ExceptionInfo, *words: str) -> None:
    """The message of a refusal is a single line and holds these words."""
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@contextmanager
def refused(*words: str, kind: type[Exception] = DBlastError) -> Iterator[None]:
    """The block is refused by such an error, in a single line that holds these words."""
    with pytest.raises(kind) as error:
        yield
    one_line(error, *words)
