"""An engine in a process of its own, behind the interface that every engine has.

What this buys a server: the engine's Python does not compete with HTTP's for one interpreter, and a process that dies,
by the system's memory killer or by a fault of the GPU, takes no server with it. Then every call here raises
:class:`EngineDied`; :class:`utils.serving.worker.EngineWorker` tells it to everyone who waits. The other way round, the
process ends by itself when its server is gone, since it then reads the end of its pipe.

Each call is one message and one answer, so the engine is asked between two steps only, as in a thread.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from utils.serving.generate import SamplingParams
from utils.serving.logprobs import TokenScore
from utils.serving.replay import Output, ServingEngine, StepEntry
from utils.serving.worker import Unavailable

#: Seconds that a process is given to end by itself.
END_SECONDS = 5.0


class EngineDied(Unavailable):
    """The engine's process is gone; the message says how."""


class PlainOutput(NamedTuple):
    """What a step says of a request, in plain values that can be sent."""

    id: str
    new_tokens: list[int]
    finished: bool
    finish_reason: str | None
    error: str | None
    logprobs: list[TokenScore]


class _Reply(NamedTuple):
    result: Any
    error: tuple[type[Exception], str] | None
    has_work: bool
    stats: dict[str, Any]


class EngineProcess:
    """An engine that ``make`` makes in another process, which starts at once and loads its model there.

    Args:
        make: a function of a module, or a ``functools.partial`` of one: it is sent to the process by name.

    Attributes:
        pid: the process's number.
        serves_logprobs: as the engine's.

    Raises:
        RuntimeError: the engine could not be made; in its own words.
    """

    history: Sequence[StepEntry] = ()  # stays with the engine

    def __init__(self, make: Callable[[], ServingEngine]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks and a GPU's context
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, make), name="engine", daemon=True)
        self._lock, self._dead = threading.Lock(), ""
        self._has_work, self._stats = False, {}
        self._process.start()
        atexit.register(self.close)  # before multiprocessing waits for its processes, and this one waits for a call
        theirs.close()  # or the pipe would not end with the process
        self.pid = self._process.pid
        try:
            self.serves_logprobs = self._receive()
        except Exception as error:
            self.close()
            raise RuntimeError(f"the engine did not start: {error}") from None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return not self._dead and self._process.is_alive()

    @property
    def has_work(self) -> bool:
        """As the engine's; also when it has died, so that a step is tried and its death noticed."""
        return self._has_work or bool(self._dead)

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, *, id: str | None = None) -> str:
        """As the engine's; its ValueError and RuntimeError come as such."""
        return self._call("add", list(prompt), params, id=id)

    def abort(self, id: str) -> bool:
        """As the engine's; False if it has died."""
        try:
            return self._call("abort", id)
        except EngineDied:
            return False

    def step(self) -> list[PlainOutput]:
        """As the engine's."""
        return self._call("step")

    def stats(self) -> dict[str, Any]:
        """The engine's counts after the last call."""
        return self._stats

    def close(self) -> None:
        """End the process, whatever it is doing, and wait for it."""
        atexit.unregister(self.close)
        if self._lock.acquire(timeout=END_SECONDS):  # nobody waits for an answer
            self._connection.close()
            self._dead = self._dead or "the engine has been closed"
            self._lock.release()
            self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()  # who waits for an answer reads the end of the pipe
            self._process.join()

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            if self._dead:
                raise EngineDied(self._dead)
            try:
                self._connection.send((name, arguments, options))
            except OSError:
                raise self._died() from None
            return self._receive()

    def _receive(self) -> Any:
        try:
            reply: _Reply = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        self._has_work, self._stats = reply.has_work, reply.stats
        if reply.error is not None:
            kind, message = reply.error
            raise kind(message)
        return reply.result

    def _died(self) -> EngineDied:
        self._process.join(END_SECONDS)
        code = self._process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        self._dead = f"the engine's process has died ({how})"
        return EngineDied(self._dead)


def _run(connection: Connection, make: Callable[[], ServingEngine]) -> None:
    """The process: make the engine, then answer calls until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the server decides when the engine ends
        signal.signal(number, signal.SIG_IGN)
    try:
        engine = make()
    except Exception as error:
        connection.send(_Reply(None, _told(error), False, {}))
        return
    stats = getattr(engine, "stats", dict)
    connection.send(_Reply(getattr(engine, "serves_logprobs", False), None, engine.has_work, stats()))
    while True:
        try:
            name, arguments, options = connection.recv()
        except (EOFError, OSError):
            return
        result, error = None, None
        try:
            result = getattr(engine, name)(*arguments, **options)
            if name == "step":
                result = [_plain(output) for output in result]
        except Exception as raised:
            error = _told(raised)
        try:
            connection.send(_Reply(result, error, engine.has_work, stats()))
        except OSError:
            return


def _plain(output: Output) -> PlainOutput:
    scores = getattr(output, "logprobs", [])
    return PlainOutput(output.id, list(output.new_tokens), output.finished, output.finish_reason, output.error, scores)


def _told(error: Exception) -> tuple[type[Exception], str]:
    """An error that can be sent: of the two kinds that have a meaning here, or any other, which the text names."""
    for kind in (ValueError, RuntimeError):
        if isinstance(error, kind):
            return kind, str(error)
    return Exception, f"{type(error).__name__}: {error}"
