"""What went wrong on which rank."""

from __future__ import annotations


class DistributedError(RuntimeError):
    """A job of several ranks that failed.

    Attributes:
        rank: The rank at fault, or None if the fault is not one rank's.
        kind: "exception", "killed", "timeout", "port", "world_size", "launcher".
        traceback: The failing rank's traceback, or "".
    """

    def __init__(self, message: str, *, rank: int | None = None, kind: str = "exception", traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.kind, self.traceback = rank, kind, traceback
