"""FlashAttention's algorithm in plain PyTorch, tile by tile: what the kernels do, in a form that can be read and run.

(exercise 3.2)
"""

from __future__ import annotations

import torch

from .arguments import check_attention, softmax_scale
from .merge import merge_outputs


def tile_scores(
    q: torch.Tensor, k: torch.Tensor, row: int, column: int, num_queries: int, num_keys: int, causal: bool, scale: float
) -> torch.Tensor:
    """Scaled and masked scores of one tile.

    Args:
        q: (B, Hq, M, D), queries from ``row`` on. k: (B, Hq, N, D), keys from ``column`` on.
        num_queries, num_keys: Nq and Nk of the whole.

    Returns:
        (B, Hq, M, N) in q's dtype, -inf where a query does not see a key: query i sees keys j <= i + Nk - Nq.
    """
    scores = scale * q @ k.transpose(-1, -2)
    if causal:
        i = row + torch.arange(q.shape[2], device=q.device)[:, None]
        j = column + torch.arange(k.shape[2], device=q.device)[None, :]
        scores = scores.masked_fill(j > i + num_keys - num_queries, -torch.inf)
    return scores


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In float32 at least: what is computed with, whatever is stored."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    block_m: int = 64,
    block_n: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its logsumexp from tiles of (block_m, block_n) scores (Dao 2023, algorithm 1).

    Args:
        q: (B, Hq, Nq, D). k, v: (B, Hkv, Nk, D), Hkv dividing Hq. Computed in float32.
        causal: Query i sees keys j <= i + Nk - Nq.
        scale: Factor of the scores, by default 1 / sqrt(D).
        block_m, block_n: Queries and keys of a tile.

    Returns:
        o, of q's shape and dtype, and L (B, Hq, Nq) float32, the natural logsumexp of each row of scores. A query that
        sees no key has o = 0 and L = -inf.

    Raises:
        TypeError, ValueError: as :func:`.arguments.check_attention`.
    """
    check_attention(q, k, v, on_device=False)
    scale = softmax_scale(scale, q.shape[3])
    (B, Hq, Nq, D), (Hkv, Nk) = q.shape, k.shape[1:3]
    group = Hq // max(1, Hkv)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for row in range(0, Nq, block_m):
        q_tile = _wide(q[:, :, row : row + block_m])  # (B, Hq, M, D), stays for the whole row of tiles
        M = q_tile.shape[2]
        m = torch.full((B, Hq, M), -torch.inf, device=q.device)
        state = (m, torch.zeros_like(m), torch.zeros((B, Hq, M, D), device=q.device))
        last = min(Nk, max(0, row + M + Nk - Nq)) if causal else Nk  # keys that the tile's last query sees
        for column in range(0, last, block_n):
            k_tile, v_tile = (
                _wide(x[:, :, column : column + block_n]).repeat_interleave(group, 1) for x in (k, v)
            )  # (B, Hq, N, D)
            scores = tile_scores(q_tile, k_tile, row, column, Nq, Nk, causal, scale)
            raise NotImplementedError("Lab 3, exercise 3.2: one step of the forward pass")
        raise NotImplementedError("Lab 3, exercise 3.2: the end of a row of tiles")
    return o, lse


def tiled_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    block_m: int = 64,
    block_n: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of attention from tiles, P computed again from the logsumexp (Dao 2023, algorithm 2).

    Args:
        q, k, v, causal, scale, block_m, block_n: As for :func:`tiled_attention`.
        o, lse: What it returned.
        do: dO, the gradient of o, of its shape.

    Returns:
        dq, dk and dv, of the shapes and dtypes of q, k and v. A query that sees no key has and gives gradient 0.

    Raises:
        TypeError, ValueError: as :func:`.arguments.check_attention`.
    """
    check_attention(q, k, v, on_device=False)
    scale = softmax_scale(scale, q.shape[3])
    (Hq, Nq), (Hkv, Nk) = q.shape[1:3], k.shape[1:3]
    group = Hq // max(1, Hkv)
    delta = (_wide(do) * _wide(o)).sum(-1)  # (B, Hq, Nq): rowsum(dO * O) = rowsum(P * dP)
    dq = torch.zeros(q.shape, device=q.device)
    dk, dv = torch.zeros(k.shape, device=q.device), torch.zeros(v.shape, device=q.device)
    for column in range(0, Nk, block_n):
        keys = slice(column, min(Nk, column + block_n))
        k_tile, v_tile = (_wide(x[:, :, keys]).repeat_interleave(group, 1) for x in (k, v))  # (B, Hq, N, D)
        first = max(0, column - (Nk - Nq)) // block_m * block_m if causal else 0  # queries before see none of the keys
        for row in range(first, Nq, block_m):
            queries = slice(row, min(Nq, row + block_m))
            q_tile, do_tile = _wide(q[:, :, queries]), _wide(do[:, :, queries])  # (B, Hq, M, D)
            scores = tile_scores(q_tile, k_tile, row, column, Nq, Nk, causal, scale)
            p = torch.exp(scores - lse[:, :, queries, None])
            p = torch.where(scores == -torch.inf, torch.zeros_like(p), p)  # also where L is -inf
            raise NotImplementedError("Lab 3, exercise 3.2: one step of the backward pass")
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
