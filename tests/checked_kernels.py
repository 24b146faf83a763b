"""Small real kernels, each with the mistakes that students make in it, for the tests of the checks.

``BUG`` selects a mistake; the empty string is the right kernel. The host functions pass it on, so that
``partial(row_softmax, bug="no rescale")`` is a wrong answer.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from utils.checks.cases import Cases
from utils.checks.core import CheckFailed, Exercise
from utils.checks.diagnoses import same_as
from utils.checks.forbid import Rules
from utils.checks.kernel import check_kernel
from utils.checks.tiling import Tiling
from utils.checks.traffic import Budget, Passes

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: A matmul over a long common axis, where accumulating in float16 shows.
LONG_SUM = (("long sum", {"m": 16, "k": 512, "n": 16}),)


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, size, stride_x, stride_y, BLOCK: tl.constexpr, BUG: tl.constexpr):
    program = tl.program_id(0)
    if BUG == "one program too far":
        program = (program + 1) % tl.num_programs(0)
    read = program * BLOCK + tl.arange(0, BLOCK)
    if BUG == "loads ignore the program":
        read = tl.arange(0, BLOCK)
    write = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if BUG == "store ignores the program":
        write = tl.arange(0, BLOCK)
    mask = read < size
    if BUG == "no mask":
        x = tl.load(x_ptr + read * stride_x)
        y = tl.load(y_ptr + read * stride_y)
        tl.store(out_ptr + write, x + y)
    else:
        x = tl.load(x_ptr + read * stride_x, mask=mask, other=0.0)
        y = tl.load(y_ptr + read * stride_y, mask=mask, other=0.0)
        if BUG == "fixed in float16":
            x = x.to(tl.float16).to(tl.float32)
        if BUG == "reads twice":
            x = tl.load(x_ptr + read * stride_x, mask=mask, other=0.0)
        tl.store(out_ptr + write, x + y, mask=write < size)


def add(x: torch.Tensor, y: torch.Tensor, bug: str = "", block: int = 32) -> torch.Tensor:
    """x + y for two tensors of shape (n,)."""
    size = x.numel()
    out = {
        "float32 out": lambda: torch.empty(size, dtype=torch.float32, device=x.device),
        "padded out": lambda: torch.empty(triton.cdiv(size, block) * block, dtype=x.dtype, device=x.device),
        "into x": lambda: x,
    }.get(bug, lambda: torch.empty(size, dtype=x.dtype, device=x.device))()
    programs = max(1, size // block) if bug == "floor grid" else triton.cdiv(size, block)
    if bug == "raises":
        raise RuntimeError(f"cannot add {size} elements")
    stride_x, stride_y = (1, 1) if bug == "ignores strides" else (x.stride(0), y.stride(0))
    if bug != "no launch" and programs:
        add_kernel[(programs,)](x, y, out, size, stride_x, stride_y, BLOCK=block, BUG=bug)
    if bug == "changes x":
        x.zero_()
    return {"no return": None, "column": out[:, None], "two": (out, out)}.get(bug, out)


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, rows, cols, stride_row, stride_col, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    lanes = tl.arange(0, BLOCK)
    for start in range(0, cols, BLOCK):
        mask = start + lanes < cols
        address = x_ptr + row.to(tl.int64) * stride_row + (start + lanes) * stride_col
        if BUG == "int32":
            address = x_ptr + row * stride_row + (start + lanes) * stride_col
        x = tl.load(address, mask=mask, other=1.0 if BUG == "other is one" else 0.0)
        if BUG == "float16 sum":
            total = (
                (total + tl.sum(x.to(tl.float16).to(tl.float32))).to(tl.float16).to(tl.float32) if start else tl.sum(x)
            )
        elif BUG == "keeps the last tile":
            total = tl.sum(x.to(tl.float32))
        else:
            total += tl.sum(x.to(tl.float32))
    if BUG == "negated":
        total = -total
    if BUG == "mean":
        total = total / cols
    if BUG == "plus one":
        total = total + 1.0
    tl.store(out_ptr + row, total)


@triton.jit
def column_tile_sum_kernel(x_ptr, partial_ptr, cols, stride_row, stride_col, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    """One program for each row and tile of columns; all programs of a row add to one element."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_row + lanes * stride_col, mask=lanes < cols, other=0.0)
    total = tl.sum(x.to(tl.float32))
    if ATOMIC:
        tl.atomic_add(partial_ptr + row, total)
    else:
        tl.store(partial_ptr + row, tl.load(partial_ptr + row) + total)


def row_sum(x: torch.Tensor, bug: str = "", block: int = 32) -> torch.Tensor:
    """Sums over the last axis of x of shape (row, col)."""
    rows, cols = x.shape
    out = torch.empty(rows, dtype=x.dtype, device=x.device)
    if bug in ("race", "uninitialised"):
        allocate = torch.zeros if bug == "race" else torch.empty
        partial = allocate(rows, dtype=torch.float32, device=x.device)
        grid = (rows, triton.cdiv(cols, block))
        column_tile_sum_kernel[grid](x, partial, cols, *x.stride(), BLOCK=block, ATOMIC=bug == "uninitialised")
        return partial.to(x.dtype)
    if bug == "wrong axis":
        row_sum_kernel[(cols,)](x, out.resize_(cols), cols, rows, *x.stride()[::-1], BLOCK=block, BUG="")
        return out
    if bug == "copies":
        x = x.clone() + 0
    row_sum_kernel[(rows,)](x, out, rows, cols, *x.stride(), BLOCK=block, BUG=bug)
    return out


@triton.jit
def row_softmax_kernel(x_ptr, out_ptr, cols, stride_row, stride_col, BLOCK: tl.constexpr, BUG: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    maximum, total = float("-inf"), 0.0
    for start in range(0, cols, BLOCK):
        mask = start + lanes < cols
        other = 0.0 if BUG == "other is zero" else float("-inf")
        x = tl.load(x_ptr + row * stride_row + (start + lanes) * stride_col, mask=mask, other=other).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(x))
        if BUG == "no maximum":
            new_maximum = 0.0
        rescale = tl.exp(maximum - new_maximum)
        if BUG == "no rescale":
            rescale = 1.0
        if BUG == "no maximum":
            rescale = 1.0
        total = total * rescale + tl.sum(tl.exp(x - new_maximum))
        maximum = new_maximum
    for start in range(0, cols, BLOCK):
        mask = start + lanes < cols
        x = tl.load(x_ptr + row * stride_row + (start + lanes) * stride_col, mask=mask, other=0.0).to(tl.float32)
        y = tl.exp(x - maximum)
        if BUG != "not normalised":
            y = y / total
        tl.store(out_ptr + row * cols + start + lanes, y.to(out_ptr.dtype.element_ty), mask=mask)


def row_softmax(x: torch.Tensor, bug: str = "", block: int = 32) -> torch.Tensor:
    """Softmax over the last axis of x of shape (row, col)."""
    rows, cols = x.shape
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if bug == "calls torch":
        out.copy_(torch.softmax(x, -1))
    row_softmax_kernel[(rows,)](x, out, cols, *x.stride(), BLOCK=block, BUG=bug)
    return out


@triton.jit
def scale_kernel(x_ptr, out_ptr, rows, cols, stride_row, stride_col, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (i < rows) & (j < cols)
    x = tl.load(x_ptr + i * stride_row + j * stride_col, mask=mask, other=0.0)
    factor = 1.0 if BUG == "no factor" else 3.0
    if BUG == "transposed":
        tl.store(out_ptr + j * rows + i, factor * x, mask=mask)
    elif BUG == "rows below the first tile":
        tl.store(out_ptr + i * cols + j, factor * x + tl.program_id(0), mask=mask)
    elif BUG == "rows below the first whole tile":
        wrong = tl.where(rows % BLOCK == 0, 1.0 * tl.program_id(0), 1.0 + j)  # all rows where they fill no whole tiles
        tl.store(out_ptr + i * cols + j, factor * x + wrong, mask=mask)
    elif BUG == "zero":
        tl.store(out_ptr + i * cols + j, 0.0 * x, mask=mask)
    elif BUG == "square root":
        tl.store(out_ptr + i * cols + j, tl.sqrt(x), mask=mask)
    else:
        tl.store(out_ptr + i * cols + j, factor * x, mask=mask)


def scale(x: torch.Tensor, bug: str = "", block: int = 16) -> torch.Tensor:
    """3 x for x of shape (row, col), in tiles of two dimensions."""
    rows, cols = x.shape
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, block), triton.cdiv(cols, block))
    scale_kernel[grid](x, out, rows, cols, *x.stride(), BLOCK=block, BUG=bug)
    return out


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BLOCK: tl.constexpr, BUG: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + lanes
        a = tl.load(a_ptr + i * stride_am + k[None, :] * stride_ak, mask=(i < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * stride_bk + j * stride_bn, mask=(k[:, None] < K) & (j < N), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        if BUG == "float16 accumulator":
            total = total.to(tl.float16).to(tl.float32)
    if BUG == "b first":
        total = tl.trans(total)
    tl.store(out_ptr + i * N + j, total.to(out_ptr.dtype.element_ty), mask=(i < M) & (j < N))


def matmul(a: torch.Tensor, b: torch.Tensor, bug: str = "", block: int = 16) -> torch.Tensor:
    """a @ b for a of shape (m, k) and b of shape (k, n)."""
    (m, k), (_, n) = a.shape, b.shape
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(m, block), triton.cdiv(n, block))
    if bug == "square intermediate":
        out = torch.empty((m * n, m), dtype=a.dtype, device=a.device)[:m, :n].contiguous()
    if bug == "swapped":
        a, b = b, a
    matmul_kernel[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), BLOCK=block, BUG=bug)
    return out


# ---- the exercises that these kernels answer

HALF = (torch.float32, torch.float16, torch.bfloat16)
FLAT = Tiling("n", tiles={"n": 32}, grid="n")
TILES = Tiling("row col", tiles={"row": 16, "col": 16}, grid=("row", "col"))
EXERCISES: dict[str, dict] = {
    "add": {
        "exercise": Exercise("2.1", "vector addition"),
        "student": add,
        "reference": lambda x, y: x + y,
        "cases": Cases({"n": 32}, layouts=("strided", "offset"), zero=True),
        "inputs": lambda case: (case.tensor("x", "n"), case.tensor("y", "n")),
        "tiling": FLAT,
        "budget": Budget({"x_ptr": Passes("n"), "y_ptr": Passes("n")}, {"out_ptr": Passes("n")}, exact=True),
    },
    "row sum": {
        "exercise": Exercise("2.2", "row sum"),
        "student": row_sum,
        "reference": lambda x: x.sum(-1),
        "cases": Cases({"row": range(2, 6), "col": 32}, layouts=("transposed", "padded")),
        "inputs": lambda case: (case.tensor("x", "row", "col"),),
        "tiling": Tiling("row", grid="row", loops={"col": 32}),
        "budget": Budget({"x_ptr": Passes("row", "col")}, {"out_ptr": Passes("row")}, exact=True),
        "outputs": ("total",),
    },
    "softmax": {
        "exercise": Exercise("2.5", "softmax of long rows"),
        "student": row_softmax,
        "reference": lambda x: torch.softmax(x, -1),
        "cases": Cases({"row": range(2, 6), "col": 32}, layouts=("transposed", "padded"), magnitude=100),
        "inputs": lambda case: (case.tensor("x", "row", "col"),),
        "tiling": Tiling("row col", grid="row", loops={"col": 32}),
        "budget": Budget({"x_ptr": Passes("row", "col", times=2)}, {"out_ptr": Passes("row", "col")}, exact=True),
        "diagnose": (same_as(lambda x: torch.exp(x - x.amax(-1, True)), "the rows are not divided by their sums"),),
    },
    "scale": {
        "exercise": Exercise("2.0", "scale"),
        "student": scale,
        "reference": lambda x: 3 * x,
        "cases": Cases({"row": 16, "col": 16}),
        "inputs": lambda case: (case.tensor("x", "row", "col"),),
        "tiling": TILES,
    },
    "matmul": {
        "exercise": Exercise("2.7", "tiled matmul"),
        "student": matmul,
        "reference": lambda a, b: a @ b,
        "cases": Cases({"m": 16, "k": 16, "n": 16}, layouts=("transposed", "padded"), max_tiles=2, fixed=LONG_SUM),
        "inputs": lambda case: (case.tensor("a", "m", "k"), case.tensor("b", "k", "n")),
        "tiling": Tiling("m n", tiles={"m": 16, "n": 16}, grid=("m", "n"), loops={"k": 16}),
        "budget": Budget(
            {
                "a_ptr": Passes("m", "k", times=lambda case: math.ceil(case.sizes["n"] / 16)),
                "b_ptr": Passes("k", "n", times=lambda case: math.ceil(case.sizes["m"] / 16)),
            },
            {"out_ptr": Passes("m", "n")},
            exact=True,
        ),
        "forbidden": Rules(largest=lambda case: case.numel("m", "n")),
    },
}


def check(name: str, bug: str = "", seed: int = 1729, **changes) -> None:
    """Hold a right or wrong answer to its exercise; ``changes`` replace parts of the exercise."""
    parts = {**EXERCISES[name], **changes}
    parts["student"] = changes.get("student") or functools.partial(parts["student"], bug=bug)
    check_kernel(**parts, seed=seed)


def message(name: str, bug: str = "", seed: int = 1729, **changes) -> str:
    """What a wrong answer is told."""
    with pytest.raises(CheckFailed) as failure:
        check(name, bug, seed, **changes)
    print(failure.value)
    return str(failure.value)
