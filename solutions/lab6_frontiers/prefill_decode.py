"""Prefill and decode in separate processes, with the keys and values handed over through shared memory.

::

    with PrefillDecode(MODELS / "target") as server:
        print(server.generate([[1, 2, 3]], SamplingParams(max_new_tokens=20)))

A request goes from the front end to a prefill worker, which computes its prompt and first token and leaves the prompt's
keys and values in a slot; then to a decode worker, which copies them into its own pool and computes all other tokens.
Slots are made once, in memory that has no name in the file system: it is gone with the last process that holds it,
however the processes end.
"""

from __future__ import annotations

import atexit
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from solutions.lab5_serving.memory import default_num_blocks
from utils.serving import Decoder, Generation, ModelConfig, SamplingParams
from utils.serving.engine_process import EngineDied, PlainOutput
from utils.serving.generate import check_prompt
from utils.serving.replay import StepEntry

from .handover_engines import Job, slot_shape
from .handover_worker import Event, WorkerProcess

#: Workers that may die while they have a request before it is given up: it may be what kills them.
MOST_DEATHS = 3


@dataclass(eq=False)
class _Entry:
    """A request as the front end knows it."""

    id: str
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    deaths: int = 0


@dataclass(eq=False)
class _Attempt:
    """A request at a worker, under an id of its own; ``entry`` is None once the client has gone."""

    entry: _Entry | None
    worker: WorkerProcess
    slot: int | None


class PrefillDecode:
    """The front end: takes requests and gives tokens, as an engine does.

    When a worker dies, it is started anew. Each of its requests goes back to a prefill worker with the tokens that it
    has got: they are computed together with the prompt, as after a preemption, and the text goes on behind them.
    A request that has been at ``MOST_DEATHS`` workers that died ends with the reason "error".

    Args:
        folder: a Hugging Face folder.
        prefill, decode: how many workers of each kind.
        num_slots: prompts that can be on their way from a prefill worker's pool to a decode worker's.
        dtype: of weights, caches and slots.
        num_blocks, block_size, max_batch: of each worker's engine. None: as many blocks as 256 MiB hold, at most enough
            for ``max_batch`` of the longest requests.
        threads: of the CPU, for each worker.
        settings: other settings of the engines.

    Attributes:
        workers: the processes, each with ``role`` and ``pid``.
        restarts: workers that died and were started anew.

    Raises:
        ValueError: a number below 1.
        RuntimeError: a worker did not start.
    """

    history: Sequence[StepEntry] = ()  # stays with the workers

    def __init__(
        self,
        folder: str | Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        num_slots: int = 8,
        dtype: torch.dtype = torch.float32,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch: int = 32,
        threads: int = 1,
        **settings: Any,
    ) -> None:
        sizes = {"prefill": prefill, "decode": decode, "num_slots": num_slots, "threads": threads}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
        config = ModelConfig.from_folder(folder)
        with torch.device("meta"):
            self._model = Decoder(config)  # without weights: what a prompt is checked against
        num_blocks = num_blocks or default_num_blocks(self._model.to(dtype), block_size, max_batch)
        self._room = num_blocks * block_size
        engine = {"num_blocks": num_blocks, "block_size": block_size, "max_batch": max_batch, "threads": threads}
        self._slots = torch.zeros((num_slots, *slot_shape(config)), dtype=dtype).share_memory_()
        self._made_of = Path(folder), self._slots, engine | settings
        self._free = list(range(num_slots))
        self._waiting: deque[_Entry] = deque()
        self._handed_over: deque[tuple[_Entry, int]] = deque()  # with the slot, for a decode worker
        self._entries: dict[str, _Entry] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._commands: list[tuple[WorkerProcess, tuple[Any, ...]]] = []
        self._reports: list[PlainOutput] = []
        self._numbers, self._broken, self.restarts = itertools.count(), "", 0
        self.workers = [WorkerProcess(role, *self._made_of) for role in ["prefill"] * prefill + ["decode"] * decode]
        atexit.register(self.close)
        while not all(worker.ready for worker in self.workers) and not self._broken:
            self._listen()
        if self._broken:
            self.close()
            raise RuntimeError(self._broken)

    def __enter__(self) -> PrefillDecode:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- requests ------------------------------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, *, id: str | None = None) -> str:
        """Queue a request and return its id, a new one if none is given.

        Raises:
            ValueError: an id in use, or a prompt that can never be served.
            EngineDied: the workers are gone.
        """
        if self._broken:
            raise EngineDied(self._broken)
        params = params or SamplingParams()
        if id in self._entries:
            raise ValueError(f"request {id!r} is not finished yet; give the new one another id")
        while id is None or id in self._entries:
            id = f"request-{next(self._numbers)}"
        prompt = check_prompt(self._model, prompt)
        limit = min(len(prompt) + params.max_new_tokens, self._model.config.max_seq_len)
        if limit - 1 > self._room:
            raise ValueError(f"request {id!r} may grow to {limit} tokens, a worker's pool holds {self._room}")
        self._entries[id] = entry = _Entry(id, prompt, params)
        self._waiting.append(entry)
        return id

    def abort(self, id: str) -> bool:
        """Give a request up, wherever it is; the next step reports it. False if there is no such request."""
        entry = self._entries.get(id)
        if entry is None:
            return False
        self._over(entry, (), "abort")
        if entry in self._waiting:
            self._waiting.remove(entry)
        for handed_over in [each for each in self._handed_over if each[0] is entry]:
            self._handed_over.remove(handed_over)
            self._free.append(handed_over[1])
        for attempt_id, attempt in self._attempts.items():
            if attempt.entry is entry:
                attempt.entry = None  # its slot is free when the worker says that it is done with it
                self._commands.append((attempt.worker, ("abort", attempt_id)))
        return True

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._entries or self._reports)

    @property
    def slots_in_use(self) -> int:
        """Slots that hold a prompt on its way, or are kept for one."""
        return len(self._slots) - len(self._free)

    def step(self) -> list[PlainOutput]:
        """Wait until a worker says something, and return what is new; at once if something is to be reported."""
        self._dispatch()
        if self._entries and not self._reports:
            self._listen()
            self._dispatch()
        outputs, self._reports = self._reports, []
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """Serve some prompts to their end, with parameters for all or one each, when nothing else is being served.

        Raises:
            ValueError: as :meth:`add`; then none of them is served.
            RuntimeError: requests are being served already, or one failed.
        """
        if self.has_work:
            raise RuntimeError("generate serves requests when there are no others; use add and step beside them")
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        ids: list[str] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                ids.append(self.add(prompt, own))
        except Exception:
            for id in ids:
                self.abort(id)
            self._reports.clear()
            raise
        tokens: dict[str, list[int]] = {id: [] for id in ids}
        reasons: dict[str, str] = {}
        while self.has_work:
            for output in self.step():
                tokens[output.id] += output.new_tokens
                if output.finished:
                    reasons[output.id] = output.finish_reason
                if output.error is not None:
                    for id in ids:
                        self.abort(id)
                    self._reports.clear()
                    raise RuntimeError(f"request {output.id!r} failed: {output.error}")
        return [Generation(tokens[id], reasons[id]) for id in ids]

    def close(self) -> None:
        """End all workers, whatever they are doing, and wait for them; requests under way get the reason "abort"."""
        atexit.unregister(self.close)
        for worker in self.workers:
            worker.connection.close()  # all at once, so that they end at the same time
        for worker in self.workers:
            worker.ended()
        self.workers = []
        self._broken = self._broken or "the workers have been closed"
        for entry in list(self._entries.values()):
            self._over(entry, (), "abort")
        self._attempts.clear()

    # ---- workers -------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send what waits to workers that are ready; each prompt takes a slot along, and leaves it when copied."""
        batches: dict[WorkerProcess, list[tuple[Any, ...]]] = {}
        for worker, command in self._commands:
            batches.setdefault(worker, []).append(command)
        self._commands = []
        while self._handed_over and (worker := self._least("decode")):
            entry, slot = self._handed_over.popleft()
            batches.setdefault(worker, []).append(self._start(entry, worker, slot))
        while self._waiting and self._free and (worker := self._least("prefill")):
            batches.setdefault(worker, []).append(self._start(self._waiting.popleft(), worker, self._free.pop()))
        for worker, commands in batches.items():
            worker.send(commands)

    def _least(self, role: str) -> WorkerProcess | None:
        """The worker of a role with the fewest requests, if one is ready."""
        ready = [worker for worker in self.workers if worker.role == role and worker.ready]
        return min(ready, key=lambda worker: worker.jobs, default=None)

    def _start(self, entry: _Entry, worker: WorkerProcess, slot: int) -> tuple[Any, ...]:
        attempt_id = f"{entry.id} ({next(self._numbers)})"
        self._attempts[attempt_id] = _Attempt(entry, worker, slot)
        worker.jobs += 1
        return "start", Job(attempt_id, entry.prompt, list(entry.output), entry.params), slot

    def _listen(self) -> None:
        """Wait for workers, and note what they say."""
        known = {worker.connection: worker for worker in self.workers}
        for one in connection.wait(list(known)):
            try:
                events = one.recv()
            except (EOFError, OSError):
                self._died(known[one])
                continue
            for event in events:
                if event.kind == "ready":
                    known[one].ready = True
                elif event.kind == "copied":
                    self._leave_slot(self._attempts[event.id])
                else:
                    self._note(event)

    def _note(self, event: Event) -> None:
        attempt = self._attempts[event.id]
        entry, handover = attempt.entry, event.reason == "handover"
        if entry is not None:
            entry.output += event.tokens
        if event.reason is not None:
            del self._attempts[event.id]
            attempt.worker.jobs -= 1
            if entry is not None and handover:
                self._handed_over.append((entry, attempt.slot))
            else:
                self._leave_slot(attempt)
        if entry is None:
            return
        if event.reason is None or handover:
            self._reports.append(PlainOutput(entry.id, list(event.tokens), False, None, None, []))
        else:
            self._over(entry, event.tokens, event.reason, event.error)

    def _leave_slot(self, attempt: _Attempt) -> None:
        if attempt.slot is not None:
            self._free.append(attempt.slot)
            attempt.slot = None

    def _over(self, entry: _Entry, tokens: Sequence[int], reason: str, error: str | None = None) -> None:
        del self._entries[entry.id]
        self._reports.append(PlainOutput(entry.id, list(tokens), True, reason, error, []))

    def _died(self, worker: WorkerProcess) -> None:
        """A worker is gone: another takes its place, and its requests are prefilled again, or told if they may not."""
        how = f"a {worker.role} worker has died ({worker.ended()})"
        lost = {id: attempt for id, attempt in self._attempts.items() if attempt.worker is worker}
        for id, attempt in reversed(lost.items()):
            del self._attempts[id]
            self._leave_slot(attempt)
            if (entry := attempt.entry) is not None:
                entry.deaths += 1
                if entry.deaths < MOST_DEATHS:
                    self._waiting.appendleft(entry)
                else:
                    self._over(
                        entry, (), "error", f"{how}; workers that had this request: {entry.deaths} died, given up"
                    )
        self._commands = [command for command in self._commands if command[0] is not worker]
        place = self.workers.index(worker)
        if worker.ready:
            self.restarts += 1
            self.workers[place] = WorkerProcess(worker.role, *self._made_of)
            return
        del self.workers[place]  # it never started, nor would another one
        if not any(other.role == worker.role for other in self.workers):
            self._broken = f"{how} before it was ready, and there is no other"
            for entry in list(self._entries.values()):
                self._over(entry, (), "error", self._broken)
