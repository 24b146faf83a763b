"""The check of exercise 6.8: tokens to the ranks of their experts by all-to-all, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from utils.checks.core import Exercise, classic, generator
from utils.checks.hidden import Draw, Tolerance
from utils.checks.problem import Problem
from utils.checks.ranks.distributed_check import DistributedCheck, in_group
from utils.checks.ranks.scenarios import RankObservation, RankScenario
from utils.distributed import calls

from .dispatch_cases import ADDED, SENT, Reading, Tokens, combined, dispatched, gradients, named, rank_of
from .exchanged_rows import RAISED, RAISED_BY_EXCHANGE, Rows, judge_rows, play_rows

_NOBODY = classic("a rank without tokens or without experts sends and receives nothing, but takes part", 9)
#: What only the cases of one scenario show, where nothing more is known.
_ONLY = {
    "shares of different size": classic("only experts that ranks cannot share evenly go wrong: shares_of says how many "
                                        "each rank has", 5),
    "bfloat16": classic("only bfloat16 goes wrong: weigh and add in float32, then round once", 10),
    "an infinite token": classic("one infinite token spoils others: rows are picked by index, for 0 times infinity is "
                                 "NaN", 12),
}  # fmt: skip


# ---- there and back
@dataclass
class Outcome:
    """What a rank had of one case, and the kind, elements and dtype of what it called, forward and backward."""

    rows: Any
    counts: Any
    out: Any = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    forward: list[tuple[str, int, str]] = field(default_factory=list)
    backward: list[tuple[str, int, str]] = field(default_factory=list)


def _there_and_back(answer: Mapping[str, Callable], case: Tokens, group: ProcessGroup | None) -> Outcome:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    options = {"group": group} if group else {}
    x, weights = case.x(rank).requires_grad_(), case.weights(rank).requires_grad_()
    factors = case.factors()[case.share(rank, ranks)].requires_grad_()
    called: list[calls.Call] = []
    with calls.listen(called.append):
        rows, counts, kept = answer["dispatch"](x, case.choices(rank), case.experts, **options)
        outcome = Outcome(rows.detach(), counts)
        fits = counts.shape == (len(factors),) and int(counts.sum()) == len(rows)
        results = rows * factors.repeat_interleave(counts, 0) if fits else rows  # all ranks call combine
        out = answer["combine"](results, kept, weights)
        outcome.out, there = out.detach(), len(called)
        out.backward(case.gradient(rank))
    outcome.gradients = {"x": x.grad, "weights": weights.grad, "factors": factors.grad}
    every = [(call.kind, call.elements, call.dtype) for call in called]
    outcome.forward, outcome.backward = every[:there], every[there:]
    return outcome


def _play(answer: Mapping[str, Callable], cases: Sequence[Tokens], group: ProcessGroup | None = None) -> dict[str, Any]:
    outcomes = [_there_and_back(answer, case, group) for case in cases]
    return {
        "outcomes": outcomes,
        "results": [value for outcome in outcomes for value in (outcome.out, *outcome.gradients.values())],
    }


def _by_expert(rows: Tensor, counts: Tensor) -> list[list[list[float]]]:
    """Of each expert its rows, in whatever order."""
    return [sorted(part.tolist()) for part in rows.double().split(counts.tolist())]


def _sent(case: Tokens, outcomes: Sequence[Outcome], only: str) -> Problem | None:
    """What is wrong in what ``dispatch`` gave."""
    ranks = len(outcomes)
    for rank, (outcome, (rows, experts, _)) in enumerate(zip(outcomes, dispatched(case, ranks), strict=True)):
        share = case.share(rank, ranks)
        right = torch.bincount(experts, minlength=case.experts)[share]
        got = outcome.counts
        if got.shape != right.shape or not torch.equal(got, right):
            own = torch.bincount(case.choices(rank).flatten(), minlength=case.experts)
            gives = partial(_counts, case=case, counts=[outcome.counts for outcome in outcomes])
            cause = named(SENT, gives) or only
            if got.shape in (own.shape, right.shape) and got.tolist() in (own.tolist(), own[share].tolist()):
                cause = classic("these are the rank's own tokens: count what has come for its experts", 4)
            headline = f"dispatch counts {got.tolist()} rows for the experts of rank {rank}, expected {right.tolist()}"
            return Problem(headline, cause, (str(case),))
        if got.dtype != torch.int64:
            return Problem(f"dispatch gives counts of {got.dtype}, expected torch.int64", details=(str(case),))
        if outcome.rows.shape != rows.shape or outcome.rows.dtype != case.dtype:
            shown = f"{tuple(outcome.rows.shape)}, {outcome.rows.dtype}; expected {tuple(rows.shape)}, {case.dtype}"
            return Problem(f"dispatch gives rows of shape {shown} on rank {rank}", only, (str(case),))
        if _by_expert(outcome.rows, right) == _by_expert(rows, right):
            continue
        gives = partial(_moves, case=case, rows=[outcome.rows for outcome in outcomes])
        experts = [
            e for e, (a, b) in enumerate(zip(_by_expert(outcome.rows, right), _by_expert(rows, right))) if a != b
        ]
        numbers = ", ".join(str(share.start + e) for e in experts)
        headline = f"dispatch gives other rows than those of expert {numbers} on rank {rank}"
        return Problem(headline, named(SENT, gives) or only, (str(case),))
    return None


def _counts(reading: Reading, case: Tokens, counts: Sequence[Tensor]) -> bool:
    """Whether a mistake of ``dispatch`` gives the counts that all ranks have."""
    ranks = len(counts)
    home = (reading.here or rank_of)(torch.arange(case.experts), case.experts, ranks)
    found = [torch.bincount(experts, minlength=case.experts) for _, experts, _ in dispatched(case, ranks, reading)]
    return all(got.tolist() == found[rank][home == rank].tolist() for rank, got in enumerate(counts))


def _moves(reading: Reading, case: Tokens, rows: Sequence[Tensor]) -> bool:
    """Whether a mistake of ``dispatch`` gives the rows that all ranks have."""
    found = dispatched(case, len(rows), reading)
    return all(a.shape == b.shape and torch.equal(a.double(), b) for a, (b, _, _) in zip(rows, found, strict=True))


def _wrong(got: Tensor, right: Tensor, once: float = 0.0, sums: float = 1e-5) -> Tensor:
    """Which elements differ by more than the rounding of sums, relative to the largest, and a last one of ``once``."""
    least = sums * right.abs().nan_to_num(posinf=0.0).amax().clamp(min=1) if right.numel() else 0.0
    near = (got.double() - right).abs().nan_to_num() <= once * right.abs().nan_to_num(posinf=0.0) + least
    return ~near | (got.isfinite() != right.isfinite())


def _gives(reading: Reading, case: Tokens, outs: Sequence[Tensor], once: float) -> bool:
    """Whether a mistake of ``combine`` gives what all ranks have."""
    found = combined(case, len(outs), reading)
    return all(a.shape == b.shape and not _wrong(a, b, once).any() for a, b in zip(outs, found, strict=True))


def _back(case: Tokens, outcomes: Sequence[Outcome], only: str) -> Problem | None:
    """What is wrong in what ``combine`` gave, and in the gradients."""
    ranks, once = len(outcomes), 2**-7.9 if case.dtype == torch.bfloat16 else 0.0
    rights = combined(case, ranks)
    for rank, (outcome, right) in enumerate(zip(outcomes, rights, strict=True)):
        got = outcome.out
        if got.shape != right.shape or got.dtype != case.dtype:
            shown = f"{tuple(got.shape)}, {got.dtype}; expected {tuple(right.shape)}, {case.dtype}"
            return Problem(f"combine gives shape {shown} on rank {rank}", "", (str(case),))
        rows = _wrong(got, right, once).any(1)
        if not rows.any():
            continue
        gives = partial(_gives, case=case, outs=[outcome.out for outcome in outcomes], once=once)
        first = int(rows.nonzero()[0])
        headline = f"combine: {int(rows.sum())} of {len(rows)} tokens differ on rank {rank}"
        shown = [[f"{value:.4g}" for value in x[first].tolist()] for x in (got, right)]
        details = f"token {first} is [{', '.join(shown[0])}], expected [{', '.join(shown[1])}]"
        return Problem(headline, named(ADDED, gives) or only, (str(case), details))
    if case.kind != "infinite":
        return _gradients(case, outcomes, only)
    return None


def _gradients(case: Tokens, outcomes: Sequence[Outcome], only: str) -> Problem | None:
    ranks, sums = len(outcomes), 3e-2 if case.dtype == torch.bfloat16 else 1e-5
    for rank, (outcome, right) in enumerate(zip(outcomes, gradients(case, ranks), strict=True)):
        for name, expected in right.items():
            got = outcome.gradients[name]
            of = {"x": "its tokens", "weights": "the weights", "factors": "its experts' parameters"}[name]
            if got is None:
                if expected.numel() and len(outcome.rows):
                    cause = classic("autograd does not reach it: exchange_rows takes gradients back", 2)
                    return Problem(f"rank {rank}: {of} have no gradient", cause, (str(case),))
                continue
            if got.shape != expected.shape or _wrong(got, expected, sums=sums).any():
                return Problem(f"rank {rank}: the gradient of {of} is wrong", only, (str(case),))
    return None


def _traffic(case: Tokens, outcomes: Sequence[Outcome]) -> Problem | None:
    """Three all-to-alls forward, two backward, each row once."""
    for rank, outcome in enumerate(outcomes):
        rows = case.tokens[rank] * case.chosen * case.hidden
        others = [kind for kind, _, _ in (*outcome.forward, *outcome.backward) if kind != "all_to_all"]
        if others:
            cause = classic("rows and counts travel by all-to-all, to the ranks that need them", 8)
            return Problem(f"rank {rank} calls {others[0]}", cause, (str(case),))
        counted = [entry for entry in outcome.forward if "int" in entry[2]]
        if len(counted) > 1 or sum(elements for _, elements, _ in counted) > case.experts:
            cause = classic("one all-to-all of counts, of E numbers, says all that is to be known", 8)
            return Problem(f"rank {rank} exchanges integers {len(counted)} times", cause, (str(case), str(counted)))
        sizes = [elements for _, elements, dtype in outcome.forward if "int" not in dtype]
        home = len(outcome.rows) * case.hidden
        if sizes != [rows, home]:
            cause = classic("one all-to-all takes each row there, one takes each result back, and nothing else", 8)
            shown = ", ".join(f"{size:,}" for size in sizes)
            return Problem(
                f"rank {rank} sends {shown} elements of rows, expected {rows:,}, {home:,}", cause, (str(case),)
            )
        back = [elements for _, elements, _ in outcome.backward]
        if sorted(back) != sorted([rows, home]):
            cause = classic("backward each of the two exchanges of rows is made once more, the other way", 8)
            return Problem(f"rank {rank} sends {back} elements backward, expected {[rows, home]}", cause, (str(case),))
    return None


def _judge(observations: Sequence[RankObservation], cases: Sequence[Tokens], only: str = "") -> Problem | None:
    for k, case in enumerate(cases):
        outcomes = [observed.value["outcomes"][k] for observed in observations]
        for problem in (_sent(case, outcomes, only), _back(case, outcomes, only), _traffic(case, outcomes)):
            if problem:
                return problem
    return None


# ---- scenarios
def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    ranks, draw_ = (3, generator(seed)) if draw is None else (4, draw.random)

    def some(least: int = 2) -> tuple[int, ...]:
        return tuple(draw_.randint(least, 6) for _ in range(ranks))

    def scenario(name: str, *cases: Tokens, stuck: str = "", **others: Any) -> RankScenario:
        judge = lambda observed, cases: _judge(observed, cases, _ONLY.get(name, ""))  # noqa: E731
        return RankScenario(
            name, _play, judge, {"cases": cases}, ranks, stuck=stuck, raised=RAISED, values=("results",), **others
        )  # fmt: skip

    nobody, usual = (0, *some()[1:]), Tokens(seed, some(), 2 * ranks)
    rows = RankScenario(
        "rows between ranks",
        play_rows,
        judge_rows,
        {"rows": Rows(seed)},
        ranks,
        raised=RAISED_BY_EXCHANGE,
        values=("results",),
    )
    found = [
        rows,
        scenario(
            "tokens to experts and back", usual, Tokens(seed, some(), 2 * ranks, 1), Tokens(seed, some(), ranks, 3)
        ),
        scenario("shares of different size", *(Tokens(seed, some(), 2 * ranks + more) for more in range(1, ranks))),
        scenario("experts without tokens", Tokens(seed, some(), 2 * ranks, kind="idle experts")),
        scenario("all tokens to one expert", Tokens(seed, some(), 2 * ranks, 1, kind="one expert"), stuck=_NOBODY),
        scenario("a rank without tokens", Tokens(seed, nobody, 2 * ranks), Tokens(seed, (0,) * ranks), stuck=_NOBODY),
        scenario("fewer experts than ranks", Tokens(seed, some(), ranks - 1, ranks - 1), stuck=_NOBODY),
        scenario("views", Tokens(seed, some(), 2 * ranks, kind="views")),
        scenario("bfloat16", Tokens(seed, some(4), 2 * ranks, 3, 16, torch.bfloat16)),
        scenario("an infinite token", Tokens(seed, some(), 2 * ranks, kind="infinite")),
    ]
    one = scenario("a group of one rank", Tokens(seed, some(), 5))
    one = replace(one, members=(1,), raised={**RAISED, "": ""})
    return [*found, in_group(found[0], 11), in_group(found[1], 11), one]


EXPERT_DISPATCH = Exercise(
    "6.8",
    "tokens to their experts' ranks",
    points=13,
    observe=lambda package, seed: CHECK.observe(package, seed),
    tolerance=Tolerance(times=2),
)
CHECK = DistributedCheck(
    EXPERT_DISPATCH,
    _scenarios,
    "whatever the router chooses, no row is dropped, none is padded, and each crosses once in either direction",
)


@EXPERT_DISPATCH.checked_by
def check_expert_dispatch(
    exchange_rows: Callable, dispatch: Callable, combine: Callable, seed: int | None = None
) -> None:
    """Exercise 6.8: rows to the ranks of their experts and back, with gradients.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(exchange_rows, dispatch, combine, seed=seed)
