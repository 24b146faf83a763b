"""An OpenAI-compatible server around an engine: ``/v1/completions``, ``/v1/models`` and ``/health``.

::

    app = create_app(engine, tokenizer, name="target")
    with serving(app) as url:                      # or: uvicorn.run(app, port=8000)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

This is the serving layer: it speaks HTTP, checks what is asked, turns text into tokens and back, and tells the engine,
which is the execution layer, who has gone. Scheduling and memory are the engine's business alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from utils.serving import openai_api as api
from utils.serving.http_errors import CLIENT_GONE, ApiError, add_error_handlers, read_body
from utils.serving.replay import ServingEngine
from utils.serving.tokenizer import Tokenizer
from utils.serving.worker import Busy, EngineWorker, Submission, Unavailable


def create_app(
    engine: ServingEngine,
    tokenizer: Tokenizer,
    *,
    name: str = "model",
    max_body_bytes: int = 1_000_000,
    max_pending: int = 256,
) -> FastAPI:
    """The server. The engine belongs to it from now on: its thread starts and stops with the application.

    Args:
        engine: with ``max_waiting`` set, or its queue has no end.
        tokenizer: of the engine's model.
        name: what clients call the model.
        max_body_bytes: longer requests are refused (413) and not read to their end.
        max_pending: requests on their way to the engine within one of its steps; more are refused (429).
    """
    worker = EngineWorker(engine, max_pending=max_pending)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(worker.stop)

    app = FastAPI(title="Making LLMs Fast", lifespan=lifespan)
    app.state.worker = worker
    started = int(time.time())
    card = {"id": name, "object": "model", "created": started, "owned_by": "making-llms-fast"}
    add_error_handlers(app)

    def known(model: str) -> None:
        if model != name:
            raise ApiError(
                404, f"the model {model!r} does not exist; this server has {name!r}", "invalid_request_error",
                param="model", code="model_not_found",
            )  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model}")
    async def one_model(model: str) -> dict[str, Any]:
        known(model)
        return card

    @app.get("/health")
    async def health() -> JSONResponse:
        status = "ok" if worker.running else worker.broken or "stopping"
        return JSONResponse({"status": status, "model": name, **worker.stats}, 200 if worker.running else 503)

    schema = {"application/json": {"schema": api.CompletionRequest.model_json_schema()}}

    @app.post("/v1/completions", openapi_extra={"requestBody": {"content": schema, "required": True}})
    async def completions(request: Request) -> Response:
        body = api.CompletionRequest.model_validate_json(await read_body(request, max_body_bytes))
        known(body.model)
        prompts = await asyncio.to_thread(body.prompts, tokenizer)
        submission = await _submitted(worker, [(p, own) for p in prompts for own in body.params()])
        answer = _Answer(body, submission, tokenizer, prompts)
        if body.stream:
            return _Stream(answer.pieces(), submission)
        return await _unless_gone(request, answer.whole(), submission)

    return app


async def _submitted(worker: EngineWorker, requests: list[Any]) -> Submission:
    """The requests, handed in; or the error that their client is told."""
    try:
        return await worker.submit(requests)
    except ValueError as error:
        raise ApiError(400, str(error), "invalid_request_error", param="prompt") from None
    except Busy as error:
        message = f"the server is full: {error}. Try again later."
        raise ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded") from None
    except Unavailable as error:
        raise ApiError(503, str(error), "service_unavailable") from None


class _Answer:
    """The choices of one HTTP request, from tokens to text."""

    def __init__(
        self, body: api.CompletionRequest, submission: Submission, tokenizer: Tokenizer, prompts: list[list[int]]
    ) -> None:
        self.body, self.submission = body, submission
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.prompt_tokens = sum(map(len, prompts))
        self.texts = [api.AnswerText(tokenizer, body.stops) for _ in submission.ids]

    async def choices(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """(choice, new text, finish reason or None), as they come.

        Raises:
            ApiError: a request failed, or the server shuts down.
        """
        async for index, event in self.submission.events():
            if event.reason == "error":
                raise ApiError(500, event.error or "the request failed", "server_error")
            if event.reason == "abort":
                raise ApiError(503, event.error or "the server is shutting down", "service_unavailable")
            text = self.texts[index]
            piece = text.push(event.tokens, last=event.finished)
            if text.stopped:
                self.submission.close(index, stopped=True)
                yield index, piece, "stop"
            elif piece or event.finished:
                yield index, piece, event.reason if event.finished else None

    @property
    def usage(self) -> dict[str, int]:
        return api.usage(self.prompt_tokens, sum(text.tokens for text in self.texts))

    async def whole(self) -> Response:
        """The answer in one piece."""
        pieces: list[list[str]] = [[] for _ in self.texts]
        reasons: list[str | None] = [None] * len(self.texts)
        async for index, piece, reason in self.choices():
            pieces[index].append(piece)
            reasons[index] = reason or reasons[index]
        choices = [api.choice(i, "".join(p), r) for i, (p, r) in enumerate(zip(pieces, reasons, strict=True))]
        return JSONResponse(api.completion(self.id, self.created, self.body.model, choices, self.usage))

    async def pieces(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        options = self.body.stream_options
        extra = {"usage": None} if options and options.include_usage else {}

        def sent(body: dict[str, Any]) -> str:
            return f"data: {json.dumps(body)}\n\n"

        try:
            async for index, piece, reason in self.choices():
                choices = [api.choice(index, piece, reason)]
                yield sent(api.completion(self.id, self.created, self.body.model, choices) | extra)
        except ApiError as error:  # the status has gone out already
            yield sent(error.body)
        else:
            if extra:
                yield sent(api.completion(self.id, self.created, self.body.model, [], self.usage))
        yield "data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """A stream that gives its requests up when it ends, however it ends: also before its first piece."""

    def __init__(self, pieces: AsyncIterator[str], submission: Submission) -> None:
        super().__init__(pieces, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._submission = submission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._submission.close()


async def _unless_gone(request: Request, answer: Any, submission: Submission) -> Response:
    """The answer, unless its client hangs up first; then the requests are given up."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, gone = asyncio.ensure_future(answer), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=CLIENT_GONE)
    finally:
        for task in (work, gone):
            task.cancel()
        submission.close()


@contextlib.contextmanager
def serving(app: FastAPI, *, host: str = "127.0.0.1", port: int = 0, timeout: float = 30.0) -> Iterator[str]:
    """Serve an application from a thread; gives its address, ``http://host:port``, and stops it at the end.

    Args:
        port: 0 takes a free one.

    Raises:
        RuntimeError: the server did not start, within ``timeout`` seconds or at all.
    """
    config = uvicorn.Config(app, host=host, port=port, log_level="error", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    limit = time.monotonic() + timeout
    while not server.started:
        if not thread.is_alive() or time.monotonic() > limit:
            server.should_exit = True
            raise RuntimeError(f"the server did not start on {host}:{port}")
        time.sleep(0.01)
    try:
        yield "http://{}:{}".format(*server.servers[0].sockets[0].getsockname()[:2])
    finally:
        server.should_exit = True
        thread.join(timeout)
