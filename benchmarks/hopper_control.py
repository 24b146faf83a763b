"""racecheck's controls: small kernels of which it is known whether they have a race.

In three, one partition hands a tile to another and tells it by an ``mbarrier``, as the package's kernels do; Triton
moves a tile of 64-bit numbers with ordinary loads and stores, one of 32-bit numbers with those for matrices
(``ldmatrix``, ``stmatrix``). In two, the warps of one partition hand numbers to each other, with a barrier of the block
in between.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from benchmarks import hopper_races
from solutions.capstone_hopper.parts import barriers
from utils.runtime import DEVICE

#: Numbers that change hands.
SIZE = 256


@gluon.jit
def writes(tile, written, LAYOUT: gl.constexpr):
    """The numbers from 0 into the tile."""
    tile.store(gl.arange(0, tile.shape[0], layout=LAYOUT).to(tile.dtype))
    mbarrier.arrive(written)


@gluon.jit
def reads(out_ptr, tile, written, LAYOUT: gl.constexpr, WAITS: gl.constexpr):
    """The tile to global memory."""
    if WAITS:
        mbarrier.wait(written, 0)
    gl.store(out_ptr + gl.arange(0, tile.shape[0], layout=LAYOUT), tile.load(LAYOUT))


@gluon.jit
def hand_over_kernel(out_ptr, SIZE: gl.constexpr, WAITS: gl.constexpr):
    """One partition writes numbers into shared memory, another reads them, after a wait or without one."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.allocate_shared_memory(dtype, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = barriers(1, 1).index(0)
    gl.warp_specialize([
        (writes, (tile, written, LAYOUT)),
        (reads, (out_ptr, tile, written, LAYOUT, WAITS)),
    ], [4], [24])  # fmt: skip


@gluon.jit
def nothing():
    """A partition with no work."""


@gluon.jit
def exchanges(out_ptr, tile):
    """Numbers into the tile, and back in another order, in which most threads hold those of another warp."""
    PAIRS: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    SINGLE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile.store(gl.arange(0, tile.shape[0], layout=PAIRS).to(tile.dtype))
    gl.store(out_ptr + gl.arange(0, tile.shape[0], layout=SINGLE), tile.load(SINGLE))


@gluon.jit
def exchange_kernel(out_ptr, SIZE: gl.constexpr):
    """The warps of one partition hand each other numbers through shared memory; Triton puts a barrier in between."""
    tile = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(nothing, ()), (exchanges, (out_ptr, tile))], [4], [24])


def control(name: str) -> None:
    """Run one of :data:`benchmarks.hopper_races.CONTROLS` in many blocks, for racecheck to watch.

    Partitions start by atomics; the barrier that is to be missing is taken out of what Triton compiles.

    Raises:
        RuntimeError: one without a race has read something else than was written.
    """
    known = hopper_races.CONTROLS[name]
    hopper_races.install(hopper_races.without_barriers if known.barrier_removed else None)
    out = torch.full((SIZE,), -1, dtype=torch.int32 if known.matrices else torch.int64, device=DEVICE)
    if known.mbarrier:
        hand_over_kernel[(256,)](out, SIZE=SIZE, WAITS=not known.race, num_warps=4)
    else:
        exchange_kernel[(256,)](out, SIZE=SIZE, num_warps=4)
    if not known.race and out.tolist() != list(range(SIZE)):
        raise RuntimeError(f"the control that {name} has read something else than was written")
