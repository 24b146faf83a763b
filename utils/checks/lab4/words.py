"""Wording that the checks of this lab share."""

from __future__ import annotations


def classic(text: str, number: int) -> str:
    """A likely cause with its number in the notebook's classic wrong answers."""
    return f'{text}: see "classic wrong answers" {number}'
