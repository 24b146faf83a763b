"""The hidden seeds of a class: each student has their own, derived from a secret that is drawn once for each lab.

A seed is an HMAC of the student's id (RFC 2104, with SHA-256), so a run that resumes another gives each student the
same seeds, whoever else is graded, and nobody without the secret can compute any of them. ``grades/seeds.json`` holds
the secrets and is readable by its owner only. Neither a secret nor a seed is ever written into anything that a student
gets.

The hidden scenarios have :data:`INPUT_SETS` seeds for the class, since the solution has to run on each: the secret
decides which of them a student gets.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grading.lab import Lab
from utils.atomic_write import write_atomically

FILE = "seeds.json"
#: Seeds of a lab's scenarios in one class. A run of the solution takes about half as long as grading a submission.
INPUT_SETS = 16
LEAST = 1_000_000  # the released checks draw below a million


@dataclass(frozen=True)
class Seeds:
    """A student's seeds: one for the check of each exercise, and one for the scenarios of the lab.

    ``input_set`` (0 to ``INPUT_SETS - 1``) is the same for the students who share a seed of the scenarios. ``name``
    tells these seeds from all others without showing one.
    """

    checks: dict[str, int]
    scenarios: int
    input_set: int
    name: str


@dataclass(frozen=True)
class ClassSeeds:
    """The seeds of everybody in a class, for the exercises ``numbers`` of one lab; ``secret`` is in hexadecimal."""

    secret: str = field(repr=False)
    numbers: tuple[str, ...]

    def of(self, student: str | None) -> Seeds:
        """A student's seeds; those of None belong to no student, for what is run once for the whole class."""
        input_set = int.from_bytes(self._derive("input set", student)) % INPUT_SETS
        checks = {number: self._seed("check", number, student) for number in self.numbers}
        return Seeds(checks, self._seed("scenarios", input_set), input_set, self._derive("name", student).hex())

    @property
    def name(self) -> str:
        """Tells the seeds of this class from those of another without showing one."""
        return self.of(None).name

    def _seed(self, *what: str | int | None) -> int:
        return LEAST + int.from_bytes(self._derive(*what)) % (2**31 - LEAST)

    def _derive(self, *what: str | int | None) -> bytes:
        return hmac.digest(self.secret.encode(), json.dumps(what).encode(), "sha256")


def seeds_of(out: Path, lab: Lab, *, fresh: bool = False) -> ClassSeeds:
    """The seeds of a lab in the class whose grades are in ``out``; drawn when there are none, or when ``fresh``.

    Raises:
        ValueError: the file of secrets is damaged.
    """
    path = out / FILE
    every: dict[str, Any] = {}
    if path.exists():
        try:
            every = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(every, dict):
                raise ValueError("it must hold an object with a secret for each lab")
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); remove it and grade again with --fresh-seeds") from error
    if fresh or not isinstance(every.get(lab.name), str):
        every[lab.name] = secrets.token_hex(32)
        write_atomically(path, (json.dumps(every, indent=1) + "\n").encode(), mode=0o600)
    os.chmod(path, 0o600)
    return ClassSeeds(every[lab.name], tuple(exercise.number for exercise in lab.exercises))
