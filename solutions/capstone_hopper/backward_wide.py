"""The backward kernel for a head_dim of 256: a program has 64 keys and their values.

dK and dV of 64 keys would take 256 registers of every thread of one warpgroup. So two warpgroups share them by columns
(128 each), and need the weights and dS of all 64 keys and all queries of a tile: they compute half of the queries each,
and exchange through shared memory. Both are one partition of eight warps: they work in step, and the tensor cores go on
with the products that are under way. dQ is summed by TMA as in :mod:`.backward`; with ``ORDERED`` programs take turns
(:mod:`.backward_ordered`), for which they must know when TMA has added, not only when it has read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward import start
from .backward_ordered import programs_before, turn_ender, turn_taker
from .backward_pieces import first_tile, masked, next_tile, place, producer, query_tiles, where_to_turn
from .parts import add_to_global, barriers, exp2, matrix, wait_for_all


@gluon.jit
def wait_for_sums():
    """Wait until what TMA adds for this thread has been added, and others may see it."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def dq_before_is_added(step, added, ORDERED: gl.constexpr):
    """Wait until TMA has read dQ of the step before, and with ``ORDERED`` has added it, which is then said."""
    if ORDERED:
        wait_for_sums()
    else:
        tma.store_wait(0)
    wait_for_all()
    if ORDERED:
        mbarrier.arrive(added.index(step % 3))


@gluon.jit
def consumers(sums, scale, scale_log2, sizes, kept, ring, shared, turn, added, M: gl.constexpr, N: gl.constexpr,
              S: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, ORDERED: gl.constexpr):  # fmt: skip
    """Both warpgroups: 64 keys, each half of the queries of a tile in scores, half of the columns in dK, dV and dQ."""
    heads, group, _queries, keys = sizes
    k_tiles, v_tiles, dk_tiles, dv_tiles, kv_full, done = kept
    q_tiles, do_tiles, lse_rows, delta_rows, q_full, q_empty, do_full, do_empty = ring
    p_tile, ds_tile, dq_tile = shared
    D: gl.constexpr = k_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, M // 2, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    key_tile, _kv_head, _batch = place(heads, group, ORDERED and CAUSAL)
    own = key_tile * N
    first, tiles = query_tiles(own, sizes, N, M, CAUSAL)
    steps = tiles * group
    number, first_lead = first_tile(own, sizes, first, M, ORDERED and CAUSAL)
    turning = where_to_turn(own, sizes, first, M, ORDERED and CAUSAL)
    lead = first_lead
    k = matrix(k_tiles.index(0), N, D)
    v = matrix(v_tiles.index(0), N, D)
    dk = gl.zeros([N, D], gl.float32, OUT)
    dv = gl.zeros([N, D], gl.float32, OUT)
    mbarrier.wait(kv_full, 0)
    for step in range(steps):
        s = step % S
        parity = (step // S) & 1
        q = matrix(q_tiles.index(s), M, D)
        do = matrix(do_tiles.index(s), M, D)
        mbarrier.wait(q_full.index(s), parity)
        scores = start(lse_rows.index(s), M, SCORES, N)
        scores = warpgroup_mma(k, q.permute((1, 0)), scores, is_async=True)
        mbarrier.wait(do_full.index(s), parity)
        dp = start(delta_rows.index(s), M, SCORES, N)
        dp = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
        scores = masked(warpgroup_mma_wait(1, [scores]), lead, own, keys, SCORES, CAUSAL, RAGGED)
        weights = exp2(scores * scale_log2)
        p_tile.store(weights.to(dtype))
        fence_async_shared()
        wait_for_all()
        dv = warpgroup_mma(p_tile, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
        ds_tile.store((weights * dp).to(dtype))
        fence_async_shared()
        wait_for_all()
        dk = warpgroup_mma(ds_tile, q, dk, is_async=True)
        empty = gl.zeros([M, D], gl.float32, OUT)
        dq = warpgroup_mma(ds_tile.permute((1, 0)), k, empty, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(2, [dv])
        mbarrier.arrive(do_empty.index(s))
        dk = warpgroup_mma_wait(1, [dk])
        mbarrier.arrive(q_empty.index(s))
        dq = warpgroup_mma_wait(0, [dq])
        dq_before_is_added(step, added, ORDERED)
        matrix(dq_tile, M, D).store(dq)
        fence_async_shared()
        if ORDERED:
            mbarrier.wait(turn.index(step & 1), (step >> 1) & 1)
            if programs_before(lead, key_tile, M, N, CAUSAL) == 0:
                tma.async_copy_shared_to_global(sums, [0, 0, number * M, 0], dq_tile)
            else:
                add_to_global(sums, [0, 0, number * M, 0], dq_tile)
        else:
            add_to_global(sums, [0, 0, number * M, 0], dq_tile)
        number, lead = next_tile(number, lead, first_lead, turning, M, CAUSAL)
    dq_before_is_added(steps, added, ORDERED)
    matrix(dk_tiles.index(0), N, D).store((dk * scale).to(dtype))
    matrix(dv_tiles.index(0), N, D).store(dv.to(dtype))
    fence_async_shared()
    mbarrier.arrive(done)


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def hopper_wide_backward_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, sums, turns, dk_desc, dv_desc,
                                scale, scale_log2, heads, group, queries, keys, S: gl.constexpr, CAUSAL: gl.constexpr,
                                RAGGED: gl.constexpr, ORDERED: gl.constexpr):  # fmt: skip
    """Shared memory and barriers, then every warp to its job. Grid: :func:`.backward_pieces.place`.

    ``sums`` is a descriptor of what dQ is summed in, tile after tile of all heads of the batch. ``turns`` are int32
    counters, one for each tile.
    """
    dtype: gl.constexpr = q_desc.dtype
    M: gl.constexpr = q_desc.block_shape[2]
    N: gl.constexpr = k_desc.block_shape[2]
    D: gl.constexpr = q_desc.block_shape[3]
    k_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, N, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [S, 1, 1, M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [S, 1, 1, M, D], do_desc.layout)
    lse_rows = gl.allocate_shared_memory(gl.float32, [S, 1, M], lse_desc.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [S, 1, M], delta_desc.layout)
    p_tile = gl.allocate_shared_memory(dtype, [N, M], gl.NVMMASharedLayout(128, 16, 2))
    ds_tile = gl.allocate_shared_memory(dtype, [N, M], gl.NVMMASharedLayout(128, 16, 2))
    dq_tile = gl.allocate_shared_memory(gl.float32, [1, 1, M, D], sums.layout)
    kept = (k_tiles, v_tiles, k_tiles, v_tiles, barriers(1, 1).index(0), barriers(1, 1).index(0))
    ring = (q_tiles, do_tiles, lse_rows, delta_rows, barriers(S, 1), barriers(S, 1), barriers(S, 1), barriers(S, 1))
    shared = (p_tile, ds_tile, dq_tile)
    turn, added = barriers(2, 2), barriers(3, 1)
    fence_async_shared()
    sizes = (heads, group, queries, keys)
    descriptors = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc)
    if ORDERED:
        gl.warp_specialize([
            (consumers, (sums, scale, scale_log2, sizes, kept, ring, shared, turn, added, M, N, S, CAUSAL, RAGGED,
                         ORDERED)),
            (producer, (descriptors, sizes, kept, ring, M, N, S, CAUSAL, CAUSAL)),
            (turn_taker, (turns, sizes, turn, M, N, CAUSAL, 1)),
            (turn_ender, (gl.constexpr(0), turns, sizes, turn, added, M, N, CAUSAL, 1)),
        ], [1, 1, 1], [24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumers, (sums, scale, scale_log2, sizes, kept, ring, shared, turn, added, M, N, S, CAUSAL, RAGGED,
                         ORDERED)),
            (producer, (descriptors, sizes, kept, ring, M, N, S, CAUSAL)),
        ], [1], [24])  # fmt: skip
