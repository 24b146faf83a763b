"""Wrong answers to lab 3 that a laptop does not see by running them on ordinary numbers.

Kernels that compile on no GPU, or whose products a GPU rounds; scores far below 0; tensors kept where autograd does not
watch them.
"""

from __future__ import annotations

from .right import ANSWERS, DO_ROWS, K_ROWS, V_ROWS
from .wrong import ANCHOR, BACKWARD, DKDV, DQ, KEEP, LAST, LOOP, MASK, SCORES_OF_A_TILE, SEEN

wrong = ANSWERS.wrong

# ---- what only a compiler sees, and scores far below 0
IEEE = ', input_precision="ieee")'
TF32 = "a GPU rounds a float32 product to TF32"
wrong(
    LOOP,
    "products of float32",
    "expected products of float16, as the inputs are, got a product of float32",
    '"classic wrong answers" 10',
    edits={"tl.dot(p.to(v.dtype), v, acc": "tl.dot(p, v.to(tl.float32), acc"},
)
wrong(
    LOOP, "scores in TF32", TF32, "tl.trans(k))", '"classic wrong answers" 10', edits={IEEE + " * scale": ") * scale"}
)
wrong(LAST, "a Python global", "cannot read the Python global LOG2_E", edits={"* 0.6931471805599453": "/ LOG2_E"})
wrong(
    LOOP, "no maximum", "unless the running maximum is subtracted", edits={"tl.maximum(m_i, tl.max(s, 1))": "m_i * 0.0"}
)
BESIDE = "only scores far below 0 beside a ragged last tile go wrong"
wrong(LOOP, "masked with -1e4", BESIDE, '"classic wrong answers" 3', edits={'-float("inf")': "-1e4"})
wrong(
    LOOP,
    "masked after the maximum",
    BESIDE,
    '"classic wrong answers" 3',
    edits={MASK: "", "p = tl.exp2(s - m_ij[:, None])": f"{MASK}\n        p = tl.exp2(s - m_ij[:, None])"},
)
wrong(
    SEEN,
    "every tile is masked",
    "unmasked_end is wrong",
    "tiles are masked that need no mask",
    '"classic wrong answers" 4',
    edits={"tl.minimum(start_m + Nk - Nq + 1, Nk)": "0 * start_m"},
)
wrong(
    SEEN,
    "unmasked as in a square",
    "these are the numbers of a square",
    '"classic wrong answers" 2',
    edits={"start_m + Nk - Nq + 1": "start_m + 1"},
)
wrong(
    SEEN,
    "exchanged",
    "unmasked_end and key_end are exchanged",
    '"classic wrong answers" 4',
    edits={"return unmasked_end, key_end": "return key_end, unmasked_end"},
)
wrong(
    SEEN,
    "a range that is too short",
    "causal_key_range: key_end is wrong",
    '"classic wrong answers" 5',
    exercise="3.7",
    edits={"start_m + BLOCK_M + Nk - Nq": "start_m + BLOCK_M - 1 + Nk - Nq"},
)
MASKED_FIRST = "tl.exp2((tl.where({seen}, s * scale, -float('inf')) - lse{across}) * 1.4426950408889634)"
wrong(
    DKDV,
    "masked before the exponential",
    "a query that sees no key gives NaN",
    '"classic wrong answers" 5',
    edits={"tl.where(seen, p, 0.0)": MASKED_FIRST.format(seen="seen", across="[None, :]")},
)
SEES = "attention_mask(offs_m[:, None], offs_n[None, :], Nq, Nk, CAUSAL)"
wrong(
    DQ,
    "masked before the exponential",
    "a query that sees no key gives NaN",
    '"classic wrong answers" 5',
    edits={f"tl.where({SEES}, p, 0.0)": MASKED_FIRST.format(seen=SEES, across="[:, None]")},
)
wrong(DKDV, "scores in TF32", TF32, '"classic wrong answers" 8', edits={f"tl.trans(q){IEEE}": "tl.trans(q))"})
wrong(
    DKDV,
    "products of float32",
    "got a product of float32",
    '"classic wrong answers" 8',
    edits={"tl.dot(p.to(do.dtype), do, dv": "tl.dot(p, do.to(tl.float32), dv"},
)
wrong(DQ, "scores in TF32", TF32, '"classic wrong answers" 8', edits={f"tl.trans(k){IEEE}": "tl.trans(k))"})


def by_pointers(name: str, head: str, rows: str, count: str) -> str:
    """A load of rows that takes its operand for a pointer, whatever it is."""
    columns = "tl.arange(0, BLOCK_D)[None, :]"
    start = f"{name}_ptr + batch.to(tl.int64) * stride_{name}[0] + {head}.to(tl.int64) * stride_{name}[1]"
    inside = f"({rows}[:, None] < {count}) & ({columns} < ACCESS.head_dim)"
    offsets = f"{rows}[:, None] * stride_{name}[2] + {columns} * stride_{name}[3]"
    return f"tl.load({start} + {offsets}, mask={inside}, other=0.0)"


DESCRIPTORS = "on a Hopper GPU the operands are descriptors"
wrong(
    DKDV,
    "loads by pointers",
    DESCRIPTORS,
    '"classic wrong answers" 11',
    edits={DO_ROWS: by_pointers("do", "head", "offs_m", "Nq")},
)
wrong(
    DQ,
    "loads by pointers",
    DESCRIPTORS,
    '"classic wrong answers" 10',
    edits={V_ROWS: by_pointers("v", "key_head", "offs_n", "Nk")},
)
wrong(
    SCORES_OF_A_TILE, "scores in TF32", TF32, '"classic wrong answers" 11', edits={f"tl.trans(k){IEEE}": "tl.trans(k))"}
)
wrong(
    SCORES_OF_A_TILE,
    "loads by pointers",
    DESCRIPTORS,
    '"classic wrong answers" 12',
    edits={K_ROWS: by_pointers("k", "key_head", "(start_n + tl.arange(0, BLOCK_N))", "Nk")},
)
wrong(
    ANCHOR,
    "a tile that ends before the first key",
    "the loop does not end with the last key",
    '"classic wrong answers" 5',
    edits={"if key_end > 0:": "if key_end >= 0:"},
)

# ---- what an operator keeps
SAVE, LOAD = "ctx.save_for_backward(q, k, v, o, lse)", "q, k, v, o, lse = ctx.saved_tensors"
UNNOTICED = "is changed in place between forward and backward, and backward does not notice"
wrong(
    KEEP,
    "kept as attributes",
    UNNOTICED,
    "as attributes of ctx",
    '"classic wrong answers" 8',
    edits={SAVE: "ctx.t = q, k, v, o, lse"},
    also={BACKWARD: {LOAD: "q, k, v, o, lse = ctx.t"}},
)
wrong(
    KEEP,
    "copies kept",
    "are copies beside the inputs",
    '"classic wrong answers" 7',
    edits={SAVE: "ctx.save_for_backward(q.contiguous(), k.contiguous(), v.contiguous(), o, lse)"},
)
wrong(
    KEEP,
    "kept on the class",
    "only a forward pass that another one follows goes wrong",
    '"classic wrong answers" 8',
    edits={SAVE: "FlashAttention.kept = q, k, v, o, lse"},
    also={BACKWARD: {LOAD: "q, k, v, o, lse = FlashAttention.kept"}},
)
