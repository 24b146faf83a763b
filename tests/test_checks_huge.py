"""Offsets beyond 2^31 are seen in tensors that take addresses and no memory: the last program runs alone."""

import torch

from utils import interpreter
from utils.checks.huge import everywhere, overflow
from utils.kernel_profile import profile_kernel

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def copy_rows_kernel(x_ptr, out_ptr, columns, stride_row, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_row + column, mask=column < columns)
    tl.store(out_ptr + row * columns + column, x, mask=column < columns)


def copy_rows(wide):
    def student(x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        copy_rows_kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), BLOCK=64, WIDE=wide)
        return out

    return student


def test_a_row_in_32_bits_overflows_in_the_output_and_one_in_64_does_not():
    shape = (2**26 + 3, 33)  # the last row begins beyond 2^31
    found = overflow(copy_rows(wide=False), lambda: (tall(shape),))
    assert found.headline == "33 out-of-bounds accesses in tensors of more than 2^31 elements"
    assert "row.to(tl.int64)" in found.cause
    assert any("program (67108866, 0, 0) wrote out_ptr" in line for line in found.details)
    assert overflow(copy_rows(wide=True), lambda: (tall(shape),)) is None


def tall(shape):
    """Rows that all lie in the same memory."""
    return torch.ones(1, shape[1], dtype=torch.float16).expand(shape)


def test_the_last_program_alone_runs_and_sees_the_whole_grid():
    x = torch.arange(12.0).view(4, 3)
    with interpreter.last_programs(), profile_kernel() as profile:
        out = copy_rows(wide=True)(x)
    assert torch.equal(out[3], x[3])
    assert profile.launches[0].grid == (4, 1, 1) and profile.launches[0].programs == 1
    with profile_kernel() as profile:
        assert torch.equal(copy_rows(wide=True)(x), x)
    assert profile.launches[0].programs == 4


def test_where_the_addresses_cannot_be_had_nothing_is_said():
    def student(x):
        raise MemoryError

    assert overflow(student, lambda: (everywhere(0.0, 4),)) is None
