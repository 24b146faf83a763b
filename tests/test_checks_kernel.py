"""The whole check of an exercise: stubs pass through, exceptions are shown with their case, a GPU is kept safe."""

import ast
from types import SimpleNamespace

import pytest
import torch
from checked_kernels import EXERCISES, add, check, message, scale

from utils import runtime
from utils.checks import cases as cases_module
from utils.checks import explanations, kernel, traffic
from utils.checks.cases import LAYOUTS, Case, Cases
from utils.checks.core import CheckFailed
from utils.checks.forbid import Rules
from utils.checks.stage import Stage
from utils.kernel_profile import OutOfBounds

import triton  # isort: skip
import triton.language as tl  # isort: skip


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


def test_a_stub_inside_a_compiled_kernel_is_recognised_where_the_compiler_stops():
    class CompilationError(Exception):
        """As Triton's: it names the statement that it does not know."""

        node = ast.parse('raise NotImplementedError("Lab 2, exercise 1: write the kernel")').body[0]

    def student(x, y):
        raise CompilationError("unsupported AST node type: Raise")

    with pytest.raises(NotImplementedError, match="Lab 2, exercise 1: write the kernel"):
        check("add", student=student)


def test_cases_run_on_one_thread_and_the_others_come_back():
    before, seen = torch.get_num_threads(), set()

    def student(x, y):
        seen.add(torch.get_num_threads())
        return add(x, y)

    torch.set_num_threads(before + 1)
    try:
        check("add", student=student)
        assert seen == {1} and torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


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
    assert text.endswith("reproduce: seed=1729, case n=32 float32 (one tile)")


def test_a_wrong_launch_is_shown_at_the_students_line():
    text = message("add", student=launch(misspelt_kernel, 1, 2, 3))
    assert "TypeError" in text and "in student, line " in text and "jit_function[(1,)]" in text


def test_what_an_exercise_knows_of_an_exception_comes_before_the_exception():
    lines = message("add", student=launch(misspelt_kernel), raised={"is not defined": "the stub calls it y_ptr"})
    first, second = lines.splitlines()[:2]
    assert first.endswith(": the stub calls it y_ptr") and "NameError: name 'y_ptrs' is not defined" in second


def test_what_is_known_of_an_exception_may_depend_on_which_cases_raise_and_may_be_nothing():
    def student(x, y):
        if x.numel() == 0:
            raise ZeroDivisionError("no element")
        return EXERCISES["add"]["student"](x, y)

    def only_empty(trials):
        return "only empty tensors" if all(t.failed == (t.args[0].numel() == 0) for t in trials) else ""

    known = {"element": only_empty, "is not defined": only_empty}
    assert message("add", student=student, raised=known).splitlines()[0].endswith(": only empty tensors")
    assert "NameError" in message("add", student=launch(misspelt_kernel), raised=known).splitlines()[0]
    known["defined"] = "the stub calls it y_ptr"
    assert "the stub calls it" in message("add", student=launch(misspelt_kernel), raised=known).splitlines()[0]


def test_an_exception_in_a_later_case_says_which_cases_raise():
    def student(x, y):
        if x.numel() == 0:
            raise ZeroDivisionError("no element")
        return EXERCISES["add"]["student"](x, y)

    text = message("add", student=student)
    assert "ZeroDivisionError: no element" in text
    assert "1 of 13 cases fails: no element; these pass: one tile" in text


def test_cases_of_one_kind_are_counted_where_they_are_named():
    kinds = [("even", False), ("odd", True), ("odd", True), ("even", True), *((f"kind {n}", True) for n in range(6))]
    trials = [SimpleNamespace(case=SimpleNamespace(label=label), failed=failed) for label, failed in kinds]
    assert explanations._which_cases(trials) == (
        "9 of 10 cases fail: odd (2 cases), even, kind 0, kind 1, kind 2, kind 3, 2 more; these pass: even"
    )


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


@pytest.mark.slow
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
    assert (
        "first mismatch: dx[row=0, col=0], computed by program (0, 0)" in text
        and "0.33 times the expected value" in text
    )


# ---- in a GPU session


class Recorded:
    """An answer to the addition that remembers its cases; once all were seen it is the compiled one."""

    def __init__(self, bug="", compiled_bug="", cases=EXERCISES["add"]["cases"]):
        self.bug, self.compiled_bug = bug, compiled_bug
        self.first = len(cases.draw(1729))
        self.sizes = []

    def __call__(self, x, y):
        self.sizes.append(x.numel())
        bug = self.bug if len(self.sizes) <= self.first else self.compiled_bug
        return EXERCISES["add"]["student"](x, y, bug=bug)


@pytest.fixture
def two_stages(monkeypatch):
    """As on a GPU: the cases run in the interpreter and then once more."""
    stages = [Stage(True), Stage(False, compiled=True)]
    monkeypatch.setattr(kernel, "_stages", lambda is_kernel: [*stages] if is_kernel else [Stage(False)])


def test_kernels_run_in_the_interpreter_first_and_in_a_gpu_session_then_compiled(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRET", True)
    assert (kernel._stages(True), kernel._stages(False)) == ([Stage(True)], [Stage(False)])
    monkeypatch.setattr(runtime, "INTERPRET", False)
    assert (kernel._stages(True), kernel._stages(False)) == ([Stage(True), Stage(False, compiled=True)], [Stage(False)])


def test_a_right_kernel_runs_each_case_in_the_interpreter_and_compiled_those_that_bring_something_new(
    two_stages, monkeypatch, capsys
):
    student = Recorded()
    monkeypatch.setattr(kernel, "for_gpu", lambda trials, others: range(0, len(trials), 2))
    check("add", student=student)
    interpreted, compiled = student.sizes[: student.first], student.sizes[student.first :]
    assert compiled == interpreted[::2]
    assert f"all {student.first} cases pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        ("no mask", "out-of-bounds accesses"),
        ("ignores strides", "only non-contiguous inputs fail"),
        ("reads twice", "x_ptr is loaded 2.0 times"),
    ],
)
def test_a_kernel_that_is_wrong_in_the_interpreter_is_never_launched_compiled(two_stages, bug, says):
    student = Recorded(bug)
    assert says in message("add", student=student)
    assert len(student.sizes) == student.first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_access_out_of_bounds_in_any_layout_keeps_the_kernel_from_being_launched(two_stages, layout):
    cases = [Case("one tile", {"n": 32}), Case("ragged", {"n": 2 if layout == "far" else 40}, layout=layout)]
    if layout == "far":
        cases = [case for case in cases if cases_module.far_fits(case.dtype, rows=2)]
    ran = []

    def student(x, y):
        ran.append(x.numel())
        assert len(ran) <= len(cases), "launched compiled"
        return EXERCISES["add"]["student"](x, y, bug="no mask")

    assert "reproduce: seed=1729, case n=" in message("add", student=student, cases=cases, budget=None)
    assert len(ran) == len(cases)


def test_a_kernel_that_goes_wrong_only_when_compiled_is_told_so(two_stages):
    text = message("add", student=Recorded(compiled_bug="fixed in float16"))
    assert "every case passes in the interpreter and fails only when the kernel is compiled" in text
    assert "only about three digits are right" in text


@triton.autotune([triton.Config({"BLOCK": block}) for block in (32, 64)], key=["size"])
@triton.jit
def tuned_kernel(x_ptr, y_ptr, out_ptr, size, stride_x, stride_y, BLOCK: tl.constexpr, BUG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < (size if BUG != "right with the first" else tl.cdiv(size, 64) * BLOCK)
    x = tl.load(x_ptr + i * stride_x, mask=mask, other=0.0) + tl.load(y_ptr + i * stride_y, mask=mask, other=0.0)
    tl.store(out_ptr + i, x, mask=mask)


def tuned(x, y, bug=""):
    size, out = x.numel(), torch.empty_like(x)
    tuned_kernel[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](x, y, out, size, x.stride(0), y.stride(0), BUG=bug)
    return out


def test_every_configuration_of_an_autotuned_kernel_runs_in_the_interpreter_before_it_is_launched(two_stages):
    cases = [Case("one tile", {"n": 32}), Case("ragged", {"n": 40})]
    check("add", student=tuned, cases=cases)
    one = [Case("one tile", {"n": 32})]
    text = message("add", student=lambda x, y: tuned(x, y, "right with the first"), cases=one)
    assert "out-of-bounds accesses" in text
    assert "with configuration 2 of @triton.autotune (BLOCK=64); right with the first" in text


def test_an_overflow_that_leaves_the_values_right_is_told_as_one():
    found = OutOfBounds("add_kernel", "x_ptr", -(2**31), None, (2, 0, 0), "read", count=4)
    profile = SimpleNamespace(out_of_bounds=[found], uninitialized_reads=[], races=[])
    case = Case("ragged", {"row": 3}, layout="far")
    assert "tl.int64" in traffic.unsafe(profile, case).cause
    assert "mask" in traffic.unsafe(profile, Case("ragged", {"row": 3})).cause


@pytest.fixture
def lost(monkeypatch):
    """A GPU that is lost when the fixture's value is appended to."""
    when = []

    def synchronize(device=None):
        if when:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    monkeypatch.setattr(runtime, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(cases_module, "far_fits", lambda dtype: False)
    return when


def test_a_kernel_that_costs_the_process_its_gpu_is_told_to_restart(two_stages, lost):
    student = Recorded()

    def fatal(x, y):
        if len(student.sizes) == student.first + 1:
            lost.append("an illegal access")
        return student(x, y)

    lines = message("add", student=fatal).splitlines()
    assert lines[0].endswith("CUDA context lost: CUDA error: an illegal memory access was encountered")
    assert "in the interpreter no case accesses memory out of bounds" in lines[1]
    assert "restart the notebook's kernel" in lines[2] and "setup cell" in lines[2]
    assert lines[3].startswith("  reproduce: seed=1729, case n=")
    assert len(student.sizes) == student.first + 2


def test_a_check_after_the_gpu_was_lost_says_so_before_anything_else(lost):
    lost.append("an illegal access")
    text = message("add", student=lambda x, y: pytest.fail("it ran"))
    assert "the CUDA context was lost before this check began" in text and "restart the notebook's kernel" in text


def test_a_gpu_lost_while_speed_is_measured_is_told_too(lost, monkeypatch):
    def run_speed(speed, student):
        lost.append("an illegal access")
        torch.cuda.synchronize()

    monkeypatch.setattr(kernel, "run_speed", run_speed)
    text = message("add", speed=object())
    assert "while its speed was measured" in text and "restart the notebook's kernel" in text


def test_an_error_that_leaves_the_gpu_usable_is_shown_as_any_other(lost):
    def student(x, y):
        raise RuntimeError("CUDA error: invalid configuration argument")

    text = message("add", student=student)
    assert "RuntimeError: CUDA error: invalid configuration argument" in text and "restart" not in text


# ---- the verdict


@pytest.mark.slow
def test_a_passed_check_says_so_in_one_line_and_then_what_to_notice(capsys):
    check("scale", notice="Each element is read once.")
    said = capsys.readouterr().out
    assert said == "✓ exercise 2.0 (scale): all 13 cases pass (seed 1729)\n  Each element is read once.\n"


@pytest.mark.slow
def test_a_case_that_memory_does_not_allow_is_left_out_aloud(monkeypatch, capsys):
    monkeypatch.setattr(cases_module, "far_fits", lambda dtype: False)
    check("scale", cases=Cases({"row": 16, "col": 16}, layouts=("far",)))
    assert "offsets beyond 2^31 were not tested" in capsys.readouterr().out


def test_a_far_case_for_which_memory_runs_out_is_left_out_aloud(two_stages, capsys):
    cases = [Case("one tile", {"n": 32}), Case("far", {"n": 2}, layout="far"), Case("ragged", {"n": 40})]
    ran = []

    def inputs(case):
        if case.layout == "far":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return EXERCISES["add"]["inputs"](case)

    def student(x, y):
        ran.append(x.numel())
        return EXERCISES["add"]["student"](x, y)

    check("add", student=student, cases=cases, inputs=inputs)
    said = capsys.readouterr().out
    assert "all 2 cases pass" in said
    assert "offsets beyond 2^31 were not tested" in said
    assert ran[:2] == [32, 40] and ran[-1] == 40  # both in the interpreter, and then what is compiled anew


def test_memory_that_runs_out_in_another_case_is_no_pass(two_stages):
    def inputs(case):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        check("add", cases=[Case("one tile", {"n": 32})], inputs=inputs)


def test_a_fresh_seed_is_drawn_and_printed_when_none_is_given(capsys):
    check("scale", seed=None, cases=[Case("one tile", {"row": 16, "col": 16})])
    assert "1 case passes (seed " in capsys.readouterr().out


def test_an_answer_in_plain_pytorch_is_checked_without_a_profiler():
    check("scale", student=lambda x: 3 * x, forbidden=Rules(kernel=False))
