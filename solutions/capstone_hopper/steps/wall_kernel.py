"""Plain Triton's attempt at step 9: the output of a tile and the scores of the next are issued together, and then the
next softmax could run while the output is still being computed.

Only for the compiler: nothing launches it. Without ``OVERLAP`` it is step 6, not causal, and its tiles are step 6's.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: head_dim -> tile: M queries, N keys, stages of the pipeline that the compiler makes.
TILES = {64: {"M": 64, "N": 128, "num_stages": 2}, 128: {"M": 128, "N": 64, "num_stages": 2}}
OPTIONS = {"num_warps": 4}


@triton.jit
def online_softmax(scores, maximum, total, scale):
    """Weights of a tile, what the output so far shrinks by, and the new maximum and sum of each row."""
    new = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores * scale - (new * scale)[:, None])
    shrink = tl.exp2((maximum - new) * scale)
    total = total * shrink + tl.sum(weights, 1)
    return weights, shrink, new, total


@triton.jit
def attention_kernel(q_desc, k_desc, v_desc, o_desc, scale, length, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                     OVERLAP: tl.constexpr):  # fmt: skip
    """M queries of one head, not causal."""
    start = tl.program_id(1) * length
    first = tl.program_id(0) * M
    q = q_desc.load([start + first, 0])
    out = tl.zeros((M, D), tl.float32)
    maximum = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    if OVERLAP:
        scores = tl.dot(q, k_desc.load([start, 0]).T)
        for column in range(N, length, N):
            weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale)
            out = tl.dot(weights.to(q.dtype), v_desc.load([start + column - N, 0]), out * shrink[:, None])
            scores = tl.dot(q, k_desc.load([start + column, 0]).T)
        weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale)
        out = tl.dot(weights.to(q.dtype), v_desc.load([start + length - N, 0]), out * shrink[:, None])
    else:
        for column in range(0, length, N):
            scores = tl.dot(q, k_desc.load([start + column, 0]).T)
            weights, shrink, maximum, total = online_softmax(scores, maximum, total, scale)
            out = out * shrink[:, None]
            out = tl.dot(weights.to(q.dtype), v_desc.load([start + column, 0]), out)
    o_desc.store([start + first, 0], (out / total[:, None]).to(o_desc.dtype))
