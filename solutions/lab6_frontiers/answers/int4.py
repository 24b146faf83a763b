"""Right and wrong answers to exercise 6.3, a product with weights of 4 bits."""

from __future__ import annotations

import functools

from utils.checks.answers import Answers

GROUP, LAUNCH = "6.3: one group", "6.3: the launch"
ANSWERS = Answers(
    {
        GROUP: """
        row = n.to(tl.int64)
        packed = tl.load(codes_ptr + row[:, None] * (K // 2) + group * 64 + byte[None, :], mask=(n < N)[:, None])
        code = packed.to(tl.int32)
        low = code % 16
        low = tl.where(low > 7, low - 16, low)
        high = code // 16
        high = tl.where(high > 7, high - 16, high)
        place = x_ptr + m.to(tl.int64)[:, None] * stride_xm
        column = (group * 128 + byte * 2).to(tl.int64)
        x_low = tl.load(place + column[None, :] * stride_xk, mask=(m < M)[:, None], other=0)
        x_high = tl.load(place + (column[None, :] + 1) * stride_xk, mask=(m < M)[:, None], other=0)
        dtype = x_ptr.dtype.element_ty
        sums = tl.dot(x_low, low.to(dtype).T) + tl.dot(x_high, high.to(dtype).T)
        scale = tl.load(scales_ptr + row * groups + group, mask=n < N, other=0)
        total += sums * scale
        """,
        LAUNCH: """
        rows = 16
        while rows < M:
            rows *= 2
        grid = (triton.cdiv(N, BLOCK_N),)
        int4_linear_kernel[grid](
            x, codes, scales, o, M, N, K, x.stride(0), x.stride(1), BLOCK_M=rows, BLOCK_N=BLOCK_N
        )
        return o
        """,
    }
)
SUMS = "sums = tl.dot(x_low, low.to(dtype).T) + tl.dot(x_high, high.to(dtype).T)"
LOAD = "packed = tl.load(codes_ptr + row[:, None] * (K // 2) + group * 64 + byte[None, :], mask=(n < N)[:, None])"
AFTER = (
    "\n        scale = tl.load(scales_ptr + row * groups + group, mask=n < N, other=0)\n        total += sums * scale"
)
also_right = ANSWERS.also_right
also_right("the pairs joined, and one product", {GROUP: """
    packed = tl.load(codes_ptr + n.to(tl.int64)[:, None] * (K // 2) + group * 64 + byte[None, :], mask=n[:, None] < N)
    both = tl.interleave(packed & 15, packed >> 4).to(tl.int8)
    weight = ((both ^ 8) - 8).to(x_ptr.dtype.element_ty)
    k = group * 128 + tl.arange(0, 128)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * stride_xm + k.to(tl.int64)[None, :] * stride_xk
    x = tl.load(x_ptrs, mask=m[:, None] < M, other=0.0)
    scale = tl.load(scales_ptr + n.to(tl.int64) * groups + group, mask=n < N, other=0.0)
    total += tl.dot(x, weight.T) * scale[None, :]
"""})  # fmt: skip
also_right("shifted up and down again", {GROUP: {
    "low = code % 16\n        low = tl.where(low > 7, low - 16, low)": "low = (code << 28) >> 28",
    "high = code // 16\n        high = tl.where(high > 7, high - 16, high)": "high = (code << 24) >> 28",
}})  # fmt: skip
also_right("scales in the weights", {GROUP: {
    SUMS: "scale = tl.load(scales_ptr + row * groups + group, mask=n < N, other=0)\n        "
          "low = (low.to(tl.float32) * scale[:, None]).to(dtype)\n        "
          "high = (high.to(tl.float32) * scale[:, None]).to(dtype)\n        "
          "total = tl.dot(x_low, low.T, total)\n        total = tl.dot(x_high, high.T, total)",
    AFTER: "",
}})  # fmt: skip
also_right("weights on the left", {GROUP: {
    SUMS: "sums = tl.dot(low.to(dtype), x_low.T)\n        sums = tl.dot(high.to(dtype), x_high.T, sums)",
    "total += sums * scale": "total += (sums * scale[:, None]).T",
}})  # fmt: skip
also_right("sixteen off by the sign bit, larger tiles", {
    GROUP: {"low = tl.where(low > 7, low - 16, low)": "low = low - 2 * (low & 8)",
            "high = tl.where(high > 7, high - 16, high)": "high = high - ((high >> 3) << 4)"},
    LAUNCH: {"triton.cdiv(N, BLOCK_N)": "triton.cdiv(N, 2 * BLOCK_N)", "BLOCK_N=BLOCK_N": "BLOCK_N=2 * BLOCK_N",
             "rows = 16": "rows = 64"},
})  # fmt: skip

wrong = functools.partial(ANSWERS.wrong, GROUP)
C = '"classic wrong answers" '
wrong("unsigned", "codes of 8 to 15 count as such", C + "1", edits={
    "low = tl.where(low > 7, low - 16, low)": "pass", "high = tl.where(high > 7, high - 16, high)": "pass",
})  # fmt: skip
wrong("an offset of 8", "8 is taken off every code", C + "1", edits={
    "tl.where(low > 7, low - 16, low)": "low - 8", "tl.where(high > 7, high - 16, high)": "high - 8",
})  # fmt: skip
wrong("halves exchanged", "the halves of a byte are exchanged", C + "2", edits={
    "low = code % 16": "low = code // 16", "high = code // 16": "high = code % 16",
})  # fmt: skip
wrong("halves of the group", "the first 64 inputs of a group", C + "2", edits={
    "byte * 2": "byte", "column[None, :] + 1": "column[None, :] + 64",
})  # fmt: skip
wrong("low halves alone", "only the even inputs count", C + "2", edits={" + tl.dot(x_high, high.to(dtype).T)": ""})
wrong("high halves alone", "only the odd inputs count", C + "2", edits={"tl.dot(x_low, low.to(dtype).T) + ": ""})
wrong("the first scale", "every group has the scale of the first one", C + "3", edits={
    "row * groups + group, mask": "row * groups, mask",
})  # fmt: skip
wrong("the last scale", "the scale of the last group multiplies the sum of all", C + "3", edits={
    "row * groups + group, mask": "row * groups + groups - 1, mask",
})  # fmt: skip
wrong("scales turned", "the scales are read as (K / 128, N)", C + "3", edits={
    "row * groups + group, mask": "group * N + row, mask",
})  # fmt: skip
wrong("no scales", "the scales are left out", C + "3", edits={"total += sums * scale": "total += sums"})
wrong("the last group alone", "only the last group is left", C + "4", edits={"total += ": "total = "})
wrong(
    "always the first codes", "one group is right, several are not", C + "4", edits={" + group * 64 + byte": " + byte"}
)
wrong("a total of 16 bits", "the total of all groups stays float32", C + "5", edits={
    "total += sums * scale": "total = (total + sums * scale).to(dtype).to(tl.float32)",
})  # fmt: skip
wrong("each half loaded by itself", "codes_ptr is loaded 2.0 times", C + "6", edits={
    "high = code // 16": f"{LOAD}\n        high = packed.to(tl.int32) // 16",
})  # fmt: skip
wrong("no mask on the outputs", "out-of-bounds", edits={", mask=(n < N)[:, None]": ""})
wrong("no mask on the rows", "out-of-bounds", edits={", mask=(m < M)[:, None], other=0": ""})
wrong("no strides", "an x of other strides goes wrong", C + "7", edits={
    "column[None, :] * stride_xk": "column[None, :]", "(column[None, :] + 1) * stride_xk": "(column[None, :] + 1)",
})  # fmt: skip
wrong("products of float32", "got a product of float32", C + "8", edits={
    "dtype = x_ptr.dtype.element_ty": "dtype = tl.float32",
    "tl.dot(x_low, low": 'tl.dot(x_low.to(tl.float32), low',
    "tl.dot(x_high, high.to(dtype).T)": 'tl.dot(x_high.to(tl.float32), high.to(dtype).T, input_precision="ieee")',
    "low.to(dtype).T)": 'low.to(dtype).T, input_precision="ieee")',
})  # fmt: skip
wrong("offsets of 32 bits", "overflows", edits={"row = n.to(tl.int64)": "row = n"})
wrong = functools.partial(ANSWERS.wrong, LAUNCH)
wrong("too few programs", "are never written", C + "7", edits={"triton.cdiv(N, BLOCK_N)": "max(1, N // BLOCK_N)"})
wrong("a program too few where one output is left", "are never written", C + "7", edits={
    "triton.cdiv(N, BLOCK_N)": "triton.cdiv(N, BLOCK_N + 1)",
})  # fmt: skip
wrong("sixteen rows", "are never written", C + "7", edits={"while rows < M": "while rows < min(M, 16)"})
wrong(
    "a program for each row",
    "codes_ptr is loaded",
    C + "6",
    instead="""
    for row in range(0, M, 16):
        some = x[row : row + 16]
        int4_linear_kernel[(triton.cdiv(N, BLOCK_N),)](
            some, codes, scales, o[row:], len(some), N, K, x.stride(0), x.stride(1), BLOCK_M=16, BLOCK_N=BLOCK_N
        )
    return o
""",
)
wrong(
    "unpacked by PyTorch",
    "PyTorch computes part of the result",
    instead="""
    low, high = (codes & 15).to(torch.int8), (codes >> 4).to(torch.int8)
    codes = torch.stack(((low ^ 8) - 8, (high ^ 8) - 8), -1).flatten(1)
    int4_linear_kernel[(triton.cdiv(N, BLOCK_N),)](
        x, codes.view(torch.uint8), scales, o, M, N, K, x.stride(0), x.stride(1), BLOCK_M=64, BLOCK_N=BLOCK_N
    )
    return o
""",
)
