"""Data parallelism: every rank has the model, and the ranks' gradients are averaged during the backward pass (4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .async_collectives import AsyncWork, all_reduce_mean
from .buckets import BUCKET_BYTES, make_buckets
from .gradient_hooks import GradientHooks, UsedParameters


@torch.no_grad()
def broadcast_module(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Give every rank the parameters, frozen ones too, and buffers of the group's first rank."""
    raise NotImplementedError("Lab 4, exercise 4.3: the same start")


class DistributedDataParallel(nn.Module):
    """A module whose gradients, after ``backward()``, are the mean over all ranks.

    Gradients lie in flat buckets, of which each ``parameter.grad`` is a view. As soon as a bucket is full its
    all-reduce starts, while the backward pass goes on with earlier layers. At the end of the backward pass the current
    stream waits for all of them, so ``optimizer.step()`` needs nothing more. A rank sends 2 Psi (N - 1) / N elements a
    step.

    Args:
        module: the same on every rank; rank 0's weights and buffers are given to all. Its parameters may be shared,
            frozen, or left out of some or all forward passes.
        bucket_bytes: a bucket is closed once it holds this much.
        group: the ranks.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = BUCKET_BYTES, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.module, self.group = module, group
        broadcast_module(module, group)
        self.buckets = make_buckets(module.parameters(), bucket_bytes)
        self.flat_gradients = [bucket.new_flat() for bucket in self.buckets]
        self._views = [bucket.views(flat) for bucket, flat in zip(self.buckets, self.flat_gradients, strict=True)]
        self._hooks = GradientHooks(self.buckets, self._bucket_full, self._backward_done)
        self._used = UsedParameters(group)
        self._averaging: list[AsyncWork] = []
        self._synchronise = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        self._averaging = []
        self._hooks.reset()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block add to the gradients of this rank alone; the next one outside averages all."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def _bucket_full(self, k: int) -> None:
        """Every gradient of bucket k that this backward pass gives is there."""
        bucket, views = self.buckets[k], self._views[k]
        bucket.collect(views)
        bucket.attach(views)
        raise NotImplementedError("Lab 4, exercise 4.3: average a bucket")

    def _backward_done(self) -> None:
        """After the last bucket: the gradients are to be the means when ``backward()`` returns."""
        if not self._synchronise:
            return
        raise NotImplementedError("Lab 4, exercise 4.3: the end of a backward pass")
        self._share_unused()

    def _share_unused(self) -> None:
        """A parameter that other ranks alone used has their mean as gradient; one that no rank used has none."""
        pairs: list[tuple[nn.Parameter, Tensor]] = [
            pair
            for bucket, views in zip(self.buckets, self._views, strict=True)
            for pair in zip(bucket.parameters, views, strict=True)
        ]
        used = self._used.agree([parameter.grad is not None for parameter, _ in pairs], pairs[0][1].device)
        for (parameter, view), anywhere in zip(pairs, used, strict=True):
            if anywhere and parameter.grad is None:
                parameter.grad = view
