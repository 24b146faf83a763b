"""A ring of tiles in shared memory, handed from a producer to consumers through mbarriers: phases, parities, waits.

A :class:`Barrier` counts what Hopper's barriers in shared memory count, and :func:`run_ring` plays the loops of a
kernel on it: one producer that has TMA fill stages, and consumers that read them. It says who waited how
long, and stops with an error where a GPU would hang or read a tile that is not there.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from utils.simt.memory import _positive


class RingError(RuntimeError):
    """The ring stands still for ever, or somebody touched a tile that belongs to another."""


@dataclass
class Barrier:
    """An mbarrier. Its phase is complete when ``arrivals`` have arrived and all expected bytes have landed.

    Attributes:
        arrivals: arrivals that complete a phase.
        completed: phases completed so far; the current phase has parity ``completed & 1``.
        pending: arrivals that the current phase still waits for.
        missing: bytes that it still waits for.
    """

    arrivals: int
    completed: int = 0
    pending: int = field(init=False)
    missing: int = 0

    def __post_init__(self) -> None:
        _positive(arrivals=self.arrivals)
        self.pending = self.arrivals

    @property
    def parity(self) -> int:
        """Parity of the current phase, 0 for a fresh barrier."""
        return self.completed & 1

    def passes(self, parity: int) -> bool:
        """Whether a wait with ``parity`` goes through: the phase of that parity is over, the current one is not it.

        A fresh barrier lets parity 1 pass, as if a phase before the first had been completed.
        """
        if parity not in (0, 1):
            raise ValueError(f"a parity is 0 or 1, got {parity!r}")
        return parity != self.parity

    def expect(self, size: int) -> None:
        """Arrive, and announce ``size`` bytes that TMA will write."""
        self.missing += size
        self.arrive()

    def landed(self, size: int) -> None:
        """TMA has written ``size`` bytes."""
        self.missing -= size
        self._maybe_flip()

    def arrive(self) -> None:
        """Arrive once.

        Raises:
            RingError: more arrive in a phase than the barrier was made for.
        """
        if self.pending == 0:
            raise RingError(f"more than {self.arrivals} arrivals in phase {self.completed} of a barrier")
        self.pending -= 1
        self._maybe_flip()

    def _maybe_flip(self) -> None:
        if self.pending == 0 and self.missing == 0:
            self.completed += 1
            self.pending = self.arrivals


class Stage(NamedTuple):
    """One stage at one moment: the tile in it (None before the first), whether it is being filled, who reads it, and
    (phases completed, arrivals still missing) of its two barriers."""

    tile: int | None
    filling: bool
    readers: tuple[int, ...]
    full: tuple[int, int]
    empty: tuple[int, int]


class Frame(NamedTuple):
    """The ring at one moment, and what producer and consumers do or wait for, in words, the producer first."""

    time: int
    stages: tuple[Stage, ...]
    doing: tuple[str, ...]


class Work(NamedTuple):
    """What an actor did from ``start`` to ``end``: ``kind`` is "copy", "read" or "wait"."""

    actor: str
    kind: str
    tile: int
    start: int
    end: int


@dataclass(frozen=True)
class RingRun:
    """A run: its moments, what everybody did when, and when it ended, in ticks."""

    frames: tuple[Frame, ...]
    work: tuple[Work, ...]
    end: int

    def waited(self, actor: str) -> int:
        """Ticks that "producer" or "consumer 0", "consumer 1"... stood at a barrier."""
        return sum(w.end - w.start for w in self.work if w.actor == actor and w.kind == "wait")


_BYTES = 1  # of a tile: the barrier only asks whether they are there
#: An actor yields what it wants next: (kind, stage, parity or ticks, tile).
Actor = Generator[tuple[str, int, int, int], None, None]


class _Ring:
    def __init__(self, stages: int, consumers: int) -> None:
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(consumers) for _ in range(stages)]
        self.tile: list[int | None] = [None] * stages
        self.filling = [False] * stages
        self.readers: list[set[int]] = [set() for _ in range(stages)]
        self.flying: list[tuple[int, int]] = []  # (when it lands, stage)

    def ask(self, tile: int, stage: int, lands: int) -> None:
        """TMA begins to fill a stage."""
        if self.readers[stage] or self.filling[stage]:
            when = "while it is being read" if self.readers[stage] else "before it has arrived"
            raise RingError(f"tile {tile} overwrites tile {self.tile[stage]} in stage {stage} {when}")
        self.tile[stage], self.filling[stage] = tile, True
        self.full[stage].expect(_BYTES)
        self.flying.append((lands, stage))

    def land(self, now: int) -> None:
        """Tiles that arrive at ``now``."""
        for when, stage in [each for each in self.flying if each[0] == now]:
            self.flying.remove((when, stage))
            self.filling[stage] = False
            self.full[stage].landed(_BYTES)

    def read(self, consumer: int, tile: int, stage: int) -> None:
        """A consumer begins to read a stage."""
        if self.tile[stage] != tile or self.filling[stage]:
            found = "a tile that is still on its way" if self.filling[stage] else f"tile {self.tile[stage]}"
            raise RingError(f"consumer {consumer} reads stage {stage} for tile {tile} and finds {found}")
        self.readers[stage].add(consumer)

    def look(self) -> tuple[Stage, ...]:
        """Every stage as it is now."""
        states = [[(each.completed, each.pending) for each in kind] for kind in (self.full, self.empty)]
        readers = [tuple(sorted(each)) for each in self.readers]
        return tuple(map(Stage, self.tile, self.filling, readers, *states))


def run_ring(
    tiles: int, stages: int, *, consumers: int = 2, copy: int = 3, read: tuple[int, ...] | int = 2,
    first_parity: int = 1, wait_for_empty: bool = True,
) -> RingRun:  # fmt: skip
    """Play a ring: the producer's loop and the consumers' as a Hopper kernel has them.

    Of tile i, stage ``s = i % stages`` and round ``r = i // stages``: the producer waits for ``empty[s]`` with parity
    ``(r & 1) ^ 1``, then asks for the copy; a consumer waits for ``full[s]`` with parity ``r & 1``, reads, and arrives
    at ``empty[s]``.

    Args:
        tiles: tiles that pass through the ring.
        stages: places in the ring.
        consumers: readers of every tile.
        copy: ticks from asking for a tile until it is there; copies overlap.
        read: ticks that a consumer works on a tile; one figure, or one for each consumer.
        first_parity: what the producer waits for in round 0; 0 is the classic mistake.
        wait_for_empty: whether it waits at all; False is the other one.

    Raises:
        TypeError, ValueError: a size that is not a positive integer.
        RingError: the ring hangs (the text says who waits for what), or a tile is read or overwritten too early.
    """
    _positive(tiles=tiles, stages=stages, consumers=consumers, copy=copy)
    pace = (read,) * consumers if isinstance(read, int) else tuple(read)
    if len(pace) != consumers:
        raise ValueError(f"read must be one figure or one for each of {consumers} consumers, got {read!r}")
    for each in pace:
        _positive(read=each)
    ring, clock = _Ring(stages, consumers), [0]

    def producer() -> Actor:
        for i in range(tiles):
            s, parity = i % stages, ((i // stages) & 1) ^ first_parity
            if wait_for_empty:
                yield "empty", s, parity, i
            ring.ask(i, s, clock[0] + copy)
            yield "ask", s, 1, i

    def consumer(c: int) -> Actor:
        for i in range(tiles):
            s, parity = i % stages, (i // stages) & 1
            yield "full", s, parity, i
            ring.read(c, i, s)
            yield "read", s, pace[c], i
            ring.readers[s].discard(c)
            ring.empty[s].arrive()

    names = ["producer", *(f"consumer {c}" for c in range(consumers))]
    return _play(ring, clock, dict(zip(names, [producer(), *(consumer(c) for c in range(consumers))])))


def _play(ring: _Ring, clock: list[int], actors: dict[str, Actor]) -> RingRun:
    """Advance the clock tick by tick until every actor is done."""
    wants: dict[str, tuple[str, int, int, int] | None] = {name: next(actor) for name, actor in actors.items()}
    since = dict.fromkeys(actors, 0)
    frames: list[Frame] = []
    work: list[Work] = []
    while True:
        now = clock[0]
        ring.land(now)
        moved = True
        while moved:  # a barrier that flips may let others go on in the same tick
            moved = False
            for name, actor in actors.items():
                want = wants[name]
                if want is None or not _ready(ring, want, now - since[name]):
                    continue
                kind, _stage, _, tile = want
                if now > since[name]:
                    label = {"ask": "copy", "read": "read"}.get(kind, "wait")
                    work.append(Work(name, label, tile, since[name], now))
                wants[name], since[name], moved = next(actor, None), now, True
        frame = Frame(now, ring.look(), tuple(_words(want) for want in wants.values()))
        if not frames or frame[1:] != frames[-1][1:]:
            frames.append(frame)
        if all(want is None for want in wants.values()):
            return RingRun(tuple(frames), tuple(work), now)
        timed = any(want is not None and want[0] in ("ask", "read") for want in wants.values())
        if not timed and not ring.flying:
            stuck = "; ".join(f"{name} {_words(want)}" for name, want in wants.items() if want is not None)
            raise RingError(f"nobody can go on at tick {now}: {stuck}")
        clock[0] += 1


def _ready(ring: _Ring, want: tuple[str, int, int, int], passed: int) -> bool:
    kind, stage, value, _ = want
    if kind in ("full", "empty"):
        return getattr(ring, kind)[stage].passes(value)
    return passed >= value


def _words(want: tuple[str, int, int, int] | None) -> str:
    if want is None:
        return "done"
    kind, stage, value, tile = want
    if kind in ("full", "empty"):
        return f"waits for {kind}[{stage}], parity {value}"
    return f"asks for tile {tile}" if kind == "ask" else f"works on tile {tile}"
