"""The check of exercise 2.1: GeLU in its tanh form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from utils.checks.cases import Case, Cases
from utils.checks.core import Exercise, classic, draw_seed
from utils.checks.diagnoses import CaseResult, Diagnosis, same_as
from utils.checks.hidden import Tolerance, tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import launched, tile_sizes, within
from utils.checks.speed import Speed
from utils.checks.tiling import Tiling
from utils.checks.traffic import Budget

from . import shapes
from .rows import every


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _tanh_form(x: torch.Tensor, factor: float = math.sqrt(2 / math.pi), cubic: float = 0.044715) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(factor * (x + cubic * x**3)))


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
    Diagnosis(
        lambda e: e.only(lambda case: case.magnitude > 1) and bool(e.got.isnan().any()),
        classic("large values give NaN: a tanh from exponentials becomes inf / inf", 5),
    ),
)


def _cases(seed: int, block: int) -> list[Case]:
    flat = Cases({"n": block}, layouts=("strided", "offset"), count=2, magnitude=30.0, zero=True)
    return [*flat.draw(seed), *shapes.views(seed, block), *shapes.far(seed, block)]


def _further(seed: int) -> list[Case]:
    return [*shapes.further(seed), Case("no axes", {}, seed=seed), shapes.permuted(seed, 1100)]


def _inputs(case: Case) -> tuple[torch.Tensor, ...]:
    return (shapes.tensor(case, "x"),)


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
        diagnose=(*_GELU_MISTAKES, *shapes.MISTAKES),
        speed=Speed(lambda: (shapes.drawn(2**26),), _gelu, 0.9, "torch.nn.functional.gelu", bytes_moved=2**28),
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
