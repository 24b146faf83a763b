"""Tensor and pipeline parallelism, and meshes of two parallelisms, against one process (lab 4).

Each world size is launched once and runs all cases; the tests read what the ranks brought back.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from lab4_tensor_pipeline_counts import Found, everything
from lab4_tensor_pipeline_runs import (
    FULL,
    MESHES,
    ORDERS,
    PIPELINE,
    ROWS,
    SMALL,
    TENSOR,
    Case,
    one_process,
)
from parallel_training import Run, assert_same_run, mean_losses

from solutions.lab4_zero.held_activations import HeldActivations
from solutions.lab4_zero.pipeline_order import Transfer, communication_plan, gpipe_order, one_f_one_b_order
from solutions.lab4_zero.pipeline_stages import split_gpt
from solutions.lab4_zero.tensor_parallel import owned_indices
from utils import schedules
from utils.distributed import launch
from utils.gpt import GPT, batch


@functools.cache
def on(world_size: int) -> list[Found]:
    """What the ranks of one launch brought back."""
    return launch(everything, world_size=world_size)


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{} ranks".format)
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
    return (1e-11,) if case.dtype == torch.float64 else ()


@pytest.mark.slow
def test_tensor_parallelism_calls_four_all_reduces_a_layer_of_the_residual_stream(found: list[Found]) -> None:
    stream = ROWS * SMALL.context * SMALL.hidden
    for rank in found:
        for ledger in rank.counted:
            assert {entry.kind for entry in ledger.entries} == {"all_reduce"}
            assert ledger.count("all_reduce") == 2 * SMALL.layers
            assert [entry.elements for entry in ledger.entries] == [stream] * 2 * SMALL.layers


@pytest.mark.slow
def test_parallel_layers_have_the_whole_ones_outputs_and_gradients(found: list[Found]) -> None:
    for rank in found:
        assert max(rank.layers.values()) < 1e-5, rank.layers


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


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_of_two_by_two_trains_as_one_process_does(name: str) -> None:
    case, runs = MESHES[name][1], [rank.meshes[name] for rank in on(4)]
    if "pipeline" in name:  # ranks 2 and 3 have the last stage; the losses of data ranks are summands of a mean
        losses = runs[2].losses if name.startswith("tensor") else mean_losses(runs[2:])
        for run in runs:
            run.losses = losses
    assert_same_run(runs, with_tied_head(one_process(case)))


@pytest.mark.slow
def test_ranks_with_different_numbers_of_rows_have_the_batchs_gradient() -> None:
    assert max(rank.uneven for rank in on(4)) < 1e-6


@pytest.mark.slow
def test_a_mesh_sends_what_its_two_parallelisms_send() -> None:
    stream = ROWS * SMALL.context * SMALL.hidden
    for rank in on(4):
        ledger, trained = rank.counted_mesh
        floats = [entry for entry in ledger.entries if entry.dtype == "float32"]  # not which parameters were used
        assert {(entry.kind, entry.group_size) for entry in floats} == {("all_reduce", 2)}
        assert sorted(entry.elements for entry in floats) == [stream] * 4 * SMALL.layers + [trained]


def test_rows_are_shared_in_whole_heads_of_each_part() -> None:
    # queries, keys and values of 5 heads of 2 rows: 30 rows; the first of 3 ranks has heads 0 and 1
    shares = [owned_indices(30, rank, 3, unit=2, parts=3).tolist() for rank in range(3)]
    assert shares[0] == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    assert shares[2] == [8, 9, 18, 19, 28, 29]
    assert sorted(itertools.chain(*shares)) == list(range(30))
    assert [len(owned_indices(2, rank, 4)) for rank in range(4)] == [1, 1, 0, 0]


def test_rows_that_are_no_whole_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="31 rows are not 3 parts of whole units of 2"):
        owned_indices(31, 0, 2, unit=2, parts=3)


SIZES = [(stages, micro_batches) for stages in range(1, 7) for micro_batches in range(1, 13)]


@pytest.mark.parametrize("schedule", ORDERS)
def test_the_orders_are_those_of_the_simulated_schedules(schedule: str) -> None:
    expected = {"1f1b": schedules.one_f_one_b, "gpipe": schedules.gpipe}[schedule]
    for stages, micro_batches in SIZES:
        for stage, order in enumerate(expected(stages, micro_batches).orders):
            assert ORDERS[schedule](stage, stages, micro_batches) == list(order)


def rendezvous(plans: list[list]) -> None:
    """Run plans as strictly as NCCL may: an exchange ends once all its messages are taken, and the next waits for it.

    Raises:
        AssertionError: stages that wait for one another, a message that meets another one than it should.
    """
    left = [list(plan) for plan in plans]
    open_transfers: list[list[Transfer]] = [[] for _ in plans]
    while any(left) or any(open_transfers):
        moved = False
        for stage, plan in enumerate(left):
            if plan and not open_transfers[stage]:
                item, moved = plan.pop(0), True
                open_transfers[stage] = [] if isinstance(item, schedules.Action) else list(item)
            for transfer in [t for t in open_transfers[stage] if t.kind == "send"]:
                peers = [t for t in open_transfers[transfer.peer] if t.kind == "recv" and t.peer == stage]
                if peers:
                    assert (peers[0].content, peers[0].micro_batch) == (transfer.content, transfer.micro_batch)
                    open_transfers[stage].remove(transfer)
                    open_transfers[transfer.peer].remove(peers[0])
                    moved = True
        assert moved, f"stages wait for one another: {open_transfers}"


def plans_of(schedule: str, stages: int, micro_batches: int) -> list[list]:
    orders = [ORDERS[schedule](stage, stages, micro_batches) for stage in range(stages)]
    return [communication_plan(order, stage, stages) for stage, order in enumerate(orders)]


@pytest.mark.parametrize("schedule", ORDERS)
def test_no_stage_waits_for_ever_even_if_every_message_waits_for_its_reader(schedule: str) -> None:
    for stages, micro_batches in SIZES:
        rendezvous(plans_of(schedule, stages, micro_batches))


def test_1f1b_would_wait_for_ever_if_neighbours_did_not_exchange_at_once() -> None:
    plans = [
        [part for item in plan for part in ([item] if isinstance(item, schedules.Action) else [(t,) for t in item])]
        for plan in plans_of("1f1b", 4, 6)
    ]
    with pytest.raises(AssertionError, match="wait for one another"):
        rendezvous(plans)


def test_a_stage_that_there_is_not_and_no_micro_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="stage must be between 0 and 2, got 3"):
        one_f_one_b_order(3, 3, 4)
    with pytest.raises(ValueError, match="micro_batches must be at least 1, got 0"):
        gpipe_order(0, 3, 0)


def test_stages_in_a_row_are_the_model() -> None:
    model, (tokens, targets) = GPT(FULL), batch(FULL, 2)
    for count in (1, 2, 3, 4):
        x = tokens
        stages = split_gpt(model, count)
        for stage in stages:
            x = stage(x, targets if stage.last else None)
        assert torch.equal(x, model(tokens, targets))
        assert [len(stage.blocks) for stage in stages] == [len(p) for p in torch.arange(3).tensor_split(count)]
        assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())


def test_no_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stages must be at least 1, got 0"):
        split_gpt(GPT(SMALL), 0)


def test_held_activations_count_a_storage_once_and_no_parameter() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    with HeldActivations() as held:
        y = (x @ weight).exp()  # holds x, the weight and exp's own result
        z = (y * y).sum()  # holds y, which is there already
    assert held.bytes == 2 * 2 * 4 * 4
    z.backward()
    assert (held.bytes, held.peak) == (0, 64)
