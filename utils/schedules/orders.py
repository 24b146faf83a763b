"""The schedules of the literature: naive, GPipe, 1F1B, interleaved 1F1B, and zero-bubble.

Everywhere p = ``stages``, m = ``micro_batches``, v = ``chunks``.
"""

from __future__ import annotations

from itertools import islice

from utils.operators import require_sizes
from utils.schedules.schedule import Action, Schedule


def naive(stages: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time passes through all stages and back: one stage works, the others wait.

    Idle over ideal time is p - 1, whatever m.
    """
    require_sizes(stages=stages, micro_batches=micro_batches)
    order = tuple(Action(kind, i) for i in range(micro_batches) for kind in "FB")
    return Schedule("naive", (order,) * stages, micro_batches)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al. 2019): bubble (p - 1)/m, all m in flight at once."""
    require_sizes(stages=stages, micro_batches=micro_batches)
    order = tuple(Action(kind, i) for kind in "FB" for i in range(micro_batches))
    return Schedule("GPipe", (order,) * stages, micro_batches)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward in turn, once a stage has filled the ones after it (Narayanan et al. 2019 and 2021).

    Stage s starts with min(p - s - 1, m) forward passes, alternates one forward and one backward, and ends with
    backward passes. The bubble is GPipe's, (p - 1)/m; in flight are at most min(p - s, m).
    """
    require_sizes(stages=stages, micro_batches=micro_batches)
    orders = (_alternate(_run("F", micro_batches), _run("B", micro_batches), stages - s - 1) for s in range(stages))
    return Schedule("1F1B", tuple(orders), micro_batches)


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B with v chunks of layers on each stage, visited p micro-batches at a time.

    A chunk takes 1/v of a stage's time, and so does the wait at either end: bubble (p - 1)/(v m)
    (Narayanan et al. 2021, section 2.2).

    Raises:
        ValueError: p does not divide m.
    """
    require_sizes(stages=stages, micro_batches=micro_batches, chunks=chunks)
    if micro_batches % stages:
        raise ValueError(f"micro_batches must be a multiple of the {stages} stages, got {micro_batches}")
    turns = [
        (first + i, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for i in range(stages)
    ]
    forward = [Action("F", i, chunk) for i, chunk in turns]
    backward = [Action("B", i, chunks - 1 - chunk) for i, chunk in turns]
    orders = (_alternate(forward, backward, (chunks - 1) * stages + 2 * (stages - s - 1)) for s in range(stages))
    return Schedule(f"interleaved 1F1B, v = {chunks}", tuple(orders), micro_batches, chunks)


def zero_bubble(stages: int, micro_batches: int, *, extra_memory: bool = False) -> Schedule:
    """The backward pass in two parts, so that gradients of weights, which nobody waits for, fill the bubbles.

    Stage s of ZB-H1 (Qi et al. 2024, section 2.1) starts as 1F1B does and puts off gradients of weights by s
    micro-batches: all stages then hold at most p in flight, as stage 0 of 1F1B does, and when forward, backward and
    weights take equal time the bubble is a third of 1F1B's, (p - 1)/(3 m).

    Args:
        extra_memory: ZB-H2 (section 2.2): about twice as many in flight, 2 p - 1, and no idle time on any stage from
            its first action to its last, when m >= 2 p - 1.
    """
    require_sizes(stages=stages, micro_batches=micro_batches)
    orders = []
    for s in range(stages):
        ahead, lag = (2 * (stages - s) - 2, 2 * s) if extra_memory else (stages - s - 1, s)
        forward, order = iter(_run("F", micro_batches)), []
        order += islice(forward, ahead + 1)
        for i in range(micro_batches):
            order.append(Action("B", i))
            if i >= lag:
                order.append(Action("W", i - lag))
            order += islice(forward, 1)
        order += _run("W", micro_batches)[max(0, micro_batches - lag) :]
        orders.append(tuple(order))
    return Schedule("zero-bubble " + ("H2" if extra_memory else "H1"), tuple(orders), micro_batches)


def _run(kind: str, micro_batches: int) -> list[Action]:
    return [Action(kind, i) for i in range(micro_batches)]


def _alternate(forward: list[Action], backward: list[Action], warm_up: int) -> tuple[Action, ...]:
    """``warm_up`` forward passes, then one forward and one backward in turn, then the rest of the backward passes."""
    warm_up = min(warm_up, len(forward))
    order = forward[:warm_up]
    for pair in zip(forward[warm_up:], backward, strict=False):
        order.extend(pair)
    return tuple(order + backward[len(forward) - warm_up :])
