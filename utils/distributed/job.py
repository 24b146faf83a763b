"""One job seen from the caller: waits for the ranks, and finds out which one is at fault when it fails."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import time
from pathlib import Path
from typing import Any

from utils.distributed import faults
from utils.distributed.faults import DistributedError
from utils.distributed.output import Output
from utils.distributed.pool import Agent
from utils.distributed.watch import Watch, words

#: Seconds to wait, after a first sign of a fault, for signs of what caused it: a rank's own exception is its own fault,
#: but a broken connection may be there before the agent has told which rank died.
_SETTLE, _SETTLE_CONSEQUENCE, _SETTLE_DEAD = 0.5, 3.0, 2.0
#: Seconds that a rank may take to end its process after all have returned.
_LINGER = 5.0
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class Job:
    """The files of one job (``utils.distributed.worker`` writes them) and what they say."""

    def __init__(self, folder: Path, world_size: int, timeout: float, patience: float) -> None:
        self._folder, self._ranks = folder, range(world_size)
        self._timeout, self._patience = timeout, patience
        self._output, self._watch = Output(folder, world_size), Watch(folder, world_size)
        self._started = False
        self._pids: dict[int, int] = {}
        self._returned: dict[int, float] = {}  # rank -> when
        self._raised: dict[int, tuple[float, dict[str, Any]]] = {}  # rank -> when and what
        self._gone: dict[int, float] = {}  # rank that has ended otherwise -> when

    def wait(self, agent: Agent) -> list[Any]:
        """Wait for all ranks and return their results.

        Raises:
            DistributedError: The job failed.
        """
        deadline = time.monotonic() + self._timeout
        try:
            while not (self._folder / "done").exists() or len(self._returned) < len(self._ranks):
                self._look()
                if self._lingers():
                    agent.kill()
                    break
                fault = self._fault() or self._overdue(deadline)
                if fault is None and not agent.is_alive():
                    fault = DistributedError(f"the agent of the ranks ended:\n{agent.log()}", kind="launcher")
                if fault is None and self._launcher_failed():
                    text = "\n".join(self._output.errors(rank) for rank in self._ranks) + agent.log()
                    fault = DistributedError(f"the ranks could not be started:\n{text}", kind="launcher")
                if fault is not None:
                    raise fault
                self._output.show_rank_0()
                time.sleep(0.01)
            disagreement = self._watch.update(settle=0)  # a backend may get through it and give a wrong result
            if disagreement is not None:
                raise disagreement
            self._output.show_rest()
            return [pickle.loads((self._folder / f"result{rank}").read_bytes()) for rank in self._ranks]
        except DistributedError as error:
            self._output.show_rest(told=error.rank if error.kind in ("killed", "exit") else None)
            raise
        except BaseException:
            self._output.show_rest()
            raise

    def end(self, agent: Agent) -> bool:
        """Kill the ranks of a job that has failed; return whether the agent then is ready for another job."""
        if len(self._pids) < len(self._ranks):
            return False
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while agent.is_alive() and time.monotonic() < until:
            if self._exit_codes() is not None and not any(_runs(pid) for pid in self._pids.values()):
                return True
            time.sleep(0.01)
        return False

    def _look(self) -> None:
        """Take note of what the ranks have written."""
        now = time.monotonic()
        for rank in self._ranks:
            if rank in self._returned or rank in self._raised:
                continue
            if rank not in self._pids:
                with contextlib.suppress(FileNotFoundError):
                    self._pids[rank] = int((self._folder / f"pid{rank}").read_text())
            ended = rank in self._pids and not _runs(self._pids[rank])
            # in this order: a rank that has written its result may have ended since
            if (self._folder / f"result{rank}").exists():
                self._returned[rank] = now
            elif (self._folder / f"fault{rank}").exists():
                self._raised[rank] = now, pickle.loads((self._folder / f"fault{rank}").read_bytes())
            elif ended:
                self._gone.setdefault(rank, now)
        if not self._started and all((self._folder / f"ready{rank}").exists() for rank in self._ranks):
            self._started = True
            (self._folder / "start").touch()
        if len(self._returned) == len(self._ranks):
            (self._folder / "finish").touch()

    def _exit_codes(self) -> dict[int, int] | None:
        """What the agent says of the rank that failed; None while the job runs."""
        with contextlib.suppress(FileNotFoundError):
            return pickle.loads((self._folder / "done").read_bytes())
        return None

    def _launcher_failed(self) -> bool:
        nothing_else = not self._raised and not self._gone and not self._watch.is_settling()
        return nothing_else and (self._folder / "done").exists() and len(self._returned) < len(self._ranks)

    def _lingers(self) -> bool:
        """Whether all ranks have returned long ago and one does not end, for a thread of its own perhaps."""
        return len(self._returned) == len(self._ranks) and time.monotonic() - max(self._returned.values()) > _LINGER

    def _fault(self) -> DistributedError | None:
        now = time.monotonic()
        disagreement = self._watch.update()
        if disagreement is not None or self._watch.is_settling():
            return disagreement
        codes = self._exit_codes() or {}
        for rank, code in codes.items():
            if rank not in self._raised:
                return self._death(rank, code)
        if self._gone and now - min(self._gone.values()) > _SETTLE_DEAD:
            return self._death(min(self._gone, key=self._gone.__getitem__), None)
        if self._raised and not self._gone:
            own = [rank for rank, (_, fault) in self._raised.items() if not faults.is_consequence(fault)]
            first = min(self._raised[rank][0] for rank in own or self._raised)
            if own and (now - first > _SETTLE or len(self._raised) + len(self._returned) == len(self._ranks)):
                return self._exception(min(own))
            if not own and now - first > _SETTLE:
                return self._unanswered() or (self._gave_up() if now - first > _SETTLE_CONSEQUENCE else None)
        late = self._watch.absent(now, self._patience, self._returned)
        if late is not None and not self._raised and not self._gone:
            return self._hanging(*late)
        return None

    def _death(self, rank: int, code: int | None) -> DistributedError:
        kind, text = ("exit", "left its process without returning") if code is None else faults.ending(code)
        if code == 0:
            text = "left its process without returning from the function"
        errors = self._output.errors(rank)
        if kind == "killed" and "Watchdog caught collective operation timeout" in errors:
            kind = "timeout"
        last = self._watch.last.get(rank)
        text = f"rank {rank} of {len(self._ranks)} {text}"
        text += f"\n  the last that it called was {words(last)}" if last else ""
        return DistributedError(text + (f"\n{errors}" if errors else ""), rank=rank, kind=kind, traceback=errors)

    def _exception(self, rank: int) -> DistributedError:
        fault = self._raised[rank][1]
        same = [other for other, (_, its) in self._raised.items() if (its["type"], its["text"]) == _what(fault)]
        text = f": {fault['text']}" if fault["text"] else ""
        exception = pickle.loads(fault["exception"]) if fault["exception"] else None
        kind = "port" if "EADDRINUSE" in fault["text"] or "Address already in use" in fault["text"] else "exception"
        return DistributedError(
            f"{faults.name(same)} of {len(self._ranks)} raised {fault['type']}{text}\n\n{fault['traceback']}",
            rank=rank,
            kind=kind,
            traceback=fault["traceback"],
            exception=exception,
        )

    def _first_raised(self) -> int:
        return min(self._raised, key=lambda rank: self._raised[rank][0])

    def _unanswered(self) -> DistributedError | None:
        """A rank waited too long for a message."""
        rank = self._first_raised()
        told = self._watch.unanswered(rank) if faults.is_timeout(self._raised[rank][1]) else None
        return None if told is None else self._hanging([told[0]], told[1])

    def _gave_up(self) -> DistributedError:
        """A backend gave up, and no rank has died or raised anything of its own."""
        return self._exception(self._first_raised())

    def _hanging(self, missing: list[int], text: str) -> DistributedError:
        stack = "\n".join(self._stack(rank) for rank in missing if rank not in self._returned)
        text = f"{text}\n  waited {self._patience:g} s for it" if stack else text
        return DistributedError(
            "\n".join(filter(None, [text, stack])), rank=min(missing), kind="timeout", traceback=stack
        )

    def _overdue(self, deadline: float) -> DistributedError | None:
        if time.monotonic() < deadline:
            return None
        running = [rank for rank in self._ranks if rank not in self._returned]
        text = f"{faults.name(running)} of {len(self._ranks)} did not return within {self._timeout:g} s"
        stack = "\n".join(self._stack(rank) for rank in running)
        return DistributedError(f"{text}\n{stack}", rank=min(running), kind="timeout", traceback=stack)

    def _stack(self, rank: int) -> str:
        """Where a running rank is: its main thread's stack, innermost first."""
        path = self._folder / f"stack{rank}"
        if not path.exists():
            return f"  rank {rank} has not started"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[rank], signal.SIGUSR1)
        until = time.monotonic() + 1
        while time.monotonic() < until and "worker.py" not in path.read_text():
            time.sleep(0.02)
        time.sleep(0.02)
        thread = path.read_text().split("hread 0x")[-1]  # the main thread comes last
        frames = []
        for file, line, function in _FRAME.findall(thread):
            if file.endswith("distributed/worker.py"):
                break
            frames.append(f"    {file}:{line} in {function}")
        return "\n".join([f"  rank {rank} is at", *frames]) if frames else f"  rank {rank} does not answer (stopped?)"


def _what(fault: dict[str, Any]) -> tuple[str, str]:
    return fault["type"], fault["text"]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
