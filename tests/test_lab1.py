"""Lab 1: what its checks compute with, and what every check of numbers does."""

from __future__ import annotations

import importlib
import importlib.util
import math
import random
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from lab_answers import answers, exercises, lab_filled, notebook

from grading.lab import find_lab
from grading.policy.paths import own_of
from solutions import lab1_roofline as solution
from solutions.lab1_roofline.exercises import (
    attention,
    counting,
    divergence,
    passes,
    prediction,
    rates,
    residual,
    rules,
    sectors,
)
from solutions.lab1_roofline.exercises import operators as lab1_operators
from utils import hardware, operators, roofline, runtime, simt
from utils.checks import attempt, forbidden_modules
from utils.checks.core import CheckFailed
from utils.checks.question import Question
from utils.compile_only import Request, resource_usages
from utils.kernel_profile import profile_kernel

ROOT = Path(__file__).resolve().parent.parent

EXERCISES = exercises("lab1_roofline")
NOTEBOOK = notebook("lab1_roofline")
text_of = NOTEBOOK.text_of

CHECK_MODULES = [path.stem for path in (ROOT / "solutions/lab1_roofline/exercises").glob("[a-z]*.py")]


def run_check(exercise: str, package: object, seed: int, **replaced: Callable) -> None:
    """Run an exercise's check on a package's functions, some of them replaced."""
    EXERCISES[exercise].run_check(SimpleNamespace(**{**vars(package), **replaced}), seed)


# ---- the notebook ----
def test_the_notebook_states_how_far_off_a_prediction_may_be():
    stated = re.findall(r"within a factor of ([\d.]+)", text_of("1.6"))
    assert [float(factor.rstrip(".")) for factor in stated] == [prediction.EACH_WITHIN, prediction.MEDIAN_WITHIN]


#: What nearly is an exercise's solution, and may only stand in its second hint.
NEARLY_THE_SOLUTION = {
    "1.4": "first and the last",
    "1.5": "(2df - Rs(d + f))",
    "1.6": "operator_cost` in two lines",
    "1.7": "b // 32",
    "1.8": "-(-a // b)",
    "1.9": "calls itself",
    "1.10": "over the warps of the block",
}


@pytest.mark.parametrize("exercise", NEARLY_THE_SOLUTION)
def test_what_nearly_is_the_solution_is_folded_away_behind_a_first_nudge(exercise):
    text = text_of(exercise)
    folded = dict(re.findall(r"<details>\n<summary>(.+?)</summary>\n(.+?)</details>", text, flags=re.DOTALL))
    assert list(folded)[:2] == ["First hint", "Second hint, nearly the solution"]
    assert NEARLY_THE_SOLUTION[exercise] in folded["Second hint, nearly the solution"]
    assert NEARLY_THE_SOLUTION[exercise] not in folded["First hint"]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_each_size_and_rate_that_a_function_takes_is_also_tried_where_it_must_be_refused(exercise):
    others = {"causal", "materialize", "mended", "program", "points", "kind", "params"}
    for question in questions_of(exercise):
        parameters = set(question.cases(random.Random(2))[0].arguments)
        assert parameters - others - set(question.refused) == set() or question.name == "predict_operator"


def questions_of(exercise: str) -> list[Question]:
    """The questions that an exercise's check asks, by the names of the functions that it takes."""
    homes = [importlib.import_module(f"solutions.lab1_roofline.exercises.{name}") for name in CHECK_MODULES]
    found = [q for home in homes for q in vars(home).values() if isinstance(q, Question)]
    return [question for question in found if question.name in EXERCISES[exercise].functions]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_every_classic_wrong_answer_that_a_message_points_to_is_in_the_notebook(exercise):
    listed = NOTEBOOK.classic_numbers(exercise)
    pointed_to = {mistake.classic for q in questions_of(exercise) for mistake in q.mistakes} - {0}
    kernels = {"residual_add"} if exercise == "1.10" else set()  # its check runs a kernel, beside its questions
    assert {question.name for question in questions_of(exercise)} == set(EXERCISES[exercise].functions) - kernels
    pointed_to |= set(range(6, 10)) if kernels else set()
    assert listed == list(range(1, len(listed) + 1)) and len(listed) >= 4
    assert pointed_to == set(listed)


# ---- what every check of numbers does, whatever the exercise ----
def as_in_a_notebook(functions: dict[str, Callable]) -> None:
    """Let answers in this file, which imports the oracles, look as if a notebook's cell defined them."""
    for function in functions.values():
        if getattr(function, "__module__", "") == __name__:
            function.__module__ = "a_notebook"


def fail_text(exercise: str, **replaced: Callable) -> str:
    """The message of the failure that some replaced functions cause."""
    as_in_a_notebook(replaced)
    with pytest.raises(CheckFailed) as failed:
        run_check(exercise, solution, seed=5, **replaced)
    return str(failed.value)


def module_from(tmp_path: Path, source: str) -> ModuleType:
    """A student's module with this source."""
    file = tmp_path / "student.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("student", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["student"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "returned None: is a `return` missing?"),
        ((2, 4), "a tuple of 2 values, expected one number: (2, 4)"),
        (2.0, "the float 2.0, expected an int"),
        ("2", "'2' of type str, expected an int"),
        (True, "the bool True"),
        (torch.tensor(2), "a torch.Tensor, expected a Python number"),
        (np.arange(3), "a numpy.ndarray"),
    ],
)
def test_an_answer_of_the_wrong_type_is_told_what_is_due(value, words):
    assert words in fail_text("1.2", matmul_flops=lambda m, k, n: value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_rate_that_is_not_finite_is_refused(value):
    assert "expected a finite number" in fail_text("1.5", ridge_point=lambda peak_flops, bandwidth: value)


def test_an_error_in_the_students_code_is_shown_with_its_line():
    def divides_by_zero(m, k, n):
        return 2 * m * k * n // (m - m)

    text = fail_text("1.2", matmul_flops=divides_by_zero)
    assert "raised ZeroDivisionError" in text
    assert "test_lab1.py" in text and "return 2 * m * k * n // (m - m)" in text


def test_calling_the_function_instead_of_passing_it_is_explained():
    assert "pass dot_product_flops, not dot_product_flops(...)" in fail_text("1.1", dot_product_flops=8)


def test_functions_passed_in_the_wrong_order_are_told_their_parameters():
    text = fail_text("1.1", dot_product_bytes=solution.dot_product_flops)
    assert "cannot be called as dot_product_bytes(n=" in text and "(n, element_size)" in text


def test_an_answer_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(attempt, "DEADLINE_SECONDS", 0.05)

    def counts_on_its_fingers(n):
        total = 0
        for _ in range(n):
            total += 2
        return total

    text = fail_text("1.1", dot_product_flops=counts_on_its_fingers)
    assert "did not return in time" in text and "use a closed formula" in text


def test_a_negative_size_that_sends_an_answer_into_an_endless_loop_is_told(monkeypatch):
    monkeypatch.setattr(attempt, "DEADLINE_SECONDS", 0.2)

    def counts_down(n):
        left = n if n < 0 else 0
        while left != 0:
            left -= 1
        return 2 * n

    text = fail_text("1.1", dot_product_flops=counts_down)
    assert "dot_product_flops(n=-4) did not return in time" in text and "contains -4" in text


def test_an_answer_may_change_what_it_is_given():
    def empties_its_list(addresses, access_bytes):
        if access_bytes < 1 or min(addresses) < 0:
            raise ValueError(f"bad access: {access_bytes} bytes at {min(addresses)}")
        touched = set()
        while addresses:
            address = addresses.pop()
            touched |= set(range(address // 32, (address + access_bytes - 1) // 32 + 1))
        return len(touched)

    answer = {"sectors_touched": empties_its_list}
    as_in_a_notebook(answer)
    run_check("1.7", solution, seed=5, **answer)


def test_an_unknown_mistake_still_shows_cases_and_a_call_that_reproduces_it():
    text = fail_text("1.2", matmul_flops=lambda m, k, n: 2 * m * k * n + 12 * m)
    assert (
        "expected" in text
        and "reproduce: check_matmul(matmul_flops, matmul_bytes, seed=5), case matmul_flops(m=" in text
        and "likely cause" not in text
    )


def test_a_constant_factor_is_pointed_out():
    assert "every wrong result is 1/3 times what is expected" in fail_text(
        "1.5", ridge_point=lambda peak_flops, bandwidth: peak_flops / bandwidth / 3
    )


def test_an_error_where_a_known_mistake_leads_to_one_names_the_mistake_and_shows_the_line():
    def only_negative(d, f, element_size, peak_flops, bandwidth):
        threshold = element_size * Fraction(peak_flops) / Fraction(bandwidth)
        bracket = 2 * d * f - threshold * (d + f)
        return None if bracket < 0 else math.ceil(threshold * d * f / bracket)

    text = fail_text("1.5", smallest_compute_bound_batch=only_negative)
    assert "raised ZeroDivisionError" in text and "/ bracket)" in text
    assert "None belongs where what multiplies B is negative, and where it is exactly zero" in text
    assert "negative B is returned" not in text


def test_an_error_that_no_known_mistake_leads_to_is_not_blamed_on_one():
    def divides_by_the_batch(d, f, element_size, peak_flops, bandwidth):
        return d // (f - f)

    text = fail_text("1.5", smallest_compute_bound_batch=divides_by_the_batch)
    assert "raised ZeroDivisionError" in text and "this is what you get" not in text


def test_what_the_wrong_cases_have_in_common_is_pointed_out():
    def no_single_element(n):
        return 2 * n if n > 1 else 0

    assert "every case with one element fails, and every other case passes" in fail_text(
        "1.1", dot_product_flops=no_single_element
    )


def test_what_the_wrong_cases_have_in_common_is_told_with_the_argument_that_tells_them_from_like_cases_that_pass():
    def the_first_query_sees_one_key(batch, heads, seq_q, seq_k, head_dim, causal):
        rows = min(seq_q, seq_k)
        pairs = rows * (1 + seq_k) // 2 if causal else seq_q * seq_k
        return batch * heads * pairs * (4 * head_dim + 5)

    said = "every case with fewer queries than keys fails, and every other case passes (so with causal=True; all other"
    assert said in fail_text("1.4", attention_flops=the_first_query_sees_one_key)


def test_a_refusal_that_does_not_name_the_value_is_not_enough():
    def silent(n):
        if n < 1:
            raise ValueError("bad size")
        return 2 * n

    assert "contains -4" in fail_text("1.1", dot_product_flops=silent)


@pytest.mark.parametrize(
    "source",
    [
        "from utils.roofline import matmul\ndef f(m, k, n): return matmul(m, k, n).flops",
        "import utils.roofline as r\ndef f(m, k, n): return r.matmul(m, k, n).flops",
        "from utils import operators\ndef f(m, k, n): return operators.matmul(m, k, n).flops",
        "from importlib import import_module as i\ndef f(m, k, n): return i('utils.roofline').matmul(m, k, n).flops",
        "r = __import__('utils.roof' + 'line', fromlist=['x'])\ndef f(m, k, n): return r.matmul(m, k, n).flops",
        "from solutions.lab1_roofline.exercises.operators import matmul_flops as f",
        "from solutions.lab1_roofline.exercises import counting\ndef f(m, k, n): return counting.matmul(m, k, n).flops",
    ],
)
def test_an_answer_that_calls_the_ready_made_one_is_refused_kindly(tmp_path, source):
    text = fail_text("1.2", matmul_flops=module_from(tmp_path, source).f)
    assert "uses what this lab does not allow: " in text and 'under "How a lab works"' in text


def test_the_notebook_says_what_of_utils_an_answer_may_import():
    names = {name.split(".")[2] for name in own_of(find_lab("lab1")).utils if name.count(".") == 2}
    how = next(cell.source for cell in NOTEBOOK.cells if cell.id == "how")
    said = re.search(r"Of `utils`, your files may import only (.*?), and in", how)
    assert set(re.findall(r"`(\w+)`", said[1])) == names


def test_measurements_looked_up_are_no_predictions(tmp_path):
    looked_up = module_from(
        tmp_path,
        "r = __import__('utils.rec' + 'ords', fromlist=['x'])\n"
        "def f(kind, params, dtype, points):\n"
        "    found = r.load('operators').results['held_out']\n"
        "    return next(p['seconds'] for p in found if (p['kind'], p['params'], p['dtype']) == (kind, params, dtype))",
    )
    assert "utils.records" in fail_text("1.6", predict_operator=looked_up.f)
    held_out = {(p["kind"], str(p["params"]), p["dtype"]): p["seconds"] for p in prediction.held_out()}
    text = fail_text("1.6", predict_operator=lambda kind, params, dtype, points: held_out[kind, str(params), dtype])
    assert "returns the measurements themselves" in text


def test_what_stands_under_main_may_compare_with_anything(tmp_path):
    source = "def f(m, k, n): return 2 * m * k * n\n\nif __name__ == '__main__':\n    from utils import roofline\n"
    answer = module_from(tmp_path, f"from utils.operators import require_sizes\n{source}").f
    assert forbidden_modules.imports_of(answer, rules.FORBIDDEN) == []
    unguarded = source.replace("if __name__ == '__main__'", "if True")
    assert forbidden_modules.imports_of(module_from(tmp_path, unguarded).f, rules.FORBIDDEN) != []


def test_a_program_in_a_message_is_short_enough_to_read():
    for seed in range(20):
        assert all(len(case.call("warp_cycles")) < 160 for case in divergence.CYCLES.cases(random.Random(seed)))


def test_the_vocabulary_that_a_lab_hands_out_may_be_imported():
    assert forbidden_modules.imports_of(solution.warp_cycles, rules.FORBIDDEN) == []
    assert forbidden_modules.forbidden_imports("from utils.simt import run_warp", rules.FORBIDDEN) == [
        "line 1: utils.simt.run_warp"
    ]


def test_a_seed_that_is_no_seed_is_refused():
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        run_check("1.1", solution, seed=-1)
    with pytest.raises(TypeError, match=r"got 1\.5"):
        run_check("1.1", solution, seed=1.5)


# ---- the oracles ----
def test_the_counting_machine_computes_what_it_counts():
    machine = counting.Machine()
    a, b, c = machine.tensor(2), machine.tensor(2), machine.tensor(1)
    a.values, b.values = {(0,): 2.0, (1,): 3.0}, {(0,): 5.0, (1,): 7.0}
    c[0] = machine.number(0.0) + a[0] * b[0] + a[1] * b[1]
    assert (c.values[0,], machine.flops, machine.elements_moved) == (31.0, 4, 5)
    assert machine.elements_read == 4 and a[0].value == 2.0 and machine.elements_read == 4
    machine.forget()
    assert a[0].value == 2.0 and machine.elements_read == 5
    with pytest.raises(IndexError, match=r"index \(2,\) in a tensor of shape \(2,\)"):
        a[2]


@pytest.mark.parametrize("module", ["operators", "passes", "attention", "waves"])
def test_the_closed_forms_for_large_cases_equal_the_counts_on_small_ones(module, monkeypatch):
    home = importlib.import_module(f"solutions.lab1_roofline.exercises.{module}")
    questions = [value for value in vars(home).values() if isinstance(value, Question)]
    assert questions
    for question in questions:
        cases = [case for case in question.cases(random.Random(8)) if case.tag != rules.LARGE]
        counted = [question.expected(**case.arguments) for case in cases]
        monkeypatch.setattr(home, "SMALL", 0)
        assert [question.expected(**case.arguments) for case in cases] == counted, question.name
        monkeypatch.undo()


def test_the_oracles_agree_with_the_courses_own_models():
    assert attention.attention_bytes(2, 3, 5, 7, 4, 2, True) == operators.attention(2, 3, 5, 4, "bf16", kv_len=7).bytes
    flash = operators.attention(2, 3, 5, 4, "bf16", causal=True, materialize=False, kv_len=7)
    assert attention.attention_bytes(2, 3, 5, 7, 4, 2, False) == flash.bytes
    assert attention.attention_flops(2, 3, 5, 7, 4, True) == flash.flops
    assert passes.softmax_flops(11, 13) == operators.softmax(11, 13).flops
    assert lab1_operators.matmul_bytes(3, 5, 7, 4) == operators.matmul(3, 5, 7, "fp32").bytes
    h100 = hardware.gpu("H100")
    gpu = {"peak_flops": h100.peak_flops["bf16"], "bandwidth": h100.memory_bandwidth}
    assert rates.smallest_batch(8192, 8192, 2, **gpu) == roofline.crossover_batch(8192, 8192, h100)
    addresses = [13 + 12 * lane for lane in range(32)]
    assert sectors.sectors_touched(addresses, 4) == simt.sectors(addresses, 4)


def test_divergence_found_lane_by_lane_equals_the_simulator_with_masks():
    for case in divergence.CYCLES.cases(random.Random(4)):
        trace = simt.run_warp(case.arguments["program"], case.arguments["warp_size"])
        assert divergence.warp_cycles(**case.arguments) == trace.cycles
        assert divergence.wasted_lane_cycles(**case.arguments) == trace.wasted_lane_cycles


@pytest.mark.parametrize("case", residual.SECTORS.cases(random.Random(6)), ids=lambda case: case.call(""))
def test_the_profiler_counts_the_sectors_of_a_walk_as_its_oracle_does(case, monkeypatch):
    sizes = case.arguments
    rows, cols, stride, block = (sizes[name] for name in ("rows", "cols", "stride", "block"))
    monkeypatch.setattr(solution.residual, "BLOCK", block)
    x = torch.zeros(rows, stride, device=runtime.DEVICE)[:, :cols]
    kernel = solution.given_residual_add if sizes["walk"] == "runs" else solution.residual_add
    with profile_kernel() as profile:
        kernel(x, x.clone())
    counted = profile.by_argument["x_ptr"].sectors_loaded
    expected = residual.walk_sectors(rows, cols, stride, 4, block, sizes["walk"])
    if sizes["walk"] == "runs":
        expected += residual.walk_sectors(rows, cols, stride, 4, block, "tiles")
    assert counted == expected


@pytest.mark.parametrize("mended", [False, True])
def test_the_profiler_counts_the_bytes_of_a_kernel_as_the_oracle_does(mended):
    kernel = solution.residual_add if mended else solution.given_residual_add
    with profile_kernel() as profile:
        kernel(*torch.zeros(2, 3, 300, device=runtime.DEVICE))
    assert profile.bytes_moved == residual.residual_add_bytes(3, 300, 4, mended)


def test_the_given_kernel_gives_the_right_values():
    x, r = torch.randn(2, 3, 300).to(runtime.DEVICE)
    y, sums = solution.given_residual_add(x, r)
    torch.testing.assert_close(y, x + r)
    torch.testing.assert_close(sums, (x + r).sum(1))


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(4), r"x must be a float32 matrix of x's shape, got torch\.float32 \(4,\)"),
        (torch.zeros(4, 4, dtype=torch.float16), "got torch.float16"),
        (torch.zeros(4, 5).T, r"neighbours, got strides \(1, 5\)"),
        (torch.zeros(0, 4), "rows must be at least 1, got 0"),
        (torch.empty(2**20, 2**12, device="meta"), "2\\*\\*31 elements"),
    ],
)
def test_a_matrix_that_the_kernels_cannot_take_is_refused_on_entry(x, says):
    for function in (solution.given_residual_add, solution.residual_add):
        with pytest.raises(ValueError, match=says):
            function(x, x)


@pytest.mark.slow
def test_the_kernels_of_the_lab_compile_for_ampere_hopper_and_blackwell(tmp_path):
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "y_ptr", "sum_ptr"), "*fp32")
    sizes = dict.fromkeys(("cols", "stride_x", "stride_residual"), "i32")
    one_column = {name: kind for name, kind in sizes.items() if name != "cols"}
    with lab_filled("lab1_roofline", tmp_path, answers("lab1_roofline").right) as unusual:
        home = solution.residual
        kernels = (home.given_kernel, home.residual_add_kernel, unusual.residual.residual_add_kernel)
    every = [
        Request(kernel, {**pointers, **sizes}, {"BLOCK": 128}, capability)
        for kernel in kernels
        for capability in (80, 90, 100)
    ]
    every += [Request(kernel, {**pointers, **one_column}, {"BLOCK": 128, "cols": 1}, 90) for kernel in kernels]
    assert all(usage.stack_bytes == 0 for usage in resource_usages(every))


def test_no_known_mistake_agrees_with_the_right_answer_everywhere():
    """A mistake that no case tells apart would blame the wrong thing, or let a wrong answer pass."""
    for home in (importlib.import_module(f"solutions.lab1_roofline.exercises.{name}") for name in CHECK_MODULES):
        for question in (value for value in vars(home).values() if isinstance(value, Question)):
            cases = question.cases(random.Random(21))
            expected = [question.expected(**case.arguments) for case in cases]
            for mistake in question.mistakes:
                assert any(mistake.outcome(c) != e for c, e in zip(cases, expected, strict=True)), (
                    f"{question.name}: {mistake.says}"
                )
