"""The order of a product's tiles: what HBM delivers, counted by the hardware, and what the order costs in time.

One kernel, one tile; only the height of a group of tile rows (GROUP_M) changes. With 1 the programs walk along the rows
of the output, with all of its tile rows along the columns. Programs that run at the same time share what is in the L2
cache, so the order decides how often a band of the operands comes from HBM.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import benchmark_cli, profiler_truth
from utils import example_kernels, runtime, timing
from utils.example_kernels.matmul import Tiles
from utils.fingerprint import ROOT
from utils.record_schemas import COUNT, POSITIVE, SIZE, TEXT, TIMING, each

SIZES = (4096, 8192, 16384)
QUICK_SIZES = (4096, 8192)
#: Tile rows of a group; the last is more than any of the sizes has, so that it means column by column.
GROUPS = (1, 2, 4, 8, 16, 32, 128)
#: BLOCK_M, BLOCK_N, BLOCK_K, warps and stages: one program fills an H100's multiprocessor.
TILE = (128, 256, 64, 8, 3)
METRICS = (
    "dram__sectors_read.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "l1tex__m_xbar2l1tex_read_sectors.sum",
)
NAMES = ("dram_sectors_read", "l2_sectors_read", "l1_sectors_received")


def tile_of(group: int) -> Tiles:
    """The tile of this record with groups of ``group`` tile rows."""
    block_m, block_n, block_k, warps, stages = TILE
    return (block_m, block_n, block_k, group, warps, stages)


def products(n: int, groups: Sequence[int]) -> dict[int, Callable[[], object]]:
    """A call of (n, n) @ (n, n) in bf16 for each height of a group."""
    a, b = (torch.randn(n, n, device=runtime.DEVICE).to(torch.bfloat16) for _ in range(2))
    return {group: partial(example_kernels.tiled_matmul, a, b, tile_of(group)) for group in groups}


def launch_for_counters(sizes: Sequence[int], groups: Sequence[int]) -> None:
    """Run each product once to compile it, then once with Nsight Compute watching (``--profile-from-start off``)."""
    for n in sizes:
        calls = products(n, groups).values()
        for call in calls:
            call()
        torch.cuda.synchronize()
        for call in calls:
            torch.cuda.cudart().cudaProfilerStart()
            call()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()


def counters(sizes: Sequence[int], groups: Sequence[int]) -> dict[tuple[int, int], dict[str, int]]:
    """Sectors of 32 bytes that each product reads, (n, group) -> name -> count; caches flushed before each pass.

    Raises:
        RuntimeError: ncu is missing, fails, or saw other kernels.
    """
    options = {
        "--print-units": "base",
        "--profile-from-start": "off",
        "--cache-control": "all",
        "--clock-control": "none",
        "--kernel-name-base": "function",
        "--kernel-name": "regex:^tiled_matmul_kernel$",
        "--metrics": ",".join(METRICS),
    }
    program = [sys.executable, "-m", "benchmarks.tile_order", "--launch", *map(str, sizes), "--groups"]
    command = [profiler_truth.nsight_compute(), "--csv", *(word for pair in options.items() for word in pair)]
    done = subprocess.run(
        [*command, *program, *map(str, groups)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"ncu failed with status {done.returncode}: {(done.stdout + done.stderr).strip()[-1500:]}")
    keys = [(n, group) for n in sizes for group in groups]
    seen = profiler_truth.read_counters(done.stdout, [(str(key), ("tiled_matmul_kernel",)) for key in keys])
    return {key: {name: seen[str(key)][metric] for name, metric in zip(NAMES, METRICS, strict=True)} for key in keys}


SCHEMA = {
    "dtype": TEXT,
    "tile": [SIZE],
    "points": [
        {
            "n": SIZE,
            "group": SIZE,
            **each(COUNT, "dram_sectors_read", "l2_sectors_read", "l1_sectors_received"),
            **TIMING,
            "flops_per_second": POSITIVE,
        }
    ],
}


def measure(quick: bool = False, sizes: Sequence[int] | None = None, groups: Sequence[int] = GROUPS) -> dict[str, Any]:
    """Counters and times of each size and group; ``quick`` leaves the largest size out.

    Raises:
        RuntimeError: there is no GPU or no Nsight Compute here.
    """
    sizes = sizes or (QUICK_SIZES if quick else SIZES)
    counted = counters(sizes, groups)
    points = []
    for n in sizes:
        timed = timing.compare(products(n, groups), warmup=2, rounds=8 if quick else 20)
        points += [
            {
                "n": n,
                "group": group,
                **counted[n, group],
                **timed[group].as_dict(),
                "flops_per_second": 2 * n**3 / timed[group].median,
            }
            for group in groups
        ]
    return {"dtype": "bf16", "tile": list(TILE), "points": points}


def table(results: dict[str, Any]) -> str:
    """HBM traffic and rate of each size and group."""
    rows = [
        [p["n"], p["group"], f"{32 * p['dram_sectors_read'] / 1e6:,.0f}", f"{p['flops_per_second'] / 1e12:.0f}"]
        for p in results["points"]
    ]
    return benchmark_cli.text_table(["N", "group", "MB from HBM", "TFLOP/s"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--launch"]:
        split = sys.argv.index("--groups")
        launch_for_counters([int(n) for n in sys.argv[2:split]], [int(g) for g in sys.argv[split + 1 :]])
    else:
        raise SystemExit(benchmark_cli.run("tile_order", measure, table, SCHEMA))
