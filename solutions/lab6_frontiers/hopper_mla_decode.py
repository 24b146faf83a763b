"""Attention over latents on Hopper: one warp loads, one warpgroup computes scores, two have half of the sums each.

A program has 64 heads of one sequence. It walks over the tokens of a part of its context, 64 at a time, from the last
to the first. It consists of four partitions:

- *producer*, one warp, asks TMA for the queries and for tiles of tokens;
- *scoring*, a warpgroup, computes the scores of a tile and their softmax, and leaves the weights in shared memory,
  together with the factor by which the sums so far shrink;
- *summing*, two warpgroups called left and right: left multiplies the weights with the left 256 columns of the
  latents, right with the other 256, and each adds the products to its half of the sums.

The sums are 64 x 512 numbers. A half of them takes 128 registers of each thread of a warpgroup. Scores and softmax have
a warpgroup of their own, so that they need no registers beside the sums.

Shared memory delivers 128 bytes per cycle. A product of 64 x 64 scores that reads both operands from there needs all of
it. If every operand of the scores came from shared memory, it would limit the kernel, not the tensor cores. Scoring
therefore keeps the right half of the queries and their part with the position in registers. Shared memory and tensor
cores are then about equally busy. The left half of the queries stays in shared memory, because scoring has no registers
left for it.

A tile of tokens has three parts, and each part has a ring of its own: three places for right halves of the latents, two
for left halves, and two for keys with the position. More does not fit. The queries that go to registers need no memory
of their own, because they arrive in place 0 of two rings, as if they were tile -1. In these rings tile ``i`` is number
``i + 1``.

The warpgroups take turns at the tensor cores. When the scores of tile ``i + 1`` are almost done, scoring lets left
start its products of tile ``i``. When the first of these is done, left lets right start. The tensor cores thus have
products to work on while scoring exponentiates the scores of tile ``i + 1``. Left goes first because its ring has only
two places: the left half of tile ``i + 2`` cannot be loaded before these products are done.

``full`` barriers count the bytes that TMA has brought. ``empty`` ones say that a part of a tile has been used. There
are two places for weights and factors: ``p_full`` says that a tile's are there, ``p_empty`` that left and right have
used them. The barriers of ``turns`` say that left, and that right, may start its products.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from solutions.capstone_hopper.parts import barriers, copyable, layout, matrix
from solutions.capstone_hopper.softmax import apply_mask, online_softmax, rescaled

#: Numbers of a latent and of a key with the position, heads and tokens of a tile, places for right halves of tiles.
LATENT_DIM, ROPE_DIM, M, N, STAGES = 512, 64, 64, 64, 3
#: Registers a thread: of the launch, of a summing warpgroup. The producer keeps 24, and scoring gets what is left, 168.
LAUNCHED, SUMS = 128, 160


@gluon.jit
def producer(descriptors, table_ptr, stride_bb, work, queries, rings, S: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """One warp: asks TMA for the queries, and then for the next part of a tile whenever its place is free."""
    q_desc, q_rope_desc, c_desc, c_rope_desc = descriptors
    sequence, head, first, count, _valid = work
    q_left, q_full = queries
    right, left, rope = rings
    c_right, right_full, right_empty = right
    c_left, left_full, left_empty = left
    c_rope, rope_full, rope_empty = rope
    if count > 0:
        mbarrier.expect(right_full.index(0), 64 * 256 * 2)
        tma.async_copy_global_to_shared(q_desc, [sequence, head, 256], right_full.index(0), c_right.index(0))
        mbarrier.expect(rope_full.index(0), 64 * 64 * 2)
        tma.async_copy_global_to_shared(q_rope_desc, [sequence, head, 0], rope_full.index(0), c_rope.index(0))
        mbarrier.expect(q_full.index(0), 64 * 256 * 2)
        tma.async_copy_global_to_shared(q_desc, [sequence, head, 0], q_full.index(0), q_left)
        token = (first + count - 1) * 64
        block = gl.load(table_ptr + token // BLOCK_SIZE * stride_bb)
        for i in range(count):
            s = (i + 1) % S  # places: of the right half,
            r = (i + 1) % 2  # of the keys with the position,
            p = i % 2  # and of the left half
            row = token % BLOCK_SIZE
            token = gl.maximum(token - 64, 0)
            next_block = gl.load(table_ptr + token // BLOCK_SIZE * stride_bb)  # on its way meanwhile
            mbarrier.wait(right_empty.index(s), (((i + 1) // S) & 1) ^ 1)
            mbarrier.expect(right_full.index(s), 64 * 256 * 2)
            tma.async_copy_global_to_shared(c_desc, [block, row, 256], right_full.index(s), c_right.index(s))
            mbarrier.wait(rope_empty.index(r), (((i + 1) // 2) & 1) ^ 1)
            mbarrier.expect(rope_full.index(r), 64 * 64 * 2)
            tma.async_copy_global_to_shared(c_rope_desc, [block, row, 512], rope_full.index(r), c_rope.index(r))
            mbarrier.wait(left_empty.index(p), ((i // 2) & 1) ^ 1)
            mbarrier.expect(left_full.index(p), 64 * 256 * 2)
            tma.async_copy_global_to_shared(c_desc, [block, row, 0], left_full.index(p), c_left.index(p))
            block = next_block


@gluon.jit
def hide_rows(tile, valid):
    """Zeros in the rows of a tile (64, 256) from ``valid`` on: anything may lie there, and 0 times NaN is NaN."""
    HELD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, HELD))
    for part in gl.static_range(4):
        columns = tile.slice(part * 64, 64, 1)
        kept = gl.where((row < valid)[:, None], columns.load(HELD), 0.0)
        columns.store(kept.to(tile.dtype))
        # After each quarter: the first product reads two quarters, and between their stores and that product the
        # compiler puts only the barriers of the warpgroup between later quarters. A fence has to come before those.
        fence_async_shared()


@gluon.jit
def take_queries(queries, rings, SCORES: gl.constexpr):
    """The queries' right half and position, from now on in registers, and their left half, still in shared memory."""
    q_left, q_full = queries
    right, _left, rope = rings
    c_right, right_full, right_empty = right
    c_rope, rope_full, rope_empty = rope
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    mbarrier.wait(right_full.index(0), 0)
    q_right = matrix(c_right.index(0), 64, 256).load(HELD)
    mbarrier.wait(rope_full.index(0), 0)
    q_rope = matrix(c_rope.index(0), 64, 64).load(HELD)
    fence_async_shared()
    mbarrier.arrive(right_empty.index(0))
    mbarrier.arrive(rope_empty.index(0))
    mbarrier.wait(q_full.index(0), 0)
    return q_right, q_rope, matrix(q_left, 64, 256)


@gluon.jit
def begin_scores(held, rings, i, SCORES: gl.constexpr, S: gl.constexpr):
    """Scores (64, 64) of tile ``i``: four products under way, each issued once its part of the tile is there.

    The left half of the latents takes two of them. When all but one are done, the scores are almost complete.
    """
    q_right, q_rope, q_left = held
    right, left, rope = rings
    c_right, right_full, _right_empty = right
    c_left, left_full, _left_empty = left
    c_rope, rope_full, _rope_empty = rope
    s = (i + 1) % S
    r = (i + 1) % 2
    p = i % 2
    mbarrier.wait(right_full.index(s), ((i + 1) // S) & 1)
    scores = warpgroup_mma(q_right, matrix(c_right.index(s), 64, 256).permute((1, 0)),
                           gl.zeros([64, 64], gl.float32, SCORES), use_acc=False, is_async=True)  # fmt: skip
    mbarrier.wait(rope_full.index(r), ((i + 1) // 2) & 1)
    scores = warpgroup_mma(q_rope, matrix(c_rope.index(r), 64, 64).permute((1, 0)), scores, is_async=True)
    mbarrier.wait(left_full.index(p), (i // 2) & 1)
    tile = matrix(c_left.index(p), 64, 256)
    for quarter in gl.static_range(2):
        scores = warpgroup_mma(q_left.slice(quarter * 128, 128, 1), tile.slice(quarter * 128, 128, 1).permute((1, 0)),
                               scores, is_async=True)  # fmt: skip
    return scores


@gluon.jit
def hand_over(weights, shrink, handed, i):
    """Weights and factor of tile ``i`` to the summing warpgroups, once both have used those of tile ``i - 2``."""
    p_tile, shrink_tile, p_full, p_empty = handed
    p = i % 2
    mbarrier.wait(p_empty.index(p), ((i // 2) & 1) ^ 1)
    p_tile.index(p).store(weights)
    shrink_tile.index(p).store(shrink)
    fence_async_shared()
    mbarrier.arrive(p_full.index(p))


@gluon.jit
def scoring(lse_ptr, scale, work, heads, part, parts, queries, rings, handed, turns, S: gl.constexpr,
            SPLIT: gl.constexpr):  # fmt: skip
    """One warpgroup: the scores of each tile and their softmax. It also says when left may start its products.

    After the last tile it hands over one more factor, the reciprocal of the denominator.
    """
    sequence, head, _first, count, valid = work
    _right, _left, rope = rings
    _c_rope, _rope_full, rope_empty = rope
    p_tile, shrink_tile, p_full, p_empty = handed
    turn_left, _turn_right = turns
    dtype: gl.constexpr = p_tile.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    #: Eight columns of a row, as a warpgroup's result holds them: two neighbours a thread.
    EIGHT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8])  # fmt: skip
    maximum = gl.full([64], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([64, 8], gl.float32, EIGHT)
    if count > 0:
        held = take_queries(queries, rings, SCORES)
        scores = warpgroup_mma_wait(0, [begin_scores(held, rings, 0, SCORES, S)])
        mbarrier.arrive(rope_empty.index(1))
        if valid < 64:
            scores = apply_mask(scores, 0, 0, valid, SCORES, False)
        weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale, True)
        hand_over(weights.to(dtype), shrink, handed, 0)
        for i in range(1, count):
            scores = warpgroup_mma_wait(1, [begin_scores(held, rings, i, SCORES, S)])
            mbarrier.arrive(turn_left.index((i - 1) % 2))
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(rope_empty.index((i + 1) % 2))
            weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale, True)
            hand_over(weights.to(dtype), shrink, handed, i)
        mbarrier.arrive(turn_left.index((count - 1) % 2))
    total = gl.convert_layout(gl.sum(total, 1), ROWS)
    divisor = gl.where(total > 0, total, 1.0)
    mbarrier.wait(p_empty.index(count % 2), ((count // 2) & 1) ^ 1)
    shrink_tile.index(count % 2).store(1.0 / divisor)
    mbarrier.arrive(p_full.index(count % 2))
    if SPLIT:
        row = head + gl.arange(0, 64, layout=ROWS)
        lse = gl.where(total > 0, (maximum * scale + gl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        gl.store(lse_ptr + ((sequence * heads + row).to(gl.int64) * parts + part), lse, mask=row < heads)


@gluon.jit
def store_quarter(out, o_ptr, work, heads, part, parts, COLUMN: gl.constexpr):
    """128 numbers of each head, from ``COLUMN`` on."""
    sequence, head, _first, _count, _valid = work
    OUT: gl.constexpr = out.type.layout
    row = head + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    column = COLUMN + gl.arange(0, 128, layout=gl.SliceLayout(0, OUT))
    place = ((sequence * heads + row).to(gl.int64) * parts + part) * 512
    gl.store(o_ptr + (place[:, None] + column[None, :]), out, mask=(row < heads)[:, None])


@gluon.jit
def summing(o_ptr, work, heads, part, parts, ring, handed, turns, LEFT: gl.constexpr, PLACES: gl.constexpr):
    """One warpgroup: the left or the right half of the sums, as two quarters of 128 columns.

    In a launch with 128 registers per thread, ptxas refuses a product of 256 columns (C7602), although a summing
    warpgroup has more registers by then. ``PLACES`` is the number of places of ``ring``.
    """
    _sequence, _head, _first, count, valid = work
    tiles, full, empty = ring
    p_tile, shrink_tile, p_full, p_empty = handed
    turn_left, turn_right = turns
    #: Place of tile 0: in the ring of right halves, the queries came before it.
    FIRST: gl.constexpr = 0 if LEFT else 1
    COLUMN: gl.constexpr = 0 if LEFT else 256
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    one = gl.zeros([64, 128], gl.float32, OUT)
    two = gl.zeros([64, 128], gl.float32, OUT)
    for i in range(count):
        s = (i + FIRST) % PLACES
        p = i % 2
        mbarrier.wait(full.index(s), ((i + FIRST) // PLACES) & 1)
        mbarrier.wait(p_full.index(p), (i // 2) & 1)  # and so the scores of the tile are done
        tile = matrix(tiles.index(s), 64, 256)
        if (i == 0) & (valid < 64):
            hide_rows(tile, valid)
        shrink = shrink_tile.index(p).load(ROWS)
        one = rescaled(one, shrink)
        two = rescaled(two, shrink)
        if LEFT:
            mbarrier.wait(turn_left.index(p), (i // 2) & 1)
        else:
            mbarrier.wait(turn_right.index(p), (i // 2) & 1)
        one = warpgroup_mma(p_tile.index(p), tile.slice(0, 128, 1), one, is_async=True)
        two = warpgroup_mma(p_tile.index(p), tile.slice(128, 128, 1), two, is_async=True)
        if LEFT:
            one, two = warpgroup_mma_wait(1, [one, two])
            mbarrier.arrive(turn_right.index(p))
        one, two = warpgroup_mma_wait(0, [one, two])
        mbarrier.arrive(p_empty.index(p))
        mbarrier.arrive(empty.index(s))
    mbarrier.wait(p_full.index(count % 2), (count // 2) & 1)
    shrink = shrink_tile.index(count % 2).load(ROWS)[:, None]
    store_quarter(one * shrink, o_ptr, work, heads, part, parts, COLUMN)
    store_quarter(two * shrink, o_ptr, work, heads, part, parts, COLUMN + 128)


@gluon.jit(do_not_specialize=["stride_bs", "heads", "parts"])
def hopper_mla_decode_kernel(
    q_desc, q_rope_desc, c_desc, c_rope_desc, block_tables_ptr, context_lens_ptr, o_ptr, lse_ptr, scale, stride_bs,
    stride_bb, stride_cs, heads, parts, S: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: 64 heads of one sequence, against one part of its context. ``scale`` has log2(e) folded in."""
    dtype: gl.constexpr = c_desc.dtype
    part = gl.program_id(1)
    sequence = gl.program_id(2)
    length = gl.load(context_lens_ptr + sequence * stride_cs)
    tiles = gl.cdiv(length, 64)
    first = tiles * part // parts
    end = tiles * (part + 1) // parts
    work = (sequence, gl.program_id(0) * 64, first, end - first, length - (end - 1) * 64)
    c_right = gl.allocate_shared_memory(dtype, [S, 1, 64, 256], c_desc.layout)
    c_left = gl.allocate_shared_memory(dtype, [2, 1, 64, 256], c_desc.layout)
    c_rope = gl.allocate_shared_memory(dtype, [2, 1, 64, 64], c_rope_desc.layout)
    queries = (gl.allocate_shared_memory(dtype, [1, 64, 256], q_desc.layout), barriers(1, 1))
    right_full, left_full, rope_full = barriers(S, 1), barriers(2, 1), barriers(2, 1)
    right = (c_right, right_full, barriers(S, 1))
    left = (c_left, left_full, barriers(2, 1))
    rope = (c_rope, rope_full, barriers(2, 1))
    handed = (
        gl.allocate_shared_memory(dtype, [2, 64, 64], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(2, 1),
        barriers(2, 2),
    )
    turns = (barriers(2, 1), barriers(2, 1))
    fence_async_shared()
    table_ptr = block_tables_ptr + sequence.to(gl.int64) * stride_bs
    rings = (right, left, rope)
    gl.warp_specialize([
        (scoring, (lse_ptr, scale, work, heads, part, parts, queries, rings, handed, turns, S, SPLIT)),
        (summing, (o_ptr, work, heads, part, parts, left, handed, turns, True, 2)),
        (summing, (o_ptr, work, heads, part, parts, right, handed, turns, False, S)),
        (producer, ((q_desc, q_rope_desc, c_desc, c_rope_desc), table_ptr, stride_bb, work, queries, rings, S,
                    BLOCK_SIZE)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


def why_portable(q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor, scale: float) -> str:
    """Why the kernel for every GPU has to do it, or nothing if this one can. Queries may have any strides."""
    if q_latent.dtype not in (torch.bfloat16, torch.float16):
        return "numbers are neither bfloat16 nor float16"
    if q_latent.shape[2] != LATENT_DIM or q_rope.shape[2] != ROPE_DIM:
        return f"dimensions are not {LATENT_DIM} and {ROPE_DIM}"
    if latent_cache.shape[0] == 0:
        return "the cache has no blocks"
    if latent_cache.shape[1] < N:
        return f"blocks have fewer than {N} tokens"
    if scale <= 0:
        return "the factor of the scores is not positive"
    bytes_each = latent_cache.element_size()
    apart = [stride * bytes_each for stride in latent_cache.stride()[:2]]
    if latent_cache.stride(2) != 1 or latent_cache.data_ptr() % 16 or any(n <= 0 or n % 16 for n in apart):
        return "TMA reads rows without gaps, multiples of 16 bytes apart"
    return ""


def queries_for_tma(queries: Tensor) -> Tensor:
    """Queries (S, H, numbers) as TMA can read them; a copy of them where strides or address do not allow that."""
    return copyable(queries[None])[0]


def tiles_of(tensor: Tensor, columns: int) -> TensorDescriptor:
    """A descriptor that hands out tiles (1, 64, columns) of a tensor of three axes; beyond its end they are 0."""
    block = [1, 64, columns]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout(block, tensor.dtype))


def hopper_mla_decode(
    q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor, block_tables: Tensor, context_lens: Tensor,
    scale_log2: float, o: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """``o`` (S, H, parts, latent_dim) becomes the parts' outputs, and ``lse`` (S, H, parts) their logsumexps.

    With one part, ``lse`` is not written. The arguments are :func:`.mla_decode.mla_decode`'s, with log2(e) in the
    factor, and such that :func:`why_portable` has nothing to say.
    """
    S, H, parts, _ = o.shape
    q_latent, q_rope = queries_for_tma(q_latent), queries_for_tma(q_rope)
    block_tables, context_lens = block_tables.to(torch.int32), context_lens.to(torch.int32)
    hopper_mla_decode_kernel[(-(-H // M), parts, S)](
        tiles_of(q_latent, 256), tiles_of(q_rope, 64), tiles_of(latent_cache, 256), tiles_of(latent_cache, 64),
        block_tables, context_lens, o, lse, scale_log2, *block_tables.stride(), context_lens.stride(0), H, parts,
        S=STAGES, BLOCK_SIZE=latent_cache.shape[1], SPLIT=parts > 1, REGISTERS=SUMS, num_warps=4, maxnreg=LAUNCHED,
    )  # fmt: skip
