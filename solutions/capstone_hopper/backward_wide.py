"""The backward kernel for a head_dim of 256: a program has 64 keys and their values.

dK and dV of 64 keys would take 256 registers of every thread of one warpgroup. So two warpgroups share them by columns
(128 each), and need the weights and dS of all 64 keys and all queries of a tile: they compute half of the queries each,
and exchange through shared memory. Both are one partition of eight warps: they work in step, and the tensor cores go on
with the products that are under way. dQ is summed by TMA as in :mod:`.backward`.
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

from .backward import apply_mask, producer, query_tile, query_tiles, start
from .parts import add_to_global, barriers, exp2, matrix, wait_for_all


@gluon.jit
def consumers(dq_desc, dk_desc, dv_desc, scale, scale_log2, sizes, kept, ring, shared, M: gl.constexpr,
              N: gl.constexpr, S: gl.constexpr, CAUSAL: gl.constexpr, DQ: gl.constexpr):  # fmt: skip
    """Both warpgroups: 64 keys, each half of the queries of a tile in scores, half of the columns in dK, dV and dQ."""
    _heads, group, queries, keys = sizes
    k_tiles, v_tiles, kv_full = kept
    q_tiles, do_tiles, lse_rows, delta_rows, q_full, q_empty, do_full, do_empty = ring
    p_tile, ds_tile, dq_tile = shared
    D: gl.constexpr = dk_desc.block_shape[3]
    dtype: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, M // 2, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    own = gl.program_id(0) * N
    kv_head = gl.program_id(1)
    batch = gl.program_id(2)
    first, tiles = query_tiles(sizes, N, M, CAUSAL)
    steps = tiles * group
    k = matrix(k_tiles.index(0), N, D)
    v = matrix(v_tiles.index(0), N, D)
    dk = gl.zeros([N, D], gl.float32, OUT)
    dv = gl.zeros([N, D], gl.float32, OUT)
    mbarrier.wait(kv_full, 0)
    for step in range(steps):
        head, row = query_tile(step, kv_head, group, first, tiles, M)
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
        scores = apply_mask(warpgroup_mma_wait(1, [scores]), own, row, queries, keys, SCORES, CAUSAL)
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
        if DQ:
            empty = gl.zeros([M, D], gl.float32, OUT)
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k, empty, use_acc=False, is_async=True)
            dv = warpgroup_mma_wait(2, [dv])
            mbarrier.arrive(do_empty.index(s))
            dk = warpgroup_mma_wait(1, [dk])
            mbarrier.arrive(q_empty.index(s))
            tma.store_wait(0)
            dq = warpgroup_mma_wait(0, [dq])
            wait_for_all()
            matrix(dq_tile, M, D).store(dq)
            fence_async_shared()
            add_to_global(dq_desc, [batch, head, row, 0], dq_tile)
        else:
            dv = warpgroup_mma_wait(1, [dv])
            mbarrier.arrive(do_empty.index(s))
            dk = warpgroup_mma_wait(0, [dk])
            mbarrier.arrive(q_empty.index(s))
    wait_for_all()
    k.store((dk * scale).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, own, 0], k_tiles.index(0))
    tma.async_copy_shared_to_global(dv_desc, [batch, kv_head, own, 0], v_tiles.index(0))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def hopper_wide_backward_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, scale,
                                scale_log2, heads, group, queries, keys, M: gl.constexpr, N: gl.constexpr,
                                S: gl.constexpr, CAUSAL: gl.constexpr, DQ: gl.constexpr):  # fmt: skip
    """Shared memory and barriers, then every warp to its job. Grid: tiles of keys, key heads, batch."""
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[3]
    k_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, N, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [S, 1, 1, M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [S, 1, 1, M, D], do_desc.layout)
    lse_rows = gl.allocate_shared_memory(gl.float32, [S, 1, M], lse_desc.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [S, 1, M], delta_desc.layout)
    p_tile = gl.allocate_shared_memory(dtype, [N, M], gl.NVMMASharedLayout(128, 16, 2))
    ds_tile = gl.allocate_shared_memory(dtype, [N, M], gl.NVMMASharedLayout(128, 16, 2))
    dq_tile = gl.allocate_shared_memory(gl.float32, [1, 1, M, D], dq_desc.layout)
    kept = (k_tiles, v_tiles, barriers(1, 1).index(0))
    ring = (q_tiles, do_tiles, lse_rows, delta_rows, barriers(S, 1), barriers(S, 1), barriers(S, 1), barriers(S, 1))
    shared = (p_tile, ds_tile, dq_tile)
    fence_async_shared()
    sizes = (heads, group, queries, keys)
    gl.warp_specialize([
        (consumers, (dq_desc, dk_desc, dv_desc, scale, scale_log2, sizes, kept, ring, shared, M, N, S, CAUSAL, DQ)),
        (producer, ((q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc), sizes, kept, ring, M, N, S, CAUSAL)),
    ], [1], [24])  # fmt: skip
