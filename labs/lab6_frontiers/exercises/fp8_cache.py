"""Attention over a paged cache in e4m3, right and with each known mistake, and the tensors that it is tried on."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from utils import runtime
from utils.checks.cases import Case

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn
#: What stands in slots of no context: large, so that reading one is seen.
FREE = 240.0
#: Scales of blocks that nobody owns.
FREE_SCALE = 3.0
HEADS_FIRST = "heads first"
LOW = "scores far below zero"


@dataclass(frozen=True)
class Reading:
    """How a kernel reads the cache: as it should, or with mistakes.

    Attributes:
        k_scale, v_scale: which scale a token's key and value get: their ``"own"``, ``"none"``, that of the ``"other"``
            cache, of the block with the ``"logical"`` number, of the ``"first head"``, or of the first token of the
            ``"tile"``.
        scaled_sum: the weights are summed after they were multiplied by the values' scales.
        in_table: whether blocks are looked up in the table.
        whole_blocks: free slots of the last block count.
        zeros: what fills up the last tile counts with a score of 0.
        rescaled: whether sum and output follow a new maximum.
        tile: tokens of a tile.
    """

    k_scale: str = "own"
    v_scale: str = "own"
    scaled_sum: bool = False
    in_table: bool = True
    whole_blocks: bool = False
    zeros: bool = False
    rescaled: bool = True
    tile: int = 16

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scale: Tensor,
        v_scale: Tensor,
        tables: Tensor,
        lens: Tensor,
    ) -> Tensor:
        """(S, H, D) of q's dtype; computed in it."""
        (_, H, D), (_, size, G, _) = q.shape, k_cache.shape
        out = torch.zeros_like(q)
        for s, n in enumerate(lens.tolist()):
            token = torch.arange(-(-n // size) * size if self.whole_blocks else n, device=q.device)
            logical = token // size
            block = tables[s].long()[logical] if self.in_table else logical
            for h in range(H if n else 0):
                g = h // (H // G)
                caches = (k_cache, k_scale, v_scale, self.k_scale), (v_cache, v_scale, k_scale, self.v_scale)
                scales = [self._scale(own, other, which, block, logical, g) for _, own, other, which in caches]
                k, v = (cache[block, token % size, g].to(scale.dtype) for (cache, *_), scale in zip(caches, scales))
                k, v = ((x * scale[:, None]).to(q.dtype) for x, scale in zip((k, v), scales))
                if self.zeros:
                    k, v = (torch.nn.functional.pad(x, (0, 0, 0, -n % self.tile)) for x in (k, v))
                scores = (k @ q[s, h]) / math.sqrt(D)
                out[s, h] = self._weighted(scores, v, scales[1])
        return out

    def _scale(self, own: Tensor, other: Tensor, which: str, block: Tensor, logical: Tensor, g: int) -> Tensor:
        if which == "none":
            return torch.ones_like(own[block, g])
        if which == "logical":
            return own[logical, g]
        if which == "tile":
            first = torch.arange(len(block), device=block.device) // self.tile * self.tile
            return own[block[first], g]
        return (other if which == "other" else own)[block, 0 if which == "first head" else g]

    def _weighted(self, scores: Tensor, v: Tensor, v_scale: Tensor) -> Tensor:
        if not self.rescaled:
            return self._not_rescaled(scores, v)
        p = scores.softmax(-1)
        return (p @ v) / (p * v_scale).sum().to(v.dtype) if self.scaled_sum else p @ v

    def _not_rescaled(self, scores: Tensor, v: Tensor) -> Tensor:
        m, d, o = scores.new_tensor(-math.inf), 0.0, torch.zeros_like(v[0])
        for s, x in zip(scores.split(self.tile), v.split(self.tile)):
            m = torch.maximum(m, s.max())
            p = torch.exp(s - m)
            d, o = d + p.sum(), o + p @ x
        return o / d


attention = Reading()


# ---- the tensors
def lengths(case: Case) -> list[int]:
    """Context lengths of a case's sequences; the first has more than two tiles, and none ends with its block."""
    size, draw = case.sizes["block"], random.Random(f"{case.seed}/{case.kind}/lengths")
    if case.kind == "one token":
        return [1] * case.sizes["S"]
    step = max(size, 16)
    several = [n for n in range(2 * step + 1, 3 * step) if size < 4 or 1 < n % size < size - 1]
    found = [draw.choice(several), *(draw.randint(1, 3 * step) for _ in range(case.sizes["S"] - 1))]
    return [0, *found[1:]] if case.kind == "no context" else found


def inputs(case: Case) -> tuple[Tensor, ...]:
    """q, caches, scales, block table, lengths: blocks shuffled, and slots of no context full of large values.

    Scales differ by a factor of ten and more from block to block; in bfloat16 by far more.
    """
    size, S, G, found = case.sizes["block"], case.sizes["S"], case.sizes["G"], lengths(case)
    draw = random.Random(f"{case.seed}/{case}/tables")
    source = torch.Generator().manual_seed(draw.getrandbits(40))
    needed = [-(-n // size) for n in found]
    order = list(range(sum(needed) + 3))
    draw.shuffle(order)
    spare = order.pop()
    tables = torch.full((S, max(needed) + 2), spare, dtype=torch.int32)
    owned = torch.zeros(sum(needed) + 3, size, dtype=torch.bool)
    for s, n in enumerate(found):
        mine = [order.pop() for _ in range(needed[s])]
        tables[s, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        for t in range(n):
            owned[mine[t // size], t % size] = True
    caches, scales = [], []
    for name in ("k", "v"):
        codes = (60 * torch.randn(len(owned), size, G, case.sizes["D"], generator=source)).clamp(-448, 448)
        codes = torch.where(owned[:, :, None, None], codes, FREE).to(FP8)
        if case.kind == LOW and name == "k":
            codes[..., 0] = 240
        if case.layout == HEADS_FIRST:
            codes = codes.transpose(1, 2).contiguous().transpose(1, 2)
        spread = torch.rand(len(owned), G, generator=source) * 3 - 5
        if name == "v" and case.dtype == torch.bfloat16:
            spread *= 5
        if case.kind == LOW and name == "k":
            spread *= 0
        caches.append(codes.to(runtime.DEVICE))
        scale = torch.where(owned.any(1)[:, None], torch.exp(spread), FREE_SCALE)
        scales.append(scale.to(runtime.DEVICE))
    q = case.tensor("q", "S", "H", "D", layout="contiguous")
    if case.kind == LOW:  # -12,000 each for D = 16, which float16 holds
        q = torch.cat((torch.full_like(q[..., :1], -200), torch.zeros_like(q[..., 1:])), -1)
    lens = torch.tensor(found, dtype=torch.int32)
    return q, *caches, *scales, tables.to(runtime.DEVICE), lens.to(runtime.DEVICE)
