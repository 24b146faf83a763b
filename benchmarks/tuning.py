"""What tuning is worth: the same kernels under many configurations, and the best one of each shape.

A configuration is what the author of a kernel leaves open: the tile, the warps of a program and the stages of its
loop's pipeline. ``matmul`` runs one set of configurations on three shapes; ``softmax`` and ``gelu`` move each byte
once, so that what is left to choose is how much one program takes. The configurations of a shape are timed in turn
within each round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli
from utils import example_kernels, runtime, timing
from utils.example_kernels.matmul import Tiles
from utils.record_schemas import COUNT, POSITIVE, SIZE, TEXT, TIMING, each

_MI = 1 << 20
#: Name -> (M, N, K): a large square, one with fewer tiles than an H100 has multiprocessors, one with few rows.
SHAPES: dict[str, tuple[int, int, int]] = {
    "large": (4096, 4096, 4096),
    "small": (1024, 1024, 1024),
    "few rows": (64, 8192, 8192),
}
#: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, warps, stages): every combination of what is left open.
TILES: list[Tiles] = [
    (m, n, k, 8, warps, stages)
    for m, n, (k, stages), warps in itertools.product(
        (64, 128), (64, 128, 256), ((32, 4), (64, 2), (64, 3), (64, 4)), (4, 8)
    )
]
QUICK_TILES: list[Tiles] = [(64, 64, 32, 8, 4, 4), (128, 128, 64, 8, 8, 3), (128, 256, 64, 8, 8, 3)]
#: Rows and columns of softmax, and the warps that each gets: 4 to 128 elements a thread.
ROWS = {1024: 64 * _MI // 1024, 8192: 64 * _MI // 8192, 32768: 64 * _MI // 32768}
WARPS = (1, 2, 4, 8, 16, 32)
#: Elements of GeLU, and how many of them one program takes.
GELU_ELEMENTS = 64 * _MI
GELU_BLOCKS = (128, 256, 512, 1024, 2048, 4096, 8192)


def resources(compiled: Any) -> dict[str, int]:
    """Registers and spilled registers of a thread, and shared memory of a program in bytes; 0 where nothing compiles.

    Args:
        compiled: What a launch returns.
    """
    return {
        "registers": int(getattr(compiled, "n_regs", None) or 0),
        "spills": int(getattr(compiled, "n_spills", None) or 0),
        "shared_bytes": int(getattr(getattr(compiled, "metadata", None), "shared", None) or 0),
    }


def _sweep(launches: Mapping[Any, Callable[[], Any]], rounds: int) -> tuple[dict[Any, dict[str, Any]], dict[str, str]]:
    """Time and resources of each launch that the GPU accepts, and why it refuses the others."""
    found: dict[Any, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    for key, launch in launches.items():
        try:
            found[key] = resources(launch())
        except Exception as error:  # one configuration that asks for too much shared memory is a result
            if type(error).__name__ not in ("OutOfResources", "PTXASError"):
                raise
            refused[str(key)] = str(error).splitlines()[0][:200]
    timed = timing.compare({key: launches[key] for key in found}, warmup=2, rounds=rounds)
    return {key: {**found[key], **timed[key].as_dict()} for key in found}, refused


def matmul_points(
    m: int, n: int, k: int, tiles: Sequence[Tiles], rounds: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The tiled product (m, k) @ (k, n) in bf16 under each configuration.

    Raises:
        RuntimeError: there is no GPU here.
    """
    a, b = (torch.randn(shape, device=runtime.DEVICE).to(torch.bfloat16) for shape in ((m, k), (k, n)))
    c = torch.empty((m, n), dtype=torch.bfloat16, device=runtime.DEVICE)

    def launch(tile: Tiles) -> Callable[[], Any]:
        block_m, block_n, block_k, group_m, warps, stages = tile
        grid = (example_kernels.cdiv(m, block_m) * example_kernels.cdiv(n, block_n),)
        return lambda: example_kernels.tiled_matmul_kernel[grid](
            a, b, c, m, n, k, *a.stride(), *b.stride(), c.stride(0),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group_m, PRECISION="ieee",
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    found, refused = _sweep({tile: launch(tile) for tile in tiles}, rounds)
    return [
        {"tile": list(tile), **point, "flops_per_second": 2 * m * n * k / point["seconds"]}
        for tile, point in found.items()
    ], refused


def softmax_points(rows: int, columns: int, warps: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Softmax of bf16 rows, one program a row, under each number of warps.

    Raises:
        RuntimeError: there is no GPU here.
    """
    x = torch.randn(rows, columns, device=runtime.DEVICE).to(torch.bfloat16)
    out = torch.empty_like(x)
    block = 1 << (columns - 1).bit_length()

    def launch(count: int) -> Callable[[], Any]:
        return lambda: example_kernels.softmax_kernel[(rows,)](
            x, out, columns, x.stride(0), out.stride(0), BLOCK=block, num_warps=count
        )

    chosen = [count for count in warps if 4 <= block // (32 * count) <= 128] or list(warps)
    found, _ = _sweep({count: launch(count) for count in chosen}, rounds)
    return [
        {
            "rows": rows,
            "columns": columns,
            "warps": count,
            **point,
            "bytes_per_second": 4 * x.numel() / point["seconds"],
        }
        for count, point in found.items()
    ]


def gelu_points(n: int, blocks: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """GeLU of ``n`` bf16 elements under each block size and number of warps.

    Raises:
        RuntimeError: there is no GPU here.
    """
    x = torch.randn(n, device=runtime.DEVICE).to(torch.bfloat16)
    out = torch.empty_like(x)

    def launch(block: int, count: int) -> Callable[[], Any]:
        grid = (example_kernels.cdiv(n, block),)
        return lambda: example_kernels.gelu_kernel[grid](x, out, n, BLOCK=block, num_warps=count)

    chosen = [(block, count) for block in blocks for count in (1, 4, 8) if 1 <= block // (32 * count) <= 64]
    found, _ = _sweep({key: launch(*key) for key in chosen}, rounds)
    return [
        {"block": block, "warps": count, **point, "bytes_per_second": 4 * n / point["seconds"]}
        for (block, count), point in found.items()
    ]


#: What a compiled kernel occupies: registers and spilled registers of a thread, shared memory of a program in bytes.
RESOURCES = each(COUNT, "registers", "spills", "shared_bytes")
SCHEMA = {
    "dtype": TEXT,
    "matmul": [
        {
            "name": TEXT,
            **each(SIZE, "m", "n", "k"),
            "points": [{"tile": [SIZE], **RESOURCES, **TIMING, "flops_per_second": POSITIVE}],
            "refused": {str: TEXT},
        }
    ],
    "softmax": [{**each(SIZE, "rows", "columns", "warps"), **RESOURCES, **TIMING, "bytes_per_second": POSITIVE}],
    "gelu": [{"block": SIZE, "warps": SIZE, **RESOURCES, **TIMING, "bytes_per_second": POSITIVE}],
}


def measure(
    quick: bool = False,
    shapes: Mapping[str, tuple[int, int, int]] | None = None,
    tiles: Sequence[Tiles] | None = None,
    rows: Mapping[int, int] | None = None,
    gelu_elements: int = GELU_ELEMENTS,
) -> dict[str, Any]:
    """All sweeps; ``quick`` takes three tiles of the product, two row lengths and three blocks.

    Raises:
        RuntimeError: there is no GPU here.
    """
    rounds = 8 if quick else 20
    tiles = tiles or (QUICK_TILES if quick else TILES)
    rows = rows or ({c: ROWS[c] for c in (1024, 8192)} if quick else ROWS)
    products = []
    for name, (m, n, k) in (shapes or SHAPES).items():
        points, refused = matmul_points(m, n, k, tiles, rounds)
        products.append({"name": name, "m": m, "n": n, "k": k, "points": points, "refused": refused})
    return {
        "dtype": "bf16",
        "matmul": products,
        "softmax": [p for columns, count in rows.items() for p in softmax_points(count, columns, WARPS, rounds)],
        "gelu": gelu_points(gelu_elements, GELU_BLOCKS[::3] if quick else GELU_BLOCKS, rounds),
    }


def best(points: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The point with the shortest median time.

    Raises:
        ValueError: there are no points.
    """
    if not points:
        raise ValueError("points must hold at least one configuration, got none")
    return min(points, key=lambda point: point["seconds"])


def table(results: dict[str, Any]) -> str:
    """Best and worst configuration of each product, and every warp count of softmax."""
    rows = []
    for product in results["matmul"]:
        ordered = sorted(product["points"], key=lambda point: point["seconds"])
        for what, point in (("best", ordered[0]), ("median", ordered[len(ordered) // 2]), ("worst", ordered[-1])):
            rate = f"{point['flops_per_second'] / 1e12:.0f} TFLOP/s"
            rows.append([f"matmul {product['name']}, {what}", point["tile"], rate, point["registers"], point["spills"]])
    for point in results["softmax"]:
        rate = f"{point['bytes_per_second'] / 1e12:.2f} TB/s"
        rows.append([f"softmax {point['columns']}", point["warps"], rate, point["registers"], point["spills"]])
    for point in results["gelu"]:
        rate = f"{point['bytes_per_second'] / 1e12:.2f} TB/s"
        rows.append([f"gelu {point['block']}", point["warps"], rate, point["registers"], point["spills"]])
    return benchmark_cli.text_table(["kernel", "tile or warps", "rate", "registers", "spilled"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("tuning", measure, table, SCHEMA))
