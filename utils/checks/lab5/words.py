"""Wording that the checks of this lab share."""

from __future__ import annotations

from collections.abc import Iterable


def classic(text: str, number: int) -> str:
    """A likely cause with its number in the notebook's classic wrong answers."""
    return f'{text}: see "classic wrong answers" {number}'


def listed(items: Iterable[object], most: int = 8) -> str:
    """The first items, separated by blanks: ``3 1 4 ...``."""
    found = [str(item) for item in items]
    return " ".join(found[:most] + (["..."] if len(found) > most else [])) or "none"
