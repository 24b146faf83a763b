"""Which requests of a decode step begin with the same blocks, and what it saves to read these once.

With prefix caching (lab 5), requests with a common beginning have the same blocks in their tables. Ordinary decode
attention reads those blocks once per request; :mod:`.shared_prefix_attention` reads them once per group.

Letters: S requests, W columns of a block table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    A group of n requests with p common blocks saves (n - 1) p. Of two groups that save the same, the larger is taken,
    and of two of the same size that with the lowest row. No request is in two groups.

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
    groups, left = [], np.arange(len(block_tables))
    while len(groups) < most:
        candidates = _candidates(block_tables, whole, left, min_requests)
        best = max(candidates, key=lambda group: (group.saved, len(group.rows), -group.rows[0]), default=None)
        if best is None:
            break
        groups.append(best)
        left = np.setdiff1d(left, best.rows)
    return groups


def _candidates(tables: np.ndarray, whole: np.ndarray, rows: np.ndarray, min_requests: int) -> Iterator[Group]:
    """Every set of ``rows`` that holds all requests with a certain beginning: the inner nodes of the tables' trie."""
    waiting = [(rows, 0)]
    while waiting:
        rows, depth = waiting.pop()
        rows = rows[whole[rows] > depth]
        if len(rows) < min_requests:
            continue
        blocks = tables[rows, depth]
        values, counts = np.unique(blocks, return_counts=True)
        for block in values[counts >= min_requests]:
            same = rows[blocks == block]
            shortest = whole[same].min()
            differs = (tables[same, :shortest] != tables[same[0], :shortest]).any(0)
            common = int(differs.argmax()) if differs.any() else int(shortest)
            yield Group(tuple(same.tolist()), common)
            waiting.append((same, common))


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
