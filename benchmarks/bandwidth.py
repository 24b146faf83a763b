"""Bandwidth plateaus of L1, L2 and HBM, by reading working sets of growing size (``benchmarks/cuda/bandwidth.cu``)."""

from __future__ import annotations

from typing import Any

from benchmarks import benchmark_cli, cuda_program
from utils.record_schemas import POSITIVE, SIZE, TIMING

SOURCES = cuda_program.sources("bandwidth")


_POINT = {"working_set": SIZE, "bytes_per_second": POSITIVE, **TIMING, "bytes_per_cycle_per_sm": POSITIVE}
SCHEMA = {"through_l1": [_POINT], "past_l1": [_POINT], "shared": _POINT}


def measure(quick: bool = False) -> dict[str, Any]:
    """Bytes per second by working set in bytes, over all multiprocessors; ``quick`` reads less and takes a few seconds.

    Raises:
        RuntimeError: there is no GPU or no nvcc here.
    """
    if quick:
        return cuda_program.run("bandwidth", largest=512 << 20, traffic=2 << 30)
    return cuda_program.run("bandwidth")


def table(results: dict[str, Any]) -> str:
    """Both sweeps side by side, in TB/s."""
    past = {point["working_set"]: point for point in results["past_l1"]}
    rows = [
        [
            f"{point['working_set'] / 2**20:,.1f} MiB",
            f"{point['bytes_per_second'] / 1e12:.2f}",
            f"{past[point['working_set']]['bytes_per_second'] / 1e12:.2f}",
            f"{point['bytes_per_cycle_per_sm']:.1f}",
        ]
        for point in results["through_l1"]
    ]
    shared = results["shared"]
    return "\n".join(
        [
            benchmark_cli.text_table(
                ["working set", "through L1, TB/s", "past L1, TB/s", "through L1, B/cycle/SM"], rows
            ),
            f"shared memory: {shared['bytes_per_second'] / 1e12:.2f} TB/s, "
            f"{shared['bytes_per_cycle_per_sm']:.1f} B/cycle/SM",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("bandwidth", measure, table, SCHEMA))
