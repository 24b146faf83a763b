"""Lab 4's checks: who waits in vain follows from what ranks have called, and PyTorch's own solutions are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from solutions.lab4_zero.exercises.data_parallel import record_waits
from utils.checks.ranks.forbid_library_calls import ReadyMade, forbid_library_calls
from utils.checks.ranks.on_rank import is_owed
from utils.distributed.calls import Call


def call(kind: str, members: tuple[int, ...] = (0, 1, 2), peer: int | None = None) -> Call:
    return Call(kind, 4, 16, "float32", "0", members, peer)


REDUCE = call("all_reduce")


@pytest.mark.parametrize(
    ("mine", "theirs", "owed"),
    [
        ([], [], False),
        ([], [REDUCE], True),
        ([REDUCE], [REDUCE], False),
        ([REDUCE], [], False),
        ([REDUCE], [REDUCE, call("all_gather")], True),
        ([], [call("all_reduce", (1, 2))], False),
        ([call("all_reduce", (0, 1))], [REDUCE], True),
        ([], [call("send", peer=2)], False),
        ([], [call("send", peer=0)], True),
        ([call("recv", peer=1)], [call("send", peer=0)], False),
        ([call("recv", peer=2)], [call("send", peer=0)], True),
        ([call("send", peer=1)], [call("recv", peer=0), call("recv", peer=0)], True),
    ],
)
def test_a_rank_that_is_done_knows_from_the_calls_whether_it_is_waited_for_in_vain(mine, theirs, owed):
    assert is_owed(0, mine, 1, theirs) is owed


def test_pytorchs_own_solution_is_refused_by_name_and_afterwards_works_again(alone):
    with (
        forbid_library_calls(),
        pytest.raises(ReadyMade, match=r"^torch.nn.parallel.distributed.DistributedDataParallel$"),
    ):
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with forbid_library_calls(), pytest.raises(ReadyMade, match="DataParallel"):
        nn.DataParallel(nn.Linear(2, 2))


def test_a_collective_that_is_started_counts_as_waited_for_once_it_is(alone):
    x = torch.ones(3)
    with record_waits() as waits:
        dist.all_reduce(x)
        assert waits.count == 1
        work = dist.all_reduce(x, async_op=True)
        assert waits.count == 1
        work.wait()
        assert waits.count == 2 and not waits.futures
        dist.all_reduce(x, async_op=True).get_future().wait()
        assert waits.count == 2 and waits.futures
