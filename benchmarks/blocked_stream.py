"""Times calls that keep the CPU busy for long, without their launch latency: the stream waits until all is enqueued.

An autograd function in Python, or a kernel that takes tensor descriptors, costs the CPU up to a few hundred
microseconds a call. The flush that :mod:`utils.timing` runs before each call hides about 90 of them on an H100; here
the GPU idles first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from utils import timing

#: Cycles that the GPU idles before each call: some 300 microseconds.
CYCLES = 500_000


class BlockedStreamTimer(timing.CudaStopwatch):
    """A stopwatch whose GPU waits for the host before each call."""

    def lap(self, fn: Callable[[], object], flush_l2: bool) -> None:
        torch.cuda._sleep(CYCLES)
        super().lap(fn, flush_l2)


@functools.cache
def stopwatch() -> BlockedStreamTimer:
    """The one stopwatch of this kind.

    Raises:
        RuntimeError: kernels do not run on a GPU here.
    """
    return BlockedStreamTimer()
