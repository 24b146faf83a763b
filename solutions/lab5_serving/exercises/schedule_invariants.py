"""What must hold of every step that a scheduler makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from utils.checks.core import classic, listed

from .fake_block_manager import FakeBlockManager
from .scenarios import CheckMismatch

#: Steps in which right schedulers finish all requests of a run.
MOST_STEPS = 400
EACH = "each running request gets on in every step"
OLDEST_FIRST = classic("running requests come first, oldest first, and each gets on in every step", 1)


@dataclass
class StateBefore:
    """What there was before a step: who ran, oldest first; who waited; each one's pending and computed tokens."""

    running: list[Any]
    waiting: list[Any]
    pending: dict[str, int]
    computed: dict[str, int]


@dataclass
class StepInvariants:
    """One step of a student's scheduler.

    Attributes:
        scheduler: after the step.
        blocks: what it manages, with the calls of this step.
        requests: those that are not finished, by id.
        before: what there was before the step.
        static: whether it is the static scheduler.
    """

    scheduler: Any
    blocks: FakeBlockManager
    requests: dict[str, Any]
    before: StateBefore
    static: bool

    def check(self, step: Any) -> None:
        """Raise CheckMismatch unless the step is the one to make."""
        chunks = getattr(step, "chunks", None)
        if not isinstance(chunks, list):
            raise CheckMismatch(f"schedule returns {step!r}", "expected a Step")
        admitted = [id for name, id in self.blocks.calls if name == "allocate"]
        preempted = [id for name, id in self.blocks.calls if name == "free"]
        if len({chunk.request.id for chunk in chunks}) < len(chunks):
            raise CheckMismatch("a request has two chunks in a step", "one chunk per request and step")
        for chunk in chunks:
            self._check_chunk(chunk, [chunk.request for chunk in chunks])
        self._check_lists()
        if self.static:
            self._check_batch(admitted, preempted)
        else:
            self._check_order(admitted)
        left = self._check_budget(chunks, admitted, preempted)
        if not self.static:
            self._check_waiting(left, admitted, preempted)
        if not chunks and not preempted:
            cause = classic("somebody must get on in every step: nobody waits for what cannot come", 5)
            raise CheckMismatch("nothing is scheduled, although there is work", cause)

    def _check_chunk(self, chunk: Any, scheduled: list[Any]) -> None:
        """It continues its request where the cache ends."""
        request, end = chunk.request, chunk.start + chunk.count
        if request.status.name != "RUNNING":
            cause = classic("who is preempted in this very step has no blocks left, and no chunk", 4)
            ran = [each for each in self.before.running if each in scheduled]
            if ran != [each for each in scheduled if each in ran]:
                cause = OLDEST_FIRST
            raise CheckMismatch(f"request {request.id} is scheduled and does not run", cause)
        if chunk.start != request.computed:
            cause = "a chunk starts at request.computed, what is in the cache already"
            if chunk.start == 0:
                cause = "positions restart at 0: a chunk goes on at request.computed"
            elif request.preemptions and chunk.start > request.computed:
                cause = "after a preemption nothing of a request is in the cache: its positions start anew"
            elif chunk.start == self.before.computed[request.id]:
                cause = "what _admit found in the cache counts as computed: ask for request.computed after it"
            headline = f"the chunk of {request.id}: expected start {request.computed} (computed), got {chunk.start}"
            raise CheckMismatch(headline, classic(cause, 3))
        if chunk.count < 1 or end > len(request.tokens):
            cause = classic("a chunk holds one of the pending tokens at least, and all of them at most", 2)
            headline = f"request {request.id} has {len(request.tokens)} tokens, and its chunk is [{chunk.start}:{end}]"
            raise CheckMismatch(headline, cause)
        if self.blocks.length(request.id) < end:
            cause = classic("_make_room gives a running request its slots, _admit a waiting one", 4)
            raise CheckMismatch(f"token {end - 1} of request {request.id} has no slot", cause)

    def _check_lists(self) -> None:
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        if len(running) > self.scheduler.max_batch:
            cause = classic("max_batch is the most that may run", 2)
            raise CheckMismatch(f"{len(running)} requests run at a time", cause)
        ids = [request.id for request in running + waiting]
        odd = sorted(set(self.requests) ^ set(ids)) or [id for id in ids if ids.count(id) > 1]
        if odd:
            raise CheckMismatch(f"request {odd[0]} is lost, or in both lists", "_admit and _preempt move requests")

    def _check_order(self, admitted: list[str]) -> None:
        """First come, first served."""
        for id, first in zip(admitted, self.before.waiting):
            if id != first.id:
                cause = "a request that is passed over whenever a shorter one fits starves: first come first"
                raise CheckMismatch(
                    f"request {id} is admitted before {first.id}, which came earlier", classic(cause, 5)
                )

    def _check_batch(self, admitted: list[str], preempted: list[str]) -> None:
        """Static: a batch is admitted when the last one is finished, and then as many as may be."""
        if admitted and self.before.running:
            cause = classic("a static batch is not refilled: who waits, waits until its last request is finished", 6)
            raise CheckMismatch(f"{listed(admitted)} joins {_ids(self.before.running)}", cause)
        if preempted:
            cause = classic("the blocks of a request's greatest length are set aside when it is admitted", 7)
            raise CheckMismatch(f"{listed(preempted)} is preempted in a static batch", cause)
        if self.before.running:
            return
        self._check_order(admitted)
        expected, promised = [], 0
        for request in self.before.waiting[: self.scheduler.max_batch]:
            promised += self.blocks.blocks_for(request.limit - 1)
            if promised > self.blocks.num_blocks:
                break
            expected.append(request.id)
        if admitted != expected:
            cause = "as many as max_batch allows and as fit if all grow to their limit, in order"
            if len(admitted) > len(expected):
                cause = classic(cause, 7)
            raise CheckMismatch(f"the batch: expected {listed(expected)}, got {listed(admitted)}", cause)

    def _check_budget(self, chunks: Sequence[Any], admitted: list[str], preempted: list[str]) -> int:
        """Who ran gets tokens first, oldest first, each all pending ones that the budget allows; what is left of it."""
        counts, scheduled = {chunk.request.id: chunk.count for chunk in chunks}, [chunk.request.id for chunk in chunks]
        left, whole = self.scheduler.token_budget, not self.scheduler.chunked_prefill
        order = [request for request in self.before.running if request.id not in preempted]
        order += [self.requests[id] for id in admitted if id not in preempted]
        for request in order:
            old = request.id not in admitted
            pending = self.before.pending[request.id] if old else len(request.tokens) - request.computed
            expected = pending if whole and left > 0 else min(pending, left)
            got = counts.pop(request.id, 0)
            if whole and request.id in admitted[1:] and pending > left and not self.static:
                where = f"request {request.id} joins {admitted[0]} (pending {pending}, budget left {left})"
                cause = "a prompt that is not split joins another one only if the budget has room for all of it"
                raise CheckMismatch(where, classic(cause, 2))
            if got != expected:
                allowed = (
                    "all pending tokens, as prompts are not split"
                    if whole
                    else "all pending tokens that the budget allows"
                )
                cause = classic(f"a chunk takes {allowed}", 2)
                if got > expected:
                    cause = classic("min(pending, what is left of the budget): all chunks share one budget", 2)
                elif not old and got == 0:
                    cause = (
                        "who is admitted gets a chunk in the same step: all pending tokens, or what the budget allows"
                    )
                elif got == 0:
                    behind = [other.id for other in order[order.index(request) + 1 :]]
                    cause = OLDEST_FIRST if any(id in behind for id in scheduled) else EACH
                raise CheckMismatch(
                    f"request {request.id}: expected {expected} scheduled tokens, got {got} "
                    f"(pending {pending}, budget left {left})",
                    cause,
                )
            left = max(0, left - got)
        if counts:
            raise CheckMismatch(
                f"{listed(counts)} is scheduled, and was neither running nor admitted", "ask _admit first"
            )
        return left

    def _check_waiting(self, left: int, admitted: list[str], preempted: list[str]) -> None:
        """Nobody waits who could run, and nobody joins in a step that preempts."""
        scheduler = self.scheduler
        if preempted and admitted:
            cause = classic("a step that preempts admits nobody: the blocks are needed by those who run", 4)
            raise CheckMismatch(f"{listed(admitted)} is admitted in a step that preempts {listed(preempted)}", cause)
        full = left <= 0 or len(scheduler.running) >= scheduler.max_batch
        if preempted or not scheduler.waiting or full:
            return
        first = scheduler.waiting[0]
        if admitted and not scheduler.chunked_prefill and first.pending > left:
            return  # a whole prompt that waits for a step with room for all of it
        if self.blocks.can_allocate(first.tokens, scheduler.reserve if scheduler.running else 0):
            cause = "who waits joins as soon as there is room, in the very step"
            whole = not scheduler.chunked_prefill and first.pending > left
            if whole:
                cause += ": a prompt that is not split may take more than the budget if it is the step's first"
            elif len(admitted) == 1 and self._admits_one_a_step():
                cause = classic(cause, 6)
            elif self.before.running and not admitted and self._refills_when_empty():
                cause = "a batch that waits until all its requests are finished is a static one: who fits joins at once"
                cause = classic(cause, 6)
            raise CheckMismatch(f"request {first.id} waits, although there is room for it", cause)

    def _admits_one_a_step(self) -> bool:
        """Whether this scheduler, played on until it is idle, admits one of three short prompts; it has failed."""
        scheduler, request = self.scheduler, type(self.scheduler.waiting[0])
        if scheduler.token_budget < 3 or scheduler.max_batch < 2:
            return False  # too little room to tell
        try:
            for _ in range(MOST_STEPS):
                if not (scheduler.waiting or scheduler.running):
                    break
                play(scheduler, scheduler.schedule())
            for number in range(3):
                scheduler.add(request(id=f"short {number}", prompt=[number]))
            self.blocks.calls.clear()
            scheduler.schedule()
        except Exception:
            return False
        return sum(name == "allocate" for name, _ in self.blocks.calls) == 1

    def _refills_when_empty(self) -> bool:
        """Whether this scheduler, played on, admits when nobody runs and at no other time: it must have failed."""
        scheduler, empty = self.scheduler, False
        for _ in range(MOST_STEPS):
            if not scheduler.waiting:
                break
            ran = bool(scheduler.running)
            self.blocks.calls.clear()
            try:
                step = scheduler.schedule()
            except Exception:
                return False
            if any(name == "allocate" for name, _ in self.blocks.calls):
                if ran:
                    return False
                empty = True
            play(scheduler, step)
        return empty


def play(scheduler: Any, step: Any) -> list[Any]:
    """What an engine without a model does with a step; the requests that it finishes."""
    finished = []
    for request, start, count in step.chunks:
        request.computed = start + count
        if request.computed == len(request.tokens):
            request.append(0, 0.0)
            if len(request.tokens) >= request.limit:
                scheduler.remove(request)
                finished.append(request)
    return finished


def _ids(requests: Sequence[Any]) -> str:
    return listed(request.id for request in requests)
