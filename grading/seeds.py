"""The hidden seeds of a class: drawn once for each lab from the system's randomness, and kept to themselves.

They are the same for all students and for every run that resumes one; ``grades/seeds.json`` is readable by its owner
only, and no seed is ever written into anything that a student gets.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grading.lab import Lab
from utils.atomic_write import write_atomically

FILE = "seeds.json"


@dataclass(frozen=True)
class Seeds:
    """One seed for the check of each exercise, and one for the scenarios of the lab.

    ``name`` is drawn with them, to tell one drawing from another without showing a seed.
    """

    checks: dict[str, int]
    scenarios: int
    name: str


def seeds_of(out: Path, lab: Lab, *, fresh: bool = False) -> Seeds:
    """The seeds of a lab in the class whose grades are in ``out``; drawn when there are none, or when ``fresh``.

    Raises:
        ValueError: the file of seeds is damaged.
    """
    path = out / FILE
    every: dict[str, Any] = {}
    if path.exists():
        try:
            every = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); remove it and grade again with --fresh-seeds") from error
    kept = {} if fresh else every.get(lab.name, {})
    checks = {e.number: kept.get("checks", {}).get(e.number, _draw()) for e in lab.exercises}
    seeds = Seeds(checks, kept.get("scenarios", _draw()), kept.get("name", secrets.token_hex(16)))
    if every.get(lab.name) != vars(seeds):
        every[lab.name] = vars(seeds)
        write_atomically(path, (json.dumps(every, indent=1) + "\n").encode(), mode=0o600)
    os.chmod(path, 0o600)
    return seeds


def _draw() -> int:
    return 1_000_000 + secrets.randbelow(2**31 - 1_000_000)  # the released checks draw below a million
