"""What PyTorch gets wrong in a rank on a CPU, put right.

attention of no heads
    Cut over more ranks than it has heads, attention leaves some ranks without one. Up to PyTorch 2.11
    ``F.scaled_dot_product_attention`` then divides by their number, and the rank is killed by SIGFPE.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Attention = Callable[..., Tensor]


def apply_patches() -> None:
    """Put all patches that this PyTorch needs in place, in this process."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        F.scaled_dot_product_attention = of_any_heads(F.scaled_dot_product_attention)


def of_any_heads(attention: Attention) -> Attention:
    """``attention``, not called where there is no head, (..., 0, N, D): what comes out is empty, and has its graph."""

    @functools.wraps(attention)
    def attend(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
        if query.dim() > 3 and query.shape[-3] == 0:
            return query @ key.mT @ value
        return attention(query, key, value, *args, **kwargs)

    return attend
