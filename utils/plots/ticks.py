"""Axes with units: SI prefixes, binary sizes, plain counts."""

from __future__ import annotations

import math

from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from utils.units import PREFIXED, number, quantity, scale

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def binary_bytes(value: float) -> str:
    """A number of bytes in powers of 1024: "32 B", "48 KiB", "1.5 GiB"."""
    power = min(len(_BINARY) - 1, int(math.log2(value) // 10)) if value >= 1 else 0
    return f"{number(round(value / 1024**power, 4), 4)} {_BINARY[power]}".replace(".0 ", " ")


def quantity_axis(axis: Axis, unit: str, name: str, *, binary: bool = False) -> None:
    """Label an axis that holds SI values: one prefix in the label on a linear axis, one on each tick on a log axis.

    ``binary`` is for bytes on a log axis: ticks at powers of two, printed in KiB, MiB, GiB. Call it after the limits
    are set.
    """
    low, high = sorted(axis.get_view_interval())
    log = axis.get_scale() == "log"
    steps = (1, 2, 5) if log and high < 300 * low else (1,)  # a short axis would have one or two powers of ten
    most = 7 if axis.axis_name == "x" else 12  # side by side there is less room
    if binary:
        powers = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
        step = max(1, -(-len(powers) // most))
        axis.set_major_locator(FixedLocator([2.0**p for p in powers if p % step == 0]))
        axis.set_major_formatter(FuncFormatter(lambda v, _: binary_bytes(v)))
        axis.set_label_text(name)
    elif log and unit in PREFIXED:
        axis.set_major_locator(LogLocator(10, subs=steps, numticks=most))
        axis.set_major_formatter(FuncFormatter(lambda v, _: quantity(float(v), unit, 3)))
        axis.set_label_text(name)
    elif log:
        axis.set_major_locator(LogLocator(10, subs=steps, numticks=most))
        axis.set_major_formatter(FuncFormatter(lambda v, _: number(float(v), 3)))
        axis.set_label_text(f"{name} ({unit})" if unit else name)
    else:
        factor, shown = scale(high, unit)
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda v, _: number(float(v / factor), 4)))
        axis.set_label_text(f"{name} ({shown})" if shown else name)
    axis.set_minor_formatter(NullFormatter())
