"""Submissions that try to get points without solving an exercise, or to harm the grader or each other.

Each is a function that changes an honest submission in a folder, registered by :func:`hostile` with what it tries, what
must come of it and a regular expression of the reason that the student reads. The honest submission is the lab's
solution with one module as it was handed out, the *target*: so a trick that works would raise the score. Where a whole
solution takes long to grade, most of them solve less: one or two modules that lean on no other, or none.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grading.handed_out import init_of, modules_of
from grading.lab import Lab

#: The module of each lab that a hostile submission does not solve.
TARGETS = {
    1: "waves.py",
    2: "gelu.py",
    3: "merge.py",
    4: "memory.py",
    5: "merge.py",
    6: "int4_simple.py",
    7: "consumer.py",
}

#: What a brief submission solves; all other modules are as they were handed out. Lab 7 has one exercise only.
BRIEF: dict[int, tuple[str, ...]] = {
    1: ("warp.py",),
    2: ("bias_relu.py",),
    3: ("flash_forward_simple.py",),
    4: ("collectives.py",),
    5: ("block_manager.py", "scheduler.py"),
    6: ("encoder.py",),
}

#: The modules without which an exercise scores nothing although it is not written in them.
NEEDS = {
    "3.2": ("merge.py",),
    "5.7": ("paged_decode.py", "merge.py"),
    "3.9": ("flash_attention.py", "flash_backward.py", "flash_forward_simple.py"),
}

ALL = "all"

EVERY = (1, 2, 3, 4, 5, 6, 7)
"""All labs."""


@dataclass(frozen=True)
class Hostile:
    """One hostile submission.

    Args:
        name: also the student's id.
        tries: what it tries, in a sentence.
        build: changes the folder of a submission, which holds the lab's files at its top.
        outcomes: the outcomes that the target's exercises may have; every other exercise passes.
        reason: a regular expression that the message of each of them, or a note of the submission, matches.
        labs: the labs that it is for.
        loses: ``"target"``: the target's exercises score nothing; ``"all"``: no exercise does; ``"nothing"``: all
            modules are solved, and nothing else in the submission costs a point.
        module: the module in which the trick is, if that is not the target; it is not solved either.
    """

    name: str
    tries: str
    build: Callable[[Path, Lab], None]
    outcomes: tuple[str, ...]
    reason: str
    labs: tuple[int, ...]
    loses: str
    module: str = ""

    @property
    def general(self) -> bool:
        """Whether it is for every lab and ends before a check of the lab meets code of the submission."""
        never_run = set(self.outcomes) <= {"refused"} or set(self.outcomes) <= {"not attempted"}
        return self.labs == EVERY and never_run


HOSTILE: list[Hostile] = []


def hostile(
    name: str,
    tries: str,
    *outcomes: str,
    reason: str,
    labs: tuple[int, ...] = EVERY,
    loses: str = "target",
    module: str = "",
) -> Callable[[Callable[[Path, Lab], None]], Callable[[Path, Lab], None]]:
    """Register a function as a hostile submission."""

    def register(build: Callable[[Path, Lab], None]) -> Callable[[Path, Lab], None]:
        HOSTILE.append(Hostile(name, tries, build, outcomes, reason, labs, loses, module))
        return build

    return register


def honest(folder: Path, lab: Lab, solved: bool = False, only: Sequence[str] | None = None) -> None:
    """Write the submission that hostile ones start from: solved, but for the target unless ``solved``.

    With ``only`` no more than these modules is solved.
    """
    folder.mkdir(parents=True)
    unsolved = set() if solved else left_open(lab, only)
    for path in modules_of(lab.solution):
        shutil.copyfile(lab.released / path.name if path.name in unsolved else path, folder / path.name)
    (folder / "__init__.py").write_text(init_of(lab.solution), encoding="utf-8")
    shutil.copyfile(lab.notebook, folder / lab.notebook.name)


def left_open(lab: Lab, only: Sequence[str] | None = None) -> set[str]:
    """The modules that :func:`honest` leaves as they were handed out."""
    if only is None:
        return {TARGETS[lab.number]}
    return {path.name for path in modules_of(lab.solution)} - set(only)


def write(folder: Path, lab: Lab, submission: Hostile, only: Sequence[str] | None = None) -> None:
    """Write a hostile submission into a new folder."""
    honest(folder, lab, solved=submission.loses == "nothing", only=only)
    submission.build(folder, lab)


def target(folder: Path, lab: Lab) -> Path:
    """The module that is not solved."""
    return folder / TARGETS[lab.number]


def add(folder: Path, lab: Lab, code: str) -> None:
    """Put code at the end of the target: it runs when the module is imported."""
    path = target(folder, lab)
    path.write_text(path.read_text(encoding="utf-8") + "\n\n" + code.strip("\n") + "\n", encoding="utf-8")


def call(folder: Path, lab: Lab, code: str) -> None:
    """Put the body of a function at the end of the target, which its exercises call instead of working.

    The call stands in the place of each stub that is not in a kernel; where all are, at the top of what launches it.
    """
    path = target(folder, lab)
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    python = [node for node in functions if not any("jit" in ast.unparse(one) for one in node.decorator_list)]
    stubs = [
        number
        for node in python
        for number in range(node.lineno - 1, node.end_lineno)
        if lines[number].strip().startswith("raise NotImplementedError(")
    ]
    for number in stubs:
        lines[number] = re.sub(r"raise .*", "return _trick()", lines[number])
    for node in [] if stubs else reversed(python):
        lines.insert(node.body[0].end_lineno, "    return _trick()")
    body = "\n".join("    " + line for line in code.strip("\n").split("\n"))
    path.write_text("\n".join(lines) + f"\n\ndef _trick():\n{body}\n", encoding="utf-8")


def at_import(name: str, tries: str, code: str, reason: str, *outcomes: str, **options: object) -> None:
    """Register a submission whose target runs ``code`` when it is imported."""
    hostile(name, tries, *(outcomes or ("refused",)), reason=reason, **options)(lambda f, lab: add(f, lab, code))


def at_call(name: str, tries: str, code: str, reason: str, *outcomes: str, **options: object) -> None:
    """Register a submission whose target runs ``code`` in place of each exercise."""
    hostile(name, tries, *(outcomes or ("refused",)), reason=reason, **options)(lambda f, lab: call(f, lab, code))
