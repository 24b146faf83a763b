"""The exchange of rows of exercise 6.8 by itself, and what is said of errors in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from utils.checks.core import classic, generator
from utils.checks.problem import Problem
from utils.checks.ranks.scenarios import RankObservation

#: Words of an exception -> its likely cause.
RAISED = {
    "Split sizes": "the sizes of the pieces must add up to the rows of their tensor: which are these, and which sizes?",
    "invalid gradient": classic("the gradient of rows goes back the way that they came: to each rank its own", 2),
    "Tensors must be contiguous": classic("rows and gradients may be views: what travels is contiguous", 2),
}
#: The same where the sizes that are given are right.
RAISED_BY_EXCHANGE = RAISED | {
    "Split sizes": classic(
        "all_to_all_single(output, input, sizes of the output, sizes of the input): they add up to its rows", 1
    ),
}


@dataclass(frozen=True)
class Rows:
    """How many rows each rank sends to each: drawn from a seed, some of them none."""

    seed: int

    def sizes(self, ranks: int) -> list[list[int]]:
        """sizes[r][s]: from r to s."""
        draw = generator(self.seed)
        found = [[draw.choice((0, 1, 2, 3)) for _ in range(ranks)] for _ in range(ranks)]
        found[0][ranks - 1], found[ranks - 1][0] = 4, 1
        return found

    def rows(self, rank: int, ranks: int) -> Tensor:
        """Two numbers a row: whose it is, and its index."""
        count = sum(self.sizes(ranks)[rank])
        return torch.stack([torch.full((count,), float(rank)), torch.arange(float(count))]).t()

    def right(self, rank: int, ranks: int) -> Tensor:
        """What a rank gets."""
        parts = [self.rows(r, ranks).split(self.sizes(ranks)[r])[rank] for r in range(ranks)]
        return torch.cat(parts)

    def gradient(self, rank: int, ranks: int) -> Tensor:
        """That of what a rank gets: its number, and an index."""
        count = len(self.right(rank, ranks))
        return torch.stack([torch.full((count,), float(rank + 10)), torch.arange(float(count))]).t()

    def right_gradient(self, rank: int, ranks: int) -> Tensor:
        """That of what a rank sends."""
        sizes = self.sizes(ranks)
        parts = [self.gradient(s, ranks).split([sizes[r][s] for r in range(ranks)])[rank] for s in range(ranks)]
        return torch.cat(parts)


def play_rows(answer: Mapping[str, Callable], rows: Rows, group: ProcessGroup | None = None) -> dict[str, Any]:
    """On each rank: rows there, and two gradients back, one of them a view of a single number."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sizes, options = rows.sizes(ranks), {"group": group} if group else {}
    sent, received = sizes[rank], [sizes[r][rank] for r in range(ranks)]
    gradients = []
    for gradient in (rows.gradient(rank, ranks), torch.ones(()).expand(sum(received), 2)):
        given = rows.rows(rank, ranks).requires_grad_()
        out = answer["exchange_rows"](given, sent, received, **options)
        out.backward(gradient)
        gradients.append(given.grad)
    return {"results": [out.detach(), *gradients], "out": out.detach(), "gradients": gradients}


def judge_rows(observations: Sequence[RankObservation], rows: Rows) -> Problem | None:
    """What is wrong in what the ranks got, or None."""
    ranks = len(observations)
    for rank, observed in enumerate(observations):
        right, got = rows.right(rank, ranks), observed.value["out"]
        if got.shape != right.shape or not torch.equal(got, right):
            return _wrong_rows(f"exchange_rows gives other rows on rank {rank}", got, right)
    for rank, observed in enumerate(observations):
        plain, of_ones = observed.value["gradients"]
        right = rows.right_gradient(rank, ranks)
        if plain is None or of_ones is None:
            return Problem(f"exchange_rows: rows have no gradient on rank {rank}", RAISED["invalid gradient"])
        for got, expected in ((plain, right), (of_ones, torch.ones_like(right))):
            if not torch.equal(got, expected):
                return _wrong_rows(
                    f"exchange_rows: the gradient of rank {rank}'s rows is wrong", got, expected,
                    RAISED["invalid gradient"],
                )  # fmt: skip
    return None


def _wrong_rows(headline: str, got: Tensor, right: Tensor, cause: str = "") -> Problem:
    if got.shape != right.shape:
        return Problem(headline, cause, (f"shape {tuple(got.shape)}, expected {tuple(right.shape)}",))
    row = int((got != right).any(1).nonzero()[0])
    return Problem(headline, cause, (f"row {row} is {got[row].tolist()}, expected {right[row].tolist()}",))
