"""What the kernels share: which tile a program owns, and how a tile is loaded and stored."""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .tuning import block_d

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

LOG2_E = 1.4426950408889634


class Access(NamedTuple):
    """How a kernel reads and writes (B, H, N, D) tensors: it is compiled for these values.

    ``index_dtype``: type of the offsets inside a head, int64 where they pass 2^31. ``use_tma``: tiles are loaded by
    TMA, through tensor descriptors. ``loads_first`` and ``masked`` are the tile's, see :class:`.tuning.Tile`.
    """

    head_dim: int
    index_dtype: tl.dtype
    use_tma: bool = False
    loads_first: bool = False
    masked: bool = True


@triton.jit
def swizzle_tile(program, tiles, num_hz, nheads_in_l2):
    """Tile and head of a program; ``tiles`` tiles for each of ``num_hz`` heads, of all batch entries together.

    The programs of ``nheads_in_l2`` heads follow one another tile by tile, so that they run at the same time and
    find each other's keys and values in the L2 cache.
    """
    first_hz = program // (nheads_in_l2 * tiles) * nheads_in_l2
    size = tl.minimum(nheads_in_l2, num_hz - first_hz)
    rest = program - first_hz * tiles
    return rest // size, first_hz + rest % size


@triton.jit
def load_rows(
    source, strides, batch, head, first, N,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` to ``first + ROWS - 1`` of the N of one head: (ROWS, BLOCK_D), zeros beyond the edges.

    ``source`` is a descriptor of the (B, H, N, D) tensor (``ACCESS.use_tma``) or a pointer to it, ``strides`` are the
    tensor's. EVEN: no row is beyond N.
    """
    if ACCESS.use_tma:
        tile = source.load([batch, head, first, 0]).reshape(ROWS, BLOCK_D)
    else:
        stride_b, stride_h, stride_n, stride_d = strides
        row = tl.arange(0, ROWS).to(ACCESS.index_dtype)
        column = tl.arange(0, BLOCK_D).to(ACCESS.index_dtype)
        left = N - first
        head_ptr = source + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        start_ptr = head_ptr + tl.cast(first, ACCESS.index_dtype) * stride_n
        place = start_ptr + (row[:, None] * stride_n + column[None, :] * stride_d)
        if EVEN and ACCESS.head_dim == BLOCK_D:
            tile = tl.load(place)
        elif EVEN:
            tile = tl.load(place, mask=column[None, :] < ACCESS.head_dim, other=0.0)
        elif ACCESS.head_dim == BLOCK_D:
            tile = tl.load(place, mask=row[:, None] < left, other=0.0)
        else:
            tile = tl.load(place, mask=(row[:, None] < left) & (column[None, :] < ACCESS.head_dim), other=0.0)
    return tile


@triton.jit
def store_rows(
    ptr, strides, value, batch, head, first, N, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ACCESS: tl.constexpr
):  # fmt: skip
    """Store (ROWS, BLOCK_D) as rows ``first`` to ``first + ROWS - 1`` of one head, in the tensor's dtype."""
    stride_b, stride_h, stride_n, stride_d = strides
    row = tl.arange(0, ROWS).to(ACCESS.index_dtype)
    column = tl.arange(0, BLOCK_D).to(ACCESS.index_dtype)
    left = N - first
    head_ptr = ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    start_ptr = head_ptr + tl.cast(first, ACCESS.index_dtype) * stride_n
    place = start_ptr + (row[:, None] * stride_n + column[None, :] * stride_d)
    inside = (row[:, None] < left) & (column[None, :] < ACCESS.head_dim)
    tl.store(place, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_product(total, a, b):
    """total + a @ b, accumulated in float32; ``b`` is of a's dtype.

    float32 operands: the product is summed separately and then added to ``total``, so that an error grows with the
    length of a tile and with the number of tiles, and not with the length of the sequence. (Without a bound on
    ``max_num_imprecise_acc`` the compiler would let the product go on adding to ``total``.)
    """
    if a.dtype == tl.float32:
        total += tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=a.shape[1])
    else:  # to the tensor cores' accumulators
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


def index_dtype(*tensors: torch.Tensor, rows: int = 256) -> tl.dtype:
    """int64 if an offset inside one head of a (B, H, N, D) tensor, a tile's padding included, passes 2^31."""
    wide = any((x.shape[2] + rows) * abs(x.stride(2)) + 512 * abs(x.stride(3)) >= 2**31 for x in tensors)
    return tl.int64 if wide else tl.int32


def empty_in_order(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor of x's shape and dtype, its axes in memory in x's order, without gaps."""
    return torch.empty_like(x, memory_format=torch.preserve_format)


def tma_compatible(*tensors: torch.Tensor) -> bool:
    """Whether each of these (B, H, N, D) tensors may have a descriptor.

    The hardware requires a last stride of 1, and a start and other strides that are multiples of 16 bytes.
    """
    return all(map(_tma_compatible, tensors))


def kernel_operands(
    wanted: bool, *tiles: tuple[torch.Tensor, int]
) -> tuple[list[torch.Tensor | TensorDescriptor], bool]:
    """What the kernels load from: descriptors of all tensors where that is ``wanted`` and possible, else the tensors.

    Args:
        wanted: Whether the table of tuned numbers chooses descriptors.
        tiles: (B, H, N, D) tensors, each with the rows of its tiles.

    Returns:
        The operands in order, and whether they are descriptors.
    """
    tensors = [x for x, _ in tiles]
    if not wanted or not tma_compatible(*tensors):
        return tensors, False
    return [_describe(x, rows) for x, rows in tiles], True


def _tma_compatible(x: torch.Tensor) -> bool:
    if x.data_ptr() % 16 or x.stride(3) != 1:
        return False
    return all(
        size == 1 or (stride > 0 and stride * x.element_size() % 16 == 0)
        for size, stride in zip(x.shape[:3], x.stride()[:3])
    )


def _describe(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A descriptor for tiles of ``rows`` rows; the stride of an axis of one is never used, but must be a legal one."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape, x.stride())]
    strides[3] = 1
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, block_d(x.shape[3])])
