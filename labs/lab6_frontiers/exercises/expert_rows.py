"""The grouped product in plain PyTorch, and the groups of rows that exercise 6.7 tries it on."""

from __future__ import annotations

import random

import torch

from utils import runtime
from utils.checks.cases import Case, with_layout
from utils.checks.core import generator

Tensor = torch.Tensor
FP16, BF16 = torch.float16, torch.bfloat16
LONG, MANY, FEW_ROWS, MANY_ROWS = "long sum", "many experts", "more experts than rows", "many rows"


def experts_of(counts: Tensor) -> Tensor:
    """(T,): the expert of each row."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts.long())


def product(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """(T, N) in x's dtype, expert by expert."""
    return multiplied(x, weights, experts_of(counts))


def multiplied(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Each row of x times the matrix of the expert that is named for it."""
    out = x.new_zeros(len(experts), weights.shape[2])
    for expert in experts.unique().tolist():
        out[experts == expert] = x[experts == expert] @ weights[expert]
    return out


# ---- groups of rows
def counts_of(case: Case) -> list[int]:
    """Rows of each of the case's E experts, T in all."""
    T, E = case.shape("T", "E")
    draw = random.Random(f"{case.seed}/{case.kind}/{T}/{E}")
    if case.kind in ("equal groups", "one row each", "one element"):
        return [T // E] * E
    if case.kind == "one expert has all":
        return [T if expert == E // 2 else 0 for expert in range(E)]
    if case.kind == "large, then small":
        return [T - 3, 2, 1]
    if case.kind == MANY_ROWS:
        return [T - 1, 1]
    busy = list(range(E))
    if case.kind == "an expert without rows":
        busy.remove(E // 2)
    elif case.kind == "first and last without rows":
        busy = busy[1:-1]
    elif case.kind == MANY:
        busy = sorted(draw.sample(busy, E // 2))
    elif case.kind == FEW_ROWS:  # one for each expert that has any, the last among them
        busy = [*sorted(draw.sample(busy[:-1], T - 1)), E - 1]
    cuts = [0, *sorted(draw.sample(range(1, T), len(busy) - 1)), T]
    found = [0] * E
    for expert, begin, end in zip(busy, cuts, cuts[1:], strict=False):
        found[expert] = end - begin
    return found


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and counts of a case."""
    x = case.tensor("x", "T", "K", layout="contiguous")
    weights = case.tensor("weights", "E", "K", "N", layout="contiguous", scale=0.2)
    if case.kind == LONG:  # sums that grow: what a short accumulator loses
        x, weights = x.abs() / 4, weights.abs() / 4
    counts = torch.tensor(counts_of(case), dtype=torch.int32, device=runtime.DEVICE)
    return with_layout(x, case.layout), weights, counts


def cases(seed: int, m: int = 32) -> list[Case]:
    """Simplest first, for a kernel with tiles of m rows."""
    draw = generator(seed)
    few, odd = draw.randint(3, m - 3), draw.choice((21, 37, 53))

    def case(
        kind: str, T: int, E: int, K: int = 32, N: int = 32, dtype: torch.dtype = FP16, layout: str = "contiguous"
    ) -> Case:
        return Case(kind, {"T": T, "E": E, "K": K, "N": N}, dtype, layout, seed=seed)

    return [
        case("one expert", m, 1),
        case("one expert", m + few, 1, 64, odd),
        case("equal groups", 3 * m, 3, 64, 64),
        case("ragged", 2 * m + few, 4, 64),
        case("large, then small", m + 4, 3),
        case("an expert without rows", 2 * m + few, 4),
        case("first and last without rows", 2 * m + few, 5),
        case("one expert has all", m, 6, 48, odd),
        case("groups in one tile", m - 1, 5),
        case("one row each", 9, 9),
        case("one element", 1, 1, 1, 1),
        case("ragged", 3, 2, 16, 129),  # a column more than tiles of any power of two up to 128 hold
        case("ragged K and N", m + few, 3, odd, odd + draw.choice((8, 27))),
        case(MANY, 2 * m + few, 40),
        case(FEW_ROWS, 5, 12),
        case(MANY_ROWS, m * (m + 2) - 1, 2, 16, 16),  # more tiles than a tile has rows, and one more in the last group
        case("ragged", m + few, 3, 48, odd, layout="padded"),
        case("ragged", 2 * m + few, 4, odd, 48, BF16),
        case(LONG, 8, 2, 4096, 16, BF16),
        case(LONG, 8, 2, 4096, 16),
    ]


def huge_x() -> tuple[Tensor, ...]:
    """x and out of more than 2^31 numbers each, whose memory nothing fills; the last expert has the last row."""
    x = torch.empty((2**18 + 2, 2**13), dtype=FP16, device=runtime.DEVICE)
    weights = torch.empty((2, 2**13, 2**13), dtype=FP16, device=runtime.DEVICE)
    return x, weights, torch.tensor([2**18 + 1, 1], dtype=torch.int32, device=runtime.DEVICE)


def huge_weights() -> tuple[Tensor, ...]:
    """Weights of more than 2^31 numbers, whose memory nothing fills; each expert has one row, and a sum few steps."""
    x = torch.ones((129, 2**6), dtype=FP16, device=runtime.DEVICE)
    weights = torch.empty((129, 2**6, 2**18), dtype=FP16, device=runtime.DEVICE)
    return x, weights, torch.ones(129, dtype=torch.int32, device=runtime.DEVICE)
