"""Two engines that share a request: one computes its prompt and its next token, the other all tokens after that.

Both are lab 5's engine. Between them goes a copy of the request's keys and values, in a *slot*: one piece of memory,
(2, L, G, N, D), keys and values of L layers and G heads for at most N tokens.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solutions.lab5_serving.engine import Engine
from solutions.lab5_serving.request import Request, RequestOutput, Status
from utils.serving import ModelConfig, SamplingParams


class Job(NamedTuple):
    """A request as it goes from process to process: ``output`` are the tokens that it has got."""

    id: str
    prompt: list[int]
    output: list[int]
    params: SamplingParams


def slot_shape(config: ModelConfig) -> tuple[int, int, int, int, int]:
    """(2, L, G, N, D) of a slot for a request of the greatest length, N tokens."""
    return 2, config.num_layers, config.num_kv_heads, config.max_seq_len, config.head_dim


def request_of(job: Job, config: ModelConfig, now: float) -> Request:
    """The request of a job. Each token that it has got took one random number, and so those numbers are drawn here."""
    limit = min(len(job.prompt) + job.params.max_new_tokens, config.max_seq_len)
    request = Request(job.id, job.prompt, job.params, now, limit, output=list(job.output))
    if request.generator is not None:
        torch.rand(len(job.output), dtype=torch.float64, generator=request.generator)
    return request


class PrefillEngine(Engine):
    """Computes prompts, with the tokens behind them if there are some, and one token each.

    A request then ends with the reason "stop" or "length" if that token was its last. Otherwise it ends with the reason
    "handover", and its keys and values are in the slot that was given for it.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._slots: dict[str, Tensor] = {}

    def prefill(self, job: Job, slot: Tensor) -> None:
        """Queue a request; ``slot`` has the :func:`slot_shape` and the model's dtype.

        Raises:
            ValueError: a prompt that does not fit into the pool.
        """
        request = request_of(job, self.model.config, self.clock())
        self.scheduler.add(request)
        self.requests[job.id], self._slots[job.id] = request, slot
        self._totals["requests"] += 1

    def _accept(self, request: Request, token: int, now: float) -> RequestOutput:
        output = super()._accept(request, token, now)
        if output.finished:
            return output
        computed = request.computed
        caches = (self.runner.key_cache, self.runner.value_cache)
        blocks = self.manager.table(request.id)[: self.manager.blocks_for(computed)]
        for cache, target in zip(caches, self._slots[request.id], strict=True):
            kept = cache[:, blocks].flatten(1, 2)[:, :computed]  # (L, tokens, G, D)
            target[:, :, :computed] = kept.transpose(1, 2)
        return self._end(request, "handover", new=[token])

    def _end(self, request: Request, *arguments: Any, **options: Any) -> RequestOutput:
        self._slots.pop(request.id, None)
        return super()._end(request, *arguments, **options)


class DecodeEngine(Engine):
    """Goes on with requests whose keys and values come in a slot.

    A request waits in its slot until the batch has a place and the pool has blocks. One that is preempted later is
    computed again here, by lab 5's rules, and goes before those that wait in slots.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._coming: deque[tuple[Request, Tensor]] = deque()

    def take_over(self, job: Job, slot: Tensor) -> None:
        """Queue a request with at least one token of output; all but its last token are in the slot.

        Raises:
            ValueError: it may outgrow the pool.
        """
        request = request_of(job, self.model.config, self.clock())
        self.scheduler.refuse_if_hopeless(request)
        self.requests[job.id] = request
        self._coming.append((request, slot))
        self._totals["requests"] += 1

    def copy_slots(self) -> list[str]:
        """Copy what waits in slots into the pool as far as there is room; ids of the requests whose slots are free."""
        copied, scheduler = [], self.scheduler
        while self._coming and not scheduler.waiting and len(scheduler.running) < self.max_batch:
            request, slot = self._coming[0]
            computed = request.num_tokens - 1
            if not self.manager.can_allocate(request.tokens, scheduler.reserve if scheduler.running else 0):
                break
            self._coming.popleft()
            cached = self.manager.allocate(request.id, request.tokens[:computed])
            self._write(self.manager.table(request.id), slot, cached, computed)
            self.manager.commit(request.id, computed)
            request.computed, request.status = computed, Status.RUNNING
            scheduler.running.append(request)
            copied.append(request.id)
        return copied

    def _write(self, table: list[int], slot: Tensor, start: int, stop: int) -> None:
        """Tokens ``start`` to ``stop`` of a slot into a request's blocks; those before are there by a shared prefix."""
        positions = torch.arange(start, stop)
        blocks = torch.tensor(table)[positions // self.manager.block_size]
        for cache, source in zip((self.runner.key_cache, self.runner.value_cache), slot, strict=True):
            # (L, tokens, G, D) on both sides
            cache[:, blocks, positions % self.manager.block_size] = source[:, :, start:stop].transpose(1, 2).to(cache)

    def abort(self, id: str) -> bool:
        """As :meth:`Engine.abort`, also of a request that waits in its slot."""
        for waiting in self._coming:
            if waiting[0].id == id:
                self._coming.remove(waiting)
                self.scheduler.waiting.append(waiting[0])  # where the engine looks for it
                break
        return super().abort(id)
