"""Attention over a paged cache, right and with each known mistake, and the tensors that kernels are tried on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from utils import runtime
from utils.checks.cases import Case, far_fits, with_layout
from utils.checks.core import generator

Tensor = torch.Tensor

#: Added to what stands in slots of no context: large, so that reading one is seen, and finite, so that it can be told.
POISON = 6.0
#: Scores so far below zero that a masked one must be -inf: no number that a student would take is lower.
LOW = "low scores"
LN_2 = math.log(2.0)

#: Of the inputs that kernels are tried on; each may have a tile of its own.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Reading:
    """How a kernel reads the cache and adds up: as it should, or with mistakes.

    Attributes:
        length: tokens that count, from (context length, block size, tokens of a tile).
        block: the block of a token, from (its number in the sequence, block size, the sequence's table, sequence).
        head: the key head of a query head, from (head, H, G).
        tile: tokens of a tile, for the mistakes of a running sum.
        rescale_sum, rescale_output: whether they follow a new maximum; ``carry``: whether the maximum is kept.
        base: of the powers; ``scaled``: whether scores are multiplied by the scale; ``divided``: the output by its sum.
        swapped: keys and values in each other's place.
        zeros: slots that fill up the last tile count with a score of 0.
    """

    length: Callable[[int, int, int], int] = lambda n, size, tile: n
    block: Callable[[int, int, list[int], int], int] = lambda token, size, table, sequence: table[token // size]
    head: Callable[[int, int, int], int] = lambda h, H, G: h // (H // G)
    tile: int = 16
    rescale_sum: bool = True
    rescale_output: bool = True
    carry: bool = True
    base: float = math.e
    scaled: bool = True
    divided: bool = True
    swapped: bool = False
    zeros: bool = False

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor,
        *, scale: float | None = None, num_splits: int | None = None,
    ) -> Tensor:  # fmt: skip
        """(S, H, D) of the inputs' dtype; see :func:`paged_attention_decode` of the lab."""
        k_cache, v_cache = (v_cache, k_cache) if self.swapped else (k_cache, v_cache)
        H, D = q.shape[1:]
        size, G = k_cache.shape[1:3]
        out = torch.zeros_like(q)
        heads = [self.head(h, H, G) for h in range(H)]
        factor = (1 / math.sqrt(D) if scale is None else scale) if self.scaled else 1.0
        tables = block_tables.tolist()
        for s, n in enumerate(context_lens.tolist()):
            tokens = range(max(0, self.length(n, size, self.tile)))
            slots = torch.tensor(
                [self.block(t, size, tables[s], s) * size + t % size for t in tokens], dtype=torch.int64
            )
            keys, values = (cache.flatten(0, 1)[slots.to(cache.device)][:, heads] for cache in (k_cache, v_cache))
            if self.zeros:
                more = (0, 0, 0, 0, 0, -len(slots) % self.tile)
                keys, values = (torch.nn.functional.pad(x, more) for x in (keys, values))
            if len(slots):
                out[s] = self._attend(q[s], keys, values, factor)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, factor: float) -> Tensor:
        """(H, D) over (N, H, D), tile by tile."""
        scores = torch.einsum("hd,nhd->hn", q, k) * (factor * math.log(self.base))
        if self.rescale_sum and self.rescale_output and self.carry and self.divided:
            return torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
        m = scores.new_full((len(q),), -1e30)
        d, o = torch.zeros_like(m), torch.zeros_like(q)
        for start in range(0, len(k), self.tile):
            part = scores[:, start : start + self.tile]
            largest = part.amax(-1)
            new = torch.maximum(m, largest) if self.carry else largest
            p, ratio = torch.exp(part - new[:, None]), torch.exp((m - new).clamp(max=80))
            d = d * (ratio if self.rescale_sum else 1.0) + p.sum(-1)
            o = o * (ratio if self.rescale_output else 1.0)[:, None] if self.rescale_output else o
            o = o + torch.einsum("hn,nhd->hd", p, v[start : start + self.tile])
            m = new
        return o / d[:, None] if self.divided else o


attention = Reading()


# ---- the tensors
def lengths(case: Case) -> list[int]:
    """Context lengths of a case's sequences."""
    size, S, tile = case.sizes["block"], case.sizes["S"], case.sizes["tile"]
    draw = random.Random(f"{case.seed}/{case.kind}/lengths")
    if case.kind == "block boundary":
        around = [size, size + 1, max(1, size - 1), 2 * size, 2 * size + 1, max(1, 2 * size - 1)]
        return [around[s % len(around)] for s in range(S)]
    if case.kind == "no context":
        return [0 if s % 2 == 0 else draw.randint(1, 2 * size) for s in range(S)]
    if case.kind == "one token":
        return [1] * S
    if case.kind == "long and short":
        return [1 if s % 2 else 6 * max(size, tile) + draw.randint(1, size) for s in range(S)]
    step = max(size, tile)
    # More than two tiles first, and no token less or more would end a block: each mistake then gives other values.
    several = [n for n in range(2 * step + 1, 3 * step) if size < 4 or 1 < n % size < size - 1]
    return [draw.choice(several) if s == 0 else draw.randint(1, 3 * step) for s in range(S)]


def width(case: Case) -> int:
    """Columns of the block table: more than any sequence needs."""
    return -(-max(max(lengths(case)), 1) // case.sizes["block"]) + 2


def inputs(case: Case) -> tuple[Tensor, ...]:
    """q, k_cache, v_cache, block_tables, context_lens: blocks shuffled, slots of no context full of large values.

    Entries of a table beyond its context name a block full of such values.
    """
    size, S, found = case.sizes["block"], case.sizes["S"], lengths(case)
    draw = random.Random(f"{case.seed}/{case}/tables")
    needed = [-(-n // size) for n in found]
    total = 3 if case.layout == "far" else sum(needed) + 3
    order = list(range(total))
    draw.shuffle(order)
    spare = order.pop()
    tables = torch.full((S, width(case)), spare, dtype=torch.int32)
    owned = torch.zeros(total, size, dtype=torch.bool)
    for s, n in enumerate(found):
        mine = [order.pop() for _ in range(needed[s])]
        tables[s, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        for t in range(n):
            owned[mine[t // size], t % size] = True
    blocks = Case(case.kind, {**case.sizes, "blocks": total}, case.dtype, seed=case.seed, magnitude=case.magnitude)
    caches = []
    for name in ("k", "v"):
        cache = blocks.tensor(name, "blocks", "block", "G", "D")
        if name == "v":
            cache = cache / case.magnitude
        elif case.kind == LOW:  # and all equal: what float32 rounds of so large a number is the same everywhere
            cache = torch.zeros_like(cache)
            cache[..., 0] = -8192.0
        cache = torch.where(owned.to(cache.device)[:, :, None, None], cache, cache + POISON)
        caches.append(_laid_out(cache, case.layout, name))
    q = case.tensor("q", "S", "H", "D", layout="padded" if case.layout in ("padded", "mixed") else "contiguous")
    if case.kind == LOW:
        q.zero_()
        q[..., 0] = 4.0
    device = runtime.DEVICE
    if case.layout != "contiguous":
        step = 2 if case.layout == "mixed" else 1
        wide = torch.zeros(S, step * width(case) + 3, dtype=torch.int32)
        wide[:, : step * width(case) : step] = tables
        tables = wide[:, : step * width(case) : step]
    return q, *caches, tables.to(device), torch.tensor(found, dtype=torch.int32, device=device)


def _laid_out(cache: Tensor, layout: str, name: str) -> Tensor:
    if layout == "heads first" or (layout == "mixed" and name == "v"):  # (blocks, G, size, D) in memory
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    if layout in ("padded", "mixed"):
        return with_layout(cache, "padded")
    return with_layout(cache, layout)


def drawn(seed: int, tiles: Mapping[torch.dtype, int], splits: int | None = None) -> list[Case]:
    """The cases of a seed, simplest first, most with a context of several tiles; with ``splits``, fewer, in parts.

    ``tiles`` are the tokens of a tile by dtype (:data:`DTYPES`).
    """

    def sizes(S: int, H: int, G: int, D: int, block: int, dtype: torch.dtype = torch.float32) -> dict[str, int]:
        return {"S": S, "H": H, "G": G, "D": D, "block": block, "tile": tiles[dtype]}

    draw = generator(seed)
    group, odd = draw.choice((2, 3)), draw.choice((20, 24, 40))
    options, half = {"num_splits": splits or 1}, torch.float16 if splits is None else torch.bfloat16
    base = {"seed": seed, "options": options}
    plans = [
        Case("one sequence", sizes(1, 1, 1, 16, 16), **base),
        Case("ragged", sizes(2, 2, 2, 16, 16), **base),
        Case("shared heads", sizes(2, 2 * group, 2, 16, 16), **base),
        Case("small blocks", sizes(2, 2, 1, 16, draw.choice((2, 4, 8))), **base),
        Case("no context", sizes(2, 2, 1, 16, 16), **base),
        Case("long and short", sizes(2, 1, 1, 16, 16), **base),
        Case("ragged", sizes(2, group, 1, 32, 16, half), half, **base),
    ]
    if splits is not None:
        return [*plans, Case("block boundary", sizes(3, 1, 1, 16, 16), **base)]
    plans += [
        Case("block boundary", sizes(6, 1, 1, 16, 16), **base),
        Case("blocks of one", sizes(1, 2, 1, 16, 1), **base),
        Case("large blocks", sizes(2, 1, 1, 16, draw.choice((32, 64))), **base),
        Case("one token", sizes(1, 2, 2, 16, 8), **base),
        Case("odd head dimension", sizes(2, 2, 1, odd, 16), **base),
        Case("ragged", sizes(1, 2 * group, 2, 16, 8), layout="padded", **base),
        Case("ragged", sizes(1, 2, 2, 16, 16), layout="mixed", **base),
        Case("given scale", sizes(1, 1, 1, 16, 8), seed=seed, options={**options, "scale": draw.choice((0.05, 1.0))}),
        Case("ragged", sizes(2, 1, 1, 16, 16), magnitude=30.0, **base),
        Case(LOW, sizes(2, 1, 1, 16, 16), **base),
        Case("ragged", sizes(2, group, 1, 32, 16, torch.bfloat16), torch.bfloat16, **base),
    ]
    if far_fits(torch.float16):
        plans.append(Case("one token", sizes(1, 1, 1, 16, 16, torch.float16), torch.float16, layout="far", **base))
    return plans
