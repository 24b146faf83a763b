"""What the checks of lab 1 share: what an answer may not lean on, and how cases are drawn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from utils.checks.forbidden_modules import Forbidden
from utils.checks.question import Case

FORBIDDEN: Forbidden = {
    "utils.operators": frozenset({"require_sizes"}),
    "utils.roofline": frozenset(),
    "utils.dataflow": frozenset(),
    "utils.encoder_layer": frozenset(),
    "utils.simt": frozenset({"Op", "If"}),
    "utils.records": frozenset(),
    __package__: frozenset({"__call__"}),  # the conditions of the branches that a check hands over
}

ONE = "one element"
LARGE = "a count beyond 2**53, where a float loses ones"
ELEMENT_SIZES = (1, 2, 4, 8)


def size_cases(
    rng: Random,
    names: tuple[str, ...],
    *,
    drawn: int = 6,
    small: tuple[int, int] = (2, 9),
    large: tuple[int, ...] = (),
    **others: Callable[[Random], object],
) -> list[Case]:
    """Cases of positive sizes: drawn small ones first (distinct sizes where possible), one element, then large ones.

    Args:
        rng: draws the cases.
        names: the parameters that are sizes.
        drawn: how many small cases.
        small: the least and the largest small size.
        large: for each size the least value of the large cases; up to 4 more ragged elements are added to it.
        others: draws the value of each further parameter (``element_size``, a method, a flag).
    """
    cases = []
    low, high = small
    for _ in range(drawn):
        pool = rng.sample(range(low, high + 1), len(names)) if high - low + 1 >= len(names) else None
        sizes = dict(zip(names, pool or [rng.randint(low, high) for _ in names]))
        cases.append(Case(sizes | {key: draw(rng) for key, draw in others.items()}))
    cases.append(Case(dict.fromkeys(names, 1) | {key: draw(rng) for key, draw in others.items()}, ONE))
    if large:
        for _ in range(3):
            sizes = {name: least + 2 * rng.randint(1, 9) - 1 for name, least in zip(names, large, strict=True)}
            cases.append(Case(sizes | {key: draw(rng) for key, draw in others.items()}, LARGE))
    return cases


def element_size(rng: Random) -> int:
    """Bytes of an element: fp8, 16 bit, fp32 or fp64."""
    return rng.choice(ELEMENT_SIZES)
