"""A backward kernel with another issue order, to be measured against :mod:`.backward`. Attention does not use it.

It has run in the emulator only, never on a GPU, and what it gains is simulated. Tiles, partitions and results are those
of :mod:`.backward`. What differs are compile-time constants, so that each change can be measured alone:

* The end of the keys is masked only where the last tile is not full (``RAGGED``), and never under a causal mask, which
  hides what lies beyond.
* ``LATE``: the accumulators of S and dP start empty, and what belongs to a query is subtracted from the finished
  products. Start values that are written while another product is under way make the compiler wait for that one.
* ``LINEAR``: dQ goes to shared memory, and is summed in global memory, in the order in which the threads hold it. No
  two threads meet in a bank. The kernel that comes after puts dQ into order.
* ``REORDERED``: dQ is issued before dK, and is sent while dK is computed. Each warpgroup tells the other on a barrier
  of its own that its dS is there. Two such barriers take turns, as dS does: with one, a warpgroup could complete the
  next phase before the other has waited for this one, which would then wait for ever. Nobody writes dS before the
  products that read it are done, because both warpgroups pass the barriers of the step in between. One barrier says
  that the queries and the output gradients of a step are not needed any more.
* ``RED``: the threads add dQ to global memory from their registers, four numbers at a time.
* ``RELEASE``: that dS of a step is there also says that nobody needs the queries and output gradients of the step
  before any more. They are brought later so, but two barriers of all threads fewer are left in a step.
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

from .backward import query_tile, query_tiles, send, start
from .parts import add_to_global, barriers, by_eights, exp2, matrix, wait_for_all

LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def producer(descriptors, sizes, kept, ring, ds_ready, M: gl.constexpr, N: gl.constexpr, S: gl.constexpr,
             CAUSAL: gl.constexpr, RELEASE: gl.constexpr):  # fmt: skip
    """One warp: keys and values once, then queries, output gradients and their row terms of every head of the group.

    With ``RELEASE`` there are at most three stages: with four, a barrier could be a phase further than is waited for.
    At the end it stores dK and dV, so that the warpgroups need no registers for the descriptors.
    """
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc = descriptors
    heads, group, _queries, _keys = sizes
    k_tiles, v_tiles, dk_tiles, dv_tiles, kv_full, done = kept
    q_tiles, do_tiles, lse_rows, delta_rows, q_full, q_empty, do_full, do_empty = ring
    D: gl.constexpr = q_desc.block_shape[3]
    kv_head = gl.program_id(1)
    batch = gl.program_id(2)
    first, tiles = query_tiles(sizes, N, M, CAUSAL)
    mbarrier.expect(kv_full, 2 * N * D * 2)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, gl.program_id(0) * N, 0], kv_full, k_tiles.index(0))
    tma.async_copy_global_to_shared(v_desc, [batch, kv_head, gl.program_id(0) * N, 0], kv_full, v_tiles.index(0))
    for step in range(tiles * group):
        head, row = query_tile(step, kv_head, group, first, tiles, M)
        s = step % S
        parity = ((step // S) & 1) ^ 1
        if RELEASE:
            after = step - S + 1  # the step behind the one that had this place
            if after > 0:
                mbarrier.wait(ds_ready[0].index(after & 1), (after >> 1) & 1)
                mbarrier.wait(ds_ready[1].index(after & 1), (after >> 1) & 1)
        else:
            mbarrier.wait(q_empty.index(s), parity)
        mbarrier.expect(q_full.index(s), M * D * 2 + M * 4)
        tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], q_full.index(s), q_tiles.index(s))
        tma.async_copy_global_to_shared(lse_desc, [batch * heads + head, row], q_full.index(s), lse_rows.index(s))
        if not RELEASE:
            mbarrier.wait(do_empty.index(s), parity)
        mbarrier.expect(do_full.index(s), M * D * 2 + M * 4)
        tma.async_copy_global_to_shared(do_desc, [batch, head, row, 0], do_full.index(s), do_tiles.index(s))
        tma.async_copy_global_to_shared(delta_desc, [batch * heads + head, row], do_full.index(s), delta_rows.index(s))
    mbarrier.wait(done, 0)
    for i in gl.static_range(2):
        at = [batch, kv_head, gl.program_id(0) * N + 64 * i, 0]
        tma.async_copy_shared_to_global(dk_desc, at, dk_tiles.index(i))
        tma.async_copy_shared_to_global(dv_desc, at, dv_tiles.index(i))
    tma.store_wait(0)


@gluon.jit
def first_tile(own, sizes, first, M: gl.constexpr):
    """A program's first tile of queries: its number among those of all heads of the batch, and its lead.

    The lead of a tile is how far its first query sees beyond the first of this warpgroup's keys, ``own``. It takes the
    place of a row in all that follows, because fewer registers are needed so.
    """
    heads, group, queries, keys = sizes
    number = (gl.program_id(2) * heads + gl.program_id(1) * group) * gl.cdiv(queries, M) + first
    return number, first * M + keys - queries - own


@gluon.jit
def next_tile(number, lead, first, first_lead, end, M: gl.constexpr, CAUSAL: gl.constexpr):
    """Number and lead of the tile after that: behind a head's last, which ends at ``end``, the next head's first."""
    number += 1
    lead += M
    if CAUSAL:  # noqa: SIM102  (a constexpr is decided while compiling)
        if lead >= end:
            lead = first_lead
            number += first
    return number, lead


@gluon.jit
def of_each_query(row, M: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile (1, M) of float32 numbers in shared memory as (1, M) in registers, one for each column of ``LAYOUT``."""
    flat = row._reinterpret(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return flat.load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def keys_by_queries(a, b, row, M: gl.constexpr, LAYOUT: gl.constexpr, LATE: gl.constexpr):
    """Issue the product (64, D) by (D, M) that S and dP are made of; without ``LATE`` it starts from ``row``."""
    if LATE:
        result = warpgroup_mma(a, b, gl.zeros([64, M], gl.float32, LAYOUT), use_acc=False, is_async=True)
    else:
        result = warpgroup_mma(a, b, start(row, M, LAYOUT, 64), is_async=True)
    return result


@gluon.jit
def scores_and_dp(k, v, q, do, ring, step, M: gl.constexpr, S: gl.constexpr, LAYOUT: gl.constexpr,
                  LATE: gl.constexpr):  # fmt: skip
    """Issue both products (64, M) of a step, each as soon as its operand is there."""
    _q_tiles, _do_tiles, lse_rows, delta_rows, q_full, _q_empty, do_full, _do_empty = ring
    s = step % S
    parity = (step // S) & 1
    mbarrier.wait(q_full.index(s), parity)
    scores = keys_by_queries(k, q.permute((1, 0)), lse_rows.index(s), M, LAYOUT, LATE)
    mbarrier.wait(do_full.index(s), parity)
    dp = keys_by_queries(v, do.permute((1, 0)), delta_rows.index(s), M, LAYOUT, LATE)
    return scores, dp


@gluon.jit
def masked(scores, lead, own, keys, LAYOUT: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr):
    """-inf where a query of a tile with this lead must not see a key from ``own`` on; scores are keys by queries.

    A causal mask hides the keys beyond the last one from every query; the weights of rows that are no query are 0.
    """
    ROWS: gl.constexpr = scores.shape[0]
    if CAUSAL:  # noqa: SIM102  (a constexpr is decided while compiling)
        if lead < ROWS - 1:
            eights, key, eight, place = by_eights(scores)
            eights = gl.where(key - lead - place <= 8 * eight, eights, float("-inf"))
            scores = gl.convert_layout(gl.reshape(eights, scores.shape), LAYOUT)
    if RAGGED:  # noqa: SIM102  (a constexpr is decided while compiling)
        if own + ROWS > keys:
            key = own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
            scores = gl.where((key < keys)[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def weights_of(scores, row, scale_log2, M: gl.constexpr, LAYOUT: gl.constexpr, LATE: gl.constexpr):
    """2 to the scores; with ``LATE`` what is in ``row`` is added before."""
    scores = scores * scale_log2
    if LATE:
        scores = scores + of_each_query(row, M, LAYOUT)
    return exp2(scores)


@gluon.jit
def in_accumulator_order(dq):
    """A part (64, 64) of dQ as (4096,), in the order in which the threads hold it: four numbers of each thread in turn.

    Thread 32 w + 4 r + c has rows 16 w + r and 16 w + 8 + r, and of each eight of columns 2 c and 2 c + 1. So nothing
    moves here, and what neighbouring threads store lies next to each other.
    """
    parts = gl.reshape(dq, [4, 2, 8, 8, 4, 2])  # w, which of the rows, r, eight, c, which of the columns
    return gl.reshape(gl.permute(parts, (3, 0, 2, 4, 1, 5)), [4096])


@gluon.jit
def send_in_order(dq, sums, dq_tile, part):
    """Part ``part`` of dQ (64, 64) to shared memory, from where TMA adds it to the sums (parts * 128, 32)."""
    dq_tile.store(gl.reshape(in_accumulator_order(dq), [128, 32]))
    fence_async_shared()
    add_to_global(sums, [part * 128, 0], dq_tile)


@gluon.jit
def add_from_registers(dq, sums, part):
    """Every thread adds what it has of part ``part`` of dQ (64, 64) to the sums (parts, 4096)."""
    flat = in_accumulator_order(dq)
    at = gl.arange(0, 4096, layout=flat.type.layout)
    gl.atomic_add(sums + part.to(gl.int64) * 4096 + at, flat, sem="relaxed")


@gluon.jit
def dq_product(GROUP: gl.constexpr, ds, k_all, M: gl.constexpr, PART: gl.constexpr):
    """Issue this warpgroup's part (64, PART) of dQ: its columns where a tile has 64 queries, and else its rows."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    if M == 64:
        left, right = ds, k_all.slice(GROUP * PART, PART, dim=1)
    else:
        left, right = ds.slice(GROUP * 64, 64, dim=1), k_all
    return warpgroup_mma(left.permute((1, 0)), right, gl.zeros([64, PART], gl.float32, LAYOUT), use_acc=False,
                         is_async=True)  # fmt: skip


@gluon.jit
def products_as_before(GROUP: gl.constexpr, step, ds, ds_now, k_all, q, dk, dv, sums, shared, empty, part,
                       places, M: gl.constexpr, PART: gl.constexpr, LINEAR: gl.constexpr):  # fmt: skip
    """dK, then dQ, with dS of this step; the order of :mod:`.backward`. Waits for all, dV included."""
    _ds_tile, dq_tiles, ds_ready, ds_empty = shared
    q_empty, do_empty = empty
    mbarrier.wait(ds_empty.index(step & 1), ((step >> 1) & 1) ^ 1)
    ds_now.slice(GROUP * 64, 64).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_ready[GROUP].index(step & 1))
    dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2)), q, dk, is_async=True)
    mbarrier.wait(ds_ready[1 - GROUP].index(step & 1), (step >> 1) & 1)
    dq = dq_product(GROUP, ds_now, k_all, M, PART)
    dv = warpgroup_mma_wait(2, [dv])
    mbarrier.arrive(do_empty)
    dk = warpgroup_mma_wait(1, [dk])
    mbarrier.arrive(q_empty)
    dq = warpgroup_mma_wait(0, [dq])
    mbarrier.arrive(ds_empty.index(step & 1))
    if LINEAR:
        tma.store_wait(0)  # the part before has left shared memory
        wait_for_all()
        send_in_order(dq, sums, dq_tiles.index(GROUP), part)
    else:
        group, first, tiles = places
        head, row = query_tile(step, gl.program_id(1), group, first, tiles, M)
        send(GROUP, dq, sums, dq_tiles, gl.program_id(2), head, row, M)
    return dk, dv


@gluon.jit
def products_reordered(GROUP: gl.constexpr, step, ds, ds_now, k_all, q, dk, dv, sums, shared, empty, part,
                       M: gl.constexpr, PART: gl.constexpr, RED: gl.constexpr, RELEASE: gl.constexpr):  # fmt: skip
    """dQ, then dK, during which dQ is sent. dS of this step has been stored. Waits for all, dV included."""
    _ds_tile, dq_tiles, ds_ready, _ds_empty = shared
    fence_async_shared()
    if not RED:
        tma.store_wait(0)  # the part before has left shared memory, and all threads know when they have arrived
    mbarrier.arrive(ds_ready[GROUP].index(step & 1))
    mbarrier.wait(ds_ready[1 - GROUP].index(step & 1), (step >> 1) & 1)
    dq = dq_product(GROUP, ds_now, k_all, M, PART)
    dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2)), q, dk, is_async=True)
    dv, dq = warpgroup_mma_wait(1, [dv, dq])
    if RED:
        add_from_registers(dq, sums, part)
    else:
        send_in_order(dq, sums, dq_tiles.index(GROUP), part)
    dk = warpgroup_mma_wait(0, [dk])
    if not RELEASE:
        mbarrier.arrive(empty[0])
    return dk, dv


@gluon.jit
def consumer(GROUP: gl.constexpr, sums, scale_log2, sizes, kept, ring, shared, M: gl.constexpr, N: gl.constexpr,
             S: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, LATE: gl.constexpr,
             LINEAR: gl.constexpr, REORDERED: gl.constexpr, RED: gl.constexpr, RELEASE: gl.constexpr,
             EARLY: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 keys."""
    _heads, group, _queries, keys = sizes
    k_tiles, v_tiles, dk_tiles, dv_tiles, kv_full, done = kept
    q_tiles, do_tiles, lse_rows, delta_rows, _q_full, q_empty, _do_full, do_empty = ring
    D: gl.constexpr = k_tiles.shape[4]
    PART: gl.constexpr = D * M // 128  # columns of this warpgroup's part of dQ
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    own = gl.program_id(0) * N + GROUP * 64
    first, tiles = query_tiles(sizes, N, M, CAUSAL)
    steps = tiles * group
    number, first_lead = first_tile(own, sizes, first, M)
    lead = first_lead
    dk = gl.zeros([64, D], gl.float32, OUT)
    dv = gl.zeros([64, D], gl.float32, OUT)
    mbarrier.wait(kv_full, 0)
    for step in range(steps):
        s = step % S
        q = matrix(q_tiles.index(s), M, D)
        do = matrix(do_tiles.index(s), M, D)
        k_all = matrix(k_tiles.index(step >> 30), N, D)
        k = k_all.slice(GROUP * 64, 64)
        v = matrix(v_tiles.index(step >> 30), N, D).slice(GROUP * 64, 64)
        scores, dp = scores_and_dp(k, v, q, do, ring, step, M, S, SCORES, LATE)
        scores = masked(warpgroup_mma_wait(1, [scores]), lead, own, keys, SCORES, CAUSAL, RAGGED)
        weights = weights_of(scores, lse_rows.index(s), scale_log2, M, SCORES, LATE)
        weights16 = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, OUT, 2))
        if EARLY:
            dv = warpgroup_mma(weights16, do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, [dp])
        else:
            dp = warpgroup_mma_wait(0, [dp])
        if LATE:
            dp = dp + of_each_query(delta_rows.index(s), M, SCORES)
        ds = (weights * dp).to(q.dtype)
        ds_now = shared[0].index(step & 1)
        if REORDERED:
            ds_now.slice(GROUP * 64, 64).store(ds)
        if not EARLY:
            dv = warpgroup_mma(weights16, do, dv, is_async=True)
        empty = (q_empty.index(s), do_empty.index(s))
        part = 2 * number + GROUP
        if REORDERED:
            dk, dv = products_reordered(GROUP, step, ds, ds_now, k_all, q, dk, dv, sums, shared, empty, part,
                                        M, PART, RED, RELEASE)  # fmt: skip
        else:
            dk, dv = products_as_before(GROUP, step, ds, ds_now, k_all, q, dk, dv, sums, shared, empty, part,
                                        (group, first, tiles), M, PART, LINEAR)  # fmt: skip
        number, lead = next_tile(number, lead, first, first_lead, keys - own, M, CAUSAL)
    tma.store_wait(0)
    # The keys and values are not needed any more; their place takes dK and dV, once both warpgroups are there.
    mbarrier.arrive(shared[2][GROUP].index(steps & 1))
    mbarrier.wait(shared[2][1 - GROUP].index(steps & 1), (steps >> 1) & 1)
    matrix(dk_tiles.index(GROUP), 64, D).store((dk * (scale_log2 * LN_2)).to(q_tiles.dtype))
    matrix(dv_tiles.index(GROUP), 64, D).store(dv.to(q_tiles.dtype))
    fence_async_shared()
    mbarrier.arrive(done)


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def reordered_backward_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, sums, dk_desc, dv_desc, scale_log2,
                              heads, group, queries, keys, S: gl.constexpr, CAUSAL: gl.constexpr,
                              RAGGED: gl.constexpr, LATE: gl.constexpr, LINEAR: gl.constexpr, REORDERED: gl.constexpr,
                              RED: gl.constexpr, RELEASE: gl.constexpr, EARLY: gl.constexpr,
                              REGISTERS: gl.constexpr):  # fmt: skip
    """Shared memory and barriers, then every warp to its job. Grid: tiles of keys, key heads, batch.

    ``sums`` is a descriptor of what dQ is summed in, with ``RED`` a pointer to it.
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
    ds_tile = gl.allocate_shared_memory(dtype, [2, N, M], gl.NVMMASharedLayout(128, 16, 2))
    if RED:
        dq_tiles = ds_tile  # not used
    elif LINEAR:
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 128, 32], sums.layout)
    else:
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, D * M // 128], sums.layout)
    q_empty = barriers(S, 2)
    if REORDERED:
        do_empty = q_empty
        ds_ready = (barriers(2, 1), barriers(2, 1))
    else:
        do_empty = barriers(S, 2)
        of_both = barriers(2, 2)
        ds_ready = (of_both, of_both)
    dk_tiles = k_tiles._reinterpret(dtype, [2, 1, 1, 64, D], dk_desc.layout)  # when keys and values are not needed
    dv_tiles = v_tiles._reinterpret(dtype, [2, 1, 1, 64, D], dv_desc.layout)
    kept = (k_tiles, v_tiles, dk_tiles, dv_tiles, barriers(1, 1).index(0), barriers(1, 2).index(0))
    ring = (q_tiles, do_tiles, lse_rows, delta_rows, barriers(S, 1), q_empty, barriers(S, 1), do_empty)
    shared = (ds_tile, dq_tiles, ds_ready, barriers(2, 2))
    fence_async_shared()
    sizes = (heads, group, queries, keys)
    descriptors = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc)
    gl.warp_specialize([
        (consumer, (gl.constexpr(0), sums, scale_log2, sizes, kept, ring, shared, M, N, S, CAUSAL, RAGGED, LATE, LINEAR,
                    REORDERED, RED, RELEASE, EARLY)),
        (consumer, (gl.constexpr(1), sums, scale_log2, sizes, kept, ring, shared, M, N, S, CAUSAL, RAGGED, LATE, LINEAR,
                    REORDERED, RED, RELEASE, EARLY)),
        (producer, (descriptors, sizes, kept, ring, ds_ready, M, N, S, CAUSAL, RELEASE)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
