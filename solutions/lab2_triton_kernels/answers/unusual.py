"""Right answers to lab 2 that few would write: other loops, other masks, other formulas, other ways to cut the work."""

from __future__ import annotations

from utils.checks.answers import Answers

from . import cross_entropy, rms_norm

ANSWERS = Answers()
also_right = ANSWERS.also_right
INFINITE = '-float("inf")'

# ---- 2.1: GeLU
KERNEL, LAUNCH = "2.1: GeLU", "2.1: GeLU, the launch"
FORMULA = "y = x / (1 + tl.exp(-2 * u))"
also_right("a sigmoid", {KERNEL: {FORMULA: "y = x * tl.sigmoid(2 * u)"}})
also_right("tanh by its definition", {
    KERNEL: {FORMULA: "e = tl.exp(-2 * tl.abs(u))\n        tanh = (1 - e) / (1 + e)\n        "
                      "y = 0.5 * x * (1 + tl.where(u < 0, -tanh, tanh))"},
})  # fmt: skip
also_right("powers of two, Horner's way", {
    KERNEL: {
        "u = 0.7978845608028654 * (x + 0.044715 * x * x * x)": "u = x * (0.7978845608028654 + 0.035677408136 * x * x)",
        FORMULA: "y = x / (1.0 + tl.exp2(-2.8853900817779268 * u))",
    },
})  # fmt: skip
also_right("two blocks in each program", {
    KERNEL: """
        pairs = tl.cdiv(columns, 2 * BLOCK)
        row = tl.program_id(0).to(tl.int64) // pairs
        first = tl.program_id(0).to(tl.int64) % pairs * 2 * BLOCK
        start = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
        for half in tl.static_range(2):
            column = first + half * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(start + column * stride_col, mask=column < columns, other=0).to(tl.float32)
            cube = x * x * x
            inner = tl.clamp(2 * 0.7978845608028654 * (x + 0.044715 * cube), -80.0, 80.0)
            gate = 1 / (1 + tl.exp(-inner))
            gate = tl.where(x != x, x, gate)
            tl.store(out_ptr + row * columns + column, x * gate, mask=column < columns)
    """,
    LAUNCH: """
        def grid(meta):
            return (rows.count * triton.cdiv(rows.columns, 2 * meta["BLOCK"]),)

        arguments = (x, out, rows.columns) + rows.layout_args
        gelu_kernel[grid](*arguments, BLOCK=512, INT64=True)
        return out
    """,
})  # fmt: skip
also_right("a loop in the program", {
    KERNEL: """
        row = tl.program_id(0).to(tl.int64)
        base = row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
        first = tl.program_id(1).to(tl.int64) * BLOCK
        for begin in range(first, columns, tl.num_programs(1) * BLOCK):
            lanes = begin + tl.arange(0, BLOCK).to(tl.int64)
            x = tl.load(x_ptr + base + col_offset(lanes, stride_col, INT64), mask=lanes < columns, other=0.0)
            x = x.to(tl.float32)
            u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
            y = x / (1 + tl.exp(-2 * u))
            tl.store(out_ptr + row * columns + lanes, y.to(out_ptr.dtype.element_ty), mask=lanes < columns)
    """,
    LAUNCH: """
        grid = (rows.count, min(triton.cdiv(rows.columns, 1024), 16384))
        gelu_kernel[grid](x, out, rows.columns, *rows.layout_args, BLOCK=1024, INT64=rows.needs_int64)
        return out
    """,
})  # fmt: skip

# ---- 2.2: bias and ReLU
FORWARD, FORWARD_LAUNCH = "2.2: bias and ReLU", "2.2: bias and ReLU, the launch"
BACKWARD, BACKWARD_LAUNCH = "2.2: backward of bias and ReLU", "2.2: backward of bias and ReLU, the launch"
CUT, DX = "y = tl.where(y < 0, 0.0, y)", "dx = tl.where(out <= 0, 0.0, dout)"
also_right("a maximum that keeps NaN", {
    FORWARD: {CUT: "y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)"},
})  # fmt: skip
also_right("comparisons one after the other", {
    FORWARD: {CUT: "y = tl.where(y > 0, y, tl.where(y != y, y, 0.0))"},
    BACKWARD: {DX: "dx = tl.where(~(out <= 0), dout, 0.0)"},
})  # fmt: skip
also_right("conditions turned round", {
    FORWARD: {CUT: "y = tl.where((y >= 0) | (y != y), y, 0.0)",
              "mask=column < columns).to(tl.float32)": "mask=column < columns, other=0.0).to(tl.float32)"},
    BACKWARD: {DX: "dx = dout * (1 - (out <= 0).to(tl.float32))\n            dx = tl.where(out <= 0, 0.0, dx)"},
})  # fmt: skip
also_right("the sums added row by row", {
    BACKWARD: {
        "sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)": "sums = tl.zeros((BLOCK,), dtype=tl.float32)",
        "sums += dx": "sums = sums + tl.sum(dx, axis=0)",
        "tl.sum(sums, axis=0)": "sums",
    },
    BACKWARD_LAUNCH: """
        launch = bias_relu_backward_kernel[(triton.cdiv(rows.columns, tile.block) * splits, 1, 1)]
        options = dict(ROWS=tile.rows, BLOCK=tile.block, INT64=rows.needs_int64, STAGES=1)
        launch(dout, out, dx, partial, rows.count, rows.columns, *rows.layout_args, tiles_per_split, **options)
        dbias = column_sums(partial, out.dtype)
        return dx, dbias
    """,
})  # fmt: skip
also_right("a grid of two axes", {
    FORWARD: """
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = row < num_rows
        mask &= column < columns
        where_x = row_offset(row, size_1, size_2, stride_0, stride_1, stride_2) + column.to(tl.int64) * stride_col
        x = tl.load(x_ptr + where_x, mask, other=0)
        b = tl.load(bias_ptr + column.to(tl.int64) * stride_bias, column < columns, other=0)
        y = x.to(tl.float32) + b.to(tl.float32)
        tl.store(out_ptr + row * columns + column, tl.where(y < 0.0, 0.0, y), mask)
    """,
    FORWARD_LAUNCH: """
        height, width = 8, 64
        bias_relu_kernel[triton.cdiv(rows.count, height), triton.cdiv(rows.columns, width)](
            x, bias, out, rows.count, rows.columns, *rows.layout_args, *bias.stride(),
            ROWS=height, BLOCK=width, INT64=True,
        )
        return out
    """,
})  # fmt: skip

# ---- 2.3: RMSNorm
KERNELS, CALL = rms_norm.KERNELS, rms_norm.CALL
also_right("a square root and a mean", {
    KERNELS: {"r = tl.rsqrt(squares / columns + eps)": "mean = squares / columns\n    r = 1.0 / tl.sqrt(eps + mean)"},
})  # fmt: skip
also_right("the weight last", {
    KERNELS: {"y = x * r[:, None] * w[None, :]": "n = x * r[:, None]\n    y = w[None, :] * n",
              "dx = r * (gw - second)": "dx = gw * r - second * r"},
    CALL: "normalised = Normalised.apply(x, weight, float(eps))\nreturn normalised",
})  # fmt: skip
also_right("x where others have the normalised row", {
    KERNELS: {
        "second = n * (tl.sum(gw * n, axis=1)[:, None] / columns)":
            "second = x * (r * r * tl.sum(gw * x, axis=1)[:, None] / columns)",
        "dx = r * (gw - second)": "dx = r * (gw - second)\n        dx = tl.where(mask, dx, 0.0)",
    },
})  # fmt: skip
also_right("what is kept is the mean of the squares", {
    KERNELS: {
        "tl.store(r_ptr + row, r)": "tl.store(r_ptr + row, squares / columns)",
        "WIDTH: tl.constexpr,\n):": "eps, WIDTH: tl.constexpr,\n):",
        "r = tl.load(r_ptr + row)[:, None]": "r = tl.rsqrt(tl.load(r_ptr + row)[:, None] + eps)",
        "ctx.save_for_backward(x, weight, r)": "ctx.save_for_backward(x, weight, r)\n        ctx.eps = eps",
        "weight.stride(0), WIDTH=width,": "weight.stride(0), ctx.eps, WIDTH=width,",
    },
})  # fmt: skip

# ---- 2.4: cross-entropy
KERNELS, CALL = cross_entropy.KERNELS, cross_entropy.CALL
also_right("powers of two", {
    KERNELS: {"p = tl.exp(x - lse)": "p = tl.exp2((x - lse) * 1.4426950408889634)", "1024": "256"},
})  # fmt: skip
also_right("one maximum for the row", {
    KERNELS: {
        "largest = tl.full((1, WIDTH), -3.0e38, tl.float32)": "largest = tl.full((1, 1), -3.0e38, tl.float32)",
        "sums = tl.full((1, WIDTH), 0.0, tl.float32)": "sums = tl.zeros((1, 1), tl.float32)",
        "new = tl.maximum(largest, x)": "new = tl.maximum(largest, tl.max(x, axis=1)[:, None])",
        "+ tl.exp(x - new)": "+ tl.sum(tl.exp(x - new), axis=1)[:, None]",
    },
})  # fmt: skip
also_right("the target's logit found on the way", {
    KERNELS: {
        "for start in range(0, columns, WIDTH):\n        column = start + lanes":
            "chosen = tl.zeros((1,), tl.float32)\n    for start in range(0, columns, WIDTH):\n"
            "        column = start + lanes",
        "        new = tl.maximum(largest, x)":
            "        chosen += tl.sum(tl.where(column[None, :] == target[:, None], x, 0.0), axis=1)\n"
            "        new = tl.maximum(largest, x)",
        "    place = tl.sum(element_offsets(row, tl.where(counts, target, 0), layout), axis=1)\n": "",
        "    chosen = tl.load(x_ptr + place).to(tl.float32)\n": "",
    },
})  # fmt: skip
also_right("one subtracted at the target alone", {
    KERNELS: {
        "hit = (column[None, :] == target).to(tl.float32)": "one = column[None, :] == target",
        "dx = (p - hit) * d": "dx = tl.where(one, p - 1, p) * d",
        "dx = tl.where(target == ignored, 0.0, dx)": "dx = tl.where(target != ignored, dx, 0.0)",
    },
    CALL: "apply = Losses.apply\nreturn apply(logits, target, ignore_index)",
})  # fmt: skip

# ---- 2.5: softmax of short rows
SHORT, SHORT_LAUNCH = "2.5: softmax of short rows", "2.5: softmax of short rows, the launch"
NUMERATOR = "numerator = tl.exp(x - tl.max(x, axis=1)[:, None])"
QUOTIENT = "y = numerator / tl.sum(numerator, axis=1)[:, None]"
also_right("Triton's own softmax", {
    SHORT: {NUMERATOR: "y = tl.softmax(x, dim=1, keep_dims=True)", QUOTIENT: ""},
})  # fmt: skip
also_right("the logarithm of the sum", {
    SHORT: {NUMERATOR: "x = x - tl.max(x, axis=1)[:, None]",
            QUOTIENT: "y = tl.exp(x - tl.log(tl.sum(tl.exp(x), 1))[:, None])"},
})  # fmt: skip
also_right("kept axes, powers of two, a product with the reciprocal", {
    SHORT: {NUMERATOR: "numerator = tl.exp2(1.4426950408889634 * (x - tl.max(x, axis=1, keep_dims=True)))",
            QUOTIENT: "y = numerator * (1 / tl.sum(numerator, axis=1, keep_dims=True))"},
})  # fmt: skip
also_right("a row for each program", {
    SHORT: """
        row = tl.program_id(0).to(tl.int64)
        lanes = tl.arange(0, BLOCK)
        inside = lanes < columns
        start = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
        x = tl.load(start + lanes.to(tl.int64) * stride_col, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x, float("-inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * columns + lanes, e / tl.sum(e, axis=0), mask=inside)
    """,
    SHORT_LAUNCH: """
        softmax_short_kernel[(rows.count,)](
            x, out, rows.count, rows.columns, *rows.layout_args,
            ROWS=1, BLOCK=triton.next_power_of_2(rows.columns), INT64=rows.needs_int64,
        )
        return out
    """,
})  # fmt: skip

# ---- 2.6: softmax of long rows
LONG, LONG_LAUNCH = "2.6: softmax of long rows", "2.6: softmax of long rows, the launch"
also_right("a maximum that starts at -inf", {
    LONG: {
        "-3.0e38": INFINITE,
        "total = total *": "rest = tl.where(new_maximum > -3e38, new_maximum, 0.0)\n            total = total *",
        "tl.exp(maximum - new_maximum)": "tl.exp(maximum - rest)",
        "tl.exp(x - new_maximum)": "tl.exp(x - rest)",
    },
})  # fmt: skip
also_right("sums for each lane", {
    LONG: {
        "tl.full((), -3.0e38, tl.float32)": "tl.full((BLOCK,), -3.0e38, tl.float32)",
        "tl.full((), 0.0, tl.float32)": "tl.zeros((BLOCK,), tl.float32)",
        "tl.max(x, axis=0)": "x",
        "tl.sum(tl.exp(x - new_maximum), axis=0)": "tl.exp(x - new_maximum)",
        "for again in range": "top = tl.max(maximum, axis=0)\n"
                              "        total = tl.sum(total * tl.exp(maximum - top), axis=0)\n"
                              "        for again in range",
        "tl.exp(x - maximum) / total": "tl.exp(x - top) / total",
    },
})  # fmt: skip
also_right("the logarithm of the sum", {
    LONG: {"tl.exp(x - maximum) / total": "tl.exp((x - maximum) - tl.log(total))"},
})  # fmt: skip
also_right("while loops", {
    LONG: """
        row = tl.program_id(0).to(tl.int64)
        base = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
        step = tl.arange(0, BLOCK)
        m = -3.4e38
        l = 0.0
        at = 0
        while at < columns:
            inside = step < columns - at
            x = tl.load(base + col_offset(at + step, stride_col, INT64), mask=inside, other=float("-inf"))
            x = x.to(tl.float32)
            m_new = tl.maximum(m, tl.max(x))
            l = l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new))
            m = m_new
            at += BLOCK
        scale = 1.0 / l
        at = 0
        while at < columns:
            inside = step < columns - at
            x = tl.load(base + col_offset(at + step, stride_col, INT64), mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + row * columns + at + step, scale * tl.exp(x - m), mask=inside)
            at += BLOCK
    """,
    LONG_LAUNCH: """
        kernel = softmax_long_kernel[lambda meta: (rows.count, 1)]
        kernel(x, out, rows.columns, *rows.layout_args, BLOCK=4096, INT64=rows.needs_int64, num_warps=8)
        return out
    """,
})  # fmt: skip

# ---- 2.7: tiled matmul
TILED, TILED_LAUNCH = "2.7: tiled matmul", "2.7: tiled matmul, the launch"
also_right("rows that wrap around", {
    TILED: {
        "row[:, None] * stride_am": "(row % M)[:, None] * stride_am",
        "column[None, :] * stride_bn": "(column % N)[None, :] * stride_bn",
        "mask=(row[:, None] < M) & (inner[None, :] < K - start)": "mask=inner[None, :] < K - start",
        "mask=(inner[:, None] < K - start) & (column[None, :] < N)": "mask=inner[:, None] < K - start",
    },
})  # fmt: skip
also_right("products added by hand", {
    TILED: {'total = tl.dot(a, b, total, input_precision="ieee")': 'total += tl.dot(a, b, input_precision="ieee")'},
    TILED_LAUNCH: """
        strides = (*a.stride(), *b.stride(), c.stride(0))
        constants = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP_M": group, "INT64": wide}
        tiled_matmul_kernel[lambda m: (triton.cdiv(M, m["BLOCK_M"]) * triton.cdiv(N, m["BLOCK_N"]),)](
            a, b, c, M, N, K, *strides, **constants
        )
        return c
    """,
})  # fmt: skip
also_right("pointers anew in each step", {
    TILED: """
        rm = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        rn = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            k = (step * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
            a = tl.load(a_ptr + rm * stride_am + k[None, :] * stride_ak, (rm < M) & (k[None, :] < K), other=0)
            b = tl.load(b_ptr + k[:, None] * stride_bk + rn * stride_bn, (k[:, None] < K) & (rn < N), other=0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        tl.store(c_ptr + rm * stride_cm + rn, acc.to(c_ptr.dtype.element_ty), (rm < M) & (rn < N))
    """,
})  # fmt: skip
also_right("the whole tiles of K apart", {
    TILED: {
        "for start in range(0, K, BLOCK_K):":
            "whole = K // BLOCK_K * BLOCK_K\n        for start in range(0, whole, BLOCK_K):",
        "mask=(row[:, None] < M) & (inner[None, :] < K - start)": "mask=row[:, None] < M",
        "mask=(inner[:, None] < K - start) & (column[None, :] < N)": "mask=column[None, :] < N",
        "        mask = (row[:, None] < M) & (column[None, :] < N)": """\
        if whole < K:
            a = tl.load(a_ptrs, mask=(row[:, None] < M) & (inner[None, :] < K - whole), other=0.0)
            b = tl.load(b_ptrs, mask=(inner[:, None] < K - whole) & (column[None, :] < N), other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        mask = (row[:, None] < M) & (column[None, :] < N)""",
    },
})  # fmt: skip

# ---- 2.8: grouped matmul
ORDER, TILE = "2.8: grouped order", "2.8: a tile through descriptors"
also_right("tl.swizzle2d's formula with minimum", {
    ORDER: """
        group = pid // (GROUP_M * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        inside = pid - group * GROUP_M * tiles_n
        tile_n = inside // height
        tile_m = group * GROUP_M + inside - tile_n * height
        return tile_m, tile_n
    """,
    TILE: {"total = tl.dot(a, b, total, ": "total += tl.dot(a, b, "},
})  # fmt: skip
also_right("a condition for the last group", {
    ORDER: """
        group, place = pid // (tiles_n * GROUP_M), pid % (tiles_n * GROUP_M)
        left = tiles_m - group * GROUP_M
        height = left if left < GROUP_M else GROUP_M
        return place % height + group * GROUP_M, place // height
    """,
    TILE: """
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            start = step * BLOCK_K
            a = tl.trans(a_desc.load([start, row])) if A_COL_MAJOR else a_desc.load([row, start])
            b = tl.trans(b_desc.load([column, start])) if B_COL_MAJOR else b_desc.load([start, column])
            total = tl.dot(a, b, acc=total, input_precision="ieee")
    """,
})  # fmt: skip
also_right("tl.where", {
    ORDER: """
        tiles_of_group = GROUP_M * tiles_n
        group = pid // tiles_of_group
        full = (group + 1) * GROUP_M <= tiles_m
        height = tl.where(full, GROUP_M, tiles_m - group * GROUP_M)
        return group * GROUP_M + (pid % tiles_of_group) % height, (pid % tiles_of_group) // height
    """,
    TILE: {".T\n": ".trans()\n"},
})  # fmt: skip
also_right("a transposed product", {
    ORDER: {"rows = min(tiles_m - first, GROUP_M)": "rows = min(GROUP_M, tiles_m - first)"},
    TILE: """
        transposed = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            if A_COL_MAJOR:
                a = a_desc.load([start, row])
            else:
                a = a_desc.load([row, start]).T
            if B_COL_MAJOR:
                b = b_desc.load([column, start])
            else:
                b = b_desc.load([start, column]).T
            transposed = tl.dot(b, a, transposed, input_precision="ieee")
        total = transposed.T
    """,
})  # fmt: skip
