"""Attention in a sliding window in plain PyTorch, and what it gives where the bounds go wrong (exercise 3.10)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from utils.checks.cases import Case
from utils.checks.core import classic
from utils.checks.diagnoses import Diagnosis, Evidence
from utils.checks.launches import cdiv

from . import shapes, tiles
from .window_traffic import tile_of

Tensor = torch.Tensor
#: Where the exercise's list tells of each part; of what is read, window_traffic.py.
BOUNDS, RANGES, MASK, ALIGNED, EMPTY, IN_TILES, BEFORE = 1, 3, 4, 5, 6, 7, 8
OF_QUERIES, OF_KEYS = ("o", "lse", "dq"), ("dk", "dv")


def visible(num_queries: int, num_keys: int, window: int, device: torch.device | str = "cpu") -> Tensor:
    """Bool (Nq, Nk): which keys a query sees."""
    last = torch.arange(num_queries, device=device)[:, None] + num_keys - num_queries
    key = torch.arange(num_keys, device=device)
    return (key <= last) & (key > last - window)


def attention(
    q: Tensor, k: Tensor, v: Tensor, window: int = 1, scale: float | None = None, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and natural logsumexp, as :func:`.shapes.attention`; ``seen`` says otherwise what is seen."""
    seen = visible(q.shape[2], k.shape[2], window, q.device) if seen is None else seen
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    p = torch.softmax(wide, -1).nan_to_num(0.0).to(q.dtype)
    return p @ v, torch.logsumexp(wide, -1) + torch.log(p.to(wide.dtype).sum(-1))


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, window: int = 1, scale: float | None = None,
    seen: Tensor | None = None, delta: float = 1.0, power: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv from the output and the logsumexp of the forward pass, in the inputs' dtype.

    ``seen``, ``delta`` (a factor of it) and ``power`` (of the scale in dS) are for mistakes.
    """
    seen = visible(q.shape[2], k.shape[2], window, q.device) if seen is None else seen
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = (q @ k.mT * scale).to(torch.promote_types(q.dtype, torch.float32)).masked_fill(~seen, -math.inf)
    finite = torch.where(lse == -math.inf, 0.0, lse).to(scores.dtype)
    p = torch.exp(scores - finite[..., None])
    row = (do.to(p.dtype) * o.to(p.dtype)).sum(-1, keepdim=True)
    ds = (p * ((do @ v.mT).to(p.dtype) - delta * row)).to(q.dtype)
    return ds @ k * scale**power, ds.mT @ q * scale**power, p.to(q.dtype).mT @ do


# ---- which pairs a wrong answer counts
class _Pairs:
    """Queries and keys of a case, as far as a loop over tiles of ``n`` keys may read past the end: masks (Nq, Nk + n).

    ``name`` is the output: for dk and dv a program walks over queries, for the others over keys.
    """

    def __init__(self, case: Case, m: int, n: int, name: str) -> None:
        num_queries, num_keys = case.sizes["Nq"], case.sizes["Nk"]
        self.m, self.n, self.window, self.offset = m, n, case.options["window"], num_keys - num_queries
        self.of_keys, self.num_keys = name in OF_KEYS, num_keys
        self.i, self.j = torch.arange(num_queries)[:, None], torch.arange(num_keys + n)[None, :]
        self.last = self.i + self.offset
        self.first_i, self.first_j = self.i // m * m, self.j // n * n  # of its tile
        self.causal, self.near = self.j <= self.last, self.j > self.last - self.window
        self.right = self.causal & self.near

    def ranges(self, late: int = 0, early: int = 0, shift: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Which pairs a loop meets, and the first index of their tile; one for each way to begin and to end it.

        It begins at the first index that counts, or at a multiple of the step before it; or it takes no index past the
        last that counts. ``late``, ``early``: by how much it begins too late, ends too early; ``shift``: is moved.
        """
        if self.of_keys:
            at, step, begin = self.i, self.m, self.first_j - self.offset
            end = begin + self.n + self.window - 1
        else:
            at, step, end = self.j, self.n, self.first_i + self.offset + self.m
            begin = end - self.m - self.window + 1
        begin, end = (begin + late + shift).clamp(min=0), end - early + shift
        end = end if self.of_keys else end.clamp(max=self.num_keys)
        for first in (begin, begin // step * step):
            stop = first + -(-(end - first).clamp(min=0) // step) * step
            yield (at >= first) & (at < stop), first + (at - first) // step * step
        yield (at >= begin) & (at < end), begin


#: Which pairs a wrong answer counts, one mask for each way to go wrong.
Seen = Callable[[_Pairs], Iterator[Tensor]]


def _bounds(x: _Pairs) -> Iterator[Tensor]:
    yield x.causal & (x.j >= x.last - x.window)
    yield x.causal & (x.j > x.last - x.window + 1)
    yield x.near & (x.j < x.last)
    yield x.near & (x.j <= x.last + 1)
    yield (x.j < x.last) & (x.j >= x.last - x.window)


def _no_left_edge(x: _Pairs) -> Iterator[Tensor]:
    yield x.causal
    for met, start in x.ranges():  # masked only where the diagonal runs through the tile
        whole = start >= x.first_j + x.n - 1 - x.offset if x.of_keys else start + x.n <= x.first_i + x.offset + 1
        yield met & (whole | x.right)


def _no_diagonal(x: _Pairs) -> Iterator[Tensor]:
    yield x.near
    for met, start in x.ranges():  # masked only where the left edge runs through the tile
        oldest, newest = (x.first_j, start + x.m - 1) if x.of_keys else (start, x.first_i + x.m - 1)
        yield met & ((oldest > newest + x.offset - x.window) | x.right)


def _no_mask(x: _Pairs) -> Iterator[Tensor]:
    yield torch.ones_like(x.right)


def _top_left(x: _Pairs) -> Iterator[Tensor]:
    yield (x.j <= x.i) & (x.j > x.i - x.window)
    yield from (met & x.right for met, _ in x.ranges(shift=x.offset if x.of_keys else -x.offset))


def _in_tiles(x: _Pairs) -> Iterator[Tensor]:
    for tile in {x.m, x.n}:
        key, query, back = x.j // tile, x.last // tile, cdiv(x.window, tile)
        yield x.causal & (key >= query - back)
        yield x.causal & (key > query - back)
        yield x.causal & (key >= query - x.window // tile)
        yield x.causal & (key >= (x.last - x.window + 1).clamp(min=0) // tile)


def _late(x: _Pairs) -> Iterator[Tensor]:
    for by in (1, x.n - 1, x.n) if x.of_keys else (1, x.m - 1, x.m):
        yield from (met & x.right for met, _ in x.ranges(late=by))


def _early(x: _Pairs) -> Iterator[Tensor]:
    window = x.window - 1
    of_keys = (1, x.n - 1, x.n, window, window - 1, window + 1, x.n + window - x.m)
    for by in of_keys if x.of_keys else (1, x.m - 1, x.m):
        yield from (met & x.right for met, _ in x.ranges(early=by))


#: Cause, place in the list, outputs that may show it, and what a wrong answer takes for visible.
_SEEN: tuple[tuple[str, int, tuple[str, ...], Seen], ...] = (
    (
        "a bound of the window is off by one: query i sees `window` keys, i' - window < j <= i' with i' = i + Nk - Nq",
        BOUNDS, OF_QUERIES + OF_KEYS, _bounds,
    ),
    (
        "pairs past the window count: the mask of tiles at its left edge is left out, or hides none of them",
        MASK, OF_QUERIES + OF_KEYS, _no_left_edge,
    ),
    (
        "keys after a query's own count: the mask of tiles on the diagonal is left out, or hides none of them",
        MASK, OF_QUERIES + OF_KEYS, _no_diagonal,
    ),
    ("nothing is masked inside of the tiles that are read", MASK, OF_QUERIES + OF_KEYS, _no_mask),
    (
        "the window is aligned at the top left, or Nq and Nk have changed places: the last query sees the last key, "
        "i' = i + Nk - Nq",
        ALIGNED, OF_QUERIES + OF_KEYS, _top_left,
    ),
    (
        "the window is counted in tiles: its edge runs through a tile, and each query has its own",
        IN_TILES, OF_QUERIES + OF_KEYS, _in_tiles,
    ),
    (
        "the loop over keys begins too late: the first query of a tile sees the earliest keys",
        RANGES, OF_QUERIES, _late,
    ),
    (
        "the loop over keys ends too early: the last query of a tile sees the latest keys",
        RANGES, OF_QUERIES, _early,
    ),
    (
        "the loop over queries begins too late: the first key of a tile is seen by the earliest queries",
        RANGES, OF_KEYS, _late,
    ),
    (
        "the loop over queries ends too early: the last key of a tile is seen by the latest queries",
        RANGES, OF_KEYS, _early,
    ),
)  # fmt: skip


def _is_gradient(e: Evidence) -> bool:
    return e.difference.name in ("dq", "dk", "dv")


def _computed(e: Evidence, seen: Tensor | None = None, **way: Any) -> Tensor:
    """The output of the evidence, computed with a mistake; keys past the end, which were loaded as 0, may count."""
    q, k, v, *more = e.args64
    keys = k.shape[2]
    if seen is not None and not _is_gradient(e):
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, seen.shape[1] - keys)) for x in (k, v))
    elif seen is not None:
        seen = seen[:, :keys]
    function = attention_gradients if _is_gradient(e) else attention
    return function(q, k, v, *more, **{**e.case.options, **way}, seen=seen)[e.position]


def _tiles(e: Evidence) -> list[tuple[int, int]]:
    return sorted({_ for launch in e.trial.profile.launches if (_ := tile_of(launch))}) or [(32, 16)]


def _counts(outputs: Sequence[str], seen: Seen) -> Callable[[Evidence], bool]:
    def masks(case: Case, m: int, n: int, name: str) -> Iterator[Tensor]:
        x = _Pairs(case, m, n, name)
        for mask in seen(x):
            yield mask & (x.j < x.num_keys)
            yield from (mask & met for met, _ in x.ranges())

    def right_elsewhere(e: Evidence, m: int, n: int, way: int) -> bool:
        """Whether this way to go wrong leaves the cases right that pass."""
        passed = (replace(e, trial=t) for t in e.trials if not t.failed and t.case.dtype == e.case.dtype)
        for other in passed:
            mask = next(islice(masks(other.case, m, n, e.difference.name), way, None))
            if not torch.allclose(_computed(other, seen=mask), _computed(other), rtol=1e-3, atol=1e-3, equal_nan=True):
                return False
        return True

    def met(e: Evidence) -> bool:
        zeros = not e.only(_far_from_zero)  # there they come of an exponent
        for m, n in _tiles(e):
            for way, mask in enumerate(masks(e.case, m, n, e.difference.name)):
                computed = _computed(e, seen=mask)
                # zeros may come of anything: the other cases tell
                if e.close(computed) and (bool(computed.any()) or (zeros and right_elsewhere(e, m, n, way))):
                    return True
        return False

    return lambda e: e.difference.name in outputs and met(e)


# ---- queries that see no key, in all tiles or in the first ones
def _no_key(case: Case) -> bool:
    return case.sizes["Nq"] > case.sizes["Nk"]


def _bad_rows(e: Evidence, bad: Tensor) -> Tensor:
    """Bool (Nq,): queries for which an element of o, lse or dq is ``bad``."""
    return (bad if e.difference.name == "lse" else bad.any(-1)).flatten(0, 1).any(0)


def _only_queries_without_keys(e: Evidence) -> bool:
    if e.difference.name not in OF_QUERIES or not _no_key(e.case):
        return False
    return not bool(_bad_rows(e, e.bad)[e.case.sizes["Nq"] - e.case.sizes["Nk"] :].any())


def _nothing_in_the_first_tile(e: Evidence) -> bool:
    """Whether NaN stands in the rows that see none of the keys of the first tile that is read, and in no other."""
    if e.difference.name not in ("o", "lse"):
        return False
    got = _bad_rows(e, e.got.isnan())
    if e.difference.never_written.any() or not torch.equal(got, _bad_rows(e, e.bad)):
        return False
    for m, n in _tiles(e):
        x = _Pairs(e.case, m, n, e.difference.name)
        begin = (x.first_i + x.offset - x.window + 1).clamp(min=0)
        for first in (begin, begin // n * n, 0 * begin):
            blind = (x.last - x.window + 1 >= first + n) | (x.last < 0)
            if bool(blind.any()) and torch.equal(got, blind[:, 0]):
                return True
    return False


def _later_batch_entries(e: Evidence) -> bool:
    """Whether the first batch entry is right in the only case that has several, and others are wrong."""
    several = e.only(lambda case: case.sizes["B"] > 1)
    return several and len(e.bad) > 1 and not bool(e.bad[0].any())


def _far_from_zero(case: Case) -> bool:
    return case.kind in (shapes.LOW, shapes.GROWING) or case.magnitude != 1


RULES = (
    Diagnosis(
        lambda e: bool((e.got.isnan() & ~e.right.isnan())[e.bad].all()) and e.only(_no_key),
        classic(
            "a query that sees no key gives NaN: its l_i is 0 in the forward pass, its L -inf in the backward pass; o, "
            "dq and its share of dk and dv are 0",
            EMPTY,
        ),
    ),
    Diagnosis(
        _nothing_in_the_first_tile,
        classic(
            "NaN where a query sees no key of the first tile that its program reads: the maximum is -inf until then, "
            "and -inf - (-inf) is NaN",
            EMPTY,
        ),
    ),
    Diagnosis(
        _only_queries_without_keys,
        classic("queries that see no key get something: o and dq are 0 there, L is -inf", EMPTY),
    ),
    *(Diagnosis(_counts(outputs, seen), classic(cause, place)) for cause, place, outputs, seen in _SEEN),
    Diagnosis(
        lambda e: _is_gradient(e) and e.close(_computed(e, delta=0.0)),
        classic("delta is missing: dS = P * (dP - delta)", BEFORE),
    ),
    Diagnosis(
        lambda e: _is_gradient(e) and e.close(_computed(e, power=0)),
        classic("dS is not multiplied by the scale: dQ and dK carry the factor", BEFORE),
    ),
    Diagnosis(
        lambda e: _is_gradient(e) and e.close(_computed(e, power=2)),
        classic("the scale is multiplied twice: once in dS, or once at the end", BEFORE),
    ),
    Diagnosis(
        _later_batch_entries,
        classic(
            "only batch entries after the first go wrong, in the case that has several: what grows with the batch "
            "index b? A tensor's own stride of b (the case is not contiguous), and the row (b H + h) N of numbers "
            "without strides, such as L and delta",
            BEFORE,
        ),
    ),
    Diagnosis(
        lambda e: e.only(_far_from_zero),
        classic(
            "only scores far from 0 go wrong: the maximum of the scores that count is subtracted before exp or exp2, "
            "which overflows or gives 0 otherwise; it begins below every score, and each tile's own may raise it",
            BEFORE,
        ),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == "odd head dimension"),
        classic(
            "only non-contiguous inputs fail, of a head dimension that is no power of two: each axis of each tensor "
            "has a stride of its own, the last one too, and columns from D to BLOCK_D must be masked, with other=0.0",
            BEFORE,
        ),
    ),
    *tiles.only_where(
        {"scale": BEFORE, "negative": BEFORE, "strides": BEFORE, "head_dim": BEFORE, "precision": BEFORE}
    ),
)
