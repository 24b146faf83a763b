"""The check of exercise 2.1: GeLU in its tanh form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from utils import runtime
from utils.checks.cases import Case, Cases
from utils.checks.core import Exercise, classic, draw_seed
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence, same_as
from utils.checks.hidden import Tolerance, tried
from utils.checks.huge import everywhere
from utils.checks.kernel import check_kernel
from utils.checks.launches import launched, tile_sizes, within
from utils.checks.speed import Speed
from utils.checks.tensors import upcast
from utils.checks.tiling import Tiling
from utils.checks.traffic import Budget

from . import shapes
from .rows import every


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


_FACTOR, _CUBIC = math.sqrt(2 / math.pi), 0.044715
#: How far off, as a share, a constant of too few digits may be: 0.04 for 0.044715.
_NEAR = 0.12


def _tanh_form(x: torch.Tensor, factor: float = _FACTOR, cubic: float = _CUBIC) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(factor * (x + cubic * x**3)))


#: Kind of the case with NaN and the largest numbers: a formula that is right for every finite x makes no NaN of them.
LARGEST = "NaN and the largest values"
#: Kind of the case whose values are small, so that little is allowed and a constant must be exact.
SMALL = "values up to 1.2"


def _constants(e: Evidence) -> tuple[float, float] | None:
    """sqrt(2/pi) and 0.044715 as the answer has them, read off its values; None if it is no such formula."""
    failed = [t for t in e.trials if t.failed and t.differences and t.differences[0].dtype == torch.float32]
    trial = max(failed, key=lambda t: t.args[0].numel(), default=None)
    if trial is None:
        return None
    x, found = upcast(trial.args[0]).cpu(), trial.differences[0]
    some = (x.abs() > 0.3) & (x.abs() < 2.5) & found.got.isfinite()
    x, got = x[some], found.got[some]
    if len(x) < 20 or not ((2 * got / x - 1).abs() < 1).all():
        return None
    u_over_x = torch.atanh(2 * got / x - 1) / x  # factor (1 + cubic x^2): a straight line over x^2
    lines = torch.stack([torch.ones_like(x), x * x], -1)
    factor, slope = torch.linalg.lstsq(lines, u_over_x[:, None]).solution[:, 0].tolist()
    fits = factor != 0 and bool((_tanh_form(x, factor, slope / factor) - got).abs().max() <= found.allowed)
    return (factor, slope / factor) if fits else None


def _near(factor: float, cubic: float) -> bool:
    return abs(factor / _FACTOR - 1) <= _NEAR and abs(cubic / _CUBIC - 1) <= _NEAR


def _wrong_constants(e: Evidence) -> str:
    found = _constants(e)
    if found is None or not _near(*found):
        return ""
    pairs = (("sqrt(2/pi) = 0.79788456", found[0], _FACTOR), ("0.044715", found[1], _CUBIC))
    return " and ".join(
        f"about {got:.6g} stands for {name}" for name, got, right in pairs if abs(got / right - 1) > 2e-6
    )


def _another_u(e: Evidence) -> str:
    """The formula as it is computed, where what stands in the tanh is another odd polynomial; '' if it is none."""
    found = None if e.difference.never_written.any() else _constants(e)
    if found is None or _near(*found):
        return ""
    got = _polynomial(found[0], found[0] * found[1])
    return f"this is 0.5 x (1 + tanh(u)) with u = {got}: expected u = {_polynomial(_FACTOR, _FACTOR * _CUBIC)}"


def _polynomial(linear: float, cubic: float) -> str:
    """``0.7979 x + 0.03568 x^3``, without a term that is next to nothing."""
    terms = [f"{number:.4g} {power}" for number, power in ((linear, "x"), (cubic, "x^3")) if abs(number) > 1e-6]
    return " + ".join(terms).replace("+ -", "- ")


_GELU_MISTAKES = (
    same_as(lambda x: _tanh_form(x) * 2, classic("the 0.5 in front is left out", 3)),
    same_as(
        lambda x: torch.nn.functional.gelu(x),
        classic("this is the exact form with erf, not the tanh form that the exercise asks for", 3),
    ),
    same_as(lambda x: x * torch.sigmoid(1.702 * x), classic("this is x sigmoid(1.702 x), another approximation", 3)),
    same_as(torch.nn.functional.silu, classic("this is SiLU, x sigmoid(x)", 3)),
    same_as(lambda x: _tanh_form(x, factor=2 / math.pi), classic("2/pi stands where its square root belongs", 3)),
    same_as(lambda x: _tanh_form(x, factor=1.0), classic("sqrt(2/pi) is left out", 3)),
    same_as(lambda x: _tanh_form(x, cubic=0.0), classic("the cubic term 0.044715 x^3 is left out", 3)),
    same_as(
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x + 0.044715 * x**3)),
        classic("sqrt(2/pi) multiplies x only: it belongs to the whole bracket", 3),
    ),
    same_as(
        lambda x: 0.5 * x * torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
        classic("the 1 + is left out", 3),
    ),
    same_as(
        lambda x: x * torch.sigmoid(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
        classic("0.5 (1 + tanh(u)) is sigmoid(2u): the 2 is left out", 3),
    ),
    Diagnosis(_wrong_constants, lambda e: classic(f"a constant is not exact: {_wrong_constants(e)}", 3)),
    Diagnosis(_another_u, _another_u),
    Diagnosis(
        lambda e: (
            e.only(lambda case: case.magnitude > 1 or case.kind == LARGEST)
            and bool((e.got.isnan() & ~e.right.isnan()).any())
        ),
        classic("large values give NaN: a tanh from exponentials becomes inf / inf", 5),
    ),
)


_SEVERAL_ROWS = Diagnosis(
    lambda e: e.only(lambda case: len(case.sizes) > 1 and (case.layout != "contiguous" or "batch" in case.sizes)),
    "only tensors of several rows fail (one without gaps is a single row here): look at how many programs there are, "
    "which row and which block of it each takes, and where that row starts in x and in out",
)


def _cases(seed: int, block: int) -> list[Case]:
    flat = Cases({"n": block}, layouts=("strided", "offset"), count=2, magnitude=30.0, zero=True)
    edges = [Case(kind, {"n": block // 2 + 3}, seed=seed) for kind in (SMALL, LARGEST)]
    edges += [
        *shapes.boundaries(seed, 1, block),
        Case("one past a block", {"row": 3, "col": block + 1}, layout="padded", seed=seed),
    ]
    return [*flat.draw(seed), *shapes.views(seed, block), *edges, *shapes.far(seed, block)]


def _further(seed: int) -> list[Case]:
    return [*shapes.further(seed), Case("no axes", {}, seed=seed), shapes.permuted(seed, 1100)]


def _inputs(case: Case) -> tuple[torch.Tensor, ...]:
    x = shapes.tensor(case, "x")
    if case.kind == SMALL:
        x.clamp_(-1.2, 1.2)
    if case.kind == LARGEST:
        most = torch.finfo(x.dtype).max
        x[:5] = torch.tensor([math.nan, most, -most, 1e20, -1e20])
    return (x,)


def _huge() -> tuple[torch.Tensor, ...]:
    """Rows with a gap between elements, which all lie in the same memory: 1030 x 2^21, more than 2^31 elements."""
    return (everywhere(1.0, 2060).contiguous()[::2].expand(2**21 + 3, 1030),)


def _long() -> tuple[torch.Tensor, ...]:
    """A contiguous tensor of more than 2^31 elements, whose memory nothing fills."""
    return (torch.empty(2**31 + 9, dtype=torch.float16, device=runtime.DEVICE),)


GELU = Exercise(
    "2.1",
    "GeLU",
    points=10,
    observe=tried("2.1", "gelu", ("",), lambda seed: [*_cases(seed, 1024), *_further(seed)], _inputs),
    # tanh from its exponentials or from a library: a few units of float32 beside 1
    tolerance=Tolerance(absolute=1e-6),
)


@GELU.checked_by
def check_gelu(gelu: Callable[[torch.Tensor], torch.Tensor], seed: int | None = None) -> None:
    """Exercise 2.1: GeLU in its tanh form, each element read once and written once.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    block = tile_sizes(gelu, (shapes.drawn(2**14),), "gelu_kernel", BLOCK=1024)["BLOCK"]
    check_kernel(
        GELU,
        gelu,
        _gelu,
        _cases(seed, block),
        _inputs,
        tiling=lambda trials: _rows_of_blocks(trials, "gelu_kernel"),
        inspections=[
            within(
                "gelu_kernel",
                lambda case, launch: Budget({"x_ptr": every(case)}, {"out_ptr": every(case)}, exact=True),
            )
        ],
        diagnose=(*_GELU_MISTAKES, shapes.FAR, shapes.ONE_STRIDE, _SEVERAL_ROWS, *shapes.MISTAKES),
        huge=(_huge, _long),
        speed=Speed(
            lambda: (shapes.drawn(2**26),),
            _gelu,
            0.75,
            "torch.nn.functional.gelu",
            bytes_moved=2**28,
            peer_bytes=2**28,
        ),
        seed=seed,
        notice="one read and one write: this kernel takes the time of a copy, whatever the formula",
    )


def _rows_of_blocks(trials: Sequence[CaseResult], kernel: str) -> Tiling | None:
    """Programs over the blocks of each row; a tensor without gaps is a single row."""
    case, tile = trials[0].case, launched(trials, kernel)
    if tile is None or case.layout in ("transposed", "expanded"):
        return None
    axes, block, in_line = list(case.sizes), tile["BLOCK"], tuple(tile["grid"][1:]) == (1, 1)
    if case.layout == "contiguous" and "batch" not in axes:
        flat = "*".join(axes)
        return Tiling(axes, tiles={flat: block}, grid=flat if in_line else ())
    return Tiling(axes, tiles={axes[-1]: block}, grid="*".join(axes) if in_line else ())
