"""Wrong answers to lab 2, each one or a few lines away from the solution, with what its diagnosis must say.

A wrong answer is written as a student would meet it: these lines stand where those belong. They are edits of the
solutions' sources, so each is the whole lab with one mistake, host code and helpers included.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

SOLUTION = Path(__file__).resolve().parent.parent / "solutions/lab2_triton_kernels"


@dataclass(frozen=True)
class WrongAnswer:
    """``edits`` are pairs of lines in ``module``: what the solution says, and what stands there instead.

    ``says`` are words that the check's message must hold.
    """

    exercise: str
    name: str
    module: str
    edits: tuple[tuple[str, str], ...]
    says: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.exercise}-{self.name.replace(' ', '-')}"


WRONG_ANSWERS: list[WrongAnswer] = []


def wrong(exercise: str, module: str, name: str, *says: str, edits: dict[str, str]) -> None:
    """Register a wrong answer."""
    WRONG_ANSWERS.append(WrongAnswer(exercise, name, module, tuple(edits.items()), says))


def change(line: str, old: str, new: str) -> dict[str, str]:
    """An edit of one line, of which only a part changes."""
    assert line.count(old) == 1, line
    return {line: line.replace(old, new)}


@contextmanager
def package(answer: WrongAnswer, folder: Path) -> Iterator[ModuleType]:
    """The lab with one wrong answer, imported under a name of its own.

    Raises:
        ValueError: the solution does not hold a line that the answer replaces, or holds it twice.
    """
    name = f"lab2_wrong_{WRONG_ANSWERS.index(answer)}"
    shutil.copytree(SOLUTION, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
    path = folder / name / f"{answer.module}.py"
    text = path.read_text()
    for right, instead in answer.edits:
        if text.count(right) != 1:
            raise ValueError(f"{answer}: {answer.module}.py holds {text.count(right)} times, not once:\n{right}")
        text = text.replace(right, instead)
    path.write_text(text)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == name]:
            del sys.modules[loaded]


# lines that several kernels share
INSIDE = "inside = (row[:, None] < num_rows) & (column[None, :] < columns)"
BLOCKS_PER_ROW = "blocks_per_row = tl.cdiv(columns, BLOCK)"

# ---- 2.1 GeLU
GELU_LOAD = (
    "x = tl.load(x_start + along(lanes, step, WIDE), mask=mask).to(tl.float32)  # (BLOCK,), fp32 whatever the dtype"
)
GELU_STORE = "tl.store(out_ptr + row * columns + start + lanes, y.to(out_ptr.dtype.element_ty), mask=mask)"
GELU_U = "u = 0.7978845608028654 * x * (1 + 0.044715 * x * x)  # sqrt(2 / pi) (x + 0.044715 x^3)"
GELU_Y = "y = x / (1 + tl.exp(-2 * u))"
GELU_GRID = "grid = (rows.count * triton.cdiv(rows.columns, tile.block),)"

wrong(
    "2.1",
    "gelu",
    "no mask",
    "accesses outside their tensor",
    "wrote out_ptr",
    "give each load and store a mask",
    edits={GELU_LOAD: GELU_LOAD.replace(", mask=mask", ""), GELU_STORE: GELU_STORE.replace(", mask=mask", "")},
)
wrong(
    "2.1",
    "gelu",
    "no mask on the load",
    "accesses outside their tensor",
    "give each load and store a mask",
    edits={GELU_LOAD: GELU_LOAD.replace(", mask=mask", "")},
)
wrong(
    "2.1",
    "gelu",
    "grid rounded down",
    "the grid has too few programs",
    "triton.cdiv",
    edits={GELU_GRID: "grid = (rows.count * max(1, rows.columns // tile.block),)"},
)
wrong(
    "2.1",
    "gelu",
    "no step",
    "only inputs that are not contiguous go wrong",
    "`step` apart",
    edits={GELU_LOAD: GELU_LOAD.replace("along(lanes, step, WIDE)", "lanes"), "+ start * step": "+ start"},
)
wrong(
    "2.1",
    "gelu",
    "one stride for all rows",
    "rows do not lie evenly",
    "row_offset",
    edits={"row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)": "row * stride_0"},
)
wrong(
    "2.1",
    "gelu",
    "store ignores the program",
    "only the first program's tile is written",
    edits={GELU_STORE: GELU_STORE.replace(" + start", "")},
)
wrong(
    "2.1",
    "gelu",
    "no half",
    "the 0.5 in front is left out",
    '"classic wrong answers" 3',
    edits={GELU_Y: "y = 2 * x / (1 + tl.exp(-2 * u))"},
)
wrong(
    "2.1",
    "gelu",
    "no cubic term",
    "the cubic term 0.044715 x^3 is left out",
    edits={GELU_U: "u = 0.7978845608028654 * x"},
)
wrong(
    "2.1",
    "gelu",
    "bracket",
    "sqrt(2/pi) multiplies x only",
    edits={GELU_U: "u = 0.7978845608028654 * x + 0.044715 * x * x * x"},
)
wrong(
    "2.1",
    "gelu",
    "exact form",
    "this is the exact form with erf",
    edits={GELU_Y: "y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))"},
)
wrong(
    "2.1",
    "gelu",
    "tanh overflows",
    "large values give NaN",
    "inf / inf",
    edits={GELU_Y: "y = 0.5 * x * (1 + (tl.exp(2 * u) - 1) / (tl.exp(2 * u) + 1))"},
)
wrong(
    "2.1",
    "gelu",
    "through float16",
    "right to about three digits only",
    "passes through a shorter type",
    edits={GELU_LOAD: GELU_LOAD.replace(".to(tl.float32)", ".to(tl.float16).to(tl.float32)")},
)
wrong(
    "2.1",
    "gelu",
    "reads twice",
    "x_ptr is read 2.0 times, the budget is 1",
    "keep it on chip",
    edits={GELU_U: f"{GELU_U}\n    {GELU_LOAD}"},
)
wrong(
    "2.1",
    "gelu",
    "calls PyTorch",
    "torch.nn.functional.gelu is called by gelu",
    "is a ready-made activation operator",
    edits={GELU_GRID: 'return torch.nn.functional.gelu(x, approximate="tanh")\n    ' + GELU_GRID},
)
wrong(
    "2.1",
    "gelu",
    "finished by PyTorch",
    "PyTorch computes part of the result",
    "do this inside the kernel",
    edits={
        GELU_Y: "y = 2 * x / (1 + tl.exp(-2 * u))",
        "\n    return out\n    ### END": "\n    return out * 0.5\n    ### END",
    },
)

# ---- 2.2 bias and ReLU
RELU_BIAS = "bias = tl.load(bias_ptr + along(column, bias_step, WIDE), mask=column < columns, other=0.0)  # (BLOCK,)"
RELU_SUM = "y = x.to(tl.float32) + bias.to(tl.float32)[None, :]"
RELU_CUT = "y = tl.where(y < 0, 0.0, y)  # a NaN is not below 0 and stays"
RELU_DX = "dx = tl.where(out <= 0, 0.0, dout.to(tl.float32))"
RELU_PARTIAL = "tl.store(partial_ptr + strip * columns + column, tl.sum(dbias, axis=0), mask=column < columns)"
RELU_DBIAS = "dbias += dx"

wrong(
    "2.2",
    "bias_relu",
    "bias along rows",
    "each row has its own bias here",
    '"classic wrong answers" 1',
    edits={
        RELU_BIAS: "bias = tl.load(bias_ptr + row * bias_step, mask=row < num_rows, other=0.0)",
        RELU_SUM: "y = x.to(tl.float32) + bias.to(tl.float32)[:, None]",
    },
)
wrong(
    "2.2",
    "bias_relu",
    "ReLU first",
    "ReLU is applied before the bias is added",
    edits={RELU_SUM: "y = tl.where(x < 0, 0.0, x.to(tl.float32))", RELU_CUT: "y += bias.to(tl.float32)[None, :]"},
)
wrong("2.2", "bias_relu", "no ReLU", "there is no ReLU", edits={RELU_CUT: ""})
wrong(
    "2.2",
    "bias_relu",
    "mask from dout",
    "dout decides what is cut, not out",
    "first at dx",
    edits={RELU_DX: "dx = tl.where(dout <= 0, 0.0, dout.to(tl.float32))"},
)
wrong(
    "2.2", "bias_relu", "nothing cut", "the derivative of ReLU is left out", edits={RELU_DX: "dx = dout.to(tl.float32)"}
)
wrong(
    "2.2",
    "bias_relu",
    "wrong side cut",
    "the wrong side of the ReLU is cut",
    edits={RELU_DX: "dx = tl.where(out > 0, 0.0, dout.to(tl.float32))"},
)
wrong(
    "2.2",
    "bias_relu",
    "sums of dout",
    "dbias sums dout, not what is left of it after the cut",
    edits={RELU_DBIAS: "dbias += dout.to(tl.float32)"},
)
wrong(
    "2.2",
    "bias_relu",
    "last tile of a strip",
    "dbias holds the last tile of each strip only",
    edits={RELU_DBIAS: "dbias = dx"},
)
wrong(
    "2.2",
    "bias_relu",
    "strips share a row",
    "partial sums",
    edits={RELU_PARTIAL: RELU_PARTIAL.replace("strip * columns + ", "")},
)
wrong(
    "2.2",
    "bias_relu",
    "atomics",
    "is updated by atomic operations",
    "differ from run to run",
    edits={
        RELU_PARTIAL: RELU_PARTIAL.replace("tl.store(partial_ptr + strip * columns", "tl.atomic_add(partial_ptr"),
        "bias_relu_backward_kernel[(strips": "partial.zero_()\n        bias_relu_backward_kernel[(strips",
    },
)
wrong(
    "2.2",
    "bias_relu",
    "rows not masked",
    "outside of its shape",
    edits=change(f"{INSIDE}\n    bias", "row[:, None] < num_rows", "row[:, None] >= 0"),
)
wrong(
    "2.2",
    "bias_relu",
    "bias loaded for each row",
    "bias_ptr is read",
    "the budget is",
    edits={
        RELU_BIAS: "place = along(column, bias_step, WIDE)[None, :] + 0 * row[:, None]\n"
        "    bias = tl.load(bias_ptr + place, mask=inside, other=0.0)",
        RELU_SUM: "y = x.to(tl.float32) + bias.to(tl.float32)",
    },
)
wrong(
    "2.2",
    "bias_relu",
    "tail never written",
    "never written",
    edits=change(
        "[(strips * triton.cdiv(rows.columns, tile.block)", "triton.cdiv(rows.columns,", "max(1, rows.columns //"
    )
    | change(f"{BLOCKS_PER_ROW}\n    strip", "tl.cdiv(columns, BLOCK)", "tl.maximum(columns // BLOCK, 1)"),
)

# ---- 2.3 weighted sum
SUM_LAUNCH = "weighted_sum_kernel[(triton.cdiv(rows.count, tile.rows),)]("
SUM_ADD = "total += x.to(tl.float32) * weight.to(tl.float32)[None, :]"
SUM_STORE = "tl.store(out_ptr + row, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=row < num_rows)"
SUM_ROWS = "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)"
SUM_LOOP = "for start in range(0, columns, BLOCK):"
SUM_OFFSET = SUM_ROWS + "\n    x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)"

wrong(
    "2.3",
    "weighted_sum",
    "sum over axis 0",
    "programs write the same element",
    "the sum of a row belongs to one",
    edits={
        SUM_STORE: "lanes = tl.arange(0, BLOCK)\n    sums = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)\n"
        "    tl.store(out_ptr + lanes, sums, mask=lanes < num_rows)"
    },
)
wrong("2.3", "weighted_sum", "no weight", "the weight is left out", edits={SUM_ADD: "total += x.to(tl.float32)"})
wrong(
    "2.3",
    "weighted_sum",
    "weights of the first block",
    "each block of columns gets the first block's weights",
    edits=change("weight_place = weight_ptr + along(column,", "column", "tl.arange(0, BLOCK)"),
)
wrong(
    "2.3",
    "weighted_sum",
    "last block only",
    "only the last block of columns is summed",
    edits={SUM_ADD: SUM_ADD.replace("+=", "=")},
)
wrong(
    "2.3",
    "weighted_sum",
    "tail left out",
    "the last, ragged block of columns is left out",
    edits={SUM_LOOP: "for start in range(0, tl.maximum(columns // BLOCK, 1) * BLOCK, BLOCK):"},
)
wrong(
    "2.3",
    "weighted_sum",
    "accumulates in fp16",
    "too inaccurate in float16",
    "add in float32",
    edits=change("total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)", "tl.float32", "x_ptr.dtype.element_ty")
    | {SUM_ADD: "total += x * weight[None, :]"},
)
wrong(
    "2.3",
    "weighted_sum",
    "columns not masked",
    "outside",
    edits=change("x = tl.load(x_place, mask=inside,", "inside", "row[:, None] < num_rows"),
)
wrong(
    "2.3",
    "weighted_sum",
    "no program id",
    "only the first program's tile is written",
    edits={SUM_ROWS: "row = tl.arange(0, ROWS).to(tl.int64)"},
)
wrong(
    "2.3",
    "weighted_sum",
    "32-bit offsets",
    "only offsets beyond 2^31 go wrong",
    "row.to(tl.int64)",
    edits={
        SUM_OFFSET: SUM_ROWS
        + "\n    short = row.to(tl.int32)\n    x_row = x_ptr + short // size_2 // size_1 * stride_0"
        " + short // size_2 % size_1 * stride_1 + short % size_2 * stride_2"
    },
)
wrong(
    "2.3",
    "weighted_sum",
    "one stride for all rows",
    "rows do not lie evenly",
    edits={SUM_OFFSET: SUM_ROWS + "\n    x_row = x_ptr + row * stride_0"},
)
wrong(
    "2.3",
    "weighted_sum",
    "product written out",
    "PyTorch computes part of the result",
    edits={SUM_LAUNCH: "x = x * 1\n        " + SUM_LAUNCH},
)

# ---- 2.4 weighted sum, backward
DX = "dx = dout.to(tl.float32)[:, None] * weight.to(tl.float32)[None, :]  # d(sum_j w_j x_ij) / dx_ij = w_j"
DX_COLUMN = "column = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)\n    inside"
DWEIGHT_ADD = "dweight += dout[:, None] * x.to(tl.float32)  # d(sum_j w_j x_ij) / dw_j = x_ij"
DWEIGHT_STORE = "tl.store(partial_ptr + strip * columns + column, tl.sum(dweight, axis=0), mask=column < columns)"
DWEIGHT_RETURN = "return column_sums(partial, x.dtype)"
DWEIGHT_DOUT = "dout = tl.load(dout_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)  # (ROWS,)"
DWEIGHT_LAUNCH = "weighted_sum_dweight_kernel[(strips"

wrong(
    "2.4",
    "weighted_sum",
    "dx without dout",
    "dx lacks the factor dout",
    '"classic wrong answers" 1',
    edits={DX: "dx = weight.to(tl.float32)[None, :] + tl.zeros((ROWS, BLOCK), dtype=tl.float32)"},
)
wrong(
    "2.4",
    "weighted_sum",
    "dx without weight",
    "dx lacks the factor weight",
    edits={DX: "dx = dout.to(tl.float32)[:, None] + tl.zeros((ROWS, BLOCK), dtype=tl.float32)"},
)
wrong(
    "2.4",
    "weighted_sum",
    "dweight without dout",
    "dweight lacks the factor dout",
    '"classic wrong answers" 2',
    edits={DWEIGHT_ADD: "dweight += x.to(tl.float32)"},
)
wrong(
    "2.4",
    "weighted_sum",
    "dweight without x",
    "dweight lacks the factor x",
    edits={
        DWEIGHT_ADD: "dweight += dout[:, None]",
    },
)
wrong(
    "2.4",
    "weighted_sum",
    "last tile of a strip",
    "dweight holds the last tile of each strip only",
    edits=change(DWEIGHT_ADD, "+=", "="),
)
wrong(
    "2.4",
    "weighted_sum",
    "strips share a row",
    "strips write the same partial sums",
    edits=change(DWEIGHT_STORE, "strip * columns + ", ""),
)
wrong(
    "2.4",
    "weighted_sum",
    "atomics",
    "partial_ptr is updated by atomic operations",
    "differ from run to run",
    edits=change(DWEIGHT_STORE, "tl.store(partial_ptr + strip * columns", "tl.atomic_add(partial_ptr")
    | {DWEIGHT_LAUNCH: "partial.zero_()\n    " + DWEIGHT_LAUNCH},
)
wrong(
    "2.4",
    "weighted_sum",
    "first strip returned",
    "dweight holds the first strip's sums only",
    edits={DWEIGHT_RETURN: "return partial[0].to(x.dtype)"},
)
wrong(
    "2.4",
    "weighted_sum",
    "rows of dout not masked",
    "dout_ptr",
    "outside of its shape",
    edits=change(DWEIGHT_DOUT, ", mask=row < num_rows, other=0.0", ""),
)
wrong(
    "2.4",
    "weighted_sum",
    "strips overlap",
    "dweight",
    "elements differ",
    edits={"row = (strip * tiles_per_strip + tile) * ROWS": "row = (strip + tile) * ROWS"},
)
wrong(
    "2.4",
    "weighted_sum",
    "columns of dx left out",
    "never written",
    edits=change(DX_COLUMN, " % blocks_per_row * BLOCK", " % blocks_per_row * 0"),
)

# ---- 2.5 softmax of short rows
SHORT_LOAD = (
    'x = tl.load(x_place, mask=inside, other=-float("inf")).to(tl.float32)  # (ROWS, BLOCK); exp(-inf) = 0 past the end'
)
SHORT_EXP = "numerator = tl.exp(x - tl.max(x, axis=1)[:, None])"
SHORT_Y = "y = numerator / tl.sum(numerator, axis=1)[:, None]"
SHORT_STORE = (
    "tl.store(out_ptr + row[:, None] * columns + column[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)"
)

wrong(
    "2.5",
    "softmax",
    "other is zero",
    "lanes past the end of a row count as 0",
    '"classic wrong answers" 1',
    edits={SHORT_LOAD: SHORT_LOAD.replace('-float("inf")', "0.0")},
)
wrong(
    "2.5",
    "softmax",
    "no maximum",
    "only large values go wrong",
    "maximum is subtracted first",
    edits={SHORT_EXP: "numerator = tl.exp(x)"},
)
wrong(
    "2.5",
    "softmax",
    "axis 0",
    "maximum and sum run over axis 0",
    edits={
        SHORT_EXP: "numerator = tl.exp(x - tl.max(x, axis=0)[None, :])",
        SHORT_Y: "y = numerator / tl.sum(numerator, axis=0)[None, :]",
    },
)
wrong(
    "2.5",
    "softmax",
    "one sum for all rows",
    "all rows of a program are divided by one sum",
    edits={SHORT_Y: "y = numerator / tl.sum(numerator)"},
)
wrong("2.5", "softmax", "not divided", "the rows are not divided by their sums", edits={SHORT_Y: "y = numerator"})
wrong(
    "2.5",
    "softmax",
    "rows not masked",
    "outside of its shape",
    edits={INSIDE: "inside = (row[:, None] >= 0) & (column[None, :] < columns)"},
)
wrong(
    "2.5",
    "softmax",
    "reads twice",
    "x_ptr is read 2.0 times, the budget is 1",
    edits={
        SHORT_Y: f"{SHORT_LOAD}\n    y = tl.exp(x - tl.max(x, axis=1)[:, None]) / tl.sum(numerator, axis=1)[:, None]"
    },
)
wrong(
    "2.5",
    "softmax",
    "rows of BLOCK columns",
    "outside of its shape",
    edits={SHORT_STORE: SHORT_STORE.replace("* columns", "* BLOCK")},
)
wrong(
    "2.5",
    "softmax",
    "calls PyTorch",
    "torch.softmax is called by",
    "ready-made softmax operator",
    edits={"softmax_short_kernel[(triton": "return torch.softmax(x, -1)\n    softmax_short_kernel[(triton"},
)

# ---- 2.6 softmax of long rows: the loop as most write it, a maximum and a sum for the whole block
LONG_LOOP = SOLUTION.joinpath("softmax.py").read_text().split("    # Each lane keeps", 1)[1]
LONG_LOOP = "    # Each lane keeps" + LONG_LOOP.split("    # Backwards:", 1)[0]
LONG_LOAD = """column = start + lanes
        x = tl.load(x_row + along(column, step, WIDE), mask=column < columns, other=-float("inf")).to(tl.float32)
"""
LONG_BLOCKS = f"""    maximum = tl.full((), -3.0e38, tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        {LONG_LOAD}
        new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(x - new_maximum), axis=0)
        maximum = new_maximum
    row_maximum = maximum
    scale = 1 / total
"""


def wrong_loop(name: str, *says: str, edits: dict[str, str], more: dict[str, str] | None = None) -> None:
    """Register a wrong answer to 2.6: edits of the loop over blocks, and of what follows it."""
    loop = LONG_BLOCKS
    for right, instead in edits.items():
        assert loop.count(right) == 1, f"{name}: {right}"
        loop = loop.replace(right, instead)
    wrong("2.6", "softmax", name, *says, edits={LONG_LOOP: loop, **(more or {})})


NEW_MAXIMUM = "new_maximum = tl.maximum(maximum, tl.max(x, axis=0))"
wrong_loop(
    "sum not rescaled",
    "the running sum is not rescaled when a new maximum comes",
    '"classic wrong answers" 1',
    edits={"total * tl.exp(maximum - new_maximum) +": "total +"},
)
wrong_loop(
    "maximum not carried",
    "each block of columns has its own maximum",
    '"classic wrong answers" 2',
    edits={NEW_MAXIMUM: "new_maximum = tl.max(x, axis=0)", "total * tl.exp(maximum - new_maximum) +": "total +"},
)
wrong_loop(
    "last sum", "the sum holds the last block of columns only", edits={"total * tl.exp(maximum - new_maximum) +": ""}
)
wrong_loop("other is zero", "lanes past the end of a row count as 0", edits={'other=-float("inf")': "other=0.0"})
wrong_loop(
    "starts at minus infinity",
    "a block of columns that holds -inf only gives -inf - (-inf) = NaN",
    edits={"tl.full((), -3.0e38, tl.float32)": 'tl.full((), -float("inf"), tl.float32)'},
)
wrong_loop(
    "no maximum",
    "only large values go wrong",
    edits={NEW_MAXIMUM: "new_maximum = maximum", "tl.full((), -3.0e38, tl.float32)": "tl.full((), 0.0, tl.float32)"},
)
wrong_loop(
    "three reads",
    "x_ptr is read 3.0 times, the budget is 2",
    edits={
        "    total = tl.zeros": f"""    for start in range(0, columns, BLOCK):
        {LONG_LOAD}
        maximum = tl.maximum(maximum, tl.max(x, axis=0))
    total = tl.zeros"""
    },
)
wrong_loop("not divided", "the rows are not divided by their sums", edits={"scale = 1 / total": "scale = 1.0"})
wrong_loop(
    "tail never written",
    "never written",
    edits={},
    more={
        "last = (columns - 1) // BLOCK * BLOCK": "last = columns // BLOCK * BLOCK - BLOCK",
        "for done in range(0, columns, BLOCK):": "for done in range(0, columns // BLOCK * BLOCK, BLOCK):",
    },
)
wrong(
    "2.6",
    "softmax",
    "sum not rescaled in a lane",
    "the running sum is not rescaled when a new maximum comes",
    edits=change("total = tl.where(x > maximum, total * ratio + 1, total + ratio)", "total * ratio + 1", "total + 1"),
)

# ---- 2.7 tiled matmul
TILED_A = (
    "a = tl.load(a_place, mask=(row[:, None] < M) & (inner[None, :] < K - start), other=0.0)  # (BLOCK_M, BLOCK_K)"
)
TILED_B = (
    "b = tl.load(b_place, mask=(inner[:, None] < K - start) & (column[None, :] < N), other=0.0)  # (BLOCK_K, BLOCK_N)"
)
TILED_DOT = 'total = tl.dot(a, b, total, input_precision="ieee")'
TILED_STORE = "tl.store(c_place, total.to(c_ptr.dtype.element_ty), mask=(row[:, None] < M) & (column[None, :] < N))"
TILED_GRID = "tiled_matmul_kernel[(triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n),)]"
TILED_LOOP = "for start in range(0, K, BLOCK_K):"

wrong(
    "2.7",
    "tiled_matmul",
    "strides of b swapped",
    "the strides of b are swapped",
    '"classic wrong answers" 1',
    edits={
        "* stride_bk + column[None, :] * stride_bn": "* stride_bn + column[None, :] * stride_bk",
        "b_place += BLOCK_K * stride_bk": "b_place += BLOCK_K * stride_bn",
    },
)
wrong(
    "2.7",
    "tiled_matmul",
    "strides of a swapped",
    "the strides of a are swapped",
    edits={
        "* stride_am + inner[None, :] * stride_ak": "* stride_ak + inner[None, :] * stride_am",
        "a_place += BLOCK_K * stride_ak": "a_place += BLOCK_K * stride_am",
    },
)
wrong(
    "2.7",
    "tiled_matmul",
    "tile stored transposed",
    "this is the product transposed",
    edits={"c_ptr + row[:, None] * stride_cm + column[None, :]": "c_ptr + column[None, :] * stride_cm + row[:, None]"},
)
wrong(
    "2.7",
    "tiled_matmul",
    "K not masked",
    "only sizes K that BLOCK_K does not divide go wrong",
    edits={
        TILED_A: "a = tl.load(a_place, mask=row[:, None] < M, other=0.0)",
        TILED_B: "b = tl.load(b_place, mask=column[None, :] < N, other=0.0)",
    },
)
wrong(
    "2.7",
    "tiled_matmul",
    "pointers stay",
    "each step multiplies the first tiles again",
    '"classic wrong answers" 3',
    edits={"a_place += BLOCK_K * stride_ak": "", "b_place += BLOCK_K * stride_bk": ""},
)
wrong(
    "2.7",
    "tiled_matmul",
    "last step only",
    "only the last step along K is left",
    edits={TILED_DOT: 'total = tl.dot(a, b, input_precision="ieee")'},
)
wrong(
    "2.7",
    "tiled_matmul",
    "accumulates in fp16",
    "the total stays float32 over all steps",
    '"classic wrong answers" 4',
    edits={TILED_DOT: "total = (total + tl.dot(a, b)).to(c_ptr.dtype.element_ty).to(tl.float32)"},
)
wrong(
    "2.7",
    "tiled_matmul",
    "ragged step left out",
    "the last, ragged step along K is left out",
    edits={TILED_LOOP: "for start in range(0, K // BLOCK_K * BLOCK_K, BLOCK_K):"},
)
wrong(
    "2.7",
    "tiled_matmul",
    "store not masked",
    "wrote c_ptr",
    "outside of its shape",
    edits={TILED_STORE: "tl.store(c_place, total.to(c_ptr.dtype.element_ty))"},
)
wrong(
    "2.7",
    "tiled_matmul",
    "grid rounded down",
    "never written",
    edits={TILED_GRID: "tiled_matmul_kernel[(max(1, M // tile.m) * max(1, N // tile.n),)]"},
)
wrong(
    "2.7",
    "tiled_matmul",
    "32-bit offsets",
    "only offsets beyond 2^31 go wrong",
    edits={"    if WIDE:": "    if False:"},
)
wrong(
    "2.7",
    "tiled_matmul",
    "a loaded twice",
    "a_ptr is read",
    "keep it on chip",
    edits={TILED_DOT: f"{TILED_A}\n        {TILED_DOT}"},
)

# ---- 2.8 grouped matmul
GROUP_ROWS = "rows = min(tiles_m - first, GROUP_M)"
GROUP_FIRST = "first = pid // tiles_per_group * GROUP_M"
GROUP_RETURN = "return first + place % rows, place // rows"

wrong(
    "2.8",
    "grouping",
    "full groups only",
    "the last group has fewer rows than GROUP_M",
    '"classic wrong answers" 1',
    edits={GROUP_ROWS: "rows = GROUP_M"},
)
wrong(
    "2.8",
    "grouping",
    "row by row",
    "tiles follow one another row by row",
    '"classic wrong answers" 2',
    edits={GROUP_RETURN: "return first + place // tiles_n, place % tiles_n"},
)
wrong(
    "2.8",
    "grouping",
    "column by column",
    "there are no groups",
    edits={GROUP_RETURN: "return pid % tiles_m, pid // tiles_m"},
)
wrong(
    "2.8",
    "grouping",
    "groups of columns",
    "the groups are made of columns",
    edits={
        "tiles_per_group = GROUP_M * tiles_n": "tiles_per_group = GROUP_M * tiles_m",
        GROUP_ROWS: "rows = min(tiles_n - first, GROUP_M)",
        GROUP_RETURN: "return place // rows, first + place % rows",
    },
)
wrong(
    "2.8",
    "grouping",
    "number of the group",
    "the group's number stands where its first row belongs",
    edits={GROUP_FIRST: "first = pid // tiles_per_group"},
)
wrong(
    "2.8",
    "grouping",
    "all rows that are left",
    "a group takes all the rows that are left",
    edits={GROUP_ROWS: "rows = tiles_m - first"},
)
wrong(
    "2.8",
    "matmul",
    "offsets of a swapped",
    "the offsets of a's tile are swapped",
    '"classic wrong answers" 4',
    edits={"else a_desc.load([row, start])": "else a_desc.load([start, row])"},
)
wrong(
    "2.8",
    "matmul",
    "transposed operands forgotten",
    "their descriptor describes the transpose",
    edits={
        "a_desc.load([start, row]).T if A_TURNED else a_desc.load([row, start])": "a_desc.load([row, start])",
        "b_desc.load([column, start]).T if B_TURNED else b_desc.load([start, column])": "b_desc.load([start, column])",
    },
)
wrong(
    "2.8",
    "matmul",
    "last step only",
    "only the last step along K is left",
    edits={TILED_DOT: 'total = tl.dot(a, b, input_precision="ieee")'},
)
wrong(
    "2.8",
    "matmul",
    "accumulates in fp16",
    "the total stays float32 over all steps",
    edits={TILED_DOT: "total = (total + tl.dot(a, b)).to(DTYPE).to(tl.float32)"},
)
