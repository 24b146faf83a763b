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
    unmasked: int = 0,
    divide: bool = True,
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
        shift: Query i sees keys up to i + Nk - Nq + shift; ``"top left"`` up to i, ``"none"`` every key.
        padded: Keys past the end, up to a whole tile, count with score 0.
        leave_out: ``"ragged"`` the last, ragged tile of keys; ``"last"`` the last tile; ``"diagonal"`` tiles in which
            a query of the tile does not see every key; ``"top left"`` tiles past the diagonal of a square, and
            ``"square"`` those past its last query too, where a tile of queries is ragged;
            ``"unseen"`` (rightly) tiles of which no query sees a key; ``"short"`` also those
            of which only the last query sees one.
        unmasked: Keys by which the tiles that need no mask are taken to reach too far; negative for a mask everywhere.
        divide: Whether the accumulator is divided by the sum.
        heads, value_heads: Which head of k (and v) a query head reads; see :func:`shared`.
        lse: What stands for the logsumexp: ``"sum"`` without the maximum, ``"max"`` without the sum, ``"base 2"``,
            ``"log2 sum"`` (maximum natural, sum in base 2), ``"plain max"`` (maximum in base 2, sum natural),
            ``"product"`` (m * log d), ``"difference"`` (m - log d).
    """
    scale = (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * factor
    value_heads = value_heads or heads
    k, v = shared(q, k, heads), shared(q, v, value_heads)
    num_queries, num_keys = q.shape[2], k.shape[2]
    missing = -num_keys % block_n
    scores = torch.nn.functional.pad(q @ k.transpose(-1, -2) * scale, (0, missing))
    v = torch.nn.functional.pad(v, (0, 0, 0, missing))
    if not padded:
        scores[..., num_keys:] = -math.inf
    if causal and shift != "none":
        by = num_queries - num_keys if shift == "top left" else shift
        seen = torch.nn.functional.pad(shapes.visible(num_queries, num_keys, by), (0, missing), value=padded)
        if unmasked:
            tile_end = torch.arange(num_keys + missing) // block_n * block_n + block_n
            start = torch.arange(num_queries) // block_m * block_m
            all_see = (start + num_keys - num_queries + 1 + unmasked).clamp(max=num_keys)
            seen = seen | (tile_end <= all_see[:, None])
        scores = scores.masked_fill(~seen, -math.inf)
    first = torch.arange(num_queries) // block_m * block_m
    last = (first + block_m - 1).clamp(max=num_queries - 1)
    offset = num_keys - num_queries
    maximum = torch.full((*q.shape[:3], 1), _LOWEST, dtype=q.dtype)
    total, output = torch.zeros_like(maximum), torch.zeros_like(q)
    for start in range(0, num_keys, block_n):
        stop = start + block_n
        taken = torch.ones(num_queries, dtype=torch.bool)
        if leave_out == "ragged":
            taken &= stop <= num_keys
        elif leave_out == "last":
            taken &= stop < num_keys
        elif leave_out == "diagonal":
            taken &= stop - 1 <= first + offset
        elif leave_out == "top left":
            taken &= start < first + block_m
        elif leave_out == "square":
            taken &= start <= last
        elif leave_out == "unseen":
            taken &= start <= last + offset
        elif leave_out == "short":
            taken &= start < first + block_m - 1 + offset
        part, tile = scores[..., start:stop], v[:, :, start:stop]
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
        taken = taken[:, None]
        total = torch.where(taken, kept * old_total + weight.sum(-1, True), total)
        output = torch.where(taken, kept * old_output + weight @ tile, output)
        maximum = torch.where(taken, new, maximum)
    seen = total > 0
    natural = torch.where(seen, maximum + torch.log(total), -math.inf)[..., 0]
    variants = {
        "sum": torch.log(total),
        "max": torch.where(seen, maximum, -math.inf),
        "base 2": natural[..., None] / _LN2,
        "log2 sum": maximum + torch.log2(total),
        "plain max": maximum / _LN2 + torch.log(total),
        "product": maximum * torch.log(total),
        "difference": maximum - torch.log(total),
        "raw sum": maximum + total,
        "2 sums": (maximum + torch.log2(total)) * _LN2,
    }
    output = torch.where(seen, output / total, 0.0) if divide and not each_tile else output
    return output, variants[lse][..., 0] if lse else natural


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
            ``"after"`` subtracts it from P * dP, ``"no p"`` forgets the factor P, ``"lse"`` takes the logsumexp off.
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
    right_o, lse = shapes.attention(q, k, v, causal, scale)
    k, v = shared(q, k, heads), shared(q, v, heads)
    by = 0 if isinstance(shift, str) else shift
    by = q.shape[2] - k.shape[2] if shift == "top left" else by
    # P = exp(factor S - times L), in powers of e
    factor, times = {
        "": (1.0, 1.0),
        "no lse": (1.0, 0.0),
        "base 2": (_LN2, _LN2),
        "natural lse": (1.0, _LN2),
        "natural scores": (_LN2, 1.0),
    }[softmax]
    finite = torch.where(lse == -math.inf, 0.0, lse)
    masked = causal and shift != "none"
    p = shapes.probabilities(q, k, times * finite, masked, scale * score_factor * factor, by)
    row = (do * right_o).sum(-1, keepdim=True)
    if dlse is not None:
        row = row - dlse[..., None]
    row = torch.where(torch.arange(row.shape[2])[:, None] < blind, 0.0, row)
    grad_p = do @ v.transpose(-1, -2)
    ds = {
        "": lambda: p * (grad_p - row),
        "none": lambda: p * grad_p,
        "added": lambda: p * (grad_p + row),
        "of dP": lambda: p * (grad_p - grad_p.mean(-1, keepdim=True)),
        "after": lambda: p * grad_p - row,
        "no p": lambda: grad_p - row,
        "lse": lambda: p * (grad_p - finite[..., None]),
    }[delta]()
    key_p, key_ds, query_ds, query_k = p, ds, ds, k
    if rows:
        m, n = (block_m, block_n) if rows == "first tile" else (-(-q.shape[2] // block_m), -(-k.shape[2] // block_n))
        keep = slice(0, m) if rows == "first tile" else slice((m - 1) * block_m, None)
        only = torch.zeros(q.shape[2], 1, dtype=p.dtype)
        only[keep] = 1
        key_p, key_ds = p * only, ds * only
        keep = slice(0, n) if rows == "first tile" else slice((n - 1) * block_n, None)
        only = torch.zeros(k.shape[2], dtype=p.dtype)
        only[keep] = 1
        query_ds = ds * only
    factor = scale**ds_scale
    dq, dk, dv = (
        query_ds @ query_k * factor,
        key_ds.transpose(-1, -2) @ q * factor,
        key_p.transpose(-1, -2) @ do * dv_factor,
    )

    def collected(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (kv_heads, group))
        return {"group": x.sum(2), "first": x[:, :, 0], "last": x[:, :, -1], "mean": x.mean(2)}[over]

    return dq, collected(dk), collected(dv)
