"""The log: kind, count, elements and bytes of each collective that a rank takes part in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

from utils.distributed import calls

#: The kinds of entries, in the order in which a report lists them.
KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)


@dataclass(frozen=True)
class Entry:
    """One collective, or one message.

    Attributes:
        sequence: Number of the entry in its log, from 0.
        kind: One of ``KINDS``.
        elements: Elements of the message, which is the *full* tensor: what an all-reduce reduces, what an all-gather
            gives, what a reduce-scatter takes; 0 for a barrier.
        bytes: The message's bytes.
        dtype: The tensor's dtype: "float32", "bfloat16", ...
        group_size: Number of ranks that take part.
    """

    sequence: int
    kind: str
    elements: int
    bytes: int
    dtype: str
    group_size: int

    @property
    def share_sent(self) -> Fraction:
        """Part of the message that a rank sends when the collective is made of rings of N ranks.

        2 (N-1)/N for an all-reduce, which is a reduce-scatter and an all-gather of (N-1)/N each (Patarasuk and Yuan
        2009, section 3). The mean over the ranks where they differ: (N-1)/N for a broadcast or a reduce handed on from
        rank to rank (all but one send the whole tensor), (N-1)/N^2 for a gather or a scatter. 1 for a message sent, 0
        for one received and for a barrier.
        """
        n = self.group_size
        if self.kind == "all_reduce":
            return Fraction(2 * (n - 1), n)
        if self.kind in ("reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"):
            return Fraction(n - 1, n)
        if self.kind in ("gather", "scatter"):
            return Fraction(n - 1, n * n)
        return Fraction(1 if self.kind == "send" else 0)


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


@dataclass
class CollectiveLog:
    """What ``record_collectives`` saw, in order of call. Plain data: a rank may return it from ``launch``."""

    entries: list[Entry] = field(default_factory=list)

    def of(self, kind: str | None = None) -> list[Entry]:
        """The entries of one kind, or all of them.

        Raises:
            ValueError: There is no such kind.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"no kind of collective is called {kind!r}; there are {', '.join(KINDS)}")
        return [entry for entry in self.entries if kind is None or entry.kind == kind]

    def count(self, kind: str | None = None) -> int:
        """Number of calls."""
        return len(self.of(kind))

    def elements(self, kind: str | None = None) -> int:
        """Elements of all messages, each counted as the full tensor."""
        return sum(entry.elements for entry in self.of(kind))

    def bytes(self, kind: str | None = None) -> int:
        """Bytes of all messages, each counted as the full tensor."""
        return sum(entry.bytes for entry in self.of(kind))

    def volume(self, kind: str | None = None) -> int | float:
        """Elements that this rank sends when each collective is made of rings (``Entry.share_sent``).

        Exact; a float only where N does not divide.
        """
        return _number(sum((entry.elements * entry.share_sent for entry in self.of(kind)), Fraction(0)))

    def sent_bytes(self, kind: str | None = None) -> int | float:
        """Bytes that this rank sends when each collective is made of rings (``Entry.share_sent``)."""
        return _number(sum((entry.bytes * entry.share_sent for entry in self.of(kind)), Fraction(0)))

    def report(self) -> str:
        """A table with one line a kind, and the total."""
        kinds = [kind for kind in KINDS if self.count(kind)]
        rows = [("collective", "calls", "elements", "bytes", "bytes sent")]
        for kind in [*kinds, None] if len(kinds) > 1 else kinds:
            figures = (self.count(kind), self.elements(kind), self.bytes(kind), self.sent_bytes(kind))
            written = (f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" for value in figures)
            rows.append((kind or "together", *written))
        if not kinds:
            return "no collective was called"
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))
            lines.append("   ".join([row[0].ljust(widths[0]), *cells]))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()


@contextmanager
def record_collectives() -> Iterator[CollectiveLog]:
    """Record every collective that this process calls in the block, on whatever thread.

    It counts what is really called: the functions of ``torch.distributed`` with ``isend`` and ``batch_isend_irecv``,
    functional collectives, hooks that run in the backward pass, and what PyTorch's own ``DistributedDataParallel`` and
    ``fully_shard`` call from C++ or Python. An asynchronous one is counted when it is called. What a backend does
    inside one collective (its ring or tree) is not counted: ``CollectiveLog.volume`` gives the ring's.

    ::

        with record_collectives() as log:
            loss.backward()
        print(log.report())
    """
    log = CollectiveLog()
    lock = threading.Lock()

    def note(call: calls.Call) -> None:
        with lock:
            number = len(log.entries)
            log.entries.append(Entry(number, call.kind, call.elements, call.bytes, call.dtype, len(call.members)))

    with calls.listen(note):
        yield log
