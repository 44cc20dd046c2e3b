"""Checks that several test files share."""

from __future__ import annotations

import pytest


def one_line(error: pytest.ExceptionInfo, *words: str) -> None:
    """The message of a refusal is a single line and holds these words."""
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
