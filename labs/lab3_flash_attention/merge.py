"""Merging the softmax statistics of two parts of a row (exercise 3.1)."""

from __future__ import annotations

import torch

#: Maximum, sum and weighted values of a part of a row: (...), (...) and (..., D).
SoftmaxState = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def merge(m1: torch.Tensor, d1: torch.Tensor, m2: torch.Tensor, d2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and sum of exponentials of two parts of a row together.

    A part x has m = max(x) and d = sum(exp(x - m)). The operator is associative and commutative; its neutral
    element is (-inf, 0), an empty part (Milakov and Gimelshein 2018, section 3.1).

    Args:
        m1, m2: (...), the parts' maxima; -inf where a part is empty.
        d1, d2: (...), their sums; 0 where a part is empty.

    Returns:
        m and d of the whole, of the same shape and dtype. Two empty parts give (-inf, 0), never NaN.
    """
    raise NotImplementedError("Lab 3, exercise 3.1: merge")


def merge_outputs(first: SoftmaxState, second: SoftmaxState) -> SoftmaxState:
    """Maximum, sum and weighted values of two parts of a row together.

    The weighted values of a part are o = sum over its keys of exp(x - m) v, rescaled as d is and not divided by d.

    Args:
        first, second: (m, d, o) of shapes (...), (...) and (..., D); (-inf, 0, 0) for an empty part.

    Returns:
        (m, d, o) of the whole; o / d is the attention output.
    """
    raise NotImplementedError("Lab 3, exercise 3.1: merge with outputs")
