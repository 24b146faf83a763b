"""Lab 1: stubs fail with their own message, solutions pass, and every wrong answer is caught and named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from lab1_wrong_answers import WRONG_ANSWERS, WrongAnswer

import utils.checks.lab1 as checks
from solutions import lab1_roofline as solution
from utils.checks.core import CheckFailed

ROOT = Path(__file__).resolve().parent.parent

#: Exercise -> its check and the names of the functions that the check takes, in order.
EXERCISES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "1.1": (checks.check_dot_product, ("dot_product_flops", "dot_product_bytes")),
    "1.2": (checks.check_matmul, ("matmul_flops", "matmul_bytes")),
    "1.3": (checks.check_relu_softmax, ("relu_flops", "relu_bytes", "softmax_flops", "softmax_bytes")),
    "1.4": (checks.check_attention, ("attention_flops", "attention_bytes")),
    "1.5": (checks.check_ridge, ("ridge_point", "attainable_rate", "smallest_compute_bound_batch")),
    "1.7": (checks.check_sectors, ("sectors_touched", "useful_fraction")),
    "1.8": (checks.check_waves, ("num_tiles", "num_waves", "last_wave_utilisation", "tiled_matmul_seconds")),
    "1.9": (checks.check_divergence, ("warp_cycles", "wasted_lane_cycles")),
    "1.10": (checks.check_layer, ("layer_flops", "shares")),
}


def run_check(exercise: str, package: object, seed: int, **replaced: Callable) -> None:
    """Run an exercise's check on a package's functions, some of them replaced."""
    check, names = EXERCISES[exercise]
    check(*(replaced.get(name, getattr(package, name)) for name in names), seed=seed)


@pytest.fixture(scope="module")
def stub() -> Iterator[ModuleType]:
    """The released package, imported by its own name as the notebook imports it."""
    sys.path.insert(0, str(ROOT / "labs"))
    try:
        yield importlib.import_module("lab1_roofline")
    finally:
        sys.path.remove(str(ROOT / "labs"))
        for name in [name for name in sys.modules if name.split(".")[0] == "lab1_roofline"]:
            del sys.modules[name]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_stub_fails_with_its_own_message(exercise, stub):
    with pytest.raises(NotImplementedError, match=rf"^Lab 1, exercise {exercise.replace('.', '[.]')}: \w"):
        run_check(exercise, stub, seed=1)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_each_function_of_the_stub_fails_with_the_message_of_its_exercise(exercise, stub):
    for name in EXERCISES[exercise][1]:
        with pytest.raises(NotImplementedError, match=rf"^Lab 1, exercise {exercise.replace('.', '[.]')}: \w"):
            run_check(exercise, solution, seed=1, **{name: getattr(stub, name)})


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_passes_on_twenty_seeds(exercise, capsys):
    for seed in range(1000, 1020):
        run_check(exercise, solution, seed=seed)
    assert capsys.readouterr().out.count("✓ exercise " + exercise) == 20


@pytest.mark.parametrize("wrong", WRONG_ANSWERS, ids=lambda wrong: f"{wrong.exercise}-{wrong.function.__name__}")
def test_a_wrong_answer_is_caught_and_its_mistake_named(wrong: WrongAnswer):
    for seed in (3, 14, 159):
        with pytest.raises(CheckFailed) as failed:
            run_check(wrong.exercise, solution, seed=seed, **{wrong.replaces: wrong.function})
        text = str(failed.value)
        assert text.startswith(f"exercise {wrong.exercise} (") and wrong.replaces in text
        for words in wrong.says:
            assert words in text, text


def test_every_exercise_has_at_least_four_wrong_answers():
    for exercise in EXERCISES:
        assert sum(wrong.exercise == exercise for wrong in WRONG_ANSWERS) >= 4, exercise
