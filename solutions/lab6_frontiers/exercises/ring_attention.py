"""The check of exercise 6.6: ring attention's forward pass, causal in zig-zag."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from utils.checks.core import Exercise, classic
from utils.checks.hidden import Draw, Tolerance
from utils.checks.problem import Problem
from utils.checks.ranks.distributed_check import DistributedCheck, in_group
from utils.checks.ranks.scenarios import RankObservation, RankScenario

from .ring_merge import KINDS, judge_merge, pairs
from .ring_sequences import Reading, Zigzag, named
from .ring_watch import Outcome, watched

_CONTIGUOUS = classic("a message is sent as it lies in memory: it must be contiguous, as torch.stack makes it", 8)
_STUCK = classic("every rank sends first and receives afterwards: start both messages, then wait for both", 9)
_NOBODY = classic(
    "every rank waits for a message that no rank sends it: start the send before the wait, and receive from the rank "
    "whose right neighbour this one is", 9,
)  # fmt: skip
_LENGTH = classic(
    "only parts of different lengths go wrong: the tensor that waits has the length of the part that comes, "
    "lengths[source - 1]", 6,
)  # fmt: skip
#: What only the cases of one scenario show, where nothing more is known.
_ONLY = {
    "parts of different lengths": classic("only parts of different lengths go wrong: a front has (n + 1) // 2 tokens, "
                                          "and each part its own length", 6),
    "scores far from zero": classic("only scores far from 0 go wrong: no e^lse without a difference", 4),
    "bfloat16": classic("only bfloat16 goes wrong: o and lse stay float32 until the end", 10),
    "views": "only tensors that are views go wrong",
}  # fmt: skip


def _stuck(called: Sequence[Sequence[str]]) -> str:
    """Why the ranks wait for one another: in a send that nobody receives, or for a message that nobody sends."""
    met = [of_one for of_one in called if of_one]
    if met and all(of_one.count("send") > of_one.count("recv") for of_one in met):
        return _STUCK
    return _NOBODY if len(met) == len(called) and all("recv" in of_one for of_one in met) else ""


def _play(
    answer: Mapping[str, Callable], sequences: Sequence[Zigzag], merges: Sequence[str] = (), seed: int = 0,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:  # fmt: skip
    merged = [answer["merge_parts"](*pairs(kind, seed)) for kind in merges]
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    options = {"group": group} if group else {}
    outcomes = [
        watched(answer["ring_forward"], sequence.part(rank, ranks), {"causal": sequence.causal, **options})
        for sequence in sequences
    ]
    return {"merged": merged, "outcomes": outcomes, "results": [outcome.o for outcome in outcomes]}


# ---- what is wrong
def _close(got: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Which elements are right: to float32's rounding, and in bfloat16 rounded once more."""
    once = 2**-7.9 if dtype == torch.bfloat16 else 0.0
    return (got.double() - right).abs() <= once * right.abs() + 2e-5 * right.abs().amax(-1, keepdim=True).clamp(min=1)


def _gives(reading: Reading, sequence: Zigzag, outputs: Sequence[Tensor]) -> bool:
    """Whether a mistake gives what all ranks have of a sequence; no matter what of queries that see no key by it."""
    for rank, got in enumerate(outputs):
        value, seen = sequence.taken(rank, len(outputs), reading)
        if got.shape != value.shape or not _close(got, value, sequence.dtype)[:, :, seen].all():
            return False
    return True


def _values(sequence: Zigzag, outcomes: Sequence[Outcome], cause: Callable[[], str]) -> Problem | None:
    ranks = len(outcomes)
    rights = [sequence.right(rank, ranks) for rank in range(ranks)]
    for rank, (outcome, right) in enumerate(zip(outcomes, rights, strict=True)):
        got = outcome.o
        if not isinstance(got, Tensor) or got.shape != right.shape or got.dtype != sequence.dtype:
            shape = f"a tensor of {tuple(got.shape)}, {got.dtype}" if isinstance(got, Tensor) else repr(got)
            expected = f"expected {tuple(right.shape)}, {sequence.dtype}"
            return Problem(f"ring_forward gives {shape} on rank {rank}", expected, (str(sequence),))
        if not outcome.kept:
            cause = classic("what arrives needs memory of its own: the caller still needs q, k and v", 8)
            return Problem(f"ring_forward changes its inputs on rank {rank}", cause, (str(sequence),))
        if outcome.missing > 0:
            cause = classic("what a message brings is there, and what it takes may change, after its wait()", 9)
            headline = f"rank {rank} does not wait for {outcome.missing} of its messages"
            return Problem(headline, cause, (str(sequence),))
    for rank, (outcome, right) in enumerate(zip(outcomes, rights, strict=True)):
        bad = ~_close(outcome.o, right, sequence.dtype)
        if not bad.any():
            continue
        rows = bad.flatten(0, 1).any(0).any(-1)
        first = bad.nonzero()[0].tolist()
        got, expected = (x[tuple(first)].item() for x in (outcome.o, right))
        marks = "".join("X" if row else "." for row in rows)
        details = (
            f"{sequence}: first o[{', '.join(map(str, first))}] is {got:.5g}, expected {expected:.5g}",
            f"tokens of rank {rank}: {marks}   ('.' right, 'X' wrong)",
        )
        headline = f"ring_forward: {int(bad.sum())} of {bad.numel()} elements differ on rank {rank}"
        return Problem(headline, cause(), details)
    return None


def _traffic(sequence: Zigzag, outcomes: Sequence[Outcome]) -> Problem | None:
    """Only messages between neighbours, of keys and values alone."""
    ranks = len(outcomes)
    lengths = [len(found) for found in sequence.positions(ranks)]
    per_token = 2 * sequence.batch * sequence.key_heads * sequence.dim
    for rank, outcome in enumerate(outcomes):
        if outcome.further:
            cause = classic("keys and values go round as messages between neighbours, isend and irecv", 8)
            return Problem(f"ring_forward calls {outcome.further[0]} on rank {rank}", cause, (str(sequence),))
        for kind, peers in outcome.peers.items():
            if len(peers) > 1:
                does = "sends to" if kind == "send" else "receives from"
                cause = classic("in a ring a rank sends to one neighbour, and receives from the other", 8)
                headline = f"rank {rank} {does} ranks {' and '.join(str(peer) for peer in sorted(peers))}"
                return Problem(headline, cause, (str(sequence),))
        most = max(sum(lengths) - lengths[(rank + step) % ranks] for step in (1, -1)) * per_token
        if outcome.sent > most:
            group = sequence.heads // sequence.key_heads
            cause = classic("R - 1 steps, and in each the keys and values of one part, once", 8)
            if outcome.sent == group * most > most:
                cause = classic("keys and values travel once for each query head: send the G heads that there are", 8)
            headline = f"rank {rank} sends {outcome.sent:,} elements, {most:,} are enough"
            return Problem(headline, cause, (str(sequence),))
    return None


def _work(sequence: Zigzag, outcomes: Sequence[Outcome]) -> Problem | None:
    """No product of pairs that zig-zag leaves out, and messages that travel during products."""
    ranks, per_pair = len(outcomes), 4 * sequence.batch * sequence.heads * sequence.dim
    for rank, outcome in enumerate(outcomes):
        most = sequence.pairs(rank, ranks) * per_pair
        if outcome.products > most:
            cause = "pairs that are masked are computed first: compute with the keys and queries that see each other"
            headline = f"rank {rank} spends {outcome.products:,} FLOPs on products, {most:,} are enough"
            return Problem(headline, classic(cause, 7), (str(sequence),))
    for rank, outcome in enumerate(outcomes):
        if not outcome.overlapped:
            cause = "start the messages of a step, compute with the keys that are there, then wait"
            headline = f"rank {rank} waits for keys and values before it computes with those that it has"
            return Problem(headline, classic(cause, 9), (str(sequence),))
    return None


def _judge(
    observations: Sequence[RankObservation], sequences: Sequence[Zigzag], merges: Sequence[str] = (), seed: int = 0,
    only: str = "",
) -> Problem | None:  # fmt: skip
    for k, kind in enumerate(merges):
        if problem := judge_merge(kind, seed, observations[0].value["merged"][k]):
            return problem
    every = [[observed.value["outcomes"][k] for observed in observations] for k in range(len(sequences))]
    outputs = [[outcome.o for outcome in outcomes] for outcomes in every]

    def cause() -> str:
        """The mistake that gives all of it."""
        return named(lambda reading: all(map(partial(_gives, reading), sequences, outputs))) or only

    for sequence, outcomes in zip(sequences, every, strict=True):
        for problem in (_values(sequence, outcomes, cause), _traffic(sequence, outcomes), _work(sequence, outcomes)):
            if problem:
                return problem
    return None


# ---- scenarios
def _scenarios(seed: int, draw: Draw | None = None) -> list[RankScenario]:
    ranks = 3 if draw is None else 4
    token = Zigzag(seed, 2 * ranks)
    number = (lambda low, high: low + seed % (high - low + 1)) if draw is None else draw.between
    usual = replace(token, tokens=4 * ranks)
    odd = [2 * ranks * number(1, 2) + extra for extra in range(1, 2 * ranks)]

    def scenario(name: str, *sequences: Zigzag, **others: Any) -> RankScenario:
        merges = others.pop("merges", ())
        arguments = {"sequences": sequences, "merges": merges, "seed": seed}
        judge = lambda observed, **given: _judge(observed, **given, only=_ONLY.get(name, ""))  # noqa: E731
        raised = {("contiguous",): _CONTIGUOUS, **others.pop("raised", {})}
        return RankScenario(
            name, _play, judge, arguments, ranks, stuck=_stuck, raised=raised, same_calls=False, values=("results",)
        )  # fmt: skip

    ragged = [replace(token, tokens=tokens) for tokens in odd]
    found = [
        scenario("equal parts", usual, merges=KINDS),
        scenario("no mask", replace(usual, causal=False)),
        scenario("parts of different lengths", *ragged, replace(ragged[0], causal=False), raised={"SIGABRT": _LENGTH}),
        scenario("hardly a token for a rank", *(replace(token, tokens=ranks + more) for more in range(3))),
        scenario("fewer key heads", replace(ragged[0], batch=2, heads=4, key_heads=2), replace(usual, key_heads=1)),
        scenario("scores far from zero", replace(usual, kind="far"), replace(ragged[-1], kind="far", causal=False)),
        scenario("views", replace(ragged[1], kind="strided")),
        scenario("bfloat16", replace(usual, dtype=torch.bfloat16), replace(ragged[2], dtype=torch.bfloat16, dim=32)),
    ]
    one = scenario("a group of one rank", usual, replace(token, tokens=1))
    return [*found, in_group(found[0], 11), in_group(found[2], 11), replace(one, members=(1,), raised={"": ""})]


RING_ATTENTION = Exercise(
    "6.6",
    "attention in a ring",
    points=13,
    observe=lambda package, seed: CHECK.observe(package, seed),
    tolerance=Tolerance(times=2),
)
CHECK = DistributedCheck(
    RING_ATTENTION,
    _scenarios,
    "each rank computes as many pairs as any other in each step, and no rank ever has more than two parts of the keys",
)


@RING_ATTENTION.checked_by
def check_ring_attention(merge_parts: Callable, ring_forward: Callable, seed: int | None = None) -> None:
    """Exercise 6.6: attention of a sequence that is spread over ranks in zig-zag.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    CHECK.check(merge_parts, ring_forward, seed=seed)
