"""Decode attention of requests with common beginnings: each group reads its shared blocks once, for all its queries.

Attention over a context is merged from attention over parts of it (lecture 05). Here the parts are the prefix that a
group shares and the suffix that a request has for itself. Against the prefix, the queries of the whole group are the
rows of one matrix product per key head; ordinary decode multiplies each request's few rows alone. Suffixes are read by
lab 5's decode kernel, and its merge puts both together (Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, "Cascade
Inference").

Letters: S requests, J groups, H query heads, G key heads, D head dimension, P parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from solutions.lab5_serving import tuning
from solutions.lab5_serving.merge import merge_parts
from solutions.lab5_serving.paged_arguments import (
    FLOATS,
    INTEGERS,
    check_cache,
    check_same,
    check_sequences,
    check_tensor,
    softmax_scale,
)
from solutions.lab5_serving.paged_decode import LOG2_E, load_tokens, paged_decode_kernel, part_of
from solutions.lab5_serving.paged_extend import sequence_of
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["stride_ts", "J", "parts"])
def shared_prefix_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, prefix_tables_ptr, prefix_lens_ptr, group_starts_ptr, members_ptr, o_ptr, lse_ptr,
    stride_q, stride_k, stride_v, stride_ts, stride_o, J, parts, scale_log2,
    GROUP: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M / PADDED members of a group in the ``GROUP`` heads of one key head, against one part.

    A row of the tile is one request in one head; the heads of a request are padded to ``PADDED``, a power of two.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // PADDED
    key_head, part = tl.program_id(0), tl.program_id(1)
    group, tile, begin, count = sequence_of(tl.program_id(2), group_starts_ptr, 1, J, BLOCK_Q)
    if tile * BLOCK_Q < count:
        number = tile * BLOCK_Q + tl.arange(0, BLOCK_M) // PADDED  # of the member in its group
        request = tl.load(members_ptr + begin + number, mask=number < count, other=0).to(tl.int64)  # (BLOCK_M,)
        head = (key_head * GROUP + tl.arange(0, BLOCK_M) % PADDED).to(tl.int64)
        row = (number < count) & (tl.arange(0, BLOCK_M) % PADDED < GROUP)
        column = tl.arange(0, BLOCK_D)
        mine = row[:, None] & (column < HEAD_DIM)[None, :]
        place = request[:, None] * stride_q[0] + head[:, None] * stride_q[1]
        q = tl.load(q_ptr + place + column.to(tl.int64)[None, :] * stride_q[2], mask=mine, other=0.0)
        length = tl.load(prefix_lens_ptr + group).to(tl.int32)
        table_ptr = prefix_tables_ptr + group * stride_ts
        k_head_ptr = k_cache_ptr + key_head.to(tl.int64) * stride_k[2]
        v_head_ptr = v_cache_ptr + key_head.to(tl.int64) * stride_v[2]

        m = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: -inf minus -inf would be NaN
        d = tl.zeros((BLOCK_M,), tl.float32)
        o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        first, end = part_of(length, part, parts, BLOCK_N)
        for start in range(first, end, BLOCK_N):
            token = start + tl.arange(0, BLOCK_N)
            inside = token < end
            block = tl.load(table_ptr + token // BLOCK_SIZE, mask=inside, other=0)  # (BLOCK_N,)
            k = load_tokens(
                k_head_ptr, block, token, inside, stride_k[0], stride_k[1], stride_k[3], BLOCK_SIZE, HEAD_DIM, BLOCK_D
            )  # (BLOCK_N, BLOCK_D), read once for all rows
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # (BLOCK_M, BLOCK_N)
            s = tl.where(inside[None, :], s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            rescale = tl.exp2(m - m_new)
            d = d * rescale + tl.sum(p, 1)
            v = load_tokens(
                v_head_ptr, block, token, inside, stride_v[0], stride_v[1], stride_v[3], BLOCK_SIZE, HEAD_DIM, BLOCK_D
            )  # (BLOCK_N, BLOCK_D)
            o = tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision="ieee")
            m = m_new
        o = o / tl.where(d == 0, 1.0, d)[:, None]
        lse = tl.where(d == 0, -float("inf"), (m + tl.log2(d)) * 0.6931471805599453)  # back to powers of e
        place = request[:, None] * stride_o[0] + head[:, None] * stride_o[1] + part.to(tl.int64) * stride_o[2]
        # an empty part has the log-sum-exp -inf, and the merge does not read its output
        tl.store(o_ptr + place + column.to(tl.int64)[None, :] * stride_o[3], o, mask=mine & (d != 0)[:, None])
        heads = tl.num_programs(0) * GROUP
        tl.store(lse_ptr + (request * heads + head) * parts + part, lse, mask=row)


def shared_prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    suffix_tables: Tensor,
    suffix_lens: Tensor,
    prefix_tables: Tensor,
    prefix_lens: Tensor,
    group_starts: Tensor,
    members: Tensor,
    *,
    scale: float | None = None,
    prefix_splits: int | None = None,
    suffix_splits: int | None = None,
) -> Tensor:
    """Attention of one query per request over the prefix of its group and then over its own suffix.

    Group j consists of the requests ``members[group_starts[j]]`` to ``members[group_starts[j + 1] - 1]``. Nothing waits
    for the GPU, so that a CUDA graph can hold the call.

    Args:
        q: (S, H, D), float32 (multiplied as such, not as TF32), float16 or bfloat16, any strides, D from 16 to 256.
        k_cache, v_cache: (num_blocks, block_size, G, D) of q's dtype, any strides, as for
            :func:`solutions.lab5_serving.paged_decode.paged_attention_decode`.
        suffix_tables: (S, max_blocks) int32, the blocks behind the prefix; entries beyond a suffix are not read.
        suffix_lens: (S,) int32, tokens behind the prefix, the newest included.
        prefix_tables: (J, max_blocks) int32, the shared blocks of each group, rows contiguous.
        prefix_lens: (J,) int32, contiguous, tokens in them; 0 for a group of requests that share nothing.
        group_starts: (J + 1,) int32, contiguous, from 0 to S, ascending; a group may be empty.
        members: (S,) int32, contiguous, each request once.
        scale: Factor of the scores, by default 1 / sqrt(D).
        prefix_splits, suffix_splits: Parts of every prefix and of every suffix; by default as many as fill the GPU.

    Returns:
        (S, H, D) of q's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(q, k_cache, v_cache, suffix_tables, suffix_lens, prefix_tables, prefix_lens, group_starts, members)
    scale = softmax_scale(scale, q.shape[2])
    S, H, D = q.shape
    if not q.numel():
        return torch.empty_like(q)
    block_size, G = k_cache.shape[1:3]
    sms = tuning.multiprocessors(q.device)
    if prefix_splits is None:
        tiles = prefix_loads(S, H // G, tile_of(D, q.dtype, H // G, q.device))
        prefix_splits = tuning.splits(tiles * G, prefix_tables.shape[1] * block_size, sms)
    if suffix_splits is None:
        suffix_splits = tuning.splits(S * G, suffix_tables.shape[1] * block_size, sms)
    outputs = torch.empty((S, H, suffix_splits + prefix_splits, D), dtype=torch.float32, device=q.device)
    own, shared = outputs.split((suffix_splits, prefix_splits), 2)
    own_lse, shared_lse = (torch.empty(x.shape[:3], dtype=torch.float32, device=q.device) for x in (own, shared))
    _launch_suffixes(q, k_cache, v_cache, suffix_tables, suffix_lens, own, own_lse, scale)
    groups = prefix_tables, prefix_lens, group_starts, members
    _launch_prefixes(q, k_cache, v_cache, groups, shared, shared_lse, scale)
    return merge_parts(outputs, torch.cat((own_lse, shared_lse), 2), dtype=q.dtype)


def tile_of(head_dim: int, dtype: torch.dtype, group: int, device: torch.device) -> tuning.Tile:
    """Lab 5's tile of the extend kernel: there too, many rows share the keys and values that a program loads."""
    return tuning.extend(head_dim, dtype, group, tuning.capability_of(device))


def prefix_loads(requests: int, group: int, tile: tuning.Tile) -> int:
    """How often the kernel loads the prefix of so many requests: once per tile of rows.

    Args:
        group: query heads of a key head.
        tile: see :func:`tile_of`.
    """
    return -(-requests // (tile.m // tuning.power_of_two(group)))


def _check(
    q, k_cache, v_cache, suffix_tables, suffix_lens, prefix_tables, prefix_lens, group_starts, members
) -> None:  # fmt: skip
    check_tensor("q", q, "(S, H, D)", FLOATS)
    check_cache("q", q, k_cache, v_cache)
    S = q.shape[0]
    check_tensor("suffix_tables", suffix_tables, "(S, max_blocks)", INTEGERS)
    check_sequences(S, suffix_tables, suffix_lens, q.device)
    check_tensor("prefix_tables", prefix_tables, "(J, max_blocks)", INTEGERS)
    J = prefix_tables.shape[0]
    for name, value, length in (
        ("prefix_lens", prefix_lens, J),
        ("group_starts", group_starts, J + 1),
        ("members", members, S),
    ):
        check_tensor(name, value, f"({length},)", INTEGERS)
        check_same(name, value, (length,), f"for {S} requests in {J} groups")
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")
    if J == 0:
        raise ValueError("there must be at least one group; requests that share nothing form one with prefix_lens 0")
    if prefix_tables.stride(1) != 1:
        raise ValueError(f"rows of prefix_tables must be contiguous, got strides {prefix_tables.stride()}")


def _launch_suffixes(q, k_cache, v_cache, tables, lens, o, lse, scale) -> None:
    """Lab 5's decode kernel over the suffixes: ``o`` (S, H, P, D) and ``lse`` (S, H, P), contiguous."""
    S, H, D = q.shape
    block_size, G = k_cache.shape[1:3]
    tile = tuning.decode(D, q.dtype, H // G, tuning.capability_of(q.device))
    parts = lse.shape[2]
    paged_decode_kernel[(G, parts, S)](
        q, k_cache, v_cache, tables, lens, o, lse,
        q.stride(), k_cache.stride(), v_cache.stride(), *tables.stride(), lens.stride(0), o.stride(),
        scale * LOG2_E, parts,
        GROUP=H // G, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_SIZE=block_size, HEAD_DIM=D, BLOCK_D=tuning.block_d(D),
        SPLIT=True, PRECISION="ieee", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _launch_prefixes(q, k_cache, v_cache, groups, o, lse, scale) -> None:
    """All groups against their prefixes: ``o`` (S, H, P, D) and ``lse`` (S, H, P), contiguous."""
    S, H, D = q.shape
    block_size, G = k_cache.shape[1:3]
    tables, parts = groups[0], lse.shape[2]
    tile = tile_of(D, q.dtype, H // G, q.device)
    padded = tuning.power_of_two(H // G)
    shared_prefix_kernel[(G, parts, S // (tile.m // padded) + len(tables))](
        q, k_cache, v_cache, *groups, o, lse,
        q.stride(), k_cache.stride(), v_cache.stride(), tables.stride(0), o.stride(), len(tables), parts,
        scale * LOG2_E,
        GROUP=H // G, PADDED=padded, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_SIZE=block_size, HEAD_DIM=D,
        BLOCK_D=tuning.block_d(D), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
