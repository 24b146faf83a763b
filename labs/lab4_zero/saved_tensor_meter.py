"""Counts the bytes that autograd really holds for a backward pass that is still to come."""

from __future__ import annotations

import weakref
from collections import Counter
from types import TracebackType

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class _Saved:
    """A tensor that a node of an autograd graph holds; it goes when the node lets go of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensorMeter:
    """Within ``with SavedTensorMeter() as held:`` forward passes are observed; backward passes free what they held.

    A storage counts once, however many tensors share it. What is there anyway does not count: parameters, and integers,
    which are the batch's tokens.

    Attributes:
        bytes: held now.
        peak: the most held at once since the beginning.
    """

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._holders: Counter[int] = Counter()
        self._hooks = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> SavedTensorMeter:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        origin = tensor if tensor._base is None else tensor._base
        if tensor.is_floating_point() and not isinstance(origin, nn.Parameter):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if not self._holders[address]:
                self.bytes += size
                self.peak = max(self.peak, self.bytes)
            self._holders[address] += 1
            weakref.finalize(saved, self._release, address, size)
        return saved

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address]
            self.bytes -= size
