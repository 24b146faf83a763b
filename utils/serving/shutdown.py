"""Running a server, and stopping it so that everybody who waits is answered or told.

On SIGTERM or SIGINT (Ctrl-C) the server goes through four steps, each of bounded time:

1. new requests are refused with 503 and ``Retry-After``; ``/health`` says 503 too, so a load balancer goes elsewhere;
2. requests under way may finish, for ``drain_seconds``;
3. those that have not finished are told: 503, or an error as the last piece of a stream;
4. the connections are closed and the process ends with status 0.

All of it takes at most ``drain_seconds`` and 20 s more: an engine that hangs is waited for 5 s, an engine's process has
10 s to end before it is killed, and a client that does not read its answer has 5 s. A second signal ends it at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

#: Seconds for the engine to end its step, and then for answers to reach their clients.
STOP_SECONDS, CLOSE_SECONDS = 5.0, 5


class DrainingServer(uvicorn.Server):
    """A server that stops as this module says.

    Args:
        app: of :func:`utils.serving.server.create_app`.
        drain_seconds: for requests under way to finish.
        settings: of :class:`uvicorn.Config`.
    """

    def __init__(self, app: FastAPI, drain_seconds: float, **settings: Any) -> None:
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=CLOSE_SECONDS, **settings))
        self._worker, self._drain_seconds = app.state.worker, drain_seconds
        self._closing: threading.Thread | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What a signal calls."""
        if self._closing is None:
            self.close()
        else:
            self.should_exit = self.force_exit = True

    def close(self) -> None:
        """Begin to stop; does not wait. The signal's handler may not wait, so a thread does."""
        self._closing = threading.Thread(target=self._drain, name="shutdown", daemon=True)
        self._closing.start()

    def _drain(self) -> None:
        try:
            self._worker.drain(self._drain_seconds)
            self._worker.stop(STOP_SECONDS)
        finally:
            self.should_exit = True


def run(app: FastAPI, *, host: str = "127.0.0.1", port: int = 8000, drain_seconds: float = 20.0) -> None:
    """Serve an application until a signal stops it."""
    DrainingServer(app, drain_seconds, host=host, port=port, log_level="warning").run()


@contextlib.contextmanager
def serving(
    app: FastAPI, *, host: str = "127.0.0.1", port: int = 0, timeout: float = 30.0, drain_seconds: float = 5.0
) -> Iterator[str]:
    """Serve an application from a thread; gives its address, ``http://host:port``, and stops it at the end.

    Args:
        port: 0 takes a free one.
        timeout: for the start, and for the end after the requests are over, in seconds.
        drain_seconds: for requests that are under way at the end.

    Raises:
        RuntimeError: the server did not start, within ``timeout`` seconds or at all.
    """
    server = DrainingServer(app, drain_seconds, host=host, port=port, log_level="error")
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
        server.close()
        thread.join(drain_seconds + timeout)
