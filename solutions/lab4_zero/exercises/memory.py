"""The check of exercise 4.2: bytes of weights, gradients and optimizer state on each rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from utils.checks.core import Exercise
from utils.checks.forms import Rate
from utils.checks.hidden import asked
from utils.checks.numbers import check_numbers
from utils.checks.question import Case, Mistake, Question

_FORBIDDEN = {"utils.transformer_math": frozenset(), __package__: frozenset()}
_ZERO_PAPER = 7_500_000_000


def _bytes(
    parameters: int,
    world_size: int,
    stage: int,
    weight_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = 12,
) -> float:
    """The oracle."""
    shares = [world_size if stage >= sharded else 1 for sharded in (3, 2, 1)]
    return parameters * sum(
        size / share for size, share in zip((weight_bytes, gradient_bytes, optimizer_bytes), shares, strict=True)
    )


def _with(**changed: Callable[..., float] | int) -> Callable[..., float]:
    """The oracle with some arguments replaced: numbers, or functions of the arguments."""

    def mistaken(**arguments: int) -> float:
        known = {"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12} | arguments
        return _bytes(**{**known, **{k: v(**known) if callable(v) else v for k, v in changed.items()}})

    return mistaken


def _times(**parts: int) -> Callable[..., float]:
    def mistaken(parameters: int, world_size: int, stage: int, **sizes: int) -> float:
        sizes = {"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12} | sizes
        order = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
        return parameters * sum(sizes[name] / (world_size if stage >= parts[name] else 1) for name in order)

    return mistaken


def _cut(parameters: int, world_size: int, stage: int, *, each: bool, **sizes: int) -> float:
    """With ``//`` in place of ``/``: on all bytes of a kind, or on those of ``each`` parameter."""
    sizes = {"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12} | sizes
    shares = {"weight_bytes": 3, "gradient_bytes": 2, "optimizer_bytes": 1}
    parts = [(size, world_size if stage >= shares[name] else 1) for name, size in sizes.items()]
    return float(sum(parameters * (size // n) if each else parameters * size // n for size, n in parts))


def _all_shared(parameters: int, world_size: int, stage: int, **sizes: int) -> float:
    total = sum(({"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12} | sizes).values())
    return parameters * total / (world_size if stage else 1)


_MISTAKES = (
    Mistake(
        "the state is 8 bytes: momentum and variance without the float32 master weights",
        _with(optimizer_bytes=lambda optimizer_bytes, **_: optimizer_bytes - 4),
        1,
    ),
    Mistake(
        "stages shard in the wrong order: stage 1 the optimizer's state, stage 2 gradients too, stage 3 weights too",
        _times(weight_bytes=1, gradient_bytes=2, optimizer_bytes=3),
        2,
    ),
    Mistake(
        "stage 2 shards the weights and stage 3 the gradients",
        _times(weight_bytes=2, gradient_bytes=3, optimizer_bytes=1),
        2,
    ),
    Mistake("every stage shards everything", _all_shared, 3),
    Mistake(
        "each stage counts from one stage later: the optimizer's state is sharded in stage 1 already",
        _times(weight_bytes=4, gradient_bytes=3, optimizer_bytes=2),
        2,
    ),
    Mistake("nothing is sharded, in any stage", _with(stage=0), 4),
    Mistake(
        "a stage shards its own part alone: stage 2 keeps what stage 1 has sharded",
        lambda parameters, world_size, stage, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12: (
            parameters
            * (
                weight_bytes / (world_size if stage == 3 else 1)
                + gradient_bytes / (world_size if stage == 2 else 1)
                + optimizer_bytes / (world_size if stage == 1 else 1)
            )
        ),
        4,
    ),
    Mistake(
        "gradients are float32: they have the weights' 2 bytes in mixed precision",
        _with(gradient_bytes=lambda gradient_bytes, **_: 2 * gradient_bytes),
        1,
    ),
    Mistake(
        "this is the memory of all ranks together",
        lambda world_size, **arguments: _bytes(world_size=world_size, **arguments) * world_size,
        5,
    ),
    Mistake(
        "the byte counts are fixed: weight_bytes, gradient_bytes and optimizer_bytes are arguments",
        lambda parameters, world_size, stage, **_: _bytes(parameters, world_size, stage),
        5,
    ),
    Mistake("whole bytes are cut off by //", lambda **a: float(int(_bytes(**a))), 6),
    Mistake("whole bytes are cut off by //", lambda **a: _cut(each=False, **a), 6),
    Mistake("whole bytes of each parameter are cut off by //", lambda **a: _cut(each=True, **a), 6),
)


def _many(rng: random.Random) -> int:
    """A million to a billion parameters, which 3, 5 and 7 do not divide.

    Bytes are then whole only where floats are exact, and what ``//`` cuts off does not hang on how a sum was rounded
    (``sum`` rounds less from Python 3.12 on).
    """
    return 105 * rng.randint(10**4, 9 * 10**6) + rng.choice((1, 2, 4, 8, 11, 13))


def _cases(rng: random.Random) -> Sequence[Case]:
    cases = [Case({"parameters": _ZERO_PAPER, "world_size": 64, "stage": stage}) for stage in range(4)]
    for stage in range(4):
        cases.append(Case({"parameters": _many(rng), "world_size": rng.choice((3, 6, 7)), "stage": stage}))
    sizes = {"weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
    for stage in range(4):
        arguments = {"parameters": _many(rng), "world_size": rng.choice((2, 5)), "stage": stage}
        cases.append(Case(arguments | sizes, "float32 training"))
    for stage in (1, 2, 3):  # few enough that a part of a byte shows
        parameters = 5 * rng.randint(20, 200) + rng.randint(1, 4)
        cases.append(Case({"parameters": parameters, "world_size": 5, "stage": stage}, "not whole bytes"))
    cases.append(Case({"parameters": 1000, "world_size": 1, "stage": 3}, "one rank"))
    cases.append(Case({"parameters": 0, "world_size": 8, "stage": 2}, "no parameters"))
    return cases


def _hidden_cases(rng: random.Random) -> Sequence[Case]:
    """The check's, and further ones of other byte counts, of few parameters to a trillion on few ranks to many."""
    cases = list(_cases(rng))
    for stage in range(4):
        sizes = zip(("weight_bytes", "gradient_bytes", "optimizer_bytes"), rng.sample((1, 2, 4, 6, 8, 12, 16), 3))
        parameters, ranks = rng.randint(1, 10 ** rng.randint(1, 12)), rng.choice((1, 2, 64, 1000))
        cases.append(Case({"parameters": parameters, "world_size": ranks, "stage": stage, **dict(sizes)}))
    return cases


_QUESTION = Question(
    "bytes_per_rank", _cases, _bytes, _MISTAKES, form=Rate(), refused={"stage": 4, "world_size": 0, "parameters": -1}
)


MEMORY = Exercise("4.2", "memory accounting", points=4, observe=asked("4.2", replace(_QUESTION, cases=_hidden_cases)))


@MEMORY.checked_by
def check_memory(bytes_per_rank: Callable[..., float], seed: int | None = None) -> None:
    """Exercise 4.2: bytes on each rank by ZeRO stage.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    check_numbers(
        MEMORY,
        [(_QUESTION, bytes_per_rank)],
        seed=seed,
        notice="7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB",
        forbidden=_FORBIDDEN,
    )
