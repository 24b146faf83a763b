"""Answers to exercise 2.3, RMSNorm: a plain right one, cut otherwise than the solution, and wrong ones.

Forward, a program takes one row; backward, each of a few programs takes every so-manieth row.
"""

from __future__ import annotations

from utils.checks.answers import Answers

KERNELS, CALL = "2.3: RMSNorm, your kernels and what launches them", "2.3: RMSNorm"
ANSWERS = Answers(
    {
        KERNELS: """
@triton.jit
def normalise(x_ptr, w_ptr, y_ptr, r_ptr, columns, eps, layout, w_stride, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    lanes = tl.arange(0, WIDTH)
    mask = (lanes < columns)[None, :]
    x = tl.load(x_ptr + element_offsets(row, lanes, layout), mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + lanes * w_stride, mask=lanes < columns, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, axis=1)
    r = tl.rsqrt(squares / columns + eps)
    y = x * r[:, None] * w[None, :]
    tl.store(r_ptr + row, r)
    tl.store(y_ptr + row[:, None] * columns + lanes[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gradients(
    g_ptr, x_ptr, w_ptr, r_ptr, dx_ptr, sums_ptr, count, columns, programs, g_layout, layout, w_stride,
    WIDTH: tl.constexpr,
):
    me = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    mask = (lanes < columns)[None, :]
    w = tl.load(w_ptr + lanes * w_stride, mask=lanes < columns, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros((1, WIDTH), dtype=tl.float32)
    for number in range(me, count, programs):
        row = tl.cast(number, tl.int64) + tl.arange(0, 1)
        x = tl.load(x_ptr + element_offsets(row, lanes, layout), mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + element_offsets(row, lanes, g_layout), mask=mask, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row)[:, None]
        n = x * r
        gw = g * w
        second = n * (tl.sum(gw * n, axis=1)[:, None] / columns)
        dx = r * (gw - second)
        tl.store(dx_ptr + row[:, None] * columns + lanes[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        sums += g * n
    mine = tl.arange(0, 1)[:, None] + me
    tl.store(sums_ptr + mine * columns + lanes[None, :], sums, mask=mask)


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        r = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        if y.numel():
            x_rows, rows = as_rows(x)
            width = triton.next_power_of_2(rows.columns)
            normalise[(rows.count,)](
                x_rows, weight, y, r, rows.columns, eps, rows.layout_args, weight.stride(0), WIDTH=width
            )
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, weight, r = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel() == 0:
            return dx, torch.zeros(x.shape[-1], dtype=x.dtype, device=x.device), None
        x, rows = as_rows(x)
        g, g_rows = as_rows(g)
        programs = min(triton.cdiv(rows.count, 16), 512)
        sums = torch.empty(programs, rows.columns, dtype=torch.float32, device=x.device)
        width = triton.next_power_of_2(rows.columns)
        gradients[(programs,)](
            g, x, weight, r, dx, sums, rows.count, rows.columns, programs, g_rows.layout_args, rows.layout_args,
            weight.stride(0), WIDTH=width,
        )
        return dx, column_sums(sums, x.dtype), None
""",
        CALL: "return Normalised.apply(x, weight, eps)",
    }
)
wrong = ANSWERS.wrong

ROOT = "r = tl.rsqrt(squares / columns + eps)"
Y = "y = x * r[:, None] * w[None, :]"
SECOND = "second = n * (tl.sum(gw * n, axis=1)[:, None] / columns)"
DX = "dx = r * (gw - second)"
SUM = "sums += g * n"


def number(place: int) -> str:
    return f'"classic wrong answers" {place}'


# ---- the second term of dx
wrong(KERNELS, "rstd a constant", "takes rstd for a constant", number(1), edits={DX: "dx = r * gw"})
wrong(KERNELS, "x * rstd zero", "x * rstd is 0 in the backward pass", edits={"n = x * r\n": "n = 0 * r\n"})
wrong(KERNELS, "sum for mean in dx", "not its mean", number(1), edits={SECOND: SECOND.replace(" / columns", "")})
wrong(KERNELS, "mean without weight", "lacks the weight", number(1), edits={SECOND: SECOND.replace("gw *", "g *")})
wrong(
    KERNELS, "mean without normed", "lacks the factor normed", number(1), edits={SECOND: SECOND.replace("gw * n", "gw")}
)
wrong(KERNELS, "second term added", "has the wrong sign", number(1), edits={DX: "dx = r * (gw + second)"})
wrong(KERNELS, "no rstd in front", "lacks the factor rstd", number(1), edits={DX: "dx = gw - second"})
# ---- the formula
wrong(KERNELS, "mean over the tile", "the width of the tile", number(2), edits={"squares / columns": "squares / WIDTH"})
wrong(KERNELS, "norm", "this is x over its norm", number(2), edits={"squares / columns": "squares"})
wrong(
    KERNELS,
    "LayerNorm",
    "that is LayerNorm",
    number(2),
    edits={
        "squares = tl.sum(x * x, axis=1)": "x = tl.where(mask, x - tl.sum(x, axis=1)[:, None] / columns, 0.0)\n"
        "    squares = tl.sum(x * x, axis=1)"
    },
)
wrong(KERNELS, "no root", "the square root is left out", number(2), edits={ROOT: "r = 1 / (squares / columns + eps)"})
wrong(KERNELS, "no weight", "the weight is left out", number(2), edits={Y: "y = x * r[:, None]"})
wrong(
    KERNELS,
    "eps beside the root",
    "eps is added to the root",
    number(3),
    edits={ROOT: "r = 1 / (tl.sqrt(squares / columns) + eps)"},
)
wrong(KERNELS, "no eps", "eps is left out", number(3), edits={ROOT: "r = tl.rsqrt(squares / columns)"})
wrong(CALL, "eps fixed", "take the argument", number(3), edits={", eps)": ", 1e-6)"})
wrong(
    KERNELS,
    "one sum for a tile",
    "all rows of a tile share one sum of squares",
    number(4),
    edits={
        "row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)": (
            "row = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)"
        ),
        "y_ptr, r_ptr, columns,": "y_ptr, r_ptr, rows, columns,",
        "    mask = (lanes < columns)[None, :]\n    x =": (
            "    mask = (row < rows)[:, None] & (lanes < columns)[None, :]\n    x ="
        ),
        "squares = tl.sum(x * x, axis=1)": "squares = tl.sum(x * x) + tl.zeros((4,), tl.float32)",
        "tl.store(r_ptr + row, r)": "tl.store(r_ptr + row, r, mask=row < rows)",
        "normalise[(rows.count,)](\n                x_rows, weight, y, r, rows.columns": (
            "normalise[(triton.cdiv(rows.count, 4),)](\n                x_rows, weight, y, r, rows.count, rows.columns"
        ),
    },
)
# ---- the weight's gradient
wrong(KERNELS, "dweight from x", "dweight holds x itself", number(5), edits={SUM: "sums += g * x"})
wrong(KERNELS, "dweight with weight", "dweight holds the weight", number(5), edits={SUM: "sums += gw * n"})
wrong(KERNELS, "dweight without dout", "dweight lacks the factor dout", number(5), edits={SUM: "sums += n"})
wrong(KERNELS, "dweight a mean", "dweight is a mean", number(5), edits={SUM: "sums += g * n / count"})
wrong(KERNELS, "sums in one row", "write the same partial sums", number(6), edits={"+ me\n": "+ me * 0\n"})
wrong(
    KERNELS, "rows of every program", "or a term added twice?", edits={"range(me, count, programs)": "range(0, count)"}
)
wrong(
    KERNELS,
    "first program only",
    "partial sums are added up that no program has written",
    number(6),
    edits={"sums, mask=mask)": "sums, mask=mask & (me == 0))"},
)
wrong(
    KERNELS,
    "atomics",
    "is updated by atomic operations",
    "differs from run to run",
    edits={
        "mine = tl.arange(0, 1)[:, None] + me": "mine = tl.arange(0, 1)[:, None]",
        "tl.store(sums_ptr": "tl.atomic_add(sums_ptr",
        "sums = torch.empty(programs,": "sums = torch.zeros(1,",
    },
)
wrong(
    KERNELS,
    "squares in float16",
    "large float16 values fail",
    number(7),
    edits={
        "other=0.0).to(tl.float32)\n    w = ": "other=0.0)\n    w = ",
        "squares / columns + eps": "squares.to(tl.float32) / columns + eps",
    },
)
wrong(
    KERNELS,
    "one program's row",
    "these elements are never written",
    edits={"normalise[(rows.count,)]": "normalise[(1,)]"},
)
wrong(KERNELS, "root of a sum", "root or logarithm of a negative", edits={"tl.sum(x * x, axis=1)": "tl.sum(x, axis=1)"})
wrong(KERNELS, "last row only", "dweight", edits={SUM: "sums = g * n"})
wrong(
    KERNELS,
    "a row of sums for each row",
    "other memory",
    "more than one row of partial sums for every 16 rows",
    number(6),
    edits={"min(triton.cdiv(rows.count, 16), 512)": "rows.count"},
)
# ---- digits
wrong(
    KERNELS,
    "sums in 16 bits",
    "only sums over many rows are wrong",
    number(7),
    edits={SUM: "sums += g * n\n        sums = sums.to(x_ptr.dtype.element_ty).to(tl.float32)"},
)
wrong(
    KERNELS,
    "partial sums in 16 bits",
    "only sums over many rows are wrong",
    number(7),
    edits={
        "rows.columns, dtype=torch.float32": "rows.columns, dtype=x.dtype",
        "sums, mask=mask)": "sums.to(sums_ptr.dtype.element_ty), mask=mask)",
        "column_sums(sums, x.dtype)": "column_sums(sums, x.dtype)",
    },
)
wrong(
    KERNELS,
    "squares in 16 bits",
    "float16",
    edits={
        "squares = tl.sum(x * x, axis=1)": "h = x.to(x_ptr.dtype.element_ty)\n"
        "    squares = tl.sum((h * h).to(tl.float32), axis=1)"
    },
)
# ---- what is read, kept and called
wrong(
    KERNELS,
    "x read twice",
    "x is loaded 2.0 times in the forward pass",
    number(8),
    edits={
        Y: "x = tl.load(x_ptr + element_offsets(row, lanes, layout), mask=mask, other=0.0).to(tl.float32)\n    " + Y
    },
)
wrong(
    KERNELS,
    "x copied",
    "x is loaded 0.0 times in the forward pass",
    number(8),
    edits={"x_rows, rows = as_rows(x)\n": "x_rows, rows = as_rows(x.contiguous())\n"},
)
wrong(
    KERNELS,
    "keeps the output",
    "elements kept for the backward pass",
    number(8),
    edits={"ctx.save_for_backward(x, weight, r)": "ctx.y = y\n        ctx.save_for_backward(x, weight, r)"},
)
wrong(
    KERNELS,
    "kept in the module",
    "fails: what a call keeps belongs to its own ctx",
    number(9),
    edits={
        "ctx.save_for_backward(x, weight, r)": "Normalised.kept = x, weight, r",
        "x, weight, r = ctx.saved_tensors": "x, weight, r = Normalised.kept",
    },
)
wrong(
    CALL,
    "ready made",
    "rms_norm is called by rms_norm",
    "is a built-in normalisation operator",
    instead="return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)",
)
wrong(
    KERNELS,
    "weight ignores its stride",
    "w_ptr has a stride of its own",
    edits={"lanes * w_stride": "lanes"},
)
wrong(
    KERNELS,
    "no mask on the columns",
    "outside",
    edits={", mask=mask, other=0.0).to(tl.float32)\n    w =": ").to(tl.float32)\n    w ="},
)
