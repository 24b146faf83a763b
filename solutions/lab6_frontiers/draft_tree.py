"""Trees of candidate tokens: which candidate follows which, who sees whom, and how many a tree yields in a pass.

A chain of drafted tokens is lost from its first refused token on. A tree has second and third choices at each place,
and one pass of the target verifies all of them (SpecInfer, Miao et al. 2023, arXiv 2305.09781; Medusa, Cai et al. 2024,
arXiv 2401.10774). Node 0, the root, is the newest token of the text, whose keys and values no pass has computed yet.
Every other node is a candidate for the place behind its parent.

Letters: n nodes, the root included.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

#: A node's ancestors are the bits of one int64.
MOST_NODES = 64


@dataclass(frozen=True)
class Tree:
    """The shape of a tree, without tokens.

    The children of a node are in the order in which their tokens are drawn and tried: the first is the first choice.

    Args:
        parents: the parent of each node, a node before it; -1 for node 0.

    Raises:
        ValueError: no root, a parent that does not stand before its child, or more nodes than :data:`MOST_NODES`.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parents) <= MOST_NODES:
            raise ValueError(f"a tree has 1 to {MOST_NODES} nodes, got {len(self.parents)}")
        if self.parents[0] != -1:
            raise ValueError(f"node 0 is the root: its parent is -1, got {self.parents[0]}")
        for node, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < node:
                raise ValueError(f"the parent of node {node} stands before it, in 0..{node - 1}, got {parent}")

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    def chain(cls, length: int) -> Tree:
        """A tree without choices: ``length`` candidates, one behind the other."""
        return cls(tuple(range(-1, length)))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Steps from the root to each node: a node's position in the text, counted from the root's."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Most tokens that can be accepted."""
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, its children in order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Of each node, how many siblings stand before it."""
        return (0, *(self.children[parent].index(node) for node, parent in enumerate(self.parents[1:], 1)))

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Nodes that have children: those at which a draft is asked for a distribution."""
        return tuple(node for node, own in enumerate(self.children) if own)

    @cached_property
    def bits(self) -> tuple[int, ...]:
        """Of each node, the nodes that its query sees, itself and its ancestors, as bits of a signed 64-bit integer."""
        bits: list[int] = []
        for node, parent in enumerate(self.parents):
            bits.append((bits[parent] if node else 0) | 1 << node)
        return tuple(number - (1 << 64) if number >> 63 else number for number in bits)

    @property
    def mask(self) -> Tensor:
        """The same as (n, n) booleans: row i is true where node i sees node j."""
        return torch.tensor([[number >> j & 1 for j in range(len(self))] for number in self.bits], dtype=torch.bool)

    def path(self, node: int) -> list[int]:
        """The candidates from the root's child to ``node``, which is the last; empty for the root."""
        path = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def only(self, nodes: Iterable[int]) -> tuple[Tree, list[int]]:
        """The tree of some of the nodes, in their order here, less those whose parent is missing; and these nodes."""
        kept: dict[int, int] = {0: 0}
        parents = [-1]
        for node in sorted(set(nodes) - {0}):
            if self.parents[node] in kept:
                parents.append(kept[self.parents[node]])
                kept[node] = len(kept)
        return Tree(tuple(parents)), list(kept)


def grow(acceptance: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The tree of at most ``nodes`` nodes, root included, that is expected to yield the most tokens.

    It is grown node by node: next comes the candidate that is most likely to be accepted with all its ancestors. This
    is the best tree as long as no row of ``acceptance`` increases (a later choice is not better than an earlier one),
    since then a node is never better than its parent or the sibling before it (Medusa, appendix C.3; Sequoia, Chen et
    al. 2024, arXiv 2402.12374, section 3.1). So the first nodes of a tree are the best smaller tree.

    Args:
        acceptance: ``acceptance[d][r]`` is the probability that candidate r behind an accepted node of depth d is
            accepted. A parent's candidates exclude one another, so that a row sums to at most 1. It may be empty.
        nodes: from 1 to :data:`MOST_NODES`.

    Returns:
        A tree with fewer nodes if there are no more candidates of a probability over 0.

    Raises:
        ValueError: a number of nodes out of range, or rows that are no such probabilities.
    """
    if not 1 <= nodes <= MOST_NODES:
        raise ValueError(f"a tree has 1 to {MOST_NODES} nodes, got {nodes}")
    _check(acceptance)
    parents, depths, reached = [-1], [0], [1.0]
    waiting: list[tuple[float, int, int, int]] = []  # minus the probability, order of arrival, parent, rank

    def offer(parent: int, rank: int) -> None:
        row = acceptance[depths[parent]] if depths[parent] < len(acceptance) else ()
        if rank < len(row) and row[rank] > 0:
            heapq.heappush(waiting, (-reached[parent] * row[rank], len(parents) + len(waiting), parent, rank))

    offer(0, 0)
    while waiting and len(parents) < nodes:
        value, _, parent, rank = heapq.heappop(waiting)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        reached.append(-value)
        offer(parent, rank + 1)
        offer(len(parents) - 1, 0)
    return Tree(tuple(parents))


def expected_accepted(tree: Tree, acceptance: Sequence[Sequence[float]]) -> list[float]:
    """The probability that at least d candidates are accepted, for d = 1, 2, ... up to the tree's depth.

    It is the sum over the nodes of depth d of the products along their paths, exactly, if an acceptance depends on its
    depth and rank alone. One more than the sum of the list is the expected number of tokens that a pass yields.

    Args:
        tree: any.
        acceptance: as for :func:`grow`; a node beyond its rows is never accepted.

    Raises:
        ValueError: rows that are no such probabilities.
    """
    _check(acceptance)
    reached, levels = [1.0], [0.0] * tree.depth
    for node, parent in enumerate(tree.parents[1:], 1):
        depth, rank = tree.depths[node], tree.ranks[node]
        row = acceptance[depth - 1] if depth <= len(acceptance) else ()
        reached.append(reached[parent] * row[rank] if rank < len(row) else 0.0)
        levels[depth - 1] += reached[node]
    return levels


def expected_tokens(tree: Tree, acceptance: Sequence[Sequence[float]]) -> float:
    """Tokens that one pass of the target is expected to yield: the accepted candidates and the one that is added."""
    return 1.0 + sum(expected_accepted(tree, acceptance))


def _check(acceptance: Sequence[Sequence[float]]) -> None:
    for depth, row in enumerate(acceptance):
        if any(not 0 <= value <= 1 for value in row) or sum(row) > 1 + 1e-9:
            raise ValueError(
                f"acceptance[{depth}] must hold probabilities of events that exclude one another, got {list(row)}"
            )
