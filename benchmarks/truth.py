"""The table of the course's profiler against Nsight Compute: ratios, and why each one is not 1.

An explanation is chosen by what the counters themselves show (repeats that L1 answered, sectors that came by the copy
engine, reads that several multiprocessors shared), never by a kernel's name. What no rule fits stays unexplained, and a
test fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Counts within this share of each other are called equal.
EQUAL = 0.01
#: A launch reads its instructions, arguments and descriptors from memory too: up to this many sectors (64 KiB).
LAUNCH_SECTORS = 2048

_L1 = "l1tex__t_sectors_pipe_lsu_mem_global_op_"
_FROM_L2 = "l1tex__m_xbar2l1tex_read_sectors"


@dataclass(frozen=True)
class Row:
    """One count of one kernel: sectors of 32 bytes, counted by the course's profiler and by the hardware.

    Attributes:
        kernel: The kernel's name in the table.
        size: Its problem size, in words.
        what: Which sectors: ``loads``, ``stores`` and ``atomics`` are what warps ask of L1; ``into L1`` what L2 sends
            to the multiprocessors; ``L2 reads`` and ``L2 writes`` what L2 looks up; ``DRAM reads`` and ``DRAM
            writes`` what memory moves.
        counted: By ``utils.kernel_profile`` in the interpreter.
        measured: By the hardware.
        explanation: Why the two differ; empty where they are equal.
    """

    kernel: str
    size: str
    what: str
    counted: int
    measured: int
    explanation: str = ""

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
    return [row for kernel in results["kernels"] for row in rows(kernel)]


def rows(kernel: Mapping[str, Any]) -> list[Row]:
    """The rows of one recorded kernel: every pair of counts of which at least one is not zero."""
    counted, measured = kernel["counted"], Counters(kernel["measured"])
    atomics = counted["sectors_atomic"]
    into_l1 = counted["l2_sectors_loaded"] - atomics  # an atomic is carried out in L2: nothing comes back
    pairs = {
        "loads": (counted["sectors_loaded"] - atomics, measured[_L1 + "ld"] + measured[_L1 + "ldgsts_cache_access"]),
        "stores": (counted["sectors_stored"] - atomics, measured[_L1 + "st"]),
        "atomics": (atomics, measured[_L1 + "red"] + measured[_L1 + "atom"]),
        "into L1": (into_l1, measured[_FROM_L2]),
        "L2 reads": (into_l1, measured["lts__t_sectors_srcunit_tex_op_read"]),
        "L2 writes": (counted["l2_sectors_stored"] - atomics, measured["lts__t_sectors_srcunit_tex_op_write"]),
        "DRAM reads": (counted["dram_sectors_loaded"], measured["dram__sectors_read"]),
        "DRAM writes": (counted["dram_sectors_stored"], measured["dram__sectors_write"]),
    }
    found = []
    for what, (count, seen) in pairs.items():
        if count or seen:
            row = Row(kernel["name"], kernel["size"], what, count, seen)
            why = "" if row.equal else _RULES[what](count, seen, measured)
            found.append(Row(kernel["name"], kernel["size"], what, count, seen, why))
    return found


def unexplained(results: Mapping[str, Any]) -> list[Row]:
    """Rows whose counts differ for a reason that no rule here knows."""
    return [row for row in comparison(results) if not row.equal and not row.explanation]


class Counters:
    """Hardware counters by base name; 0 for one that was not read."""

    def __init__(self, values: Mapping[str, int]) -> None:
        self.values = values

    def __getitem__(self, name: str) -> int:
        return self.values.get(f"{name}.sum", 0)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= EQUAL * max(a, b, 1)


def _loads(counted: int, measured: int, counters: Counters) -> str:
    by_copy_engine = counters[_FROM_L2 + "_mem_global_op_tma_ld"]
    if measured < counted and _close(measured + by_copy_engine, counted):
        return f"TMA: {by_copy_engine:,} sectors come by the copy engine, which passes the load path by"
    hits, requests = counters[_L1 + "ld_lookup_hit"], counters["l1tex__t_requests_pipe_lsu_mem_global_op_ld"]
    if measured > counted and requests and measured - hits <= counted * (1 + EQUAL):
        return (
            f"L1 hits: sectors are asked for again by a lane's next element or by another warp of the program "
            f"({measured / requests:.1f} sectors a request); L1 answers {hits:,} of them"
        )
    return ""


def _stores(counted: int, measured: int, counters: Counters) -> str:
    by_copy_engine = counters["l1tex__m_l1tex2xbar_write_sectors_mem_global_op_tma_st"]
    if measured < counted and _close(measured + by_copy_engine, counted):
        return f"TMA: {by_copy_engine:,} sectors go by the copy engine, which passes the store path by"
    requests = counters["l1tex__t_requests_pipe_lsu_mem_global_op_st"]
    if measured > counted and requests:
        return (
            f"element by element: a lane's neighbouring elements leave by separate instructions, each touching the "
            f"same sectors ({measured / requests:.1f} sectors a request)"
        )
    return ""


def _atomics(counted: int, measured: int, counters: Counters) -> str:
    if not counted and counters[_FROM_L2 + "_mem_global_op_tma_ld"]:
        return "TMA: each program writes its tensor descriptors to memory and fetches them for the copy engine"
    return ""


def _into_l1(counted: int, measured: int, counters: Counters) -> str:
    return ""  # the two agree for every kernel; a rule comes with the first that differs


def _l2_reads(counted: int, measured: int, counters: Counters) -> str:
    arrived = counters[_FROM_L2]
    left, delivered = counters["lrc__lts2lrc_sectors_op_read"], counters["lrc__xbar2gpc_sectors_op_read"]
    if measured < counted and _close(arrived, counted) and left < delivered:
        return (
            f"shared reads: multiprocessors that ask for one sector at a time share one read of L2 "
            f"(its request coalescer turned {left:,} sectors into {delivered:,})"
        )
    return ""


def _l2_writes(counted: int, measured: int, counters: Counters) -> str:
    if measured > counted and counters[_L1 + "st"] > measured:
        return (
            f"write-through: parts of a sector are stored by separate instructions; L1 merges "
            f"{counters[_L1 + 'st']:,} stored sectors to {measured:,} before they reach L2"
        )
    return ""


def _dram_reads(counted: int, measured: int, counters: Counters) -> str:
    if 0 < measured - counted <= LAUNCH_SECTORS:
        return f"{measured - counted:,} sectors more: the launch's instructions, arguments and descriptors"
    if _close(measured, 2 * counted):
        return "64 bytes at a time: memory delivers two neighbouring sectors, of which the kernel needs one"
    return ""


def _dram_writes(counted: int, measured: int, counters: Counters) -> str:
    if measured < counted:
        kept = (counted - measured) * 32
        return f"write-back: {kept:,} bytes of modified sectors stay in L2 until something evicts them"
    return ""


_RULES = {
    "loads": _loads,
    "stores": _stores,
    "atomics": _atomics,
    "into L1": _into_l1,
    "L2 reads": _l2_reads,
    "L2 writes": _l2_writes,
    "DRAM reads": _dram_reads,
    "DRAM writes": _dram_writes,
}
