"""Wrong answers to lab 2 that only the edges show: 32 bits, NaN, rows far apart or far below, what a GPU rounds."""

from __future__ import annotations

from utils.environment import version_tuple

from .right import ANSWERS
from .wrong import (
    DESCRIPTORS,
    DOT,
    GELU,
    GELU_U,
    LONG,
    RELU,
    RELU_BACK,
    RELU_CUT,
    SHORT,
    SHORT_MAX,
    SHORT_SUM,
    TILED,
)

import triton  # isort: skip

wrong = ANSWERS.wrong

# ---- offsets of more than 2^31 elements
NARROW = "tensors of more than 2^31 elements", "row.to(tl.int64)"
NARROW_PID = {"pid = tl.program_id(0).to(tl.int64)": "pid = tl.program_id(0)"}
for place in (GELU, RELU, RELU_BACK):
    wrong(place, "rows of the output in 32 bits", *NARROW, edits=NARROW_PID)
wrong(
    SHORT,
    "rows of the output in 32 bits",
    *NARROW,
    edits={"tl.program_id(0).to(tl.int64) * ROWS": "tl.program_id(0) * ROWS"},
)
wrong(LONG, "rows of the output in 32 bits", *NARROW, edits={"tl.program_id(0).to(tl.int64)": "tl.program_id(0)"})
wrong(
    TILED,
    "rows of the output in 32 bits",
    *NARROW,
    edits={"c_ptr + row[:, None] * stride_cm": "c_ptr + row.to(tl.int32)[:, None] * stride_cm"},
)
wrong(
    "2.2: bias and ReLU, the launch",
    "a far bias in 32 bits",
    "only columns 2^30 elements apart are wrong",
    "or vector.stride(0) > 1",
    edits={"INT64=rows.needs_int64 or bias.stride(0) > 1": "INT64=rows.needs_int64"},
    also={RELU: {"column = pid % blocks_per_row * BLOCK": "column = (pid % blocks_per_row * BLOCK).to(tl.int32)"}},
)

# ---- NaN, and sums of many rows
KEPT = "torch.relu keeps a NaN", '"classic wrong answers" 8'
wrong(RELU, "NaN dropped", *KEPT, edits={RELU_CUT: "y = tl.maximum(y, 0.0)"})
wrong(
    RELU_BACK,
    "NaN cut",
    "dx is 0 where out is NaN",
    '"classic wrong answers" 8',
    edits={"tl.where(out <= 0, 0.0, dout)": "tl.where(out > 0, dout, 0.0)"},
)
wrong(
    RELU_BACK,
    "sums in 16 bits",
    "only sums of many 16-bit rows are wrong",
    '"classic wrong answers" 6',
    edits={
        "BLOCK), dtype=tl.float32)": "BLOCK), dtype=dx_ptr.dtype.element_ty)",
        "sums += dx": "sums += dx.to(sums.dtype)",
    },
)

# ---- values
TOO_SHORT = "about 0.79788 stands for sqrt(2/pi)", '"classic wrong answers" 3'
wrong(GELU, "constant of five digits", *TOO_SHORT, edits={GELU_U: GELU_U.replace("0.7978845608028654", "0.79788")})
ONE_MAXIMUM = "a program subtracts one maximum from all its rows", '"classic wrong answers" 3'
wrong(SHORT, "one maximum for all rows", *ONE_MAXIMUM, edits={SHORT_MAX: "tl.max(x)"})
if version_tuple(triton.__version__) < (3, 9):  # from then on softmax keeps the shape by itself
    wrong(
        SHORT,
        "softmax without its axis",
        "keep_dims=True",
        "ValueError",
        edits={
            f"numerator = tl.exp(x - {SHORT_MAX})": "y = tl.softmax(x, dim=1)",
            f"y = numerator / {SHORT_SUM}": "",
        },
    )
for start in ("0.0", "-1.0e4", "-65504.0", "-1.0e30"):
    wrong(
        LONG,
        f"maximum that starts at {start}",
        "the running maximum starts above their values",
        '"classic wrong answers" 8',
        edits={"-3.0e38": start},
    )

# ---- matrix products
ROUNDED = "a GPU rounds a float32 product to TF32", '"classic wrong answers" 7'
for place in (TILED, DESCRIPTORS):
    wrong(place, "TF32", *ROUNDED, edits={DOT: "total = tl.dot(a, b, total)"})
MOVE_A, MOVE_B = "a_ptrs += BLOCK_K * stride_ak", "b_ptrs += BLOCK_K * stride_bk"
wrong(TILED, "a stays", "a_ptrs stay where they are", '"classic wrong answers" 3', edits={MOVE_A: "pass"})
wrong(
    TILED,
    "b moves along its rows",
    "b_ptrs move by BLOCK_K * stride_bn or BLOCK_K per step: expected BLOCK_K * stride_bk",
    '"classic wrong answers" 3',
    edits={MOVE_B: "b_ptrs += BLOCK_K * stride_bn"},
)
wrong(
    TILED,
    "sides of the tile mixed up",
    "never written",
    edits={"row = tile_m * BLOCK_M": "row = tile_m * BLOCK_N"},
)
wrong(
    DESCRIPTORS,
    "offsets in tiles",
    "a tile begins at its number times BLOCK_M, BLOCK_N or BLOCK_K",
    '"classic wrong answers" 4',
    edits={"a_desc.load([row, start])": "a_desc.load([row // BLOCK_M, start // BLOCK_K])"},
)
