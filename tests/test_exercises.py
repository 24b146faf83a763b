"""What holds for every exercise of every lab: stub, solution, right and wrong answers, and the cells of its notebook.

Exercises that run on several processes are held to their answers in test_answers_on_ranks.py, all in few launches.
"""

from __future__ import annotations

import importlib
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from lab_answers import (
    HEAVY,
    LABS,
    answers,
    exercises,
    lab_answered,
    lab_filled,
    lab_of,
    notebook,
    right_for,
    solution,
    tried,
    wrong_answers,
)  # fmt: skip
from lab_notebook import assert_released_notebook_stops_at_each_check
from lab_places import ROOT, forget, labels
from parameters import thorough_but

from grading.lab import find_lab
from grading.strip import places
from utils.checks.answers import WrongAnswer
from utils.checks.core import CheckFailed, exercises_of

#: All exercises of the course by their numbers.
EXERCISES = {number: each for lab in LABS for number, each in exercises(lab).items()}
#: Played on several processes.
ON_RANKS = ("4.1", "4.3", "4.4", "4.5", "4.6", "4.7", "4.9", "4.10", "6.6", "6.8")
#: Exercises whose checks take a moment; `make check` runs these, `make test` all.
QUICK = {"1.1", "2.5", "3.1", "4.8", "5.2", "6.1", "7.1"}
#: What the check of an exercise meets first while nothing is solved, where that is not its own place.
FIRST_MET = {number: number for number in EXERCISES} | {
    "2.8": "2.7",
    "3.4": "3.3",
    "4.5": "4.3",
    "4.10": "4.6",
}


#: Exercises that are checked with their own places filled and those of what they build on.
FILLED_ALONE = [n for n in EXERCISES if n not in (*ON_RANKS, "3.8", "3.9")]


#: Places at the margin of a module, where functions of the student's own stand: nothing is raised where they lack.
OWN = {place.label for lab in LABS for place in places(ROOT / "solutions" / lab) if not place.indent}


def thorough_but_quick(numbers: list[str]) -> list:
    """Exercises as parameters: all that are neither quick nor of lab 1 belong to the thorough tests."""
    return thorough_but(numbers, *(n for n in numbers if n in QUICK or n[0] == "1"))


each_exercise = pytest.mark.parametrize("number", EXERCISES)
each_lab = pytest.mark.parametrize("lab", LABS)


@pytest.fixture(scope="module")
def stubs() -> Iterator[Callable[[str], ModuleType]]:
    """The released packages, imported by their own names as the notebooks import them."""
    sys.path.insert(0, str(ROOT / "labs"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "labs"))
        for lab in LABS:
            forget(lab)


# ---- the declaration ----
@each_lab
def test_the_declarations_are_those_of_the_notebook(lab):
    declared = {number: (each.points, each.grade_id) for number, each in exercises(lab).items()}
    assert declared == {each.number: (each.points, each.grade_id) for each in find_lab(lab).exercises}
    assert all(each.observe is not None for each in exercises(lab).values())


def test_two_exercises_of_one_number_and_one_without_a_check_are_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for package, lines in {
        "twice_declared": "A = Exercise('1.1', 'a', check=print)\nB = Exercise('1.1', 'b', check=print)",
        "never_checked": "A = Exercise('1.1', 'a')",
    }.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "of.py").write_text(f"from utils.checks.core import Exercise\n{lines}\n")
        with pytest.raises(ValueError, match=r"exercise 1\.1 twice|has no check"):
            exercises_of(package)


# ---- stubs, solutions and right answers ----
@each_exercise
def test_the_stub_fails_with_its_own_message(number, stubs, monkeypatch):
    if number in ON_RANKS:
        monkeypatch.setattr("utils.checks.ranks.distributed_check.run_on_ranks", None)  # before any process starts
    with pytest.raises(NotImplementedError, match=rf"^Lab \d, exercise {re.escape(FIRST_MET[number])}: \w"):
        EXERCISES[number].run_check(stubs(lab_of(number)), seed=1)


# Under nbval the notebooks of the solutions run each check on a seed: here `make test` tries the quick ones.
@pytest.mark.slow
@pytest.mark.parametrize("number", thorough_but_quick([n for n in EXERCISES if n not in ON_RANKS]))
def test_the_solution_passes_on_several_seeds(number, capsys):
    seeds = (
        (7, 1000, 1234)
        if number in HEAVY
        else range(1000, 1010)
        if number in exercises(LABS[0]) and number != "1.10"
        else (7,)
    )
    for seed in seeds:
        EXERCISES[number].run_check(solution(lab_of(number)), seed)
    assert capsys.readouterr().out.count(f"✓ exercise {number} (") >= len(seeds)


@each_lab
def test_every_place_has_a_right_answer_that_is_not_the_solution(lab):
    assert sorted(answers(lab).right) == sorted(label for _, label in labels(lab))


@pytest.mark.slow
@pytest.mark.parametrize("number", thorough_but_quick(FILLED_ALONE))
def test_a_right_answer_passes_before_what_it_does_not_build_on_is_solved(number, tmp_path, capsys):
    with lab_filled(lab_of(number), tmp_path, right_for(number)) as lab:
        EXERCISES[number].run_check(lab, seed=5)
    assert f"✓ exercise {number} (" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", thorough_but_quick([n for n in EXERCISES if n[0] in "123"]))
def test_a_right_answer_passes_on_several_seeds(number, tmp_path):
    with lab_filled(lab_of(number), tmp_path, answers(lab_of(number)).right) as lab:
        for seed in (2, 3, 8):
            EXERCISES[number].run_check(lab, seed)


#: Places whose own message tells that they lack, where nothing starts processes, by lab.
TOLD = {lab: [p for p in answers(lab).right if p.split(":")[0] not in ON_RANKS and p not in OWN] for lab in LABS[1:]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", thorough_but([p for told in TOLD.values() for p in told], *(told[0] for told in TOLD.values() if told))
)
def test_a_place_left_unfilled_stops_its_exercises_check_with_its_own_message(place, tmp_path, monkeypatch):
    if place.startswith("5.6"):
        monkeypatch.setattr("solutions.lab5_serving.exercises.speculation.SAMPLES", 50)
    number = place.split(":")[0]
    places = {other: answer for other, answer in answers(lab_of(number)).right.items() if other != place}
    with (
        lab_filled(lab_of(number), tmp_path, places) as lab,
        pytest.raises(NotImplementedError, match=rf"^Lab \d, exercise {re.escape(place)}$"),
    ):
        EXERCISES[number].run_check(lab, seed=1)


# ---- wrong answers ----
def message(wrong: WrongAnswer, folder: Path, seed: int) -> str:
    """What a wrong answer is told, held against what must be said."""
    folder.mkdir(exist_ok=True)
    with lab_answered(wrong, folder) as lab, pytest.raises(CheckFailed) as failed:
        EXERCISES[wrong.exercise].run_check(lab, seed)
    text = str(failed.value)
    print(text)
    assert text.startswith(f"exercise {wrong.exercise} (")
    assert wrong.exercise[0] != "1" or any(name in text for name in EXERCISES[wrong.exercise].functions)
    assert re.search(rf"\n  reproduce: .*seed[= ]{seed}\b", text) or wrong.exercise[0] in "14"
    for words in wrong.says:
        assert words in text
    for listed in re.findall(r'"classic wrong answers" (\d+)', text):
        known = notebook(lab_of(wrong.exercise)).classic_numbers(wrong.exercise)
        assert int(listed) in known, "the message points to a line that the notebook lacks"
    return text


FOUND: dict[tuple, tuple] = {}


def drawn_once(between: Callable) -> Callable:
    """The same distributions from the same random numbers, looked for once: all wrong answers meet those of a seed."""

    def again(rng: random.Random, k: int, size: int) -> tuple:
        key = rng.getstate(), k, size
        if key not in FOUND:
            FOUND[key] = between(rng, k, size), rng.getstate()
        (p, q, drafted), state = FOUND[key]
        rng.setstate(state)
        return p.clone(), q.clone(), list(drafted)

    return again


def with_fewer_cases(wrong: WrongAnswer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the time of cases that a wrong answer to lab 5 does not need to be caught."""
    if wrong.exercise[0] != "5":
        return
    from solutions.lab5_serving.exercises import paged, speculation

    if "5.6: drop what was rejected" in wrong.edits:
        monkeypatch.setattr(speculation, "SAMPLES", 50)  # the distribution is right: enough for its scenarios to pass
    if wrong.exercise == "5.4":  # the first cases tell, or one of two others; the frequent wrong answer meets all
        drawn = paged.drawn

        def few(*args: object, **options: object) -> list:
            first, more = (cases := drawn(*args, **options))[:5], cases[5:]
            others = (case.kind == paged.LOW or case.layout == "mixed" or case.dtype.itemsize == 2 for case in more)
            return first + [case for case, taken in zip(more, others) if taken]

        monkeypatch.setattr(paged, "drawn", few)
    monkeypatch.setattr(speculation, "_between", drawn_once(speculation._between))


def frequent_ones_first() -> list:
    """Each exercise's most frequent wrong answer is tried by `make test`, and by `make check` where that is quick; so
    is every tenth of the others by `make test`, unless checks of the exercise run many kernels. `make test-thorough`
    tries all."""
    found = []
    for number in (n for n in EXERCISES if n not in ON_RANKS):
        first, *others = wrong_answers(lab_of(number), number)
        found += tried([first], *(() if number in QUICK else (pytest.mark.slow,)))
        for i, other in enumerate(others):
            found += tried([other], pytest.mark.slow if i % 10 == 5 and number not in HEAVY else pytest.mark.thorough)
    return found


@pytest.mark.parametrize("wrong", frequent_ones_first())
def test_a_wrong_answer_is_caught_and_its_mistake_named(wrong, tmp_path, monkeypatch):
    with_fewer_cases(wrong, monkeypatch)
    for seed in {"1": (3, 14), "4": (14, 1, 2, 3, 5, 8, 13)}.get(wrong.exercise[0], (14,)):
        text = message(wrong, tmp_path / str(seed), seed)
    if wrong.exercise[0] in "23" and wrong is wrong_answers(lab_of(wrong.exercise), wrong.exercise)[0]:
        assert re.match(r"  reproduce: check_\w+\(.+, seed=14\), case \w+=\d+ .*\(.+\)$", text.splitlines()[-1])


@each_exercise
def test_an_exercise_has_wrong_answers_each_of_a_name_of_its_own(number):
    found = wrong_answers(lab_of(number), number)
    assert len(found) >= {"1": 4, "2": 5, "5": 8}.get(number[0], 6)
    assert len({(wrong.name, *wrong.edits) for wrong in found}) == len(found)


# ---- the notebook ----
@each_exercise
def test_its_check_cell_is_graded_locked_and_shows_its_seed(number):
    notebook(lab_of(number)).assert_graded_and_locked(number)
    check, functions = EXERCISES[number].check, ", ".join(EXERCISES[number].functions)
    cell = notebook(lab_of(number)).check_cell(number)
    assert re.fullmatch(rf"{check.__name__}\({functions}, seed=\d+\)", cell.source)


@each_lab
def test_points_and_minutes_add_up_to_what_the_notebook_promises(lab):
    notebook(lab).assert_points_add_up(exercises(lab))
    notebook(lab).assert_minutes_add_up(exercises(lab))


#: Functions that the text of an exercise need not call by name.
SAID_ELSEWHERE = ("split_gpt", "CachedAttention")


@each_exercise
def test_its_text_states_what_a_student_needs(number):
    text = notebook(lab_of(number)).text_of(number)
    stated = (
        r"Difficulty [●○]{5} · importance [●○]{5}",
        r"edit \[`(\w+\.py)`\]\(\1\)",
        r"\*\*(Predict|Think)\.\*\*",
        "<summary>(Hint|First hint)</summary>",
    )
    for part in stated:
        assert re.search(part, text), part
    assert "budget" in text or number[0] == "1"
    for name in EXERCISES[number].functions:
        assert f"`{name}(" in text or name in SAID_ELSEWHERE or number == "3.4", name
    files = {f"{module}.py" for module, label in labels(lab_of(number)) if label.startswith(number + ":")}
    named = set(re.findall(r"`(\w+\.py)`", text.split("\n")[2]))
    assert number[0] == "1" or named == (files or {"tuning.py"})
    for place in answers(lab_of(number)).right if number[0] == "5" else ():
        assert not place.startswith(number + ":") or f"**{place.split(': ')[1]}**" in text, place
    notebook(lab_of(number)).assert_task_check_and_notice_follow(number)


@each_exercise
def test_its_classic_wrong_answers_are_numbered(number):
    found = notebook(lab_of(number)).classic_numbers(number)
    assert found == list(range(1, len(found) + 1)) and len(found) >= (4 if number[0] == "1" else 5)


@each_exercise
def test_what_it_builds_on_comes_before_it(number):
    order = list(EXERCISES)
    assert all(order.index(other) < order.index(number) for other in EXERCISES[number].builds_on)


@pytest.mark.slow
@pytest.mark.parametrize("lab", thorough_but(LABS, LABS[0], LABS[-1]))
def test_the_released_notebook_runs_and_every_check_fails_with_its_exercises_message(lab):
    first = {number: FIRST_MET[number] for number in exercises(lab)}
    left_out = "look-" if lab in ("lab4_zero", "lab5_serving") else None
    assert_released_notebook_stops_at_each_check(ROOT / "labs" / lab / f"{lab}.ipynb", first, left_out=left_out)
