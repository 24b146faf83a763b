"""What exercise 5.4 allows a kernel to read, whole and in parts, and the classic wrong answers by what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from utils.checks.cases import Case
from utils.checks.core import classic
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.launches import launched
from utils.checks.problem import Problem
from utils.checks.traffic import Budget, Passes

from . import paged
from .paged import Reading

KERNEL = "paged_decode_kernel"
Tensor = torch.Tensor


def _context_tokens(case: Case) -> int:
    return sum(paged.lengths(case))


def key_bytes(case: Case) -> int:
    """Bytes of all keys, or all values, that the contexts hold."""
    return _context_tokens(case) * case.numel("G", "D") * case.element_size


def exact(case: Case, launch: Mapping[str, Any]) -> Budget:
    """q, each key and each value once."""
    parts = launch.get("parts", 1)
    return Budget(
        {"q_ptr": Passes("S", "H", "D", times=parts), "k_cache_ptr": key_bytes, "v_cache_ptr": key_bytes}, exact=True
    )


def output(case: Case, launch: Mapping[str, Any]) -> Budget:
    """The result once."""
    return Budget({}, {"o_ptr": Passes("S", "H", "D")}, exact=True)


def tables(case: Case, launch: Mapping[str, Any]) -> Budget:
    """At most one entry of a block table for each token and key head."""
    return Budget({"block_tables_ptr": _context_tokens(case) * case.sizes["G"] * 4})


def tile_of(e: Evidence) -> int:
    """Tokens of the tile that the failed case was launched with."""
    return tile_of_launch(e.trial)


def _says(reading: Reading, text: str, number: int, where: Callable[[Evidence], bool] = lambda e: True) -> Diagnosis:
    """A rule that holds when the answer is what this reading of the cache gives, with the answer's own tile."""
    return Diagnosis(lambda e: where(e) and e.same_as(replace(reading, tile=tile_of(e))), classic(text, number))


def _rounded_up(n: int, size: int, tile: int) -> int:
    return -(-n // size) * size


def _block_of_the_tile(e: Evidence) -> bool:
    """Whether all tokens of a tile are read from the block of its first one."""
    tile = tile_of(e)
    return e.same_as(Reading(block=lambda t, size, table, s: table[t // tile * tile // size]))


def _only_small_blocks(e: Evidence) -> bool:
    """Whether tiles that lie in one block are right, several of them too, and no tile of several blocks is."""

    def spans(case: Case) -> bool:
        return case.sizes["block"] < case.sizes["tile"] and max(paged.lengths(case)) > case.sizes["block"]

    right = [trial.case for trial in e.trials if not trial.failed]
    several = any(max(paged.lengths(case)) > case.sizes["tile"] for case in right)
    return several and e.only(spans) and not any(map(spans, right))


_SPANS = classic("a tile spans several blocks: each token has an entry of its own, t // block_size", 1)

RULES = (
    Diagnosis(_block_of_the_tile, _SPANS),
    _says(Reading(block=lambda t, size, table, s: t // size),
          "the block table is ignored: token t of a sequence lies in block table[t // block_size]", 1),
    _says(Reading(block=lambda t, size, table, s: s * len(table) + t // size),
          "the block table is ignored: its place is taken for its entry", 1),
    _says(Reading(block=lambda t, size, table, s: table[0]), "every token is read from the sequence's first block", 1,
          lambda e: not e.findings("out_of_bounds")),
    _says(Reading(block=lambda t, size, table, s: table[min(t, len(table) - 1)]),
          "the table is asked for the token, not for its block: table[t // block_size]", 1),
    _says(Reading(length=lambda n, size, tile: n - 1), "the newest token is left out: context_lens counts it", 2),
    _says(Reading(length=lambda n, size, tile: n + 1), "a token beyond the context counts", 2),
    _says(Reading(length=lambda n, size, tile: n // size * size),
          "a last block that is not full is left out: round the number of blocks up", 2),
    _says(Reading(length=lambda n, size, tile: n // tile * tile),
          "a last tile that is not full is left out: round the number of tiles up", 2),
    _says(Reading(length=_rounded_up),
          "the free slots of the last block count, which hold old keys: the mask is missing, or it ends there", 3),
    _says(Reading(length=lambda n, size, tile: _rounded_up(n, tile, tile)),
          "slots beyond the context count in the last tile: the mask is missing, or its end is that of the tile", 3),
    _says(Reading(zeros=True),
          "scores of the free slots are not masked before the maximum is taken, or not with -inf: a score of 0, or "
          "of another number, is no weight of 0", 3),
    _says(Reading(head=lambda h, H, G: 0), "every query head reads the first key head: k_head_ptr is the program's", 4),
    _says(Reading(head=lambda h, H, G: h % G), "query head h reads key head h // (H / G), not h % G", 4),
    _says(Reading(rescale_sum=False, rescale_output=False),
          "neither the sum nor the output is rescaled after the maximum has changed (or the powers take it off twice, "
          "which comes to the same)", 5),
    _says(Reading(rescale_output=False), "the sum is rescaled after the maximum has changed, the output is not", 5),
    _says(Reading(rescale_sum=False), "the output is rescaled after the maximum has changed, the sum is not", 5),
    _says(Reading(carry=False, rescale_sum=False, rescale_output=False), "each tile has a maximum of its own", 5),
    _says(Reading(carry=False), "each tile has a maximum of its own: the new one is the larger of both", 5),
    _says(Reading(base=2.0), "these are powers of 2 of the scores: scale_log2 holds the factor log2(e)", 6),
    _says(Reading(base=math.exp(1 / paged.LN_2)),
          "scale_log2 goes with exp2: with exp the factor log2(e) is one too many", 6),
    _says(Reading(scaled=False), "the scores are not scaled", 6),
    _says(Reading(divided=False), "the output is not divided by the sum, or the sum stays 0", 7),
    _says(Reading(swapped=True), "keys and values stand in each other's place", 4),
    Diagnosis(lambda e: _only_small_blocks(e) and not bool(e.got[e.bad].isnan().any()), _SPANS),
    Diagnosis(
        lambda e: bool(e.got.isnan().any()) and e.only(lambda case: case.kind == "no context"),
        classic("a context without tokens gives NaN: nothing is to be divided by a sum of 0", 7),
    ),
    Diagnosis(
        lambda e: bool(e.got[e.bad].isnan().any()) and e.only(lambda case: min(paged.lengths(case)) == 0),
        classic("a context without tokens gives NaN: nothing is to be divided by a sum of 0", 7),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == "block boundary"),
        classic("only contexts that end at a block's boundary go wrong, or next to it", 2),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.options.get("scale") is not None),
        classic("only a scale that the caller gives goes wrong", 6),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.magnitude != 1),
        classic("only large scores go wrong: a maximum that never falls is subtracted before each power", 5),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == paged.LOW),
        classic("only scores far below zero go wrong: a masked score is -inf, lower than any that is not", 3),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.layout not in ("contiguous", "far")),
        classic("only tensors of other strides go wrong: each axis of each one, the block table too, has its own", 8),
    ),
    Diagnosis(
        lambda e: e.case.layout != "far" and e.only(lambda case: case.dtype.itemsize < 4),
        classic("right in float32, too inaccurate in 16 bits: scores, maximum, sum and output are float32", 8),
    ),
)  # fmt: skip


# ---- in parts
def merged(paged_attention_parts: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """The student's parts, merged here: whatever the parts are, they must be the whole."""

    def merged_parts(q, k_cache, v_cache, block_tables, context_lens, *, num_splits, scale=None):
        outputs, logsumexps = paged_attention_parts(
            q, k_cache, v_cache, block_tables, context_lens, num_splits, scale=scale
        )
        largest = logsumexps.amax(-1, keepdim=True)
        weights = torch.exp(logsumexps - torch.where(largest == -math.inf, 0.0, largest))
        total = weights.sum(-1)[..., None]
        whole = (weights[..., None] * torch.where(weights[..., None] > 0, outputs, 0.0)).sum(2)
        return (whole / torch.where(total == 0, 1.0, total)).to(q.dtype)

    return merged_parts


MERGING = ("amax", "sub", "eq", "where", "exp", "sum", "mul", "gt", "div", "scalar_tensor", "_to_copy")


def _bytes_read(e: Evidence) -> tuple[int, int]:
    """Bytes of keys that were read, and that the contexts hold."""
    return e.trial.profile.by_argument["k_cache_ptr"].bytes_loaded, key_bytes(e.case)


def _wrong_logsumexp(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Evidence], bool]:
    """Whether an answer is what parts give whose logsumexps are a function of (maximum, sum), natural ones."""

    def applies(e: Evidence) -> bool:
        return e.same_as(lambda *args, **options: _by_parts(*args, **options, tile=tile_of(e), lse=change))

    return applies


def _by_parts(q, k_cache, v_cache, block_tables, context_lens, *, num_splits, scale=None, tile, lse):
    """Attention in parts of whole tiles, merged by logsumexps that may be wrong."""
    H, D = q.shape[1:]
    size, G = k_cache.shape[1:3]
    heads = [h // (H // G) for h in range(H)]
    out = torch.zeros_like(q)
    for s, n in enumerate(context_lens.tolist()):
        slots = torch.tensor([int(block_tables[s, t // size]) * size + t % size for t in range(n)], dtype=torch.int64)
        if not n:
            continue
        keys, values = (cache.flatten(0, 1)[slots][:, heads] for cache in (k_cache, v_cache))
        scores = torch.einsum("hd,nhd->hn", q[s], keys) * (1 / math.sqrt(D) if scale is None else scale)
        tiles, found = -(-n // tile), []
        for part in range(num_splits):
            span = slice(tiles * part // num_splits * tile, min(n, tiles * (part + 1) // num_splits * tile))
            if span.start >= span.stop:
                continue
            m = scores[:, span].amax(-1)
            p = torch.exp(scores[:, span] - m[:, None])
            found.append((lse(m, p.sum(-1)), torch.einsum("hn,nhd->hd", p, values[span]) / p.sum(-1)[:, None]))
        weights = torch.stack([part[0] for part in found]).softmax(0)
        out[s] = (weights[..., None] * torch.stack([part[1] for part in found])).sum(0)
    return out


PART_RULES = (
    Diagnosis(
        _wrong_logsumexp(lambda m, d: (m + d.log()) / paged.LN_2),
        classic("the logsumexp is in powers of 2: multiply it by ln 2", 9),
    ),
    Diagnosis(_wrong_logsumexp(lambda m, d: d.log()), classic("the logsumexp lacks the maximum: m + log2(d)", 9)),
    Diagnosis(_wrong_logsumexp(lambda m, d: m), classic("the logsumexp lacks the sum: m + log2(d)", 9)),
    Diagnosis(
        _wrong_logsumexp(lambda m, d: m / paged.LN_2 + d.log()),
        classic("the logsumexp mixes bases: m is in powers of 2 here, so log2(d), and ln 2 times both", 9),
    ),
    Diagnosis(
        _wrong_logsumexp(lambda m, d: m + d.log() / paged.LN_2),
        classic("the logsumexp mixes bases: ln 2 times both m and log2(d)", 9),
    ),
    Diagnosis(
        _wrong_logsumexp(lambda m, d: m + d.log() * paged.LN_2),
        classic("the logsumexp mixes bases: m is in powers of 2, so log2(d) goes with it", 9),
    ),
    Diagnosis(
        lambda e: _bytes_read(e)[0] < _bytes_read(e)[1],
        lambda e: classic(
            "tokens are left out: {:,} bytes of keys are read, the contexts hold {:,}".format(*_bytes_read(e)), 10
        ),
    ),
    Diagnosis(
        lambda e: _bytes_read(e)[0] > _bytes_read(e)[1],
        lambda e: classic(
            "tokens are in several parts: {:,} bytes of keys are read, the contexts hold {:,}".format(*_bytes_read(e)),
            10,
        ),
    ),
    Diagnosis(
        lambda e: bool(e.got[e.bad].isnan().any()),
        classic("an empty part gives NaN: its logsumexp is -inf, its output 0", 7),
    ),
    *RULES,
    Diagnosis(
        lambda e: True,
        classic("whole contexts are right, parts are not: what does a part say of itself, and where does it end?", 9),
    ),
)


def once(trial: CaseResult) -> Problem | None:
    """An inspection: no token is in two parts."""
    read, needed = trial.profile.by_argument["k_cache_ptr"].bytes_loaded, key_bytes(trial.case)
    if read <= needed:
        return None
    return Problem(
        f"{read:,} bytes of keys are read, the contexts hold {needed:,}",
        classic("tokens are in several parts: each tile belongs to one", 10),
    )


def even(trial: CaseResult) -> Problem | None:
    """An inspection: no part has two tiles more than another one of the same sequence, and no tile is in two parts."""
    launch = next((launch for launch in trial.profile.launches if launch.kernel == KERNEL), None)
    if launch is None:
        return None
    row, tile = trial.case.sizes["D"] * trial.case.element_size, launch.scalars["BLOCK_N"]
    read: dict[tuple[int, int], dict[int, int]] = {}
    for (program, name), cell in launch.cells.items():
        if name == "k_cache_ptr":
            key_head, part, sequence = (*program, 0, 0)[:3]
            read.setdefault((key_head, sequence), {})[part] = cell.bytes_loaded // row
    for (_, sequence), held in read.items():
        tokens = [held.get(part, 0) for part in range(launch.scalars["parts"])]
        headline = f"sequence {sequence}: the parts hold {' '.join(map(str, tokens))} tokens, in tiles of {tile}"
        if max(tokens) - min(tokens) > tile:
            cause = "the longest part decides how long all take: deal the tiles out evenly, one more at most"
            return Problem(headline, classic(cause, 10))
        if sum(-(-count // tile) for count in tokens) > -(-sum(tokens) // tile):
            cause = "a part ends where a tile ends: whoever cuts within one makes two steps of it"
            return Problem(headline, classic(cause, 10))
    return None


# ---- the logsumexp in 16 bits
#: How far a logsumexp of float32 sums may be off.
SUM_ERROR = 1e-5


def float32_sums(paged_attention_parts: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[CaseResult], Problem | None]:
    """An inspection: where the inputs have 16 bits, the logsumexp of a context is still that of float32 sums."""

    def inspect(trial: CaseResult) -> Problem | None:
        case = trial.case
        if case.dtype.itemsize != 2:
            return None
        found = paged_attention_parts(*trial.args, case.options["num_splits"])[1].double().cpu().logsumexp(-1)
        exact, rounded = (_logsumexp(trial, tile_of_launch(trial), dtype) for dtype in (None, case.dtype))
        error = (found - exact)[exact.isfinite()].abs().max().item()
        if error <= SUM_ERROR:
            return None
        cause = "the running sum is float32, as p is before it is rounded for the second product"
        same = (found - rounded)[exact.isfinite()].abs().max().item() <= SUM_ERROR
        return Problem(
            f"the logsumexp of a context is off by {error:.1e}, at most {SUM_ERROR:.0e} is expected of float32 sums",
            classic(f"d adds up p after it was rounded: {cause}", 8) if same else cause,
        )

    return inspect


def tile_of_launch(trial: CaseResult) -> int:
    """Tokens of the tile that a case was launched with."""
    return (launched([trial], KERNEL) or {}).get("BLOCK_N", trial.case.sizes["tile"])


def _logsumexp(trial: CaseResult, tile: int, dtype: torch.dtype | None) -> Tensor:
    """(S, H) of whole contexts in float64; with a ``dtype`` the running sum of each part adds up rounded weights."""
    q, k_cache, _, tables, lens = (value.cpu() for value in trial.args)
    parts, (H, D), (size, G) = trial.case.options["num_splits"], q.shape[1:], k_cache.shape[1:3]
    heads = [h // (H // G) for h in range(H)]
    out = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for s, n in enumerate(lens.tolist()):
        slots = torch.tensor([int(tables[s, t // size]) * size + t % size for t in range(n)], dtype=torch.int64)
        scores = torch.einsum("hd,nhd->hn", q[s].double(), k_cache.double().flatten(0, 1)[slots][:, heads])
        scores, tiles, found = scores / math.sqrt(D), -(-n // tile), []
        for part in range(parts):
            m, d = torch.full((H,), -math.inf, dtype=torch.float64), torch.zeros(H, dtype=torch.float64)
            for i in range(tiles * part // parts, tiles * (part + 1) // parts):
                new = torch.maximum(m, scores[:, i * tile : (i + 1) * tile].amax(-1))
                p = torch.exp(scores[:, i * tile : (i + 1) * tile] - new[:, None])
                d = d * torch.exp(m - new) + (p if dtype is None else p.to(dtype).double()).sum(-1)
                m = new
            found.append(m + d.log())
        out[s] = torch.stack(found).logsumexp(0)
    return out
