"""Untrusted JSON: parsed within bounds, and checked entry by entry before anything reads it.

A check is a function of a value and of its place, and raises a ``ValueError`` that names the place.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Check = Callable[[Any, str], None]

FILE = 1 << 20
"""The most bytes of a file."""
LARGEST = 1 << 20
"""The largest plausible number of heads, dims, layers, keys or queries."""


def read(path: Path) -> Any:
    """The content of a file.

    Raises:
        ValueError: It is too long, or no JSON.
    """
    with path.open("rb") as file:
        data = file.read(FILE + 1)
    if len(data) > FILE:
        raise ValueError(f"{path} is damaged: it has more than {FILE:,} bytes")
    try:
        return json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def integer(low: int, high: int) -> Check:
    """An integer between two others, both included."""

    def check(value: Any, place: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{place} must be an integer from {low:,} to {high:,}: got {reprlib.repr(value)}")

    return check


def number(value: Any, place: str) -> None:
    """A number that float32 holds."""
    if type(value) not in (int, float) or not -3e38 < value < 3e38:
        raise ValueError(f"{place} must be a finite number: got {reprlib.repr(value)}")


def text(longest: int) -> Check:
    """Printable characters, at most ``longest``."""

    def check(value: Any, place: str) -> None:
        if type(value) is not str or len(value) > longest or not value.isprintable():
            raise ValueError(f"{place} must be text of {longest:,} characters at most: got {reprlib.repr(value)}")

    return check


def nullable(check: Check) -> Check:
    """``None``, or a value that passes another check."""
    return lambda value, place: None if value is None else check(value, place)


def one_of(*allowed: str | bool | None) -> Check:
    """One of a few values."""

    def check(value: Any, place: str) -> None:
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise ValueError(f"{place} must be one of {', '.join(map(repr, allowed))}: got {reprlib.repr(value)}")

    return check


def list_of(each: Check, longest: int) -> Check:
    """A list of at most ``longest`` values that pass a check."""

    def check(value: Any, place: str) -> None:
        if type(value) is not list or len(value) > longest:
            raise ValueError(f"{place} must be a list of {longest:,} at most: got {reprlib.repr(value)}")
        for n, entry in enumerate(value):
            each(entry, f"{place}[{n}]")

    return check


def entries(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """A dictionary of these entries and no other."""
    known = {**required, **(optional or {})}

    def check(value: Any, place: str) -> None:
        if type(value) is not dict:
            raise ValueError(f"{place} must have entries: got {reprlib.repr(value)}")
        if missing := [name for name in required if name not in value]:
            raise ValueError(f"{place} lacks {', '.join(missing)}")
        if unknown := [name for name in value if name not in known]:
            raise ValueError(f"{place} has entries that this StreamKL does not know: {reprlib.repr(unknown)}")
        for name, entry in value.items():
            known[name](entry, f"{name} of {place}")

    return check


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
