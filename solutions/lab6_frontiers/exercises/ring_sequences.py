"""The sequences of exercise 6.6, attention over them, and what mistakes make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.checks.core import classic


@dataclass(frozen=True)
class Zigzag:
    """One sequence in zig-zag: its sizes, how it is masked, and what is special about it.

    ``kind`` is "usual"; "far", where scores are far from zero, and of another magnitude on each rank; or "strided",
    where the tensors of a rank are views.
    """

    seed: int
    tokens: int
    causal: bool = True
    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    dim: int = 8
    dtype: torch.dtype = torch.float32
    kind: str = "usual"

    def __str__(self) -> str:
        sizes = f"{self.tokens} tokens, B={self.batch} H={self.heads} G={self.key_heads} D={self.dim}"
        words = [sizes, "causal" if self.causal else "no mask", str(self.dtype).removeprefix("torch.")]
        return ", ".join(words + ([self.kind] if self.kind != "usual" else []))

    def positions(self, ranks: int) -> list[Tensor]:
        """Which tokens of the sequence each rank has."""
        parts = torch.arange(self.tokens).tensor_split(2 * ranks)
        return [torch.cat((parts[r], parts[2 * ranks - 1 - r])) for r in range(ranks)]

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the whole sequence."""
        source = torch.Generator().manual_seed(self.seed + self.tokens)
        heads = self.heads, self.key_heads, self.key_heads
        q, k, v = (torch.randn(self.batch, n, self.tokens, self.dim, generator=source) for n in heads)
        if self.kind == "far":
            q, k = 2 + 0.1 * q, k + torch.linspace(-40, 40, self.tokens)[:, None]
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)

    def part(self, rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a rank."""
        mine = self.positions(ranks)[rank]
        q, k, v = (x[:, :, mine] for x in self.whole())
        if self.kind == "strided":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def right(self, rank: int, ranks: int) -> Tensor:
        """(B, H, n, D) float64: attention of a rank's queries over the whole sequence."""
        mine, every = self.positions(ranks)[rank], torch.arange(self.tokens)
        q, k, v = self._wide()
        scores = q[:, :, mine] @ k.mT / self.dim**0.5
        if self.causal:
            scores = scores.masked_fill(mine[:, None] < every, -torch.inf)
        return scores.softmax(-1) @ v

    def _wide(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.double() for x in self.whole())
        return q, *(x.repeat_interleave(self.heads // self.key_heads, 1) for x in (k, v))

    def pairs(self, rank: int, ranks: int) -> int:
        """Pairs of a query and a key that a rank need not leave out: its own part whole, of others what it sees."""
        lengths = [len(found) for found in self.positions(ranks)]
        every = [(lengths[rank], length) for length in lengths]
        if self.causal:
            every = [_seen(rank, r, lengths, lengths[r]) for r in range(ranks) if r != rank]
            every = [(int(seen.any(1).sum()), int(seen.any(0).sum())) for seen in every] + [(lengths[rank],) * 2]
        return sum(queries * keys for queries, keys in every)

    def taken(self, rank: int, ranks: int, reading: Reading) -> tuple[Tensor, Tensor]:
        """What a rank has, (B, H, n, D) float64, if it takes the ring that way; and (n,) whether a query saw a key."""
        positions = self.positions(ranks)
        lengths = [len(found) for found in positions]
        q, k, v = self._wide()
        k, v = (v, k) if reading.exchanged else (k, v)
        met = []
        for source, taken_for in reading.parts(rank, ranks):
            scores = q[:, :, positions[rank]] @ k[:, :, positions[source]].mT / self.dim**0.5
            if self.causal:
                scores = scores.masked_fill(~reading.sees(rank, taken_for, lengths, lengths[source]), -torch.inf)
            lse = scores.logsumexp(-1)
            met.append((torch.exp(scores - lse[..., None]).nan_to_num() @ v[:, :, positions[source]], lse))
        o, lse = (torch.stack(each) for each in zip(*met, strict=True))
        return reading.merge(o, lse), lse.isfinite().any(0)[0, 0]


# ---- how an answer may take a ring
def front(length: int) -> int:
    """Tokens of a rank's front."""
    return (length + 1) // 2


def _seen(rank: int, source: int, lengths: Sequence[int], keys: int) -> Tensor:
    """(queries of ``rank``, ``keys`` of ``source``): which pairs count in zig-zag."""
    seen = torch.zeros(lengths[rank], keys, dtype=torch.bool)
    if source == rank:
        return ~seen.logical_not().triu(1)
    if source < rank:
        seen[:, : front(lengths[source])] = True
    else:
        seen[front(lengths[rank]) :] = True
    return seen


def _round(rank: int, ranks: int) -> list[tuple[int, int]]:
    """The parts of a ring in the order in which they come: whose they are, and whose they are taken for."""
    return [((rank - step) % ranks, (rank - step) % ranks) for step in range(ranks)]


def _by_weight(o: Tensor, lse: Tensor) -> Tensor:
    return (lse.softmax(0).nan_to_num()[..., None] * o).sum(0)


def _last(o: Tensor, lse: Tensor) -> Tensor:
    """Of each query what the last part gave in which it saw a key."""
    found = o[0]
    for more, more_lse in zip(o[1:], lse[1:], strict=True):
        found = torch.where(more_lse.isfinite()[..., None], more, found)
    return found


@dataclass(frozen=True)
class Reading:
    """How an answer may take a ring.

    Attributes:
        parts: (rank, ranks) -> of each step whose keys and values it computes with, and whose it takes them for.
        sees: (rank, source, lengths, keys) -> (queries, keys) which pairs count.
        exchanged: whether keys are taken for values, and values for keys.
        merge: (parts, B, H, n, D) outputs and (parts, B, H, n) logsumexps -> the output.
    """

    parts: Callable[[int, int], list[tuple[int, int]]] = _round
    sees: Callable[[int, int, Sequence[int], int], Tensor] = _seen
    exchanged: bool = False
    merge: Callable[[Tensor, Tensor], Tensor] = _by_weight


def _with(**others: Callable[[Tensor, int, int, Sequence[int]], object]) -> Reading:
    """Zig-zag but for parts that are one's ``own``, ``earlier`` or ``later``: what fills their (queries, keys)."""

    def sees(rank: int, source: int, lengths: Sequence[int], keys: int) -> Tensor:
        relation = "own" if source == rank else "earlier" if source < rank else "later"
        if relation not in others:
            return _seen(rank, source, lengths, keys)
        seen = torch.zeros(lengths[rank], keys, dtype=torch.bool)
        others[relation](seen, rank, source, lengths)
        return seen

    return Reading(sees=sees)


def _all(seen: Tensor, *_: object) -> None:
    seen[:] = True


def _none(seen: Tensor, *_: object) -> None:
    seen[:] = False


def _diagonal(seen: Tensor, *_: object) -> None:
    seen[:] = torch.ones_like(seen).tril()


def _front_diagonal(seen: Tensor, rank: int, source: int, lengths: Sequence[int]) -> None:
    _diagonal(seen[:, : front(lengths[source])])


def _back_diagonal(seen: Tensor, rank: int, source: int, lengths: Sequence[int]) -> None:
    _diagonal(seen[front(lengths[rank]) :])


def _keys(which: Callable[[int, int, Sequence[int]], slice]) -> Callable[..., None]:
    def fill(seen: Tensor, *about: object) -> None:
        seen[:, which(*about)] = True

    return fill


def _queries(which: Callable[[int, int, Sequence[int]], slice]) -> Callable[..., None]:
    def fill(seen: Tensor, *about: object) -> None:
        seen[which(*about)] = True

    return fill


def _steps(*changes: Callable[[list[tuple[int, int]], int], list[tuple[int, int]]]) -> Reading:
    def parts(rank: int, ranks: int) -> list[tuple[int, int]]:
        found = _round(rank, ranks)
        for change in changes:
            found = change(found, ranks)
        return found or [(rank, rank)]

    return Reading(parts)


#: What each mistake makes of a ring, and its cause and number.
READINGS: tuple[tuple[Reading, str, int], ...] = (
    (_with(own=_all, earlier=_all, later=_all), "the causal mask is left out", 1),
    (_with(earlier=_all, later=_none), "this is the rule for contiguous parts: in zig-zag an earlier rank's back comes "
     "after all of these queries, and a later rank's keys before this rank's back", 1),
    (_with(own=_all), "a rank's own part is not masked: positions rise along it", 1),
    (_with(own=_diagonal, earlier=_diagonal, later=_diagonal), "every part is masked as if it were the rank's own", 1),
    (_with(earlier=_all), "an earlier rank's back counts too: it comes after all of these queries", 1),
    (_with(earlier=_none), "the keys of earlier ranks do not count", 1),
    (_with(earlier=_front_diagonal), "the front of an earlier rank is masked: all of it comes before these queries", 1),
    (_with(later=_back_diagonal), "the keys of a later rank are masked: all of them come before this rank's back", 1),
    (_with(later=_none), "the keys of later ranks do not count: this rank's back sees all of them", 2),
    (_with(later=_all), "a later rank's keys count for the front too, which comes before them", 2),
    (_with(later=_keys(lambda rank, source, n: slice(front(n[rank]), None))),
     "of a later rank the back's keys count, for all queries: all of its keys count, for this rank's back", 2),
    (_with(later=_queries(lambda rank, source, n: slice(front(n[rank])))),
     "of a later rank's keys the front sees all and the back none: it is the other way round", 2),
    (_with(earlier=_keys(lambda rank, source, n: slice(front(n[source]), None))),
     "of an earlier rank the back counts instead of the front", 2),
    (_with(earlier=_queries(lambda rank, source, n: slice(front(n[rank]), None)),
           later=_keys(lambda rank, source, n: slice(front(n[source])))),
     "earlier and later ranks are exchanged", 2),
    (_with(earlier=_keys(lambda rank, source, n: slice(n[source] // 2))),
     "the front of a part is taken for shorter than it is: it has (n + 1) // 2 tokens", 6),
    (_with(later=_queries(lambda rank, source, n: slice(n[rank] // 2, None))),
     "the back of this rank is taken for longer than it is: its front has (n + 1) // 2 tokens", 6),
    (_with(earlier=_keys(lambda rank, source, n: slice(n[source] // 2)),
           later=_queries(lambda rank, source, n: slice(n[rank] // 2, None))),
     "fronts are taken for shorter than they are: a front has (n + 1) // 2 tokens", 6),
    (_with(earlier=_keys(lambda rank, source, n: slice(front(n[rank])))),
     "the front of another rank's part is measured by this rank's length: lengths[source] is that of the keys", 6),
    (_with(later=_queries(lambda rank, source, n: slice(front(n[source]), None))),
     "the back of this rank is measured by another rank's length: lengths[rank] is that of the queries", 6),
    (Reading(merge=_last), "only the last part counts: o and lse must both be kept for the next step", 5),
    (Reading(merge=lambda o, lse: o.sum(0)), "the parts are added: they are averages, to be weighted by e^lse", 3),
    (Reading(merge=lambda o, lse: o.mean(0)), "the mean of the parts is taken: they are to be weighted by e^lse", 3),
    (_steps(lambda steps, ranks: steps[:1]), "only the rank's own keys count: none is passed on", 5),
    (_steps(lambda steps, ranks: [(steps[0][0], taken) for _, taken in steps]),
     "every step computes with the rank's own keys: take those that have arrived", 5),
    (_steps(lambda steps, ranks: steps[:-1]), "a step too few: the last part is missing", 5),
    (_steps(lambda steps, ranks: steps[1:]), "the rank's own part is missing: it is the first step's", 5),
    (_steps(lambda steps, ranks: steps[:1] + [(steps[min(1, ranks - 1)][0], taken) for _, taken in steps[1:]]),
     "from the second step on, each step computes with the keys of rank r - 1: pass on what arrives, R - 1 times", 5),
    (Reading(exchanged=True), "keys and values are exchanged: keys come first", 5),
    (_steps(lambda steps, ranks: [(met, (2 * steps[0][0] - met) % ranks) for met, _ in steps]),
     "the parts are taken for those of other ranks: after s steps the keys of rank r - s have come", 5),
    (_steps(lambda steps, ranks: [(met, taken) for (met, _), (_, taken) in zip(steps, [*steps[1:], steps[0]])]),
     "the parts are taken for those of the step after: the first step has the rank's own", 5),
    (_steps(lambda steps, ranks: [(met, taken) for (met, _), (_, taken) in zip([*steps[1:], steps[0]], steps)]),
     "a step computes with the keys of the next one: what arrives is for the step after", 5),
    (_steps(lambda steps, ranks: [*steps, steps[0]]), "a step too many: the rank's own part counts twice", 5),
)  # fmt: skip


def named(found: Callable[[Reading], bool]) -> str:
    """The cause of the first mistake that gives just this, or nothing."""
    return next((classic(cause, number) for reading, cause, number in READINGS if found(reading)), "")
