"""Steps 8, 9 and 10 with clock reads: one program writes down when what happened to each of its tiles."""

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
from .ring import barriers, copy, described, place

#: Events of a consumer for each tile of keys, and of the producer, in the order of the buffer.
CONSUMER_EVENTS = (
    "asked", "keys_there", "scores_issued", "scores_there", "softmax_done", "output_issued", "output_there",
)  # fmt: skip
PRODUCER_EVENTS = ("keys_issued", "values_issued")
ASKED, KEYS_THERE, SCORES_ISSUED, SCORES_THERE, SOFTMAX_DONE, OUTPUT_ISSUED, OUTPUT_THERE = map(tl.constexpr, range(7))
KEYS_ISSUED, VALUES_ISSUED = map(tl.constexpr, range(2))

#: head_dim -> tile: M queries, N keys, S stages of the ring.
TILES = {64: {"M": 64, "N": 128, "S": 3}, 128: {"M": 64, "N": 128, "S": 2}}
OPTIONS = {"num_warps": 4, "maxnreg": 168}


@gluon.jit
def note(log, EVENT: tl.constexpr, i):
    """Write down the clock of the multiprocessor for tile ``i``, if this is the program that is traced."""
    times_ptr, most, here = log
    now = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], tl.int64, is_pure=False, pack=1)
    tl.store(times_ptr + EVENT * most + i, now, mask=here)


@gluon.jit
def note_after(log, EVENT: tl.constexpr, i, total, ROWS: tl.constexpr):
    """The same, once the sums ``total`` (M,) are computed: the clock read is made to depend on them."""
    times_ptr, most, here = log
    now = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.f32 p, $1, 0f00000000; mov.u64 $0, 0; @p mov.u64 $0, %clock64; }",
        "=&l,f", [total], tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    row = tl.arange(0, total.shape[0], ROWS)
    tl.store(times_ptr + EVENT * most + i + row, now, mask=(row == 0) & here)


@gluon.jit
def producer(q_desc, k_desc, v_desc, queries, ring, tile, log, N: tl.constexpr, S: tl.constexpr):
    """One warp: asks TMA for the next tile whenever both warpgroups have left a stage."""
    start, first, blocks = tile
    q_tiles, q_full = queries
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    for group in tl.static_range(2):
        copy(q_desc, start + first + group * 64, q_tiles.index(group), q_full.index(group))
    for i in range(blocks):
        row = start + (blocks - 1 - i) * N
        mbarrier.wait(k_empty.index(i % S), ((i // S) & 1) ^ 1)
        note(log, KEYS_ISSUED, i)
        copy(k_desc, row, k_tiles.index(i % S), k_full.index(i % S))
        mbarrier.wait(v_empty.index(i % S), ((i // S) & 1) ^ 1)
        note(log, VALUES_ISSUED, i)
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
def consumer(GROUP: tl.constexpr, o_desc, lse_ptr, scale, queries, ring, order, tile, log, D: tl.constexpr,
             M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr, OVERLAP: tl.constexpr,
             PINGPONG: tl.constexpr):  # fmt: skip
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
    note(log, ASKED, 0)
    mbarrier.wait(k_full.index(0), 0)
    note(log, KEYS_THERE, 0)
    scores = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    note(log, SCORES_ISSUED, 0)
    scores = warpgroup_mma_wait(0, [scores])
    note(log, SCORES_THERE, 0)
    mbarrier.arrive(k_empty.index(0))
    if CAUSAL:
        column = (blocks - 1) * N
        scores = tl.where((column + columns)[None, :] <= rows[:, None], scores, float("-inf"))
    weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale)
    note_after(log, SOFTMAX_DONE, 0, total, tl.SliceLayout(1, SCORES))
    weights16 = tl.convert_layout(weights.to(o_desc.dtype), tl.DotOperandLayout(0, OUT, 2))
    if not OVERLAP:
        mbarrier.wait(v_full.index(0), 0)
        out = warpgroup_mma(weights16, v_tiles.index(0), out, is_async=True)
        note(log, OUTPUT_ISSUED, 0)
        out = warpgroup_mma_wait(0, [out])
        note(log, OUTPUT_THERE, 0)
        mbarrier.arrive(v_empty.index(0))
    for i in range(1, blocks):
        note(log, ASKED, i)
        mbarrier.wait(k_full.index(i % S), (i // S) & 1)
        note(log, KEYS_THERE, i)
        if PINGPONG:
            mbarrier.wait(order.index(GROUP), (i + GROUP) & 1)
        scores = warpgroup_mma(q_tile, k_tiles.index(i % S).permute((1, 0)), zeros, use_acc=False, is_async=True)
        note(log, SCORES_ISSUED, i)
        if OVERLAP:
            mbarrier.wait(v_full.index((i - 1) % S), ((i - 1) // S) & 1)
            out = warpgroup_mma(weights16, v_tiles.index((i - 1) % S), out, is_async=True)
            note(log, OUTPUT_ISSUED, i - 1)
            if PINGPONG:
                mbarrier.arrive(order.index(1 - GROUP))
            scores = warpgroup_mma_wait(1, [scores])
        else:
            scores = warpgroup_mma_wait(0, [scores])
        note(log, SCORES_THERE, i)
        mbarrier.arrive(k_empty.index(i % S))
        weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale)
        note_after(log, SOFTMAX_DONE, i, total, tl.SliceLayout(1, SCORES))
        if OVERLAP:
            out = warpgroup_mma_wait(0, [out])
            note(log, OUTPUT_THERE, i - 1)
            mbarrier.arrive(v_empty.index((i - 1) % S))
        out = out * tl.convert_layout(shrink, tl.SliceLayout(1, OUT))[:, None]
        weights16 = tl.convert_layout(weights.to(o_desc.dtype), tl.DotOperandLayout(0, OUT, 2))
        if not OVERLAP:
            mbarrier.wait(v_full.index(i % S), (i // S) & 1)
            out = warpgroup_mma(weights16, v_tiles.index(i % S), out, is_async=True)
            note(log, OUTPUT_ISSUED, i)
            out = warpgroup_mma_wait(0, [out])
            note(log, OUTPUT_THERE, i)
            mbarrier.arrive(v_empty.index(i % S))
    if OVERLAP:
        last = blocks - 1
        mbarrier.wait(v_full.index(last % S), (last // S) & 1)
        out = warpgroup_mma(weights16, v_tiles.index(last % S), out, is_async=True)
        note(log, OUTPUT_ISSUED, last)
        out = warpgroup_mma_wait(0, [out])
        note(log, OUTPUT_THERE, last)
        mbarrier.arrive(v_empty.index(last % S))
    out = out * tl.convert_layout(1.0 / total, tl.SliceLayout(1, OUT))[:, None]
    wait_for_all()
    q_tile.store(out.to(o_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [start + first, 0], q_tile)
    tl.store(lse_ptr + start + rows, (maximum * scale + tl.log2(total)) * 0.6931471805599453)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["together", "traced", "most"])
def attention_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, length, together, times_ptr, traced, most,
                     D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr,
                     OVERLAP: tl.constexpr, PINGPONG: tl.constexpr):  # fmt: skip
    """Shared memory and barriers, then every warp to its job: 2 M queries of one head."""
    here = tl.program_id(0) == traced
    log0 = (times_ptr, most, here)
    log1 = (times_ptr + 7 * most, most, here)
    log2 = (times_ptr + 14 * most, most, here)
    tile = place(length, together, 2 * M, N, CAUSAL)
    q_tiles = tl.allocate_shared_memory(q_desc.dtype, [2, M, D], q_desc.layout)
    k_tiles = tl.allocate_shared_memory(q_desc.dtype, [S, N, D], k_desc.layout)
    v_tiles = tl.allocate_shared_memory(q_desc.dtype, [S, N, D], v_desc.layout)
    queries = (q_tiles, barriers(2, 1))
    ring = (k_tiles, v_tiles, barriers(S, 1), barriers(S, 2), barriers(S, 1), barriers(S, 2))
    order = barriers(2, 1)
    fence_async_shared()
    tl.warp_specialize([
        (consumer, (tl.constexpr(0), o_desc, lse_ptr, scale, queries, ring, order, tile, log0, D, M, N, S, CAUSAL,
                    OVERLAP, PINGPONG)),
        (consumer, (tl.constexpr(1), o_desc, lse_ptr, scale, queries, ring, order, tile, log1, D, M, N, S, CAUSAL,
                    OVERLAP, PINGPONG)),
        (producer, (q_desc, k_desc, v_desc, queries, ring, tile, log2, N, S)),
    ], [4, 1], [240, 24])  # fmt: skip


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, overlap: bool, take_turns: bool,
    times: torch.Tensor, traced: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """o and the logsumexp, as of the steps; the clock of program ``traced`` goes into ``times``.

    Args:
        overlap: Step 9 and 10; without it step 8.
        take_turns: Step 10.
        times: (3, 7, tiles of keys) int64: two consumers and the producer, events, tiles.
    """
    check(q, k, v)
    o, lse = outputs(q)
    batch, heads, length, head_dim = q.shape
    tile = TILES[head_dim]
    attention_kernel[(batch * heads * length // (2 * tile["M"]),)](
        *described((q, tile["M"]), (k, tile["N"]), (v, tile["N"]), (o, tile["M"])), lse, scale_of(q) * LOG2_E, length,
        heads_together(q), times, traced, times.shape[2], D=head_dim, CAUSAL=causal, OVERLAP=overlap,
        PINGPONG=take_turns, **tile, **OPTIONS,
    )  # fmt: skip
    return o, lse
