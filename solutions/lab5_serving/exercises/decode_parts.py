"""Exercise 5.4 in parts: what the parts must be together, and what goes wrong with a part."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from utils.checks.core import classic
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.problem import Problem

from . import paged
from .decode_rules import KERNEL, RULES, key_bytes, tile_of

Tensor = torch.Tensor


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
    """An inspection: no part has two tiles more than another one of the same sequence."""
    launch = next((launch for launch in trial.profile.launches if launch.kernel == KERNEL), None)
    if launch is None:
        return None
    row = trial.case.sizes["D"] * trial.case.element_size
    read: dict[tuple[int, int], list[int]] = {}
    for (program, name), cell in launch.cells.items():
        if name == "k_cache_ptr":
            key_head, _, sequence = (*program, 0, 0)[:3]
            read.setdefault((key_head, sequence), []).append(cell.bytes_loaded // row)
    for (_, sequence), tokens in read.items():
        tokens += [0] * (launch.scalars["parts"] - len(tokens))
        if max(tokens) - min(tokens) > launch.scalars["BLOCK_N"]:
            return Problem(
                f"sequence {sequence}: the parts hold {' '.join(map(str, sorted(tokens)))} tokens, in tiles of "
                f"{launch.scalars['BLOCK_N']}",
                classic("the longest part decides how long all take: deal the tiles out evenly, one more at most", 10),
            )
    return None
