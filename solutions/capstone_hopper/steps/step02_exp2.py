"""Step 2: powers of two, and log2(e) folded into the scale: one multiply-add and one instruction a score."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .host import LOG2_E, check, outputs, scale_of

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: head_dim -> tile: M queries, N keys, stages of the pipeline that the compiler makes.
TILES = {64: {"M": 128, "N": 128, "num_stages": 2}, 128: {"M": 128, "N": 128, "num_stages": 2}}
OPTIONS = {"num_warps": 8}


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, scale, length,
                     D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """M queries of one head against all keys that they see, N at a time."""
    first = tl.program_id(0) * M
    start = tl.program_id(1).to(tl.int64) * length
    rows = first + tl.arange(0, M)
    columns = tl.arange(0, N)
    dims = tl.arange(0, D)
    q = tl.load(q_ptr + start * D + rows[:, None] * D + dims)
    out = tl.zeros((M, D), tl.float32)
    maximum = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    for column in range(0, first + M if CAUSAL else length, N):
        k = tl.load(k_ptr + start * D + (column + columns)[:, None] * D + dims)
        scores = tl.dot(q, k.T)
        visible = (column + columns < length)[None, :]
        if CAUSAL:
            visible = visible & ((column + columns)[None, :] <= rows[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores * scale - (new * scale)[:, None])
        shrink = tl.exp2((maximum - new) * scale)
        total = total * shrink + tl.sum(weights, 1)
        maximum = new
        v = tl.load(v_ptr + start * D + (column + columns)[:, None] * D + dims)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None])
    out = out / total[:, None]
    tl.store(o_ptr + start * D + rows[:, None] * D + dims, out.to(o_ptr.dtype.element_ty))
    tl.store(lse_ptr + start + rows, (maximum * scale + tl.log2(total)) * 0.6931471805599453)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the logsumexp; the package's docstring says of what."""
    check(q, k, v)
    o, lse = outputs(q)
    batch, heads, length, head_dim = q.shape
    tile = TILES[head_dim]
    attention_kernel[(length // tile["M"], batch * heads)](
        q, k, v, o, lse, scale_of(q) * LOG2_E, length, D=head_dim, CAUSAL=causal, **tile, **OPTIONS,
    )  # fmt: skip
    return o, lse
