"""No function is longer than a screen, and none takes more arguments than a reader keeps apart.

A line of code is a line of a function, from its ``def`` on, that is neither blank nor a comment nor in its docstring; a
function within counts towards the one around it. Arguments are the parameters of a function or kernel, and what a call
or launch of it (``kernel[grid](...)``) passes, a ``*row`` being one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("utils", "solutions", "benchmarks", "grading", "website")
MOST_LINES = 60
MOST_ARGUMENTS = 25

#: These are as long as they are for a reason: at most eight.
EXCEPTIONS = {
    "benchmarks/shared_prefix.py::measure": "as it was measured; to be split with the next record",
    "benchmarks/truth_cases.py::cases": "a list of sixteen cases, drawn in order from one generator",
    "solutions/capstone_hopper/backward.py::consumer": "a warpgroup's program: one loop over tiles held in registers",
    "solutions/capstone_hopper/backward_wide.py::consumers": "as backward.py's",
    "solutions/capstone_hopper/forward.py::consumer": "as backward.py's",
    "solutions/capstone_hopper/launch.py::hopper_forward_kernel": "twelve constants, each measured by itself",
    "solutions/capstone_hopper/steps/traced.py::consumer": "as forward.py's, with marks in it that a trace is read off",
    "utils/example_kernels/attention.py::flash_attention_forward_kernel": "a kernel takes each stride by itself",
}


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Lines of code of a function, ``lines`` being those of its file."""
    docstring: set[int] = set()
    if ast.get_docstring(function, clean=False) is not None:
        docstring = set(range(function.body[0].lineno, function.body[0].end_lineno + 1))
    own = ((number, lines[number - 1].strip()) for number in range(function.lineno, function.end_lineno + 1))
    return sum(bool(line) and line[0] != "#" and number not in docstring for number, line in own)


def called(call: ast.Call) -> str:
    """Last name of what is called: of ``kernel[grid](...)`` and ``module.kernel(...)`` that of the kernel."""
    callee = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    return ast.unparse(callee).split(".")[-1]


def too_much(text: str) -> Iterator[tuple[str, str, int]]:
    """Of one file (name, "lines" or "arguments", how many), for each time that there are too many."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            arguments = len(given.posonlyargs + given.args + given.kwonlyargs)
            counts = {"lines": code_lines(node, lines), "arguments": arguments}
            name = node.name
        elif isinstance(node, ast.Call):
            counts = {"arguments": len(node.args) + len(node.keywords)}
            name = called(node) if counts["arguments"] > MOST_ARGUMENTS else ""
        else:
            continue
        for kind, most in (("lines", MOST_LINES), ("arguments", MOST_ARGUMENTS)):
            if counts.get(kind, 0) > most:
                yield name, kind, counts[kind]


def test_functions_are_short_and_take_few_arguments():
    found = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for name, kind, count in too_much(path.read_text(encoding="utf-8")):
            counts = found.setdefault(f"{path.relative_to(ROOT).as_posix()}::{name}", {})
            counts[kind] = max(count, counts.get(kind, 0))
    longer = {name: counts for name, counts in found.items() if name not in EXCEPTIONS}
    assert not longer, f"at most {MOST_LINES} lines of code and {MOST_ARGUMENTS} arguments: split by meaning"
    assert EXCEPTIONS.keys() - found.keys() == set(), "need no exception any more"
    assert len(EXCEPTIONS) <= 8


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f():\n" + "    x = 1\n" * 59, []),
        ("@jit\ndef f():\n    '''Two\n    lines.'''\n\n    # said\n" + "    x = 1\n" * 59, []),
        ("async def f():\n    '''One.'''\n" + "    x = 1\n" * 60, [("f", "lines", 61)]),
        ("class C:\n    def f(self):\n        def g():\n" + "            x = 1\n" * 59, [("f", "lines", 61)]),
        (f"f({'x, ' * 24}y=1)", []),
        (f"m.kernel[1, 2]({'x, ' * 24}y=1, *z)", [("kernel", "arguments", 26)]),
        (f"def f({', '.join(f'x{i}' for i in range(20))}, *, {', '.join(f'y{i}' for i in range(6))}): pass",
         [("f", "arguments", 26)]),
    ],
)  # fmt: skip
def test_what_is_counted(text, found):
    assert list(too_much(text)) == found
