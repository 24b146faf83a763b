"""A pipeline schedule: for each stage, what it does in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from utils.operators import require_sizes

KINDS = ("F", "B", "W")


class Action(NamedTuple):
    """One piece of work of a stage: ``kind`` "F" forward, "B" backward, "W" gradients of weights where they are apart.

    Where a schedule has "W" actions, its "B" computes the gradient of the stage's input only.
    """

    kind: str
    micro_batch: int
    chunk: int = 0
    """which of the stage's chunks of layers; chunk c of stage s holds the (c p + s)-th piece of the model"""

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """Orders of all stages.

    Args:
        name: for titles.
        orders: for each stage its actions, in order.
        micro_batches: m, each of which passes through every chunk once.
        chunks: v, chunks of layers on each stage.

    Raises:
        ValueError: a stage that lacks an action, has one twice or one that cannot be; the message names it.
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]
    micro_batches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        require_sizes(stages=len(self.orders), micro_batches=self.micro_batches, chunks=self.chunks)
        kinds = KINDS if self.split_backward else KINDS[:2]
        wanted = {Action(k, i, c) for k in kinds for i in range(self.micro_batches) for c in range(self.chunks)}
        for stage, order in enumerate(self.orders):
            count = Counter(order)
            problems = {
                "lacks": wanted - set(count),
                "cannot have": set(count) - wanted,
                "repeats": {action for action, times in count.items() if times > 1},
            }
            for what, actions in problems.items():
                if actions:
                    raise ValueError(f"{self.name}: stage {stage} {what} {min(actions)}")

    @property
    def stages(self) -> int:
        """p, the number of stages."""
        return len(self.orders)

    @property
    def split_backward(self) -> bool:
        """Gradients of weights ("W") are computed apart from those of activations ("B")."""
        return any(action.kind == "W" for order in self.orders for action in order)

    def needs(self, stage: int, action: Action) -> Iterator[tuple[int, Action]]:
        """The (stage, action) pairs that must be done before ``action`` can start on ``stage``."""
        kind, micro_batch, chunk = action
        last, p = self.chunks - 1, self.stages
        if kind == "F" and (stage or chunk):
            yield (stage - 1, action) if stage else (p - 1, Action("F", micro_batch, chunk - 1))
        elif kind == "B":
            yield stage, Action("F", micro_batch, chunk)
            if stage < p - 1:
                yield stage + 1, action
            elif chunk < last:
                yield 0, Action("B", micro_batch, chunk + 1)
        elif kind == "W":
            yield stage, Action("B", micro_batch, chunk)

    def in_flight(self, stage: int) -> list[int]:
        """After each action of ``stage``: how many forward passes still wait for the end of their backward pass.

        Their activations are in memory; each is those of one micro-batch and one chunk.
        """
        end = "W" if self.split_backward else "B"
        return list(accumulate((a.kind == "F") - (a.kind == end) for a in self.orders[stage]))

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each stage the most (micro-batch, chunk) pairs in flight at once."""
        return tuple(max(self.in_flight(stage)) for stage in range(self.stages))


def from_orders(name: str, orders: Sequence[Sequence[Action | tuple]], chunks: int = 1) -> Schedule:
    """A schedule from lists of ``Action`` or (kind, micro_batch[, chunk]) tuples: a student's, a recorded one.

    Raises:
        ValueError: as :class:`Schedule`; no actions.
    """
    listed = tuple(tuple(Action(*action) for action in order) for order in orders)
    if not any(listed):
        raise ValueError(f"{name}: no stage has an action")
    return Schedule(name, listed, 1 + max(a.micro_batch for order in listed for a in order), chunks)
