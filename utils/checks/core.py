"""What every check of the course shares: the seed that draws its cases, and the shape of a message that teaches.

A check draws its cases at random from a seed that it prints, so that a failure can be reproduced and an answer cannot
be fitted to the cases. A failed check raises :class:`CheckFailed`, an ``AssertionError``, whose text says which
exercise, what differs and where, what usually causes that, and how to see it again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from utils.checks.hidden import Observation, Tolerance
from utils.checks.student_files import LoadedFiles, folders_of, notebook_shell, set_up_autoreload
from utils.stubs import not_written


class CheckFailed(AssertionError):
    """A student's answer differs from what the exercise asks for; the text teaches."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows (IPython asks for it): the text alone, without the check's own frames above it."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lab, declared once; its check is the function that :meth:`checked_by` decorates.

    ::

        GELU = Exercise("2.1", "GeLU", points=10, observe=hidden.gelu, tolerance=Tolerance(absolute=1e-6))


        @GELU.checked_by
        def check_gelu(gelu: Callable, seed: int | None = None) -> None: ...

    Attributes:
        number: as students see it (``"3.2"``).
        title: in a few words (``"forward kernel"``).
        points: of the lab's hundred; 0 for a voluntary exercise.
        builds_on: the exercises that must be solved before this one can be checked.
        observe: what the student's functions give on hidden cases: takes their :meth:`home` and a seed, and returns
            observations by name. A name begins with the function that it is about and says in the student's words what
            was special: ``"gelu of a strided view"``. A student reads it; no input is in it.
        tolerance: how far an observation may be from the solution's.
        tolerances: the beginning of a name -> what holds for it instead (the longest beginning counts).
        module: the module of the lab's package that holds the student's functions; by default the package itself.
        check: the check; None until there is one.
    """

    number: str
    title: str
    points: int = 0
    builds_on: tuple[str, ...] = ()
    observe: Callable[[ModuleType, int], Mapping[str, Observation]] | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    module: str = ""
    check: Callable[..., None] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"exercise {self.number} ({self.title})"

    def checked_by(self, check: Callable[..., None]) -> Callable[..., None]:
        """Decorate the exercise's check: its parameters are the student's functions, by their names, and ``seed``.

        It fails if a file of the lab is not what is loaded, and a notebook shows a place that is still to be filled in
        one line.
        """
        set_up_autoreload()
        loaded = LoadedFiles(check.__module__.partition(".exercises")[0])

        @functools.wraps(check)
        def checked(*functions: Any, **options: Any) -> None:
            if problem := loaded.problem():
                fail(self, problem)
            shell = notebook_shell()
            loaded.refresh(*([shell.user_ns] if shell else []))
            functions = tuple(map(loaded.current, functions))
            try:
                check(*functions, **options)
            except NotImplementedError as error:
                if line := not_written(error, folders_of((*functions, *options.values()))):
                    error._render_traceback_ = lambda: [line]  # what IPython shows instead of a traceback
                raise

        object.__setattr__(self, "check", checked)
        return checked

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the student's functions, in the order in which the check takes them."""
        return tuple(name for name in inspect.signature(self.check).parameters if name != "seed")

    @property
    def grade_id(self) -> str:
        """The id of its check cell in the lab's notebook: ``"check-3-2"``."""
        return "check-" + self.number.replace(".", "-")

    def part(self, title: str) -> Exercise:
        """The same exercise under the title of one of its parts, for the messages about it."""
        return replace(self, title=title)

    def home(self, package: Any) -> Any:
        """What has the student's functions as attributes: the lab's package, or its module that is named for it."""
        inside = self.module and isinstance(package, ModuleType)
        return importlib.import_module(f"{package.__name__}.{self.module}") if inside else package

    def run_check(self, package: Any, seed: int | None = None) -> None:
        """Run the check on the functions of a lab's package (or of anything that has them as attributes)."""
        self.check(*(getattr(self.home(package), name) for name in self.functions), seed=seed)

    def rerun(self, seed: int) -> str:
        """The call that runs the check again on the same cases: ``check_gelu(gelu, seed=7)``."""
        return f"{self.check.__name__}({', '.join(self.functions)}, seed={seed})" if self.check else f"seed={seed}"

    def tolerance_of(self, name: str) -> Tolerance:
        """How far the observation of that name may be from the solution's."""
        fitting = [beginning for beginning in self.tolerances if name.startswith(beginning)]
        return self.tolerances[max(fitting, key=len)] if fitting else self.tolerance


def exercises_of(package: str) -> tuple[Exercise, ...]:
    """Every exercise that a module of ``package`` (``"solutions.lab2_triton_kernels.exercises"``) declares, in order.

    Raises:
        ModuleNotFoundError: there is no such package.
        ValueError: two declarations of one number, or one without a check.
    """
    home = importlib.import_module(package)
    modules = [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(home.__path__)]
    found: dict[str, Exercise] = {}
    for value in (value for module in modules for value in vars(module).values() if isinstance(value, Exercise)):
        if found.setdefault(value.number, value) is not value:
            raise ValueError(f"{package} declares exercise {value.number} twice")
        if value.check is None:
            raise ValueError(f"{package}: {value} has no check: decorate it with @....checked_by")
    return tuple(sorted(found.values(), key=lambda exercise: [int(part) for part in exercise.number.split(".")]))


def draw_seed(seed: int | None = None) -> int:
    """Return ``seed``, or a fresh one from the operating system when it is None.

    Raises:
        TypeError: ``seed`` is neither None nor an integer.
        ValueError: ``seed`` is negative.
    """
    if seed is None:
        return secrets.randbelow(1_000_000)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return seed


def generator(seed: int) -> random.Random:
    """A generator of cases; the same seed gives the same cases on every machine and Python version."""
    return random.Random(seed)


def message(
    exercise: Exercise, headline: str, details: Sequence[str] = (), cause: str = "", reproduce: str = ""
) -> str:
    """Lay out a failed check as the course does everywhere.

    The headline follows the exercise's name; ``details`` are indented lines (first wrong index, the program that
    computed it, a map of tiles); ``cause`` is the likely cause, or what to do, in a sentence; ``reproduce`` is the call
    that draws the same cases again, and the case.
    """
    lines = [f"{exercise}: {headline}", *(f"  {line}" for line in details)]
    if cause:
        lines.append(f"  {cause}")
    if reproduce:
        lines.append(f"  reproduce: {reproduce}")
    return "\n".join(lines)


def classic(cause: str, *numbers: int) -> str:
    """A likely cause, with its number, or its numbers, in the notebook's list of classic wrong answers."""
    return f'{cause}: see "classic wrong answers" {" and ".join(map(str, numbers))}'


def listed(items: Iterable[object], most: int = 8) -> str:
    """The first items, separated by blanks: ``3 1 4 ...``."""
    found = [str(item) for item in items]
    return " ".join(found[:most] + (["..."] if len(found) > most else [])) or "none"


def fail(exercise: Exercise, headline: str, details: Sequence[str] = (), cause: str = "", reproduce: str = "") -> None:
    """Raise :class:`CheckFailed` with the text that :func:`message` lays out."""
    raise CheckFailed(message(exercise, headline, details, cause, reproduce))


def passed(exercise: Exercise, notice: str, seed: int, cases: int) -> None:
    """Print the verdict of a passed check and what to notice in it."""
    print(f"✓ {exercise}: {f'all {cases} cases pass' if cases > 1 else '1 case passes'} (seed {seed})")
    if notice:
        print(f"  {notice}")
