"""Numbers as the course prints them: the same characters on every machine, SI prefixes, thousands separated.

Claims, tables and figures all format through this module, so that ``3.35e12`` bytes per second reads "3.35 TB/s"
wherever it appears and a notebook's stored text is the same on a laptop and on a GPU machine.
"""

from __future__ import annotations

import math
from numbers import Integral, Real

#: Units that take an SI prefix. Everything else ("FLOP/B", "cycles", "%", "tiles") is printed with the plain number.
PREFIXED = ("FLOP/s", "FLOP", "B/s", "B", "s", "Hz")

_PREFIXES = {-12: "p", -9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: Real, digits: int = 5) -> str:
    """Print ``value`` plainly: an integer exactly ("1,792"), anything else with ``digits`` significant digits.

    Very large and very small numbers use a power of ten ("9.89×10¹⁴"). Trailing zeros are dropped.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``digits`` is less than one.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"value must be a real number, got {value!r}")
    if digits < 1:
        raise ValueError(f"digits must be at least 1, got {digits}")
    if isinstance(value, Integral):
        return f"{int(value):,}".replace("-", "−")
    value = float(value)
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "NaN")
    if value == 0:
        return "0"
    mantissa, exponent = f"{abs(value):.{digits - 1}e}".split("e")
    power = int(exponent)
    sign = "−" if value < 0 else ""
    if -4 <= power < 7:
        decimals = max(0, digits - 1 - power)
        rounded = round(abs(value), digits - 1 - power)
        text = f"{rounded:,.{decimals}f}"
        return sign + (text.rstrip("0").rstrip(".") if "." in text else text)
    mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{sign}{mantissa}×10{str(power).translate(_SUPERSCRIPT)}"


def scale(value: float, unit: str) -> tuple[float, str]:
    """Return the factor to divide by and the prefixed unit that suit ``value``: ``(1e12, "TB/s")`` for 3.35e12 B/s.

    Seconds go down to picoseconds and stay seconds above one; the other units of :data:`PREFIXED` go up in thousands.
    Units outside :data:`PREFIXED` come back as they are, with factor 1.
    """
    if unit not in PREFIXED or value == 0 or not math.isfinite(value):
        return 1.0, unit
    power = 3 * math.floor((math.log10(abs(value)) + 1e-9) / 3)
    power = min(0, max(-12, power)) if unit == "s" else min(18, max(0, power))
    return 10.0**power, _PREFIXES[power] + unit


def quantity(value: Real, unit: str = "", digits: int = 5) -> str:
    """Print a number with its unit: ``quantity(3.35e12, "B/s")`` is "3.35 TB/s", ``quantity(98, "tiles")`` "98 tiles".

    Integers are counts and are printed in full ("4,325,376 B"); floats of a unit in :data:`PREFIXED` get an SI prefix.
    """
    if isinstance(value, Integral) or unit not in PREFIXED:
        return f"{number(value, digits)} {unit}".rstrip()
    factor, scaled = scale(float(value), unit)
    return f"{number(float(value) / factor, digits)} {scaled}"
