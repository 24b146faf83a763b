"""Exercises on ranks: right answers pass, a place left out is told, and every wrong answer is told its mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from lab_answers import LABS, answers, is_left_to_thorough, lab_of, notebook, tried, wrong_answers
from played_on_ranks import CHECKS, SEED, judge, played

from utils.checks.core import CheckFailed
from utils.checks.ranks.scenario_runs import run_on_ranks
from utils.checks.ranks.scenarios import RankScenario
from utils.distributed import warm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def launcher() -> Iterator[None]:
    """A launcher that outlives the answers that end their processes."""
    with warm():
        yield


def check_message(text: str, exercise: str, says: tuple[str, ...]) -> None:
    """Hold the message of a failed check against what it must say."""
    print(text)
    assert text.startswith(f"exercise {exercise} (")
    for words in says:
        assert words in text
    for number in re.findall(r'"classic wrong answers" (\d+)', text):
        known = notebook(lab_of(exercise)).classic_numbers(exercise)
        assert int(number) in known, "the message points to a line the notebook lacks"


@pytest.mark.thorough
@pytest.mark.parametrize("exercise", CHECKS)
def test_a_plain_answer_passes_before_what_it_does_not_build_on_is_solved(exercise):
    judge(exercise, "plain", thorough=True)
    judge(exercise, "solution", thorough=True)


@pytest.mark.thorough
@pytest.mark.parametrize("place", [p for lab in LABS for p in answers(lab).right if p.split(":")[0] in CHECKS])
def test_each_place_left_unfilled_stops_its_exercises_check_with_its_own_message(place):
    with pytest.raises(NotImplementedError, match=rf"^Lab \d, exercise {re.escape(place)}$"):
        judge(place.split(":")[0], f"without {place}", thorough=True)


@pytest.mark.parametrize("wrong", tried(wrong for number in CHECKS for wrong in wrong_answers(lab_of(number), number)))
def test_a_wrong_answer_is_caught_and_its_mistake_named(wrong):
    with pytest.raises(CheckFailed) as failed:
        judge(wrong.exercise, str(wrong), is_left_to_thorough(wrong))
    check_message(str(failed.value), wrong.exercise, wrong.says)
    if not wrong.functions:
        assert re.search(rf"\n  reproduce: seed {SEED}, .+, [35] ranks$", str(failed.value))


@pytest.mark.parametrize("exercise", CHECKS)
def test_what_a_rank_alone_shows_names_the_mistake_too(exercise):
    """A check runs its first scenario on one rank before it starts any process; a failure there is reported at once."""
    says = {str(wrong): wrong.says for wrong in wrong_answers(lab_of(exercise), exercise)}
    for name, text in played(exercise, False)[1].items():
        check_message(text, exercise, says[name])


# ---- what happens to a rank that does not come back ----
def test_a_rank_that_leaves_its_process_ends_the_check_with_a_word_about_it():
    def leave(answer) -> None:  # here, so that it travels with its code: no rank has to import this file
        import os

        import torch.distributed as dist

        if dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()

    (seen,) = run_on_ranks([{}], [RankScenario("one leaves", leave)])
    assert "rank" in seen.end and seen.scenario == "one leaves" and not seen.observations
