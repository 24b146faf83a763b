"""From the tokens of an engine to the HTTP answer of a client: whole, or piece by piece in a stream."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from utils.serving import openai_api as api
from utils.serving.fates import Fate, Fates
from utils.serving.http_errors import CLIENT_GONE, ApiError
from utils.serving.logprobs import TokenScore
from utils.serving.openai_chat import ChatRequest
from utils.serving.tokenizer import Tokenizer
from utils.serving.worker import Event, Submission


@dataclass
class Part:
    """What is new of a choice: text, why it ended if it did, and the scores of its new tokens, if asked for."""

    index: int
    text: str
    reason: str | None
    scores: list[TokenScore] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # where in the choice's text each of these tokens begins


class Answer:
    """The choices of one HTTP request, from tokens to text.

    Args:
        body: what was asked.
        submission: its requests, as the engine took them.
        tokenizer: of the engine's model.
        prompt_tokens: of all prompts.
        stops: texts that end a choice.
        fates: of the requests; each is told here how it ended.
    """

    def __init__(
        self,
        body: api.Options,
        submission: Submission,
        tokenizer: Tokenizer,
        prompt_tokens: int,
        stops: Sequence[str],
        fates: Fates,
    ) -> None:
        self.body, self.submission, self.tokenizer, self.fates = body, submission, tokenizer, fates
        self.id, self.created = f"{body.id_prefix}-{uuid.uuid4().hex}", int(time.time())
        self.prompt_tokens = prompt_tokens
        self.texts = [api.AnswerText(tokenizer, stops) for _ in submission.ids]

    async def parts(self) -> AsyncIterator[Part]:
        """The choices' parts, as they come. Log probabilities of text that is held back wait for it.

        Raises:
            ApiError: a request failed, or the server shuts down; all of them are then over.
        """
        waiting = [Part(index, "", None) for index in range(len(self.texts))]
        try:
            async for index, event in self.submission.events():
                self._refuse_if_failed(event)
                part = waiting[index]
                self._take(part, event)
                if part.text or part.reason:
                    waiting[index] = Part(index, "", None)
                    yield part
        except Exception:
            self.fates.end_all(Fate.FAILED)
            raise

    def _refuse_if_failed(self, event: Event) -> None:
        if event.reason == "error":
            raise ApiError(500, event.error or "the request failed", "server_error")
        if event.reason == "abort":
            self.fates.end_all(Fate.SHUTDOWN)
            raise ApiError(503, event.error or "the server is shutting down", "service_unavailable")

    def _take(self, part: Part, event: Event) -> None:
        """Add an event to what is known of a choice, and end the choice if this is its end."""
        index, text = part.index, self.texts[part.index]
        before = text.tokens
        part.text = text.push(event.tokens, last=event.finished)
        part.offsets += text.offsets[before:]
        part.scores += event.logprobs[: text.tokens - before]
        self.fates.tokens(index, text.tokens - before)
        if text.stopped:
            self.submission.close(index)
            part.reason = "stop"
            self.fates.end(index, Fate.STOP_STRING)
        elif event.finished:
            part.reason = event.reason
            self.fates.end(index, Fate.LENGTH if event.reason == "length" else Fate.END_TOKEN)

    @property
    def usage(self) -> dict[str, int]:
        return api.usage(self.prompt_tokens, sum(text.tokens for text in self.texts))

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if self.body.scored is None:
            return None
        return self.body.logprobs_body(self.tokenizer, part.scores, part.offsets)

    def _json(self, name: str, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        body = {"id": self.id, "object": name, "created": self.created, "model": self.body.model}
        return body | {"choices": list(choices)} | more

    async def whole(self) -> Response:
        """The answer in one piece."""
        wholes = [Part(index, "", None) for index in range(len(self.texts))]
        async for part in self.parts():
            whole = wholes[part.index]
            whole.text, whole.reason = whole.text + part.text, part.reason
            whole.scores += part.scores
            whole.offsets += part.offsets
        choices = [self.body.choice(each.index, each.text, each.reason, self._logprobs(each)) for each in wholes]
        return JSONResponse(self._json(self.body.object_name, choices, usage=self.usage))

    async def pieces(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        options, name = self.body.stream_options, self.body.piece_name
        extra = {"usage": None} if options and options.include_usage else {}

        def sent(body: dict[str, Any]) -> str:
            return f"data: {json.dumps(body)}\n\n"

        try:
            if isinstance(self.body, ChatRequest):
                for index in range(len(self.texts)):
                    yield sent(self._json(name, [self.body.opening(index)], **extra))
            async for part in self.parts():
                piece = self.body.piece(part.index, part.text, part.reason, self._logprobs(part))
                yield sent(self._json(name, [piece], **extra))
        except ApiError as error:  # the status has gone out already
            yield sent(error.body)
        else:
            if extra:
                yield sent(self._json(name, [], usage=self.usage))
        yield "data: [DONE]\n\n"

    def give_up(self) -> None:
        """Nobody waits any more: what is still open of this answer is over."""
        self.fates.end_all(Fate.SHUTDOWN if self.submission.cut_short else Fate.CLIENT_GONE)
        self.submission.close()


class Stream(StreamingResponse):
    """An answer as a stream, which is given up when the stream ends, however it ends: also before its first piece."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.pieces(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.give_up()


async def unless_gone(request: Request, answer: Answer) -> Response:
    """The whole answer, unless its client hangs up first; then the requests are given up."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = _task(answer.whole()), _task(hung_up())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=CLIENT_GONE)
    finally:
        for task in (work, gone):
            task.cancel()
        answer.give_up()


def _task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(work)
