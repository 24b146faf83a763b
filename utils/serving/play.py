"""Playing a workload against an engine, in real time or in simulated time, and writing down what each client sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tqdm import tqdm

from utils.serving.generate import SamplingParams
from utils.serving.metrics import Report, RequestRecord
from utils.serving.workload import TimedRequest, Workload


class Output(Protocol):
    """What a step says about one request: its new tokens, and whether and why it is over."""

    id: str
    new_tokens: list[int]
    finished: bool
    finish_reason: str | None
    error: str | None


class ServingEngine(Protocol):
    """What a client needs of an engine. ``add`` raises ValueError for a request that can never be served, and another
    exception when it is full; ``history`` holds one entry a step."""

    history: Sequence[Any]
    has_work: bool

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, id: str | None = None) -> str: ...

    def abort(self, id: str) -> None: ...

    def step(self) -> list[Any]: ...


class _Seen:
    """One request as its client sees it."""

    def __init__(self, request: TimedRequest) -> None:
        self.request = request
        self.times: list[float] = []
        self.reason, self.error, self.end = "", None, request.arrival

    def over(self, now: float, reason: str, error: str | None = None) -> None:
        self.reason, self.error, self.end = reason, error, now

    def record(self) -> RequestRecord:
        request = self.request
        return RequestRecord(
            request.id, request.arrival, len(request.prompt), tuple(self.times), self.reason, self.end, self.error
        )


def play(
    engine: ServingEngine,
    workload: Workload,
    *,
    step_seconds: Callable[[Any], float] | None = None,
    progress: bool = True,
) -> Report:
    """Give an engine the requests of a workload at their times, step it until all are over, and report.

    Args:
        engine: with nothing to do yet.
        workload: its ids are given to the engine.
        step_seconds: None plays in real time. Otherwise time is simulated: the seconds that a step takes, of its entry
            in ``engine.history``; ``lambda step: 1.0`` counts in iterations.
        progress: a bar of the requests that are over.

    Requests that the engine refuses are recorded with ``finish_reason == "error"`` and its message.

    Raises:
        RuntimeError: the engine has requests, but nothing to do.
    """
    seen = {request.id: _Seen(request) for request in workload}
    coming = list(workload)[::-1]
    start, simulated, busy, steps = time.perf_counter(), 0.0, 0.0, 0
    shares: list[tuple[float, dict[str, float]]] = []

    def now() -> float:
        return simulated if step_seconds else time.perf_counter() - start

    with tqdm(total=len(seen), disable=not progress, unit="request", smoothing=0.05) as bar:
        while coming or engine.has_work:
            while coming and coming[-1].arrival <= now():
                request = coming.pop()
                try:
                    engine.add(request.prompt, request.params, id=request.id)
                except Exception as error:
                    seen[request.id].over(now(), "error", f"{type(error).__name__}: {error}")
                    bar.update()
            if not engine.has_work:
                if coming and step_seconds:
                    simulated = max(simulated, coming[-1].arrival)
                elif coming:
                    time.sleep(max(0.0, coming[-1].arrival - now()))
                continue
            before, known = now(), len(engine.history)
            outputs = engine.step()
            if step_seconds and len(engine.history) > known:
                simulated += step_seconds(engine.history[-1])
            elif not outputs and len(engine.history) == known:
                raise RuntimeError(f"the engine says it has work, but a step did nothing (after {steps} steps)")
            after = now()
            steps, busy = steps + 1, busy + after - before
            shares.append((after - before, _shares(engine)))
            for output in outputs:
                client = seen[output.id]
                client.times += [after] * len(output.new_tokens)
                if output.finished:
                    client.over(after, output.finish_reason or "error", output.error)
                    bar.update()
    duration = max(client.end for client in seen.values())
    records = tuple(client.record() for client in seen.values())
    return Report(records, duration, steps, busy, _averages(shares))


def _shares(engine: ServingEngine) -> dict[str, float]:
    """Shares of the batch's slots and of the KV blocks that the last step used, where the engine says so."""
    if not engine.history:
        return {}
    step, shares = engine.history[-1], {}
    batch, most = getattr(step, "batch", None), getattr(engine, "max_batch", None)
    if batch is not None and most:
        shares["slots"] = batch / most
    used, free = getattr(step, "used", None), getattr(step, "free", None)
    if used is not None and free is not None and used + free:
        shares["blocks"] = used / (used + free)
    return shares


def _averages(shares: Sequence[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """Means weighted by the seconds of the steps."""
    whole = sum(seconds for seconds, _ in shares)
    names = sorted({name for _, share in shares for name in share})
    return {name: sum(seconds * share.get(name, 0.0) for seconds, share in shares) / whole for name in names if whole}
