"""Asks for the anchored loop of exercise 3.9 where the table of tiles would not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from utils.environment import version_tuple

import triton  # isort: skip

#: Whether this Triton compiles the anchored loop for every GPU: 3.6 and 3.7 do not, 3.9 does.
FOR_ALL = version_tuple(triton.__version__) >= (3, 9)


def compiles_anchored(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether Triton compiles the anchored loop: from sm_100 on, 3.6 and 3.7 do not if its products are of 16 bits."""
    return FOR_ALL or dtype == torch.float32 or capability[0] < 10


@contextlib.contextmanager
def anchored(tuning: ModuleType) -> Iterator[None]:
    """Inside, each tile of the forward kernel asks for the anchored loop wherever Triton compiles it.

    Where a GPU has a tile of its own for that loop, short rows of keys get it, too.
    """
    chosen, least = tuning.forward, tuning.ANCHORED_FROM

    def forward_tile(head_dim: int, dtype: torch.dtype, causal: bool, capability: tuple[int, int], *rest: Any) -> Any:
        tile = chosen(head_dim, dtype, causal, capability, *rest)
        return tile._replace(anchored=compiles_anchored(dtype, capability))

    tuning.forward, tuning.ANCHORED_FROM = forward_tile, 1
    try:
        yield
    finally:
        tuning.forward, tuning.ANCHORED_FROM = chosen, least
