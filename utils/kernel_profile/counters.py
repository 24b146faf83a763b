"""What is counted, and what each count stands for on the hardware."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

SECTOR = 32  # bytes: what a GPU's caches and memory move at least


@dataclass(slots=True)
class Counters:
    """Exact counts of memory traffic and of ``tl.dot`` arithmetic. All sizes in bytes, a sector is 32 bytes.

    Attributes:
        bytes_loaded: Bytes that unmasked lanes ask for. An atomic reads its element, so it counts here too.
        bytes_stored: Bytes that unmasked lanes write. An atomic writes its element, so it counts here too.
        bytes_atomic: The part of both that atomics account for.
        sectors_loaded: Sectors of all requests, as the L1 cache sees them: a request is what 32 lanes (a warp) ask for
            with one instruction, and each sector that it touches counts once. Nsight Compute:
            ``l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum``.
        sectors_stored: The same for stores, ``l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum``.
        sectors_atomic: The part of both that atomics account for.
        l2_sectors_loaded: Sectors that must come from the L2 cache even if L1 keeps all that a program has loaded: each
            counts once per program. Nsight Compute's ``lts__t_sectors_op_read.sum`` is near where programs share
            little.
        l2_sectors_stored: L1 writes through, so this is ``sectors_stored``.
        dram_sectors_loaded: Distinct sectors that a launch loads: what memory must deliver to a cold L2 cache without
            limits. Nsight Compute: ``dram__sectors_read.sum`` where the data fit L2.
        dram_sectors_stored: Distinct sectors that a launch stores.
        useful_bytes_loaded: Distinct bytes asked for, request by request: a broadcast of one element counts it once.
        useful_bytes_stored: The same for stores.
        flops: 2 x m x n x k of each ``tl.dot``; other arithmetic is not counted.
    """

    bytes_loaded: int = 0
    bytes_stored: int = 0
    bytes_atomic: int = 0
    sectors_loaded: int = 0
    sectors_stored: int = 0
    sectors_atomic: int = 0
    l2_sectors_loaded: int = 0
    l2_sectors_stored: int = 0
    dram_sectors_loaded: int = 0
    dram_sectors_stored: int = 0
    useful_bytes_loaded: int = 0
    useful_bytes_stored: int = 0
    flops: int = 0

    def add(self, other: Counters) -> None:
        """Add ``other``'s counts to these."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def bytes_moved(self) -> int:
        """Bytes loaded plus bytes stored."""
        return self.bytes_loaded + self.bytes_stored

    @property
    def sectors_moved(self) -> int:
        """Sectors loaded plus sectors stored."""
        return self.sectors_loaded + self.sectors_stored

    @property
    def coalescing(self) -> float:
        """Useful bytes per byte of the sectors moved, 0 to 1; 1 where nothing was moved."""
        useful = self.useful_bytes_loaded + self.useful_bytes_stored
        return useful / (SECTOR * self.sectors_moved) if self.sectors_moved else 1.0

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs of dots per byte loaded or stored (FLOP/B); 0 where nothing was computed."""
        if self.flops == 0:
            return 0.0
        return self.flops / self.bytes_moved if self.bytes_moved else float("inf")


_NAMES = tuple(field.name for field in fields(Counters))


def total(counters: Iterable[Counters]) -> Counters:
    """Sum of several counters."""
    result = Counters()
    for one in counters:
        result.add(one)
    return result
