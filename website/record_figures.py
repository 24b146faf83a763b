"""Recorded figures as text: what a key's name says about the unit, a key in words, one unit for a column of a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from utils.units import PREFIXED, number, quantity, scale

#: A column whose largest figure is this many times its smallest has a unit in each cell instead of one in the header.
WIDEST_COLUMN = 1e4

Path = tuple[str, ...]
_LABELS = {
    "seconds": "time", "ratio_low": "ratio low", "ratio_high": "ratio high",
    "flops_per_second": "arithmetic", "bytes_per_second": "bandwidth",
    "bus_bytes_per_second": "bus bandwidth", "tokens_per_second": "throughput", "bytes_per_cycle_per_sm": "per SM",
    "clock_hz": "clock", "watts": "power", "celsius": "temperature", "flops": "operations", "dtype": "format",
    "seq_len": "sequence length", "head_dim": "head dimension", "kv_heads": "heads of keys", "timed": "what ran",
    "calls_a_lap": "calls per lap",
}  # fmt: skip
#: Words of keys that are written otherwise.
_NAMES = {
    "l1": "L1", "l2": "L2", "hbm": "HBM", "sm": "SM", "dram": "DRAM", "cublas": "cuBLAS", "nccl": "NCCL",
    "gelu": "GeLU", "relu": "ReLU", "gemm": "GEMM", "ttft": "TTFT", "tpot": "TPOT", "dq": "dQ", "dk": "dK", "dv": "dV",
    "lse": "logsumexp", "rms": "RMS", "sin2": "sin²", "cos2": "cos²", "flops": "operations",
}  # fmt: skip
#: What a key's name says about its unit; the first pattern that fits the whole name counts.
_UNITS = (
    (r".*bytes_per_second", "B/s"), (r".*flops_per_second", "FLOP/s"), (r".*tokens_per_second", "tokens/s"),
    (r"bytes_per_cycle_per_sm", "B/cycle"), (r"(.*_)?bytes(_.*)?|working_set|element_size|.*_size_bytes", "B"),
    (r"(.*_)?cycles", "cycles"), (r"(.*_)?seconds|low|high|duration|start|end|ttft|tpot|latency|classes", "s"),
    (r"(.*_)?flops", "FLOP"), (r"intensity", "FLOP/B"), (r".*_hz", "Hz"), (r"watts", "W"), (r"celsius", "°C"),
    (r"capacity|rate|request_rate", "requests/s"), (r"bandwidth", "B/s"),
)  # fmt: skip


def unit_of(path: Path) -> str:
    """The SI unit that the names on the way to a figure say, from the last to the first; "" when none does."""
    for key in reversed(path):
        for pattern, unit in _UNITS:
            if re.fullmatch(pattern, key):
                return unit
    return ""


def spread_of(path: Path) -> tuple[Path, Path]:
    """Where the low and the high end of a measured figure are kept beside it: ``low`` beside ``seconds``."""
    *outer, key = path
    before = "" if key == "seconds" else f"{key}_"
    return (*outer, f"{before}low"), (*outer, f"{before}high")


def label(key: str) -> str:
    """A key in words: ``"micro_batches"`` is "micro batches", ``"peak_bytes"`` "peak": the unit stands beside it."""
    if key in _LABELS:
        return _LABELS[key]
    if "__" in key:  # a hardware counter's own name
        return key
    short = re.sub(r"(?<=.)_seconds$", "_time", re.sub(r"(?<=.)_(bytes|cycles)$", "", key))
    return " ".join(_NAMES.get(word, word) for word in short.split("_"))


def path_label(path: Path) -> str:
    """A column's name: the way to it in words, from the outside."""
    return ": ".join(label(key) for key in path)


def text(value: Any, unit: str = "") -> str:
    """A recorded value as people read it; a figure with its unit and the SI prefix that :mod:`utils.units` gives it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(text(v, unit) for v in value) or "–"
    if isinstance(value, int | float):
        return quantity(value, unit)
    return "–" if value is None else str(value)


def is_figure(value: Any) -> bool:
    """Whether a recorded value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Column:
    """A column of figures: its path of keys, what to divide by, the unit for its header, or units in the cells.

    ``spread`` holds the paths of the low and high end that stand beside each figure, if there are such.
    """

    path: Path
    factor: float
    unit: str
    in_cells: bool
    spread: tuple[Path, ...] = ()

    def cell(self, value: Any) -> str:
        """A value of this column as text."""
        if isinstance(value, list) and value:
            return ", ".join(map(self.cell, value))
        if not is_figure(value) or self.in_cells:
            return text(value, unit_of(self.path))
        return number(value if self.factor == 1 else value / self.factor)


def column(path: Path, values: Sequence[Any]) -> Column:
    """How to print the values at ``path`` of all points: in one unit where they are near each other."""
    unit = unit_of(path)
    each = [v for value in values for v in (value if isinstance(value, list) else [value])]
    figures = [abs(v) for v in each if is_figure(v) and v]
    if not figures or unit not in PREFIXED:
        return Column(path, 1, unit if figures else "", False)
    whole = all(isinstance(v, int) for v in figures)
    if max(figures) > WIDEST_COLUMN * min(figures):
        return Column(path, 1, unit if whole else "", not whole)
    if whole and max(figures) < 1e5:
        return Column(path, 1, unit, False)
    factor, prefixed = scale(max(figures), unit)
    return Column(path, factor, prefixed, False)
