"""The merge of exercise 6.6 by itself: what it is tried on, and what wrong ones give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from utils.checks.core import classic
from utils.checks.problem import Problem

Pair = tuple[Tensor, Tensor]
KINDS = ("usual", "nothing yet", "nothing more", "far", "far apart")


def pairs(kind: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, lse, more and more_lse of two heads with five queries each."""
    source = torch.Generator().manual_seed(seed)
    o, more = (torch.randn(1, 2, 5, 4, generator=source) for _ in range(2))
    lse, more_lse = (torch.randn(1, 2, 5, generator=source) for _ in range(2))
    if kind == "nothing yet":
        o, lse = torch.zeros_like(o), torch.full_like(lse, -torch.inf)
    if kind == "nothing more":
        more, more_lse = torch.zeros_like(more), torch.full_like(more_lse, -torch.inf)
    if kind.startswith("far"):
        lse = lse + torch.tensor([200.0, -200.0])[:, None]
        more_lse = more_lse + torch.tensor([200.0, -200.0] if kind == "far" else [-200.0, 200.0])[:, None]
    return o, lse, more, more_lse


def merged(o: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> Pair:
    """What is right."""
    weights = torch.stack((lse, more_lse)).softmax(0)[..., None]
    return (torch.stack((o, more)) * weights).sum(0), torch.stack((lse, more_lse)).logsumexp(0)


def _weighted(weigh: Callable[[Tensor, Tensor, Tensor], Pair]) -> Callable[..., Tensor]:
    def output(o: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> Tensor:
        a, b = weigh(lse, more_lse, torch.logaddexp(lse, more_lse))
        return a[..., None] * o + b[..., None] * more

    return output


_WEIGHTED = "each part is weighted by its share of the sum, e^(its lse - the common lse)"
#: What wrong merges give, and their cause.
_OUTPUTS: dict[str, Callable[..., Tensor]] = {
    f"the parts are added: {_WEIGHTED}": lambda o, lse, more, more_lse: o + more,
    f"this is the mean of the parts: {_WEIGHTED}": lambda o, lse, more, more_lse: (o + more) / 2,
    f"the weights are exchanged: {_WEIGHTED}": _weighted(lambda a, b, both: ((b - both).exp(), (a - both).exp())),
    f"the first part is not rescaled: {_WEIGHTED}": _weighted(lambda a, b, both: (a**0, (b - both).exp())),
    f"the second part is not rescaled: {_WEIGHTED}": _weighted(lambda a, b, both: ((a - both).exp(), b**0)),
    f"the sum is not divided by that of the weights: {_WEIGHTED}": _weighted(lambda a, b, both: (a.exp(), b.exp())),
    f"the weights are relative to the larger one: {_WEIGHTED}": _weighted(
        lambda a, b, both: ((a - torch.maximum(a, b)).exp(), (b - torch.maximum(a, b)).exp())
    ),
    f"the logsumexps themselves are the weights: {_WEIGHTED}": _weighted(lambda a, b, both: (a / (a + b), b / (a + b))),
    f"the weights are powers of two: {_WEIGHTED}": _weighted(lambda a, b, both: (2 ** (a - both), 2 ** (b - both))),
    f"the second part is left out: {_WEIGHTED}": _weighted(lambda a, b, both: ((a - both).exp(), 0 * b)),
    f"the first part is left out: {_WEIGHTED}": _weighted(lambda a, b, both: (0 * a, (b - both).exp())),
    "the second part takes the place of the first": lambda o, lse, more, more_lse: more,
}
_LOGSUMEXPS: dict[str, Callable[..., Tensor]] = {
    "the logsumexps are added: their exponentials are sums, and these add": lambda o, lse, more, more_lse: (
        lse + more_lse
    ),
    "this is the larger logsumexp: the logarithm of the sum of both exponentials is a little more": (
        lambda o, lse, more, more_lse: torch.maximum(lse, more_lse)
    ),
    "this is the sum of the exponentials, without the logarithm": lambda o, lse, more, more_lse: (
        lse.exp() + more_lse.exp()
    ),
    "the first part's logsumexp is returned: it must hold for both parts together": lambda o, lse, more, more_lse: lse,
    "the second part's logsumexp is returned: it must hold for both parts together": (
        lambda o, lse, more, more_lse: more_lse
    ),
}


def _close(got: Tensor, right: Tensor) -> bool:
    return torch.allclose(got.double(), right, rtol=1e-5, atol=1e-6)


def judge_merge(kind: str, seed: int, found: Any) -> Problem | None:
    """What is wrong in what ``merge_parts`` gave of one pair of parts, or None."""
    given = pairs(kind, seed)
    right = merged(*(x.double() for x in given))
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(x, Tensor) for x in found):
        return Problem(f"merge_parts gives {type(found).__name__}", "it returns two tensors: the output, the logsumexp")
    for name, got, expected in zip(("output", "logsumexp"), found, right, strict=True):
        if got.shape != expected.shape or got.dtype != torch.float32:
            shown = f"{tuple(got.shape)}, {got.dtype}; expected {tuple(expected.shape)}, torch.float32"
            return Problem(f"the {name} of merge_parts has {shown}")
    for name, got, expected, wrong in zip(("output", "logsumexp"), found, right, (_OUTPUTS, _LOGSUMEXPS), strict=True):
        if _close(got, expected):
            continue
        bad = ~torch.isclose(got.double(), expected, rtol=1e-5, atol=1e-6)
        index = bad.flatten().nonzero()[0].item()
        got_, expected_ = (x.flatten()[index].item() for x in (got, expected))
        headline = f"the {name} of merge_parts is wrong ({kind}): {int(bad.sum())} of {bad.numel()} elements differ"
        details = (f"[{index}] is {got_:.5g}, expected {expected_:.5g}",)
        return Problem(headline, _cause(kind, given, found, got, wrong), details)
    return None


def _cause(kind: str, given: tuple[Tensor, ...], found: Pair, got: Tensor, wrong: dict[str, Callable]) -> str:
    if not all(x.isfinite().all() for x in found) and kind.startswith("far"):
        return classic("e^lse overflows, or all of them become 0: subtract the common lse, or the larger one, first", 4)
    if any(x.isnan().any() for x in found) and kind.startswith("nothing"):
        return classic("a part without keys has lse = -inf, and -inf minus -inf is NaN", 4)
    if kind == "usual":
        wide = tuple(x.double() for x in given)
        return next((classic(says, 3) for says, value in wrong.items() if _close(got, value(*wide))), "")
    if kind.startswith("far"):
        return classic("only logsumexps far from 0 go wrong: subtract the common lse, or the larger one, first", 4)
    return ""
