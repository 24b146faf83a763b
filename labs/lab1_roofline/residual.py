"""A kernel to profile: what it moves on paper, and the same kernel without its waste (exercise 1.10).

It adds a residual stream to x and sums the rows of the result, which is where a layer norm begins.
"""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.operators import require_sizes

from .warp import sectors_touched

import triton  # isort: skip
import triton.language as tl  # isort: skip

BLOCK = 128
"""Elements that a program takes in one step: one per lane, so four warps of 32 lanes."""

WALKS = ("runs", "tiles")


def residual_add_bytes(rows: int, cols: int, element_size: int, mended: bool) -> int:
    """Bytes that a kernel loads and stores for ``y = x + residual`` and the sums of y's rows, all loops together.

    Args:
        rows: rows of x, residual and y; there is one sum per row.
        cols: columns of x, residual and y.
        element_size: bytes of one element of x, residual, y and of one sum.
        mended: False: the kernel as it is given, :func:`given_kernel`. True: as few bytes as any kernel needs.

    Raises:
        ValueError: a size is below 1.
    """
    require_sizes(rows=rows, cols=cols, element_size=element_size)
    raise NotImplementedError("Lab 1, exercise 1.10: bytes of the kernels")


def walk_sectors(rows: int, cols: int, stride: int, element_size: int, block: int, walk: str) -> int:
    """Sectors that one ``tl.load`` or ``tl.store`` in a loop over the rows of a matrix moves, all programs together.

    Each program walks along one row in ``steps = ceil(cols / block)`` steps, and takes ``block`` elements in each: its
    lanes 0 to ``block - 1`` one element each. Lanes beyond the row's end are masked off. Each 32 neighbouring lanes are
    a warp, and a warp asks for its own sectors in each step: what another step or another warp asked for counts again.

    Args:
        rows: rows of the matrix, one program each.
        cols: elements of a row.
        stride: elements from the beginning of a row to the beginning of the next; the first row begins at address 0.
        element_size: bytes of one element.
        block: lanes of a program, a power of two, at least 32.
        walk: ``"runs"``: in step s, lane l takes element ``l * steps + s`` of the row, so that the lane takes a run of
            neighbours, one after another. ``"tiles"``: lane l takes element ``s * block + l``, so that the lanes take
            neighbours of each other.

    Raises:
        ValueError: a size is below 1, or ``walk`` is neither of the two.
    """
    require_sizes(rows=rows, cols=cols, stride=stride, element_size=element_size, block=block)
    if walk not in WALKS:
        raise ValueError(f"walk must be 'runs' or 'tiles', got {walk!r}")
    raise NotImplementedError("Lab 1, exercise 1.10: sectors of a walk")


@triton.jit
def given_kernel(x_ptr, residual_ptr, y_ptr, sum_ptr, cols, stride_x, stride_residual, BLOCK: tl.constexpr):
    """The kernel to profile: one program per row. Its values are right; leave it as it is, to compare with."""
    row = tl.program_id(0)  # the number of this program, which is the row that it owns
    x_row = x_ptr + row * stride_x  # where the row begins in x: rows lie stride_x elements apart
    residual_row = residual_ptr + row * stride_residual  # the same in residual
    y_row = y_ptr + row * cols  # and in y, which has no gaps between its rows
    lane = tl.arange(0, BLOCK)  # (BLOCK,) the numbers 0, 1, ..., BLOCK - 1, one per lane
    steps = tl.cdiv(cols, BLOCK)  # steps that it takes to cover the row: cols / BLOCK, rounded up

    for step in range(steps):  # y = x + residual
        col = lane * steps + step  # (BLOCK,) the element of the row that each lane takes in this step
        inside = col < cols  # (BLOCK,) False for lanes beyond the row's end
        x = tl.load(x_row + col, mask=inside, other=0.0)  # (BLOCK,) one element per lane, 0 where masked off
        r = tl.load(residual_row + col, mask=inside, other=0.0)  # (BLOCK,)
        tl.store(y_row + col, x + r, mask=inside)  # one element per lane, nothing where masked off

    total = 0.0  # stays on the chip from step to step
    for step in range(steps):  # the sum of the row of y
        col = step * BLOCK + lane  # (BLOCK,)
        inside = col < cols  # (BLOCK,)
        x = tl.load(x_row + col, mask=inside, other=0.0)  # (BLOCK,)
        r = tl.load(residual_row + col, mask=inside, other=0.0)  # (BLOCK,)
        total += tl.sum(x + r)  # over all lanes
    tl.store(sum_ptr + row, total)  # one number per program


@triton.jit
def residual_add_kernel(x_ptr, residual_ptr, y_ptr, sum_ptr, cols, stride_x, stride_residual, BLOCK: tl.constexpr):
    """The same values as :func:`given_kernel`, with as few bytes and sectors as they take: write it here."""
    raise NotImplementedError("Lab 1, exercise 1.10: the mended kernel")


def given_residual_add(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``y = x + residual`` and the sums of y's rows, computed by :func:`given_kernel`; see :func:`residual_add`."""
    return _launch(given_kernel, x, residual)


def residual_add(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``y = x + residual`` and the sums of y's rows, computed by :func:`residual_add_kernel`.

    Args:
        x: (rows, cols) float32, the elements of a row next to each other; rows may lie apart.
        residual: as x.

    Returns:
        y, (rows, cols) and without gaps, and the sums, (rows,); both float32.

    Raises:
        ValueError: x or residual is no such matrix, or reaches further than 32-bit offsets do.
    """
    return _launch(residual_add_kernel, x, residual)


def _launch(kernel: triton.JITFunction, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one of the two kernels, one program per row."""
    for name, matrix in (("x", x), ("residual", residual)):
        if matrix.dim() != 2 or matrix.shape != x.shape or matrix.dtype != torch.float32:
            raise ValueError(f"{name} must be a float32 matrix of x's shape, got {matrix.dtype} {tuple(matrix.shape)}")
        if matrix.shape[1] > 1 and matrix.stride(1) != 1:
            raise ValueError(f"the elements of a row of {name} must be neighbours, got strides {matrix.stride()}")
        if matrix.shape[0] * max(matrix.stride(0), matrix.shape[1]) >= 2**31:
            raise ValueError(f"{name} must reach over less than 2**31 elements, got {tuple(matrix.shape)}")
    rows, cols = x.shape
    require_sizes(rows=rows, cols=cols)
    y, sums = torch.empty(rows, cols, device=x.device), torch.empty(rows, device=x.device)
    kernel[(rows,)](x, residual, y, sums, cols, x.stride(0), residual.stride(0), BLOCK=BLOCK)
    return y, sums
