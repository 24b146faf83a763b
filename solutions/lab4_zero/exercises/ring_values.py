"""What a wrong result of exercise 4.1 is: from tensors whose digits say which ranks' values are in a sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from utils.checks.core import classic
from utils.checks.problem import Problem

#: In a coded tensor rank r holds BASE ** r: digit r of a result says how often rank r's value is in it.
BASE = 16
SMALL_STEP = "the first chunk is as large as any, the last may be smaller or empty: take sizes from the chunks"


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


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """What a sum of a few values of ``dtype`` may err, as ``torch.isclose`` takes it."""
    rounding = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return {"rtol": 4 * rounding, "atol": 8 * rounding}


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a result of ``dtype`` is right but for the rounding of its sums."""
    return torch.allclose(got.to(expected.dtype), expected, **tolerance(dtype))


def explained(
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
    """The problem of a rank whose result differs from what is expected (``bad``), with its likely cause."""
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
    if not cause and name == "ring_all_gather" and messages < size - 1:
        cause = classic(f"too few steps: {messages} messages, where a chunk takes N - 1 = {size - 1} to go round", 4)
    if not cause and name == "ring_all_gather" and not bad.tensor_split(size)[position].any():
        cause = classic(
            "a chunk lands where another one belongs, or does not travel on: in step s rank r sends r - s", 4
        )
    return Problem(f"{name} is wrong", cause, tuple(details))


def in_the_group(
    problem: Problem, reduction: Reduction, got: torch.Tensor, expected: torch.Tensor, size: int, world_size: int
) -> Problem:
    """The same problem; in a group of some ranks its cause is that the others are counted."""
    if not reduction.members:
        return problem
    cause = classic("only a group of some ranks goes wrong: ranks count within it, dist.get_rank(group)", 5)
    mean = expected * size / world_size
    if reduction.op == "mean" and torch.allclose(got.to(mean.dtype), mean, **tolerance(reduction.dtype)):
        cause = "only in a group is the mean wrong: its sum is divided by all ranks, not by dist.get_world_size(group)"
        cause = classic(cause, 5)
    return Problem(problem.headline, cause, problem.details)


def _factor_of(reduction: Reduction, got: torch.Tensor, expected: torch.Tensor, size: int) -> str:
    if not expected.is_floating_point():
        return ""
    wide = got.to(expected.dtype)
    if reduction.op == "mean" and torch.allclose(wide, expected * size, **tolerance(reduction.dtype)):
        return classic("this is the sum: the mean is a part in N of it", 2)
    if reduction.op == "mean" and torch.allclose(wide, expected / size, **tolerance(reduction.dtype)):
        return classic("the sum is divided by N twice", 2)
    if reduction.op == "sum" and torch.allclose(wide, expected / size, **tolerance(reduction.dtype)):
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
    if name == "ring_all_reduce" and marks.count(".") == 1 and marks[position] == "." and messages < 2 * (size - 1):
        return classic("only the rank's own chunk is complete: the second round, the all-gather, is missing", 4)
    if not counts:
        return ""
    if messages < size - 1:
        return classic(f"too few steps: {messages} messages, where a chunk takes N - 1 = {size - 1} to go round", 3)
    if name == "ring_all_reduce" and messages < 2 * (size - 1):
        return classic(
            f"{messages} messages, where a reduce-scatter and an all-gather take 2 (N - 1) = {2 * (size - 1)}", 3
        )
    if name == "ring_all_reduce":
        return ""  # its two halves are right: they come before it
    if any(count > 1 for count in counts):
        return classic("a value is added more than once: too many steps", 3) if messages > size - 1 else ""
    if sum(counts) == 1 and not counts[position]:
        return classic("nothing is added: what arrives belongs on top of the rank's own values", 3)
    if name == "ring_reduce_scatter" and sum(counts) == 1:
        return classic(
            "the rank's own values alone, after N - 1 steps: what arrives is not added, or another chunk ends "
            "here: chunk r is the last one that rank r receives",
            3,
        )
    cause = "a rank's values are missing: what arrives is added to another chunk than the one that is sent on next"
    return classic(cause, 3)
