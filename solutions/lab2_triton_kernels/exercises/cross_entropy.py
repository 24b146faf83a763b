"""The check of exercise 2.4: cross-entropy in one online pass, and its gradient, in kernels that the student cuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from utils import runtime
from utils.checks.cases import Case, with_layout
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import CaseResult
from utils.checks.hidden import Tolerance, tried
from utils.checks.huge import everywhere
from utils.checks.kernel import check_kernel
from utils.checks.launches import Limits, halves, no_atomics, outside_limits, probed_tile, tile_over, tiling_over
from utils.checks.problem import Problem
from utils.checks.speed import Speed

from . import shapes
from .cross_entropy_mistakes import EARLY, EVEN, EVERY_KIND, LATE, MISTAKES, OFFSETS, reference
from .rows import num_rows
from .steps import TWO_AT_ONCE, Kept, keeps, step

CrossEntropy = Callable[..., torch.Tensor]
#: Most logits that a program may hold at a time.
LARGEST_TILE = 32768
#: What a difference of logarithms may leave of float32's last digit, where the loss is 0.
ROUNDING = 1e-6


# ---- cases
def _cases(seed: int, height: int = 64, width: int = 1024) -> list[Case]:
    """``height``, ``width``: of the tile of the student's kernels, where rows are short and where they are long."""
    draw = generator(seed)
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    ragged = {"row": draw.randint(9, 20), "col": draw.randint(65, 250)}
    small = {"row": draw.randint(5, 9), "col": draw.randint(20, 60)}
    long = LARGEST_TILE + draw.randint(700, 3000)
    return [
        Case("whole tiles", {"row": 16, "col": 128}, seed=seed),
        Case("ragged", ragged, seed=seed),
        Case("one past whole tiles", {"row": height + 1, "col": 33}, seed=seed),
        Case("whole tiles", {"row": 3, "col": width}, seed=seed),
        Case("one past whole tiles", {"row": 3, "col": width + 1}, seed=seed),
        Case("one element", {"row": 1, "col": 1}, seed=seed),
        Case("one column", {"row": draw.randint(5, 20), "col": 1}, seed=seed),
        Case("no element", {"row": 0, "col": 7}, seed=seed),
        Case("ragged", small, fp32, "transposed", seed=seed),
        Case("ragged", small, fp16, "padded", seed=seed),
        Case("ragged", small, bf16, "strided", seed=seed),
        shapes.permuted(seed, draw.randint(20, 50)),
        Case("a class is ignored", small, options={"ignore_index": draw.randint(2, 9)}, seed=seed),
        Case("all are ignored", small, seed=seed),
        Case("large values", small, magnitude=100.0, seed=seed),
        Case(OFFSETS, ragged, seed=seed),
        Case("far below zero", small, seed=seed),
        Case("a large vocabulary", {"row": 2, "col": 50_304 - draw.randint(0, 60)}, bf16, seed=seed),
        Case(EVERY_KIND, {"row": 6, "col": long}, seed=seed),
        Case("tall", {"row": draw.randint(100, 150), "col": 5}, fp16, seed=seed),
        Case("gradient of a sum", small, seed=seed),
        Case("calls", small, options={"calls": TWO_AT_ONCE}, seed=seed),
        *shapes.far(seed, 40),
    ]


def _inputs(case: Case) -> Sequence[torch.Tensor]:
    logits = shapes.tensor(case, "logits")
    columns, leading = logits.shape[-1], list(case.sizes)[:-1]
    source = torch.Generator().manual_seed(case.seed)
    target = torch.randint(0, columns, logits.shape[:-1], generator=source)
    number = torch.arange(target.numel()).view(target.shape)
    if case.kind == OFFSETS:
        logits += 150.0 * (number % 7 - 3)[:, None].to(logits)
    if case.kind == "far below zero":
        logits -= 1e5
    if case.kind == "a large vocabulary":  # beyond any tile, and in the first one of any
        target[0] = columns - 1 - target[0] % 1000
        target[1] %= 16
    if case.kind == EVERY_KIND:
        slope = torch.linspace(0, 40, columns, device=logits.device)
        logits[1] += slope
        logits[2] -= slope
        logits[LATE, :-300] = logits[EARLY, 300:] = logits[EVEN, 1::2] = -torch.inf
        target[LATE] = columns - 1 - target[LATE] % 300
        target[EARLY] %= 300
        target[EVEN] -= target[EVEN] % 2
    ignore = case.options.get("ignore_index", -100)
    if case.kind == "all are ignored":
        target.fill_(ignore)
    elif case.kind not in ("one element", "a large vocabulary", EVERY_KIND):
        target[number % 4 == 1] = ignore
    layout = "strided" if case.layout in ("padded", "strided") else "contiguous"
    target = with_layout(target.to(logits.device), layout)
    dloss = case.tensor("dloss", *leading, dtype=torch.float32, layout=layout)
    if case.kind == "gradient of a sum":
        dloss = torch.ones((), device=logits.device).expand(target.shape)
    return logits, target, dloss


def _huge() -> Sequence[torch.Tensor]:
    """More than 2^31 logits, all of them one number."""
    rows, columns = 2**13 + 9, 2**18
    return (
        everywhere(1.0, rows, columns),
        everywhere(3, rows, dtype=torch.int64),
        everywhere(1.0, rows, dtype=torch.float32),
    )


# ---- what the kernels hold, move and keep
def _whole_rows(trial: CaseResult) -> Problem | None:
    """A row of logits on chip at once."""
    block = tile_over(trial.profile, trial.args[0])
    if math.prod(block) <= LARGEST_TILE:
        return None
    shape = " x ".join(map(str, block))
    return Problem(
        f"expected at most {LARGEST_TILE:,} logits on chip at a time, got a tile of {math.prod(block):,} ({shape})",
        classic("walk along the row in tiles, and carry its maximum and its sum from one to the next", 8),
    )


def _moves(trial: CaseResult) -> Problem | None:
    """Logits are read once in each pass, and nothing of their size is written but their gradient."""
    if trial.case.options.get("calls") or not trial.args[0].numel():
        return None
    (logits, target, _), (loss, dlogits) = trial.args, trial.outputs
    rows, size = num_rows(trial.case), logits.element_size()
    one = logits.numel() * size
    read = int((target != trial.case.options.get("ignore_index", -100)).sum()) * logits.shape[-1] * size
    once = Limits(
        loads=(read, one + rows * size), one=one,
        more=classic("maximum and sum grow together in one pass: rescale the sum when a larger maximum comes", 8),
        less=classic("a copy is read in their place, which moves them two more times: read them where they lie", 8),
    )  # fmt: skip
    few = (0, 32 * rows + one // 16)
    passes = halves(trial, loss)
    forward = outside_limits(
        "forward",
        passes["forward"],
        {"logits": logits, "loss": loss},
        {
            "logits": once,
            "loss": Limits(stores=(4 * rows, 8 * rows), one=4 * rows, more=classic("a loss is stored once", 8)),
            "": Limits(
                loads=few,
                stores=(0, 4 * rows),
                more=classic("only one number per row is stored for the backward pass, which makes the gradient", 8),
            ),
        },
    )
    return forward or outside_limits(
        "backward",
        passes["backward"],
        {"logits": logits, "dlogits": dlogits},
        {
            "logits": once,
            "dlogits": Limits(stores=(one, one), one=one, more=classic("each result is stored once", 8)),
            "": Limits(loads=few, more=classic("nothing is stored but the gradient", 8)),
        },
    )


def _stepped(cross_entropy: CrossEntropy, kept: Kept) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(logits, target, dloss, ignore_index=-100, calls=""):
        return step(lambda x, t: cross_entropy(x, t, ignore_index), (logits, target), dloss, calls, kept)

    return run


CROSS_ENTROPY = Exercise(
    "2.4",
    "cross-entropy",
    points=10,
    observe=tried(
        "2.4",
        "cross_entropy",
        ("loss", "dlogits"),
        lambda seed: [*_cases(seed), *shapes.further(seed)],
        _inputs,
        lambda lab: _stepped(lab.cross_entropy, {}),
    ),
    tolerance=Tolerance(absolute=2e-5),
    tolerances={  # a logsumexp of -1e5 has steps of 0.008
        "loss of cross_entropy, far below zero": Tolerance(absolute=0.02),
        "dlogits of cross_entropy, far below zero": Tolerance(relative=0.02),
    },
)


@CROSS_ENTROPY.checked_by
def check_cross_entropy(cross_entropy: CrossEntropy, seed: int | None = None) -> None:
    """Exercise 2.4: the loss of each row in one read of the logits, and its gradient in a second one.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    kept: Kept = {}
    run = _stepped(cross_entropy, kept)
    short, long = (
        _inputs(Case("a shape", {"row": row, "col": col}, seed=seed)) for row, col in ((2, 33), (1, LARGEST_TILE + 1))
    )
    height, width = probed_tile(run, short, short[0])[0], probed_tile(run, long, long[0])[1]
    check_kernel(
        CROSS_ENTROPY,
        run,
        reference,
        _cases(seed, min(height, 300), min(width, LARGEST_TILE)),
        _inputs,
        outputs=("loss", "dlogits"),
        atol=ROUNDING,
        tiling={"loss": lambda trials: tiling_over(trials, 0), "dlogits": lambda trials: tiling_over(trials, 1)},
        inspections=[
            lambda trial: keeps(trial, kept, 2 * num_rows(trial.case), classic("keep the logsumexp of each row", 8)),
            no_atomics,
            _whole_rows,
            _moves,
        ],
        diagnose=MISTAKES,
        huge=_huge,
        speed=Speed(
            lambda: (
                shapes.drawn(2**12, 50_304),
                torch.randint(0, 50_304, (2**12,), device=runtime.DEVICE),
                torch.ones(2**12, device=runtime.DEVICE),
            ),
            _of_pytorch,
            1.2,
            "torch.nn.functional.cross_entropy, forward and backward",
            bytes_moved=3 * 2 * 2**12 * 50_304,
            peer_bytes=3 * 2 * 2**12 * 50_304,
        ),
        seed=seed,
        notice="one read forward, a read and a write backward: no tensor of probabilities is ever stored",
    )


def _of_pytorch(logits: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = logits.detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x, target, reduction="none")
    return loss.detach(), torch.autograd.grad(loss, x, dloss.to(loss.dtype))[0]
