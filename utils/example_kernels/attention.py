"""A FlashAttention forward pass: exact attention that never writes the N x N scores."""

from __future__ import annotations

import math

import torch

from utils import runtime
from utils.example_kernels.traffic import Traffic, cdiv, same_dtype, size, tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: (BLOCK_M, BLOCK_N, warps, stages)
Tiles = tuple[int, int, int, int]
CPU_TILES: Tiles = (64, 64, 4, 1)
#: By head_dim: the largest tiles whose registers do not spill on sm_80, sm_90 and sm_100 (tests/test_compile_only.py).
GPU_TILES: dict[int, Tiles] = {
    16: (128, 64, 4, 3),
    32: (128, 64, 4, 3),
    64: (64, 128, 4, 2),
    128: (128, 64, 8, 2),
    256: (64, 32, 8, 2),
}
LOG2_E = 1.4426950408889634


@triton.jit
def flash_attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on,
    heads, N_q, N_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_m = tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    features = tl.arange(0, HEAD_DIM)
    row_inside = rows[:, None] < N_q
    q_ptrs = q_ptr + batch * stride_qb + head * stride_qh + rows[:, None] * stride_qn + features[None, :]
    q = tl.load(q_ptrs, mask=row_inside, other=0.0)  # (BLOCK_M, HEAD_DIM), on chip for all tiles of keys
    k_base = k_ptr + batch * stride_kb + head * stride_kh
    v_base = v_ptr + batch * stride_vb + head * stride_vh

    maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    accumulator = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    last = N_k
    if CAUSAL:  # keys after the tile's last query weigh nothing
        last = min(N_k, (tile_m + 1) * BLOCK_M)
    for start in range(0, last, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        column_inside = columns[:, None] < N_k
        k_ptrs = k_base + columns[:, None] * stride_kn + features[None, :]
        k = tl.load(k_ptrs, mask=column_inside, other=0.0)  # (BLOCK_N, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2  # (BLOCK_M, BLOCK_N), in powers of 2
        visible = columns[None, :] < N_k
        if CAUSAL:
            visible = visible & (columns[None, :] <= rows[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        rescale = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])  # (BLOCK_M, BLOCK_N)
        total = total * rescale + tl.sum(weights, axis=1)
        v_ptrs = v_base + columns[:, None] * stride_vn + features[None, :]
        v = tl.load(v_ptrs, mask=column_inside, other=0.0)  # (BLOCK_N, HEAD_DIM)
        accumulator = accumulator * rescale[:, None]
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision=PRECISION)
        maximum = new_maximum

    o_ptrs = o_ptr + batch * stride_ob + head * stride_oh + rows[:, None] * stride_on + features[None, :]
    tl.store(o_ptrs, (accumulator / total[:, None]).to(o_ptr.dtype.element_ty), mask=row_inside)
    lse = (maximum + tl.log2(total)) / 1.4426950408889634  # back to powers of e
    tl.store(lse_ptr + tl.program_id(1) * N_q + rows, lse, mask=rows < N_q)


def attention_tiles(head_dim: int) -> Tiles:
    """(BLOCK_M, BLOCK_N, warps, stages) that :func:`flash_attention_forward` uses on this machine."""
    return runtime.pick(cpu=CPU_TILES, gpu=GPU_TILES[head_dim])


def flash_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    tile: Tiles | None = None,
    precision: str = "ieee",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output and logsumexp, computed tile by tile (FlashAttention-2, Dao 2023, algorithm 1).

    Args:
        q: Queries (B, H, N, D), float16, bfloat16 or float32; the last axis has unit stride, the others any.
        k: Keys (B, H, N_k, D), same dtype; N_k may differ from N unless ``causal``.
        v: Values, of k's shape.
        causal: Query i sees keys 0 ... i only; needs N_k = N.
        scale: Factor of the scores, by default 1 / sqrt(D).
        tile: (BLOCK_M, BLOCK_N, warps, stages); by default :func:`attention_tiles`.
        precision: For float32 operands: ``ieee`` or ``tf32``.

    Returns:
        o (B, H, N, D) in q's dtype, and the natural logsumexp of each row of scores, (B, H, N) float32.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device, shape or stride, or D is no power of two from 16 to 256.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        tensor(name, value, 4)
        if value.stride(3) != 1 and value.shape[3] > 1:
            raise ValueError(f"{name}'s last axis must have stride 1, got {value.stride(3)}")
    same_dtype(q=q, k=k, v=v)
    B, H, N, D = q.shape
    if D not in (16, 32, 64, 128, 256):
        raise ValueError(f"head_dim must be a power of two between 16 and 256, got {D} (pad q, k, v on the last axis)")
    if k.shape != v.shape or (k.shape[0], k.shape[1], k.shape[3]) != (B, H, D):
        raise ValueError(f"k and v must have shape ({B}, {H}, N_k, {D}), got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[2] == 0:
        raise ValueError("k and v must hold at least one key, got N_k = 0")
    if causal and k.shape[2] != N:
        raise ValueError(f"causal attention needs as many keys as queries, got N = {N} and N_k = {k.shape[2]}")
    scale = 1 / math.sqrt(D) if scale is None else scale
    o = torch.empty((B, H, N, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, N), dtype=torch.float32, device=q.device)
    block_m, block_n, warps, stages = tile or attention_tiles(D)
    if o.numel():
        flash_attention_forward_kernel[(cdiv(N, block_m), B * H)](
            q, k, v, o, lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], H, N, k.shape[2], scale * LOG2_E,
            HEAD_DIM=D, BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal, PRECISION=precision,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return o, lse


def flash_attention_forward_traffic(
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    element_size: int,
    causal: bool = False,
    num_keys: int | None = None,
    tile: Tiles | None = None,
) -> Traffic:
    """Traffic of :func:`flash_attention_forward`.

    q is read once; k and v once per tile of queries, up to the diagonal when causal; o and a float32 logsumexp are
    written once (FlashAttention-2, Dao 2023, section 3.1).
    """
    N, D = size("seq_len", seq_len), size("head_dim", head_dim, 1)
    N_k = N if num_keys is None else size("num_keys", num_keys, 1)
    block_m, block_n, *_ = tile or attention_tiles(D)
    keys_read = flops = 0
    for tile_m in range(cdiv(N, block_m)):
        last = min(N_k, (tile_m + 1) * block_m) if causal else N_k
        tiles_n = cdiv(last, block_n)
        keys_read += min(N_k, tiles_n * block_n)
        flops += 2 * 2 * block_m * (tiles_n * block_n) * D
    sequences = size("batch", batch) * size("heads", heads)
    loaded = sequences * (N + 2 * keys_read) * D * size("element_size", element_size, 1)
    return Traffic(loaded, sequences * (N * D * element_size + N * 4), sequences * flops)
