"""Hidden scenarios: each exercise of a lab observed on inputs that its seed alone decides.

What is observed is declared with the exercise (``labs/LAB/exercises``). The same function on the solution gives what is
expected, and :mod:`grading.scenarios.compare` holds the two against each other, outside of the process that ran the
student's code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import utils.runtime  # first: PyTorch takes less time through it
from utils.checks.core import Exercise, exercises_of

LABS = Path(__file__).resolve().parent.parent.parent / "labs"


def exercises(lab_name: str) -> tuple[Exercise, ...]:
    """The exercises of a lab (``"lab2"`` or ``"lab2_triton_kernels"``), in order.

    Raises:
        ValueError: the name is no lab's.
    """
    if not re.fullmatch(r"lab\d+(_\w+)?", lab_name):
        raise ValueError(f"a lab is named like lab2 or lab2_triton_kernels, got {lab_name!r}")
    found = [path.name for path in LABS.glob("lab*_*") if lab_name in (path.name, path.name.split("_")[0])]
    if not found:
        raise ValueError(f"there is no lab {lab_name}")
    return exercises_of(f"labs.{found[0]}.exercises")


def chosen(lab_name: str, only: Sequence[str] | None = None) -> tuple[Exercise, ...]:
    """The exercises of a lab, or those whose numbers are in ``only``.

    Raises:
        ValueError: as :func:`exercises`, or the lab has no exercise of such a number.
    """
    every = exercises(lab_name)
    if only is None:
        return every
    if unknown := set(only) - {exercise.number for exercise in every}:
        raise ValueError(f"{lab_name} has no exercise {', '.join(sorted(unknown))}")
    return tuple(exercise for exercise in every if exercise.number in only)
