"""Latency of every level of memory, by pointer chasing in CUDA C++ (``benchmarks/cuda/latency.cu``).

One thread follows a chain of pointers through a working set, each load waiting for the one before. As the working set
outgrows a cache, the time of a load climbs to the next level's. Loads through L1 and past it are separate sweeps; a
third sweep touches one line in each 2 MiB page, so that only address translation can be slow; histograms of single
loads show near and far L2; and each multiprocessor in turn reads one and the same line.
"""

from __future__ import annotations

from typing import Any

from benchmarks import benchmark_cli, cuda_program
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, each

SOURCES = cuda_program.sources("latency")


_CYCLES = {"cycles": POSITIVE, "seconds": POSITIVE, "steps": SIZE}
_HISTOGRAM = {"working_set": SIZE, "bin_cycles": SIZE, "counts": [COUNT]}
SCHEMA = {
    "through_l1": [{"working_set": SIZE, **_CYCLES}],
    "past_l1": [{"working_set": SIZE, **_CYCLES}],
    "pages": [{"pages": SIZE, **_CYCLES}],
    "distribution": each(_HISTOGRAM, "l1", "l2", "hbm"),
    "one_line_from_each_sm": [POSITIVE],
    "by_index": {"shared_cycles": POSITIVE, "l1_cycles": POSITIVE},
    "shared": {
        **each(POSITIVE, "load_cycles", "store_then_load_cycles", "store_then_fence_cycles"),
        "fence_cycles": NOT_NEGATIVE,
    },
}


def measure(quick: bool = False) -> dict[str, Any]:
    """Latencies in cycles and seconds by working set in bytes; ``quick`` stops at 256 MiB and takes a few seconds.

    Raises:
        RuntimeError: there is no GPU or no nvcc here.
    """
    if quick:
        return cuda_program.run("latency", largest=256 << 20, page_span=1 << 30)
    return cuda_program.run("latency")


def table(results: dict[str, Any]) -> str:
    """Both sweeps side by side, in cycles, and the shared-memory figures."""
    past = {point["working_set"]: point for point in results["past_l1"]}
    rows = [
        [
            f"{point['working_set'] / 1024:,.1f} KiB",
            f"{point['cycles']:.1f}",
            f"{past[point['working_set']]['cycles']:.1f}",
            f"{past[point['working_set']]['seconds'] * 1e9:.1f}",
        ]
        for point in benchmark_cli.thin(results["through_l1"])
    ]
    shared = ", ".join(f"{name} {value:.1f}" for name, value in results["shared"].items())
    pages = ", ".join(f"{point['pages']}: {point['cycles']:.0f}" for point in benchmark_cli.thin(results["pages"], 12))
    by_index = results["by_index"]
    sms = results["one_line_from_each_sm"]
    return "\n".join(
        [
            benchmark_cli.text_table(["working set", "through L1, cycles", "past L1, cycles", "past L1, ns"], rows),
            f"shared memory: {shared}",
            f"by index: shared {by_index['shared_cycles']:.1f}, L1 {by_index['l1_cycles']:.1f} cycles",
            f"2 MiB pages touched: {pages}",
            f"one L2 line from {len(sms)} multiprocessors: {min(sms):.0f} to {max(sms):.0f} cycles",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("latency", measure, table, SCHEMA))
