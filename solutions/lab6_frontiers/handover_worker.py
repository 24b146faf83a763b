"""A prefill or decode worker: an engine of :mod:`.handover_engines` in a process of its own.

The front end sends a worker lists of commands, and gets lists of events back, one list per step of the engine. Slots
lie in memory that all processes share, so only their numbers are sent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # so that a tensor in shared memory is sent as its file descriptor
from torch import Tensor

from utils import runtime
from utils.serving import load_model
from utils.serving.engine_process import END_SECONDS

from .handover_engines import DecodeEngine, Job, PrefillEngine

ENGINES = {"prefill": PrefillEngine, "decode": DecodeEngine}


class Event(NamedTuple):
    """What a worker says: of the request of a job, by the job's id, or of itself.

    ``kind``: "ready": the engine is there (``id`` is empty). "copied": the slot is free. "tokens": ``tokens`` have been
    chosen, and with a ``reason`` the request is over: "handover" for a prefill worker, otherwise as an engine has it.
    """

    kind: str
    id: str = ""
    tokens: tuple[int, ...] = ()
    reason: str | None = None
    error: str | None = None


class WorkerProcess:
    """A worker's process as the front end holds it; it starts at once, and is ``ready`` when it says so.

    Args:
        role: "prefill" or "decode".
        folder, slots, settings: see :func:`_run`.
    """

    def __init__(self, role: str, folder: Path, slots: Tensor, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.role, self.ready, self.jobs = role, False, 0
        self.connection, theirs = context.Pipe()
        arguments = (theirs, role, folder, slots, settings)
        self._process = context.Process(target=_run, args=arguments, name=f"{role} worker", daemon=True)
        self._process.start()
        theirs.close()  # or the pipe would not end with the process
        self.pid = self._process.pid

    def send(self, commands: list[tuple[Any, ...]]) -> None:
        """Send commands: ("start", job, number of its slot) or ("abort", id)."""
        with contextlib.suppress(OSError):  # it has died; the end of its pipe says so when it is read
            self.connection.send(commands)

    def ended(self) -> str:
        """Wait for the end of a process that has closed its pipe; how it ended."""
        self.connection.close()
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _run(connection: Connection, role: str, folder: Path, slots: Tensor, settings: dict[str, Any]) -> None:
    """The process: load the model, then obey commands and step the engine until the pipe ends.

    Args:
        folder: of the model.
        slots: (slots, 2, L, G, N, D) in shared memory.
        settings: of the engine, and ``threads``, the CPU's threads.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the front end decides when workers end
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(settings.pop("threads"))
    model = load_model(folder, dtype=slots.dtype).to(runtime.DEVICE)
    engine = ENGINES[role](model, history=1, **settings)
    try:
        connection.send([Event("ready")])
        while True:
            while connection.poll(0 if engine.has_work else None):
                for command in connection.recv():
                    _obey(engine, command, slots)
            if events := _advance(engine):
                connection.send(events)
    except (EOFError, OSError):
        return  # the front end is gone


def _obey(engine: PrefillEngine | DecodeEngine, command: tuple[Any, ...], slots: Tensor) -> None:
    if command[0] == "abort":
        engine.abort(command[1])
        return
    job: Job = command[1]
    start = engine.prefill if isinstance(engine, PrefillEngine) else engine.take_over
    start(job, slots[command[2]])


def _advance(engine: PrefillEngine | DecodeEngine) -> list[Event]:
    """One step of the engine."""
    copied = engine.copy_slots() if isinstance(engine, DecodeEngine) else []
    outputs = engine.step()
    return [Event("copied", id) for id in copied] + [
        Event("tokens", output.id, tuple(output.new_tokens), output.finish_reason, output.error) for output in outputs
    ]
