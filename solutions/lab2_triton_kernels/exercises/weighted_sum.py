"""The checks of exercises 2.3 and 2.4: the weighted sum of each row, and its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from utils import runtime
from utils.checks.cases import Case
from utils.checks.core import Exercise, classic, draw_seed
from utils.checks.diagnoses import Diagnosis, Evidence, same_as
from utils.checks.hidden import Observation, Tolerance, tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import cdiv, launched, no_atomics, tile_sizes, within
from utils.checks.speed import Speed
from utils.checks.tiling import Tiling
from utils.checks.traffic import Budget, Passes

from . import shapes, splits
from .rows import every, num_rows, rows_tiling, sums_tiling

FORWARD = "weighted_sum_kernel"
DX, DWEIGHT = "weighted_sum_dx_kernel", "weighted_sum_dweight_kernel"
WeightedSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _weighted_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Summed in float32 and rounded once, in whatever dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (weight.to(wide) * x.to(wide)).sum(-1).to(x.dtype)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2)


# ---- 2.3


def _block_sums(e: Evidence) -> list[torch.Tensor]:
    """What each block of columns adds to the rows' sums, in float64; with the weight of its own columns."""
    block = launched([e.trial, *e.trials], FORWARD)["BLOCK"]
    x, weight = e.args64
    starts = range(0, x.shape[-1], block)
    return [(weight[s : s + block] * x[..., s : s + block]).sum(-1) for s in starts]


def _is_ragged(e: Evidence) -> bool:
    """Whether several blocks of columns make up a row, the last one cut short."""
    sizes, columns = launched([e.trial, *e.trials], FORWARD), e.case.sizes["col"]
    return columns > sizes["BLOCK"] and columns % sizes["BLOCK"] != 0


def _first_weights(e: Evidence) -> torch.Tensor:
    block = launched([e.trial, *e.trials], FORWARD)["BLOCK"]
    x, weight = e.args64
    return (weight[torch.arange(x.shape[-1]) % block] * x).sum(-1)


_FORWARD_MISTAKES = (
    *shapes.MISTAKES,
    shapes.too_inaccurate("multiply and add in float32, and round once when storing", 4),
    same_as(
        lambda x, weight: (weight * x).sum(tuple(range(x.dim() - 1))),
        classic("this sums the rows of each column: the sum runs along the last axis", 1),
    ),
    Diagnosis(
        lambda e: e.findings("races") and not e.difference.never_written.any(),
        lambda e: classic(
            f"programs write the same element ({e.findings('races')[0]}): the sum of a row belongs to one", 1
        ),
    ),
    same_as(lambda x, weight: x.sum(-1), classic("the weight is left out", 2)),
    same_as(lambda x, weight: (weight * weight * x).sum(-1), classic("the weight is applied twice", 2)),
    same_as(lambda x, weight: weight[0] * x.sum(-1), classic("every column gets the first weight", 2)),
    same_as(lambda x, weight: (weight * x).mean(-1), classic("this is the mean of a row, not its sum", 2)),
    Diagnosis(lambda e: e.close(_first_weights(e)), classic("each block of columns gets the first block's weights", 2)),
    Diagnosis(
        lambda e: e.close(_block_sums(e)[-1]),
        classic("only the last block of columns is summed: each block must be added to the total", 3),
    ),
    Diagnosis(
        lambda e: _is_ragged(e) and e.close(sum(_block_sums(e)[:-1])),
        classic("the last, ragged block of columns is left out: the loop must go up to `columns`", 3),
    ),
    Diagnosis(
        lambda e: e.close(_block_sums(e)[0]),
        classic("only the first block of columns is summed: the loop ends too early, or does not move on", 3),
    ),
)


def _inputs(case: Case) -> Sequence[torch.Tensor]:
    x, weight = shapes.tensor(case, "x"), shapes.vector(case, "weight")
    if case.kind == "drifting":  # partial sums grow to hundreds of times the result, and beyond float16
        half = x.shape[-1] // 2
        x[:, :half] += 20
        x[:, half:] -= 20
        weight += 20
    return x, weight


def _drifting(seed: int, columns: int) -> list[Case]:
    return [Case("drifting", {"row": 2, "col": columns}, dtype, seed=seed) for dtype in (torch.float16, torch.bfloat16)]


WEIGHTED_SUM = Exercise(
    "2.3",
    "weighted sum",
    points=10,
    observe=tried(
        "2.3",
        "weighted_sum",
        ("",),
        lambda seed: [*shapes.matrices(seed, 8, 256), *shapes.further(seed), *_drifting(seed, 2 * 1300)],
        _inputs,
    ),
    tolerance=Tolerance(absolute=2e-5),
)


@WEIGHTED_SUM.checked_by
def check_weighted_sum(weighted_sum: WeightedSum, seed: int | None = None) -> None:
    """Exercise 2.3: ``(weight * x).sum(-1)``, x read once and the product never written.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    cases = [*_cases(weighted_sum, seed), *_drifting(seed, runtime.pick(cpu=10_000, gpu=50_000))]
    check_kernel(
        WEIGHTED_SUM,
        weighted_sum,
        _weighted_sum,
        cases,
        _inputs,
        tiling=_sum_tiles,
        inspections=[within(FORWARD, _forward_budget)],
        diagnose=_FORWARD_MISTAKES,
        speed=Speed(
            lambda: (shapes.drawn(2**14, 2**13), shapes.drawn(2**13)),
            lambda x, weight: (weight * x).sum(-1),
            1.5,
            "PyTorch's product and sum",
            bytes_moved=2**28,
        ),
        seed=seed,
        notice="one pass: the product of x and weight never leaves the chip",
    )


def _cases(weighted_sum: WeightedSum, seed: int) -> list[Case]:
    tile = tile_sizes(weighted_sum, (shapes.drawn(2, 700), shapes.drawn(700)), FORWARD, ROWS=4, BLOCK=256)
    return shapes.matrices(seed, 2 * tile["ROWS"], tile["BLOCK"])


def _sum_tiles(trials: Sequence[Any]) -> Tiling | None:
    """Each program sums ``ROWS`` whole rows."""
    found = launched(trials, FORWARD)
    if found is None:
        return None
    *leading, col = trials[0].case.sizes
    rows, in_line = "*".join(leading), tuple(found["grid"][1:]) == (1, 1)
    return Tiling(leading, tiles={rows: found["ROWS"]}, grid=rows if in_line else (), loops={col: found["BLOCK"]})


def _forward_budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    weight = Passes("col", times=cdiv(num_rows(case), launch["ROWS"]))
    out = Passes(*list(case.sizes)[:-1])
    return Budget({"x_ptr": every(case), "weight_ptr": weight}, {"out_ptr": out}, exact=True)


# ---- 2.4


def _gradients(wrong: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A wrong gradient as a formula of (x, weight, dout), where dout is spread over columns."""
    return lambda x, weight, dout: wrong(x, weight, dout[..., None])


_BACKWARD_MISTAKES = (
    Diagnosis(lambda e: e.difference.name == "out", "the forward pass is wrong already: finish exercise 2.3 first"),
    same_as(_gradients(lambda x, w, d: w.expand_as(x).clone()), classic("dx lacks the factor dout", 1)),
    same_as(_gradients(lambda x, w, d: d.expand_as(x).clone()), classic("dx lacks the factor weight", 1)),
    same_as(_gradients(lambda x, w, d: d * x), classic("dx holds dout x: the derivative by x is the weight", 1)),
    same_as(
        _gradients(lambda x, w, d: (d * w[: x.shape[-2], None]).expand_as(x).clone()),
        classic("dx takes one weight for each row: the weight has one number for each column", 1),
    ),
    same_as(_gradients(lambda x, w, d: _flat(x).sum(0)), classic("dweight lacks the factor dout", 2)),
    same_as(_gradients(lambda x, w, d: d.sum().expand_as(w).clone()), classic("dweight lacks the factor x", 2)),
    same_as(
        _gradients(lambda x, w, d: _flat(d * x * w).sum(0)),
        classic("dweight holds the weight: the derivative by the weight is x", 2),
    ),
    same_as(_gradients(lambda x, w, d: _flat(d * x).mean(0)), classic("dweight is a mean over rows, not their sum", 2)),
    *splits.mistakes(DWEIGHT, "dweight", lambda e: _flat(e.args64[2][..., None] * e.args64[0]), sharing=3, adding=4),
    *shapes.MISTAKES,
)


def _backward_inputs(case: Case) -> Sequence[torch.Tensor]:
    vectors = (
        shapes.vector(case, "weight"),
        case.tensor("dout", *list(case.sizes)[:-1], layout="contiguous"),
    )
    return shapes.tensor(case, "x"), *vectors


def _observe_gradients(package: ModuleType, seed: int) -> dict[str, Observation]:
    observed = tried(
        "2.4",
        "weighted_sum",
        ("out", "dx", "dweight"),
        lambda drawn: [*shapes.matrices(drawn, 8, 256), *shapes.further(drawn)],
        _backward_inputs,
        lambda lab: shapes.with_gradient(lab.weighted_sum),
    )(package, seed)
    case = Case("one gradient", {"row": 23, "col": 31}, seed=seed)
    for position, name in enumerate(("x", "weight")):
        given = [shapes.tensor(case, "x"), shapes.vector(case, "weight")]
        alone = given[position].requires_grad_()
        (gradient,) = torch.autograd.grad(package.weighted_sum(*given).sum(), alone)
        observed[f"d{name} of weighted_sum where only {name} asks for its gradient"] = gradient
    return observed


WEIGHTED_SUM_BACKWARD = Exercise(
    "2.4",
    "weighted sum, backward",
    points=15,
    builds_on=("2.3",),
    observe=_observe_gradients,
    tolerance=Tolerance(absolute=2e-5),
)


@WEIGHTED_SUM_BACKWARD.checked_by
def check_weighted_sum_backward(weighted_sum: WeightedSum, seed: int | None = None) -> None:
    """Exercise 2.4: both gradients in one pass over x, the weight's summed in two stages without atomics.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    tall = {"row": runtime.pick(cpu=600, gpu=300_000), "col": 5}
    check_kernel(
        WEIGHTED_SUM_BACKWARD,
        shapes.with_gradient(weighted_sum),
        shapes.with_gradient(_weighted_sum),
        [*_cases(weighted_sum, seed), Case("tall", tall, seed=seed)],
        _backward_inputs,
        outputs=("out", "dx", "dweight"),
        tiling={
            "out": _sum_tiles,
            "dx": lambda trials: rows_tiling(trials, DX),
            "dweight": sums_tiling,
        },
        inspections=[no_atomics, within(DX, _dx_budget), within(DWEIGHT, _dweight_budget)],
        diagnose=_BACKWARD_MISTAKES,
        speed=Speed(
            lambda: (shapes.drawn(2**14, 2**13), shapes.drawn(2**13), shapes.drawn(2**14)),
            shapes.with_gradient(lambda x, weight: (weight * x).sum(-1)),
            1.5,
            "PyTorch's product and sum, forward and backward",
            bytes_moved=3 * 2**28,
        ),
        seed=seed,
        notice="x in once, dx out once; the partial sums are a few rows, not a matrix",
    )


def _dx_budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    weight = Passes("col", times=cdiv(num_rows(case), launch["ROWS"]))
    return Budget({"weight_ptr": weight, "dout_ptr": _dout(case, launch)}, {"dx_ptr": every(case)}, exact=True)


def _dweight_budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    return Budget({"x_ptr": every(case), "dout_ptr": _dout(case, launch)}, exact=True)


def _dout(case: Case, launch: Mapping[str, Any]) -> Passes:
    """One number a row, for each block of columns."""
    return Passes(*list(case.sizes)[:-1], times=cdiv(case.sizes["col"], launch["BLOCK"]))
