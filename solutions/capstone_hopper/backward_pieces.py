"""What the faster backward kernels share: the producer, and the pieces that consumers are made of."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from .backward import query_tile, start
from .parts import by_eights, exp2, matrix


@gluon.jit
def of_last_heads():
    """Whether this program's heads are the last ones that are begun."""
    return gl.program_id(2) == gl.num_programs(2) - 1


@gluon.jit
def place(heads, group, SHORT_FIRST: gl.constexpr = False):
    """Tile of keys, key head and batch of this program. Grid: heads together, tiles of keys, the rest of the heads.

    Under a causal mask the first tiles of keys are seen by most queries, and their programs come first, so that at the
    end only short ones are left. With ``SHORT_FIRST`` they come last, but for the last heads' (:mod:`.backward_ordered`
    says why). Only few heads go together: what they read and add to stays in the L2 cache.
    """
    kv_heads = heads // group
    number = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    key_tile = gl.program_id(1)
    if SHORT_FIRST:  # noqa: SIM102  (a constexpr is decided while compiling)
        if not of_last_heads():
            key_tile = gl.num_programs(1) - 1 - key_tile
    return key_tile, number % kv_heads, number // kv_heads


@gluon.jit
def query_tiles(column, sizes, N: gl.constexpr, M: gl.constexpr, CAUSAL: gl.constexpr):
    """First tile of queries that sees the keys from ``column`` on, and how many do."""
    _heads, _group, queries, keys = sizes
    first = 0
    if CAUSAL:
        first = gl.maximum(column - (keys - queries), 0) // M
    return first, gl.maximum(gl.cdiv(queries, M) - first, 0)


@gluon.jit
def producer(descriptors, sizes, kept, ring, M: gl.constexpr, N: gl.constexpr, S: gl.constexpr,
             CAUSAL: gl.constexpr, SHORT_FIRST: gl.constexpr = False):  # fmt: skip
    """One warp: keys and values once, then queries, output gradients and their row terms of every head of the group.

    At the end it stores dK and dV, so that the warpgroups need no registers for the descriptors.
    """
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc = descriptors
    heads, group, _queries, _keys = sizes
    k_tiles, v_tiles, dk_tiles, dv_tiles, kv_full, done = kept
    q_tiles, do_tiles, lse_rows, delta_rows, q_full, q_empty, do_full, do_empty = ring
    D: gl.constexpr = q_desc.block_shape[3]
    key_tile, kv_head, batch = place(heads, group, SHORT_FIRST)
    first, tiles = query_tiles(key_tile * N, sizes, N, M, CAUSAL)
    mbarrier.expect(kv_full, 2 * N * D * 2)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, key_tile * N, 0], kv_full, k_tiles.index(0))
    tma.async_copy_global_to_shared(v_desc, [batch, kv_head, key_tile * N, 0], kv_full, v_tiles.index(0))
    for step in range(tiles * group):
        head, row = query_tile(step, kv_head, group, first, tiles, M)
        if SHORT_FIRST:  # noqa: SIM102  (a constexpr is decided while compiling)
            if of_last_heads():
                row = (2 * first + tiles - 1) * M - row
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
    mbarrier.wait(done, 0)
    for i in gl.static_range(N // 64):
        at = [batch, kv_head, key_tile * N + 64 * i, 0]
        tma.async_copy_shared_to_global(dk_desc, at, dk_tiles.index(i))
        tma.async_copy_shared_to_global(dv_desc, at, dv_tiles.index(i))
    tma.store_wait(0)


@gluon.jit
def first_tile(own, sizes, first, M: gl.constexpr, SHORT_FIRST: gl.constexpr = False):
    """A program's first tile of queries: its number among those of all heads of the batch, and its lead.

    The lead of a tile is how far its first query sees beyond the first of this warpgroup's keys, ``own``. It takes the
    place of a row in all that follows, because fewer registers are needed so.
    """
    heads, group, queries, keys = sizes
    _key_tile, kv_head, batch = place(heads, group)
    if SHORT_FIRST:  # noqa: SIM102  (a constexpr is decided while compiling)
        if of_last_heads():
            first = gl.cdiv(queries, M) - 1
    number = (batch * heads + kv_head * group) * gl.cdiv(queries, M) + first
    return number, first * M + keys - queries - own


@gluon.jit
def where_to_turn(own, sizes, first, M: gl.constexpr, SHORT_FIRST: gl.constexpr):
    """Which way a program goes through the queries of a head, where it turns to the next head's, and what it skips.

    The way is 1, or -1 from the last tile to the first. A program turns when its lead, times its way, reaches the
    second number; the third is then added to its tile's number.
    """
    _heads, _group, queries, keys = sizes
    way, end, skipped = 1, keys - own, first
    if SHORT_FIRST:  # noqa: SIM102  (a constexpr is decided while compiling)
        if of_last_heads():
            way, end, skipped = -1, own + queries - keys - first * M + 1, 2 * gl.cdiv(queries, M) - first
    return way, end, skipped


@gluon.jit
def next_tile(number, lead, first_lead, turning, M: gl.constexpr, CAUSAL: gl.constexpr):
    """Number and lead of the tile after that."""
    way, end, skipped = turning
    number += way
    lead += way * M
    if CAUSAL:  # noqa: SIM102  (a constexpr is decided while compiling)
        if way * lead >= end:
            lead = first_lead
            number += skipped
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
def add_from_registers(dq, sums, part, empty=False):
    """Every thread adds what it has of part ``part`` of dQ (64, 64) to the sums (parts, 4096).

    If these are ``empty``, nothing is there to add to, and it is stored.
    """
    flat = in_accumulator_order(dq)
    at = sums + part.to(gl.int64) * 4096 + gl.arange(0, 4096, layout=flat.type.layout)
    if empty:
        gl.store(at, flat)
    else:
        gl.atomic_add(at, flat, sem="relaxed")


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
def hand_over(GROUP: gl.constexpr, dk, dv, scale_log2, kept, ds_ready, index, phase):
    """dK, not yet scaled, and dV of this warpgroup's keys to shared memory, from where the producer stores them.

    They take the place of keys and values, which are not needed any more once both warpgroups have arrived here.
    """
    _k_tiles, _v_tiles, dk_tiles, dv_tiles, _kv_full, done = kept
    D: gl.constexpr = dk_tiles.shape[4]
    mbarrier.arrive(ds_ready[GROUP].index(index))
    mbarrier.wait(ds_ready[1 - GROUP].index(index), phase)
    matrix(dk_tiles.index(GROUP), 64, D).store((dk * (scale_log2 * 0.6931471805599453)).to(dk_tiles.dtype))
    matrix(dv_tiles.index(GROUP), 64, D).store(dv.to(dv_tiles.dtype))
    fence_async_shared()
    mbarrier.arrive(done)
