"""Hidden scenarios of exercise 4.1: the collectives of a ring, on tensors of odd sizes and several dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from utils.checks.hidden import Draw
from utils.distributed import calls

from .hidden_ranks import RankResult, named, of_some, record_collectives

#: Elements over the number of ranks, what is left over, dtype and operation.
Case = tuple[int, int, torch.dtype, str]


def of_all(package: ModuleType, seed: int) -> RankResult:
    """On each rank: sums and means of chunks of one size and of two."""
    draw = Draw(seed, "4.1")
    rest, cases = draw.between(1, dist.get_world_size() - 1), _plain_cases(draw)
    cases["odd chunks"] = (draw.between(2, 6), rest, torch.float32, "sum")
    return _collectives(package, draw, None, "of all ranks", {**cases, "integers": (2, rest, torch.int64, "sum")})


def of_edges(package: ModuleType, seed: int) -> RankResult:
    """On each rank: hardly an element, many of them, few bits, and a tensor that is not contiguous."""
    draw = Draw(seed, "4.1 edges")
    cases: dict[str, Case] = {
        "bfloat16": (draw.between(2, 6), 1, torch.bfloat16, "mean"),
        "fewer elements than ranks": (0, draw.between(1, dist.get_world_size() - 1), torch.float32, "sum"),
        "no element": (0, 0, torch.float32, "sum"),
        "many elements": (draw.between(500, 1500), 1, torch.float32, "sum"),
    }
    seen = _collectives(package, draw, None, "of all ranks", cases)
    size = draw.between(5, 11)
    rows = _drawn(draw.random.getrandbits(40), 3 * size, torch.float32, None).view(3, size).t()
    seen["ring_all_reduce of all ranks, a transposed tensor"] = package.ring_all_reduce(rows)
    return seen


def of_groups(package: ModuleType, seed: int) -> RankResult:
    """On each rank: rings of some of the ranks."""
    seen: RankResult = {}
    for members in ((0, 1, 3), (1, 2)):
        draw = Draw(seed, f"4.1 {members}")
        with of_some(members) as group:
            if group is not None:
                whose = f"of {len(members)} of the ranks"
                seen |= _collectives(package, draw, group, whose, _plain_cases(draw))
    return seen


def _plain_cases(draw: Draw) -> dict[str, Case]:
    return {
        "even chunks": (draw.between(2, 6), 0, torch.float32, "sum"),
        "odd chunks, the mean": (draw.between(2, 6), 1, torch.float64, "mean"),
    }


def _collectives(
    package: ModuleType, draw: Draw, group: ProcessGroup | None, whose: str, cases: Mapping[str, Case]
) -> RankResult:
    """The three functions on each of the cases."""
    seen: RankResult = {}
    for what, (chunk, rest, dtype, op) in cases.items():
        seed, numel = draw.random.getrandbits(40), chunk * dist.get_world_size(group) + rest
        for name in ("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce"):
            if name != "ring_all_reduce" and what in ("bfloat16", "many elements"):
                continue
            found = _one(getattr(package, name), name, _drawn(seed, numel, dtype, group), op, group)
            seen |= named(f"{name} {whose}, {what}", found)
    return seen


def _drawn(seed: int, numel: int, dtype: torch.dtype, group: ProcessGroup | None) -> Tensor:
    """What this rank starts with."""
    numbers = Draw(seed, f"rank {dist.get_rank(group)}").normal(numel, scale=1.0 if dtype.is_floating_point else 40.0)
    return numbers.to(dtype)


def _one(function: object, name: str, tensor: Tensor, op: str, group: ProcessGroup | None) -> RankResult:
    """The result on this rank, and whether only as much as needed was sent, to the neighbours alone."""
    rank, world_size, numel = dist.get_rank(group), dist.get_world_size(group), tensor.numel()
    before, heard = tensor.clone(), []
    with record_collectives() as ledger, calls.listen(heard.append):
        if name == "ring_all_gather":
            result = function(tensor.tensor_split(world_size)[rank].clone(), group=group, numel=numel)
        else:
            result = function(tensor, group=group, op=op)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    peers = {"send": ranks[(rank + 1) % world_size], "recv": ranks[(rank - 1) % world_size]}
    budget = (2 if name == "ring_all_reduce" else 1) * (world_size - 1) * -(-numel // world_size)
    seen = {"result": result, "no more than needed is sent": ledger.elements("send") <= budget}
    seen["messages go around the ring"] = all(
        call.kind in peers and call.peer in (peers[call.kind], None) for call in heard
    )
    if name == "ring_all_reduce":
        seen["it works in place"] = isinstance(result, Tensor) and torch.equal(result.reshape(-1), tensor.reshape(-1))
        seen["the same bits on every rank"] = _same_bits(tensor, group)
    else:
        seen["its argument stays as it is"] = torch.equal(before, tensor)
    return seen


def _same_bits(tensor: Tensor, group: ProcessGroup | None) -> bool:
    """Whether every rank of the group has this very tensor."""
    if not tensor.numel():
        return True
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, tensor, group=group)
    return all(torch.equal(other, tensor) for other in every)


PARTS = (of_all, of_edges, of_groups)
