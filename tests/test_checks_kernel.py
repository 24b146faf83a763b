"""The whole check of an exercise: stubs pass through, exceptions are shown with their case, a GPU is kept safe."""

import ast

import pytest
import torch
from checked_kernels import EXERCISES, check, message, scale

from utils import runtime
from utils.checks import cases as cases_module
from utils.checks import kernel
from utils.checks.cases import Case, Cases
from utils.checks.core import CheckFailed
from utils.checks.forbid import Rules

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def stub_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    """out = x + y"""
    raise NotImplementedError("Lab 2, exercise 1: write the kernel")


@triton.jit
def misspelt_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptrs + i))  # noqa: F821


def launch(jit_function, *more):
    def student(x, y):
        out = torch.empty_like(x)
        jit_function[(1,)](x, y, out, *more, BLOCK=32)
        return out

    return student


# ---- stubs


def test_a_stub_passes_through_with_its_own_message():
    def stub(x, y):
        raise NotImplementedError("Lab 2, exercise 1: vector addition")

    with pytest.raises(NotImplementedError, match="Lab 2, exercise 1: vector addition"):
        check("add", student=stub)


def test_a_stub_inside_a_kernel_passes_through_the_interpreter():
    with pytest.raises(NotImplementedError, match="Lab 2, exercise 1: write the kernel"):
        check("add", student=launch(stub_kernel))


def test_a_stub_inside_a_compiled_kernel_is_recognised_where_the_compiler_stops():
    class CompilationError(Exception):
        """As Triton's: it names the statement that it does not know."""

        node = ast.parse('raise NotImplementedError("Lab 2, exercise 1: write the kernel")').body[0]

    def student(x, y):
        raise CompilationError("unsupported AST node type: Raise")

    with pytest.raises(NotImplementedError, match="Lab 2, exercise 1: write the kernel"):
        check("add", student=student)


def test_an_exception_of_a_library_is_not_taken_for_a_stub():
    def student(x, y):
        return torch.ops.aten._nested_tensor_from_mask(x, y)

    with pytest.raises(CheckFailed):
        check("add", student=student)


# ---- exceptions


def test_a_mistake_inside_a_kernel_is_shown_with_its_line_and_case():
    text = message("add", student=launch(misspelt_kernel))
    assert "NameError: name 'y_ptrs' is not defined" in text
    assert "in misspelt_kernel, line " in text and "tl.load(y_ptrs + i)" in text
    assert text.endswith("reproduce: seed 1729, shape n=32 float32 (one tile)")


def test_a_wrong_launch_is_shown_at_the_students_line():
    text = message("add", student=launch(misspelt_kernel, 1, 2, 3))
    assert "TypeError" in text and "in student, line " in text and "jit_function[(1,)]" in text


def test_an_exception_in_a_later_case_says_which_cases_raise():
    def student(x, y):
        if x.numel() == 0:
            raise ZeroDivisionError("no element")
        return EXERCISES["add"]["student"](x, y)

    text = message("add", student=student)
    assert "ZeroDivisionError: no element" in text
    assert "wrong in 1 of 13 cases: no element; right in: one tile" in text


def test_a_keyboard_interrupt_is_not_swallowed():
    def student(x, y):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("add", student=student)


# ---- gradients


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scale(x)

    @staticmethod
    def backward(ctx, gradient):
        return scale(gradient.contiguous(), bug=Scale.bug)


def with_gradient(function):
    def run(x, gradient):
        x = x.detach().requires_grad_()
        y = function(x)
        y.backward(gradient)
        return y, x.grad

    return run


def test_an_autograd_function_is_checked_with_its_gradient():
    parts = {
        "student": with_gradient(Scale.apply),
        "reference": with_gradient(lambda x: 3 * x),
        "inputs": lambda case: (case.tensor("x", "row", "col"), case.tensor("gradient", "row", "col")),
        "outputs": ("y", "dx"),
    }
    Scale.bug = ""
    check("scale", **parts)
    Scale.bug = "no factor"
    text = message("scale", **parts)
    assert "first at dx[row=0, col=0], owned by program (0, 0)" in text and "0.33 times what it should be" in text


# ---- on a machine with a GPU


def test_on_a_gpu_the_profiler_runs_one_small_case_of_each_kind_before_the_gpu_runs_all(monkeypatch):
    drawn = EXERCISES["add"]["cases"].draw(1)
    assert kernel._plan(drawn, True) == [(case, True) for case in drawn] or runtime.HAS_GPU
    monkeypatch.setattr(runtime, "INTERPRET", False)
    plan = kernel._plan(drawn, True)
    assert [(case.kind, profiled) for case, profiled in plan[:3]] == [
        ("one tile", True),
        ("ragged", True),
        ("short", True),
    ]
    assert plan[3:] == [(case, False) for case in drawn]
    assert kernel._plan(drawn, False) == [(case, False) for case in drawn]


def test_a_kernel_that_leaves_its_tensors_is_never_launched_on_the_gpu(monkeypatch):
    drawn = EXERCISES["add"]["cases"].draw(1729)
    small = kernel._plan(drawn, True)[:4]
    monkeypatch.setattr(kernel, "_plan", lambda cases, is_kernel: [*small, (Case("whole tiles", {"n": 64}), False)])
    ran = []

    def student(x, y):
        ran.append(x.numel())
        return EXERCISES["add"]["student"](x, y, bug="no mask")

    text = message("add", student=student)
    assert "accesses outside their tensor" in text
    assert ran == [case.sizes["n"] for case, _ in small]


# ---- the verdict


def test_a_passed_check_says_so_in_one_line_and_then_what_to_notice(capsys):
    check("scale", notice="Each element is read once.")
    said = capsys.readouterr().out
    assert said == "✓ exercise 2.0 (scale): 13 cases agree (seed 1729)\n  Each element is read once.\n"


def test_a_case_that_memory_does_not_allow_is_left_out_aloud(monkeypatch, capsys):
    monkeypatch.setattr(cases_module, "far_fits", lambda dtype: False)
    check("scale", cases=Cases({"row": 16, "col": 16}, layouts=("far",)))
    assert "offsets beyond 2^31 were not tried" in capsys.readouterr().out


def test_a_fresh_seed_is_drawn_and_printed_when_none_is_given(capsys):
    check("scale", seed=None, cases=[Case("one tile", {"row": 16, "col": 16})])
    assert "1 cases agree (seed " in capsys.readouterr().out


def test_an_answer_in_plain_pytorch_is_checked_without_a_profiler():
    check("scale", student=lambda x: 3 * x, forbidden=Rules(kernel=False))
