"""Imports run one way and in no circle; and what lint-imports is told in pyproject.toml fails when one does not."""

from __future__ import annotations

import graphlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]


def circle(graph: grimp.ImportGraph) -> list[str]:
    """Modules each of which imports the one before, the first again at the end; empty where there is no circle.

    A module that imports itself is none: a program does, so that what it sends to other processes has a module's name.
    """
    try:
        graphlib.TopologicalSorter(
            {module: graph.find_modules_directly_imported_by(module) - {module} for module in graph.modules}
        ).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_module_leads_back_to_itself():
    # the contract compares neighbours; here a package counts beside its own modules
    assert circle(grimp.build_graph(*PACKAGES, cache_dir=None)) == []


def test_a_package_and_its_own_module_are_a_circle():
    graph = grimp.ImportGraph()
    graph.add_import(importer="utils.plots", imported="utils.plots.show")
    assert circle(graph) == []
    graph.add_import(importer="utils.plots.show", imported="utils.plots")
    assert set(circle(graph)) == {"utils.plots", "utils.plots.show"}


@pytest.mark.parametrize(
    ("files", "broken"),
    [
        ({"tests/one.py": "import grading, website, benchmarks, solutions, utils"}, 0),
        ({"utils/one.py": "import solutions"}, 1),
        ({"solutions/one.py": "def f():\n    import benchmarks"}, 1),
        ({"website/one.py": "import grading"}, 1),
        ({"utils/one.py": "from utils import two", "utils/two.py": "def f():\n    from utils import one"}, 1),
        (
            {
                "utils/one.py": "import utils.deep.two",
                "utils/deep/two.py": "",
                "utils/deep/high.py": "import utils.one",
            },
            1,
        ),
        (
            {
                "grading/one.py": "from grading import two",
                "grading/two.py": "import typing\nif typing.TYPE_CHECKING:\n    from grading.one import One",
            },
            1,
        ),
    ],
)
def test_a_wrong_import_breaks_a_contract(files, broken, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path in [*(f"{package}/__init__.py" for package in PACKAGES), "utils/deep/__init__.py", *files]:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(files.get(path, ""))
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert f"{broken} broken" in done.stdout, done.stdout + done.stderr
    assert done.returncode == broken
