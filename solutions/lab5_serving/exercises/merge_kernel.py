"""The check of exercise 5.5: the kernel that puts the parts of a split context together."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from utils import runtime
from utils.checks.cases import Case
from utils.checks.core import Exercise, classic, draw_seed, generator
from utils.checks.diagnoses import Diagnosis, Evidence, same_as
from utils.checks.hidden import Observation, Tolerance, collected
from utils.checks.kernel import check_kernel
from utils.checks.launches import launched, tile_sizes, within
from utils.checks.speed import Speed
from utils.checks.tiling import Tiling
from utils.checks.traffic import Budget, Passes

KERNEL = "merge_parts_kernel"
Tensor = torch.Tensor

#: Kinds of cases in which some part, or every part of some head, holds no token.
_EMPTY = ("empty parts", "nothing at all", "only the last part")


def _merge(outputs: Tensor, logsumexps: Tensor, weigh: Callable[[Tensor], Tensor] = torch.exp) -> Tensor:
    """(S, H, D): the parts' outputs, weighed by e^(logsumexp - largest); 0 where all are empty."""
    largest = logsumexps.amax(-1, keepdim=True)
    weights = weigh(logsumexps - torch.where(largest == -math.inf, 0.0, largest))
    weights = torch.where(logsumexps == -math.inf, 0.0, weights)
    total = weights.sum(-1)[..., None]
    return _weighted(outputs, logsumexps, weights) / torch.where(total == 0, 1.0, total)


def _weighted(outputs: Tensor, logsumexps: Tensor, weights: Tensor) -> Tensor:
    """The sum over parts, empty ones left out: their outputs may be anything."""
    return (weights[..., None] * torch.where((logsumexps == -math.inf)[..., None], 0.0, outputs)).sum(2)


def _some(logsumexps: Tensor) -> Tensor:
    """1 for a part that holds tokens, 0 for an empty one."""
    return (logsumexps != -math.inf).to(logsumexps.dtype)


def _mean(outputs: Tensor, logsumexps: Tensor) -> Tensor:
    return _weighted(outputs, logsumexps, _some(logsumexps)) / _some(logsumexps).sum(-1).clamp(min=1)[..., None]


def _mean_of_all(outputs: Tensor, logsumexps: Tensor) -> Tensor:
    return _weighted(outputs, logsumexps, _some(logsumexps)) / logsumexps.shape[-1]


def _plain_sum(outputs: Tensor, logsumexps: Tensor) -> Tensor:
    return _weighted(outputs, logsumexps, _some(logsumexps))


def _not_normalised(outputs: Tensor, logsumexps: Tensor) -> Tensor:
    largest = logsumexps.amax(-1, keepdim=True)
    weights = torch.exp(logsumexps - torch.where(largest == -math.inf, 0.0, largest))
    return _weighted(outputs, logsumexps, weights)


def _by_logarithm(outputs: Tensor, logsumexps: Tensor) -> Tensor:
    weights = torch.where(logsumexps == -math.inf, 0.0, logsumexps)
    return _weighted(outputs, logsumexps, weights) / weights.sum(-1)[..., None]


def _exponentials_over_count(outputs: Tensor, logsumexps: Tensor) -> Tensor:
    return _not_normalised(outputs, logsumexps) / _some(logsumexps).sum(-1).clamp(min=1)[..., None]


def _in_steps(
    rescale_sum: bool, rescale_output: bool, carry: bool, exp: Callable[[Tensor], Tensor] = torch.exp
) -> Callable[[Evidence], bool]:
    """Whether an answer is what a running merge gives that forgets some of its rescaling, or rescales by ``exp``."""

    def applies(e: Evidence) -> bool:
        found = launched([e.trial, *e.trials], KERNEL)
        return found is not None and e.same_as(lambda o, lse: _running(o, lse, found["BLOCK_P"]))

    def _running(outputs: Tensor, logsumexps: Tensor, block: int) -> Tensor:
        m = torch.full_like(logsumexps[..., 0], -1e30)
        d, o = torch.zeros_like(m), torch.zeros_like(outputs[:, :, 0])
        for start in range(0, logsumexps.shape[-1], block):
            lse = logsumexps[..., start : start + block]
            new = torch.maximum(m, lse.amax(-1)) if carry else lse.amax(-1).clamp(min=-1e30)
            weights, ratio = torch.exp(lse - new[..., None]), exp((m - new).clamp(max=80))
            d = d * (ratio if rescale_sum else 1.0) + weights.sum(-1)
            o = o * (ratio[..., None] if rescale_output else 1.0)
            o = o + _weighted(outputs[:, :, start : start + block], lse, weights)
            m = new
        return o / torch.where(d == 0, 1.0, d)[..., None]

    return applies


def _last_step_alone(e: Evidence) -> bool:
    """Whether an answer is what the last step's parts give."""
    found = launched([e.trial, *e.trials], KERNEL)
    if found is None:
        return False
    block, parts = found["BLOCK_P"], e.case.sizes["P"]
    first = (parts - 1) // block * block
    return first > 0 and e.same_as(lambda o, lse: _merge(o[:, :, first:], lse[..., first:]))


def _nan_of_nothing(e: Evidence) -> bool:
    return bool((e.got.isnan() & ~e.right.isnan()).any()) and e.only(lambda case: case.kind in _EMPTY)


_RULES = (
    Diagnosis(
        _nan_of_nothing,
        classic("an empty part gives NaN: its logsumexp is -inf, and its output may hold anything, NaN too", 3),
    ),
    same_as(
        _mean,
        classic(
            "the parts are averaged, as if each had the same logsumexp: a part counts as much as the sum of its "
            "exponentials",
            2,
        ),
    ),
    same_as(_mean_of_all, classic("the parts are averaged, empty ones among them: the logsumexps are the weights", 2)),
    same_as(_plain_sum, classic("the outputs are added up as they are: the logsumexps are the weights", 2)),
    same_as(_exponentials_over_count, classic("the denominator is the sum of the weights, not their number", 2)),
    same_as(_by_logarithm, classic("the logsumexps themselves are the weights: their exponentials are", 2)),
    same_as(
        lambda o, lse: _merge(o, lse, torch.exp2),
        classic("these are powers of 2: the logsumexps are natural logarithms", 4),
    ),
    same_as(
        lambda o, lse: _merge(o, lse, lambda x: torch.exp(x / math.log(2.0))),
        classic("the logsumexps are natural logarithms already: exp of them, with no factor of log2 e", 4),
    ),
    same_as(
        lambda o, lse: _merge(o, lse, lambda x: torch.exp(-x.clamp(min=-80))),
        classic("the sign is wrong: a part weighs e^(its logsumexp - the largest)", 4),
    ),
    same_as(_not_normalised, classic("the sum of the weights is missing: d collects it", 2)),
    Diagnosis(
        _in_steps(False, False, True),
        classic(
            "neither sum nor output is rescaled when a later step brings a larger logsumexp (or a step's weights take "
            "it off twice, which comes to the same)",
            1,
        ),
    ),
    Diagnosis(
        _in_steps(True, True, True, exp=torch.exp2),
        classic("earlier steps are rescaled by a power of 2: the logsumexps are natural logarithms", 4),
    ),
    Diagnosis(_in_steps(True, False, True), classic("the sum is rescaled, the output is not", 1)),
    Diagnosis(_in_steps(False, True, True), classic("the output is rescaled, the sum is not", 1)),
    Diagnosis(
        _in_steps(True, True, False),
        classic("each step has a maximum of its own: the new one is the larger of both", 1),
    ),
    Diagnosis(
        _in_steps(False, False, False),
        classic("each step has a maximum of its own: the new one is the larger of both", 1),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.magnitude != 1),
        classic("only large logsumexps go wrong: e^L overflows, e^(L - largest) never does", 5),
    ),
    Diagnosis(
        _last_step_alone,
        classic("only the last step counts: the maximum stays where it started, m = m_new is missing", 1),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.kind == "many parts"),
        classic("only several steps go wrong: what is carried from BLOCK_P parts to the next?", 1),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.layout != "contiguous"),
        classic("only tensors of other strides go wrong: each axis has a stride of its own", 6),
    ),
    Diagnosis(
        lambda e: e.only(lambda case: case.sizes["D"] & (case.sizes["D"] - 1) != 0),
        classic("only head dimensions that are no power of two go wrong: mask the columns from D on", 6),
    ),
)


def _cases(seed: int, block: int) -> list[Case]:
    """The cases of a seed, simplest first, some with more parts than the ``block`` of one step."""
    draw = generator(seed)

    def sizes(parts: int, D: int = 16) -> dict[str, int]:
        return {"S": draw.randint(1, 3), "H": draw.randint(1, 3), "P": parts, "D": D}

    many, odd = block * draw.randint(1, 3) + draw.randint(1, block - 1), draw.choice((20, 24, 40))
    plans = [
        Case("few parts", sizes(draw.randint(2, 4)), seed=seed),
        Case("one part", sizes(1), seed=seed),
        Case("many parts", sizes(many), seed=seed),
        Case("many parts", sizes(2 * block), seed=seed),
        *(Case(kind, sizes(draw.randint(3, 12)), seed=seed) for kind in _EMPTY),
        Case("odd head dimension", sizes(draw.randint(2, 9), odd), seed=seed),
        Case("one element", {"S": 1, "H": 1, "P": 1, "D": 16}, seed=seed),
        Case("many parts", sizes(many), seed=seed, magnitude=100.0),
        Case("many parts", sizes(block + draw.randint(1, 3)), layout="padded", seed=seed),
        Case("few parts", {**sizes(draw.randint(3, 6)), "H": 2}, layout="transposed", seed=seed),
    ]
    return plans


def _inputs(case: Case) -> tuple[Tensor, Tensor]:
    """Outputs and logsumexps; those of empty parts NaN and -inf."""
    outputs = case.tensor("outputs", "S", "H", "P", "D") / case.magnitude
    logsumexps = case.tensor("logsumexps", "S", "H", "P", scale=2.0)
    if case.kind in _EMPTY:
        draw = random.Random(f"{case.seed}/{case}")
        empty = torch.rand(logsumexps.shape, generator=torch.Generator().manual_seed(draw.getrandbits(60))) < 0.4
        empty[..., 0] = True  # the first one, which starts the maximum
        if case.kind == "only the last part":
            empty[...], empty[..., -1] = True, False
        elif case.kind == "nothing at all":
            empty[:, 0] = True
        else:
            empty[..., -1] = False
        empty = empty.to(outputs.device)
        outputs[empty], logsumexps[empty] = math.nan, -math.inf
    return outputs, logsumexps


def _budget(case: Case, launch: Mapping[str, Any]) -> Budget:
    return Budget(
        {"outputs_ptr": Passes("S", "H", "P", "D"), "logsumexps_ptr": Passes("S", "H", "P")},
        {"o_ptr": Passes("S", "H", "D")},
    )


def _output(case: Case, launch: Mapping[str, Any]) -> Budget:
    return Budget({}, {"o_ptr": Passes("S", "H", "D")}, exact=True)


def _large() -> tuple[Tensor, Tensor]:
    """128 parts of 2,048 heads."""
    shape = (64, 32, 128, 128)
    return torch.randn(shape, device=runtime.DEVICE), torch.randn(shape[:3], device=runtime.DEVICE)


def _block(merge_parts: Callable[..., Tensor]) -> int:
    """Parts that one step of the kernel takes where there are many."""
    many = torch.zeros((1, 1, 64, 16), device=runtime.DEVICE), torch.zeros((1, 1, 64), device=runtime.DEVICE)
    return tile_sizes(merge_parts, many, KERNEL, BLOCK_P=8)["BLOCK_P"]


@collected
def observe(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Hidden cases: those of the check with another seed, logsumexps that grow, and a 16-bit result."""
    for number, case in enumerate(_cases(seed, 8)):
        outputs, logsumexps = _inputs(case)
        yield f"merge_parts, case {number + 1}: {case.kind}", package.merge_parts(outputs, logsumexps)
        if case.kind == "many parts" and case.layout == "padded":
            growing = logsumexps + 0.7 * torch.arange(logsumexps.shape[-1], device=logsumexps.device)
            yield "merge_parts of logsumexps that grow", package.merge_parts(outputs, growing)
            yield "merge_parts into bfloat16", package.merge_parts(outputs, logsumexps, dtype=torch.bfloat16)


MERGE_PARTS = Exercise(
    "5.5",
    "split-KV merge",
    points=10,
    observe=observe,
    tolerance=Tolerance(1e-4),
    tolerances={"merge_parts into bfloat16": Tolerance(1e-2)},
)


@MERGE_PARTS.checked_by
def check_merge_parts(merge_parts: Callable[..., Tensor], seed: int | None = None) -> None:
    """Exercise 5.5: parts of a split context put together.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    check_kernel(
        MERGE_PARTS,
        merge_parts,
        _merge,
        _cases(seed, max(2, _block(merge_parts))),
        _inputs,
        outputs=("o",),
        tiling=Tiling("s h col", tiles={"s": 1, "h": 1}, grid=("s*h",)),
        inspections=[within(KERNEL, _budget), within(KERNEL, _output)],
        diagnose=_RULES,
        speed=Speed(_large, lambda outputs, logsumexps: outputs.sum(2), 0.5, "the plain sum of the parts"),
        seed=seed,
        notice="one pass over the parts, in any number of steps; what an empty part holds is never seen",
    )
