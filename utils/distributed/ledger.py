"""A ledger of the collectives that a rank takes part in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

from utils.distributed import calls


@dataclass(frozen=True)
class Entry:
    """One collective: ``elements`` and ``bytes`` are those of the full tensor (of all ranks' shards together)."""

    sequence: int
    kind: str
    elements: int
    bytes: int
    dtype: str
    group_size: int

    def share_sent(self) -> Fraction:
        """Part of the full tensor that one rank sends by the ring algorithm."""
        n = self.group_size
        if self.kind == "all_reduce":
            return Fraction(2 * (n - 1), n)
        if self.kind in ("reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"):
            return Fraction(n - 1, n)
        if self.kind in ("gather", "scatter"):
            return Fraction(n - 1, n * n)
        return Fraction(1) if self.kind == "send" else Fraction(0)


@dataclass
class Ledger:
    """Every collective called in a ``record_collectives`` block, in order."""

    entries: list[Entry] = field(default_factory=list)

    def _of(self, kind: str | None) -> list[Entry]:
        return [entry for entry in self.entries if kind is None or entry.kind == kind]

    def count(self, kind: str | None = None) -> int:
        return len(self._of(kind))

    def elements(self, kind: str | None = None) -> int:
        return sum(entry.elements for entry in self._of(kind))

    def bytes(self, kind: str | None = None) -> int:
        return sum(entry.bytes for entry in self._of(kind))

    def volume(self, kind: str | None = None) -> int | float:
        """Elements a rank sends by the ring algorithm."""
        total = sum((e.elements * e.share_sent() for e in self._of(kind)), Fraction(0))
        return int(total) if total.denominator == 1 else float(total)

    def sent_bytes(self, kind: str | None = None) -> int | float:
        """Bytes a rank sends by the ring algorithm."""
        total = sum((e.bytes * e.share_sent() for e in self._of(kind)), Fraction(0))
        return int(total) if total.denominator == 1 else float(total)

    def report(self) -> str:
        lines = [f"{'collective':<16}{'calls':>7}{'elements':>16}{'bytes':>16}{'bytes sent':>16}"]
        for kind in Counter(e.kind for e in self.entries):
            lines.append(
                f"{kind:<16}{self.count(kind):>7,}{self.elements(kind):>16,}{self.bytes(kind):>16,}"
                f"{self.sent_bytes(kind):>16,}"
            )
        return "\n".join(lines)


@contextmanager
def record_collectives() -> Iterator[Ledger]:
    """Record every collective that this process calls in the block."""
    ledger = Ledger()

    def note(call: calls.Call) -> None:
        ledger.entries.append(
            Entry(len(ledger.entries), call.kind, call.elements, call.bytes, call.dtype, call.group_size)
        )

    with calls.listen(note):
        yield ledger
