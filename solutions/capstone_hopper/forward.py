"""The forward kernel: one producer warp, two or three consumer warpgroups, and a list of tiles for each program.

A consumer warpgroup has 64 queries of a tile and walks over the keys from the last to the first. While the tensor cores
compute the scores of the next keys and the output of the last ones, it exponentiates; what it waits for is in barriers:

- ``k_full[s]``, ``v_full[s]``: TMA has filled stage s (it counts the bytes);
- ``k_empty[s]``, ``v_empty[s]``: every consumer has read stage s;
- ``q_full[b]``, ``q_empty[b]``: the same for the queries of a tile. Of two sets, one may be filled while the other is
  worked on; the output of a tile then goes where its queries were. With one set it has a place of its own, which at a
  head_dim of 256 is half as wide;
- ``order[g]``: warpgroup g may issue its products.

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

from .parts import barriers, matrix, wait_for_all
from .softmax import apply_mask, online_softmax, rescaled


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
    """One warp: asks TMA for what comes next, whenever there is room."""
    q_desc, k_desc, v_desc = descriptors
    tiles_ptr, counts_ptr, width = work
    q_tiles, _o_tiles, q_full, q_empty = queue
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    D: gl.constexpr = q_desc.block_shape[3]
    B: gl.constexpr = q_tiles.shape[0] // G
    mine = tiles_ptr + gl.program_id(0) * width
    step = 0
    for turn in range(gl.load(counts_ptr + gl.program_id(0))):
        batch, head, first, blocks = place(gl.load(mine + turn), sizes, 64 * G, N, CAUSAL)
        kv_head = head // sizes[1]
        b = turn % B
        mbarrier.wait(q_empty.index(b), ((turn // B) & 1) ^ 1)
        mbarrier.expect(q_full.index(b), G * 64 * D * 2)
        for g in gl.static_range(G):
            tma.async_copy_global_to_shared(q_desc, [batch, head, first + g * 64, 0], q_full.index(b),
                                            q_tiles.index(b * G + g))  # fmt: skip
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
def advance(step, state, q, ring, order, parity, block, whole, row, keys, scale, GROUP: gl.constexpr, G: gl.constexpr,
            N: gl.constexpr, S: gl.constexpr, MASKED: gl.constexpr, PINGPONG: gl.constexpr,
            RESCALE_AFTER_MMA: gl.constexpr, PARTIAL: gl.constexpr, SLACK: gl.constexpr):  # fmt: skip
    """Scores of tile ``step`` and output of tile ``step - 1`` run side by side; then the softmax of the former.

    ``block`` counts the tiles of keys from the first on. With ``MASKED`` the causal mask hides some of its keys.
    """
    out, weights16, shrink, maximum, total = state
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    D: gl.constexpr = out.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = out.type.layout
    s = step % S
    last = (step - 1) % S
    mbarrier.wait(k_full.index(s), (step // S) & 1)
    if PINGPONG:
        mbarrier.wait(order.index(GROUP), parity)
    scores = warpgroup_mma(q, matrix(k_tiles.index(s), N, D).permute((1, 0)),
                           gl.zeros([64, N], gl.float32, SCORES), use_acc=False, is_async=True)  # fmt: skip
    if RESCALE_AFTER_MMA:
        out = rescaled(out, shrink)
    mbarrier.wait(v_full.index(last), ((step - 1) // S) & 1)
    out = warpgroup_mma(weights16, matrix(v_tiles.index(last), N, D), out, is_async=True)
    if PINGPONG:
        mbarrier.arrive(order.index((GROUP + 1) % G))
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(k_empty.index(s))
    if MASKED:  # noqa: SIM102  (a constexpr is decided while compiling)
        if (block + 1) * N > whole:
            scores = apply_mask(scores, block * N, row, keys, SCORES, True)
    weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale, PARTIAL, SLACK)
    out = warpgroup_mma_wait(0, [out])
    mbarrier.arrive(v_empty.index(last))
    if not RESCALE_AFTER_MMA:
        out = rescaled(out, shrink)
    weights16 = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, OUT, 2))
    return out, weights16, shrink, maximum, total


@gluon.jit
def hand_back(turn, q_empty, B: gl.constexpr):
    """Where outputs share the place of queries: the one before has left it, and queries may come."""
    if B == 2:  # noqa: SIM102  (a constexpr is decided while compiling)
        if turn > 0:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((turn - 1) % B))


@gluon.jit
def epilogue_store(out, o_desc, o_tile, batch, head, first):
    """This warpgroup's 64 rows of output: to shared memory, from where TMA takes them; perhaps by halves.

    Before a place is written, what was there has left it.
    """
    COLUMNS: gl.constexpr = o_desc.block_shape[3]
    if out.shape[1] == COLUMNS:
        tma.store_wait(0)
        wait_for_all()
        matrix(o_tile, 64, COLUMNS).store(out.to(o_tile.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [batch, head, first, 0], o_tile)
    else:
        halves = gl.split(gl.permute(gl.reshape(out.to(o_tile.dtype), [64, 2, COLUMNS]), (0, 2, 1)))
        for side in gl.static_range(2):
            tma.store_wait(0)
            wait_for_all()
            matrix(o_tile, 64, COLUMNS).store(halves[side])
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [batch, head, first, side * COLUMNS], o_tile)


@gluon.jit
def consumer(GROUP: gl.constexpr, o_desc, lse_ptr, scale, work, sizes, queue, ring, order, G: gl.constexpr,
             N: gl.constexpr, S: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, PINGPONG: gl.constexpr,
             RESCALE_AFTER_MMA: gl.constexpr, PARTIAL: gl.constexpr, SLACK: gl.constexpr,
             MASK_APART: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 queries of each tile."""
    tiles_ptr, counts_ptr, width = work
    heads, _group, queries, keys = sizes
    q_tiles, o_tiles, q_full, q_empty = queue
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    D: gl.constexpr = q_tiles.shape[4]
    B: gl.constexpr = q_tiles.shape[0] // G
    dtype: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    #: Eight columns of a row, as a warpgroup's result holds them: two neighbours a thread.
    EIGHT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8])  # fmt: skip
    mine = tiles_ptr + gl.program_id(0) * width
    parity = 1 if GROUP == 0 else 0
    step = 0
    tile = gl.load(mine)
    for turn in range(gl.load(counts_ptr + gl.program_id(0))):
        _batch, _head, first, blocks = place(tile, sizes, 64 * G, N, CAUSAL)
        tile = gl.load(mine + turn + 1)
        b = turn % B
        first += 64 * GROUP
        q = matrix(q_tiles.index(b * G + GROUP), 64, D)
        row = first + keys - queries
        out = gl.zeros([64, D], gl.float32, OUT)
        maximum = gl.full([64], float("-inf"), gl.float32, ROWS)
        if PARTIAL:
            total = gl.zeros([64, 8], gl.float32, EIGHT)
        else:
            total = gl.zeros([64], gl.float32, ROWS)
        whole = keys  # how many, from the first on, every query sees
        needed = blocks
        if CAUSAL:
            whole = row + 1
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
                    mbarrier.wait(order.index(GROUP), parity)
                    parity = parity ^ 1
                    mbarrier.arrive(order.index((GROUP + 1) % G))
        mbarrier.wait(q_full.index(b), (turn // B) & 1)
        if needed > 0:
            s = (step + skipped) % S
            mbarrier.wait(k_full.index(s), ((step + skipped) // S) & 1)
            scores = warpgroup_mma(q, matrix(k_tiles.index(s), N, D).permute((1, 0)),
                                   gl.zeros([64, N], gl.float32, SCORES), use_acc=False, is_async=True)  # fmt: skip
            hand_back(turn, q_empty, B)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(k_empty.index(s))
            if MASKED:  # noqa: SIM102
                if needed * N > whole:
                    scores = apply_mask(scores, (needed - 1) * N, row, keys, SCORES, CAUSAL)
            weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale, PARTIAL, SLACK)
            weights16 = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OUT, 2))
            start = skipped + 1
            if CAUSAL and MASK_APART:  # noqa: SIM102
                if (start < blocks) & ((blocks - start) * N > whole):
                    out, weights16, shrink, maximum, total = advance(
                        step + start, (out, weights16, shrink, maximum, total), q, ring, order, parity,
                        blocks - 1 - start, whole, row, keys, scale, GROUP, G, N, S, True, PINGPONG, RESCALE_AFTER_MMA,
                        PARTIAL, SLACK)  # fmt: skip
                    parity = parity ^ 1
                    start += 1
            for i in range(start, blocks):
                out, weights16, shrink, maximum, total = advance(
                    step + i, (out, weights16, shrink, maximum, total), q, ring, order, parity, blocks - 1 - i, whole,
                    row, keys, scale, GROUP, G, N, S, CAUSAL and not MASK_APART, PINGPONG, RESCALE_AFTER_MMA, PARTIAL,
                    SLACK)  # fmt: skip
                parity = parity ^ 1
            if B == 1:  # the queries are not needed any more
                mbarrier.arrive(q_empty.index(0))
            if RESCALE_AFTER_MMA:
                out = rescaled(out, shrink)
            s = (step + blocks - 1) % S
            mbarrier.wait(v_full.index(s), ((step + blocks - 1) // S) & 1)
            out = warpgroup_mma(weights16, matrix(v_tiles.index(s), N, D), out, is_async=True)
            this = gl.load(mine + turn)
            out = warpgroup_mma_wait(0, [out])
            mbarrier.arrive(v_empty.index(s))
        else:
            this = gl.load(mine + turn)
            hand_back(turn, q_empty, B)
            if B == 1:
                mbarrier.arrive(q_empty.index(0))
        step += blocks
        if PARTIAL:
            total = gl.convert_layout(gl.sum(total, 1), ROWS)
        divisor = gl.where(total > 0, total, 1.0)
        out = out * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT))[:, None]
        # Read again, rather than kept in registers through the loop.
        batch, head, first, _blocks = place(this, sizes, 64 * G, N, CAUSAL)
        first += 64 * GROUP
        epilogue_store(out, o_desc, o_tiles.index(b * G + GROUP), batch, head, first)
        lse = gl.where(total > 0, (maximum * scale + gl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        rows = first + gl.arange(0, 64, layout=ROWS)
        gl.store(lse_ptr + (batch * heads + head).to(gl.int64) * queries + rows, lse, mask=rows < queries)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["width", "heads", "group", "queries", "keys"])
def hopper_forward_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, tiles_ptr, counts_ptr, scale, width, heads, group,
                          queries, keys, G: gl.constexpr, N: gl.constexpr, S: gl.constexpr, CAUSAL: gl.constexpr,
                          MASKED: gl.constexpr, PINGPONG: gl.constexpr, RESCALE_AFTER_MMA: gl.constexpr,
                          PARTIAL: gl.constexpr, SLACK: gl.constexpr, MASK_APART: gl.constexpr, B: gl.constexpr,
                          REGISTERS: gl.constexpr):  # fmt: skip
    """Shared memory and barriers, then every warp to its job. ``scale`` has log2(e) folded in.

    ``SLACK`` is that of :func:`.softmax.online_softmax`. ``MASKED`` says whether any tile has keys to hide. Where none
    has, code for it would still cost registers and time. ``MASK_APART`` takes that code out of the loop: the causal
    mask cuts the last tile of a warpgroup and at most one more.
    """
    dtype: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_shape[3]
    q_tiles = gl.allocate_shared_memory(dtype, [B * G, 1, 1, 64, D], q_desc.layout)
    if B == 2:
        o_tiles = q_tiles
    else:
        o_tiles = gl.allocate_shared_memory(dtype, [G, 1, 1, 64, o_desc.block_shape[3]], o_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [S, 1, 1, N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [S, 1, 1, N, D], v_desc.layout)
    queue = (q_tiles, o_tiles, barriers(B, 1), barriers(B, G))
    ring = (k_tiles, v_tiles, barriers(S, 1), barriers(S, G), barriers(S, 1), barriers(S, G))
    order = barriers(G, 1)
    fence_async_shared()
    work = (tiles_ptr, counts_ptr, width)
    sizes = (heads, group, queries, keys)
    if G == 2:
        gl.warp_specialize([
            (consumer, (gl.constexpr(0), o_desc, lse_ptr, scale, work, sizes, queue, ring, order,
                        G, N, S, CAUSAL, MASKED, PINGPONG, RESCALE_AFTER_MMA, PARTIAL, SLACK, MASK_APART)),
            (consumer, (gl.constexpr(1), o_desc, lse_ptr, scale, work, sizes, queue, ring, order,
                        G, N, S, CAUSAL, MASKED, PINGPONG, RESCALE_AFTER_MMA, PARTIAL, SLACK, MASK_APART)),
            (producer, ((q_desc, k_desc, v_desc), work, sizes, queue, ring, G, N, S, CAUSAL)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (gl.constexpr(0), o_desc, lse_ptr, scale, work, sizes, queue, ring, order,
                        G, N, S, CAUSAL, MASKED, PINGPONG, RESCALE_AFTER_MMA, PARTIAL, SLACK, MASK_APART)),
            (consumer, (gl.constexpr(1), o_desc, lse_ptr, scale, work, sizes, queue, ring, order,
                        G, N, S, CAUSAL, MASKED, PINGPONG, RESCALE_AFTER_MMA, PARTIAL, SLACK, MASK_APART)),
            (consumer, (gl.constexpr(2), o_desc, lse_ptr, scale, work, sizes, queue, ring, order,
                        G, N, S, CAUSAL, MASKED, PINGPONG, RESCALE_AFTER_MMA, PARTIAL, SLACK, MASK_APART)),
            (producer, ((q_desc, k_desc, v_desc), work, sizes, queue, ring, G, N, S, CAUSAL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
