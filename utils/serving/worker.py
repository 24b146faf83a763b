"""An engine in a thread of its own, so that an asyncio server can wait for its tokens without stopping it.

The engine is touched by that one thread only. Whoever wants something of it leaves a command; between two steps the
thread carries the commands out, steps, and hands what came out to the event loops that wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from utils.serving.generate import SamplingParams
from utils.serving.logprobs import TokenScore
from utils.serving.replay import ServingEngine

#: Prompts, and how each one's tokens are to be chosen.
Requests = Sequence[tuple[Sequence[int], SamplingParams]]
#: Steps that may fail one after another before the engine is given up.
MOST_FAILURES = 3


class Busy(RuntimeError):
    """The queue is full; the client may retry later."""


class Unavailable(RuntimeError):
    """The engine is not running: it has not been started, is shutting down, or is broken.

    An engine that raises this itself is not asked again: it is gone, and with it all that it was working on.
    """


@dataclass(frozen=True)
class Event:
    """What a step brought one request: new tokens; at the end the reason, and for "error" what was wrong.

    ``logprobs``: the tokens' scores, if the request asked for them.
    """

    tokens: list[int]
    finished: bool
    reason: str | None = None
    error: str | None = None
    logprobs: list[TokenScore] = field(default_factory=list)


class Submission:
    """Requests that were handed in together; their events come in one stream, numbered in the order of the requests."""

    def __init__(self, worker: EngineWorker, ids: Sequence[str]) -> None:
        self.ids = list(ids)
        self.open = set(range(len(ids)))
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Each request's events, until all requests are over."""
        while self.open:
            index, event = await self._queue.get()
            if index in self.open:
                if event.finished:
                    self.open.discard(index)
                yield index, event

    @property
    def cut_short(self) -> bool:
        """Whether the server is past waiting for these requests."""
        return self._worker.stopping

    def close(self, index: int | None = None) -> None:
        """Give up one request, or all that are still open. Nothing more is heard of them."""
        gone = sorted(self.open) if index is None else [i for i in (index,) if i in self.open]
        self.open.difference_update(gone)
        self._worker.abort([self.ids[i] for i in gone])


class EngineWorker:
    """Runs an engine.

    Args:
        engine: of this worker alone from now on.
        max_pending: requests that may be on their way to the engine while it is within a step; more are refused.
    """

    def __init__(self, engine: ServingEngine, *, max_pending: int = 256) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending must be at least 1, got {max_pending}")
        self.engine, self.max_pending = engine, max_pending
        self.stats: dict[str, Any] = {}
        self.broken: str | None = None
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._pending = 0
        self._listeners: dict[str, tuple[Submission, int]] = {}  # touched by the engine's thread only
        self._thread: threading.Thread | None = None
        self._draining = self._stopping = False
        self._failures = 0
        self._numbers = itertools.count()

    # ---- called from anywhere ------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether requests are taken."""
        return self.status == "ok"

    @property
    def stopping(self) -> bool:
        """Whether requests under way are not waited for any more."""
        return self._stopping

    @property
    def status(self) -> str:
        """ "ok", or why no requests are taken."""
        if self.broken is not None:
            return self.broken
        if self._draining or self._stopping:
            return "the server is shutting down"
        if self._thread is None or not self._thread.is_alive():
            return "the engine is not running"
        return "ok" if getattr(self.engine, "alive", True) else "the engine is gone"

    def start(self) -> None:
        """Start the thread."""
        if self._thread is not None:
            raise RuntimeError("a worker is started once")
        self._note()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def drain(self, timeout: float) -> bool:
        """Take no more requests, and wait for those under way; whether all of them are over within ``timeout`` s."""
        with self._wake:
            self._draining = True
        limit = time.monotonic() + timeout
        while (busy := bool(self._listeners or self._pending)) and time.monotonic() < limit:
            time.sleep(0.01)
        return not busy

    def stop(self, timeout: float = 10.0) -> None:
        """End: requests that are under way end with the reason "abort". Waits ``timeout`` s for the step to end.

        An engine that hangs cannot be stopped, but whoever waits for it is told. An engine that has a ``close`` is
        closed: a process of its own ends.
        """
        with self._wake:
            first, self._stopping = not self._stopping, True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout if first else 0)  # it has had its time
            if self._thread.is_alive():
                self._end(None)
        if close := getattr(self.engine, "close", None):
            close()

    async def submit(self, requests: Requests) -> Submission:
        """Hand in requests, all of them or none.

        Raises:
            ValueError: one can never be served; the engine's own words.
            Busy: the engine's queue, or the way to it, is full.
            Unavailable: the engine does not run.
        """
        if not self.running:
            raise Unavailable(self.status)
        submission = Submission(self, [f"cmpl-{next(self._numbers)}" for _ in requests])
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[None] = loop.create_future()

        def answer(error: Exception | None) -> None:
            if accepted.cancelled():
                submission.close()  # whoever asked is gone already
            elif error is None:
                accepted.set_result(None)
            else:
                submission.open.clear()
                accepted.set_exception(error)

        def command() -> None:
            error = self._add(submission, requests)
            with self._wake:
                self._pending -= 1
            self._call(loop, lambda: answer(error))

        with self._wake:
            if self._stopping or self._draining:  # since the question above
                raise Unavailable(self.status)
            if self._pending >= self.max_pending:
                raise Busy(f"{self._pending} requests are on their way to the engine already")
            self._pending += 1
            self._commands.append(command)
            self._wake.notify()
        await accepted
        return submission

    def abort(self, ids: Sequence[str]) -> None:
        """Give requests up; those that are over already are no matter."""
        if not ids:
            return
        with self._wake:
            if not self._stopping:  # then nobody would carry out the command, and all requests are over
                self._commands.append(lambda: self._abort(ids))
                self._wake.notify()

    # ---- the engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                with self._wake:
                    while not (self._commands or self._stopping or self.engine.has_work):
                        self._wake.wait()
                    commands, self._commands = self._commands, deque()
                for command in commands:
                    command()
                if self.engine.has_work and not self._stopping:
                    self._step()
                self._note()
        except BaseException as error:
            self.broken = f"the engine stopped: {type(error).__name__}: {error}"
        finally:
            self._end(self.broken)

    def _note(self) -> None:
        stats = getattr(self.engine, "stats", None)
        self.stats = dict(stats()) if stats else {}

    def _add(
        self, submission: Submission, requests: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> Exception | None:
        added = []
        try:
            if self._stopping:
                raise Unavailable("the engine is shutting down")
            for id, (prompt, params) in zip(submission.ids, requests, strict=True):
                self.engine.add(prompt, params, id=id)
                added.append(id)
        except Exception as error:
            for id in added:
                self.engine.abort(id)
            if isinstance(error, (ValueError, Unavailable)):
                return error
            return Busy(str(error)) if isinstance(error, RuntimeError) else error
        self._listeners |= {id: (submission, index) for index, id in enumerate(submission.ids)}
        return None

    def _abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            if self._listeners.pop(id, None) is not None:
                self.engine.abort(id)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            # An engine reports what fails within a request. This is something else: nobody under way can be trusted.
            self._failures += 1
            self._fail_all(f"the engine failed: {type(error).__name__}: {error}")
            if self._failures == MOST_FAILURES or isinstance(error, Unavailable):
                raise
            return
        self._failures = 0
        self._hand_out(
            [
                (o.id, Event(list(o.new_tokens), o.finished, o.finish_reason, o.error, getattr(o, "logprobs", [])))
                for o in outputs
            ]
        )

    def _fail_all(self, message: str) -> None:
        ids = list(self._listeners)
        self._hand_out([(id, Event([], True, "error", message)) for id in ids])
        for id in ids:
            self.engine.abort(id)

    def _hand_out(self, events: Sequence[tuple[str, Event]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Submission, int, Event]]] = {}
        for id, event in events:
            known = self._listeners.pop(id, None) if event.finished else self._listeners.get(id)
            if known is not None:
                by_loop.setdefault(known[0]._loop, []).append((*known, event))
        for loop, parcel in by_loop.items():

            def deliver(parcel: list[tuple[Submission, int, Event]] = parcel) -> None:
                for submission, index, event in parcel:
                    submission._queue.put_nowait((index, event))

            self._call(loop, deliver)

    def _end(self, error: str | None) -> None:
        """Nobody is left waiting when the thread ends."""
        reason = "error" if error else "abort"
        message = error or "the server is shutting down"
        self._hand_out([(id, Event([], True, reason, message)) for id in list(self._listeners)])
        with self._wake:
            self._stopping, commands = True, self._commands
            self._commands = deque()
        for command in commands:
            command()  # additions are refused; aborts find nobody

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(function)
