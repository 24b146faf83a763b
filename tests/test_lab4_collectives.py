"""What lab 4's collectives on a ring send and refuse; exercise 4.1's check holds the ring's own to their sums."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from slow_machine_launch import launch

from solutions import lab4_zero as lab
from solutions.lab4_zero.exercises import ring
from solutions.lab4_zero.exercises.ring_values import Reduction
from utils.distributed import record_collectives


def sent() -> int:
    """Elements that a rank sends in an all-reduce of 24."""
    with record_collectives() as ledger:
        lab.ring_all_reduce(torch.arange(24.0) + dist.get_rank())
    return ledger.elements("send")


@pytest.mark.slow
def test_no_chunk_is_sent_in_vain():
    assert launch(sent, world_size=4) == [2 * 24 * 3 / 4] * 4


def test_a_ring_of_one_leaves_the_tensor_as_it_is(alone):
    x = torch.arange(5.0)
    assert torch.equal(lab.ring_all_reduce(x.clone(), op="mean"), x)
    assert torch.equal(lab.ring_all_gather(lab.ring_reduce_scatter(x)), x)


def test_a_ring_refuses_what_it_cannot_do(alone):
    with pytest.raises(ValueError, match="op must be one of sum, mean, got 'max'"):
        lab.ring_all_reduce(torch.ones(3), op="max")
    with pytest.raises(TypeError, match=r"mean needs floating-point numbers, got torch\.int64"):
        lab.ring_all_reduce(torch.ones(3, dtype=torch.int64), op="mean")
    with pytest.raises(ValueError, match=r"chunk of 5 elements on 1 ranks must have shape \(5,\), got \(3,\)"):
        lab.ring_all_gather(torch.ones(3), numel=5)


def test_values_that_came_by_fewer_messages_than_a_ring_sends_are_no_answer():
    reduction = Reduction(10, torch.float32)
    for rank, sent in enumerate((4, 6, 6, 0)):
        outcome = ring.Outcome(torch.zeros(10), None, {}, sent, {"send": set(), "recv": set()}, largest=3)
        problem = ring._past_the_ring("ring_reduce_scatter", outcome, rank, reduction, (0, 1, 2, 3))
        assert (problem is None) == (sent == 6), sent
    assert problem.headline == "rank 3 sends 0 elements in ring_reduce_scatter, a ring needs at least 6"
