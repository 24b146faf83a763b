"""Occupancy: how many blocks of a kernel fit on an SM at a time, and what keeps more from fitting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from utils.hardware import GPU


@dataclass(frozen=True)
class Occupancy:
    """How full an SM is with blocks of one kernel.

    Attributes:
        blocks_per_sm: blocks resident at a time.
        warps_per_sm: their warps.
        fraction: warps over the most the SM can hold.
        limiter: what keeps one more block out: ``"warps"`` (the SM's threads), ``"blocks"``, ``"registers"`` or
            ``"shared memory"``; where several bind, the first in that order, which no leaner kernel can change.
        limits: blocks that each resource alone would allow.
    """

    blocks_per_sm: int
    warps_per_sm: int
    fraction: float
    limiter: str
    limits: Mapping[str, int]


def _ceil_to(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def occupancy(
    gpu: GPU, threads_per_block: int, registers_per_thread: int, shared_memory_per_block: int = 0
) -> Occupancy:
    """Blocks, warps and occupancy of a kernel on ``gpu``, and the resource that limits them.

    The rules are those of the CUDA occupancy calculator (cuda_occupancy.h). Registers: a warp's are rounded up to a
    multiple of 256, and each of an SM's schedulers hands out its own share of them. Shared memory: a block's, plus 1
    KiB that the system reserves from compute capability 8.0 on, rounded up to 128 bytes (256 before). Threads: whole
    warps.

    Args:
        gpu: an entry of the hardware table.
        threads_per_block: threads of a block.
        registers_per_thread: 32-bit registers the compiler gave each thread.
        shared_memory_per_block: bytes of shared memory a block uses, static and dynamic.

    Raises:
        TypeError: ``gpu`` is not in the table, a number is not an integer.
        ValueError: a block that could never launch (too many threads, registers or bytes), naming the limit.
    """
    if not isinstance(gpu, GPU):
        raise TypeError(f"gpu must be an entry of the hardware table, such as gpu('H100'), got {gpu!r}")
    _check("threads_per_block", threads_per_block, 1, gpu.max_threads_per_block, gpu.name)
    _check("registers_per_thread", registers_per_thread, 0, gpu.max_registers_per_thread, gpu.name)
    _check("shared_memory_per_block", shared_memory_per_block, 0, gpu.max_shared_memory_per_block, gpu.name)

    warps = -(-threads_per_block // gpu.warp_size)
    by_warps = gpu.max_warps_per_sm // warps

    registers_per_warp = _ceil_to(registers_per_thread * gpu.warp_size, gpu.register_allocation_unit)
    if registers_per_warp:
        if registers_per_warp * _ceil_to(warps, gpu.schedulers_per_sm) > gpu.registers_per_sm:
            raise ValueError(
                f"a block of {threads_per_block} threads with {registers_per_thread} registers each does not fit the "
                f"{gpu.registers_per_sm} registers of an SM of {gpu.name}: use fewer threads or registers"
            )
        per_scheduler = gpu.registers_per_sm // gpu.schedulers_per_sm // registers_per_warp
        by_registers = per_scheduler * gpu.schedulers_per_sm // warps
    else:
        by_registers = gpu.max_blocks_per_sm

    shared = _ceil_to(shared_memory_per_block + gpu.reserved_shared_memory_per_block, gpu.shared_memory_allocation_unit)
    by_shared = gpu.shared_memory_per_sm // shared if shared else gpu.max_blocks_per_sm

    limits = {
        "warps": by_warps,
        "blocks": gpu.max_blocks_per_sm,
        "registers": by_registers,
        "shared memory": by_shared,
    }
    blocks = min(limits.values())
    limiter = next(name for name, limit in limits.items() if limit == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.max_warps_per_sm, limiter, limits)


def _check(name: str, value: int, lowest: int, highest: int, gpu_name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be between {lowest} and {highest} on {gpu_name}, got {value}")
