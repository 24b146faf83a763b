"""Learning, while a backward pass goes on, which gradients are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .buckets import Bucket


class GradientHooks:
    """Calls ``on_full(k)`` as soon as all gradients of bucket k are there, and ``on_end()`` after the backward pass.

    Every rank must start its collectives in the same order, but its gradients may come in another: so buckets are
    reported strictly in their order, a full one after all before it. Those that a parameter without a gradient kept
    open are reported at the end.

    Raises (in the backward pass):
        RuntimeError: a parameter gets a gradient twice in one backward pass (reentrant checkpointing does this).
    """

    def __init__(self, buckets: Sequence[Bucket], on_full: Callable[[int], None], on_end: Callable[[], None]) -> None:
        self._buckets, self._on_full, self._on_end = buckets, on_full, on_end
        self._bucket_of = {parameter: k for k, bucket in enumerate(buckets) for parameter in bucket.parameters}
        self.reset()
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def reset(self) -> None:
        """Forget a backward pass that an error cut short; called before each forward pass."""
        self._running = False
        self._seen: set[Tensor] = set()
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._next = 0  # the first bucket that is not reported yet

    def _arrived(self, parameter: Tensor) -> None:
        """A parameter's gradient of this backward pass is complete, in ``parameter.grad``."""
        if not self._running:
            self.reset()
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if parameter in self._seen:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient twice in one backward pass; checkpoint "
                "with use_reentrant=False"
            )
        self._seen.add(parameter)
        raise NotImplementedError("Lab 4, exercise 4.3: a gradient arrives")

    def _end(self) -> None:
        """The backward pass is over."""
        while self._next < len(self._buckets):
            self._on_full(self._next)
            self._next += 1
        self._running = False
        self._on_end()


class UsedParameters:
    """Which parameters any rank has a gradient for.

    A parameter that no rank used must keep ``grad`` None: with zeros instead, AdamW would still decay it. The ranks
    exchange who used what (one all-reduce of an int32 per parameter) after the first backward pass. If every rank used
    every parameter, they never do so again, and a gradient that is missing later counts as zeros.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self._all_used = False

    def agree(self, used: Sequence[bool], device: torch.device) -> list[bool]:
        """For each parameter: does any rank use it? A collective call, unless all are known to be used."""
        if self._all_used or not used:
            return [True] * len(used)
        ranks = torch.tensor(used, dtype=torch.int32, device=device)
        dist.all_reduce(ranks, group=self._group)
        counts = ranks.tolist()
        self._all_used = min(counts) == dist.get_world_size(self._group)
        return [count > 0 for count in counts]
