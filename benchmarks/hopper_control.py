"""racecheck's controls: a kernel whose partitions hand over a tile with a barrier, and the same without the wait.

Triton moves a tile of 64-bit numbers with ordinary loads and stores, one of 32-bit numbers with those for matrices
(``ldmatrix``, ``stmatrix``).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from solutions.capstone_hopper.parts import barriers
from utils.runtime import DEVICE


@gluon.jit
def writes(tile, written, LAYOUT: gl.constexpr):
    """The numbers 0 to 127 into the tile."""
    tile.store(gl.arange(0, 128, layout=LAYOUT).to(tile.dtype))
    mbarrier.arrive(written)


@gluon.jit
def reads(out_ptr, tile, written, LAYOUT: gl.constexpr, WAITS: gl.constexpr):
    """The tile to global memory."""
    if WAITS:
        mbarrier.wait(written, 0)
    gl.store(out_ptr + gl.arange(0, 128, layout=LAYOUT), tile.load(LAYOUT))


@gluon.jit
def control_kernel(out_ptr, WAITS: gl.constexpr):
    """One partition writes 128 numbers into shared memory, another reads them, after a wait or without one."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.allocate_shared_memory(dtype, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = barriers(1, 1).index(0)
    gl.warp_specialize([
        (writes, (tile, written, LAYOUT)),
        (reads, (out_ptr, tile, written, LAYOUT, WAITS)),
    ], [4], [24])  # fmt: skip


def control(waits: bool, matrices: bool) -> None:
    """Run a control in many blocks, for racecheck to watch.

    Args:
        waits: Whether the reader waits for the writer.
        matrices: Whether the tile moves by the instructions for matrices.

    Raises:
        RuntimeError: the one that waits read something else than was written.
    """
    out = torch.full((128,), -1, dtype=torch.int32 if matrices else torch.int64, device=DEVICE)
    control_kernel[(256,)](out, WAITS=waits, num_warps=4)
    if waits and out.tolist() != list(range(128)):
        raise RuntimeError("the control's barrier does not hold back its reader")
