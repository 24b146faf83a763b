"""Tiled attention with one of its steps left out or done wrongly, in float64: what classic wrong answers compute.

:func:`walk` goes through the keys tile by tile as the algorithm does (Dao 2023, algorithm 1). Each of its keywords is
a mistake; without any it gives the right output and logsumexp. :func:`gradients` does the same for the backward pass.
"""

from __future__ import annotations

import math

import torch

from . import shapes

_LN2 = math.log(2)
_LOWEST = -1e30  # what a maximum starts with here: no -inf - (-inf)


def shared(q: torch.Tensor, k: torch.Tensor, heads: str = "group") -> torch.Tensor:
    """k or v with a head for each head of q: head h reads ``h // group``, or another one by mistake."""
    query_heads, kv_heads = q.shape[1], k.shape[1]
    group = query_heads // kv_heads
    h = torch.arange(query_heads)
    index = {"group": h // group, "modulo": h % kv_heads, "first": h * 0, "same": h.clamp(max=kv_heads - 1)}[heads]
    return k[:, index]


def walk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    block_m: int,
    block_n: int,
    factor: float = 1.0,
    rescale_sum: bool = True,
    rescale_output: bool = True,
    inverse: bool = False,
    carry: bool = True,
    each_tile: bool = False,
    last_tile: bool = False,
    shift: int | str = 0,
    padded: bool = False,
    leave_out: str = "",
    unmasked: str = "",
    divide: bool | str = True,
    heads: str = "group",
    value_heads: str = "",
    lse: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp of attention in tiles of ``block_m`` queries and ``block_n`` keys.

    Args:
        q, k, v: (B, Hq, Nq, D), (B, Hkv, Nk, D) and the same, float64.
        factor: Multiplies the scores.
        rescale_sum, rescale_output: Whether sum and accumulator follow a new maximum; ``inverse``: the wrong way.
        carry: Whether the maximum is that of all tiles so far, or of the tile alone.
        each_tile: Each tile is a softmax of its own, and their outputs add up.
        last_tile: Sum and accumulator hold the last tile only.
        shift: Query i sees keys up to i + Nk - Nq + shift; ``"top left"`` up to i, ``"none"`` every key,
            ``"reversed"`` keys from i + Nk - Nq on, of the tiles that it should see.
        padded: Keys past the end, up to a whole tile, count with score 0.
        leave_out: ``"ragged"`` the last, ragged tile of keys; ``"last"`` the last tile; ``"diagonal"`` tiles in which
            a query of the tile does not see every key; ``"top left"`` tiles past the diagonal of a square, and
            ``"square"`` those past its last query too, where a tile of queries is ragged;
            ``"unseen"`` (rightly) tiles of which no query sees a key; ``"short"`` also those
            of which only the last query sees one.
        unmasked: By how many keys the tiles that need no mask are taken to reach too far: ``"key"`` by one, ``"last
            query"`` to what the last query of the tile sees, ``"next query tile"`` to what the query after it sees,
            ``"key tile"`` by one less than a tile of keys.
        divide: Whether the accumulator is divided by the sum; ``"each"``: after each tile, and not at the end.
        heads, value_heads: Which head of k (and v) a query head reads; see :func:`shared`.
        lse: What stands for the logsumexp: ``"sum"`` without the maximum, ``"max"`` without the sum, ``"base 2"``,
            ``"log2 sum"`` (maximum natural, sum in base 2), ``"plain max"`` (maximum in base 2, sum natural),
            ``"2 sums"`` (maximum natural, sum in base 2, both multiplied by ln 2), ``"product"`` (m * log d),
            ``"difference"`` (m - log d), ``"raw sum"`` (m + d).
    """
    scale = (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * factor
    k, v = shared(q, k, heads), shared(q, v, value_heads or heads)
    num_queries, num_keys, missing = q.shape[2], k.shape[2], -k.shape[2] % block_n
    scores = torch.nn.functional.pad(q @ k.transpose(-1, -2) * scale, (0, missing))
    v = torch.nn.functional.pad(v, (0, 0, 0, missing))
    if not padded:
        scores[..., num_keys:] = -math.inf
    if causal and shift != "none":
        visible = _visible(num_queries, num_keys, shift, block_m, block_n)
        seen = torch.nn.functional.pad(visible, (0, missing), value=padded)
        if unmasked:
            seen = seen | _without_mask(num_queries, num_keys, unmasked, block_m, block_n)
        scores = scores.masked_fill(~seen, -math.inf)
    maximum = torch.full((*q.shape[:3], 1), _LOWEST, dtype=q.dtype)
    total, output = torch.zeros_like(maximum), torch.zeros_like(q)
    for start in range(0, num_keys, block_n):
        part, tile = scores[..., start : start + block_n], v[:, :, start : start + block_n]
        here = part.amax(-1, True).clamp(min=_LOWEST)
        new = torch.maximum(here, maximum) if carry else here
        weight = torch.exp(part - new)
        ratio = torch.exp(new - maximum) if inverse else torch.exp(maximum - new)
        ratio = torch.where(total == 0, 0.0, ratio)  # nothing to rescale yet
        if each_tile:
            weight, ratio = weight / weight.sum(-1, True), torch.ones_like(ratio)
        old_total = total * ratio if rescale_sum else total
        old_output = output * ratio if rescale_output else output
        kept = 0.0 if last_tile else 1.0
        taken = _taken(leave_out, start, num_queries, num_keys, block_m, block_n)
        total = torch.where(taken, kept * old_total + weight.sum(-1, True), total)
        output = torch.where(taken, kept * old_output + weight @ tile, output)
        output = torch.where((total > 0) & (divide == "each"), output / total, output)
        maximum = torch.where(taken, new, maximum)
    if divide is True and not each_tile:
        output = torch.where(total > 0, output / total, 0.0)
    return output, _logsumexp(maximum, total, lse)[..., 0]


def _visible(num_queries: int, num_keys: int, shift: int | str, block_m: int, block_n: int) -> torch.Tensor:
    """Bool (Nq, Nk): query i sees keys up to i + Nk - Nq + shift, or as :func:`walk` says of another ``shift``."""
    if shift == "reversed":
        return _reversed(num_queries, num_keys, block_m, block_n)
    return shapes.visible(num_queries, num_keys, num_queries - num_keys if shift == "top left" else shift)


def _reversed(num_queries: int, num_keys: int, block_m: int, block_n: int) -> torch.Tensor:
    """Bool (Nq, Nk): a query sees its own key and later ones, as far as its tile of queries reads keys."""
    i, j = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None, :]
    key_end = i // block_m * block_m + block_m + num_keys - num_queries
    return (j >= i + num_keys - num_queries) & (j // block_n * block_n < key_end)


def _without_mask(num_queries: int, num_keys: int, unmasked: str, block_m: int, block_n: int) -> torch.Tensor:
    """Bool (Nq, keys up to a whole tile): where a tile is taken to need no mask; see ``unmasked`` of :func:`walk`."""
    too_far = {"key": 1, "last query": block_m - 1, "next query tile": block_m, "key tile": block_n - 1}[unmasked]
    start = torch.arange(num_queries) // block_m * block_m
    seen_by_all = (start + num_keys - num_queries + 1 + too_far).clamp(max=num_keys)
    tile_end = torch.arange(num_keys + -num_keys % block_n) // block_n * block_n + block_n
    return (tile_end <= seen_by_all[:, None]) & (too_far > 0)


def _taken(leave_out: str, start: int, num_queries: int, num_keys: int, block_m: int, block_n: int) -> torch.Tensor:
    """Bool, (Nq, 1) or one for all: which queries take the tile of keys at ``start``; see :func:`walk`."""
    first = (torch.arange(num_queries) // block_m * block_m)[:, None]  # query of each query's tile
    last = (first + block_m - 1).clamp(max=num_queries - 1)
    offset, stop = num_keys - num_queries, start + block_n
    return {
        "": torch.tensor(True),
        "ragged": torch.tensor(stop <= num_keys),
        "last": torch.tensor(stop < num_keys),
        "diagonal": stop - 1 <= first + offset,
        "top left": start < first + block_m,
        "square": start <= last,
        "unseen": start <= last + offset,
        "short": start < first + block_m - 1 + offset,
    }[leave_out]


def _logsumexp(maximum: torch.Tensor, total: torch.Tensor, variant: str) -> torch.Tensor:
    """m + log d, or what stands in its place; -inf for a query that sees no key."""
    log_total, natural = torch.log(total), torch.where(total > 0, maximum + torch.log(total), -math.inf)
    return {
        "": natural,
        "sum": log_total,
        "max": torch.where(total > 0, maximum, -math.inf),
        "base 2": natural / _LN2,
        "log2 sum": maximum + torch.log2(total),
        "plain max": maximum / _LN2 + log_total,
        "product": maximum * log_total,
        "difference": maximum - log_total,
        "raw sum": maximum + total,
        "2 sums": (maximum + torch.log2(total)) * _LN2,
    }[variant]


def anchored(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    block_m: int,
    block_n: int,
    values: str = "",
    unmasked: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp of the anchored loop of exercise 3.9.

    Args:
        q, k, v, causal, scale, block_m, block_n: As for :func:`walk`.
        values: ``"own"``: a step adds the values of the tile whose scores it computes; ``"early"``: those of the last
            tile begin ``block_n`` before the last key; ``"none of the last"``, with its sum or without.
        unmasked: ``"first"``: the causal mask is missing in the first tile of keys; ``"past the end"``: keys up to a
            whole tile count with score 0, but for a causal mask; ``"all"``: no score is masked.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    num_queries, num_keys, missing = q.shape[2], k.shape[2], -k.shape[2] % block_n
    k, v = shared(q, k), torch.nn.functional.pad(shared(q, v), (0, 0, 0, missing + block_n))
    scores = torch.nn.functional.pad(q @ k.transpose(-1, -2) * scale, (0, missing))
    key = torch.arange(num_keys + missing)
    seen = key[None, :] <= torch.arange(num_queries)[:, None] + num_keys - num_queries if causal else key[None, :] >= 0
    if unmasked == "first":
        seen = seen | (key[None, :] < block_n)
    if unmasked in ("", "first"):
        seen = seen & (key[None, :] < num_keys)
    if unmasked != "all":
        scores = scores.masked_fill(~seen, -math.inf)
    o, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=q.dtype)
    for start in range(0, num_queries, block_m):
        rows = slice(start, start + block_m)
        key_end = min(num_keys, start + block_m + num_keys - num_queries) if causal else num_keys
        if key_end <= 0:
            continue
        last = (key_end - 1) // block_n * block_n
        s, place = scores[:, :, rows, : last + block_n], key[: last + block_n]
        m = s.amax(-1, True).clamp(min=_LOWEST)
        p = torch.exp(s - m)
        taken = p * (place < last) if values.startswith("none of the last") else p
        p = taken if values == "none of the last" else p
        shift = {"own": block_n * (place < last), "early": (max(key_end - block_n, 0) - last) * (place >= last)}
        o[:, :, rows] = (taken @ v[:, :, place + shift.get(values, 0)]) / p.sum(-1, True).clamp(min=1e-300)
        lse[:, :, rows] = (m + torch.log(p.sum(-1, True)))[..., 0]
    return o, lse


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    delta: str = "",
    ds_scale: int = 1,
    score_factor: float = 1.0,
    softmax: str = "",
    shift: int | str = 0,
    dv_factor: float = 1.0,
    heads: str = "group",
    over: str = "group",
    rows: str = "",
    block_m: int = 0,
    block_n: int = 0,
    dlse: torch.Tensor | None = None,
    blind: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of attention with a step done wrongly.

    Args:
        q, k, v, do: As for :func:`walk`, and the gradient of the output; float64.
        delta: ``"none"`` leaves it out, ``"added"`` adds it, ``"of dP"`` takes the mean of dP's row instead,
            ``"after"`` subtracts it from P * dP, ``"no p"`` forgets the factor P, ``"lse"`` takes the logsumexp off,
            ``"tile"`` takes the sum of P * dP over one tile of keys.
        ds_scale: How often dS is multiplied by the scale.
        score_factor: Multiplies the scores that P is recomputed from.
        softmax: ``"no lse"``: P = exp(S); ``"base 2"``: P = 2^(S - L); ``"natural lse"``: P = 2^(log2(e) S - L);
            ``"natural scores"``: P = 2^(S - log2(e) L).
        shift: As for :func:`walk`.
        dv_factor: Multiplies dV.
        heads: Which head of k and v a query head reads.
        over: Gradients of k and v: ``"group"`` sums over the heads that share them, ``"first"`` and ``"last"`` take
            one of them, ``"mean"``.
        rows: ``"last tile"``, ``"first tile"``: dk and dv hold one tile of queries, dq one tile of keys.
        dlse: Gradient that arrives for the logsumexp.
        blind: Queries at the start whose delta is 0.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    o, lse = shapes.attention(q, k, v, causal, scale)
    k, v = shared(q, k, heads), shared(q, v, heads)
    finite = torch.where(lse == -math.inf, 0.0, lse)
    factor, times = _SOFTMAX[softmax]
    by = 0 if shift == "none" else q.shape[2] - k.shape[2] if shift == "top left" else shift
    masked = causal and shift != "none"
    p = shapes.probabilities(q, k, times * finite, masked, scale * score_factor * factor, by)
    row = (do * o).sum(-1, keepdim=True)
    if dlse is not None:
        row = row - dlse[..., None]
    row = torch.where(torch.arange(row.shape[2])[:, None] < blind, 0.0, row)
    grad_p = do @ v.transpose(-1, -2)
    row = _of_tiles(p * grad_p, block_n) if delta == "tile" else row
    ds = _grad_scores(p, grad_p, row, finite[..., None], "" if delta == "tile" else delta)
    of_queries, of_keys = _kept(q.shape[2], block_m, rows)[:, None], _kept(k.shape[2], block_n, rows)
    dq = (ds * of_keys) @ k * scale**ds_scale
    dk = (ds * of_queries).transpose(-1, -2) @ q * scale**ds_scale
    dv = (p * of_queries).transpose(-1, -2) @ do * dv_factor

    def collected(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (kv_heads, group))
        return {"group": x.sum(2), "first": x[:, :, 0], "last": x[:, :, -1], "mean": x.mean(2)}[over]

    return dq, collected(dk), collected(dv)


#: P = exp(factor S - times L), in powers of e: (factor, times) for each way to compute P again.
_SOFTMAX = {
    "": (1.0, 1.0),
    "no lse": (1.0, 0.0),
    "base 2": (_LN2, _LN2),
    "natural lse": (1.0, _LN2),
    "natural scores": (_LN2, 1.0),
}


def _grad_scores(
    p: torch.Tensor, grad_p: torch.Tensor, delta: torch.Tensor, lse: torch.Tensor, variant: str
) -> torch.Tensor:
    """dS = P * (dP - delta), or what stands in its place; P and dP are (B, Hq, Nq, Nk), the others (B, Hq, Nq, 1)."""
    return {
        "": lambda: p * (grad_p - delta),
        "none": lambda: p * grad_p,
        "added": lambda: p * (grad_p + delta),
        "of dP": lambda: p * (grad_p - grad_p.mean(-1, keepdim=True)),
        "after": lambda: p * grad_p - delta,
        "no p": lambda: grad_p - delta,
        "lse": lambda: p * (grad_p - lse),
    }[variant]()


def _of_tiles(x: torch.Tensor, block: int) -> torch.Tensor:
    """The sum of x over the tile of ``block`` columns that an element lies in, in x's shape."""
    tiles = torch.nn.functional.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block)).sum(-1)
    return tiles.repeat_interleave(block, -1)[..., : x.shape[-1]]


def _kept(length: int, block: int, rows: str) -> torch.Tensor:
    """1 for each row that counts and 0 for the others: those of the first tile, of the last, or all."""
    tile = torch.arange(length) // max(1, block)
    kept = {"": tile >= 0, "first tile": tile == 0, "last tile": tile == (length - 1) // max(1, block)}[rows]
    return kept.double()
