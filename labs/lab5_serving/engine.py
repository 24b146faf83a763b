"""The serving engine: requests in, tokens out, one step of the model at a time.

A step is: the scheduler chooses chunks of tokens, the runner computes them in one ragged batch, the sampler chooses
one token for every request whose known tokens are all computed. Nothing else happens, and all of it in ``Engine.step``
(exercise 5.7).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from utils.serving import Decoder, Generation, SamplingParams
from utils.serving.generate import check_prompt

from .block_manager import BlockManager
from .history import COUNTED, StepRecord
from .memory import default_num_blocks
from .request import Request, RequestOutput, Status
from .runner import ModelRunner
from .sampling import choose
from .scheduler import Chunk, Scheduler, StaticScheduler, Step


class EngineFull(RuntimeError):
    """As many requests wait as may; try again later."""


class Engine:
    """Serves many requests at a time with one model.

    Args:
        model: in evaluation mode.
        num_blocks, block_size: of the cache; None: see :func:`default_num_blocks`. A ``runner`` brings its own.
        max_batch, token_budget, chunked_prefill: see :class:`Scheduler`.
        scheduler: "continuous" or "static".
        prefix_caching: reuse the blocks of equal beginnings.
        runner: what computes a step; None: a :class:`ModelRunner` of the model.
        clock: seconds; another one simulates.
        max_waiting: requests that may wait; None: any number.
        history: steps that the attribute ``history`` keeps, the newest; None: all, which in a server is a leak.

    Attributes:
        history: a :class:`StepRecord` per step.
        requests: those that are not finished, by id.
    """

    request_type: ClassVar[type[Request]] = Request
    #: What the argument ``scheduler`` names.
    schedulers: ClassVar[dict[str, type[Scheduler]]] = {"continuous": Scheduler, "static": StaticScheduler}

    def __init__(
        self,
        model: Decoder,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch: int = 64,
        token_budget: int = 512,
        chunked_prefill: bool = True,
        scheduler: str = "continuous",
        prefix_caching: bool = True,
        runner: ModelRunner | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_waiting: int | None = None,
        history: int | None = None,
    ) -> None:
        if scheduler not in self.schedulers:
            raise ValueError(f"scheduler must be one of {', '.join(self.schedulers)}, got {scheduler!r}")
        if runner is not None:
            num_blocks, block_size = runner.num_blocks, runner.block_size
        elif num_blocks is None:
            num_blocks = default_num_blocks(model, block_size, max_batch)
        self.model, self.clock, self.max_batch, self.max_waiting = model, clock, max_batch, max_waiting
        self.manager = BlockManager(num_blocks, block_size, prefix_caching)
        self.scheduler = self.schedulers[scheduler](self.manager, max_batch, token_budget, chunked_prefill)
        self.runner = runner or ModelRunner(model, num_blocks, block_size)
        self.requests: dict[str, Request] = {}
        self.history: deque[StepRecord] = deque(maxlen=history)
        self._totals: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._reports: list[RequestOutput] = []  # of requests that ended between two steps
        self._named = 0

    # ---- requests in ---------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        arrival: float | None = None,
    ) -> str:
        """Queue a request and return its id, a new one if none is given.

        Raises:
            ValueError: an id in use, or a prompt that can never be served: empty, outside the vocabulary, too long for
                the model or the pool.
            EngineFull: ``max_waiting`` requests wait already.
        """
        params = params or SamplingParams()
        if id in self.requests:
            raise ValueError(f"request {id!r} is not finished yet; give the new one another id")
        while id is None or id in self.requests:
            self._named += 1
            id = f"request-{self._named}"
        prompt = check_prompt(self.model, prompt)
        limit = min(len(prompt) + params.max_new_tokens, self.model.config.max_seq_len)
        request = self.request_type(id, prompt, params, self.clock() if arrival is None else arrival, limit)
        self.scheduler.refuse_if_hopeless(request)  # also when the queue is full
        if self.max_waiting is not None and len(self.scheduler.waiting) >= self.max_waiting:
            raise EngineFull(f"{len(self.scheduler.waiting)} requests wait, and no more than {self.max_waiting} may")
        self.scheduler.add(request)
        self.requests[id] = request
        self._totals["requests"] += 1
        return id

    def abort(self, id: str) -> bool:
        """Give a request up, wherever it is; its blocks are free at once, the next step reports it.

        Returns False if there is no such request: it may have finished a moment ago.
        """
        request = self.requests.get(id)
        if request is None:
            return False
        self._reports.append(self._end(request, "abort"))
        return True

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self.requests or self._reports)

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step; what it produced for each request that got a token or ended; an empty list if idle.

        The scheduler chooses, :meth:`_run` computes. A request that fails there or in :meth:`_choose` is in
        ``failed`` (its id -> what went wrong) and ends by :meth:`_end` with the reason "error"; the others go on.
        What was run is ``computed``, and committed to the manager. A chunk that ``samples`` gets a token, which
        :meth:`_accept` appends.
        """
        outputs, self._reports = self._reports, []
        if not self.scheduler.has_work:
            return outputs
        start = self.clock()
        raise NotImplementedError("Lab 5, exercise 5.7: schedule and run")
        # A GPU works on its own now, until _choose asks for its result. So here is what does not depend on that: while
        # the CPU decides and writes down, a GPU has nothing to do.
        self._count(step, start)
        raise NotImplementedError("Lab 5, exercise 5.7: count and commit")
        raise NotImplementedError("Lab 5, exercise 5.7: who gets a token")
        took_part = StepRecord.chunks_of(step)
        chosen = self._choose(sampling, logits, failed)
        now = self.clock()
        raise NotImplementedError("Lab 5, exercise 5.7: tokens and errors")
        self.history.append(StepRecord.of(step, took_part, self.scheduler, start, now, outputs))
        return outputs

    def _count(self, step: Step, now: float) -> None:
        for request in step.admitted:
            self._totals["cached_tokens"] += request.cached
            if request.first_scheduled is None:
                request.first_scheduled = now
        self._totals["steps"] += 1
        self._totals["computed_tokens"] += step.num_tokens
        self._totals["preemptions"] += len(step.preempted)

    def _run(self, step: Step) -> tuple[Tensor | None, dict[str, str]]:
        """Compute a step: the logits (S, V) of chunks that yield a token, and what went wrong, by request id.

        If the step fails, each chunk is run alone, to see whose fault it is: a second time the same keys and values are
        written to the same slots. Blocks are copied once, since the step may write where something was copied from.
        """
        if step.copies:
            self.runner.copy_blocks(step.copies)
        try:
            return self.runner.run(Step(step.chunks), self.manager), {}
        except Exception:
            rows, failed = [], {}
            for chunk in step.chunks:
                try:
                    rows.append(self.runner.run(Step([chunk]), self.manager).clone())  # a graph reuses its logits
                except Exception as error:
                    failed[chunk.request.id] = f"the model failed: {type(error).__name__}: {error}"
            return torch.cat(rows) if rows else None, failed

    def _choose(self, sampling: list[Chunk], logits: Tensor | None, failed: dict[str, str]) -> list[int]:
        """The next token of each chunk's request; requests that cannot get one are added to ``failed``."""
        if not sampling:
            return []
        try:
            tokens, wrong = choose(logits, [chunk.request for chunk in sampling])
        except Exception as error:  # a device that is lost, or out of memory
            tokens = [0] * len(sampling)
            wrong = {chunk.request.id: f"sampling failed: {type(error).__name__}: {error}" for chunk in sampling}
        failed.update(wrong)
        return tokens

    def _accept(self, request: Request, token: int, now: float) -> RequestOutput:
        """A request has its next token; perhaps its last."""
        request.append(token, now)
        self._totals["generated_tokens"] += 1
        if not request.params.ignore_eos and token in self.model.config.eos_token_ids:
            return self._end(request, "stop", new=[token])
        if len(request.tokens) >= request.limit:
            return self._end(request, "length", new=[token])
        return RequestOutput(request.id, [token], False, None, None, request)

    def _end(self, request: Request, reason: str, error: str | None = None, new: Sequence[int] = ()) -> RequestOutput:
        """A request is over: its blocks are free, and nothing of it stays here; if it failed, no prefix."""
        if reason == "error":
            self.manager.forget(request.id)
        self.scheduler.remove(request)
        del self.requests[request.id]
        request.finish_reason, request.error, request.finished = reason, error, self.clock()
        self._totals[reason] += 1
        return RequestOutput(request.id, list(new), True, reason, error, request)

    # ---- tokens out ----------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """Serve some prompts to their end, with parameters for all or one each, beside what else is being served.

        Raises:
            ValueError: as :meth:`add`; then none of them is served.
            RuntimeError: a request failed.
        """
        each, requests = list(params) if isinstance(params, Sequence) else [params] * len(prompts), []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                requests.append(self.requests[self.add(prompt, own)])
        except Exception:
            for request in requests:
                self.abort(request.id)
            raise
        while any(request.status is not Status.FINISHED for request in requests):
            self.step()
        for request in requests:
            request.raise_if_failed()
        return [Generation(list(request.output), request.finish_reason) for request in requests]

    def stream(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Iterator[int]:
        """The tokens after a prompt, each as soon as it is known. Who stops listening aborts the request.

        Raises:
            ValueError: as :meth:`add`, at once.
            RuntimeError: the request failed.
        """
        return self._stream(self.requests[self.add(prompt, params)])

    def _stream(self, request: Request) -> Iterator[int]:
        given = 0
        try:
            while given < len(request.output) or request.status is not Status.FINISHED:
                if given == len(request.output):
                    self.step()
                new = request.output[given:]
                given += len(new)
                yield from new
            request.raise_if_failed()
        finally:
            if request.status is not Status.FINISHED:
                self.abort(request.id)

    def stats(self) -> dict[str, Any]:
        """Counts since the start (requests, how they ended, tokens, steps, preemptions) and what there is now."""
        return dict(self._totals) | {
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "blocks_used": self.manager.num_used,
            "blocks_free": self.manager.num_free,
        }
