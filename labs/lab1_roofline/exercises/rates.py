"""Checks of exercise 1.5: ridge point, attainable rate, and the batch from which a matmul is compute-bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from math import ceil
from random import Random

from utils.checks.forms import Count, Rate
from utils.checks.question import Case, Mistake, Question

from .rules import asking

BELOW, ABOVE = "an intensity below the ridge point", "an intensity above the ridge point"
NEVER = "a matrix too small for any batch"
BALANCED = "weights for which more batch brings the intensity ever closer to the ridge point, but never onto it"
TIE = "a whole B whose intensity is the ridge point exactly"
ROUNDED = "a whole B whose intensity is the ridge point exactly, of rates that are no powers of two"
FAR = "weights that need a very large batch"
ONE_ROW = "a GPU with a ridge point so low that one row is enough"
SMALLEST = "weights of one element"


def _rates(rng: Random) -> dict[str, float]:
    """Peak and bandwidth of a GPU that does not exist."""
    return {"peak_flops": rng.randint(20, 2500) * 1e12, "bandwidth": rng.randint(300, 8000) * 1e9}


def _attainable_cases(rng: Random) -> list[Case]:
    cases = []
    for tag, low, high in 4 * ((BELOW, 0.01, 0.9), (ABOVE, 1.1, 40.0)):
        gpu = _rates(rng)
        intensity = round(gpu["peak_flops"] / gpu["bandwidth"] * rng.uniform(low, high), 3)
        cases.append(Case({"intensity": max(intensity, 0.001)} | gpu, tag))
    slow = {"peak_flops": float(rng.randint(60, 90)), "bandwidth": float(rng.randint(20, 30))}
    return [*cases, *(Case({"intensity": intensity} | slow, "a very slow machine") for intensity in (0.5, 8.0))]


def attainable_rate(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """Work through a byte's worth: ``intensity`` FLOPs take as long as the slower of arithmetic and memory."""
    seconds = max(Fraction(1) / Fraction(bandwidth), Fraction(intensity) / Fraction(peak_flops))
    return float(Fraction(intensity) / seconds)


def _harmonic(intensity: float, peak_flops: float, bandwidth: float) -> float:
    return intensity / (1 / bandwidth + intensity / peak_flops)


RIDGE = Question(
    "ridge_point",
    lambda rng: [Case(_rates(rng)) for _ in range(6)],
    lambda peak_flops, bandwidth: float(Fraction(peak_flops) / Fraction(bandwidth)),
    (
        Mistake(
            "bandwidth is divided by peak: FLOP/B are FLOP/s over bytes/s",
            lambda peak_flops, bandwidth: bandwidth / peak_flops,
            1,
        ),
        Mistake(
            "an element of two bytes is assumed: intensity is per byte",
            lambda peak_flops, bandwidth: 2 * peak_flops / bandwidth,
            1,
        ),
        Mistake(
            "a multiply-add is counted as one operation in the peak",
            lambda peak_flops, bandwidth: peak_flops / bandwidth / 2,
            1,
        ),
        Mistake(
            "the result is floored: an intensity is no whole number",
            lambda peak_flops, bandwidth: peak_flops // bandwidth,
            1,
        ),
    ),
    form=Rate(),
    refused={"peak_flops": -3.0, "bandwidth": -2.0},
)
ATTAINABLE = Question(
    "attainable_rate",
    _attainable_cases,
    attainable_rate,
    (
        Mistake(
            "the higher of the two roofs is taken: the lower one limits",
            lambda intensity, peak_flops, bandwidth: max(peak_flops, intensity * bandwidth),
            2,
        ),
        Mistake(
            "memory is taken to limit always: above the ridge point the peak does",
            lambda intensity, peak_flops, bandwidth: intensity * bandwidth,
            2,
        ),
        Mistake(
            "arithmetic is taken to limit always: below the ridge point memory does",
            lambda intensity, peak_flops, bandwidth: peak_flops,
            2,
        ),
        Mistake("arithmetic and traffic are added: they overlap, so the slower one alone counts", _harmonic, 3),
        Mistake(
            "the share of the peak is returned, not a rate in FLOP/s",
            lambda intensity, peak_flops, bandwidth: min(1.0, intensity * bandwidth / peak_flops),
            3,
        ),
        Mistake(
            "the bytes/s are capped, not the FLOP/s",
            lambda intensity, peak_flops, bandwidth: min(bandwidth, peak_flops / intensity),
            3,
        ),
    ),
    form=Rate(),
    refused={"intensity": -1.5, "peak_flops": -3.0, "bandwidth": -2.0},
)


# ---- the smallest compute-bound batch ----
def reaches_ridge(batch: int, d: int, f: int, element_size: int, peak_flops: float, bandwidth: float) -> bool:
    """Whether a (batch, d) @ (d, f) matmul has at least the ridge point's intensity, in exact arithmetic."""
    moved = element_size * (batch * d + d * f + batch * f)
    return Fraction(2 * batch * d * f) / moved >= Fraction(peak_flops) / Fraction(bandwidth)


def smallest_batch(d: int, f: int, element_size: int, peak_flops: float, bandwidth: float) -> int | None:
    """Found by trying: double until one is enough, then halve the gap; None if even a gigantic batch is not enough."""
    sizes = (d, f, element_size, peak_flops, bandwidth)
    if not reaches_ridge(10**15, *sizes):
        return None
    high = 1
    while not reaches_ridge(high, *sizes):
        high *= 2
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches_ridge(middle, *sizes) else (middle, high)
    return high


def _batch_cases(rng: Random) -> list[Case]:
    """Weights from small to large, some too small for any batch; none so close to a tie that rounding decides.

    Then come two of powers of two, so that floats are exact whichever way the equation is solved: a B that is whole,
    and weights whose B would be infinite (a division by zero, for who asks only whether it is negative). The last four
    are the ends: a tie that floats miss, the largest B, the smallest, and the smallest weights.
    """
    cases: list[Case] = []
    while len(cases) < 10:
        gpu, size = _rates(rng), rng.choice((1, 2, 4))
        threshold = size * gpu["peak_flops"] / gpu["bandwidth"]
        never = len(cases) % 4 == 3
        d, f = (int(threshold * rng.uniform(*((0.2, 0.8) if never else (1.5, 40.0)))) + 1 for _ in "df")
        slope = 2 * d * f - threshold * (d + f)
        exact = threshold * d * f / slope if slope else 0.5
        if abs(slope) > 1e-3 * d * f and abs(exact - round(exact)) > 1e-3:
            cases.append(Case({"d": d, "f": f, "element_size": size} | gpu, NEVER if never else ""))
    bandwidth = 2.0 ** rng.randint(39, 42)
    ridge = 2 ** rng.randint(5, 8)  # with two bytes an element and d = f = 4 * ridge, B is twice the ridge point
    tie = {"d": 4 * ridge, "f": 4 * ridge, "element_size": 2, "peak_flops": ridge * bandwidth, "bandwidth": bandwidth}
    balanced = tie | {"d": 2 * ridge, "f": 2 * ridge}  # 2 d f = ridge * 2 bytes * (d + f)
    scale, n = 2 ** rng.randint(0, 2), 2 * rng.randint(100, 400)
    rounded = {"d": 1000, "f": 1000, "element_size": 2, "peak_flops": scale * 2e15, "bandwidth": scale * 4.8e12}
    far = {"d": n, "f": n, "element_size": 1, "peak_flops": (n - 0.5) * bandwidth, "bandwidth": bandwidth}
    one_row = {"d": n, "f": n, "element_size": 1, "peak_flops": bandwidth, "bandwidth": bandwidth}
    smallest = {"d": 1, "f": 1, "element_size": 1, "peak_flops": 0.75 * bandwidth, "bandwidth": bandwidth}
    ends = Case(rounded, ROUNDED), Case(far, FAR), Case(one_row, ONE_ROW), Case(smallest, SMALLEST)
    return [*cases, Case(tie, TIE), Case(balanced, BALANCED), *ends]


def _gained_per_row(
    number: type, d: int, f: int, element_size: int, peak_flops: float, bandwidth: float
) -> float | Fraction:
    """FLOPs of a row of B beyond those that its own bytes ask for at the ridge point, in floats or in fractions."""
    return 2 * d * f - element_size * number(peak_flops) / number(bandwidth) * (d + f)


def _finite(number: type, d: int, f: int, element_size: int, peak_flops: float, bandwidth: float) -> float | Fraction:
    """B as if a row always gained FLOPs: negative where it loses, a ZeroDivisionError where it does neither."""
    threshold = element_size * number(peak_flops) / number(bandwidth)
    return threshold * d * f / _gained_per_row(number, d, f, element_size, peak_flops, bandwidth)


def _mistaken(value: Callable[..., float | None]) -> Callable[..., int | None]:
    """A mistake that knows of matrices that are too small."""

    def computes(**arguments) -> int | None:
        found = None if smallest_batch(**arguments) is None else value(**arguments)
        return None if found is None else ceil(found)

    return computes


def _solved(number: type) -> Iterator[Mistake]:
    """Mistakes in what is made of the equation's solution, which is computed in floats or in fractions."""
    gained, finite = partial(_gained_per_row, number), partial(_finite, number)
    yield Mistake(
        "the exact B is rounded down: one more row is needed to reach the ridge",
        _mistaken(lambda **arguments: int(finite(**arguments))),
        5,
    )
    yield Mistake(
        "one is added to the B rounded down, also where B is whole: round up",
        _mistaken(lambda **arguments: int(finite(**arguments)) + 1),
        5,
    )
    yield Mistake(
        "None belongs where what multiplies B is negative, and where it is exactly zero: there no B is enough",
        lambda **arguments: None if gained(**arguments) < 0 else ceil(finite(**arguments)),
        5,
    )
    for says, rounded in (
        ("a negative B is returned: when the bytes of a row outweigh its FLOPs, no batch is enough: None", ceil),
        ("a batch of 1 is returned where no batch is enough: the answer there is None", lambda b: max(1, ceil(b))),
    ):
        yield Mistake(says, lambda rounded=rounded, **arguments: rounded(finite(**arguments)), 5)
        # or so only where what multiplies B is not zero
        yield Mistake(
            says,
            lambda rounded=rounded, **arguments: rounded(finite(**arguments)) if gained(**arguments) else None,
            5,
        )


BATCH = Question(
    "smallest_compute_bound_batch",
    _batch_cases,
    smallest_batch,
    (
        Mistake(
            "the activations' bytes are left out, as if d and f were endless: B grows as they move too",
            lambda d, f, element_size, peak_flops, bandwidth: ceil(element_size * peak_flops / bandwidth / 2),
            4,
        ),
        Mistake(
            "the activations' bytes are left out, as if d and f were endless: B grows as they move too",
            _mistaken(lambda d, f, element_size, peak_flops, bandwidth: element_size * peak_flops / bandwidth / 2),
            4,
        ),
        Mistake(
            "the ridge point itself is taken: that holds for two bytes an element and endless d and f",
            lambda d, f, element_size, peak_flops, bandwidth: ceil(peak_flops / bandwidth),
            4,
        ),
        *_solved(Fraction),
        *_solved(float),
        Mistake(
            "the quotient is rounded up from floats, which are off by one where B is whole: use fractions.Fraction",
            _mistaken(lambda **arguments: _finite(float, **arguments)),
            5,
        ),
        Mistake(
            "every element is taken to have 2 bytes: use element_size",
            lambda **arguments: smallest_batch(**(arguments | {"element_size": 2})),
            6,
        ),
        Mistake(
            "elements are counted, not bytes: multiply by the size of one",
            lambda **arguments: smallest_batch(**(arguments | {"element_size": 1})),
            6,
        ),
        Mistake(
            "the output's bytes are left out",
            lambda d, f, element_size, peak_flops, bandwidth: _without_output(
                d, f, element_size * peak_flops / bandwidth
            ),
            4,
        ),
        Mistake(
            "a multiply-add is counted as one operation",
            lambda **arguments: smallest_batch(**(arguments | {"peak_flops": 2 * arguments["peak_flops"]})),
            6,
        ),
    ),
    form=Count(or_none=True),
    refused={"d": -4, "f": -6, "element_size": -2, "peak_flops": -3.0, "bandwidth": -5.0},
)


def _without_output(d: int, f: int, threshold: float) -> int | None:
    slope = 2 * d * f - threshold * d
    return ceil(threshold * d * f / slope) if slope > 0 else None


RIDGE_POINT = asking(
    "1.5",
    "ridge point and attainable rate",
    10,
    (RIDGE, ATTAINABLE, BATCH),
    check="check_ridge",
    says="the ridge point, the attainable rate, and the smallest compute-bound batch of a matmul.",
    notice="in 16 bit a matmul needs a batch above the ridge point, further above the smaller its weights are",
)
check_ridge = RIDGE_POINT.check
