"""Step 7: the same in Gluon, by one warpgroup: layouts, two stages that TMA fills, barriers."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as tl  # "tl" as before: a diff shows what changes, and not a name
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from ..parts import wait_for_all
from .host import LOG2_E, check, heads_together, outputs, scale_of
from .ring import barriers, copy, described, place

#: head_dim -> tile: M queries, N keys, S stages of the ring.
TILES = {64: {"M": 64, "N": 128, "S": 2}, 128: {"M": 64, "N": 64, "S": 2}}
OPTIONS = {"num_warps": 4}


@gluon.jit(do_not_specialize=["together"])
def attention_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, scale, length, together, D: tl.constexpr,
                     M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """M queries of one head against all keys that they see, N at a time, from the last to the first."""
    start, first, blocks = place(length, together, M, N, CAUSAL)
    q_tile = tl.allocate_shared_memory(q_desc.dtype, [M, D], q_desc.layout)
    k_tiles = tl.allocate_shared_memory(q_desc.dtype, [S, N, D], k_desc.layout)
    v_tiles = tl.allocate_shared_memory(q_desc.dtype, [S, N, D], v_desc.layout)
    q_full, k_full, v_full = barriers(1, 1).index(0), barriers(S, 1), barriers(S, 1)
    fence_async_shared()
    copy(q_desc, start + first, q_tile, q_full)
    copy(k_desc, start + (blocks - 1) * N, k_tiles.index(0), k_full.index(0))
    copy(v_desc, start + (blocks - 1) * N, v_tiles.index(0), v_full.index(0))
    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows = first + tl.arange(0, M, tl.SliceLayout(1, SCORES))
    columns = tl.arange(0, N, tl.SliceLayout(0, SCORES))
    out = tl.zeros([M, D], tl.float32, OUT)
    maximum = tl.full([M], float("-inf"), tl.float32, tl.SliceLayout(1, SCORES))
    total = tl.zeros([M], tl.float32, tl.SliceLayout(1, SCORES))
    mbarrier.wait(q_full, 0)
    for i in range(blocks):
        column = (blocks - 1 - i) * N
        wait_for_all()  # for all warps to have read the stage that is filled next
        if i + 1 < blocks:
            copy(k_desc, start + column - N, k_tiles.index((i + 1) % S), k_full.index((i + 1) % S))
            copy(v_desc, start + column - N, v_tiles.index((i + 1) % S), v_full.index((i + 1) % S))
        mbarrier.wait(k_full.index(i % S), (i // S) & 1)
        zeros = tl.zeros([M, N], tl.float32, SCORES)
        scores = warpgroup_mma(q_tile, k_tiles.index(i % S).permute((1, 0)), zeros, use_acc=False)
        if CAUSAL and column + N > first:
            scores = tl.where((column + columns)[None, :] <= rows[:, None], scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores * scale - (new * scale)[:, None])
        shrink = tl.exp2((maximum - new) * scale)
        total = total * shrink + tl.sum(weights, 1)
        maximum = new
        out = out * tl.convert_layout(shrink, tl.SliceLayout(1, OUT))[:, None]
        weights16 = tl.convert_layout(weights.to(o_desc.dtype), tl.DotOperandLayout(0, OUT, 2))
        mbarrier.wait(v_full.index(i % S), (i // S) & 1)
        out = warpgroup_mma(weights16, v_tiles.index(i % S), out)
    out = out * tl.convert_layout(1.0 / total, tl.SliceLayout(1, OUT))[:, None]
    wait_for_all()
    q_tile.store(out.to(o_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [start + first, 0], q_tile)
    tl.store(lse_ptr + start + rows, (maximum * scale + tl.log2(total)) * 0.6931471805599453)
    tma.store_wait(0)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the logsumexp; the package's docstring says of what."""
    check(q, k, v)
    o, lse = outputs(q)
    batch, heads, length, head_dim = q.shape
    tile = TILES[head_dim]
    attention_kernel[(batch * heads * length // tile["M"],)](
        *described((q, tile["M"]), (k, tile["N"]), (v, tile["N"]), (o, tile["M"])), lse, scale_of(q) * LOG2_E, length,
        heads_together(q), D=head_dim, CAUSAL=causal, **tile, **OPTIONS,
    )  # fmt: skip
    return o, lse
