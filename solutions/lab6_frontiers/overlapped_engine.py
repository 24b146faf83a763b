"""The serving engine with overlapped scheduling: the host prepares step n + 1 while the device computes step n.

:class:`solutions.lab5_serving.Engine` schedules step n + 1 when it has read the tokens of step n, and meanwhile the
device waits. But to schedule, it is enough to know *that* a request gets a token: which one it is matters only to the
model, and the model runs where the token is. So step n + 1 is scheduled and launched with a placeholder for each token
of step n, and the device looks the token up. Only then does the host wait for step n. (SGLang calls this a
zero-overhead batch scheduler, TensorRT-LLM the overlap scheduler, vLLM asynchronous scheduling.)

What the host learns one step late:

- An end of text. The request's part of the step that is launched already is *surplus*: nobody reads its token.
- Logits that are not finite. The request fails one step late, and its part of the next step is surplus too.

The greatest length is known in advance, so it costs nothing. Blocks are freed as soon as the host knows of an end,
although a surplus step may still write to them: whoever gets them writes in a later step, and a device runs its steps
in order. Where blocks are so short that somebody might be preempted, the host reads step n before it schedules step
n + 1, without overlap: an end may free what is missing, and a preemption costs more than one wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from solutions.lab5_serving.engine import Engine
from solutions.lab5_serving.history import StepRecord
from solutions.lab5_serving.logprobs import Scoring
from solutions.lab5_serving.memory import default_num_blocks
from solutions.lab5_serving.request import Request, RequestOutput, Status
from solutions.lab5_serving.scheduler import Chunk, Step
from utils.serving import Decoder

from .overlapped_runner import OverlappedRunner, Read, placeholder
from .overlapped_sampling import choose_later


def longest_first(step: Step) -> None:
    """Order the chunks of a decode step by their contexts, the longest first.

    A GPU starts programs in the order of the batch, and attention has some for each sequence. When only a few are left,
    most multiprocessors are idle: short ones keep that end short. Contexts grow alike, so that the order stays as it is
    until a request comes or goes. A step with prompts in it is left as it was.
    """
    if all(chunk.count == 1 for chunk in step.chunks):
        step.chunks.sort(key=lambda chunk: chunk.start, reverse=True)


@dataclass(slots=True)
class Flight:
    """A step that is launched, and whose tokens the host has not read yet.

    Attributes:
        start: when the host began to schedule it.
        sampling: the chunks that yield a token, a row of the step's tokens each.
        read: waits for the tokens, and whether each row is finite; None if nobody gets a token.
        failed: what went wrong when it was launched, by request id.
        outputs: of the requests that ended because of that.
    """

    step: Step
    start: float
    sampling: list[Chunk]
    read: Read | None
    failed: dict[str, str]
    outputs: list[RequestOutput] = field(default_factory=list)


class OverlappedEngine(Engine):
    """An :class:`Engine` whose host works one step ahead; every request gets the tokens that :class:`Engine` gives it.

    All sampling parameters are overlapped. Drafts are not: how many tokens a request gains in a step decides on the
    slots of the next one. Nor are log probabilities, whose texts and ranks the host makes of a step's logits.

    Args:
        model: in evaluation mode.
        num_blocks, block_size, max_batch: as for :class:`Engine`.
        runner: an :class:`.overlapped_runner.OverlappedRunner`; None: one of the model.
        settings: the other arguments of :class:`Engine`.

    ``stats`` also counts ``surplus_tokens``: computed for requests that were over already.

    Raises:
        ValueError: as :class:`Engine`; a draft model, log probabilities.
        TypeError: a runner that knows no placeholders.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch: int = 64,
        runner: OverlappedRunner | None = None,
        **settings: Any,
    ) -> None:
        if "draft_model" in settings:
            raise ValueError(
                "drafts cannot be overlapped: how many tokens a request gains decides on the slots of its next step; "
                "take a SpeculativeEngine for them"
            )
        if isinstance(self, Scoring):
            raise ValueError("log probabilities cannot be overlapped; take scored(Engine) for them")
        if runner is not None and not isinstance(runner, OverlappedRunner):
            raise TypeError(f"an OverlappedEngine needs an OverlappedRunner, got a {type(runner).__name__}")
        if runner is None:
            if num_blocks is None:
                num_blocks = default_num_blocks(model, block_size, max_batch)
            runner = OverlappedRunner(model, num_blocks, block_size)
        super().__init__(model, runner=runner, max_batch=max_batch, **settings)
        self._flight: Flight | None = None
        self._totals["surplus_tokens"] = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything; the end of a surplus step is something, too."""
        return super().has_work or self._flight is not None

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Launch a step, then read the one before it; what that produced for each request; an empty list if idle.

        A request that fails when its step is launched ends in the same call, behind the token that is read there.
        """
        outputs, self._reports = self._reports, []
        if self._flight is not None and self._short_of_blocks():
            outputs += self._land(self._flight)
            self._flight = None
        landing = self._flight
        self._flight = self._launch(landing)
        if landing is not None:
            outputs += self._land(landing)
        if self._flight is not None:
            outputs += self._end_failed(self._flight)
        return outputs

    def _short_of_blocks(self) -> bool:
        """Whether the next step might preempt a request: each that runs gains one token, for a new block at most.

        No block is copied: requests share only full ones.
        """
        manager, running = self.manager, self.scheduler.running
        return sum(manager.length(request.id) % manager.block_size == 0 for request in running) > manager.num_free

    def _launch(self, landing: Flight | None) -> Flight | None:
        """Schedule a step behind ``landing`` and launch it; nothing is waited for; None if there is nothing to do."""
        if not self.scheduler.has_work:
            return None
        start = self.clock()
        with self._placeholders(landing):
            step = self.scheduler.schedule()
            if not step.chunks:  # all who run wait for their last token
                return None
            longest_first(step)
            logits, failed = self._run(step)
            sampling = [chunk for chunk in step.chunks if chunk.samples and chunk.request.id not in failed]
        self._count(step, start)
        for request, first, count in step.chunks:
            request.computed = first + count
        return Flight(step, start, sampling, self._choose_later(sampling, logits, failed), failed)

    @contextmanager
    def _placeholders(self, landing: Flight | None) -> Iterator[None]:
        """Meanwhile, each request that ``landing`` gives a token, but not its last, has a placeholder for it."""
        requests = []
        for row, chunk in enumerate(landing.sampling if landing is not None else ()):
            request = chunk.request
            # The last token of a request is never fed back.
            if len(request.tokens) + 1 < request.limit:
                request.tokens.append(placeholder(row))
                requests.append(request)
        try:
            yield
        finally:
            for request in requests:
                request.tokens.pop()

    def _choose_later(self, sampling: list[Chunk], logits: Tensor | None, failed: dict[str, str]) -> Read | None:
        """Launch the choice of each chunk's token; requests that cannot get one are added to ``failed``."""
        if not sampling:
            return None
        try:
            found, wrong = choose_later(logits, [chunk.request for chunk in sampling])
            failed.update(wrong)
            return self.runner.keep(found)
        except Exception as error:  # a device that is lost, or out of memory
            failed.update((chunk.request.id, _sampling_failed(error)) for chunk in sampling)
            return None

    def _land(self, flight: Flight) -> list[RequestOutput]:
        """Wait for a step; what it brought each request that is still there.

        Only now are its blocks committed: its tokens are known, and so is whose computation failed. What is surplus is
        never committed.
        """
        tokens, failed = self._read(flight)
        now = self.clock()
        for request, first, count in flight.step.chunks:
            if request.status is Status.RUNNING and request.id not in failed:
                self.manager.commit(request.id, first + count)
        outputs = []
        for chunk, token in zip(flight.sampling, tokens, strict=True):
            request = chunk.request
            if request.id in flight.failed:  # it has ended
                continue
            if request.status is Status.FINISHED:
                self._totals["surplus_tokens"] += 1
            elif request.id in failed:
                outputs.append(self._end(request, "error", failed[request.id]))
            else:
                outputs.append(self._accept(request, token, now))
        ended = [*flight.outputs, *outputs]
        chunks = StepRecord.chunks_of(flight.step)
        self.history.append(StepRecord.of(flight.step, chunks, self.scheduler, flight.start, now, ended))
        return outputs

    def _read(self, flight: Flight) -> tuple[list[int], dict[str, str]]:
        """A step's tokens, and what went wrong in it, by request id; here the host waits for the device."""
        requests = [chunk.request for chunk in flight.sampling]
        if flight.read is None:
            return [0] * len(requests), {}
        try:
            tokens, finite = flight.read()
        except Exception as error:  # a device that is lost
            return [0] * len(requests), {request.id: _sampling_failed(error) for request in requests}
        wrong = [request.id for request, good in zip(requests, finite, strict=True) if not good]
        return tokens, dict.fromkeys(wrong, "the model's logits are not finite")

    def _end_failed(self, flight: Flight) -> list[RequestOutput]:
        """End the requests whose step failed when it was launched, unless the step before was their last."""
        for request in [chunk.request for chunk in flight.step.chunks]:
            if request.id in flight.failed and request.status is not Status.FINISHED:
                flight.outputs.append(self._end(request, "error", flight.failed[request.id]))
        return flight.outputs

    # ---- requests ------------------------------------------------------------------------------------------------

    def _accept(self, request: Request, token: int, now: float) -> RequestOutput:
        """A request has its next token, which takes the placeholder's place in the block manager."""
        place = len(request.tokens)
        if self.manager.length(request.id) > place:
            self.manager.sequence(request.id).tokens[place] = token
        return super()._accept(request, token, now)


def _sampling_failed(error: Exception) -> str:
    return f"sampling failed: {type(error).__name__}: {error}"
