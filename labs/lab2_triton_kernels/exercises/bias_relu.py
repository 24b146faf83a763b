"""The check of exercise 2.2: bias and ReLU in one kernel, and their backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from utils import runtime
from utils.checks.cases import Case
from utils.checks.core import Exercise, classic, draw_seed
from utils.checks.diagnoses import Diagnosis, Evidence
from utils.checks.hidden import Tolerance, tried
from utils.checks.huge import everywhere
from utils.checks.kernel import check_kernel
from utils.checks.launches import cdiv, no_atomics, tile_sizes, within
from utils.checks.speed import Speed
from utils.checks.traffic import Budget, Passes

from . import shapes, splits
from .rows import every, num_rows, rows_tiling, sums_tiling

FORWARD, BACKWARD = "bias_relu_kernel", "bias_relu_backward_kernel"


def _bias_relu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + bias)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2)


def _cut(x: torch.Tensor, bias: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    return torch.where(x + bias > 0, dout, 0)


#: Kind of the case whose gradients, summed over many rows, cancel: it takes float32 to add them up.
CANCELLING = "many rows whose sums cancel"


def _zero_for_nan(e: Evidence, output: str) -> bool:
    """Whether only the elements are wrong at which ``out`` is NaN, and hold 0 there."""
    at_nan = e.trial.targets[0].right.isnan()
    return e.difference.name == output and bool((e.bad <= at_nan).all()) and bool((e.got[e.bad] == 0).all())


def _of(output: str, formula: Callable[..., torch.Tensor], cause: str) -> Diagnosis:
    """A rule that holds when this output equals what ``formula`` gives."""
    return Diagnosis(lambda e: e.difference.name == output and e.same_as(formula), cause)


_MISTAKES = (
    Diagnosis(
        lambda e: _zero_for_nan(e, "out"),
        classic("a NaN becomes 0: tl.maximum returns the other operand, and torch.relu keeps a NaN", 8),
    ),
    Diagnosis(
        lambda e: _zero_for_nan(e, "dx"),
        classic("dx is 0 where out is NaN: `out > 0` is false there, and so is `out <= 0`, which is what cuts", 8),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == CANCELLING) and e.difference.name == "dbias",
        classic("only sums of many 16-bit rows are wrong: the sums of a split stay float32 until all is added", 6),
    ),
    _of(
        "out",
        lambda x, bias, dout: torch.relu(x + bias[: x.shape[-2], None]),
        classic("each row has its own bias here: the bias has one number for each column", 1),
    ),
    _of("out", lambda x, bias, dout: torch.relu(x + bias[0]), classic("every column gets the first bias", 1)),
    _of("out", lambda x, bias, dout: torch.relu(x) + bias, classic("ReLU is applied before the bias is added", 2)),
    _of("out", lambda x, bias, dout: x + bias, classic("there is no ReLU", 2)),
    _of("out", lambda x, bias, dout: torch.relu(x), classic("the bias is not added", 2)),
    _of("dx", lambda x, bias, dout: torch.where(dout > 0, dout, 0), classic("dout decides what is cut, not out", 3)),
    _of("dx", lambda x, bias, dout: torch.where(x > 0, dout, 0), classic("x decides what is cut, not x + bias", 3)),
    _of(
        "dx", lambda x, bias, dout: torch.where(x + bias > 0, 0, dout), classic("the wrong side of the ReLU is cut", 3)
    ),
    _of(
        "dx",
        lambda x, bias, dout: dout.clone(),
        classic("nothing is cut in dx: the derivative of ReLU is left out, or its mask leaves all", 3),
    ),
    _of("dx", lambda x, bias, dout: (torch.relu(x + bias) > 0).to(x.dtype), classic("dx lacks the factor dout", 3)),
    _of(
        "dx",
        lambda x, bias, dout: torch.relu(x + bias) * dout,
        classic("out itself is the factor, not where it is above 0", 3),
    ),
    _of(
        "dbias",
        lambda x, bias, dout: _flat(dout).sum(0),
        classic("dbias sums dout, not what is left of it after the cut", 4),
    ),
    _of(
        "dbias",
        lambda x, bias, dout: _flat(_cut(x, bias, dout)).mean(0),
        classic("dbias is a mean over rows, not their sum", 4),
    ),
    *splits.mistakes(BACKWARD, "dbias", lambda e: _flat(_cut(*e.args64)), sharing=5, adding=6),
    *shapes.MISTAKES,
)


def _inputs(case: Case) -> Sequence[torch.Tensor]:
    x, bias = shapes.tensor(case, "x"), shapes.vector(case, "bias")
    if case.kind == shapes.ZERO_STRIDE:
        return x, bias, case.tensor("dout", 1).expand(x.shape)
    if case.kind == shapes.FAR_COLUMNS:
        return x, bias, shapes.tensor(case, "dout")
    dout = case.tensor("dout", *case.sizes, layout="contiguous" if case.layout == "far" else None)
    if case.kind == shapes.SPECIAL:
        x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    if case.kind == CANCELLING:  # nothing is cut, and the second half of the rows takes away what the first has added
        x.abs_(), bias.abs_()
        half = len(dout) // 2
        dout[:half] = dout[:half].abs() + 2
        dout[half : 2 * half] = -dout[:half]
        dout[-1] += 3
    return x, bias, dout


def _cases(seed: int, rows: int, columns: int) -> list[Case]:
    """All that is tried; in a GPU session the tall cases alone have several tiles in a split, and are few."""
    few = {"row": 5, "col": columns // 2 + 3}
    tall = [Case("tall", {"row": 600, "col": 5}, seed=seed)] if runtime.INTERPRET else []
    cancelling = {"row": runtime.pick(cpu=2001, gpu=20_001), "col": 5}
    return [
        *shapes.matrices(seed, rows, columns),
        *shapes.boundaries(seed, rows, columns),
        *shapes.far_columns(seed),
        *shapes.far_vector(seed),
        Case(shapes.SPECIAL, few, seed=seed),
        *tall,
        Case(CANCELLING, cancelling, torch.bfloat16, seed=seed),
    ]


def _huge() -> tuple[torch.Tensor, ...]:
    """Three rows of more than 2^30 columns, which all lie in the memory of one number."""
    columns = 2**30 + 5
    return everywhere(1.0, 3, columns), everywhere(1.0, columns), everywhere(1.0, 3, columns)


BIAS_RELU = Exercise(
    "2.2",
    "bias and ReLU",
    points=15,
    observe=tried(
        "2.2",
        "bias_relu",
        ("out", "dx", "dbias"),
        lambda seed: [*shapes.matrices(seed, 8, 256), *shapes.further(seed)],
        _inputs,
        lambda package: shapes.with_gradient(package.bias_relu),
    ),
    tolerance=Tolerance(absolute=1e-5),
)


@BIAS_RELU.checked_by
def check_bias_relu(bias_relu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], seed: int | None = None) -> None:
    """Exercise 2.2: ``relu(x + bias)`` in one pass, and its gradients with the bias's summed without atomics.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    tile = tile_sizes(bias_relu, (shapes.drawn(2, 700), shapes.drawn(700)), FORWARD, ROWS=4, BLOCK=256)
    check_kernel(
        BIAS_RELU,
        shapes.with_gradient(bias_relu),
        shapes.with_gradient(_bias_relu),
        _cases(seed, 2 * tile["ROWS"], tile["BLOCK"]),
        _inputs,
        outputs=("out", "dx", "dbias"),
        tiling={
            "out": lambda trials: rows_tiling(trials, FORWARD),
            "dx": lambda trials: rows_tiling(trials, BACKWARD, per_split=True),
            "dbias": sums_tiling,
        },
        inspections=[within(FORWARD, _forward_budget), no_atomics, within(BACKWARD, _backward_budget)],
        diagnose=_MISTAKES,
        huge=_huge,
        speed=Speed(
            lambda: (shapes.drawn(2**15, 2**12), shapes.drawn(2**12), shapes.drawn(2**15, 2**12)),
            shapes.with_gradient(_bias_relu),
            1.05,
            "PyTorch's addition and ReLU, forward and backward",
            bytes_moved=5 * 2**28,
            peer_bytes=8 * 2**28,
        ),
        seed=seed,
        notice="two passes forward and three backward: PyTorch's separate operators take four and four",
    )


def _forward_budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    bias = Passes("col", times=cdiv(num_rows(case), launch["ROWS"]))
    return Budget({"x_ptr": every(case), "bias_ptr": bias}, {"out_ptr": every(case)}, exact=True)


def _backward_budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    return Budget({"dout_ptr": every(case), "out_ptr": every(case)}, {"dx_ptr": every(case)}, exact=True)
