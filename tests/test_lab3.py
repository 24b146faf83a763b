"""Lab 3: stubs fail with their own message, solutions pass, and every wrong answer is caught and named."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from lab3_plain_answers import ANSWERS, LAB
from lab3_wrong_answers import WRONG_ANSWERS
from lab_notebook import LabNotebook, assert_released_notebook_stops_at_each_check
from lab_places import WrongAnswer, forget, lab_with, labels

import utils.checks.lab3 as checks
from solutions import lab3_flash_attention as solution
from utils import reference, runtime
from utils.checks import tensors
from utils.checks.core import CheckFailed
from utils.checks.lab3 import backward, forward, gradients, operator, shapes, walk

ROOT = Path(__file__).resolve().parent.parent

#: Exercise -> its check, the functions that the check takes, and the exercises that it builds on.
EXERCISES: dict[str, tuple[Callable, tuple[str, ...], tuple[str, ...]]] = {
    "3.1": (checks.check_merge, ("merge", "merge_outputs"), ()),
    "3.2": (checks.check_tiled_attention, ("tiled_attention", "tiled_attention_backward"), ()),
    "3.3": (checks.check_flash_forward, ("flash_forward",), ()),
    "3.4": (checks.check_flash_causal, ("flash_forward",), ("3.3",)),
    "3.5": (checks.check_delta, ("attention_delta",), ()),
    "3.6": (checks.check_dkdv, ("flash_dkdv",), ()),
    "3.7": (checks.check_dq, ("flash_dq",), ("3.4",)),
    "3.8": (
        checks.check_flash_attention,
        ("flash_attention", "flash_attention_with_lse"),
        ("3.3", "3.4", "3.5", "3.6", "3.7"),
    ),
    "3.9": (checks.check_speed, ("flash_attention",), ("3.3", "3.4", "3.8")),
}
#: Exercises whose checks take seconds and resemble another one's: `make test` runs them.
BROAD = ("3.4", "3.7", "3.8")
#: What an exercise's check meets first before anything is solved.
FIRST = {**{exercise: exercise for exercise in EXERCISES}, "3.4": "3.3"}


def run_check(exercise: str, lab: object, seed: int) -> None:
    """Run an exercise's check on a package's functions."""
    check, names, _ = EXERCISES[exercise]
    check(*(getattr(lab, name) for name in names), seed=seed)


@pytest.fixture(scope="module")
def stub() -> Iterator[ModuleType]:
    """The released package, imported by its own name as the notebook imports it."""
    sys.path.insert(0, str(ROOT / "labs"))
    try:
        yield importlib.import_module(LAB)
    finally:
        sys.path.remove(str(ROOT / "labs"))
        forget(LAB)


# ---- stubs and solutions ----
@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_stub_fails_with_its_own_message(exercise, stub):
    with pytest.raises(NotImplementedError, match=rf"^Lab 3, exercise {re.escape(FIRST[exercise])}: \w"):
        run_check(exercise, stub, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_passes_on_several_seeds(exercise, capsys):
    for seed in (7, 1000, 1234):
        run_check(exercise, solution, seed=seed)
    assert capsys.readouterr().out.count(f"✓ exercise {exercise} (") >= 3


def test_every_place_has_a_plain_answer():
    assert sorted(ANSWERS) == sorted(label for _, label in labels(LAB))


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_plain_answer_passes_on_several_seeds(exercise, tmp_path, capsys):
    with lab_with(LAB, tmp_path, "lab3_plain", ANSWERS) as lab:
        for seed in (2, 5):
            run_check(exercise, lab, seed)
    assert capsys.readouterr().out.count(f"✓ exercise {exercise} (") >= 2


@pytest.mark.parametrize(
    "exercise",
    [
        pytest.param(exercise, marks=[pytest.mark.slow] if exercise in (*BROAD, "3.2", "3.3", "3.6") else [])
        for exercise in EXERCISES
        if exercise not in ("3.8", "3.9")
    ],
)
def test_an_exercise_can_be_solved_before_those_it_does_not_build_on(exercise, tmp_path, capsys):
    filled = (exercise, *EXERCISES[exercise][2])
    answers = {label: answer for label, answer in ANSWERS.items() if label.split(":")[0] in filled}
    with lab_with(LAB, tmp_path, f"lab3_only_{exercise.replace('.', '_')}", answers) as lab:
        run_check(exercise, lab, seed=5)
    assert f"✓ exercise {exercise} (" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("label", ANSWERS)
def test_each_place_left_unfilled_stops_its_exercises_check_with_its_own_message(label, tmp_path):
    answers = {other: answer for other, answer in ANSWERS.items() if other != label}
    name = f"lab3_without_{list(ANSWERS).index(label)}"
    with (
        lab_with(LAB, tmp_path, name, answers) as lab,
        pytest.raises(NotImplementedError, match=f"^Lab 3, exercise {re.escape(label)}$"),
    ):
        run_check(label.split(":")[0], lab, seed=1)


# ---- wrong answers ----
def message(wrong: WrongAnswer, folder: Path, seed: int) -> str:
    """What a wrong answer is told."""
    name = f"lab3_wrong_{WRONG_ANSWERS.index(wrong)}"
    with lab_with(LAB, folder, name, wrong.answers(ANSWERS)) as lab, pytest.raises(CheckFailed) as failed:
        run_check(wrong.exercise, lab, seed)
    print(failed.value)
    return str(failed.value)


def first_of_each_exercise() -> list:
    first = {exercise: next(wrong for wrong in WRONG_ANSWERS if wrong.exercise == exercise) for exercise in EXERCISES}
    return [
        pytest.param(wrong, marks=[pytest.mark.slow] if exercise in BROAD else []) for exercise, wrong in first.items()
    ]


@pytest.mark.parametrize("wrong", first_of_each_exercise(), ids=str)
def test_a_frequent_wrong_answer_is_caught_and_its_mistake_named(wrong: WrongAnswer, tmp_path):
    text = message(wrong, tmp_path, seed=3)
    lines = text.splitlines()
    assert lines[0].startswith(f"exercise {wrong.exercise} (")
    assert re.match(r"  reproduce: seed 3, shape \w+=\d+ .*\(.+\)$", lines[-1])
    for words in wrong.says:
        assert words in text


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=str)
def test_a_wrong_answer_is_caught_and_its_mistake_named(wrong: WrongAnswer, tmp_path):
    text = message(wrong, tmp_path, seed=14)
    assert text.startswith(f"exercise {wrong.exercise} (") and "\n  reproduce: seed 14, shape " in text
    for words in wrong.says:
        assert words in text
    for number in re.findall(r'"classic wrong answers" (\d+)', text):
        assert int(number) in NOTEBOOK.classic_numbers(wrong.exercise), (
            "the message points to a line that the notebook lacks"
        )


# ---- what rounding decides, on every seed ----
STEP, END = "3.3: one step of the inner loop", "3.3: the end of a row of tiles"
#: Right answers to 3.3 that round elsewhere than the plain one: edits of it.
ROUNDED_ELSEWHERE: dict[str, dict[str, dict[str, str]]] = {
    "as it is": {},
    "the output divided in each step": {
        STEP: {
            "d = d * rescale +": "before = d * rescale\n        d = before +",
            "o = o * rescale[:, None]": "o = o * (before / d)[:, None]",
            "p.to(v.dtype)": "(p / d[:, None]).to(v.dtype)",
        },
        END: {"o = o / tl.where(seen, d, 1.0)[:, None]": "o = o"},
    },
    "scaled queries": {
        STEP: {
            "tl.dot(q,": "tl.dot((q.to(tl.float32) * scale_log2).to(q.dtype),",
            "input_precision=PRECISION) * scale_log2": "input_precision=PRECISION)",
        }
    },
    "a sum of rounded probabilities": {
        STEP: {"p = tl.exp2(s - m_new[:, None])": "p = tl.exp2(s - m_new[:, None]).to(q.dtype).to(tl.float32)"}
    },
    "probabilities as they are": {
        STEP: {"tl.dot(p.to(v.dtype), v, o, input_precision=PRECISION)": 'tl.dot(p, v.to(tl.float32), o, "ieee")'}
    },
    "a maximum that is too large": {STEP: {"tl.max(s, 1)": "tl.max(s, 1) + 3.3"}},
}


@pytest.fixture
def drifting_alone(monkeypatch):
    """Of the cases of exercise 3.3, one tile in float32 and those whose values cancel."""
    drawn = shapes.drawn

    def few(*args, **options):
        return [case for case in drawn(*args, **options) if case.kind in ("one tile", shapes.DRIFTING)]

    monkeypatch.setattr(shapes, "drawn", few)


def assert_named(name: str, folder: Path, seeds: Sequence[int]) -> None:
    """Hold a wrong answer's check to what it must say, seed by seed."""
    wrong = next(wrong for wrong in WRONG_ANSWERS if wrong.name == name)
    with lab_with(LAB, folder, f"lab3_wrong_{WRONG_ANSWERS.index(wrong)}", wrong.answers(ANSWERS)) as lab:
        for seed in seeds:
            with pytest.raises(CheckFailed) as failed:
                run_check(wrong.exercise, lab, seed)
            assert all(words in str(failed.value) for words in wrong.says), f"seed {seed}: {failed.value}"


@pytest.mark.parametrize("name", ["accumulator in float16", pytest.param("sum in float16", marks=pytest.mark.slow)])
def test_what_is_kept_in_16_bits_between_the_steps_is_named_on_every_seed(name, tmp_path, drifting_alone):
    assert_named(name, tmp_path, range(1, 7))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if place else []) for place, name in enumerate(ROUNDED_ELSEWHERE)],
)
def test_what_is_rounded_where_only_a_product_takes_it_passes_on_every_seed(name, tmp_path, drifting_alone, capsys):
    answer = WrongAnswer("3.3", name, ROUNDED_ELSEWHERE[name], ()).answers(ANSWERS)
    with lab_with(LAB, tmp_path, f"lab3_rounded_{list(ROUNDED_ELSEWHERE).index(name)}", answer) as lab:
        for seed in range(6):
            run_check("3.3", lab, seed)
    assert capsys.readouterr().out.count("✓ exercise 3.3 (") == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one key too few is seen by one", "top left loop", "one query too late"])
def test_a_loop_that_leaves_out_a_tile_is_named_on_every_seed(name, tmp_path):
    assert_named(name, tmp_path, (21, 22, 29))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sum alone looked at", shapes.LARGE),
        pytest.param("sum alone looked at, and for infinity", shapes.LARGE, marks=pytest.mark.slow),
        pytest.param("first column alone looked at", shapes.LARGE, marks=pytest.mark.slow),
        pytest.param("output compared with plus infinity", shapes.LARGE, marks=pytest.mark.slow),
        ("output alone looked at", shapes.TOGETHER),
    ],
)
def test_what_overflows_beside_an_anchor_is_named_on_every_seed(name, kind, tmp_path, monkeypatch):
    everything = operator._anchored_cases
    alone = lambda *args: [case for case in everything(*args) if case.kind == kind]  # noqa: E731
    monkeypatch.setattr(operator, "_anchored_cases", alone)
    assert_named(name, tmp_path, range(1, 7))


@pytest.mark.parametrize(("block_m", "block_n"), [(32, 16), (16, 16), (16, 64), (128, 64), (64, 128)])
def test_the_last_query_of_a_tile_is_alone_in_a_tile_of_keys_on_every_seed(block_m, block_n):
    for seed in range(10):
        sizes = [case.sizes for case in forward.causal_cases(seed, block_m, block_n)]
        assert any(s["Nq"] % block_m == 0 and s["Nk"] % block_n == 1 and s["Nk"] >= s["Nq"] for s in sizes)


@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_compiles_a_third_of_the_cases_with_an_anchor_and_all_that_outgrow_it(monkeypatch, seed):
    blocks = {torch.float32: (32, 16), torch.bfloat16: (32, 16), torch.float16: (64, 128)}
    everything = operator._anchored_cases(seed, blocks)
    monkeypatch.setattr(operator, "runtime", SimpleNamespace(pick=lambda cpu, gpu: gpu))
    some = operator._anchored_cases(seed, blocks)
    assert set(map(repr, some)) < set(map(repr, everything)) and len(some) < len(everything) / 2
    assert [case.kind for case in some[-9:]] == [case.kind for case in everything[-9:]]


def take_tiles_of_a_gpu(monkeypatch, lab: ModuleType, capability: tuple[int, int]) -> None:
    """Let a package's kernels have the tiles of a GPU, and the check of 3.9 the cases that it has there."""
    tuning = importlib.import_module(f"{lab.__name__}.tuning")
    monkeypatch.setattr(tuning, "runtime", SimpleNamespace(INTERPRET=False, pick=lambda cpu, gpu: gpu))
    monkeypatch.setattr(tuning, "capability_of", lambda device: capability)
    monkeypatch.setattr(operator, "runtime", SimpleNamespace(pick=lambda cpu, gpu: gpu, DEVICE=runtime.DEVICE))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_the_anchored_loop_passes_with_the_tiles_of_a_gpu(capability, monkeypatch, capsys):
    take_tiles_of_a_gpu(monkeypatch, solution, capability)
    for seed in (4, 39):  # 39 found tiles that held all keys of a case in which some must outgrow the first
        run_check("3.9", solution, seed)
    assert capsys.readouterr().out.count("✓ exercise 3.9 (") == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sum alone looked at, and for infinity", "always again", "never tried"])
def test_an_anchored_loop_that_is_wrong_is_named_with_the_tiles_of_a_gpu(name, tmp_path, monkeypatch):
    wrong = next(wrong for wrong in WRONG_ANSWERS if wrong.name == name)
    with lab_with(LAB, tmp_path, f"lab3_gpu_{WRONG_ANSWERS.index(wrong)}", wrong.answers(ANSWERS)) as lab:
        take_tiles_of_a_gpu(monkeypatch, lab, (9, 0))
        with pytest.raises(CheckFailed) as failed:
            run_check("3.9", lab, seed=39)
    assert all(words in str(failed.value) for words in wrong.says), failed.value


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (32, 16), (16, 16), (128, 64), (64, 128)])
def test_the_first_query_that_sees_a_tile_of_keys_ends_its_own_tile_on_every_seed(block_m, block_n):
    for seed in range(10):
        cases = [case for case in backward._cases(seed, block_m, block_n) if case.options.get("causal")]
        first = [block_n - (case.sizes["Nk"] - case.sizes["Nq"]) for case in cases if case.sizes["Nk"] > block_n]
        assert any(query >= 0 and query % block_m == block_m - 1 for query in first)


def test_low_scores_are_no_reason_to_refuse_the_solution_on_any_seed():
    for seed in range(36, 60):
        case = backward._low(seed, 32, 16)
        args = gradients.inputs_with_delta(case)
        (target,) = tensors.targets(lambda *x, **o: shapes.attention_gradients(*x[:4], **o)[0], args, case.options)
        dq = solution.flash_dq(*args, False, 0.25)
        assert (dq.cpu().double() - target.right).abs().max() < 0.8 * (target.allowed + gradients.ROUNDING), seed


def test_every_exercise_has_at_least_six_wrong_answers():
    for exercise in EXERCISES:
        assert sum(wrong.exercise == exercise for wrong in WRONG_ANSWERS) >= 6, exercise
    assert len({str(wrong) for wrong in WRONG_ANSWERS}) == len(WRONG_ANSWERS)


# ---- what the checks compute with ----
@pytest.mark.parametrize("causal", [False, True])
def test_tiled_attention_without_a_mistake_is_attention(causal):
    for case in shapes.drawn(3, 16, 16, causal=causal):
        if case.kind == "no element" or case.layout == "far":
            continue
        *qkv, do = (x.cpu().double() for x in shapes.with_do(case))
        right = reference.attention(*qkv, **case.options)
        for found in (walk.walk(*qkv, **case.options, block_m=16, block_n=16), shapes.attention(*qkv, **case.options)):
            for one, other in zip(found, right):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        right = reference.attention_backward(*qkv, do, **case.options)
        for function in (walk.gradients, shapes.attention_gradients):
            for one, other in zip(function(*qkv, do, **case.options), right):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_the_cases_hold_every_edge():
    cases = shapes.drawn(5, 32, 16, causal=True)
    sizes = [case.sizes for case in cases]
    assert any(s["Nq"] < s["Nk"] for s in sizes) and any(s["Nq"] > s["Nk"] for s in sizes)
    assert any(s["Hq"] > s["Hkv"] > 1 for s in sizes) and any(s["D"] & (s["D"] - 1) for s in sizes)
    assert any(s["Nq"] == s["Nk"] == 1 for s in sizes) and any(s["B"] == 0 for s in sizes)
    assert {case.dtype for case in cases} == {torch.float32, torch.float16, torch.bfloat16}
    assert {"padded", "transposed", shapes.HEADS_LAST, shapes.MIXED} <= {case.layout for case in cases}


# ---- the notebook ----
NOTEBOOK = LabNotebook(ROOT / "solutions" / LAB / f"{LAB}.ipynb")
text_of, check_cell = NOTEBOOK.text_of, NOTEBOOK.check_cell


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_check_cell_is_graded_locked_and_shows_its_seed(exercise):
    NOTEBOOK.assert_graded_and_locked(exercise)
    check, names, _ = EXERCISES[exercise]
    assert re.fullmatch(rf"{check.__name__}\({', '.join(names)}, seed=\d+\)", check_cell(exercise).source)


def test_the_points_add_up_to_what_the_notebook_promises():
    assert len(EXERCISES) == 9
    NOTEBOOK.assert_points_add_up(EXERCISES)


def test_the_minutes_add_up_to_what_the_notebook_promises():
    NOTEBOOK.assert_minutes_add_up(EXERCISES)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_an_exercise_states_what_a_student_needs(exercise):
    text = text_of(exercise)
    for part in (r"Difficulty [●○]{5} · importance [●○]{5}", r"edit `\w+\.py`", "Predict", "<summary>Hint</summary>"):
        assert re.search(part, text), part
    assert "budget" in text
    for name in EXERCISES[exercise][1]:
        assert f"`{name}(" in text or exercise == "3.4", name
    files = {f"{module}.py" for module, label in labels(LAB) if label.startswith(exercise + ":")}
    assert set(re.findall(r"`(\w+\.py)`", text.split("\n")[2])) == (files or {"tuning.py"})
    NOTEBOOK.assert_task_check_and_notice_follow(exercise)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_classic_wrong_answers_are_numbered_and_at_least_five(exercise):
    found = NOTEBOOK.classic_numbers(exercise)
    assert found == list(range(1, len(found) + 1)) and len(found) >= 5


@pytest.mark.slow
def test_the_released_notebook_runs_and_every_check_fails_with_its_exercises_message():
    path = ROOT / "labs" / LAB / f"{LAB}.ipynb"
    assert_released_notebook_stops_at_each_check(path, FIRST)
