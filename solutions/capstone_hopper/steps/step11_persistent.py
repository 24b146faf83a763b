"""Step 11: one program a multiprocessor, with a list of tiles: nothing waits between one tile and the next."""

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
from .host import LOG2_E, check, outputs, scale_of, tile_lists
from .ring import barriers, copy, described, listed, settled

#: head_dim -> tile: M queries, N keys, S stages of the ring.
TILES = {64: {"M": 64, "N": 128, "S": 3}, 128: {"M": 64, "N": 128, "S": 2}}
OPTIONS = {"num_warps": 4, "maxnreg": 168}


@gluon.jit
def producer(q_desc, k_desc, v_desc, queries, ring, tile, N: tl.constexpr, S: tl.constexpr):
    """One warp: asks TMA for the next tile whenever both warpgroups have left a stage."""
    start, first, blocks, step, turn = tile
    q_tiles, q_full, q_empty, _ = queries
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    for group in tl.static_range(2):
        mbarrier.wait(q_empty.index(group), (turn & 1) ^ 1)
        copy(q_desc, start + first + group * 64, q_tiles.index(group), q_full.index(group))
    for i in range(step, step + blocks):
        row = start + (step + blocks - 1 - i) * N
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
    start, first, blocks, step, turn = tile
    q_tile, q_full = queries[0].index(GROUP), queries[1].index(GROUP)
    q_empty, o_tile = queries[2].index(GROUP), queries[3].index(GROUP)
    first += GROUP * M
    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows = first + tl.arange(0, M, tl.SliceLayout(1, SCORES))
    columns = tl.arange(0, N, tl.SliceLayout(0, SCORES))
    out = tl.zeros([M, D], tl.float32, OUT)
    maximum = tl.full([M], float("-inf"), tl.float32, tl.SliceLayout(1, SCORES))
    total = tl.zeros([M], tl.float32, tl.SliceLayout(1, SCORES))
    mbarrier.wait(q_full, turn & 1)
    zeros = tl.zeros([M, N], tl.float32, SCORES)
    mbarrier.wait(k_full.index(step % S), (step // S) & 1)
    scores = warpgroup_mma(q_tile, k_tiles.index(step % S).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(k_empty.index(step % S))
    if CAUSAL:
        column = (blocks - 1) * N
        scores = tl.where((column + columns)[None, :] <= rows[:, None], scores, float("-inf"))
    weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale)
    weights16 = tl.convert_layout(weights.to(o_desc.dtype), tl.DotOperandLayout(0, OUT, 2))
    for i in range(step + 1, step + blocks):
        mbarrier.wait(k_full.index(i % S), (i // S) & 1)
        mbarrier.wait(order.index(GROUP), (i + turn + GROUP) & 1)
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
    mbarrier.arrive(q_empty)
    last = step + blocks - 1
    mbarrier.wait(v_full.index(last % S), (last // S) & 1)
    out = warpgroup_mma(weights16, v_tiles.index(last % S), out)
    mbarrier.arrive(v_empty.index(last % S))
    out = out * tl.convert_layout(1.0 / total, tl.SliceLayout(1, OUT))[:, None]
    tma.store_wait(0)  # TMA has read the output of the tile before
    wait_for_all()
    o_tile.store(out.to(o_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [start + first, 0], o_tile)
    tl.store(lse_ptr + start + rows, (maximum * scale + tl.log2(total)) * 0.6931471805599453)


@gluon.jit
def every_tile(GROUP: tl.constexpr, descriptors, lse_ptr, scale, queries, ring, order, work,
               D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """The job of a partition for each tile of the program's list: group 2 is the producer."""
    q_desc, k_desc, v_desc, o_desc = descriptors
    step = 0
    for turn in range(tl.load(work[0])):
        tile = listed(work, step, turn, 2 * M, N, CAUSAL)
        if GROUP == 2:
            producer(q_desc, k_desc, v_desc, queries, ring, tile, N, S)
        else:
            consumer(GROUP, o_desc, lse_ptr, scale, queries, ring, order, tile, D, M, N, S, CAUSAL)
        step += tile[2]
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["width"])
def attention_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, length, tiles_ptr, width, D: tl.constexpr,
                     M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Shared memory and barriers, then every warp to its job: 2 M queries of one head."""
    descriptors = (q_desc, k_desc, v_desc, o_desc)
    work = (tiles_ptr + tl.program_id(0) * width, length)
    q_tiles = tl.allocate_shared_memory(q_desc.dtype, [2, M, D], q_desc.layout)
    k_tiles = tl.allocate_shared_memory(q_desc.dtype, [S, N, D], k_desc.layout)
    v_tiles = tl.allocate_shared_memory(q_desc.dtype, [S, N, D], v_desc.layout)
    o_tiles = tl.allocate_shared_memory(q_desc.dtype, [2, M, D], o_desc.layout)
    queries = (q_tiles, barriers(2, 1), barriers(2, 1), o_tiles)
    ring = (k_tiles, v_tiles, barriers(S, 1), barriers(S, 2), barriers(S, 1), barriers(S, 2))
    order = barriers(2, 1)
    fence_async_shared()
    tl.warp_specialize([
        (every_tile, (tl.constexpr(0), descriptors, lse_ptr, scale, queries, ring, order, work, D, M, N, S, CAUSAL)),
        (every_tile, (tl.constexpr(1), descriptors, lse_ptr, scale, queries, ring, order, work, D, M, N, S, CAUSAL)),
        (every_tile, (tl.constexpr(2), descriptors, lse_ptr, scale, queries, ring, order, work, D, M, N, S, CAUSAL)),
    ], [4, 1], [240, 24])  # fmt: skip


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the logsumexp; the package's docstring says of what."""
    check(q, k, v)
    o, lse = outputs(q)
    length, head_dim = q.shape[2:]
    tile = TILES[head_dim]
    lists = tile_lists(q, 2 * tile["M"], tile["N"], bool(causal))
    attention_kernel[(lists.shape[0],)](
        *described((q, tile["M"]), (k, tile["N"]), (v, tile["N"]), (o, tile["M"])), lse, scale_of(q) * LOG2_E, length,
        lists, lists.shape[1], D=head_dim, CAUSAL=causal, **tile, **OPTIONS,
    )  # fmt: skip
    return o, lse
