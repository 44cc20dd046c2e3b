"""Types of a configuration's fields, as they are annotated: what a command line or a notebook may get wrong."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any

from dblast.errors import DBlastError
from dblast.support.checks import check_number, is_whole


def check_fields(config: Any) -> None:
    """Refuse field values of another type than annotated, NaN and infinities; looks into nested configurations."""
    hints = typing.get_type_hints(type(config))
    for field in fields(config):
        _check(field.name, getattr(config, field.name), hints[field.name])


def _check(name: str, value: Any, hint: Any) -> None:
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in choices:
        return
    (hint,) = (choice for choice in choices if choice is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise DBlastError(f"{name} must be a tuple, got {_shown(value)}")
        for item in value:
            _check(f"a value of {name}", item, typing.get_args(hint)[0])
    elif is_dataclass(hint):
        if not isinstance(value, hint):
            raise DBlastError(f"{name} must be a {hint.__name__}, got {_shown(value)}")
        check_fields(value)
    elif hint is float:
        check_number(name, value)
    elif hint is int:
        if not is_whole(value):
            raise DBlastError(f"{name} must be an integer, got {_shown(value)}")
    elif not isinstance(value, hint):
        raise DBlastError(f"{name} must be a {hint.__name__}, got {_shown(value)}")
    elif hint is str and len(f"{value} ".splitlines()) > 1:
        raise DBlastError(f"{name} must be on one line, got {_shown(value)}")


def _shown(value: Any) -> str:
    return f"{value!r:.60}".replace("\n", " ")
