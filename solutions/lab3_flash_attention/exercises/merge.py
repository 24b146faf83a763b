"""The check of exercise 3.1: the operator that merges what two parts of a row know of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from utils.checks.cases import Case
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import Diagnosis, same_as
from utils.checks.forbid import Rules
from utils.checks.hidden import Observation, Tolerance, tried
from utils.checks.kernel import check_kernel

Tensor = torch.Tensor
Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
MergeOutputs = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Tensor, Tensor]]

_ALONE = Rules(groups=("softmax", "attention", "NumPy"), kernel=False)
#: Kinds of cases in which a part, or both, hold no element: (-inf, 0).
_EMPTY = ("first part empty", "second part empty", "both parts empty")
#: Kind of the cases whose scores lie near -9000: a logarithm of the sum that is added to one of them is rounded away.
_VERY_LOW = "very low maxima"


def _ratio(old: Tensor, new: Tensor) -> Tensor:
    """e^(old - new); 1 where both are -inf."""
    return torch.exp(torch.where(new == -math.inf, 0.0, old - new))


def _merge(m1: Tensor, d1: Tensor, m2: Tensor, d2: Tensor) -> tuple[Tensor, Tensor]:
    m = torch.maximum(m1, m2)
    return m, d1 * _ratio(m1, m) + d2 * _ratio(m2, m)


def _merge_outputs(m1: Tensor, d1: Tensor, o1: Tensor, m2: Tensor, d2: Tensor, o2: Tensor) -> tuple[Tensor, ...]:
    m, d = _merge(m1, d1, m2, d2)
    return m, d, o1 * _ratio(m1, m)[..., None] + o2 * _ratio(m2, m)[..., None]


# ---- the mistakes


def _wrong_sum(
    first: Callable[[Tensor, Tensor, Tensor], Tensor], second: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A wrong merge: what each part adds to the sum, as a function of (d, m of the part, m of both)."""

    def merge(m1: Tensor, d1: Tensor, m2: Tensor, d2: Tensor) -> tuple[Tensor, Tensor]:
        m = torch.maximum(m1, m2)
        return m, first(d1, m1, m) + second(d2, m2, m)

    return merge


def _as_it_is(d: Tensor, part: Tensor, m: Tensor) -> Tensor:
    return d


def _rescaled(d: Tensor, part: Tensor, m: Tensor) -> Tensor:
    return d * _ratio(part, m)


def _inverse(d: Tensor, part: Tensor, m: Tensor) -> Tensor:
    return d * _ratio(m, part)


def _powers_of_two(d: Tensor, part: Tensor, m: Tensor) -> Tensor:
    return d * torch.exp2(torch.where(m == -math.inf, 0.0, part - m))


def _crossed(m1: Tensor, d1: Tensor, m2: Tensor, d2: Tensor) -> tuple[Tensor, Tensor]:
    m = torch.maximum(m1, m2)
    return m, d1 * _ratio(m2, m) + d2 * _ratio(m1, m)


def _nan_of_nothing(e) -> bool:
    return bool((e.got.isnan() & ~e.right.isnan()).any()) and e.only(lambda case: case.kind in _EMPTY)


_COMMON = (
    Diagnosis(
        _nan_of_nothing,
        classic("a part without elements, (-inf, 0), gives NaN: -inf - (-inf) is no number", 3),
    ),
    Diagnosis(
        lambda e: bool(e.got.isfinite().all()) and e.only(lambda case: case.magnitude != 1),
        "only large values fail, by rounding: m + log d keeps fewer digits of d the larger m is; merge d itself",
    ),
    Diagnosis(
        lambda e: e.position == 0 and bool(e.got[e.bad].isfinite().all()) and e.only(lambda case: case.kind in _EMPTY),
        classic("the maximum of two empty parts is -inf: what replaces it in the exponents is not returned", 3),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind not in _EMPTY and case.magnitude != 1),
        classic("only large values fail: e^m overflows; e^(m1 - m) with the new maximum m never does", 4),
    ),
)


def _either(first: Callable, second: Callable) -> Callable:
    """A rule's predicate: the answer is what one of two wrong formulas gives."""
    return lambda e: e.same_as(first) or e.same_as(second)


_MERGE_MISTAKES = (
    Diagnosis(
        lambda e: e.position == 0 and e.close(e.trial.targets[1].right),
        "maximum and sum stand in each other's place: m is returned first, then d",
    ),
    same_as(_wrong_sum(_as_it_is, _as_it_is), classic("neither sum is rescaled to the new maximum", 1)),
    Diagnosis(
        _either(_wrong_sum(_rescaled, _as_it_is), _wrong_sum(_as_it_is, _rescaled)),
        classic("only one of the two sums is rescaled: either part may hold the larger maximum", 1),
    ),
    same_as(_wrong_sum(_inverse, _inverse), classic("the ratio is upside down: e^(old maximum - new maximum)", 2)),
    same_as(_crossed, classic("each sum is rescaled by the other part's maximum", 2)),
    same_as(_wrong_sum(_powers_of_two, _powers_of_two), classic("these are powers of 2, the sums hold powers of e", 2)),
    Diagnosis(
        lambda e: e.position == 0 and e.close(torch.minimum(e.args64[0], e.args64[2])),
        classic("this is the smaller of the two maxima", 2),
    ),
    *_COMMON,
)


def _weighted(
    first: Callable[[Tensor, Tensor, Tensor], Tensor],
    second: Callable[[Tensor, Tensor, Tensor], Tensor],
    divide: bool = False,
) -> Callable[..., tuple[Tensor, ...]]:
    """A wrong merge of outputs: each one's weight as a function of (d of the part, m of the part, m of both)."""

    def merge(m1: Tensor, d1: Tensor, o1: Tensor, m2: Tensor, d2: Tensor, o2: Tensor) -> tuple[Tensor, ...]:
        m, d = _merge(m1, d1, m2, d2)
        w1, w2 = first(d1, m1, m), second(d2, m2, m)
        total = torch.where(d == 0, 1.0, d) if divide else torch.ones_like(d)
        return m, d, o1 * (w1 / total)[..., None] + o2 * (w2 / total)[..., None]

    return merge


def _one(d: Tensor, part: Tensor, m: Tensor) -> Tensor:
    return torch.ones_like(d)


def _ratio_of(d: Tensor, part: Tensor, m: Tensor) -> Tensor:
    return _ratio(part, m)


def _upside_down(d: Tensor, part: Tensor, m: Tensor) -> Tensor:
    return _ratio(m, part)


_OUTPUT_MISTAKES = (
    Diagnosis(
        lambda e: e.position < 2 and not bool(e.got.isnan().any()),
        "the maximum or the sum is wrong already: they are what merge(m1, d1, m2, d2) returns, in that order",
    ),
    same_as(_weighted(_one, _one), classic("the outputs are added as they are: each is rescaled like its sum", 5)),
    Diagnosis(
        _either(_weighted(_ratio_of, _one), _weighted(_one, _ratio_of)),
        classic("only one of the two outputs is rescaled: either part may hold the larger maximum", 5),
    ),
    same_as(_weighted(_upside_down, _upside_down), classic("the ratio of the outputs is upside down", 2)),
    same_as(
        _weighted(_ratio_of, _ratio_of, divide=True),
        classic("the output is divided by d: o stays a plain sum, so that it can be merged again", 6),
    ),
    Diagnosis(
        _either(_weighted(_rescaled, _rescaled), _weighted(_rescaled, _rescaled, divide=True)),
        classic("the outputs are multiplied by their sums d: o is a sum already, not an average", 6),
    ),
    Diagnosis(
        _either(_weighted(_as_it_is, _as_it_is), _weighted(_as_it_is, _as_it_is, divide=True)),
        classic("the outputs are weighted by d: what rescales them is e^(m1 - m)", 6),
    ),
    *_COMMON,
)


# ---- the cases


def _cases(seed: int) -> list[Case]:
    draw = generator(seed)
    sizes = {"row": draw.randint(5, 40), "D": draw.randint(3, 20)}
    kinds = ["plain", "one element", *_EMPTY, "unequal parts"]
    one = {"row": 1, "D": 1}
    cases = [Case(kind, one if kind == "one element" else sizes, seed=seed) for kind in kinds]
    cases.append(Case("plain", sizes, torch.float64, seed=seed))
    return [*cases, Case("plain", sizes, magnitude=300.0, seed=seed)]


def _part(case: Case, name: str, length: int, empty: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum and weighted values of ``length`` scores and values; every other row without any if ``empty``."""
    x = case.tensor(f"x{name}", "row", length)
    v = case.tensor(f"v{name}", "row", length, "D").div(case.magnitude)
    if case.kind == _VERY_LOW:
        x -= 9000
    if empty:
        x[::2] = -math.inf
    m = x.amax(-1)
    weight = torch.exp(x - torch.where(m == -math.inf, 0.0, m)[:, None])
    d = weight.sum(-1)
    return m, d, (weight[..., None] * v).sum(1)


def _parts(case: Case) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    lengths = (2, 50) if case.kind == "unequal parts" else (7, 9)
    empty = (case.kind in (_EMPTY[0], _EMPTY[2]), case.kind in _EMPTY[1:])
    return _part(case, "1", lengths[0], empty[0]), _part(case, "2", lengths[1], empty[1])


def _inputs(case: Case) -> tuple[Tensor, ...]:
    return tuple(x for part in _parts(case) for x in part)


def _without_outputs(case: Case) -> tuple[Tensor, ...]:
    return tuple(x for part in _parts(case) for x in part[:2])


def _flat(merge_outputs: MergeOutputs) -> Callable[..., tuple[Tensor, ...]]:
    return lambda m1, d1, o1, m2, d2, o2: merge_outputs((m1, d1, o1), (m2, d2, o2))


def _observe(package: ModuleType, seed: int) -> dict[str, Observation]:
    def cases(drawn: int) -> list[Case]:
        return [*_cases(drawn), Case(_VERY_LOW, {"row": 12, "D": 5}, seed=drawn)]

    merged = tried("3.1", "merge", ("m", "d"), cases, _without_outputs)
    outputs = tried("3.1", "merge_outputs", ("m", "d", "o"), cases, _inputs, lambda lab: _flat(lab.merge_outputs))
    return merged(package, seed) | outputs(package, seed)


MERGE = Exercise(
    "3.1",
    "merge operator",
    points=8,
    observe=_observe,
    tolerance=Tolerance(of="element"),
)


@MERGE.checked_by
def check_merge(merge: Merge, merge_outputs: MergeOutputs, seed: int | None = None) -> None:
    """Exercise 3.1: merge two parts of a row: maxima and sums, then their outputs too.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    cases = _cases(seed)
    check_kernel(
        MERGE,
        merge,
        _merge,
        cases,
        _without_outputs,
        outputs=("m", "d"),
        forbidden=_ALONE,
        diagnose=_MERGE_MISTAKES,
        seed=seed,
        notice="a row may be cut anywhere, and its parts merged in any order",
    )

    check_kernel(
        MERGE.part("merge of outputs"),
        _flat(merge_outputs),
        _merge_outputs,
        cases,
        _inputs,
        outputs=("m", "d", "o"),
        forbidden=_ALONE,
        diagnose=_OUTPUT_MISTAKES,
        seed=seed,
        notice="attention over two halves of the keys, computed apart, is attention over all of them",
    )
