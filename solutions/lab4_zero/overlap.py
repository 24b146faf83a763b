"""What runs beside the computation: on a GPU in a CUDA stream of its own, on a CPU as a collective just started.

The two look alike from outside. On a GPU nothing here makes the host wait: the order of the streams is set by events,
so that the host may run ahead of the device and memory is still never overwritten while it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

# PyTorch 2.13 renamed the two; 2.9 to 2.12 have the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SideStream:
    """A stream beside the compute stream; on a CPU there is none, and its methods do nothing.

    It has a higher priority: a collective's few thread blocks then start while a large matrix product runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def recorded_event(self) -> torch.cuda.Event | None:
        """Record an event on the current stream, for another stream to wait for."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def stream_after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Put what the block launches and allocates on this stream, to start after ``event``."""
        if self.stream is None:
            yield
            return
        if event is not None:
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            yield

    def wait_for_event(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream (not the host) wait for ``event``."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def start_all_gather(full: Tensor, shard: Tensor, group: ProcessGroup | None) -> Work | None:
    """Fill ``full`` (N n,) on every rank with the ranks' shards (n,) in order of rank; ``shard`` may be its own part.

    Returns:
        On a CPU a handle to ``wait()`` for; on a GPU None, for the current stream takes care of the order.
    """
    return _all_gather(full, shard, group=group, async_op=not full.is_cuda)


def start_reduce_scatter(shard: Tensor, full: Tensor, group: ProcessGroup | None) -> Work | None:
    """Fill ``shard`` (n,) with this rank's part of the *sum* over the ranks of ``full`` (N n,).

    Returns:
        As :func:`start_all_gather`.
    """
    return _reduce_scatter(shard, full, op=dist.ReduceOp.SUM, group=group, async_op=not full.is_cuda)
