"""Cells of a lecture that a reader writes in: a function of theirs held against a reference, in one line.

Such a cell (tagged ``write-here``) defines a function that raises ``NotImplementedError``; the cell below it compares,
and the folded text after that holds an answer. A lecture works with the function unwritten, and says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def compare(
    yours: Callable[..., Any],
    reference: Callable[..., Any],
    cases: Iterable[Sequence[Any]],
    *,
    tolerance: float = 1e-5,
    profiler: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    """Print whether a reader's function gives what a reference gives: the first difference, or that all cases agree.

    Args:
        yours: the reader's function; ``NotImplementedError`` means that it is not written yet.
        reference: gives what is expected, of the same arguments.
        cases: the arguments of each call.
        tolerance: how far a number may be off, relative to the largest of its case.
        profiler: ``profile_kernel``, for a kernel: what it finds counts (a race, an access out of bounds).
    """
    print(_verdict(yours, reference, cases, tolerance, profiler)[1])


def _verdict(
    yours: Callable[..., Any],
    reference: Callable[..., Any],
    cases: Iterable[Sequence[Any]],
    tolerance: float,
    profiler: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[bool | None, str]:
    """Whether all cases agree (None: not written yet), and the line that says so."""
    name, number = yours.__name__, 0
    for number, case in enumerate(cases, start=1):
        try:
            with profiler() as profile:
                got = yours(*case)
            problem = _found(profile) or _difference(got, reference(*case), tolerance)
        except NotImplementedError:
            return None, f"{name}: not written yet"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            return False, f"✗ {name}, case {number}{_shown(case)}: {problem}"
    return True, f"✓ {name}: all {number} cases agree"


class Diagnostic:
    """Questions of several areas, each held against a reference; at the end, the areas to read more about.

    Args:
        areas: Name of each area -> a text to read about it, with its address.
        questions: How many there are in all; who has checked fewer is not told to be ready.
    """

    def __init__(self, areas: Mapping[str, str], questions: int) -> None:
        self._areas, self._questions = dict(areas), questions
        self._passed: dict[str, dict[str, bool | None]] = {area: {} for area in areas}

    def compare(
        self,
        area: str,
        yours: Callable[..., Any],
        reference: Callable[..., Any],
        cases: Sequence[Sequence[Any]],
        *,
        read: str,
        mistakes: Mapping[str, Callable[..., Any]] | None = None,
        tolerance: float = 1e-5,
    ) -> None:
        """Print what :func:`compare` prints; below a difference, its probable cause if it is known, and what to read.

        Args:
            area: one of the areas.
            yours: the reader's function; ``NotImplementedError`` means that it is not written yet.
            reference: gives what is expected, of the same arguments.
            cases: the arguments of each call. Each function gets copies, so none sees what another did to them.
            read: what explains the question, with its address.
            mistakes: words -> a function with this mistake. The words are printed if the reader's function gives the
                same as this one in every case, or an error of the same type.
            tolerance: how far a number may be off, relative to the largest of its case.
        """
        passed, line = _verdict(yours, reference, copy.deepcopy(cases), tolerance)
        self._passed[area][yours.__name__] = passed
        print(line)
        if passed is False:
            for words, wrong in (mistakes or {}).items():
                if _same(yours, wrong, cases, tolerance):
                    print(f"  Probable cause: {words}")
                    break
            print(f"  To read: {read}")

    def summary(self) -> None:
        """Print how many questions of each area passed, and what to read about each area in which one did not."""
        verdicts = [passed for found in self._passed.values() for passed in found.values()]
        if all(passed is None for passed in verdicts):
            print(f"0 of {self._questions} questions are answered: write, run the checks, then run this cell again.")
            return
        width = max(map(len, self._areas))
        for area, found in self._passed.items():
            unwritten = sum(passed is None for passed in found.values())
            rest = f", {unwritten} not written" if unwritten else ""
            print(f"{area:{width}}  {sum(map(bool, found.values()))} of {len(found)} passed{rest}")
        if left := self._questions - len(verdicts):
            print(
                f"Not checked yet: {left} of {self._questions} questions. Run their checks, then run this cell again."
            )
        weak = [area for area, found in self._passed.items() if not all(found.values())]
        if weak:
            print("Brush up:")
        elif not left:
            print("Nothing to brush up: you are ready. Begin with lecture 01.")
        for area in weak:
            print(f"  {area}: {self._areas[area]}")


def _same(
    yours: Callable[..., Any], wrong: Callable[..., Any], cases: Sequence[Sequence[Any]], tolerance: float
) -> bool:
    """Whether two functions give the same in every case, where errors of one type are the same."""
    outcomes = zip(_outcomes(yours, cases), _outcomes(wrong, cases), strict=True)
    return all(
        got is expected
        if isinstance(got, type) or isinstance(expected, type)
        else not _difference(got, expected, tolerance)
        for got, expected in outcomes
    )


def _outcomes(function: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[Any]:
    """What a function gives in each case: its result, or the type of its error."""
    found: list[Any] = []
    for case in copy.deepcopy(cases):
        try:
            found.append(function(*case))
        except Exception as error:
            found.append(type(error))
    return found


def _found(profile: Any) -> str:
    """What the profiler found, if the function ran under it: a fault, or that no kernel was launched."""
    if profile is None:
        return ""
    return str(profile.findings[0]) if profile.findings else "" if profile.launches else "it launched no kernel"


def _shown(case: Sequence[Any]) -> str:
    """The arguments of a case, if they are numbers."""
    return f" {tuple(case)}" if all(isinstance(value, int | float) for value in case) else ""


def _difference(got: Any, expected: Any, tolerance: float) -> str:
    """What differs, in words; empty if nothing does. Tensors, numbers, and tuples or lists of these."""
    if isinstance(expected, tuple | list):
        if not isinstance(got, tuple | list) or len(got) != len(expected):
            return f"expected {len(expected)} results, got {got!r}"
        found = (_difference(*pair, tolerance) for pair in zip(got, expected, strict=True))
        return next((f"result {place}: {text}" for place, text in enumerate(found, start=1) if text), "")
    if got is None:
        return "it returned None: is a 'return' missing?"
    ours, right = (torch.as_tensor(x).detach().double().cpu() for x in (got, expected))
    if ours.shape != right.shape:
        return f"expected the shape {tuple(right.shape)}, got {tuple(ours.shape)}"
    scale = right[right.isfinite()].abs().max().item() if right.isfinite().any() else 1.0
    wrong = ~torch.isclose(ours, right, rtol=0, atol=tolerance * max(scale, 1e-30), equal_nan=True)
    if not wrong.any():
        return ""
    first = tuple(wrong.nonzero()[0].tolist())
    where = f"element {first[0] if len(first) == 1 else first}: " if first else ""
    return f"{where}expected {right[first].item():.6g}, got {ours[first].item():.6g}"
