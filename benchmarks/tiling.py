"""What tiles are worth: matrix products without a tile and with tiles of growing side, and transposes with and without.

Every product is an example kernel whose traffic has a closed formula: ``bytes_loaded`` is what its programs ask for.
In fp32 the products are exact and run on the ordinary cores, so that the tile is all that changes; in bf16 the tiled
ones use tensor cores. ``by columns`` is the naive kernel on a second factor that lies column by column in memory: it
asks for the same bytes, and neighbouring lanes read far apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli
from utils import example_kernels, runtime, timing
from utils.example_kernels.matmul import Tiles
from utils.record_schemas import COUNT, POSITIVE, RATIO, SIZE, TEXT, TIMING

SIZES = [1024, 2048, 4096]
QUICK_SIZES = [1024]
TRANSPOSE_SIZE = 8192
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Square tiles by side: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, warps, stages).
TILES: dict[int, Tiles] = {
    16: (16, 16, 32, 8, 1, 2),
    32: (32, 32, 32, 8, 4, 3),
    64: (64, 64, 32, 8, 4, 3),
    128: (128, 128, 32, 8, 8, 3),
}


def matmuls(dtype: str, n: int, sides: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Times of all products of two (n, n) matrices; ``tile`` is the side, 1 without a tile and 0 for cuBLAS.

    Raises:
        RuntimeError: there is no GPU here.
    """
    a, b = (torch.randn(n, n, device=runtime.DEVICE).to(DTYPES[dtype]) for _ in range(2))
    by_columns = b.t().contiguous().t()
    calls: dict[tuple[str, int], Callable[[], object]] = {
        ("naive, by columns", 1): lambda: example_kernels.naive_matmul(a, by_columns),
        ("naive", 1): lambda: example_kernels.naive_matmul(a, b),
    }
    calls |= {("tiled", side): lambda side=side: example_kernels.tiled_matmul(a, b, TILES[side]) for side in sides}
    timed = timing.compare({str(key): call for key, call in calls.items()}, warmup=2, rounds=rounds)
    former = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        library = timing.measure(lambda: torch.mm(a, b), rounds=rounds)
    finally:
        torch.backends.cuda.matmul.fp32_precision = former
    size = a.element_size()
    points = []
    for (kernel, side), timing_here in [*((key, timed[str(key)]) for key in calls), (("cuBLAS", 0), library)]:
        loaded = example_kernels.naive_matmul_traffic(n, n, n, size).bytes_loaded
        if kernel == "tiled":
            loaded = example_kernels.tiled_matmul_traffic(n, n, n, size, TILES[side]).bytes_loaded
        points.append(
            {
                "kernel": kernel,
                "dtype": dtype,
                "n": n,
                "tile": side,
                "bytes_loaded": loaded if side else 0,
                **timing_here.as_dict(),
                "flops_per_second": 2 * n**3 / timing_here.median,
            }
        )
    return points


def transposes(n: int, rounds: int) -> list[dict[str, Any]]:
    """Times of a copy of an (n, n) fp32 matrix and of its transposes.

    Raises:
        RuntimeError: there is no GPU here.
    """
    x = torch.randn(n, n, device=runtime.DEVICE)
    flat = x.view(-1)
    calls = {
        "copy": lambda: example_kernels.copy(flat),
        "naive": lambda: example_kernels.naive_transpose(x),
        "tiled": lambda: example_kernels.tiled_transpose(x),
        "PyTorch": lambda: x.t().contiguous(),
    }
    timed = timing.compare(calls, rounds=rounds)
    return [
        {
            "kernel": name,
            "n": n,
            **timed[name].as_dict(),
            "bytes_per_second": 2 * x.nbytes / timed[name].median,
            **timing.ratio(timed[name], timed["copy"]).as_dict(),
        }
        for name in calls
    ]


SCHEMA = {
    "matmul": [
        {
            "kernel": TEXT,
            "dtype": TEXT,
            "n": SIZE,
            "tile": COUNT,
            "bytes_loaded": COUNT,
            **TIMING,
            "flops_per_second": POSITIVE,
        }
    ],
    "transpose": [{"kernel": TEXT, "n": SIZE, **TIMING, "bytes_per_second": POSITIVE, **RATIO}],
}


def measure(
    quick: bool = False, sizes: Sequence[int] | None = None, sides: Sequence[int] | None = None,
    transpose_size: int = TRANSPOSE_SIZE,
) -> dict[str, Any]:  # fmt: skip
    """All products and transposes; ``quick`` takes one size.

    Raises:
        RuntimeError: there is no GPU here.
    """
    rounds = 5 if quick else 12
    return {
        "matmul": [
            point
            for dtype in DTYPES
            for n in (sizes or (QUICK_SIZES if quick else SIZES))
            for point in matmuls(dtype, n, sides or list(TILES), rounds)
        ],
        "transpose": transposes(transpose_size, 2 * rounds),
    }


def table(results: dict[str, Any]) -> str:
    """Time, rate and bytes asked for; then the transposes beside a copy."""
    products = [
        [
            f"{p['kernel']} {p['dtype']} {p['n']}",
            p["tile"] or "",
            f"{p['seconds'] * 1e6:,.1f}",
            f"{p['flops_per_second'] / 1e12:.2f}",
            f"{p['bytes_loaded'] / p['seconds'] / 1e12:.2f}" if p["tile"] else "",
        ]
        for p in results["matmul"]
    ]
    moved = [
        [p["kernel"], f"{p['seconds'] * 1e6:,.1f}", f"{p['bytes_per_second'] / 1e12:.3f}", f"{p['ratio']:.2f}"]
        for p in results["transpose"]
    ]
    return "\n".join(
        [
            benchmark_cli.text_table(["product", "tile", "us", "TFLOP/s", "asked TB/s"], products),
            benchmark_cli.text_table(["transpose", "us", "TB/s", "of a copy"], moved),
        ]
    )


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("tiling", measure, table, SCHEMA))
