"""Attention over latents on Hopper: one warp loads, one warpgroup has scores and half of the sums, one the other half.

A program has 64 heads of one sequence and walks over the tokens of a part of its context, 64 at a time, from the last
to the first. The sums of 64 x 512 numbers take 128 registers of each thread of two warpgroups:

- *left* computes the scores of a tile and their softmax, leaves the weights in shared memory, and adds the product of
  weights and latents to the left half of the sums;
- *right* does the latter for the right half.

A tile of tokens lies in shared memory as three parts, each with barriers of its own: the right half of the latents, the
keys with the position, and the left half. This is the order in which TMA brings them and scores multiply them.

Left issues the product of a tile's weights first and the scores of the next tile behind it. It waits for the product
while scores are under way, and sets the tile's left half free before it exponentiates. There are places for two tiles
only: the earlier a half is free, the longer TMA has to bring the one that takes its place. While left exponentiates,
the tensor cores work on right's product.

``full`` barriers count the bytes that TMA has brought; ``empty`` ones say that a half has been used. The keys with the
position need none: right uses its half after the tile's scores are finished. ``p_full`` says that weights and the
factor that shrinks the sums are in shared memory, ``p_empty`` that right has used both.
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

from solutions.capstone_hopper.parts import barriers, layout, matrix
from solutions.capstone_hopper.softmax import apply_mask, online_softmax

#: Numbers of a latent and of a key with the position, heads and tokens of a tile, tiles in shared memory.
LATENT_DIM, ROPE_DIM, M, N, STAGES = 512, 64, 64, 64, 2
#: Registers a thread: of the launch, of the right warpgroup. The warp that loads gives its own away.
LAUNCHED, RIGHT = 168, 216


@gluon.jit
def producer(descriptors, table_ptr, stride_bb, work, q_tiles, ring, S: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """One warp: asks TMA for the queries, and then for the next part of a tile whenever its place is free."""
    q_desc, q_rope_desc, c_desc, c_rope_desc = descriptors
    sequence, head, first, count, _valid = work
    q_right, q_rope, q_left, q_full = q_tiles
    c_right, c_rope, c_left, full, empty = ring
    if count > 0:
        mbarrier.expect(q_full.index(0), 64 * 576 * 2)
        tma.async_copy_global_to_shared(q_desc, [sequence, head, 256], q_full.index(0), q_right)
        tma.async_copy_global_to_shared(q_rope_desc, [sequence, head, 0], q_full.index(0), q_rope)
        tma.async_copy_global_to_shared(q_desc, [sequence, head, 0], q_full.index(0), q_left)
        token = (first + count - 1) * 64
        block = gl.load(table_ptr + token // BLOCK_SIZE * stride_bb)
        for i in range(count):
            s = i % S
            parity = ((i // S) & 1) ^ 1
            row = token % BLOCK_SIZE
            token = gl.maximum(token - 64, 0)
            next_block = gl.load(table_ptr + token // BLOCK_SIZE * stride_bb)  # on its way meanwhile
            mbarrier.wait(empty.index(s), parity)
            mbarrier.expect(full.index(s), 64 * 256 * 2)
            tma.async_copy_global_to_shared(c_desc, [block, row, 256], full.index(s), c_right.index(s))
            mbarrier.expect(full.index(S + s), 64 * 64 * 2)
            tma.async_copy_global_to_shared(c_rope_desc, [block, row, 512], full.index(S + s), c_rope.index(s))
            mbarrier.wait(empty.index(S + s), parity)
            mbarrier.expect(full.index(2 * S + s), 64 * 256 * 2)
            tma.async_copy_global_to_shared(c_desc, [block, row, 0], full.index(2 * S + s), c_left.index(s))
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
    fence_async_shared()


@gluon.jit
def begin_scores(q_tiles, ring, i, SCORES: gl.constexpr, S: gl.constexpr):
    """Scores (64, 64) of tile ``i`` but for its left half: two products, under way, each once its part is there."""
    q_right, q_rope, _q_left, _q_full = q_tiles
    c_right, c_rope, _c_left, full, _empty = ring
    s = i % S
    phase = (i // S) & 1
    mbarrier.wait(full.index(s), phase)
    scores = warpgroup_mma(matrix(q_right, 64, 256), matrix(c_right.index(s), 64, 256).permute((1, 0)),
                           gl.zeros([64, 64], gl.float32, SCORES), use_acc=False, is_async=True)  # fmt: skip
    mbarrier.wait(full.index(S + s), phase)
    return warpgroup_mma(matrix(q_rope, 64, 64), matrix(c_rope.index(s), 64, 64).permute((1, 0)), scores, is_async=True)


@gluon.jit
def end_scores(scores, q_tiles, ring, i, S: gl.constexpr):
    """Scores (64, 64) of tile ``i``: adds the product with its left half, and waits for all that is under way."""
    _q_right, _q_rope, q_left, _q_full = q_tiles
    _c_right, _c_rope, c_left, full, _empty = ring
    s = i % S
    mbarrier.wait(full.index(2 * S + s), (i // S) & 1)
    scores = warpgroup_mma(
        matrix(q_left, 64, 256), matrix(c_left.index(s), 64, 256).permute((1, 0)), scores, is_async=True
    )
    return warpgroup_mma_wait(0, [scores])


@gluon.jit
def hand_over(weights, shrink, handed, i):
    """Weights and factor of tile ``i`` to the other warpgroup, once it has used those before."""
    p_tile, shrink_tile, p_full, p_empty = handed
    mbarrier.wait(p_empty.index(0), (i & 1) ^ 1)
    p_tile.store(weights)
    shrink_tile.store(shrink)
    fence_async_shared()
    mbarrier.arrive(p_full.index(0))


@gluon.jit
def add_left(out, shrink, p_tile, tile):
    """``out`` (64, 256) times the factor ``shrink`` plus the product of weights and left half of a tile, under way."""
    OUT: gl.constexpr = out.type.layout
    out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    # Read back into registers: of shared memory's rate, the product then takes only what the latents need. Weights that
    # stayed there from the softmax on would be written while the product before reads others, and ptxas would wait for
    # each instruction of a product (C7513).
    weights = p_tile.load(gl.DotOperandLayout(0, OUT, 2))
    return warpgroup_mma(weights, tile, out, is_async=True)


@gluon.jit
def store_half(out, o_ptr, work, heads, part, parts, COLUMN: gl.constexpr):
    """256 numbers of each head."""
    sequence, head, _first, _count, _valid = work
    OUT: gl.constexpr = out.type.layout
    row = head + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    column = COLUMN + gl.arange(0, 256, layout=gl.SliceLayout(0, OUT))
    place = ((sequence * heads + row).to(gl.int64) * parts + part) * 512
    mine = (row < heads)[:, None] & (column < 512)[None, :]
    gl.store(o_ptr + (place[:, None] + column[None, :]), out, mask=mine)


@gluon.jit
def left(o_ptr, lse_ptr, scale, work, heads, part, parts, q_tiles, ring, handed, S: gl.constexpr,
         SPLIT: gl.constexpr):  # fmt: skip
    """One warpgroup: scores, softmax, and the left half of the sums."""
    sequence, head, _first, count, valid = work
    _c_right, _c_rope, c_left, _full, empty = ring
    p_tile, shrink_tile, p_full, p_empty = handed
    dtype: gl.constexpr = c_left.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    #: Eight columns of a row, as a warpgroup's result holds them: two neighbours a thread.
    EIGHT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8])  # fmt: skip
    out = gl.zeros([64, 256], gl.float32, OUT)
    maximum = gl.full([64], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([64, 8], gl.float32, EIGHT)
    if count > 0:
        mbarrier.wait(q_tiles[3].index(0), 0)
        scores = end_scores(begin_scores(q_tiles, ring, 0, SCORES, S), q_tiles, ring, 0, S)
        if valid < 64:
            scores = apply_mask(scores, 0, 0, valid, SCORES, False)
            hide_rows(matrix(c_left.index(0), 64, 256), valid)
        weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale, True)
        hand_over(weights.to(dtype), shrink, handed, 0)
        for i in range(1, count):
            last = (i - 1) % S
            out = add_left(out, shrink, p_tile, matrix(c_left.index(last), 64, 256))
            scores = begin_scores(q_tiles, ring, i, SCORES, S)
            out = warpgroup_mma_wait(2, [out])
            mbarrier.arrive(empty.index(S + last))
            scores = end_scores(scores, q_tiles, ring, i, S)
            weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale, True)
            hand_over(weights.to(dtype), shrink, handed, i)
        out = warpgroup_mma_wait(0, [add_left(out, shrink, p_tile, matrix(c_left.index((count - 1) % S), 64, 256))])
    total = gl.convert_layout(gl.sum(total, 1), ROWS)
    divisor = gl.where(total > 0, total, 1.0)
    mbarrier.wait(p_empty.index(0), (count & 1) ^ 1)
    shrink_tile.store(1.0 / divisor)
    mbarrier.arrive(p_full.index(0))
    out = out * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT))[:, None]
    store_half(out, o_ptr, work, heads, part, parts, 0)
    if SPLIT:
        row = head + gl.arange(0, 64, layout=ROWS)
        lse = gl.where(total > 0, (maximum * scale + gl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        gl.store(lse_ptr + ((sequence * heads + row).to(gl.int64) * parts + part), lse, mask=row < heads)


@gluon.jit
def right(o_ptr, work, heads, part, parts, ring, handed, S: gl.constexpr):
    """One warpgroup: the right half of the sums."""
    _sequence, _head, _first, count, valid = work
    c_right, _c_rope, _c_left, full, empty = ring
    p_tile, shrink_tile, p_full, p_empty = handed
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    out = gl.zeros([64, 256], gl.float32, OUT)
    for i in range(count):
        s = i % S
        mbarrier.wait(full.index(s), (i // S) & 1)
        mbarrier.wait(p_full.index(0), i & 1)  # and so the scores of the tile are done
        if (i == 0) & (valid < 64):
            hide_rows(matrix(c_right.index(s), 64, 256), valid)
        out = out * shrink_tile.load(ROWS)[:, None]
        out = warpgroup_mma(p_tile, matrix(c_right.index(s), 64, 256), out, is_async=True)
        out = warpgroup_mma_wait(0, [out])
        mbarrier.arrive(p_empty.index(0))
        mbarrier.arrive(empty.index(s))
    mbarrier.wait(p_full.index(0), count & 1)
    out = out * shrink_tile.load(ROWS)[:, None]
    store_half(out, o_ptr, work, heads, part, parts, 256)


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
    q_tiles = (
        gl.allocate_shared_memory(dtype, [1, 64, 256], q_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 64, 64], q_rope_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 64, 256], q_desc.layout),
        barriers(1, 1),
    )
    ring = (
        gl.allocate_shared_memory(dtype, [S, 1, 64, 256], c_desc.layout),
        gl.allocate_shared_memory(dtype, [S, 1, 64, 64], c_rope_desc.layout),
        gl.allocate_shared_memory(dtype, [S, 1, 64, 256], c_desc.layout),
        barriers(3 * S, 1),
        barriers(2 * S, 1),
    )
    handed = (
        gl.allocate_shared_memory(dtype, [64, 64], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(1, 1),
        barriers(1, 1),
    )
    fence_async_shared()
    table_ptr = block_tables_ptr + sequence.to(gl.int64) * stride_bs
    gl.warp_specialize([
        (left, (o_ptr, lse_ptr, scale, work, heads, part, parts, q_tiles, ring, handed, S, SPLIT)),
        (right, (o_ptr, work, heads, part, parts, ring, handed, S)),
        (producer, ((q_desc, q_rope_desc, c_desc, c_rope_desc), table_ptr, stride_bb, work, q_tiles, ring, S,
                    BLOCK_SIZE)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


def why_portable(q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor, scale: float) -> str:
    """Why the kernel for every GPU has to do it, or nothing if this one can. Queries may have any strides."""
    if q_latent.dtype not in (torch.bfloat16, torch.float16):
        return "numbers are neither bfloat16 nor float16"
    if q_latent.shape[2] != LATENT_DIM or q_rope.shape[2] != ROPE_DIM:
        return f"dimensions are not {LATENT_DIM} and {ROPE_DIM}"
    if latent_cache.shape[1] < N:
        return f"blocks have fewer than {N} tokens"
    if scale <= 0:
        return "the factor of the scores is not positive"
    bytes_each = latent_cache.element_size()
    apart = [stride * bytes_each for stride in latent_cache.stride()[:2]]
    if latent_cache.stride(2) != 1 or latent_cache.data_ptr() % 16 or any(n <= 0 or n % 16 for n in apart):
        return "TMA reads rows without gaps, multiples of 16 bytes apart"
    return ""


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
    q_latent, q_rope = q_latent.contiguous(), q_rope.contiguous()
    hopper_mla_decode_kernel[(-(-H // M), parts, S)](
        tiles_of(q_latent, 256), tiles_of(q_rope, 64), tiles_of(latent_cache, 256), tiles_of(latent_cache, 64),
        block_tables, context_lens, o, lse, scale_log2, *block_tables.stride(), context_lens.stride(0), H, parts,
        S=STAGES, BLOCK_SIZE=latent_cache.shape[1], SPLIT=parts > 1, REGISTERS=RIGHT, num_warps=4, maxnreg=LAUNCHED,
    )  # fmt: skip
