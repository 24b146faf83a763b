"""The check of exercise 2.4: cross-entropy in one online pass, and its gradient, in kernels that the student cuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from utils import runtime
from utils.checks.cases import Case, with_layout
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import CaseResult, Diagnosis, Evidence, same_as
from utils.checks.hidden import Tolerance, tried
from utils.checks.huge import everywhere
from utils.checks.kernel import check_kernel
from utils.checks.launches import Limits, halves, no_atomics, outside_limits, probed_tile, tile_over, tiling_over
from utils.checks.problem import Problem
from utils.checks.speed import Speed

from . import shapes
from .rows import num_rows
from .steps import TWO_AT_ONCE, keeps, step

CrossEntropy = Callable[..., torch.Tensor]
#: Most logits that a program may hold at a time.
LARGEST_TILE = 32768
#: Kind of the case whose rows are plain, rising, falling, and -inf but for their last, first, and even columns.
EVERY_KIND = "rows longer than a tile"
LATE, EARLY, EVEN = 3, 4, 5
#: Kind of the case whose rows lie hundreds apart.
OFFSETS = "rows of different offsets"
#: What a difference of logarithms may leave of float32's last digit, where the loss is 0.
ROUNDING = 1e-6


def _reference(
    logits: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, ignore_index: int = -100, calls: str = ""
) -> tuple[torch.Tensor, ...]:
    """Loss of each row, in float32 at least, and the gradient of the logits from its logsumexp."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = target != ignore_index
    column = torch.where(counts, target, 0)[..., None]
    lse = torch.logsumexp(x, -1)
    loss = torch.where(counts, lse - x.gather(-1, column)[..., 0], 0)
    difference = torch.exp(x - lse[..., None]).scatter_add(-1, column, -torch.ones_like(x[..., :1]))
    dlogits = torch.where(counts[..., None], difference * dloss.to(x.dtype)[..., None], 0)
    return loss, dlogits.to(logits.dtype)


# ---- cases
def _cases(seed: int, height: int = 64, width: int = 1024) -> list[Case]:
    """``height``, ``width``: of the tile of the student's kernels, where rows are short and where they are long."""
    draw = generator(seed)
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    ragged = {"row": draw.randint(9, 20), "col": draw.randint(65, 250)}
    small = {"row": draw.randint(5, 9), "col": draw.randint(20, 60)}
    long = LARGEST_TILE + draw.randint(700, 3000)
    return [
        Case("whole tiles", {"row": 16, "col": 128}, seed=seed),
        Case("ragged", ragged, seed=seed),
        Case("one past whole tiles", {"row": height + 1, "col": 33}, seed=seed),
        Case("one past whole tiles", {"row": 3, "col": width + 1}, seed=seed),
        Case("one element", {"row": 1, "col": 1}, seed=seed),
        Case("one column", {"row": draw.randint(5, 20), "col": 1}, seed=seed),
        Case("no element", {"row": 0, "col": 7}, seed=seed),
        Case("ragged", small, fp32, "transposed", seed=seed),
        Case("ragged", small, fp16, "padded", seed=seed),
        Case("ragged", small, bf16, "strided", seed=seed),
        shapes.permuted(seed, draw.randint(20, 50)),
        Case("a class is ignored", small, options={"ignore_index": draw.randint(2, 9)}, seed=seed),
        Case("all are ignored", small, seed=seed),
        Case("large values", small, magnitude=100.0, seed=seed),
        Case(OFFSETS, ragged, seed=seed),
        Case("far below zero", small, seed=seed),
        Case("a large vocabulary", {"row": 2, "col": 50_304 - draw.randint(0, 60)}, bf16, seed=seed),
        Case(EVERY_KIND, {"row": 6, "col": long}, seed=seed),
        Case("tall", {"row": draw.randint(150, 250), "col": 5}, fp16, seed=seed),
        Case("gradient of a sum", small, seed=seed),
        Case("calls", small, options={"calls": TWO_AT_ONCE}, seed=seed),
        *shapes.far(seed, 40),
    ]


def _inputs(case: Case) -> Sequence[torch.Tensor]:
    logits = shapes.tensor(case, "logits")
    columns, leading = logits.shape[-1], list(case.sizes)[:-1]
    source = torch.Generator().manual_seed(case.seed)
    target = torch.randint(0, columns, logits.shape[:-1], generator=source)
    number = torch.arange(target.numel()).view(target.shape)
    if case.kind == OFFSETS:
        logits += 150.0 * (number % 7 - 3)[:, None].to(logits)
    if case.kind == "far below zero":
        logits -= 1e5
    if case.kind == "a large vocabulary":  # beyond any tile, and in the first one of any
        target[0] = columns - 1 - target[0] % 1000
        target[1] %= 16
    if case.kind == EVERY_KIND:
        slope = torch.linspace(0, 40, columns, device=logits.device)
        logits[1] += slope
        logits[2] -= slope
        logits[LATE, :-300] = logits[EARLY, 300:] = logits[EVEN, 1::2] = -torch.inf
        target[LATE] = columns - 1 - target[LATE] % 300
        target[EARLY] %= 300
        target[EVEN] -= target[EVEN] % 2
    ignore = case.options.get("ignore_index", -100)
    if case.kind == "all are ignored":
        target.fill_(ignore)
    elif case.kind not in ("one element", "a large vocabulary", EVERY_KIND):
        target[number % 4 == 1] = ignore
    layout = "strided" if case.layout in ("padded", "strided") else "contiguous"
    target = with_layout(target.to(logits.device), layout)
    dloss = case.tensor("dloss", *leading, dtype=torch.float32, layout=layout)
    if case.kind == "gradient of a sum":
        dloss = torch.ones((), device=logits.device).expand(target.shape)
    return logits, target, dloss


def _huge() -> Sequence[torch.Tensor]:
    """More than 2^31 logits, all of them one number."""
    rows, columns = 2**13 + 9, 2**18
    return (
        everywhere(1.0, rows, columns),
        everywhere(3, rows, dtype=torch.int64),
        everywhere(1.0, rows, dtype=torch.float32),
    )


# ---- what the kernels hold, move and keep
def _whole_rows(trial: CaseResult) -> Problem | None:
    """A row of logits on chip at once."""
    block = tile_over(trial.profile, trial.args[0])
    if math.prod(block) <= LARGEST_TILE:
        return None
    shape = " x ".join(map(str, block))
    return Problem(
        f"expected at most {LARGEST_TILE:,} logits on chip at a time, got a tile of {math.prod(block):,} ({shape})",
        classic("walk along the row in tiles, and carry its maximum and its sum from one to the next", 8),
    )


def _moves(trial: CaseResult) -> Problem | None:
    """Logits are read once in each pass, and nothing of their size is written but their gradient."""
    if trial.case.options.get("calls") or not trial.args[0].numel():
        return None
    (logits, target, _), (loss, dlogits) = trial.args, trial.outputs
    rows, size = num_rows(trial.case), logits.element_size()
    one = logits.numel() * size
    read = int((target != trial.case.options.get("ignore_index", -100)).sum()) * logits.shape[-1] * size
    once = Limits(
        loads=(read, one + rows * size), one=one,
        more=classic("maximum and sum grow together in one pass: rescale the sum when a larger maximum comes", 8),
        less=classic("a copy is read in their place, which moves them two more times: read them where they lie", 8),
    )  # fmt: skip
    few = (0, 32 * rows + one // 16)
    passes = halves(trial, loss)
    forward = outside_limits(
        "forward",
        passes["forward"],
        {"logits": logits, "loss": loss},
        {
            "logits": once,
            "loss": Limits(stores=(4 * rows, 4 * rows), one=4 * rows, more=classic("a loss is stored once", 8)),
            "": Limits(
                loads=few,
                stores=(0, 4 * rows),
                more=classic("only one number per row is stored for the backward pass, which makes the gradient", 8),
            ),
        },
    )
    return forward or outside_limits(
        "backward",
        passes["backward"],
        {"logits": logits, "dlogits": dlogits},
        {
            "logits": once,
            "dlogits": Limits(stores=(one, one), one=one, more=classic("each result is stored once", 8)),
            "": Limits(loads=few, more=classic("nothing is stored but the gradient", 8)),
        },
    )


# ---- the likely causes
def _tile(e: Evidence) -> int:
    """Columns of the block with which the student's kernels load the logits."""
    return tile_over(e.trial.profile, e.trial.args[0])[1]


def _ignored(e: Evidence) -> torch.Tensor:
    return e.args64[1] == e.case.options.get("ignore_index", -100)


def _chosen(e: Evidence) -> torch.Tensor:
    """The logit of each row's target; 0 where the row is ignored."""
    x, target, _ = e.args64
    column = torch.where(_ignored(e), 0, target)[..., None]
    return torch.where(_ignored(e), 0, x.gather(-1, column)[..., 0])


def _loss_is(e: Evidence, loss: torch.Tensor) -> bool:
    return e.difference.name == "loss" and e.close(torch.where(_ignored(e), 0, loss))


def _online(
    e: Evidence, rescale: bool = True, carry: bool = True, last: bool = False, lanes: bool = False
) -> torch.Tensor:
    """The logsumexp that an online loop gives with one of its steps left out; with ``lanes``, one in each lane."""
    x, width = e.args64[0], _tile(e)
    parts = list(torch.nn.functional.pad(x, (0, -x.shape[-1] % width), value=-torch.inf).split(width, -1))
    like = parts[0] if lanes else parts[0][..., :1]
    maximum, total = torch.full_like(like, torch.finfo(torch.float32).min), torch.zeros_like(like)
    for part in parts:
        new = part if lanes else part.amax(-1, True)
        new = torch.maximum(new, maximum) if carry else torch.where(new.isneginf(), maximum, new)
        numerator = torch.exp(part - new)
        total = (0.0 if last else total * torch.exp(maximum - new) if rescale else total) + (
            numerator if lanes else numerator.sum(-1, True)
        )
        maximum = new
    largest = maximum.amax(-1, True)
    return (largest + torch.log((total * torch.exp(maximum - largest)).sum(-1, True)))[..., 0]


def _left_out(**step_: bool) -> Callable[[Evidence], bool]:
    """Whether the loss is what an online loop without one of its steps gives."""
    return lambda e: any(_loss_is(e, _online(e, **step_, lanes=lanes) - _chosen(e)) for lanes in (False, True))


def _past_the_end(e: Evidence) -> bool:
    """Whether lanes past the end of a row count as logits of 0."""
    x = e.args64[0]
    missing = -x.shape[-1] % _tile(e)
    return missing > 0 and _loss_is(e, torch.logaddexp(_lse(e), torch.tensor(math.log(missing)).to(x)) - _chosen(e))


def _lse(e: Evidence) -> torch.Tensor:
    return torch.logsumexp(e.args64[0], -1)


def _local_columns(e: Evidence) -> bool:
    """Whether a target is looked for at its number inside every tile."""
    x, target, _ = e.args64
    width = _tile(e)
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % width))
    inside = padded.unflatten(-1, (-1, width)).sum(-2)  # what stands at each place of all tiles, added up
    column = torch.where(_ignored(e) | (target >= width), 0, target)[..., None]
    found = torch.where(target < width, inside.gather(-1, column)[..., 0], 0)
    return _loss_is(e, _lse(e) - found)


def _one_maximum(e: Evidence) -> bool:
    """Whether rows go wrong, and nothing overflows, where their tile holds others of a far offset."""
    several = tile_over(e.trial.profile, e.trial.args[0])[0] > 1
    apart = e.only(lambda case: case.magnitude != 1 or case.kind == OFFSETS)
    return several and apart and not bool((e.got == torch.inf).any())


def _bad_rows(e: Evidence) -> set[int]:
    bad = e.bad if e.difference.name == "loss" else e.bad.any(-1)
    return set(bad.flatten().nonzero().flatten().tolist())


def _only_ignored(e: Evidence) -> bool:
    """Whether rows are wrong that are to be ignored, and no others."""
    ignored = set(_ignored(e).flatten().nonzero().flatten().tolist())
    return _bad_rows(e) <= ignored


def _gradient(wrong: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Both outputs with another gradient: a function of softmax, one-hot and dloss."""

    def formula(logits, target, dloss, ignore_index=-100, calls=""):
        counts = target != ignore_index
        hit = torch.zeros_like(logits).scatter(-1, torch.where(counts, target, 0)[..., None], 1)
        p, d = torch.softmax(logits, -1), dloss[..., None]
        return _reference(logits, target, dloss, ignore_index)[0], torch.where(counts[..., None], wrong(p, hit, d), 0)

    return formula


_MISTAKES = (
    shapes.FAR,
    Diagnosis(_only_ignored, classic("only rows that are ignored are wrong: their loss and their gradient are 0", 5)),
    Diagnosis(_past_the_end, classic("lanes past the end of a row count as 0: give them other=-inf", 3)),
    Diagnosis(_left_out(rescale=False), classic("the running sum is not rescaled when a larger maximum comes", 1)),
    Diagnosis(
        _left_out(rescale=False, carry=False),
        classic("each tile has a maximum of its own: carry the largest so far, and rescale the sum", 1),
    ),
    Diagnosis(_left_out(last=True), classic("the sum holds the last tile only: add to what came before", 1)),
    Diagnosis(
        lambda e: _loss_is(e, torch.logsumexp(e.args64[0][..., : _tile(e)], -1) - _chosen(e)),
        classic("the sum holds the first tile only", 1),
    ),
    Diagnosis(
        lambda e: e.case.kind == EVERY_KIND and _bad_rows(e) == {LATE} and bool(e.got.isnan().any()),
        classic("a tile that holds -inf only gives -inf - (-inf) = NaN: start the maximum at a finite number", 2),
    ),
    Diagnosis(
        lambda e: bool((e.got.isnan() & e.right.isfinite()).any()) and e.difference.name == "loss",
        classic("NaN comes of -inf - (-inf), where a maximum starts at -inf, or of -inf times 0", 2),
    ),
    Diagnosis(_one_maximum, classic("all rows of a tile share one maximum: take it along axis 1, one per row", 7)),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind in (OFFSETS, "far below zero")),
        classic("only rows far below zero fail: the maximum must start below every logit, at about -3.4e38", 2),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.magnitude != 1 or case.kind in (OFFSETS, "far below zero")),
        classic("only large logits fail: exp overflows unless the row's maximum is subtracted first", 2),
    ),
    Diagnosis(_local_columns, classic("a target is compared with the columns of a tile, not with those of the row", 4)),
    Diagnosis(
        lambda e: _loss_is(e, _lse(e) - torch.where(e.args64[1] < _tile(e), _chosen(e), 0)),
        classic("targets beyond the first tile are not found", 4),
    ),
    Diagnosis(lambda e: _loss_is(e, _lse(e)), classic("the logit of the target is not subtracted", 4)),
    Diagnosis(lambda e: _loss_is(e, _chosen(e) - _lse(e)), classic("the loss has the wrong sign", 4)),
    same_as(_gradient(lambda p, hit, d: p * d), classic("the gradient lacks the 1 of the target's column", 6)),
    same_as(_gradient(lambda p, hit, d: p - hit), classic("the gradient lacks the factor dloss", 6)),
    same_as(_gradient(lambda p, hit, d: p * d - hit), classic("dloss multiplies the softmax only, not the 1", 6)),
    same_as(_gradient(lambda p, hit, d: (hit - p) * d), classic("the gradient has the wrong sign", 6)),
    same_as(
        _gradient(lambda p, hit, d: (p - hit) * d / max(1, d.numel())),
        classic("the gradient is divided by the number of rows: each row has a loss of its own", 6),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: "calls" in case.options),
        lambda e: classic(f"only {e.case.options['calls']} fails: what a call keeps belongs to its own ctx", 9),
    ),
    *shapes.MISTAKES,
    shapes.too_inaccurate("exponentials, sums and losses in float32, and round once when storing", 9),
)


def _stepped(cross_entropy: CrossEntropy, kept: dict[int, int]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(logits, target, dloss, ignore_index=-100, calls=""):
        return step(lambda x, t: cross_entropy(x, t, ignore_index), (logits, target), dloss, calls, kept)

    return run


CROSS_ENTROPY = Exercise(
    "2.4",
    "cross-entropy",
    points=10,
    observe=tried(
        "2.4",
        "cross_entropy",
        ("loss", "dlogits"),
        lambda seed: [*_cases(seed), *shapes.further(seed)],
        _inputs,
        lambda lab: _stepped(lab.cross_entropy, {}),
    ),
    tolerance=Tolerance(absolute=2e-5),
)


@CROSS_ENTROPY.checked_by
def check_cross_entropy(cross_entropy: CrossEntropy, seed: int | None = None) -> None:
    """Exercise 2.4: the loss of each row in one read of the logits, and its gradient in a second one.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed, kept = draw_seed(seed), {}
    run = _stepped(cross_entropy, kept)
    short, long = (
        _inputs(Case("a shape", {"row": row, "col": col}, seed=seed)) for row, col in ((300, 33), (1, LARGEST_TILE + 1))
    )
    height, width = probed_tile(run, short, short[0])[0], probed_tile(run, long, long[0])[1]
    check_kernel(
        CROSS_ENTROPY,
        run,
        _reference,
        _cases(seed, min(height, 300), min(width, LARGEST_TILE)),
        _inputs,
        outputs=("loss", "dlogits"),
        atol=ROUNDING,
        tiling={"loss": lambda trials: tiling_over(trials, 0), "dlogits": lambda trials: tiling_over(trials, 1)},
        inspections=[
            lambda trial: keeps(trial, kept, 2 * num_rows(trial.case), classic("keep the logsumexp of each row", 8)),
            no_atomics,
            _whole_rows,
            _moves,
        ],
        diagnose=_MISTAKES,
        huge=_huge,
        speed=Speed(
            lambda: (
                shapes.drawn(2**12, 50_304),
                torch.randint(0, 50_304, (2**12,), device=runtime.DEVICE),
                torch.ones(2**12, device=runtime.DEVICE),
            ),
            _of_pytorch,
            1.2,
            "torch.nn.functional.cross_entropy, forward and backward",
            bytes_moved=3 * 2 * 2**12 * 50_304,
            peer_bytes=3 * 2 * 2**12 * 50_304,
        ),
        seed=seed,
        notice="one read forward, a read and a write backward: no tensor of probabilities is ever stored",
    )


def _of_pytorch(logits: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = logits.detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x, target, reduction="none")
    return loss.detach(), torch.autograd.grad(loss, x, dloss.to(loss.dtype))[0]
