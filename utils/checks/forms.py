"""The forms an answer can have (a count, a rate): what is wrong with a value, and when two agree."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass


class AnswerFormat:
    """What a question's answers look like; each subclass is one kind of answer."""

    def problem(self, value: object) -> str:
        """What is wrong with the type of ``value``, as the end of "... returned"; empty when it is an answer at all."""
        raise NotImplementedError

    def same(self, value: object, expected: object) -> bool:
        """Whether two values without a :meth:`problem` agree."""
        return value == expected

    def like(self, value: object, mistaken: object) -> bool:
        """Whether a value is what a mistake leads to; stricter than :meth:`same` where that is generous."""
        return self.same(value, mistaken)

    def show(self, value: object) -> str:
        """The value as a person reads it."""
        return repr(value)

    def show_both(self, got: object, expected: object) -> tuple[str, str]:
        """Two values that differ, as a person reads them and can tell them apart."""
        return self.show(got), self.show(expected)

    def scalar(self, value: object) -> float | None:
        """The value as one number for hints about ratios, or None."""
        return None


def _odd_type(value: object) -> str:
    """The complaints that all forms share: nothing returned, several things returned, a tensor, an array."""
    if value is None:
        return "None: is a `return` missing?"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} values, expected one number: {value!r}"
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, numbers.Number):
        kind = f"{type(value).__module__.split('.')[0]}.{type(value).__name__}"
        return f"a {kind}, expected a Python number: use the arguments as they are (a tensor rounds large counts)"
    if isinstance(value, bool):
        return f"the bool {value!r}, expected a number"
    return ""


@dataclass(frozen=True)
class Count(AnswerFormat):
    """An exact integer: operations, bytes, sectors, tiles. With ``or_none``, None is an answer too."""

    or_none: bool = False

    def problem(self, value: object) -> str:
        if value is None and self.or_none:
            return ""
        if problem := _odd_type(value):
            return problem
        if isinstance(value, int):
            return ""
        if isinstance(value, numbers.Integral):
            return f"the {type(value).__name__} {value}, expected a Python int, which cannot overflow: use int(...)"
        if isinstance(value, numbers.Real):
            return (
                f"the float {value!r}, expected an int: / gives a float, // does not (nor is every int above 2**53 one)"
            )
        return f"{value!r} of type {type(value).__name__}, expected an int"

    def show(self, value: object) -> str:
        return f"{value:,}" if isinstance(value, numbers.Integral) else repr(value)

    def scalar(self, value: object) -> float | None:
        return None if value is None else float(value)


@dataclass(frozen=True)
class Rate(AnswerFormat):
    """A real number (a rate, a time, a fraction) that may differ from the expected one by ``tolerance``, relatively."""

    tolerance: float = 1e-9

    def problem(self, value: object) -> str:
        if problem := _odd_type(value):
            return problem
        if not isinstance(value, numbers.Real):
            return f"{value!r} of type {type(value).__name__}, expected a number"
        return "" if math.isfinite(value) else f"{value!r}, expected a finite number"

    def same(self, value: object, expected: object) -> bool:
        return math.isclose(value, expected, rel_tol=self.tolerance, abs_tol=0.0)

    def show(self, value: object) -> str:
        return f"{value:.6g}" if isinstance(value, numbers.Real) and not isinstance(value, bool) else repr(value)

    def show_both(self, got: object, expected: object) -> tuple[str, str]:
        both = self.show(got), self.show(expected)
        if both[0] == both[1] and got != expected:  # as many digits as it takes
            both = next(two for n in (9, 12, 17) if len(set(two := (f"{got:.{n}g}", f"{expected:.{n}g}"))) == 2)
        return both

    def scalar(self, value: object) -> float | None:
        return float(value)


@dataclass(frozen=True)
class FactorTolerance(Rate):
    """A positive number that may be off by ``factor`` in either direction: a prediction of a measurement."""

    factor: float = 2.0

    def problem(self, value: object) -> str:
        return super().problem(value) or ("" if value > 0 else f"{value!r}, expected a positive number")

    def same(self, value: object, expected: object) -> bool:
        return 1 / self.factor <= value / expected <= self.factor

    def like(self, value: object, mistaken: object) -> bool:
        return super().same(value, mistaken)
