"""Hidden cases of lab 3: those of its checks from other seeds, and attention on further shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from utils.checks.cases import Case
from utils.checks.core import generator
from utils.checks.hidden import Tolerance

from . import shapes
from .shapes import sizes

#: Probabilities are rounded to the inputs' dtype before they are multiplied, or are not: both are right.
ATTENTION = Tolerance(absolute=1e-5, times=2)
#: Scores of -105: a float32 of that size is rounded to 1e-5, and its exponential with it.
LOW = Tolerance(relative=1e-3, absolute=1e-4)


def comparable(cases: Sequence[Case]) -> list[Case]:
    """The cases on which two right answers round alike: no large scores, and no sums of bfloat16 that cancel."""
    return [c for c in cases if c.magnitude == 1 and not (c.kind == shapes.DRIFTING and c.dtype == torch.bfloat16)]


def further(seed: int, **options: object) -> list[Case]:
    """Attention on shapes that the check does not draw: other heads and widths, low scores, every diagonal."""
    draw = generator(seed)
    n, more = draw.randint(18, 30), draw.randint(33, 45)
    base = {"seed": seed, "options": options}
    cases = [
        Case("three heads share one", sizes(2, 3, 1, n, more, 64), shapes.BF16, **base),
        Case("each its own strides", sizes(1, 2, 2, n, n, 40), shapes.FP16, shapes.MIXED, **base),
        Case("strided", sizes(1, 2, 1, more, n, 24), layout="strided", **base),
    ]
    if options.get("causal"):
        lengths = range(26, 42)  # the diagonal passes through every place of a tile
        return [
            *cases,
            *(Case(f"34 queries and {keys} keys", sizes(1, 1, 1, 34, keys, 16), **base) for keys in lengths),
        ]
    return [*cases, Case(shapes.LOW, sizes(1, 1, 1, n, more, 16), **base)]
