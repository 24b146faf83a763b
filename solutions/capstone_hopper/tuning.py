"""Tiles and stages of each kernel, as they were measured fastest on an H100 or H200."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardTile:
    """One configuration of the forward kernel.

    Attributes:
        warpgroups: Consumer warpgroups; each has 64 queries.
        columns: Keys of a tile.
        stages: Tiles of keys (and as many of values) in shared memory.
        registers: A consumer's registers a thread; the producer hands its own over.
        launch_maxnreg: Registers a thread that the kernel starts with.
        pingpong: Warpgroups issue their products in turns, so that one exponentiates while the other multiplies.
        partial_sums: A thread adds up its own columns; the threads of a row meet once, at the tile's end.
        rescale_after_mma: The rescaling of the output waits until the next product has been issued.
        together: Heads that go side by side.
        num_q_buffers: Sets of queries in shared memory; with two, outputs share their place.
        mask_apart: Tiles that the causal mask cuts come before the loop, whose code has no mask.
    """

    warpgroups: int
    columns: int
    stages: int
    registers: int
    launch_maxnreg: int
    pingpong: bool
    partial_sums: bool
    rescale_after_mma: bool
    together: int
    num_q_buffers: int
    mask_apart: bool


def forward(head_dim: int, causal: bool) -> ForwardTile:
    """The forward kernel's configuration for a head_dim of 64, 128 or 256."""
    if head_dim == 64:
        return ForwardTile(3, 128, 4, 160, 128, True, causal, True, 8, 2, False)
    if head_dim == 128:
        return ForwardTile(2, 128, 2, 240, 168, False, True, True, 8 if causal else 1, 2, False)
    return ForwardTile(2, 64, 2, 240, 168, False, True, False, 8 if causal else 1, 1, causal)


@dataclass(frozen=True)
class BackwardTile:
    """One configuration of a backward kernel.

    Attributes:
        rows: Queries of a step.
        columns: Keys of a program.
        stages: Tiles of queries (and as many of output gradients) in shared memory.
        registers, launch_maxnreg: As of :class:`ForwardTile`.
        warps: Warps of the first partition: one warpgroup, or both.
        early: The product with the weights is issued before dS is computed.
    """

    rows: int
    columns: int
    stages: int
    registers: int
    launch_maxnreg: int
    warps: int
    early: bool


def backward(head_dim: int) -> BackwardTile:
    """The backward kernel's configuration for a head_dim of 64, 128 or 256."""
    if head_dim == 64:
        return BackwardTile(128, 128, 2, 240, 168, 4, False)
    if head_dim == 128:
        return BackwardTile(64, 128, 2, 240, 168, 4, True)
    return BackwardTile(64, 64, 1, 240, 168, 8, True)
