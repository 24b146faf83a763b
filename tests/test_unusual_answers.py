"""Right answers that few would write pass the check, the policy and the hidden cases, alone and beside one another.

Each exercise has at least five: the plain answer, of which the wrong ones are edits, and those in
``solutions/LAB/answers/unusual.py``. Beside one another they stand in the hand-ins of :mod:`tests.gpu_rounds`, which
have an unusual answer to each exercise: what an answer calls of an earlier exercise then is not the plain one either.
Answers to an exercise that runs on ranks share one launch for the check and one for the hidden cases.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab_answers import LABS, answers, exercise, exercises, lab_filled, lab_of, solution, unusual_answers
from lab_places import write_lab
from played_on_ranks import CHECKS, SEED, functions_of, solved

from grading.lab import find_lab
from grading.policy import violations
from grading.scenarios.compare import difference
from tests.gpu_rounds import HandIn, unusual
from utils.checks.answers import EditedAnswer
from utils.checks.ranks.scenario_runs import run_on_ranks
from utils.distributed import warm

EXERCISES = [number for lab in LABS for number in exercises(lab)]
LEAST = 5
#: Beyond lab 1, `make test` tries one answer to each of a few exercises whose checks take no time.
QUICK = ("2.5", "3.1", "4.2", "4.8", "5.2", "6.1")
#: And of the hand-ins that hold an unusual answer to each exercise, these.
QUICK_TOGETHER = ("2.5", "3.2", "5.5", "6.1")


def alone() -> Iterator:
    """Answers that need no ranks; those to lab 1 take no time."""
    for number in (n for n in EXERCISES if n not in CHECKS):
        for index, answer in enumerate(unusual_answers(lab_of(number), number)):
            quick = number in exercises(LABS[0]) or (number in QUICK and index == 0)
            yield pytest.param(answer, id=str(answer), marks=() if quick else pytest.mark.thorough)


def filled(answer: EditedAnswer) -> dict[str, str]:
    return answer.filled(answers(lab_of(answer.exercise)).right)


def hand_ins(lab: str) -> list[HandIn]:
    return unusual(answers(lab), exercises(lab))


def together() -> Iterator:
    """Exercises that need no ranks, each with the hand-ins that its check must pass."""
    for number in (n for n in EXERCISES if n not in CHECKS and len(exercises(lab_of(n))) > 1):
        for index, hand_in in enumerate(hand_ins(lab_of(number))):
            quick = number in exercises(LABS[0]) or (number in QUICK_TOGETHER and index == 0)
            yield pytest.param(
                number, hand_in, id=f"{number}-{hand_in.name}", marks=() if quick else pytest.mark.thorough
            )


@pytest.mark.parametrize("number", EXERCISES)
def test_an_exercise_has_five_right_answers_that_are_not_the_solution(number):
    found = unusual_answers(lab_of(number), number)
    assert len(found) + 1 >= LEAST
    assert len({tuple(filled(answer).items()) for answer in found}) == len({each.name for each in found}) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("lab", [LABS[0], *(pytest.param(lab, marks=pytest.mark.thorough) for lab in LABS[1:])])
def test_the_policy_has_nothing_against_them(lab, tmp_path):
    judged = set()
    for index, answer in enumerate(unusual_answers(lab)):
        write_lab(lab, tmp_path / str(index), filled(answer))
        for path in (tmp_path / str(index)).glob("*.py"):
            if (source := path.read_bytes()) not in judged:
                judged.add(source)
                assert violations(source, path.name, find_lab(lab)) == [], (str(answer), path.name)


@pytest.mark.slow
@pytest.mark.parametrize("answer", list(alone()))
def test_an_unusual_right_answer_passes_the_check_and_agrees_with_the_solution_on_hidden_cases(answer, tmp_path):
    asked = exercise(answer.exercise)
    with lab_filled(lab_of(answer.exercise), tmp_path, filled(answer)) as lab:
        asked.run_check(lab, seed=9)
        expected, found = (asked.observe(asked.home(each), 9) for each in (solution(lab_of(answer.exercise)), lab))
    assert difference(asked, expected, found) is None


@pytest.mark.slow
@pytest.mark.parametrize(("number", "hand_in"), list(together()))
def test_an_exercise_passes_its_check_where_the_others_have_unusual_answers_too(number, hand_in, tmp_path):
    with lab_filled(lab_of(number), tmp_path, hand_in.places(answers(lab_of(number)).right)) as lab:
        exercise(number).run_check(lab, seed=9)


@pytest.mark.slow
@pytest.mark.parametrize("merge", unusual_answers(lab_of("3.1"), "3.1"), ids=str)
def test_tiled_attention_may_call_any_right_answer_to_the_merge_operator(merge, tmp_path):
    (calling,) = (each for each in unusual_answers(lab_of("3.2"), "3.2") if "merge_outputs" in str(each.edits))
    with lab_filled(lab_of("3.2"), tmp_path, calling.filled(filled(merge))) as lab:
        exercise("3.2").run_check(lab, seed=9)


@pytest.fixture(scope="module")
def launcher() -> Iterator[None]:
    with warm():
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("number", CHECKS)
def test_unusual_right_answers_on_ranks_pass_the_check_and_agree_on_hidden_cases(number, launcher):
    check, texts = CHECKS[number], {str(each): filled(each) for each in unusual_answers(lab_of(number), number)}
    with functions_of(number, texts) as found:
        shown, hidden = check.scenarios(SEED), check.hidden(SEED)
        for answer, run in zip(found.values(), run_on_ranks(list(found.values()), shown), strict=True):
            check.alone(answer, shown[0], SEED)
            check.judge(run, shown, SEED)
        functions = {"solution": solved(number)} | found
        runs = run_on_ranks(list(functions.values()), hidden)
        seen = {name: check.observations(run, hidden) for name, run in zip(functions, runs, strict=True)}
        for name, observed in seen.items():
            assert difference(check.exercise, seen["solution"], observed) is None, name


@pytest.mark.thorough
@pytest.mark.parametrize("number", CHECKS)
def test_on_ranks_too_an_exercise_passes_where_the_others_have_unusual_answers(number, launcher):
    check, right = CHECKS[number], answers(lab_of(number)).right
    with functions_of(number, {each.name: each.places(right) for each in hand_ins(lab_of(number))}) as found:
        shown = check.scenarios(SEED)
        for answer, run in zip(found.values(), run_on_ranks(list(found.values()), shown), strict=True):
            check.alone(answer, shown[0], SEED)
            check.judge(run, shown, SEED)
