"""The check of exercise 2.3: RMSNorm, forward and backward, in kernels that the student cuts and names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from utils.checks.cases import Case
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import CaseResult
from utils.checks.hidden import Tolerance, tried
from utils.checks.huge import everywhere
from utils.checks.kernel import check_kernel
from utils.checks.launches import Limits, cdiv, halves, no_atomics, outside_limits, probed_tile, tiling_over
from utils.checks.problem import Problem
from utils.checks.speed import Speed

from . import shapes
from .rms_norm_mistakes import MISTAKES, reference
from .rows import num_rows
from .steps import ALONE, TWO_AT_ONCE, Kept, keeps, step

RMSNorm = Callable[..., torch.Tensor]
#: Rows of x for one row of partial sums.
ROWS_A_SUM = 16
#: What differences of numbers of size 1 may leave of float32's last digit, where nearly nothing is left.
ROUNDING = 1e-6


# ---- cases
def _cases(seed: int, height: int = 64) -> list[Case]:
    """``height``: rows of a tile of the student's kernels where rows are short."""
    draw = generator(seed)
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    ragged = {"row": draw.randint(17, 30), "col": draw.randint(65, 120)}
    small = {"row": draw.randint(5, 9), "col": draw.randint(20, 60)}
    tall = {"row": draw.randint(280, 320), "col": 5}
    return [
        Case("whole tiles", {"row": 32, "col": 64}, seed=seed),
        Case("ragged", ragged, seed=seed),
        Case("large eps", small, options={"eps": 0.5}, seed=seed),
        Case("one past whole tiles", {"row": height + 1, "col": 33}, seed=seed),
        Case("longest", {"row": 2, "col": 8192}, fp16, seed=seed),
        Case("one element", {"row": 1, "col": 1}, seed=seed),
        Case("one column", {"row": draw.randint(5, 40), "col": 1}, seed=seed),
        Case("no element", {"row": 0, "col": 7}, seed=seed),
        Case("ragged", small, fp32, "transposed", seed=seed),
        Case("ragged", small, fp16, "padded", seed=seed),
        Case("ragged", small, bf16, "strided", seed=seed),
        shapes.permuted(seed, draw.randint(20, 50)),
        Case("wide", {"row": 3, "col": draw.randint(5000, 8000)}, bf16, seed=seed),
        Case("small values", small, magnitude=1e-3, seed=seed),
        Case("rows of zeros", small, seed=seed),
        Case("rows of different scale", ragged, seed=seed),
        Case("far below zero", small, seed=seed),
        Case("large values", small, fp16, magnitude=1000.0, seed=seed),
        Case("tall", tall, bf16, seed=seed),
        Case("sums that cancel", tall, bf16, seed=seed),
        Case("one row of sums for every 16", {"row": 32, "col": draw.randint(2050, 2200)}, seed=seed),
        Case("gradient of a sum", small, seed=seed),
        Case("calls", small, options={"calls": TWO_AT_ONCE}, seed=seed),
        Case("calls", small, options={"calls": ALONE}, seed=seed),
        *shapes.far(seed, 40),
    ]


def _inputs(case: Case) -> Sequence[torch.Tensor]:
    x, weight, dout = shapes.tensor(case, "x"), shapes.vector(case, "weight"), shapes.tensor(case, "dout")
    count = x.shape[0] if x.dim() else 0
    if case.kind == "rows of zeros":
        x[::2] = 0
    if case.kind == "rows of different scale":  # and dout with them, so that dx is of one size
        scale = 10.0 ** (torch.arange(count, device=x.device) % 5 - 2)[:, None]
        x *= scale
        dout *= scale
    if case.kind == "far below zero":
        x -= 1000
    if case.kind == "large values":
        dout /= case.magnitude  # of size 1, as the weight
        weight /= case.magnitude
    if case.kind == "tall":  # all of one sign: a sum in bfloat16 stops where a step is below its last digit
        x.abs_().add_(1)
        dout.abs_().add_(1)
    if (
        case.kind == "sums that cancel"
    ):  # whatever rows a program takes, its sum is far larger than what is left at last
        x /= 128
        x += 1
        dout /= 128
        signs = torch.ones(count).index_fill_(0, torch.arange(count // 2) * 2, -1)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(case.seed))
        dout += signs[order].to(dout)[:, None]
    if case.kind == "gradient of a sum":
        dout = torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape)
    return x, weight, dout


def _huge() -> Sequence[torch.Tensor]:
    """More than 2^31 elements, all of them one number."""
    rows, columns = 2**18 + 9, 2**13
    return everywhere(1.0, rows, columns), everywhere(1.0, columns), everywhere(1.0, rows, columns)


# ---- what the kernels move and keep
def _moves(trial: CaseResult) -> Problem | None:
    """Each half of a step reads what it needs once and writes its results once."""
    if trial.case.options.get("calls") or not trial.outputs[0].numel():
        return None
    (x, weight, dout), (out, dx, dweight) = trial.args, trial.outputs
    one, row, column = (t.numel() * t.element_size() for t in (x, x[..., 0], weight))
    rows, columns = num_rows(trial.case), x.shape[-1]
    once = Limits(
        loads=(one, one), one=one,
        more=classic("a row is on chip after its first load: keep it there for all that is computed of it", 8),
        less=classic("a copy is read in its place, which moves the tensor two more times: read it where it lies", 8),
    )  # fmt: skip
    results = Limits(stores=(one, one), one=one, more=classic("each result is stored once", 8))
    weights = Limits(
        loads=(column, max(one, column)), one=column, more=classic("the weight is loaded once per row at most", 8)
    )
    passes = halves(trial, out)
    forward = outside_limits(
        "forward",
        passes["forward"],
        {"x": x, "weight": weight, "out": out},
        {
            "x": once,
            "weight": weights,
            "out": results,
            "": Limits(stores=(0, 4 * rows), more=classic("one float32 number per row waits, and nothing else", 8)),
        },
    )
    sums = cdiv(rows, ROWS_A_SUM) * columns * 4
    return forward or outside_limits(
        "backward",
        passes["backward"],
        {"x": x, "dout": dout, "weight": weight, "dx": dx, "dweight": dweight},
        {
            "x": once,
            "dout": once,
            "weight": weights,
            "dx": results,
            "dweight": Limits(stores=(column, column), one=column, more=classic("each result is stored once", 8)),
            "": Limits(
                loads=(0, 16 * row + sums),
                stores=(0, sums),
                more=classic(f"more than one row of partial sums for every {ROWS_A_SUM} rows of x", 6),
            ),
        },
    )


def _wide_sums(trial: CaseResult) -> Problem | None:
    """What a kernel of the backward pass leaves for another one is float32."""
    results = {value.untyped_storage().data_ptr() for value in trial.outputs}
    for launch in halves(trial, trial.outputs[0])["backward"]:
        for name, value in launch.given.items():
            stored = isinstance(value, torch.Tensor) and launch.by_argument[name].bytes_stored
            if stored and value.dtype.itemsize == 2 and value.untyped_storage().data_ptr() not in results:
                headline = f"{launch.kernel} stores partial sums as {str(value.dtype).removeprefix('torch.')} ({name})"
                return Problem(headline, classic("partial sums are sums, too: float32 until the last one is added", 7))
    return None


def _stepped(rms_norm: RMSNorm, kept: Kept) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(x, weight, dout, eps=1e-6, calls=""):
        return step(lambda x, weight: rms_norm(x, weight, eps), (x, weight), dout, calls, kept)

    return run


RMS_NORM = Exercise(
    "2.3",
    "RMSNorm",
    points=15,
    observe=tried(
        "2.3",
        "rms_norm",
        ("out", "dx", "dweight"),
        lambda seed: [*_cases(seed), *shapes.further(seed)],
        _inputs,
        lambda lab: _stepped(lab.rms_norm, {}),
    ),
    tolerance=Tolerance(absolute=2e-5),
)


@RMS_NORM.checked_by
def check_rms_norm(rms_norm: RMSNorm, seed: int | None = None) -> None:
    """Exercise 2.3: RMSNorm and both its gradients; each pass reads x once, whatever the student's kernels.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    kept: Kept = {}
    run = _stepped(rms_norm, kept)
    short = _inputs(Case("short rows", {"row": 2, "col": 33}, seed=seed))
    height, _ = probed_tile(run, short, short[0])
    check_kernel(
        RMS_NORM,
        run,
        reference,
        _cases(seed, min(height, 300)),
        _inputs,
        outputs=("out", "dx", "dweight"),
        atol=ROUNDING,
        tiling={"out": lambda trials: tiling_over(trials, 0), "dx": lambda trials: tiling_over(trials, 1)},
        inspections=[
            lambda trial: keeps(trial, kept, num_rows(trial.case), classic("one number per row is enough", 8)),
            no_atomics,
            _moves,
            _wide_sums,
        ],
        diagnose=MISTAKES,
        huge=_huge,
        speed=Speed(
            lambda: (shapes.drawn(2**14, 2**13), shapes.drawn(2**13), shapes.drawn(2**14, 2**13)),
            _of_pytorch,
            0.7,
            "torch.nn.functional.rms_norm, forward and backward",
            bytes_moved=5 * 2**28,
            peer_bytes=5 * 2**28,
        ),
        seed=seed,
        notice="two passes forward, three backward: a row is on chip from its first load to its last use",
    )


def _of_pytorch(x: torch.Tensor, weight: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)
    return out.detach(), *torch.autograd.grad(out, (x, weight), dout)
