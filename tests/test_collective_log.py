"""The log counts every collective that a rank really calls, from wherever, exactly."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from slow_machine_launch import launch
from torch import nn
from torch.distributed.fsdp import fully_shard

from utils.distributed import CollectiveLog, Entry, record_collectives


def show(log: CollectiveLog) -> list[tuple[str, int, int, int]]:
    return [(entry.kind, entry.elements, entry.bytes, entry.group_size) for entry in log.entries]


def entry(kind: str, elements: int, ranks: int) -> Entry:
    return Entry(0, kind, elements, 4 * elements, "float32", ranks)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all_reduce", 2 * 120 * 3 // 4),
        ("reduce_scatter", 120 * 3 // 4),
        ("all_gather", 120 * 3 // 4),
        ("broadcast", 120 * 3 // 4),
        ("reduce", 120 * 3 // 4),
        ("all_to_all", 120 * 3 // 4),
        ("gather", 22.5),
        ("scatter", 22.5),
        ("send", 120),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_the_volume_of_a_collective_is_that_of_its_ring(kind: str, sent: float) -> None:
    log = CollectiveLog([entry(kind, 120, 4)])
    assert log.volume() == log.volume(kind) == sent
    assert log.sent_bytes() == 4 * sent


def test_a_volume_is_exact_and_whole_where_it_can_be() -> None:
    log = CollectiveLog([entry("all_gather", 7, 3), entry("reduce_scatter", 2, 3)])
    assert log.volume() == 6
    assert isinstance(log.volume(), int)
    assert log.volume("all_gather") == pytest.approx(14 / 3)


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'allreduce'; there are all_reduce"):
        CollectiveLog().count("allreduce")


def test_the_report_is_a_table_with_a_total() -> None:
    log = CollectiveLog([entry("all_gather", 1000, 4), entry("all_reduce", 3, 2)])
    assert log.report() == (
        "collective   calls   elements   bytes   bytes sent\n"
        "all_reduce       1          3      12           12\n"
        "all_gather       1      1,000   4,000        3,000\n"
        "together         2      1,003   4,012        3,012"
    )
    assert CollectiveLog().report() == "no collective was called"


def test_a_ledger_can_be_pickled() -> None:
    log = CollectiveLog([entry("send", 5, 2)])
    assert pickle.loads(pickle.dumps(log)) == log


def every_collective() -> CollectiveLog:
    """All functions of torch.distributed, on three ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ring, back = (rank + 1) % ranks, (rank - 1) % ranks
    pair = dist.new_group([0, 2])
    with record_collectives() as log:
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16), async_op=True).wait()
        dist.all_gather([torch.empty(4) for _ in range(ranks)], torch.ones(4))
        dist.all_gather_into_tensor(torch.empty(6), torch.ones(2))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(6))
        dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(ranks)])
        dist.broadcast(torch.ones(7), src=1)
        dist.reduce(torch.ones(8), dst=2)
        dist.gather(torch.ones(3), [torch.empty(3) for _ in range(ranks)] if rank == 0 else None)
        dist.scatter(torch.empty(3), [torch.ones(3) for _ in range(ranks)] if rank == 0 else None)
        dist.all_to_all_single(torch.empty(9), torch.ones(9))
        dist.barrier()
        wanted = torch.empty(11)
        pending = [dist.isend(torch.full((11,), float(rank)), ring), dist.irecv(wanted, back)]
        for work in pending:
            work.wait()
        operations = [dist.P2POp(dist.isend, wanted, ring), dist.P2POp(dist.irecv, torch.empty(11), back)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if rank != 1:
            dist.all_reduce(torch.ones(10), group=pair)
    dist.all_reduce(torch.ones(99))  # outside of the block
    assert wanted[0] == back
    return log


EVERY_COLLECTIVE = [
    ("all_reduce", 5, 20, 3),
    ("all_reduce", 6, 12, 3),
    ("all_gather", 12, 48, 3),
    ("all_gather", 6, 24, 3),
    ("reduce_scatter", 6, 24, 3),
    ("reduce_scatter", 6, 24, 3),
    ("broadcast", 7, 28, 3),
    ("reduce", 8, 32, 3),
    ("gather", 9, 36, 3),
    ("scatter", 9, 36, 3),
    ("all_to_all", 9, 36, 3),
    ("barrier", 0, 0, 3),
    ("send", 11, 44, 3),
    ("recv", 11, 44, 3),
    ("send", 11, 44, 3),
    ("recv", 11, 44, 3),
]


@pytest.mark.slow
def test_every_collective_is_counted_exactly() -> None:
    logs = launch(every_collective, world_size=3)
    for rank, log in enumerate(logs):
        assert show(log) == EVERY_COLLECTIVE + ([] if rank == 1 else [("all_reduce", 10, 40, 2)])
    assert logs[0].entries[1].dtype == "bfloat16"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def hidden_places() -> dict[str, list[tuple[str, int, int, int]]]:
    """Collectives from where a wrapper of Python functions would not see them."""
    torch.manual_seed(0)
    seen = {}
    x = torch.ones(2, 3)
    with record_collectives() as log:
        functional.all_reduce(torch.ones(5), "sum", dist.group.WORLD).sum().item()
        functional.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD).sum().item()
        functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, dist.group.WORLD).sum().item()
    seen["functional"] = show(log)
    with record_collectives() as log, torch.inference_mode():
        dist.all_reduce(torch.ones(5))
    seen["inference mode"] = show(log)
    with record_collectives() as log:
        Doubled.apply(torch.ones(4, requires_grad=True)).sum().backward()
    seen["backward"] = show(log)
    with record_collectives() as log:
        weight = nn.Parameter(torch.ones(6))
        weight.register_post_accumulate_grad_hook(lambda w: dist.all_reduce(w.grad))
        (weight * 2).sum().backward()
    seen["hook"] = show(log)
    with record_collectives() as log:
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(4),))
        thread.start()
        thread.join()
    seen["thread"] = show(log)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 4))
    with record_collectives() as log:
        model(x).sum().backward()
    seen["DistributedDataParallel"] = show(log)
    sharded = fully_shard(nn.Linear(4, 6), mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    with record_collectives() as log:
        sharded(torch.ones(2, 4)).sum().backward()
    seen["fully_shard"] = show(log)
    return seen


@pytest.mark.slow
def test_collectives_below_python_and_on_other_threads_are_counted_exactly() -> None:
    for seen in launch(hidden_places, world_size=2):
        assert seen == {
            "functional": [("all_reduce", 5, 20, 2), ("all_gather", 4, 16, 2), ("reduce_scatter", 4, 16, 2)],
            "inference mode": [("all_reduce", 5, 20, 2)],
            "backward": [("all_reduce", 4, 16, 2)],
            "hook": [("all_reduce", 6, 24, 2)],
            "thread": [("all_reduce", 4, 16, 2)],
            "DistributedDataParallel": [("all_reduce", 16, 64, 2)],
            "fully_shard": [("all_gather", 30, 120, 2), ("reduce_scatter", 30, 120, 2)],
        }
