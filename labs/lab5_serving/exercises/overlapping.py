"""The check of exercise 5.9: placeholders that the device replaces, and steps that are launched before one is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import torch
from torch import Tensor

from utils.checks.core import Exercise, classic, listed
from utils.checks.hidden import Observation, collected

from .scenarios import CheckMismatch, CheckScenario, check_scenarios
from .watched_device import MIXED, VOCABULARY, DeviceTensor, LoggingDevice, WatchedDevice, Work

Answer = Mapping[str, Callable]

#: Seconds of host and device for a step: the device is the slower one, and the host.
TIMES = ((0.003, 0.007), (0.007, 0.003))
WAITS = "the host would wait for the device here: no value is read, and no shape depends on values"
#: What a known mistake makes of tokens and newest, what is said of it, and its number.
MISTAKES = (
    (lambda tokens, newest: [newest[t] if t < 0 else t for t in tokens],
     "as an index, -1 - row counts from the end of newest: row r stands at place r", 5),
    (lambda tokens, newest: [newest[min(-t, len(newest) - 1)] if t < 0 else t for t in tokens],
     "the row of placeholder t is -1 - t: -1 stands for row 0", 5),
    (lambda tokens, newest: [newest[0] if t < 0 else t for t in tokens],
     "each placeholder has a row of its own: -1 - t", 5),
    (lambda tokens, newest: [newest[max(-1 - t, 0)] if t <= 0 else t for t in tokens],
     "0 is a token: placeholders are negative", 5),
    (lambda tokens, newest: [newest[max(-1 - t, 0)] for t in tokens],
     "tokens that are no placeholders stay as they are", 5),
    (lambda tokens, newest: [max(-1 - t, 0) if t < 0 else t for t in tokens],
     "this is the row, not the token that stands there in newest", 5),
    (lambda tokens, newest: tokens, "no placeholder is replaced", 5),
)  # fmt: skip


# ---- on the device
def _drawn(rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens and placeholders of several rows, and a token for each row and behind them."""
    rows = rng.randint(3, 6)
    newest = [rng.randrange(100, 200) for _ in range(rows + rng.randint(1, 4))]
    tokens = [rng.choice((0, -1 - rng.randrange(rows), rng.randrange(VOCABULARY, 400))) for _ in range(12)]
    return [0, -1, -2, 399, *tokens], newest


def _look_up(answer: Answer, rng: random.Random) -> None:
    cases = [_drawn(rng) for _ in range(3)] + [([5, 0, 7], [3]), ([-1], [4, 9])]
    results = []
    for tokens, newest in cases:
        given = [torch.tensor(numbers).as_subclass(DeviceTensor) for numbers in (tokens, newest)]
        DeviceTensor.asked.clear()
        got = answer["look_up"](*given)
        if DeviceTensor.asked:
            raise CheckMismatch(f"look_up asks for values: {listed(DeviceTensor.asked)}", classic(WAITS, 5))
        if not isinstance(got, Tensor) or tuple(got.shape) != (len(tokens),) or got.dtype != torch.int64:
            shown = f"a tensor of {tuple(got.shape)}, {got.dtype}" if isinstance(got, Tensor) else repr(got)
            raise CheckMismatch(f"look_up gives {shown}", f"expected ({len(tokens)},) of torch.int64, as tokens")
        after, results = [each.as_subclass(Tensor).tolist() for each in given], [*results, got.as_subclass(Tensor)]
        if after != [tokens, newest]:
            raise CheckMismatch("look_up changes its arguments in place", "the host still needs its tokens")
    results = [got.tolist() for got in results]
    right = [[newest[-1 - token] if token < 0 else token for token in tokens] for tokens, newest in cases]
    if results == right:
        return
    wrong = next(i for i, got in enumerate(results) if got != right[i])
    cause = next((classic(text, number) for computes, text, number in MISTAKES
                  if all(computes(*case) == got for case, got in zip(cases, results, strict=True))), "")  # fmt: skip
    tokens, newest = cases[wrong]
    raise CheckMismatch(
        f"look_up gives {listed(results[wrong])}, expected {listed(right[wrong])}",
        cause,
        f"tokens {listed(tokens)}, newest {listed(newest)}",
    )


# ---- on the host
def _serve(answer: Answer, rng: random.Random, count: int, max_batch: int, ends: bool) -> None:
    work = Work(rng, count, max_batch, ends=ends)
    host, device = rng.choice(TIMES)
    watched = WatchedDevice(answer["look_up"], work, host_seconds=host, device_seconds=device)
    answer["serve_overlapped"](watched, list(work.requests), max_batch, work.ends)
    watched.judge_end()


def _by_length(answer: Answer, rng: random.Random) -> None:
    _serve(answer, rng, rng.randint(5, 7), rng.randint(2, 3), ends=False)


def _by_token(answer: Answer, rng: random.Random) -> None:
    _serve(answer, rng, rng.randint(5, 8), rng.randint(2, 4), ends=True)


def _alone(answer: Answer, rng: random.Random) -> None:
    for ends in (False, True):
        _serve(answer, rng, rng.randint(1, 3), 1, ends)


_RAISED = {
    "out of bounds": classic("a token is no row: clamp before you index, also where the result is not used", 5),
    "list index out of range": MIXED,
    "zip() argument": MIXED,
    "has 1 to": classic("if nobody takes part, there is nothing to launch", 1),
}
_SCENARIOS = (
    CheckScenario("look the placeholders up", _look_up, _RAISED),
    CheckScenario("texts that end by their length", _by_length, _RAISED, times=4),
    CheckScenario("texts that end by a token", _by_token, _RAISED, times=6),
    CheckScenario("one request at a time", _alone, _RAISED, times=2),
)


# ---- hidden cases
@collected
def observe(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Hidden cases: other placeholders, more requests, larger batches."""
    rng, answer = random.Random(f"{seed}/5.9"), vars(package)
    drawn = [[torch.tensor(numbers).as_subclass(DeviceTensor) for numbers in _drawn(rng)] for _ in range(4)]
    before = [each.as_subclass(Tensor).clone() for given in drawn for each in given]
    DeviceTensor.asked.clear()
    found = [answer["look_up"](*given) for given in drawn]
    yield "look_up: values that it asks for", list(DeviceTensor.asked)
    yield "look_up", [got.as_subclass(Tensor) if isinstance(got, Tensor) else got for got in found]
    after = [each.as_subclass(Tensor) for given in drawn for each in given]
    yield "look_up: its arguments stay as they are", all(map(torch.equal, before, after))
    for number in range(5):
        work = Work(rng, rng.randint(6, 12), rng.randint(1, 5), ends=number > 1)
        host, seconds = rng.choice(TIMES)
        device = LoggingDevice(answer["look_up"], host_seconds=host, device_seconds=seconds)
        answer["serve_overlapped"](device, list(work.requests), work.max_batch, work.ends)
        name = f"serve_overlapped, run {number + 1}"
        yield f"{name}: texts", [list(request.output) for request in work.requests]
        yield f"{name}: requests of each step", [sorted(rows) for rows in device.rows]
        yield f"{name}: launches and reads", [f"{what} {step}" for what, step in device.log]
        yield f"{name}: seconds", [device.now, *(time for request in work.requests for time in request.token_times)]


OVERLAP = Exercise("5.9", "the overlapped step", observe=observe, module="overlap")


@OVERLAP.checked_by
def check_overlap(look_up: Callable, serve_overlapped: Callable, seed: int | None = None) -> None:
    """Exercise 5.9: placeholders, and a host that works one step ahead.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    check_scenarios(
        OVERLAP,
        {"look_up": look_up, "serve_overlapped": serve_overlapped},
        _SCENARIOS,
        seed,
        "every text is the one without overlap, and the device has its next step before it ends the one before",
    )
