"""Tensor and pipeline parallelism, and meshes of two parallelisms, against one process (lab 4).

Each world size is launched once and runs all cases; the tests read what the ranks brought back.
"""

from __future__ import annotations

import functools

import pytest
import torch
from lab4_tensor_pipeline_counts import Found, count_tensor_data, everything
from lab4_tensor_pipeline_runs import (
    MESHES,
    PIPELINE,
    ROWS,
    SMALL,
    TENSOR,
    Case,
    one_process,
)
from parallel_training import Run, assert_same_run, mean_losses
from slow_machine_launch import launch


@functools.cache
def on(world_size: int) -> list[Found]:
    """What the ranks of one launch brought back."""
    return launch(everything, world_size=world_size)


@pytest.fixture(
    scope="module",
    params=[2, *(pytest.param(size, marks=pytest.mark.thorough) for size in (3, 4))],
    ids="{} ranks".format,
)
def found(request: pytest.FixtureRequest) -> list[Found]:
    return on(request.param)


def with_tied_head(run: Run) -> Run:
    """The reference with the names that the last stage's parameters have."""
    named = {"head.weight": run.parameters["embedding.weight"], **run.parameters}
    return Run(run.losses, named, run.norms)


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSOR)
def test_a_tensor_parallel_gpt_trains_as_one_process_does(found: list[Found], name: str) -> None:
    expected, runs = one_process(TENSOR[name]), [rank.tensor[name] for rank in found]
    assert all(run.parameters.keys() == expected.parameters.keys() for run in runs)
    assert_same_run(runs, expected, *tolerance_of(TENSOR[name]))
    for run in runs[1:]:  # what is whole everywhere stays the same everywhere, bit for bit
        assert run.losses == runs[0].losses
        assert all(torch.equal(run.parameters[key], runs[0].parameters[key]) for key in expected.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINE)
def test_a_pipeline_trains_as_one_process_does(found: list[Found], name: str) -> None:
    expected, runs = with_tied_head(one_process(PIPELINE[name])), [rank.pipeline[name] for rank in found]
    assert {key for run in runs for key in run.parameters} >= one_process(PIPELINE[name]).parameters.keys()
    for run in runs:
        run.losses = runs[-1].losses
    assert_same_run(runs, expected, *tolerance_of(PIPELINE[name]))
    if PIPELINE[name].exact:
        for run in runs:
            assert all(torch.equal(parameter, expected.parameters[key]) for key, parameter in run.parameters.items())
    if PIPELINE[name].config.tied:
        assert torch.equal(runs[0].parameters["embedding.weight"], runs[-1].parameters["head.weight"])


def tolerance_of(case: Case) -> tuple[float, ...]:
    return (1e-12,) if case.dtype == torch.float64 else ()


@pytest.mark.slow
def test_tensor_parallelism_calls_four_all_reduces_a_layer_of_the_residual_stream(found: list[Found]) -> None:
    stream = ROWS * SMALL.context * SMALL.hidden
    for rank in found:
        for ledger in rank.counted:
            assert {entry.kind for entry in ledger.entries} == {"all_reduce"}
            assert ledger.count("all_reduce") == 2 * SMALL.layers
            assert [entry.elements for entry in ledger.entries] == [stream] * 2 * SMALL.layers


@pytest.mark.slow
def test_a_cut_vocabulary_adds_an_all_reduce_each_way_and_three_numbers_a_token(found: list[Found]) -> None:
    tokens = ROWS * SMALL.context
    stream = tokens * SMALL.hidden
    for rank in found:
        forward, backward = rank.counted_vocabulary
        layers = [stream] * 2 * SMALL.layers
        assert [entry.elements for entry in forward.entries] == [stream, *layers, tokens, 2 * tokens]
        assert [entry.elements for entry in backward.entries] == [stream, *layers]


@pytest.mark.slow
def test_parallel_layers_are_drawn_as_the_whole_ones(found: list[Found]) -> None:
    assert [rank.layers for rank in found] == [0.0] * len(found)


@pytest.mark.slow
def test_a_pipeline_of_any_micro_batches_has_the_whole_models_gradients(found: list[Found]) -> None:
    for rank in found:
        assert len(rank.swept) == 12
        for step in rank.swept:
            assert step.difference < 1e-6, f"{step.schedule}, {step.micro_batches} micro-batches"


@pytest.mark.slow
def test_a_stage_sends_each_micro_batch_once_each_way(found: list[Found]) -> None:
    stages, stream = len(found), ROWS * SMALL.context * SMALL.hidden
    for stage, rank in enumerate(found):
        ends = (stage > 0) + (stage < stages - 1)  # neighbours: one gets activations, the other gradients
        for step in rank.swept:
            for kind in ("send", "recv"):
                assert step.ledger.count(kind) == ends * step.micro_batches
                assert step.ledger.elements(kind) == ends * stream
            shares = stage in (0, stages - 1)
            assert step.ledger.count("all_reduce") == shares
            assert step.ledger.elements("all_reduce") == shares * SMALL.vocabulary * SMALL.hidden
    for steps in zip(*(rank.swept for rank in found), strict=True):
        assert sum(step.ledger.count("send") for step in steps) == 2 * (stages - 1) * steps[0].micro_batches


@pytest.mark.slow
def test_1f1b_holds_fewer_micro_batches_than_gpipe(found: list[Found]) -> None:
    for stage, rank in enumerate(found):
        for step in rank.swept:
            most = len(found) - stage if step.schedule == "1f1b" else step.micro_batches
            assert step.peak == min(most, step.micro_batches)


@pytest.mark.slow
def test_what_autograd_holds_is_what_is_in_flight(found: list[Found]) -> None:
    for stage, rank in enumerate(found):
        assert rank.held["gpipe"] == 6 * rank.held["one"]
        assert rank.held["1f1b"] == (len(found) - stage) * rank.held["one"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_of_two_by_two_trains_as_one_process_does(name: str) -> None:
    case, runs = MESHES[name][1], [rank.meshes[name] for rank in on(4)]
    if "pipeline" in name:  # ranks 2 and 3 have the last stage; the losses of data ranks are summands of a mean
        losses = runs[2].losses if name.startswith("tensor") else mean_losses(runs[2:])
        for run in runs:
            run.losses = losses
    assert_same_run(runs, with_tied_head(one_process(case)))


@pytest.mark.thorough
def test_ranks_with_different_numbers_of_rows_have_the_batchs_gradient() -> None:
    assert max(rank.uneven for rank in on(4)) < 1e-6


@pytest.mark.slow
def test_a_mesh_sends_what_its_two_parallelisms_send() -> None:
    stream = ROWS * SMALL.context * SMALL.hidden
    for ledger, trained in launch(count_tensor_data, world_size=4):
        floats = [entry for entry in ledger.entries if entry.dtype == "float32"]  # not which parameters were used
        assert {(entry.kind, entry.group_size) for entry in floats} == {("all_reduce", 2)}
        assert sorted(entry.elements for entry in floats) == [stream] * 4 * SMALL.layers + [trained]
