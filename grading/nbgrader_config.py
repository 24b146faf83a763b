"""nbgrader's configuration of this course: where things are, and that nbgrader grades nothing.

    cd grades && jupyter lab                                                     (the formgrader is in the menu)
    cd grading && ../.venv/bin/nbgrader release_assignment lab2_triton_kernels --course=ID    (an exchange on a hub)

nbgrader reads the file of this name in the folder that it is started in; `make grade` writes one into its folder.

Releases are made by `make labs`. nbgrader never learns where the solutions are: a release of its own would copy the
modules as they are, solutions included.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets.config import Config

from grading.lab import ROOT


def find_programs() -> None:
    """Put this Python's programs on the path: nbgrader calls `alembic` by its bare name when it makes a gradebook."""
    programs = str(Path(sys.executable).parent)
    if programs not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((programs, os.environ.get("PATH", os.defpath)))


class UseMakeGrade(NbGraderPreprocessor):
    """Stops `nbgrader autograde`, which would run a student's code outside of the sandbox and without hidden tests."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Raise, and say what to do. (A hook could not: nbgrader swallows what a hook raises.)"""
        raise RuntimeError(
            "nbgrader autograde would run this submission outside of the sandbox and without hidden tests. Use "
            "`make grade LAB=... SUBMISSIONS=...`, then open its gradebook with nbgrader."
        )


def course_config(root: Path, **folders: Path) -> Config:
    """How nbgrader works in the folder ``root``, with its gradebook there.

    Args:
        root: the folder that nbgrader is started in.
        **folders: other settings of nbgrader's ``CourseDirectory``, such as ``release_directory``.
    """
    config = Config()
    config.CourseDirectory.root = str(root.resolve())
    config.CourseDirectory.db_url = f"sqlite:///{root.resolve() / 'gradebook.db'}"
    for name, path in folders.items():
        config.CourseDirectory[name] = str(path)
    config.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", ".*"]
    config.Autograde.sanitize_preprocessors = [UseMakeGrade]
    return config


def grades_config(out: Path) -> Config:
    """How nbgrader works in a folder of grades; the formgrader lists the labs of its source directory."""
    return course_config(out, source_directory=ROOT / "labs")


find_programs()
if "get_config" in globals():  # nbgrader reads this file as its configuration
    globals()["get_config"]().merge(course_config(ROOT, release_directory=ROOT / "labs"))
