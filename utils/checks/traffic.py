"""Holds a kernel to a traffic budget, counted exactly, and to using only memory that is its own.

The profiler counts every byte that a kernel loads and stores, by argument. A budget says how many the exercise's
algorithm needs: one read of each input, one write of the output, or a tiled kernel's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from utils.checks.cases import Case
from utils.checks.problem import Problem

_SHOWN = 3

#: What goes wrong where only the ``far`` layout does.
OVERFLOW = (
    "only offsets beyond 2^31 are wrong: a 32-bit integer overflows where an index is multiplied by a stride or "
    "the size of a tile; convert the index to 64 bits first: row.to(tl.int64) * stride"
)


@dataclass(frozen=True)
class Passes:
    """So many passes over one tensor: ``Passes("row", "col")`` is one pass over a (row, col) tensor.

    Args:
        axes: The tensor's axes, by the names of the case.
        times: How many passes: a number, or a function of the case (``lambda case: ceil(case.sizes["n"] / 64)``). Parts
            of a pass are a ``Fraction``, so that bytes come out whole.
        element_size: Bytes of an element; by default that of the case's dtype.
    """

    axes: tuple[str | int, ...]
    times: int | float | Fraction | Callable[[Case], float] = 1
    element_size: int | None = None

    def __init__(
        self,
        *axes: str | int,
        times: int | float | Fraction | Callable[[Case], float] = 1,
        element_size: int | None = None,
    ):
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "times", times)
        object.__setattr__(self, "element_size", element_size)

    def one_pass(self, case: Case) -> int:
        """Bytes of the tensor."""
        return case.numel(*self.axes) * (self.element_size or case.element_size)

    def __call__(self, case: Case) -> float:
        times = self.times(case) if callable(self.times) else self.times
        num_bytes = self.one_pass(case) * times
        return int(num_bytes) if num_bytes == int(num_bytes) else float(num_bytes)


#: Bytes that a kernel may load beside its budget in any case: a few numbers per row.
SMALL = 4096

#: Bytes or FLOPs: a number, or a function of the case.
Formula = int | float | Callable[[Case], float]


@dataclass(frozen=True)
class Budget:
    """How much memory traffic an exercise's kernels may cause, in bytes, and how many FLOPs their dots may take.

    Args:
        loads, stores: By kernel argument (``"x_ptr"``): a formula, or :class:`Passes` for passes over a tensor.
        total_loads, total_stores: All arguments together, where students choose their kernel's arguments themselves.
        flops: FLOPs of ``tl.dot``, so that skipping blocks of a causal mask is held to its formula too.
        factor: How many times the formula is allowed.
        exact: The count must equal the formula; less is then as wrong as more.
        least: The share of each formula that must be reached: a kernel that moves less has not computed the result.

    Raises:
        ValueError: ``factor`` is less than 1, or differs from 1 for an exact budget; ``least`` is not from 0 to 1.
    """

    loads: Mapping[str, Formula] = field(default_factory=dict)
    stores: Mapping[str, Formula] = field(default_factory=dict)
    total_loads: Formula | None = None
    total_stores: Formula | None = None
    flops: Formula | None = None
    factor: float = 1.0
    exact: bool = False
    least: float = 0.0

    def __post_init__(self) -> None:
        if not self.factor >= 1 or (self.exact and self.factor != 1):
            raise ValueError(f"factor must be at least 1, and 1 for an exact budget, got {self.factor}")
        if not 0 <= self.least <= 1:
            raise ValueError(f"least is a share from 0 to 1, got {self.least}")


def _bytes(formula: Formula, case: Case) -> float:
    return formula(case) if callable(formula) else formula


def _plain(value: float) -> str:
    return f"{value:,.0f}"


def over_budget(budget: Budget, profile: Any, case: Case) -> Problem | None:
    """The first way in which a profiled run leaves its budget, or None.

    Args:
        budget: What is allowed.
        profile: What :func:`utils.kernel_profile.profile_kernel` counted.
        case: The inputs it ran on, for the formulas.
    """
    for verb, formulas in (("loaded", budget.loads), ("stored", budget.stores)):
        for name, formula in formulas.items():
            if name not in profile.by_argument:
                if _bytes(formula, case) == 0:
                    continue
                known = ", ".join(profile.by_argument) or "none"
                cause = f"the arguments that are used: {known}; keep the stub's names"
                return Problem(f"no kernel loads or stores through an argument named {name}", cause)
            counted = getattr(profile.by_argument[name], f"bytes_{verb}")
            problem = _compare(name, verb, counted, formula, budget, case)
            if problem:
                return problem
    if problem := _beside(budget, profile, case):
        return problem
    totals = (
        ("loaded", budget.total_loads, profile.bytes_loaded),
        ("stored", budget.total_stores, profile.bytes_stored),
    )
    for verb, formula, counted in totals:
        if formula is not None and (problem := _compare("", verb, counted, formula, budget, case)):
            return problem
    if budget.flops is not None and not _within(profile.flops, _bytes(budget.flops, case), budget):
        needed = _bytes(budget.flops, case)
        more = profile.flops > needed
        allowed = needed * (budget.factor if more else budget.least or 1)
        at_most = "" if budget.exact else "at most " if more else "at least "
        cause = "some tiles that are multiplied cannot change the result: skip them" if more else ""
        return Problem(f"tl.dot: expected {at_most}{_plain(allowed)} FLOPs, got {profile.flops:,}", cause)
    return None


def _beside(budget: Budget, profile: Any, case: Case) -> Problem | None:
    """What is loaded past a budget: its tensors under another name; past an exact one, copies that it does not name."""
    named, beside = {*budget.loads, *budget.stores}, 0
    for launch in getattr(profile, "launches", ()) if budget.loads else ():
        homes = {_home(launch.given.get(name)): name for name in named if name in launch.by_argument}
        for name, counted in launch.by_argument.items():
            if name in named or not counted.bytes_loaded:
                continue
            if (other := homes.get(_home(launch.given.get(name)))) is not None:
                return Problem(
                    f"{counted.bytes_loaded:,} bytes of {other} are loaded under another name, {name}",
                    "a tensor is one argument, and what is loaded of it is counted together",
                )
            beside += counted.bytes_loaded
    allowed = sum(_bytes(formula, case) for formula in budget.loads.values()) * budget.factor
    if budget.exact and beside > max(allowed / 4, SMALL):
        return Problem(
            f"{beside:,} bytes are loaded through arguments that the budget does not name, beside {_plain(allowed)}",
            "a copy of an input counts as the input: read it where it lies",
        )
    return None


def _home(value: Any) -> int | None:
    """Where an argument's memory begins: a tensor's, or that of a descriptor's tensor."""
    value = getattr(value, "base", value)
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _within(counted: float, formula: float, budget: Budget) -> bool:
    return counted == formula if budget.exact else formula * budget.least <= counted <= formula * budget.factor


def _compare(name: str, verb: str, counted: int, formula: Formula, budget: Budget, case: Case) -> Problem | None:
    needed = _bytes(formula, case)
    if _within(counted, needed, budget):
        return None
    allowed = needed * (budget.factor if counted > needed else budget.least or 1)
    at_most = "" if budget.exact else "at most " if counted > needed else "at least "
    if name and isinstance(formula, Passes) and formula.one_pass(case):
        one = formula.one_pass(case)
        headline = f"{name} is {verb} {counted / one:.1f} times, expected {at_most}{allowed / one:.3g} "
        headline += f"({counted:,} bytes, expected {_plain(allowed)})"
    else:
        headline = f"{name or 'total traffic'}: expected {at_most}{_plain(allowed)} bytes {verb}, got {counted:,}"
    return Problem(headline, _cause(verb, counted, needed))


def _cause(verb: str, counted: float, needed: float) -> str:
    if counted < needed:
        return f"part of the tensor is never {verb}"
    if needed == 0:
        return f"nothing needs to be {verb} through this argument"
    if verb == "stored":
        return (
            "intermediate results are written out, or several programs write the same elements: store each result once"
        )
    if counted / needed >= 1.9:
        return (
            "the same elements are loaded more than once: load a tile once and keep it on chip until its last use, and "
            "launch no more programs than there are tiles"
        )
    return (
        "some loaded elements are never needed: tiles overlap, a loop begins too early or ends too late, or the grid "
        "goes too far"
    )


def unsafe(profile: Any, case: Case | None = None, raced: str = "") -> Problem | None:
    """The first kind of memory fault that the profiler found, or None: out of bounds, uninitialised, races.

    ``raced`` is why programs race, where the exercise knows.

    Cases in the ``far`` layout come after others of their shape: what first leaves its tensor there is an overflow.
    """
    kinds: Sequence[tuple[str, str, str, str]] = (
        (
            "out_of_bounds",
            "out-of-bounds access",
            "out-of-bounds accesses",
            "the values may be right here, but on a GPU this reads or overwrites other memory, or aborts the kernel: "
            "is there a mask that compares the offsets with the tensor's size, are they the offsets that are meant, "
            "and does no program and no step go beyond the last tile?",
        ),
        (
            "uninitialized_reads",
            "uninitialized read",
            "uninitialized reads",
            "torch.empty does not initialize its memory: write it first, or allocate with torch.zeros",
        ),
        (
            "races",
            "race between programs",
            "races between programs",
            "programs run in any order and at the same time: give each program its own elements to write, "
            "or add with tl.atomic_add",
        ),
    )
    for kind, one, many, cause in kinds:
        found = list(getattr(profile, kind))
        if found:
            more = (f"and {len(found) - _SHOWN:,} more",) if len(found) > _SHOWN else ()
            times = sum(finding.count for finding in found)
            headline = f"{times:,} {one if times == 1 else many}"
            if kind == "out_of_bounds" and case is not None and case.layout == "far":
                cause = OVERFLOW
            if kind == "races":
                cause = raced or cause
            return Problem(headline, cause, tuple(str(finding) for finding in found[:_SHOWN]) + more)
    return None
