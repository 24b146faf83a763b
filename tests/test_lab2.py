"""Lab 2: stubs fail with their own message, solutions pass, and every wrong answer is caught and named."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import torch
from lab2_plain_answers import ANSWERS, LAB
from lab2_wrong_answers import WRONG_ANSWERS, package
from lab_notebook import LabNotebook, assert_released_notebook_stops_at_each_check
from lab_places import WrongAnswer, forget, lab_with, labels
from nbclient import NotebookClient

import utils.checks.lab2 as checks
from solutions import lab2_triton_kernels as solution
from solutions.lab2_triton_kernels import tuning
from utils.checks.core import CheckFailed
from utils.checks.lab2 import softmax as softmax_checks
from utils.checks.lab2 import tile_order

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "solutions/lab2_triton_kernels"

#: Exercise -> its check, the functions that the check takes, and the exercises that it builds on.
EXERCISES: dict[str, tuple[Callable, tuple[str, ...], tuple[str, ...]]] = {
    "2.1": (checks.check_gelu, ("gelu",), ()),
    "2.2": (checks.check_bias_relu, ("bias_relu",), ()),
    "2.3": (checks.check_weighted_sum, ("weighted_sum",), ()),
    "2.4": (checks.check_weighted_sum_backward, ("weighted_sum",), ("2.3",)),
    "2.5": (checks.check_softmax_short, ("softmax",), ()),
    "2.6": (checks.check_softmax_long, ("online_softmax",), ()),
    "2.7": (checks.check_tiled_matmul, ("tiled_matmul",), ()),
    "2.8": (checks.check_grouped_matmul, ("tiled_matmul", "matmul"), ("2.7",)),
}


def run_check(exercise: str, lab: object, seed: int) -> None:
    """Run an exercise's check on a package's functions."""
    check, names, _ = EXERCISES[exercise]
    check(*(getattr(lab, name) for name in names), seed=seed)


@pytest.fixture(scope="module")
def stub() -> Iterator[ModuleType]:
    """The released package, imported by its own name as the notebook imports it."""
    sys.path.insert(0, str(ROOT / "labs"))
    try:
        yield importlib.import_module("lab2_triton_kernels")
    finally:
        sys.path.remove(str(ROOT / "labs"))
        forget("lab2_triton_kernels")


# ---- stubs and solutions ----
@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_stub_fails_with_its_own_message(exercise, stub):
    first = (*EXERCISES[exercise][2], exercise)[0]  # before anything else is solved, what it builds on is asked for
    with pytest.raises(NotImplementedError, match=rf"^Lab 2, exercise {re.escape(first)}: \w"):
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
    with lab_with(LAB, tmp_path, "lab2_plain", ANSWERS) as lab:
        for seed in (2, 3, 5, 8):
            run_check(exercise, lab, seed)
    assert capsys.readouterr().out.count(f"✓ exercise {exercise} (") >= 4


@pytest.mark.parametrize("exercise", EXERCISES)
def test_an_exercise_can_be_solved_before_those_it_does_not_build_on(exercise, tmp_path, capsys):
    filled = (exercise, *EXERCISES[exercise][2])
    answers = {label: answer for label, answer in ANSWERS.items() if label.split(":")[0] in filled}
    with lab_with(LAB, tmp_path, f"lab2_only_{exercise.replace('.', '_')}", answers) as lab:
        run_check(exercise, lab, seed=5)
    assert f"✓ exercise {exercise} (" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("label", ANSWERS)
def test_each_place_left_unfilled_stops_its_exercises_check_with_its_own_message(label, tmp_path):
    answers = {other: answer for other, answer in ANSWERS.items() if other != label}
    with (
        lab_with(LAB, tmp_path, f"lab2_without_{list(ANSWERS).index(label)}", answers) as lab,
        pytest.raises(NotImplementedError, match=f"^Lab 2, exercise {re.escape(label)}$"),
    ):
        run_check(label.split(":")[0], lab, seed=1)


# ---- wrong answers ----
def message(wrong: WrongAnswer, folder: Path, seed: int) -> str:
    """What a wrong answer is told."""
    with package(wrong, folder) as lab, pytest.raises(CheckFailed) as failed:
        run_check(wrong.exercise, lab, seed)
    print(failed.value)
    return str(failed.value)


def first_of_each_exercise() -> list[WrongAnswer]:
    return [next(wrong for wrong in WRONG_ANSWERS if wrong.exercise == exercise) for exercise in EXERCISES]


@pytest.mark.parametrize("wrong", first_of_each_exercise(), ids=str)
def test_a_frequent_wrong_answer_is_caught_and_its_mistake_named(wrong: WrongAnswer, tmp_path):
    text = message(wrong, tmp_path, seed=3)
    lines = text.splitlines()
    assert lines[0].startswith(f"exercise {wrong.exercise} (")
    assert re.match(r"  reproduce: seed 3, shape \w+=\d+ .*\(.+\)$", lines[-1])
    assert any(re.search(r"program \(\d|owned by program|program \d", line) for line in lines)
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


def test_every_exercise_has_at_least_five_wrong_answers():
    for exercise in EXERCISES:
        assert sum(wrong.exercise == exercise for wrong in WRONG_ANSWERS) >= 5, exercise
    assert len({str(wrong) for wrong in WRONG_ANSWERS}) == len(WRONG_ANSWERS)


# ---- the order of tiles ----
def test_the_grouped_order_visits_each_tile_once_and_goes_down_its_groups():
    for tiles_m, tiles_n, group in ((5, 3, 2), (4, 4, 4), (3, 2, 8), (7, 1, 3), (1, 1, 1)):
        places = [tile_order.grouped(pid, tiles_m, tiles_n, group) for pid in range(tiles_m * tiles_n)]
        assert len(set(places)) == tiles_m * tiles_n
        assert [row // group for row, _ in places] == sorted(row // group for row, _ in places)
    assert [tile_order.grouped(pid, 5, 3, 2) for pid in range(7)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
        (2, 0),
    ]


def test_an_order_is_drawn_as_the_notebook_draws_it():
    places = tuple(tile_order.grouped(pid, 5, 3, 2) for pid in range(15))
    order = tile_order.TileOrder(places, 5, 3, 2)
    assert tile_order.cause_of(order) is None
    drawn = "\n".join(order.drawn(places))
    assert drawn == " 0  2  4\n 1  3  5\n 6  8 10\n 7  9 11\n12 13 14"
    assert drawn in text_of("2.8")


@pytest.mark.parametrize("wrong", range(len(tile_order.WRONG_ORDERS)))
def test_each_wrong_order_has_a_cause_of_its_own(wrong):
    follow, cause = tile_order.WRONG_ORDERS[wrong]
    inside = [follow(pid, 5, 3, 2) for pid in range(15)]
    places = tuple(place if place[0] < 5 and place[1] < 3 else None for place in inside)
    assert tile_order.cause_of(tile_order.TileOrder(places, 5, 3, 2)) == cause


def test_the_checks_know_how_long_a_row_softmax_keeps_on_chip():
    longest = softmax_checks.LONGEST_ROW
    assert tuning.softmax_fits(longest, 4) and not tuning.softmax_fits(longest + 1, 4)


def test_gradients_have_the_same_bits_on_each_run():
    source = torch.Generator().manual_seed(20)
    x, weight = torch.randn(300, 40, generator=source), torch.randn(40, generator=source)
    for function in (solution.weighted_sum, solution.bias_relu):
        found = []
        for _ in range(2):
            w = weight.clone().to(solution.gelu(x).device).requires_grad_()
            found.append(torch.autograd.grad(function(x.to(w.device), w).sum(), w)[0])
        assert torch.equal(*found)


# ---- the notebook ----
NOTEBOOK = LabNotebook(SOURCES / "lab2_triton_kernels.ipynb")
text_of, check_cell = NOTEBOOK.text_of, NOTEBOOK.check_cell


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_check_cell_is_graded_locked_and_shows_its_seed(exercise):
    NOTEBOOK.assert_graded_and_locked(exercise)
    cell = check_cell(exercise)
    check, names, _ = EXERCISES[exercise]
    assert re.fullmatch(rf"{check.__name__}\({', '.join(names)}, seed=\d+\)", cell.source)


def test_the_points_add_up_to_what_the_notebook_promises():
    assert len(EXERCISES) == 8
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
        assert f"`{name}(" in text or exercise == "2.4", name
    files = {f"{module}.py" for module, label in labels(LAB) if label.startswith(exercise + ":")}
    assert set(re.findall(r"`(\w+\.py)`", text.split("\n")[2])) == files
    NOTEBOOK.assert_task_check_and_notice_follow(exercise)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_classic_wrong_answers_are_numbered_and_at_least_five(exercise):
    found = NOTEBOOK.classic_numbers(exercise)
    assert found == list(range(1, len(found) + 1)) and len(found) >= 5


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_order_of_exercises_is_that_of_what_they_build_on(exercise):
    order = list(EXERCISES)
    for other in EXERCISES[exercise][2]:
        assert order.index(other) < order.index(exercise)
        assert f"Exercise {exercise} needs {other}" in NOTEBOOK.opening or (
            f"{exercise} needs {other}" in NOTEBOOK.opening
        )


@pytest.mark.slow
def test_the_released_notebook_runs_and_every_check_fails_with_its_exercises_message():
    first = {exercise: (*needs, exercise)[0] for exercise, (_, _, needs) in EXERCISES.items()}
    path = ROOT / "labs/lab2_triton_kernels/lab2_triton_kernels.ipynb"
    assert_released_notebook_stops_at_each_check(path, first, whole=("setup", "imports", "look-rows"))


@pytest.mark.slow
def test_a_file_that_a_student_saves_is_checked_at_once_without_a_restart(tmp_path):
    """Also one whose kernel function is called by the kernels of other files."""
    lab = tmp_path / "lab2_triton_kernels"
    shutil.copytree(ROOT / "labs/lab2_triton_kernels", lab)
    right = {name: (SOURCES / f"{name}.py").read_text() for name in ("gelu", "grouping", "tiled_matmul", "matmul")}
    for name in ("tiled_matmul", "matmul"):
        (lab / f"{name}.py").write_text(right[name])
    saves = [
        ("gelu", right["gelu"].replace("0.044715", "0.0"), "check-2-1"),
        ("gelu", right["gelu"], "check-2-1"),
        ("grouping", right["grouping"].replace("min(tiles_m - first, GROUP_M)", "GROUP_M"), "check-2-8"),
        ("grouping", right["grouping"], "check-2-8"),
    ]
    notebook = nbformat.read(lab / "lab2_triton_kernels.ipynb", as_version=4)
    cells = {cell.id: cell.source for cell in notebook.cells}
    sources = [cells["imports"], cells["check-2-1"], cells["check-2-8"]]
    for number, (name, text, check) in enumerate(saves):
        stamp = 4e9 + number  # as if an editor saved later, whatever the clock's resolution
        save = f"p.write_text({text!r}); os.utime(p, ({stamp}, {stamp}))"
        sources += [f"import os, pathlib; p = pathlib.Path('{name}.py'); {save}", cells[check]]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    NotebookClient(notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(lab)}}).execute()
    said = ["".join(o.get("text", o.get("evalue", "")) for o in cell.get("outputs", ())) for cell in notebook.cells]
    assert said[1].startswith("Lab 2, exercise 2.1: GeLU") and said[2].startswith("Lab 2, exercise 2.8: ")
    assert "the cubic term 0.044715 x^3 is left out" in said[4]
    assert said[6].startswith("✓ exercise 2.1 (GeLU)")
    assert "the last group has fewer rows than GROUP_M" in said[8]
    assert said[10].startswith("✓ exercise 2.8 (grouped order)") and "✓ exercise 2.8 (grouped matmul)" in said[10]
