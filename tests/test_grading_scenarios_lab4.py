"""The hidden scenarios of lab 4: right answers agree with the solution, wrong ones are told apart.

Many answers to an exercise are played on the ranks of few launches, as in the tests of the checks; the scenarios' own
launches are tried with the solution, and with answers that raise and that hang. Of the wrong answers a quarter is
played, and all of them where the environment has ``GRADING_IN_FULL``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from lab4_compared import Places, compare_on_rank
from lab_answers import answers as answers_of
from lab_answers import exercises, lab_answered, lab_filled, right_for, wrong_answer, wrong_answers
from lab_places import write_lab

from grading.scenarios.compare import difference
from solutions import lab4_zero as solution
from solutions.lab4_zero.answers import own
from solutions.lab4_zero.exercises import (
    hidden_data_parallel,
    hidden_pipeline,
    hidden_ranks,
    hidden_ring,
    hidden_tensor_parallel,
    hidden_zero,
)
from utils.distributed import launch, warm

SEED = 2026
LAB = "lab4_zero"
EXERCISES = exercises(LAB)
#: What is played on how many ranks, and the module of an exercise with its names.
PLAYED = {
    "4.1": (hidden_ring.PARTS, 4, "collectives", ["ring_all_reduce", "ring_reduce_scatter", "ring_all_gather"]),
    "4.3": (hidden_data_parallel.PARTS, 3, "distributed_data_parallel", ["DistributedDataParallel"]),
    "4.4": (hidden_zero.ZERO1, 3, "zero1", ["Zero1Optimizer"]),
    "4.5": (hidden_zero.ZERO2, 3, "zero2", ["Zero2"]),
    "4.6": (hidden_zero.ZERO3, 3, "zero3", ["Zero3"]),
    "4.7": (
        hidden_tensor_parallel.PARTS, 3, "tensor_parallel",
        [
            "ColumnParallelLinear", "RowParallelLinear", "TensorParallelMLP",
            "copy_to_tp_region", "reduce_from_tp_region",
        ],
    ),
}  # fmt: skip
#: Exercises whose wrong answers need no rank.
ALONE = ("4.2", "4.8")
#: Wrong answers that every observation of which is right: what they get wrong is memory, or when something happens.
RIGHT_VALUES = {
    "4.3-waits-at-once": "the gradients are right, the backward pass stands still meanwhile",
    "4.5-flat-tensors-kept": "the memory of full gradients is not given back",
    "4.5-all-in-flight": "the memory of full gradients is given back late",
    "4.6-a-view-of-everything": "the memory of the other ranks' shards is not given back",
    "4.6-full-gradients-kept": "the memory of full gradients is not given back",
}
#: Wrong answers whose ranks wait for one another, or die: each takes seconds, and all end as one of them does.
STUCK = {
    "4.1-send-before-receive",
    "4.1-one-size",
    "4.1-ranks-of-the-whole-job",
    "4.1-chunks-out-of-order",
    "4.3-as-buckets-get-full",
    "4.3-ranks-of-the-whole-job",
    "4.3-last-bucket-missing-on-one-rank",
    "4.3-last-bucket-waits-for-an-unused-parameter",
    "4.3-hook-takes-the-parameter",
    "4.4-ranks-of-the-whole-job",
    "4.4-norm-over-the-whole-job",
    "4.5-ranks-of-the-whole-job",
    "4.6-ranks-of-the-whole-job",
    "4.6-whole-weights",
    "4.6-padding-lost",
    "4.7-nothing-to-add",
    "4.7-ranks-of-the-whole-job",
}


WRONG = [(wrong.exercise, str(wrong)) for wrong in wrong_answers(LAB)]
SAMPLE = WRONG if os.environ.get("GRADING_IN_FULL") else WRONG[::4]


@pytest.fixture(scope="module", autouse=True)
def launcher() -> Iterator[None]:
    """Processes that outlive the answers that end their ranks."""
    with warm():
        yield


def _answers(exercise: str, folder: str) -> dict[str, Places]:
    """Name -> where what the scenario calls is; the packages that are filled in lie in ``folder``."""
    _, _, module, names = PLAYED[exercise]
    answers = {"solution": {name: (f"solutions.{LAB}.{module}", name) for name in names}}
    places = {"plain": right_for(exercise)}
    places |= {str(w): w.filled(places["plain"]) for w in wrong_answers(LAB, exercise) if not w.functions}
    for number, name in enumerate(name for name in places if name not in STUCK):
        if name != "plain" and (exercise, name) not in SAMPLE:
            continue
        package = f"hidden4_{exercise.replace('.', '_')}_{number}"
        write_lab(LAB, Path(folder, package), places[name])
        Path(folder, package, "__init__.py").write_text("")  # each rank imports what the exercise needs, and no more
        answers[name] = {key: (f"{package}.{module}", key) for key in names}
    for wrong in (wrong for wrong in wrong_answers(LAB, exercise) if wrong.functions):
        if str(wrong) not in STUCK and (exercise, str(wrong)) in SAMPLE:
            answers[str(wrong)] = {key: (its.__module__, its.__name__) for key, its in wrong.functions.items()}
    return answers


def compared(exercise: str, parts: Sequence[Callable], answers: Mapping[str, Places]) -> dict[str, str | None]:
    """Of each answer: None if all ranks see what they see of the first, else what the first rank says that does not."""
    places = [(part.__module__, part.__name__) for part in parts]
    ranks = PLAYED[exercise][1]
    of_ranks = launch(compare_on_rank, exercise, places, answers, SEED, world_size=ranks, backend="gloo")
    return {name: next((of[name] for of in of_ranks if of[name]), None) for name in answers}


@cache
def reasons(exercise: str) -> dict[str, str | None]:
    """Of each answer to an exercise that is played on ranks, as :func:`compared`."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return compared(exercise, PLAYED[exercise][0], _answers(exercise, folder))


@pytest.mark.slow
@pytest.mark.parametrize("exercise", PLAYED)
def test_a_plain_answer_agrees_with_the_solution(exercise):
    assert reasons(exercise)["solution"] is None
    assert reasons(exercise)["plain"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "name"), [pair for pair in SAMPLE if pair[0] in PLAYED and pair[1] not in STUCK])
def test_a_wrong_answer_is_told_apart_unless_its_values_are_right(exercise, name):
    reason = reasons(exercise)[name]
    assert (reason is None) == (name in RIGHT_VALUES), reason


@pytest.mark.slow
def test_an_optimizer_of_another_build_agrees_with_the_solution():
    answers = {
        "solution": {"Zero1Optimizer": (f"solutions.{LAB}.zero1", "Zero1Optimizer")},
        "own": {"Zero1Optimizer": (own.__name__, "PlainZero1")},
    }
    assert compared("4.4", [hidden_zero.zero1_steps, hidden_zero.zero1_training], answers)["own"] is None


def verdict(exercise: str, folder: Path, answers: Mapping[str, str], seed: int = SEED) -> str | None:
    """What is said of answers to an exercise that needs no rank; None if they agree with the solution."""
    with lab_filled(LAB, folder, answers) as package:
        return _alone(exercise, package, seed)


def _alone(number: str, lab: object, seed: int) -> str | None:
    exercise = EXERCISES[number]
    run = exercise.observe if number == "4.2" else hidden_pipeline.orders
    try:
        return difference(exercise, run(solution, seed), run(lab, seed))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "name"), [pair for pair in SAMPLE if pair[0] in ALONE])
def test_a_wrong_answer_that_needs_no_rank_is_told_apart(exercise, name, tmp_path):
    (wrong,) = (wrong for wrong in wrong_answers(LAB, exercise) if str(wrong) == name)
    assert verdict(exercise, tmp_path, wrong.filled(answers_of(LAB).right)) is not None


@pytest.mark.parametrize("seed", [1, 22])
@pytest.mark.parametrize("exercise", ALONE)
def test_a_plain_answer_that_needs_no_rank_agrees_with_the_solution(exercise, seed, tmp_path):
    assert verdict(exercise, tmp_path, answers_of(LAB).right, seed) is None


def test_every_exercise_has_its_scenario_and_the_lists_name_wrong_answers():
    assert list(EXERCISES) == sorted([*PLAYED, *ALONE])
    names = {name for _, name in WRONG}
    assert set(RIGHT_VALUES) | STUCK <= names and not set(RIGHT_VALUES) & STUCK


# ---- launches of their own
@pytest.mark.slow
def test_a_scenario_launches_its_ranks_and_another_seed_gives_other_observations():
    exercise = EXERCISES["4.7"]
    right = exercise.observe(solution, 1)
    assert len(right["TensorParallelMLP: result"]) == hidden_ranks.RANKS
    assert right["TensorParallelMLP in a group of two ranks: result"][0] is None
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
    monkeypatch.setattr(hidden_ranks, "PATIENCE", 1.0)
    wrong = wrong_answer("4.1", "send before receive")
    with (
        lab_answered(wrong, tmp_path) as package,
        pytest.raises(hidden_ranks.RanksFailed, match=r"^[^\n]*rank[^\n]*$"),
    ):
        EXERCISES["4.1"].observe(package, SEED)
