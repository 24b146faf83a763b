"""Programs that add to the same part of dQ take turns, always in the same order: equal runs give equal gradients.

Each part has a counter of the programs that have added to it. Warps of their own mind the counters, so that the
consumer warpgroups wait for nothing but a barrier in shared memory. One waits until all programs before this one have
added to a tile, and tells the warpgroups; for each part another counts on when it is added. Waiting and counting on are
apart because each goes to the L2 cache and back: while the end of one turn is still on its way, the next one is already
being waited for.

Nobody waits for a program with a later number. GPUs start programs in the order of their numbers, though nothing
guarantees it; so none that runs waits for one that cannot start. Without a mask the first tile of keys adds first.
Under a causal mask the last one that sees a part does, and programs are numbered from the last tile of keys on: each
begins with queries to which no tile behind its own has still to add. But so the longest programs come last, and at the
end most multiprocessors have nothing to do. So the last heads have the other order: the longest programs first, which
go through the queries from the last to the first, and the first tile of keys adds first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .backward_pieces import first_tile, next_tile, of_last_heads, place, query_tiles, where_to_turn


@gluon.jit
def programs_before(lead, key_tile, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many programs add to a tile of dQ before this one; ``lead`` is how far it sees beyond this tile of keys."""
    before = key_tile
    if CAUSAL:  # noqa: SIM102  (a constexpr is decided while compiling)
        if not of_last_heads():
            before = gl.minimum((lead + M - 1) // N, gl.num_programs(1) - 1 - key_tile)
    return before


@gluon.jit
def wait_for_turn(counter, before):
    """Wait until so many programs have added to a part of dQ; what they have added is then there."""
    gl.inline_asm_elementwise(
        "{ .reg .pred early; .reg .b32 now; again: ld.acquire.gpu.global.b32 now, [$1]; "
        "setp.ne.b32 early, now, $2; @early bra again; mov.b32 $0, now; }",
        "=r,l,r", [counter, before], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_turn(counter):
    """Count this program, once all that this warp knows to have been added is there for everybody."""
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.b32 first, lane, 0; "
        "@first red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, lane; }",
        "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def way_through(sizes, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """This program's tile of keys and number of steps, its first tile of queries and lead, and how it goes on."""
    heads, group, _queries, _keys = sizes
    key_tile, _kv_head, _batch = place(heads, group, CAUSAL)
    own = key_tile * N
    first, tiles = query_tiles(own, sizes, N, M, CAUSAL)
    number, lead = first_tile(own, sizes, first, M, CAUSAL)
    return key_tile, tiles * group, number, lead, where_to_turn(own, sizes, first, M, CAUSAL)


@gluon.jit
def turn_taker(turns, sizes, turn, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr,
               PARTS: gl.constexpr):  # fmt: skip
    """One warp: for each step waits until all programs before this one have added to all parts of a tile, and says so.

    Barriers of the steps take turns. A turn completes when those who end turns have ended the one before the last, too
    (:func:`turn_ender`), so that no barrier is a phase ahead of one who waits for it.
    """
    key_tile, steps, number, first_lead, turning = way_through(sizes, M, N, CAUSAL)
    lead = first_lead
    for step in range(steps):
        before = programs_before(lead, key_tile, M, N, CAUSAL)
        for part in gl.static_range(PARTS):
            wait_for_turn(turns + PARTS * number + part, before)
        mbarrier.wait(turn.index(step & 1), ((step >> 1) & 1) ^ 1)
        mbarrier.arrive(turn.index(step & 1))
        number, lead = next_tile(number, lead, first_lead, turning, M, CAUSAL)


@gluon.jit
def turn_ender(PART: gl.constexpr, turns, sizes, turn, added, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr,
               PARTS: gl.constexpr):  # fmt: skip
    """One warp: counts on when one part of a step's tile is added, which ``added`` of the next step says."""
    _key_tile, steps, number, first_lead, turning = way_through(sizes, M, N, CAUSAL)
    lead = first_lead
    mbarrier.arrive(turn.index(0))
    mbarrier.arrive(turn.index(1))
    for step in range(steps):
        mbarrier.wait(added.index((step + 1) % 3), ((step + 1) // 3) & 1)
        end_turn(turns + PARTS * number + PART)
        mbarrier.arrive(turn.index(step & 1))
        number, lead = next_tile(number, lead, first_lead, turning, M, CAUSAL)
