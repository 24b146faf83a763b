"""What an engine writes down of each step: what figures are drawn from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .request import RequestOutput
from .scheduler import Scheduler, Step

#: What an engine counts from its start on; the last four are how requests end.
COUNTED = ("requests", "steps", "computed_tokens", "cached_tokens", "generated_tokens", "preemptions",
           "stop", "length", "abort", "error")  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an engine, as it was when the step was over.

    Attributes:
        start, end: in seconds of the engine's clock.
        chunks: (id, first token, number of tokens) of each request that took part, in the order of the batch.
        waiting: how many wait.
        used, free: blocks of the pool.
        preempted, finished: ids.
    """

    start: float
    end: float
    chunks: tuple[tuple[str, int, int], ...]
    waiting: int
    used: int
    free: int
    preempted: tuple[str, ...]
    finished: tuple[str, ...]

    @staticmethod
    def chunks_of(step: Step) -> tuple[tuple[str, int, int], ...]:
        """Who takes part in a step, which is known before it is over."""
        return tuple([(request.id, first, count) for request, first, count in step.chunks])

    @classmethod
    def of(
        cls,
        step: Step,
        chunks: tuple[tuple[str, int, int], ...],
        scheduler: Scheduler,
        start: float,
        end: float,
        outputs: Iterable[RequestOutput],
    ) -> StepRecord:
        """What there is to say of a step that is over, with its :meth:`chunks_of`."""
        return cls(
            start,
            end,
            chunks,
            len(scheduler.waiting),
            scheduler.manager.num_used,
            scheduler.manager.num_free,
            tuple([request.id for request in step.preempted]),
            tuple([output.id for output in outputs if output.finished]),
        )

    @property
    def batch(self) -> int:
        """Requests that took part."""
        return len(self.chunks)

    @property
    def tokens(self) -> dict[str, int]:
        """How many tokens of each request went through the model."""
        return {id: count for id, _, count in self.chunks}
