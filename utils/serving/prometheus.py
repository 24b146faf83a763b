"""Counters, gauges and histograms in the text form that Prometheus reads.

The form is version 0.0.4 of "Exposition formats" in Prometheus' documentation: lines of ``name{label="value"} number``
after a ``# HELP`` and a ``# TYPE`` line. A counter only grows and its name ends in ``_total``; a histogram's buckets
are cumulative, and the last one, ``le="+Inf"``, counts everything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Metric:
    """A counter or a gauge, with one label or none.

    Args:
        kind: ``"counter"`` or ``"gauge"``.
        label: the label's name, if there is one; ``values`` is then by the label's value, otherwise under ``""``.
    """

    name: str
    help: str
    kind: str = "counter"
    label: str | None = None
    values: dict[str, float] = field(default_factory=dict)

    def add(self, amount: float = 1, value: str = "") -> None:
        """Count ``amount`` more under a value of the label."""
        self.values[value] = self.values.get(value, 0) + amount

    def lines(self) -> Iterable[str]:
        """The metric in Prometheus' text form."""
        yield from _head(self.name, self.help, self.kind)
        for value, number in (self.values or ({} if self.label else {"": 0})).items():
            label = f'{{{self.label}="{_escaped(value)}"}}' if self.label else ""
            yield f"{self.name}{label} {number}"


class Histogram:
    """How many observations were at most so large, for each of some upper bounds; and their sum and number.

    Args:
        bounds: ascending.
    """

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help, list(bounds)
        self.sum, self._counts = 0.0, [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self) -> Iterable[str]:
        """The histogram in Prometheus' text form."""
        yield from _head(self.name, self.help, "histogram")
        for bound, count in zip((*self.bounds, "+Inf"), accumulate(self._counts), strict=True):
            yield f'{self.name}_bucket{{le="{bound}"}} {count}'
        yield f"{self.name}_sum {self.sum}"
        yield f"{self.name}_count {self.count}"


def exposition(metrics: Iterable[Metric | Histogram]) -> str:
    """The page that Prometheus fetches."""
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


def _head(name: str, help: str, kind: str) -> list[str]:
    text = help.replace("\\", r"\\").replace("\n", r"\n")
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
