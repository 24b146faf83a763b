"""The hidden scenarios of exercises on ranks: right answers agree with the solution, wrong ones are told apart.

They are the scenarios of the checks with other seeds and sizes; test_answers_on_ranks.py holds the checks to every
wrong answer, and here is one that fails in a hidden scenario alone. All answers to an exercise are played in one
launch; the scenarios' own launches are tried with the solution, and with answers that raise and that hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from lab_answers import answers, exercises, lab_answered, lab_filled, lab_of, right_for, wrong_answer, wrong_answers
from parameters import thorough_but
from played_on_ranks import CHECKS, functions_of, solved

from grading.scenarios.compare import difference
from solutions import lab4_zero as solution
from solutions.lab4_zero.answers import own
from solutions.lab4_zero.exercises import schedule
from utils.checks.ranks import distributed_check
from utils.checks.ranks.distributed_check import RanksFailed
from utils.checks.ranks.scenario_runs import run_on_ranks
from utils.checks.ranks.scenarios import ScenarioRun
from utils.distributed import warm

LAB, SEED = "lab4_zero", 2026
EXERCISES = exercises(LAB)
#: A wrong answer that passes the check: its place, words of the plain answer, and what stands there instead.
PASSING = ("4.4: the norm of a gradient in shards", "if norm > max_norm:", "if True:")


@pytest.fixture(scope="module", autouse=True)
def launcher() -> Iterator[None]:
    """Processes that outlive the answers that end their ranks."""
    with warm():
        yield


@cache
def played(exercise: str) -> dict[str, ScenarioRun]:
    """What was seen in the hidden scenarios: of the solution, a plain answer, and wrong ones."""
    plain = right_for(exercise)
    wrong = next(wrong for wrong in wrong_answers(lab_of(exercise), exercise)[1:] if not wrong.functions)
    filled = {"plain": plain, "wrong": wrong.filled(plain)}
    place, words, instead = PASSING
    if exercise == place.split(":")[0]:
        filled["passing"] = plain | {place: plain[place].replace(words, instead)}
    with functions_of(exercise, filled) as answers:
        functions = {"solution": solved(exercise)} | answers
        runs = run_on_ranks(list(functions.values()), CHECKS[exercise].hidden(SEED))
    return dict(zip(functions, runs, strict=True))


def reason(exercise: str, run: ScenarioRun) -> str | None:
    """What is said of a run; None if it agrees with the solution's."""
    check = CHECKS[exercise]
    scenarios = check.hidden(SEED)
    expected = check.observations(played(exercise)["solution"], scenarios)
    try:
        return difference(check.exercise, expected, check.observations(run, scenarios))
    except RanksFailed as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("exercise", thorough_but(CHECKS, "4.4"))
def test_a_plain_answer_agrees_with_the_solution_and_a_wrong_one_does_not(exercise):
    found = {name: reason(exercise, run) for name, run in played(exercise).items()}
    assert found.pop("solution") is None and found.pop("plain") is None
    assert all(found.values()), found


@pytest.mark.slow
def test_an_optimizer_of_another_build_agrees_with_the_solution():
    check = CHECKS["4.4"]
    scenarios = [scenario for scenario in check.hidden(SEED) if not scenario.members]
    both = [{"Zero1Optimizer": kind} for kind in (solution.Zero1Optimizer, own.PlainZero1)]
    expected, found = (check.observations(run, scenarios) for run in run_on_ranks(both, scenarios))
    assert difference(EXERCISES["4.4"], expected, found) is None


# ---- exercises that need no rank
def said_alone(number: str, lab: object, seed: int = SEED) -> str | None:
    """What is said of answers to an exercise that needs no rank; None if they agree with the solution."""
    exercise = EXERCISES[number]
    run = exercise.observe if number == "4.2" else schedule.observe_orders
    try:
        return difference(exercise, run(solution, seed), run(lab, seed))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("number", ["4.2", "4.8"])
def test_answers_that_need_no_rank_agree_with_the_solution_if_they_are_right(number, tmp_path):
    with lab_filled(LAB, tmp_path, answers(LAB).right) as lab:
        assert [said_alone(number, lab, seed) for seed in (1, 22)] == [None, None]
    for wrong in wrong_answers(LAB, number)[::3]:
        with lab_answered(wrong, tmp_path) as lab:
            assert said_alone(number, lab) is not None, wrong


# ---- launches of their own
@pytest.mark.slow
def test_a_scenario_launches_its_ranks_and_another_seed_gives_other_observations():
    exercise = EXERCISES["4.7"]
    right = exercise.observe(solution, 1)
    assert len(right["TensorParallelMLP: y"]) == 3
    assert right["TensorParallelMLP, in a group of two of the ranks: y"][0] is None
    assert difference(exercise, right, exercise.observe(solution, 2)) is not None


@pytest.mark.slow
def test_a_place_that_is_not_filled_raises_its_own_message(tmp_path):
    with (
        lab_filled(LAB, tmp_path, {}) as package,
        pytest.raises(NotImplementedError, match=r"^Lab 4, exercise 4\.7"),
    ):
        EXERCISES["4.7"].observe(package, SEED)


@pytest.mark.slow
def test_ranks_that_wait_for_one_another_end_with_an_error_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed_check, "HIDDEN_PATIENCE", 1.0)
    with (
        lab_answered(wrong_answer("4.1", "send before receive"), tmp_path) as package,
        pytest.raises(RanksFailed, match=r"^[^\n]*rank[^\n]*$"),
    ):
        EXERCISES["4.1"].observe(package, SEED)
