"""The tile of attention's forward kernel: time, registers and shared memory of lab 3's inner loop by its size.

Each tile runs with 4 and with 8 warps, through tensor descriptors where the lab's own tile does. Configurations that
the GPU refuses, for want of shared memory, are recorded with what it said.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import benchmark_cli, tuning
from solutions import lab3_flash_attention as lab
from utils import runtime, timing
from utils.attention_math import AttentionShape, attention_flops
from utils.record_schemas import POSITIVE, SIZE, TEXT, TIMING, each

#: BLOCK_M (queries), BLOCK_N (keys), warps, stages
Tiles = tuple[int, int, int, int]
SHAPES = (AttentionShape(2, 16, 4096, 64), AttentionShape(2, 8, 4096, 128))
WARPS = (4, 8)
STAGES = 2
TILES: dict[int, list[Tiles]] = {
    64: [(m, n, w, STAGES) for m in (16, 32, 64, 128, 256) for n in (16, 32, 64, 128, 256) for w in WARPS],
    128: [(m, n, w, STAGES) for m in (32, 64, 128, 256) for n in (32, 64, 128) for w in WARPS],
}
QUICK_TILES: dict[int, list[Tiles]] = {d: [(64, 64, 4, STAGES), (128, 64, 4, STAGES)] for d in TILES}
WORKERS = 14

_forward = importlib.import_module("solutions.lab3_flash_attention.flash_forward")
_tuning = importlib.import_module("solutions.lab3_flash_attention.tuning")


class _Watched:
    """A kernel that keeps what its last launch returned: the compiled kernel, with the registers that it uses."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: Any = None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            self.compiled = self.kernel[grid](*args, **options)
            return self.compiled

        return launch


@contextlib.contextmanager
def tile_of_forward(tile: Tiles, descriptors: bool = False) -> Iterator[_Watched]:
    """Inside, lab 3's forward kernel runs with this tile instead of the one that its table names.

    ``descriptors``: through tensor descriptors, where the strides allow.
    """
    chosen, kernel = _tuning.forward, _forward.flash_forward_kernel
    watched = _Watched(kernel)
    _tuning.forward = lambda *_: _tuning.Tile(*tile, descriptors)
    _forward.flash_forward_kernel = watched
    try:
        yield watched
    finally:
        _tuning.forward, _forward.flash_forward_kernel = chosen, kernel


def _chosen(head_dim: int) -> Any:
    """The tile that the lab's table names for the inner loop, bf16, not causal, on this machine."""
    return _tuning.forward(head_dim, torch.bfloat16, False, _tuning.capability_of(runtime.DEVICE), anchored=False)


def inputs(shape: AttentionShape) -> list[torch.Tensor]:
    """q, k, v (B, H, N, D) in bf16."""
    size = (shape.batch, shape.heads, shape.seq_len, shape.head_dim)
    return [torch.randn(size, device=runtime.DEVICE).to(torch.bfloat16) for _ in range(3)]


def try_tile(shape: AttentionShape, tile: Tiles) -> dict[str, int] | str:
    """Compile and run once: registers, spills and shared memory; or what the GPU said when it refused."""
    try:
        with tile_of_forward(tile, _chosen(shape.head_dim).descriptors) as kernel:
            lab.flash_forward(*inputs(shape))
        return tuning.resources(kernel.compiled)
    except Exception as error:  # one configuration that asks for too much shared memory is a result
        if type(error).__name__ not in ("OutOfResources", "PTXASError"):
            raise
        return str(error).splitlines()[0][:200]


def _try_all(jobs: Sequence[tuple[AttentionShape, Tiles]], workers: int) -> list[dict[str, int] | str]:
    if workers <= 1:
        return [try_tile(*job) for job in jobs]
    context = multiprocessing.get_context("spawn")  # most of the time goes into compiling: each keeps a core busy
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(try_tile, *zip(*jobs, strict=True)))


SCHEMA = {
    "dtype": TEXT,
    "shapes": [each(SIZE, "batch", "heads", "seq_len", "head_dim")],
    "points": [
        {"head_dim": SIZE, "tile": [SIZE], **tuning.RESOURCES, **TIMING, "flops_per_second": POSITIVE, "chosen": bool}
    ],
    "refused": {str: TEXT},
}


def measure(
    quick: bool = False,
    shapes: Sequence[AttentionShape] = SHAPES,
    tiles: Mapping[int, Sequence[Tiles]] | None = None,
    workers: int = WORKERS,
) -> dict[str, Any]:
    """Time and resources of every tile; ``quick`` takes two of them.

    Raises:
        RuntimeError: there is no GPU here.
    """
    tiles = tiles or (QUICK_TILES if quick else TILES)
    jobs = [(shape, tile) for shape in shapes for tile in tiles[shape.head_dim]]
    tried = dict(zip(jobs, _try_all(jobs, 1 if quick else workers), strict=True))
    points, refused = [], {}
    for shape in shapes:
        q, k, v = inputs(shape)
        chosen = _chosen(shape.head_dim)

        def run(tile: Tiles, q=q, k=k, v=v, descriptors=chosen.descriptors) -> None:
            with tile_of_forward(tile, descriptors):
                lab.flash_forward(q, k, v)

        fits = {tile: found for (s, tile), found in tried.items() if s == shape and not isinstance(found, str)}
        refused |= {
            f"D {shape.head_dim}, {tile}": found
            for (s, tile), found in tried.items() if s == shape and isinstance(found, str)
        }  # fmt: skip
        timed = timing.compare(
            {tile: lambda tile=tile: run(tile) for tile in fits}, warmup=2, rounds=4 if quick else 12
        )
        points += [
            {
                "head_dim": shape.head_dim,
                "tile": list(tile),
                **found,
                **timed[tile].as_dict(),
                "flops_per_second": attention_flops(shape) / timed[tile].median,
                "chosen": tile == tuple(chosen[:4]),
            }
            for tile, found in fits.items()
        ]
    return {
        "dtype": "bf16",
        "shapes": [
            {"batch": s.batch, "heads": s.heads, "seq_len": s.seq_len, "head_dim": s.head_dim} for s in shapes
        ],
        "points": points,
        "refused": refused,
    }  # fmt: skip


def best(results: Mapping[str, Any], head_dim: int) -> dict[tuple[int, int], dict[str, Any]]:
    """(BLOCK_M, BLOCK_N) -> the faster of its points, with 4 or with 8 warps."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for point in results["points"]:
        key = (point["tile"][0], point["tile"][1])
        if point["head_dim"] == head_dim and (key not in found or point["seconds"] < found[key]["seconds"]):
            found[key] = point
    return found


def rate(point: Mapping[str, Any]) -> float:
    """TFLOP/s of a point."""
    return point["flops_per_second"] / 1e12


def table(results: Mapping[str, Any]) -> str:
    """Rate and resources of the faster number of warps of each tile."""
    texts = []
    for shape in results["shapes"]:
        rows = [
            [f"{m} x {n}", p["tile"][2], p["registers"], p["spills"], p["shared_bytes"], f"{rate(p):.0f}"]
            for (m, n), p in best(results, shape["head_dim"]).items()
        ]
        heads = ["tile", "warps", "registers", "spills", "shared", "TFLOP/s"]
        texts.append(f"D = {shape['head_dim']}\n" + benchmark_cli.text_table(heads, rows))
    texts += [f"{key}: {why}" for key, why in results["refused"].items()]
    return "\n\n".join(texts)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("attention_blocks", measure, table, SCHEMA))
