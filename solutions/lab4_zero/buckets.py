"""Parameters that travel together: their gradients (or weights) side by side in one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in a shard.

    ``parameter`` is an index into the bucket's parameters; the part is ``shard[start:stop]``, and in the flattened
    parameter it begins at ``offset``.
    """

    parameter: int
    start: int
    stop: int
    offset: int


class Bucket:
    """Where each of some parameters lies in a flat tensor that ``shards`` ranks can share evenly.

    Args:
        parameters: of one dtype and device, in the order in which they lie.
        shards: number of equal shards; zeros at the end fill the last one.

    Attributes:
        numel: elements of the flat tensor, a multiple of ``shards``.
        padding: how many of them belong to no parameter.
        shard_numel: elements of one shard.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shards: int = 1) -> None:
        self.parameters = list(parameters)
        self.starts: list[int] = []
        used = 0
        for parameter in self.parameters:
            self.starts.append(used)
            used += parameter.numel()
        self.shard_numel = -(-used // shards)
        self.numel = self.shard_numel * shards
        self.padding = self.numel - used

    def new_flat(self) -> Tensor:
        """A flat tensor (numel,) of the parameters' dtype and device; only its padding is set, to zero."""
        first = self.parameters[0]
        flat = torch.empty(self.numel, dtype=first.dtype, device=first.device)
        flat[self.numel - self.padding :] = 0
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of ``flat`` in the parameters' shapes: writing to one writes to ``flat``."""
        return [
            flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(self.starts, self.parameters, strict=True)
        ]

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """The part of ``flat`` that belongs to ``rank``, as a view."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def pieces(self, rank: int) -> list[Piece]:
        """Which parts of which parameters lie in the shard of ``rank``, none of them empty; padding lies in none."""
        ### BEGIN SOLUTION 4.4: what of each parameter lies in a shard
        first, last = rank * self.shard_numel, (rank + 1) * self.shard_numel
        pieces = []
        for k, (start, parameter) in enumerate(zip(self.starts, self.parameters, strict=True)):
            low, high = max(start, first), min(start + parameter.numel(), last)
            if low < high:
                pieces.append(Piece(k, low - first, high - first, low - start))
        return pieces
        ### END SOLUTION

    def collect(self, views: Sequence[Tensor]) -> None:
        """Copy the gradients into ``views`` of a flat tensor, unless they are there already; None counts as zeros.

        No ``grad`` is changed: see :meth:`attach`.
        """
        to, come = [], []
        for parameter, view in zip(self.parameters, views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr() or not gradient.numel():
                to.append(view)
                come.append(gradient)
        if to:
            torch._foreach_copy_(to, come)  # one kernel for many small tensors

    def flat_gradient(self) -> Tensor:
        """The gradients in a flat tensor (numel,): if one parameter fills the bucket, its gradient, without a copy."""
        gradient = self.parameters[0].grad
        if len(self.parameters) == 1 and not self.padding and gradient is not None and gradient.is_contiguous():
            return gradient.view(-1)
        flat = self.new_flat()
        self.collect(self.views(flat))
        return flat

    def attach(self, views: Sequence[Tensor]) -> None:
        """Make each gradient that there is the view itself: its own memory is freed, and more is added in place."""
        for parameter, view in zip(self.parameters, views, strict=True):
            if parameter.grad is not None:
                parameter.grad = view

    def release(self) -> None:
        """Let go of the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


def make_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES, shards: int = 1) -> list[Bucket]:
    """Buckets of the trainable parameters, last parameter first: about the order in which gradients become known.

    A bucket is closed once it holds ``bucket_bytes``, and where dtype or device change; no parameter is cut in two.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    buckets: list[Bucket] = []
    held: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(list(dict.fromkeys(p for p in parameters if p.requires_grad))):
        fits = not held or (parameter.dtype == held[0].dtype and parameter.device == held[0].device)
        if held and (size >= bucket_bytes or not fits):
            buckets.append(Bucket(held, shards))
            held, size = [], 0
        held.append(parameter)
        size += parameter.numel() * parameter.element_size()
    return [*buckets, Bucket(held, shards)] if held else buckets
