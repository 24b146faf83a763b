"""The last steps of the reordered backward kernel: dQ is computed one step late.

In the steps before, each warpgroup waits for the other's dS before it issues dQ, so both compute their weights at the
same time, and the tensor cores have only dP to do meanwhile. Here dQ of a step is issued in the next one, when the
other's dS has long been there. One warpgroup may be up to a step ahead of the other, and multiply while that one
exponentiates. dS has three places: who writes into the first again has seen that the other has written the second,
and so that it has done with the first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_ordered import programs_before
from .backward_pieces import (
    add_from_registers,
    dq_product,
    first_tile,
    hand_over,
    masked,
    next_tile,
    of_each_query,
    place,
    query_tiles,
    scores_and_dp,
    weights_of,
    where_to_turn,
)
from .parts import matrix


@gluon.jit
def dq_of(GROUP: gl.constexpr, step, k_all, ds_tile, ds_ready, M: gl.constexpr, PART: gl.constexpr):
    """Issue this warpgroup's part of a step's dQ, once the other's half of dS is there."""
    mbarrier.wait(ds_ready[1 - GROUP].index(step % 3), (step // 3) & 1)
    return dq_product(GROUP, ds_tile.index(step % 3), k_all, M, PART)


@gluon.jit
def one_step(FIRST: gl.constexpr, GROUP: gl.constexpr, step, part_before, empty, lead, own, keys, dk, dv, sums,
             scale_log2, kept, ring, shared, M: gl.constexpr, N: gl.constexpr, S: gl.constexpr, CAUSAL: gl.constexpr,
             RAGGED: gl.constexpr, EARLY: gl.constexpr, ORDERED: gl.constexpr):  # fmt: skip
    """One step but for its dQ; of the step before, whose part of dQ is ``part_before``, that is computed here.

    ``empty`` says that nobody has added to that part before.
    """
    k_tiles, v_tiles, _dk_tiles, _dv_tiles, _kv_full, _done = kept
    q_tiles, do_tiles, lse_rows, delta_rows, _q_full, q_empty, _do_full, _do_empty = ring
    ds_tile, _dq_tiles, ds_ready, turn = shared
    D: gl.constexpr = k_tiles.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    s = step % S
    q = matrix(q_tiles.index(s), M, D)
    do = matrix(do_tiles.index(s), M, D)
    k_all = matrix(k_tiles.index(step >> 30), N, D)
    k = k_all.slice(GROUP * 64, 64)
    v = matrix(v_tiles.index(step >> 30), N, D).slice(GROUP * 64, 64)
    scores, dp = scores_and_dp(k, v, q, do, ring, step, M, S, SCORES, True)
    scores = masked(warpgroup_mma_wait(1, [scores]), lead, own, keys, SCORES, CAUSAL, RAGGED)
    weights = weights_of(scores, lse_rows.index(s), scale_log2, M, SCORES, True)
    weights16 = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
    if EARLY:
        dv = warpgroup_mma(weights16, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
    else:
        dp = warpgroup_mma_wait(0, [dp])
    ds = (weights * (dp + of_each_query(delta_rows.index(s), M, SCORES))).to(q.dtype)
    ds_tile.index(step % 3).slice(GROUP * 64, 64).store(ds)
    if not EARLY:
        dv = warpgroup_mma(weights16, do, dv, is_async=True)
    fence_async_shared()
    ds16 = gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2))
    if FIRST:
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, [dv])
    else:
        dq = dq_of(GROUP, step - 1, k_all, ds_tile, ds_ready, M, D * M // 128)
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, [dv, dq])
        if ORDERED:
            mbarrier.wait(turn.index((step - 1) & 1), ((step - 1) >> 1) & 1)
        add_from_registers(dq, sums, part_before, empty)
    mbarrier.arrive(ds_ready[GROUP].index(step % 3))
    dk = warpgroup_mma_wait(0, [dk])
    mbarrier.arrive(q_empty.index(s))
    return dk, dv


@gluon.jit
def lagged_consumer(GROUP: gl.constexpr, sums, scale_log2, sizes, kept, ring, shared, M: gl.constexpr, N: gl.constexpr,
                    S: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, EARLY: gl.constexpr,
                    ORDERED: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 keys."""
    heads, group, _queries, keys = sizes
    k_tiles, _v_tiles, _dk_tiles, _dv_tiles, kv_full, _done = kept
    ds_tile, _dq_tiles, ds_ready, turn = shared
    D: gl.constexpr = k_tiles.shape[4]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    key_tile, _kv_head, _batch = place(heads, group, ORDERED and CAUSAL)
    own = key_tile * N + GROUP * 64
    first, tiles = query_tiles(key_tile * N, sizes, N, M, CAUSAL)
    steps = tiles * group
    number, first_lead = first_tile(own, sizes, first, M, ORDERED and CAUSAL)
    lead = first_lead
    dk = gl.zeros([64, D], gl.float32, OUT)
    dv = gl.zeros([64, D], gl.float32, OUT)
    mbarrier.wait(kv_full, 0)
    if steps > 0:
        dk, dv = one_step(True, GROUP, 0, 0, False, lead, own, keys, dk, dv, sums, scale_log2, kept, ring, shared, M,
                          N, S, CAUSAL, RAGGED, EARLY, ORDERED)  # fmt: skip
        turning = where_to_turn(own, sizes, first, M, ORDERED and CAUSAL)
        for step in range(1, steps):
            part = 2 * number + GROUP
            empty = False
            if ORDERED:
                empty = programs_before(lead + 64 * GROUP, key_tile, M, N, CAUSAL) == 0
            number, lead = next_tile(number, lead, first_lead, turning, M, CAUSAL)
            dk, dv = one_step(False, GROUP, step, part, empty, lead, own, keys, dk, dv, sums, scale_log2, kept, ring,
                              shared, M, N, S, CAUSAL, RAGGED, EARLY, ORDERED)  # fmt: skip
        dq = dq_of(GROUP, steps - 1, matrix(k_tiles.index(0), N, D), ds_tile, ds_ready, M, D * M // 128)
        dq = warpgroup_mma_wait(0, [dq])
        empty = False
        if ORDERED:
            empty = programs_before(lead + 64 * GROUP, key_tile, M, N, CAUSAL) == 0
            mbarrier.wait(turn.index((steps - 1) & 1), ((steps - 1) >> 1) & 1)
        add_from_registers(dq, sums, 2 * number + GROUP, empty)
    hand_over(GROUP, dk, dv, scale_log2, kept, ds_ready, steps % 3, (steps // 3) & 1)
