"""The labs of the course with answers in them, for every test that holds checks to right and wrong ones."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from lab_notebook import LabNotebook
from lab_places import ROOT, lab_with

from grading.lab import lab_names
from grading.strip import places
from utils.checks.answers import Answers, EditedAnswer, WrongAnswer, answers_of
from utils.checks.core import Exercise, exercises_of

LABS = lab_names()
CLASSIC = re.compile(r'"classic wrong answers" \d+')
_numbers = itertools.count()


def lab_of(number: str) -> str:
    """The lab of an exercise: ``"lab2_triton_kernels"`` for ``"2.1"``."""
    return next(lab for lab in LABS if lab.startswith(f"lab{number.split('.')[0]}_"))


@functools.cache
def exercises(lab: str) -> dict[str, Exercise]:
    """The exercises of a lab by their numbers, in order."""
    return {exercise.number: exercise for exercise in exercises_of(f"solutions.{lab}.exercises")}


def exercise(number: str) -> Exercise:
    """The exercise of that number."""
    return exercises(lab_of(number))[number]


@functools.cache
def answers(lab: str) -> Answers:
    """Right and wrong answers to a lab's exercises."""
    return answers_of(f"solutions.{lab}.answers")


@functools.cache
def edited(lab: str) -> dict[str, str]:
    """What a lab's wrong answers are edits of, by place: its right answers, and in lab 1 the solution's own lines."""
    if lab == LABS[0]:
        return {place.label: place.text for place in places(ROOT / "solutions" / lab)}
    return answers(lab).right


def wrong_answers(lab: str, number: str = "") -> list[WrongAnswer]:
    """The wrong answers to a lab's exercises, or to one of them."""
    return [wrong for wrong in answers(lab).wrong_answers if number in ("", wrong.exercise)]


def unusual_answers(lab: str, number: str = "") -> list[EditedAnswer]:
    """Right answers that few would write, to a lab's exercises or to one of them."""
    return [answer for answer in answers(lab).unusual if number in ("", answer.exercise)]


#: Their checks run many kernels, or ranks: `make test` tries one wrong answer for each of a few classic numbers.
HEAVY = (
    *("2.2", "2.3", "2.4", "2.6", "2.7", "2.8", "3.2", "3.3", "3.4", "3.6", "3.7", "3.8", "3.9", "3.10"),
    *("4.1", "4.3", "4.4", "4.5", "4.6", "4.7", "4.9", "4.10", "5.4", "5.6", "6.6", "6.8"),
)


FEW = 2


def classic_number(wrong: WrongAnswer) -> str:
    """What the message must say of the classic wrong answers; empty where it names none of them."""
    return next(filter(CLASSIC.search, wrong.says), "")


@functools.cache
def _first_of_few_numbers(number: str) -> set[str]:
    """Names of the wrong answers that are the first to be told a classic number, or none: the first few of them."""
    first: dict[str, str] = {}
    for wrong in wrong_answers(lab_of(number), number):
        first.setdefault(classic_number(wrong), str(wrong))
    return set(list(first.values())[:FEW])


def is_left_to_thorough(wrong: WrongAnswer) -> bool:
    """Whether a wrong answer to a heavy exercise is one that `make test-thorough` alone tries."""
    return wrong.exercise in HEAVY and str(wrong) not in _first_of_few_numbers(wrong.exercise)


def tried(wrong_answers: Iterable[WrongAnswer], *marks: pytest.MarkDecorator) -> list:
    """Parameters of a test, with these marks; some of heavy exercises belong to the thorough tests."""
    return [
        pytest.param(
            wrong, id=str(wrong), marks=(*marks, pytest.mark.thorough) if is_left_to_thorough(wrong) else marks
        )
        for wrong in wrong_answers
    ]


def wrong_answer(number: str, name: str) -> WrongAnswer:
    """The wrong answer of that name to an exercise."""
    (found,) = (wrong for wrong in wrong_answers(lab_of(number), number) if wrong.name == name)
    return found


def solution(lab: str) -> ModuleType:
    """The lab as the course solves it."""
    return importlib.import_module(f"solutions.{lab}")


@functools.cache
def notebook(lab: str) -> LabNotebook:
    """The lab's notebook with its solutions."""
    return LabNotebook(ROOT / "solutions" / lab / f"{lab}.ipynb")


def right_for(number: str) -> dict[str, str]:
    """The right answers to an exercise and to those that it builds on, by place."""
    filled = (number, *exercise(number).builds_on)
    return {label: text for label, text in answers(lab_of(number)).right.items() if label.split(":")[0] in filled}


@contextmanager
def lab_filled(lab: str, folder: Path, places: Mapping[str, str]) -> Iterator[ModuleType]:
    """A lab as a package of a name of its own, its places filled with these answers."""
    with lab_with(lab, folder, f"{lab}_answered_{next(_numbers)}", places) as package:
        yield package


@contextmanager
def lab_answered(wrong: WrongAnswer, folder: Path) -> Iterator[object]:
    """What has the functions of a lab, among them those of a wrong answer."""
    lab = lab_of(wrong.exercise)
    if wrong.functions:
        yield SimpleNamespace(**{**vars(exercise(wrong.exercise).home(solution(lab))), **wrong.functions})
    else:
        with lab_filled(lab, folder, wrong.filled(edited(lab))) as package:
            yield package
