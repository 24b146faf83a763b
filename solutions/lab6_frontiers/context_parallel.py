"""Attention of a sequence that is spread over ranks: keys and values in a ring, or heads for parts of the sequence.

Letters: R ranks; this rank has n of the sequence's N tokens; q is (B, Hq, n, D), k and v are (B, Hkv, n, D).

In the ring each rank keeps its queries and passes keys and values on. After R steps every query has met every key, and
what it got in each step is merged by the logsumexps (lecture 05). While a rank computes with one part, the next is on
its way. A causal mask leaves the first ranks little to do where the sequence is cut into R parts; in zig-zag each rank
has a part from the front and one from the back, and every step is half full on every rank.

The other way exchanges, once before and once after, parts of the sequence for heads: each rank then has the whole
sequence of R-th of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from solutions.lab3_flash_attention import attention_delta, flash_attention, flash_dkdv, flash_dq, flash_forward
from solutions.lab3_flash_attention.arguments import check_attention, softmax_scale

from .rows_to_ranks import all_to_all

LAYOUTS = ("zigzag", "contiguous")
#: Queries and keys of a step, and whether the causal mask cuts through them.
Seen = tuple[slice, slice, bool]
ALL = slice(None)


def cut_sequence(x: Tensor, ranks: int, layout: str = "zigzag", dim: int = 2) -> list[Tensor]:
    """The part of each rank: of R equal parts the r-th, or in zig-zag of 2 R the r-th and the r-th from the end.

    Parts differ by a token where the length is no multiple.

    Raises:
        ValueError: the layout is unknown, or there is less than a token for a rank.
    """
    _check_layout(layout)
    if x.shape[dim] < ranks:
        raise ValueError(f"{x.shape[dim]} tokens are fewer than {ranks} ranks")
    if layout == "contiguous":
        return list(x.tensor_split(ranks, dim))
    parts = x.tensor_split(2 * ranks, dim)
    return [torch.cat((parts[r], parts[-1 - r]), dim) for r in range(ranks)]


def join_sequence(parts: Sequence[Tensor], layout: str = "zigzag", dim: int = 2) -> Tensor:
    """The whole sequence again, from the part of each rank."""
    _check_layout(layout)
    if layout == "contiguous":
        return torch.cat(list(parts), dim)
    halves = [part.tensor_split(2, dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def seen_by(rank: int, source: int, lengths: Sequence[int], causal: bool, layout: str) -> Seen | None:
    """Which queries of ``rank`` see which keys of ``source``; None where none sees any.

    In zig-zag a rank has its part from the front before the one from the back, the longer first.
    """
    if not causal:
        return ALL, ALL, False
    if rank == source:
        return ALL, ALL, True  # positions rise within a part, and from one part of a rank to the other
    if layout == "contiguous":
        return (ALL, ALL, False) if source < rank else None
    if source < rank:
        return ALL, slice(0, (lengths[source] + 1) // 2), False
    later = slice((lengths[rank] + 1) // 2, None)
    return (later, ALL, False) if lengths[rank] > 1 else None


class _Hop:
    """A tensor on its way to the next rank of the ring, and another from the one before."""

    def __init__(self, outgoing: Tensor, length: int, group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        self.outgoing = outgoing.contiguous()
        self.incoming = outgoing.new_empty((*outgoing.shape[:3], length, outgoing.shape[4]))
        peers = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        send, receive = (
            dist.P2POp(act, tensor, peer, group)
            for act, tensor, peer in zip((dist.isend, dist.irecv), (self.outgoing, self.incoming), peers)
        )
        # ranks take turns in who speaks first, for backends that carry out one after the other
        self.works = dist.batch_isend_irecv([send, receive] if rank % 2 == 0 else [receive, send])

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.incoming


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, layout: str, group: dist.ProcessGroup
    ) -> Tensor:
        lengths, rank = _lengths(q.shape[2], group, q.device), group.rank()
        o, lse = torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        kv = torch.stack((k, v))
        for step in range(len(lengths)):
            source = (rank - step) % len(lengths)
            hop = _Hop(kv, lengths[source - 1], group) if step + 1 < len(lengths) else None
            if seen := seen_by(rank, source, lengths, causal, layout):
                rows, keys, diagonal = seen
                part = flash_forward(q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys], diagonal, scale, True)
                _merge(o[:, :, rows], lse[:, :, rows], *part)
            kv = hop.wait() if hop else kv
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = causal, scale, layout, group, lengths
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        causal, scale, layout, group, lengths = ctx.call
        rank, ranks = group.rank(), len(lengths)
        delta, dq, kv = attention_delta(o, do), torch.zeros_like(q, dtype=torch.float32), torch.stack((k, v))
        dkv, on_its_way = torch.zeros_like(kv, dtype=torch.float32), None  # travels with the keys and values
        for step in range(ranks):
            source = (rank - step) % ranks
            hop = _Hop(kv, lengths[source - 1], group) if step + 1 < ranks else None
            seen = seen_by(rank, source, lengths, causal, layout)
            if seen:
                rows, keys, diagonal = seen
                given = (q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys], do[:, :, rows])
                given += (lse[:, :, rows].contiguous(), delta[:, :, rows].contiguous(), diagonal, scale)
                dq[:, :, rows] += flash_dq(*given)
                here = torch.stack(flash_dkdv(*given))
            dkv = on_its_way.wait() if on_its_way else dkv
            if seen:
                dkv[:, :, :, keys] += here
            on_its_way = _Hop(dkv, lengths[source - 1], group) if ranks > 1 else None
            kv = hop.wait() if hop else kv
        dk, dv = (on_its_way.wait() if on_its_way else dkv).to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None


def _merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over further keys into o and lse, in place (lecture 05, in logsumexps)."""
    both = torch.logaddexp(lse, part_lse)
    o.mul_((lse - both).exp_().unsqueeze(-1)).add_(part * (part_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


def _lengths(own: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Tokens of each rank."""
    found = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather(list(found.split(1)), torch.tensor([own], dtype=torch.int64, device=device), group=group)
    return found.tolist()


def _checked(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_attention(q, k, v)
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"q, k and v must be parts of one sequence, got {q.shape[2]} queries and {k.shape[2]} keys")


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    group: dist.ProcessGroup,
    layout: str = "zigzag",
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries over the whole sequence, with gradients; keys and values go round in a ring.

    Args:
        q: (B, Hq, n, D), this rank's part of the queries (:func:`cut_sequence`), as lab 3's ``flash_attention`` takes
            them. Parts may have different lengths, in zig-zag each a longer or equal front and a back.
        k, v: (B, Hkv, n, D), the same part of keys and values.
        causal: Whether a query sees the tokens up to its own only.
        group: the ranks, in the order of their parts. B, Hq, Hkv and D are the same on all.
        layout: ``"zigzag"`` or ``"contiguous"``; without a mask there is no difference.
        scale: Factor of the scores, by default 1 / sqrt(D).

    Returns:
        (B, Hq, n, D) of q's dtype.

    Raises:
        TypeError, ValueError: as ``flash_attention``; the layout is unknown; or queries and keys differ in number.
    """
    _checked(q, k, v)
    _check_layout(layout)
    return _RingAttention.apply(q, k, v, bool(causal), softmax_scale(scale, q.shape[3]), layout, group)


def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, group: dist.ProcessGroup, scale: float | None = None
) -> Tensor:
    """Attention of this rank's queries over the whole sequence, with gradients, each rank computing some heads of all.

    Args:
        q, k, v, causal, group, scale: as in :func:`ring_attention`, in contiguous parts; R divides Hq and Hkv.

    Returns:
        (B, Hq, n, D) of q's dtype.

    Raises:
        TypeError, ValueError: as :func:`ring_attention`, or the ranks do not divide the heads.
    """
    _checked(q, k, v)
    ranks = group.size()
    if q.shape[1] % ranks or k.shape[1] % ranks:
        raise ValueError(f"{ranks} ranks must divide the {q.shape[1]} heads of q and the {k.shape[1]} of k and v")
    lengths = _lengths(q.shape[2], group, q.device)
    o = flash_attention(*(_heads_for_tokens(x, lengths, group) for x in (q, k, v)), causal, scale)
    return _tokens_for_heads(o, lengths, group)


def _heads_for_tokens(x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """(B, H, n, D) of all heads -> (B, H / R, N, D) of all tokens."""
    B, H, n, D = x.shape
    rows, ranks = B * H // len(lengths) * D, len(lengths)
    outgoing = x.unflatten(1, (ranks, -1)).movedim(1, 0).reshape(-1)  # for each rank its heads
    parts = all_to_all(outgoing, [rows * n] * ranks, [rows * length for length in lengths], group)
    each = parts.split([rows * length for length in lengths])
    return torch.cat([part.view(B, -1, length, D) for part, length in zip(each, lengths)], 2)


def _tokens_for_heads(x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """(B, H / R, N, D) of all tokens -> (B, H, n, D) of all heads."""
    B, H, _, D = x.shape
    n, ranks, rows = lengths[group.rank()], len(lengths), B * H * D
    outgoing = torch.cat([part.reshape(-1) for part in x.split(lengths, 2)])
    parts = all_to_all(outgoing, [rows * length for length in lengths], [rows * n] * ranks, group)
    return parts.view(ranks, B, H, n, D).movedim(0, 1).reshape(B, ranks * H, n, D)


def ring_bytes(
    lengths: Sequence[int], rank: int, batch: int, kv_heads: int, head_dim: int, element_size: int, backward: bool
) -> int:
    """Bytes that a rank sends in :func:`ring_attention`, or in its backward pass.

    Keys and values travel R - 1 hops in either pass. In the backward pass their gradients, in float32, travel R, the
    last of them home.
    """
    ranks, per_token = len(lengths), 2 * batch * kv_heads * head_dim
    there = sum(lengths[(rank - step) % ranks] for step in range(ranks - 1)) * element_size
    home = sum(lengths) * 4 if backward and ranks > 1 else 0
    return per_token * (there + home)
