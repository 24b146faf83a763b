"""Which memory came from ``torch.empty`` inside a block, and which part of it something has written since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from utils.interpreter import in_launch

_EMPTY = {
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
    if hasattr(torch.ops.aten, name)
}
#: Operations that replace a tensor's memory instead of writing into it.
_REPLACES = {torch.ops.aten.set_, torch.ops.aten.resize_}
#: Methods that give a tensor's memory to NumPy and others, whose writes nobody sees.
_GIVES_AWAY = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}


class Written:
    """Which elements of one storage have been written; ``unit`` bytes to an element."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.keep = tensor.untyped_storage()  # so that nobody else is given this memory while the block is open
        self.unit = tensor.element_size()
        self.flags = np.zeros(-(-tensor.untyped_storage().nbytes() // self.unit), dtype=bool)

    def units(self, offsets: np.ndarray, itemsize: int) -> np.ndarray:
        """Flags that elements at byte ``offsets`` (int64, (n,)) of the storage have."""
        if itemsize < self.unit:
            self.flags = np.repeat(self.flags, self.unit // itemsize)
            self.unit = itemsize
        first = offsets // self.unit
        if itemsize == self.unit:
            return first
        return (first[:, None] + np.arange(itemsize // self.unit)).reshape(-1)

    def mark(self, tensor: torch.Tensor) -> None:
        """PyTorch wrote ``tensor``, a view of this storage."""
        if tensor.numel() == 0:
            return
        size, begin = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
        if size == self.unit:
            flags = self.flags[tensor.storage_offset() :]  # by NumPy: who listens to PyTorch hears the student alone
            np.lib.stride_tricks.as_strided(flags, tensor.shape, tensor.stride())[...] = True
            return
        reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride())) + 1
        self.flags[begin // self.unit : -(-(begin + reach * size) // self.unit)] = True


class Allocations(TorchDispatchMode):
    """While open, remembers what ``torch.empty`` and its relatives returned and what PyTorch wrote into it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile does not trace into a profiled block, and skipping it would import it: a second

    def __init__(self) -> None:
        super().__init__()
        self.empty: dict[int, Written] = {}  # by address of the storage
        self._given_away = _GivenAway(self)

    def __enter__(self) -> Allocations:
        self._given_away.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._given_away.__exit__(*error)

    def of(self, tensor: torch.Tensor) -> Written | None:
        """Flags of ``tensor``'s storage if it came from ``torch.empty`` inside the block."""
        return self.empty.get(tensor.untyped_storage().data_ptr()) if self.empty else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if in_launch():  # the interpreter's own copies of arguments
            return result
        packet = func.overloadpacket
        if packet in _EMPTY and "out" not in kwargs:
            if result.numel() and _has_memory(result):
                self.empty[result.untyped_storage().data_ptr()] = Written(result)
        elif self.empty and packet in _REPLACES:
            self.empty = {key: one for key, one in self.empty.items() if one.keep.data_ptr() == key}
        elif self.empty:
            for tensor in _written(func, args, kwargs):
                written = self.of(tensor)
                if written is not None:
                    written.mark(tensor)
        return result


class _GivenAway(TorchFunctionMode):
    """While open, memory that leaves PyTorch counts as written: what NumPy writes into it goes unseen."""

    def __init__(self, allocations: Allocations) -> None:
        super().__init__()
        self.allocations = allocations

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _GIVES_AWAY and not in_launch():
            written = self.allocations.of(args[0])
            if written is not None:
                written.mark(args[0])
        return func(*args, **(kwargs or {}))


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.layout == torch.strided


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """Tensors that an operation writes into, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor) and _has_memory(item):
                yield item
