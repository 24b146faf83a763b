"""Hidden cases of exercise 1.6: predictions from measurements of GPUs that do not exist, which no release holds."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from utils.checks.hidden import Draw, Observation


def _points(draw: Draw, dtypes: list[str], peak: float, bandwidth: float) -> list[dict[str, Any]]:
    """Measurements whose rates lie below ``peak`` FLOP/s and ``bandwidth`` bytes/s, and reach both once a dtype."""
    points = []
    for number, dtype in enumerate(dtypes):
        share = 1.0 if number == 0 else draw.random.uniform(0.3, 0.9)
        for kind in ("compute", "memory", "neither"):
            seconds = draw.random.uniform(1e-6, 1e-3)
            done = 1.0 if kind == "compute" else draw.random.uniform(0.1, 0.6)
            moved = 1.0 if kind == "memory" else draw.random.uniform(0.1, 0.6)
            counts = {
                "flops": round(done * share * peak * seconds),
                "bytes": round(moved * share * bandwidth * seconds),
            }
            points.append({"kind": "add", "params": {"n": 1}, "dtype": dtype, "seconds": seconds, **counts})
    draw.random.shuffle(points)
    return points


def predictions(package: ModuleType, seed: int) -> dict[str, Observation]:
    """Operators on GPUs on which memory or arithmetic limits by far, and the refusal where no point tells about it."""
    draw = Draw(seed, "1.6")
    # rates at which gelu and layer norm are bound by arithmetic, or copies and additions by memory, by far
    slow = _points(draw, ["fp32", "bf16", "fp16"], draw.random.uniform(1, 9) * 1e9, draw.random.uniform(1, 9) * 1e12)
    fast = _points(draw, ["fp16", "fp32", "bf16"], draw.random.uniform(1, 9) * 1e15, draw.random.uniform(1, 9) * 1e11)
    single = [point for point in slow if point["dtype"] == "fp32"]
    n = draw.between(10**8, 10**9)
    kinds = [("gelu", {"n": n}), ("axpy", {"n": n}), ("layer_norm", {"rows": draw.between(10**4, 10**5), "cols": 4096})]
    kinds += [("add", {"n": n}), ("gelu", {"rows": draw.between(10**4, 10**5), "cols": 3000})]
    return {
        "measured_peak where nothing tells about the dtype: a ValueError that names it": _refuses(
            lambda: package.measured_peak(single, "fp16"), "fp16"
        ),
        "predict_operator": [
            package.predict_operator(kind, params, dtype, points)
            for points, dtype in ((slow, "fp32"), (slow, "bf16"), (fast, "fp16"))
            for kind, params in kinds
        ],
    }


def _refuses(call: Callable[[], object], named: str) -> bool:
    """Whether a call raises a ValueError that names what is wrong."""
    try:
        call()
    except ValueError as error:
        return named in str(error)
    return False
