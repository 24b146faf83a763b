"""Lab 5: stubs fail with their own message, solutions pass, and every wrong answer is caught and named."""

from __future__ import annotations

import importlib
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from lab5_plain_answers import ANSWERS, LAB
from lab5_registry import modules_with
from lab5_wrong_answers import WRONG_ANSWERS
from lab_notebook import LabNotebook, assert_released_notebook_stops_at_each_check
from lab_places import WrongAnswer, forget, labels

import utils.checks.lab5 as checks
from solutions import lab5_serving as solution
from utils.checks.core import CheckFailed
from utils.checks.lab5 import paged, speculation

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = LabNotebook(ROOT / "solutions" / LAB / f"{LAB}.ipynb")
SEED = 14

#: Exercise -> its check, and the functions that the check takes with their modules.
EXERCISES: dict[str, tuple[Callable, dict[str, str]]] = {
    "5.1": (checks.check_kv_cache, {"CachedAttention": "kv_cache", "decode": "kv_cache"}),
    "5.2": (checks.check_block_manager, {"BlockManager": "block_manager", "OutOfBlocks": "block_manager"}),
    "5.3": (
        checks.check_schedulers,
        {"Scheduler": "scheduler", "StaticScheduler": "scheduler", "Request": "request"},
    ),
    "5.4": (
        checks.check_paged_decode,
        {"paged_attention_decode": "paged_decode", "paged_attention_parts": "paged_decode"},
    ),
    "5.5": (checks.check_merge_parts, {"merge_parts": "merge"}),
    "5.6": (
        checks.check_speculative_sampling,
        {
            "speculative_sample": "speculative",
            "residual": "speculative",
            "speculative_generate": "speculative_decoding",
        },
    ),
}
#: Exercises whose checks take more than a moment.
BROAD = ("5.4", "5.5", "5.6")
EACH = [pytest.param(e, marks=[pytest.mark.slow] if e in BROAD else []) for e in EXERCISES]


def run_check(exercise: str, lab: ModuleType, seed: int) -> None:
    """Run an exercise's check on the functions of the whole package."""
    check, names = EXERCISES[exercise]
    check(*(getattr(lab, name) for name in names), seed=seed)


def check_answers(exercise: str, answers: Mapping[str, str], folder: Path, name: str, seed: int = SEED) -> None:
    """Run an exercise's check on modules whose places hold these answers."""
    check, names = EXERCISES[exercise]
    with modules_with(folder, name, answers) as module:
        check(*(getattr(module(home), function) for function, home in names.items()), seed=seed)


def own_answers(exercise: str) -> dict[str, str]:
    """The plain answers of one exercise; the others' places stay stubs."""
    return {label: answer for label, answer in ANSWERS.items() if label.startswith(exercise + ":")}


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
    with pytest.raises(NotImplementedError, match=rf"^Lab 5, exercise {re.escape(exercise)}: \w"):
        run_check(exercise, stub, seed=1)


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if e not in BROAD])  # those: when the notebook is run
def test_the_solution_passes(exercise, capsys):
    run_check(exercise, solution, seed=7)
    assert f"✓ exercise {exercise} (" in capsys.readouterr().out


def test_every_place_has_a_plain_answer():
    assert sorted(ANSWERS) == sorted(label for _, label in labels(LAB))


@pytest.mark.parametrize("exercise", EACH)
def test_a_plain_answer_passes_before_any_other_exercise_is_solved(exercise, tmp_path, capsys):
    check_answers(exercise, own_answers(exercise), tmp_path, f"lab5_plain_{exercise[2:]}", seed=2)
    assert f"✓ exercise {exercise} (" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("label", ANSWERS)
def test_each_place_left_unfilled_stops_its_exercises_check_with_its_own_message(label, tmp_path, monkeypatch):
    monkeypatch.setattr(speculation, "SAMPLES", 50)
    answers = {other: answer for other, answer in ANSWERS.items() if other != label}
    with pytest.raises(NotImplementedError, match=f"^Lab 5, exercise {re.escape(label)}$"):
        check_answers(label.split(":")[0], answers, tmp_path, f"lab5_without_{list(ANSWERS).index(label)}")


# ---- wrong answers ----
def told(wrong: WrongAnswer, folder: Path, seed: int = SEED) -> str:
    """What a wrong answer is told, held against what must be said."""
    name = f"lab5_wrong_{WRONG_ANSWERS.index(wrong)}"
    with pytest.raises(CheckFailed) as failed:
        check_answers(wrong.exercise, wrong.answers(ANSWERS), folder, name, seed)
    text = str(failed.value)
    print(text)
    assert text.startswith(f"exercise {wrong.exercise} (") and f"\n  reproduce: seed {seed}, " in text
    for words in wrong.says:
        assert words in text
    for number in re.findall(r'"classic wrong answers" (\d+)', text):
        assert int(number) in NOTEBOOK.classic_numbers(wrong.exercise), "the message points to a line that is not there"
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


def first_of_each_exercise() -> list:
    first = {exercise: next(wrong for wrong in WRONG_ANSWERS if wrong.exercise == exercise) for exercise in EXERCISES}
    return [pytest.param(first[e], marks=[pytest.mark.slow] if e in BROAD else []) for e in EXERCISES]


@pytest.mark.parametrize("wrong", first_of_each_exercise(), ids=str)
def test_a_frequent_wrong_answer_is_caught_and_its_mistake_named(wrong, tmp_path):
    assert '"classic wrong answers" ' in told(wrong, tmp_path, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=str)
def test_a_wrong_answer_is_caught_and_its_mistake_named(wrong, tmp_path, monkeypatch):
    if "5.6: drop what was rejected" in wrong.edits:
        monkeypatch.setattr(speculation, "SAMPLES", 50)  # the distribution is right: enough for its scenes to pass
    if wrong.exercise == "5.4":  # the first cases already tell; the frequent wrong answer above meets all of them
        drawn = paged.drawn
        monkeypatch.setattr(paged, "drawn", lambda *args, **options: drawn(*args, **options)[:5])
    monkeypatch.setattr(speculation, "_between", drawn_once(speculation._between))
    told(wrong, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one block a tile", "no rescale"])
def test_a_mistake_is_named_with_tiles_as_long_as_a_gpus(name, tmp_path, monkeypatch):
    drawn = paged.drawn
    monkeypatch.setattr(paged, "drawn", lambda *args, **options: drawn(*args, **options)[:1])
    wrong = next(wrong for wrong in WRONG_ANSWERS if (wrong.exercise, wrong.name) == ("5.4", name))
    with modules_with(tmp_path, "lab5_long_tiles", wrong.answers(ANSWERS)) as module:
        decode = module("tuning").decode
        monkeypatch.setattr(module("tuning"), "decode", lambda *args: decode(*args)._replace(n=64))
        paged_decode = module("paged_decode")
        with pytest.raises(CheckFailed, match=rf"{re.escape(wrong.says[0])}[^@]*tile=64"):
            checks.check_paged_decode(
                paged_decode.paged_attention_decode, paged_decode.paged_attention_parts, seed=SEED
            )


def test_every_exercise_has_at_least_eight_wrong_answers_and_every_place_one():
    for exercise in EXERCISES:
        assert sum(wrong.exercise == exercise for wrong in WRONG_ANSWERS) >= 8, exercise
    assert {place for wrong in WRONG_ANSWERS for place in wrong.edits} == set(ANSWERS)
    places = [(tuple(wrong.edits), wrong.name) for wrong in WRONG_ANSWERS]
    assert len(set(places)) == len(places)


# ---- answers that are not the student's own ----
def test_an_answer_that_leans_on_the_courses_cache_is_refused(tmp_path):
    place = "5.1: keep keys and values"
    answers = {**ANSWERS, place: "from utils.serving import KVCache\n" + "pass"}
    with pytest.raises(CheckFailed, match=r"leans on a ready-made solution \(kv_cache.py, line \d+: utils.serving.KVC"):
        check_answers("5.1", answers, tmp_path, "lab5_leaning")


@pytest.mark.slow
def test_the_batched_twin_of_an_exercise_is_no_answer_to_it(tmp_path):
    call = """
        accepted, added = verify(target_probs[None], draft_probs[None], drafted[None], uniforms[None])
        return [*drafted.tolist()[: int(accepted)], int(added)]
        """
    answers = {**ANSWERS, "5.6: accept, replace or add": call}
    with pytest.raises(CheckFailed, match="verify is this exercise for many sequences at once"):
        check_answers("5.6", answers, tmp_path, "lab5_twin")


def test_a_call_in_place_of_the_function_is_told():
    with pytest.raises(CheckFailed, match="the check takes decode itself, got 3: leave out the parentheses"):
        checks.check_kv_cache(solution.CachedAttention, 3, seed=1)


# ---- the notebook ----
text_of, check_cell = NOTEBOOK.text_of, NOTEBOOK.check_cell


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_check_cell_is_graded_locked_and_shows_its_seed(exercise):
    NOTEBOOK.assert_graded_and_locked(exercise)
    check, names = EXERCISES[exercise]
    assert re.fullmatch(rf"{check.__name__}\({', '.join(names)}, seed=\d+\)", check_cell(exercise).source)


def test_the_points_and_minutes_add_up_to_what_the_notebook_promises():
    NOTEBOOK.assert_points_add_up(EXERCISES)
    NOTEBOOK.assert_minutes_add_up(EXERCISES)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_an_exercise_states_what_a_student_needs(exercise):
    text = text_of(exercise)
    for part in (r"Difficulty [●○]{5} · importance [●○]{5}", r"edit `\w+\.py`", "Predict", "<summary>Hint</summary>"):
        assert re.search(part, text), part
    assert "budget" in text
    for name in EXERCISES[exercise][1]:
        assert f"`{name}(" in text or name == "CachedAttention", name
    files = {f"{module}.py" for module, label in labels(LAB) if label.startswith(exercise + ":")}
    assert set(re.findall(r"`(\w+\.py)`", text.split("\n")[2])) == files
    for label in own_answers(exercise):
        assert f"**{label.split(': ')[1]}**" in text, label
    NOTEBOOK.assert_task_check_and_notice_follow(exercise)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_classic_wrong_answers_are_numbered_and_at_least_five(exercise):
    found = NOTEBOOK.classic_numbers(exercise)
    assert found == list(range(1, len(found) + 1)) and len(found) >= 5


@pytest.mark.slow
def test_the_released_notebook_runs_and_every_check_fails_with_its_exercises_message():
    path = ROOT / "labs" / LAB / f"{LAB}.ipynb"
    assert_released_notebook_stops_at_each_check(path, {exercise: exercise for exercise in EXERCISES}, left_out="look-")
