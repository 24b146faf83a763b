"""Step 10: ping-pong: the warpgroups issue their products in order, so that one exponentiates while one multiplies."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as tl  # "tl" as before: a diff shows what changes, and not a name
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..parts import wait_for_all
from .host import LOG2_E, check, heads_together, outputs, scale_of
from .ring import barriers, copy, described, place, settled

#: head_dim -> tile: M queries, N keys, S stages of the ring.
TILES = {64: {"M": 64, "N": 128, "S": 3}, 128: {"M": 64, "N": 128, "S": 2}}
OPTIONS = {"num_warps": 4, "maxnreg": 168}


@gluon.jit
def producer(q_desc, k_desc, v_desc, queries, ring, tile, N: tl.constexpr, S: tl.constexpr):
    """One warp: asks TMA for the next tile whenever both warpgroups have left a stage."""
    start, first, blocks = tile
    q_tiles, q_full = queries
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    for group in tl.static_range(2):
        copy(q_desc, start + first + group * 64, q_tiles.index(group), q_full.index(group))
    for i in range(blocks):
        row = start + (blocks - 1 - i) * N
        mbarrier.wait(k_empty.index(i % S), ((i // S) & 1) ^ 1)
        copy(k_desc, row, k_tiles.index(i % S), k_full.index(i % S))
        mbarrier.wait(v_empty.index(i % S), ((i // S) & 1) ^ 1)
        copy(v_desc, row, v_tiles.index(i % S), v_full.index(i % S))


@gluon.jit
def online_softmax(scores, maximum, total, scale):
    """Weights of a tile, what the output so far shrinks by, and the new maximum and sum of each row."""
    new = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores * scale - (new * scale)[:, None])
    shrink = tl.exp2((maximum - new) * scale)
    total = total * shrink + tl.sum(weights, 1)
    return weights, shrink, new, total


@gluon.jit
def consumer(GROUP: tl.constexpr, o_desc, lse_ptr, scale, queries, ring, order, tile,
             D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """One warpgroup: M queries of one head against all keys that they see, N at a time, from the last to the first."""
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    start, first, blocks = tile
    q_tile, q_full = queries[0].index(GROUP), queries[1].index(GROUP)
    first += GROUP * M
    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows = first + tl.arange(0, M, tl.SliceLayout(1, SCORES))
    columns = tl.arange(0, N, tl.SliceLayout(0, SCORES))
    out = tl.zeros([M, D], tl.float32, OUT)
    maximum = tl.full([M], float("-inf"), tl.float32, tl.SliceLayout(1, SCORES))
    total = tl.zeros([M], tl.float32, tl.SliceLayout(1, SCORES))
    mbarrier.wait(q_full, 0)
    zeros = tl.zeros([M, N], tl.float32, SCORES)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(k_empty.index(0))
    if CAUSAL:
        column = (blocks - 1) * N
        scores = tl.where((column + columns)[None, :] <= rows[:, None], scores, float("-inf"))
    weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale)
    weights16 = tl.convert_layout(weights.to(o_desc.dtype), tl.DotOperandLayout(0, OUT, 2))
    for i in range(1, blocks):
        mbarrier.wait(k_full.index(i % S), (i // S) & 1)
        mbarrier.wait(order.index(GROUP), (i + GROUP) & 1)
        scores = warpgroup_mma(q_tile, k_tiles.index(i % S).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index((i - 1) % S), ((i - 1) // S) & 1)
        out = warpgroup_mma(weights16, v_tiles.index((i - 1) % S), out, is_async=True)
        mbarrier.arrive(order.index(1 - GROUP))
        scores = warpgroup_mma_wait(1, [scores])
        mbarrier.arrive(k_empty.index(i % S))
        weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale)
        total = settled(total)  # or ptxas waits for the output before the softmax
        out = warpgroup_mma_wait(0, [out])
        mbarrier.arrive(v_empty.index((i - 1) % S))
        out = out * tl.convert_layout(shrink, tl.SliceLayout(1, OUT))[:, None]
        weights16 = tl.convert_layout(weights.to(o_desc.dtype), tl.DotOperandLayout(0, OUT, 2))
    last = blocks - 1
    mbarrier.wait(v_full.index(last % S), (last // S) & 1)
    out = warpgroup_mma(weights16, v_tiles.index(last % S), out)
    mbarrier.arrive(v_empty.index(last % S))
    out = out * tl.convert_layout(1.0 / total, tl.SliceLayout(1, OUT))[:, None]
    wait_for_all()
    q_tile.store(out.to(o_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [start + first, 0], q_tile)
    tl.store(lse_ptr + start + rows, (maximum * scale + tl.log2(total)) * 0.6931471805599453)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["together"])
def attention_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, length, together, D: tl.constexpr,
                     M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Shared memory and barriers, then every warp to its job: 2 M queries of one head."""
    tile = place(length, together, 2 * M, N, CAUSAL)
    q_tiles = tl.allocate_shared_memory(q_desc.dtype, [2, M, D], q_desc.layout)
    k_tiles = tl.allocate_shared_memory(q_desc.dtype, [S, N, D], k_desc.layout)
    v_tiles = tl.allocate_shared_memory(q_desc.dtype, [S, N, D], v_desc.layout)
    queries = (q_tiles, barriers(2, 1))
    ring = (k_tiles, v_tiles, barriers(S, 1), barriers(S, 2), barriers(S, 1), barriers(S, 2))
    order = barriers(2, 1)
    fence_async_shared()
    tl.warp_specialize([
        (consumer, (tl.constexpr(0), o_desc, lse_ptr, scale, queries, ring, order, tile, D, M, N, S, CAUSAL)),
        (consumer, (tl.constexpr(1), o_desc, lse_ptr, scale, queries, ring, order, tile, D, M, N, S, CAUSAL)),
        (producer, (q_desc, k_desc, v_desc, queries, ring, tile, N, S)),
    ], [4, 1], [240, 24])  # fmt: skip


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the logsumexp; the package's docstring says of what."""
    check(q, k, v)
    o, lse = outputs(q)
    batch, heads, length, head_dim = q.shape
    tile = TILES[head_dim]
    attention_kernel[(batch * heads * length // (2 * tile["M"]),)](
        *described((q, tile["M"]), (k, tile["N"]), (v, tile["N"]), (o, tile["M"])), lse, scale_of(q) * LOG2_E, length,
        heads_together(q), D=head_dim, CAUSAL=causal, **tile, **OPTIONS,
    )  # fmt: skip
    return o, lse
