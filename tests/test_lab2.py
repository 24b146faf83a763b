"""Lab 2: the order of tiles, gradients to the bit, a file saved while its notebook is open."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
import torch
from lab_answers import notebook
from nbclient import NotebookClient

from solutions import lab2_triton_kernels as solution
from solutions.lab2_triton_kernels import tuning
from solutions.lab2_triton_kernels.exercises import softmax as softmax_checks
from solutions.lab2_triton_kernels.exercises import tile_order

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "solutions/lab2_triton_kernels"

LAB = "lab2_triton_kernels"
text_of = notebook(LAB).text_of


# ---- the order of tiles ----
def test_the_grouped_order_visits_each_tile_once_and_goes_down_its_groups():
    for tiles_m, tiles_n, group in ((5, 3, 2), (4, 4, 4), (3, 2, 8), (7, 1, 3), (1, 1, 1)):
        places = [tile_order.grouped(pid, tiles_m, tiles_n, group) for pid in range(tiles_m * tiles_n)]
        assert len(set(places)) == tiles_m * tiles_n
        assert [row // group for row, _ in places] == sorted(row // group for row, _ in places)
    assert [tile_order.grouped(pid, 5, 3, 2) for pid in range(7)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
        (2, 0),
    ]


def test_an_order_is_drawn_as_the_notebook_draws_it():
    places = tuple(tile_order.grouped(pid, 5, 3, 2) for pid in range(15))
    order = tile_order.TileOrder(places, 5, 3, 2)
    assert tile_order.cause_of(order) is None
    drawn = "\n".join(order.drawn(places))
    assert drawn == " 0  2  4\n 1  3  5\n 6  8 10\n 7  9 11\n12 13 14"
    assert drawn in text_of("2.8")


@pytest.mark.parametrize("wrong", range(len(tile_order.WRONG_ORDERS)))
def test_each_wrong_order_has_a_cause_of_its_own(wrong):
    follow, cause = tile_order.WRONG_ORDERS[wrong]
    inside = [follow(pid, 5, 3, 2) for pid in range(15)]
    places = tuple(place if place[0] < 5 and place[1] < 3 else None for place in inside)
    assert tile_order.cause_of(tile_order.TileOrder(places, 5, 3, 2)) == cause


def test_the_checks_know_how_long_a_row_softmax_keeps_on_chip():
    longest = softmax_checks.LONGEST_ROW
    assert tuning.softmax_fits(longest, 4) and not tuning.softmax_fits(longest + 1, 4)


def test_gradients_have_the_same_bits_on_each_run():
    source = torch.Generator().manual_seed(20)
    x, weight = torch.randn(300, 40, generator=source), torch.randn(40, generator=source)
    for function in (solution.rms_norm, solution.bias_relu, solution.weighted_sum):
        found = []
        for _ in range(2):
            w = weight.clone().to(solution.gelu(x).device).requires_grad_()
            found.append(torch.autograd.grad(function(x.to(w.device), w).sum(), w)[0])
        assert torch.equal(*found)


@pytest.mark.slow
def test_a_file_that_a_student_saves_is_checked_at_once_without_a_restart(tmp_path):
    """Also one whose kernel function is called by the kernels of other files."""
    lab = tmp_path / "lab2_triton_kernels"
    shutil.copytree(ROOT / "labs/lab2_triton_kernels", lab)
    right = {name: (SOURCES / f"{name}.py").read_text() for name in ("gelu", "grouping", "tiled_matmul", "matmul")}
    for name in ("tiled_matmul", "matmul"):
        (lab / f"{name}.py").write_text(right[name])
    saves = [
        ("gelu", right["gelu"].replace("0.044715", "0.0"), "check-2-1"),
        ("gelu", right["gelu"], "check-2-1"),
        ("grouping", right["grouping"].replace("min(tiles_m - first_tile_m, GROUP_M)", "GROUP_M"), "check-2-8"),
        ("grouping", right["grouping"], "check-2-8"),
    ]
    notebook = nbformat.read(lab / "lab2_triton_kernels.ipynb", as_version=4)
    cells = {cell.id: cell.source for cell in notebook.cells}
    sources = [cells["imports"], cells["check-2-1"], cells["check-2-8"]]
    for number, (name, text, check) in enumerate(saves):
        stamp = 4e9 + number  # as if an editor saved later, whatever the clock's resolution
        save = f"p.write_text({text!r}); os.utime(p, ({stamp}, {stamp}))"
        sources += [f"import os, pathlib; p = pathlib.Path('{name}.py'); {save}", cells[check]]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    NotebookClient(notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(lab)}}).execute()
    said = ["".join(o.get("text", o.get("evalue", "")) for o in cell.get("outputs", ())) for cell in notebook.cells]
    assert said[1].startswith("Lab 2, exercise 2.1: GeLU") and said[2].startswith("Lab 2, exercise 2.8: ")
    assert "the cubic term 0.044715 x^3 is left out" in said[4]
    shown = "".join(notebook.cells[4].outputs[0].traceback)
    assert shown == f"CheckFailed: {said[4]}", "a student sees the message alone, not the check's own frames"
    assert said[6].startswith("✓ exercise 2.1 (GeLU)")
    assert "the last group has fewer rows than GROUP_M" in said[8]
    assert said[10].startswith("✓ exercise 2.8 (grouped order)") and "✓ exercise 2.8 (grouped matmul)" in said[10]
