"""Right and wrong answers to exercise 6.7, the grouped product of experts."""

from __future__ import annotations

import functools

from utils.checks.answers import Answers

KERNEL, LAUNCH = "6.7: your kernel", "6.7: the launch"
ANSWERS = Answers(
    {
        KERNEL: """
@triton.jit
def my_kernel(
    x_ptr, w_ptr, out_ptr, counts_ptr, E, N, K, stride,
    EXPERTS: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
):
    e = tl.program_id(2)
    each = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + each, mask=each < E, other=0)
    begin = tl.sum(tl.where(each < e, counts, 0), axis=0)
    count = tl.load(counts_ptr + e)
    if tl.program_id(0) * TM >= count:
        return
    place = tl.program_id(0) * TM + tl.arange(0, TM)
    row = (begin + place).to(tl.int64)
    column = tl.program_id(1) * TN + tl.arange(0, TN)
    here = (place < count)[:, None]
    there = (column < N)[None, :]
    total = tl.zeros((TM, TN), tl.float32)
    for k0 in range(0, K, TK):
        k = k0 + tl.arange(0, TK)
        x = tl.load(x_ptr + row[:, None] * stride + k[None, :], mask=here & (k < K)[None, :], other=0.0)
        matrix = w_ptr + e.to(tl.int64) * K * N
        w = tl.load(matrix + k.to(tl.int64)[:, None] * N + column[None, :], mask=(k < K)[:, None] & there, other=0.0)
        total += tl.dot(x, w)
    tl.store(out_ptr + row[:, None] * N + column[None, :], total.to(out_ptr.dtype.element_ty), mask=here & there)
""",
        LAUNCH: """
        grid = (triton.cdiv(T, 32), triton.cdiv(N, 32), E)
        my_kernel[grid](
            x, weights, out, counts, E, N, K, x.stride(0), EXPERTS=triton.next_power_of_2(E), TM=32, TN=32, TK=32
        )
        return out
        """,
    }
)
FIND = (
    "begin = tl.sum(tl.where(each < e, counts, 0), axis=0)\n    count = tl.load(counts_ptr + e)\n"
    "    if tl.program_id(0) * TM >= count:\n        return\n"
    "    place = tl.program_id(0) * TM + tl.arange(0, TM)\n    row = (begin + place).to(tl.int64)"
)
IN_ORDER = """
@triton.jit
def my_kernel(
    x_ptr, w_ptr, out_ptr, counts_ptr, T, E, N, K, stride, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr
):
    row = tl.program_id(0) * TM + tl.arange(0, TM)
    column = tl.program_id(1) * TN + tl.arange(0, TN)
    here = (row < T)[:, None]
    there = (column < N)[None, :]
    total = tl.zeros((TM, TN), tl.float32)
    begin = 0
    for e in range(E):
        end = begin + tl.load(counts_ptr + e)
        if (begin < end) & (end > tl.program_id(0) * TM) & (begin < tl.program_id(0) * TM + TM):
            mine = ((row >= begin) & (row < end))[:, None]
            matrix = w_ptr + e * tl.cast(K, tl.int64) * N
            for k0 in range(0, K, TK):
                k = k0 + tl.arange(0, TK)
                of_x = x_ptr + row.to(tl.int64)[:, None] * stride + k[None, :]
                x = tl.load(of_x, mask=mine & (k < K)[None, :], other=0.0)
                of_w = matrix + k.to(tl.int64)[:, None] * N + column[None, :]
                w = tl.load(of_w, mask=(k < K)[:, None] & there, other=0.0)
                total = tl.dot(x, w, total)
        begin = end
    place = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=here & there)
"""
IN_ORDER_LAUNCH = """
    my_kernel[(triton.cdiv(T, 32), triton.cdiv(N, 32))](
        x, weights, out, counts, T, E, N, K, x.stride(0), TM=32, TN=32, TK=16
    )
    return out
"""
also_right = ANSWERS.also_right
also_right("tiles in the order of the rows, with several groups in one", {KERNEL: IN_ORDER, LAUNCH: IN_ORDER_LAUNCH})
also_right("a table of tiles by PyTorch", {
    KERNEL: {
        "counts_ptr, E, N,": "counts_ptr, tiles_ptr, rows_ptr, E, N,",
        "e = tl.program_id(2)": "tile = tl.program_id(0)",
        "counts = tl.load(counts_ptr + each, mask=each < E, other=0)":
            "ends = tl.load(tiles_ptr + each, mask=each < E, other=2147483647)\n    "
            "e = tl.sum((ends <= tile).to(tl.int32), axis=0)\n    if e == E:\n        return",
        FIND: "count = tl.load(counts_ptr + e)\n    before = tl.load(tiles_ptr + e - 1, mask=e > 0, other=0)\n    "
              "begin = tl.load(rows_ptr + e) - count\n    place = (tile - before) * TM + tl.arange(0, TM)\n    "
              "row = (begin + place).to(tl.int64)",
    },
    LAUNCH: {
        "grid = (triton.cdiv(T, 32), triton.cdiv(N, 32), E)":
            "tiles = ((counts + 31) // 32).cumsum(0, dtype=torch.int32)\n        "
            "rows = counts.cumsum(0, dtype=torch.int32)\n        grid = (T // 32 + E, triton.cdiv(N, 32))",
        "out, counts, E": "out, counts, tiles, rows, E",
    },
})  # fmt: skip
WALK = {
    "e = tl.program_id(2)\n    each = tl.arange(0, EXPERTS)\n    "
    "counts = tl.load(counts_ptr + each, mask=each < E, other=0)": """tile = tl.program_id(0)
    e = 0
    begin = 0
    count = tl.load(counts_ptr)
    while (tile >= tl.cdiv(count, TM)) & (e < E - 1):
        tile -= tl.cdiv(count, TM)
        begin += count
        e += 1
        count = tl.load(counts_ptr + e)
    if tile >= tl.cdiv(count, TM):
        return""",
    FIND: "place = tile * TM + tl.arange(0, TM)\n    row = (begin + place).to(tl.int64)",
}
WALK_LAUNCH = {"(triton.cdiv(T, 32), triton.cdiv(N, 32), E)": "(T // 32 + E, triton.cdiv(N, 32))"}
also_right("a walk through the counts", {KERNEL: WALK, LAUNCH: WALK_LAUNCH})
also_right("programs that take one tile after the other", {
    KERNEL: {
        "e = tl.program_id(2)\n    each": "e = tl.program_id(0)\n    each",
        "    if tl.program_id(0) * TM >= count:\n        return\n": "",
        "    place = tl.program_id(0) * TM + tl.arange(0, TM)\n    row = (begin + place).to(tl.int64)\n": "",
        "    here = (place < count)[:, None]\n": "",
        "    total = tl.zeros((TM, TN), tl.float32)\n    for k0 in range(0, K, TK):\n":
            "    for t in range(0, tl.cdiv(count, TM)):\n      place = t * TM + tl.arange(0, TM)\n      "
            "row = (begin + place).to(tl.int64)\n      here = (place < count)[:, None]\n      "
            "total = tl.zeros((TM, TN), tl.float32)\n      for k0 in range(0, K, TK):\n",
        "    tl.store(": "      tl.store(",
    },
    LAUNCH: {"(triton.cdiv(T, 32), triton.cdiv(N, 32), E)": "(E, triton.cdiv(N, 32))"},
})  # fmt: skip
also_right("weights on the left", {KERNEL: {
    "total = tl.zeros((TM, TN), tl.float32)": "total = tl.zeros((TN, TM), tl.float32)",
    "total += tl.dot(x, w)": "total = tl.dot(tl.trans(w), tl.trans(x), acc=total)",
    "total.to(out_ptr.dtype.element_ty)": "tl.trans(total).to(tl.bfloat16 if out_ptr.dtype.element_ty == tl.bfloat16 "
                                          "else tl.float16)",
}})  # fmt: skip
also_right("larger tiles, and pointers that move on", {
    KERNEL: {
        "for k0 in range(0, K, TK):\n        k = k0 + tl.arange(0, TK)": """inner = tl.arange(0, TK)
    x_ptrs = x_ptr + row[:, None] * stride + inner[None, :]
    w_ptrs = w_ptr + e.to(tl.int64) * K * N + inner.to(tl.int64)[:, None] * N + column[None, :]
    for step in range(tl.cdiv(K, TK)):
        k = step * TK + inner""",
        "x_ptr + row[:, None] * stride + k[None, :], mask": "x_ptrs, mask",
        "matrix = w_ptr + e.to(tl.int64) * K * N\n        ": "",
        "matrix + k.to(tl.int64)[:, None] * N + column[None, :], mask": "w_ptrs, mask",
        "total += tl.dot(x, w)": "total += tl.dot(x, w)\n        x_ptrs += TK\n        w_ptrs += TK * N",
    },
    LAUNCH: {"cdiv(T, 32), triton.cdiv(N, 32)": "cdiv(T, 64), triton.cdiv(N, 64)", "TM=32, TN=32, TK=32":
             "TM=64, TN=64, TK=16"},
})  # fmt: skip

wrong = functools.partial(ANSWERS.wrong, KERNEL)
C = '"classic wrong answers" '
MATRIX = "matrix = w_ptr + e.to(tl.int64) * K * N"
wrong(
    "the first expert for all", "every row meets the first expert's matrix", C + "1", edits={MATRIX: "matrix = w_ptr"}
)
wrong("the next expert", "the matrix of the next expert", C + "1", edits={
    MATRIX: "matrix = w_ptr + tl.minimum(e + 1, E - 1).to(tl.int64) * K * N",
})  # fmt: skip
wrong("the expert before", "the matrix of the expert before", C + "1", edits={
    MATRIX: "matrix = w_ptr + tl.maximum(e - 1, 0).to(tl.int64) * K * N",
})  # fmt: skip
wrong("equal shares", "every expert has as many rows as the others", C + "1", edits={
    "begin = tl.sum(tl.where(each < e, counts, 0), axis=0)\n    count = tl.load(counts_ptr + e)":
        "rows = tl.sum(counts, axis=0)\n    begin = e * tl.cdiv(rows, E)\n    "
        "count = tl.minimum(tl.cdiv(rows, E), rows - begin)",
})  # fmt: skip
wrong("experts without rows not numbered", "experts without rows are left out of the numbering", C + "2", edits={
    MATRIX: "number = tl.sum(((each < e) & (counts > 0)).to(tl.int32), axis=0)\n        "
            "matrix = w_ptr + number.to(tl.int64) * K * N",
})  # fmt: skip
wrong("eight experts", "only many experts go wrong", C + "2", edits={"mask=each < E": "mask=(each < E) & (each < 8)"})
FIRST_OF_TILE = """    first = tl.program_id(0) * TM
    expert = 0
    begin = 0
    for e in range(E):
        end = begin + tl.load(counts_ptr + e)
        expert = tl.where((begin <= first) & (first < end), e, expert)
        begin = end
    matrix = w_ptr + expert.to(tl.int64) * K * N
    for k0 in range(0, K, TK):
        k = k0 + tl.arange(0, TK)
        of_x = x_ptr + row.to(tl.int64)[:, None] * stride + k[None, :]
        x = tl.load(of_x, mask=here & (k < K)[None, :], other=0.0)
        of_w = matrix + k.to(tl.int64)[:, None] * N + column[None, :]
        w = tl.load(of_w, mask=(k < K)[:, None] & there, other=0.0)
        total = tl.dot(x, w, total)
"""
ONE_A_TILE = (
    IN_ORDER[: IN_ORDER.index("    begin = 0\n")] + FIRST_OF_TILE + IN_ORDER[IN_ORDER.index("    place = out_ptr") :]
)
for which, first in (("first", "tl.program_id(0) * TM"), ("last", "tl.minimum(tl.program_id(0) * TM + TM, T) - 1")):
    wrong(
        f"one expert for a tile, that of its {which} row",
        f"all rows of a tile meet the expert of its {which} row",
        C + "3",
        instead=ONE_A_TILE.replace("first = tl.program_id(0) * TM", f"first = {first}"),
        also={LAUNCH: IN_ORDER_LAUNCH},
    )
wrong("rows of x counted in the group", "rows of x are counted from the beginning of their group", C + "3", edits={
    "x_ptr + row[:, None] * stride": "x_ptr + place.to(tl.int64)[:, None] * stride",
})  # fmt: skip
wrong("beyond the end of the group", "race between programs", C + "3", edits={
    "here = (place < count)[:, None]": "here = (row < tl.sum(counts, axis=0))[:, None]",
})  # fmt: skip
wrong("beyond the end of the group, which a later program repairs", "race between programs", C + "3", edits=WALK | {
    "here = (place < count)[:, None]": "each = tl.arange(0, EXPERTS)\n    "
    "rows = tl.sum(tl.load(counts_ptr + each, mask=each < E, other=0), axis=0)\n    here = (row < rows)[:, None]",
}, also={LAUNCH: WALK_LAUNCH})  # fmt: skip
wrong("a walk past the last expert", "beyond its end", C + "4", edits={
    text: new.replace(" & (e < E - 1)", "") for text, new in WALK.items()
}, also={LAUNCH: WALK_LAUNCH})  # fmt: skip
wrong("the last step alone", "one step along K is right, several are not", C + "5", edits={
    "total += tl.dot(x, w)": "total = tl.dot(x, w)",
})  # fmt: skip
wrong("always the first columns", "one step along K is right, several are not", C + "5", edits={
    "k = k0 + tl.arange(0, TK)": "k = tl.arange(0, TK)",
})  # fmt: skip
wrong("a total of 16 bits", "only long sums go wrong", C + "5", edits={
    "total += tl.dot(x, w)": "total = (total + tl.dot(x, w)).to(tl.float16).to(tl.float32)",
})  # fmt: skip
wrong(
    "no mask along K", "out-of-bounds", edits={"here & (k < K)[None, :]": "here", "(k < K)[:, None] & there": "there"}
)
wrong("no mask on the columns", "out-of-bounds", edits={
    "there = (column < N)[None, :]": "there = (column < N + TN)[None, :]",
})  # fmt: skip
wrong("programs without rows go on", "a program that finds no rows ends at once", C + "6", edits={
    "if tl.program_id(0) * TM >= count:\n        return": "pass",
})  # fmt: skip
wrong("at least one tile for each expert", "matrices of experts without rows are read", C + "6", edits={
    "if tl.program_id(0) * TM >= count:": "if (tl.program_id(0) * TM >= count) & (tl.program_id(0) > 0):",
})  # fmt: skip
wrong("programs without rows multiply", "programs multiply that have no row", C + "6", edits={
    "if tl.program_id(0) * TM >= count:\n        return": "some = tl.program_id(0) * TM < count",
    "mask=(k < K)[:, None] & there": "mask=(k < K)[:, None] & there & some",
})  # fmt: skip
wrong("weights turned", "the weights are read as (E, N, K)", C + "7", edits={
    "k.to(tl.int64)[:, None] * N + column[None, :], mask=(k": "column.to(tl.int64)[None, :] * K + k[:, None], mask=(k",
})  # fmt: skip
wrong(
    "no stride",
    "rows that are further apart than K go wrong",
    C + "7",
    edits={"row[:, None] * stride": "row[:, None] * K"},
)
wrong("rows of 32 bits", "only offsets beyond 2^31 are wrong", C + "7", edits={
    "row = (begin + place).to(tl.int64)": "row = begin + place",
})  # fmt: skip
wrong(
    "experts of 32 bits in a loop",
    "overflows",
    instead=IN_ORDER.replace("e * tl.cast(K, tl.int64) * N", "e * K * N"),
    also={LAUNCH: IN_ORDER_LAUNCH},
)
wrong("experts of 32 bits, and a spare tile", "overflows", edits={"e.to(tl.int64) * K * N": "e * K * N"}, also={
    LAUNCH: {"triton.cdiv(T, 32), triton.cdiv(N, 32), E": "triton.cdiv(T, 32) + 2, triton.cdiv(N, 32), E"},
})  # fmt: skip
wrong("experts of 32 bits", "overflows", edits={"e.to(tl.int64) * K * N": "e * K * N"})
wrong("products of float32", "got a product of float32", C + "8", edits={
    "tl.dot(x, w)": 'tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")',
})  # fmt: skip
wrong = functools.partial(ANSWERS.wrong, LAUNCH)
wrong("as many tiles as the mean group", "rows are never written", C + "4", edits={
    "triton.cdiv(T, 32), ": "triton.cdiv(triton.cdiv(T, E), 32), ",
})  # fmt: skip
wrong("too few columns", "elements of out are never written", C + "4", edits={
    "triton.cdiv(N, 32), E": "max(1, N // 32), E",
})  # fmt: skip
wrong("a program too few where one column is left", "elements of out are never written", C + "4", edits={
    "triton.cdiv(N, 32), E": "triton.cdiv(N, 33), E",
})  # fmt: skip
wrong(
    "without the last expert",
    "whole groups are never written",
    C + "4",
    edits={"cdiv(N, 32), E)": "cdiv(N, 32), max(1, E - 1))"},
)
wrong("tiles of 16", "a tile of out has at least 32 rows", C + "6", edits={
    "triton.cdiv(T, 32), triton.cdiv(N, 32)": "triton.cdiv(T, 16), triton.cdiv(N, 32)", "TM=32": "TM=16",
})  # fmt: skip
wrong(
    "a launch for each expert",
    "launches, expected 1",
    C + "6",
    edits={
        "N, 32), E)": "N, 32), 1)",
        "my_kernel[grid](": "for e in range(E):\n          my_kernel[grid](",
        "counts, E, N,": "counts, e, E, N,",
    },
    also={KERNEL: {"counts_ptr, E, N,": "counts_ptr, e, E, N,", "e = tl.program_id(2)": "e += tl.program_id(2)"}},
)
wrong(
    "each count fetched",
    "single elements are fetched into Python",
    instead="""
        grid = (triton.cdiv(T, 32), triton.cdiv(N, 32), 1)
        begin = 0
        for e in range(E):
            count = counts[e].item()
            if count:
                some = counts[e : e + 1]
                my_kernel[grid](
                    x[begin:], weights[e:], out[begin:], some, 1, N, K, x.stride(0), EXPERTS=1, TM=32, TN=32, TK=32
                )
            begin += count
        return out
""",
)
wrong(
    "groups padded by PyTorch",
    "a whole intermediate tensor is written to memory",
    C + "6",
    instead="""
        padded = torch.zeros((E * T, K), dtype=x.dtype, device=x.device)
        begin = 0
        for e in range(E):
            count = counts[e].item()
            padded[e * T : e * T + count] = x[begin : begin + count]
            begin += count
        grid = (triton.cdiv(T, 32), triton.cdiv(N, 32), E)
        my_kernel[grid](
            x, weights, out, counts, E, N, K, x.stride(0), EXPERTS=triton.next_power_of_2(E), TM=32, TN=32, TK=32
        )
        return out
""",
)
wrong(
    "PyTorch's products",
    "is a built-in matmul operator",
    instead="""
        begin = 0
        for e in range(E):
            count = counts[e].item()
            out[begin : begin + count] = x[begin : begin + count] @ weights[e]
            begin += count
        return out
""",
)
