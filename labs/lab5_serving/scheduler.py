"""Which tokens go through the model in the next step (exercise 5.3).

Iteration-level scheduling (Yu et al. 2022, Orca): the choice is made anew before every step, so a request joins as
soon as there is room and leaves as soon as it is finished. The static scheduler, which serves a batch until its last
request is finished, is here to be compared with.

All of this runs on the CPU between two steps of the model, so it deals in integers only, and in a constant number of
operations per running request.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from .block_manager import BlockManager
from .request import Request, Status


class Chunk(NamedTuple):
    """``count`` tokens of a request, from token ``start`` on, that go through the model in this step."""

    request: Request
    start: int
    count: int

    @property
    def tokens(self) -> list[int]:
        """The tokens themselves."""
        return self.request.slice(self.start, self.start + self.count)

    @property
    def samples(self) -> bool:
        """Whether the chunk ends the tokens that its request has, so that the step yields the next one."""
        return self.start + self.count == self.request.num_tokens


@dataclass(slots=True)
class Step:
    """One step of the model: chunks of different requests, in the order of the batch, and what led to them."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target) blocks, before anything is written
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Continuous batching, first come first served.

    Args:
        manager: of the blocks that the requests' keys and values need.
        max_batch: requests that run at a time: throughput rises with it, and so does the time between two tokens.
        token_budget: tokens in a step, of all requests together, so that a long prompt cannot hold up the others for
            long. At least ``max_batch``: then every running request advances in every step.
        chunked_prefill: a prompt may take several steps. If not, it goes whole into a step with some budget left;
            beside another newcomer only if what is left suffices for all of it.

    Attributes:
        waiting: in order of arrival; the first one is never passed over, so that none starves.
        running: in order of admission, the oldest first. At most one of them, the last, is in the middle of its prompt.
        reserve: blocks that an admission leaves free, so that the newcomer is not thrown out by the next few tokens.
    """

    #: Share of the pool that is the reserve, rounded up to whole blocks.
    reserve_share = 0.01

    def __init__(
        self, manager: BlockManager, max_batch: int = 64, token_budget: int = 512, chunked_prefill: bool = True
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        if token_budget < max_batch:
            raise ValueError(f"token_budget must be at least max_batch = {max_batch}, got {token_budget}")
        self.manager, self.max_batch, self.token_budget = manager, max_batch, token_budget
        self.chunked_prefill = chunked_prefill
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.reserve = math.ceil(manager.num_blocks * self.reserve_share)

    @property
    def has_work(self) -> bool:
        """Whether there is anything left to schedule."""
        return bool(self.waiting or self.running)

    def refuse_if_hopeless(self, request: Request) -> None:
        """ValueError if a request could outgrow the whole pool.

        Every other one can finish at the latest when it is alone, which is why preemption never ends in a deadlock.
        """
        # The last token of a request is never fed back, so it needs no slot.
        needed, manager = self.manager.blocks_for(request.limit - 1), self.manager
        if needed > manager.num_blocks:
            raise ValueError(
                f"request {request.id!r} may grow to {request.limit} tokens (its prompt has "
                f"{len(request.prompt)}), {needed} blocks of {manager.block_size}; the pool has {manager.num_blocks}"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it is hopeless.
        """
        self.refuse_if_hopeless(request)
        request.status = Status.WAITING
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """A request is finished or given up: it leaves, and its blocks are free at once."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.manager.free(request.id)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            raise ValueError(f"request {request.id!r} is neither waiting nor running")
        request.status = Status.FINISHED

    def schedule(self) -> Step:
        """The next step: first the running requests, oldest first, then the waiting ones that fit beside them.

        A running request gets as many of its pending tokens as the budget allows. If its blocks do not suffice, the
        newest running request is preempted (``_make_room``). A waiting request is admitted if there is a place in the
        batch, some budget, and blocks for all its tokens and the reserve (``_admit``); in a step that preempted, none.
        """
        step, budget = Step(), self.token_budget
        raise NotImplementedError("Lab 5, exercise 5.3: a step of continuous batching")
        return step

    def _make_room(self, request: Request, count: int, step: Step) -> int:
        """Slots for the next ``count`` pending tokens of a running request, preempting as many others as it takes.

        The newest is preempted first: it has the least to lose, and the oldest is sure to finish.

        Returns:
            How many tokens have a slot; 0 if the request itself was the newest and lost its blocks.
        """
        manager = self.manager
        new = request.slice(manager.length(request.id), request.computed + count)
        while new and not manager.can_append(request.id, len(new)):
            victim = self.running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return 0
        step.copies += manager.append(request.id, new)
        return count

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks and put it first in line; its keys and values will be computed again.

        Recomputing is one pass over all its tokens, prompt and output alike (Kwon et al. 2023, section 4.5), less those
        that are found in the cache: its blocks are free, but they hold what they held until somebody takes them.
        """
        self.running.remove(request)
        self.manager.free(request.id)
        request.computed, request.status = 0, Status.WAITING
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, step: Step) -> bool:
        """Let the first of the waiting requests run, if there are blocks for all its tokens; whether there were."""
        request = self.waiting[0]
        if not self.manager.can_allocate(request.tokens, self.reserve if self.running else 0):
            return False
        request.computed = request.cached = self.manager.allocate(request.id, request.tokens)
        request.status = Status.RUNNING
        self.running.append(self.waiting.popleft())
        step.admitted.append(request)
        return True


class StaticScheduler(Scheduler):
    """Request-level batching: who is not in a batch when it starts waits until its last request is finished.

    Blocks for a request's greatest length are set aside when it is admitted, so nobody is ever preempted.
    """

    reserve_share = 0.0

    def schedule(self) -> Step:
        """The next step of the current batch; when it is finished, the first step of the next.

        A batch is as many of the waiting requests, in order, as ``max_batch`` allows and as fit into the pool if all of
        them grow to their limit. Each step then advances every request of it, within the budget.
        """
        step, budget = Step(), self.token_budget
        raise NotImplementedError("Lab 5, exercise 5.3: a step of static batching")
        return step
