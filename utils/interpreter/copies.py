"""A launch's copies of GPU memory: of a huge allocation with small views in it, only what the views hold.

Upstream's interpreter copies the whole allocation behind each argument to the host and back. Rows that lie 2^30
elements apart would be gigabytes of nothing; here the host reserves their addresses, and pages come to life where an
element is. Where all arguments are on the host already, nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from utils.interpreter import observation

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

#: Allocations from this size on (bytes) are looked at, and those whose views hold less than a quarter of them.
LARGE = 2**28
_SPARSE = 4


def sparse_arguments(to_host: Callable) -> Callable:
    """Around ``GridExecutor._init_args_hst``: sparse arguments are on the host before upstream copies the others.

    Arguments that are there already are shared, each as a tensor of its own.
    """

    @functools.wraps(to_host)
    def _init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> Any:
        if all(map(_on_host_or_number, (*args_dev, *kwargs.values()))):
            self._sparse = None
            return list(map(_shared, args_dev)), {key: _shared(value) for key, value in kwargs.items()}
        self._sparse = _Sparse((*args_dev, *kwargs.values()))
        return to_host(self, *self._sparse.replaced(args_dev, kwargs))

    return _init_args_hst


def sparse_results(from_host: Callable) -> Callable:
    """Around ``GridExecutor._restore_args_dev``: what the kernel wrote into sparse arguments goes back view by view."""

    @functools.wraps(from_host)
    def _restore_args_dev(self: Any, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> Any:
        sparse = self._sparse
        if sparse is None:  # the kernel has written into the arguments themselves
            return None
        args, options = sparse.replaced(args_dev, kwargs)  # upstream copies a host tensor onto itself: nothing
        result = from_host(self, args, args_hst, options, kwargs_hst)
        sparse.copy_back()
        return result

    return _restore_args_dev


def _on_host_or_number(value: Any) -> bool:
    """Whether an argument is a tensor of PyTorch's own kind in the host's memory, or holds no tensor."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return not _elsewhere(value)
    if isinstance(value, tuple):
        return all(map(_on_host_or_number, value))
    return value is None or type(value) in (int, float, bool, str) or isinstance(value, (tl.dtype, tl.constexpr))


def _shared(value: Any) -> Any:
    if isinstance(value, tuple):
        return _tuple_like(value, map(_shared, value))
    return value.detach() if isinstance(value, torch.Tensor) else value


def _tuple_like(value: tuple, items: Iterable[Any]) -> tuple:
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


class _Sparse:
    """The sparse tensors of one launch and their counterparts on the host."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        views: dict[int, list[torch.Tensor]] = {}
        for value in values:
            for tensor in _tensors(value):
                views.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        large = observation.state.large
        if large is not None:  # of each launch only the last program runs
            for key, tensors in views.items():
                if key not in large and tensors[0].untyped_storage().nbytes() >= LARGE:
                    large[key] = _addresses(tensors)
            self.views = {key: [] for key in views if key in large}
            self.homes = {key: large[key] for key in self.views}
            return
        self.views = {key: tensors for key, tensors in views.items() if _is_sparse(tensors)}
        self.homes = {key: _reserve(tensors) for key, tensors in self.views.items()}

    def replaced(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """The arguments, sparse ones by their counterparts."""
        if not self.views:
            return args, kwargs
        return [self._replaced(value) for value in args], {key: self._replaced(v) for key, v in kwargs.items()}

    def copy_back(self) -> None:
        """Copy what the counterparts hold into the launch's own tensors."""
        for key, tensors in self.views.items():
            for tensor in tensors:
                _distinct(tensor).copy_(_distinct(self._on_host(tensor, self.homes[key])))

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return _tuple_like(value, map(self._replaced, value))
        if isinstance(value, TensorDescriptor):
            rest = (value.shape, value.strides, value.block_shape, value.padding)
            more = (value.round_f32_to_tf32,) if hasattr(value, "round_f32_to_tf32") else ()
            return TensorDescriptor(self._replaced(value.base), *rest, *more)
        if isinstance(value, triton.TensorWrapper):
            return triton.TensorWrapper(self._replaced(value.base), value.dtype)
        if not isinstance(value, torch.Tensor) or value.untyped_storage().data_ptr() not in self.homes:
            return value
        return self._on_host(value, self.homes[value.untyped_storage().data_ptr()])

    def _on_host(self, tensor: torch.Tensor, home: torch.UntypedStorage) -> torch.Tensor:
        host = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return host.set_(home, tensor.storage_offset(), tensor.shape, tensor.stride())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, (TensorDescriptor, triton.TensorWrapper)):
        yield from _tensors(value.base)
    elif isinstance(value, torch.Tensor) and _elsewhere(value):
        yield value


def _elsewhere(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def _is_sparse(tensors: list[torch.Tensor]) -> bool:
    nbytes = tensors[0].untyped_storage().nbytes()
    return nbytes >= LARGE and _SPARSE * sum(_distinct(t).numel() * t.element_size() for t in tensors) < nbytes


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the repetitions along axes of stride 0."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor.detach()


def _addresses(tensors: list[torch.Tensor]) -> torch.UntypedStorage:
    """Addresses on the host for the allocation behind the tensors; pages come to life where something is written."""
    return torch.empty(tensors[0].untyped_storage().nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()


def _reserve(tensors: list[torch.Tensor]) -> torch.UntypedStorage:
    """Addresses on the host for the allocation behind the tensors, filled where they have elements."""
    home = _addresses(tensors)
    for tensor in tensors:
        host = torch.empty(0, dtype=tensor.dtype, device="cpu")
        host.set_(home, tensor.storage_offset(), tensor.shape, tensor.stride())
        _distinct(host).copy_(_distinct(tensor))
    return home
