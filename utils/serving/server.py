"""An OpenAI-compatible server around an engine: completions, chat completions, models, health and metrics.

::

    app = create_app(engine, tokenizer, name="target")
    with serving(app) as url:                      # or: utils.serving.shutdown.run(app, host="127.0.0.1", port=8000)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

This is the serving layer: it speaks HTTP, checks what is asked, turns text into tokens and back, and tells the engine,
which is the execution layer, who has gone. Scheduling and memory are the engine's business alone.

=========================  ==========================================================================================
``/v1/completions``        text or tokens in, text out; ``n``, ``logprobs``, ``stop``, ``stream``
``/v1/chat/completions``   messages in, through the model's chat template or the course's plain one
``/v1/models``             the one model that is served, and whose chat template
``/health``                200 while requests are taken, otherwise 503 and why; how requests ended, what the engine does
``/metrics``               the same and latencies, for Prometheus
=========================  ==========================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from utils.serving import openai_api as api
from utils.serving import prometheus
from utils.serving.answers import Answer, Stream, unless_gone
from utils.serving.chat_template import ChatTemplate, plain_template
from utils.serving.fates import Fate, Fates, Ledger
from utils.serving.http_errors import ApiError, add_error_handlers, read_body
from utils.serving.openai_chat import ChatRequest
from utils.serving.replay import ServingEngine
from utils.serving.shutdown import serving
from utils.serving.tokenizer import Tokenizer
from utils.serving.worker import Busy, EngineWorker, Unavailable

__all__ = ["create_app", "serving"]


def create_app(
    engine: ServingEngine,
    tokenizer: Tokenizer,
    *,
    name: str = "model",
    chat_template: ChatTemplate | None = None,
    max_body_bytes: int = 1_000_000,
    max_pending: int = 256,
) -> FastAPI:
    """The server. The engine belongs to it from now on: its thread starts and stops with the application.

    Args:
        engine: with ``max_waiting`` set, or its queue has no end. Log probabilities are served if its attribute
            ``serves_logprobs`` is true.
        tokenizer: of the engine's model.
        name: what clients call the model.
        chat_template: of the model; None: it has none, and chats are put into the course's plain one.
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
    server = _Server(worker, tokenizer, name, chat_template or plain_template())
    app.state.worker, app.state.ledger = worker, server.ledger
    add_error_handlers(app)
    _add_reports(app, server, "model" if chat_template else "plain")

    async def completions(request: Request) -> Response:
        return await server.answer(request, api.CompletionRequest, max_body_bytes)

    async def chat(request: Request) -> Response:
        return await server.answer(request, ChatRequest, max_body_bytes)

    app.post("/v1/completions", openapi_extra=_schema(api.CompletionRequest))(completions)
    app.post("/v1/chat/completions", openapi_extra=_schema(ChatRequest))(chat)
    return app


class _Server:
    """What the routes share."""

    def __init__(self, worker: EngineWorker, tokenizer: Tokenizer, name: str, template: ChatTemplate) -> None:
        self.worker, self.tokenizer, self.name, self.template = worker, tokenizer, name, template
        self.ledger = Ledger()

    def check_name(self, model: str) -> None:
        """ApiError if this is not the model that is served."""
        if model != self.name:
            raise ApiError(
                404, f"the model {model!r} does not exist; this server has {self.name!r}", "invalid_request_error",
                param="model", code="model_not_found",
            )  # fmt: skip

    async def answer(self, request: Request, kind: type[api.Options], max_body_bytes: int) -> Response:
        """The answer to a body of this kind, whole or as a stream."""
        with _counted(self.ledger, self.worker) as fates:
            body = kind.model_validate_json(await read_body(request, max_body_bytes))
            self.check_name(body.model)
            if body.scored is not None and not getattr(self.worker.engine, "serves_logprobs", False):
                raise _invalid("logprobs is not supported by this server's engine; leave it out", "logprobs")
            answer = await self._submitted(body, fates)
            return Stream(answer) if body.stream else await unless_gone(request, answer)

    async def _submitted(self, body: api.Options, fates: Fates) -> Answer:
        """The answer to come of the requests, which are handed in; or the error that their client is told."""
        try:
            prompts = await asyncio.to_thread(body.prompts, self.tokenizer, self.template)
            requests = [(prompt, params) for prompt in prompts for params in body.params()]
            fates.split(len(requests))
            submission = await self.worker.submit(requests)
        except ValueError as error:
            raise _invalid(str(error), body.input_name) from None
        except Busy as error:
            message = f"the server is full: {error}. Try again later."
            raise ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded") from None
        except Unavailable as error:
            raise ApiError(503, str(error), "service_unavailable") from None
        prompt_tokens = sum(map(len, prompts))
        self.ledger.prompt_tokens.add(prompt_tokens)
        return Answer(body, submission, self.tokenizer, prompt_tokens, body.ends(self.template), fates)


def _add_reports(app: FastAPI, server: _Server, template: str) -> None:
    """The routes that say what there is and how it goes."""
    worker, ledger = server.worker, server.ledger
    card = {"id": server.name, "object": "model", "created": int(time.time()), "owned_by": "making-llms-fast"}
    card["chat_template"] = template

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model}")
    async def one_model(model: str) -> dict[str, Any]:
        server.check_name(model)
        return card

    @app.get("/health")
    async def health() -> JSONResponse:
        body = {"status": worker.status, "model": server.name, **worker.stats, **_ends(ledger)}
        return JSONResponse(body, 200 if worker.running else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(ledger.page(worker.stats), media_type=prometheus.CONTENT_TYPE)


def _schema(body: type[api.Options]) -> dict[str, Any]:
    return {"requestBody": {"content": {"application/json": {"schema": body.model_json_schema()}}, "required": True}}


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, "invalid_request_error", param=param)


def _ends(ledger: Ledger) -> dict[str, int]:
    """How requests that the engine took have ended, by the four reasons that the engine itself knows.

    The engine knows no text: it is told to give up what a stop text ends, and would call that an abort.
    """
    count = ledger.ended.values
    return {
        "stop": count[Fate.END_TOKEN] + count[Fate.STOP_STRING],
        "length": count[Fate.LENGTH],
        "abort": count[Fate.CLIENT_GONE] + count[Fate.SHUTDOWN],
        "error": count[Fate.FAILED],
    }


@contextlib.contextmanager
def _counted(ledger: Ledger, worker: EngineWorker) -> Iterator[Fates]:
    """The fates of one HTTP request; where it goes no further than here, that is how its requests end."""
    fates = ledger.open()
    try:
        yield fates
    except ApiError as error:
        refused = {429: Fate.FULL, 503: Fate.UNAVAILABLE}
        fates.end_all(refused.get(error.status, Fate.INVALID if error.status < 500 else Fate.FAILED))
        raise
    except ValidationError:
        fates.end_all(Fate.INVALID)
        raise
    except (ClientDisconnect, asyncio.CancelledError):
        fates.end_all(Fate.SHUTDOWN if worker.stopping else Fate.CLIENT_GONE)
        raise
    except BaseException:
        fates.end_all(Fate.FAILED)
        raise
