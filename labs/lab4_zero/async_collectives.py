"""The three collectives of data parallelism, started at once and waited for later.

On GPUs a collective runs on a stream of its own: ``wait`` makes the stream of the computation wait for it, not the
program. NCCL divides while it adds; gloo cannot, so there the sum is divided when it has arrived.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

# newer names of the same collectives
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AsyncWork:
    """A collective under way.

    Args:
        work: what ``torch.distributed`` returned.
        result: what will hold the result.
        divisor: by what the result is divided when it has arrived.
    """

    def __init__(self, work: dist.Work, result: Tensor, divisor: int = 1) -> None:
        self._work, self._result, self._divisor = work, result, divisor

    def wait(self) -> Tensor:
        """The result; what uses it from here on uses it after the collective."""
        self._work.wait()
        if self._divisor != 1:
            self._result.div_(self._divisor)
        return self._result


def _mean(group: ProcessGroup | None) -> tuple[ReduceOp, int]:
    """How to form a mean: the operation, and what is left to divide by."""
    if dist.get_backend(group) == "nccl":
        return ReduceOp.AVG, 1
    return ReduceOp.SUM, dist.get_world_size(group)


def all_reduce_mean(tensor: Tensor, group: ProcessGroup | None = None) -> AsyncWork:
    """Start replacing ``tensor`` by its mean over all ranks."""
    op, divisor = _mean(group)
    return AsyncWork(dist.all_reduce(tensor, op, group=group, async_op=True), tensor, divisor)


def reduce_scatter_mean(shard: Tensor, tensor: Tensor, group: ProcessGroup | None = None) -> AsyncWork:
    """Start writing this rank's shard of the mean of all ranks' ``tensor`` into ``shard``.

    Args:
        shard: (n / N,); it may be that part of ``tensor`` itself.
        tensor: (n,), n a multiple of N; not to be changed before the result is there.
    """
    op, divisor = _mean(group)
    return AsyncWork(_reduce_scatter(shard, tensor, op=op, group=group, async_op=True), shard, divisor)


def all_gather(tensor: Tensor, shard: Tensor, group: ProcessGroup | None = None) -> AsyncWork:
    """Start filling ``tensor`` (n,) with the shards (n / N,) of all ranks; ``shard`` may be its part of ``tensor``."""
    return AsyncWork(_all_gather(tensor, shard, group=group, async_op=True), tensor)
