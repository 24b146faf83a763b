"""The cells of lectures to write in: unwritten they say so, the folded answer passes, a wrong one is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from lab_places import ROOT

from utils import notebooks
from utils.kernel_profile import profile_kernel
from utils.write_here import compare

#: Cell -> cells before it that its check uses, besides the imports.
USES = {"write-keep-s1-cell": ["b1f2dbc9"]}
#: Cell -> an edit that makes its answer wrong, and what is said then.
WRONG = {
    "write-kahan-cell": (("addend = value + lost", "addend = value"), "case 1: expected 5000, got 2048"),
    "write-keep-s1-cell": (('memory.read("s1")\n', 'memory.read("s1")\n    memory.read("y")\n'), "expected 6, got 7"),
    "write-add-bias-cell": (("mask=column < columns", "mask=None"), "outside of its shape"),
    "write-log-softmax-cell": (('other=float("-inf")', "other=0.0"), "case 1: element (0, 0): expected"),
    "write-running-sum-cell": (("range(0, pid + 1)", "range(0, pid)"), "case 1: element 0: expected 8, got 0"),
    "write-attention-step-cell": (("rescale * o + ", "o + "), "result 1: element (0, 0): expected"),
    "write-key-range-cell": (("min(first + block_m, num_queries)", "first + block_m"), "result 2: expected"),
    "write-swiglu-cell": (
        ("G.chunk(t, 1), U.chunk(t, 1)", "*zip(*(p.chunk(2, 1) for p in gate_up.chunk(t, 1)))"), "result 2: element",
    ),
    "write-forward-seconds-cell": (("max(seconds)", "seconds[-1]"), "case 3: expected 18, got 14"),
}  # fmt: skip
CELLS = {
    cell.id: (path, cell)
    for path in sorted(ROOT.glob("notebooks/[!.]*.ipynb"))
    for cell in notebooks.read(path).cells if "write-here" in notebooks.tags(cell)
}  # fmt: skip


def answer(id_: str) -> str:
    """The code of the folded answer to a cell."""
    path, _ = CELLS[id_]
    (text,) = (c.source for c in notebooks.read(path).cells if c.id == id_.replace("-cell", "-answer"))
    return re.search(r"<details>\n<summary>Answer</summary>\n\n```python\n(.*?)```", text, re.DOTALL)[1]


def said(id_: str, written: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> str:
    """What the check below a cell prints when this is written in it."""
    path, _ = CELLS[id_]
    sources = {cell.id: cell.source for cell in notebooks.code_cells(notebooks.read(path))}
    imports = list(sources)[1]  # the cell after the setup
    parts = [
        sources[imports],
        *(sources[name] for name in USES.get(id_, ())),
        written,
        sources[id_.replace("-cell", "-check")],
    ]
    file = tmp_path / "cells.py"  # a kernel is read from its file
    file.write_text("\n\n\n".join(parts), encoding="utf-8")
    capsys.readouterr()
    exec(compile_(file), {"__name__": "cells"})
    return capsys.readouterr().out.strip().splitlines()[-1]


def compile_(file: Path):
    return compile(file.read_text(encoding="utf-8"), str(file), "exec")


def test_lectures_03_04_06_and_09_have_cells_to_write_in():
    assert set(CELLS) == set(WRONG)
    assert {path.name[:2] for path, _ in CELLS.values()} == {"03", "04", "06", "09"}


@pytest.mark.parametrize("id_", CELLS)
def test_an_unwritten_cell_says_so_its_answer_passes_and_a_wrong_one_is_told(id_, tmp_path, capsys):
    name = re.findall(r"def (\w+)", CELLS[id_][1].source)[-1]
    assert said(id_, CELLS[id_][1].source, tmp_path, capsys) == f"{name}: not written yet"
    assert re.fullmatch(rf"✓ {name}: all \d+ cases agree", said(id_, answer(id_), tmp_path, capsys))
    (before, after), words = WRONG[id_]
    assert before in answer(id_)
    told = said(id_, answer(id_).replace(before, after), tmp_path, capsys)
    assert told.startswith(f"✗ {name}, case ") and words in told


@pytest.mark.parametrize(
    ("got", "expected", "words"),
    [
        (None, 1.0, "it returned None"),
        ((1.0,), (1.0, 2.0), "expected 2 results"),
        (torch.zeros(2), torch.zeros(3), "expected the shape (3,), got (2,)"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "element 1: expected 2, got nan"),
    ],
)
def test_a_difference_is_said_in_words(got, expected, words, capsys):
    compare(lambda: got, lambda: expected, [()])
    assert words in capsys.readouterr().out


def test_an_error_a_missing_launch_and_the_arguments_are_said(capsys):
    compare(lambda n: [][n], lambda n: n, [(3,)])
    compare(lambda x: x, lambda x: x, [(torch.ones(2),)], profiler=profile_kernel)
    assert capsys.readouterr().out.splitlines() == [
        "✗ <lambda>, case 1 (3,): IndexError: list index out of range",
        "✗ <lambda>, case 1: it launched no kernel",
    ]
