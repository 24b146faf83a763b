"""Lab 4's other collectives on a ring, and what all refuse; exercise 4.1's check holds the ring's own to their sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from slow_machine_launch import launch
from torch import Tensor

from solutions import lab4_zero as lab
from utils.distributed import record_collectives


def values(rank: int) -> Tensor:
    """Rank's seven numbers."""
    return torch.randn(7, generator=torch.Generator().manual_seed(rank))


def collectives() -> dict[Any, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: dict[Any, Any] = {}
    for root in range(world_size):
        found["broadcast", root] = lab.broadcast(values(rank), src=root)
        found["reduce", root] = lab.reduce(values(rank), dst=root, op="mean")
    found["all_to_all"] = lab.all_to_all(10 * rank + torch.arange(2 * world_size).view(world_size, 2))
    mine = torch.arange(24.0) + rank
    with record_collectives() as ledger:
        lab.ring_all_reduce(mine)
    found["sent"] = ledger.elements("send")
    return found


@pytest.mark.slow
def test_the_other_collectives_on_the_ring_give_what_their_names_say():
    results = launch(collectives, world_size=4)
    mine = [values(rank) for rank in range(4)]
    for rank, result in enumerate(results):
        for root in range(4):
            assert torch.equal(result["broadcast", root], mine[root])
            right = torch.stack(mine).mean(0) if rank == root else mine[rank]
            torch.testing.assert_close(result["reduce", root], right, rtol=0, atol=1e-6 if rank == root else 0)
        assert result["all_to_all"].tolist() == [[10 * k + 2 * rank, 10 * k + 2 * rank + 1] for k in range(4)]
        assert result["sent"] == 2 * 24 * 3 / 4  # no chunk is sent in vain


def test_a_ring_of_one_leaves_the_tensor_as_it_is(alone):
    x = torch.arange(5.0)
    assert torch.equal(lab.ring_all_reduce(x.clone(), op="mean"), x)
    assert torch.equal(lab.ring_all_gather(lab.ring_reduce_scatter(x)), x)
    assert torch.equal(lab.broadcast(x.clone()), x) and torch.equal(lab.reduce(x.clone()), x)
    assert torch.equal(lab.all_to_all(x[None]), x[None])


def test_a_ring_refuses_what_it_cannot_do(alone):
    with pytest.raises(ValueError, match="op must be one of sum, mean, got 'max'"):
        lab.ring_all_reduce(torch.ones(3), op="max")
    with pytest.raises(TypeError, match=r"mean needs floating-point numbers, got torch\.int64"):
        lab.ring_all_reduce(torch.ones(3, dtype=torch.int64), op="mean")
    with pytest.raises(ValueError, match=r"chunk of 5 elements on 1 ranks must have shape \(5,\), got \(3,\)"):
        lab.ring_all_gather(torch.ones(3), numel=5)
    with pytest.raises(ValueError, match=r"on 1 ranks needs 1 rows, got shape \(2, 3\)"):
        lab.all_to_all(torch.ones(2, 3))
