"""The roofline of a GPU: where its two roofs meet, and what they allow (exercise 1.5)."""

import math
from fractions import Fraction

from utils.operators import require_sizes


def require_positive(**quantities: float) -> None:
    """Refuse rates, times and intensities that are not above zero, naming the first offender."""
    for name, value in quantities.items():
        if not value > 0:
            raise ValueError(f"{name} must be above zero, got {value}")


def ridge_point(peak_flops: float, bandwidth: float) -> float:
    """Arithmetic intensity in FLOP/B from which on arithmetic, not memory, limits.

    Args:
        peak_flops: peak arithmetic rate in FLOP/s.
        bandwidth: memory bandwidth in bytes/s.

    Raises:
        ValueError: an argument is not above zero.
    """
    require_positive(peak_flops=peak_flops, bandwidth=bandwidth)
    raise NotImplementedError("Lab 1, exercise 1.5: the ridge point")


def attainable_rate(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """The highest rate in FLOP/s that an operator of ``intensity`` FLOP/B can reach.

    Raises:
        ValueError: an argument is not above zero.
    """
    require_positive(intensity=intensity, peak_flops=peak_flops, bandwidth=bandwidth)
    raise NotImplementedError("Lab 1, exercise 1.5: the attainable rate")


def smallest_compute_bound_batch(d: int, f: int, element_size: int, peak_flops: float, bandwidth: float) -> int | None:
    """The smallest B for which (B, d) @ (d, f) has at least the intensity of the ridge point; None when no B has.

    Exactly: where the inequality holds with equality at a whole B, that B, which floats may miss by one.

    Raises:
        ValueError: an argument is below 1, or not above zero.
    """
    require_sizes(d=d, f=f, element_size=element_size)
    require_positive(peak_flops=peak_flops, bandwidth=bandwidth)
    raise NotImplementedError("Lab 1, exercise 1.5: the smallest compute-bound batch")
