"""Tiles and stages of each kernel, as they were measured fastest on an H100."""

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
        at_start: Registers a thread that the kernel starts with.
        take_turns: Warpgroups issue their products in turns, so that one exponentiates while the other multiplies.
        partial_sums: A thread adds up its own columns; the threads of a row meet once, at the tile's end.
        late: The rescaling of the output waits until the next product has been issued.
        together: Heads that go side by side.
    """

    warpgroups: int
    columns: int
    stages: int
    registers: int
    at_start: int
    take_turns: bool
    partial_sums: bool
    late: bool
    together: int


def forward(head_dim: int, causal: bool) -> ForwardTile:
    """The forward kernel's configuration for a head_dim of 64, 128 or 256."""
    if head_dim == 64:
        return ForwardTile(3, 128, 4, 160, 128, True, False, False, 8)
    if head_dim == 128:
        return ForwardTile(2, 128, 2, 240, 168, False, False, not causal, 8 if causal else 1)
    return ForwardTile(2, 64, 2, 240, 168, False, True, False, 4)


@dataclass(frozen=True)
class BackwardTile:
    """One configuration of the backward kernel: 128 ``columns`` (keys) a program, ``rows`` queries a step."""

    rows: int
    columns: int
    stages: int
    registers: int
    at_start: int


def backward(head_dim: int) -> BackwardTile:
    """The backward kernel's configuration for a head_dim of 64 or 128."""
    return BackwardTile(128 if head_dim == 64 else 64, 128, 2, 240, 168)
