"""Sees every collective that this process really calls.

All of them pass through the operators ``c10d::*`` of PyTorch's dispatcher: the Python functions, functional
collectives, and the C++ code of ``DistributedDataParallel``. A kernel registered under the dispatch key BackendSelect,
which every call passes whatever its tensors and its thread, tells the listeners and passes the call on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}

#: which argument holds the full tensor (or, for gather and scatter, one rank's share of it)
_FULL = {"reduce_scatter_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_tensor_coalesced_": 1, "alltoall_": 1}
_FULL |= {"alltoall_base_": 1, "gather_": 1}


@dataclass(frozen=True)
class Call:
    """One call: ``elements`` and ``bytes`` are those of the full tensor."""

    kind: str
    elements: int
    bytes: int
    dtype: str
    group_size: int


_listeners: list[Callable[[Call], None]] = []
_library: torch.library.Library | None = None


def _flat(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)]


def _describe(name: str, args: tuple) -> Call:
    kind = _KINDS[name]
    group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    size = dist.ProcessGroup.unbox(group).size()
    if kind == "barrier":
        return Call(kind, 0, 0, "", size)
    tensors = _flat(args[_FULL.get(name, 0)])
    elements, count = sum(t.numel() for t in tensors), sum(t.numel() * t.element_size() for t in tensors)
    if kind in ("gather", "scatter"):
        elements, count = elements * size, count * size
    return Call(kind, elements, count, str(tensors[0].dtype).removeprefix("torch."), size)


def install() -> None:
    """Put the kernel in place, once a process."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("c10d", "IMPL")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for name in _KINDS:
        if not hasattr(torch.ops.c10d, name):
            continue
        operator = getattr(torch.ops.c10d, name).default

        def kernel(keys, *args, operator=operator, name=name, **kwargs):
            if _listeners:
                call = _describe(name, args)
                for listener in tuple(_listeners):
                    listener(call)
            return operator.redispatch(keys & below, *args, **kwargs)

        _library.impl(name, kernel, "BackendSelect", with_keyset=True)


@contextmanager
def listen(listener: Callable[[Call], None]) -> Iterator[None]:
    """Call ``listener`` for each collective in the block, before it runs."""
    install()
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
