"""Attention of packed documents, right and with each known mistake, and the rows that it is tried on."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import torch
from torch.nn.functional import pad

from utils import runtime
from utils.checks.cases import Case, with_layout
from utils.checks.core import generator

Tensor = torch.Tensor
FP16, BF16 = torch.float16, torch.bfloat16
HEADS_FIRST, MIXED = "heads first", "mixed"
EMPTY, MANY, GROWING = "empty documents", "many documents", "scores that grow"
LOW = "scores far below zero"


# ---- the right result, and wrong ones
def begins(T: int, cu_seqlens: Tensor) -> Tensor:
    """(T,) int64: where each token's document begins."""
    starts = cu_seqlens.long()
    return starts[torch.bucketize(torch.arange(T, device=starts.device), starts, right=True) - 1]


def visible(T: int, cu_seqlens: Tensor) -> Tensor:
    """(T, T) bool: whether query i sees key j."""
    token = torch.arange(T, device=cu_seqlens.device)
    return (token >= begins(T, cu_seqlens)[:, None]) & (token <= token[:, None])


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(T, H, D), computed in the inputs' dtype."""
    return masked(q, k, v, visible(len(q), cu_seqlens))


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, factor: float = 1.0) -> Tensor:
    """Attention under a mask (T, T), with ``factor`` times the right scale; 0 for a query that sees nothing."""
    scores = torch.einsum("ihd,jhd->hij", q, k) * (factor / math.sqrt(q.shape[2]))
    p = torch.softmax(scores.masked_fill(~seen, -math.inf), -1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", p, v)


class Walk:
    """A loop over tiles of ``n`` keys for tiles of ``m`` queries that begin at multiples of m, as in the solution.

    ``aligned``: its tiles begin at multiples of n, too; otherwise at the first key that is needed.
    """

    def __init__(self, T: int, cu_seqlens: Tensor, m: int, n: int, aligned: bool = False) -> None:
        self.T, self.m, self.n, self.begin = T, m, n, begins(T, cu_seqlens)
        self.i, self.j = torch.arange(T)[:, None], torch.arange(T + n)[None, :]
        of_tile = torch.arange(T) // m * m
        self.first_query, self.last_query = of_tile[:, None], (of_tile + m - 1).clamp(max=T - 1)[:, None]
        self.needed = self.begin[self.first_query]
        self.first = self.needed // n * n if aligned else self.needed
        self.end = self.first + -(-(self.last_query + 1 - self.first) // n) * n
        self.seen = (self.j >= self.begin[:, None]) & (self.j <= self.i)

    def tile_of_key(self) -> Tensor:
        """(T, T + n): which step of the loop meets a key; negative before the first."""
        return (self.j - self.first).div(self.n, rounding_mode="floor")


def not_rescaled(q: Tensor, k: Tensor, v: Tensor, walk: Walk, sum_too: bool, output_too: bool) -> Tensor:
    """What comes out where the running sum, the running output or both keep the factor of an older maximum."""
    k, v = (pad(x, (0, 0, 0, 0, 0, walk.n)) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[2])
    scores = scores.masked_fill(~walk.seen, -math.inf)
    step = walk.tile_of_key().clamp(min=0)
    steps = int(step.max()) + 1
    largest = torch.stack([scores.masked_fill(step != s, -math.inf).amax(-1) for s in range(steps)], -1)
    largest = largest.cummax(-1).values.clamp(min=-1e30)  # (H, T, steps)
    old = largest.gather(-1, step.expand(len(scores), -1, -1))
    right, wrong = torch.exp(scores - largest[..., -1:]), torch.exp(scores - old)
    total = (wrong if sum_too else right).sum(-1)
    return torch.einsum("hij,jhd->ihd", wrong if output_too else right, v) / total.T[..., None]


def zeros_for_hidden(q: Tensor, k: Tensor, v: Tensor, walk: Walk) -> Tensor:
    """What comes out where a hidden key of a tile that is visited counts with a score of 0."""
    met = (walk.j >= walk.first) & (walk.j < walk.end)
    k, v = (pad(x, (0, 0, 0, 0, 0, walk.n)) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[2])
    p = torch.softmax(scores.masked_fill(~walk.seen, 0.0).masked_fill(~met, -math.inf), -1)
    return torch.einsum("hij,jhd->ihd", p, v)


# ---- rows of documents
def lengths(case: Case) -> list[int]:
    """Tokens of each of the case's S documents, T in all."""
    T, S = case.shape("T", "S")
    draw = random.Random(f"{case.seed}/{case.kind}/{T}/{S}")
    if case.kind == "equal documents":
        return [T // S] * S
    if case.kind == "long, then short":
        return [T - 3, 2, 1]
    if case.kind == "short, then long":
        return [1, 2, T - 3]
    cuts = [draw.randint(0, T) for _ in range(S - 1)] if case.kind == EMPTY else draw.sample(range(1, T), S - 1)
    if case.kind == EMPTY:  # at the beginning, twice in the middle, and at the end
        cuts[:4] = [0, cuts[4], cuts[4], T]
    cuts = [0, *sorted(cuts), T]
    return [end - begin for begin, end in pairwise(cuts)]


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and cu_seqlens of a case, each in memory of its own."""
    layouts = {HEADS_FIRST: (HEADS_FIRST,) * 3, MIXED: ("contiguous", HEADS_FIRST, "padded")}
    layouts = layouts.get(case.layout, (case.layout,) * 3)
    q, k, v = (_placed(case.tensor(name, "T", "H", "D", layout="contiguous"), how) for name, how in zip("qkv", layouts))
    if case.kind == GROWING:  # along the row, so that the maximum rises with every tile
        slope = torch.linspace(0.1, 6, len(k), device=k.device, dtype=k.dtype)[:, None, None]
        q, k = q.abs(), k.abs() * slope
    if case.kind == LOW:  # -12,000 each for D = 16, which float16 holds
        q = torch.cat((torch.full_like(q[..., :1], -200), torch.zeros_like(q[..., 1:])), -1)
        k[..., 0] = 240
    starts = torch.tensor([0, *lengths(case)]).cumsum(0, dtype=torch.int32)
    return q, k, v, starts.to(runtime.DEVICE)


def _placed(x: Tensor, layout: str) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1) if layout == HEADS_FIRST else with_layout(x, layout)


def cases(seed: int, m: int = 32, n: int = 32) -> list[Case]:
    """Simplest first, for a kernel with tiles of m queries and n keys."""
    draw = generator(seed)
    large = max(m, n)
    odd = draw.randint(1, min(m, n) // 2 - 1) * 2 + 1

    def case(
        kind: str, T: int, S: int, dtype: torch.dtype = FP16, H: int = 1, D: int = 16, layout: str = "contiguous"
    ) -> Case:
        return Case(kind, {"T": T, "S": S, "H": H, "D": D}, dtype, layout, seed=seed)

    ragged = 2 * large + odd
    return [
        case("one document", large, 1),
        case("one document", large + 1, 1),  # a program for one query
        case("one document", ragged, 1),
        case("equal documents", 3 * large, 3),
        case("documents of one tile", min(m, n) - 1, 4),
        case("long, then short", 2 * large + odd + 3, 3),
        case("short, then long", ragged, 3),
        case("one token", 1, 1),
        case("documents of one token", 35, 35),
        case("ragged", ragged, 4),
        case("several heads", ragged, 3, H=3),
        case(EMPTY, ragged, 9),
        case(MANY, max(ragged, 64), 40),
        case("odd head dimension", ragged, 3, H=2, D=draw.choice((20, 24, 40))),
        case("ragged", ragged, 4, H=2, layout="padded"),
        case("ragged", ragged, 4, H=2, layout=HEADS_FIRST),
        case("ragged", ragged, 4, BF16, H=2, layout=MIXED),
        case(GROWING, 3 * large + odd, 2),
        case(LOW, ragged, 3),
        case("ragged", ragged, 5, BF16, D=32),
    ]


def huge(heads_first: bool = False) -> tuple[Tensor, ...]:
    """q, k and v of more than 2^31 numbers each, whose memory nothing fills; the last tokens have few keys to see.

    Each document has a token more than whole tiles: as many tiles as there may be, so that the last program has one.
    With ``heads_first`` it is the last head that lies so far from the first, not the last token.
    """
    lengths, device = (2**20 + 1, 257), runtime.DEVICE
    q, k, v = (torch.empty((sum(lengths), 17, 128), dtype=FP16, device=device) for _ in range(3))
    if heads_first:
        q, k, v = (x.view(17, -1, 128).transpose(0, 1) for x in (q, k, v))
    return q, k, v, torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
