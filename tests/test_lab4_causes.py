"""Lab 4's checks name a cause where its symptom is there, and none where it is not."""

from __future__ import annotations

import pytest
import torch

from solutions.lab4_zero.exercises import optimizer_states, parameter_shards, pipeline_engine
from solutions.lab4_zero.exercises.gradients import _shrunk, judge_steps
from solutions.lab4_zero.exercises.tiny_models import Reference, TinyTraining
from utils.checks.ranks.distributed_check import _cause, _ended, parted
from utils.checks.ranks.scenarios import RankObservation, ScenarioRun
from utils.distributed.calls import Call


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "RuntimeError: The size of tensor a (32) must match the size of tensor b (31) at non-singleton dimension 0",
            True,
        ),
        (
            "RuntimeError: The size of tensor a (43) must match the size of tensor b (3) at non-singleton dimension 0",
            False,
        ),
        ("RuntimeError: invalid tensor size at index 0 (expected (285), got (32))", False),
        ("NameError: name 'world_size' is not defined", False),
    ],
)
def test_padding_is_told_of_sizes_that_differ_by_less_than_the_ranks(said, told):
    scenario = parameter_shards.CHECK.scenarios(3)[0]
    assert ("N does not divide" in _cause(said, (), scenario)) == told


def test_what_is_none_decides_what_is_said_of_it():
    first = optimizer_states.CHECK.scenarios(3)[0]
    said = "TypeError: 'NoneType' object is not subscriptable"
    assert not _cause(said, ("tensor.grad = self.gradient[0:3]",), first)
    assert "has no gradient" in _cause("AttributeError: 'NoneType' object", ("flat(parameter.grad.view(-1))",), first)
    step = pipeline_engine.CHECK.scenarios(3)[0]
    none, line = "AttributeError: 'NoneType' object has no attribute ", ("x.grad.contiguous()",)
    assert "x is None on the first stage" in _cause(none + "'grad'", line, step)
    assert "must require a gradient" in _cause(none + "'contiguous'", line, step)


def test_of_a_loop_that_does_not_end_only_its_lines_are_told():
    problem = _ended(ScenarioRun({}, "rank 0 did not end in 18 s", ("a.py, line 3 in f",)), None)
    assert not problem.cause and problem.details == ("a.py, line 3 in f",)


def test_weight_decay_is_told_of_a_weight_that_shrank():
    weight = torch.tensor([1.0, -2.0, 3.0])
    assert _shrunk(0.99 * weight, weight)
    assert not _shrunk(weight + 0.01, weight) and not _shrunk(1.01 * weight, weight)


def test_a_wrong_scale_is_told_of_steps_along_the_gradient():
    start, mean = {"w": torch.zeros(4)}, {"w": torch.tensor([1.0, -2.0, 3.0, 4.0])}
    reference = Reference(start, [mean], mean, [])
    for step, told in (
        (3 * mean["w"], True),
        (mean["w"] * torch.tensor([1, 0.5, 1, 0.5]), True),
        (mean["w"] + 1, False),
    ):
        assert optimizer_states._other_scale([{"w": -step}], reference, 0.5) == told


def test_elements_that_are_not_stepped_are_not_said_to_have_a_gradient_of_zeros():
    start, mean = {"w": torch.zeros(4)}, {"w": torch.tensor([1.0, -2.0, 3.0, 4.0])}
    reference = Reference(start, [mean] * 2, mean, [])
    problem = judge_steps([start, {"w": torch.full((4,), 7.0)}], reference, {"zeros": 5})
    assert "no piece holds these elements" in problem.cause and problem.cause.endswith("5")


def test_a_norm_may_be_wrong_because_the_gradient_is():
    seen = [RankObservation({"norm": float("inf")})]
    assert "a shard's gradient is not the mean" in optimizer_states._judge_clipped(seen, TinyTraining(3), 1.0).cause


def test_in_an_all_to_all_ranks_may_send_different_sizes_and_in_no_other_collective():
    def called(kind: str, *sizes: int) -> list[list[Call]]:
        return [[Call(kind, size, 4 * size, "float32", "0", (0, 1))] for size in sizes]

    assert parted(called("all_to_all", 5, 7), (0, 1)) == ""
    assert "rank 0 calls all_gather of 5 float32, rank 1 all_gather of 7 float32" in parted(
        called("all_gather", 5, 7), (0, 1)
    )
    apart = parted([called("all_to_all", 5)[0], called("all_gather", 5)[0]], (0, 1))
    assert "rank 0 calls all_to_all of float32, rank 1 all_gather of 5 float32" in apart
