"""Cells of a lecture that a reader writes in: a function of theirs held against a reference, in one line.

Such a cell (tagged ``write-here``) defines a function that raises ``NotImplementedError``; the cell below it compares,
and the folded text after that holds an answer. A lecture works with the function unwritten, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    name, number = yours.__name__, 0
    for number, case in enumerate(cases, start=1):
        try:
            with profiler() as profile:
                got = yours(*case)
            problem = _found(profile) or _difference(got, reference(*case), tolerance)
        except NotImplementedError:
            print(f"{name}: not written yet")
            return
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            print(f"✗ {name}, case {number}{_shown(case)}: {problem}")
            return
    print(f"✓ {name}: all {number} cases agree")


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
