"""An engine that also reports log probabilities, for the requests that ask for them by :class:`ScoredParams`.

The engine itself knows nothing of this. It hands the logits of a step to ``_choose``, and there a subclass finds them
together with the tokens that were chosen.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from utils.serving.logprobs import ScoredParams, TokenScore, token_scores

from .engine import Engine
from .request import Request
from .scheduler import Chunk


class ScoredOutput(NamedTuple):
    """A :class:`.request.RequestOutput` with the scores of its new tokens; none if the request did not ask."""

    id: str
    new_tokens: list[int]
    finished: bool
    finish_reason: str | None
    error: str | None
    request: Request
    logprobs: list[TokenScore]


class Scoring:
    """What :func:`scored` puts before an engine's class."""

    #: A server asks this before it takes a request for log probabilities.
    serves_logprobs: ClassVar[bool] = True

    def step(self) -> list[ScoredOutput]:
        """As :meth:`.engine.Engine.step`, with scores."""
        self._scores: dict[str, list[TokenScore]] = {}
        outputs = super().step()
        # An end of text within an accepted draft drops the tokens behind it.
        return [ScoredOutput(*o, self._scores.get(o.id, [])[: len(o.new_tokens)]) for o in outputs]

    def _choose(self, sampling: list[Chunk], logits: Tensor | None, failed: dict[str, str]) -> list[Any]:
        chosen = super()._choose(sampling, logits, failed)
        row = 0
        for chunk, tokens in zip(sampling, chosen, strict=True):
            request, tokens = chunk.request, tokens if isinstance(tokens, list) else [tokens]
            if isinstance(request.params, ScoredParams) and request.id not in failed:
                try:
                    rows = logits[row : row + len(tokens)]
                    self._scores[request.id] = token_scores(rows, tokens, request.params.logprobs)
                except Exception as error:  # a device that is lost, or out of memory
                    failed[request.id] = f"log probabilities failed: {type(error).__name__}: {error}"
            row += 1 + len(getattr(request, "draft", ()))  # a row for each drafted token, and one
        return chosen


def scored(engine: type[Engine]) -> type[Engine]:
    """The class of engines that do what ``engine``'s do, and report log probabilities."""
    return type(f"Scored{engine.__name__}", (Scoring, engine), {})
