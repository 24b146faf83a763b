"""What a wrong answer to exercise 2.4 is told: cross-entropy in PyTorch, and the mistakes that are made in it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from utils.checks.core import classic
from utils.checks.diagnoses import Diagnosis, Evidence, same_as
from utils.checks.launches import tile_over

from . import shapes

#: Kind of the case whose rows are plain, rising, falling, and -inf but for their last, first, and even columns.
EVERY_KIND = "rows longer than a tile"
LATE, EARLY, EVEN = 3, 4, 5
#: Kind of the case whose rows lie hundreds apart.
OFFSETS = "rows of different offsets"


def reference(
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
    """Whether a target is looked for at its number inside every tile; lanes past the end are -inf, or left out."""
    x, target, _ = e.args64
    width = _tile(e)
    column = torch.where(_ignored(e) | (target >= width), 0, target)[..., None]
    for past_the_end in (-torch.inf, 0.0):
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % width), value=past_the_end)
        inside = padded.unflatten(-1, (-1, width)).sum(-2)  # what stands at each place of all tiles, added up
        if _loss_is(e, _lse(e) - torch.where(target < width, inside.gather(-1, column)[..., 0], 0)):
            return True
    return False


def _one_maximum(e: Evidence) -> bool:
    """Whether rows go wrong, and nothing overflows, where their tile holds others of a far offset."""
    several = tile_over(e.trial.profile, e.trial.args[0])[0] > 1
    apart = e.only(lambda case: case.magnitude != 1 or case.kind == OFFSETS)
    return several and apart and not bool((e.got == torch.inf).any())


def _several_tiles(e: Evidence) -> bool:
    """Whether rows of several tiles go wrong, and no others do."""
    return e.args64[0].shape[-1] > _tile(e) and e.only(lambda case: case.sizes["col"] > _tile(e))


def _of_last_tile(e: Evidence) -> torch.Tensor:
    """The logit of each row's target where it lies in the row's last tile, else 0."""
    first = (e.args64[0].shape[-1] - 1) // _tile(e) * _tile(e)
    return torch.where(e.args64[1] >= first, _chosen(e), 0)


def _to_base_2(e: Evidence) -> tuple[torch.Tensor, ...]:
    """The logsumexp with log2 for log, with exp2 for exp, and with both."""
    x, ln2 = e.args64[0], math.log(2)
    maximum = x.amax(-1).clamp_min(torch.finfo(torch.float32).min)
    of_exp = torch.logsumexp(x, -1) - maximum
    of_exp2 = torch.logsumexp((x - maximum[..., None]) * ln2, -1)
    return maximum + of_exp / ln2, maximum + of_exp2, maximum + of_exp2 / ln2


def _nan_is_computed(e: Evidence) -> bool:
    """Whether a loss is NaN that was written, from numbers that were there to be read."""
    strange = e.findings("out_of_bounds") or e.findings("uninitialized_reads")
    return not strange and bool((e.got.isnan() & e.right.isfinite() & ~e.difference.never_written).any())


def _only_infinite(e: Evidence) -> bool:
    """Whether losses are wrong, and all of them in rows that hold -inf or whose last tile has lanes past the end."""
    if e.difference.name != "loss":
        return False
    if not e.only(lambda case: case.kind == EVERY_KIND or case.sizes["col"] % _tile(e) != 0):
        return False
    ragged = e.args64[0].shape[-1] % _tile(e) != 0
    return ragged or bool((e.args64[0].isneginf().any(-1) | ~e.bad).all())


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
        return reference(logits, target, dloss, ignore_index)[0], torch.where(counts[..., None], wrong(p, hit, d), 0)

    return formula


#: The most telling first; the numbers are those of the notebook's list.
MISTAKES = (
    shapes.FAR,
    Diagnosis(_only_ignored, classic("only rows that are ignored are wrong: their loss and their gradient are 0", 5)),
    Diagnosis(_past_the_end, classic("lanes past the end of a row count as 0: give them other=-inf", 3)),
    Diagnosis(
        lambda e: _left_out(rescale=False)(e) and _left_out(rescale=False, carry=False)(e),
        classic(
            "the running sum is not rescaled when a larger maximum comes, or each tile has a maximum of its own: carry "
            "the largest so far, and rescale the sum",
            1,
        ),
    ),
    Diagnosis(_left_out(rescale=False), classic("the running sum is not rescaled when a larger maximum comes", 1)),
    Diagnosis(
        _left_out(rescale=False, carry=False),
        classic("each tile has a maximum of its own: carry the largest so far, and rescale the sum", 1),
    ),
    Diagnosis(_left_out(last=True), classic("the sum holds the last tile only: what came before is lost", 1)),
    Diagnosis(
        lambda e: _loss_is(e, torch.logsumexp(e.args64[0][..., : _tile(e)], -1) - _chosen(e)),
        classic("the sum holds the first tile only: does the loop go on to the end of the row?", 1),
    ),
    Diagnosis(
        lambda e: e.case.kind == EVERY_KIND and _bad_rows(e) == {LATE} and bool(e.got.isnan().any()),
        classic("a tile that holds -inf only gives -inf - (-inf) = NaN: start the maximum at a finite number", 2),
    ),
    Diagnosis(
        lambda e: _only_infinite(e) and _nan_is_computed(e),
        classic(
            "only rows give NaN that hold -inf or have lanes past the end: -inf - (-inf), where a maximum is still "
            "-inf, and -inf times 0 are NaN, and lanes past the end need other=-inf",
            2,
            3,
        ),
    ),
    Diagnosis(_one_maximum, classic("all rows of a tile share one maximum: take it along axis 1, one per row", 7)),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind in (OFFSETS, "far below zero")),
        classic(
            "only rows far below zero fail: the first maximum, and `other` past the end, must lie below every logit",
            2,
        ),
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
    Diagnosis(
        lambda e: _several_tiles(e) and _loss_is(e, _lse(e) - _of_last_tile(e)),
        classic("only a target in the last tile of its row is subtracted: what earlier tiles found is lost", 4),
    ),
    Diagnosis(lambda e: _loss_is(e, _lse(e)), classic("the logit of the target is not subtracted", 4)),
    Diagnosis(lambda e: _loss_is(e, _chosen(e) - _lse(e)), classic("the loss has the wrong sign", 4)),
    Diagnosis(
        lambda e: any(_loss_is(e, other - _chosen(e)) for other in _to_base_2(e)),
        classic("the logarithm, or the exponential, is to base 2: this loss takes exp and log", 9),
    ),
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
