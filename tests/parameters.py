"""Which values of a parameter `make test` tries, where `make test-thorough` tries them all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def thorough_but(values: Iterable[object], *tried: object) -> list:
    """The values as parameters of a test; all but those in ``tried`` belong to the thorough tests.

    Raises:
        ValueError: a value in ``tried`` is none of the values.
    """
    values = list(values)
    if unknown := [value for value in tried if value not in values]:
        raise ValueError(f"{unknown} are none of {values}")
    return [pytest.param(value, marks=() if value in tried else pytest.mark.thorough) for value in values]


def few_on_hopper(capabilities: Iterable[int]) -> list:
    """Compute capabilities times ten, and whether few of a kernel's forms are compiled, as parameters of a test.

    `make test` compiles for Hopper what most launches ask for; the thorough tests compile all forms for each of them.
    """
    every = (pytest.param(each, False, id=f"{each}", marks=pytest.mark.thorough) for each in capabilities)
    return [pytest.param(90, True, id="90 few"), *every]
