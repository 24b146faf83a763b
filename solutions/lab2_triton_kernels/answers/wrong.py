"""Wrong answers to lab 2, each with one mistake, and what the check must say of it.

A wrong answer is an edit of a plain right one (:mod:`.right`), written as the mistake is made: these words
stand where those belong.
"""

from __future__ import annotations

from .right import ANSWERS

wrong = ANSWERS.wrong

ROW_OFFSET = "row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)"
UNMASKED = "is there a mask that compares"


def wrong_splits(stage: str, launch: str, gradient: str, term: str, adding: int, sharing: int) -> None:
    """Wrong sums of splits over rows, with the places of adding and of sharing in the exercise's list."""
    last, own = f'"classic wrong answers" {adding}', f'"classic wrong answers" {sharing}'
    only_last = f"{gradient} holds the last tile of each split only"
    wrong(stage, "last tile of a split", only_last, last, edits={f"sums += {term}": f"sums = {term}"})
    same = "splits write the same partial sums"
    wrong(stage, "splits share a row", same, own, edits={"partial_ptr + split * columns": "partial_ptr"})
    wrong(
        stage,
        "atomics",
        "partial_ptr is updated by atomic operations",
        "differs from run to run",
        edits={"tl.store(partial_ptr + split * columns": "tl.atomic_add(partial_ptr"},
        also={launch: {"grid = ": "partial.zero_()\n        grid = "}},
    )


# ---- 2.1 GeLU
GELU, GELU_LAUNCH = "2.1: GeLU", "2.1: GeLU, the launch"
GELU_Y = "y = x / (1 + tl.exp(-2 * u))"
GELU_U = "u = 0.7978845608028654 * (x + 0.044715 * x * x * x)"
GELU_LOAD = "x = tl.load(x_row + col_offset(start + lanes, stride_col, INT64), mask=mask)"
wrong(GELU, "no mask", "out-of-bounds accesses", "wrote out_ptr", UNMASKED, edits={", mask=mask": ""})
wrong(GELU, "no mask on the load", "outside of its shape", UNMASKED, edits={"INT64), mask=mask": "INT64)"})
wrong(
    GELU_LAUNCH,
    "grid rounded down",
    "the grid has too few programs",
    "triton.cdiv",
    edits={"triton.cdiv(rows.columns, tile.block)": "max(1, rows.columns // tile.block)"},
)
wrong(GELU_LAUNCH, "one row of blocks", "look at how many programs there are", edits={"rows.count * ": ""})
wrong(
    GELU,
    "blocks on axis one",
    "programs, which no GPU launches",
    "at most 65,535 programs",
    edits={
        "row = pid // blocks_per_row": "row = pid",
        "start = pid % blocks_per_row * BLOCK": "start = tl.program_id(1).to(tl.int64) * BLOCK",
    },
    also={
        GELU_LAUNCH: {
            "(rows.count * triton.cdiv(rows.columns, tile.block),)": "rows.count, triton.cdiv(rows.columns, tile.block)"
        }
    },
)
wrong(
    GELU,
    "no step",
    "x_ptr has a stride of its own",
    edits={"col_offset(start + lanes, stride_col, INT64)": "start + lanes"},
)
wrong(
    GELU,
    "one stride for all rows",
    "without one stride from row to row",
    "row_offset",
    edits={ROW_OFFSET: "row * stride_0"},
)
wrong(
    GELU,
    "store ignores the program",
    "only the first program's tile is written",
    edits={"out_ptr + row * columns + start": "out_ptr + row * columns"},
)
wrong(GELU, "no half", "the 0.5 in front is left out", '"classic wrong answers" 3', edits={"y = x /": "y = 2 * x /"})
wrong(GELU, "no cubic term", "the cubic term 0.044715 x^3 is left out", edits={"0.044715": "0.0"})
wrong(
    GELU,
    "bracket",
    "sqrt(2/pi) multiplies x only",
    edits={GELU_U: "u = 0.7978845608028654 * x + 0.044715 * x * x * x"},
)
wrong(GELU, "three u", "with u = 1.197 x + 0.05352 x^3", edits={GELU_Y: "y = x / (1 + tl.exp(-3 * u))"})
wrong(GELU, "no linear term", "u = 0.03568 x^3", edits={"(x + 0.044715 * x * x * x)": "(0.044715 * x * x * x)"})
wrong(
    GELU_LAUNCH,
    "a program too many",
    "no program and no step go",
    edits={"rows.columns, tile": "rows.columns + 1, tile"},
)
wrong(
    GELU,
    "exact form",
    "this is the exact form with erf",
    edits={GELU_Y: "y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))"},
)
wrong(
    GELU,
    "tanh overflows",
    "large values give NaN",
    "inf / inf",
    edits={GELU_Y: "y = 0.5 * x * (1 + (tl.exp(2 * u) - 1) / (tl.exp(2 * u) + 1))"},
)
wrong(
    GELU,
    "through float16",
    "only about three digits are right",
    "rounded to a narrower format",
    edits={"x = x.to(tl.float32)": "x = x.to(tl.float16).to(tl.float32)"},
)
wrong(
    GELU,
    "reads twice",
    "x_ptr is loaded 2.0 times, expected 1",
    "keep it on chip",
    edits={GELU_Y: f"{GELU_LOAD}.to(tl.float32)\n        {GELU_Y}"},
)
wrong(
    GELU_LAUNCH,
    "calls PyTorch",
    "torch.nn.functional.gelu is called by gelu",
    "is a built-in activation operator",
    edits={"grid = ": 'return torch.nn.functional.gelu(x, approximate="tanh")\n        grid = '},
)
wrong(
    GELU_LAUNCH,
    "finished by PyTorch",
    "PyTorch computes part of the result",
    "do this inside yours",
    edits={"return out": "return out * 0.5"},
    also={GELU: {"y = x /": "y = 2 * x /"}},
)

# ---- 2.2 bias and ReLU
RELU, RELU_BACK = "2.2: bias and ReLU", "2.2: backward of bias and ReLU"
RELU_BACK_LAUNCH, RELU_LAUNCH = "2.2: backward of bias and ReLU, the launch", "2.2: bias and ReLU, the launch"
RELU_SUM, RELU_CUT = "y = x + bias[None, :]", "y = tl.where(y < 0, 0.0, y)"
wrong(
    RELU,
    "bias along rows",
    "each row has its own bias here",
    '"classic wrong answers" 1',
    edits={
        "col_offset(column, stride_bias, INT64), mask=column < columns": "row * stride_bias, mask=row < num_rows",
        "bias[None, :]": "bias[:, None]",
    },
)
wrong(
    RELU,
    "bias without its stride",
    "bias_ptr has a stride of its own",
    edits={"col_offset(column, stride_bias, INT64)": "column"},
)
wrong(
    RELU,
    "ReLU first",
    "ReLU is applied before the bias is added",
    '"classic wrong answers" 2',
    edits={RELU_SUM: "y = tl.where(x < 0, 0.0, x) + bias[None, :]", RELU_CUT: ""},
)
wrong(RELU, "no ReLU", "there is no ReLU", edits={RELU_CUT: ""})
wrong(
    RELU_BACK,
    "mask from dout",
    "first mismatch: dx",
    "dout decides what is cut, not out",
    '"classic wrong answers" 3',
    edits={"tl.where(out <= 0": "tl.where(dout <= 0"},
)
wrong(
    RELU_BACK,
    "nothing cut",
    "the derivative of ReLU is left out",
    edits={"dx = tl.where(out <= 0, 0.0, dout)": "dx = dout"},
)
wrong(RELU_BACK, "wrong side cut", "the wrong side of the ReLU is cut", edits={"out <= 0": "out > 0"})
wrong(
    RELU_BACK,
    "sums of dout",
    "dbias sums dout, not what is left of it after the cut",
    '"classic wrong answers" 4',
    edits={"sums += dx": "sums += dout"},
)
wrong_splits(RELU_BACK, RELU_BACK_LAUNCH, "dbias", "dx", adding=6, sharing=5)
wrong(RELU, "rows not masked", "outside of its shape", edits={"row[:, None] < num_rows": "row[:, None] >= 0"})
wrong(
    RELU,
    "bias loaded for each row",
    "bias_ptr is loaded",
    "keep it on chip",
    edits={
        "col_offset(column, stride_bias, INT64), mask=column < columns": "0 * row[:, None]"
        " + col_offset(column, stride_bias, INT64)[None, :], mask=mask",
        "bias[None, :]": "bias",
    },
)
wrong(
    RELU_BACK,
    "tail never written",
    "first mismatch: dx",
    "columns of every row are never written",
    "a row has triton.cdiv(columns, BLOCK) blocks",
    edits={"tl.cdiv(columns, BLOCK)": "tl.maximum(columns // BLOCK, 1)"},
    also={RELU_BACK_LAUNCH: {"triton.cdiv(rows.columns, tile.block)": "max(1, rows.columns // tile.block)"}},
)

wrong(RELU_BACK, "columns not masked", "no mask stops it", edits={" & (column[None, :] < columns)": ""})
SAME_BLOCK = {"pid % blocks_per_row * BLOCK + tl.arange": "tl.arange"}
wrong(
    RELU,
    "same columns for all",
    "columns of every row are never",
    "which rows and columns each takes",
    edits=SAME_BLOCK,
)
SAME_ROWS = {"pid // blocks_per_row * ROWS + tl.arange": "tl.arange"}
wrong(RELU, "same rows for all", "whole rows are never written", "which rows and columns each takes", edits=SAME_ROWS)
wrong(
    RELU,
    "stores nothing",
    "though bias_relu_kernel ran: where is its tl.store",
    edits={"row[:, None] < num_rows": "row[:, None] >= num_rows"},
)
BACKWARDS = {"* columns + column[None, :], y": "* columns - column[None, :], y"}
wrong(RELU, "columns stored backwards", "bias_relu_kernel: program", "its offset is negative", edits=BACKWARDS)
wrong(
    RELU_LAUNCH,
    "never launched",
    "is the kernel launched on it",
    edits={"bias_relu_kernel[grid](": "(lambda *a, **k: None)("},
)
# ---- 2.5 softmax of short rows
SHORT, SHORT_LAUNCH = "2.5: softmax of short rows", "2.5: softmax of short rows, the launch"
SHORT_MAX, SHORT_SUM = "tl.max(x, axis=1)[:, None]", "tl.sum(numerator, axis=1)[:, None]"
wrong(
    SHORT,
    "other is zero",
    "lanes past the end of a row count as 0",
    '"classic wrong answers" 1',
    edits={'other=-float("inf")': "other=0.0"},
)
wrong(
    SHORT,
    "no maximum",
    "rows with values above 88 fail",
    "maximum is subtracted",
    '"classic wrong answers" 2',
    edits={f"x - {SHORT_MAX}": "x"},
)
wrong(
    SHORT, "sum for the maximum", "every element is NaN", edits={f"x - {SHORT_MAX}": "x - tl.sum(x, axis=1)[:, None]"}
)
wrong(
    SHORT,
    "axis 0",
    "maximum and sum run over axis 0",
    '"classic wrong answers" 3',
    edits={SHORT_MAX: "tl.max(x, axis=0)[None, :]", SHORT_SUM: "tl.sum(numerator, axis=0)[None, :]"},
)
wrong(
    SHORT,
    "one sum for all rows",
    "all rows of a program are divided by one sum",
    edits={SHORT_SUM: "tl.sum(numerator)"},
)
wrong(
    SHORT,
    "not divided",
    "the rows are not divided by their sums",
    '"classic wrong answers" 4',
    edits={f"numerator / {SHORT_SUM}": "numerator"},
)
wrong(SHORT, "rows not masked", "outside of its shape", edits={"row[:, None] < num_rows": "row[:, None] >= 0"})
wrong(
    SHORT,
    "reads twice",
    "x_ptr is loaded 2.0 times, expected 1",
    edits={
        "numerator = ": "x = tl.load(x_row[:, None] + col_offset(column, stride_col, INT64)[None, :], mask=mask,"
        ' other=-float("inf")).to(tl.float32)\n        numerator = '
    },
)
wrong(
    SHORT,
    "rows of BLOCK columns",
    "outside of its shape",
    edits={"out_ptr + row[:, None] * columns": "out_ptr + row[:, None] * BLOCK"},
)
wrong(
    SHORT_LAUNCH,
    "calls PyTorch",
    "torch.softmax is called by",
    "built-in softmax operator",
    edits={"grid = ": "return torch.softmax(x, -1)\n        grid = "},
)
SHORT_STORE = "tl.store(out_ptr + row[:, None] * columns + column[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)"
wrong(
    SHORT,
    "the logarithm of the sum",
    "exp(x - log(sum)) errs the more the larger x is",
    edits={
        "numerator = tl.exp(x - tl.max(x, axis=1)[:, None])": "top = tl.max(x, axis=1)[:, None]",
        "y = numerator / tl.sum(numerator, axis=1)[:, None]": "total = tl.sum(tl.exp(x - top), axis=1)[:, None]\n"
        "        y = tl.exp(x - (top + tl.log(total)))",
    },
)
wrong(SHORT, "no store", "softmax_short_kernel ran: where is its tl.store", edits={SHORT_STORE: "pass"})

# ---- 2.6 softmax of long rows
LONG = "2.6: softmax of long rows"
LONG_MAX = "new_maximum = tl.maximum(maximum, tl.max(x, axis=0))"
RESCALED = "total * tl.exp(maximum - new_maximum) +"
LONG_ANSWER = ANSWERS.right[LONG]
FIRST_LOOP = LONG_ANSWER[LONG_ANSWER.index("maximum = tl.full") : LONG_ANSWER.index("for again")]
wrong(
    LONG,
    "sum not rescaled",
    "the running sum is not rescaled when a new maximum comes",
    '"classic wrong answers" 1',
    edits={RESCALED: "total +"},
)
wrong(
    LONG,
    "maximum not carried",
    "each block of columns has its own maximum",
    '"classic wrong answers" 2',
    edits={LONG_MAX: "new_maximum = tl.max(x, axis=0)", RESCALED: "total +"},
)
wrong(
    LONG,
    "the logarithm of the sum",
    "exp(x - log(sum)) errs the more the larger x is",
    edits={
        "for again in range": "lse = maximum + tl.log(total)\n        for again in range",
        "tl.exp(x - maximum) / total": "tl.exp(x - lse)",
    },
)
wrong(LONG, "last sum", "the sum holds the last block of columns only", edits={RESCALED: ""})
wrong(
    LONG,
    "other is zero",
    "lanes past the end of a row count as 0",
    '"classic wrong answers" 3',
    edits={'other=-float("inf")': "other=0.0"},
)
wrong(
    LONG,
    "starts at minus infinity",
    "a block of columns that holds -inf only gives -inf - (-inf) = NaN",
    '"classic wrong answers" 4',
    edits={"-3.0e38": '-float("inf")'},
)
wrong(
    LONG,
    "no maximum",
    "rows with values above 88 fail",
    edits={LONG_MAX: "new_maximum = maximum", "-3.0e38": "0.0"},
)
wrong(
    LONG,
    "three reads",
    "x_ptr is loaded 3.0 times, expected 2",
    "maximum and sum come out of one pass",
    '"classic wrong answers" 6',
    edits={"for again": f"{FIRST_LOOP}for again"},
)
wrong(LONG, "not divided", "the rows are not divided by their sums", edits={" / total": ""})
wrong(
    LONG,
    "tail never written",
    "never written",
    edits={"for again in range(0, columns, BLOCK)": "for again in range(0, columns // BLOCK * BLOCK, BLOCK)"},
)
wrong(
    LONG,
    "sum not rescaled in a lane",
    "the running sum is not rescaled when a new maximum comes",
    edits={
        FIRST_LOOP: FIRST_LOOP.replace("tl.full((), ", "tl.full((BLOCK,), ")
        .replace("tl.max(x, axis=0)", "x")
        .replace(f"{RESCALED} tl.sum(tl.exp(x - new_maximum), axis=0)", "total + tl.exp(x - new_maximum)")
        + "row_maximum = tl.max(maximum, axis=0)\n"
        "        total = tl.sum(total * tl.exp(maximum - row_maximum), axis=0)\n"
        "        maximum = row_maximum\n        ",
    },
)

# ---- 2.7 tiled matmul
TILED, TILED_LAUNCH = "2.7: tiled matmul", "2.7: tiled matmul, the launch"
wrong(
    TILED,
    "no other",
    "mask both loads along K, with other=0",
    edits={"(inner[None, :] < K - start), other=0.0)": "(inner[None, :] < K - start))"},
)
DOT = 'total = tl.dot(a, b, total, input_precision="ieee")'
wrong(
    TILED,
    "strides of b swapped",
    "the strides of b are swapped",
    '"classic wrong answers" 1',
    edits={"* stride_bk + column[None, :] * stride_bn": "* stride_bn + column[None, :] * stride_bk",
           "+= BLOCK_K * stride_bk": "+= BLOCK_K * stride_bn"},
)  # fmt: skip
wrong(
    TILED,
    "strides of a swapped",
    "the strides of a are swapped",
    edits={"* stride_am + inner[None, :] * stride_ak": "* stride_ak + inner[None, :] * stride_am",
           "+= BLOCK_K * stride_ak": "+= BLOCK_K * stride_am"},
)  # fmt: skip
wrong(
    TILED,
    "tile stored transposed",
    "this is the product transposed",
    edits={"c_ptr + row[:, None] * stride_cm + column[None, :]": "c_ptr + column[None, :] * stride_cm + row[:, None]"},
)
wrong(
    TILED,
    "K not masked",
    "only sizes K that are no multiple of BLOCK_K fail",
    '"classic wrong answers" 2',
    edits={" & (inner[None, :] < K - start)": "", "(inner[:, None] < K - start) & ": ""},
)
wrong(
    TILED,
    "K not masked after the first step",
    "only sizes K that are no multiple of BLOCK_K fail",
    '"classic wrong answers" 2',
    edits={"(inner[:, None] < K - start)": "(inner[:, None] < K + start)"},
)
wrong(
    TILED,
    "pointers stay",
    "each step multiplies the first tiles again",
    '"classic wrong answers" 3',
    edits={"a_ptrs += BLOCK_K * stride_ak": "", "b_ptrs += BLOCK_K * stride_bk": ""},
)
wrong(TILED, "last step only", "only the last step along K is left", edits={"tl.dot(a, b, total,": "tl.dot(a, b,"})
wrong(
    TILED,
    "accumulates in fp16",
    "the total stays float32 over all steps",
    '"classic wrong answers" 4',
    edits={DOT: "total = (total + tl.dot(a, b)).to(c_ptr.dtype.element_ty).to(tl.float32)"},
)
wrong(
    TILED,
    "ragged step left out",
    "the last, ragged step along K is left out",
    edits={"range(0, K, BLOCK_K)": "range(0, K // BLOCK_K * BLOCK_K, BLOCK_K)"},
)
wrong(
    TILED,
    "store not masked",
    "wrote c_ptr",
    "outside of its shape",
    edits={"total.to(c_ptr.dtype.element_ty), mask=mask": "total.to(c_ptr.dtype.element_ty)"},
)
wrong(
    TILED_LAUNCH,
    "grid rounded down",
    "never written",
    edits={"triton.cdiv(M, tile.m)": "max(1, M // tile.m)", "triton.cdiv(N, tile.n)": "max(1, N // tile.n)"},
)
wrong(TILED, "32-bit offsets", "only offsets beyond 2^31 are wrong", edits={"if INT64:": "if False:"})
wrong(
    TILED,
    "a loaded twice",
    "a_ptr is loaded",
    "keep it on chip",
    edits={
        DOT: "a = tl.load(a_ptrs, mask=(row[:, None] < M) & (inner[None, :] < K - start), other=0.0)\n"
        f"            {DOT}"
    },
)

# ---- 2.8 grouped order, and descriptors
GROUPED, DESCRIPTORS = "2.8: grouped order", "2.8: a tile through descriptors"
GROUPED_ROWS, GROUPED_RETURN = "rows = min(tiles_m - first, GROUP_M)", "first + place % rows, place // rows"
wrong(
    GROUPED,
    "full groups only",
    "the last group has fewer rows than GROUP_M",
    '"classic wrong answers" 1',
    edits={GROUPED_ROWS: "rows = GROUP_M"},
)
wrong(
    GROUPED,
    "row by row",
    "tiles follow one another row by row",
    '"classic wrong answers" 2',
    edits={GROUPED_RETURN: "first + place // tiles_n, place % tiles_n"},
)
wrong(GROUPED, "column by column", "there are no groups", edits={GROUPED_RETURN: "pid % tiles_m, pid // tiles_m"})
wrong(
    GROUPED,
    "groups of columns",
    "the groups are made of columns",
    edits={
        "GROUP_M * tiles_n": "GROUP_M * tiles_m",
        GROUPED_ROWS: "rows = min(tiles_n - first, GROUP_M)",
        GROUPED_RETURN: "place // rows, first + place % rows",
    },
)
wrong(
    GROUPED,
    "number of the group",
    "the group's number stands where its first row belongs",
    edits={"first = pid // tiles_per_group * GROUP_M": "first = pid // tiles_per_group"},
)
wrong(
    GROUPED,
    "all rows that are left",
    "a group takes all the rows that are left",
    edits={GROUPED_ROWS: "rows = tiles_m - first"},
)
wrong(
    DESCRIPTORS,
    "offsets of a swapped",
    "the offsets of a's tile are swapped",
    '"classic wrong answers" 4',
    edits={"a_desc.load([row, start])": "a_desc.load([start, row])"},
)
wrong(
    DESCRIPTORS,
    "offsets of b swapped",
    "the offsets of b's tile are swapped",
    edits={"b_desc.load([start, column])": "b_desc.load([column, start])"},
)
wrong(
    DESCRIPTORS,
    "transposed operands forgotten",
    "of a column-major operand the descriptor describes the transpose",
    edits={"if A_COL_MAJOR:": "if False:", "if B_COL_MAJOR:": "if False:"},
)
wrong(
    DESCRIPTORS,
    "last step only",
    "only the last step along K is left",
    '"classic wrong answers" 5',
    edits={"tl.dot(a, b, total,": "tl.dot(a, b,"},
)
wrong(
    DESCRIPTORS,
    "accumulates in fp16",
    "the total stays float32 over all steps",
    '"classic wrong answers" 6',
    edits={DOT: "total = (total + tl.dot(a, b)).to(DTYPE).to(tl.float32)"},
)
