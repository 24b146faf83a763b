"""Hidden scenarios: right answers agree with the solution, wrong ones do not, and no file of a sandbox is trusted."""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from lab_answers import answers, exercise, exercises, lab_answered, lab_filled, lab_of, solution, wrong_answers
from lab_places import write_lab
from parameters import thorough_but

from grading.scenarios import chosen
from grading.scenarios import exercises as released_exercises
from grading.scenarios import observations as files
from grading.scenarios.__main__ import run
from grading.scenarios.compare import DID_NOT_FINISH, compare, difference, errors
from solutions.lab2_triton_kernels.answers.cross_entropy import KERNELS as KERNELS_2_4
from solutions.lab2_triton_kernels.answers.rms_norm import KERNELS as KERNELS_2_3
from utils.checks.answers import EditedAnswer
from utils.checks.core import Exercise
from utils.checks.hidden import Observed, Tolerance

ROOT = Path(__file__).resolve().parent.parent
LAB1, LAB2, LAB3, LAB5 = "lab1_roofline", "lab2_triton_kernels", "lab3_flash_attention", "lab5_serving"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread would only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def expected_of(number: str, seed: int) -> dict[str, Any]:
    """What the solution gives."""
    declared = exercise(number)
    observed = declared.observe(declared.home(solution(lab_of(number))), seed)
    return {name: files.plain(value) for name, value in observed.items()}


# ---- the labs' scenarios
def assert_agrees(number: str, package: object, seed: int) -> None:
    given = exercise(number).observe(exercise(number).home(package), seed)
    assert difference(exercise(number), expected_of(number, seed), given) is None


#: Of labs 2, 3 and 5, `make test` tries these.
TRIED = ("2.5", "3.1", "3.5", "5.1")


@pytest.mark.slow
@pytest.mark.parametrize("number", exercises(LAB1))
def test_lab_1s_solution_agrees_with_itself_on_several_seeds(number):
    for seed in range(20):
        assert_agrees(number, solution(LAB1), seed)
    if number not in ("1.9",):  # its programs are made of functions, which the numbers alone do not tell apart
        assert expected_of(number, 1) != expected_of(number, 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", thorough_but([n for lab in (LAB2, LAB3, LAB5) for n in exercises(lab)], *TRIED))
def test_the_plain_answers_agree_with_the_solution_and_another_seed_gives_other_observations(number, tmp_path):
    lab = lab_of(number)
    with lab_filled(lab, tmp_path, answers(lab).right) as plain:
        assert_agrees(number, plain, 1)
    assert difference(exercise(number), expected_of(number, 1), expected_of(number, 2)) is not None


#: Right answers written otherwise: place -> words of the plain answer, and what stands there instead.
OTHERWISE = {
    LAB2: {
        "2.1: GeLU": {"y = x / (1 + tl.exp(-2 * u))": "y = 0.5 * x * (1 + (1 - 2 / (1 + tl.exp(2 * u))))"},
        KERNELS_2_3: {"r = tl.rsqrt(squares / columns + eps)": "r = 1 / tl.sqrt(squares / columns + eps)"},
        KERNELS_2_4: {"p = tl.exp(x - lse)": "p = tl.exp2((x - lse) * 1.4426950408889634)", "1024": "256"},
        "2.5: softmax of short rows": {
            "tl.exp(x - tl.max(x, axis=1)[:, None])": "tl.exp2((x - tl.max(x, axis=1)[:, None]) * 1.4426950408889634)"
        },
        "2.6: softmax of long rows": {
            "-3.0e38": "-3.2e38",
            "tl.exp(x - maximum) / total": "tl.exp(x - maximum) * (1 / total)",
        },
        "2.7: tiled matmul": {
            "total = tl.dot(a, b, total, ": "total += tl.dot(a.to(tl.float32), b.to(tl.float32), ",
        },
    },
    LAB3: {
        "3.1: merge": {"d1 * r1 + d2 * r2": "d2 * r2 + d1 * r1"},
        "3.3: one step of the inner loop": {"tl.dot(p.to(v.dtype), v, acc": "tl.dot(p, v.to(tl.float32), acc"},
        "3.6: one step of dK and dV": {
            "tl.dot(p.to(do.dtype), do, dv": "tl.dot(p, do.to(tl.float32), dv",
            "tl.dot(ds.to(q.dtype), q, dk": "tl.dot(ds, q.to(tl.float32), dk",
        },
        "3.7: one step of dQ": {"tl.dot(ds.to(k.dtype), k, dq": "tl.dot(ds, k.to(tl.float32), dq"},
    },
}


def with_other_tiles(lab: str, package: ModuleType) -> None:
    """Let a package's kernels take tiles of other sizes."""
    tuning = package.tuning
    if lab == LAB2:
        tuning.gelu = lambda columns: tuning.Tile(1, 256, 4)
        tuning.online_softmax = lambda columns: tuning.Tile(1, 512, 4)
        for name in ("bias_relu", "bias_relu_backward"):
            setattr(tuning, name, lambda columns: tuning.Tile(16, 64, 4))
        for name in ("tiled_matmul", "descriptor_matmul"):
            setattr(tuning, name, lambda size: tuning.MatmulTile(64, 32, 16, 2, 4, 1))
        return
    for name in ("forward", "dkdv", "dq"):
        setattr(tuning, name, lambda *given, **options: tuning.Tile(16, 64, 4, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("lab", OTHERWISE)
def test_right_answers_that_round_and_add_otherwise_agree(lab, tmp_path):
    edited = EditedAnswer(lab, "right", OTHERWISE[lab]).filled(answers(lab).right)
    with lab_filled(lab, tmp_path, edited) as package:
        with_other_tiles(lab, package)
        for number in exercises(lab):
            assert_agrees(number, package, 1)


# ---- wrong answers
#: Wrong answers that give the right values, by exercise: what they do wrong is seen in their traffic, in offsets beyond
#: 2^31, in what they keep or call, in what they do not refuse, in what a compiler makes of them, in NaN, in sums of
#: many rows, in scores far from 0, or in lanes that the interpreter fills with zeros.
NOT_IN_VALUES = {
    "1.1": {"negative lengths let in", "counted by NumPy"},
    "1.2": {"counted by NumPy"},
    "1.4": {"counted by NumPy"},
    "1.5": {"trusts the data sheet"},
    "1.6": {"refuses counts only", "refuses bytes only", "waits for both"},
    "1.10": {
        "one pass in runs",
        "two passes in tiles",
        "given as it is",
        "reads y back",
        "no other",
        "leaves it to pytorch",
        "a step per element",
    },
    "2.1": {
        "blocks on axis one",
        "no mask on the load",
        "reads twice",
        "constant of five digits",
        "rows of the output in 32 bits",
    },
    "2.2": {
        "NaN cut",
        "NaN dropped",
        "a far bias in 32 bits",
        "atomics",
        "bias loaded for each row",
        "rows of the output in 32 bits",
        "sums in 16 bits",
    },
    "2.3": {"a row of sums for each row", "atomics", "keeps the output", "ready made", "x copied", "x read twice"},
    "2.4": {
        "a tile as long as the row",
        "an address from ignore_index",
        "gradient made forward",
        "logits copied",
        "two reads",
    },
    "2.5": {"calls PyTorch", "reads twice", "rows of the output in 32 bits"},
    "2.6": {"rows of the output in 32 bits", "three reads"},
    "2.7": {
        "32-bit offsets",
        "TF32",
        "a loaded twice",
        "no other",
        "rows of the output in 32 bits",
        "sides of the tile mixed up",
    },
    "2.8": {"TF32"},
    "3.2": {"all of dP at once", "all scores at once", "ready made"},  # what they allocate is seen by the check
    "3.3": {
        "a Python global",
        "k loaded twice",
        "more than the output leaves the kernel",
        "products of float32",
        "scores in TF32",
    },
    "3.6": {"loads by pointers", "nothing skipped", "products of float32", "scores in TF32"},
    "3.7": {"loads by pointers", "scores in TF32"},
    "3.8": {"copies kept", "keeps a copy on ctx", "keeps the scores", "keeps too much", "kept as attributes"},
    "3.9": {
        "a tile that ends before the first key",
        "always again",
        "loads by pointers",
        "never tried",
        "one limit",
        "scaled in the exponent alone",
        "scores in TF32",
    },
    "3.10": {
        "begins at key 0",
        "dq begins at key 0",
        "ends at the last query",
        "begins a tile early",
        "ends a tile late",
    },
    "5.4": {"a global", "products as they come", "values in float32"},
}
#: These write outside of their tensors, into the memory of whoever runs them: no test does.
WRITE_ANYWHERE = {
    "2.1": {"no mask", "a program too many"},
    "2.2": {"rows not masked", "columns not masked", "columns stored backwards"},
    "2.5": {"rows not masked", "rows of BLOCK columns"},
    "2.7": {"tile stored transposed", "store not masked"},
    "1.10": {"store without a mask", "y with x's stride"},
    "5.4": {"before the table"},  # it reads anywhere
}


@pytest.mark.thorough
def test_lab_1s_wrong_answers_are_told_apart_where_values_show_them(tmp_path):
    unseen: dict[str, set[str]] = {}
    for wrong in wrong_answers(LAB1):
        for seed in (1, 2, 3) if wrong.name not in WRITE_ANYWHERE.get(wrong.exercise, ()) else ():
            with lab_answered(wrong, tmp_path) as package:
                if not shows(wrong.exercise, package, seed):
                    unseen.setdefault(wrong.exercise, set()).add(wrong.name)
    assert unseen == {number: names for number, names in NOT_IN_VALUES.items() if number.startswith("1.")}


class _Wrong(Exception):
    """An observation differs already: the rest need not be made."""


def shows(number: str, package: object, seed: int) -> bool:
    """Whether an answer's observations differ from the solution's; it stops at the first that does."""
    declared, expected = exercise(number), expected_of(number, seed)
    package = declared.home(package)

    class Compared(Observed):
        def __setitem__(self, name: str, value: Any) -> None:
            if difference(declared, {name: expected[name]}, {name: value}):
                raise _Wrong
            super().__setitem__(name, value)

    home = importlib.import_module(declared.observe.__module__)
    one_by_one = getattr(declared.observe, "__wrapped__", None)
    with pytest.MonkeyPatch.context() as patched:
        if hasattr(home, "Observed"):
            patched.setattr(home, "Observed", Compared)
        try:
            if one_by_one:
                got = Compared()
                for name, value in one_by_one(package, seed):
                    got[name] = value
            else:
                got = declared.observe(package, seed)
            return difference(declared, expected, got) is not None
        except Exception:  # a student's error is as good as a wrong value
            return True


@pytest.fixture
def filled() -> Iterator[None]:
    """Memory that nobody has written holds NaN: left as it is, it may hold the right values of the run before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize("number", thorough_but([n for lab in (LAB2, LAB3, LAB5) for n in exercises(lab)], *TRIED))
def test_wrong_answers_are_told_apart_where_values_show_them(number, tmp_path, filled):
    unseen = set()
    for wrong in wrong_answers(lab_of(number), number):
        if wrong.name not in WRITE_ANYWHERE.get(number, ()):
            with lab_answered(wrong, tmp_path) as package:
                unseen |= set() if shows(number, package, 1) else {wrong.name}
    assert unseen == NOT_IN_VALUES.get(number, set())


def test_what_is_left_out_names_wrong_answers_that_exist():
    for number, names in WRITE_ANYWHERE.items():
        assert names <= {wrong.name for wrong in wrong_answers(lab_of(number), number)}


# ---- running
@pytest.fixture
def expected_dir(tmp_path) -> Path:
    folder = tmp_path / "expected"
    folder.mkdir()
    run(released_exercises("lab1"), solution(LAB1), 7, folder)
    return folder


def test_the_solutions_files_agree_with_themselves(expected_dir):
    assert compare(expected_dir, expected_dir, "lab1_roofline") == dict.fromkeys(exercises(LAB1))


def lab_1_with(places: dict[str, str]) -> dict[str, str]:
    """Right answers to lab 1, some places filled otherwise."""
    return {**answers(LAB1).right, **places}


def test_an_error_is_told_with_the_students_own_file_and_line(tmp_path, expected_dir):
    folder = tmp_path / "got"
    folder.mkdir()
    with lab_filled(LAB1, tmp_path, lab_1_with({"1.1: FLOPs of a dot product": "return 2 * n // (n - n)"})) as package:
        run(chosen("lab1", ["1.1"]), package, 7, folder)
        reason = compare(expected_dir, folder, "lab1", ["1.1"], Path(package.__file__).parent)["1.1"]
    assert reason == "on hidden inputs it raised ZeroDivisionError at operators.py, line 21"
    whole = errors(folder, ["1.1", "1.2"])
    assert list(whole) == ["1.1"] and whole["1.1"].endswith("(operators.py, line 21)")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ValueError: n is 987 (gelu.py, line 12)", "ValueError at gelu.py, line 12"),
        ("ValueError: (gelu.py, line 12)", "ValueError at gelu.py, line 12"),
        ("NoRoom: 987 (parts/tanh.py, line 3)", "NoRoom at parts/tanh.py, line 3"),
        ("ValueError: n is 987", "ValueError"),
        ("ValueError: (gelu.py, line 987)", "ValueError"),  # it has no such line
        ("ValueError: (gelu.py, line 0012)", "ValueError"),
        ("ValueError: (gelu.py, line \u0663)", "ValueError"),
        ("ValueError: (987.py, line 1)", "ValueError"),
        ("ValueError: (gelu.py, line 12) 987", "ValueError"),
        ("N987: no (gelu.py, line 12)", "an error at gelu.py, line 12"),  # a type of the student's own
        ("987", "an error"),
        ("", "an error"),
    ],
)
def test_a_student_reads_type_and_place_of_a_hidden_error_and_nothing_that_the_code_chose(text, told):
    assert files.Raised(text).told({"gelu.py": 20, "parts/tanh.py": 3}) == told


def run_program(root: Path, out: Path, *more: str) -> None:
    """Run lab 1's scenarios on the package in ``root`` as the grader does."""
    command = [sys.executable, "-m", "grading.scenarios", "lab1_roofline", "--package-root", str(root), "--seed", "7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLF_DEVICE": "cpu"}
    subprocess.run([*command, "--out", str(out), *more], check=True, cwd=ROOT, env=environment, timeout=100)


@pytest.mark.slow
def test_a_scenario_that_ends_the_process_or_hangs_costs_its_own_exercise_alone(tmp_path, expected_dir):
    ends = {
        "1.1: FLOPs of a dot product": "import os; os._exit(0)",
        "1.7: sectors of an access pattern": "while 1: pass",
    }
    (tmp_path / "student").mkdir()
    write_lab(LAB1, tmp_path / "student" / LAB1, lab_1_with(ends))
    run_program(tmp_path / "student", tmp_path / "got", "--limit", "2", "--only", "1.1", "1.3", "1.7", "1.8")
    reasons = compare(expected_dir, tmp_path / "got", "lab1", ["1.1", "1.3", "1.7", "1.8", "1.9"])
    assert reasons["1.1"] == reasons["1.7"] == DID_NOT_FINISH
    assert reasons["1.3"] is None and reasons["1.8"] is None
    assert "was not run" in reasons["1.9"]


@pytest.mark.slow
def test_a_package_that_cannot_be_imported_is_told_so(tmp_path, expected_dir):
    broken = tmp_path / "broken" / "lab1_roofline"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("def gelu(:\n")
    run_program(broken.parent, tmp_path / "got")
    reasons = compare(expected_dir, tmp_path / "got", "lab1", package=broken)
    assert all("SyntaxError" in reason and "__init__.py, line 1" in reason for reason in reasons.values())


def test_an_exercise_or_lab_without_a_scenario_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no exercise 1\.99"):
        chosen("lab1", ["1.99"])
    with pytest.raises(ValueError, match="no lab lab99_none"):
        released_exercises("lab99_none")
    with pytest.raises(ValueError, match="'warp'"):
        released_exercises("warp")


# ---- comparing
def reason_for(expected: Any, got: Any, tolerance: Tolerance | None = None) -> str | None:
    exercise = Exercise("9.1", "compared", tolerance=tolerance or Tolerance())
    return difference(exercise, {"out of f": expected}, {"out of f": got})


ONES = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (ONES, ONES[:2], "expected shape (3, 4), got (?, 4)"),
        (ONES, ONES.T, "expected shape (3, 4), got (4, 3)"),
        (ONES, ONES[0], "expected shape (3, 4), got (4,)"),
        (ONES, ONES[0, 0], "expected shape (3, 4), got ()"),
        (ONES, torch.empty(0, 987, 1, 654, 321), "expected shape (3, 4), got (?, ?, 1, ...)"),
        (ONES, ONES.half(), "expected dtype float32, got float16"),
        (ONES, ONES * torch.tensor([1, 1, 2, 1]), "3 of 12 values are wrong"),
        (ONES, ONES * 1.0001, "12 of 12 values are wrong (the largest error is 5 times the tolerance)"),
        (ONES, ONES * math.nan, "12 of 12 values are wrong; 12 of them are NaN or infinite"),
        (ONES, "ones", "expected a tensor, got a string"),
        (ONES, {1: 2}, "expected a tensor, got a value of type dict"),
        (ONES, files.Other("n_987"), "expected a tensor, got a value of another type"),
        (
            ONES,
            files.Other("tensor of 987 elements"),
            "expected a tensor, got a tensor that is complex, sparse or far too large",
        ),
        (torch.ones(9876), torch.arange(9876), "expected dtype float32, got int64"),
        (torch.ones(9876), torch.arange(9876) / 1234, "about 9,900 of 9,876 values are wrong"),
        (ONES.bool(), torch.tensor([False, True, True, True]).expand(3, 4), "3 of 12 values are wrong"),
        (3, 3.0, "expected an int, got a float"),
        (3, True, "expected an int, got a bool"),
        ([3, 4], [3, 5], "1 of 2 values is wrong"),
        ([3, 4], (3,), "expected 2 values, got fewer"),
        ([3, 4], [987] * 654, "expected 2 values, got more"),
        ([3, None], [3, 4], "1 of 2 values is wrong"),
        (3, None, "expected a value, got None"),
        (1.5, 10**400, "it is wrong"),
        (math.inf, -math.inf, "it is wrong"),
        (math.nan, 1.0, "it is wrong"),
        ([ONES, ONES], [ONES, ONES * 2], "12 of 12 values are wrong"),
    ],
)
def test_a_difference_is_told_in_the_students_words(expected, got, words):
    assert reason_for(files.plain(expected), files.plain(got)) == f"on hidden inputs, out of f: {words}"


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (ONES * math.nan, ONES * math.nan),
        (torch.tensor([1.0, -math.inf]), torch.tensor([1.0, -math.inf])),
        (ONES, ONES * 1.00001),
        (torch.tensor([1000.0, 0.001]), torch.tensor([1000.0, 0.002])),  # relative to the row
        (torch.empty(0, 4), torch.empty(0, 4)),
        (2.0, 2),
        (math.inf, math.inf),
        ([[1], [2.0, "a", None]], [[1], [2.0, "a", None]]),
    ],
)
def test_what_is_equal_or_near_enough_agrees(expected, got):
    assert reason_for(files.plain(expected), files.plain(got)) is None


def test_a_tolerance_holds_for_the_names_that_begin_so():
    exercise = Exercise("9.1", "compared", tolerances={"f": Tolerance(relative=0.1), "f of": Tolerance()})
    assert difference(exercise, {"f": 1.0}, {"f": 1.05}) is None
    assert difference(exercise, {"f of g": 1.0}, {"f of g": 1.05}) is not None
    assert reason_for(ONES, ONES * 1.0001, Tolerance(times=10)) is None
    assert reason_for(torch.tensor([1e3, 1e-3]), torch.tensor([1e3, 2e-3]), Tolerance(of="element")) is not None
    assert reason_for(torch.tensor([[1e3], [1e-3]]), torch.tensor([[1e3], [2e-3]]), Tolerance(of="tensor")) is None
    with pytest.raises(ValueError, match="'column'"):
        Tolerance(of="column")
    with pytest.raises(ValueError, match="nan"):
        Tolerance(relative=math.nan)


def test_outputs_that_are_missing_or_that_nobody_asked_for_are_told():
    exercise = Exercise("9.1", "compared")
    assert difference(exercise, {"a": 1, "b": 2}, {"a": 1}) == "on hidden inputs, b: this output is missing"
    assert "more outputs than expected" in difference(exercise, {"a": 1}, {"a": 1, "b": 2})
    assert "(1 more output of 2 wrong)" in difference(exercise, {"a": 1, "b": 2}, {"a": 2, "b": 1})


# ---- files of a sandbox
def test_observations_come_back_as_they_were_written(tmp_path):
    written = {"a": [1, 2.5, math.inf, None, True, "text"], "b": torch.arange(6).view(2, 3), "c": [ONES.half(), {}]}
    files.write(tmp_path, "1.1", written)
    found = files.read(tmp_path, "1.1")
    assert found["a"] == written["a"] and torch.equal(found["b"], written["b"])
    assert torch.equal(found["c"][0], ONES.half()) and found["c"][1] == files.Other("dict")
    assert [type(value) for value in found["a"]] == [int, float, float, type(None), bool, str]


def test_an_errors_text_is_one_short_line_without_control_characters(tmp_path):
    files.write_error(tmp_path, "1.1", ValueError("red \x1b[31m\n" + "x" * 1000), "gelu.py, line 3")
    text = files.read(tmp_path, "1.1").text
    assert text.startswith("ValueError: red [31m xxx") and text.endswith("(gelu.py, line 3)") and len(text) <= 300


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_the_solutions(path: Path) -> None:
    path.symlink_to(path.parent.parent / "expected" / path.name)


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


@pytest.mark.parametrize(
    "write",
    [
        fifo,
        link_to_the_solutions,
        Path.mkdir,
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        text("["),
        text("[" * 100_000 + "]" * 100_000),
        text('{"observations": {"dot_product_flops": ' + "[" * 900 + "]" * 900 + "}}"),
        text(" " * (files.MOST_JSON_BYTES + 1)),
        text("[1]"),
        text('{"error": 3}'),
        text('{"observations": [1]}'),
        text('{"observations": {"dot_product_flops": {"tensor": "0"}}}'),
        text('{"observations": {"dot_product_flops": {"tensor": [[]]}}}'),
        text('{"observations": {"dot_product_flops": {"other": {"tensor": 1}}}}'),
        text('{"observations": {"dot_product_flops": ' + "9" * 5000 + "}}"),
        text('{"observations": {"dot_product_flops": [1e999, NaN, -Infinity, 1, 2]}}'),
        text('{"observations": {"dot_product_flops": [[[]], {}, true, null, "a"]}}'),
        text('{"observations": {}}'),
        text('{"error": "\\u001b[2Jyou passed"}'),
    ],
)
def test_an_odd_file_is_a_reason_and_never_an_exception(write, tmp_path, expected_dir):
    folder = tmp_path / "got"
    folder.mkdir()
    write(folder / "1.1.json")
    reason = compare(expected_dir, folder, "lab1", ["1.1"])["1.1"]
    assert reason and reason.isprintable() and len(reason) < 500


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        (2**62).to_bytes(8, "little") + b"{}",
        (10).to_bytes(8, "little") + b"[" * 10,
        safetensors.torch.save({"1": torch.ones(3)}),
        safetensors.torch.save({"0": torch.ones(3)})[:-2],
        bytes(files.MOST_TENSOR_BYTES + 1),
    ],
    ids=["empty", "noise", "a header of 2^62 bytes", "no table", "another name", "cut", "too large"],
)
def test_odd_tensors_are_a_reason_and_never_an_exception(content, tmp_path):
    (tmp_path / "1.1.json").write_text(json.dumps({"observations": {"x": {"tensor": "0"}}}))
    (tmp_path / "1.1.safetensors").write_bytes(content)
    with pytest.raises(files.Unreadable, match="tensor"):
        files.read(tmp_path, "1.1")


def test_broken_observations_of_the_solution_are_an_error_of_the_grader(tmp_path):
    with pytest.raises(ValueError, match=r"exercise 1\.1 are missing"):
        compare(tmp_path, tmp_path, "lab1", ["1.1"])
    files.write_error(tmp_path, "1.1", ValueError("no"))
    with pytest.raises(ValueError, match=r"the solution fails in the scenario of exercise 1\.1"):
        compare(tmp_path, tmp_path, "lab1", ["1.1"])
