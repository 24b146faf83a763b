"""The check of exercise 3.10: a sliding window, forward and backward, in kernels of the student's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from utils.checks.cases import Case
from utils.checks.compiled import Compiled
from utils.checks.core import Exercise, draw_seed, generator
from utils.checks.diagnoses import CaseResult
from utils.checks.hidden import Observation, tried
from utils.checks.kernel import check_kernel
from utils.checks.launches import no_atomics
from utils.checks.tiling import Tiling
from utils.kernel_profile import profile_kernel

from . import forward, gradients, hidden, shapes, window_mistakes
from .shapes import sizes
from .window_mistakes import OF_QUERIES, attention, attention_gradients
from .window_traffic import moved, stored_by, tile_of

Attention = Callable[..., tuple[torch.Tensor, ...]]


def _with_output(case: Case) -> tuple[torch.Tensor, ...]:
    """(q, k, v, o, lse, do): output and logsumexp computed in float64, rounded to the case's dtype and to float32."""
    q, k, v, do = shapes.with_do(case)
    o, lse = attention(q.double(), k.double(), v.double(), **case.options)
    return q, k, v, o.to(q.dtype), lse.float(), do


def _tiles_of(function: Attention, args: Sequence[Any]) -> list[tuple[int, int]]:
    """(BLOCK_M, BLOCK_N) of each launch that has both; of a function that does not get so far, one that is usual."""
    try:
        with profile_kernel(check_races=False) as profile:
            function(*args)
    except Exception:  # the check itself runs the function again, and says what is wrong
        return [(32, 16)]
    return [pair for launch in profile.launches if (pair := tile_of(launch))] or [(32, 16)]


def _cases(seed: int, found: Sequence[tuple[int, int]]) -> list[Case]:
    """Simplest first, for kernels with these tiles, (queries, keys)."""
    draw = generator(seed)
    m, n = (max(pair[axis] for pair in found) for axis in (0, 1))
    large = max(m, n)
    part = draw.randint(large // 2 + 1, large - 3) | 1  # of a tile, and no multiple of one
    few, extra = m + draw.randint(1, m - 1), draw.randint(1, n - 1)

    def case(
        kind: str, num_queries: int, num_keys: int, window: int, scale: float | None = None, width: int = 16,
        shape: tuple[int, int] = (1, 1), **more: Any,
    ) -> Case:  # fmt: skip
        options = {"window": window} if scale is None else {"window": window, "scale": scale}
        named = sizes(shape[0], shape[1], shape[1], num_queries, num_keys, width)
        return Case(kind, named, options=options, seed=seed, **more)

    odd = (few, few + n + extra, part)
    cases = [
        case("square", 3 * large + extra, 3 * large + extra, part),
        case("window 1", few, few, 1),
        case("window larger than N", few, few, few + extra),
        case("whole tiles", 3 * large, 3 * large, large),
        case("fewer queries than keys", 2 * m + draw.randint(1, 9), 2 * m + 2 * large + extra, part),
        case("far fewer queries than keys", few, few + 3 * large, n // 2 + 1, shape=(1, 2)),
        case("more queries than keys", n + extra + m + draw.randint(2, m), n + extra, n // 2 + 3),
        case("one query", 1, 3 * n + extra, n + 2),
        case("one key", few, 1, 3),
        case("one element", 1, 1, 1),
        case("no element", few, few, 3, shape=(0, 2)),
        case("given scale", few, few + n, part, scale=0.37),
        case(shapes.NEGATIVE, few, few + n, part, scale=-0.29),
        case("odd head dimension", *odd, layout=shapes.MIXED, width=24, shape=(2, 3)),
        case("ragged", *odd, layout="padded"),
        case("ragged", *odd, layout="transposed"),
        case("ragged", *odd, dtype=shapes.FP16),
        case("ragged", *odd, dtype=shapes.BF16, layout=shapes.HEADS_LAST, shape=(1, 2)),
    ]  # fmt: skip
    return [*cases, *_exact(case, found)]


def _scores(cases: Sequence[Case], seed: int) -> list[Case]:
    """Scores that grow along a row, that all lie far below 0, and that lie far apart."""
    ragged = {"sizes": cases[4].sizes, "options": cases[4].options, "seed": seed}
    return [Case(shapes.GROWING, **ragged), Case(shapes.LOW, **ragged), Case("ragged", magnitude=12.0, **ragged)]


def _exact(case: Callable[..., Case], found: Sequence[tuple[int, int]]) -> Iterator[Case]:
    """Windows with which whole steps end at the last key (or query) that a tile sees, or one before it."""
    for m, n in dict.fromkeys(found):
        common = math.lcm(m, n)
        queries, keys = 2 * common + 1, 4 * common + 1
        of_keys, of_queries = n - (m - 1) % n, m - (n - 1) % m  # m + window - 1 keys are steps of n, and the other way
        for window in dict.fromkeys((of_keys, of_keys + 1, of_queries, of_queries + 1)):
            yield case(f"window {window} of tiles {m} x {n}", queries, keys, window)


def _rows_of(output: str) -> Callable[[Sequence[CaseResult]], Tiling | None]:
    """The tiles of an output, from the launch that stores it, or else the first whose tile is known."""
    axis, noun = (0, "query tile") if output in OF_QUERIES else (1, "key tile")
    axes = "b h row" if output == "lse" else "b h row col"

    def tiling(trials: Sequence[CaseResult]) -> Tiling | None:
        launches = trials[0].profile.launches if trials[0].profile is not None else ()
        own = "queries" if axis == 0 else "keys"
        storing_first = sorted(launches, key=lambda launch: own not in stored_by(trials[0].case, launch))
        found = next((pair for launch in storing_first if (pair := tile_of(launch))), None)
        return found and Tiling(axes, tiles={"b": 1, "h": 1, "row": found[axis]}, noun=noun)

    return tiling


_FORWARD, _BACKWARD = ("o", "lse"), ("dq", "dk", "dv")


def _observe(package: ModuleType, seed: int) -> dict[str, Observation]:
    """Both functions on the cases of the check for tiles of 16."""
    found = [(16, 16)]

    def forward_cases(seed: int) -> list[Case]:
        cases = _cases(seed, found)
        return [*cases, *_scores(cases, seed)]

    observed = tried("3.10", "window_attention", _FORWARD, forward_cases, shapes.qkv)(package, seed)
    name = "window_attention_backward"
    return observed | tried("3.10", name, _BACKWARD, lambda s: _cases(s, found), _with_output)(package, seed)


WINDOW = Exercise(
    "3.10",
    "sliding window",
    points=14,
    builds_on=("3.5",),
    observe=_observe,
    tolerance=hidden.ATTENTION,
)


@WINDOW.checked_by
def check_window_attention(
    window_attention: Attention, window_attention_backward: Attention, seed: int | None = None
) -> None:
    """Exercise 3.10: a sliding window, forward and backward; what lies outside of it is neither counted nor read.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    seed = draw_seed(seed)
    q, k, v = forward.small()
    o, lse = attention(q, k, v)
    cases = _cases(seed, _tiles_of(window_attention, (q, k, v, 1)))
    check_kernel(
        WINDOW.part("sliding window, forward"),
        window_attention,
        attention,
        [*cases, *_scores(cases, seed)],
        shapes.qkv,
        outputs=_FORWARD,
        tiling={name: _rows_of(name) for name in _FORWARD},
        inspections=[no_atomics, moved],
        forbidden=forward.RULES,
        diagnose=window_mistakes.RULES,
        compiled=Compiled(tf32=window_mistakes.BEFORE),
        seed=seed,
        notice="once the window is full, every tile of queries reads equally many keys, however long the row",
    )
    check_kernel(
        WINDOW.part("sliding window, backward"),
        window_attention_backward,
        attention_gradients,
        _cases(seed, _tiles_of(window_attention_backward, (q, k, v, o, lse, q, 1))),
        _with_output,
        outputs=_BACKWARD,
        atol=gradients.ROUNDING,
        tiling={name: _rows_of(name) for name in _BACKWARD},
        inspections=[no_atomics, moved],
        forbidden=forward.RULES,
        diagnose=window_mistakes.RULES,
        compiled=Compiled(tf32=window_mistakes.BEFORE),
        seed=seed,
        notice="a key is seen by `window` queries: its gradients end where the window does",
    )
