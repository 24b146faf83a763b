"""What one part of a check found wrong, before it is laid out as a message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A headline, detail lines, and the likely cause in a sentence; :func:`utils.checks.core.fail` lays them out."""

    headline: str
    cause: str = ""
    details: tuple[str, ...] = ()
