"""The checks of exercises 2.7 and 2.8: the matrix product in tiles, and the grouped order of the tiles."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from utils import runtime
from utils.checks.cases import Case, Cases, far_fits
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence
from utils.checks.hidden import Draw, Observation, Tolerance, normal, tried
from utils.checks.huge import everywhere
from utils.checks.kernel import check_kernel
from utils.checks.launches import cdiv, launched, tile_sizes, within
from utils.checks.problem import Problem
from utils.checks.speed import Speed
from utils.checks.tiling import Tiling
from utils.checks.traffic import Budget, Passes

from . import hidden, shapes, tile_order

TILED, DESCRIPTORS = "tiled_matmul_kernel", "descriptor_matmul_kernel"
Matmul = Callable[..., torch.Tensor]
FP16, BF16 = torch.float16, torch.bfloat16
#: Kind of the cases whose partial sums along K grow to hundreds of times the product: it takes float32 to add them up.
CANCELLING = "sums that cancel"
#: Kinds of the cases whose columns of a and rows of b, or rows of a and columns of b, lie 2^30 elements apart.
FAR_INNER, FAR_OUTER = "inner axes far apart", "outer axes far apart"
#: Kind of the case that a descriptor can describe though the steps along K end one element past a whole one.
ONE_MORE_STEP = "one past whole steps along K"


def _matmul(a: torch.Tensor, b: torch.Tensor, group: int = 1) -> torch.Tensor:
    return a @ b


@contextmanager
def _tiles_of_three_sides(function: Matmul) -> Iterator[None]:
    """On a GPU the sides of a tile differ, and BLOCK_M stands for BLOCK_N in vain; in the block in the interpreter too.

    The lab's table of tiles has square ones for the interpreter, so that its numbers are easy to follow.
    """
    tuning = sys.modules.get(f"{function.__module__.rpartition('.')[0]}.tuning")
    before = {name: getattr(tuning, name) for name in ("tiled_matmul", "descriptor_matmul")} if tuning else {}

    def with_sides(chosen: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: chosen(*args)._replace(m=32, n=64, k=16)

    try:
        for name, chosen in before.items():
            setattr(tuning, name, with_sides(chosen) if runtime.INTERPRET else chosen)
        yield
    finally:
        for name, chosen in before.items():
            setattr(tuning, name, chosen)


def _tile(matmul: Matmul) -> dict[str, Any]:
    a = shapes.drawn(32, 32)
    return tile_sizes(matmul, (a, a), TILED, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32)


def _budget(
    case: Case,
    launch: Mapping[str, Any],
    a: str = "a_ptr",
    b: str = "b_ptr",
    c: str = "c_ptr",
    wrapped: bool = False,
) -> Budget:
    """a is read once for each column of tiles, b once for each row of tiles, c written once.

    ``wrapped``: rows and columns beyond the matrix are read from its start again, as by ``row % M``.
    """
    m, n, k = (case.sizes[axis] for axis in "mnk")
    tiles_m, tiles_n, steps = cdiv(m, launch["BLOCK_M"]), cdiv(n, launch["BLOCK_N"]), cdiv(k, launch["BLOCK_K"])
    flops = 2 * tiles_m * launch["BLOCK_M"] * tiles_n * launch["BLOCK_N"] * steps * launch["BLOCK_K"]
    loads = {a: Passes("m", "k", times=tiles_n), b: Passes("k", "n", times=tiles_m)}
    if wrapped:
        rows, columns = tiles_m * launch["BLOCK_M"], tiles_n * launch["BLOCK_N"]
        loads = {a: Passes(rows, "k", times=tiles_n), b: Passes("k", columns, times=tiles_m)}
    return Budget(loads, {c: Passes("m", "n")}, flops=flops, exact=True)


def _within_tiles(trial: CaseResult) -> Problem | None:
    """The budget to the byte; or, as it is in Triton's tutorial, whole tiles whose rows and columns wrap around."""
    problem = within(TILED, _budget)(trial)
    if problem is None or within(TILED, functools.partial(_budget, wrapped=True))(trial) is None:
        return None
    return problem


def _steps(e: Evidence, kernel: str) -> list[torch.Tensor]:
    """What each step along K adds to the product."""
    block = launched([e.trial, *e.trials], kernel)["BLOCK_K"]
    a, b = e.args64[:2]
    return [a[:, start : start + block] @ b[start : start + block] for start in range(0, a.shape[1], block)]


def _accumulation(kernel: str, number: int) -> tuple[Diagnosis, ...]:
    """Mistakes in the loop along K."""
    return (
        Diagnosis(
            lambda e: len(_steps(e, kernel)) > 1 and e.close(_steps(e, kernel)[-1]),
            classic("only the last step along K is left: each product must be added to the total", number),
        ),
        Diagnosis(
            lambda e: len(_steps(e, kernel)) > 1 and e.close(len(_steps(e, kernel)) * _steps(e, kernel)[0]),
            classic("each step multiplies the first tiles again: the loop does not move along K", number),
        ),
        Diagnosis(
            lambda e: (
                e.case.sizes["k"] % _block_k(e, kernel) > 0
                and e.close(sum(_steps(e, kernel)[:-1], start=torch.zeros_like(e.right)))
            ),
            classic("the last, ragged step along K is left out: the loop must go up to K", number),
        ),
        shapes.too_inaccurate("the total stays float32 over all steps, and is rounded once, when stored", number + 1),
    )


def _block_k(e: Evidence, kernel: str) -> int:
    return launched([e.trial, *e.trials], kernel)["BLOCK_K"]


def _from_the_second_step(e: Evidence, kernel: str) -> bool:
    """Whether a single step along K is right in this case's dtype and several never are, and only several ever fail."""
    block = _block_k(e, kernel)
    passing = [t.case for t in e.trials if not t.failed and t.case.dtype == e.case.dtype and launched([t], kernel)]
    single = [case.sizes["k"] <= block for case in passing if case.sizes["k"]]
    return bool(single) and all(single) and all(t.case.sizes["k"] > block for t in e.trials if t.failed)


# ---- 2.7


def _moved(e: Evidence, moves: Mapping[str, int]) -> torch.Tensor:
    """The product if the pointers into a and b move by so many elements in each step; NaN beyond the operands."""
    (a, b), block = e.trial.args[:2], _block_k(e, TILED)
    total = torch.zeros_like(e.right)
    for number, start in enumerate(range(0, a.shape[1], block)):
        left = min(block, a.shape[1] - start)
        total += _at(a[:, :left], number * moves["a"]) @ _at(b[:left], number * moves["b"])
    return total


def _at(tile: torch.Tensor, elements: int, strides: Sequence[int] | None = None) -> torch.Tensor:
    """What a tile holds whose pointers have moved by so many elements, or that is read with other strides."""
    if tile.untyped_storage().nbytes() > 2**24:
        raise ValueError("an operand far apart in memory is not looked at in whole")
    memory = tile.as_strided((tile.untyped_storage().nbytes() // tile.element_size(),), (1,), 0).cpu().double()
    index = (
        tile.storage_offset()
        + elements
        + sum(
            torch.arange(size).view(-1, *[1] * (1 - axis)) * stride
            for axis, (size, stride) in enumerate(zip(tile.shape, strides or tile.stride()))
        )
    )
    inside = (index >= 0) & (index < len(memory))
    return torch.where(inside, memory[index.clamp(0, len(memory) - 1)], torch.nan)


def _wrong_moves(e: Evidence) -> str:
    """By what a_ptrs or b_ptrs are moved, read off the answer; '' if by what they should or by none of these."""
    (a, b), block = e.trial.args[:2], _block_k(e, TILED)
    if e.case.layout == "far" or a.shape[1] <= block:
        return ""
    strides = {"stride_am": a.stride(0), "stride_ak": a.stride(1), "stride_bk": b.stride(0), "stride_bn": b.stride(1)}
    right = {"a": "stride_ak", "b": "stride_bk"}
    for name, of_its_own in (("a", ("stride_am", "stride_ak")), ("b", ("stride_bn", "stride_bk"))):
        moves = {f"BLOCK_K * {stride}": block * strides[stride] for stride in of_its_own}
        moves |= {stride: strides[stride] for stride in of_its_own} | {"BLOCK_K": block, "0": 0}
        for move in dict.fromkeys(moves.values()):
            if move == block * strides[right[name]]:
                continue
            every = {other: block * strides[right[other]] for other in "ab"} | {name: move}
            if e.close(_moved(e, every)):
                by = " or ".join(words for words, other in moves.items() if other == move)
                moved = f"{name}_ptrs stay where they are" if not move else f"{name}_ptrs move by {by} per step"
                return f"{moved}: expected BLOCK_K * {right[name]}"
    return ""


def _with_strides_swapped(e: Evidence, swapped: str) -> torch.Tensor:
    """The product if one operand is read with its strides the other way round; NaN beyond its memory."""
    a, b = e.args64[:2]
    given = e.trial.args["ab".index(swapped)]
    read = _at(given, 0, given.stride()[::-1])
    return read @ b if swapped == "a" else a @ read


def _stored_transposed(e: Evidence) -> torch.Tensor:
    """What the output holds if rows and columns are swapped in the store; NaN where nothing comes to lie."""
    (rows, columns), memory = e.right.shape, torch.full((e.right.numel(),), torch.nan, dtype=torch.float64)
    index = torch.arange(columns) * columns + torch.arange(rows)[:, None]
    inside = index < len(memory)
    memory[index[inside]] = e.right[inside]
    return memory.view(rows, columns)


_TILED_MISTAKES = (
    Diagnosis(lambda e: e.close(_with_strides_swapped(e, "b")), classic("the strides of b are swapped", 1)),
    Diagnosis(lambda e: e.close(_with_strides_swapped(e, "a")), classic("the strides of a are swapped", 1)),
    Diagnosis(
        lambda e: e.close(_stored_transposed(e)),
        classic("this is the product transposed: rows and columns are swapped in the store", 1),
    ),
    shapes.FAR,
    Diagnosis(_wrong_moves, lambda e: classic(_wrong_moves(e), 3)),
    *_accumulation(TILED, 3),
    Diagnosis(
        lambda e: (
            _from_the_second_step(e, TILED)
            and not e.difference.never_written.any()
            and any(trial.failed and trial.case.layout == "contiguous" for trial in e.trials)
        ),
        classic("right in one step along K, wrong from the second on: look at the loop, masks, pointers and total", 3),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.layout != "contiguous"),
        classic("only non-contiguous operands fail: each index has a stride of its own", 1),
    ),
    Diagnosis(
        lambda e: (
            e.only(lambda case: case.sizes["k"] % _block_k(e, TILED) != 0) and not e.difference.never_written.any()
        ),
        classic("only sizes K that are no multiple of BLOCK_K fail: mask both loads along K, with other=0", 2),
    ),
)


def _tiles(trials: Sequence[CaseResult]) -> Tiling | None:
    found = launched(trials, TILED)
    if found is None:
        return None
    grid = "m*n" if tuple(found["grid"][1:]) == (1, 1) and found["GROUP_M"] == 1 else ()
    program = None
    if found["GROUP_M"] > 1:
        program = _grouped_program(found["GROUP_M"])
    tiles = {"m": found["BLOCK_M"], "n": found["BLOCK_N"]}
    return Tiling("m n", tiles=tiles, grid=grid, loops={"k": found["BLOCK_K"]}, program=program)


def _grouped_program(group: int) -> Callable[[Mapping[str, int], Mapping[str, int]], tuple[int]]:
    """The program of a tile in the grouped order."""

    def program(tile: Mapping[str, int], counts: Mapping[str, int]) -> tuple[int]:
        first = tile["m"] // group * group
        rows = min(group, counts["m"] - first)
        return (first * counts["n"] + tile["n"] * rows + tile["m"] - first,)

    return program


def _operands(case: Case) -> Sequence[torch.Tensor]:
    if case.kind == FAR_OUTER:
        return case.tensor("a", "m", "k"), case.tensor("b", "n", "k").T
    if case.kind in (FAR_INNER, ONE_MORE_STEP):
        return case.tensor("a", "k", "m").T, case.tensor("b", "k", "n")
    a, b = case.tensor("a", "m", "k"), case.tensor("b", "k", "n")
    if case.kind == shapes.SPECIAL:
        a[0, 1], b[2, 1], b[3, 2] = torch.nan, torch.inf, -torch.inf
    if case.kind == CANCELLING:
        half = case.sizes["k"] // 2
        a[:, :half], b[:half] = a[:, :half].abs() + 2, b[:half].abs() + 2
        a[:, half:], b[half:] = -a[:, :half], b[:half]
        a[:, -1] += a[:, 0]
    return a, b


def _tiled_cases(seed: int, block_m: int, block_k: int, block_n: int) -> list[Case]:
    axes = {"m": block_m, "k": block_k, "n": block_n}
    long_sum = ("long sum", {"m": 25, "k": 2049, "n": 41})
    cases = Cases(axes, layouts=("transposed", "padded", "strided"), max_tiles=2, fixed=[long_sum]).draw(seed)
    whole_steps = {"m": block_m + 5, "k": 2 * block_k, "n": block_n + 7}
    cases.append(Case("whole steps along K", whole_steps, seed=seed))
    one_more = {"m": block_m + 1, "k": block_k + 1, "n": block_n + 1}
    cases.append(Case("one past whole tiles", one_more, seed=seed))
    cases.append(Case(shapes.SPECIAL, {"m": block_m + 3, "k": block_k + 4, "n": block_n + 5}, seed=seed))
    if far_fits(FP16):  # the inner axes in two columns of tiles
        cases.append(Case(FAR_OUTER, {"m": 3, "k": 40, "n": 3}, FP16, "far", seed=seed))
        cases.append(Case(FAR_INNER, {"m": 20, "k": 3, "n": block_n + 5}, FP16, "far", seed=seed))
    return cases


def _huge() -> tuple[torch.Tensor, ...]:
    """Operands of one number each, whose product has three rows of more than 2^30 columns."""
    return everywhere(1.0, 3, 8), everywhere(1.0, 8, 2**30 + 5)


def _further(seed: int) -> list[Case]:
    """Products that the check does not draw: of a row and a column, of one step, of 16 bits in other layouts."""
    draw = generator(seed)
    m, k, n = (draw.randint(33, 75) for _ in "mkn")
    return [
        Case("one row and column", {"m": 1, "k": k, "n": 1}, seed=seed),
        Case("one step", {"m": m, "k": 1, "n": n}, seed=seed),
        Case("ragged", {"m": m, "k": k, "n": n}, FP16, "transposed", seed=seed),
        Case("ragged", {"m": m, "k": k, "n": n}, BF16, "strided", seed=seed),
        Case(CANCELLING, {"m": 24, "k": 512, "n": 16}, FP16, seed=seed),
    ]


TILED_MATMUL = Exercise(
    "2.7",
    "tiled matmul",
    points=15,
    observe=tried(
        "2.7", "tiled_matmul", ("",), lambda seed: _tiled_cases(seed, 32, 32, 32) + _further(seed), _operands
    ),
    tolerance=Tolerance(absolute=1e-5),
)


@TILED_MATMUL.checked_by
def check_tiled_matmul(tiled_matmul: Matmul, seed: int | None = None) -> None:
    """Exercise 2.7: a matrix product in tiles, its traffic exactly the tiled formula's.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    with _tiles_of_three_sides(tiled_matmul):
        tile = _tile(tiled_matmul)
        check_kernel(
            TILED_MATMUL,
            tiled_matmul,
            _matmul,
            _tiled_cases(seed, tile["BLOCK_M"], tile["BLOCK_K"], tile["BLOCK_N"]),
            _operands,
            outputs=("c",),
            tiling=_tiles,
            inspections=[_within_tiles],
            diagnose=_TILED_MISTAKES,
            compiled=Compiled(tf32=7),
            huge=_huge,
            speed=Speed(
                lambda: (shapes.drawn(4096, 4096), shapes.drawn(4096, 4096)),
                torch.matmul,
                0.25,
                "torch.matmul (cuBLAS)",
            ),
            seed=seed,
            notice="a is read once for each column of tiles, b once for each row of tiles: larger tiles, fewer bytes",
        )


# ---- 2.8


def _order_cases(tile: Mapping[str, Any], seed: int) -> list[Case]:
    draw = generator(seed)
    whole, ragged = draw.randint(2, 3), draw.randint(2, 4)
    grids = [
        ("whole groups", 2 * whole, 3, 2),
        ("short last group", 2 * ragged + 1, draw.randint(2, 5), 2),
        ("short last group", 3 + draw.randint(1, 2), 4, 3),
        ("one group", 2, draw.randint(2, 4), 3),
        ("one tile", 1, 1, 2),
    ]  # groups of two sizes and no side a multiple of 16: on a GPU these are two compilations
    cases = []
    for kind, tiles_m, tiles_n, group in grids:
        m = tiles_m * tile["BLOCK_M"] - draw.randint(1, 5)
        sizes = {"m": m, "k": tile["BLOCK_K"], "n": tiles_n * tile["BLOCK_N"] - draw.randint(1, 5)}
        cases.append(Case(kind, sizes, BF16, options={"group": group}, seed=seed))
    return cases


def _order_cause(e: Evidence) -> str | None:
    launch = next(launch for launch in e.trial.profile.launches if launch.kernel == TILED)
    return tile_order.cause_of(tile_order.read_off(launch, "c_ptr"))


def _with_offsets_swapped(e: Evidence, swapped: str) -> torch.Tensor:
    """The product if the tiles of one operand are loaded from [column, row] in place of [row, column]."""
    tile = launched([e.trial], DESCRIPTORS)
    (a, b), sides = e.args64[:2], [tile[f"BLOCK_{axis}"] for axis in "MNK"]
    room = 2 * max(*sides, *a.shape, *b.shape)
    a, b = (torch.nn.functional.pad(x, (0, room - x.shape[1], 0, room - x.shape[0])) for x in (a, b))
    rows, columns, depth = sides
    c = torch.zeros(room, room, dtype=torch.float64)
    places = zip((*e.right.shape, e.case.sizes["k"]), sides)
    for row, column, start in itertools.product(*(range(0, size, side) for size, side in places)):
        of_a = (start, row) if swapped == "a" else (row, start)
        of_b = (column, start) if swapped == "b" else (start, column)
        tile_a = a[of_a[0] : of_a[0] + rows, of_a[1] : of_a[1] + depth]
        tile_b = b[of_b[0] : of_b[0] + depth, of_b[1] : of_b[1] + columns]
        c[row : row + rows, column : column + columns] += tile_a @ tile_b
    return c[: e.right.shape[0], : e.right.shape[1]]


_DESCRIPTOR_MISTAKES = (
    Diagnosis(
        lambda e: e.case.layout == "contiguous" and e.close(_with_offsets_swapped(e, "a")),
        classic("the offsets of a's tile are swapped: [row, start], rows first", 4),
    ),
    Diagnosis(
        lambda e: e.case.layout == "contiguous" and e.close(_with_offsets_swapped(e, "b")),
        classic("the offsets of b's tile are swapped: [start, column], rows first", 4),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.layout == "transposed"),
        classic(
            "only column-major operands fail: their descriptor describes the transpose, so the offsets "
            "are swapped and the tile is transposed with .T",
            4,
        ),
    ),
    *_accumulation(DESCRIPTORS, 5),
    Diagnosis(
        lambda e: _from_the_second_step(e, DESCRIPTORS),
        classic("right in one step along K, wrong from the second on: look at the loop, the offsets, and total", 5),
    ),
)


#: What Triton says of tiles and their offsets -> what to do.
_RAISED = {
    "equal reduction dimensions": classic(
        "tl.dot takes a tile (BLOCK_M, BLOCK_K) of a and one (BLOCK_K, BLOCK_N) of b: of a column-major operand the "
        "descriptor describes the transpose, and .T turns its tile",
        4,
    ),
    "must be 16-byte aligned": classic(
        "a tile begins at its number times BLOCK_M, BLOCK_N or BLOCK_K, counted in elements", 4
    ),
}


def _descriptor_cases(tile: Mapping[str, Any], seed: int) -> list[Case]:
    """Sizes that a descriptor can describe: all but one case have rows that start at multiples of 16 bytes."""
    draw = generator(seed)
    sides = {axis: tile[f"BLOCK_{axis.upper()}"] for axis in "mkn"}
    side = max(sides.values())
    sizes = {axis: of_tile + 8 * draw.randint(1, of_tile // 8 - 1) for axis, of_tile in sides.items()}
    odd = {"m": draw.randint(3, 40), "k": 2 * draw.randint(5, 30) + 1, "n": 2 * draw.randint(5, 30) + 1}
    square = dict.fromkeys("mkn", 2 * side)
    long_sum = {"m": 24, "k": 2048, "n": 40}
    return [
        Case("one tile", sides, seed=seed),
        Case("whole tiles", square, seed=seed),
        Case("ragged", sizes, seed=seed),
        Case("short", dict.fromkeys("mkn", 8), seed=seed),
        Case("ragged", sizes, layout="transposed", seed=seed),
        Case("odd", odd, seed=seed),
        Case(ONE_MORE_STEP, {**sizes, "k": sides["k"] + 1}, seed=seed),
        Case("ragged", sizes, FP16, seed=seed),
        Case("ragged", sizes, BF16, "transposed", seed=seed),
        Case("long sum", long_sum, FP16, seed=seed),
        Case("long sum", long_sum, BF16, seed=seed),
    ]


def _descriptor_tiles(trials: Sequence[CaseResult]) -> Tiling | None:
    """Tiles as the programs of the descriptor kernel take them: each every so many in the grouped order."""
    found = launched(trials[:1], DESCRIPTORS)
    if found is None:
        return _tiles(trials)
    number, programs = _grouped_program(found["GROUP_M"]), found["grid"][0]
    return Tiling(
        "m n",
        tiles={"m": found["BLOCK_M"], "n": found["BLOCK_N"]},
        program=lambda tile, counts: (number(tile, counts)[0] % programs,),
        loops={"k": found["BLOCK_K"]},
    )


def _either_budget(trial: CaseResult) -> Problem | None:
    """The tiled formula for whichever kernel the operands went through."""
    if any(launch.kernel == TILED for launch in trial.profile.launches):
        return _within_tiles(trial)
    names = {"a": "a_desc", "b": "b_desc", "c": "c_desc"}
    return within(DESCRIPTORS, lambda case, launch: _budget(case, launch, **names))(trial)


def _observe_grouped(package: ModuleType, seed: int) -> dict[str, Observation]:
    tile = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}
    products = {"tiled_matmul": _order_cases, "matmul": _descriptor_cases}
    observed = hidden.tile_orders(package, seed)
    for name, cases in products.items():
        observed |= tried("2.8", name, ("",), lambda s, cases=cases: cases(tile, s), _operands)(package, seed)
    draw = Draw(seed, "2.8")
    a, b = normal(draw, 3, draw.between(9, 20), 40), normal(draw, 40, draw.between(17, 60))
    return observed | {"matmul of an a of three axes": package.matmul(a, b)}


GROUPED_MATMUL = Exercise(
    "2.8",
    "grouped matmul",
    points=10,
    builds_on=("2.7",),
    observe=_observe_grouped,
    tolerance=Tolerance(absolute=1e-5),
)


@GROUPED_MATMUL.checked_by
def check_grouped_matmul(tiled_matmul: Matmul, matmul: Matmul, seed: int | None = None) -> None:
    """Exercise 2.8: the grouped order of the tiles, and a tile through tensor descriptors.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    with _tiles_of_three_sides(tiled_matmul):
        tile = _tile(tiled_matmul)
        check_kernel(
            GROUPED_MATMUL.part("grouped order"),
            tiled_matmul,
            _matmul,
            _order_cases(tile, seed),
            _operands,
            outputs=("c",),
            tiling=_tiles,
            inspections=[tile_order.wrong_order(TILED, "c_ptr"), _within_tiles],
            diagnose=[(_order_cause, _order_cause)],
            compiled=None,
            seed=seed,
            notice="the same bytes are asked for as before; neighbours in time now ask for the same ones",
        )
        check_kernel(
            GROUPED_MATMUL,
            matmul,
            _matmul,
            _descriptor_cases(tile, seed),
            _operands,
            outputs=("c",),
            tiling=_descriptor_tiles,
            inspections=[_either_budget],
            diagnose=_DESCRIPTOR_MISTAKES,
            raised=_RAISED,
            compiled=Compiled(tf32=7),
            speed=Speed(
                lambda: (shapes.drawn(4096, 4096), shapes.drawn(4096, 4096)),
                torch.matmul,
                0.35,
                "torch.matmul (cuBLAS)",
            ),
            seed=seed,
            notice="no address and no mask in the loop: the descriptor knows the matrix's shape",
        )
