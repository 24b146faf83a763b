"""The backward kernel: a program has 128 keys and their values, and walks over the queries that see them.

Each of two consumer warpgroups holds dK and dV of 64 keys in registers. Of every tile of queries they compute the
weights again, transposed (keys by queries), so that both products that add to dK and dV read them from registers.
dQ needs the keys of both warpgroups: they put dS into shared memory, each multiplies half of the columns (or rows) of
dQ, and TMA adds the result to global memory, where the programs of other keys add theirs. In which order
those sums arrive is not fixed: with ``DQ`` off the kernel leaves dQ to one that fixes it.

Three things keep everything in registers. What belongs to a query, its logsumexp and its delta, is not subtracted: it
is what the accumulators of the products start from (:func:`start`). dS has two places, so that nobody waits for the one
that the products of the step before read. And the tiles of keys and values are addressed through ``step >> 30``, which
is 0, but the compiler cannot know that: it computes addresses when they are needed instead of keeping all of them.
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

from .parts import add_to_global, barriers, by_eights, exp2, matrix, wait_for_all


@gluon.jit
def query_tiles(sizes, N: gl.constexpr, M: gl.constexpr, CAUSAL: gl.constexpr):
    """First tile of queries that sees this program's keys, and how many do."""
    _heads, _group, queries, keys = sizes
    first = 0
    if CAUSAL:
        first = gl.maximum(gl.program_id(0) * N - (keys - queries), 0) // M
    return first, gl.maximum(gl.cdiv(queries, M) - first, 0)


@gluon.jit
def query_tile(step, kv_head, group, first, tiles, M: gl.constexpr):
    """Head and first query of a program's tile ``step``.

    Programs of one head begin at different tiles, so that they do not all add to the same rows of dQ at once.
    """
    tile = step % tiles
    return kv_head * group + step // tiles, (first + tile) * M


@gluon.jit
def producer(descriptors, sizes, kept, ring, M: gl.constexpr, N: gl.constexpr, S: gl.constexpr,
             CAUSAL: gl.constexpr):  # fmt: skip
    """One warp: keys and values once, then queries, output gradients and their row sums of every head of the group."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descriptors
    heads, group, _queries, _keys = sizes
    k_tiles, v_tiles, kv_full = kept
    q_tiles, do_tiles, lse_rows, delta_rows, q_full, q_empty, do_full, do_empty = ring
    D: gl.constexpr = q_desc.block_shape[3]
    column = gl.program_id(0) * N
    kv_head = gl.program_id(1)
    batch = gl.program_id(2)
    first, tiles = query_tiles(sizes, N, M, CAUSAL)
    mbarrier.expect(kv_full, 2 * N * D * 2)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, column, 0], kv_full, k_tiles.index(0))
    tma.async_copy_global_to_shared(v_desc, [batch, kv_head, column, 0], kv_full, v_tiles.index(0))
    for step in range(tiles * group):
        head, row = query_tile(step, kv_head, group, first, tiles, M)
        s = step % S
        parity = ((step // S) & 1) ^ 1
        mbarrier.wait(q_empty.index(s), parity)
        mbarrier.expect(q_full.index(s), M * D * 2 + M * 4)
        tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], q_full.index(s), q_tiles.index(s))
        tma.async_copy_global_to_shared(lse_desc, [batch * heads + head, row], q_full.index(s), lse_rows.index(s))
        mbarrier.wait(do_empty.index(s), parity)
        mbarrier.expect(do_full.index(s), M * D * 2 + M * 4)
        tma.async_copy_global_to_shared(do_desc, [batch, head, row, 0], do_full.index(s), do_tiles.index(s))
        tma.async_copy_global_to_shared(delta_desc, [batch * heads + head, row], do_full.index(s), delta_rows.index(s))


@gluon.jit
def start(row, M: gl.constexpr, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    """A tile (1, M) of float32 numbers in shared memory as an accumulator (ROWS, M): each row is the same."""
    flat = row._reinterpret(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return gl.zeros([ROWS, M], gl.float32, LAYOUT) + flat.load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def apply_mask(scores, own, row, queries, keys, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf where a query from ``row`` on must not see a key from ``own`` on; scores are keys by queries."""
    ROWS: gl.constexpr = scores.shape[0]
    if CAUSAL:  # noqa: SIM102  (a constexpr is decided while compiling)
        if own + ROWS - 1 > row + keys - queries:
            eights, key, eight, place = by_eights(scores)
            eights = gl.where(key + (own - row - keys + queries) - place <= 8 * eight, eights, float("-inf"))
            scores = gl.convert_layout(gl.reshape(eights, scores.shape), LAYOUT)
    if own + ROWS > keys:
        key = own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        scores = gl.where((key < keys)[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def send(GROUP: gl.constexpr, dq, dq_desc, dq_tiles, batch, head, row, M: gl.constexpr):
    """This warpgroup's part of dQ of one tile of queries: to shared memory, from where TMA adds it."""
    PART: gl.constexpr = dq.shape[1]
    tma.store_wait(0)  # the part before has left shared memory
    wait_for_all()
    matrix(dq_tiles.index(GROUP), 64, PART).store(dq)
    fence_async_shared()
    if M == 64:
        add_to_global(dq_desc, [batch, head, row, GROUP * PART], dq_tiles.index(GROUP))
    else:
        add_to_global(dq_desc, [batch, head, row + GROUP * 64, 0], dq_tiles.index(GROUP))


@gluon.jit
def consumer(GROUP: gl.constexpr, dq_desc, dk_desc, dv_desc, scale, scale_log2, sizes, kept, ring, shared,
             M: gl.constexpr, N: gl.constexpr, S: gl.constexpr, CAUSAL: gl.constexpr, DQ: gl.constexpr,
             EARLY: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 keys."""
    _heads, group, queries, keys = sizes
    k_tiles, v_tiles, kv_full = kept
    q_tiles, do_tiles, lse_rows, delta_rows, q_full, q_empty, do_full, do_empty = ring
    ds_tile, dq_tiles, ds_full, ds_empty = shared
    D: gl.constexpr = dk_desc.block_shape[3]
    PART: gl.constexpr = D * M // 128  # columns of this warpgroup's part of dQ
    dtype: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    DQ_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    own = gl.program_id(0) * N + GROUP * 64
    kv_head = gl.program_id(1)
    batch = gl.program_id(2)
    first, tiles = query_tiles(sizes, N, M, CAUSAL)
    steps = tiles * group
    dk = gl.zeros([64, D], gl.float32, OUT)
    dv = gl.zeros([64, D], gl.float32, OUT)
    mbarrier.wait(kv_full, 0)
    for step in range(steps):
        s = step % S
        parity = (step // S) & 1
        q = matrix(q_tiles.index(s), M, D)
        do = matrix(do_tiles.index(s), M, D)
        k_all = matrix(k_tiles.index(step >> 30), N, D)
        k = k_all.slice(GROUP * 64, 64)
        v = matrix(v_tiles.index(step >> 30), N, D).slice(GROUP * 64, 64)
        mbarrier.wait(q_full.index(s), parity)
        scores = start(lse_rows.index(s), M, SCORES, 64)
        scores = warpgroup_mma(k, q.permute((1, 0)), scores, is_async=True)
        mbarrier.wait(do_full.index(s), parity)
        dp = start(delta_rows.index(s), M, SCORES, 64)
        dp = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
        head, row = query_tile(step, kv_head, group, first, tiles, M)
        scores = apply_mask(warpgroup_mma_wait(1, [scores]), own, row, queries, keys, SCORES, CAUSAL)
        weights = exp2(scores * scale_log2)
        weights16 = gl.convert_layout(weights.to(dtype), LEFT)
        if EARLY:
            dv = warpgroup_mma(weights16, do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, [dp])
        else:
            dp = warpgroup_mma_wait(0, [dp])
        ds = (weights * dp).to(dtype)
        if not EARLY:
            dv = warpgroup_mma(weights16, do, dv, is_async=True)
        ds_now = ds_tile.index(step & 1)
        if DQ:
            mbarrier.wait(ds_empty.index(step & 1), ((step >> 1) & 1) ^ 1)
            ds_now.slice(GROUP * 64, 64).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full)
        dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q, dk, is_async=True)
        if DQ:
            mbarrier.wait(ds_full, step & 1)
            empty = gl.zeros([64, PART], gl.float32, DQ_OUT)
            if M == 64:
                dq = warpgroup_mma(ds_now.permute((1, 0)), k_all.slice(GROUP * PART, PART, dim=1), empty, use_acc=False,
                                   is_async=True)  # fmt: skip
            else:
                dq = warpgroup_mma(ds_now.slice(GROUP * 64, 64, dim=1).permute((1, 0)), k_all, empty, use_acc=False,
                                   is_async=True)  # fmt: skip
            dv = warpgroup_mma_wait(2, [dv])
            mbarrier.arrive(do_empty.index(s))
            dk = warpgroup_mma_wait(1, [dk])
            mbarrier.arrive(q_empty.index(s))
            dq = warpgroup_mma_wait(0, [dq])
            mbarrier.arrive(ds_empty.index(step & 1))
            send(GROUP, dq, dq_desc, dq_tiles, batch, head, row, M)
        else:
            dv = warpgroup_mma_wait(1, [dv])
            mbarrier.arrive(do_empty.index(s))
            dk = warpgroup_mma_wait(0, [dk])
            mbarrier.arrive(q_empty.index(s))
    tma.store_wait(0)
    # The keys and values are not needed any more; their place takes dK and dV, once both warpgroups are there.
    mbarrier.arrive(ds_full)
    if DQ:
        mbarrier.wait(ds_full, steps & 1)
    else:
        mbarrier.wait(ds_full, 0)
    dk_tile = k_tiles._reinterpret(dtype, [2, 1, 1, 64, D], dk_desc.layout).index(GROUP)
    dv_tile = v_tiles._reinterpret(dtype, [2, 1, 1, 64, D], dv_desc.layout).index(GROUP)
    matrix(dk_tile, 64, D).store((dk * scale).to(dtype))
    matrix(dv_tile, 64, D).store(dv.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, own, 0], dk_tile)
    tma.async_copy_shared_to_global(dv_desc, [batch, kv_head, own, 0], dv_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def hopper_backward_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, scale,
                           scale_log2, heads, group, queries, keys, M: gl.constexpr, N: gl.constexpr, S: gl.constexpr,
                           CAUSAL: gl.constexpr, DQ: gl.constexpr, EARLY: gl.constexpr,
                           REGISTERS: gl.constexpr):  # fmt: skip
    """Shared memory and barriers, then every warp to its job. Grid: tiles of keys, key heads, batch."""
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[3]
    k_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, N, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [S, 1, 1, M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [S, 1, 1, M, D], do_desc.layout)
    lse_rows = gl.allocate_shared_memory(gl.float32, [S, 1, M], lse_desc.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [S, 1, M], delta_desc.layout)
    ds_tile = gl.allocate_shared_memory(dtype, [2, N, M], gl.NVMMASharedLayout(128, 16, 2))
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, D * M // 128], dq_desc.layout)
    kept = (k_tiles, v_tiles, barriers(1, 1).index(0))
    ring = (q_tiles, do_tiles, lse_rows, delta_rows, barriers(S, 1), barriers(S, 2), barriers(S, 1), barriers(S, 2))
    shared = (ds_tile, dq_tiles, barriers(1, 2).index(0), barriers(2, 2))
    fence_async_shared()
    sizes = (heads, group, queries, keys)
    gl.warp_specialize([
        (consumer, (gl.constexpr(0), dq_desc, dk_desc, dv_desc, scale, scale_log2, sizes, kept, ring, shared,
                    M, N, S, CAUSAL, DQ, EARLY)),
        (consumer, (gl.constexpr(1), dq_desc, dk_desc, dv_desc, scale, scale_log2, sizes, kept, ring, shared,
                    M, N, S, CAUSAL, DQ, EARLY)),
        (producer, ((q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc), sizes, kept, ring, M, N, S, CAUSAL)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
