"""A step of the engine as a few arrays of integers, packed into one so that they cross to the GPU in one copy.

Letters: S sequences in a step, T tokens in a step (laid end to end), R rows of logits, W blocks of a block table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .block_manager import BlockManager
    from .scheduler import Chunk

ROWS = ("last", "all")
#: What an array holds behind its end when it is padded: a slot of -1 is written nowhere, a context of 0 sees nothing.
PADDING = {"slots": -1}
#: Arrays begin at multiples of so many int32, and tables are as many blocks wide: Triton compiles a kernel once more
#: for a pointer or a stride that is no multiple of 16.
ALIGNMENT = 16


@dataclass(frozen=True)
class Batch:
    """A step on the device. ``decode``: every sequence has one token, and each of them wants its logits."""

    tokens: Tensor  # (T,) int32
    positions: Tensor  # (T,) int32, each token's place in its sequence
    slots: Tensor  # (T,) int32: where its keys and values go; -1: nowhere
    block_tables: Tensor  # (S, W) int32, anything behind a table's end
    query_starts: Tensor  # (S + 1,) int32: where each sequence's tokens begin
    context_lens: Tensor  # (S,) int32: tokens in the cache once this step's are written
    rows: Tensor  # (R,) int32: the tokens that want logits
    decode: bool


def table_width(blocks: int) -> int:
    """Columns of a padded block table: a power of two, so that few widths occur, and at least ``ALIGNMENT``."""
    return max(ALIGNMENT, 1 << (blocks - 1).bit_length())


class TableRows:
    """Block tables as one padded array: from step to step only the rows whose table has changed are written."""

    def __init__(self) -> None:
        self._array = np.zeros((1, ALIGNMENT), np.int32)
        self._seen: list[list[int]] = []

    def update(self, tables: Sequence[list[int]]) -> np.ndarray:
        """(S, W) int32, valid until the next call."""
        width = table_width(max(map(len, tables)))
        rows, columns = self._array.shape
        if len(tables) > rows or width > columns:
            self._array = np.zeros((max(rows, len(tables)), max(columns, width)), np.int32)
            self._seen = []
        self._seen += [[] for _ in range(len(tables) - len(self._seen))]
        for row, table in enumerate(tables):
            if self._seen[row] != table:
                self._array[row, : len(table)] = table
                self._seen[row] = table.copy()
        return self._array[: len(tables), :width]


def assemble(
    chunks: Sequence[Chunk], manager: BlockManager, table_rows: TableRows, rows: str = "last"
) -> tuple[dict[str, np.ndarray], bool]:
    """The arrays of a :class:`Batch` by name, on the host, and its ``decode``.

    Args:
        chunks: which tokens of which requests; ``manager`` has slots for all of them.
        rows: ``"last"``: of each chunk that ends what is known of its request, the positions whose next token is
            wanted, which are the last token's and those of a draft. ``"all"``: every position.

    Raises:
        ValueError: another ``rows``, no chunks, a chunk beyond what its request has.
    """
    if rows not in ROWS:
        raise ValueError(f"rows must be one of {', '.join(ROWS)}, got {rows!r}")
    if not chunks:
        raise ValueError("a step without chunks has nothing to compute")
    tokens: list[int] = []
    starts, counts, wanted, tables = [], [], [], []  # of each chunk; wanted: rows, counted from its end
    for request, start, count in chunks:
        end, known = start + count, request.num_tokens
        if not 0 <= start < end <= known:
            raise ValueError(f"request {request.id!r} has {known} tokens, a chunk wants {start} to {end}")
        tokens += request.slice(start, end)
        starts.append(start)
        counts.append(count)
        wanted.append(0 if end < known else min(count, 1 + known - len(request.tokens)))
        tables.append(manager.table(request.id))
    tables = table_rows.update(tables)
    starts, counts = np.asarray(starts, dtype=np.int32), np.asarray(counts, dtype=np.int32)
    query_starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int32)), dtype=np.int32)
    sequence = np.repeat(np.arange(len(chunks)), counts)  # (T,), whose token it is
    positions = np.arange(len(tokens), dtype=np.int32) + (starts - query_starts[:-1])[sequence]
    block, offset = np.divmod(positions, manager.block_size)
    last = np.asarray(wanted, dtype=np.int32) if rows == "last" else counts
    behind = query_starts[1:] - np.cumsum(last, dtype=np.int32)
    arrays = {
        "tokens": np.asarray(tokens, dtype=np.int32),
        "positions": positions,
        "slots": tables[sequence, block] * np.int32(manager.block_size) + offset,
        "block_tables": tables,
        "query_starts": query_starts,
        "context_lens": starts + counts,
        "rows": np.arange(last.sum(), dtype=np.int32) + np.repeat(behind, last),
    }
    return arrays, len(tokens) == len(chunks) == len(arrays["rows"])


class Layout:
    """Where each array of a batch lies in one packed array of ``size`` int32."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes, self.places, self.size = dict(shapes), {}, 0
        for name, shape in self.shapes.items():
            count = int(np.prod(shape))
            self.places[name] = slice(self.size, self.size + count)
            self.size += -(-count // ALIGNMENT) * ALIGNMENT

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Layout:
        """With room for these arrays and no more."""
        return cls({name: array.shape for name, array in arrays.items()})

    @classmethod
    def of_step(cls, sequences: int, tokens: int, width: int) -> Layout:
        """With room for so many sequences and tokens, all of which may want logits, and tables of ``width`` blocks."""
        each = (tokens,)
        return cls(
            {
                "tokens": each,
                "positions": each,
                "slots": each,
                "block_tables": (sequences, width),
                "query_starts": (sequences + 1,),
                "context_lens": (sequences,),
                "rows": each,
            }
        )

    def pack(self, arrays: Mapping[str, np.ndarray], packed: np.ndarray) -> None:
        """Write arrays to their places; what is left of a place is filled with ``PADDING``, or zeros.

        Sequences behind the end have no queries: they all begin where the last one ends.

        Raises:
            ValueError: an array that is larger than its place.
        """
        for name, shape in self.shapes.items():
            array = arrays[name]
            if any(have > room for have, room in zip(array.shape, shape, strict=True)):
                raise ValueError(f"{name} has shape {array.shape}, there is room for {shape}")
            place = packed[self.places[name]].reshape(shape)
            if array.shape != shape:
                place.fill(array[-1] if name == "query_starts" else PADDING.get(name, 0))
            place[tuple(map(slice, array.shape))] = array

    def unpack(self, packed: Tensor, decode: bool) -> Batch:
        """The batch that lies in a packed tensor: views, not copies."""
        arrays = {name: packed[place].view(self.shapes[name]) for name, place in self.places.items()}
        return Batch(**arrays, decode=decode)


class Staging:
    """Pinned host memory that batches are packed in on their way to the device.

    An asynchronous copy reads it after the call has returned, so the next batch waits until it has.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._cuda = device, device.type == "cuda"
        self._host = torch.empty(0, dtype=torch.int32)
        self._copied = torch.cuda.Event() if self._cuda else None

    def send(self, arrays: Mapping[str, np.ndarray], layout: Layout, target: Tensor | None = None) -> Tensor:
        """The packed batch on the device: in ``target`` (at least ``layout.size`` int32), or in new memory."""
        if self._copied is not None:
            self._copied.synchronize()
        if layout.size > len(self._host):
            size = 1 << (layout.size - 1).bit_length()
            self._host = torch.empty(size, dtype=torch.int32, pin_memory=self._cuda)
        host = self._host[: layout.size]
        layout.pack(arrays, host.numpy())
        if target is None:
            target = torch.empty(layout.size, dtype=torch.int32, device=self.device)
        target[: layout.size].copy_(host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return target
