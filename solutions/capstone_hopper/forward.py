"""The forward kernel: one producer warp, two or three consumer warpgroups, and a list of tiles for each program.

A consumer warpgroup has 64 queries of a tile and walks over the keys from the last to the first. While the tensor cores
compute the scores of the next keys and the output of the last ones, it exponentiates; what it waits for is in barriers:

- ``k_full[s]``, ``v_full[s]``: the copy engine has filled stage s (it counts the bytes);
- ``k_empty[s]``, ``v_empty[s]``: every consumer has read stage s;
- ``q_full``, ``q_empty``: the same for the queries of a tile;
- ``turns[g]``: warpgroup g may issue its products.

A barrier alternates between phase 0 and 1. Wait for the n-th completion with parity (n - 1) & 1; a fresh barrier lets
parity 1 pass, so whoever fills a stage for the first time does not wait.
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

from .parts import exp2, matrix, wait_for_all


@gluon.jit
def place(tile, sizes, ROWS: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """Batch, head and first query of a tile, and how many tiles of keys it sees."""
    heads, _group, queries, keys = sizes
    tiles = gl.cdiv(queries, ROWS)
    first = (tile % tiles) * ROWS
    head = (tile // tiles) % heads
    batch = tile // tiles // heads
    seen = keys
    if CAUSAL:
        seen = gl.minimum(keys, gl.maximum(first + ROWS + keys - queries, 0))
    return batch, head, first, gl.cdiv(seen, N)


@gluon.jit
def producer(descriptors, work, sizes, queue, ring, G: gl.constexpr, N: gl.constexpr, S: gl.constexpr,
             CAUSAL: gl.constexpr):  # fmt: skip
    """One warp: asks the copy engine for what comes next, whenever there is room."""
    q_desc, k_desc, v_desc = descriptors
    tiles_ptr, counts_ptr, width = work
    q_tiles, q_full, q_empty = queue
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    D: gl.constexpr = q_desc.block_shape[3]
    mine = tiles_ptr + gl.program_id(0) * width
    step = 0
    for turn in range(gl.load(counts_ptr + gl.program_id(0))):
        batch, head, first, blocks = place(gl.load(mine + turn), sizes, 64 * G, N, CAUSAL)
        kv_head = head // sizes[1]
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, G * 64 * D * 2)
        for g in gl.static_range(G):
            tma.async_copy_global_to_shared(q_desc, [batch, head, first + g * 64, 0], q_full, q_tiles.index(g))
        for i in range(blocks):
            column = (blocks - 1 - i) * N
            s = step % S
            parity = ((step // S) & 1) ^ 1
            mbarrier.wait(k_empty.index(s), parity)
            mbarrier.expect(k_full.index(s), N * D * 2)
            tma.async_copy_global_to_shared(k_desc, [batch, kv_head, column, 0], k_full.index(s), k_tiles.index(s))
            mbarrier.wait(v_empty.index(s), parity)
            mbarrier.expect(v_full.index(s), N * D * 2)
            tma.async_copy_global_to_shared(v_desc, [batch, kv_head, column, 0], v_full.index(s), v_tiles.index(s))
            step += 1


@gluon.jit
def hide(scores, column, row, keys, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf where query ``row + i`` (counted so that it sees keys up to its own number) must not see a key."""
    offset = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    last = keys - 1 - column
    if CAUSAL:
        own = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)) + (row - column)
        scores = gl.where(offset[None, :] <= gl.minimum(own, last)[:, None], scores, float("-inf"))
    else:
        scores = gl.where((offset <= last)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def online_softmax(scores, maximum, total, scale, PARTIAL: gl.constexpr):
    """Weights of this tile, and what the step does to output, maximum and sum: lab 3's recurrence."""
    new = gl.maximum(maximum, gl.max(scores, 1))
    base = gl.where(new == float("-inf"), 0.0, new) * scale
    weights = exp2(scores * scale - base[:, None])
    shrink = exp2(maximum * scale - base)
    if PARTIAL:
        part = gl.sum(gl.reshape(weights, [64, weights.shape[1] // 8, 8]), 1)
        rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
        total = total * gl.convert_layout(shrink, rows)[:, None] + gl.convert_layout(part, total.type.layout)
    else:
        total = total * shrink + gl.sum(weights, 1)
    return weights, shrink, new, total


@gluon.jit
def advance(step, state, q, ring, turns, parity, column, row, keys, scale, GROUP: gl.constexpr, G: gl.constexpr,
            N: gl.constexpr, S: gl.constexpr, CAUSAL: gl.constexpr, PINGPONG: gl.constexpr, LATE: gl.constexpr,
            PARTIAL: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Scores of tile ``step`` and output of tile ``step - 1`` run side by side; then the softmax of the former."""
    out, weights16, shrink, maximum, total = state
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    D: gl.constexpr = out.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = out.type.layout
    s = step % S
    last = (step - 1) % S
    mbarrier.wait(k_full.index(s), (step // S) & 1)
    if PINGPONG:
        mbarrier.wait(turns.index(GROUP), parity)
    scores = warpgroup_mma(q, matrix(k_tiles.index(s), N, D).permute((1, 0)),
                           gl.zeros([64, N], gl.float32, SCORES), use_acc=False, is_async=True)  # fmt: skip
    if LATE:
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    mbarrier.wait(v_full.index(last), ((step - 1) // S) & 1)
    out = warpgroup_mma(weights16, matrix(v_tiles.index(last), N, D), out, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turns.index((GROUP + 1) % G))
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(k_empty.index(s))
    if MASKED:
        scores = hide(scores, column, row, keys, SCORES, CAUSAL)
    weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale, PARTIAL)
    out = warpgroup_mma_wait(0, [out])
    mbarrier.arrive(v_empty.index(last))
    if not LATE:
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    weights16 = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, OUT, 2))
    return out, weights16, shrink, maximum, total


@gluon.jit
def consumer(GROUP: gl.constexpr, o_desc, lse_ptr, scale, work, sizes, queue, ring, turns, o_tiles, G: gl.constexpr,
             N: gl.constexpr, S: gl.constexpr, CAUSAL: gl.constexpr, PINGPONG: gl.constexpr, LATE: gl.constexpr,
             PARTIAL: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 queries of each tile."""
    tiles_ptr, counts_ptr, width = work
    heads, _group, queries, keys = sizes
    q_tiles, q_full, q_empty = queue
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    D: gl.constexpr = o_desc.block_shape[3]
    dtype: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    #: Eight columns of a row, as a warpgroup's result holds them: two neighbours a thread.
    EIGHT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8])  # fmt: skip
    mine = tiles_ptr + gl.program_id(0) * width
    q = matrix(q_tiles.index(GROUP), 64, D)
    parity = 1 if GROUP == 0 else 0
    step = 0
    tile = gl.load(mine)
    for turn in range(gl.load(counts_ptr + gl.program_id(0))):
        batch, head, first, blocks = place(tile, sizes, 64 * G, N, CAUSAL)
        tile = gl.load(mine + turn + 1)
        first += 64 * GROUP
        row = first + keys - queries
        out = gl.zeros([64, D], gl.float32, OUT)
        maximum = gl.full([64], float("-inf"), gl.float32, ROWS)
        if PARTIAL:
            total = gl.zeros([64, 8], gl.float32, EIGHT)
        else:
            total = gl.zeros([64], gl.float32, ROWS)
        whole = keys // N  # tiles of which every query sees every key
        needed = blocks
        if CAUSAL:
            whole = gl.minimum(whole, gl.maximum(row + 1, 0) // N)
            needed = gl.minimum(blocks, gl.cdiv(gl.maximum(row + 64, 0), N))
        needed = gl.where(first < queries, needed, 0)
        skipped = blocks - needed  # tiles that only the other warpgroups see
        for i in range(skipped):
            s = (step + i) % S
            mbarrier.wait(k_full.index(s), ((step + i) // S) & 1)
            mbarrier.arrive(k_empty.index(s))
            mbarrier.wait(v_full.index(s), ((step + i) // S) & 1)
            mbarrier.arrive(v_empty.index(s))
            if PINGPONG:  # noqa: SIM102  (a constexpr is decided while compiling)
                if i < blocks - 1:
                    mbarrier.wait(turns.index(GROUP), parity)
                    parity = parity ^ 1
                    mbarrier.arrive(turns.index((GROUP + 1) % G))
        mbarrier.wait(q_full, turn & 1)
        if needed > 0:
            s = (step + skipped) % S
            mbarrier.wait(k_full.index(s), ((step + skipped) // S) & 1)
            scores = warpgroup_mma(q, matrix(k_tiles.index(s), N, D).permute((1, 0)),
                                   gl.zeros([64, N], gl.float32, SCORES), use_acc=False, is_async=True)  # fmt: skip
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_empty.index(s))
            if needed > whole:
                scores = hide(scores, (needed - 1) * N, row, keys, SCORES, CAUSAL)
            weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale, PARTIAL)
            weights16 = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OUT, 2))
            edge = gl.maximum(blocks - whole, skipped + 1)
            for i in range(skipped + 1, edge):
                out, weights16, shrink, maximum, total = advance(
                    step + i, (out, weights16, shrink, maximum, total), q, ring, turns, parity, (blocks - 1 - i) * N,
                    row, keys, scale, GROUP, G, N, S, CAUSAL, PINGPONG, LATE, PARTIAL, True)  # fmt: skip
                parity = parity ^ 1
            for i in range(edge, blocks):
                out, weights16, shrink, maximum, total = advance(
                    step + i, (out, weights16, shrink, maximum, total), q, ring, turns, parity, 0,
                    row, keys, scale, GROUP, G, N, S, CAUSAL, PINGPONG, LATE, PARTIAL, False)  # fmt: skip
                parity = parity ^ 1
            if D < 256:
                mbarrier.arrive(q_empty)
            if LATE:
                out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
            s = (step + blocks - 1) % S
            mbarrier.wait(v_full.index(s), ((step + blocks - 1) // S) & 1)
            out = warpgroup_mma(weights16, matrix(v_tiles.index(s), N, D), out, is_async=True)
            out = warpgroup_mma_wait(0, [out])
            mbarrier.arrive(v_empty.index(s))
        else:
            if D < 256:
                mbarrier.arrive(q_empty)
        step += blocks
        if PARTIAL:
            total = gl.convert_layout(gl.sum(total, 1), ROWS)
        divisor = gl.where(total > 0, total, 1.0)
        out = out * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT))[:, None]
        tma.store_wait(0)  # the tile before has left shared memory
        wait_for_all()
        matrix(o_tiles.index(GROUP), 64, D).store(out.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [batch, head, first, 0], o_tiles.index(GROUP))
        lse = gl.where(total > 0, (maximum * scale + gl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        rows = first + gl.arange(0, 64, layout=ROWS)
        gl.store(lse_ptr + (batch * heads + head).to(gl.int64) * queries + rows, lse, mask=rows < queries)
        if D == 256:  # the output lies where the queries were
            tma.store_wait(0)
            mbarrier.arrive(q_empty)
    tma.store_wait(0)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """``COUNT`` barriers that complete a phase when ``ARRIVALS`` have arrived."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), ARRIVALS)
    return made


@gluon.jit(do_not_specialize=["width", "heads", "group", "queries", "keys"])
def hopper_forward_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, tiles_ptr, counts_ptr, scale, width, heads, group,
                          queries, keys, G: gl.constexpr, N: gl.constexpr, S: gl.constexpr, CAUSAL: gl.constexpr,
                          PINGPONG: gl.constexpr, LATE: gl.constexpr, PARTIAL: gl.constexpr,
                          REGISTERS: gl.constexpr):  # fmt: skip
    """Shared memory and barriers, then every warp to its job. ``scale`` has log2(e) folded in."""
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[3]
    q_tiles = gl.allocate_shared_memory(dtype, [G, 1, 1, 64, D], q_desc.layout)
    if D == 256:
        o_tiles = q_tiles
    else:
        o_tiles = gl.allocate_shared_memory(dtype, [G, 1, 1, 64, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [S, 1, 1, N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [S, 1, 1, N, D], v_desc.layout)
    queue = (q_tiles, barriers(1, 1).index(0), barriers(1, G).index(0))
    ring = (k_tiles, v_tiles, barriers(S, 1), barriers(S, G), barriers(S, 1), barriers(S, G))
    turns = barriers(G, 1)
    fence_async_shared()
    work = (tiles_ptr, counts_ptr, width)
    sizes = (heads, group, queries, keys)
    if G == 2:
        gl.warp_specialize([
            (consumer, (gl.constexpr(0), o_desc, lse_ptr, scale, work, sizes, queue, ring, turns, o_tiles,
                        G, N, S, CAUSAL, PINGPONG, LATE, PARTIAL)),
            (consumer, (gl.constexpr(1), o_desc, lse_ptr, scale, work, sizes, queue, ring, turns, o_tiles,
                        G, N, S, CAUSAL, PINGPONG, LATE, PARTIAL)),
            (producer, ((q_desc, k_desc, v_desc), work, sizes, queue, ring, G, N, S, CAUSAL)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (gl.constexpr(0), o_desc, lse_ptr, scale, work, sizes, queue, ring, turns, o_tiles,
                        G, N, S, CAUSAL, PINGPONG, LATE, PARTIAL)),
            (consumer, (gl.constexpr(1), o_desc, lse_ptr, scale, work, sizes, queue, ring, turns, o_tiles,
                        G, N, S, CAUSAL, PINGPONG, LATE, PARTIAL)),
            (consumer, (gl.constexpr(2), o_desc, lse_ptr, scale, work, sizes, queue, ring, turns, o_tiles,
                        G, N, S, CAUSAL, PINGPONG, LATE, PARTIAL)),
            (producer, ((q_desc, k_desc, v_desc), work, sizes, queue, ring, G, N, S, CAUSAL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
