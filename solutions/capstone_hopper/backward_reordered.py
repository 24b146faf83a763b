"""A faster backward kernel than :mod:`.backward`'s, and the steps that lead to it. Attention uses the last two steps.

Tiles, warpgroups and results are those of :mod:`.backward`; the producer stores dK and dV, too. Most of what differs
are compile-time constants, so that each change can be measured alone:

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
* ``LAGGED``: dQ is computed one step late (:mod:`.backward_lagged`).
* ``ORDERED``: the programs that add to the same part of dQ take turns (:mod:`.backward_ordered`).

In which order programs start is the launch's choice (:func:`.backward_pieces.place`).
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

from .backward import query_tile, send
from .backward_lagged import lagged_consumer
from .backward_ordered import turn_ender, turn_taker
from .backward_pieces import (
    add_from_registers,
    dq_product,
    first_tile,
    hand_over,
    in_accumulator_order,
    masked,
    next_tile,
    of_each_query,
    place,
    producer,
    query_tiles,
    scores_and_dp,
    weights_of,
)
from .parts import add_to_global, barriers, matrix, wait_for_all


@gluon.jit
def send_in_order(dq, sums, dq_tile, part):
    """Part ``part`` of dQ (64, 64) to shared memory, from where TMA adds it to the sums (parts * 128, 32)."""
    dq_tile.store(gl.reshape(in_accumulator_order(dq), [128, 32]))
    fence_async_shared()
    add_to_global(sums, [part * 128, 0], dq_tile)


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
        group, first, tiles, kv_head, batch = places
        head, row = query_tile(step, kv_head, group, first, tiles, M)
        send(GROUP, dq, sums, dq_tiles, batch, head, row, M)
    return dk, dv


@gluon.jit
def products_reordered(GROUP: gl.constexpr, step, ds, ds_now, k_all, q, dk, dv, sums, shared, empty, part,
                       M: gl.constexpr, PART: gl.constexpr, RED: gl.constexpr):  # fmt: skip
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
    mbarrier.arrive(empty[0])
    return dk, dv


@gluon.jit
def consumer(GROUP: gl.constexpr, sums, scale_log2, sizes, kept, ring, shared, M: gl.constexpr, N: gl.constexpr,
             S: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, LATE: gl.constexpr,
             LINEAR: gl.constexpr, REORDERED: gl.constexpr, RED: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 keys."""
    heads, group, _queries, keys = sizes
    k_tiles, v_tiles, _dk_tiles, _dv_tiles, kv_full, _done = kept
    q_tiles, do_tiles, lse_rows, delta_rows, _q_full, q_empty, _do_full, do_empty = ring
    D: gl.constexpr = k_tiles.shape[4]
    PART: gl.constexpr = D * M // 128  # columns of this warpgroup's part of dQ
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    key_tile, kv_head, batch = place(heads, group)
    own = key_tile * N + GROUP * 64
    first, tiles = query_tiles(key_tile * N, sizes, N, M, CAUSAL)
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
                                        M, PART, RED)  # fmt: skip
        else:
            dk, dv = products_as_before(GROUP, step, ds, ds_now, k_all, q, dk, dv, sums, shared, empty, part,
                                        (group, first, tiles, kv_head, batch), M, PART, LINEAR)  # fmt: skip
        number, lead = next_tile(number, lead, first_lead, (1, keys - own, first), M, CAUSAL)
    tma.store_wait(0)
    hand_over(GROUP, dk, dv, scale_log2, kept, shared[2], steps & 1, (steps >> 1) & 1)


@gluon.jit
def memory_of_dq(sums, dtype: gl.constexpr, D: gl.constexpr, M: gl.constexpr, N: gl.constexpr, LINEAR: gl.constexpr,
                 REORDERED: gl.constexpr, RED: gl.constexpr, LAGGED: gl.constexpr, ORDERED: gl.constexpr):  # fmt: skip
    """Places for dS and dQ, the barriers that say that dS is there, and those of turns or of free places for dS."""
    PLACES: gl.constexpr = 3 if LAGGED else 2
    ds_tile = gl.allocate_shared_memory(dtype, [PLACES, N, M], gl.NVMMASharedLayout(128, 16, 2))
    if RED:
        dq_tiles = ds_tile  # not used
    elif LINEAR:
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 128, 32], sums.layout)
    else:
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, D * M // 128], sums.layout)
    if REORDERED:
        ds_ready = (barriers(PLACES, 1), barriers(PLACES, 1))
    else:
        of_both = barriers(2, 2)
        ds_ready = (of_both, of_both)
    return ds_tile, dq_tiles, ds_ready, barriers(2, 3 if ORDERED else 2)


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def reordered_backward_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, sums, turns, dk_desc, dv_desc,
                              scale_log2, heads, group, queries, keys, S: gl.constexpr, CAUSAL: gl.constexpr,
                              RAGGED: gl.constexpr, STEP: gl.constexpr, EARLY: gl.constexpr,
                              REGISTERS: gl.constexpr):  # fmt: skip
    """Shared memory and barriers, then every warp to its job. Grid: :func:`place`.

    ``STEP`` is one of :class:`.launch_reordered.Step`. ``sums`` is a descriptor of what dQ is summed in, with ``RED`` a
    pointer to it. ``turns`` are int32 counters, one for each part of dQ.
    """
    LATE: gl.constexpr = STEP >= 1
    LINEAR: gl.constexpr = STEP >= 2
    REORDERED: gl.constexpr = STEP >= 3
    RED: gl.constexpr = STEP >= 4
    LAGGED: gl.constexpr = STEP >= 5
    ORDERED: gl.constexpr = STEP >= 7
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
    shared = memory_of_dq(sums, dtype, D, M, N, LINEAR, REORDERED, RED, LAGGED, ORDERED)
    q_empty = barriers(S, 2)
    do_empty = q_empty
    if not REORDERED:
        do_empty = barriers(S, 2)
    dk_tiles = k_tiles._reinterpret(dtype, [2, 1, 1, 64, D], dk_desc.layout)  # when keys and values are not needed
    dv_tiles = v_tiles._reinterpret(dtype, [2, 1, 1, 64, D], dv_desc.layout)
    kept = (k_tiles, v_tiles, dk_tiles, dv_tiles, barriers(1, 1).index(0), barriers(1, 2).index(0))
    ring = (q_tiles, do_tiles, lse_rows, delta_rows, barriers(S, 1), q_empty, barriers(S, 1), do_empty)
    fence_async_shared()
    sizes = (heads, group, queries, keys)
    descriptors = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc)
    if ORDERED:
        gl.warp_specialize([
            (lagged_consumer, (gl.constexpr(0), sums, scale_log2, sizes, kept, ring, shared, M, N, S, CAUSAL, RAGGED,
                               EARLY, ORDERED)),
            (lagged_consumer, (gl.constexpr(1), sums, scale_log2, sizes, kept, ring, shared, M, N, S, CAUSAL, RAGGED,
                               EARLY, ORDERED)),
            (producer, (descriptors, sizes, kept, ring, M, N, S, CAUSAL, ORDERED and CAUSAL)),
            (turn_taker, (turns, sizes, shared[3], M, N, CAUSAL, 2)),
            (turn_ender, (gl.constexpr(0), turns, sizes, shared[3], shared[2][0], M, N, CAUSAL, 2)),
            (turn_ender, (gl.constexpr(1), turns, sizes, shared[3], shared[2][1], M, N, CAUSAL, 2)),
        ], [4, 1, 1, 1, 1], [REGISTERS, 24, 24, 24, 24])  # fmt: skip
    elif LAGGED:
        gl.warp_specialize([
            (lagged_consumer, (gl.constexpr(0), sums, scale_log2, sizes, kept, ring, shared, M, N, S, CAUSAL, RAGGED,
                               EARLY, ORDERED)),
            (lagged_consumer, (gl.constexpr(1), sums, scale_log2, sizes, kept, ring, shared, M, N, S, CAUSAL, RAGGED,
                               EARLY, ORDERED)),
            (producer, (descriptors, sizes, kept, ring, M, N, S, CAUSAL, ORDERED and CAUSAL)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (gl.constexpr(0), sums, scale_log2, sizes, kept, ring, shared, M, N, S, CAUSAL, RAGGED, LATE,
                        LINEAR, REORDERED, RED, EARLY)),
            (consumer, (gl.constexpr(1), sums, scale_log2, sizes, kept, ring, shared, M, N, S, CAUSAL, RAGGED, LATE,
                        LINEAR, REORDERED, RED, EARLY)),
            (producer, (descriptors, sizes, kept, ring, M, N, S, CAUSAL)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
