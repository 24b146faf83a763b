"""Tensor and pipeline parallelism without other processes: shares, orders, messages, what is refused (lab 4)."""

from __future__ import annotations

import itertools

import pytest
import torch
from lab4_tensor_pipeline_counts import count_tensor_parallel, sweep
from lab4_tensor_pipeline_runs import (
    FULL,
    ORDERS,
    SMALL,
)

from solutions.lab4_zero.mesh import parallel_mesh
from solutions.lab4_zero.partitioned_module import owned_indices
from solutions.lab4_zero.pipeline import Pipeline
from solutions.lab4_zero.pipeline_order import Transfer, communication_plan, gpipe_order, one_f_one_b_order
from solutions.lab4_zero.pipeline_stages import split_gpt
from solutions.lab4_zero.saved_tensor_meter import SavedTensorMeter
from solutions.lab4_zero.vocabulary_parallel import partition_vocab
from utils import schedules
from utils.gpt import GPT, batch


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


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_pipeline_of_one_stage_is_the_model_and_sends_nothing() -> None:
    for step in sweep():
        assert step.difference < 1e-6
        assert step.peak == (1 if step.schedule == "1f1b" else step.micro_batches)
        assert not step.ledger.entries


@pytest.mark.usefixtures("alone")
def test_a_tensor_parallel_model_of_one_rank_sends_nothing() -> None:
    for ledger in (*count_tensor_parallel(), *count_tensor_parallel(vocabulary=True)):
        assert not ledger.entries


@pytest.mark.usefixtures("alone")
def test_what_a_pipeline_cannot_do_is_refused() -> None:
    stage, rows = split_gpt(GPT(SMALL), 1)[0], batch(SMALL, 3)
    with pytest.raises(ValueError, match="1f1b, gpipe or a function, got 'zb'"):
        Pipeline(stage, schedule="zb")
    with pytest.raises(ValueError, match="between 1 and the batch's 3 rows, got 4"):
        Pipeline(stage).step(*rows, 4)
    with pytest.raises(RuntimeError, match=r"before the backward pass of micro-batches \[0, 1\]"):
        Pipeline(stage, schedule=lambda stage, stages, m: gpipe_order(stage, stages, m)[:m]).step(*rows, 2)


@pytest.mark.usefixtures("alone")
def test_a_mesh_of_more_ranks_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor 2 x data 1 x pipeline 3 needs 6 ranks, there are 1"):
        parallel_mesh(tensor=2, pipeline=3)


@pytest.mark.usefixtures("alone")
def test_targets_that_count_as_none_weigh_nothing_in_a_cut_vocabulary() -> None:
    model, (tokens, targets) = GPT(SMALL), batch(SMALL, 3)
    targets[1] = -100
    expected = model(tokens, targets)
    found = split_gpt(partition_vocab(model), 1)[0](tokens, targets)
    torch.testing.assert_close(found, expected)


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
    with SavedTensorMeter() as held:
        y = (x @ weight).exp()  # holds x, the weight and exp's own result
        z = (y * y).sum()  # holds y, which is there already
    assert held.bytes == 2 * 2 * 4 * 4
    z.backward()
    assert (held.bytes, held.peak) == (0, 64)
