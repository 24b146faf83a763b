"""Three matrix products: an output element per lane, tiles through ``tl.dot``, and tiles through tensor descriptors."""

from __future__ import annotations

import torch

from utils import runtime
from utils.example_kernels.traffic import Traffic, cdiv, same_dtype, size, tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

NAIVE_BLOCK = 256
#: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, warps, stages). On a GPU 128 x 128 with three stages of 16-bit operands fits
#: shared memory twice; the interpreter has no caches to fill and gets a tile that small matrices cross.
GPU_TILES = (128, 128, 64, 8, 8, 3)
CPU_TILES = (32, 32, 32, 4, 4, 1)
Tiles = tuple[int, int, int, int, int, int]


@triton.jit
def naive_matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BLOCK: tl.constexpr):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,), each lane owns one element of c
    mask = element < M * N
    row = element // N
    column = element % N
    accumulator = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(0, K):
        a = tl.load(a_ptr + row * stride_am + k * stride_ak, mask=mask, other=0.0)  # (BLOCK,), mostly one address
        b = tl.load(b_ptr + k * stride_bk + column * stride_bn, mask=mask, other=0.0)  # (BLOCK,), neighbours
        accumulator += a.to(tl.float32) * b.to(tl.float32)
    tl.store(c_ptr + element, accumulator.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def grouped_tile(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile of c that a program owns: GROUP_M tile rows at a time, so that programs that run together share b."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_in_group = GROUP_M * tiles_n
    first_m = (pid // tiles_in_group) * GROUP_M
    rows_in_group = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + (pid % tiles_in_group) % rows_in_group
    tile_n = (pid % tiles_in_group) // rows_in_group
    return tile_m, tile_n


@triton.jit
def tiled_matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = grouped_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + inner[:, None] * stride_bk + columns[None, :] * stride_bn
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (inner[None, :] < K - k), other=0.0)  # (BLOCK_M, BLOCK_K)
        b = tl.load(b_ptrs, mask=(inner[:, None] < K - k) & (columns[None, :] < N), other=0.0)  # (BLOCK_K, BLOCK_N)
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + rows[:, None] * stride_cm + columns[None, :]
    tl.store(c_ptrs, accumulator.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def descriptor_matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = grouped_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_am, 1], [BLOCK_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_bk, 1], [BLOCK_K, BLOCK_N])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [stride_cm, 1], [BLOCK_M, BLOCK_N])
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = a_desc.load([tile_m * BLOCK_M, k])  # (BLOCK_M, BLOCK_K), zeros outside of a
        b = b_desc.load([k, tile_n * BLOCK_N])  # (BLOCK_K, BLOCK_N), zeros outside of b
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
    c_desc.store([tile_m * BLOCK_M, tile_n * BLOCK_N], accumulator.to(c_ptr.dtype.element_ty))


def _checked(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    tensor("a", a, 2)
    tensor("b", b, 2)
    same_dtype(a=a, b=b)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a's columns must equal b's rows, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return a.shape[0], b.shape[1], a.shape[1]


def naive_matmul(a: torch.Tensor, b: torch.Tensor, block: int = NAIVE_BLOCK) -> torch.Tensor:
    """Product of ``a`` (M, K) and ``b`` (K, N) of any strides, one output element per lane, no tile, no tensor core.

    Raises:
        TypeError, ValueError: Wrong dtype, rank or device, or the inner sizes differ.
    """
    M, N, K = _checked(a, b)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if c.numel():
        naive_matmul_kernel[(cdiv(M * N, block),)](a, b, c, M, N, K, *a.stride(), *b.stride(), BLOCK=block)
    return c


def naive_matmul_traffic(m: int, n: int, k: int, element_size: int) -> Traffic:
    """Traffic of :func:`naive_matmul`: each element of a is requested n times, each of b m times.

    Its 2mnk FLOPs run outside ``tl.dot``, so ``flops`` is 0 here.
    """
    outputs = size("m", m) * size("n", n)
    return Traffic(2 * outputs * size("k", k) * size("element_size", element_size, 1), outputs * element_size)


def tiles() -> Tiles:
    """(BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, warps, stages) that the tiled products use on this machine."""
    return runtime.pick(cpu=CPU_TILES, gpu=GPU_TILES)


def tiled_matmul(a: torch.Tensor, b: torch.Tensor, tile: Tiles | None = None, precision: str = "ieee") -> torch.Tensor:
    """Product of ``a`` (M, K) and ``b`` (K, N) of any strides, tile by tile, in groups of tile rows that share L2.

    Args:
        tile: (BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, warps, stages); by default :func:`tiles`.
        precision: For float32 operands: ``ieee`` (exact products) or ``tf32`` (tensor cores).

    Raises:
        TypeError, ValueError: Wrong dtype, rank or device, or the inner sizes differ.
    """
    M, N, K = _checked(a, b)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    block_m, block_n, block_k, group_m, warps, stages = tile or tiles()
    if c.numel():
        tiled_matmul_kernel[(cdiv(M, block_m) * cdiv(N, block_n),)](
            a, b, c, M, N, K, *a.stride(), *b.stride(), c.stride(0),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group_m, PRECISION=precision,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return c


def descriptor_matmul(
    a: torch.Tensor, b: torch.Tensor, tile: Tiles | None = None, precision: str = "ieee"
) -> torch.Tensor:
    """The same product with tensor descriptors (TMA on Hopper): rows of unit stride and a pitch of 16-byte multiples.

    Raises:
        TypeError, ValueError: As :func:`tiled_matmul`, or a matrix does not have such rows.
    """
    M, N, K = _checked(a, b)
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M * N * K == 0:
        return c.zero_()
    for name, matrix in (("a", a), ("b", b), ("c", c)):
        pitch = matrix.stride(0) * matrix.element_size()
        if matrix.stride(1) != 1 or pitch % 16 or matrix.data_ptr() % 16:
            raise ValueError(
                f"{name} needs rows of unit stride that start on 16-byte boundaries, got strides {matrix.stride()} of "
                f"{matrix.element_size()} bytes (pad its last axis)"
            )
    block_m, block_n, block_k, group_m, warps, stages = tile or tiles()
    if runtime.HAS_GPU:
        triton.set_allocator(lambda nbytes, alignment, stream: torch.empty(nbytes, dtype=torch.int8, device=a.device))
    descriptor_matmul_kernel[(cdiv(M, block_m) * cdiv(N, block_n),)](
        a, b, c, M, N, K, a.stride(0), b.stride(0), c.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=group_m, PRECISION=precision,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return c


def tiled_matmul_traffic(m: int, n: int, k: int, element_size: int, tile: Tiles | None = None) -> Traffic:
    """Traffic of :func:`tiled_matmul` and :func:`descriptor_matmul`.

    Each tile of c reads a band of a and a band of b, so a is read once per tile column and b once per tile row.
    """
    block_m, block_n, block_k, *_ = tile or tiles()
    tiles_m, tiles_n = cdiv(size("m", m), block_m), cdiv(size("n", n), block_n)
    loaded = (m * size("k", k) * tiles_n + k * n * tiles_m) * size("element_size", element_size, 1)
    flops = 2 * (tiles_m * block_m) * (tiles_n * block_n) * (cdiv(k, block_k) * block_k)
    return Traffic(loaded, m * n * element_size, flops)
