"""Launches of kernels whose names are the student's: told apart by the memory that they touch."""

from __future__ import annotations

import pytest
import torch

from utils import runtime
from utils.checks.cases import Case
from utils.checks.diagnoses import CaseResult
from utils.checks.launches import Limits, by_memory, halves, outside_limits, probed_tile, tile_over, tiling_over
from utils.kernel_profile import profile_kernel

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def anything(here, there, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(here + row[:, None] * columns + column[None, :], mask=mask)
    tl.store(there + row[:, None] * columns + column[None, :], 2 * x, mask=mask)


@pytest.fixture(scope="module")
def trial() -> CaseResult:
    """A forward pass of two launches, through memory of its own, and a backward pass of one."""
    x = torch.randn(10, 5, device=runtime.DEVICE)
    between, out, dx = (torch.empty_like(x) for _ in range(3))
    with profile_kernel() as profile:
        for here, there in ((x, between), (between, out), (x, dx)):
            anything[(3,)](here, there, *x.shape, ROWS=4, BLOCK=8)
    return CaseResult(Case("any", {"row": 10, "col": 5}), (x,), outputs=(out, dx), profile=profile)


def test_the_forward_pass_ends_with_the_last_store_to_its_output(trial):
    passes = halves(trial, trial.outputs[0])
    assert [len(launches) for launches in passes.values()] == [2, 1]
    assert [len(launches) for launches in halves(trial, torch.zeros(3)).values()] == [0, 3]


def test_traffic_is_counted_by_memory_whatever_an_argument_is_called(trial):
    (x,), (out, _) = trial.args, trial.outputs
    forward = halves(trial, out)["forward"]
    found = by_memory(forward, {"x": x, "a view of out": out[2:]})
    assert (found["x"].bytes_loaded, found["x"].bytes_stored) == (200, 0)
    assert (found["a view of out"].bytes_loaded, found["a view of out"].bytes_stored) == (0, 200)
    assert (found[""].bytes_loaded, found[""].bytes_stored) == (200, 200)


@pytest.mark.parametrize(
    ("name", "limits", "says"),
    [
        ("x", Limits((200, 200), one=200), ""),
        ("x", Limits((100, 300)), ""),
        ("x", Limits((100, 100), one=100, more="more"), "x is loaded 2.0 times in the forward pass, expected 1 (200 "),
        ("x", Limits((400, 400), one=200, less="less"), "x is loaded 1.0 times in the forward pass, expected 2 (200 "),
        ("x", Limits((0, 100), one=100, more="more"), "expected at most 1 (200 bytes, expected at most 100)"),
        ("out", Limits((0, 0), (50, 100), one=50, more="more"), "out is stored 4.0 times"),
        ("", Limits((0, 300), (0, 40), more="more"), "other memory: expected at most 40 bytes stored"),
    ],
)  # fmt: skip
def test_limits_are_held_from_both_sides_and_say_which(trial, name, limits, says):
    forward = halves(trial, trial.outputs[0])["forward"]
    problem = outside_limits("forward", forward, {"x": trial.args[0], "out": trial.outputs[0]}, {name: limits})
    assert (problem is None) == (says == "")
    if problem is not None:
        assert says in problem.headline and problem.cause == (limits.more or limits.less)


def test_a_tile_and_the_rows_of_a_program_are_read_off_what_it_touched(trial):
    x = trial.args[0]
    assert tile_over(trial.profile, x) == (4, 8) and tile_over(trial.profile, torch.zeros(3)) == (1, 1)
    assert probed_tile(lambda here: anything[(1,)](here, here, *here.shape, ROWS=16, BLOCK=8), (x,), x) == (16, 8)
    assert probed_tile(lambda here: 1 / 0, (x,), x) == (1, 1)
    tiling = tiling_over([trial], 1)
    assert tiling.describe((9, 2), (10, 5)) == "program (2): tile rows 8..9"
    assert tiling_over([CaseResult(trial.case, trial.args)], 0) is None


def test_a_single_program_does_not_say_how_many_rows_are_a_programs(trial):
    x, out = torch.randn(10, 5, device=runtime.DEVICE), torch.empty(10, 5, device=runtime.DEVICE)
    with profile_kernel() as profile:
        anything[(1,)](x, out, *x.shape, ROWS=4, BLOCK=8)
    assert tiling_over([CaseResult(trial.case, (x,), outputs=(out,), profile=profile)], 0) is None
