"""Every error of the server in the form of OpenAI's: statuses, bodies, and a limit to what is read."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from utils.serving import openai_api as api

#: Seconds after which a client that was refused may try again.
RETRY_AFTER = 1
#: Status of an answer that nobody waits for any more (nginx's word for it: client closed request).
CLIENT_GONE = 499


class ApiError(Exception):
    """An answer that is an error: its status and OpenAI's error body."""

    def __init__(self, status: int, message: str, kind: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.body = status, api.error_body(message, kind, param=param, code=code)


def add_error_handlers(app: FastAPI) -> None:
    """Make an application answer what goes wrong with an error body."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER)} if error.status in (429, 503) else None
        return JSONResponse(error.body, error.status, headers)

    @app.exception_handler(ValidationError)
    async def invalid(request: Request, error: ValidationError) -> JSONResponse:
        first = error.errors(include_url=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        if first["type"] == "json_invalid":
            return JSONResponse(api.error_body("the body is no valid JSON", "invalid_request_error"), 400)
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "this option is not known to this server"
        param = place[0] if place else None
        if param is not None:
            message = f"{param}: {message}"
        return JSONResponse(api.error_body(message, "invalid_request_error", param=param), 400)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(api.error_body(message, "invalid_request_error"), error.status_code)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(api.error_body(f"{type(error).__name__}: {error}", "server_error"), 500)


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request, of at most ``limit`` bytes.

    Raises:
        ApiError: it is longer, or announced to be.
    """
    refused = ApiError(413, f"the request is longer than {limit:,} bytes", "invalid_request_error")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise refused
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise refused
    return bytes(body)
