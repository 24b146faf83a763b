"""The product with 4-bit weights for up to 8 activations: codes go to the tensor cores without changing threads.

Letters: M activations, N rows of the weight, K columns, in groups of 128 that share a scale.

A warp takes 16 rows of a group at a time, with eight instructions ``mma.sync.m16n8k16``. Of the weight, such an
instruction wants from thread ``4 r + t`` the columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of rows r and r + 8; of the
activations, it wants the same columns of activation r. But a sum over columns may take them in any order, as long as
both operands agree on it. So thread ``4 r + t`` loads what lies together in memory: 16 bytes of each of its two rows,
which are 32 columns, and the same 32 columns of its activation. Eight products use them up, and no number has to go
through shared memory to another thread.

Triton does not say which thread has which number, and Gluon does. That is why this kernel is in Gluon.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from utils import triton_versions  # noqa: F401  (the names that the kernel uses, on each version of Triton)

#: Rows of the weight that a program takes, and activations at most.
ROWS, MOST = 16, 8
#: When the next kernel may start: after this one, when all programs have done their products, or when all have begun.
AFTER, LATE, AT_ONCE = range(3)


@gluon.constexpr_function
def products_of_a_group(dtype: str) -> str:
    """PTX: the products of 16 rows of one group with 8 activations.

    Operands of thread 4 r + t: sums of rows r and r + 8 with activations 2 t and 2 t + 1; four words with codes of row
    r, and four of row r + 8; for each nibble of a halfword, four words of x.

    A nibble that is moved to the first fraction bits of 16 gives 16 + (code + 8). A multiply-add subtracts 24.
    """
    shift, sixteen, one, minus = {
        "bf16": (3, "41804180", "3F803F80", "C1C0C1C0"),
        "f16": (6, "4C004C00", "3C003C00", "CE00CE00"),
    }[dtype]
    lines = [".reg .b32 one, minus, a<4>; .reg .f32 s<8>;", f"mov.b32 one, 0x{one}; mov.b32 minus, 0x{minus};"]
    lines += [f"mov.f32 s{i}, 0f00000000;" for i in range(8)]
    for word in (0, 2):
        for nibble in range(4):
            right = 4 * nibble - shift
            moved = f"shr.b32 a{{}}, ${{}}, {right};" if right > 0 else f"shl.b32 a{{}}, ${{}}, {-right};"
            for i in range(4):  # rows r and r + 8 of this word, then of the next
                lines.append(moved.format(i, 4 + 4 * (i % 2) + word + i // 2))
                lines.append(f"lop3.b32 a{i}, a{i}, 0x{0x000F000F << shift:08X}, 0x{sixteen}, 0xEA;")
                lines.append(f"fma.rn.{dtype}x2 a{i}, a{i}, one, minus;")
            sums = ", ".join(f"s{4 * (nibble % 2) + i}" for i in range(4))  # two of each: products need not wait
            x = f"${12 + 4 * nibble + word}, ${13 + 4 * nibble + word}"
            product = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
            lines.append(f"{product} {{{sums}}}, {{a0, a1, a2, a3}}, {{{x}}}, {{{sums}}};")
    lines += [f"add.f32 ${i}, s{i}, s{4 + i};" for i in range(4)]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def group_products(low, high, x0, x1, x2, x3, DTYPE: gl.constexpr):
    """Sums over a group, (G, 8, 16) float32: [g, r, 4 t + 2 h + u] is that of row r + 8 h and activation 2 t + u."""
    return gl.inline_asm_elementwise(
        products_of_a_group(DTYPE), "=r,=r,=r,=r" + 24 * ",r", [low, high, x0, x1, x2, x3],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def dependents(INSTRUCTION: gl.constexpr):
    """Let the next kernel start (``launch_dependents``), or wait for the one before to end (``wait``)."""
    gl.inline_asm_elementwise(
        "griddepcontrol." + INSTRUCTION + "; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ask(ring, scale_ring, place, codes, scales, group, scale_group, groups, in_rows, scale_in_rows):
    """Have the codes and scales of some groups brought to a place of the rings; outside of the weight it gets zeros."""
    async_copy.async_copy_global_to_shared(ring.index(place), codes, mask=in_rows & (group < groups))
    async_copy.async_copy_global_to_shared(scale_ring.index(place), scales, mask=scale_in_rows & (scale_group < groups))
    async_copy.commit_group()


@gluon.jit
def store_sums(o_ptr, acc, first, M, N):
    """Add up what the warps have, (G, 8, 16) as in :func:`group_products`, and store it."""
    layout: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    o = gl.sum(acc, 0)
    eighth = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    place = gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    row = first + eighth + place % 4 // 2 * 8
    token = place // 4 * 2 + place % 2
    gl.store(o_ptr + (token * N + row), o.to(o_ptr.dtype.element_ty), mask=(token < M) & (row < N))


@gluon.jit(do_not_specialize=["M", "groups"])
def int4_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, o_ptr, M, N, groups,
    BLOCK_G: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, NEXT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One program: 16 rows of the weight times all activations.

    A step takes ``BLOCK_G`` groups, which the warps share out; their sums meet at the end. ``STAGES - 1`` steps are
    under way while one is computed. With ``NEXT`` LATE (1) or AT_ONCE (2), a kernel that is launched so may start while
    the one before is at its end (programmatic dependent launch): it asks for weights, which are there already, and only
    then waits for x.

    x is (M, 64 * groups), codes (groups, N, 16), both words of 32 bits; scales (groups, N) float32.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    scale_layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    group = gl.arange(0, BLOCK_G, gl.SliceLayout(1, flat))[:, None][:, :, None]
    sixteenth = gl.arange(0, 16, gl.SliceLayout(0, flat))[None, :][:, :, None]
    eighth = gl.arange(0, 8, gl.SliceLayout(0, flat))[None, :][:, :, None]
    word = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :][:, None, :]
    scale_group = gl.arange(0, BLOCK_G, gl.SliceLayout(1, scale_layout))[:, None]
    first = gl.program_id(0) * 16
    row = first + sixteenth
    scale_row = first + gl.arange(0, 16, gl.SliceLayout(0, scale_layout))[None, :]
    codes = codes_ptr + (group.to(gl.int64) * N + row) * 16 + word
    scales = scales_ptr + (scale_group.to(gl.int64) * N + scale_row)
    step = gl.to_tensor(N).to(gl.int64) * BLOCK_G
    x_ptrs = x_ptr + eighth * (groups * 64) + group * 64 + word

    ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_G, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_G, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    asked = 0
    for stage in gl.static_range(STAGES - 1):
        ask(ring, scale_ring, stage, codes, scales, group, scale_group, groups - asked, row < N, scale_row < N)
        asked += BLOCK_G
        codes += step * 16
        scales += step
    if NEXT == 2:
        dependents("launch_dependents")
    if NEXT != 0:
        dependents("wait")
    acc = gl.zeros([BLOCK_G, 8, 16], gl.float32, layout)
    take, put = 0, STAGES - 1
    for start in range(0, groups, BLOCK_G):
        wanted = (eighth < M) & (start + group < groups)
        x0 = gl.load(x_ptrs, mask=wanted, other=0)  # (G, 8, 16) words: nibble 0 meets columns 0 to 31 of a group
        x1 = gl.load(x_ptrs + 16, mask=wanted, other=0)
        x2 = gl.load(x_ptrs + 32, mask=wanted, other=0)
        x3 = gl.load(x_ptrs + 48, mask=wanted, other=0)
        x_ptrs += BLOCK_G * 64
        async_copy.wait_group(STAGES - 2)
        ask(ring, scale_ring, put, codes, scales, group, scale_group, groups - asked, row < N, scale_row < N)
        asked += BLOCK_G
        codes += step * 16
        scales += step
        put = gl.where(put == STAGES - 1, 0, put + 1)
        tile, factors = ring.index(take), scale_ring.index(take)
        take = gl.where(take == STAGES - 1, 0, take + 1)
        low, high = tile.slice(0, 8, 1).load(layout), tile.slice(8, 8, 1).load(layout)
        low_scale = factors.slice(0, 8, 1).load(flat)[:, :, None]
        high_scale = factors.slice(8, 8, 1).load(flat)[:, :, None]
        sums = group_products(low, high, x0, x1, x2, x3, DTYPE)
        acc += sums * gl.where(word % 4 < 2, low_scale, high_scale)
    if NEXT == 1:
        dependents("launch_dependents")
    store_sums(o_ptr, acc, first, M, N)
