"""The check of exercise 6.2: a product of e4m3 matrices with a scale for each 128 of K, in kernels of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from utils import runtime
from utils.checks.cases import Case
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence, same_as
from utils.checks.hidden import Tolerance, tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import by_memory, cdiv, tile_over
from utils.checks.problem import Problem
from utils.checks.tiling import Tiling

from .rules import one_group_is_right

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn
BLOCK = 128
#: Sides of the smallest tile of c for which the budget has room.
LEAST_TILE = 32


# ---- the right product, and wrong ones
def scaled(x: Tensor, scales: Tensor) -> Tensor:
    """The numbers of a matrix, in the scales' dtype."""
    return x.to(scales.dtype) * scales.repeat_interleave(BLOCK, 1)


def product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    """(M, N): bfloat16, and float64 where the scales are."""
    c = scaled(a, a_scales) @ scaled(b, b_scales).T
    return c if c.dtype == torch.float64 else c.bfloat16()


def _with(change_a: Callable[[Tensor], Tensor], change_b: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, a_scales, b, b_scales: product(a, change_a(a_scales), b, change_b(b_scales))


def _first(scales: Tensor) -> Tensor:
    return scales[:, :1].expand_as(scales)


def _last(scales: Tensor) -> Tensor:
    return scales[:, -1:].expand_as(scales)


def _turned(scales: Tensor) -> Tensor:
    return scales.flatten().view(scales.shape[1], scales.shape[0]).T


def _kept(scales: Tensor) -> Tensor:
    return scales


def _last_block(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    return product(a[:, -BLOCK:], a_scales[:, -1:], b[:, -BLOCK:], b_scales[:, -1:])


def _exchanged(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    rows = torch.arange(max(len(a), len(b)), device=a.device)
    return product(a, b_scales[rows[: len(a)] % len(b)], b, a_scales[rows[: len(b)] % len(a)])


# ---- cases
def _cases(seed: int) -> list[Case]:
    draw = generator(seed)

    def case(kind: str, M: int, N: int, G: int, layout: str = "contiguous") -> Case:
        return Case(kind, {"M": M, "N": N, "G": G}, FP8, layout, seed=seed)

    odd = {"M": draw.randint(3, 60), "N": draw.randint(65, 90)}
    return [
        case("one block", 64, 64, 1),
        case("several blocks", 64, 64, 3),
        case("ragged", odd["M"], odd["N"], 2),
        case("ragged", odd["N"], odd["M"], 3),
        case("one row", 1, draw.randint(33, 64), 2),
        case("one more than whole tiles", 129, 129, 1),
        case("one element", 1, 1, 1),
        case("ragged", draw.randint(3, 30), draw.randint(3, 30), 2, "padded"),
        case("a block of zeros", 20, 40, 3),
        case("long sum", 16, 16, 48),
    ]


def _inputs(case: Case) -> tuple[Tensor, ...]:
    """a, a_scales, b, b_scales: numbers up to 448, and scales that differ by a factor of ten."""
    K, source = case.sizes["G"] * BLOCK, torch.Generator().manual_seed(case.seed + case.numel("M", "N", "G"))
    found = []
    for rows in case.shape("M", "N"):
        x = (100 * torch.randn(rows, K, generator=source)).clamp(-448, 448)
        scales = torch.exp(torch.rand(rows, case.sizes["G"], generator=source) * 2.3) / 500
        if case.kind == "a block of zeros":
            x[:, BLOCK : 2 * BLOCK] = 0
            scales[:, 1] = 0
        if case.kind == "long sum":  # sums that grow: what a short accumulator loses
            x = x.abs()
        if case.layout == "padded":
            home = torch.full((rows, K + 48), torch.nan).to(FP8)
            home[:, 16 : 16 + K] = x.to(FP8)
            x = home.to(runtime.DEVICE)[:, 16 : 16 + K]
        found += [x.to(runtime.DEVICE, FP8), scales.to(runtime.DEVICE)]
    return tuple(found)


def _operand(rows: int, K: int, filled: bool) -> tuple[Tensor, Tensor]:
    """A matrix and its scales; with ``filled`` false nothing fills their memory."""
    made = torch.ones if filled else torch.empty
    x = made((rows, K), dtype=torch.uint8, device=runtime.DEVICE).view(FP8)
    return x, made((rows, K // BLOCK), device=runtime.DEVICE)


def _huge_a() -> tuple[Tensor, ...]:
    """Rows of a with more than 2^31 numbers together."""
    return *_operand(2**18 + 72, 2**13, False), *_operand(40, 2**13, True)


def _huge_b() -> tuple[Tensor, ...]:
    """Rows of b with more than 2^31 numbers together."""
    return *_operand(40, 2**13, True), *_operand(2**18 + 72, 2**13, False)


# ---- what is wrong
def _traffic(trial: CaseResult) -> Problem | None:
    """An inspection: a and b are read once for each tile of 32 columns or rows at most, c is written once."""
    case, c = trial.case, trial.outputs[0]
    tensors = dict(zip(("a", "a_scales", "b", "b_scales"), trial.args)) | {"c": c}
    found = by_memory(trial.profile.launches, tensors)
    wrote = found["c"].bytes_stored
    if wrote != c.nbytes:
        cause = "each element of c is stored once, when its sum is complete"
        return Problem(f"c: expected {c.nbytes:,} bytes stored, got {wrote:,}", classic(cause, 6))
    for name, other in (("a", "N"), ("b", "M"), ("a_scales", "N"), ("b_scales", "M")):
        times, one = cdiv(case.sizes[other], LEAST_TILE), case.numel("M" if other == "N" else "N", "G")
        one *= 4 if name.endswith("scales") else BLOCK
        loaded = found[name].bytes_loaded
        if not one <= loaded <= times * one:
            cause = f"a tile of c has at least {LEAST_TILE} rows and columns, and {name} is read once for each"
            passes = f"{loaded / one:.1f} times, expected 1 to {times}"
            return Problem(f"{name} is loaded {passes} ({loaded:,} bytes, one pass is {one:,})", classic(cause, 6))
    if moved := found[""].bytes_loaded + found[""].bytes_stored + found["c"].bytes_loaded:
        cause = "partial sums stay on chip: they are as large as c, and there is one for each block"
        return Problem(f"other memory: expected 0 bytes loaded and stored, got {moved:,}", classic(cause, 6))
    return None


def _tiles(trials: Sequence[CaseResult]) -> Tiling | None:
    trial = trials[0]
    if trial.profile is None or not trial.outputs:
        return None
    rows, columns = tile_over(trial.profile, trial.outputs[0])
    return Tiling("M N", tiles={"M": rows, "N": columns}, loops={"G": 1}) if rows * columns > 1 else None


def _as_integers(e: Evidence) -> bool:
    """Whether the codes were multiplied, not the numbers that they stand for."""
    a, a_scales, b, b_scales = e.trial.args
    codes = [x.contiguous().view(torch.uint8).cpu().double() for x in (a, b)]
    signed = [torch.where(x > 127, x - 256, x) for x in codes]
    scales = [x.cpu().double() for x in (a_scales, b_scales)]
    return any(e.close(product(x[0], scales[0], x[1], scales[1])) for x in (codes, signed))


_MISTAKES = (
    same_as(_with(_first, _first), classic("every block has the scales of the first one", 1)),
    same_as(
        _with(_last, _last),
        classic("the scales of the last block multiply the whole sum: they belong to the sum of their own 128", 1),
    ),
    same_as(_with(torch.ones_like, _kept), classic("the scales of a are left out", 2)),
    same_as(_with(_kept, torch.ones_like), classic("the scales of b are left out", 2)),
    same_as(_with(torch.ones_like, torch.ones_like), classic("the scales are left out", 2)),
    same_as(_with(_first, _kept), classic("every block of a has the scale of the first one", 1)),
    same_as(_with(_kept, _first), classic("every block of b has the scale of the first one", 1)),
    same_as(
        _exchanged,
        classic("rows of c are multiplied by scales of b, columns by those of a: [:, None] goes with rows", 2),
    ),
    same_as(
        _with(_turned, _turned),
        classic("the scales are read as (K / 128, rows): those of a row lie side by side", 2),
    ),
    same_as(_last_block, classic("only the last block is left: each block's scaled sum is added to the total", 3)),
    Diagnosis(_as_integers, classic("the codes are multiplied as integers: e4m3 goes into tl.dot as it is", 4)),
    Diagnosis(
        lambda e: bool(e.difference.never_written.any()),
        classic("elements of c are never written: the grid covers all rows and all columns", 7),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.layout == "padded"),
        classic("only rows that are further apart than K go wrong: row m of a begins at m * a.stride(0)", 7),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == "long sum"),
        classic("only long sums go wrong: the total of all blocks stays float32 until it is stored", 5),
    ),
    Diagnosis(
        one_group_is_right,
        classic("one block is right, several are not: does each step read its own 128 columns and its own scales?", 3),
    ),
)

BLOCK_SCALED = Exercise(
    "6.2",
    "a product with a scale for each block",
    points=12,
    observe=tried("6.2", "block_scaled_matmul", ("",), _cases, _inputs),
    tolerance=Tolerance(1.2e-2, of="row"),
)


@BLOCK_SCALED.checked_by
def check_block_scaled(
    block_scaled_matmul: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], seed: int | None = None
) -> None:
    """Exercise 6.2: a product of e4m3 matrices with a scale for each 128 of a row.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    check_kernel(
        BLOCK_SCALED,
        block_scaled_matmul,
        product,
        _cases(seed),
        _inputs,
        outputs=("c",),
        tiling=_tiles,
        inspections=[_traffic],
        diagnose=_MISTAKES,
        compiled=Compiled(wide=4),
        huge=(_huge_a, _huge_b),
        seed=seed,
        notice="the scales stand inside the sum, and cost one multiplication of a tile for every 128 products",
    )
