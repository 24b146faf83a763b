"""Programs that add to the same part of dQ take turns, always in the same order: equal runs give equal gradients.

Each part has a counter of the programs that have added to it. Each consumer warpgroup has a *keeper*, one warp that
waits until all programs before this one have added, tells the warpgroup, and counts on when that has added, too. So
the warpgroup itself waits for nothing but a barrier in shared memory.

Nobody waits for a program with a later number, so none that runs waits for one that cannot start. Without a mask the
first tile of keys adds first. Under a causal mask the last one that sees a part does, and programs are numbered from
the last tile of keys on: each begins with queries to which no tile behind its own has still to add. But so the longest
programs come last, and at the end most multiprocessors have nothing to do. So the last heads have the other order: the
longest programs first, which go through the queries from the last to the first, and the first tile of keys adds first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .backward_pieces import first_tile, next_tile, of_last_heads, place, query_tiles, where_to_turn


@gluon.jit
def programs_before(lead, key_tile, GROUP: gl.constexpr, M: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many programs add to a part of dQ before this one; ``lead`` is that of its tile of queries."""
    before = key_tile
    if CAUSAL:  # noqa: SIM102  (a constexpr is decided while compiling)
        if not of_last_heads():
            before = gl.minimum((lead + 64 * GROUP + M - 1) // N, gl.num_programs(1) - 1 - key_tile)
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
def keeper(GROUP: gl.constexpr, turns, sizes, turn, ds_ready, M: gl.constexpr, N: gl.constexpr,
           CAUSAL: gl.constexpr):  # fmt: skip
    """One warp: the turns of one warpgroup, whose arrival with dS of a step says that dQ of the one before is added."""
    heads, group, _queries, _keys = sizes
    key_tile, _kv_head, _batch = place(heads, group, CAUSAL)
    own = key_tile * N + GROUP * 64
    first, tiles = query_tiles(key_tile * N, sizes, N, M, CAUSAL)
    number, first_lead = first_tile(own, sizes, first, M, CAUSAL)
    turning = where_to_turn(own, sizes, first, M, CAUSAL)
    lead = first_lead
    for step in range(tiles * group):
        counter = turns + 2 * number + GROUP
        wait_for_turn(counter, programs_before(lead, key_tile, GROUP, M, N, CAUSAL))
        mbarrier.arrive(turn.index(GROUP))
        number, lead = next_tile(number, lead, first_lead, turning, M, CAUSAL)
        mbarrier.wait(ds_ready[GROUP].index((step + 1) % 3), ((step + 1) // 3) & 1)
        end_turn(counter)
