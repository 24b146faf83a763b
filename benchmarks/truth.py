"""The table of the course's profiler against Nsight Compute: ratios, and why each one is not 1.

An explanation is chosen by what the counters themselves show (hits in L1, loads that never went through it, sectors
that stayed in L2), never by a kernel's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Counts within this share of each other are called equal.
EQUAL = 0.01

_L1 = "l1tex__t_sectors_pipe_lsu_mem_global_op_"


@dataclass(frozen=True)
class Row:
    """One count of one kernel: sectors of 32 bytes, counted by the course's profiler and by the hardware.

    ``ratio`` is measured over counted; ``explanation`` says why it is not 1 (empty where it is).
    """

    kernel: str
    size: str
    what: str
    counted: int
    measured: int
    explanation: str

    @property
    def ratio(self) -> float:
        """Measured over counted; 1 where both are zero, infinite where only the count is."""
        if self.counted:
            return self.measured / self.counted
        return float("inf") if self.measured else 1.0

    @property
    def ratio_text(self) -> str:
        """The ratio to three decimals, as tables print it."""
        return f"{self.ratio:.3f}"

    @property
    def equal(self) -> bool:
        """Whether the two agree within :data:`EQUAL`."""
        return abs(self.ratio - 1) <= EQUAL


def comparison(results: Mapping[str, Any]) -> list[Row]:
    """All rows of a recorded comparison (``utils.records.load("profiler_truth").results``), kernel by kernel."""
    return [row for kernel in results["kernels"] for row in _rows(kernel)]


def _rows(kernel: Mapping[str, Any]) -> list[Row]:
    counted, measured = kernel["counted"], kernel["measured"]

    def metric(name: str) -> int:
        return measured.get(f"{name}.sum", 0)

    asynchronous = max(
        metric(_L1 + "ldgsts"), metric(_L1 + "ldgsts_cache_access") + metric(_L1 + "ldgsts_cache_bypass")
    )
    pairs = [
        ("loads", counted["sectors_loaded"] - counted["sectors_atomic"], metric(_L1 + "ld") + asynchronous),
        ("stores", counted["sectors_stored"] - counted["sectors_atomic"], metric(_L1 + "st")),
        ("atomics", counted["sectors_atomic"], metric(_L1 + "red") + metric(_L1 + "atom")),
        ("L2 reads", counted["l2_sectors_loaded"], metric("lts__t_sectors_srcunit_tex_op_read")),
        ("L2 writes", counted["l2_sectors_stored"], metric("lts__t_sectors_srcunit_tex_op_write")),
        ("DRAM reads", counted["dram_sectors_loaded"], metric("dram__sectors_read")),
        ("DRAM writes", counted["dram_sectors_stored"], metric("dram__sectors_write")),
    ]
    return [Row(kernel["name"], kernel["size"], what, count, seen, "") for what, count, seen in pairs if count or seen]
