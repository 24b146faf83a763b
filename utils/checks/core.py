"""What every check of the course shares: the seed that draws its cases, and the shape of a message that teaches.

A check draws its cases at random from a seed that it prints, so that a failure can be reproduced and an answer cannot
be fitted to the cases. A failed check raises :class:`CheckFailed`, an ``AssertionError``, whose text says which
exercise, what differs and where, what usually causes that, and how to see it again.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass


class CheckFailed(AssertionError):
    """A student's answer differs from what the exercise asks for; the text teaches."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows (IPython asks for it): the text alone, without the check's own frames above it."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lab: its number as students see it (``"3.2"``) and a short title (``"forward kernel"``)."""

    number: str
    title: str

    def __str__(self) -> str:
        return f"exercise {self.number} ({self.title})"


def draw_seed(seed: int | None = None) -> int:
    """Return ``seed``, or a fresh one from the operating system when it is None.

    Raises:
        TypeError: ``seed`` is neither None nor an integer.
        ValueError: ``seed`` is negative.
    """
    if seed is None:
        return secrets.randbelow(1_000_000)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return seed


def generator(seed: int) -> random.Random:
    """A generator of cases; the same seed gives the same cases on every machine and Python version."""
    return random.Random(seed)


def message(
    exercise: Exercise, headline: str, details: Sequence[str] = (), cause: str = "", reproduce: str = ""
) -> str:
    """Lay out a failed check as the course does everywhere.

    The headline follows the exercise's name; ``details`` are indented lines (first bad index, owner, map of tiles);
    ``cause`` is the likely reason in a sentence; ``reproduce`` names the seed and the case.
    """
    lines = [f"{exercise}: {headline}", *(f"  {line}" for line in details)]
    if cause:
        lines.append(f"  {cause}")
    if reproduce:
        lines.append(f"  reproduce: {reproduce}")
    return "\n".join(lines)


def fail(exercise: Exercise, headline: str, details: Sequence[str] = (), cause: str = "", reproduce: str = "") -> None:
    """Raise :class:`CheckFailed` with the text that :func:`message` lays out."""
    raise CheckFailed(message(exercise, headline, details, cause, reproduce))


def passed(exercise: Exercise, notice: str, seed: int, cases: int) -> None:
    """Print the verdict of a passed check and what to notice in it."""
    print(f"✓ {exercise}: {cases} cases agree (seed {seed})")
    if notice:
        print(f"  {notice}")
