"""Useful bandwidth of copies by stride, offset and element size (``benchmarks/cuda/access.cu``), and the sector model.

A copy's *useful* bytes are the ones it was asked to copy, read and written. The model (``utils.simt.access_pattern``)
says how many bytes the 32-byte sectors that its warps touch hold; if memory moved those and nothing else, useful
bandwidth would be the copy bandwidth times useful bytes over moved bytes. Where the measurement differs, something
else is at work: DRAM moves more than one sector at a time, and neighbouring warps find shared sectors in the cache.
"""

from __future__ import annotations

from typing import Any

from benchmarks import benchmark_cli, cuda_program
from utils import simt
from utils.record_schemas import COUNT, POSITIVE, SIZE, TEXT, TIMING, each

SOURCES = cuda_program.sources("access")

_WARPS = 32  # a pattern repeats after this many warps for every stride, offset and element size here


def sector_efficiency(pattern: str, element_size: int, stride: int, offset: int) -> float:
    """Useful bytes over the bytes of the sectors that the copy's warps touch, from the model of a warp's access.

    Args:
        pattern: ``"strided read"``, ``"strided write"``, ``"strided copy"``, ``"misaligned copy"`` or ``"element
            size"``.
        element_size: Bytes of an element.
        stride: Elements from one access to the next on the strided side.
        offset: Elements that the read starts after an aligned address.

    Raises:
        ValueError: the pattern is unknown.
    """
    strides = {"strided read": (stride, 1), "strided write": (1, stride), "strided copy": (stride, stride)}
    if pattern not in (*strides, "misaligned copy", "element size"):
        raise ValueError(f"pattern must be one of {', '.join(strides)}, misaligned copy, element size, got {pattern!r}")
    read_stride, write_stride = strides.get(pattern, (1, 1))
    lanes = range(32 * _WARPS)
    read = simt.access_pattern([i * read_stride + offset for i in lanes], element_size)
    write = simt.access_pattern([i * write_stride for i in lanes], element_size)
    return (read.bytes_requested + write.bytes_requested) / (read.bytes_moved + write.bytes_moved)


SCHEMA = {
    "points": [
        {
            "pattern": TEXT,
            "level": TEXT,
            **each(SIZE, "element_size", "count", "stride"),
            "offset": COUNT,
            **TIMING,
            "useful_bytes_per_second": POSITIVE,
            "sector_efficiency": POSITIVE,
        }
    ]
}


def measure(quick: bool = False) -> dict[str, Any]:
    """Seconds and useful bytes per second of each copy; ``quick`` copies an eighth of the elements.

    Raises:
        RuntimeError: there is no GPU or no nvcc here.
    """
    results = cuda_program.run("access", count=4 << 20) if quick else cuda_program.run("access")
    for point in results["points"]:
        point["sector_efficiency"] = sector_efficiency(
            point["pattern"], point["element_size"], point["stride"], point["offset"]
        )
    return results


def table(results: dict[str, Any]) -> str:
    """One line a copy: useful TB/s, and its share of the best copy of that kind beside the model's."""
    best: dict[tuple[str, str], float] = {}
    for point in results["points"]:
        key = (point["level"], "copy")
        best[key] = max(best.get(key, 0.0), point["useful_bytes_per_second"])
    rows = [
        [
            f"{point['pattern']} ({point['level']})",
            point["element_size"],
            point["stride"],
            point["offset"],
            f"{point['useful_bytes_per_second'] / 1e12:.3f}",
            f"{point['useful_bytes_per_second'] / best[(point['level'], 'copy')]:.3f}",
            f"{point['sector_efficiency']:.3f}",
        ]
        for point in results["points"]
        if point["offset"] in (0, 1, 4, 7, 8, 16, 31, 32)
    ]
    return benchmark_cli.text_table(["copy", "B", "stride", "offset", "useful TB/s", "of best", "model"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("access", measure, table, SCHEMA))
