"""The check of exercise 4.1: ring reduce-scatter, all-gather and all-reduce from messages between neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from utils.checks.core import Exercise, classic, generator
from utils.checks.hidden import Draw, Tolerance
from utils.checks.problem import Problem
from utils.checks.ranks.distributed_check import DistributedCheck
from utils.checks.ranks.scenarios import RankObservation, RankScenario
from utils.distributed import calls, record_collectives

from .ring_values import SMALL_STEP, Reduction, close, explained, in_the_group, tolerance

_DEADLOCK = classic("every rank sends first and receives afterwards: start both messages, then wait for both", 1)


def _stuck(called: Sequence[Sequence[str]]) -> str:
    return _DEADLOCK if all(of_one and of_one[-1] == "send" for of_one in called) else ""


_DIRECT = classic(
    "in a ring a rank sends to its right neighbour alone and receives from the left one: chunks are passed on", 8
)
_NAMES = ("ring_all_reduce", "ring_reduce_scatter", "ring_all_gather")
_TO_ITSELF = classic("too many steps: N ranks take N - 1 steps, so one rank takes none", 3)


@dataclass
class Outcome:
    """What one rank has after one reduction.

    Its tensor, what the function returned, how often it called each kind of collective, how many elements it sent, the
    peers of its messages by kind, and the elements of the largest that it sent.
    """

    tensor: torch.Tensor
    returned: Any
    kinds: dict[str, int]
    sent: int
    peers: dict[str, set[int | None]]
    largest: int


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed":
        rows = next(d for d in range(2, values.numel() + 1) if values.numel() % d == 0)
        return values.view(rows, -1).t().contiguous().t()
    return values.clone()


def _play(answer: Mapping[str, Callable], name: str, reductions: Sequence[Reduction], seed: int) -> dict[str, Any]:
    """On each rank: one function over several tensors; None for one in which the rank takes no part."""
    outcomes: list[Outcome | None] = []
    for reduction in reductions:
        members = reduction.ranks(dist.get_world_size())
        group = dist.new_group(list(members)) if reduction.members and len(members) <= dist.get_world_size() else None
        if dist.get_rank() not in members:
            outcomes.append(None)
            continue
        position = members.index(dist.get_rank())
        tensor = _laid_out(reduction.tensor(position, seed), reduction.layout)
        messages: list[calls.Call] = []
        with record_collectives() as ledger, calls.listen(messages.append):
            if name == "ring_all_gather":
                chunks = tensor.tensor_split(dist.get_world_size(group))
                returned = answer[name](chunks[position].clone(), group=group, numel=reduction.numel)
            else:
                returned = answer[name](tensor, group=group, op=reduction.op)
        kinds = {kind: ledger.count(kind) for kind in {entry.kind for entry in ledger.entries}}
        sent = sum(entry.elements for entry in ledger.entries if entry.kind == "send")
        peers = {kind: {call.peer for call in messages if call.kind == kind} for kind in ("send", "recv")}
        largest = max((call.elements for call in messages if call.kind == "send"), default=0)
        outcomes.append(Outcome(tensor.detach().reshape(-1), returned, kinds, sent, peers, largest))
    results = [outcome and [outcome.tensor, outcome.returned] for outcome in outcomes]
    return {"outcomes": outcomes, "results": results}


def _rule(name: str, outcome: Outcome, rank: int, reduction: Reduction, ranks: tuple[int, ...]) -> Problem | None:
    """Only messages between neighbours, and not more of them than the ring needs."""
    size, position = len(ranks), ranks.index(rank)
    ready = [kind for kind in outcome.kinds if kind not in ("send", "recv")]
    if ready:
        return Problem(
            f"{name} calls the ready-made collective {ready[0]} on rank {rank}",
            classic("the exercise is to build it from isend and irecv between neighbours", 7),
        )
    neighbours = {"send": ranks[(position + 1) % size], "recv": ranks[(position - 1) % size]}
    for kind, neighbour in neighbours.items():
        others = outcome.peers[kind] - {neighbour, None}
        if others:
            does, side = ("sends to", "right") if kind == "send" else ("receives from", "left")
            return Problem(
                f"rank {rank} {does} rank {min(others)} in {name}, its {side} neighbour is rank {neighbour}",
                _DIRECT,
                (str(reduction),),
            )
    rounds = 2 if name == "ring_all_reduce" else 1
    chunk = -(-reduction.numel // size)
    budget = rounds * (size - 1) * chunk
    if outcome.sent > budget:
        cause = (
            classic("whole tensors travel: each message holds one chunk, a part in N of the tensor", 6)
            if outcome.largest == reduction.numel > chunk
            else classic("chunks are too large: each message holds a part in N of the tensor", 6)
            if outcome.largest > chunk
            else classic("too many steps: N - 1 steps of one chunk each", 3)
        )
        return Problem(
            f"rank {rank} sends {outcome.sent:,} elements in {name}, {budget:,} are enough", cause, (str(reduction),)
        )
    return None


def _past_the_ring(
    name: str, outcome: Outcome, rank: int, reduction: Reduction, ranks: tuple[int, ...]
) -> Problem | None:
    """Right values that fewer messages than a ring's have brought."""
    least = (2 if name == "ring_all_reduce" else 1) * (len(ranks) - 1) * (reduction.numel // len(ranks))
    if outcome.sent >= least:
        return None
    return Problem(
        f"rank {rank} sends {outcome.sent:,} elements in {name}, a ring needs at least {least:,}",
        classic("the exercise is to build it from isend and irecv between neighbours", 7),
        (str(reduction),),
    )


def _judge(
    observations: Sequence[RankObservation], name: str, reductions: Sequence[Reduction], seed: int
) -> Problem | None:
    world_size = len(observations)
    for k, reduction in enumerate(reductions):
        ranks = reduction.ranks(world_size)
        outcomes = [observations[rank].value["outcomes"][k] for rank in ranks]
        for rank, outcome in zip(ranks, outcomes, strict=True):
            if problem := _rule(name, outcome, rank, reduction, ranks):
                return problem
        if problem := _values(name, reduction, ranks, outcomes, seed, world_size):
            return problem
        for rank, outcome in zip(ranks, outcomes, strict=True):
            if problem := _past_the_ring(name, outcome, rank, reduction, ranks):
                return problem
    return None


def _values(
    name: str, reduction: Reduction, ranks: tuple[int, ...], outcomes: list[Outcome], seed: int, world_size: int
) -> Problem | None:
    size, whole = len(ranks), reduction.expected(max(ranks) + 1, seed)
    if name == "ring_all_gather":
        parts = [reduction.tensor(k, seed).tensor_split(size)[k] for k in range(size)]
        whole = torch.cat([part.to(whole.dtype) for part in parts])
    chunks = list(whole.tensor_split(size))
    for position, (rank, outcome) in enumerate(zip(ranks, outcomes, strict=True)):
        expected = chunks[position] if name == "ring_reduce_scatter" else whole
        got = outcome.tensor if name == "ring_all_reduce" else outcome.returned
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape or got.dtype != reduction.dtype:
            shape = f"a tensor of {tuple(got.shape)}, {got.dtype}" if isinstance(got, torch.Tensor) else repr(got)
            return Problem(
                f"{name} gives {shape}", f"expected {tuple(expected.shape)}, {reduction.dtype}", (str(reduction),)
            )
        start = torch.as_tensor(reduction.tensor(position, seed))
        if name == "ring_reduce_scatter" and not torch.equal(outcome.tensor, start):
            return Problem(
                f"{name} changes the tensor that it is given", "its caller still needs it", (str(reduction),)
            )
        if close(got, expected, reduction.dtype):
            continue
        bad = ~torch.isclose(got.to(expected.dtype), expected, **tolerance(reduction.dtype))
        problem = explained(
            name, reduction, rank, position, got, expected, bad, start, outcome.kinds.get("send", 0), size
        )
        return in_the_group(problem, reduction, got, expected, size, world_size)
    if name == "ring_all_reduce":
        for rank, outcome in zip(ranks, outcomes, strict=True):
            if not torch.equal(outcome.tensor, outcomes[0].tensor):
                return Problem(
                    f"rank {rank} ends with other bits than rank {ranks[0]}",
                    "each sum must be formed on one rank and copied to the others, not formed on every rank",
                    (str(reduction),),
                )
    return None


def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    random, world_size = generator(seed), 3 if draw is None else 4
    even = world_size * random.randint(2, 5)
    odd = world_size * random.randint(2, 5) + random.choice(range(1, world_size))

    def scenario(title: str, name: str, reductions: list[Reduction], ranks: int = 3) -> RankScenario:
        return RankScenario(
            f"{name}, {title}",
            _play,
            _judge,
            {"name": name, "reductions": reductions, "seed": seed},
            ranks,
            stuck=_stuck,
            sizes=classic(SMALL_STEP, 5),
            same_calls=False,
            to_itself=_TO_ITSELF,
            values=("results",),
        )

    plain = [Reduction(even), Reduction(odd), Reduction(odd, op="mean")]
    edges = [Reduction(1), Reduction(2), Reduction(0), Reduction(2 * odd, layout="transposed", coded=False)]
    values = [
        Reduction(odd, coded=False),
        Reduction(odd, torch.float64, "mean", coded=False),
        Reduction(odd, torch.int64, coded=False),
        Reduction(odd, torch.bfloat16, coded=False),
        Reduction(4099, coded=False),
    ]
    if draw is not None:  # each function on all of them, and in groups
        many = [replace(reduction, coded=False) for reduction in (*plain, *edges[:3], *values)]
        groups = [
            Reduction(random.randint(4, 20), op=op, members=members, coded=False)
            for members in ((0, 1, 3), (1, 2))
            for op in ("sum", "mean")
        ]
        return [scenario("many tensors", name, [*many, *groups], 4) for name in _NAMES[1:]] + [
            scenario("many tensors", _NAMES[0], [*many, edges[3], *groups], 4)
        ]
    pair = [Reduction(odd, members=(0, 2)), Reduction(odd, op="mean", members=(0, 2))]
    five = [Reduction(odd), Reduction(odd, members=(0, 1, 2, 4))]
    return [
        scenario("whole and ragged chunks", "ring_reduce_scatter", plain),
        scenario("whole and ragged chunks", "ring_all_gather", plain[:2]),
        scenario("whole and ragged chunks", "ring_all_reduce", plain),
        scenario("fewer elements than ranks", "ring_all_reduce", edges),
        scenario("dtypes", "ring_all_reduce", values),
        scenario("a group of two of the ranks", "ring_all_reduce", pair),
        scenario("five ranks", "ring_reduce_scatter", five, 5),
        scenario("five ranks", "ring_all_reduce", five, 5),
    ]


RING_ALL_REDUCE = Exercise(
    "4.1",
    "ring all-reduce",
    points=12,
    observe=lambda package, seed: CHECK.observe(package, seed),
    tolerance=Tolerance(times=2),
)
CHECK = DistributedCheck(
    RING_ALL_REDUCE, _scenarios, "every rank sends 2 n (N - 1) / N elements, however many ranks there are"
)


@RING_ALL_REDUCE.checked_by
def check_ring_all_reduce(
    ring_all_reduce: Callable, ring_reduce_scatter: Callable, ring_all_gather: Callable, seed: int | None = None
) -> None:
    """Exercise 4.1: the collectives of a ring, from messages between neighbours.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(ring_all_reduce, ring_reduce_scatter, ring_all_gather, seed=seed)
