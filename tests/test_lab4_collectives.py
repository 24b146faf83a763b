"""Lab 4's collectives on a ring: right for any size and dtype, the same bits on every rank, nothing sent in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from slow_machine_launch import launch, once
from torch import Tensor

from solutions import lab4_zero as lab
from utils.distributed import record_collectives

SIZES = (0, 1, 2, 3, 5, 7, 24, 1001)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def values(numel: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rank's numbers of a test; small integers where the dtype counts, so that their sum is exact."""
    generator = torch.Generator().manual_seed(100 * numel + rank)
    if dtype == torch.float32:
        return torch.randn(numel, generator=generator)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def collectives() -> dict[Any, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: dict[Any, Any] = {}
    for numel in SIZES:
        for dtype in DTYPES:
            mine = values(numel, rank, dtype)
            with record_collectives() as ledger:
                found["all_reduce", numel, dtype] = lab.ring_all_reduce(mine.clone())
            found["sent", numel, dtype] = ledger.elements("send")
            chunk = lab.ring_reduce_scatter(mine)
            found["reduce_scatter", numel, dtype] = chunk
            found["all_gather", numel, dtype] = lab.ring_all_gather(chunk, numel=numel)
            found["kept", numel, dtype] = mine
        found["mean", numel] = lab.ring_all_reduce(values(numel, rank), op="mean")
    strided = values(24, rank).view(4, 6).t()
    lab.ring_all_reduce(strided)
    found["strided"] = strided
    for root in range(world_size):
        found["broadcast", root] = lab.broadcast(values(7, rank), src=root)
        found["reduce", root] = lab.reduce(values(7, rank), dst=root, op="mean")
    found["all_to_all"] = lab.all_to_all(10 * rank + torch.arange(2 * world_size).view(world_size, 2))
    pair = dist.new_group([world_size - 1, 0])
    if rank in (0, world_size - 1):
        found["pair"] = lab.ring_all_reduce(torch.tensor([float(rank), 1.0, 2.0]), group=pair)
    return found


@once
def job(world_size: int) -> list[dict[Any, Any]]:
    """Results of all ranks."""
    return launch(collectives, world_size=world_size)


@pytest.fixture(params=[2, 3, 4])
def world_size(request):
    return request.param


@pytest.fixture
def alone():
    """A group of one rank, this process: what needs no second rank is tested without starting any."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_ring_all_reduce_of_any_size_is_the_sum_and_the_same_bits_on_every_rank(world_size, dtype):
    results = job(world_size)
    for numel in SIZES:
        expected = sum(values(numel, rank, dtype).double() for rank in range(world_size))
        first = results[0]["all_reduce", numel, dtype]
        assert first.dtype == dtype and first.shape == (numel,)
        torch.testing.assert_close(first.double(), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)
        for rank, result in enumerate(results):
            assert torch.equal(result["all_reduce", numel, dtype], first)
            chunk = first.tensor_split(world_size)[rank]
            assert torch.equal(result["reduce_scatter", numel, dtype], chunk)
            assert torch.equal(result["all_gather", numel, dtype], first)
            assert torch.equal(result["kept", numel, dtype], values(numel, rank, dtype))


@pytest.mark.slow
def test_a_ring_all_reduce_sends_every_chunk_but_one_twice(world_size):
    for rank, result in enumerate(job(world_size)):
        for numel in SIZES:
            sizes = [len(chunk) for chunk in torch.empty(numel).tensor_split(world_size)]
            expected = 2 * numel - sizes[rank] - sizes[(rank + 1) % world_size]
            for dtype in DTYPES:
                assert result["sent", numel, dtype] == expected
        assert result["sent", 24, torch.float32] == 2 * 24 * (world_size - 1) / world_size


@pytest.mark.slow
def test_the_other_collectives_on_the_ring_give_what_their_names_say(world_size):
    results = job(world_size)
    mine = [values(7, rank) for rank in range(world_size)]
    for rank, result in enumerate(results):
        for numel in SIZES:
            mean = torch.stack([values(numel, k) for k in range(world_size)]).mean(0)
            torch.testing.assert_close(result["mean", numel], mean, rtol=0, atol=1e-6)
        strided = sum(values(24, k) for k in range(world_size)).view(4, 6).t()
        torch.testing.assert_close(result["strided"], strided, rtol=0, atol=1e-6)
        for root in range(world_size):
            assert torch.equal(result["broadcast", root], mine[root])
            right = torch.stack(mine).mean(0) if rank == root else mine[rank]
            torch.testing.assert_close(result["reduce", root], right, rtol=0, atol=1e-6 if rank == root else 0)
        assert result["all_to_all"].tolist() == [[10 * k + 2 * rank, 10 * k + 2 * rank + 1] for k in range(world_size)]
    for rank in (0, world_size - 1):
        assert results[rank]["pair"].tolist() == [world_size - 1, 2, 4]


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
