"""Sees every collective that this process really calls.

All collectives pass through the operators ``c10d::*`` of PyTorch's dispatcher: the functions of ``torch.distributed``,
functional collectives, and the C++ code of PyTorch's own ``DistributedDataParallel``. Here a kernel is registered for
each of these operators under the dispatch key BackendSelect, which every call passes exactly once: on any thread (a
``TorchDispatchMode`` belongs to one), below autograd and in inference mode. It tells the listeners, then passes the
call on to the backend.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

#: operator -> (kind, name of the argument that holds the full tensor; for gather and scatter one rank's share of it)
OPERATORS = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "allgather_": ("all_gather", "output_tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
    "barrier": ("barrier", "tensor"),
    "monitored_barrier_": ("barrier", "tensor"),
}

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


@dataclass(frozen=True)
class Call:
    """One call of a collective, or one message to or from a peer.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "gather", "scatter",
            "barrier", "send" or "recv".
        elements: Elements of the full tensor: that of all ranks' shares together, 0 for a barrier.
        bytes: Its bytes.
        dtype: "float32", "bfloat16", ...
        group: Name of the process group, the same on each of its ranks.
        members: Global ranks of the group.
        peer: Global rank that a broadcast or scatter comes from, that a reduce or gather goes to, or at the other end
            of a message; None otherwise.
        tag: Tag of a message.
    """

    kind: str
    elements: int
    bytes: int
    dtype: str
    group: str
    members: tuple[int, ...]
    peer: int | None = None
    tag: int = 0


_listeners: list[Callable[[Call], None]] = []
_library: torch.library.Library | None = None


def caller() -> str:
    """Where the code outside PyTorch is that makes the call: ``"train.py:12 in step"``; "" on a thread of C++."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_HERE, _TORCH, "<frozen")):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)]


def _kernel(name: str) -> Callable[..., Any]:
    """The kernel of one operator: tell the listeners, then pass the call on."""
    kind, full = OPERATORS[name]
    operator = getattr(torch.ops.c10d, name).default
    place = {argument.name: index for index, argument in enumerate(operator._schema.arguments)}
    full_place, group_place, tag_place = place[full], place["process_group"], place.get("tag")
    peer_place = next((place[argument] for argument in ("root_rank", "dst", "src") if argument in place), None)
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def describe(args: tuple[Any, ...]) -> Call:
        group = dist.ProcessGroup.unbox(args[group_place])
        try:
            members = tuple(dist.get_process_group_ranks(group))
        except KeyError:  # a group of PyTorch's own that is not registered
            members = tuple(range(group.size()))
        if kind == "barrier":
            return Call(kind, 0, 0, "", group.group_name, members)
        tensors = _tensors(args[full_place])
        share = len(members) if kind in ("gather", "scatter") else 1
        elements = share * sum(tensor.numel() for tensor in tensors)
        size = share * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        peer = None if peer_place is None else members[args[peer_place]]
        tag = 0 if tag_place is None else args[tag_place]
        return Call(kind, elements, size, dtype, group.group_name, members, peer, tag)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if _listeners:
            call = describe(args)
            for listener in tuple(_listeners):
                listener(call)
        return operator.redispatch(keys & below, *args, **kwargs)

    return kernel


def install() -> None:
    """Put the kernels in place, once a process."""
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")
        for name in OPERATORS:
            if hasattr(torch.ops.c10d, name):
                _library.impl(name, _kernel(name), "BackendSelect", with_keyset=True)


@contextmanager
def listen(listener: Callable[[Call], None]) -> Iterator[None]:
    """Call ``listener`` for each collective of the block, on any thread, before the backend runs it."""
    install()
    _listeners.append(listener)
    try:
        yield
    finally:
        # by identity: two listeners may compare equal
        del _listeners[next(index for index, other in enumerate(_listeners) if other is listener)]


@contextmanager
def unheard() -> Iterator[None]:
    """Let nobody outside the block hear of the collectives in it: a check lets ranks disagree, and goes on."""
    outside = _listeners[:]
    _listeners.clear()
    try:
        yield
    finally:
        _listeners[:] = outside


@contextmanager
def unobserved() -> Iterator[None]:
    """Tell nobody of the collectives in the block, for timing: what a listener costs the host is left out.

    All ranks must skip the same collectives, for the caller compares what they call.
    """
    listeners, _listeners[:] = list(_listeners), []
    try:
        yield
    finally:
        _listeners[:] = listeners
