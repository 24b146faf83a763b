"""A scheduler at work: every step that it makes is judged, and then played as an engine plays it, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from utils.checks.core import classic, listed
from utils.serving import SamplingParams

from .plain_blocks import PlainBlocks
from .scenes import mistaken


@dataclass
class Before:
    """What there was before a step: requests that ran, oldest first, their pending and computed tokens; who waited."""

    running: list[Any]
    waiting: list[Any]
    pending: dict[str, int]
    computed: dict[str, int]


@dataclass
class Shift:
    """A scheduler, its blocks, and the requests that it was given.

    Attributes:
        scheduler: the student's.
        blocks: what it manages.
        make: builds a request of the lab: ``make(id=, prompt=, params=)``.
        static: whether it is the static one.
        steps: how many steps there were; ``idle`` how many slots of the running batch got no token in them.
    """

    scheduler: Any
    blocks: PlainBlocks
    make: Callable[..., Any]
    static: bool
    requests: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    said: str = ""

    def add(self, id: str, prompt: int, new: int) -> None:
        """A request arrives."""
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        request = self.make(id=id, prompt=list(range(1, prompt + 1)), params=params)
        self.requests[id] = request
        self.scheduler.add(request)

    def stop(self, headline: str, cause: str = "", *details: str) -> None:
        """End the scene, showing the step."""
        scheduler = self.scheduler
        where = (
            f"step {self.steps}, max_batch {scheduler.max_batch}, token_budget {scheduler.token_budget}, "
            f"{self.blocks.num_blocks} blocks of {self.blocks.block_size}"
        )
        mistaken(headline, cause, *details, self.said, where)

    # ---- one step
    def step(self, most: int = 2000) -> None:
        """Schedule, judge, and play what was scheduled."""
        self.steps += 1
        if self.steps > most:
            cause = classic("requests push one another out and nobody gets on, or somebody is passed over for ever", 5)
            self.stop(f"{self._left()} are not finished after {most} steps", cause)
        running = list(self.scheduler.running)
        before = Before(
            running,
            list(self.scheduler.waiting),
            {id: request.pending for id, request in self.requests.items()},
            {id: request.computed for id, request in self.requests.items()},
        )
        self.blocks.calls.clear()
        self.said = (
            f"running before: {_shown(running) or 'none'}; waiting: {listed(r.id for r in before.waiting)} "
            "(id:computed+pending)"
        )
        step = self.scheduler.schedule()
        self._judge(step, before)
        for chunk in step.chunks:
            chunk.request.computed = chunk.start + chunk.count
            if chunk.request.computed == len(chunk.request.tokens):
                chunk.request.append(0, float(self.steps))
                if len(chunk.request.tokens) >= chunk.request.limit:
                    self.scheduler.remove(chunk.request)

    def finish(self) -> None:
        """Play until nothing is left; every request has all its tokens then, and no block is held."""
        while self.scheduler.has_work:
            self.step()
        if left := self._left():
            self.stop(f"{left} are not finished, and the scheduler has no work", "a request is lost from both lists")
        if self.blocks.num_used:
            self.stop(f"{self.blocks.num_used} blocks are in use after the last request", "blocks are leaked")

    def abort(self, id: str) -> None:
        """A client gives up."""
        if self.requests[id].status.name != "FINISHED":
            self.scheduler.remove(self.requests[id])
        del self.requests[id]

    def _left(self) -> str:
        return ", ".join(id for id, request in self.requests.items() if len(request.tokens) < request.limit)

    # ---- what must hold of a step
    def _judge(self, step: Any, before: Before) -> None:
        chunks = getattr(step, "chunks", None)
        if not isinstance(chunks, list):
            self.stop(f"schedule returns {step!r}", "expected a Step")
        self.said += (
            f"; scheduled: {', '.join(f'{c.request.id}[{c.start}:{c.start + c.count}]' for c in chunks) or '-'}"
        )
        admitted = [id for name, id, _ in self.blocks.calls if name == "allocate"]
        lost = [id for name, id, _ in self.blocks.calls if name == "free"]
        self._judge_chunks(chunks, before, lost)
        self._judge_lists(before)
        if self.static:
            self._judge_batch(before, admitted, lost)
        else:
            self._judge_order(before, admitted)
        left = self._judge_budget(chunks, before, lost, admitted)
        if not self.static:
            self._judge_waiting(left, admitted, lost)
        if not chunks and not lost:
            cause = classic("somebody must get on in every step: nobody waits for what cannot come", 5)
            self.stop("nothing is scheduled, although there is work", cause)

    def _judge_chunks(self, chunks: list[Any], before: Before, lost: list[str]) -> None:
        """Each chunk continues its request where the cache ends."""
        seen = set()
        for chunk in chunks:
            request = chunk.request
            if request.id in seen:
                self.stop(f"request {request.id} has two chunks in a step", "one chunk a request and step")
            seen.add(request.id)
            if request.status.name != "RUNNING":
                cause = classic("who is preempted in this very step has no blocks left, and no chunk", 4)
                self.stop(f"request {request.id} is scheduled and does not run", cause)
            if chunk.start != request.computed:
                cause = "a chunk starts at request.computed, what is in the cache already"
                if chunk.start == 0:
                    cause = "positions restart at 0: a chunk goes on at request.computed"
                elif request.preemptions and chunk.start > request.computed:
                    cause = "after a preemption nothing of a request is in the cache: its positions start anew"
                elif request.id in before.computed and chunk.start == before.computed[request.id]:
                    cause = "what _admit found in the cache counts as computed: ask for request.computed after it"
                self.stop(
                    f"the chunk of {request.id} starts at {chunk.start}, {request.computed} of its tokens are computed",
                    classic(cause, 3),
                )
            end = chunk.start + chunk.count
            if chunk.count < 1 or end > len(request.tokens):
                self.stop(
                    f"a chunk of {chunk.count} tokens from {chunk.start} on, request {request.id} has "
                    f"{len(request.tokens)} tokens",
                    classic("a chunk holds one of the pending tokens at least, and all of them at most", 2),
                )
            if self.blocks.length(request.id) < end:
                cause = classic("_make_room gives a running request its slots, _admit a waiting one", 4)
                self.stop(f"token {end - 1} of request {request.id} has no slot", cause)

    def _judge_lists(self, before: Before) -> None:
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        if len(running) > self.scheduler.max_batch:
            self.stop(f"{len(running)} requests run at a time", classic("max_batch is the most that may run", 2))
        known = {id for id, request in self.requests.items() if request.status.name != "FINISHED"}
        listed_now = [request.id for request in running + waiting]
        if len(set(listed_now)) < len(listed_now) or set(listed_now) != known:
            odd = sorted(known ^ set(listed_now)) or [id for id in listed_now if listed_now.count(id) > 1]
            self.stop(f"request {odd[0]} is lost, or stands in both lists", "_admit and _preempt move requests")

    def _judge_order(self, before: Before, admitted: list[str]) -> None:
        """First come, first served."""
        due = [request.id for request in before.waiting]
        for id, first in zip(admitted, due, strict=False):
            if id != first:
                cause = classic(
                    "a request that is passed over whenever a shorter one fits starves: first come first", 5
                )
                self.stop(f"request {id} is admitted before {first}, which came earlier", cause)

    def _judge_batch(self, before: Before, admitted: list[str], lost: list[str]) -> None:
        """Static: a batch is admitted when the last one is finished, and then as many as may be."""
        if admitted and before.running:
            cause = classic("a static batch is not refilled: who waits, waits until its last request is finished", 6)
            self.stop(f"{listed(admitted)} joins {listed(r.id for r in before.running)}", cause)
        if lost:
            cause = classic("the blocks of a request's greatest length are set aside when it is admitted", 7)
            self.stop(f"{listed(lost)} is preempted in a static batch", cause)
        if before.running:
            return
        self._judge_order(before, admitted)
        due, promised = [], 0
        for request in before.waiting[: self.scheduler.max_batch]:
            promised += self.blocks.blocks_for(request.limit - 1)
            if promised > self.blocks.num_blocks:
                break
            due.append(request.id)
        if admitted != due:
            cause = classic("as many as max_batch allows and as fit if all grow to their limit, in order", 7)
            self.stop(f"the batch is {listed(admitted)}, expected {listed(due)}", cause)

    def _judge_budget(self, chunks: list[Any], before: Before, lost: list[str], admitted: list[str]) -> int:
        """Who ran gets tokens first, the oldest first, each all its pending ones if the budget allows; what is left."""
        counts = {chunk.request.id: chunk.count for chunk in chunks}
        order = [request for request in before.running if request.id not in lost]
        order += [self.requests[id] for id in admitted if id not in lost]
        left, whole = self.scheduler.token_budget, not self.scheduler.chunked_prefill
        for request in order:
            old = request.id in before.pending and request.id not in admitted
            pending = before.pending[request.id] if old else len(request.tokens) - request.computed
            due = pending if whole and left > 0 else min(pending, left)
            got = counts.pop(request.id, 0)
            if got != due:
                self._wrong_count(request, got, due, pending, left, old)
            left = max(0, left - got)
        if counts:
            self.stop(f"{listed(counts)} is scheduled, and was neither running nor admitted", "ask _admit first")
        total = sum(chunk.count for chunk in chunks)
        if not whole and total > self.scheduler.token_budget:
            self.stop(f"{total} tokens in a step", classic("all chunks share one budget", 2))
        return left

    def _wrong_count(self, request: Any, got: int, due: int, pending: int, left: int, old: bool) -> None:
        who = f"request {request.id} gets {got} tokens, {due} are due ({pending} pending, {left} of the budget left)"
        if got > due:
            cause = classic("min(pending, what is left of the budget): all chunks share one budget", 2)
        elif old and got == 0:
            cause = classic("running requests come first, oldest first, and each gets on in every step", 1)
        elif got == 1 or got < due:
            cause = classic("a chunk takes all pending tokens that the budget allows", 2)
        else:
            cause = ""
        self.stop(who, cause)

    def _judge_waiting(self, left: int, admitted: list[str], lost: list[str]) -> None:
        """Nobody waits who could run, and nobody joins in a step that preempts."""
        scheduler = self.scheduler
        if lost and admitted:
            cause = classic("a step that preempts admits nobody: the blocks are needed by those who run", 4)
            self.stop(f"{listed(admitted)} is admitted in a step that preempts {listed(lost)}", cause)
        if lost or not scheduler.waiting or left <= 0 or len(scheduler.running) >= scheduler.max_batch:
            return
        if not scheduler.chunked_prefill and admitted:
            return  # whether another whole prompt still fits is the budget's business
        first = scheduler.waiting[0]
        if self.blocks.can_allocate(first.tokens, scheduler.reserve if scheduler.running else 0):
            cause = "who waits joins as soon as there is room, in the very step"
            if scheduler.running:
                cause = "a batch that waits until all its requests are finished is a static one: who fits joins at once"
            self.stop(f"request {first.id} waits, although there is room for it", classic(cause, 6))


def _shown(requests: list[Any]) -> str:
    return " ".join(f"{request.id}:{request.computed}+{request.pending}" for request in requests)


def new_shift(
    scheduler: Callable[..., Any],
    make: Callable[..., Any],
    *,
    blocks: PlainBlocks,
    max_batch: int,
    token_budget: int,
    static: bool = False,
    chunked_prefill: bool = True,
) -> Shift:
    """A scheduler over these blocks."""
    options: Mapping[str, Any] = {"max_batch": max_batch, "token_budget": token_budget}
    return Shift(scheduler(blocks, **options, chunked_prefill=chunked_prefill), blocks, make, static)
