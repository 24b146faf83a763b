"""The check of exercise 1.10: what a given kernel moves, predicted, and the kernel without its waste."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import ModuleType
from typing import Any

import torch

from utils.checks.cases import Case as KernelCase
from utils.checks.cases import Cases
from utils.checks.core import Exercise, classic, draw_seed
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence, same_as
from utils.checks.hidden import Observed, asked, tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import never_launched
from utils.checks.numbers import check_numbers
from utils.checks.problem import Problem
from utils.checks.question import Case, Mistake, Question
from utils.checks.tiling import Tiling
from utils.kernel_profile.lanes import trace_lanes

from .operators import size_mistakes
from .rules import FORBIDDEN, element_size, size_cases

SECTOR, WARP = 32, 32  # bytes, lanes
BLOCK = 128  # what the kernels are launched with
KERNEL = "residual_add_kernel"


# ---- bytes ----
def residual_add_bytes(rows: int, cols: int, element_size: int, mended: bool) -> int:
    """Tensor by tensor: x and residual in each loop that reads them, y, the sums."""
    loads = [rows * cols, rows * cols] * (1 if mended else 2)
    return sum([*loads, rows * cols, rows]) * element_size


def _moved(given: int = 5, mended: int = 3, sums: Callable[[int, int], int] | None = None) -> Callable[..., int]:
    """A count of bytes from passes over the matrices and elements of the sums; what is not given is right."""

    def moved(rows: int, cols: int, element_size: int, **which: bool) -> int:
        matrices = mended if which["mended"] else given
        return (matrices * rows * cols + (sums(rows, cols) if sums else rows)) * element_size

    return moved


def _byte_cases(rng: Random) -> list[Case]:
    cases = []
    for mended in (False, True):
        fixed = {"element_size": element_size, "mended": lambda _, mended=mended: mended}
        cases += size_cases(rng, ("rows", "cols"), drawn=4, small=(2, 99), large=(2**20, 2**34), **fixed)
    return cases


BYTES = Question(
    "residual_add_bytes",
    _byte_cases,
    residual_add_bytes,
    (
        Mistake(
            "two passes are missing: the second loop's loads are left out (it reads x and residual again, "
            "because nothing of them was kept), or y's store is subtracted",
            _moved(given=3),
            1,
        ),
        Mistake(
            "every pass of the given kernel is counted: with mended=True, x and residual are read once", _moved(5, 5), 1
        ),
        Mistake(
            "one pass too many is counted: mended, x and residual are read once, y is stored and not read back",
            _moved(mended=4),
            1,
        ),
        Mistake(
            "one of the passes is left out: each loop that reads loads x and residual, and y is stored", _moved(4, 2), 2
        ),
        Mistake("the sums are left out: one element per row", _moved(sums=lambda rows, cols: 0), 2),
        Mistake("one sum is counted: there is one per row", _moved(sums=lambda rows, cols: 1), 2),
        Mistake("one sum per column is counted: there is one per row", _moved(sums=lambda rows, cols: cols), 2),
        *size_mistakes(residual_add_bytes, 2),
    ),
    refused={"rows": -4, "cols": -3, "element_size": -2},
    split_by="mended",
)


# ---- sectors ----
def _element(walk: str, lane: int, step: int, steps: int, block: int) -> int:
    return lane * steps + step if walk == "runs" else step * block + lane


def _request(row: int, step: int, warp: int, sector: int) -> object:
    """What counts once: a sector in one request of one warp."""
    return row, step, warp, sector


def walk_sectors(
    rows: int,
    cols: int,
    stride: int,
    element_size: int,
    block: int,
    walk: str,
    *,
    start: int = 0,
    element: Callable[..., int] = _element,
    unit: Callable[..., object] = _request,
    masked: bool = True,
    whole_steps: bool = False,
) -> int:
    """Byte by byte: each byte that a lane wants lies in a sector, and counts once for each request.

    The matrix begins at byte ``start``. What mistakes change: which element a lane takes, what counts once, whether
    lanes beyond a row's end are masked off, and whether steps are rounded down.
    """
    steps = cols // block if whole_steps else -(-cols // block)
    stop = cols if masked else steps * block
    found = set()
    for row in range(rows):
        for step in range(steps):
            for lane in range(block):
                col = element(walk, lane, step, steps, block)
                first = start + (row * stride + col) * element_size
                for byte in range(first, first + element_size) if col < stop else ():
                    found.add(unit(row, step, lane // WARP, byte // SECTOR))
    return len(found)


def _walked(**changed: object) -> Callable[..., int]:
    return lambda **arguments: walk_sectors(**arguments, **changed)


def _other_walk(walk: str, lane: int, step: int, steps: int, block: int) -> int:
    return _element("tiles" if walk == "runs" else "runs", lane, step, steps, block)


MISALIGNED, SHORT, RAGGED = "rows that begin inside a sector", "rows of one step", "a last step that is not full"


def _walk_cases(rng: Random) -> list[Case]:
    """Short runs, whose lanes share sectors; rows that begin inside a sector for one warp per program and for four."""
    cases = []
    for walk in ("runs", "tiles"):
        for tag in ("", RAGGED, RAGGED, MISALIGNED, MISALIGNED, f"{MISALIGNED} ", SHORT):
            block = {MISALIGNED: 32, f"{MISALIGNED} ": 128}.get(tag) or rng.choice((32, 64, 128))
            size, rows, tag = rng.choice((2, 4)), rng.randint(2, 3), tag.strip()
            cols = rng.randint(5, block - 3) if tag == SHORT else block * rng.randint(3, 7 if size == 2 else 5)
            cols -= rng.randint(1, block - 1) if tag in (RAGGED, MISALIGNED) else 0
            whole = SECTOR // size
            cols -= cols % whole == 1
            stride = (cols // whole + rng.randint(1, 3)) * whole
            if tag == MISALIGNED:  # the second row touches one sector more than an aligned one
                stride += rng.randint(whole - (cols % whole or whole) + 1, whole - 1)
            sizes = {"rows": rows, "cols": cols, "stride": stride, "element_size": size, "block": block}
            cases.append(Case(sizes | {"walk": walk}, tag))
    return cases


SECTORS = Question(
    "walk_sectors",
    _walk_cases,
    walk_sectors,
    (
        Mistake(
            "the bytes are divided by 32, as if the lanes of a warp always took neighbours",
            lambda rows, cols, stride, element_size, block, walk: -(-rows * cols * element_size // SECTOR),
            3,
        ),
        Mistake(
            "each row's bytes are divided by 32, as if a warp's lanes always took neighbours and no step asked again",
            lambda rows, cols, stride, element_size, block, walk: rows * -(-cols * element_size // SECTOR),
            3,
        ),
        Mistake("this walk is taken for the other one", _walked(element=_other_walk), 3),
        Mistake(
            "one sector per element is counted: the lanes of a warp that take part in a step share a sector, and "
            "there are ceil(cols / block) steps",
            lambda rows, cols, stride, element_size, block, walk: rows * cols,
            4,
        ),
        Mistake(
            "a sector counts once in all: each step asks for it again",
            _walked(unit=lambda row, step, warp, sector: sector),
            4,
        ),
        Mistake(
            "the whole block is taken for one request: each warp of 32 lanes asks for itself",
            _walked(unit=lambda row, step, warp, sector: (row, step, sector)),
            4,
        ),
        Mistake(
            "the stride is left out: a row begins stride elements after the one before it, wherever that row ends",
            lambda **case: walk_sectors(**(case | {"stride": case["cols"]})),
            5,
        ),
        Mistake(
            "every row is taken to begin where a sector does",
            lambda **case: walk_sectors(**(case | {"stride": SECTOR * case["stride"]})),
            5,
        ),
        Mistake(
            "the stride is taken in bytes: it counts elements",
            lambda **case: sum(
                walk_sectors(**(case | {"rows": 1}), start=row * case["stride"]) for row in range(case["rows"])
            ),
            5,
        ),
        Mistake(
            "lanes beyond the row's end are counted: they are masked off", _walked(masked=False), 5
        ),
        Mistake("the last step is left out: round up, it is there though it is shorter", _walked(whole_steps=True), 5),
        Mistake("bytes are returned, not sectors", lambda **case: SECTOR * walk_sectors(**case), 4),
        Mistake("one row is counted", lambda **case: walk_sectors(**(case | {"rows": 1})), 5),
    ),
    refused={"rows": -4, "cols": -3, "stride": -7, "element_size": -2, "block": -32, "walk": "zigzag"},
    split_by="walk",
)  # fmt: skip


# ---- the mended kernel ----
def _residual_add(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + residual, (x + residual).sum(1)


def _kernel_cases(seed: int) -> list[KernelCase]:
    axes = {"row": range(2, 5), "col": BLOCK}
    cases = Cases(
        axes,
        dtypes=(torch.float32,),
        layouts=("padded", "offset"),
        max_tiles=3,
        fixed=[("one element over", {"row": 2, "col": BLOCK + 1})],
    )
    return cases.draw(seed)


def _inputs(case: KernelCase) -> tuple[torch.Tensor, ...]:
    return case.tensor("x", "row", "col"), case.tensor("residual", "row", "col")


ONE_PASS = (
    "the given kernel's second pass is still there: each element is added once, and while it is on the chip it is "
    "both stored and added to the sum"
)
RUNS = (
    "in each step, neighbouring lanes take elements that lie a whole run apart, so that a warp's 32 elements lie in "
    "more sectors than they fill"
)


def _passes(trial: CaseResult) -> Problem | None:
    """Each element of x and residual is loaded once, each of y and the sums stored once, and nothing read back."""
    rows, cols = trial.case.shape("row", "col")
    found = trial.profile.by_argument
    if KERNEL not in trial.profile.by_kernel:
        return never_launched(KERNEL, trial)
    for name, verb, elements in (
        ("x_ptr", "loaded", rows * cols), ("residual_ptr", "loaded", rows * cols), ("y_ptr", "loaded", 0),
        ("y_ptr", "stored", rows * cols), ("sum_ptr", "loaded", 0), ("sum_ptr", "stored", rows),
    ):  # fmt: skip
        counted, expected = getattr(found[name], f"bytes_{verb}"), 4 * elements
        if counted != expected:
            again = (verb, counted) == ("loaded", 2 * expected) or (name == "y_ptr" and counted == 4 * rows * cols)
            cause = classic(ONE_PASS, 6) if again else ""
            return Problem(f"{name}: expected {expected:,} bytes {verb}, got {counted:,}", cause)
    return None


def _sectors(trial: CaseResult) -> Problem | None:
    """Each load and store takes no more sectors than one in tiles does."""
    x, residual = trial.args
    for name, verb, matrix in (("x_ptr", "loaded", x), ("residual_ptr", "loaded", residual), ("y_ptr", "stored", None)):
        rows, cols = x.shape
        stride, start = (cols, 0) if matrix is None else (matrix.stride(0), 4 * matrix.storage_offset())
        counted = getattr(trial.profile.by_argument[name], f"sectors_{verb}")
        least, runs = (walk_sectors(rows, cols, stride, 4, BLOCK, walk, start=start) for walk in ("tiles", "runs"))
        if counted > least:
            cause = classic(RUNS, 7) if counted == runs else ""
            return Problem(f"{name}: expected at most {least:,} sectors {verb}, got {counted:,}", cause)
    return None


def _steps(residual_add: Callable[..., Any]) -> Callable[[CaseResult], Problem | None]:
    """No more steps do nothing than do something; one is as good as none."""

    def inspect(trial: CaseResult) -> Problem | None:
        with trace_lanes() as trace:
            residual_add(*trial.args)
        loads = trace.of("x_ptr", "read")
        idle = sum(lanes.active == 0 for lanes in loads)
        if idle <= len(loads) - idle:
            return None
        cause = "the row is covered in cols / BLOCK steps, rounded up"
        return Problem(f"in {idle:,} of {len(loads):,} loads from x_ptr every lane is masked off", cause)

    return inspect


def _of_step(step: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The sums of one step's elements alone."""

    def computes(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + residual
        return y, y.split(BLOCK, dim=1)[step].sum(1)

    return computes


def _partial_step_missing(e: Evidence) -> bool:
    """What is never written, or not in the sums, is what whole steps leave."""
    y = sum(e.args64)
    whole = y.shape[1] // BLOCK * BLOCK
    if e.position == 0:
        never = e.difference.never_written
        return whole < y.shape[1] and bool(never[:, whole:].all()) and not never[:, :whole].any()
    return e.close(y[:, :whole].sum(1))


def _only_ragged_sums(e: Evidence) -> bool:
    """Only the sums are wrong, and only of rows whose last step is partial."""
    return e.position == 1 and e.only(lambda case: case.sizes["col"] % BLOCK != 0)


def _stored_by_the_stride_of_x(e: Evidence) -> bool:
    """What is in y is what belongs there, for rows that begin where x's would."""
    x, y = e.trial.args[0], sum(e.args64)
    if e.position != 0 or x.stride(0) == y.shape[1]:
        return False
    at = (torch.arange(len(y))[:, None] * x.stride(0) + torch.arange(y.shape[1])).flatten()
    inside = at < y.numel()
    written = torch.full((y.numel(),), torch.nan, dtype=y.dtype).index_put((at[inside],), y.flatten()[inside])
    never = e.difference.never_written.flatten()
    return torch.equal(never, written.isnan()) and torch.allclose(e.got.flatten()[~never], written[~never], atol=1e-5)


def _masked_lanes_in_sum(e: Evidence) -> bool:
    """NaN, though no lane left its tensor: what masked loads bring without `other`."""
    return _only_ragged_sums(e) and bool(e.got.isnan().all()) and not e.findings("out_of_bounds")


def _unmasked_loads(e: Evidence) -> bool:
    return _only_ragged_sums(e) and bool(e.findings("out_of_bounds"))


_MISTAKES = (
    Diagnosis(
        _stored_by_the_stride_of_x, classic("y has no gaps between its rows: its row begins at row * cols, not x's", 8)
    ),
    Diagnosis(
        _partial_step_missing, classic("the last, partial step is left out: there are ceil(cols / BLOCK) steps", 8)
    ),
    same_as(_of_step(-1), classic("only the last step's elements are in the sum: add each step's to the total", 8)),
    same_as(_of_step(0), classic("only the first step's elements are in the sum: add each step's to the total", 8)),
    same_as(lambda x, residual: (x, (x + residual).sum(1)), classic("this is x: residual is not added", 8)),
    same_as(lambda x, residual: (x + residual, x.sum(1)), classic("this is the sum of x: add up y", 8)),
    same_as(lambda x, residual: (x + residual, residual.sum(1)), classic("this is the sum of residual: add up y", 8)),
    Diagnosis(
        _masked_lanes_in_sum,
        classic("lanes beyond the row's end enter the sum: a masked load without `other` may bring anything", 9),
    ),
    Diagnosis(
        _unmasked_loads,
        lambda e: classic(f"out-of-bounds access ({e.findings('out_of_bounds')[0]}): its mask is missing or wrong", 9),
    ),
)


def _observe(package: ModuleType, seed: int) -> Observed:
    observed = asked("1.10", BYTES, SECTORS)(package, seed)
    observed |= tried("1.10", "residual_add", ("y", "sums"), _kernel_cases, _inputs)(package, seed)
    return observed


RESIDUAL_ADD = Exercise(
    "1.10", "profile and mend a kernel", 15, builds_on=("1.7",), observe=_observe, module="residual"
)


@RESIDUAL_ADD.checked_by
def check_residual_add(
    residual_add_bytes: Callable[..., int],
    walk_sectors: Callable[..., int],
    residual_add: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    seed: int | None = None,
) -> None:
    """Exercise 1.10: the predicted bytes and sectors, then the kernel without its second pass and its runs.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    predictions = [(BYTES, residual_add_bytes), (SECTORS, walk_sectors)]
    check_numbers(RESIDUAL_ADD.part("predictions"), predictions, seed=seed, forbidden=FORBIDDEN)
    check_kernel(
        RESIDUAL_ADD,
        residual_add,
        _residual_add,
        _kernel_cases(seed),
        _inputs,
        outputs=("y", "sums"),
        tiling={
            "y": Tiling("row col", grid="row", loops={"col": BLOCK}),
            "sums": Tiling("row", grid="row", loops={"col": BLOCK}),
        },
        inspections=[_passes, _sectors, _steps(residual_add)],
        diagnose=_MISTAKES,
        seed=seed,
        notice="three passes over a matrix where there were five, each in as few sectors as its bytes fill",
    )
