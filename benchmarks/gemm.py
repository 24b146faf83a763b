"""The matrix products of lab 2 beside cuBLAS, bf16: descriptors, pointers, and what the grouped order is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli, blocked_stream
from solutions import lab2_triton_kernels as lab
from solutions.lab2_triton_kernels import tuning
from utils import runtime, timing
from utils.record_schemas import POSITIVE, RATIO, SIZE, TEXT, TIMING

SIZES = (2048, 4096, 8192)
#: Which operands are stored column by column.
LAYOUTS = {"plain": (False, False), "b turned": (False, True), "a turned": (True, False), "both turned": (True, True)}
OURS = "lab 2, descriptors"


def _matrix(n: int, turned: bool) -> torch.Tensor:
    """Random values: a product of zeros draws less power, so the GPU clocks higher than on real data."""
    matrix = torch.randn(n, n, device=runtime.DEVICE).to(torch.bfloat16)
    return matrix.T if turned else matrix


def point(n: int, layout: str, rounds: int) -> dict[str, Any]:
    """Measure (n, n) @ (n, n) in one layout.

    Raises:
        RuntimeError: there is no GPU here.
    """
    a, b = (_matrix(n, turned) for turned in LAYOUTS[layout])
    calls: dict[str, Callable[[], object]] = {"cuBLAS": lambda: a @ b, OURS: lambda: lab.matmul(a, b)}
    if layout == "plain":
        group = tuning.tiled_matmul(a.element_size()).group
        calls["lab 2, pointers, grouped"] = lambda: lab.tiled_matmul(a, b, group)
        calls["lab 2, pointers, row by row"] = lambda: lab.tiled_matmul(a, b)
    timed = timing.compare(calls, warmup=5, rounds=rounds, stopwatch=blocked_stream.stopwatch())
    return {
        "n": n,
        "layout": layout,
        "timed": {name: {**t.as_dict(), "flops_per_second": 2 * n**3 / t.median} for name, t in timed.items()},
        "of_cublas": timing.ratio(timed["cuBLAS"], timed[OURS]).as_dict(),
    }


SCHEMA = {
    "dtype": TEXT,
    "points": [
        {"n": SIZE, "layout": TEXT, "timed": {str: {**TIMING, "flops_per_second": POSITIVE}}, "of_cublas": RATIO}
    ],
}


def measure(quick: bool = False, sizes: Sequence[int] | None = None) -> dict[str, Any]:
    """All sizes and layouts; ``quick`` takes one size and few rounds.

    Raises:
        RuntimeError: there is no GPU here.
    """
    sizes = sizes or ((4096,) if quick else SIZES)
    return {"dtype": "bf16", "points": [point(n, layout, 10 if quick else 40) for n in sizes for layout in LAYOUTS]}


def table(results: Mapping[str, Any]) -> str:
    """One line a product: TFLOP/s of each way, and lab 2's ratio to cuBLAS."""
    rows = []
    for item in results["points"]:
        for name, timed in item["timed"].items():
            share = f"{item['of_cublas']['ratio']:.3f}" if name == OURS else ""
            rows.append([f"{item['n']} {item['layout']}: {name}", f"{timed['flops_per_second'] / 1e12:.1f}", share])
    return benchmark_cli.text_table(["product", "TFLOP/s", "x cuBLAS"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("gemm", measure, table, SCHEMA))
