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


class StepEntry(Protocol):
    """What an engine notes of a step: the chunks that went through the model, one a request, and its KV blocks."""

    chunks: Sequence[Any]
    used: int
    free: int


class ServingEngine(Protocol):
    """What a client needs of an engine.

    ``add`` raises ValueError for a request that can never be served, and RuntimeError when it can take none now;
    ``abort`` says whether there was such a request; ``history`` holds an entry for each of the last steps.
    """

    history: Sequence[StepEntry]

    @property
    def has_work(self) -> bool: ...

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, *, id: str | None = None) -> str: ...

    def abort(self, id: str) -> bool: ...

    def step(self) -> list[Output]: ...


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


def replay_workload(
    engine: ServingEngine,
    workload: Workload,
    *,
    step_seconds: Callable[[StepEntry], float] | None = None,
    progress: bool = True,
) -> Report:
    """Give an engine the requests of a workload at their times, step it until all are over, and report.

    Args:
        engine: with nothing to do yet; the places in its batch are ``engine.max_batch``, if it has that.
        workload: its ids are given to the engine.
        step_seconds: None plays in real time. Otherwise time is simulated: the seconds that a step takes, of its entry
            in ``engine.history``; ``lambda step: 1.0`` counts in iterations.
        progress: a bar of the requests that are over.

    Requests that the engine refuses are recorded with ``finish_reason == "error"`` and its message.

    Raises:
        RuntimeError: the engine says that it has work, and does none.
    """
    seen = {request.id: _Seen(request) for request in workload}
    coming = list(workload)[::-1]
    start, simulated, busy, steps, idle = time.perf_counter(), 0.0, 0.0, 0, 0
    slots = getattr(engine, "max_batch", None)
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
            before, known = now(), _last(engine)
            outputs = engine.step()
            entry = _last(engine)
            idle = 0 if outputs or (entry is not known and entry.chunks) else idle + 1
            if idle > 2:
                raise RuntimeError(f"the engine says it has work, but its steps do nothing (after {steps} steps)")
            if entry is known:  # it had only ends to report
                entry = None
            elif step_seconds:
                simulated += step_seconds(entry)
            after = now()
            if entry is not None:
                steps, busy = steps + 1, busy + after - before
                shares.append((after - before, _shares(entry, slots)))
            for output in outputs:
                client = seen[output.id]
                client.times += [after] * len(output.new_tokens)
                if output.finished:
                    client.over(after, output.finish_reason or "error", output.error)
                    bar.update()
    duration = max(client.end for client in seen.values())
    records = tuple(client.record() for client in seen.values())
    return Report(records, duration, steps, busy, _averages(shares))


def _last(engine: ServingEngine) -> StepEntry | None:
    """The newest entry of the engine's history."""
    return engine.history[-1] if engine.history else None


def _shares(step: StepEntry, slots: int | None) -> dict[str, float]:
    """Shares of the batch's places and of the KV blocks that a step used."""
    shares = {"slots": len(step.chunks) / slots} if slots else {}
    if step.used + step.free:
        shares["blocks"] = step.used / (step.used + step.free)
    return shares


def _averages(shares: Sequence[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """Means weighted by the seconds of the steps."""
    whole = sum(seconds for seconds, _ in shares)
    names = sorted({name for _, share in shares for name in share})
    return {name: sum(seconds * share.get(name, 0.0) for seconds, share in shares) / whole for name in names if whole}
