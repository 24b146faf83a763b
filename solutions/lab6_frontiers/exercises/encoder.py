"""The check of exercise 6.1: the codes of e4m3 and e2m1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from utils import runtime
from utils.checks.cases import Case
from utils.checks.core import Exercise, classic, draw_seed, fail, generator
from utils.checks.diagnoses import Diagnosis, Evidence
from utils.checks.forbid import Rules
from utils.checks.forbidden_modules import calls_into
from utils.checks.hidden import Tolerance, tried
from utils.checks.kernel import check_kernel

from .formats import FORMATS, Encoding, encoded, encoded_by_exponent, least_normal, numbers, sign_bit

Tensor = torch.Tensor
Encode = Callable[[Tensor, str], Tensor]

#: What the numbers of a case try, as its kind begins.
EXACT, TIES, NEAR, SUBNORMAL = "numbers of the format", "ties", "next to ties", "below the least normal number"
BEYOND, ZEROS, NOT_A_NUMBER, ALL = "beyond the largest number", "zeros", "NaN", "all magnitudes"
#: Elements that one tensor may have for each number of ``x``; and at least.
MOST, LEAST = 8, 4096


# ---- cases
def _cases(seed: int) -> list[Case]:
    draw = generator(seed)
    cases = []
    for format in FORMATS:

        def case(what: str, dtype: torch.dtype = torch.float32, layout: str = "contiguous", **sizes: int) -> Case:
            options = {"format": format}  # noqa: B023 (called within this turn)
            kind = f"{what} in {format}"  # noqa: B023
            return Case(kind, sizes or {"n": len(_special(what, format))}, dtype, layout, options, seed)  # noqa: B023

        row, col = draw.randint(3, 9), draw.randint(20, 60)
        kinds = [EXACT, ALL, TIES, NEAR, SUBNORMAL, BEYOND, ZEROS, *([NOT_A_NUMBER] if format == "e4m3" else [])]
        cases += [case(kind, row=row, col=col) if kind == ALL else case(kind) for kind in kinds]
        cases.append(case("one number", n=1))
        cases.append(case("no number", n=0))
        cases.append(case("a slice", torch.bfloat16, "padded", row=col, col=row))
        cases.append(case("three axes", torch.float16, "transposed", a=2, row=row, col=col))
    return cases


def _special(what: str, format: str) -> Tensor:
    """The numbers of a case that tries something in particular, float32."""
    values = numbers(format)
    middle = ((values[:-1] + values[1:]) / 2).float()
    least, largest = least_normal(format), values[-1].item()
    tiny = [least * share for share in (0.999, 0.6, 0.3, 0.07, 0.051, 0.01, 1e-3, 1e-20)]
    found = {
        EXACT: values.float(),
        TIES: middle,
        NEAR: torch.cat([middle.nextafter(torch.tensor(end)) for end in (math.inf, 0.0)]),
        SUBNORMAL: torch.tensor([*tiny, 1e-45]),
        BEYOND: torch.tensor([largest * (1 + 2**-20), largest * 1.03, largest * 1.25, 3 * largest, 3e38, math.inf]),
        ZEROS: torch.tensor([0.0]),
        NOT_A_NUMBER: torch.tensor([1.0, math.nan, -1.0]),
    }[what]
    return found if what == NOT_A_NUMBER else torch.cat([found, -found])  # a NaN has the sign of x, as any number


def _inputs(case: Case) -> tuple[Tensor, ...]:
    what = case.kind.rpartition(" in ")[0]
    if what in (EXACT, TIES, NEAR, SUBNORMAL, BEYOND, ZEROS, NOT_A_NUMBER):
        return (_special(what, case.options["format"]).to(runtime.DEVICE),)
    x = case.tensor("x", *case.sizes)
    spread = case.tensor("spread", *case.sizes, dtype=torch.float32, layout="contiguous", scale=2.0)
    return (x.mul_(spread.exp().clamp(max=100.0).to(x.dtype)),)


# ---- mistakes
def _like(number: int, cause: str, **mistakes: object) -> Diagnosis:
    """A rule that holds when the codes are those of an encoding with these mistakes."""

    return Diagnosis(
        lambda e: _are(e, Encoding(**mistakes)(e.trial.args[0], **e.case.options)),
        lambda e: _with_number(e, classic(cause, number)),
    )


def _exponent(off: int, how: str) -> Diagnosis:
    """A rule that holds when the exponent is off in the gap and in the number of smaller codes alike."""
    cause = f"the exponent is one too {how}, in the gap and in the code: frexp takes the significand from 1/2 to 1"

    def holds(e: Evidence) -> bool:
        found = (encoded_by_exponent(e.trial.args[0], off=off, least_first=k, **e.case.options) for k in (True, False))
        return any(_are(e, codes) for codes in found)

    return Diagnosis(holds, lambda e: _with_number(e, classic(cause, 4)))


def _are(e: Evidence, codes: Tensor) -> bool:
    """Whether the answer is these codes, which are not the right ones."""
    wrong = codes.double()
    return e.got.shape == wrong.shape and not torch.equal(wrong, e.right) and torch.equal(e.got, wrong)


def _rounded_before(e: Evidence) -> bool:
    """Whether the answer is the codes of what is left of ``x`` in 16 bits."""
    x = e.trial.args[0]
    return any(_are(e, encoded(x.to(dtype), **e.case.options)) for dtype in (torch.float16, torch.bfloat16))


def _magnitudes(e: Evidence) -> Tensor:
    """Those of the numbers that got a wrong code."""
    return e.trial.args[0].abs().cpu()[e.bad]


def _in(number: int, cause: str, *kinds: str) -> Diagnosis:
    """A rule that holds when only cases of these kinds go wrong."""
    return Diagnosis(
        lambda e: e.only(lambda case: case.kind.startswith(kinds)),
        lambda e: _with_number(e, classic(cause, number)),
    )


def _with_number(e: Evidence, cause: str) -> str:
    """The cause, and which number became which."""
    format, first = e.case.options["format"], e.difference.first
    x = e.trial.args[0][first].item()
    right, got = (_read(int(side[first]), format) for side in (e.right, e.got))
    return f"{cause}; x = {x:.7g} became {got}, expected {right}"


def _read(code: int, format: str) -> str:
    """``0x2a (5.0)``: a code and what it stands for."""
    sign = sign_bit(format)
    if not 0 <= code < 2 * sign:
        return f"{code} (no code of {format})"
    values, below = numbers(format), code % sign
    value = f"{'-' if code >= sign else ''}{values[below].item():g}" if below < len(values) else "NaN"
    return f"{code:#04x} ({value})"


_SUBNORMAL_CAUSE = "below the least normal number the gap stays as it is there: the exponent is min_exponent at least"
_CARRY = "a fraction that is rounded up to a whole must raise the exponent"
_SATURATE = "numbers beyond the largest one saturate, infinity too: clamp the magnitude first"
_TWICE = "the number is rounded twice, to 16 bits before it is encoded: keep float32 until the one rounding"
_MISTAKES = (
    _like(1, "ties go away from zero (floor(gaps + 0.5)): of two equally near numbers the even code is right",
          ties="up"),
    _like(1, "ties go towards zero: of two equally near numbers the even code is right", ties="down"),
    _like(1, "fractions are cut off, not rounded to the nearest", truncated=True),
    _like(2, "all numbers below the least normal one become zero: they are multiples of one gap", flushed=True),
    _like(3, _CARRY, carried="never"),
    _like(3, _CARRY, carried="below"),
    _like(4, "the exponent field is one too large", shifted=1),
    _like(4, "the exponent field is one too small", shifted=-1),
    _exponent(1, "large"),
    _exponent(-1, "small"),
    _like(5, "minus zero loses its sign: x < 0 is false for it, torch.signbit(x) is true", zero_sign=False),
    _like(5, "negative numbers are in two's complement: a float has a sign bit and a magnitude", twos_complement=True),
    _like(5, "the sign stands in bit 7: a code of 4 bits has it in bit 3", sign_at=7),
    _in(6, _SATURATE, BEYOND),
    _in(7, "NaN has a code of its own: the sign of x, then ones in all other bits", NOT_A_NUMBER),
    _in(2, "zero is no power of two: frexp gives it the exponent 0, and its code must still be 0", ZEROS, "one number"),
    _in(2, "zero is no power of two, and numbers below the least normal one have its gap", ZEROS, EXACT, SUBNORMAL),
    _in(2, _SUBNORMAL_CAUSE, SUBNORMAL),
    _in(1, "of two equally near numbers the even code is right", TIES),
    Diagnosis(
        lambda e: bool((_magnitudes(e) > numbers(e.case.options["format"])[-1]).all()),
        lambda e: _with_number(e, classic(_SATURATE, 6)),
    ),
    Diagnosis(_rounded_before, lambda e: _with_number(e, classic(_TWICE, 8))),
    _in(8, _TWICE, NEAR),
    Diagnosis(
        lambda e: bool((_magnitudes(e) < least_normal(e.case.options["format"])).all()),
        lambda e: _with_number(e, classic(_SUBNORMAL_CAUSE, 2)),
    ),
)  # fmt: skip


# ---- shortcuts
class _Float8(TorchDispatchMode):
    """Notes whether an operator makes a tensor of 8-bit floats."""

    found = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it would import it: two seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.found |= isinstance(result, Tensor) and result.dtype.is_floating_point and result.dtype.itemsize == 1
        return result


@contextmanager
def _own_work(exercise: Exercise, seed: int) -> Iterator[None]:
    """Refuse what encodes already: PyTorch's 8-bit dtypes, and the course's own encoder.

    Raises:
        CheckFailed: the block uses one.
    """
    called: list[str] = []
    properties = {"bits", "is_integer", "min_exponent", "element_format"}
    with (
        _Float8() as float8,
        calls_into({"utils.formats.elements": properties, "utils.formats.quantized": set()}, called),
    ):
        yield
    if float8.found or called:
        what = f"the course's {called[0]}" if called else "a PyTorch dtype of 8-bit floats"
        cause = "compute the codes yourself, from float32 and integers"
        fail(exercise, f"encode uses {what}", cause=cause, reproduce=exercise.rerun(seed))


ENCODER = Exercise(
    "6.1",
    "codes of 8 and 4 bits",
    points=10,
    observe=tried("6.1", "encode", ("",), _cases, _inputs),
    tolerance=Tolerance(0.0),
)


@ENCODER.checked_by
def check_encoder(encode: Encode, seed: int | None = None) -> None:
    """Exercise 6.1: numbers to codes of e4m3 and e2m1, rounded to nearest, ties to even.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    with _own_work(ENCODER, seed):
        for format in FORMATS:
            encode(torch.linspace(-3.0, 3.0, 7, device=runtime.DEVICE), format)
    check_kernel(
        ENCODER,
        encode,
        encoded,
        _cases(seed),
        _inputs,
        outputs=("codes",),
        forbidden=Rules(
            groups=("NumPy", "Python"),
            kernel=False,
            largest=lambda case: max(LEAST, MOST * case.numel(*case.sizes)),
            place=9,
        ),
        diagnose=_MISTAKES,
        seed=seed,
        notice="the same arithmetic serves every format: its widths and its bias are all that differs",
    )
