"""A decode step whose requests begin with common blocks, as arrays: lab 5's, and the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from solutions.lab5_serving.batch import Batch, Layout
from solutions.lab5_serving.cuda_graphs import Graph, StepGraphs

from .shared_prefix import MOST_GROUPS, Group

#: Groups that a step has room for: the last one takes the requests that share nothing.
ROOM = MOST_GROUPS + 1


@dataclass(frozen=True)
class SharedBatch(Batch):
    """A decode step on the device; ``block_tables`` and ``context_lens`` are those of the suffixes."""

    prefix_tables: Tensor  # (ROOM, W) int32
    prefix_lens: Tensor  # (ROOM,) int32: tokens of the blocks that each group shares
    group_starts: Tensor  # (ROOM + 1,) int32: where the members of each group begin
    members: Tensor  # (S,) int32: the rows of all groups, one after the other


def share(
    arrays: Mapping[str, np.ndarray], groups: Sequence[Group], block_size: int, sequences: int
) -> dict[str, np.ndarray]:
    """The arrays of a :class:`SharedBatch` from those of a decode step.

    Args:
        arrays: as :func:`solutions.lab5_serving.batch.assemble` makes them; they are not changed.
        groups: at most ``MOST_GROUPS``.
        block_size: tokens of a block.
        sequences: rows that the step is padded to. Those behind the end are members of the last group.
    """
    tables, lens = arrays["block_tables"].copy(), arrays["context_lens"].copy()
    prefix_tables, prefix_lens = np.zeros((ROOM, tables.shape[1]), np.int32), np.zeros(ROOM, np.int32)
    members: list[int] = []
    starts = []
    for number, group in enumerate(groups):
        rows, blocks = list(group.rows), group.blocks
        prefix_tables[number, :blocks] = tables[rows[0], :blocks]
        prefix_lens[number] = blocks * block_size
        tables[rows, : tables.shape[1] - blocks] = tables[rows, blocks:]
        lens[rows] -= blocks * block_size
        starts.append(len(members))
        members += rows
    starts += [len(members)] * (ROOM - len(groups)) + [sequences]
    members += sorted(set(range(sequences)) - set(members))
    return dict(arrays) | {
        "block_tables": tables,
        "context_lens": lens,
        "prefix_tables": prefix_tables,
        "prefix_lens": prefix_lens,
        "group_starts": np.asarray(starts, np.int32),
        "members": np.asarray(members, np.int32),
    }


class SharedLayout(Layout):
    """Where the arrays of a :class:`SharedBatch` lie."""

    @classmethod
    def of_step(cls, sequences: int, tokens: int, width: int) -> SharedLayout:
        shapes = Layout.of_step(sequences, tokens, width).shapes
        groups = {"prefix_tables": (ROOM, width), "prefix_lens": (ROOM,), "group_starts": (ROOM + 1,)}
        return cls(shapes | groups | {"members": (sequences,)})

    def unpack(self, packed: Tensor, decode: bool) -> SharedBatch:
        return SharedBatch(**{name: packed[place].view(self.shapes[name]) for name, place in self.places.items()},
                           decode=decode)  # fmt: skip


class SharedGraphs(StepGraphs):
    """Lab 5's graphs of decode steps, with room for groups: which requests they hold is an input of the graph."""

    def prepare(self, sequences: int, tokens: int, width: int) -> Graph:
        key = (sequences, tokens, width)
        if key not in self._graphs:
            layout = SharedLayout.of_step(sequences, sequences * tokens, width)
            inputs = torch.zeros(layout.size, dtype=torch.int32, device=self._staging.device)
            inputs[layout.places["slots"]] = -1  # recording runs the step too: it must not write
            batch = layout.unpack(inputs, decode=True)
            self._graphs[key] = Graph(layout, inputs, self._record(lambda: self._compute(batch)))
        return self._graphs[key]
