"""The check of exercise 5.3: what a continuous and a static scheduler put into each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from utils.checks.core import Exercise, classic
from utils.checks.hidden import Observation, collected
from utils.serving import SamplingParams

from .fake_block_manager import FakeBlockManager
from .scenarios import Answer, CheckMismatch
from .schedule_invariants import MOST_STEPS, StateBefore, StepInvariants, play
from .stateful import Call, Machine, Workload, check_workloads


class SchedulerMachine(Machine):
    """Requests that arrive, run without a model, finish and are aborted.

    Args:
        blocks, block_size, max_batch, budget, prompt, new: the least and the most, all drawn; ``blocks`` of the pool,
            ``budget`` tokens more than ``max_batch``, and a request's ``prompt`` and ``new`` tokens.
        scheduler: the class's name.
        long: tokens of the third request's prompt, if it is a longer one.
        aborts: the share of steps before which a client gives up.
        cached: whether beginnings of prompts are in the cache.
        requests: how many arrive.
        options: of the scheduler.
    """

    def __init__(
        self, answer: Answer, key: str, *, blocks: tuple[int, int], block_size: tuple[int, int] = (4, 4),
        max_batch: tuple[int, int] = (2, 5), budget: tuple[int, int] = (0, 6), prompt: tuple[int, int] = (1, 9),
        new: tuple[int, int] = (1, 9), scheduler: str = "Scheduler", long: tuple[int, int] | None = None,
        aborts: float = 0.0, cached: bool = False, requests: int = 10, **options: bool,
    ) -> None:  # fmt: skip
        super().__init__(answer, key)
        drawn = self.random.randint
        self.blocks = FakeBlockManager(drawn(*blocks), drawn(*block_size))
        batch = drawn(*max_batch)
        options = {"max_batch": batch, "token_budget": batch + drawn(*budget), **options}
        said = ", ".join(f"{option}={value}" for option, value in options.items())
        self.shown.append(f"{scheduler}({self.blocks.num_blocks} blocks of {self.blocks.block_size}, {said})")
        self.scheduler, self.static = answer[scheduler](self.blocks, **options), scheduler == "StaticScheduler"
        self.prompt, self.new, self.long, self.aborts, self.cached = prompt, new, long, aborts, cached
        self.requests: dict[str, Any] = {}
        self.left, self.arrived, self.steps, self.wait = requests, 0, 0, 0
        self.seen: Observation = None

    # ---- which call is next
    def draw(self) -> Call | None:
        """A request arrives, or the scheduler makes a step, until all requests have arrived and are finished."""
        random = self.random
        if self.requests and random.random() < self.aborts:
            return "abort", random.choice(list(self.requests))
        if self.scheduler.has_work and (self.wait > 0 or not self.left):
            self.wait -= 1
            return ("schedule",)
        if not self.left:
            return None if self.steps < 0 else ("finish",)
        self.left, self.wait, self.arrived = self.left - 1, random.choice((0, 0, 1, 2, 5)), self.arrived + 1
        prompt = random.randint(*(self.long if self.long and self.arrived == 3 else self.prompt))
        saved = random.choice((0, 1, 2)) * self.blocks.block_size if self.cached else 0
        return "add", f"r{self.arrived}", prompt, random.randint(*self.new), saved

    def is_possible(self, rule: str, *arguments: Any) -> bool:
        """There is something to schedule, and only an unfinished request is aborted."""
        if rule == "abort":
            return arguments[0] in self.requests
        return rule == "add" or self.scheduler.has_work == (rule == "schedule")

    # ---- the rules
    def add(self, id: str, prompt: int, new: int, saved: int) -> None:
        """A request arrives, some blocks of which may be in the cache; none outgrows the pool."""
        capacity = self.blocks.num_blocks * self.blocks.block_size
        prompt = min(prompt, capacity)
        new, first = min(new, capacity + 1 - prompt), 1000 * int(id[1:])  # no two prompts begin alike
        self.blocks.cached[first] = saved
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        tokens = list(range(first, first + prompt))
        self.requests[id] = self.answer["Request"](id=id, prompt=tokens, params=params)
        self.shown.append(f"add({id}: {prompt} tokens, {new} new)")
        self.scheduler.add(self.requests[id])
        self.seen = None

    def abort(self, id: str) -> None:
        """A client gives up, waiting or running."""
        self.shown.append(f"remove({id})")
        self.scheduler.remove(self.requests.pop(id))
        self.seen = None

    def schedule(self) -> None:
        """One step, which is checked, and then played as the engine plays it, without a model."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            cause = classic("requests preempt one another and none is finished, or one is passed over for ever", 5)
            raise CheckMismatch(f"livelock: {_ids(self.requests)} not finished after {MOST_STEPS} steps", cause)
        scheduler, requests = self.scheduler, self.requests
        before = StateBefore(
            list(scheduler.running), list(scheduler.waiting),
            {id: request.pending for id, request in requests.items()},
            {id: request.computed for id, request in requests.items()},
        )  # fmt: skip
        self.blocks.calls.clear()
        step = self.call(scheduler.schedule, shown=_chunks)
        running = ", ".join(f"{r.id} ({before.pending[r.id]} pending)" for r in before.running) or "none"
        self.shown[-1] += f"   (before: running {running}; waiting {_ids(r.id for r in before.waiting)})"
        StepInvariants(scheduler, self.blocks, requests, before, self.static).check(step)
        self.seen = [
            sorted([chunk.request.id, chunk.start, chunk.count] for chunk in step.chunks),
            list(map(list, self.blocks.calls)),
            sorted(map(list, self.blocks.lengths.items())),
        ]
        for request in play(scheduler, step):
            del requests[request.id]

    def finish(self) -> None:
        """Nothing is left: every request has all its tokens, and no block is held."""
        self.steps, self.seen = -1, None
        if self.requests:
            cause = "a request is in neither list"
            raise CheckMismatch(f"{_ids(self.requests)} not finished, and the scheduler has no work", cause)
        if self.blocks.num_used:
            raise CheckMismatch(f"block leak: {self.blocks.num_used} blocks in use after the last request")

    def observation(self) -> Observation:
        """A step's chunks, who was admitted and preempted, and the tokens that have slots."""
        return self.seen


def _ids(requests: Any) -> str:
    return " ".join(requests) or "none"


def _chunks(step: Any) -> str:
    chunks = getattr(step, "chunks", None)
    if not isinstance(chunks, list):
        return repr(step)
    return " ".join(f"{chunk.request.id}[{chunk.start}:{chunk.start + chunk.count}]" for chunk in chunks) or "nothing"


def _workload(name: str, times: int, hidden: int, static: bool = False, **options: Any) -> Workload:
    """Runs of a scheduler; the hidden ones have more requests."""
    scheduler = "StaticScheduler" if static else "Scheduler"
    options = {"scheduler": scheduler, **options}
    return Workload(f"{scheduler} with {name}", SchedulerMachine, options, times, ({"requests": 12}, hidden))


SMALL = {"block_size": (1, 3), "max_batch": (3, 6), "budget": (0, 34), "prompt": (1, 8), "new": (1, 14)}
WHOLE = {"blocks": (60, 60), "chunked_prefill": False}
WORKLOADS = (
    _workload("one request", 2, 1, blocks=(40, 40), requests=1, prompt=(1, 30)),
    _workload("many blocks", 4, 2, blocks=(400, 400)),
    _workload("a long prompt among short ones", 2, 2, blocks=(30, 30), long=(50, 90)),
    _workload("beginnings in the cache", 4, 2, blocks=(12, 60), prompt=(1, 16), cached=True),
    _workload("few blocks", 10, 6, blocks=(16, 24), **SMALL),
    _workload("prompts that may not be split", 6, 2, max_batch=(3, 6), budget=(2, 8), prompt=(4, 14), **WHOLE),
    _workload("short prompts that may not be split", 5, 2, max_batch=(5, 6), budget=(0, 4), prompt=(2, 5), **WHOLE),
    _workload("clients that give up", 3, 2, blocks=(14, 14), block_size=(2, 2), aborts=0.15),
    _workload("many blocks", 5, 2, static=True, blocks=(400, 400), budget=(0, 16)),
    _workload("few blocks", 5, 2, static=True, blocks=(12, 16), **(SMALL | {"block_size": (2, 3)})),
    _workload("prompts that may not be split", 0, 2, static=True, **WHOLE),
    _workload("clients that give up", 0, 2, static=True, blocks=(24, 24), aborts=0.15),
)
RAISED = {
    "NoRoom": classic("call _make_room or _admit before taking blocks: they say whether there are any", 4),
    "deque mutated": classic("_admit and _preempt change the lists: loop over a copy, or look again each time", 4),
    "pop from an empty deque": "no request waits any more: look at self.waiting before _admit",
    "deque index out of range": "no request waits any more: look at self.waiting before _admit",
    "list index out of range": "self.running[-1] is the request that _admit has let run, if it returned True",
    "KeyError": classic("a preempted request has no blocks any more: look at its status", 4),
}


@collected
def observe(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Hidden cases: more requests, and what the check plays with the continuous scheduler only."""
    for workload in WORKLOADS:
        yield from workload.observe(vars(package), f"{seed}/5.3")


SCHEDULERS = Exercise("5.3", "schedulers", points=16, observe=observe)


@SCHEDULERS.checked_by
def check_schedulers(
    Scheduler: Callable, StaticScheduler: Callable, Request: Callable, seed: int | None = None
) -> None:
    """Exercise 5.3: a step of continuous and of static batching.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    check_workloads(
        SCHEDULERS,
        {"Scheduler": Scheduler, "StaticScheduler": StaticScheduler, "Request": Request},
        WORKLOADS,
        seed,
        "no request was passed over or waited while there was room for it, and every request got all its tokens",
        RAISED,
    )
