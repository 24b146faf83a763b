"""nbgrader's configuration of this course, for its command line and for the grader.

    cd grading && nbgrader generate_assignment lab2_triton_kernels     (what `make labs` does)
    cd grades && jupyter lab                                           (the formgrader is in the menu)

nbgrader reads the file of this name in the folder that it is started in; `make grade` writes one into its folder.

Each setting that closes one of nbgrader's traps says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nbgrader.preprocessors import (
    AssignLatePenalties,
    CheckCellMetadata,
    ClearOutput,
    ComputeChecksums,
    DeduplicateIds,
    LimitOutput,
    OverwriteCells,
    OverwriteKernelspec,
    SaveAutoGrades,
    SaveCells,
)
from traitlets.config import Config

from grading.lab import ROOT, lab_names
from grading.preprocessors import GradeCells, ReleaseModules, ReleaseNotebook, RestoreCells, UseMakeGrade

IGNORED = [".ipynb_checkpoints", "*.pyc", "__pycache__", ".*"]


def course_config(root: Path, gradebook: Path | None = None, course: Path = ROOT) -> Config:
    """How nbgrader works in the folder ``root``, with its gradebook there; releases are made from ``course``.

    With ``root`` the repository itself, ``nbgrader generate_assignment`` writes ``labs/`` from ``solutions/``.
    """
    config = Config()
    config.CourseDirectory.root = str(root.resolve())
    config.CourseDirectory.db_url = f"sqlite:///{(gradebook or root / 'gradebook.db').resolve()}"
    config.CourseDirectory.source_directory = str((course / "solutions").resolve())
    config.CourseDirectory.release_directory = str((root / "labs").resolve())
    config.CourseDirectory.ignore = IGNORED
    # trap: files beside the notebook are copied verbatim, solutions and all; so none is, and a preprocessor writes them
    config.GenerateAssignmentApp.CourseDirectory.ignore = [*IGNORED, "*.py"]
    config.GenerateAssignment.preprocessors = [
        *(ClearOutput, CheckCellMetadata, ComputeChecksums, SaveCells, ReleaseModules, ReleaseNotebook)
    ]
    config.Autograde.sanitize_preprocessors = [
        *(ClearOutput, RestoreCells, DeduplicateIds, OverwriteKernelspec, OverwriteCells, CheckCellMetadata)
    ]
    config.Autograde.autograde_preprocessors = [UseMakeGrade]
    # trap: autograde writes the course's files over the student's, which makes every submission right
    config.Autograde.exclude_overwriting = {name: _files(course / "solutions" / name) for name in lab_names(course)}
    # trap: a deleted check cell is not graded at all
    config.OverwriteCells.add_missing_cells = True
    return config


def graders(grade_cells: GradeCells) -> list:
    """What takes the place of nbgrader's own execution, once a submission's grading is at hand."""
    return [grade_cells, LimitOutput, SaveAutoGrades, AssignLatePenalties, CheckCellMetadata]


def _files(folder: Path) -> list[str]:
    files: Iterable[Path] = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(folder).as_posix() for path in files)


if "get_config" in globals():  # nbgrader reads this file as its configuration
    globals()["get_config"]().merge(course_config(ROOT))
