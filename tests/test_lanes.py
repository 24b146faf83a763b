"""Lanes of a kernel as the drawings see them, and the drawings of programs over a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from utils import plots, runtime
from utils.kernel_profile.lanes import Lanes, trace_lanes
from utils.plots.programs import program_owners, programs_animation, tile_orders

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def double_kernel(x_ptr, out_ptr, rows, columns, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = row[:, None] * stride_m + column[None, :] * stride_n  # (BLOCK_M, BLOCK_N)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(out_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask), mask=mask)


def doubled(x):
    out = torch.empty_strided(x.shape, x.stride(), device=x.device)
    with trace_lanes() as trace:
        double_kernel[(2, 3)](x, out, *x.shape, *x.stride(), BLOCK_M=4, BLOCK_N=8)
    assert torch.equal(out, 2 * x)
    return trace


def test_every_access_is_kept_with_its_program_and_mask():
    trace = doubled(torch.randn(6, 20, device=runtime.DEVICE))
    reads = trace.of("x_ptr", "read")
    assert [one.program for one in reads] == [(m, n, 0) for m in range(2) for n in range(3)]
    assert sum(one.active for one in reads) == 6 * 20 and reads[-1].masked == 4 * 8 - 2 * 4
    assert reads[-1].corner((20, 1)) == (4, 16, 4, 8)
    assert len(trace.of("out_ptr")) == 6 and trace.profile.bytes_stored == 4 * 6 * 20
    touched = np.concatenate([one.elements[one.mask] for one in reads])
    assert sorted(touched) == list(range(120))


def test_lanes_over_a_transposed_matrix_keep_rows_and_columns():
    trace = doubled(torch.randn(20, 6, device=runtime.DEVICE).t())
    assert trace.of("x_ptr", "read")[-1].corner((1, 6)) == (4, 16, 4, 8)


def test_an_argument_that_nobody_touched_is_refused_by_name():
    trace = doubled(torch.randn(6, 20, device=runtime.DEVICE))
    with pytest.raises(ValueError, match=r"no write of 'x_ptr' was seen; the kernels touched: out_ptr, x_ptr"):
        trace.of("x_ptr", "write")


def test_lanes_that_are_no_rectangle_are_refused():
    lanes = Lanes("k", (0, 0, 0), "x_ptr", "read", np.array([0, 3, 4]), np.ones(3, bool))
    with pytest.raises(ValueError, match="no rectangle"):
        lanes.corner((8, 1))


@pytest.mark.slow
def test_the_animation_has_a_frame_for_each_program_and_says_what_is_masked():
    reads = doubled(torch.randn(6, 20, device=runtime.DEVICE)).of("x_ptr", "read")
    shown = programs_animation(reads, (6, 20), title="Six programs", alt="Six programs take turns over a matrix")
    assert "program (1, 2): 8 lanes read an element each; 24 are masked off" in shown.html
    assert shown.poster.startswith(b"\x89PNG")


@pytest.mark.slow
def test_orders_are_drawn_and_said():
    rows = [(m, n) for m in range(4) for n in range(6)]
    columns = [(m, n) for n in range(6) for m in range(4)]
    fig = tile_orders({"rows": rows, "columns": columns}, 8, title="Two orders", note=lambda name: name.upper())
    assert "rows: the first 8 programs touch 2 tile rows and 6 columns" in fig.alt
    assert "columns: the first 8 programs touch 4 tile rows and 2 columns" in fig.alt
    assert plots.png(fig).startswith(b"\x89PNG")


@triton.jit
def add_up_kernel(x_ptr, shared_ptr, own_ptr, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * columns + column, mask=column < columns)
    tl.atomic_add(shared_ptr + column, x, mask=column < columns)
    tl.store(own_ptr + tl.program_id(0) * columns + column, x, mask=column < columns)


def test_owners_say_where_programs_meet():
    x = torch.ones(3, 10, device=runtime.DEVICE)
    shared, own = torch.zeros(10, device=runtime.DEVICE), torch.zeros(3, 10, device=runtime.DEVICE)
    with trace_lanes() as trace:
        add_up_kernel[(3,)](x, shared, own, 10, BLOCK=16)
    panels = {"shared": (trace.of("shared_ptr"), (1, 10)), "own": (trace.of("own_ptr"), (3, 10))}
    fig = program_owners(panels, title="Programs meet in a shared sum")
    assert "shared: 3 programs, 10 of 10 elements touched by several" in fig.alt
    assert "own: 3 programs, 0 of 30 elements touched by several" in fig.alt
    assert plots.png(fig).startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="element 20 is outside of 2 x 10"):
        program_owners({"own": (trace.of("own_ptr"), (2, 10))}, title="Too small")
