"""One claim: a figure held against what it should be, and the line that shows it."""

from __future__ import annotations

import ast
import html
import math
import re
import reprlib
import sys
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from utils.units import PREFIXED, number, quantity, scale

MIME = "application/vnd.making-llms-fast.claim+json"
KINDS = ("derive", "measure", "state")
#: A float that should equal another exactly may still differ by rounding, which depends on the machine's libm.
ROUNDING = 1e-12
#: Significant digits in the stored copy of a float: ten, but six where a range or a tolerance of at least 0.01 % leaves
#: room, since two processors' exp() may disagree in those behind.
STORED_DIGITS = 10
STORED_DIGITS_WITH_ROOM = 6
ROOM = 1e-4

_ID = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")
Value = float | int | bool | str
Expected = Value | tuple[float, float]
T = TypeVar("T")


class ClaimError(AssertionError):
    """A figure that the course states is not what its cell computes."""


class LedgerError(ValueError):
    """The stored outputs of the notebooks contradict each other or cannot be read."""


@dataclass(frozen=True)
class Claim:
    """One figure: what was computed, what it was held against, and where that comes from.

    ``expected`` is a value, or ``(low, high)`` for a range. ``tolerance`` is relative. ``notebook`` and
    ``cell`` (counted from 0 over all cells) say where it was made; they are filled in by :func:`ledger`.
    """

    id: str
    computed: Value
    expected: Expected
    unit: str = ""
    source: str = ""
    tolerance: float = 0.0
    kind: str = "derive"
    statement: str = ""
    notebook: str = field(default="", compare=False)
    cell: int = field(default=-1, compare=False)

    @property
    def holds(self) -> bool:
        """Whether the computed value is within tolerance of the expected one, or of the expected range."""
        if isinstance(self.computed, bool | str):
            return self.computed == self.expected
        low, high = self.expected if isinstance(self.expected, tuple) else (self.expected, self.expected)
        exact = all(isinstance(v, Integral) for v in (self.computed, low, high))
        slack = self.tolerance if exact else max(self.tolerance, ROUNDING)
        return low - slack * abs(low) <= self.computed <= high + slack * abs(high)

    @property
    def computed_text(self) -> str:
        """The computed value with its unit, as people read it: the stored copy's digits, here and in the ledger."""
        return _show(self._stored_computed, self.unit)

    @property
    def expected_text(self) -> str:
        """The expected value or range with its unit, without the tolerance."""
        if not isinstance(self.expected, tuple):
            return _show(self.expected, self.unit)
        low, high = self.expected
        factor, unit = scale(high, self.unit) if self.unit in PREFIXED else (1, self.unit)
        bounds = (number(bound if factor == 1 else bound / factor) for bound in (low, high))
        return f"{' to '.join(bounds)} {unit}".rstrip()

    @property
    def tolerance_text(self) -> str:
        """ "exact", or the relative tolerance as a percentage."""
        return f"± {number(100 * self.tolerance)} %" if self.tolerance else "exact"

    def line(self) -> str:
        """The claim in one line of plain text, the same characters on every machine."""
        held = self.expected_text + (f" {self.tolerance_text}" if self.tolerance else "")
        parts = [f"{'✓' if self.holds else '✗'} {self.statement or self.id}: {self.computed_text}", f"expected {held}"]
        parts += [text for text in (self.source, self.statement and self.id) if text]
        return " · ".join(parts)

    def to_html(self) -> str:
        """One line for a notebook page, which opens to what is expected and where it is from.

        It inherits the page's colours, so that it reads on light and dark.
        """
        held = self.expected_text + (f" {self.tolerance_text}" if self.tolerance else "")
        small = " · ".join(html.escape(text) for text in (f"expected {held}", self.source, self.id) if text)
        sign, colour = ("✓", "#009E73") if self.holds else ("✗", "#E69F00")
        return (
            f'<details style="border-left:3px solid {colour};padding:1px 0 1px 10px;margin:2px 0;line-height:1.4">'
            f'<summary style="cursor:pointer;list-style:none"><span style="color:{colour};font-weight:bold">{sign}'
            f"</span> {html.escape(self.statement or self.id)}: <strong>{html.escape(self.computed_text)}</strong>"
            f'</summary><small style="opacity:.75">{small}</small></details>'
        )

    def to_json(self) -> dict[str, Any]:
        """What is stored in the notebook's output; floats keep as many digits as two machines agree in."""
        stored = {k: v for k, v in asdict(self).items() if k not in ("notebook", "cell")}
        expected = self.expected
        stored["computed"] = self._stored_computed
        stored["expected"] = [_rounded(v) for v in expected] if isinstance(expected, tuple) else _rounded(expected)
        return stored

    @property
    def _stored_computed(self) -> Value:
        has_room = isinstance(self.expected, tuple) or self.tolerance >= ROOM
        return _rounded(self.computed, STORED_DIGITS_WITH_ROOM if has_room else STORED_DIGITS)

    @classmethod
    def from_json(cls, stored: dict[str, Any], notebook: str = "", cell: int = -1) -> Claim:
        """Read back what :meth:`to_json` stored; LedgerError when a field is missing, unknown or malformed."""
        names = {f.name for f in fields(cls)} - {"notebook", "cell"}
        if not isinstance(stored, dict) or set(stored) != names:
            raise LedgerError(f"{notebook}, cell {cell}: not a stored claim: {str(stored)[:120]!r}")
        expected = stored["expected"]
        values = stored | {"expected": tuple(expected) if isinstance(expected, list) else expected}
        read = cls(**values, notebook=notebook, cell=cell)
        try:
            _checked_expected(read.expected, _checked_value("computed", read.computed, _checked_id(read.id)), read.id)
            _checked_tolerance(read.tolerance, read.id)
            _check_types_agree(read)
            for name in ("unit", "source", "statement"):
                _checked_text(name, getattr(read, name), read.id)
            _checked_kind(read.kind, read.source, read.id)
        except (TypeError, ValueError) as error:
            raise LedgerError(f"{notebook}, cell {cell}: not a stored claim: {error}") from error
        return read


def claim(
    id: str,
    computed: T,
    expected: Expected | None = None,
    *,
    unit: str = "",
    source: str = "",
    tolerance: float = 0.0,
    kind: str = "derive",
    statement: str = "",
) -> T:
    """Assert that ``computed`` is what the course says it is, show it in one line, and return it unchanged.

    Args:
        id: dotted lower-case name, unique in the course: ``"roofline.ridge.h100"``.
        computed: a number (also a NumPy or torch scalar), a bool or a string, the same on every machine.
        expected: the value, or ``(low, high)``. None is allowed for a bool only and means True.
        unit: SI unit of both; "B/s", "FLOP/s", "s" and "B" are printed with a prefix.
        source: where ``expected`` comes from; required when ``kind`` is "measure" or "state".
        tolerance: relative to ``expected``: ``|computed - expected| <= tolerance * |expected|``. With 0 integers
            must be equal and floats agree up to rounding (1e-12).
        kind: "derive" (computed or counted), "measure" (a recorded measurement) or "state" (published by others).
        statement: the claim in a few words, shown instead of the id.

    Raises:
        ClaimError: (an AssertionError) the value is outside the tolerance; names id, both values, tolerance and source.
        TypeError, ValueError: the claim itself is malformed.
    """
    made = Claim(
        id=_checked_id(id),
        computed=(value := _checked_value("computed", computed, id)),
        expected=_checked_expected(expected, value, id),
        unit=_checked_text("unit", unit, id),
        source=_checked_text("source", source, id),
        tolerance=_checked_tolerance(tolerance, id),
        kind=_checked_kind(kind, source, id),
        statement=_checked_text("statement", statement, id),
    )
    _check_types_agree(made)
    if not made.holds:
        difference = ""
        if not isinstance(made.computed, bool | str) and not isinstance(made.expected, tuple) and made.expected:
            difference = f" (off by {number(100 * abs(made.computed - made.expected) / abs(made.expected), 3)} %)"
        raise ClaimError(
            f"claim {id!r} does not hold: computed {made.computed_text}, expected {made.expected_text}{difference}; "
            f"tolerance {made.tolerance_text}; source: {made.source or 'none given'}"
        )
    _display(made)
    return computed


# ---- what a claim may be -------------------------------------------------------------------------------------------


def _checked_id(id: Any) -> str:
    if not isinstance(id, str):
        raise TypeError(f"a claim's id must be a string, got {id!r}")
    if not _ID.fullmatch(id):
        raise ValueError(f'a claim\'s id is lower-case words joined by dots, such as "roofline.ridge.h100", got {id!r}')
    return id


def _checked_text(name: str, text: Any, id: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"claim {id!r}: {name} must be a string, got {text!r}")
    if "\n" in text:
        raise ValueError(f"claim {id!r}: {name} must fit on one line, got {text!r}")
    return text.strip()


def _checked_value(name: str, value: Any, id: str) -> Value:
    if hasattr(value, "item") and getattr(value, "size", 1) != 0 and not isinstance(value, bool | int | float):
        try:
            value = value.item()  # a NumPy or torch scalar
        except (RuntimeError, ValueError):
            raise TypeError(
                f"claim {id!r}: {name} must be a single number, got {type(value).__name__} of many"
            ) from None
    if isinstance(value, bool | str):
        return value
    if not isinstance(value, Real):
        raise TypeError(f"claim {id!r}: {name} must be a number, a bool or a string, got {value!r}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        finite = False
    if not finite:
        raise ValueError(f"claim {id!r}: {name} must be finite and fit a float, got {reprlib.repr(value)}")
    return int(value) if isinstance(value, Integral) else float(value)


def _checked_expected(expected: Any, computed: Value, id: str) -> Expected:
    if expected is None:
        if isinstance(computed, bool):
            return True
        raise ValueError(f"claim {id!r}: say what {computed!r} is held against: a value or a (low, high) range")
    if not isinstance(expected, tuple):
        return _checked_value("expected", expected, id)
    if len(expected) != 2:
        raise ValueError(f"claim {id!r}: a range is (low, high), got {expected!r}")
    low, high = (_checked_value("expected", bound, id) for bound in expected)
    if any(isinstance(bound, bool | str) for bound in (low, high)) or low > high:
        raise ValueError(f"claim {id!r}: a range is (low, high) with low <= high, got {expected!r}")
    return low, high


def _check_types_agree(made: Claim) -> None:
    family = [type(v) if isinstance(v, bool | str) else Real for v in (made.computed, made.expected)]
    if family[0] is not family[1]:
        raise TypeError(f"claim {made.id!r}: computed {made.computed!r} cannot be held against {made.expected!r}")
    if family[0] is not Real and made.tolerance:
        raise ValueError(f"claim {made.id!r}: a tolerance needs numbers, got {made.computed!r}")


def _checked_tolerance(tolerance: Any, id: str) -> float:
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real):
        raise TypeError(f"claim {id!r}: tolerance must be a number, got {tolerance!r}")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"claim {id!r}: tolerance is relative and not negative, such as 0.01, got {tolerance!r}")
    return float(tolerance)


def _checked_kind(kind: Any, source: Any, id: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"claim {id!r}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind != "derive" and not (isinstance(source, str) and source.strip()):
        raise ValueError(f"claim {id!r}: a claim of kind {kind!r} needs a source, got {source!r}")
    return kind


# ---- showing -------------------------------------------------------------------------------------------------------


def _show(value: Value, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return f"{value} {unit}".rstrip()
    return quantity(value, unit)


def _rounded(value: Value, digits: int = STORED_DIGITS) -> Value:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value


def _shell() -> Any:
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()


def _display(made: Claim) -> None:
    if _shell() is None:
        print(made.line())
        return
    from IPython.display import display

    display({"text/plain": made.line(), "text/html": made.to_html(), MIME: made.to_json()}, raw=True)


def is_claim(node: ast.AST) -> bool:
    """Whether a syntax node is a call of ``claim``, by its name or as an attribute of a module."""
    return isinstance(node, ast.Call) and "claim" in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))


class _QuietClaims(ast.NodeTransformer):
    """A cell that ends in ``claim(...)`` shows the claim's line, and not once more the value that it returns."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        last = node.body[-1] if node.body else None
        if isinstance(last, ast.Expr) and is_claim(last.value):
            node.body[-1] = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
            ast.fix_missing_locations(node)
        return node


def keep_quiet() -> None:
    """Inside a notebook, stop a closing ``claim(...)`` from being echoed; does nothing elsewhere, or twice."""
    shell = _shell()
    if shell is not None and not any(type(t).__name__ == _QuietClaims.__name__ for t in shell.ast_transformers):
        shell.ast_transformers.append(_QuietClaims())
