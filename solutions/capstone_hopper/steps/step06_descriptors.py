"""Step 6: tensor descriptors: TMA brings tiles, and no thread computes an address."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .host import LOG2_E, check, heads_together, outputs, rows_of, scale_of

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

#: head_dim -> tile: M queries, N keys, stages of the pipeline that the compiler makes.
TILES = {64: {"M": 64, "N": 128, "num_stages": 2}, 128: {"M": 128, "N": 64, "num_stages": 2}}
OPTIONS = {"num_warps": 4}


@triton.jit
def place(length, together, M: tl.constexpr):
    """First row of a program's head, and its first query in there: ``together`` heads go side by side, tile by tile."""
    program = tl.program_id(0)
    tiles = length // M
    head = program // (together * tiles) * together + program % together
    return head * length, (tiles - 1 - program % (together * tiles) // together) * M


@triton.jit(do_not_specialize=["together"])
def attention_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, length, together, D: tl.constexpr,
                     M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """M queries of one head against all keys that they see, N at a time."""
    start, first = place(length, together, M)
    rows = first + tl.arange(0, M)
    columns = tl.arange(0, N)
    q = q_desc.load([start + first, 0])
    out = tl.zeros((M, D), tl.float32)
    maximum = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    for column in range(0, first + M if CAUSAL else length, N):
        k = k_desc.load([start + column, 0])
        scores = tl.dot(q, k.T)
        if CAUSAL and column + N > first:
            scores = tl.where((column + columns)[None, :] <= rows[:, None], scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores * scale - (new * scale)[:, None])
        shrink = tl.exp2((maximum - new) * scale)
        total = total * shrink + tl.sum(weights, 1)
        maximum = new
        v = v_desc.load([start + column, 0])
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None])
    out = out / total[:, None]
    o_desc.store([start + first, 0], out.to(o_desc.dtype))
    tl.store(lse_ptr + start + rows, (maximum * scale + tl.log2(total)) * 0.6931471805599453)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the logsumexp; the package's docstring says of what."""
    check(q, k, v)
    o, lse = outputs(q)
    batch, heads, length, head_dim = q.shape
    tile = TILES[head_dim]
    sizes = (tile["M"], tile["N"], tile["N"], tile["M"])
    descriptors = [TensorDescriptor.from_tensor(rows_of(x), [n, head_dim]) for x, n in zip((q, k, v, o), sizes)]
    attention_kernel[(batch * heads * length // tile["M"],)](
        *descriptors, lse, scale_of(q) * LOG2_E, length, heads_together(q), D=head_dim, CAUSAL=causal, **tile,
        **OPTIONS,
    )  # fmt: skip
    return o, lse
