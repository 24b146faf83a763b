"""A tile of an operand in, a tile of the result out: through tensor descriptors, or through pointers."""

from __future__ import annotations

import functools

import torch

from utils import runtime

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip


@triton.jit
def load_tile(x, row, start, rows, K, stride, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr):
    """(BLOCK_ROWS, BLOCK_K) of x (rows, K) from (row, start) on, zeros beyond its edges; x is what `operand` gives."""
    if DESCRIBED:
        tile = x.load([row, start])
    else:
        r = (row + tl.arange(0, BLOCK_ROWS))[:, None]
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        tile = tl.load(x + r.to(tl.int64) * stride + k, mask=(r < rows) & (k < K), other=0.0)
    return tile


@triton.jit
def store_tile(
    c, tile, row, column, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIBED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Write a tile (BLOCK_M, BLOCK_N) of the contiguous c (M, N), as far as it lies inside."""
    if DESCRIBED:
        c.store([row, column], tile.to(DTYPE))
    else:
        m = (row + tl.arange(0, BLOCK_M))[:, None]
        n = (column + tl.arange(0, BLOCK_N))[None, :]
        tl.store(c + m.to(tl.int64) * N + n, tile.to(DTYPE), mask=(m < M) & (n < N))


def describable(x: torch.Tensor) -> bool:
    """Whether TMA can bring tiles of ``x`` (rows, columns): it starts, and each of its rows, at multiples of 16 bytes.

    GPUs before Hopper (compute capability 9.0) have no TMA.
    """
    has_tma = runtime.INTERPRET or torch.cuda.get_device_capability(x.device) >= (9, 0)
    pitch = x.stride(0) * x.element_size()
    return has_tma and x.stride(1) == 1 and pitch > 0 and pitch % 16 == 0 and x.data_ptr() % 16 == 0


def aligned(x: torch.Tensor) -> bool:
    """As :func:`describable`, on a GPU with TMA. A caller that knows its GPU saves the time of asking for it."""
    rows_apart, columns_apart = x.stride()
    pitch = rows_apart * x.element_size()
    return columns_apart == 1 and pitch > 0 and pitch % 16 == 0 and x.data_ptr() % 16 == 0


def extent(x: torch.Tensor) -> int:
    """Elements from the first of ``x`` to its last in memory; it must not be empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))


def operand(x: torch.Tensor, described: bool, block: tuple[int, int]) -> torch.Tensor | TensorDescriptor:
    """``x`` as :func:`load_tile` and :func:`store_tile` take it, for tiles of the shape ``block``."""
    return TensorDescriptor.from_tensor(x, list(block)) if described else x


@functools.cache
def programs(device: torch.device) -> int:
    """How many programs run at a time: one for each SM of a GPU."""
    return runtime.pick(cpu=4, gpu=0) or torch.cuda.get_device_properties(device).multi_processor_count
