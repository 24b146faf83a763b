"""The points at which the course replaces something in Triton: few, in one place, and only while Triton needs them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import unpatched_interpreter

from utils import runtime
from utils.interpreter.patches import POINTS

import triton  # isort: skip

pytestmark = pytest.mark.compat

ROOT = Path(__file__).parents[1]
INTERNALS = re.compile(r"triton\.(runtime|compiler|backends|_C|language\.(core|semantic|standard))\b")
#: Repairs that make the interpreter faster, or spare memory that only a GPU session copies: nothing is wrong without.
ONLY_FASTER = {
    "overflow checks that nobody reads", "slow types", "slow device functions", "copies of huge allocations",
}  # fmt: skip


def places(path: Path) -> list[int]:
    """Lines of a file that import Triton's internals, or that state a point."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Point":
                found.add(node.lineno)
            continue
        if any(map(INTERNALS.match, names)):
            found.add(node.lineno)
    return sorted(found)


def test_the_interpreters_package_touches_triton_in_forty_lines_of_one_table_and_one_module():
    where = {path.name: len(lines) for path in (ROOT / "utils/interpreter").glob("*.py") if (lines := places(path))}
    assert set(where) == {"patches.py", "upstream.py"} and where["patches.py"] == len(POINTS)
    assert sum(where.values()) <= 40


def test_each_point_names_an_issue_or_change_of_triton_by_its_number():
    assert all(re.fullmatch(r"(#\d+)?", point.upstream) for point in POINTS)
    assert all(re.fullmatch(r"(\d+\.\d+)?", point.until) for point in POINTS)
    assert all(point.upstream for point in POINTS if point.until)  # what Triton has mended, it has mended somewhere


def test_every_repair_of_what_is_wrong_is_tried():
    tried = {name.split(": ")[0] for name in unpatched_interpreter.TRIED}
    assert tried == {point.repair for point in POINTS} - ONLY_FASTER - {""}


@pytest.mark.skipif(not runtime.INTERPRET, reason="kernels are compiled here")
@pytest.mark.parametrize("name", unpatched_interpreter.TRIED)
def test_with_its_repair_the_interpreter_does_it_right(name):
    assert unpatched_interpreter.works(unpatched_interpreter.TRIED[name])


@pytest.mark.slow
def test_a_repair_is_made_only_where_triton_needs_it():
    """On a newer Triton this names what it no longer needs: give such a point its ``until``, or take it out."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(unpatched_interpreter.__file__)
    done = subprocess.run([sys.executable, "-P", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    right = json.loads(done.stdout.splitlines()[-1])
    needed = {
        name: any(p.needed for p in POINTS if p.repair == repair and first in p.names.split())
        for name, (repair, first) in {name: name.split(": ") for name in right}.items()
    }
    unneeded = sorted(name for name in right if right[name] and needed[name])
    missing = sorted(name for name in right if not right[name] and not needed[name])
    assert not unneeded, f"Triton {triton.__version__} does this right by itself: {', '.join(unneeded)}"
    assert not missing, f"Triton {triton.__version__} needs these after all: {', '.join(missing)}"
