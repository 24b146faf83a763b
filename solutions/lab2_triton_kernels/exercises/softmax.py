"""The checks of exercises 2.5 and 2.6: softmax of rows that fit on chip, and of longer ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from utils import runtime
from utils.checks.cases import Case, Cases
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence, same_as
from utils.checks.hidden import tried
from utils.checks.huge import everywhere
from utils.checks.kernel import check_kernel
from utils.checks.launches import launched, tile_sizes, within
from utils.checks.problem import Problem
from utils.checks.speed import Speed
from utils.checks.tiling import Tiling
from utils.checks.traffic import Budget

from . import shapes
from .rows import every, rows_tiling

SHORT, LONG = "softmax_short_kernel", "softmax_long_kernel"
#: Elements of the longest float32 row that the lab's softmax keeps on chip.
LONGEST_ROW = runtime.pick(cpu=1024, gpu=16384)
Softmax = Callable[[torch.Tensor], torch.Tensor]


#: Kinds of cases: rows whose offsets differ by hundreds and more; rows far below 0, down to the lowest numbers.
OFFSETS, BELOW = "rows of very different offsets", "values far below 0"
EDGES = (OFFSETS, BELOW, shapes.SPECIAL)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _other_is_zero(e: Evidence, kernel: str) -> torch.Tensor:
    """Softmax when the lanes past the end hold 0 and take part in maximum and sum."""
    (x,), block = e.args64, launched([e.trial, *e.trials], kernel)["BLOCK"]
    missing = -x.shape[-1] % block
    return torch.softmax(torch.nn.functional.pad(x, (0, missing)), -1)[..., : x.shape[-1]]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _overflows(e: Evidence) -> bool:
    """Whether only rows with values whose exponential is no float32 are wrong, and these without exception."""
    if not e.only(lambda case: case.magnitude != 1 or case.kind in EDGES):
        return False
    most, bad = _rows(e.args64[0]).amax(-1), _rows(e.bad).any(-1)
    unshifted = torch.exp(e.args64[0].float())
    as_unshifted = torch.equal(e.got.isnan(), (unshifted / unshifted.sum(-1, True)).isnan())
    return bool(bad.any() and bad[most > 100].all() and (most[bad] > 80).all()) and as_unshifted


def _only_far_from_zero(e: Evidence) -> bool:
    """Whether only cases of large numbers fail, above or below 0, and not for the NaN and infinities in them."""
    return e.case.kind != shapes.SPECIAL and e.only(lambda case: case.magnitude != 1 or case.kind in EDGES)


def _rounded_logarithm(e: Evidence) -> bool:
    """Whether float32 errs by no more than its rounding of x and of the logarithm of the sum explains."""
    x = e.args64[0]
    lse = torch.logsumexp(x, -1, keepdim=True)
    relative = torch.finfo(torch.float32).eps * (x.abs() + lse.abs())
    room = e.right * relative.clamp(max=0.1)
    return bool(e.case.dtype == torch.float32 and ((e.got - e.right).abs() <= room)[e.bad].all())


_LOGARITHM = Diagnosis(
    _rounded_logarithm,
    "exp(x - log(sum)) errs the more the larger x is, since float32 rounds the logarithm: subtract the row's maximum, "
    "and divide by the sum",
)


def _common(kernel: str, past_the_end: int, no_maximum: int, axis: int, unnormalised: int, precision: int):
    """Mistakes that both exercises share, with their places in the exercise's list."""
    return (
        Diagnosis(
            lambda e: e.close(_other_is_zero(e, kernel)) and e.only(lambda case: case.kind in EDGES),
            classic(
                "only rows far below 0 fail: lanes past the end hold a number above theirs: give them other=-inf",
                past_the_end,
            ),
        ),
        Diagnosis(
            lambda e: e.close(_other_is_zero(e, kernel)),
            classic(
                "lanes past the end of a row count as 0: give them other=-inf, whose exponential is 0", past_the_end
            ),
        ),
        same_as(lambda x: torch.exp(x), classic("the rows are not divided by their sums", unnormalised)),
        same_as(
            lambda x: torch.exp(x - x.amax(-1, True)), classic("the rows are not divided by their sums", unnormalised)
        ),
        same_as(
            lambda x: torch.softmax(x, -2), classic("this is the softmax of each column: rows are the last axis", axis)
        ),
        same_as(lambda x: torch.log_softmax(x, -1), classic("this is the logarithm of softmax", unnormalised)),
        Diagnosis(
            _overflows,
            classic("rows with values above 88 fail: exp overflows unless the row's maximum is subtracted", no_maximum),
        ),
        Diagnosis(
            _only_far_from_zero,
            "only rows of values far from 0 fail: look at what exp is given (x minus its row's maximum is never above "
            "0), at how a maximum starts, and at lanes past the end (other=-inf)",
        ),
        *shapes.MISTAKES,
        shapes.too_inaccurate("exponentials and their sum need float32; round once, when storing", precision),
    )


# ---- 2.5


def _per_tile(e: Evidence, of: Callable[[torch.Tensor, bool], torch.Tensor]) -> torch.Tensor:
    """What a program that mixes its rows computes: a function of them, and of whether it has as many as it can take."""
    rows = launched([e.trial, *e.trials], SHORT)["ROWS"]
    x = e.args64[0]
    return torch.cat([of(part, len(part) == rows) for part in _rows(x).split(rows)]).reshape(x.shape)


def _tile_maximum(e: Evidence) -> bool:
    """Whether the rows are wrong that lie far below the largest value of their program's rows, and no others."""
    rows = launched([e.trial, *e.trials], SHORT)["ROWS"]
    below = torch.cat([part.amax() - part.amax(-1) for part in _rows(e.args64[0]).split(rows)])
    bad = _rows(e.bad).any(-1)
    return bool(bad.any() and bad[below > 110].all() and (below[bad] > 60).all())


def _in_some(e: Evidence, applies: Callable[[Evidence], bool]) -> bool:
    """Whether a rule holds for some failed trial: those of the simplest cases do not fill a program's rows."""
    failed = (trial for trial in e.trials if trial.wrong)
    return any(applies(dataclasses.replace(e, trial=trial, difference=trial.wrong[0])) for trial in failed)


def _shared_sum(x: torch.Tensor, full: bool) -> torch.Tensor:
    numerator = torch.exp(x - x.amax(-1, True))
    return numerator / numerator.sum() if full else torch.full_like(x, torch.nan)  # -inf - (-inf) in rows that are none


_SHORT_MISTAKES = (
    _LOGARITHM,
    Diagnosis(
        _tile_maximum,
        classic("rows far below their neighbours fail: a program subtracts one maximum from all its rows", 3),
    ),
    Diagnosis(
        lambda e: e.close(_per_tile(e, lambda x, full: torch.softmax(x, 0))),
        classic("maximum and sum run over axis 0, the program's rows: a row's columns are axis 1", 3),
    ),
    Diagnosis(
        lambda e: _in_some(e, lambda each: each.close(_per_tile(each, _shared_sum))),
        classic("all rows of a program are divided by one sum: sum along axis 1, one number a row", 3),
    ),
    *_common(SHORT, past_the_end=1, no_maximum=2, axis=3, unnormalised=4, precision=5),
)


#: What Triton says of a softmax whose maximum and sum have lost an axis -> what to do.
_RAISED = {
    "incompatible dimensions": (
        "maximum and sum have one number per row, (ROWS,): give them a second axis before they meet the tile, "
        "tl.max(x, axis=1)[:, None], or keep_dims=True, as in tl.softmax(x, dim=1, keep_dims=True)"
    ),
}


def _short_cases(seed: int) -> list[Case]:
    cases = Cases(
        {"row": range(5, 30), "col": 64}, layouts=("transposed", "padded"), count=2, zero=True, magnitude=100.0
    )
    longest = {"row": 16, "col": LONGEST_ROW}  # rows and columns fill whole tiles
    return [
        *cases.draw(seed),
        shapes.permuted(seed, 21),
        *shapes.far(seed, 40),
        *shapes.far_columns(seed),
        *(Case(kind, {"row": 12, "col": 40}, seed=seed) for kind in EDGES),
        Case("longest", longest, seed=seed),
    ]


def _further(seed: int, least: int, most: int) -> list[Case]:
    """Shapes that no check draws, and rows of ``least`` to ``most`` columns at the edges of their values."""
    draw = generator(seed)
    edges = ("far below 0", "rising", "falling", "begins with -inf", "ends with -inf")
    cases = [Case(edge, {"row": draw.randint(2, 4), "col": draw.randint(least, most)}, seed=seed) for edge in edges]
    return [*cases, *(case for case in shapes.further(seed) if case.sizes["col"] <= most)]


def _input(case: Case) -> Sequence[torch.Tensor]:
    x = shapes.tensor(case, "x")
    if case.kind == OFFSETS:  # no row starts with its largest value
        x += torch.tensor([0.0, 300.0, -300.0, 4e4])[torch.arange(len(x)) % 4, None].to(x.device)
    if case.kind == BELOW:  # a million, and from one to two times 1e38, below 0
        x[::2] -= 1e6
        x[1::2] = -1e38 * (1 + x[1::2].abs().clamp(max=1))
    if case.kind == shapes.SPECIAL:  # the fourth row alone has a softmax without NaN
        x[0, 1], x[1, 2], x[2], x[3, 3] = torch.nan, torch.inf, -torch.inf, -torch.inf
    if case.kind == "masked":  # as a causal mask leaves them: one row sees its start only, one its end only
        x[0, 5:] = -torch.inf
        x[1, :-3] = -torch.inf
    return (x,)


def _edge_input(case: Case) -> Sequence[torch.Tensor]:
    (x,) = _input(case)
    some, slope = x.shape[-1] // 4, torch.linspace(0, 40, x.shape[-1], device=x.device)
    if case.kind == "far below 0":  # a lane that counts as 0 is the maximum
        x -= 90
    if case.kind in ("rising", "falling"):
        x += slope if case.kind == "rising" else -slope
    if case.kind == "begins with -inf":
        x[:, :-some] = -torch.inf
    if case.kind == "ends with -inf":
        x[:, some:] = -torch.inf
    return (x,)


SHORT_SOFTMAX = Exercise(
    "2.5",
    "softmax of short rows",
    points=10,
    observe=tried("2.5", "softmax", ("",), lambda seed: [*_short_cases(seed), *_further(seed, 40, 150)], _edge_input),
)


@SHORT_SOFTMAX.checked_by
def check_softmax_short(softmax: Softmax, seed: int | None = None) -> None:
    """Exercise 2.5: softmax of rows that stay on chip, read once and written once.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    check_kernel(
        SHORT_SOFTMAX,
        softmax,
        _softmax,
        _short_cases(seed),
        _input,
        tiling=lambda trials: rows_tiling(trials, SHORT),
        inspections=[
            within(SHORT, lambda case, launch: Budget({"x_ptr": every(case)}, {"out_ptr": every(case)}, exact=True))
        ],
        diagnose=_SHORT_MISTAKES,
        raised=_RAISED,
        huge=lambda: (everywhere(1.0, 2**21 + 3, 1024),),
        speed=Speed(
            lambda: (shapes.drawn(2**16, 1000),),
            _softmax,
            0.75,
            "torch.softmax",
            bytes_moved=4 * 2**16 * 1000,
            peer_bytes=4 * 2**16 * 1000,
        ),
        seed=seed,
        notice="one read, one write: maximum, exponentials and sum happen between them, on chip",
    )


# ---- 2.6


def _blocks(e: Evidence) -> list[torch.Tensor]:
    (x,), block = e.args64, launched([e.trial, *e.trials], LONG)["BLOCK"]
    return list(x.split(block, -1))


def _online(
    e: Evidence, rescale: bool = True, carry: bool = True, last_sum: bool = False, lanes: bool = False
) -> torch.Tensor:
    """Softmax by an online loop over blocks of columns, with one of its steps left out.

    With ``lanes`` each lane keeps a maximum and a sum of its own, and they meet after the loop.
    """
    x, parts = e.args64[0], _blocks(e)
    missing = parts[0].shape[-1] - parts[-1].shape[-1]
    parts[-1] = torch.nn.functional.pad(parts[-1], (0, missing), value=-torch.inf)
    like = parts[0] if lanes else parts[0][..., :1]
    maximum, total = torch.full_like(like, torch.finfo(torch.float32).min), torch.zeros_like(like)
    for part in parts:
        new = part if lanes else part.amax(-1, True)
        new = torch.maximum(new, maximum) if carry else new
        numerator = torch.exp(part - new)
        total = (0.0 if last_sum else total * torch.exp(maximum - new) if rescale else total) + (
            numerator if lanes else numerator.sum(-1, True)
        )
        maximum = new
    largest = maximum.amax(-1, True)
    return torch.exp(x - largest) / (total * torch.exp(maximum - largest)).sum(-1, True)


def _left_out(**step: bool) -> Callable[[Evidence], bool]:
    """Whether the answer is what an online loop without one of its steps gives, a row or a lane at a time."""
    return lambda e: e.close(_online(e, **step)) or e.close(_online(e, **step, lanes=True))


def _starts_above(e: Evidence) -> bool:
    """Whether only rows are wrong whose every value is below -60, and at all events those below -1e5."""
    if not e.only(lambda case: case.kind in (OFFSETS, BELOW)):
        return False
    x, bad = _rows(e.args64[0]).amax(-1), _rows(e.bad).any(-1)
    return bool(bad.any() and bad[x < -1e37].all() and (x[bad] < -60).all())


def _nan_of_empty_lanes(e: Evidence) -> bool:
    """Whether NaN is computed, in rows that leave lanes of the block without a number, and longer rows are right."""
    block = launched([e.trial, *e.trials], LONG)["BLOCK"]
    few = e.only(lambda case: case.sizes["col"] < block or case.kind in ("masked", shapes.SPECIAL))
    return few and bool(e.got[e.bad].isnan().all()) and not e.difference.never_written.any()


_LONG_MISTAKES = (
    _LOGARITHM,
    Diagnosis(
        _starts_above,
        classic("rows far below 0 fail: the running maximum starts above their values", 8),
    ),
    Diagnosis(_left_out(rescale=False), classic("the running sum is not rescaled when a new maximum comes", 1)),
    Diagnosis(
        _left_out(rescale=False, carry=False),
        classic("each block of columns has its own maximum: carry the largest so far, and rescale the sum", 2),
    ),
    Diagnosis(
        _left_out(last_sum=True), classic("the sum holds the last block of columns only: add to what came before", 2)
    ),
    Diagnosis(
        lambda e: e.close(torch.cat([torch.softmax(part, -1) for part in _blocks(e)], -1)),
        classic("each block of columns is a softmax of its own: maximum and sum belong to the whole row", 2),
    ),
    Diagnosis(
        lambda e: bool(e.got.isnan().any()) and e.only(lambda case: case.kind == "masked"),
        classic(
            "a block of columns that holds -inf only gives -inf - (-inf) = NaN: start the maximum at a finite value", 4
        ),
    ),
    Diagnosis(
        _nan_of_empty_lanes,
        classic(
            "NaN comes only where a lane sees -inf alone: -inf - (-inf) is NaN: start each maximum at a finite float32",
            4,
        ),
    ),
    *_common(LONG, past_the_end=3, no_maximum=1, axis=2, unnormalised=5, precision=5),
)


def _long_cases(seed: int, block: int) -> list[Case]:
    cases = Cases(
        {"row": range(2, 5), "col": block},
        layouts=("transposed", "padded", "strided"),
        count=2,
        zero=True,
        magnitude=100.0,
    ).draw(seed)
    masked = {"row": 3, "col": 2 * block + generator(seed).randint(10, block - 1)}
    return [
        *cases,
        Case("masked", masked, seed=seed),
        Case("one past whole tiles", {"row": 3, "col": 2 * block + 1}, seed=seed),
        *(Case(kind, {"row": 4, "col": 2 * block + 9}, seed=seed) for kind in EDGES),
        shapes.permuted(seed, block + 7),
        *shapes.far(seed, block),
        *shapes.far_columns(seed),
    ]


def _not_three_reads(trial: CaseResult) -> Problem | None:
    counters = trial.profile.by_argument.get("x_ptr")
    one = every(trial.case).one_pass(trial.case)
    if counters is None or one == 0 or counters.bytes_loaded != 3 * one:
        return None
    return Problem(
        f"x_ptr is loaded 3.0 times, expected 2 ({counters.bytes_loaded:,} bytes, expected {2 * one:,})",
        classic("maximum and sum come out of one pass: rescale the sum when a new maximum comes", 6),
    )


LONG_SOFTMAX = Exercise(
    "2.6",
    "softmax of long rows",
    points=15,
    observe=tried(
        "2.6",
        "online_softmax",
        ("",),
        lambda seed: [*_long_cases(seed, 1024), *_further(seed, 2100, 5000)],
        _edge_input,
    ),
)


@LONG_SOFTMAX.checked_by
def check_softmax_long(online_softmax: Softmax, seed: int | None = None) -> None:
    """Exercise 2.6: softmax of rows too long to stay on chip, by the online maximum and sum, in two reads.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    block = tile_sizes(online_softmax, (shapes.drawn(1, 2**13),), LONG, BLOCK=1024)["BLOCK"]
    check_kernel(
        LONG_SOFTMAX,
        online_softmax,
        _softmax,
        _long_cases(seed, block),
        _input,
        tiling=_long_tiles,
        inspections=[
            _not_three_reads,
            within(
                LONG, lambda case, launch: Budget({"x_ptr": every(case, times=2)}, {"out_ptr": every(case)}, exact=True)
            ),
        ],
        diagnose=_LONG_MISTAKES,
        huge=lambda: (everywhere(1.0, 2**21 + 3, 1024),),
        speed=Speed(
            lambda: (shapes.drawn(512, 2**17),),
            _softmax,
            0.6,
            "torch.softmax",
            bytes_moved=3 * 2**27,
            peer_bytes=3 * 2**27,
        ),
        seed=seed,
        notice="two reads instead of three: maximum and sum come out of the same pass",
    )


def _long_tiles(trials: Sequence[CaseResult]) -> Tiling | None:
    found = launched(trials, LONG)
    if found is None:
        return None
    *leading, col = trials[0].case.sizes
    grid = "*".join(leading) if tuple(found["grid"][1:]) == (1, 1) else ()
    return Tiling([*leading, col], grid=grid, loops={col: found["BLOCK"]})
