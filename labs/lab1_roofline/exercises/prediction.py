"""Checks of exercise 1.6: predicted times against measurements on a GPU that the student has not seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from statistics import median
from types import ModuleType

from utils import records
from utils.checks.forms import FactorTolerance, Rate
from utils.checks.hidden import Observed, Tolerance, asked
from utils.checks.question import Answer, Case, Mistake, Question

from . import hidden
from .rules import asking

EACH_WITHIN = 4.0
"""How far off one prediction may be, as a factor."""
MEDIAN_WITHIN = 1.3
"""How far off the middle one of all predictions may be."""

SLOWER = 8
"""How many times slower the GPU is that a prediction must also follow."""

MEMORY, COMPUTE = "an operator that memory limits", "an operator that arithmetic limits"
SIXTEEN_BIT = "a 16-bit dtype that only the other one's points tell about"
BOTH = "points in bf16 and in fp16"
SLOW_GPU = f"the points of a GPU that takes {SLOWER} times as long for everything"


# ---- the model ----
def _seconds_cases(rng: Random) -> list[Case]:
    cases = []
    for tag in 4 * (MEMORY, COMPUTE):
        gpu = {"peak_flops": rng.randint(20, 2500) * 1e12, "bandwidth": rng.randint(300, 8000) * 1e9}
        bytes_moved = rng.randint(10**5, 10**9)
        lean = rng.uniform(0.01, 0.8) if tag == MEMORY else rng.uniform(1.2, 50)
        flops = int(lean * bytes_moved * gpu["peak_flops"] / gpu["bandwidth"])
        cases.append(Case({"flops": flops, "bytes_moved": bytes_moved} | gpu, tag))
    return [*cases, Case({"flops": 0, "bytes_moved": 4096, "peak_flops": 1e12, "bandwidth": 1e12}, "no FLOPs at all")]


def predict_seconds(flops: int, bytes_moved: int, peak_flops: float, bandwidth: float) -> float:
    return flops / peak_flops if flops * bandwidth > bytes_moved * peak_flops else bytes_moved / bandwidth


def _parts(combine: Callable[[float, float], float]) -> Callable[..., float]:
    """A mistaken way to combine the seconds of arithmetic and of traffic."""
    return lambda flops, bytes_moved, peak_flops, bandwidth: combine(flops / peak_flops, bytes_moved / bandwidth)


SECONDS = Question(
    "predict_seconds",
    _seconds_cases,
    predict_seconds,
    (
        Mistake(
            "the two times are added: arithmetic and traffic overlap, the longer one counts", _parts(float.__add__), 1
        ),
        Mistake("the shorter of the two times is taken: the longer one limits", _parts(min), 1),
        Mistake("memory is taken to limit always", _parts(lambda compute, memory: memory), 1),
        Mistake("arithmetic is taken to limit always", _parts(lambda compute, memory: compute), 1),
        Mistake("microseconds are returned: the answer is in seconds", _parts(lambda c, m: 1e6 * max(c, m)), 2),
        Mistake("milliseconds are returned: the answer is in seconds", _parts(lambda c, m: 1e3 * max(c, m)), 2),
        Mistake(
            "peak and bandwidth are swapped",
            lambda flops, bytes_moved, peak_flops, bandwidth: max(flops / bandwidth, bytes_moved / peak_flops),
            2,
        ),
        Mistake("the mean of the two times is taken", _parts(lambda compute, memory: (compute + memory) / 2), 1),
    ),
    form=Rate(),
    refused={"flops": -5, "bytes_moved": -64, "peak_flops": -3.0, "bandwidth": -2.0},
)


# ---- the roofs, from measurements that are invented ----
def _points(rng: Random, dtypes: Sequence[str]) -> list[dict[str, object]]:
    """Measured operators of a GPU that does not exist; neither the most bytes nor the least time is the fastest."""
    points = []
    for dtype in dtypes:
        bytes_moved, flops = rng.randint(10**6, 10**9), rng.randint(10**7, 10**12)
        seconds = round(rng.uniform(1e-5, 1e-3), 7)
        points.append(
            {"kind": "any", "params": {}, "dtype": dtype, "flops": flops, "bytes": bytes_moved, "seconds": seconds}
        )
    rng.shuffle(points)
    return points


def _bandwidth_cases(rng: Random) -> list[Case]:
    drawn = (_points(rng, ["fp32", "bf16"] * rng.randint(2, 4)) for _ in range(5))
    return [Case({"points": points}, brief=f"{len(points)} points") for points in drawn]


def _peak_cases(rng: Random) -> list[Case]:
    cases = []
    for dtype, tag in (("fp32", ""), ("bf16", ""), ("fp32", ""), ("bf16", ""), ("fp16", SIXTEEN_BIT)):
        points = _points(rng, ["fp32", "bf16"] * 4)
        cases.append(Case({"points": points, "dtype": dtype}, tag, brief=f"8 points, for {dtype!r}"))
    points = _points(rng, ["fp32"] * 3 + ["fp16"] * 3)
    cases.append(Case({"points": points, "dtype": "bf16"}, SIXTEEN_BIT, brief="6 points, for 'bf16'"))
    points = _points(rng, ["fp32"] * 2 + ["bf16", "fp16"] * 3)
    cases += [Case({"points": points, "dtype": d}, BOTH, brief=f"8 points, for {d!r}") for d in ("bf16", "fp16")]
    return cases


def _rates(points: Sequence[Mapping], what: str, dtype: str = "") -> list[float]:
    """Rates of the points, sorted; with ``dtype``, of those that tell about it."""
    bits = {"fp32": 32, "bf16": 16, "fp16": 16}
    return sorted(p[what] / p["seconds"] for p in points if not dtype or bits[p["dtype"]] == bits[dtype])


_POINT = {"kind": "any", "params": {}, "flops": 2_000_000, "bytes": 4096, "seconds": 1e-5}

BANDWIDTH = Question(
    "measured_bandwidth",
    _bandwidth_cases,
    lambda points: _rates(points, "bytes")[-1],
    (
        Mistake(
            "the mean over the points is taken: most operators stay below the roof",
            lambda points: sum(_rates(points, "bytes")) / len(points),
            3,
        ),
        Mistake(
            "all bytes are divided by all seconds: a mean, not the roof",
            lambda points: sum(p["bytes"] for p in points) / sum(p["seconds"] for p in points),
            3,
        ),
        Mistake("FLOPs are taken in place of bytes", lambda points: _rates(points, "flops")[-1], 4),
        Mistake(
            "the most bytes are divided by the least seconds, of different operators",
            lambda points: max(p["bytes"] for p in points) / min(p["seconds"] for p in points),
            4,
        ),
        Mistake("the lowest rate is taken", lambda points: _rates(points, "bytes")[0], 3),
        Mistake("the first point is taken", lambda points: points[0]["bytes"] / points[0]["seconds"], 3),
        Mistake(
            "the rate of the point with the most bytes is taken",
            lambda points: max((p["bytes"], p["bytes"] / p["seconds"]) for p in points)[1],
            3,
        ),
    ),
    form=Rate(),
    refused={"points": []},
)
PEAK = Question(
    "measured_peak",
    _peak_cases,
    lambda points, dtype: _rates(points, "flops", dtype)[-1],
    (
        Mistake(
            "the dtype is ignored: fp32 does not run on the tensor cores' 16-bit rate",
            lambda points, dtype: _rates(points, "flops")[-1],
            5,
        ),
        Mistake(
            "the other 16-bit dtype counts only where there is no point in dtype itself: it counts always",
            lambda points, dtype: (
                _rates([p for p in points if p["dtype"] == dtype], "flops") or _rates(points, "flops", dtype)
            )[-1],
            5,
        ),
        Mistake("bytes are taken in place of FLOPs", lambda points, dtype: _rates(points, "bytes", dtype)[-1], 4),
        Mistake(
            "the mean over the points is taken: most operators stay below the roof",
            lambda points, dtype: sum(_rates(points, "flops", dtype)) / len(_rates(points, "flops", dtype)),
            3,
        ),
        Mistake("the lowest rate is taken", lambda points, dtype: _rates(points, "flops", dtype)[0], 3),
    ),
    form=Rate(),
    refused={"dtype": "fp7"},
    also_refused=[
        ({"points": [_POINT | {"dtype": measured}], "dtype": asked}, asked)
        for measured, asked in (("fp32", "fp16"), ("fp32", "bf16"), ("fp16", "fp32"))
    ],
)


# ---- operators that the student has not seen ----
@cache
def _results() -> Mapping[str, list[dict[str, object]]]:
    return records.load("operators").results


def held_out() -> list[dict[str, object]]:
    """The measurements that the predictions are held against."""
    return _results()["held_out"]


def seen() -> list[dict[str, object]]:
    """The measurements that the student may look at."""
    keys = ("kind", "params", "dtype", "flops", "bytes", "seconds")
    return [{key: point[key] for key in keys} for point in _results()["points"]]


def _held_out_cases(rng: Random) -> list[Case]:
    points, cases = seen(), []
    for item in held_out():
        asked = {"kind": item["kind"], "params": dict(item["params"]), "dtype": item["dtype"]}
        written = ", ".join(f"{key}={value!r}" for key, value in asked.items())
        cases.append(Case(asked | {"points": points}, "", f"{written}, points=points"))
    slow = [point | {"seconds": SLOWER * point["seconds"]} for point in points]
    typed = f"points=[p | {{'seconds': {SLOWER} * p['seconds']}} for p in points]"
    for case in rng.sample(cases, 6):
        shown = case.shown.replace("points=points", typed)
        cases.append(Case({**case.arguments, "points": slow}, SLOW_GPU, shown))
    return cases


def _seconds(points: Sequence[Mapping], **asked: object) -> float:
    """The measured time, on the GPU that the points tell about."""
    return _measured(**asked)["seconds"] * points[0]["seconds"] / seen()[0]["seconds"]


def _measured(kind: str, params: Mapping[str, int], dtype: str, **_: object) -> dict[str, object]:
    return next(i for i in held_out() if (i["kind"], i["params"], i["dtype"]) == (kind, dict(params), dtype))


def _predicted(combine: Callable[[float, float], float], size: float = 1.0) -> Callable[..., float]:
    """What a prediction from the right counts and roofs gives that combines the times in a mistaken way."""

    def computes(kind: str, params: Mapping[str, int], dtype: str, points: Sequence[Mapping]) -> float:
        item = _measured(kind, params, dtype)
        arithmetic = item["flops"] / _rates(points, "flops", dtype)[-1]
        return combine(arithmetic, size * item["bytes"] / _rates(points, "bytes")[-1])

    return computes


def _together(answers: Sequence[Answer]) -> str:
    """Whether the middle one is good enough."""
    off = [max(a.got / a.expected, a.expected / a.got) for a in answers if a.case.tag != SLOW_GPU]
    if median(off) > MEDIAN_WITHIN:
        return (
            f"half of the predictions of predict_operator are off by a factor of {median(off):.2f} or more, allowed is "
            f"{MEDIAN_WITHIN:g}"
        )
    return ""


HELD_OUT = Question(
    "predict_operator",
    _held_out_cases,
    _seconds,
    (
        Mistake(
            "predict_operator returns the measurements themselves: predict from counts and roofs",
            lambda **asked: _measured(**asked)["seconds"],
        ),
        Mistake("microseconds are returned: the answer is in seconds", _predicted(lambda c, m: 1e6 * max(c, m)), 2),
        Mistake("milliseconds are returned: the answer is in seconds", _predicted(lambda c, m: 1e3 * max(c, m)), 2),
        Mistake(
            "arithmetic is taken to limit always: most operators are limited by memory", _predicted(lambda c, m: c), 1
        ),
        Mistake(
            "memory is taken to limit always: large matmuls are limited by arithmetic", _predicted(lambda c, m: m), 1
        ),
        Mistake("the shorter of the two times is taken: the longer one limits", _predicted(min), 1),
    ),
    form=FactorTolerance(factor=EACH_WITHIN),
    together=_together,
)


# ---- a GPU on which arithmetic and traffic take as long as each other: there the model is held to itself
BOTH_TAKE = 8.0


def _balanced_cases(rng: Random) -> list[Case]:
    cases = []
    for item in rng.sample(held_out(), 3):
        point = {"kind": "any", "params": {}, "dtype": item["dtype"], "seconds": BOTH_TAKE}
        points = [point | {"flops": item["flops"], "bytes": 1}, point | {"flops": 1, "bytes": item["bytes"]}]
        asked = {"kind": item["kind"], "params": dict(item["params"]), "dtype": item["dtype"], "points": points}
        cases.append(Case(asked, f"a GPU on which arithmetic and traffic take {BOTH_TAKE:g} seconds each"))
    return cases


BALANCED = Question(
    "predict_operator",
    _balanced_cases,
    lambda **asked: BOTH_TAKE,
    (
        Mistake(
            "the two times are added: arithmetic and traffic overlap, the longer one counts",
            _predicted(float.__add__),
            1,
        ),
    ),
    form=FactorTolerance(factor=1.1),
)


def _observe(package: ModuleType, seed: int) -> Observed:
    observed = asked("1.6", SECONDS, BANDWIDTH, PEAK)(package, seed)
    observed |= hidden.predictions(package, seed)
    return observed


PREDICTION = asking(
    "1.6",
    "predicted and measured time",
    10,
    (SECONDS, BANDWIDTH, PEAK, HELD_OUT, BALANCED),
    builds_on=("1.1", "1.2", "1.3", "1.4"),
    check="check_prediction",
    says="""the model, the measured roofs, and predictions for operators that were measured but not shown.

Each prediction must be within :data:`EACH_WITHIN` times of the measured time, half of them within
:data:`MEDIAN_WITHIN` times.""",
    notice="two counts and two measured roofs place most operators of a model: no kernel was run to predict them",
    observe=_observe,
    # a prediction may count what else takes time; that is little beside milliseconds
    tolerances={"predict_operator": Tolerance(relative=0.2)},
)
check_prediction = PREDICTION.check
