"""Hidden tensors: drawn numbers in any memory layout, with NaN wherever a right answer does not look."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from grading.scenarios import Draw
from utils import runtime

#: Layout -> how the student reads of it.
LAYOUTS = {
    "whole": "a contiguous tensor",
    "padded": "a slice",
    "strided": "every second column",
    "transposed": "a transposed tensor",
    "turned": "a tensor with its first axes swapped",
}
_MARGIN = 8192  # elements on each side; it keeps a start at a multiple of 16 bytes


def placed(values: torch.Tensor, layout: str = "whole") -> torch.Tensor:
    """``values`` in another layout, on the device of the kernels, inside of a larger tensor of NaN.

    ``padded``: rows further apart than they are long; ``strided``: elements of a row two apart; ``transposed``: the
    last two axes stored in the other order; ``turned``: the first two axes swapped, so that no single stride leads
    from row to row.

    Raises:
        ValueError: the layout is unknown, or has more axes than the values.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    shape = tuple(values.shape)
    if len(shape) < {"whole": 0, "turned": 3, "transposed": 2}.get(layout, 1):
        raise ValueError(f"a tensor of shape {shape} cannot be {layout}")
    if layout == "whole":
        view = _home(shape, values.dtype)
    elif layout == "padded":
        view = _home((*shape[:-1], shape[-1] + 9), values.dtype)[..., 5 : 5 + shape[-1]]
    elif layout == "strided":
        view = _home((*shape[:-1], 2 * shape[-1]), values.dtype)[..., ::2]
    elif layout == "transposed":
        view = _home((*shape[:-2], shape[-1], shape[-2] + 3), values.dtype)[..., : shape[-2]].transpose(-1, -2)
    else:
        home = _home((shape[1], shape[0] + 1, *shape[2:-1], shape[-1] + 3), values.dtype)
        view = home[:, 1:, ..., : shape[-1]].transpose(0, 1)
    return view.copy_(values)


def _home(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    flat = torch.full((count + 2 * _MARGIN,), math.nan, dtype=dtype, device=runtime.DEVICE)
    return flat[_MARGIN : _MARGIN + count].view(shape)


def normal(
    draw: Draw, *shape: int, dtype: torch.dtype = torch.float32, layout: str = "whole", scale: float = 1.0
) -> torch.Tensor:
    """Normal numbers of that shape, dtype and layout."""
    return placed(draw.normal(*shape, dtype=dtype, scale=scale), layout)


def words(*parts: str, dtype: torch.dtype = torch.float32, layout: str = "whole") -> str:
    """What a case is, for the name of an observation: ``"a slice, float16"``."""
    name = str(dtype).removeprefix("torch.")
    return ", ".join([*parts, LAYOUTS[layout], name])


def leaves_alone(function: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> tuple[Any, bool]:
    """What a function returns, and whether the tensors that it was given hold afterwards what they held before."""
    before = [tensor.detach().clone() for tensor in tensors]
    result = function(*tensors, **options)
    same = [torch.equal(tensor.detach().nan_to_num(), old.nan_to_num()) for tensor, old in zip(tensors, before)]
    return result, all(same)
