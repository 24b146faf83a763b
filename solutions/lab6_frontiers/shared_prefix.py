"""Which requests of a decode step begin with the same blocks, and what it saves to read these once.

With prefix caching (lab 5), requests with a common beginning have the same blocks in their tables. Ordinary decode
attention reads those blocks once per request; :mod:`.shared_prefix_attention` reads them once per group.

Letters: S requests, W columns of a block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Groups of a step at most. Further requests read their whole context alone.
MOST_GROUPS = 8


class Group(NamedTuple):
    """Requests whose tables begin with the same blocks: their rows, ascending, and the number of common blocks."""

    rows: tuple[int, ...]
    blocks: int

    @property
    def saved(self) -> int:
        """Blocks that need not be read when the common ones are read once and not once per request."""
        return (len(self.rows) - 1) * self.blocks


def whole_blocks(context_lens: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks of each request that may be shared, (S,): those that are full before the newest token.

    The block of the newest token is left out. It is written in this step, and what is written is never shared.
    """
    return (np.asarray(context_lens) - 1) // block_size


def find_groups(
    block_tables: np.ndarray, whole: np.ndarray, min_requests: int = 2, most: int = MOST_GROUPS
) -> list[Group]:
    """The groups of a step, found one by one: always the group that saves the most blocks among the requests left.

    A group of n requests with p common blocks saves (n - 1) p. Of two groups that save the same, the larger one is
    taken, and of two of the same size the one whose table comes first in lexicographic order.

    In sorted tables, requests with a common beginning stand next to each other. Let c_i be the blocks that neighbours i
    and i + 1 have in common. Then the requests i to j have min(c_i, ..., c_{j-1}) blocks in common, so that the best
    group is the largest rectangle in the histogram of c.

    Args:
        block_tables: (S, W) integers, a table per row, as :class:`solutions.lab5_serving.batch.TableRows` pads them.
        whole: (S,) integers, blocks at the beginning of each table that may be shared (:func:`whole_blocks`).
        min_requests: of a group, at least 2.
        most: groups at most.

    Raises:
        ValueError: ``min_requests`` below 2, or tables and numbers of blocks that do not fit each other.
    """
    block_tables, whole = np.asarray(block_tables), np.asarray(whole)
    if min_requests < 2:
        raise ValueError(f"min_requests must be at least 2, got {min_requests}: one request shares nothing")
    if block_tables.ndim != 2 or whole.shape != block_tables.shape[:1]:
        raise ValueError(
            f"block_tables must be (S, W) and whole (S,), got shapes {block_tables.shape} and {whole.shape}"
        )
    if whole.size and whole.max() > block_tables.shape[1]:
        raise ValueError(f"tables have {block_tables.shape[1]} columns, {whole.max()} blocks are to be shared")
    order, common = _sorted_tables(block_tables, whole)
    groups: list[Group] = []
    while len(groups) < most:
        first, end, blocks = _largest_rectangle(common, min_requests)
        if not blocks:
            break
        groups.append(Group(tuple(sorted(order[first:end])), blocks))
        if first:  # the requests before and behind the group become neighbours
            common[first - 1] = min(common[first - 1], common[end - 1])
        del order[first:end], common[first:end]
    return groups


def _sorted_tables(tables: np.ndarray, whole: np.ndarray) -> tuple[list[int], list[int]]:
    """Rows in lexicographic order of their shareable blocks, and how many of these each has in common with the next."""
    raw, width = tables.astype(">i4").tobytes(), 4 * tables.shape[1]  # bytes compare as the numbers do
    keys = [raw[row * width : row * width + 4 * count] for row, count in enumerate(whole.tolist())]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    if len(order) < 2:
        return order, [0] * len(order)
    sorted_tables, sorted_whole = tables[order], whole[order]
    differs = sorted_tables[1:] != sorted_tables[:-1]
    common = np.where(differs.any(1), differs.argmax(1), tables.shape[1])
    return order, [*np.minimum(common, np.minimum(sorted_whole[1:], sorted_whole[:-1])).tolist(), 0]


def _largest_rectangle(common: list[int], min_requests: int) -> tuple[int, int, int]:
    """First request, end and blocks of the group that saves the most; no blocks if there is none.

    Args:
        common: blocks in common with the next request, of each request in sorted order; the last has 0.
        min_requests: of a group.
    """
    best, found = (0, 0, 0), (0, 0, 0)
    rising: list[tuple[int, int]] = []  # groups that may grow, (first request, blocks), each with more blocks
    for last, height in enumerate(common):
        first = last
        while rising and rising[-1][1] >= height:
            first, blocks = rising.pop()
            requests = last + 1 - first
            if blocks and requests >= min_requests and best < (key := ((requests - 1) * blocks, requests, -first)):
                best, found = key, (first, last + 1, blocks)
        rising.append((first, height))
    return found


def kv_bytes_read(prefix: int, suffixes: Sequence[int], bytes_per_token: int, prefix_reads: int | None = None) -> int:
    """Bytes of keys and values that a decode step reads for requests with a common prefix.

    ``(prefix_reads * prefix + sum(suffixes)) * bytes_per_token``. Ordinary decode reads the prefix once per request,
    shared-prefix attention once in all. Its kernel loads the prefix once per tile of rows
    (:func:`.shared_prefix_attention.prefix_loads`); all loads but the first can hit the L2 cache.

    Args:
        prefix: common tokens.
        suffixes: tokens that each request has behind them, the newest included.
        bytes_per_token: of keys and values, in one layer or in all of them: 2 G D times bytes per number times layers.
        prefix_reads: how often the prefix is read; None: once per request.
    """
    reads = len(suffixes) if prefix_reads is None else prefix_reads
    return (reads * prefix + sum(suffixes)) * bytes_per_token


def partial_bytes(requests: int, num_heads: int, head_dim: int, parts: int) -> int:
    """Bytes of the partial results that one layer writes and then reads again, the price of sharing.

    Each part of a context leaves ``head_dim`` float32 and a log-sum-exp per request and query head. The log-sum-exps
    are moved once more when those of prefix and suffix are put side by side.
    """
    return 2 * requests * num_heads * parts * (head_dim + 2) * 4
