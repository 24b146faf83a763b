"""Right and wrong answers to exercise 6.2, a product of e4m3 matrices with a scale for each 128 of K."""

from __future__ import annotations

import functools

from utils.checks.answers import Answers

KERNEL, LAUNCH = "6.2: your kernel", "6.2: the launch"
ANSWERS = Answers(
    {
        KERNEL: """
@triton.jit
def my_kernel(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, M, N, K, stride_a, stride_b, TM: tl.constexpr, TN: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * TM + tl.arange(0, TM)
    columns = tl.program_id(1).to(tl.int64) * TN + tl.arange(0, TN)
    inside_rows = rows < M
    inside_columns = columns < N
    G = K // 128
    c = tl.zeros((TM, TN), tl.float32)
    for g in range(0, G):
        k = g * 128 + tl.arange(0, 128)
        a = tl.load(a_ptr + rows[:, None] * stride_a + k[None, :], mask=inside_rows[:, None])
        b = tl.load(b_ptr + columns[None, :] * stride_b + k[:, None], mask=inside_columns[None, :])
        sa = tl.load(as_ptr + rows * G + g, mask=inside_rows)
        sb = tl.load(bs_ptr + columns * G + g, mask=inside_columns)
        part = tl.dot(a, b)
        part = part * sa[:, None]
        part = part * sb[None, :]
        c += part
    inside = inside_rows[:, None] & inside_columns[None, :]
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], c.to(tl.bfloat16), mask=inside)
""",
        LAUNCH: """
        grid = (triton.cdiv(M, 64), triton.cdiv(N, 64))
        my_kernel[grid](a, a_scales, b, b_scales, c, M, N, K, a.stride(0), b.stride(0), TM=64, TN=64)
        return c
        """,
    }
)
ZEROED = "a = tl.load(a_ptr + rows[:, None] * stride_a + k[None, :], mask=inside_rows[:, None])"
also_right = ANSWERS.also_right
also_right("one axis of programs, in groups of tiles", {
    KERNEL: {
        "rows = tl.program_id(0).to(tl.int64) * TM": "tiles_m, tiles_n = tl.cdiv(M, TM), tl.cdiv(N, TN)\n    "
        "pid = tl.program_id(0)\n    "
        "tile_m, tile_n = tl.swizzle2d(pid // tiles_n, pid % tiles_n, tiles_m, tiles_n, 2)\n    "
        "rows = tile_m.to(tl.int64) * TM",
        "tl.program_id(1).to(tl.int64) * TN": "tile_n.to(tl.int64) * TN",
    },
    LAUNCH: {"(triton.cdiv(M, 64), triton.cdiv(N, 64))": "(triton.cdiv(M, 64) * triton.cdiv(N, 64),)"},
})  # fmt: skip
also_right("each block in two halves", {KERNEL: {
    "k = g * 128 + tl.arange(0, 128)": "k = g * 128 + tl.arange(0, 64)",
    "part = tl.dot(a, b)\n": "part = tl.dot(a, b)\n        "
    "a = tl.load(a_ptr + rows[:, None] * stride_a + 64 + k[None, :], mask=inside_rows[:, None])\n        "
    "b = tl.load(b_ptr + columns[None, :] * stride_b + 64 + k[:, None], mask=inside_columns[None, :])\n        "
    "part = tl.dot(a, b, part)\n",
}})  # fmt: skip
also_right("the product of the scales, and the other operand first", {KERNEL: {
    "part = tl.dot(a, b)\n        part = part * sa[:, None]\n        part = part * sb[None, :]\n        c += part":
    "part = tl.dot(b.T, a.T)\n        c += (part * (sb[:, None] * sa[None, :])).T",
}})  # fmt: skip
also_right("programs that take one tile after the other", {
    KERNEL: """
@triton.jit
def some_tiles(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, M, N, K, stride_a, stride_b, TM: tl.constexpr, TN: tl.constexpr):
    tiles = tl.cdiv(M, TM) * tl.cdiv(N, TN)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        m = (tile % tl.cdiv(M, TM)).to(tl.int64) * TM + tl.arange(0, TM)
        n = (tile // tl.cdiv(M, TM)).to(tl.int64) * TN + tl.arange(0, TN)
        a_ptrs = a_ptr + m[:, None] * stride_a + tl.arange(0, 128)[None, :]
        b_ptrs = b_ptr + n[:, None] * stride_b + tl.arange(0, 128)[None, :]
        as_ptrs = as_ptr + m * (K // 128)
        bs_ptrs = bs_ptr + n * (K // 128)
        c = tl.zeros((TM, TN), tl.float32)
        for _ in range(K // 128):
            a = tl.load(a_ptrs, mask=(m < M)[:, None], other=0.0)
            b = tl.load(b_ptrs, mask=(n < N)[:, None], other=0.0)
            sa, sb = tl.load(as_ptrs, mask=m < M, other=0.0), tl.load(bs_ptrs, mask=n < N, other=0.0)
            c = tl.fma(tl.dot(a, b.T), sa[:, None] * sb[None, :], c)
            a_ptrs += 128
            b_ptrs += 128
            as_ptrs += 1
            bs_ptrs += 1
        tl.store(c_ptr + m[:, None] * N + n[None, :], c.to(tl.bfloat16), mask=(m < M)[:, None] & (n < N)[None, :])
""",
    LAUNCH: """
        programs = triton.cdiv(triton.cdiv(M, 32) * triton.cdiv(N, 128), 3)
        some_tiles[(programs,)](a, a_scales, b, b_scales, c, M, N, K, a.stride(0), b.stride(0), TM=32, TN=128)
        return c
    """,
})  # fmt: skip

wrong = functools.partial(ANSWERS.wrong, KERNEL)
C = '"classic wrong answers" '
GA, GB = "rows * G + g, mask", "columns * G + g, mask"
wrong("scales of the first block", "every block has the scales of the first one", C + "1", edits={
    GA: "rows * G, mask", GB: "columns * G, mask",
})  # fmt: skip
wrong("scaled at the end", "the scales of the last block multiply the whole sum", C + "1", edits={
    "        part = part * sa[:, None]\n        part = part * sb[None, :]\n        c += part":
    "        c += part\n    c = c * sa[:, None] * sb[None, :]",
})  # fmt: skip
wrong("the first scale of a", "every block of a has the scale of the first one", C + "1", edits={GA: "rows * G, mask"})
wrong("no scale of a", "the scales of a are left out", C + "2", edits={"part = part * sa[:, None]": "pass"})
wrong("no scale of b", "the scales of b are left out", C + "2", edits={"part = part * sb[None, :]": "pass"})
wrong("scales exchanged", "[:, None] goes with rows", C + "2", edits={
    "part * sa[:, None]": "part * sa[None, :]", "part * sb[None, :]": "part * sb[:, None]",
})  # fmt: skip
wrong("scales turned", "the scales are read as (K / 128, rows)", C + "2", edits={
    GA: "g * M + rows, mask", GB: "g * N + columns, mask",
})  # fmt: skip
wrong("the last block alone", "only the last block is left", C + "3", edits={"c += part": "c = part"})
wrong("always the first columns", "one block is right, several are not", C + "3", edits={"k = g * 128 + ": "k = "})
wrong("multiplied in bfloat16", "expected products of float8_e4m3fn", "got a product of bfloat16", C + "4", edits={
    "tl.dot(a, b)": "tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))",
})  # fmt: skip
wrong("codes as integers", "the codes are multiplied as integers", C + "4", edits={
    "tl.dot(a, b)": "tl.dot(a.to(tl.int8, bitcast=True), b.to(tl.int8, bitcast=True)).to(tl.float32)",
})  # fmt: skip
wrong("scaled before the product", "got a product of float32", C + "4", edits={
    "part = tl.dot(a, b)": 'part = tl.dot(a.to(tl.float32) * sa[:, None], b.to(tl.float32), input_precision="ieee")',
    "part = part * sa[:, None]": "pass",
})  # fmt: skip
wrong("a total of 16 bits", "only long sums go wrong", C + "5", edits={
    "c += part": "c = (c + part).to(tl.bfloat16).to(tl.float32)",
})  # fmt: skip
wrong("no mask on rows", "out-of-bounds", edits={", mask=inside_rows[:, None])": ")"})
wrong("no mask on the store", "out-of-bounds access", edits={", mask=inside)": ")"})
wrong("no strides", "rows that are further apart than K go wrong", C + "7", edits={
    "rows[:, None] * stride_a": "rows[:, None] * K", "columns[None, :] * stride_b": "columns[None, :] * K",
})  # fmt: skip
wrong("offsets of 32 bits", "overflows", edits={"tl.program_id(0).to(tl.int64)": "tl.program_id(0)"})
wrong("columns of 32 bits", "overflows", edits={"tl.program_id(1).to(tl.int64)": "tl.program_id(1)"})
wrong = functools.partial(ANSWERS.wrong, LAUNCH)
wrong("tiles of 16", "a is loaded 4.0 times, expected 1 to 2", "a tile of c has at least 32 rows", C + "6", edits={
    "triton.cdiv(M, 64), triton.cdiv(N, 64)": "triton.cdiv(M, 16), triton.cdiv(N, 16)", "TM=64, TN=64": "TM=16, TN=16",
})  # fmt: skip
wrong("too few programs", "elements of c are never written", C + "7", edits={
    "triton.cdiv(M, 64), ": "max(1, M // 64), ",
})  # fmt: skip
wrong("no program for a last column of its own", "elements of c are never written", C + "7", edits={
    "triton.cdiv(N, 64))": "max(1, triton.cdiv(N - 1, 64)))",
})  # fmt: skip
wrong(
    "dequantised by PyTorch",
    "PyTorch computes part of the result",
    instead="""
        a = (a.float().unflatten(1, (-1, 128)) * a_scales[:, :, None]).flatten(1).to(a.dtype)
        grid = (triton.cdiv(M, 64), triton.cdiv(N, 64))
        my_kernel[grid](a, a_scales, b, b_scales, c, M, N, K, a.stride(0), b.stride(0), TM=64, TN=64)
        return c
""",
)
wrong(
    "PyTorch's product",
    "is a built-in matmul operator",
    instead="""
        scaled = [x.float() * s.repeat_interleave(128, 1) for x, s in ((a, a_scales), (b, b_scales))]
        return (scaled[0] @ scaled[1].T).bfloat16()
""",
)
