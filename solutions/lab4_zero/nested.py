"""Tensors among a module's arguments and results, and a mark on them that tells when their gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` applied to every tensor in it, through tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, part) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, part) for part in value)
    if isinstance(value, dict):
        return {key: map_tensors(function, part) for key, part in value.items()}
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a value, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` with its floating-point tensors in ``dtype``; None leaves them."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


class AfterBackward(torch.autograd.Function):
    """Hands tensors on unchanged, and calls a function once the gradients of all of them are known.

    By then the gradients of the parameters used in between are there too: autograd runs what was made later first, and
    before all the nodes that store a parameter's gradient.
    """

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *gradients


def call_after_backward(call: Callable[[], None], value: Any) -> Any:
    """``value`` with its tensors marked: ``call`` is called once the gradients of those that need one are known."""
    needing = [tensor for tensor in tensors_of(value) if tensor.requires_grad]
    if not needing or not torch.is_grad_enabled():
        return value
    return _replace(value, needing, AfterBackward.apply(call, *needing))


def _replace(value: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
    replacement = {id(before): after for before, after in zip(old, new, strict=True)}
    return map_tensors(lambda tensor: replacement.get(id(tensor), tensor), value)
