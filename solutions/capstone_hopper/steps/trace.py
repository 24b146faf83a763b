"""What one program of steps 8, 9 and 10 does when: clock reads inside the kernel, and the intervals between them.

The two consumer warpgroups and the producer each note the multiprocessor's own cycle counter (%clock64), so that their
times compare. A note is one read and one store by one thread, in one program of the grid; :mod:`.traced` has the
kernel. What the notes cost in time is part of the record.

Products run asynchronously: an interval of them reaches from issue to the moment when the warpgroup sees the result, so
it includes the time in which the tensor cores work for the other warpgroup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

#: Steps that can be traced -> whether softmax and products overlap, and whether warpgroups take turns.
STEPS: dict[str, tuple[bool, bool]] = {
    "producer": (False, False),
    "overlap": (True, False),
    "ping-pong": (True, True),
}
CONSUMERS = ("consumer 0", "consumer 1")
PRODUCER = "producer"


class Interval(NamedTuple):
    """Cycles ``start`` to ``end``, counted from the first event of the trace.

    ``what``: "scores" or "output" (that product is in flight), "softmax", "waiting" (for keys, or for its turn) or
    "copy" (from its request until a consumer first found the keys there: at most that long). ``tile``: which tile of
    keys, in the order of work.
    """

    what: str
    tile: int
    start: int
    end: int


def launch(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, times: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Run a step with clock reads: o, logsumexp, times (3, 7, tiles of keys) int64, and the program that was traced.

    Args:
        name: One of :data:`STEPS`.
        times: Where they go; a new tensor by default.

    Raises:
        ValueError: the step cannot be traced.
    """
    if name not in STEPS:
        raise ValueError(f"name must be one of {', '.join(STEPS)}, got {name!r}")
    from . import traced

    batch, heads, length, head_dim = q.shape
    tile = traced.TILES[head_dim]
    if times is None:
        times = torch.zeros((3, len(traced.CONSUMER_EVENTS), length // tile["N"]), dtype=torch.int64, device=q.device)
    program = batch * heads * length // (2 * tile["M"]) // 2  # in the middle of the grid: the card is busy
    o, lse = traced.forward(q, k, v, causal, *STEPS[name], times, program)
    return o, lse, times, program


def record(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Any]:
    """A trace as the record keeps it, without its cost; the second run is kept, the first warms up.

    Raises:
        ValueError: the step cannot be traced.
        RuntimeError: there is no Hopper GPU, or an event of some tile was not noted.
    """
    from utils import runtime

    if runtime.INTERPRET or torch.cuda.get_device_capability(q.device) != (9, 0):
        raise RuntimeError("a trace needs a Hopper GPU (compute capability 9.0)")
    from . import traced

    _, _, times, program = launch(name, q, k, v, causal)
    launch(name, q, k, v, causal, times)
    return _item(name, q, causal, program, times.tolist(), traced.CONSUMER_EVENTS, traced.PRODUCER_EVENTS)


def _item(
    name: str, q: torch.Tensor, causal: bool, program: int, times: Sequence[Sequence[Sequence[int]]],
    consumer_events: Sequence[str], producer_events: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """A record's item from the buffer of a kernel; cycles from the first event on."""
    noted = {who: dict(zip(consumer_events, times[i])) for i, who in enumerate(CONSUMERS)}
    noted[PRODUCER] = dict(zip(producer_events, times[2]))
    tiles = sum(cycle != 0 for cycle in noted[CONSUMERS[0]]["output_there"])
    cut = {who: {event: list(cycles[:tiles]) for event, cycles in events.items()} for who, events in noted.items()}
    every = [cycle for events in cut.values() for cycles in events.values() for cycle in cycles]
    if not every or not all(every):
        raise RuntimeError(f"the trace of {name} has tiles without a clock read")
    first = min(every)
    batch, heads, seq_len, head_dim = q.shape
    return {
        "name": name,
        "batch": batch,
        "heads": heads,
        "seq_len": seq_len,
        "head_dim": head_dim,
        "causal": bool(causal),
        "program": program,
        "events": {
            who: {event: [cycle - first for cycle in cycles] for event, cycles in events.items()}
            for who, events in cut.items()
        },
    }


def timeline(item: Mapping[str, Any]) -> dict[str, list[Interval]]:
    """Intervals of each consumer and of the producer, in order of their beginning.

    Args:
        item: An item of the record's ``traces``, or what :func:`record` returns.
    """
    events = item["events"]
    found: dict[str, list[Interval]] = {}
    for who in CONSUMERS:
        mine = events[who]
        intervals = []
        for tile in range(len(mine["asked"])):
            at = {event: cycles[tile] for event, cycles in mine.items()}
            intervals += [
                Interval("waiting", tile, at["asked"], at["scores_issued"]),
                Interval("scores", tile, at["scores_issued"], at["scores_there"]),
                Interval("softmax", tile, at["scores_there"], at["softmax_done"]),
                Interval("output", tile, at["output_issued"], at["output_there"]),
            ]
        found[who] = sorted(intervals, key=lambda interval: interval.start)
    asked = events[PRODUCER]["keys_issued"]
    there = [min(pair) for pair in zip(*(events[who]["keys_there"] for who in CONSUMERS))]
    found[PRODUCER] = [Interval("copy", tile, *pair) for tile, pair in enumerate(zip(asked, there))]
    return found


_SHARES = {"products": ("scores", "output"), "softmax": ("softmax",), "copies": ("copy",)}


def covered(intervals: Sequence[tuple[int, int]]) -> int:
    """Cycles that at least one of the intervals (start, end) covers."""
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            reached = start
        if end > reached:
            total += end - reached
            reached = end
    return total


def busy(item: Mapping[str, Any]) -> dict[str, float]:
    """Share of the traced time in which anyone's product was in flight, anyone exponentiated, a copy was under way."""
    every = [interval for intervals in timeline(item).values() for interval in intervals]
    whole = max(i.end for i in every) - min(i.start for i in every)
    return {
        name: covered([(i.start, i.end) for i in every if i.what in kinds]) / whole for name, kinds in _SHARES.items()
    }
