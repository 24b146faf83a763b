"""What went wrong, on which rank."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from typing import Any

#: What a rank that did nothing wrong raises when a peer is gone.
_CONSEQUENCES = re.compile(
    r"closed by peer|connection reset|connection refused|broken pipe|gloo.*(pair|rank)|read error|write error"
    r"|remote process exited|nccl.*(abort|remote)|process ?group.*abort|store.*(closed|shut)",
    re.IGNORECASE | re.DOTALL,
)
_TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


class DistributedError(RuntimeError):
    """A job of several ranks that failed; the message says which rank and why.

    Attributes:
        rank: The rank at fault; None where it is not one rank's fault.
        kind: "exception" (the function raised), "killed" (a signal ended the process), "exit" (it left its process
            without returning), "mismatch" (ranks called different collectives, or the same one with other sizes),
            "timeout" (a rank did not arrive at a collective, or the job did not end), "port" (it is in use),
            "world_size" (more ranks than the machine has room for) or "launcher" (the ranks could not be started).
        traceback: Traceback of the failing rank, or where it was when others waited for it; "" where there is none.
        exception: What the function raised, where it can be pickled; else None.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        kind: str = "exception",
        traceback: str = "",
        exception: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.kind, self.traceback, self.exception = rank, kind, traceback, exception

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (str(self), self.rank, self.kind, self.traceback, self.exception)


def _again(message: str, rank: int | None, kind: str, traceback: str, exception: BaseException | None):
    return DistributedError(message, rank=rank, kind=kind, traceback=traceback, exception=exception)


def is_consequence(fault: dict[str, Any]) -> bool:
    """Whether a rank's exception is what a rank raises when another one has gone away."""
    return bool(_CONSEQUENCES.search(fault["text"])) or is_timeout(fault)


def is_timeout(fault: dict[str, Any]) -> bool:
    """Whether a rank's exception says that the backend waited too long."""
    return fault["type"] in ("RuntimeError", "DistBackendError", "DistError") and bool(_TIMEOUT.search(fault["text"]))


def name(ranks: Iterable[int]) -> str:
    """``"rank 2"``, ``"ranks 0 and 1"``, ``"ranks 0, 1 and 3"``."""
    numbers = [str(rank) for rank in sorted(ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def ending(exit_code: int) -> tuple[str, str]:
    """How a process ended that did not return: kind and words for an exit code (negative: a signal)."""
    if exit_code >= 0:
        return "exit", f"left its process with exit code {exit_code} instead of returning from the function"
    try:
        word = signal.Signals(-exit_code).name
    except ValueError:
        word = f"signal {-exit_code}"
    reason = {
        "SIGKILL": ": someone killed it, or the system did because memory ran out",
        "SIGSEGV": ": it touched memory that is not its own, in compiled code",
        "SIGABRT": ": compiled code gave up",
    }.get(word, "")
    return "killed", f"was killed by {word}{reason}"
