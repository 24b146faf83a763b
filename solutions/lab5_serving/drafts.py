"""Requests with drafts, tokens that a smaller model proposed and the next step verifies, and how they are scheduled."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import Request
from .scheduler import Scheduler, StaticScheduler, Step


@dataclass(eq=False, slots=True)
class DraftedRequest(Request):
    """A :class:`Request` with a draft, which is pending with its tokens but not among them."""

    draft: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt, output and draft."""
        return len(self.tokens) + len(self.draft)

    def slice(self, start: int, stop: int) -> list[int]:
        """Tokens ``start`` to ``stop`` of prompt, output and draft laid end to end."""
        if stop <= len(self.tokens):
            return self.tokens[start:stop]
        return (self.tokens[start:] + self.draft[max(start - len(self.tokens), 0) :])[: stop - start]


class DraftScheduler(Scheduler):
    """Continuous batching of requests that may have drafts."""

    def _make_room(self, request: DraftedRequest, count: int, step: Step) -> int:
        """As :meth:`Scheduler._make_room`. A draft is only a guess: it is dropped before a request is preempted."""
        if request.draft:
            known = len(request.tokens) - request.computed
            if not self.manager.can_append(request.id, request.computed + count - self.manager.length(request.id)):
                count = min(count, known)
            del request.draft[max(0, count - known) :]
        return super()._make_room(request, count, step)

    def _preempt(self, request: DraftedRequest) -> None:
        request.draft = []
        super()._preempt(request)


class StaticDraftScheduler(DraftScheduler, StaticScheduler):
    """Static batching of requests that may have drafts."""
