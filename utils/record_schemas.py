"""Schemas of recorded measurements: what the ``SCHEMA`` in each benchmark's file is made of.

A schema is plain data. A dict names the keys that must be there (and no others), a list of one schema means a list of
at least one such item, ``{str: schema}`` a dict with any names, and the constants below say what a value may be.
:func:`check` walks a schema and a value together and says where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A finite number of at least ``least`` (above it when ``strict``); whole numbers only when ``whole``."""

    what: str
    least: float
    strict: bool = False
    whole: bool = False

    def problem(self, value: object) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"must be {self.what}, got {value!r}"
        if not math.isfinite(value) or (self.whole and not isinstance(value, int)):
            return f"must be {self.what}, got {value!r}"
        if value < self.least or (self.strict and value == self.least):
            return f"must be {self.what}, got {value!r}"
        return None


POSITIVE = Number("a positive finite number", 0, strict=True)
FINITE = Number("a finite number", -math.inf)
NOT_NEGATIVE = Number("a finite number that is not negative", 0)
COUNT = Number("a whole number that is not negative", 0, whole=True)
SIZE = Number("a whole number of at least 1", 1, whole=True)
TEXT = str

#: A timing as ``utils.timing.Timing.as_dict`` gives it, in seconds.
TIMING = {"seconds": POSITIVE, "low": POSITIVE, "high": POSITIVE, "rounds": SIZE}
#: A ratio as ``utils.timing.Ratio.as_dict`` gives it.
RATIO = {"ratio": POSITIVE, "ratio_low": POSITIVE, "ratio_high": POSITIVE}
#: An error of ours, PyTorch's own in the same dtype, and what is allowed.
ERROR = {"error": NOT_NEGATIVE, "torch_error": NOT_NEGATIVE, "allowed": NOT_NEGATIVE}


def each(kind: object, *names: str) -> dict[str, object]:
    """A schema of several keys with values of one kind."""
    return dict.fromkeys(names, kind)


def check(value: object, schema: object, where: str) -> list[str]:
    """What is wrong with ``value``, as sentences that begin with the place; empty when it has the schema.

    Args:
        value: Parsed JSON.
        schema: What it should be.
        where: The place's name, such as ``"results.copy[3].seconds"``.
    """
    if isinstance(schema, Number):
        problem = schema.problem(value)
        return [f"{where} {problem}"] if problem else []
    if schema is str:
        return [] if isinstance(value, str) and value else [f"{where} must be a text that is not empty, got {value!r}"]
    if schema is bool:
        return [] if isinstance(value, bool) else [f"{where} must be true or false, got {value!r}"]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{where} must be a list of at least one item, got {_short(value)}"]
        return [p for i, item in enumerate(value) for p in check(item, schema[0], f"{where}[{i}]")]
    if not isinstance(value, Mapping):
        return [f"{where} must be an object, got {_short(value)}"]
    if set(schema) == {str}:
        return [p for key in value for p in check(value[key], schema[str], f"{where}.{key}")]
    problems = [f"{where}.{key} is not in the schema" for key in value if key not in schema]
    for key, inner in schema.items():
        problems += check(value[key], inner, f"{where}.{key}") if key in value else [f"{where}.{key} is missing"]
    return problems


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
