"""The tokens of exercise 6.8, what becomes of them, and what mistakes make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.checks.core import classic


@dataclass(frozen=True)
class Tokens:
    """Tokens of some ranks, and the experts that they go to.

    ``tokens`` says how many each rank has (of as many ranks as take part, the first ones). ``kind`` is "usual";
    "one expert", where all go to the last; "idle experts", where every second has none; "views", where the tensors are
    views; or "infinite", where one token is infinite.
    """

    seed: int
    tokens: tuple[int, ...]
    experts: int = 6
    chosen: int = 2
    hidden: int = 4
    dtype: torch.dtype = torch.float32
    kind: str = "usual"

    def __str__(self) -> str:
        sizes = f"{' + '.join(map(str, self.tokens))} tokens, E={self.experts} k={self.chosen} H={self.hidden}"
        words = [sizes, str(self.dtype).removeprefix("torch.")]
        return ", ".join(words + ([self.kind] if self.kind != "usual" else []))

    def _source(self, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + 10 * self.experts + rank)

    def x(self, rank: int) -> Tensor:
        """(T, H), the tokens of a rank."""
        x = torch.randn(self.tokens[rank], self.hidden, generator=self._source(rank))
        if self.kind == "infinite" and rank == 0:
            x[0, 0] = torch.inf
        x = x.to(self.dtype)
        return x.t().contiguous().t() if self.kind == "views" else x

    def choices(self, rank: int) -> Tensor:
        """(T, k), their experts."""
        allowed = torch.arange(self.experts)
        if self.kind == "one expert":
            allowed = allowed[-1:]
        if self.kind == "idle experts":
            allowed = allowed[::2]
        scores = torch.rand(self.tokens[rank], len(allowed), generator=self._source(rank))
        found = allowed[scores.argsort(1)[:, : self.chosen]]
        return found.t().contiguous().t() if self.kind == "views" else found

    def weights(self, rank: int) -> Tensor:
        """(T, k), their weights."""
        return torch.rand(self.tokens[rank], self.chosen, generator=self._source(rank)) + 0.1

    def factors(self) -> Tensor:
        """(E, H): an expert multiplies its rows by these powers of two, without rounding."""
        source, shape = self._source(99), (self.experts, self.hidden)
        signs = 2 * torch.randint(0, 2, shape, generator=source) - 1
        return (signs * 2.0 ** torch.randint(-2, 3, shape, generator=source)).to(self.dtype)

    def gradient(self, rank: int) -> Tensor:
        """(T, H), the gradient of a rank's outputs."""
        return torch.randn(self.tokens[rank], self.hidden, generator=self._source(rank + 50)).to(self.dtype)

    def share(self, rank: int, ranks: int) -> slice:
        """The experts of a rank."""
        found = torch.arange(self.experts).tensor_split(ranks)[rank].tolist()
        return slice(found[0], found[-1] + 1) if found else slice(self.experts, self.experts)


@dataclass(frozen=True)
class Reading:
    """How an answer may take the way there and back; the defaults are right.

    Attributes:
        token: (choices in order, k, T) -> the token of each.
        here: (experts, E, ranks) -> the rank of each.
        sort: whether the rows that have come are sorted by expert.
        unsort: (rows by expert, their order) -> the rows as they came.
        unsort_home: (rows by expert, the choices' order) -> the rows choice by choice.
        add: (rows (T, k, H), weights (T, k), experts (T, k)) -> (T, H).
    """

    token: Callable[[Tensor, int, int], Tensor] = lambda order, k, tokens: order // k
    here: Callable[[Tensor, int, int], Tensor] | None = None
    sort: bool = True
    unsort: Callable[[Tensor, Tensor], Tensor] = lambda rows, order: rows[order.argsort()]
    unsort_home: Callable[[Tensor, Tensor], Tensor] = lambda rows, order: rows[order.argsort()]
    add: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda each, weights, experts: (each * weights[..., None]).sum(1)


RIGHT = Reading()


def rank_of(experts: Tensor, count: int, ranks: int) -> Tensor:
    """The rank that has each expert."""
    sizes = torch.tensor([len(share) for share in torch.arange(count).tensor_split(ranks)])
    return torch.arange(ranks).repeat_interleave(sizes)[experts]


def dispatched(case: Tokens, ranks: int, reading: Reading = RIGHT) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """Of each rank: the rows that have come in float64, the expert of each, and the orders in which choices left.

    Rows lie by expert if the reading sorts them, otherwise as they came: by rank, then by expert.
    """
    rows, experts, orders = [[] for _ in range(ranks)], [[] for _ in range(ranks)], []
    for rank in range(ranks):
        chosen = case.choices(rank).flatten()
        home = (reading.here or rank_of)(chosen, case.experts, ranks)
        order = (home * case.experts + chosen).argsort(stable=True)
        token = reading.token(order, case.chosen, case.tokens[rank])
        orders.append(order)
        for other in range(ranks):
            mine = home[order] == other
            rows[other].append(case.x(rank).double()[token[mine]])
            experts[other].append(chosen[order][mine])
    found = []
    for each, of in zip(map(torch.cat, rows), map(torch.cat, experts), strict=True):
        by = of.argsort(stable=True) if reading.sort else torch.arange(len(of))
        found.append((each[by], of[by], orders))
    return found


def combined(case: Tokens, ranks: int, reading: Reading = RIGHT) -> list[Tensor]:
    """Of each rank (T, H) float64: the weighted sums of its tokens' results."""
    sent = [[[] for _ in range(ranks)] for _ in range(ranks)]
    arrived = dispatched(case, ranks, Reading(sort=False))
    orders, factors = arrived[0][2], case.factors().double()
    homes = [rank_of(case.choices(rank).flatten(), case.experts, ranks) for rank in range(ranks)]
    for other, (rows, experts, _) in enumerate(arrived):
        by = experts.argsort(stable=True)
        results = reading.unsort(rows[by] * factors[experts[by]], by)
        for rank, part in enumerate(results.split([int((home == other).sum()) for home in homes])):
            sent[rank][other] = part
    found = []
    for rank in range(ranks):
        each = reading.unsort_home(torch.cat(sent[rank]), orders[rank])
        weights, experts = case.weights(rank).double(), case.choices(rank)
        found.append(reading.add(each.view(*experts.shape, case.hidden), weights, experts))
    return found


def gradients(case: Tokens, ranks: int) -> list[dict[str, Tensor]]:
    """Of each rank the gradients in float64 of its tokens, its weights and its experts' factors."""
    factors = case.factors().double().requires_grad_()
    inputs = [(case.x(r).double().requires_grad_(), case.weights(r).double().requires_grad_()) for r in range(ranks)]
    total = torch.zeros((), dtype=torch.float64)
    for rank, (x, weights) in enumerate(inputs):
        each = x[:, None] * factors[case.choices(rank)]
        total = total + ((each * weights[..., None]).sum(1) * case.gradient(rank).double()).sum()
    total.backward()
    return [
        {"x": x.grad, "weights": weights.grad, "factors": factors.grad[case.share(rank, ranks)]}
        for rank, (x, weights) in enumerate(inputs)
    ]


def _largest(each: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Of each token the result of its last expert alone."""
    last = experts.argmax(1)
    return (each * weights[..., None])[torch.arange(len(each)), last]


def _shuffled(each: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Weights in the order of the tokens on results in the order of the experts."""
    order = experts.flatten().argsort(stable=True)
    return (each * weights.flatten()[order.argsort()].view(weights.shape)[..., None]).sum(1)


#: What mistakes of ``dispatch`` send where, and their cause and number.
SENT: tuple[tuple[Reading, str, int], ...] = (
    (Reading(sort=False), "the rows lie as they came, by rank and then by expert: sort them by expert once more", 4),
    (Reading(token=lambda order, k, tokens: order % max(tokens, 1)),
     "a choice is taken for another token's: choice c of the flattened experts is token c // k's", 3),
    (Reading(here=lambda experts, count, ranks: experts % ranks),
     "experts are dealt out in turn: each rank has a share of neighbours", 5),
)  # fmt: skip

#: What mistakes of ``combine`` make of the results.
ADDED: tuple[tuple[Reading, str, int], ...] = (
    (Reading(unsort=lambda rows, order: rows), "results are sent back by expert: they go back in the order in which "
     "their rows came", 6),
    (Reading(unsort=lambda rows, order: rows[order]), "results are sorted by expert once more on their way back: the "
     "inverse of an order is order.argsort()", 6),
    (Reading(unsort_home=lambda rows, order: rows), "results that are home are not put back: they lie by expert, not "
     "by token", 6),
    (Reading(unsort_home=lambda rows, order: rows[order]), "results that are home are sorted once more: the inverse of "
     "an order is order.argsort()", 6),
    (Reading(add=lambda each, weights, experts: each.sum(1)), "the weights are left out", 7),
    (Reading(add=lambda each, weights, experts: each.mean(1)), "the mean of the results is taken, without weights", 7),
    (Reading(add=lambda each, weights, experts: (each * weights[..., None]).mean(1)), "the weighted results are "
     "averaged: they are to be added", 7),
    (Reading(add=lambda each, weights, experts: (each * (weights**2)[..., None]).sum(1)), "the weights count twice", 7),
    (Reading(add=_shuffled), "each result has the weight of another one: weights lie by token, rows by expert", 7),
    (Reading(add=_largest), "of each token one result is left: its k results are to be added", 7),
    (Reading(add=lambda each, weights, experts: (each * weights[..., None])[:, 0]), "of each token only the first "
     "choice counts: its k results are to be added", 7),
)  # fmt: skip


def named(readings: Sequence[tuple[Reading, str, int]], found: Callable[[Reading], bool]) -> str:
    """The cause of the first mistake that gives just this, or nothing."""
    return next((classic(cause, number) for reading, cause, number in readings if found(reading)), "")
