"""What a drawing function refuses: no data, NaN, values outside of a range, lengths that differ, unknown names."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sized
from typing import Any

import numpy as np


def _has_nan(data: Any) -> bool:
    if isinstance(data, Mapping):
        return any(map(_has_nan, data.values()))
    if isinstance(data, list | tuple):
        return any(map(_has_nan, data))
    if isinstance(data, np.ndarray):
        return data.dtype.kind == "f" and bool(np.isnan(data).any())
    return isinstance(data, float) and math.isnan(data)


def require_entries(what: str, data: Any) -> None:
    """ValueError where ``data`` has a length and is empty."""
    if isinstance(data, Sized) and not isinstance(data, str) and not len(data):
        raise ValueError(f"{what} needs at least one entry, got {data!r}")


def require_data(what: str, data: Any) -> None:
    """ValueError where ``data`` has a length and is empty, or holds NaN. It reads all of ``data``: once a figure."""
    require_entries(what, data)
    if _has_nan(data):
        raise ValueError(f"{what} needs numbers, got nan in {data!r}")


def require_between(what: str, values: Iterable[float], low: float, high: float) -> None:
    """ValueError for the first value below ``low`` or above ``high``."""
    for value in values:
        if not low <= value <= high:
            raise ValueError(f"{what} must be between {low} and {high}, got {value}")


def require_positive(what: str, values: Iterable[float]) -> None:
    """ValueError for the first value that is not above 0 or not finite."""
    for value in values:
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{what} must be positive, got {value}")


def require_same_length(what: str, *sequences: Sized) -> None:
    """ValueError where there is no sequence, one is empty, or two differ in length."""
    lengths = [len(each) for each in sequences]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"{what} must have the same length, at least 1, got {lengths}")


def require_known(what: str, names: Iterable[Any], known: Collection[Any]) -> None:
    """ValueError for the first name that is not among the known ones."""
    for name in names:
        if name not in known:
            raise ValueError(f"{what} must be one of {', '.join(map(str, known))}, got {name!r}")
