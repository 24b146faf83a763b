"""Answers to exercise 2.4, cross-entropy: a plain right one, cut otherwise than the solution, and wrong ones.

A program takes one row, forward and backward; forward each lane has a maximum and a sum of its own.
"""

from __future__ import annotations

from utils.checks.answers import Answers

KERNELS, CALL = "2.4: cross-entropy, your kernels and what launches them", "2.4: cross-entropy"
ANSWERS = Answers(
    {
        KERNELS: """
@triton.jit
def losses(x_ptr, t_ptr, loss_ptr, lse_ptr, columns, ignored, layout, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    target = tl.load(t_ptr + row)
    lanes = tl.arange(0, WIDTH)
    largest = tl.full((1, WIDTH), -3.0e38, tl.float32)
    sums = tl.full((1, WIDTH), 0.0, tl.float32)
    for start in range(0, columns, WIDTH):
        column = start + lanes
        mask = (column < columns)[None, :]
        x = tl.load(x_ptr + element_offsets(row, column, layout), mask=mask, other=-float("inf"))
        x = x.to(tl.float32)
        new = tl.maximum(largest, x)
        sums = sums * tl.exp(largest - new) + tl.exp(x - new)
        largest = new
    top = tl.max(largest, axis=1)
    lse = top + tl.log(tl.sum(sums * tl.exp(largest - top[:, None]), axis=1))
    counts = target != ignored
    place = tl.sum(element_offsets(row, tl.where(counts, target, 0), layout), axis=1)
    chosen = tl.load(x_ptr + place).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(counts, lse - chosen, 0.0))


@triton.jit
def gradient(x_ptr, t_ptr, lse_ptr, d_ptr, dx_ptr, columns, ignored, layout, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    target = tl.load(t_ptr + row)[:, None]
    lse = tl.load(lse_ptr + row)[:, None]
    d = tl.load(d_ptr + row)[:, None]
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask = (column < columns)[None, :]
        x = tl.load(x_ptr + element_offsets(row, column, layout), mask=mask, other=0.0).to(tl.float32)
        p = tl.exp(x - lse)
        hit = (column[None, :] == target).to(tl.float32)
        dx = (p - hit) * d
        dx = tl.where(target == ignored, 0.0, dx)
        tl.store(dx_ptr + row[:, None] * columns + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


class Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, ignored):
        loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
        lse = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
        target = target.contiguous()
        x, rows = as_rows(logits)
        if loss.numel():
            losses[(rows.count,)](
                x, target, loss, lse, rows.columns, ignored, rows.layout_args,
                WIDTH=min(1024, triton.next_power_of_2(rows.columns)),
            )
        ctx.save_for_backward(logits, target, lse)
        ctx.ignored = ignored
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        logits, target, lse = ctx.saved_tensors
        dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        x, rows = as_rows(logits)
        if dx.numel():
            gradient[(rows.count,)](
                x, target, lse, dloss.contiguous(), dx, rows.columns, ctx.ignored, rows.layout_args,
                WIDTH=min(1024, triton.next_power_of_2(rows.columns)),
            )
        return dx, None, None
""",
        CALL: "return Losses.apply(logits, target, ignore_index)",
    }
)
wrong = ANSWERS.wrong

UPDATE = "sums = sums * tl.exp(largest - new) + tl.exp(x - new)"
NEW = "new = tl.maximum(largest, x)"
CHOSEN = "chosen = tl.load(x_ptr + place).to(tl.float32)"
HIT = "hit = (column[None, :] == target).to(tl.float32)"
INLINE = "found += tl.sum(tl.where({} == target[:, None], x, 0.0), axis=1)"
WIDTH = "min(1024, triton.next_power_of_2(rows.columns))"


def number(place: int) -> str:
    return f'"classic wrong answers" {place}'


# ---- the online sum
wrong(KERNELS, "not rescaled", "is not rescaled", number(1), edits={UPDATE: "sums += tl.exp(x - new)"})
wrong(
    KERNELS,
    "a maximum for each tile",
    "each tile has a maximum of its own",
    number(1),
    edits={NEW: "new = tl.where(mask, x, largest)", UPDATE: "sums += tl.exp(x - new)"},
)
wrong(KERNELS, "last tile only", "the last tile only", number(1), edits={UPDATE: "sums = tl.exp(x - new)"})
wrong(
    KERNELS,
    "first tile only",
    "the first tile only",
    number(1),
    edits={"range(0, columns, WIDTH):\n        column = start + lanes": "range(0, 1):\n        column = start + lanes"},
)
wrong(
    KERNELS,
    "no maximum",
    "exp overflows",
    number(2),
    edits={NEW: "new = tl.zeros((1, WIDTH), tl.float32)", "-3.0e38": "0.0"},
)
wrong(KERNELS, "starts at 0", "only rows far below zero fail", number(2), edits={"-3.0e38": "0.0"})
wrong(KERNELS, "starts at the least float16", "only rows far below zero fail", number(2), edits={"-3.0e38": "-65504.0"})
wrong(KERNELS, "starts at -inf", "NaN", number(2), edits={"-3.0e38": '-float("inf")'})
wrong(KERNELS, "lanes past the end", "count as 0", number(3), edits={'other=-float("inf")': "other=0.0"})
wrong(
    KERNELS,
    "one maximum for a tile",
    "all rows of a tile share one maximum",
    number(7),
    edits={
        "row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)\n    target = tl.load(t_ptr + row)\n": (
            "row = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)\n"
            "    target = tl.load(t_ptr + row, mask=row < count, other=ignored)\n"
        ),
        "loss_ptr, lse_ptr, columns": "loss_ptr, lse_ptr, count, columns",
        "(1, WIDTH)": "(4, WIDTH)",
        "mask = (column < columns)[None, :]\n        x = tl.load(x_ptr + element_offsets(row, column, layout), "
        "mask=mask, other=-float": "mask = (row < count)[:, None] & (column < columns)[None, :]\n"
        "        x = tl.load(x_ptr + element_offsets(row, column, layout), mask=mask, other=-float",
        NEW: "new = tl.zeros((4, WIDTH), tl.float32) + tl.maximum(tl.max(largest), tl.max(x))",
        "    place = tl.sum(element_offsets(row, tl.where(counts, target, 0), layout), axis=1)\n": "",
        "sums = tl.full((4, WIDTH), 0.0, tl.float32)": "sums = tl.full((4, WIDTH), 0.0, tl.float32)\n"
        "    found = tl.zeros((4,), tl.float32)",
        CHOSEN: "chosen = found",
        "largest = new": "largest = new\n        " + INLINE.format("column[None, :]"),
        "tl.store(lse_ptr + row, lse)": "tl.store(lse_ptr + row, lse, mask=row < count)",
        "lse - chosen, 0.0))": "lse - chosen, 0.0), mask=row < count)",
        "losses[(rows.count,)](\n                x, target, loss, lse, rows.columns": (
            "losses[(triton.cdiv(rows.count, 4),)](\n                x, target, loss, lse, rows.count, rows.columns"
        ),
    },
)
# ---- the target
IN_LOOP = {
    "sums = tl.full((1, WIDTH), 0.0, tl.float32)": "sums = tl.full((1, WIDTH), 0.0, tl.float32)\n"
    "    found = tl.zeros((1,), tl.float32)",
    CHOSEN: "chosen = found",
}
wrong(
    KERNELS,
    "columns of the tile",
    "not with those of the row",
    number(4),
    edits={**IN_LOOP, "largest = new": "largest = new\n        " + INLINE.format("lanes[None, :]")},
)
wrong(
    KERNELS,
    "target in the first tile only",
    "targets beyond the first tile are not found",
    number(4),
    edits={
        **IN_LOOP,
        "largest = new": "largest = new\n        if start == 0:\n            " + INLINE.format("column[None, :]"),
    },
)
wrong(KERNELS, "no target", "is not subtracted", number(4), edits={"lse - chosen, 0.0))": "lse, 0.0))"})
wrong(KERNELS, "loss negated", "the loss has the wrong sign", number(4), edits={"lse - chosen": "chosen - lse"})
# ---- rows that are ignored
wrong(
    KERNELS,
    "ignored rows have a loss",
    "only rows that are ignored are wrong",
    number(5),
    edits={"tl.where(counts, lse - chosen, 0.0)": "lse - chosen"},
)
wrong(
    KERNELS,
    "ignored rows have a gradient",
    "only rows that are ignored are wrong",
    number(5),
    edits={"dx = tl.where(target == ignored, 0.0, dx)\n": "\n"},
)
wrong(CALL, "ignores -100 only", "fail", edits={"ignore_index": "-100"})
wrong(
    KERNELS,
    "an address from ignore_index",
    "outside of its shape",
    edits={"tl.where(counts, target, 0)": "target"},
)
# ---- the gradient
wrong(KERNELS, "no one-hot", "lacks the 1 of the target's column", number(6), edits={"(p - hit) * d": "p * d"})
wrong(KERNELS, "no dloss", "the gradient lacks the factor dloss", number(6), edits={"(p - hit) * d": "p - hit"})
wrong(KERNELS, "dloss on one only", "multiplies the softmax only", number(6), edits={"(p - hit) * d": "p * d - hit"})
wrong(KERNELS, "gradient negated", "has the wrong sign", number(6), edits={"(p - hit) * d": "(hit - p) * d"})
wrong(
    KERNELS,
    "divided by rows",
    "divided by the number of rows",
    number(6),
    edits={"(p - hit) * d": "(p - hit) * d / tl.num_programs(0)"},
)
# ---- what is held, read, kept and called
wrong(
    KERNELS,
    "a tile as long as the row",
    "logits on chip at a time",
    number(8),
    edits={WIDTH: "triton.next_power_of_2(rows.columns)"},
)
wrong(
    KERNELS,
    "two reads",
    "logits is loaded 2.0 times in the forward pass",
    number(8),
    edits={
        "    for start in range(0, columns, WIDTH):\n        column = start + lanes": (
            "    for start in range(0, columns, WIDTH):\n"
            "        column = start + lanes\n"
            "        x = tl.load(x_ptr + element_offsets(row, column, layout),"
            ' mask=(column < columns)[None, :], other=-float("inf"))\n'
            "        largest = tl.maximum(largest, x.to(tl.float32))\n"
            "    for start in range(0, columns, WIDTH):\n        column = start + lanes"
        )
    },
)
wrong(
    KERNELS,
    "logits copied",
    "logits is loaded 0.0 times",
    number(8),
    edits={
        "x, rows = as_rows(logits)\n        if loss": "x, rows = as_rows(logits.contiguous())\n        if loss",
    },
)
wrong(
    KERNELS,
    "gradient made forward",
    "elements kept for the backward pass",
    number(8),
    edits={
        "ctx.save_for_backward(logits, target, lse)": (
            "dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)\n"
            "        if dx.numel():\n"
            "            gradient[(rows.count,)](\n"
            "                x, target, lse, torch.ones_like(lse), dx, rows.columns, ignored, rows.layout_args,\n"
            f"                WIDTH={WIDTH},\n"
            "            )\n"
            "        ctx.dx = dx\n"
            "        ctx.save_for_backward(logits, target, lse)"
        )
    },
)
wrong(
    KERNELS,
    "kept in the module",
    "fails: what a call keeps belongs to its own ctx",
    number(9),
    edits={
        "ctx.save_for_backward(logits, target, lse)": "Losses.kept = logits, target, lse",
        "logits, target, lse = ctx.saved_tensors": "logits, target, lse = Losses.kept",
    },
)
wrong(
    KERNELS,
    "sums in 16 bits",
    "too inaccurate in",
    number(9),
    edits={UPDATE: UPDATE + "\n        sums = sums.to(x_ptr.dtype.element_ty).to(tl.float32)"},
)
wrong(
    KERNELS,
    "log to base 2",
    "is to base 2",
    number(9),
    edits={"lse = top + tl.log(": "lse = top + tl.log2("},
)
wrong(
    KERNELS,
    "lse in 16 bits",
    "expected float32",
    edits={"lse = torch.empty(target.shape, dtype=torch.float32": "lse = torch.empty(target.shape, dtype=logits.dtype"},
)
wrong(
    KERNELS,
    "targets without their stride",
    "t_ptr has a stride of its own",
    edits={"        target = target.contiguous()\n": ""},
)
wrong(
    CALL,
    "ready made",
    "cross_entropy is called by cross_entropy",
    instead='return torch.nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")',
)
# ---- what launches the kernels
LAUNCHED = "gradient[(rows.count,)]"
wrong(KERNELS, "one program for the gradient", "the grid is too small", edits={LAUNCHED: "gradient[(1,)]"})
wrong(
    KERNELS,
    "gradient not launched",
    "is the kernel launched on it",
    edits={"if dx.numel():": "if False:"},
)
