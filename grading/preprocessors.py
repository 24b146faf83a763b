"""nbgrader's preprocessors of this course: how a release is made, and how a submission is graded.

nbgrader swallows what a hook raises, so nothing here is a hook: a preprocessor that fails stops the conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Any as AnyTrait
from traitlets import Unicode

from grading.release import generate
from grading.results import Verdict
from grading.strip import strip_notebook


class ReleaseModules(NbGraderPreprocessor):
    """Writes a lab's other files into the release, without solutions.

    nbgrader copies them as they are, solutions included; the configuration tells it to copy none (``ignore``).
    """

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Write the files; the notebook passes through."""
        course = CourseDirectory(config=self.config)
        name = resources["nbgrader"]["assignment"]
        release = Path(course.format_path(course.release_directory, ".", name))
        source = Path(course.format_path(course.source_directory, ".", name))
        for path, content in generate(source.parent).items():
            lab, _, file = path.partition("/")
            if lab == name and not file.endswith(".ipynb"):
                (release / file).parent.mkdir(parents=True, exist_ok=True)
                (release / file).write_bytes(content)
        return nb, resources


class ReleaseNotebook(NbGraderPreprocessor):
    """Cuts the solutions out of the notebook by the function that ``make labs`` uses: the same bytes come out."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Return the notebook as students get it."""
        for cell in nb.cells:
            if "nbgrader" in cell.metadata:
                for noted in ("checksum", "cell_type"):  # both are in the gradebook, where they cannot be edited
                    cell.metadata.nbgrader.pop(noted, None)
        name = resources["nbgrader"]["notebook"]
        return nbformat.reads(strip_notebook(nbformat.writes(nb), f"{name}.ipynb"), as_version=4), resources


class UseMakeGrade(NbGraderPreprocessor):
    """Stops `nbgrader autograde`, which would run a student's code unprotected and without hidden tests."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Raise, and say what to do."""
        raise RuntimeError(
            "nbgrader autograde would run this submission outside of the sandbox and without hidden tests. Use "
            "`make grade LAB=... SUBMISSIONS=...`, then open its gradebook with nbgrader."
        )


class RestoreCells(NbGraderPreprocessor):
    """Puts the released notebook in the place of the submitted one, whatever was done to that.

    Deleted, duplicated, renamed and edited check cells, points in the metadata, code in other cells: none of it
    reaches the grading.
    """

    released = Unicode(help="The released notebook.").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Return the released notebook."""
        return nbformat.read(self.released, as_version=4), resources


class GradeCells(NbGraderPreprocessor):
    """Has the submission graded and writes each verdict into its check cell, in the one form that nbgrader must read.

    nbgrader takes a cell's score from its outputs: an error or any text on stderr is 0, a number is partial credit,
    anything else is full marks. So a student's outputs never stay: an exercise that passed leaves one text on stdout,
    any other one error with its message. Sources keep the released seeds, so that no hidden one is in nbgrader's files.
    """

    grade = AnyTrait(help="Called without arguments; returns the verdict of each exercise by its grade_id.")

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        """Grade, and write the verdicts into ``nb``."""
        grade: Callable[[], Mapping[str, Verdict]] = self.grade
        verdicts = grade()
        for cell in nb.cells:
            grading = cell.metadata.get("nbgrader", {})
            if grading.get("grade"):
                cell.outputs = [_output(verdicts[grading["grade_id"]])]
        return nb, resources


def _output(verdict: Verdict) -> NotebookNode:
    if verdict.passed:
        return nbformat.v4.new_output("stream", name="stdout", text="passed\n")
    name, text = verdict.outcome.title().replace(" ", ""), verdict.message or verdict.outcome
    return nbformat.v4.new_output("error", ename=name, evalue=text, traceback=text.split("\n"))
