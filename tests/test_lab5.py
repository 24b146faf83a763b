"""Lab 5: tiles as long as a GPU's, and answers that are not the student's own."""

from __future__ import annotations

import importlib
import re

import pytest
from lab_answers import answers, exercise, exercises, lab_answered, lab_filled, wrong_answer

from grading.lab import find_lab
from solutions import lab5_serving as solution
from solutions.lab5_serving.exercises import engine, paged
from solutions.lab5_serving.exercises.client import Refused, ask
from solutions.lab5_serving.exercises.fake_block_manager import FakeBlockManager
from solutions.lab5_serving.exercises.kv_cache import check_kv_cache
from utils.checks.core import CheckFailed
from utils.serving import MODELS
from utils.serving.server import serving

LAB = "lab5_serving"
SEED = 14
#: Exercises that nothing builds on, and that count no points.
VOLUNTARY = ("5.8", "5.9")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one block a tile", "no rescale"])
def test_a_mistake_is_named_with_tiles_as_long_as_a_gpus(name, tmp_path, monkeypatch):
    drawn = paged.drawn
    monkeypatch.setattr(paged, "drawn", lambda *args, **options: drawn(*args, **options)[:1])
    wrong = wrong_answer("5.4", name)
    with lab_answered(wrong, tmp_path) as lab:
        tuning = importlib.import_module(f"{lab.__name__}.tuning")
        decode = tuning.decode
        monkeypatch.setattr(tuning, "decode", lambda *args: decode(*args)._replace(n=64))
        with pytest.raises(CheckFailed, match=rf"{re.escape(wrong.says[0])}[^@]*tile=64"):
            exercise("5.4").run_check(lab, SEED)


# ---- answers that are not the student's own ----
def check(number: str, places: dict[str, str], folder) -> None:
    """Run an exercise's check on a lab whose places hold these answers."""
    with lab_filled(LAB, folder, places) as lab:
        exercise(number).run_check(lab, SEED)


def test_an_answer_that_leans_on_the_courses_cache_is_refused(tmp_path):
    place = "5.1: keep keys and values"
    places = {**answers(LAB).right, place: "from utils.serving import KVCache\n" + "pass"}
    with pytest.raises(CheckFailed, match=r"uses a ready-made solution \(kv_cache.py, line \d+: utils.serving.KVC"):
        check("5.1", places, tmp_path)


@pytest.mark.slow
def test_the_batched_twin_of_an_exercise_is_no_answer_to_it(tmp_path):
    call = """
        accepted, added = verify(target_probs[None], draft_probs[None], drafted[None], uniforms[None])
        return [*drafted.tolist()[: int(accepted)], int(added)]
        """
    places = {**answers(LAB).right, "5.6: accept, replace or add": call}
    with pytest.raises(CheckFailed, match="verify is this exercise for many sequences at once"):
        check("5.6", places, tmp_path)


def test_a_call_in_place_of_the_function_is_told():
    with pytest.raises(CheckFailed, match="the check takes decode itself, got 3: leave out the parentheses"):
        check_kv_cache(solution.CachedAttention, 3, seed=1)


# ---- what an exercise is tried with ----
def test_the_test_double_of_5_3_has_what_a_scheduler_may_ask_a_block_manager():
    """A student may call any public method: all but those that are about the blocks of a table."""
    of_tables = {"table", "slot", "references", "sequence", "fork", "forget", "check"}
    manager, double = solution.BlockManager(4, 2), FakeBlockManager(4, 2)
    asked = {name for name in dir(manager) if not name.startswith("_")} - of_tables - {"pool", "sequences"}
    assert asked <= set(dir(double))
    double.cached[7] = 5
    assert len(double.cached_prefix([7, 8, 9])[0]) == 1 and double.allocate("a", [7, 8, 9]) == 2


# ---- voluntary exercises ----
def test_the_voluntary_exercises_count_nothing_and_nothing_builds_on_them():
    lab = find_lab(LAB)
    assert [one.number for one in lab.exercises if one.voluntary] == list(VOLUNTARY) and lab.max_score == 100
    assert not {needed for one in exercises(LAB).values() for needed in one.builds_on} & set(VOLUNTARY)


# ---- everything together ----
@pytest.mark.slow
@pytest.mark.parametrize("place", [p for p in answers(LAB).right if p.split(":")[0] not in VOLUNTARY])
def test_a_place_left_unfilled_anywhere_in_the_lab_stops_the_engines_check_with_its_own_line(
    place, tmp_path, monkeypatch
):
    monkeypatch.setattr(engine, "WORKLOADS", engine.WORKLOADS[-1:])
    places = {other: answer for other, answer in answers(LAB).right.items() if other != place}
    number, title = place.split(": ")
    with pytest.raises(NotImplementedError, match=rf"^Lab 5, exercise {re.escape(number)}: {title}$") as raised:
        check("5.7", places, tmp_path)
    assert re.fullmatch(
        rf"{re.escape(number)} is not written yet: \w+\.py, line \d+", *raised.value._render_traceback_()
    )


@pytest.mark.slow
def test_a_client_of_a_lab_whose_kernel_is_not_written_is_told_which(tmp_path):
    places = {place: answer for place, answer in answers(LAB).right.items() if place != "5.5: merging parts"}
    sizes = {"num_blocks": 16, "block_size": 8, "max_batch": 2}
    with lab_filled(LAB, tmp_path, places) as lab:
        server = importlib.import_module(f"{lab.__name__}.__main__").create_server(MODELS / "draft", **sizes)
        with serving(server) as url, pytest.raises(Refused, match=r"Lab 5, exercise 5\.5: merging parts") as refused:
            ask(url, "The whale", max_tokens=3, model="draft")
    assert refused.value._render_traceback_() == [str(refused.value)]
