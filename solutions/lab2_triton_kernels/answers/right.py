"""Plain answers to lab 2, as a student might write them: right, and without the solution's tuning.

A test fills the lab's places with them, so that the checks are held to an answer that is not the solution, and wrong
answers are edits of these.
"""

from __future__ import annotations

from utils.checks.answers import Answers

#: What stands in each place, by the label that the place has in the solution.
ANSWERS = Answers(
    {
        "2.1: GeLU": """
        blocks_per_row = tl.cdiv(columns, BLOCK)
        pid = tl.program_id(0).to(tl.int64)
        row = pid // blocks_per_row
        start = pid % blocks_per_row * BLOCK
        lanes = tl.arange(0, BLOCK)
        mask = start + lanes < columns
        x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
        x = tl.load(x_row + col_offset(start + lanes, stride_col, INT64), mask=mask)
        x = x.to(tl.float32)
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1 + tl.exp(-2 * u))
        tl.store(out_ptr + row * columns + start + lanes, y.to(out_ptr.dtype.element_ty), mask=mask)
        """,
        "2.1: GeLU, the launch": """
        grid = (rows.count * triton.cdiv(rows.columns, tile.block),)
        gelu_kernel[grid](
            x, out, rows.columns, *rows.layout_args, BLOCK=tile.block, INT64=rows.needs_int64, num_warps=tile.warps
        )
        return out
        """,
        "2.2: bias and ReLU": """
        blocks_per_row = tl.cdiv(columns, BLOCK)
        pid = tl.program_id(0).to(tl.int64)
        row = pid // blocks_per_row * ROWS + tl.arange(0, ROWS)
        column = pid % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
        mask = (row[:, None] < num_rows) & (column[None, :] < columns)
        x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
        x = tl.load(x_row[:, None] + col_offset(column, stride_col, INT64)[None, :], mask=mask).to(tl.float32)
        bias = tl.load(bias_ptr + col_offset(column, stride_bias, INT64), mask=column < columns).to(tl.float32)
        y = x + bias[None, :]
        y = tl.where(y < 0, 0.0, y)
        tl.store(out_ptr + row[:, None] * columns + column[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
        """,
        "2.2: bias and ReLU, the launch": """
        grid = (triton.cdiv(rows.count, tile.rows) * triton.cdiv(rows.columns, tile.block),)
        bias_relu_kernel[grid](
            x, bias, out, rows.count, rows.columns, *rows.layout_args, bias.stride(0),
            ROWS=tile.rows, BLOCK=tile.block, INT64=rows.needs_int64 or bias.stride(0) > 1, num_warps=tile.warps,
        )
        return out
        """,
        "2.2: backward of bias and ReLU": """
        blocks_per_row = tl.cdiv(columns, BLOCK)
        pid = tl.program_id(0).to(tl.int64)
        split = pid // blocks_per_row
        column = pid % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
        sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for tile in range(0, tiles_per_split):
            row = (split * tiles_per_split + tile) * ROWS + tl.arange(0, ROWS)
            mask = (row[:, None] < num_rows) & (column[None, :] < columns)
            dout_row = dout_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
            dout = tl.load(dout_row[:, None] + col_offset(column, stride_col, INT64)[None, :], mask=mask, other=0.0)
            dout = dout.to(tl.float32)
            out = tl.load(out_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
            dx = tl.where(out <= 0, 0.0, dout)
            tl.store(dx_ptr + row[:, None] * columns + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
            sums += dx
        tl.store(partial_ptr + split * columns + column, tl.sum(sums, axis=0), mask=column < columns)
        """,
        "2.2: backward of bias and ReLU, the launch": """
        grid = (splits * triton.cdiv(rows.columns, tile.block),)
        bias_relu_backward_kernel[grid](
            dout, out, dx, partial, rows.count, rows.columns, *rows.layout_args, tiles_per_split,
            ROWS=tile.rows, BLOCK=tile.block, INT64=rows.needs_int64, STAGES=tile.stages, num_warps=tile.warps,
        )
        return dx, column_sums(partial, out.dtype)
        """,
        "2.5: softmax of short rows": """
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK)
        mask = (row[:, None] < num_rows) & (column[None, :] < columns)
        x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
        x = tl.load(x_row[:, None] + col_offset(column, stride_col, INT64)[None, :], mask=mask, other=-float("inf"))
        x = x.to(tl.float32)
        numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
        y = numerator / tl.sum(numerator, axis=1)[:, None]
        tl.store(out_ptr + row[:, None] * columns + column[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
        """,
        "2.5: softmax of short rows, the launch": """
        grid = (triton.cdiv(rows.count, tile.rows),)
        softmax_short_kernel[grid](
            x, out, rows.count, rows.columns, *rows.layout_args,
            ROWS=tile.rows, BLOCK=tile.block, INT64=rows.needs_int64, num_warps=tile.warps,
        )
        return out
        """,
        "2.6: softmax of long rows": """
        row = tl.program_id(0).to(tl.int64)
        x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
        lanes = tl.arange(0, BLOCK)
        maximum = tl.full((), -3.0e38, tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + lanes
            x_ptrs = x_row + col_offset(column, stride_col, INT64)
            x = tl.load(x_ptrs, mask=column < columns, other=-float("inf")).to(tl.float32)
            new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
            total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(x - new_maximum), axis=0)
            maximum = new_maximum
        for again in range(0, columns, BLOCK):
            column = again + lanes
            x = tl.load(x_row + col_offset(column, stride_col, INT64), mask=column < columns).to(tl.float32)
            y = tl.exp(x - maximum) / total
            tl.store(out_ptr + row * columns + column, y.to(out_ptr.dtype.element_ty), mask=column < columns)
        """,
        "2.6: softmax of long rows, the launch": """
        softmax_long_kernel[(rows.count,)](
            x, out, rows.columns, *rows.layout_args, BLOCK=tile.block, INT64=rows.needs_int64, num_warps=tile.warps
        )
        return out
        """,
        "2.7: tiled matmul": """
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        if INT64:
            row, column, inner = row.to(tl.int64), column.to(tl.int64), inner.to(tl.int64)
        a_ptrs = a_ptr + row[:, None] * stride_am + inner[None, :] * stride_ak
        b_ptrs = b_ptr + inner[:, None] * stride_bk + column[None, :] * stride_bn
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            a = tl.load(a_ptrs, mask=(row[:, None] < M) & (inner[None, :] < K - start), other=0.0)
            b = tl.load(b_ptrs, mask=(inner[:, None] < K - start) & (column[None, :] < N), other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            a_ptrs += BLOCK_K * stride_ak
            b_ptrs += BLOCK_K * stride_bk
        mask = (row[:, None] < M) & (column[None, :] < N)
        tl.store(c_ptr + row[:, None] * stride_cm + column[None, :], total.to(c_ptr.dtype.element_ty), mask=mask)
        """,
        "2.7: tiled matmul, the launch": """
        grid = (triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n),)
        tiled_matmul_kernel[grid](
            a, b, c, M, N, K, *a.stride(), *b.stride(), c.stride(0),
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=group, INT64=wide,
            num_warps=tile.warps, num_stages=tile.stages,
        )
        return c
        """,
        "2.8: grouped order": """
        tiles_per_group = GROUP_M * tiles_n
        first = pid // tiles_per_group * GROUP_M
        rows = min(tiles_m - first, GROUP_M)
        place = pid % tiles_per_group
        return first + place % rows, place // rows
        """,
        "2.8: a tile through descriptors": """
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            if A_COL_MAJOR:
                a = a_desc.load([start, row]).T
            else:
                a = a_desc.load([row, start])
            if B_COL_MAJOR:
                b = b_desc.load([column, start]).T
            else:
                b = b_desc.load([start, column])
            total = tl.dot(a, b, total, input_precision="ieee")
        """,
    }
)
