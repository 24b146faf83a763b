"""Many answers to an exercise of lab 4, held against the solution's observations on the ranks of one launch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
import torch.distributed as dist
from lab_answers import exercise as exercise_of

from grading.scenarios.compare import difference
from solutions.lab4_zero.exercises.hidden_ranks import RankResult
from utils.checks.core import Exercise

#: What an answer's function is called in the lab -> its module and its name there.
Places = Mapping[str, tuple[str, str]]


def compare_on_rank(
    exercise: str, parts: list[tuple[str, str]], answers: Mapping[str, Places], seed: int
) -> dict[str, str | None]:
    """Of each answer: None if this rank saw what it saw of the first answer, else the first thing that differs.

    An answer is played up to the first part in which some rank sees a difference. All answers share the ranks' default
    group, so none of them may leave a rank behind in a collective.
    """
    plays = [getattr(importlib.import_module(module), name) for module, name in parts]
    right: list[RankResult] = []
    found: dict[str, str | None] = {}
    for name, places in answers.items():
        lab = SimpleNamespace(
            **{key: getattr(importlib.import_module(module), there) for key, (module, there) in places.items()}
        )
        if not right:
            right = [play(lab, seed) for play in plays]
        found[name] = _first_difference(exercise_of(exercise), plays, right, lab, seed)
    return found


def _first_difference(
    exercise: Exercise, plays: list[Callable], right: list[RankResult], lab: SimpleNamespace, seed: int
) -> str | None:
    for play, expected in zip(plays, right, strict=True):
        try:
            reason = difference(exercise, expected, play(lab, seed))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        differs = torch.tensor(float(reason is not None))
        dist.all_reduce(differs)
        if differs:
            return reason or "another rank sees a difference"
    return None
