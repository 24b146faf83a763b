"""Single figures read off a record: the plateaus of its curves, and what a model says beside a measurement.

Records hold curves as they were measured. What a notebook quotes ("L2 answers after 278 cycles") is read from them
here, by rules that are written down once.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SECTOR = 32
#: Bytes that memory delivers at least, on an H100: Nsight Compute counts two sectors read where a kernel touches one.
DRAM_ACCESS = 64

_KIB, _MIB = 1 << 10, 1 << 20
#: Working sets, in bytes, that lie well inside one level of an H100: 256 KiB of L1 a multiprocessor, 50 MiB of L2.
LATENCY_RANGES = {"l1": (4 * _KIB, 64 * _KIB), "l2": (1 * _MIB, 16 * _MIB), "hbm": (256 * _MIB, 2048 * _MIB)}
BANDWIDTH_RANGES = {"l1": (2 * _MIB, 26 * _MIB), "l2": (4 * _MIB, 26 * _MIB), "hbm": (500 * _MIB, 1 << 40)}


def latency_levels(results: Mapping[str, Any]) -> dict[str, float]:
    """Latency of each level in cycles: ``shared``, ``l1``, ``l2``, ``hbm``.

    L1, L2 and HBM are medians over the working sets of :data:`LATENCY_RANGES`; L1 from loads that may use it, the
    others from loads past it. ``shared_by_index`` and ``l1_by_index`` are the same walks written as array indexing,
    as some publications do: each step then computes an address too.

    Args:
        results: Of the record ``latency``.
    """
    sweeps = {"l1": "through_l1", "l2": "past_l1", "hbm": "past_l1"}
    levels = {"shared": results["shared"]["load_cycles"], "shared_by_index": results["by_index"]["shared_cycles"]}
    for level, sweep in sweeps.items():
        low, high = LATENCY_RANGES[level]
        levels[level] = statistics.median(p["cycles"] for p in results[sweep] if low <= p["working_set"] <= high)
    levels["l1_by_index"] = results["by_index"]["l1_cycles"]
    return levels


def near_and_far(histogram: Mapping[str, Any]) -> tuple[float, float]:
    """Mean latency in cycles of the two groups of single loads in a histogram with two humps.

    The chip's L2 and memory are in two halves; a load to the far half takes longer. The groups are cut where the
    variance within them is least (Otsu 1979).

    Args:
        histogram: ``distribution["l2"]`` or ``["hbm"]`` of the record ``latency``.
    """
    width = histogram["bin_cycles"]
    bins = [((i + 0.5) * width, count) for i, count in enumerate(histogram["counts"]) if count]

    def spread(part: Sequence[tuple[float, int]]) -> float:
        mean = _mean(part)
        return sum(count * (center - mean) ** 2 for center, count in part)

    cut = min(range(1, len(bins)), key=lambda i: spread(bins[:i]) + spread(bins[i:]))
    return _mean(bins[:cut]), _mean(bins[cut:])


def _mean(part: Sequence[tuple[float, int]]) -> float:
    return sum(center * count for center, count in part) / sum(count for _, count in part)


def bandwidth_levels(results: Mapping[str, Any]) -> dict[str, float]:
    """Bytes per second that all multiprocessors together read from ``shared``, ``l1``, ``l2`` and ``hbm``.

    Medians over the working sets of :data:`BANDWIDTH_RANGES`.

    Args:
        results: Of the record ``bandwidth``.
    """
    levels = {"shared": results["shared"]["bytes_per_second"]}
    for level, sweep in {"l1": "through_l1", "l2": "past_l1", "hbm": "past_l1"}.items():
        low, high = BANDWIDTH_RANGES[level]
        inside = [p["bytes_per_second"] for p in results[sweep] if low <= p["working_set"] <= high]
        levels[level] = statistics.median(inside)
    return levels


def memory_efficiency(pattern: str, element_size: int, stride: int) -> float:
    """Useful bytes over bytes that memory moves for a strided copy: the sector model, made to fit memory.

    Two things differ from what caches see. Memory delivers 64 bytes at a time, two sectors, so a stride of 16 floats
    costs twice a stride of 8. And a sector of which a kernel writes only a part is read before it is written back, so
    a strided write moves its sectors twice. Useful bandwidth on an H100 is this share of the copy bandwidth within 5%
    for reads up to a stride of 16 floats and for writes up to 8; wider strides fall below it.

    Args:
        pattern: ``"strided read"``, ``"strided write"`` or ``"strided copy"``.
        element_size: Bytes of an element, at most 32.
        stride: Elements from one access to the next on the strided side.

    Raises:
        ValueError: the pattern is another, or a size is below 1.
    """
    if pattern not in ("strided read", "strided write", "strided copy"):
        raise ValueError(f"pattern must be strided read, strided write or strided copy, got {pattern!r}")
    if not 1 <= element_size <= SECTOR or stride < 1:
        raise ValueError(f"element_size must be 1 to {SECTOR} and stride at least 1, got {element_size} and {stride}")
    pitch = stride * element_size
    read = element_size if pattern == "strided write" else min(pitch, DRAM_ACCESS)
    write = element_size if pattern == "strided read" else min(pitch, SECTOR)
    fill = write if pattern != "strided read" and stride > 1 else 0
    return 2 * element_size / (read + write + fill)


def by_size(points: Sequence[Mapping[str, Any]], key: str = "n") -> dict[int, Mapping[str, Any]]:
    """Points of a sweep by their size, for looking one up: ``by_size(results["cublas"])[1792]``."""
    return {point[key]: point for point in points}
