"""The check of exercise 4.1: ring reduce-scatter, all-gather and all-reduce from messages between neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from utils.checks.core import Exercise, generator
from utils.checks.lab4.sights import Scene, Sight
from utils.checks.lab4.trial import Part, Trial
from utils.checks.lab4.words import classic
from utils.checks.problem import Problem
from utils.distributed import calls, record_collectives

#: In a coded tensor rank r holds BASE ** r: digit r of a result says how often rank r's value is in it.
BASE = 16
_DEADLOCK = classic("every rank sends first and receives afterwards: start both messages, then wait for both", 1)
_DIRECT = classic(
    "in a ring a rank sends to its right neighbour alone and receives from the left one: chunks are passed on", 8
)
_SMALL_STEP = "the first chunk is as large as any, the last may be smaller or empty: take sizes from the chunks"


@dataclass(frozen=True)
class Reduction:
    """One tensor to reduce: elements, dtype, operation, memory layout and the ranks that take part (() for all)."""

    numel: int
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    layout: str = "contiguous"
    members: tuple[int, ...] = ()
    coded: bool = True

    def __str__(self) -> str:
        parts = [f"{self.numel} elements", str(self.dtype).removeprefix("torch."), self.op]
        parts += [] if self.layout == "contiguous" else [self.layout]
        return ", ".join(parts + ([f"group of ranks {list(self.members)}"] if self.members else []))

    def ranks(self, world_size: int) -> tuple[int, ...]:
        """The ranks that take part, in the group's order."""
        return self.members or tuple(range(world_size))

    def tensor(self, position: int, seed: int) -> torch.Tensor:
        """What the rank at a position of the group starts with."""
        if self.coded:
            return torch.full((self.numel,), BASE**position, dtype=self.dtype)
        source = torch.Generator().manual_seed(1000 * seed + 10 * self.numel + position)
        if not self.dtype.is_floating_point:
            return torch.randint(-50, 50, (self.numel,), generator=source).to(self.dtype)
        return torch.randn(self.numel, generator=source).to(self.dtype)

    def expected(self, world_size: int, seed: int) -> torch.Tensor:
        """The result in float64 (integers stay integers)."""
        parts = [self.tensor(k, seed) for k in range(len(self.ranks(world_size)))]
        wide = torch.float64 if self.dtype.is_floating_point else torch.int64
        total = torch.stack([part.to(wide) for part in parts]).sum(0)
        return total / len(parts) if self.op == "mean" else total


@dataclass
class Outcome:
    """What one rank has after one reduction.

    Its tensor, what the function returned, how often it called each kind of collective, how many elements it sent, and
    the peers of its messages by kind.
    """

    tensor: torch.Tensor
    returned: Any
    kinds: dict[str, int]
    sent: int
    peers: dict[str, set[int | None]]


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed":
        rows = next(d for d in range(2, values.numel() + 1) if values.numel() % d == 0)
        return values.view(rows, -1).t().contiguous().t()
    return values.clone()


def _play(
    answer: Mapping[str, Callable], name: str, reductions: Sequence[Reduction], seed: int
) -> list[Outcome | None]:
    """On each rank: one function over several tensors."""
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
        outcomes.append(Outcome(tensor.detach().reshape(-1), returned, kinds, sent, peers))
    return outcomes


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
    budget = rounds * (size - 1) * -(-reduction.numel // size)
    if outcome.sent > budget:
        cause = (
            "whole tensors travel: each message holds one chunk, a part in N of the tensor"
            if outcome.sent >= (size - 1) * reduction.numel
            else "a step too many, or chunks that are too large: N - 1 steps of one chunk each"
        )
        return Problem(
            f"rank {rank} sends {outcome.sent:,} elements in {name}, {budget:,} are enough",
            classic(cause, 6),
            (str(reduction),),
        )
    return None


def _judge(name: str, reductions: Sequence[Reduction], seed: int) -> Callable[[list[Sight]], Problem | None]:
    def judge(sights: list[Sight]) -> Problem | None:
        world_size = len(sights)
        for k, reduction in enumerate(reductions):
            ranks = reduction.ranks(world_size)
            outcomes = [sights[rank].value[k] for rank in ranks]
            for rank, outcome in zip(ranks, outcomes, strict=True):
                if problem := _rule(name, outcome, rank, reduction, ranks):
                    return problem
            if problem := _values(name, reduction, ranks, outcomes, seed, world_size):
                return problem
        return None

    return judge


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
        if _close(got, expected, reduction.dtype):
            continue
        bad = ~torch.isclose(got.to(expected.dtype), expected, **_tolerance(reduction.dtype))
        problem = _wrong(name, reduction, rank, position, got, expected, bad, start, outcome.kinds.get("send", 0), size)
        return _of_the_whole_job(problem, reduction, got, expected, size, world_size)
    if name == "ring_all_reduce":
        for rank, outcome in zip(ranks, outcomes, strict=True):
            if not torch.equal(outcome.tensor, outcomes[0].tensor):
                return Problem(
                    f"rank {rank} ends with other bits than rank {ranks[0]}",
                    "each sum must be formed on one rank and copied to the others, not formed on every rank",
                    (str(reduction),),
                )
    return None


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    rounding = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return {"rtol": 4 * rounding, "atol": 8 * rounding}


def _close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.allclose(got.to(expected.dtype), expected, **_tolerance(dtype))


def _wrong(
    name: str,
    reduction: Reduction,
    rank: int,
    position: int,
    got: torch.Tensor,
    expected: torch.Tensor,
    bad: torch.Tensor,
    start: torch.Tensor,
    messages: int,
    size: int,
) -> Problem:
    first = int(bad.nonzero()[0])
    marks = "".join("X" if piece.any() else "." for piece in bad.tensor_split(size))
    details = [
        f"{reduction}: {int(bad.sum())} of {bad.numel()} elements differ on rank {rank}, first [{first}]: "
        f"got {got[first].item():g}, expected {expected[first].item():g}"
    ]
    if name != "ring_reduce_scatter":
        details.append(f"chunks on rank {rank}: {marks}   ('.' right, 'X' wrong)")
    cause = _factor_of(reduction, got, expected, size)
    rest = reduction.numel % size
    if not cause and name == "ring_all_reduce" and rest and not bad[:-rest].any() and got[-rest:].equal(start[-rest:]):
        cause = classic(f"the last {rest} elements are in no chunk: not all chunks are of numel // N elements", 5)
    if not cause and name == "ring_all_reduce" and torch.equal(got, start) and size > 1:
        cause = "the tensor is as it was: the chunks must be views of it, so that it changes in place"
    if not cause and reduction.coded and reduction.op == "sum" and name != "ring_all_gather":
        counts = _digits(got[first].item(), size)
        held = ", ".join(f"rank {k}'s x {n}" for k, n in enumerate(counts))
        details.append(f"element [{first}] holds {held}" if counts else "it is no sum of the ranks' values")
        cause = _cause_of_counts(counts, name, marks, position, size, messages)
    if not cause and name == "ring_all_gather":
        cause = classic(
            "a chunk lands where another one belongs, or does not travel on: in step s rank r sends r - s", 4
        )
    if not cause and reduction.numel % size:
        cause = classic(_SMALL_STEP, 5)
    return Problem(f"{name} is wrong", cause, tuple(details))


def _of_the_whole_job(
    problem: Problem, reduction: Reduction, got: torch.Tensor, expected: torch.Tensor, size: int, world_size: int
) -> Problem:
    """The same problem; in a group of some ranks its cause is that the others are counted."""
    if not reduction.members:
        return problem
    cause = classic("only a group of some ranks goes wrong: ranks count within it, dist.get_rank(group)", 5)
    mean = expected * size / world_size
    if reduction.op == "mean" and torch.allclose(got.to(mean.dtype), mean, **_tolerance(reduction.dtype)):
        cause = "only in a group is the mean wrong: its sum is divided by all ranks, not by dist.get_world_size(group)"
        cause = classic(cause, 5)
    return Problem(problem.headline, cause, problem.details)


def _factor_of(reduction: Reduction, got: torch.Tensor, expected: torch.Tensor, size: int) -> str:
    if not expected.is_floating_point():
        return ""
    wide = got.to(expected.dtype)
    if reduction.op == "mean" and torch.allclose(wide, expected * size, **_tolerance(reduction.dtype)):
        return classic("this is the sum: the mean is a part in N of it", 2)
    if reduction.op == "mean" and torch.allclose(wide, expected / size, **_tolerance(reduction.dtype)):
        return classic("the sum is divided by N twice", 2)
    if reduction.op == "sum" and torch.allclose(wide, expected / size, **_tolerance(reduction.dtype)):
        return classic("this is the mean although the sum is asked for: op says which", 2)
    if reduction.op == "mean" and reduction.coded:
        ratio = (wide / expected).unique()
        if len(ratio) <= 2 and all(
            abs(r - 1) < 1e-5 or abs(r * size - 1) < 1e-5 or abs(r / size - 1) < 1e-5 for r in ratio
        ):
            return classic("some chunks are divided by N and some are not, or twice: each exactly once, on one rank", 2)
    return ""


def _digits(value: float, size: int) -> list[int]:
    """How often each rank's value is in a coded sum; empty if it is none."""
    if not 0 <= value < BASE**size or value != int(value):  # NaN is not between them
        return []
    return [int(value) // BASE**k % BASE for k in range(size)]


def _cause_of_counts(counts: list[int], name: str, marks: str, position: int, size: int, messages: int) -> str:
    if name == "ring_all_reduce" and marks.count(".") == 1 and marks[position] == ".":
        return classic("only the rank's own chunk is complete: the second round, the all-gather, is missing", 4)
    if not counts:
        return classic("memory that no message has filled, or a chunk that is overwritten while it is still sent", 3)
    if messages < size - 1:
        return classic(f"a step too few: {messages} messages, where a chunk takes N - 1 = {size - 1} to go round", 3)
    if any(count > 1 for count in counts):
        where = "in the all-gather chunks are copied, not added" if name == "ring_all_reduce" else "a step too many"
        return classic(f"a value is added more than once: {where}, or a chunk goes round too far", 3)
    if sum(counts) == 1 and not counts[position]:
        return classic("nothing is added: what arrives belongs on top of the rank's own values", 3)
    return classic(
        "a rank's values are missing: a step too few, or another chunk than the one that arrived is sent on", 3
    )


def _parts(seed: int) -> list[Part]:
    draw = generator(seed)
    even, odd = 3 * draw.randint(2, 5), 3 * draw.randint(2, 5) + draw.choice((1, 2))
    plain = [Reduction(even), Reduction(odd), Reduction(odd, op="mean")]
    edges = [Reduction(1), Reduction(2), Reduction(0), Reduction(2 * odd, layout="transposed", coded=False)]
    values = [
        Reduction(odd, coded=False),
        Reduction(odd, torch.float64, "mean", coded=False),
        Reduction(odd, torch.int64, coded=False),
        Reduction(odd, torch.bfloat16, coded=False),
        Reduction(4099, coded=False),
    ]
    pair = [Reduction(odd, members=(0, 2)), Reduction(odd, op="mean", members=(0, 2))]
    five = [Reduction(odd), Reduction(odd, members=(0, 1, 2, 4))]

    def part(title: str, name: str, reductions: list[Reduction], ranks: int = 3) -> Part:
        return Part(
            Scene(f"{name}, {title}", _play, {"name": name, "reductions": reductions, "seed": seed}, ranks),
            _judge(name, reductions, seed),
            stuck=_DEADLOCK,
            raised={"size of tensor": classic(_SMALL_STEP, 5), "must match": classic(_SMALL_STEP, 5)},
            same_calls=False,
        )

    return [
        part("whole and ragged chunks", "ring_reduce_scatter", plain),
        part("whole and ragged chunks", "ring_all_gather", plain[:2]),
        part("whole and ragged chunks", "ring_all_reduce", plain),
        part("fewer elements than ranks", "ring_all_reduce", edges),
        part("dtypes", "ring_all_reduce", values),
        part("a group of two of the ranks", "ring_all_reduce", pair),
        part("five ranks", "ring_reduce_scatter", five, 5),
        part("five ranks", "ring_all_reduce", five, 5),
    ]


TRIAL = Trial(
    Exercise("4.1", "ring all-reduce"),
    ("ring_all_reduce", "ring_reduce_scatter", "ring_all_gather"),
    _parts,
    "every rank sends 2 n (N - 1) / N elements, however many ranks there are",
)


def check_ring_all_reduce(
    ring_all_reduce: Callable, ring_reduce_scatter: Callable, ring_all_gather: Callable, seed: int | None = None
) -> None:
    """Exercise 4.1: the collectives of a ring, from messages between neighbours.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    TRIAL.check(ring_all_reduce, ring_reduce_scatter, ring_all_gather, seed=seed)
