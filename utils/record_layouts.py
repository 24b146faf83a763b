"""What each family of recorded measurements holds: the layout a record must have when it is saved and when it is read.

A layout is plain data. A dict names the keys that must be there (and no others), a list of one layout means a list of
at least one such item, ``{str: layout}`` a dict with any names, ``Optional(layout)`` a key that may be absent, and
the constants below say what a value may be. :func:`check` walks a layout and a value together and says where they
differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class Optional:
    """A key that a record may leave out."""

    layout: Any


POSITIVE = Number("a positive finite number", 0, strict=True)
NOT_NEGATIVE = Number("a finite number that is not negative", 0)
NUMBER = Number("a finite number", -math.inf)
COUNT = Number("a whole number that is not negative", 0, whole=True)
SIZE = Number("a whole number of at least 1", 1, whole=True)
TEXT = str

#: A timing as ``utils.timing.Timing.as_dict`` gives it, in seconds.
TIMING = {"seconds": POSITIVE, "low": POSITIVE, "high": POSITIVE, "rounds": SIZE}
RATIO = {"ratio": POSITIVE, "ratio_low": POSITIVE, "ratio_high": POSITIVE}


def check(value: object, layout: object, where: str) -> list[str]:
    """What is wrong with ``value``, as sentences that begin with the place; empty when it has the layout.

    Args:
        value: Parsed JSON.
        layout: One of this module's layouts.
        where: The place's name, such as ``"results.copy[3].seconds"``.
    """
    if isinstance(layout, Number):
        problem = layout.problem(value)
        return [f"{where} {problem}"] if problem else []
    if layout is str:
        return [] if isinstance(value, str) and value else [f"{where} must be a text that is not empty, got {value!r}"]
    if layout is bool:
        return [] if isinstance(value, bool) else [f"{where} must be true or false, got {value!r}"]
    if isinstance(layout, list):
        if not isinstance(value, list) or not value:
            return [f"{where} must be a list of at least one item, got {_short(value)}"]
        return [p for i, item in enumerate(value) for p in check(item, layout[0], f"{where}[{i}]")]
    if not isinstance(value, Mapping):
        return [f"{where} must be an object, got {_short(value)}"]
    if set(layout) == {str}:
        return [p for key in value for p in check(value[key], layout[str], f"{where}.{key}")]
    problems = [f"{where}.{key} is not part of the layout" for key in value if key not in layout]
    for key, inner in layout.items():
        optional = isinstance(inner, Optional)
        if key in value:
            problems += check(value[key], inner.layout if optional else inner, f"{where}.{key}")
        elif not optional:
            problems.append(f"{where}.{key} is missing")
    return problems


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_LATENCY_POINT = {"working_set": SIZE, "cycles": POSITIVE, "seconds": POSITIVE, "steps": SIZE}
_HISTOGRAM = {"working_set": SIZE, "bin_cycles": SIZE, "counts": [COUNT]}
_BANDWIDTH_POINT = {
    "working_set": SIZE,
    "bytes_per_second": POSITIVE,
    "seconds": POSITIVE,
    "bytes_per_cycle_per_sm": POSITIVE,
}
_ACCESS_POINT = {
    "bytes_useful": SIZE,
    "bytes_moved_model": SIZE,
    **TIMING,
    "useful_bytes_per_second": POSITIVE,
}
_OPERATOR = {
    "name": TEXT,
    "kind": TEXT,
    "params": {str: Number("a number", -math.inf)},
    "dtype": TEXT,
    "flops": SIZE,
    "bytes": SIZE,
    "intensity": POSITIVE,
    **TIMING,
    "flops_per_second": POSITIVE,
    "bytes_per_second": POSITIVE,
    "kernels": [TEXT],
}
_MATMUL_POINT = {"n": SIZE, **TIMING, "flops_per_second": POSITIVE}
_CUBLAS_POINT = {**_MATMUL_POINT, "kernel": TEXT, "grid": [SIZE]}
_VARIANT = {
    "classes": {"contraction": POSITIVE, "normalisation": NOT_NEGATIVE, "element-wise": NOT_NEGATIVE},
    "shares": {"contraction": POSITIVE, "normalisation": NOT_NEGATIVE, "element-wise": NOT_NEGATIVE},
    "kernel_seconds": POSITIVE,
    "step": TIMING,
    "kernels": [{"name": TEXT, "class": TEXT, "calls": SIZE, "seconds": POSITIVE}],
}

#: Family -> layout of its results.
LAYOUTS: dict[str, object] = {}
