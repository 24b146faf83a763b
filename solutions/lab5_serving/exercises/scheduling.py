"""The check of exercise 5.3: what a continuous and a static scheduler put into each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from utils.checks.core import Exercise, classic

from . import hidden_schedule
from .plain_blocks import PlainBlocks
from .scenes import Scene, check_scenes
from .shift import Shift, new_shift

Answer = Mapping[str, Callable]


def _shift(answer: Answer, blocks: PlainBlocks, max_batch: int, budget: int, **options: bool) -> Shift:
    name = "StaticScheduler" if options.get("static") else "Scheduler"
    return new_shift(
        answer[name], answer["Request"], blocks=blocks, max_batch=max_batch, token_budget=budget, **options
    )


def _arrivals(shift: Shift, rng: random.Random, count: int, prompt: int, new: int) -> None:
    """So many requests that arrive while others run."""
    for number in range(count):
        shift.add(f"r{number}", rng.randint(1, prompt), rng.randint(1, new))
        for _ in range(rng.choice((0, 0, 1, 2, 5))):
            if shift.scheduler.has_work:
                shift.step()
    shift.finish()


def _one_request(answer: Answer, rng: random.Random) -> None:
    """A prompt longer than the budget, then one token a step."""
    for prompt in (1, rng.randint(9, 30)):
        shift = _shift(answer, PlainBlocks(40, 4), 3, 8)
        shift.add("a", prompt, rng.randint(1, 5))
        shift.finish()


def _late_and_early(answer: Answer, rng: random.Random) -> None:
    """Requests that arrive late and finish early, blocks enough for all."""
    _arrivals(_shift(answer, PlainBlocks(400, 4), rng.randint(2, 4), rng.randint(6, 12)), rng, 12, 9, 9)


def _long_prompt(answer: Answer, rng: random.Random) -> None:
    """A long prompt among short ones: those who run get on beside it, and it is not passed over."""
    shift = _shift(answer, PlainBlocks(30, 4), 4, 8)
    for id in ("a", "b"):
        shift.add(id, rng.randint(2, 6), rng.randint(6, 12))
    shift.step()
    shift.add("long", rng.randint(60, 90), 3)
    for number in range(8):
        shift.add(f"s{number}", rng.randint(1, 4), rng.randint(1, 4))
        shift.step()
    shift.finish()


def _small_pool(answer: Answer, rng: random.Random) -> None:
    """Requests that outgrow the pool together: the newest loses its blocks, and computes again later."""
    size = rng.choice((1, 2, 3))
    blocks = PlainBlocks(-(-24 // size) + rng.randint(0, 3), size)
    _arrivals(_shift(answer, blocks, 6, rng.choice((6, 8, 40))), rng, 10, 8, 14)


def _shared_prefix(answer: Answer, rng: random.Random) -> None:
    """Prompts of which a part is in the cache."""
    saved = {f"r{number}": rng.choice((0, 4, 8)) for number in range(10)}
    blocks = PlainBlocks(rng.choice((12, 60)), 4, saved.__getitem__)
    _arrivals(_shift(answer, blocks, 4, 10), rng, 10, 16, 8)


def _whole_prompts(answer: Answer, rng: random.Random) -> None:
    """Prompts that may not be split, some of them longer than the budget."""
    _arrivals(_shift(answer, PlainBlocks(60, 4), 4, 8, chunked_prefill=False), rng, 10, 14, 6)


def _aborts(answer: Answer, rng: random.Random) -> None:
    """Clients that give up, waiting or running."""
    shift = _shift(answer, PlainBlocks(14, 2), 4, 8)
    for number in range(14):
        shift.add(f"r{number}", rng.randint(1, 10), rng.randint(1, 8))
        if shift.scheduler.has_work:
            shift.step()
        if rng.random() < 0.4:
            shift.abort(rng.choice(list(shift.requests)))
    shift.finish()


def _static_batches(answer: Answer, rng: random.Random) -> None:
    """Static batches of requests of different lengths, which arrive while a batch runs."""
    shift = _shift(answer, PlainBlocks(400, 4), 4, rng.choice((8, 40)), static=True)
    for number in range(3):
        shift.add(f"a{number}", rng.randint(1, 6), rng.randint(2, 9))
    _arrivals(shift, rng, 10, 9, 9)


def _static_pool(answer: Answer, rng: random.Random) -> None:
    """Static batches that the pool limits."""
    shift = _shift(answer, PlainBlocks(12, 2), 6, rng.choice((8, 40)), static=True)
    for number in range(4):
        shift.add(f"a{number}", rng.randint(1, 9), rng.randint(1, 12))
    _arrivals(shift, rng, 8, 9, 12)


_RAISED = {
    "NoRoom": classic("blocks are asked for without a look: _make_room and _admit say whether there are any", 4),
    "deque mutated": classic("_admit and _preempt change the lists: loop over a copy, or look again each time", 4),
    "pop from an empty deque": "nobody waits any more: look at self.waiting before _admit",
    "index out of range": "nobody waits any more: look at self.waiting before _admit",
    "KeyError": classic("who was preempted has no blocks any more: look at its status", 4),
}
_SCENES = (
    Scene("one request", _one_request, _RAISED),
    Scene("requests that arrive late and finish early", _late_and_early, _RAISED, times=4),
    Scene("a long prompt among short ones", _long_prompt, _RAISED, times=2),
    Scene("prompts of which a part is in the cache", _shared_prefix, _RAISED, times=3),
    Scene("a small pool", _small_pool, _RAISED, times=8),
    Scene("prompts that may not be split", _whole_prompts, _RAISED, times=3),
    Scene("clients that give up", _aborts, _RAISED, times=3),
    Scene("static batches", _static_batches, _RAISED, times=3),
    Scene("static batches in a small pool", _static_pool, _RAISED, times=4),
)


SCHEDULERS = Exercise(
    "5.3",
    "schedulers",
    points=18,
    observe=hidden_schedule.schedulers,
)


@SCHEDULERS.checked_by
def check_schedulers(
    Scheduler: Callable, StaticScheduler: Callable, Request: Callable, seed: int | None = None
) -> None:
    """Exercise 5.3: a step of continuous and of static batching.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    check_scenes(
        SCHEDULERS,
        {"Scheduler": Scheduler, "StaticScheduler": StaticScheduler, "Request": Request},
        _SCENES,
        seed,
        "nobody was passed over, nobody waited beside a free place, and every request got all its tokens",
    )
