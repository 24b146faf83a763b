"""The check of exercise 4.8: the 1F1B order of every stage, by itself and in a simulated pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

from utils.checks.attempt import attempt, tail
from utils.checks.core import Exercise, classic, draw_seed, fail, generator, passed
from utils.checks.hidden import Draw, Observation
from utils.checks.library_use import find_library_use
from utils.checks.problem import Problem
from utils.schedules import Action, Deadlock, from_orders, simulate


def order_problem(order: Callable, stages: int, micro_batches: int) -> Problem | None:
    """What is wrong with the orders of all stages of one pipeline, or None.

    Raises:
        NotImplementedError: a stub.
    """
    orders: list[list[Action]] = []
    for stage in range(stages):
        call = f"one_f_one_b_order({stage}, {stages}, {micro_batches})"
        made = attempt(order, {"stage": stage, "stages": stages, "micro_batches": micro_batches}, {})
        if made.late:
            return Problem(f"{call} did not return in time", "a loop that does not end")
        if made.error is not None:
            lines = tuple(tail(made.error))
            return Problem(f"{call} raised {type(made.error).__name__}: {made.error}", details=lines)
        if problem := _stage_problem(call, made.value, stage, stages, micro_batches):
            return problem
        orders.append([Action(action.kind, action.micro_batch) for action in made.value])
    return _memory_problem(orders, micro_batches) or _pipeline_problem(orders, stages, micro_batches)


def _shown(actions: Sequence[Action]) -> str:
    return " ".join(f"{action.kind}{action.micro_batch}" for action in actions) or "nothing"


def _stage_problem(call: str, value: object, stage: int, stages: int, m: int) -> Problem | None:
    if (
        not isinstance(value, (list, tuple))
        or not all(hasattr(a, "kind") and hasattr(a, "micro_batch") for a in value)
        or not all(a.kind in ("F", "B") for a in value)
    ):
        return Problem(f"{call} returned {value!r}", "a list of Action(kind, micro_batch) is expected, of kind F or B")
    shown = (f"{call}: {_shown(value)}",)
    for kind in "FB":
        found = [action.micro_batch for action in value if action.kind == kind]
        missing, more = (sorted(set(range(m)) - set(found)), sorted(set(found) - set(range(m))))
        if missing or more or len(found) != m:
            which = f"{kind}{missing[0]} is missing" if missing else f"{kind}{(more or found)[0]} does not belong"
            if not missing and not more:
                which = f"{kind} of a micro-batch comes twice"
            cause = "each micro-batch goes forward once and backward once"
            if m < stages:
                cause = classic(f"{cause}, also where m is small", 4)
            elif missing and kind == "B":
                cause = classic(cause, 4)
            return Problem(f"stage {stage} of {stages}, {m} micro-batches: {which}", cause, shown)
        if found != sorted(found):
            cause = classic("micro-batches go in ascending order, forward and backward: the oldest frees its memory", 5)
            early, due = next(pair for pair in zip(found, sorted(found)) if pair[0] != pair[1])
            return Problem(f"stage {stage} of {stages}: {kind}{early} before {kind}{due}", cause, shown)
    done: set[int] = set()
    for action in value:
        if action.kind == "F":
            done.add(action.micro_batch)
        elif action.micro_batch not in done:
            cause = classic("a micro-batch goes backward after it has gone forward on the same stage", 4)
            return Problem(f"stage {stage} of {stages}: B{action.micro_batch} comes before its F", cause, shown)
    return None


def _warm_up(order: Sequence[Action]) -> int:
    """Forward passes before the first backward pass."""
    return [action.kind for action in order].index("B")


#: How long the warm-ups of all stages are (p stages, m micro-batches): the cause, and its number.
_LONG_WARM_UPS = (
    (lambda s, p, m: m, "this is GPipe's order: all forward, then all backward", 1),
    (
        lambda s, p, m: p,
        "every stage warms up as the first does: stage s needs stages - 1 - s forwards before it alternates",
        2,
    ),
    (lambda s, p, m: s + 1, "the warm-up counts the stages before this one: those after it are waiting for work", 2),
    (
        lambda s, p, m: p - s + 1,
        "one forward too many before the first backward: after stages - 1 - s of them, alternate",
        2,
    ),
)


def _memory_problem(orders: list[list[Action]], m: int) -> Problem | None:
    """A stage that holds more micro-batches than it must; the cause is told if the warm-ups of all stages show it."""
    stages = len(orders)
    stage = next((s for s, order in enumerate(orders) if peak_in_flight(order) > min(stages - s, m)), None)
    if stage is None:
        return None
    found, cause = [_warm_up(order) for order in orders], ""
    for long, text, number in _LONG_WARM_UPS:
        if not cause and found == [min(long(s, stages, m), m) for s in range(stages)]:
            cause = classic(text, number)
    return Problem(
        f"stage {stage} of {stages} has {peak_in_flight(orders[stage])} micro-batches in flight, "
        f"{min(stages - stage, m)} are enough",
        cause,
        (f"one_f_one_b_order({stage}, {stages}, {m}): {_shown(orders[stage])}",),
    )


def peak_in_flight(order: Sequence[Action]) -> int:
    """The most micro-batches between their F and their B at once."""
    flying, peak = 0, 0
    for action in order:
        flying += 1 if action.kind == "F" else -1
        peak = max(peak, flying)
    return peak


def _pipeline_problem(orders: list[list[Action]], stages: int, m: int) -> Problem | None:
    shown = tuple(f"stage {stage}: {_shown(order)}" for stage, order in enumerate(orders))
    try:
        timeline = simulate(from_orders("yours", orders), forward=1, backward=2)
    except Deadlock as error:
        cause = classic("a stage waits for a micro-batch that the stage before it sends only after an answer", 3)
        return Problem(f"{stages} stages, {m} micro-batches: no stage can go on: {error}", cause, shown)
    best = 3 * (m + stages - 1)
    if timeline.makespan > best + 1e-9:
        cause = classic("too few forwards before the first backward: the later stages wait for work", 3)
        if all(_warm_up(order) >= min(stages - stage, m) for stage, order in enumerate(orders)):
            cause = ""
        return Problem(
            f"{stages} stages, {m} micro-batches take {timeline.makespan:g} units of time, {best} are possible "
            "(forward 1, backward 2)",
            cause,
            shown,
        )
    return None


def pipelines_tried(seed: int, draw: Draw | None = None) -> list[tuple[int, int]]:
    """Pipelines (stages, micro-batches) that are looked at: one stage, one micro-batch, fewer than stages, many."""
    random = generator(seed)
    found = [(4, 8), (3, 3), (4, 2), (1, 3), (5, 1), (2, 7), (3, 40), (random.randint(3, 6), random.randint(5, 12))]
    return found + [(draw.between(2, 9), draw.between(1, 15)) for _ in range(8)] if draw else found


def observe_orders(package: ModuleType, seed: int) -> dict[str, Observation]:
    """The actions of every stage of hidden pipelines."""
    orders = [
        [[f"{a.kind}{a.micro_batch}" for a in package.one_f_one_b_order(stage, stages, m)] for stage in range(stages)]
        for stages, m in pipelines_tried(seed, Draw(seed, "4.8 orders"))
    ]
    return {"one_f_one_b_order": orders}


SCHEDULE = Exercise("4.8", "1F1B schedule", points=6, observe=observe_orders)


@SCHEDULE.checked_by
def check_schedule(one_f_one_b_order: Callable, seed: int | None = None) -> None:
    """Exercise 4.8: in which order a stage works under 1F1B.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    if found := find_library_use([one_f_one_b_order]):
        cause = "the exercise is to derive the order; compare with utils.schedules afterwards"
        fail(SCHEDULE, f"the answer uses a built-in, {found[0]}", cause=cause)
    tried = pipelines_tried(seed)
    for stages, micro_batches in tried:
        if problem := order_problem(one_f_one_b_order, stages, micro_batches):
            where = f"seed {seed}, {stages} stages, {micro_batches} micro-batches"
            fail(SCHEDULE, problem.headline, problem.details, problem.cause, where)
    notice = "the bubble is GPipe's; in flight are at most as many micro-batches as stages are left"
    passed(SCHEDULE, notice, seed, len(tried))
