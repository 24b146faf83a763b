"""Offsets beyond 2^31 are seen in tensors that take addresses and no memory: the last program runs alone."""

import time

import pytest
import torch

from utils import interpreter
from utils.checks.cases import Case
from utils.checks.core import Exercise
from utils.checks.huge import everywhere, overflow
from utils.checks.kernel import check_kernel
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


@triton.jit
def copy_blocks_kernel(x_ptr, out_ptr, columns, AXIS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(AXIS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + column, tl.load(x_ptr + column, mask=column < columns), mask=column < columns)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_grid_that_no_gpu_launches_is_told_of(axis):
    def student(x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grid = [1, 1]
        grid[axis] = triton.cdiv(x.numel(), 1024)
        copy_blocks_kernel[tuple(grid)](x, out, x.numel(), AXIS=axis, BLOCK=1024)
        return out

    found = overflow(student, lambda: (torch.empty(2**31 + 5, dtype=torch.float16),))
    if axis == 0:
        assert found is None
    else:
        assert found.headline == "a grid of 1 x 2,097,153 x 1 programs, which no GPU launches"
        assert "at most 65,535 programs" in found.cause


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


@triton.jit
def rows_with_room_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    for row in range(tl.program_id(0), rows, rows):  # none for a program beyond the rows
        row = row.to(tl.int64) if WIDE else row
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + row * columns + column, 1.0, mask=column < columns)


@pytest.mark.parametrize("wide", [False, True])
def test_programs_that_a_grid_has_to_spare_are_passed_over(wide):
    def student(x):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grid = (x.shape[0] + 5, triton.cdiv(x.shape[1], 16) + 1)
        rows_with_room_kernel[grid](x, out, *x.shape, BLOCK=16, WIDE=wide)
        return out

    found = overflow(student, lambda: (tall((2**26 + 3, 33)),))
    assert (found is None) == wide
    if not wide:
        assert any("program (67108866, 2, 0) wrote out_ptr" in line for line in found.details)


def test_where_the_addresses_cannot_be_had_nothing_is_said():
    def student(x):
        raise MemoryError

    assert overflow(student, lambda: (everywhere(0.0, 4),)) is None


@triton.jit
def few_programs_kernel(x_ptr, rows, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    for _row in range(rows):
        tl.load(x_ptr + column, mask=column < columns)


def few_programs(x):
    few_programs_kernel[(1,)](x, *x.shape, BLOCK=64)
    return x.new_empty(x.shape)


def test_a_program_that_would_take_minutes_is_stopped():
    began = time.process_time()
    with pytest.raises(interpreter.TimeIsUp):
        overflow(few_programs, lambda: (tall((2**26 + 3, 33)),), seconds=0.2)
    assert time.process_time() - began < 5
    assert overflow(copy_rows(wide=True), lambda: (tall((2**26 + 3, 33)),)) is None  # the next one has its own time


def test_a_check_says_that_it_did_not_wait_for_the_last_program(monkeypatch, capsys):
    def out_of_time(*_):
        raise interpreter.TimeIsUp

    monkeypatch.setattr("utils.checks.kernel.overflow", out_of_time)
    check_kernel(
        Exercise("1.1", "copy"),
        copy_rows(wide=True),
        lambda x: x.clone(),
        [Case("whole", {"row": 2, "col": 33})],
        lambda case: (case.tensor("x", "row", "col"),),
        huge=lambda: (tall((4, 33)),),
    )
    assert "not tested to the end" in capsys.readouterr().out
