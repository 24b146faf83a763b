"""A step of an engine whose requests may have trees, as arrays: lab 5's, and who is an ancestor of whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from solutions.lab5_serving.batch import Batch, Layout, Staging
from solutions.lab5_serving.cuda_graphs import Graph, StepGraphs
from solutions.lab5_serving.drafts import DraftedRequest
from solutions.lab5_serving.scheduler import Chunk

from .draft_tree import Tree

NO_TREE = Tree((-1,))


@dataclass(eq=False, slots=True)
class TreeRequest(DraftedRequest):
    """A request whose draft is a tree.

    Attributes:
        draft: the candidates' tokens, in the order of the tree's nodes 1, 2, ...; it may be shorter than the tree,
            whose first nodes are a tree too.
        tree: the shape; its root is the newest of ``tokens``.
        nodes: which node of the drafter's tree each node is.
        hidden: (rows, C), the target's last hidden states of the newest step, a row for each row of its logits.
        state: (C,), the last hidden state behind which the newest token was chosen; None before the first.
    """

    tree: Tree = NO_TREE
    nodes: list[int] = field(default_factory=lambda: [0])
    hidden: Tensor | None = None
    state: Tensor | None = None


@dataclass(frozen=True)
class TreeBatch(Batch):
    """A step on the device. Of a sequence without a tree, ``tree_starts`` is its ``context_lens``."""

    tree_starts: Tensor  # (S,) int32: where in the cache the root of each sequence's tree stands
    bits: Tensor  # (T,) int64: of a node, itself and its ancestors


def plant(arrays: dict[str, np.ndarray], chunks: Sequence[Chunk]) -> None:
    """Turn the arrays of a step in which drafts count as chains into those of a :class:`TreeBatch`.

    A candidate's position is its depth behind the root; its slot stays where its number puts it.
    """
    arrays["tree_starts"] = arrays["context_lens"].copy()
    bits = np.zeros(len(arrays["tokens"]), np.int64)
    for row, (request, start, count) in enumerate(chunks):
        root = len(request.tokens) - 1
        nodes = start + count - root  # of the tree, the root included
        if nodes > 1:
            end = int(arrays["query_starts"][row + 1])
            arrays["tree_starts"][row] = root
            arrays["positions"][end - nodes : end] = root + np.asarray(request.tree.depths[:nodes], np.int32)
            bits[end - nodes : end] = request.tree.bits[:nodes]
    arrays["bits"] = bits.view(np.int32)


class TreeLayout(Layout):
    """Where the arrays of a :class:`TreeBatch` lie; bits take two int32 each."""

    @classmethod
    def of_step(cls, sequences: int, tokens: int, width: int) -> TreeLayout:
        shapes = Layout.of_step(sequences, tokens, width).shapes
        return cls(shapes | {"tree_starts": (sequences,), "bits": (2 * tokens,)})

    def unpack(self, packed: Tensor, decode: bool) -> TreeBatch:
        arrays = {name: packed[place].view(self.shapes[name]) for name, place in self.places.items()}
        return TreeBatch(**arrays | {"bits": arrays["bits"].view(torch.int64)}, decode=decode)


class TreeGraphs(StepGraphs):
    """Lab 5's graphs of small steps, with room for trees."""

    def prepare(self, sequences: int, tokens: int, width: int) -> Graph:
        key = (sequences, tokens, width)
        if key not in self._graphs:
            layout = TreeLayout.of_step(sequences, sequences * tokens, width)
            inputs = torch.zeros(layout.size, dtype=torch.int32, device=self._staging.device)
            inputs[layout.places["slots"]] = -1  # recording runs the step too: it must not write
            batch = layout.unpack(inputs, decode=tokens == 1)
            self._graphs[key] = Graph(layout, inputs, self._record(lambda: self._compute(batch)))
        return self._graphs[key]


def packed(arrays: Mapping[str, np.ndarray], staging: Staging, decode: bool) -> TreeBatch:
    """A step on its way to the device, without a graph."""
    layout = TreeLayout.of(arrays)
    return layout.unpack(staging.send(arrays, layout), decode)
