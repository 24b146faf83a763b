"""When the gradients of data parallelism are computed and when they travel: one training step, bucket by bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass

from utils.operators import require_sizes
from utils.transformer_math.communication import ring_seconds


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of gradients, in seconds from the start of the step."""

    ready: float
    """the backward pass has computed the bucket's last gradient"""
    start: float
    """its all-reduce starts: the bucket is full and the link is free"""
    end: float
    """all ranks have the sum"""


@dataclass(frozen=True)
class DataParallelStep:
    """The forward and backward pass of a rank, and the all-reduces of its gradients. Times in seconds."""

    forward: float
    backward: float
    buckets: tuple[BucketTimes, ...]
    """in the order in which the backward pass fills them: the last layers' bucket first"""

    @property
    def arithmetic(self) -> float:
        """Time of both passes."""
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        """Until all gradients are summed and the optimizer can start."""
        return max(self.arithmetic, self.buckets[-1].end)

    @property
    def communication(self) -> float:
        """Time of all all-reduces together; they take turns on the link."""
        return math.fsum(bucket.end - bucket.start for bucket in self.buckets)

    @property
    def exposed(self) -> float:
        """What the step waits for after the backward pass."""
        return self.seconds - self.arithmetic

    @property
    def hidden(self) -> float:
        """Time of the all-reduces during which the backward pass goes on."""
        return self.communication - self.exposed

    def spans(self) -> list[tuple[str, str, float, float]]:
        """The step as (name, lane, start, end), as :func:`utils.plots.overlap.overlap_timeline` draws it."""
        work = [
            ("forward", "arithmetic", 0.0, self.forward),
            ("backward", "arithmetic", self.forward, self.arithmetic),
        ]
        return work + [("all-reduce", "link", bucket.start, bucket.end) for bucket in self.buckets]


def data_parallel_step(
    parameters: int,
    world_size: int,
    buckets: int,
    tokens: int,
    *,
    peak_flops: float,
    bandwidth: float,
    latency: float = 0.0,
    element_size: int = 2,
    overlap: bool = True,
) -> DataParallelStep:
    """A step of plain data parallelism whose gradients are all-reduced on a ring, in equal buckets.

    The forward pass computes 2 Psi T FLOPs, the backward pass 4 Psi T. It fills the k-th of K buckets after k/K of its
    time (Li et al. 2020, section 3.2). The link carries one all-reduce at a time, in this order.

    Args:
        buckets: K, in how many all-reduces the gradients are sent.
        tokens: T, tokens of each rank in a step.
        peak_flops: FLOP/s that a rank reaches.
        bandwidth: bytes/s that a rank sends while it receives as much.
        latency: seconds of a message however small.
        element_size: bytes of a gradient.
        overlap: a bucket leaves as soon as it is full and the link is free; else all wait for the backward pass's end.

    Raises:
        ValueError: a size below one, a rate that is not positive, a latency that is negative.
    """
    require_sizes(parameters=parameters, buckets=buckets, tokens=tokens, element_size=element_size)
    for name, value in (("peak_flops", peak_flops), ("bandwidth", bandwidth)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, got {value}")
    if not 0 <= latency < math.inf:
        raise ValueError(f"latency must not be negative, got {latency}")
    forward, backward = 2 * parameters * tokens / peak_flops, 4 * parameters * tokens / peak_flops
    each = ring_seconds("all_reduce", element_size * parameters / buckets, world_size, bandwidth, latency)
    times, free = [], 0.0
    for filled in range(1, buckets + 1):
        ready = forward + backward * filled / buckets
        start = max(free, ready if overlap else forward + backward)
        free = start + each
        times.append(BucketTimes(ready, start, free))
    return DataParallelStep(forward, backward, tuple(times))
