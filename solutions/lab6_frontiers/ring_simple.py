"""Ring attention's forward pass over a sequence in zig-zag (exercise 6.6).

Letters: R ranks, ``lengths[r]`` tokens on rank r, n on this one; B sequences, H query heads, G key heads, D head
dimension: q is (B, H, n, D), k and v are (B, G, n, D).

The sequence is cut into 2 R chunks, the first of which have a token more where 2 R does not divide its length. The part
of rank r is chunk r, its *front*, and behind it chunk 2 R - 1 - r, its *back*. A front is as long as the back, or a
token longer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

ALL = slice(None)


def zigzag(x: Tensor, ranks: int) -> list[Tensor]:
    """The part of each rank, from the whole sequence (B, H, N, D); N is at least the number of ranks."""
    chunks = x.tensor_split(2 * ranks, 2)
    return [torch.cat((chunks[rank], chunks[-1 - rank]), 2) for rank in range(ranks)]


def attention_part(q: Tensor, k: Tensor, v: Tensor, diagonal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention of some queries over some keys, and the logsumexp of each query's scores, in float32.

    Args:
        q: (B, H, a, D); scores are multiplied by 1 / sqrt(D).
        k, v: (B, G, b, D); G divides H, and query head h reads key head h // (H / G).
        diagonal: whether query i sees the keys up to i only; otherwise each query sees all b keys.

    Returns:
        (B, H, a, D) and (B, H, a).
    """
    q, k, v = (x.float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[3] ** 0.5
    if diagonal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ v, lse


def merge_parts(o: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys together, from that over each of them.

    Args:
        o, more: (..., D) float32, attention over the first set and over the second.
        lse, more_lse: (...) float32, the logsumexps of their scores; one of the two may be -inf: no key.

    Returns:
        (..., D) and (...) float32.
    """
    ### BEGIN SOLUTION 6.6: merging two parts
    both = torch.logaddexp(lse, more_lse)
    return o * (lse - both).exp().unsqueeze(-1) + more * (more_lse - both).exp().unsqueeze(-1), both
    ### END SOLUTION


def seen_by(rank: int, source: int, lengths: list[int], causal: bool) -> tuple[slice, slice, bool]:
    """Which queries of ``rank`` see which keys of ``source``.

    Args:
        rank, source: of the R ranks; they may be the same.
        lengths: tokens of each rank, at least one.
        causal: whether a query sees the tokens up to its own only.

    Returns:
        The queries, the keys, and whether the i-th of these queries sees the first i + 1 of these keys only; otherwise
        each of these queries sees all of these keys.
    """
    ### BEGIN SOLUTION 6.6: who sees whom
    if not causal:
        return ALL, ALL, False
    if source == rank:
        return ALL, ALL, True  # positions rise from the front to the back
    if source < rank:
        return ALL, slice(0, (lengths[source] + 1) // 2), False  # its front comes before both of mine, its back after
    return slice((lengths[rank] + 1) // 2, None), ALL, False  # both of its parts lie between mine
    ### END SOLUTION


@torch.no_grad()
def ring_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, group: ProcessGroup | None = None) -> Tensor:
    """Attention of this rank's queries over the whole sequence, while keys and values go round in a ring.

    Args:
        q: (B, H, n, D) float32 or bfloat16, this rank's part of the queries (:func:`zigzag`).
        k, v: (B, G, n, D) of q's dtype, the same part of keys and values; G divides H.
        causal: whether a query sees the tokens up to its own only.
        group: the ranks, in the order of their parts; by default all.

    Returns:
        (B, H, n, D) of q's dtype, rounded once.

    Raises:
        TypeError, ValueError: the tensors do not fit together.
    """
    _check(q, k, v)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    lengths = lengths_of(q, group)
    o = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
    ### BEGIN SOLUTION 6.6: the ring
    kv = torch.stack((k, v))
    for step in range(ranks):
        source = (rank - step) % ranks  # whose keys and values these are
        messages = []
        if step + 1 < ranks:
            shape = list(kv.shape)
            shape[3] = lengths[source - 1]
            incoming = kv.new_empty(shape)
            send = dist.P2POp(dist.isend, kv, group=group, group_peer=(rank + 1) % ranks)
            receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % ranks)
            messages = dist.batch_isend_irecv([send, receive])
        queries, keys, diagonal = seen_by(rank, source, lengths, causal)
        part = attention_part(q[:, :, queries], kv[0][:, :, keys], kv[1][:, :, keys], diagonal)
        o[:, :, queries], lse[:, :, queries] = merge_parts(o[:, :, queries], lse[:, :, queries], *part)
        for message in messages:
            message.wait()
        if messages:
            kv = incoming
    ### END SOLUTION
    return o.to(q.dtype)


def lengths_of(q: Tensor, group: ProcessGroup | None = None) -> list[int]:
    """Tokens of each rank, in the order of the ranks."""
    own = torch.tensor([q.shape[2]], device=q.device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [int(length) for length in found]


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.bfloat16) or x.dtype != q.dtype:
            raise TypeError(f"{name} must be a tensor of q's dtype, float32 or bfloat16")
    B, H, n, D = q.shape
    if not n or k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (B, n, D) or H % k.shape[1]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"q must be (B, H, n, D), k and v (B, G, n, D) with G a divisor of H, got {shapes}")
