"""The check of exercise 6.3: a linear layer whose weights of 4 bits are unpacked on chip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from utils import runtime
from utils.checks.cases import Case, far_fits
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import CaseResult, Diagnosis, same_as
from utils.checks.hidden import tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import cdiv, launched, within
from utils.checks.problem import Problem
from utils.checks.tiling import Tiling
from utils.checks.traffic import Budget, Passes

from .rules import one_group_is_right

Tensor = torch.Tensor
KERNEL = "int4_linear_kernel"
FP16, BF16 = torch.float16, torch.bfloat16
GROUP = 128


# ---- the right product, and wrong ones
def signed(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The codes in the low and in the high half of each byte, as numbers from -8 to 7."""
    halves = (codes % 16).int(), (codes // 16).int()
    return tuple(torch.where(half > 7, half - 16, half) for half in halves)


def weight_of(low: Tensor, high: Tensor, scales: Tensor) -> Tensor:
    """(N, K) from the codes of even and of odd inputs (N, K / 2), and a scale for each 128."""
    codes = torch.stack((low, high), -1).flatten(1).to(scales.dtype)
    return codes * scales.repeat_interleave(GROUP, 1)


def linear(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """(M, N) in x's dtype, of a weight that is unpacked first."""
    return x @ weight_of(*signed(codes), scales).to(x.dtype).T


def _unsigned(x: Tensor, codes: Tensor, scales: Tensor, less: int = 0) -> Tensor:
    return x @ weight_of((codes % 16).int() - less, (codes // 16).int() - less, scales).to(x.dtype).T


def _high_first(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    low, high = signed(codes)
    return x @ weight_of(high, low, scales).to(x.dtype).T


def _halves_of_the_group(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    low, high = (half.unflatten(1, (-1, GROUP // 2)) for half in signed(codes))
    in_order = torch.cat((low, high), -1).flatten(1).to(scales.dtype)
    return x @ (in_order * scales.repeat_interleave(GROUP, 1)).to(x.dtype).T


def _only(half: int) -> Callable[..., Tensor]:
    def one(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        halves = list(signed(codes))
        halves[1 - half] = torch.zeros_like(halves[half])
        return x @ weight_of(*halves, scales).to(x.dtype).T

    return one


def _with_scales(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, codes, scales: linear(x, codes, change(scales))


def _last_group(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return linear(x[:, -GROUP:], codes[:, -GROUP // 2 :], scales[:, -1:])


# ---- cases
def _cases(seed: int) -> list[Case]:
    draw = generator(seed)
    n, odd = draw.choice((48, 80)), draw.choice((21, 37, 53))

    def case(kind: str, M: int, N: int, G: int, dtype: torch.dtype = FP16, layout: str = "contiguous") -> Case:
        return Case(kind, {"M": M, "N": N, "G": G}, dtype, layout, seed=seed)

    cases = [
        case("one group", 16, 32, 1),
        case("several groups", 16, n, 3),
        case("ragged", draw.randint(3, 15), odd, 2),
        case("one row", 1, n, 2),
        case("64 rows", 64, 32, 2),
        case("between tiles", draw.randint(17, 31), odd, 1, BF16),
        case("ragged", draw.randint(3, 15), odd, 3, BF16),
        case("one output", 2, 1, 1),
        case("ragged", 2, 129, 1),  # one output more than tiles of any power of two up to 128 hold
        case("ragged", draw.randint(5, 9), odd, 2, layout="transposed"),
        case("ragged", draw.randint(5, 9), odd, 2, BF16, "strided"),
        case("long sum", 2, 16, 64, BF16),
        case("long sum", 2, 16, 64),
    ]
    return cases + ([case("ragged", 3, 20, 1, layout="far")] if far_fits(FP16) else [])


def _inputs(case: Case) -> tuple[Tensor, ...]:
    """x, codes of all sixteen values, and scales that differ by a factor of ten."""
    K = case.sizes["G"] * GROUP
    source = torch.Generator().manual_seed(case.seed + case.numel("M", "N", "G"))
    codes = torch.randint(0, 256, (case.sizes["N"], K // 2), generator=source).to(torch.uint8)
    scales = torch.exp(torch.rand(case.shape("N", "G"), generator=source) * 2.3) / 50
    x = case.tensor("x", "M", K)
    if case.kind == "long sum":  # sums that grow: what a short accumulator loses
        x = x.abs()
        codes &= 0x77
    return x, codes.to(runtime.DEVICE), scales.to(runtime.DEVICE)


def _huge() -> tuple[Tensor, ...]:
    """A weight of more than 2^31 bytes, whose memory nothing fills."""
    N = 2**24 + 40
    codes = torch.empty((N, 128), dtype=torch.uint8, device=runtime.DEVICE)
    scales = torch.empty((N, 2), dtype=torch.float32, device=runtime.DEVICE)
    return torch.ones((1, 256), dtype=FP16, device=runtime.DEVICE), codes, scales


# ---- what is wrong
def _budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    """Codes and scales once, x once for each tile of outputs."""
    tiles = cdiv(case.sizes["N"], launch["BLOCK_N"])
    return Budget(
        {
            "codes_ptr": Passes("N", "G", GROUP // 2, element_size=1),
            "scales_ptr": Passes("N", "G", element_size=4),
            "x_ptr": Passes("M", "G", GROUP, times=tiles),
        },
        {"o_ptr": Passes("M", "N")},
        exact=True,
    )


def _codes_once(trial: CaseResult) -> Problem | None:
    """An inspection: each byte of codes is loaded once."""
    found, needed = trial.profile.by_argument.get("codes_ptr"), trial.case.numel("N", "G", GROUP // 2)
    if found is None or found.bytes_loaded <= needed:
        return None
    cause = "the bytes are what takes the time: load each once, take both codes out of it, and use them for all rows"
    return Problem(
        f"codes_ptr is loaded {found.bytes_loaded / needed:.1f} times, expected 1 "
        f"({found.bytes_loaded:,} bytes, expected {needed:,})",
        classic(cause, 6),
    )


def _tiles(trials: Sequence[CaseResult]) -> Tiling | None:
    found = launched(trials, KERNEL)
    if found is None:
        return None
    in_line = tuple(found["grid"][1:]) == (1, 1)
    return Tiling("M N", tiles={"N": found["BLOCK_N"]}, grid="N" if in_line else (), loops={"G": 1})


_MISTAKES = (
    same_as(_unsigned, classic("codes of 8 to 15 count as such: in two's complement they stand for -8 to -1", 1)),
    same_as(
        lambda x, codes, scales: _unsigned(x, codes, scales, 8),
        classic("8 is taken off every code: they are in two's complement, so only those of 8 and above lose 16", 1),
    ),
    same_as(_high_first, classic("the halves of a byte are exchanged: an even input's code is in the low one", 2)),
    same_as(
        _halves_of_the_group,
        classic("the low halves are taken for the first 64 inputs of a group: they belong to the even ones", 2),
    ),
    same_as(_only(0), classic("only the even inputs count: the codes in the high halves are missing", 2)),
    same_as(_only(1), classic("only the odd inputs count: the codes in the low halves are missing", 2)),
    same_as(
        _with_scales(lambda s: s[:, :1].expand_as(s)), classic("every group has the scale of the first one", 3)
    ),
    same_as(
        _with_scales(lambda s: s[:, -1:].expand_as(s)),
        classic("the scale of the last group multiplies the sum of all: scale each group's sum before it is added", 3),
    ),
    same_as(
        _with_scales(lambda s: s.flatten()[: s.numel()].view(s.shape[1], s.shape[0]).T),
        classic("the scales are read as (K / 128, N): those of an output lie side by side", 3),
    ),
    same_as(_with_scales(torch.ones_like), classic("the scales are left out", 3)),
    same_as(_last_group, classic("only the last group is left: each group's sum is added to the total", 4)),
    Diagnosis(
        lambda e: bool(e.difference.never_written.any()),
        classic("rows or outputs are never written: BLOCK_M covers all rows, the grid all outputs", 7),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.layout not in ("contiguous", "far")),
        classic("only an x of other strides goes wrong: element (m, k) lies at m * stride_xm + k * stride_xk", 7),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == "long sum" or case.dtype == BF16)
        or e.only(lambda case: case.kind == "long sum"),
        classic("only long sums go wrong: the total of all groups stays float32 until it is stored", 5),
    ),
    Diagnosis(
        one_group_is_right,
        classic("one group is right, several are not: does each step read its own codes, inputs and scales?", 4),
    ),
)  # fmt: skip

INT4 = Exercise(
    "6.3",
    "a product with weights of 4 bits",
    points=14,
    observe=tried("6.3", "int4_linear", ("",), _cases, _inputs),
)


@INT4.checked_by
def check_int4(int4_linear: Callable[[Tensor, Tensor, Tensor], Tensor], seed: int | None = None) -> None:
    """Exercise 6.3: a linear layer with weights of 4 bits, each byte of which is read once.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    check_kernel(
        INT4,
        int4_linear,
        linear,
        _cases(seed),
        _inputs,
        tiling=_tiles,
        inspections=[_codes_once, within(KERNEL, _budget)],
        diagnose=_MISTAKES,
        compiled=Compiled(wide=8),
        huge=_huge,
        seed=seed,
        notice="a weight takes 4.25 bits of traffic, whether one row needs it or 64",
    )
