"""The check of exercise 6.5: causal attention of packed documents, in kernels of one's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from utils import runtime
from utils.checks import forbid
from utils.checks.cases import Case, far_fits
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, classic, draw_seed
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.hidden import Tolerance, tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import arguments_in, probed_tile
from utils.checks.tiling import Tiling

from .document_mask import (
    EMPTY,
    FP16,
    GROWING,
    LOW,
    Walk,
    attention,
    begins,
    cases,
    huge,
    inputs,
    masked,
    not_rescaled,
    visible,
    zeros_for_hidden,
)
from .document_traffic import moved, tile_of
from .rules import OF_TABLES

Tensor = torch.Tensor
RULES = forbid.Rules(allow=OF_TABLES, largest=lambda case: case.numel("T", "H", "D"))


def _tile(function: Callable[..., Tensor]) -> tuple[int, int]:
    """(queries, keys) of the tiles that a function loads, between 16 and 256."""
    x = [torch.zeros(64, 1, 16, device=runtime.DEVICE, dtype=FP16) for _ in range(3)]
    starts = torch.tensor([0, 64], dtype=torch.int32, device=runtime.DEVICE)
    (m, columns), of_keys = (probed_tile(function, (*x, starts), tensor) for tensor in x[:2])
    if columns < 16:
        return 32, 32
    return min(256, max(16, m)), min(256, max(16, math.prod(of_keys) // columns))


def _checked_cases(seed: int, m: int, n: int) -> list[Case]:
    far = [Case("far tokens", {"T": 3, "S": 2, "H": 1, "D": 16}, FP16, "far", seed=seed)] if far_fits(FP16) else []
    return cases(seed, m, n) + far


def _tiling(trials: Sequence[CaseResult]) -> Tiling | None:
    """Which tile an element is in, where tiles begin at multiples of their size in the row."""
    trial, m = trials[0], tile_of(trials[0])[0]
    width = trial.case.numel("H", "D")
    for launch in trial.profile.launches if m else ():
        names = arguments_in(launch, trial.outputs[0])
        firsts = [first // width for (_, name), (first, _) in launch.written.items() if name in names]
        if firsts and all(first % m == 0 for first in firsts):
            return Tiling("T H D", tiles={"T": m}, noun="token tile")
    return None


# ---- what is wrong
@dataclass(frozen=True)
class Reading:
    """A known mistake: whether an answer is what it gives, its cause, and its place in the list."""

    gives: Callable[[Evidence], bool]
    cause: str
    place: int


def _seen(change: Callable[[Tensor, Tensor, Tensor], Tensor], cause: str, place: int) -> Reading:
    """Another mask, of queries (T, 1), keys (T,) and where each query's document begins (T, 1)."""

    def gives(e: Evidence) -> bool:
        q, k, v, starts = e.args64
        j = torch.arange(len(q))
        return _at_most(e, masked(q, k, v, change(j[:, None], j, begins(len(q), starts)[:, None])))

    return Reading(gives, cause, place)


def _at_most(e: Evidence, candidate: Tensor) -> bool:
    """Whether this is the answer, where queries that see nothing have 0 or NaN."""
    got = e.got
    nothing = got.isnan() & (candidate == 0)
    return bool(candidate.any()) and e.close(torch.where(nothing, got, candidate))


def _walks(e: Evidence) -> Iterator[Walk]:
    """The loops that the answer may have."""
    m, n, columns = tile_of(e.trial)
    for aligned in (False, True) if columns else ():
        yield Walk(len(e.right), e.trial.args[3].cpu(), m, n, aligned)


def _in_loop(masks: Callable[[Walk], Iterator[Tensor]], cause: str, place: int) -> Reading:
    """A mask (T, T + n) that follows from the tiles, in one of several ways."""

    def gives(e: Evidence) -> bool:
        q, k, v = e.args64[:3]
        return any(_at_most(e, masked(q, k, v, seen[:, : len(q)])) for walk in _walks(e) for seen in masks(walk))

    return Reading(gives, cause, place)


def _of_first_query(w: Walk) -> Iterator[Tensor]:
    yield (w.j >= w.needed) & (w.j <= w.i)


def _of_last_query(w: Walk) -> Iterator[Tensor]:
    begin = w.begin[w.last_query]
    yield (w.j >= begin) & (w.j <= w.i)
    yield (w.j >= begin // w.n * w.n) & w.seen


def _late(w: Walk) -> Iterator[Tensor]:
    yield w.seen & (w.j >= -(-w.needed // w.n) * w.n)
    yield w.seen & (w.j >= w.first + w.n)
    yield w.seen & (w.j >= w.needed + 1)


def _early(w: Walk) -> Iterator[Tensor]:
    yield w.seen & (w.j <= w.first_query)
    yield w.seen & (w.j < w.first_query)
    yield w.seen & (w.j < w.last_query)
    yield w.seen & (w.j < (w.last_query + 1) // w.n * w.n)
    yield w.seen & (w.j < w.end - w.n)
    yield w.seen & (w.j < w.first + (w.last_query + 1 - w.first) // w.n * w.n)
    yield w.seen & (w.j < w.first + w.n)


def _no_key_in_the_first_tile(e: Evidence) -> bool:
    """Whether NaN stands where a query sees none of the keys of the first tile, and nothing else is wrong."""
    rows = e.got.isnan().flatten(1).any(1)
    if not rows.any() or not torch.equal(rows, e.bad.flatten(1).any(1)):
        return False
    return any(torch.equal(rows, walk.begin >= walk.first[:, 0] + walk.n) for walk in _walks(e))


def _not_rescaled(sum_too: bool, output_too: bool, what: str) -> Reading:
    def gives(e: Evidence) -> bool:
        walks = (walk for walk in _walks(e) if walk.n < walk.T)
        return any(e.close(not_rescaled(*e.args64[:3], walk, sum_too, output_too)) for walk in walks)

    return Reading(gives, f"{what} not rescaled after the maximum has changed", 7)


def _scaled(change: Callable[[int], float], cause: str) -> Reading:
    def gives(e: Evidence) -> bool:
        q, k, v, starts = e.args64
        return e.close(masked(q, k, v, visible(len(q), starts), change(q.shape[2])))

    return Reading(gives, cause, 7)


def _fitting(e: Evidence) -> str:
    """The mistake that gives the simplest failed case, and of several the one that gives most of the others."""
    found = [reading for reading in _READINGS if reading.gives(e)]
    if not found:
        return ""
    cases = e.of_each_case() if len(found) > 1 else [e]
    best = max(found, key=lambda reading: sum(reading.gives(case) for case in cases))
    return classic(best.cause, best.place)


OWN = "a query sees the keys of its own document up to itself, begin <= j <= i"
_READINGS = (
    _seen(lambda i, j, b: j <= i, "keys of the documents before count: the document mask is left out", 1),
    _seen(lambda i, j, b: j >= b, "keys after a query count: inside a document the mask is causal", 1),
    _seen(lambda i, j, b: b == b.T, "keys after a query count: inside a document the mask is causal", 1),
    _seen(lambda i, j, b: (j >= 0) & (i >= 0), "nothing is masked: every query sees every key", 1),
    _seen(lambda i, j, b: (j >= torch.cat([b[:1], b[:-1]])) & (j <= i),
          f"a document's first token counts as one of the document before: {OWN}, and begin is the last of cu_seqlens "
          "that is at most i", 2),
    _seen(lambda i, j, b: (j >= torch.cat([b[:1] + len(b), b[:-1]])) & (j <= i),
          "a document's first token counts as one of the document before, and token 0 of none: begin is the last of "
          "cu_seqlens that is at most i, which torch.searchsorted finds with right=True", 2),
    _seen(lambda i, j, b: (j >= b - 1) & (j <= i), f"the last key of the document before counts: {OWN}", 2),
    _seen(lambda i, j, b: (j > b) & (j <= i), f"a document's first key is not seen: {OWN}", 2),
    _seen(lambda i, j, b: (j >= b) & (j < i), f"a query does not see its own key: {OWN}", 2),
    _seen(lambda i, j, b: (j >= b) & (j <= i + 1), f"the key after a query's own counts: {OWN}", 2),
    _in_loop(
        _of_first_query, "the keys of the first query's document count for the whole tile, which may hold several", 3
    ),
    _in_loop(_of_last_query, "the loop begins with the document of a tile's last query: the first one's is earlier", 3),
    Reading(
        _no_key_in_the_first_tile,
        "NaN where a query sees no key of the first tile that is read: its maximum is -inf until then, and "
        "-inf - (-inf) is NaN", 4,
    ),
    _not_rescaled(True, True, "sum and output are"),
    _not_rescaled(False, True, "the output is"),
    _not_rescaled(True, False, "the sum is"),
    Reading(
        lambda e: any(e.close(zeros_for_hidden(*e.args64[:3], walk)) for walk in _walks(e)),
        "hidden keys count with a score of 0: a score of 0 is no weight of 0", 7,
    ),
    _scaled(lambda D: D**0.5, "the scores are not multiplied by 1 / sqrt(D)"),
    _scaled(lambda D: D**-0.5, "the scores are multiplied by 1 / sqrt(D) twice"),
    _scaled(lambda D: math.log(2), "exp2 of scores without the factor log2(e)"),
    _scaled(lambda D: 1 / math.log(2), "exp of scores with the factor log2(e)"),
    _in_loop(_late, "the loop begins too late: the first query of a tile sees the first key of its document", 6),
    _in_loop(_early, "the loop ends too early: the last query of a tile sees its own key", 6),
)  # fmt: skip


def _only(holds: Callable[[Case], bool], cause: str, place: int) -> Diagnosis:
    return Diagnosis(lambda e: e.only(holds), classic(cause, place))


_MISTAKES = (
    _only(
        lambda case: case.layout == "far",
        "only offsets beyond 2^31 are wrong: token.to(tl.int64), before it is multiplied by a stride", 9,
    ),
    Diagnosis(
        lambda e: bool(e.difference.never_written.any()) and not e.findings("out_of_bounds"),
        classic("elements of o are never written: is there a program for each, and what does it store?", 9),
    ),
    _only(
        lambda case: case.layout != "contiguous",
        "only tensors of other strides go wrong: q, k and v have each their own, for tokens and for heads", 9,
    ),
    _only(
        lambda case: case.kind == LOW,
        "only scores far below zero go wrong: that of a hidden key is -inf, below any that a query sees", 7,
    ),
    Diagnosis(_fitting, _fitting),
    _only(
        lambda case: case.kind == EMPTY,
        "only rows with empty documents go wrong: of equal entries of cu_seqlens the last one counts", 8,
    ),
    _only(
        lambda case: case.sizes["S"] > 16,
        "only rows of more than 16 documents go wrong: there may be as many as tokens, and more", 8,
    ),
    _only(
        lambda case: case.kind == "odd head dimension",
        "only a head dimension that is no power of two goes wrong: mask the columns from D on", 9,
    ),
    _only(
        lambda case: case.sizes["H"] > 1,
        "only rows of several heads go wrong: a head begins at head * stride(1), in o at head * D", 9,
    ),
    _only(
        lambda case: case.kind == GROWING,
        "only scores that grow along the row go wrong: maximum, sum and output of each tile are float32", 7,
    ),
)  # fmt: skip

DOCUMENTS = Exercise(
    "6.5",
    "attention of packed documents",
    points=13,
    observe=tried("6.5", "document_attention", ("",), cases, inputs),
    tolerance=Tolerance(times=4),
)


@DOCUMENTS.checked_by
def check_documents(
    document_attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], seed: int | None = None
) -> None:
    """Exercise 6.5: causal attention of packed documents; tiles without a visible pair are not read.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    check_kernel(
        DOCUMENTS,
        document_attention,
        attention,
        _checked_cases(seed, *_tile(document_attention)),
        inputs,
        outputs=("o",),
        tiling=_tiling,
        inspections=[moved],
        forbidden=RULES,
        diagnose=_MISTAKES,
        compiled=Compiled(wide=10),
        huge=(huge, functools.partial(huge, heads_first=True)),
        seed=seed,
        notice="what a token costs depends on its place in its document, and on no other document of the row",
    )
