"""Two ways to add up a column over programs: atomics, or partial sums that a second kernel adds in a fixed order.

The gradient of a weighted sum's weight is a sum over all rows, ``(grad[:, None] * x).sum(0)``. Programs that own
different rows contribute to the same elements. Beside the times the record holds how many different results repeated
calls gave: atomic additions arrive in any order, and a sum of floats depends on its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import benchmark_cli
from utils import runtime, timing
from utils.example_kernels import cdiv
from utils.record_schemas import POSITIVE, SIZE, TEXT, TIMING

import triton  # isort: skip
import triton.language as tl  # isort: skip


#: (rows, columns) of x in bf16, and the rows that one program adds up: fewer rows mean more programs that meet.
SHAPES = ((32768, 4096), (1 << 20, 128))
ROWS_PER_PROGRAM = (32, 128, 512, 2048)
BLOCK_ROWS = 32
BLOCK_COLUMNS = 128
#: Calls whose results are compared bit by bit.
REPEATS = 50


@triton.jit
def partial_gradient(
    grad_ptr, x_ptr, first, rows, columns, column,
    TAKEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum of grad x over the TAKEN rows from ``first`` on, for a block of columns: (BLOCK_COLUMNS,) float32."""
    total = tl.zeros((BLOCK_COLUMNS,), dtype=tl.float32)
    for start in range(0, TAKEN, BLOCK_ROWS):
        row = first + start + tl.arange(0, BLOCK_ROWS)
        grad = tl.load(grad_ptr + row, mask=row < rows, other=0.0).to(tl.float32)  # (BLOCK_ROWS,)
        x_ptrs = x_ptr + row[:, None].to(tl.int64) * columns + column[None, :]
        mask = (row[:, None] < rows) & (column[None, :] < columns)
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_ROWS, BLOCK_COLUMNS)
        total += tl.sum(grad[:, None] * x, axis=0)
    return total


@triton.jit
def atomic_kernel(
    grad_ptr, x_ptr, out_ptr, rows, columns,
    TAKEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    first = tl.program_id(0) * TAKEN
    total = partial_gradient(grad_ptr, x_ptr, first, rows, columns, column, TAKEN, BLOCK_ROWS, BLOCK_COLUMNS)
    tl.atomic_add(out_ptr + column, total, mask=column < columns, sem="relaxed")


@triton.jit
def partial_kernel(
    grad_ptr, x_ptr, partial_ptr, rows, columns,
    TAKEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    first = tl.program_id(0) * TAKEN
    total = partial_gradient(grad_ptr, x_ptr, first, rows, columns, column, TAKEN, BLOCK_ROWS, BLOCK_COLUMNS)
    tl.store(partial_ptr + tl.program_id(0) * columns + column, total, mask=column < columns)


@triton.jit
def column_sum_kernel(
    partial_ptr, out_ptr, count, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros((BLOCK_COLUMNS,), dtype=tl.float32)
    for start in range(0, count, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row[:, None] < count) & (column[None, :] < columns)
        # (BLOCK_ROWS, BLOCK_COLUMNS), partial sums of several programs
        total += tl.sum(tl.load(partial_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0), axis=0)
    tl.store(out_ptr + column, total, mask=column < columns)


def with_atomics(grad: torch.Tensor, x: torch.Tensor, taken: int) -> torch.Tensor:
    """``(grad[:, None] * x).sum(0)`` of grad (rows,) and contiguous x (rows, columns), as float32, by atomic adds."""
    rows, columns = x.shape
    out = torch.zeros(columns, dtype=torch.float32, device=x.device)
    grid = (cdiv(rows, taken), cdiv(columns, BLOCK_COLUMNS))
    atomic_kernel[grid](grad, x, out, rows, columns, TAKEN=taken, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS)
    return out


def in_two_stages(grad: torch.Tensor, x: torch.Tensor, taken: int) -> torch.Tensor:
    """The same by partial sums and a second kernel that adds them in a fixed order."""
    rows, columns = x.shape
    count = cdiv(rows, taken)
    partial = torch.empty((count, columns), dtype=torch.float32, device=x.device)
    out = torch.empty(columns, dtype=torch.float32, device=x.device)
    grid = (count, cdiv(columns, BLOCK_COLUMNS))
    blocks = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_COLUMNS": BLOCK_COLUMNS}
    partial_kernel[grid](grad, x, partial, rows, columns, TAKEN=taken, **blocks)
    column_sum_kernel[(grid[1],)](partial, out, count, columns, **blocks)
    return out


METHODS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "two stages": in_two_stages,
    "atomics": with_atomics,
}


def distinct_results(call: Callable[[], torch.Tensor], repeats: int) -> int:
    """How many bitwise different results ``repeats`` calls give."""
    return len({call().cpu().numpy().tobytes() for _ in range(repeats)})


SCHEMA = {
    "dtype": TEXT,
    "points": [
        {
            "rows": SIZE,
            "columns": SIZE,
            "method": TEXT,
            "rows_per_program": SIZE,
            "programs_per_element": SIZE,
            **TIMING,
            "bytes_per_second": POSITIVE,
            "repeats": SIZE,
            "distinct_results": SIZE,
        }
    ],
}


def measure(
    quick: bool = False,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    taken: Sequence[int] = ROWS_PER_PROGRAM,
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """Time and number of different results of both methods; ``quick`` takes one shape and two sizes of program.

    Raises:
        RuntimeError: there is no GPU here.
    """
    shapes, taken = (shapes[:1], taken[::2]) if quick else (shapes, taken)
    points = []
    for rows, columns in shapes:
        grad = torch.randn(rows, device=runtime.DEVICE).to(torch.bfloat16)
        x = torch.randn(rows, columns, device=runtime.DEVICE).to(torch.bfloat16)
        calls = {(name, count): partial(method, grad, x, count) for name, method in METHODS.items() for count in taken}
        timed = timing.compare(calls, warmup=2, rounds=8 if quick else 25)
        points += [
            {
                "rows": rows,
                "columns": columns,
                "method": name,
                "rows_per_program": count,
                "programs_per_element": cdiv(rows, count),
                **timed[name, count].as_dict(),
                "bytes_per_second": (x.numel() * 2 + rows * 2 + columns * 4) / timed[name, count].median,
                "repeats": repeats,
                "distinct_results": distinct_results(calls[name, count], repeats),
            }
            for name, count in calls
        ]
    return {"dtype": "bf16", "points": points}


def table(results: dict[str, Any]) -> str:
    """Rate of the least traffic, and how many different results."""
    rows = [
        [
            f"{p['method']}, {p['rows']} x {p['columns']}",
            p["programs_per_element"],
            f"{p['bytes_per_second'] / 1e12:.2f}",
            f"{p['distinct_results']} of {p['repeats']}",
        ]
        for p in results["points"]
    ]
    return benchmark_cli.text_table(["weight gradient", "programs meet", "TB/s", "different results"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("weight_gradient", measure, table, SCHEMA))
