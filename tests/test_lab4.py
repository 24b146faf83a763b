"""Lab 4: what a check says before it starts a process."""

from __future__ import annotations

import importlib

import pytest

from solutions.lab4_zero.answers import own
from solutions.lab4_zero.exercises.data_parallel import check_distributed_data_parallel
from solutions.lab4_zero.exercises.gradient_shards import check_zero2
from solutions.lab4_zero.exercises.parameter_shards import check_zero3
from utils.checks.core import CheckFailed


def test_an_answer_that_leans_on_pytorchs_own_solution_is_refused(tmp_path, monkeypatch):
    lines = "from torch.nn.parallel import DistributedDataParallel as Ready\n\n\nclass Mine(Ready):\n    pass\n"
    (tmp_path / "leaning_answer.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    answer = importlib.import_module("leaning_answer").Mine
    with pytest.raises(CheckFailed, match=r"leaning_answer.py, line 1: torch.nn.parallel.DistributedDataParallel"):
        check_distributed_data_parallel(answer, seed=1)


def test_the_fast_form_in_the_lab_is_no_answer_to_the_short_one(tmp_path, monkeypatch):
    package = tmp_path / "leaning_lab"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "fully_sharded.py").write_text("class FullyShardedDataParallel:\n    pass\n")
    (package / "zero3.py").write_text(
        "from .fully_sharded import FullyShardedDataParallel\n\n\nclass Zero3(FullyShardedDataParallel):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckFailed, match=r"zero3.py, line 1: fully_sharded.FullyShardedDataParallel"):
        check_zero3(importlib.import_module("leaning_lab.zero3").Zero3, seed=1)


def test_an_exception_is_told_on_a_single_rank_with_the_students_line():
    with pytest.raises(CheckFailed) as failed:
        check_distributed_data_parallel(own.HooksFrozen, seed=1)
    assert "a group of one rank already fails: RuntimeError" in str(failed.value)
    assert "own.py, line" in str(failed.value)


def test_a_call_in_place_of_the_function_is_told():
    with pytest.raises(CheckFailed, match="the check takes Zero2 itself, got 3: leave out the parentheses"):
        check_zero2(3, seed=1)
