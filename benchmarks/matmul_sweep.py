"""The matrix mystery: the rate of square bf16 products over N, and each of its causes alone.

``cublas`` is what everyone measures: PyTorch's product at many N, in fine steps around the sizes where the output's
tiles overflow a wave of multiprocessors, with the kernel that cuBLAS chose at each N (its name holds the tile).
``fixed_tile`` is a Triton kernel with one tile whatever the size, and K held constant, so that only the number of
tiles changes: its time over N is a staircase of waves. N is measured in random order and several passes, so that heat
does not look like a property of N.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli, trace
from utils import example_kernels, runtime, simt, timing
from utils.example_kernels.matmul import Tiles
from utils.record_schemas import POSITIVE, SIZE, TEXT, TIMING

#: Coarse over the whole range; every multiple of 8 where waves of 128x256 tiles change; every N in three windows.
SIZES = sorted(
    {
        *range(64, 1024, 64),
        *range(1024, 4104, 8),
        *range(4224, 8193, 128),
        12288,
        16384,
        *range(1776, 1809),
        *range(2032, 2065),
        *range(3568, 3601),
    }
)
QUICK_SIZES = [256, 512, 1024, 1536, 1784, 1791, 1792, 1793, 1800, 2048, 2056, 2560, 3072, 4096, 4097, 8192]
#: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, warps, stages) of the fixed-tile kernel, and its K.
TILES = [(128, 256, 64, 8, 8, 3), (128, 128, 64, 8, 8, 3)]
FIXED_K = 4096
FIXED_SIZES = list(range(1024, 4097, 16))
QUICK_FIXED_SIZES = list(range(1536, 2561, 64))


def _passes(calls: dict[Any, Callable[[], object]], passes: int, rounds: int) -> dict[Any, timing.Timing]:
    """Time every call in several passes, each in another random order; the samples of a call are pooled."""
    order = list(calls)
    shuffle = random.Random(20061120)
    samples: dict[Any, list[float]] = {key: [] for key in order}
    for _ in range(passes):
        shuffle.shuffle(order)
        for key in order:
            samples[key] += timing.measure(calls[key], warmup=2, rounds=rounds).samples
    return {key: timing.summarize(samples[key]) for key in calls}


def cublas_points(sizes: Sequence[int], passes: int = 3, rounds: int = 6) -> list[dict[str, Any]]:
    """Rate and kernel of (N, N) @ (N, N) in bf16 at each N.

    Raises:
        RuntimeError: there is no GPU here.
    """
    largest = max(sizes)
    pools = [torch.randn(largest * largest, device=runtime.DEVICE).to(torch.bfloat16) for _ in range(2)]
    out = torch.empty(largest * largest, dtype=torch.bfloat16, device=runtime.DEVICE)

    def product(n: int) -> Callable[[], object]:
        a, b, c = (pool[: n * n].view(n, n) for pool in (*pools, out))
        return lambda: torch.mm(a, b, out=c)

    calls = {n: product(n) for n in sizes}
    timed = _passes(calls, passes, rounds)
    kernels = trace.kernels_of(list(calls.values()))
    points = []
    for n, launched in zip(sizes, kernels, strict=True):
        main = max(launched, key=lambda kernel: kernel.seconds)
        points.append(
            {
                "n": n,
                **timed[n].as_dict(),
                "flops_per_second": 2 * n**3 / timed[n].median,
                "kernel": trace.short_name(main.name),
                "grid": list(main.grid),
                "launches": len(launched),
            }
        )
    return points


def fixed_tile_points(
    tile: Tiles, sizes: Sequence[int], k: int = FIXED_K, passes: int = 3, rounds: int = 6
) -> dict[str, Any]:
    """Time of (N, K) @ (K, N) in bf16 with one tile at each N, and what the wave model says of it.

    Raises:
        RuntimeError: there is no GPU here.
    """
    a, b = (torch.randn(max(sizes) * k, device=runtime.DEVICE).to(torch.bfloat16) for _ in range(2))

    def product(n: int) -> Callable[[], object]:
        left, right = a[: n * k].view(n, k), b[: k * n].view(k, n)
        return lambda: example_kernels.tiled_matmul(left, right, tile)

    timed = _passes({n: product(n) for n in sizes}, passes, rounds)
    return {
        "tile": list(tile),
        "k": k,
        "points": [
            {
                "n": n,
                "tiles": simt.tiles(n, n, tile[0], tile[1]),
                **timed[n].as_dict(),
                "flops_per_second": 2 * n * n * k / timed[n].median,
            }
            for n in sizes
        ],
    }


SCHEMA = {
    "dtype": TEXT,
    "cublas": [{"n": SIZE, **TIMING, "flops_per_second": POSITIVE, "kernel": TEXT, "grid": [SIZE], "launches": SIZE}],
    "fixed_tile": [
        {"tile": [SIZE], "k": SIZE, "points": [{"n": SIZE, "tiles": SIZE, **TIMING, "flops_per_second": POSITIVE}]}
    ],
}


def measure(
    quick: bool = False,
    sizes: Sequence[int] | None = None,
    fixed_sizes: Sequence[int] | None = None,
    tiles: Sequence[Tiles] | None = None,
    k: int = FIXED_K,
) -> dict[str, Any]:
    """Both sweeps; ``quick`` measures a few sizes in a few seconds.

    Raises:
        RuntimeError: there is no GPU here.
    """
    passes, rounds = (1, 8) if quick else (3, 6)
    fixed_sizes = fixed_sizes or (QUICK_FIXED_SIZES if quick else FIXED_SIZES)
    return {
        "dtype": "bf16",
        "cublas": cublas_points(sizes or (QUICK_SIZES if quick else SIZES), passes, rounds),
        "fixed_tile": [
            fixed_tile_points(tile, fixed_sizes, k, passes, rounds)
            for tile in (tiles or (TILES[:1] if quick else TILES))
        ],
    }


def table(results: dict[str, Any]) -> str:
    """A thinned sweep with kernels, and the fixed tile's staircase."""
    rows = [
        [p["n"], f"{p['seconds'] * 1e6:,.1f}", f"{p['flops_per_second'] / 1e12:.1f}", p["kernel"][:60], p["grid"]]
        for p in benchmark_cli.thin(results["cublas"], 60)
    ]
    parts = [benchmark_cli.text_table(["N", "us", "TFLOP/s", "kernel", "grid"], rows)]
    for sweep in results["fixed_tile"]:
        rows = [
            [p["n"], p["tiles"], f"{p['seconds'] * 1e6:,.1f}", f"{p['flops_per_second'] / 1e12:.1f}"]
            for p in benchmark_cli.thin(sweep["points"])
        ]
        parts.append(f"tile {sweep['tile']}, K = {sweep['k']}")
        parts.append(benchmark_cli.text_table(["N", "tiles", "us", "TFLOP/s"], rows))
    return "\n".join(parts)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("matmul_sweep", measure, table, SCHEMA))
