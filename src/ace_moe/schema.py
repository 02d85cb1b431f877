"""Schemas of JSON from outside, written down as values.

    PERSON = record({"name": text}, {"age": maybe(number(0))})
    PERSON({"name": "Ada", "age": "old"}, "person")        # ValueError: person: age is 'old', not a number

A schema is a function (value, where) that raises ValueError; those below are made of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Schema = Callable[[Any, str], None]


def wrong(value: object, where: str, what: str) -> ValueError:
    """Say what a value is and what it should be."""
    return ValueError(f"{where} is {value!r:.40}, not {what}")


def kind(cls: type, what: str) -> Schema:
    """A value of one class."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, cls):
            raise wrong(value, where, what)

    return check


text, flag, thing = kind(str, "a text"), kind(bool, "true or false"), kind(dict, "an object")


def number(low: float = -math.inf, high: float = math.inf, whole: bool = False) -> Schema:
    """A finite number in [low, high]. True and false are numbers to Python, not to us."""

    def check(value: Any, where: str) -> None:
        numeric = int if whole else (int, float)
        what = "a whole number" if whole else "a number"
        if not isinstance(value, numeric) or isinstance(value, bool) or not -1e308 < value < 1e308:
            raise wrong(value, where, what)
        if not low <= value <= high:
            bounds = f"from {low:g} on" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise wrong(value, where, f"{what} {bounds}")

    return check


def maybe(schema: Schema) -> Schema:
    """null, or a value of this schema."""

    def check(value: Any, where: str) -> None:
        if value is not None:
            schema(value, where)

    return check


def choice(*values: Any) -> Schema:
    """One of these values."""

    def check(value: Any, where: str) -> None:
        if value not in values:
            raise wrong(value, where, f"one of {', '.join(map(str, values))}")

    return check


def items(schema: Schema, least: int = 0, most: int | None = None) -> Schema:
    """A list."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or len(value) < least or (most is not None and len(value) > most):
            size = f" of {least}" if least == most else f" of at least {least}" if least else ""
            raise wrong(value, where, f"a list{size}")
        for number, item in enumerate(value):
            schema(item, f"{where}[{number}]")

    return check


def values(schema: Schema) -> Schema:
    """An object with any names and values of one kind."""

    def check(value: Any, where: str) -> None:
        thing(value, where)
        for name, item in value.items():
            schema(item, f"{where}: {name!r:.40}")

    return check


def record(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, closed: bool = False
) -> Schema:
    """An object with these names; `closed`: with no others."""
    known = {**required, **(optional or {})}

    def check(value: Any, where: str) -> None:
        thing(value, where)
        missing, unknown = [n for n in required if n not in value], [n for n in value if n not in known]
        if missing:
            raise ValueError(f"{where} has no {missing[0]}")
        if closed and unknown:
            raise ValueError(f"{where} has {unknown[0]!r:.40}, which is not one of {', '.join(known)}")
        for name, schema in known.items():
            if name in value:
                schema(value[name], f"{where}: {name}")

    return check
