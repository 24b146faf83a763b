"""The roofline: how fast a GPU can run an operator, from two numbers of the operator and two of the GPU.

An operator of F FLOPs and B bytes takes at least F / peak seconds to compute and B / bandwidth seconds to move. When
the two overlap it takes the longer of them; when they do not, up to their sum (Williams, Waterman and Patterson 2009).
Costs of operators come from :mod:`utils.operators`, those of a whole transformer layer from :mod:`utils.encoder_layer`;
both are reachable from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from numbers import Real
from typing import NamedTuple

from utils.dataflow import CLASSES, Operator, class_totals, flop_shares
from utils.encoder_layer import transformer_layer
from utils.hardware import CPU, GPU, TPU
from utils.operators import (
    ELEMENT_SIZE,
    Cost,
    add,
    attention,
    causal_pairs,
    copy,
    dot_product,
    element_size,
    elementwise,
    gelu,
    layer_norm,
    matmul,
    relu,
    require_sizes,
    softmax,
)

Device = GPU | TPU | CPU


class TimeBounds(NamedTuple):
    """Seconds a piece of work takes at least."""

    overlapped: float
    """when arithmetic and traffic overlap perfectly: the longer of the two"""
    serial: float
    """when nothing overlaps: their sum, at most twice ``overlapped``"""


def _check_device(gpu: object) -> None:
    if not isinstance(gpu, Device):
        raise TypeError(f"gpu must be an entry of the hardware table, such as gpu('H100'), got {gpu!r}")


def _check_cost(cost: object) -> None:
    if not isinstance(cost, Cost):
        raise TypeError(f"cost must be a Cost(flops, bytes), got {cost!r}")


def peak(gpu: Device, dtype: str = "bf16") -> float:
    """Peak FLOP/s of ``gpu`` in ``dtype``, dense.

    Raises:
        TypeError: ``gpu`` is not an entry of the hardware table.
        ValueError: this GPU has no such rate; the message lists those it has.
    """
    _check_device(gpu)
    if not isinstance(dtype, str) or dtype not in gpu.peak_flops:
        raise ValueError(f"{gpu.name} has no {dtype!r} rate; it has: {', '.join(gpu.peak_flops)}")
    return gpu.peak_flops[dtype]


def ridge(gpu: Device, dtype: str = "bf16") -> float:
    """Intensity in FLOP/B where the two roofs meet: below it memory limits, above it arithmetic (H100, bf16: 295)."""
    return peak(gpu, dtype) / gpu.memory_bandwidth


def attainable(intensity: float, gpu: Device, dtype: str = "bf16") -> float:
    """Highest FLOP/s possible at ``intensity`` FLOP/B: the lower of the two roofs.

    Raises:
        TypeError, ValueError: the intensity is not a number, or negative.
    """
    if isinstance(intensity, bool) or not isinstance(intensity, Real):
        raise TypeError(f"intensity must be a number of FLOP/B, got {intensity!r}")
    if not intensity >= 0:
        raise ValueError(f"intensity must be zero or more FLOP/B, got {intensity}")
    return min(peak(gpu, dtype), intensity * gpu.memory_bandwidth)


def compute_time(cost: Cost, gpu: Device, dtype: str = "bf16") -> float:
    """Seconds for the arithmetic of ``cost`` at the peak rate; TypeError where ``cost`` is no Cost."""
    _check_cost(cost)
    return cost.flops / peak(gpu, dtype)


def memory_time(cost: Cost, gpu: Device) -> float:
    """Seconds for the traffic of ``cost`` at the full memory bandwidth; TypeError as in :func:`compute_time`."""
    _check_cost(cost)
    _check_device(gpu)
    return cost.bytes / gpu.memory_bandwidth


def time_bounds(cost: Cost, gpu: Device, dtype: str = "bf16") -> TimeBounds:
    """Least seconds of ``cost`` on ``gpu``: the longer of arithmetic and traffic, and their sum."""
    compute, memory = compute_time(cost, gpu, dtype), memory_time(cost, gpu)
    return TimeBounds(max(compute, memory), compute + memory)


def bound_by(cost: Cost, gpu: Device, dtype: str = "bf16") -> str:
    """``"compute"`` when the arithmetic takes longer than the traffic, else ``"memory"`` (at the ridge too)."""
    _check_cost(cost)
    longer = cost.flops * Fraction(gpu.memory_bandwidth) > cost.bytes * Fraction(peak(gpu, dtype))
    return "compute" if longer else "memory"


def crossover_batch(d: int, f: int, gpu: Device, dtype: str = "bf16") -> int | None:
    """Smallest B at which a (B, d) @ (d, f) matmul is compute-bound on ``gpu``, or None when no B is enough.

    Intensity is 2Bdf / (s (Bd + df + Bf)) with s bytes an element; it exceeds the ridge R iff
    B (2df - sR(d + f)) > sRdf. For d and f much larger than R that is B > sR/2, the ridge itself in 16 bit.
    """
    require_sizes(d=d, f=f)
    threshold = element_size(dtype) * Fraction(peak(gpu, dtype)) / Fraction(gpu.memory_bandwidth)
    slope = 2 * d * f - threshold * (d + f)
    return floor(threshold * d * f / slope) + 1 if slope > 0 else None


def class_seconds(operators: Iterable[Operator], gpu: Device, dtype: str = "bf16") -> dict[str, float]:
    """Least seconds of each operator class on ``gpu``: the sum over its operators, run one after another.

    Contractions run at the peak of ``dtype``; the others on the ordinary cores, at the peak of fp32.
    """
    seconds = dict.fromkeys(CLASSES, 0.0)
    for each in operators:
        if not isinstance(each, Operator):
            raise TypeError(f"operators must be of type Operator, as transformer_layer gives them, got {each!r}")
        rate = dtype if each.operator_class == "contraction" else "fp32"
        seconds[each.operator_class] += time_bounds(each.cost, gpu, rate).overlapped
    return seconds
