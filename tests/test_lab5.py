"""Lab 5: tiles as long as a GPU's, and answers that are not the student's own."""

from __future__ import annotations

import importlib
import re

import pytest
from lab_answers import answers, exercise, lab_answered, lab_filled, wrong_answer

from solutions import lab5_serving as solution
from solutions.lab5_serving.exercises import paged
from solutions.lab5_serving.exercises.kv_cache import check_kv_cache
from utils.checks.core import CheckFailed

LAB = "lab5_serving"
SEED = 14


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
