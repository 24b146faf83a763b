"""Agents that are kept warm from one job to the next, so that only the first one pays for importing PyTorch."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

#: How long an agent waits for another job before it ends itself.
IDLE_SECONDS = 60.0

#: Modules that the server of ranks imports once, so that a rank need not.
_PRELOAD = ["torch.distributed.elastic.multiprocessing", "utils.distributed.worker"]
#: Optimizers import torch._dynamo at their first step, which takes a second a rank, and Triton with it.
_PRELOAD_TORCH = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
#: What only a machine without a GPU imports ahead: utils.runtime, which looks for one, and what imports it. A process
#: that has used CUDA cannot be forked.
_PRELOAD_CPU = ["utils.runtime", *_PRELOAD_TORCH, "utils.checks.ranks.distributed_check", "utils.gpt"]
_PROGRAM = "import gc; gc.disable(); from utils.distributed.agent import main; main({preload!r}, {idle_seconds})"


def _preload(gpus: int, environment: Mapping[str, str]) -> list[str]:
    """What the server of ranks imports on a machine with so many GPUs.

    Whether Triton compiles or interprets is decided when it is imported, and utils.runtime decides: where it cannot be
    imported ahead and would choose the interpreter, Triton cannot be either.
    """
    if not gpus:
        return [*_PRELOAD_CPU, *_PRELOAD]
    interprets = environment.get("MLF_DEVICE", "").strip().lower() == "cpu" or environment.get("TRITON_INTERPRET")
    return _PRELOAD if interprets else [*_PRELOAD_TORCH, *_PRELOAD]


class Agent:
    """A running ``utils.distributed.agent``, the leader of a process group with all that it starts."""

    def __init__(self) -> None:
        import torch

        preload = _preload(torch.cuda.device_count(), os.environ)
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._has_had_a_job = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by kill)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(preload=preload, idle_seconds=IDLE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, folder: Path) -> None:
        """Hand it a job."""
        self._has_had_a_job = True
        with contextlib.suppress(BrokenPipeError):  # then it is not alive, which the caller sees
            self._process.stdin.write(f"{folder}\n".encode())
            self._process.stdin.flush()

    def log(self) -> str:
        """The end of what it printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def kill(self) -> None:
        """End it, its server and its ranks, whatever state they are in, and wait until they are gone."""
        if self._log.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # it then ends all that it started
        if self._has_had_a_job:  # else it may still be importing
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(3)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


_idle: list[Agent] = []
_owner = os.getpid()
_keepers = 0
_lock = threading.Lock()


def start_ahead() -> None:
    """Start what the next job's ranks are forked from, unless it is warm: it imports PyTorch meanwhile."""
    _forget_others()
    if not _idle:
        give_back(Agent())


def take(folder: Path) -> Agent:
    """An agent, warm if there is one, that has accepted the job in ``folder``."""
    _forget_others()
    while True:
        with _lock:
            agent = _idle.pop() if _idle else None
        if agent is None:
            agent = Agent()
            agent.start(folder)
            return agent
        agent.start(folder)
        while agent.is_alive():  # it may have been about to end itself
            if (folder / "accepted").exists():
                return agent
            time.sleep(0.001)
        agent.kill()


def _forget_others() -> None:
    """Leave alone the agents of the process that this one is a fork of."""
    global _owner
    with _lock:
        if _owner != os.getpid():
            _idle.clear()
            _owner = os.getpid()


def give_back(agent: Agent) -> None:
    """Keep an agent that is ready for another job."""
    if agent.is_alive():
        with _lock:
            _idle.append(agent)


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Keep the launcher warm in the block even when a job fails, for many jobs that are to fail; end it after it.

    Without it, a job that fails leaves no process at all, and the next one has to import PyTorch again.
    """
    global _keepers
    with _lock:
        _keepers += 1
    try:
        yield
    finally:
        with _lock:
            _keepers -= 1
            last = _keepers == 0
        if last:
            shutdown()


def is_kept_warm() -> bool:
    """Whether a ``warm`` block is open."""
    return _keepers > 0


def shutdown() -> None:
    """End the processes that are kept warm for the next ``launch``; they also end by themselves after a minute."""
    while True:
        with _lock:
            if _owner != os.getpid() or not _idle:
                return
            agent = _idle.pop()
        agent.kill()


atexit.register(shutdown)
