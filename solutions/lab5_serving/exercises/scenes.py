"""Checks of this lab that play scenes with an answer: what a scene is, and what is told of one that goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from utils.checks.attempt import TooLong, deadline
from utils.checks.core import Exercise, draw_seed, fail, passed
from utils.checks.library_use import find_library_use
from utils.checks.problem import Problem
from utils.checks.trials import students_frame

SCENE_SECONDS = 20.0
#: The course's own answers, which no answer may call.
OURS = ("solutions", "utils.checks")


class Mistaken(Exception):
    """Raised by a judge in the middle of a scene: what it has found."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.headline)
        self.problem = problem


def mistaken(headline: str, cause: str = "", *details: str) -> None:
    """End the scene with what a judge has found.

    Raises:
        Mistaken: always.
    """
    raise Mistaken(Problem(headline, cause, details))


@dataclass(frozen=True)
class Scene:
    """Something that is played with an answer, several times with other numbers.

    Attributes:
        name: what a message calls it.
        play: given the answer's functions by name and a generator; raises :class:`Mistaken` if something is wrong.
        raised: words of an exception -> its likely cause, the first that fits.
        times: how often it is played.
    """

    name: str
    play: Callable[[Mapping[str, Callable], random.Random], None]
    raised: Mapping[str, str] = field(default_factory=dict)
    times: int = 1


def check_scenes(
    exercise: Exercise,
    answer: Mapping[str, Callable],
    scenes: Sequence[Scene],
    seed: int | None,
    notice: str,
    ready_made: Sequence[str] = (),
) -> None:
    """Hold an answer against all scenes and print the verdict.

    Args:
        exercise: its number and title.
        answer: the student's functions and classes, by name.
        scenes: in the order in which a student should meet them.
        seed: draws the scenes' numbers; a fresh one by default.
        notice: what to notice when it passes.
        ready_made: modules and functions that the answer's source may not name, besides :data:`OURS`.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
        NotImplementedError: a place is not filled; its own message.
    """
    seed = draw_seed(seed)
    for name, function in answer.items():
        if not callable(function):
            fail(exercise, f"the check takes {name} itself, got {function!r}: leave out the parentheses")
    if found := find_library_use(list(answer.values()), (*OURS, *ready_made)):
        fail(exercise, f"the answer leans on a ready-made solution ({found[0]})", cause="the exercise is to write it")
    for scene in scenes:
        for turn in range(scene.times):
            _play(exercise, answer, scene, turn, seed)
    passed(exercise, notice, seed, sum(scene.times for scene in scenes))


def _play(exercise: Exercise, answer: Mapping[str, Callable], scene: Scene, turn: int, seed: int) -> None:
    reproduce = f'seed {seed}, scene "{scene.name}"' + (f", turn {turn + 1} of {scene.times}" if turn else "")
    try:
        with deadline(SCENE_SECONDS):
            scene.play(answer, random.Random(f"{seed}/{scene.name}/{turn}"))
    except (NotImplementedError, KeyboardInterrupt):
        raise
    except Mistaken as found:
        problem = found.problem
        fail(exercise, problem.headline, problem.details, problem.cause, reproduce)
    except TooLong:
        cause = "a loop does not end, or far more is computed than the exercise needs"
        fail(exercise, f"the scene did not end in {SCENE_SECONDS:.0f} s", cause=cause, reproduce=reproduce)
    except Exception as error:
        _tell(exercise, error, scene, reproduce)


def _tell(exercise: Exercise, error: Exception, scene: Scene, reproduce: str) -> None:
    """Fail with an exception that the answer raised, and the student's line that it came from."""
    frame = students_frame(error)
    lines = [f"in {frame.name}, line {frame.lineno}: {frame.line}"] if frame else []
    said = f"{type(error).__name__}: {error}"
    cause = next((cause for words, cause in scene.raised.items() if words in said), "")
    headline, *more = said.splitlines() or [said]
    try:
        fail(exercise, headline, [*more[:4], *lines], cause, reproduce)
    except AssertionError as told:
        raise told from error
