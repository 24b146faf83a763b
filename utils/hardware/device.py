"""What a GPU, a TPU and a CPU are to this course: the figures that predict how long a kernel takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Cycles = int | float | tuple[float, float]


def _frozen(mapping: Mapping) -> Mapping:
    return MappingProxyType(dict(mapping))


@dataclass(frozen=True)
class GPU:
    """One GPU, as its maker and those who measured it describe it. Frozen; every rate is *dense* unless said otherwise.

    Attributes:
        name: short name used throughout the course, ``"H100"``.
        full_name: the exact product the figures belong to, ``"NVIDIA H100 SXM5 80GB"``.
        year: year of launch.
        architecture: NVIDIA's name of the generation, ``"Hopper"``.
        compute_capability: ``(major, minor)``.
        sms: streaming multiprocessors that are enabled.
        clock_hz: highest boost clock of the SMs, Hz.
        warp_size: threads of a warp (32 on every GPU listed).
        max_warps_per_sm, max_threads_per_sm, max_blocks_per_sm: what may be resident on an SM at a time.
        max_threads_per_block: threads of a block.
        registers_per_sm: 32-bit registers of an SM.
        max_registers_per_thread: 32-bit registers a thread may use.
        register_allocation_unit: registers are given to a *warp* in multiples of this many.
        schedulers_per_sm: partitions of an SM, each with a warp scheduler and an equal share of the registers.
        shared_memory_per_sm: bytes of shared memory an SM can be configured to offer to its blocks.
        max_shared_memory_per_block: bytes a block may ask for (above 48 KiB only on request).
        shared_memory_allocation_unit: shared memory is given to a block in multiples of this many bytes.
        reserved_shared_memory_per_block: bytes the system keeps for itself per block.
        l1_bytes_per_sm: bytes of the SM's L1 memory; from Volta on it is the one array that shared memory is cut from.
        l2_bytes: bytes of L2.
        memory_bytes: capacity as printed on the data sheet, decimal (80 GB = 80e9); a driver reports a little more,
            since the stacks are made in powers of two.
        memory_bandwidth: bytes/s of the device memory.
        peak_flops: FLOP/s (operations/s for ``"int8"``) by number format. ``"fp64"`` and ``"fp32"`` are the ordinary
            cores; ``"fp64_tensor"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp8"``, ``"int8"`` and ``"fp4"`` are the
            tensor cores where the GPU has them (``has_tensor_cores``), with sums in fp32. A format that the GPU lacks,
            or that its data sheet does not rate, is absent.
        peak_flops_sparse: the same with 2:4 structured sparsity, the figure that advertisements print.
        link_bandwidth: bytes/s of NVLink, both directions added, or None without NVLink.
        pcie_bandwidth: bytes/s of the PCIe slot, both directions added, or None where it depends on the host.
        latency_cycles: published latency by level, in cycles: a number, or ``(low, high)`` where methods disagree.
        sources: where each figure comes from, by field name.
    """

    name: str
    full_name: str
    year: int
    architecture: str
    compute_capability: tuple[int, int]
    sms: int
    clock_hz: float
    max_warps_per_sm: int
    max_blocks_per_sm: int
    shared_memory_per_sm: int
    max_shared_memory_per_block: int
    shared_memory_allocation_unit: int
    reserved_shared_memory_per_block: int
    l1_bytes_per_sm: int
    l2_bytes: int
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: Mapping[str, float]
    has_tensor_cores: bool
    sources: Mapping[str, str]
    peak_flops_sparse: Mapping[str, float] = field(default_factory=dict)
    link_bandwidth: float | None = None
    pcie_bandwidth: float | None = None
    latency_cycles: Mapping[str, Cycles] = field(default_factory=dict)
    schedulers_per_sm: int = 4
    warp_size: int = 32
    max_threads_per_block: int = 1024
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255
    register_allocation_unit: int = 256

    def __post_init__(self) -> None:
        for name in ("peak_flops", "peak_flops_sparse", "latency_cycles", "sources"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    def __hash__(self) -> int:
        return hash((type(self), self.name))

    @property
    def max_threads_per_sm(self) -> int:
        """Threads that may be resident on an SM: the warps times their 32 threads."""
        return self.max_warps_per_sm * self.warp_size

    def latency_range(self, level: str) -> tuple[float, float]:
        """Lowest and highest published latency of ``level`` in cycles; equal where one figure is known.

        Raises:
            ValueError: nothing is published for ``level`` on this GPU.
        """
        if level not in self.latency_cycles:
            known = ", ".join(self.latency_cycles) or "none"
            raise ValueError(f"no latency of {level!r} is listed for {self.name} (listed: {known})")
        cycles = self.latency_cycles[level]
        return (float(cycles[0]), float(cycles[1])) if isinstance(cycles, tuple) else (float(cycles), float(cycles))


@dataclass(frozen=True)
class TPU:
    """One TPU chip: a large systolic matrix unit, a vector unit and HBM; no warps, no SMs.

    Attributes:
        name: short name, ``"TPU v5e"``.
        year: year of general availability.
        peak_flops: FLOP/s (operations/s for ``"int8"``) of one chip, dense.
        memory_bytes, memory_bandwidth: HBM in bytes and bytes/s.
        matrix_unit: rows and columns of one systolic array.
        link_bandwidth: bytes/s of the links between chips, as the maker adds them up.
        sources: where each figure comes from, by field name.
    """

    name: str
    year: int
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    matrix_unit: tuple[int, int]
    link_bandwidth: float
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in ("peak_flops", "sources"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    def __hash__(self) -> int:
        return hash((type(self), self.name))


@dataclass(frozen=True)
class CPU:
    """One server processor, to hold a GPU against: few fast threads.

    Attributes:
        name: short name, ``"EPYC 9654"``.
        year: year of launch.
        cores, threads_per_core: cores, and hardware threads of each.
        clock_hz: clock that all cores hold, Hz.
        flops_per_core_cycle: FLOPs of a core in a cycle, by number format.
        memory_bandwidth: bytes/s of a socket.
        sources: where each figure comes from, by field name.
    """

    name: str
    year: int
    cores: int
    threads_per_core: int
    clock_hz: float
    flops_per_core_cycle: Mapping[str, int]
    memory_bandwidth: float
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in ("flops_per_core_cycle", "sources"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    def __hash__(self) -> int:
        return hash((type(self), self.name))

    @property
    def threads(self) -> int:
        """Threads that are resident at a time (a GPU: ``sms * max_threads_per_sm``)."""
        return self.cores * self.threads_per_core

    @property
    def peak_flops(self) -> Mapping[str, float]:
        """FLOP/s by number format: cores times FLOPs a cycle times the clock."""
        return {name: self.cores * each * self.clock_hz for name, each in self.flops_per_core_cycle.items()}
