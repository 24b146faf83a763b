"""The tensors that lab 3's functions are tried on, and what plain PyTorch attention gives for them."""

from __future__ import annotations

import math

import torch

from utils.checks.cases import Case, far_fits
from utils.checks.core import generator

FP16, BF16 = torch.float16, torch.bfloat16
#: Layout of (B, H, N, D) cut out of a (B, N, H, D) tensor, as a projection's output is.
HEADS_LAST = "heads last"
#: Layout in which each tensor has strides of its own: those of another one do not fit.
MIXED = "mixed strides"
_OWN = {"q": "padded", "k": "contiguous", "v": HEADS_LAST, "do": "transposed"}
#: Kind of the cases whose values cancel: partial sums grow to thousands of times the result. Their scores are small, so
#: that what plain attention errs comes from rounding P alone, and an accumulator of 16 bits errs several times as much.
DRIFTING = "drifting"
#: How far the values of either half of the keys lie from 0 in such a case.
DRIFT = 20
#: Tiles of keys in such a case: what an accumulator loses grows with its steps, while errors of P average out.
STEPS = 16
#: Kind of the cases whose scores grow from the first key to the last, so that each tile brings a new maximum.
GROWING = "growing"
#: Kinds of the cases whose last key has a score far above the others', for every other query, and how far. e^150 is no
#: float32, e^88 times a value need not be one, e^40 is no float16; e^30 is far below the limits of the others.
GROWTHS = {"outgrown": 150.0, "outgrown by 88": 88.0, "outgrown by 40": 40.0, "grown by 30": 30.0}
#: Kind of the cases whose last key outgrows the others by e^40, beside one column of values near -10^35: each power is
#: far below any limit, and its product with such a value is no float32.
LARGE = "large values"
#: Kind of the cases whose last five keys outgrow the others by e^87.5, beside small values: each power is a float32, as
#: is its product with a value, and the sum of the five is not.
TOGETHER = "outgrown together"
#: Kind of the cases whose scores all lie near -105: e^-L overflows where a key past the end counts with score 0.
LOW = "low scores"
#: Kind of the cases whose scores are all -30,000, so that P is exact: whatever a masked score or a maximum begins with
#: in place of -inf is larger.
VERY_LOW = "very low scores"
#: Kind of the cases with a scale below 0, for which the largest product is the smallest score.
NEGATIVE = "negative scale"


def sizes(B: int, Hq: int, Hkv: int, Nq: int, Nk: int, D: int) -> dict[str, int]:
    """Named sizes of q (B, Hq, Nq, D) and of k and v (B, Hkv, Nk, D)."""
    return {"B": B, "Hq": Hq, "Hkv": Hkv, "Nq": Nq, "Nk": Nk, "D": D}


def group(case: Case) -> int:
    """Query heads that share a head of keys and values."""
    return case.sizes["Hq"] // case.sizes["Hkv"]


def tensor(case: Case, name: str, *axes: str, layout: str | None = None) -> torch.Tensor:
    """An input of a case, in the case's layout."""
    layout = layout or case.layout
    layout = _OWN.get(name, "contiguous") if layout == MIXED else layout
    if layout != HEADS_LAST:
        return case.tensor(name, *axes, layout=layout)
    b, h, n, *rest = axes
    return case.tensor(name, b, n, h, *rest, layout="contiguous").transpose(1, 2)


def qkv(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a case.

    In the ``far`` layout the keys alone are far apart, one batch entry from the next: address space is short.
    """
    near = "contiguous" if case.layout == "far" else None
    q = tensor(case, "q", "B", "Hq", "Nq", "D", layout=near)
    k = tensor(case, "k", "B", "Hkv", "Nk", "D")
    v = tensor(case, "v", "B", "Hkv", "Nk", "D", layout=near)
    if case.kind == GROWING:  # in place, so that the layout stays
        k *= torch.linspace(0.2, 2.5, case.sizes["Nk"], dtype=torch.float32, device=k.device).to(k.dtype)[:, None]
    if case.kind in (*GROWTHS, LARGE, TOGETHER):
        q[..., 0], k[..., 0] = 0.0, 0.0
        q[:, :, 1::2, 0] = case.sizes["D"] ** 0.5
        k[:, :, -1, 0] = GROWTHS.get(case.kind, 40.0)
    if case.kind == LARGE:
        v[..., 5] = -1e35 * (1 + v[..., 5].abs())
    if case.kind == TOGETHER:
        q[..., 1:] = 0.0
        k[:, :, -5:, 0] = 87.5
        v /= 1000
    if case.kind == LOW:  # every score is shifted alike, so that the softmax stays
        q[..., 0], k[..., 0] = 105.0 * case.sizes["D"] ** 0.5, -1.0
        v /= 16  # float32 rounds scores of -105 to 4e-6, and P errs by a few times as much: let it count less
    if case.kind == VERY_LOW:
        q.zero_(), k.zero_()
        q[..., 0], k[..., 0] = case.sizes["D"] ** 0.5, -30_000.0
    if case.kind == DRIFTING:
        q /= 16
        half = case.sizes["Nk"] // 2
        v[:, :, :half] += DRIFT
        v[:, :, half:] -= DRIFT
    return q, k, v


def with_do(case: Case) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and the gradient that arrives for the output."""
    near = "contiguous" if case.layout == "far" else None
    do = tensor(case, "do", "B", "Hq", "Nq", "D", layout=near)
    if case.kind == LOW:  # as of v
        do /= 16
    return *qkv(case), do


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch attention with the whole matrix of scores, in the inputs' dtype: output and natural logsumexp.

    The logsumexp has float32 at least, and is that of the probabilities as they are rounded: they may be summed before
    or after. A query that sees no key gives 0 and -inf. Other options (tile sizes) change nothing.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    shared = q.shape[1] // max(1, k.shape[1])
    if shared > 1:
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    if causal:
        seen = visible(q.shape[2], k.shape[2], device=q.device)
        scores = scores.masked_fill(~seen, -math.inf)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    p = torch.softmax(wide, -1).nan_to_num(0.0).to(q.dtype)
    return p @ v, torch.logsumexp(wide, -1) + torch.log(p.detach().to(wide.dtype).sum(-1))


def attention_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of plain attention, by hand and in the inputs' dtype (matrix products round to it)."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    shared, kv_heads = q.shape[1] // max(1, k.shape[1]), k.shape[1]
    o, lse = attention(q, k, v, causal, scale)
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    p = probabilities(q, k, lse, causal, scale)
    delta = (do.to(p.dtype) * o.to(p.dtype)).sum(-1, keepdim=True)
    ds = (p * ((do @ v.transpose(-1, -2)).to(p.dtype) - delta)).to(q.dtype)
    dq, dk, dv = ds @ k * scale, ds.transpose(-1, -2) @ q * scale, p.to(q.dtype).transpose(-1, -2) @ do
    return dq, *(x.to(p.dtype).unflatten(1, (kv_heads, shared)).sum(2).to(q.dtype) for x in (dk, dv))


def probabilities(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, causal: bool, scale: float, shift: int = 0
) -> torch.Tensor:
    """The softmax from its logsumexp, (B, Hq, Nq, Nk), in float32 at least; k has as many heads as q."""
    scores = ((q @ k.transpose(-1, -2)) * scale).to(torch.promote_types(q.dtype, torch.float32))
    if causal:
        scores = scores.masked_fill(~visible(q.shape[2], k.shape[2], shift, q.device), -math.inf)
    finite = torch.where(lse == -math.inf, 0.0, lse).to(scores.dtype)
    return torch.exp(scores - finite[..., None])


def visible(num_queries: int, num_keys: int, shift: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bool (Nq, Nk): query i sees key j iff j <= i + Nk - Nq + shift."""
    i = torch.arange(num_queries, device=device)[:, None]
    return torch.arange(num_keys, device=device)[None, :] <= i + num_keys - num_queries + shift


def far(seed: int, **options: object) -> list[Case]:
    """Three batch entries whose keys lie 2^30 elements apart, where such a tensor can be had."""
    if not far_fits(FP16):
        return []
    return [Case("ragged", sizes(3, 1, 1, 7, 21, 16), FP16, "far", options, seed)]


def drawn(seed: int, block_m: int, block_n: int, **options: object) -> list[Case]:
    """What a kernel with tiles of ``block_m`` queries and ``block_n`` keys is tried on, simplest first.

    Whole tiles and ragged ones, more queries than keys and fewer, shared heads, head dimensions that are no power of
    two, one element and none, every layout, three dtypes, large scores, and sums that cancel.
    """
    draw = generator(seed)

    def ragged(block: int, most: int = 2) -> int:
        return block * draw.randint(1, most) + draw.randint(1, block - 1)

    few, many = ragged(block_m, 1), 2 * block_n + draw.randint(1, block_n - 1)
    odd = draw.choice([d for d in range(17, 48) if d not in (32,)])
    uneven = sizes(1, 2, 2, few, many, odd)
    shared = sizes(1, 4, 2, ragged(block_m, 1), ragged(block_n, 1), 16)
    base = {"seed": seed, "options": options}
    plans = [
        Case("one tile", sizes(1, 1, 1, block_m, block_n, 16), **base),
        Case("whole tiles", sizes(1, 2, 2, 2 * block_m, 3 * block_n, 16), **base),
        Case("fewer queries than keys", sizes(2, 1, 1, few, few + block_n + draw.randint(1, 9), 16), **base),
        Case(
            "more queries than keys", sizes(1, 1, 1, 2 * block_m + draw.randint(1, 9), ragged(block_n, 1), 32), **base
        ),
        Case("odd head dimension", uneven, **base),
        Case("shared heads", shared, **base),
        Case("short", sizes(1, 1, 1, draw.randint(2, block_m - 1), draw.randint(2, block_n - 1), 16), **base),
        Case("one element", sizes(1, 1, 1, 1, 1, 16), **base),
        Case("no element", sizes(0, 2, 2, few, many, 16), **base),
        Case(GROWING, sizes(1, 1, 1, few, 3 * block_n + 5, 16), **base),
        *(Case(VERY_LOW, sizes(1, 1, 1, block_m, keys, 16), **base) for keys in (many, 2 * block_n)),
        Case("odd head dimension", uneven, magnitude=12.0, **base),
        Case("given scale", sizes(1, 1, 1, few, many, 16), seed=seed, options={**options, "scale": 0.37}),
        Case(NEGATIVE, sizes(1, 1, 1, few, many, 16), seed=seed, options={**options, "scale": -0.29}),
        Case("odd head dimension", uneven, layout=MIXED, **base),
        Case("shared heads", shared, layout=HEADS_LAST, **base),
        Case("odd head dimension", uneven, layout="padded", **base),
        Case("odd head dimension", uneven, layout="transposed", **base),
    ]
    for dtype in (FP16, BF16):
        plans.append(Case("whole tiles", sizes(1, 2, 1, 2 * block_m, 3 * block_n, 32), dtype, **base))
        plans.append(Case("odd head dimension", uneven, dtype, **base))
        plans.append(Case(DRIFTING, sizes(1, 1, 1, block_m, STEPS * block_n, 16), dtype, **base))
    return [*plans, *far(seed, **options)]
