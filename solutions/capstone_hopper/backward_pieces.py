"""What the steps of the reordered backward kernel share: its producer, and the pieces that consumers are made of."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from .backward import query_tile, start
from .parts import by_eights, exp2


@gluon.jit
def place(heads, group):
    """Tile of keys, key head and batch of this program. Grid: heads together, tiles of keys, the rest of the heads.

    Under a causal mask the first tiles of keys are seen by most queries, and their programs come first, so that at the
    end only short ones are left. Only few heads go together: what they read and add to stays in the L2 cache.
    """
    kv_heads = heads // group
    number = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    return gl.program_id(1), number % kv_heads, number // kv_heads


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
             CAUSAL: gl.constexpr):  # fmt: skip
    """One warp: keys and values once, then queries, output gradients and their row terms of every head of the group.

    At the end it stores dK and dV, so that the warpgroups need no registers for the descriptors.
    """
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc = descriptors
    heads, group, _queries, _keys = sizes
    k_tiles, v_tiles, dk_tiles, dv_tiles, kv_full, done = kept
    q_tiles, do_tiles, lse_rows, delta_rows, q_full, q_empty, do_full, do_empty = ring
    D: gl.constexpr = q_desc.block_shape[3]
    key_tile, kv_head, batch = place(heads, group)
    first, tiles = query_tiles(key_tile * N, sizes, N, M, CAUSAL)
    mbarrier.expect(kv_full, 2 * N * D * 2)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, key_tile * N, 0], kv_full, k_tiles.index(0))
    tma.async_copy_global_to_shared(v_desc, [batch, kv_head, key_tile * N, 0], kv_full, v_tiles.index(0))
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
    mbarrier.wait(done, 0)
    for i in gl.static_range(2):
        at = [batch, kv_head, key_tile * N + 64 * i, 0]
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
    _key_tile, kv_head, batch = place(heads, group)
    number = (batch * heads + kv_head * group) * gl.cdiv(queries, M) + first
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
def of_each_query(row, M: gl.constexpr, LAYOUT: gl.constexpr, WIDE: gl.constexpr):
    """A tile (1, M) of float32 numbers in shared memory as (1, M) in registers, one for each column of ``LAYOUT``.

    A thread has columns 2 c and 2 c + 1 of each eight. With ``WIDE`` those of each sixteen lie side by side (in the
    order of :func:`.launch_reordered.in_fours`), and it reads four numbers at a time instead of two.
    """
    flat = row._reinterpret(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if WIDE:
        FOURS: gl.constexpr = gl.DistributedLinearLayout(
            [[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [M]
        )
        fours = gl.reshape(flat.load(FOURS), [M // 16, 4, 2, 2])  # sixteen, c, eight, which of the columns
        numbers = gl.convert_layout(
            gl.reshape(gl.permute(fours, (0, 2, 1, 3)), [M]), gl.SliceLayout(0, LAYOUT), assert_trivial=True
        )
    else:
        numbers = flat.load(gl.SliceLayout(0, LAYOUT))
    return numbers[None, :]


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
def weights_of(scores, row, scale_log2, M: gl.constexpr, LAYOUT: gl.constexpr, LATE: gl.constexpr,
               WIDE: gl.constexpr):  # fmt: skip
    """2 to the scores; with ``LATE`` what is in ``row`` is added before."""
    scores = scores * scale_log2
    if LATE:
        scores = scores + of_each_query(row, M, LAYOUT, WIDE)
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
