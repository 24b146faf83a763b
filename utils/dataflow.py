"""Operators as a graph: what each computes, which arrays it reads and writes, and what fusing them saves.

Operators fall into three classes (Ivanov et al. 2021, "Data Movement Is All You Need", MLSys):

- ``contraction``: matrix products;
- ``normalisation``: whatever reduces over an axis: softmax, LayerNorm, the gradients of biases;
- ``element-wise``: the rest: biases, dropout, activations, residual connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from utils.operators import Cost

CLASSES = ("contraction", "normalisation", "element-wise")


@dataclass(frozen=True)
class Array:
    """An array in memory: its name, its elements, bytes of an element."""

    name: str
    elements: int
    element_size: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return self.elements * self.element_size


@dataclass(frozen=True)
class Operator:
    """One kernel: its class, its FLOPs, the arrays it reads and writes, each once and in full.

    ``phase`` is ``"forward"`` or ``"backward"``; ``parts`` names the operators that a fused one stands for.
    """

    name: str
    operator_class: str
    flops: int
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    phase: str
    parts: tuple[str, ...]

    @property
    def cost(self) -> Cost:
        """FLOPs, and bytes of everything read and written."""
        return Cost(self.flops, sum(array.bytes for array in (*self.reads, *self.writes)))


def fuse(operators: Sequence[Operator], run: Sequence[Operator]) -> Operator:
    """One operator that does the work of ``run``, a part of ``operators``, in a single kernel.

    What one member writes and only members read stays on chip: neither written nor read. An array that several members
    read is read once. FLOPs stay as they are.
    """
    if len(run) == 1:
        return run[0]
    written = {array: None for each in run for array in each.writes}
    needed = {array for each in operators if each not in run for array in each.reads}
    used_somewhere = {array for each in operators for array in each.reads}
    classes = {each.operator_class for each in run}
    return Operator(
        name=" + ".join(each.name for each in run),
        operator_class=next(each for each in CLASSES if each in classes),
        flops=sum(each.flops for each in run),
        reads=tuple(dict.fromkeys(array for each in run for array in each.reads if array not in written)),
        writes=tuple(array for array in written if array in needed or array not in used_somewhere),
        phase=run[0].phase,
        parts=tuple(part for each in run for part in each.parts),
    )


def fuse_between_contractions(operators: Sequence[Operator]) -> list[Operator]:
    """Fuse each run of neighbours of one phase that are no contractions into one kernel; contractions stay alone."""
    fused: list[Operator] = []
    for (contraction, _), run in groupby(operators, lambda each: (each.operator_class == "contraction", each.phase)):
        members = list(run)
        fused.extend(members if contraction else [fuse(operators, members)])
    return fused


def class_totals(operators: Iterable[Operator]) -> dict[str, Cost]:
    """The summed cost of each of the three classes."""
    totals = dict.fromkeys(CLASSES, Cost(0, 0))
    for each in operators:
        totals[each.operator_class] += each.cost
    return totals


def flop_shares(operators: Iterable[Operator]) -> dict[str, float]:
    """Each class's share of all FLOPs, adding up to 1."""
    totals = class_totals(operators)
    total = sum(cost.flops for cost in totals.values())
    return {name: cost.flops / total for name, cost in totals.items()}
