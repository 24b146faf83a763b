"""Solutions are cut out of modules and notebooks, and nothing else is touched."""

from __future__ import annotations

import ast
import json

import pytest

from grading.strip import StripError, strip_notebook, strip_source

MODULE = '''"""A module."""

def double(n: int) -> int:
    """Twice n."""
    # hint: add it to itself
    ### BEGIN SOLUTION 3.2: doubling "things"
    if n:
        return n + n
    ### END SOLUTION


TAIL = 1
'''


def notebook(*sources: str, **metadata: object) -> str:
    cells = [
        {
            "cell_type": "code",
            "execution_count": 7,
            "id": f"cell-{i}",
            "metadata": {"tags": ["setup"], "execution": {"iopub.status.busy": "2026"}, "making-llms-fast": {"at": 1}},
            "outputs": [{"output_type": "stream", "name": "stdout", "text": ["42\n"]}],
            "source": source.splitlines(keepends=True),
        }
        for i, source in enumerate(sources)
    ]
    cells.insert(0, {"cell_type": "markdown", "id": "text", "metadata": {}, "source": ["### BEGIN of a chapter"]})
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def test_a_solution_becomes_an_error_that_names_its_exercise():
    stub = strip_source(MODULE, "m.py")
    assert '    raise NotImplementedError("Lab 3, exercise 3.2: doubling \\"things\\"")\n' in stub
    space: dict = {}
    exec(stub, space)
    with pytest.raises(NotImplementedError, match=r'^Lab 3, exercise 3\.2: doubling "things"$'):
        space["double"](2)


def test_functions_of_the_students_own_become_a_comment_so_that_the_module_can_be_imported():
    own = "### BEGIN SOLUTION 3.2: kernels\ndef twice(n):\n    return n + n\n### END SOLUTION\n"
    assert strip_source(f"A = 1\n\n\n{own}B = 2\n", "m.py") == "A = 1\n\n\n# Lab 3, exercise 3.2: kernels\nB = 2\n"


def test_what_stands_outside_the_markers_stays_as_it_is():
    stub = strip_source(MODULE, "m.py")
    before, after = MODULE.split("    ### BEGIN")[0], MODULE.split("### END SOLUTION")[1]
    assert stub.startswith(before) and stub.endswith(after)
    assert ast.get_docstring(ast.parse(stub).body[1]) == "Twice n."


def test_the_lines_of_a_solution_are_gone_and_so_are_the_markers():
    stub = strip_source(MODULE, "m.py")
    assert "n + n" not in stub and "SOLUTION" not in stub


def test_a_module_without_markers_is_not_changed():
    assert strip_source("x = 1\r\ny = 2", "m.py") == "x = 1\r\ny = 2"


def test_hidden_tests_are_cut_out_and_leave_no_trace():
    text = "check(f, seed=1)\n### BEGIN HIDDEN TESTS\nassert f(41) == 42\n### END HIDDEN TESTS\nprint(f)\n"
    assert strip_source(text, "m.py") == "check(f, seed=1)\nprint(f)\n"
    indented = "if x:\n    y\n    ### BEGIN HIDDEN TESTS\n    z\n    ### END HIDDEN TESTS"
    assert strip_source(indented, "m.py") == "if x:\n    y"


def test_several_solutions_in_one_module_each_get_their_own_message():
    stub = strip_source(MODULE + MODULE.replace("3.2", "12.10").replace("double", "twice"), "m.py")
    assert "Lab 3, exercise 3.2:" in stub and "Lab 12, exercise 12.10:" in stub


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a\n### BEGIN SOLUTION 1.1: x\nb\n", r"m\.py:2: BEGIN SOLUTION without an END"),
        ("a\n\n### END SOLUTION\n", r"m\.py:3: END SOLUTION without a BEGIN"),
        (
            "### BEGIN SOLUTION 1.1: x\n### BEGIN SOLUTION 1.2: y\n### END SOLUTION\n### END SOLUTION",
            r"m\.py:2: BEGIN SOLUTION inside the solution that begins on line 1",
        ),
        ("### BEGIN SOLUTION\nb\n### END SOLUTION", r"m\.py:1: write '### BEGIN SOLUTION 1\.2: title'"),
        ("### BEGIN SOLUTION 1: x\nb\n### END SOLUTION", r"m\.py:1: write"),
        ("### BEGIN SOLUTION 1.1: x\nb\n### end solution", r"m\.py:3: a marker stands alone"),
        ("a\n### BEGIN HIDDEN TESTS\nb", r"m\.py:2: BEGIN HIDDEN TESTS without an END HIDDEN TESTS"),
        ("a\n### END HIDDEN TESTS", r"m\.py:2: END HIDDEN TESTS without a BEGIN"),
        (
            "### BEGIN HIDDEN TESTS\n### BEGIN HIDDEN TESTS\n### END HIDDEN TESTS",
            r"m\.py:2: BEGIN HIDDEN TESTS inside the hidden tests that begin on line 1",
        ),
        (
            "### BEGIN SOLUTION 1.1: x\n### BEGIN HIDDEN TESTS\n### END HIDDEN TESTS\n### END SOLUTION",
            r"m\.py:2: BEGIN HIDDEN TESTS inside the solution that begins on line 1",
        ),
        (
            "### BEGIN HIDDEN TESTS\n### END SOLUTION\n### END HIDDEN TESTS",
            r"m\.py:2: END SOLUTION inside the hidden tests that begin on line 1",
        ),
        ("x  ### BEGIN HIDDEN TESTS", r"m\.py:1: a marker stands alone"),
        ("### BEGIN HIDDEN TEST\nb\n### END HIDDEN TEST", r"m\.py:1: a marker stands alone"),
        ("# begin hidden tests\nb\n# end hidden tests", r"m\.py:1: a marker stands alone"),
        ("y = 1  # BEGIN SOLUTION 1.1: x", r"m\.py:1: a marker stands alone"),
    ],
)
def test_markers_that_do_not_pair_up_are_refused_by_file_and_line(text, complaint):
    with pytest.raises(StripError, match=complaint):
        strip_source(text, "m.py")


def test_a_notebook_loses_solutions_outputs_counts_and_traces_of_its_execution():
    source = "x = 1\n### BEGIN SOLUTION 2.4: a cell\nsecret = 6 * 7\n### END SOLUTION\n"
    text = strip_notebook(
        notebook(source, kernelspec={"name": "python3"}, language_info={"version": "3.11.2"}), "n.ipynb"
    )
    cell = json.loads(text)["cells"][1]
    assert "".join(cell["source"]) == 'x = 1\nraise NotImplementedError("Lab 2, exercise 2.4: a cell")\n'
    assert cell["outputs"] == [] and cell["execution_count"] is None and cell["metadata"] == {"tags": ["setup"]}
    assert json.loads(text)["metadata"] == {"kernelspec": {"name": "python3"}}
    assert "secret" not in text and "42" not in text


def test_a_notebook_loses_its_hidden_tests():
    text = strip_notebook(notebook("f(1)\n### BEGIN HIDDEN TESTS\nsecret(2)\n### END HIDDEN TESTS\n"), "n.ipynb")
    assert json.loads(text)["cells"][1]["source"] == ["f(1)\n"]
    assert "secret" not in text and "HIDDEN" not in text


@pytest.mark.parametrize("marker", ["### BEGIN HIDDEN TESTS", "### BEGIN SOLUTION 1.1: x", "### END SOLUTION"])
@pytest.mark.parametrize("kind", ["markdown", "raw"])
def test_a_marker_in_a_cell_that_is_not_code_is_refused(kind, marker):
    broken = json.loads(notebook("x = 1"))
    broken["cells"][0] |= {"cell_type": kind, "source": ["text\n", marker]}
    with pytest.raises(StripError, match=r"n\.ipynb\[cell 0\]: only code cells are stripped"):
        strip_notebook(json.dumps(broken), "n.ipynb")


def test_a_markdown_cell_keeps_its_text():
    assert json.loads(strip_notebook(notebook("1"), "n.ipynb"))["cells"][0]["source"] == ["### BEGIN of a chapter"]


def test_the_same_notebook_gives_the_same_bytes_whatever_the_order_of_its_keys():
    text = notebook("x = 1", kernelspec={"name": "python3", "display_name": "Python 3"})
    turned = json.dumps(dict(reversed(json.loads(text).items())), indent=4)
    assert strip_notebook(text, "n") == strip_notebook(turned, "n") == strip_notebook(strip_notebook(text, "n"), "n")


def test_an_error_in_a_notebook_names_the_cell():
    with pytest.raises(StripError, match=r"n\.ipynb\[cell 2\]:1: END SOLUTION without"):
        strip_notebook(notebook("x = 1", "### END SOLUTION"), "n.ipynb")


@pytest.mark.parametrize("text", ["", "[1, 2]", "{}", "not json"])
def test_a_file_that_is_no_notebook_is_refused_by_name(text):
    with pytest.raises(StripError, match=r"broken\.ipynb: not a notebook"):
        strip_notebook(text, "broken.ipynb")
