"""The seal on what the checks rely on: it breaks when something is changed, and names it; kernels leave it whole."""

from __future__ import annotations

import builtins
import importlib.util
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from lab_answers import LABS, ROOT

import utils.checks.core as core
import utils.checks.forbid as forbid
import utils.checks.numbers as numbers
from grading.graded_copy import VERIFY, graded_copy
from grading.lab import find_lab
from grading.seal import SealBroken, _behind, snapshot
from solutions.lab1_roofline.exercises.rates import check_ridge
from utils import runtime
from utils.interpreter import interpret_launches
from utils.kernel_profile import profile_kernel


@pytest.fixture
def seal():
    return snapshot()


@triton.jit
def doubled(x_ptr, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(x_ptr + lanes, 2 * tl.load(x_ptr + lanes, mask=lanes < n), mask=lanes < n)


def anything(*args, **kwargs):
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "named"),
    [
        (core, "fail", "utils.checks.core.fail"),
        (core.CheckFailed, "__init__", "utils.checks.core.CheckFailed.__init__"),
        (core.Exercise, "__str__", "utils.checks.core.Exercise.__str__"),
        (numbers, "check_numbers", "utils.checks.numbers.check_numbers"),
        (torch, "allclose", "torch.allclose"),
        (torch.Tensor, "__sub__", "Tensor.__sub__"),
        (torch.nn.functional, "gelu", "torch.nn.functional.gelu"),
        (tl, "store", "triton.language.store"),
        (builtins, "abs", "builtins.abs"),
        (math, "exp", "math.exp"),
        (random.Random, "random", "random.Random.random"),
        (sys, "exit", "sys.exit"),
    ],
)
def test_a_replaced_function_breaks_it_and_is_named(seal, monkeypatch, owner, name, named):
    monkeypatch.setattr(owner, name, anything)
    with pytest.raises(SealBroken, match=named.replace(".", r"\.")):
        seal.verify()


def test_it_is_whole_again_when_all_is_as_it_was(seal):
    seal.verify()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda patch: patch.setattr(core.fail, "__code__", anything.__code__), "utils.checks.core.fail"),
        (lambda patch: patch.setattr(numbers, "abs", lambda x: 0, raising=False), "utils.checks.numbers.abs"),
        (lambda patch: patch.setitem(forbid.OPERATOR_GROUPS, "softmax", frozenset()), "forbid.OPERATOR_GROUPS"),
        (lambda patch: patch.setitem(sys.modules, "utils.checks.core", math), "sys.modules['utils.checks.core']"),
    ],
    ids=["other code in a function", "a name before a builtin", "a table without an entry", "a module for another"],
)
def test_what_is_changed_within_breaks_it_and_is_named(seal, monkeypatch, change, named):
    change(monkeypatch)
    with pytest.raises(SealBroken, match=re.escape(named)):
        seal.verify()


def test_handlers_and_modes_that_stay_break_it(seal):
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        with pytest.raises(SealBroken, match="SIGALRM"):
            seal.verify()
    finally:
        signal.signal(signal.SIGALRM, before)
    with torch.no_grad(), pytest.raises(SealBroken, match="is_grad_enabled"):
        seal.verify()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(SealBroken, match="default dtype"):
            seal.verify()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_broken_seal_is_shown_without_a_traceback():
    assert SealBroken("a was changed")._render_traceback_() == ["SealBroken: a was changed"]


def test_checks_and_kernels_leave_it_whole(seal, capsys):
    x = torch.ones(8, device=runtime.DEVICE)
    with profile_kernel():
        doubled[(1,)](x, 8, BLOCK=8)
    from solutions.lab1_roofline import attainable_rate, ridge_point, smallest_compute_bound_batch

    check_ridge(ridge_point, attainable_rate, smallest_compute_bound_batch, seed=15)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    seal.verify()
    assert x.sum() == 16


def test_the_names_that_the_interpreter_lends_a_kernels_module_leave_it_whole_and_no_others(tmp_path, monkeypatch):
    """Triton's interpreter puts its own names beside a kernel that it runs for the first time; a check may hold one."""
    path = tmp_path / "with_a_kernel.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef one(x_ptr):\n    tl.store(x_ptr, 1.0)\n"
    )
    spec = importlib.util.spec_from_file_location("utils.with_a_kernel", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "utils.with_a_kernel", module)
    spec.loader.exec_module(module)
    seal, before = snapshot(), len(vars(module))
    x = torch.zeros(1, device=runtime.DEVICE)
    with interpret_launches():
        module.one[(1,)](x)
    assert x.item() == 1 and (len(vars(module)) > before or not runtime.INTERPRET)
    seal.verify()
    module.print = anything
    with pytest.raises(SealBroken, match=r"utils\.with_a_kernel\.print"):
        seal.verify()


def test_an_object_that_refuses_to_be_looked_at_is_kept_as_it_is():
    class Refusing:
        @property
        def __dict__(self):
            raise RuntimeError("not today")

    placeholder = Refusing()
    assert _behind(placeholder) is placeholder


@pytest.mark.thorough
@pytest.mark.parametrize("lab", LABS)
def test_the_checks_of_a_right_submission_leave_it_whole(lab, tmp_path):
    """In a process of its own, as in the class grader: there each kernel runs for the first time."""
    shutil.copytree(ROOT / "solutions" / lab, tmp_path / lab, ignore=shutil.ignore_patterns("exercises", "answers"))
    found = find_lab(lab)
    cells = graded_copy(found, {exercise.number: 7 for exercise in found.exercises}).cells
    lines = [
        line for cell in cells for line in (cell.source, VERIFY if cell.id not in ("prelude-0", "prelude-1") else "")
    ]
    (tmp_path / "graded.py").write_text("\n".join([*lines, "print('whole to the end')"]))
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    ran = subprocess.run(
        [sys.executable, "graded.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert "whole to the end" in ran.stdout, ran.stderr[-3000:]
