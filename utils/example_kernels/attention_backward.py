"""A FlashAttention backward pass, and three ways to add up dQ: a second pass, atomics, and a planted race.

A program of the main kernel owns a tile of keys and goes through the tiles of queries, so dK and dV are its own and dQ
is everybody's. The three ways differ in who adds up dQ and in nothing else.
"""

from __future__ import annotations

import math

import torch

from utils import runtime
from utils.example_kernels.attention import LOG2_E, Tiles
from utils.example_kernels.traffic import Traffic, cdiv, same_dtype, size, tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

CPU_TILES: Tiles = (32, 32, 4, 1)
#: By head_dim: (BLOCK_M, BLOCK_N, warps, stages). None spills on sm_90 (tests/test_example_backward.py).
GPU_TILES: dict[int, Tiles] = {
    16: (64, 64, 4, 2),
    32: (64, 64, 4, 2),
    64: (64, 64, 4, 2),
    128: (64, 64, 8, 1),
    256: (32, 32, 8, 1),
}
#: How dQ is added up -> what the main kernel does with a tile's share of it.
WAYS = {"second pass": "none", "atomics": "atomic", "race": "plain"}
DELTA_ROWS = 64


@triton.jit
def attention_delta_kernel(o_ptr, do_ptr, delta_ptr, rows, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offsets = row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    inside = row[:, None] < rows
    o = tl.load(o_ptr + offsets, mask=inside, other=0.0).to(tl.float32)  # (BLOCK, HEAD_DIM)
    do = tl.load(do_ptr + offsets, mask=inside, other=0.0).to(tl.float32)  # (BLOCK, HEAD_DIM)
    tl.store(delta_ptr + row, tl.sum(o * do, axis=1), mask=row < rows)


@triton.jit
def probabilities(scores, lse, rows, columns, N_k, scale_log2, CAUSAL: tl.constexpr):
    """P of a tile from its scores and the rows' logsumexp; 0 for keys that are masked or not there."""
    p = tl.exp2(scores * scale_log2 - lse[:, None] * 1.4426950408889634)
    visible = columns[None, :] < N_k
    if CAUSAL:
        visible = visible & (columns[None, :] <= rows[:, None])
    return tl.where(visible, p, 0.0)


@triton.jit
def flash_attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, N_q, N_k, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    DQ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys; DQ says whether and how its share of every dQ tile is added as well."""
    tile_n = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    features = tl.arange(0, HEAD_DIM)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k_offsets = (sequence * N_k + columns[:, None]) * HEAD_DIM + features[None, :]
    k_inside = columns[:, None] < N_k
    k = tl.load(k_ptr + k_offsets, mask=k_inside, other=0.0)  # (BLOCK_N, HEAD_DIM), on chip for all tiles of queries
    v = tl.load(v_ptr + k_offsets, mask=k_inside, other=0.0)  # (BLOCK_N, HEAD_DIM), too
    dk = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
    dv = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
    first = 0
    if CAUSAL:  # queries before the tile's first key do not see it
        first = (tile_n * BLOCK_N // BLOCK_M) * BLOCK_M
    for start in range(first, N_q, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        inside = rows < N_q
        q_offsets = (sequence * N_q + rows[:, None]) * HEAD_DIM + features[None, :]
        q = tl.load(q_ptr + q_offsets, mask=inside[:, None], other=0.0)  # (BLOCK_M, HEAD_DIM)
        do = tl.load(do_ptr + q_offsets, mask=inside[:, None], other=0.0)  # (BLOCK_M, HEAD_DIM)
        # a row that is not there has logsumexp infinity, so its P is 0
        lse = tl.load(lse_ptr + sequence * N_q + rows, mask=inside, other=float("inf"))  # (BLOCK_M,)
        delta = tl.load(delta_ptr + sequence * N_q + rows, mask=inside, other=0.0)  # (BLOCK_M,)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = probabilities(scores, lse, rows, columns, N_k, scale_log2, CAUSAL)  # (BLOCK_M, BLOCK_N), recomputed
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(q.dtype)  # (BLOCK_M, BLOCK_N)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        if DQ != "none":
            share = tl.dot(ds, k, input_precision=PRECISION) * scale  # (BLOCK_M, HEAD_DIM), this tile of keys' part
            if DQ == "atomic":
                tl.atomic_add(dq_ptr + q_offsets, share, mask=inside[:, None], sem="relaxed")
            else:  # read, add, write: between the two another program may write
                sum_so_far = tl.load(dq_ptr + q_offsets, mask=inside[:, None])  # (BLOCK_M, HEAD_DIM)
                tl.store(dq_ptr + q_offsets, sum_so_far + share, mask=inside[:, None])
    tl.store(dk_ptr + k_offsets, (dk * scale).to(dk_ptr.dtype.element_ty), mask=k_inside)
    tl.store(dv_ptr + k_offsets, dv.to(dv_ptr.dtype.element_ty), mask=k_inside)


@triton.jit
def flash_attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, N_q, N_k, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The second pass: dQ of one tile of queries, which goes through the tiles of keys once more."""
    tile_m = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    features = tl.arange(0, HEAD_DIM)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < N_q
    q_offsets = (sequence * N_q + rows[:, None]) * HEAD_DIM + features[None, :]
    q = tl.load(q_ptr + q_offsets, mask=inside[:, None], other=0.0)  # (BLOCK_M, HEAD_DIM), on chip
    do = tl.load(do_ptr + q_offsets, mask=inside[:, None], other=0.0)  # (BLOCK_M, HEAD_DIM), on chip
    lse = tl.load(lse_ptr + sequence * N_q + rows, mask=inside, other=float("inf"))  # (BLOCK_M,)
    delta = tl.load(delta_ptr + sequence * N_q + rows, mask=inside, other=0.0)  # (BLOCK_M,)
    dq = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    last = N_k
    if CAUSAL:
        last = min(N_k, (tile_m + 1) * BLOCK_M)
    for start in range(0, last, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        k_offsets = (sequence * N_k + columns[:, None]) * HEAD_DIM + features[None, :]
        k_inside = columns[:, None] < N_k
        k = tl.load(k_ptr + k_offsets, mask=k_inside, other=0.0)  # (BLOCK_N, HEAD_DIM)
        v = tl.load(v_ptr + k_offsets, mask=k_inside, other=0.0)  # (BLOCK_N, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = probabilities(scores, lse, rows, columns, N_k, scale_log2, CAUSAL)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(k.dtype)  # (BLOCK_M, BLOCK_N)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + q_offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside[:, None])


def backward_tiles(head_dim: int) -> Tiles:
    """(BLOCK_M, BLOCK_N, warps, stages) that :func:`flash_attention_backward` uses on this machine."""
    return runtime.pick(cpu=CPU_TILES, gpu=GPU_TILES[head_dim])


def flash_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    way: str = "second pass",
    tile: Tiles | None = None,
    precision: str = "ieee",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of attention from what :func:`flash_attention_forward` returned (Dao 2023, algorithm 2).

    Args:
        q, k, v: (B, H, N, D) and twice (B, H, N_k, D), contiguous, float16, bfloat16 or float32.
        o, lse: the forward's result, (B, H, N, D) and (B, H, N) float32.
        do: Gradient of o, contiguous.
        causal: Query i sees keys 0 ... i only; needs N_k = N.
        scale: Factor of the scores, by default 1 / sqrt(D).
        way: How dQ is added up. ``second pass``: a kernel of its own, the same bits on every call. ``atomics``: the
            programs that own the keys add to a float32 buffer that starts at zero. ``race``: the same with a load and a
            store instead of the atomic add. **Wrong on purpose.**
        tile: (BLOCK_M, BLOCK_N, warps, stages); by default :func:`backward_tiles`.
        precision: For float32 operands: ``ieee`` or ``tf32``.

    Returns:
        dq, dk, dv with shapes and dtype of q, k, v.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device, shape or layout, D is no power of two from 16 to 256, or
            another ``way``.
    """
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(map(repr, WAYS))}, got {way!r}")
    named = {"q": q, "k": k, "v": v, "o": o, "do": do}
    for name, value in named.items():
        tensor(name, value, 4)
    same_dtype(**named)
    tensor("lse", lse, 3, (torch.float32,))
    B, H, N, D = q.shape
    N_k = k.shape[2]
    for name, value in {**named, "lse": lse}.items():
        wanted = (B, H, N_k, D) if name in "kv" else (B, H, N, D)[: value.ndim]
        if tuple(value.shape) != wanted or not value.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous with shape {wanted}, got {tuple(value.shape)}, {value.stride()}"
            )
    if D not in GPU_TILES:
        raise ValueError(f"head_dim must be a power of two between 16 and 256, got {D}")
    if causal and N_k != N:
        raise ValueError(f"causal attention needs as many keys as queries, got N = {N} and N_k = {N_k}")
    scale = 1 / math.sqrt(D) if scale is None else scale
    block_m, block_n, warps, stages = tile or backward_tiles(D)
    delta = torch.empty((B, H, N), dtype=torch.float32, device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    shared = WAYS[way] != "none"
    dq = torch.zeros_like(q, dtype=torch.float32) if shared else torch.empty_like(q)
    if q.numel() and k.numel():
        attention_delta_kernel[(cdiv(B * H * N, DELTA_ROWS),)](
            o, do, delta, B * H * N, HEAD_DIM=D, BLOCK=DELTA_ROWS, num_warps=4
        )
        inputs = (q, k, v, do, lse, delta, dq)
        sizes = (N, N_k, scale, scale * LOG2_E)
        constants = {"HEAD_DIM": D, "BLOCK_M": block_m, "BLOCK_N": block_n, "CAUSAL": causal, "PRECISION": precision}
        options = {"num_warps": warps, "num_stages": stages}
        flash_attention_backward_kernel[(cdiv(N_k, block_n), B * H)](
            *inputs, dk, dv, *sizes, DQ=WAYS[way], **constants, **options
        )
        if not shared:
            flash_attention_dq_kernel[(cdiv(N, block_m), B * H)](*inputs, *sizes, **constants, **options)
    return dq.to(q.dtype), dk, dv


def flash_attention_backward_traffic(
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    element_size: int,
    causal: bool = False,
    way: str = "second pass",
    tile: Tiles | None = None,
) -> Traffic:
    """Traffic of the kernels of :func:`flash_attention_backward` with as many keys as queries.

    The main kernel reads k and v once, and q, do, lse and delta once per tile of keys; its matrix products are
    five, or four without dQ. The second pass reads q and do once and k and v once per tile of queries, with three
    products. Zeroing and conversion of the float32 buffer are PyTorch's and not counted.
    """
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(map(repr, WAYS))}, got {way!r}")
    N, D, E = size("seq_len", seq_len, 1), size("head_dim", head_dim, 1), size("element_size", element_size, 1)
    block_m, block_n, *_ = tile or backward_tiles(D)
    sequences = size("batch", batch) * size("heads", heads)
    rows_read = pairs = keys_read = pairs_again = 0
    for tile_n in range(cdiv(N, block_n)):
        first = tile_n * block_n // block_m * block_m if causal else 0
        rows_read += N - first
        pairs += cdiv(N - first, block_m) * block_m * block_n
    for tile_m in range(cdiv(N, block_m)):
        last = min(N, (tile_m + 1) * block_m) if causal else N
        keys_read += min(N, cdiv(last, block_n) * block_n)
        pairs_again += cdiv(last, block_n) * block_n * block_m
    total = Traffic(2 * N * D * E, N * 4)  # delta
    total += Traffic(2 * N * D * E + rows_read * (2 * D * E + 8), 2 * N * D * E, 8 * pairs * D)
    if way == "second pass":
        total += Traffic(N * (2 * D * E + 8) + 2 * keys_read * D * E, N * D * E, 6 * pairs_again * D)
    else:
        shares = rows_read * D * 4
        total += Traffic(shares, shares, 2 * pairs * D, shares if way == "atomics" else 0)
    return Traffic(
        *(sequences * part for part in (total.bytes_loaded, total.bytes_stored, total.flops, total.bytes_atomic))
    )
