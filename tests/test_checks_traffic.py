"""Kernels are held to their bytes, argument by argument, and to memory that is their own."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from checked_kernels import message

from utils.checks.cases import Case
from utils.checks.traffic import Budget, Passes, over_budget, unsafe
from utils.kernel_profile import OutOfBounds, Race, UninitializedRead, profile_kernel

CASE = Case("ragged", {"row": 3, "col": 100})
X = Passes("row", "col")  # 1,200 bytes


def counted(loaded=1200, stored=0, flops=0, **findings):
    """What a profiler of one argument ``x_ptr`` would say."""
    counters = SimpleNamespace(bytes_loaded=loaded, bytes_stored=stored)
    none = {"out_of_bounds": [], "uninitialized_reads": [], "races": []}
    return SimpleNamespace(
        by_argument={"x_ptr": counters}, bytes_loaded=loaded, bytes_stored=stored, flops=flops, **{**none, **findings}
    )


# ---- budgets


def test_parts_of_a_pass_come_out_as_whole_bytes():
    for rows in range(1, 200):
        case = Case("ragged", {"row": rows, "col": 16})
        for read in range(1, rows + 40, 7):
            budget = Budget({"x_ptr": Passes("row", "col", times=Fraction(read, rows))}, exact=True)
            assert over_budget(budget, counted(loaded=read * 64), case) is None, (read, rows)
            assert over_budget(budget, counted(loaded=read * 64 + 4), case) is not None, (read, rows)


def test_a_tensor_read_three_times_is_told_in_passes_and_bytes():
    problem = over_budget(Budget({"x_ptr": X}), counted(loaded=3600), CASE)
    assert problem.headline == "x_ptr is loaded 3.0 times, expected at most 1 (3,600 bytes, expected 1,200)"
    assert "load a tile once and keep it on chip" in problem.cause


def test_a_tensor_written_twice_is_told_so():
    problem = over_budget(Budget(stores={"x_ptr": X}), counted(stored=2400), CASE)
    assert problem.headline.startswith("x_ptr is stored 2.0 times, expected at most 1 (2,400 bytes")
    assert "store each result once" in problem.cause


def test_within_a_factor_passes_and_an_exact_budget_refuses_less_too():
    assert over_budget(Budget({"x_ptr": X}, factor=1.5), counted(loaded=1700), CASE) is None
    assert over_budget(Budget({"x_ptr": X}, factor=1.5), counted(loaded=1804), CASE) is not None
    assert over_budget(Budget({"x_ptr": X}), counted(loaded=800), CASE) is None
    problem = over_budget(Budget({"x_ptr": X}, exact=True), counted(loaded=800), CASE)
    assert "part of the tensor is never loaded" in problem.cause


def test_formulas_may_be_numbers_functions_and_passes_that_depend_on_the_case():
    twice = Passes("row", "col", times=lambda case: case.sizes["row"] - 1, element_size=2)
    assert twice(CASE) == 1200
    assert over_budget(Budget({"x_ptr": 1200}, exact=True), counted(), CASE) is None
    assert (
        over_budget(Budget({"x_ptr": lambda case: case.numel("row", "col") * 4}, exact=True), counted(), CASE) is None
    )
    problem = over_budget(Budget({"x_ptr": 600}), counted(), CASE)
    assert problem.headline == "x_ptr: expected at most 600 bytes loaded, got 1,200"


def test_totals_and_flops_have_budgets_too():
    problem = over_budget(Budget(total_loads=600), counted(), CASE)
    assert problem.headline == "total traffic: expected at most 600 bytes loaded, got 1,200"
    problem = over_budget(Budget(flops=100), counted(flops=200), CASE)
    assert problem.headline == "tl.dot: expected at most 100 FLOPs, got 200"
    assert "skip them" in problem.cause
    assert over_budget(Budget(flops=200, exact=True), counted(flops=200), CASE) is None


def test_an_argument_that_no_kernel_has_is_named_with_those_there_are():
    problem = over_budget(Budget({"q_ptr": X}), counted(), CASE)
    assert "no kernel loads or stores through an argument named q_ptr" in problem.headline and "x_ptr" in problem.cause
    assert over_budget(Budget({"q_ptr": 0}), counted(), CASE) is None


@pytest.mark.parametrize("arguments", [{"factor": 0.5}, {"factor": 2, "exact": True}])
def test_an_impossible_budget_is_refused(arguments):
    with pytest.raises(ValueError, match="factor must be at least 1"):
        Budget(**arguments)


def test_a_fault_names_its_kind_shows_the_first_findings_and_says_what_to_do():
    def found(kind, *programs):
        findings = [kind_of[kind]("add", "x_ptr", 9, None, (p, 0, 0), "read", count=4) for p in programs]
        return unsafe(counted(**{kind: findings}))

    kind_of = {"out_of_bounds": OutOfBounds, "uninitialized_reads": UninitializedRead, "races": Race}
    assert unsafe(counted()) is None
    problem = found("out_of_bounds", 1, 2, 3, 4, 5)
    assert problem.headline == "20 out-of-bounds accesses"
    assert "x_ptr[9]" in problem.details[0] and problem.details[3:] == ("and 2 more",)
    assert "mask" in problem.cause
    assert "torch.zeros" in found("uninitialized_reads", 1).cause
    assert "tl.atomic_add" in found("races", 1).cause


# ---- real kernels under the profiler


@pytest.mark.parametrize("seed", [1729, 8])
def test_a_missing_mask_is_reported_by_argument_index_and_program(seed):
    text = message("add", "no mask", seed)
    assert "out-of-bounds accesses" in text or "out-of-bounds access" in text
    assert "add_kernel: program (" in text and "x_ptr[" in text
    assert "is there a mask that compares" in text


def test_two_programs_that_add_to_one_element_are_a_race_although_the_interpreter_gives_the_right_sum():
    text = message("row sum", "race", budget=None)
    assert "between programs" in text and "partial_ptr[0]" in text and "tl.atomic_add" in text


def test_adding_into_memory_from_torch_empty_is_an_uninitialised_read():
    text = message("row sum", "uninitialised", budget=None)
    assert "uninitialized memory" in text and "partial_ptr[0]" in text


@triton.jit
def three_reads(x_ptr, y_ptr, z_ptr, out_ptr, n, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes, mask=lanes < n, other=0.0)
    y = tl.load(y_ptr + lanes, mask=lanes < n, other=0.0)
    z = tl.load(z_ptr + lanes, mask=lanes < n, other=0.0)
    tl.store(out_ptr + lanes, x + y + z, mask=lanes < n)


@pytest.mark.parametrize(("copies", "says"), [(False, "of x_ptr are loaded under another name, y_ptr"),
                                              (True, "through arguments that the budget does not name")])  # fmt: skip
def test_one_tensor_under_three_names_and_copies_of_it_are_counted(copies, says):
    x = torch.rand(4096)
    others = (x.clone(), x.clone()) if copies else (x, x)
    with profile_kernel() as profile:
        three_reads[(16,)](x, *others, torch.empty_like(x), 4096, BLOCK=256)
    budget = Budget({"x_ptr": 4 * 4096}, {"out_ptr": 4 * 4096}, exact=True)
    assert says in over_budget(budget, profile, Case("whole", {"n": 4096})).headline


def test_a_kernel_that_moves_less_than_the_result_needs_is_found():
    least = Budget({"x_ptr": X}, least=0.5)
    assert over_budget(least, counted(loaded=600), CASE) is None
    problem = over_budget(least, counted(loaded=599), CASE)
    assert "loaded 0.5 times, expected at least 0.5" in problem.headline and "never loaded" in problem.cause
    assert "at least 500 FLOPs" in over_budget(Budget(flops=1000, least=0.5), counted(flops=400), CASE).headline
    with pytest.raises(ValueError, match="from 0 to 1"):
        Budget(least=2)
