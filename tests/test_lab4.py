"""Lab 4 without ranks: stubs fail with their own message, checks that need no process, and the notebook.

What the checks say of answers that are played on ranks is in test_lab4_answers.py.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import lab4_own_answers as own
import pytest
from lab4_plain_answers import ANSWERS, LAB
from lab4_played import ALONE, NOTEBOOK, SEED, check_message
from lab4_wrong_answers import OWN_ANSWERS, WRONG_ANSWERS
from lab_notebook import assert_released_notebook_stops_at_each_check
from lab_places import WrongAnswer, forget, lab_with, labels

import utils.checks.lab4 as checks
from solutions import lab4_zero as solution
from utils.checks.core import CheckFailed

ROOT = Path(__file__).resolve().parent.parent

#: Exercise -> its check and the functions that the check takes.
EXERCISES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "4.1": (checks.check_ring_all_reduce, ("ring_all_reduce", "ring_reduce_scatter", "ring_all_gather")),
    "4.2": (checks.check_memory, ("bytes_per_rank",)),
    "4.3": (checks.check_distributed_data_parallel, ("DistributedDataParallel",)),
    "4.4": (checks.check_zero1, ("Zero1Optimizer",)),
    "4.5": (checks.check_zero2, ("Zero2",)),
    "4.6": (checks.check_fully_sharded, ("FullyShardedDataParallel",)),
    "4.7": (checks.check_tensor_parallel, ("ColumnParallelLinear", "RowParallelLinear", "TensorParallelMLP")),
    "4.8": (checks.check_schedule, ("one_f_one_b_order", "Pipeline", "split_gpt")),
}
#: What an exercise's check meets first before anything is solved.
FIRST = {**{exercise: exercise for exercise in EXERCISES}, "4.5": "4.3"}


def run_check(exercise: str, lab: object, seed: int) -> None:
    """Run an exercise's check on a package's functions."""
    check, names = EXERCISES[exercise]
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
def test_the_stub_fails_with_its_own_message_without_starting_a_process(exercise, stub, monkeypatch):
    monkeypatch.setattr("utils.checks.lab4.trial.play_on_ranks", None)
    with pytest.raises(NotImplementedError, match=rf"^Lab 4, exercise {re.escape(FIRST[exercise])}: \w"):
        run_check(exercise, stub, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("exercise", ALONE)  # the others: in test_lab4_answers.py, and in the notebook
def test_the_solution_passes(exercise, capsys):
    run_check(exercise, solution, seed=7)
    assert f"✓ exercise {exercise} (" in capsys.readouterr().out


def test_every_place_has_a_plain_answer():
    assert sorted(ANSWERS) == sorted(label for _, label in labels(LAB))


@pytest.mark.parametrize("wrong", [w for w in WRONG_ANSWERS if w.exercise in ALONE], ids=str)
def test_a_wrong_answer_is_caught_without_a_process(wrong: WrongAnswer, tmp_path):
    name = f"lab4_wrong_{WRONG_ANSWERS.index(wrong)}"
    with lab_with(LAB, tmp_path, name, wrong.answers(ANSWERS)) as lab:
        for seed in (SEED, *range(1, 21)):
            with pytest.raises(CheckFailed) as failed:
                run_check(wrong.exercise, lab, seed)
            check_message(str(failed.value), wrong.exercise, wrong.says)


def test_every_exercise_has_at_least_six_wrong_answers():
    for exercise in EXERCISES:
        count = sum(wrong.exercise == exercise for wrong in WRONG_ANSWERS)
        assert count + sum(number == exercise for number, *_ in OWN_ANSWERS) >= 6, exercise
    assert len({str(wrong) for wrong in WRONG_ANSWERS}) == len(WRONG_ANSWERS)


# ---- what a check does before it starts processes ----
def test_an_answer_that_leans_on_pytorchs_own_solution_is_refused(tmp_path, monkeypatch):
    lines = "from torch.nn.parallel import DistributedDataParallel as Ready\n\n\nclass Mine(Ready):\n    pass\n"
    (tmp_path / "leaning_answer.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    answer = importlib.import_module("leaning_answer").Mine
    with pytest.raises(CheckFailed, match=r"leaning_answer.py, line 1: torch.nn.parallel.DistributedDataParallel"):
        checks.check_distributed_data_parallel(answer, seed=1)


def test_an_exception_is_told_on_a_single_rank_with_the_students_line():
    with pytest.raises(CheckFailed) as failed:
        checks.check_distributed_data_parallel(own.HooksFrozen, seed=1)
    assert "a group of one rank already fails: RuntimeError" in str(failed.value)
    assert "lab4_own_answers.py, line" in str(failed.value)


def test_a_call_in_place_of_the_function_is_told():
    with pytest.raises(CheckFailed, match="the check takes Zero2 itself, got 3: leave out the parentheses"):
        checks.check_zero2(3, seed=1)


# ---- the notebook ----
text_of, check_cell = NOTEBOOK.text_of, NOTEBOOK.check_cell


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_check_cell_is_graded_locked_and_shows_its_seed(exercise):
    NOTEBOOK.assert_graded_and_locked(exercise)
    check, names = EXERCISES[exercise]
    assert re.fullmatch(rf"{check.__name__}\({', '.join(names)}, seed=\d+\)", check_cell(exercise).source)


def test_the_points_and_minutes_add_up_to_what_the_notebook_promises():
    assert len(EXERCISES) == 8
    NOTEBOOK.assert_points_add_up(EXERCISES)
    NOTEBOOK.assert_minutes_add_up(EXERCISES)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_an_exercise_states_what_a_student_needs(exercise):
    text = text_of(exercise)
    for part in (r"Difficulty [●○]{5} · importance [●○]{5}", r"edit `\w+\.py`", "Predict", "<summary>Hint</summary>"):
        assert re.search(part, text), part
    assert "budget" in text
    for name in EXERCISES[exercise][1]:
        assert f"`{name}(" in text or name == "split_gpt", name
    files = {f"{module}.py" for module, label in labels(LAB) if label.startswith(exercise + ":")}
    assert set(re.findall(r"`(\w+\.py)`", text.split("\n")[2])) == files
    NOTEBOOK.assert_task_check_and_notice_follow(exercise)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_classic_wrong_answers_are_numbered_and_at_least_five(exercise):
    found = NOTEBOOK.classic_numbers(exercise)
    assert found == list(range(1, len(found) + 1)) and len(found) >= 5


@pytest.mark.slow
def test_the_released_notebook_runs_and_every_check_fails_with_its_exercises_message():
    path = ROOT / "labs" / LAB / f"{LAB}.ipynb"
    assert_released_notebook_stops_at_each_check(path, FIRST, left_out="look-")
