"""Holds what a student's functions gave in the hidden scenarios against what the solution's gave.

The files of the student come from a sandbox and may hold anything; each odd one is a reason, never an exception. A
reason says which output of which function is wrong and how badly. It shows no input and no expected value, and no text,
name or size that the student's code chose: it knows the hidden inputs, and could send them along.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grading.scenarios import chosen
from grading.scenarios.observations import Other, Raised, Unreadable, plain, read
from utils.checks.core import Exercise
from utils.checks.hidden import BY_DTYPE, FLOAT, Tolerance

#: The largest ratio of an error to what is allowed that says something.
MOST_TIMES = 10_000
#: Types that are told by name.
TYPES = {"Size", "bytes", "complex", "device", "dict", "dtype", "function", "generator", "method", "ndarray", "range"}
TYPES |= {"builtin_function_or_method", "frozenset", "map", "object", "set", "type", "zip"}
DID_NOT_FINISH = "it did not finish on the hidden inputs: it ran too long, or it ended the process"


def compare(
    expected_dir: Path, got_dir: Path, lab_name: str, only: Sequence[str] | None = None, package: Path | None = None
) -> dict[str, str | None]:
    """What is wrong with each exercise, in words for the student, or None where everything agrees.

    Args:
        expected_dir: what ``python -m grading.scenarios`` wrote for the solution.
        got_dir: what it wrote, with the same seed, for the student.
        lab_name: the lab.
        only: the exercises to compare; all of the lab's by default.
        package: the folder of the student's package; the line of an error is told if it is one of these files.

    Raises:
        ValueError: the expected observations are missing or broken, or there is no such lab or exercise.
    """
    files = package.rglob("*.py") if package else ()
    lines = {str(path.relative_to(package)): len(path.read_bytes().splitlines()) for path in files}
    return {e.number: _reason(e, Path(expected_dir), Path(got_dir), lines) for e in chosen(lab_name, only)}


def errors(got_dir: Path, numbers: Sequence[str]) -> dict[str, str]:
    """The whole text of each error that ended a scenario, for the instructor: it may hold hidden inputs."""
    found = {}
    for number in numbers:
        with contextlib.suppress(FileNotFoundError, Unreadable):
            if isinstance(got := read(got_dir, number), Raised):
                found[number] = got.text
    return found


def _reason(exercise: Exercise, expected_dir: Path, got_dir: Path, lines: Mapping[str, int]) -> str | None:
    try:
        expected = read(expected_dir, exercise.number)
    except FileNotFoundError as error:
        raise ValueError(f"the solution's observations of exercise {exercise.number} are missing") from error
    if isinstance(expected, Raised):
        raise ValueError(f"the solution fails in the scenario of exercise {exercise.number}: {expected.text}")
    try:
        got = read(got_dir, exercise.number)
    except FileNotFoundError:
        begun = os.path.lexists(got_dir / f"{exercise.number}.started")
        return DID_NOT_FINISH if begun else "it was not run on the hidden inputs: the process ended first"
    except Unreadable as error:
        return f"its result on the hidden inputs cannot be read: {error}"
    if isinstance(got, Raised):
        return f"on hidden inputs it raised {got.told(lines)}"
    return difference(exercise, expected, got)


def difference(exercise: Exercise, expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """What is wrong with observations, in words for the student, or None when they agree."""
    wrong = []
    for name, right in expected.items():
        if name not in got:
            wrong.append(f"{name}: this output is missing")
        elif problem := _problem(plain(right), plain(got[name]), exercise.tolerance_of(name)):
            wrong.append(f"{name}: {problem}")
    if not wrong and len(got) > len(expected):
        wrong.append("there are more outputs than expected")
    if not wrong:
        return None
    more = len(wrong) - 1
    others = f" ({more} more output{'s' if more > 1 else ''} of {len(expected)} wrong)" if more else ""
    return f"on hidden inputs, {wrong[0]}{others}"


@dataclass
class _Tally:
    """Elements that are wrong among how many, and the worst error over what is allowed."""

    elements: int = 0
    wrong: int = 0
    worst: float = 0.0

    def add(self, excess: float) -> None:
        self.elements += 1
        self.wrong += not excess <= 1
        self.worst = max(self.worst, excess)

    def __str__(self) -> str:
        if not self.wrong:
            return ""
        if self.elements == 1:
            return f"it is wrong{self._by()}"
        verb = "is" if self.wrong == 1 else "are"
        return f"{_about(self.wrong, self.elements)} of {self.elements:,} values {verb} wrong{self._by()}"

    def _by(self) -> str:
        """How far off the worst value is; nothing where it is off by orders of magnitude, or has no measure."""
        if not self.worst < MOST_TIMES:
            return ""
        return f" (the largest error is {self.worst:.2g} times the tolerance)"


def _about(count: int, of: int) -> str:
    """How many: two digits of a large number, unless it is all."""
    return f"{count:,}" if count < 100 or count == of else f"about {float(f'{count:.1e}'):,.0f}"


def _problem(expected: Any, got: Any, tolerance: Tolerance) -> str:
    """What is wrong with one observation; empty when nothing is."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        return _tensor_problem(expected, got, tolerance)
    tally = _Tally()
    return _walk(expected, got, tolerance, tally) or str(tally)


def _walk(expected: Any, got: Any, tolerance: Tolerance, tally: _Tally) -> str:
    """Go through lists; count wrong numbers in ``tally``, and return what cannot be counted."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        return _tensor_problem(expected, got, tolerance)
    if isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            return f"expected {len(expected):,} values, got {'fewer' if len(got) < len(expected) else 'more'}"
        for right, value in zip(expected, got):
            if problem := _walk(right, value, tolerance, tally):
                return problem
        return ""
    if _kind(expected) != _kind(got) and not (type(expected) is float and type(got) is int):
        if expected is None or got is None:  # one of the answers that are allowed, but the wrong one
            tally.add(math.inf)
            return "" if got is not None else "expected a value, got None"
        return f"expected {_kind(expected)}, got {_kind(got)}"
    tally.add(_excess(expected, got, tolerance))
    return ""


def _kind(value: Any) -> str:
    """A value's type in words."""
    names = {bool: "a bool", int: "an int", float: "a float", str: "a string", list: "a list"}
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, Other):
        if value.kind.startswith("tensor of "):
            return "a tensor that is complex, sparse or far too large"
        return f"a value of type {value.kind}" if value.kind in TYPES else "a value of another type"
    return "None" if value is None else names[type(value)]


def _excess(expected: Any, got: Any, tolerance: Tolerance) -> float:
    """The error of one value over what is allowed: at most 1 when it is right, infinite when it has no measure."""
    if type(expected) is not float:
        return 0.0 if expected == got else math.inf
    try:
        got = float(got)
    except OverflowError:
        return math.inf
    if math.isnan(expected) or math.isnan(got):
        return 0.0 if math.isnan(expected) and math.isnan(got) else math.inf
    if math.isinf(expected) or math.isinf(got):
        return 0.0 if expected == got else math.inf
    relative = tolerance.times * FLOAT if tolerance.relative is None else tolerance.relative
    return _over(abs(expected - got), relative * abs(expected) + tolerance.absolute)


def _over(error: float, allowed: float) -> float:
    if error == 0:
        return 0.0
    return error / allowed if allowed > 0 else math.inf


def _tensor_problem(expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> str:
    if got.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {_shape(got, expected)}"
    if got.dtype != expected.dtype:
        return f"expected dtype {_dtype(expected)}, got {_dtype(got)}"
    if not expected.numel():
        return ""
    if not expected.dtype.is_floating_point:
        excess = torch.where(got == expected, 0.0, math.inf)
    else:
        excess = _tensor_excess(expected, got, tolerance)
    tally = _Tally(excess.numel(), int((~(excess <= 1)).sum()))
    finite = excess[torch.isfinite(excess)]
    tally.worst = finite.max().item() if finite.numel() and finite.max() > 1 else math.inf
    lost = int((~torch.isfinite(got) & torch.isfinite(expected)).sum()) if got.dtype.is_floating_point else 0
    return str(tally) + (f"; {_about(lost, tally.elements)} of them are NaN or infinite" if lost else "")


def _shape(got: torch.Tensor, expected: torch.Tensor) -> str:
    """A wrong shape, with a question mark for each size that is neither 1 nor one of those expected."""
    known = {1, *expected.shape}
    sizes = [str(size) if size in known else "?" for size in got.shape[: expected.ndim + 1]]
    sizes += ["..."] * (got.ndim > len(sizes))
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def _tensor_excess(expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """The error of each element over what is allowed; infinite where one is not finite and the other differs."""
    relative = tolerance.relative
    if relative is None:
        relative = tolerance.times * BY_DTYPE.get(expected.dtype, 0.0)
    right, value = expected.to(torch.float64), got.to(torch.float64)
    size = torch.where(torch.isfinite(right), right.abs(), 0.0)
    if tolerance.of == "tensor":
        size = size.max().expand_as(size)
    elif tolerance.of == "row" and size.ndim:
        size = size.amax(-1, keepdim=True).expand_as(size)
    error, allowed = (right - value).abs(), relative * size + tolerance.absolute
    excess = torch.where(error == 0, 0.0, error / allowed)
    same = torch.where(torch.isnan(right), torch.isnan(value), right == value)
    finite = torch.isfinite(right) & torch.isfinite(value)
    return torch.where(finite, excess, torch.where(same, 0.0, math.inf))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
