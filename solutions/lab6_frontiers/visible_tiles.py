"""Which tile of scores a program owns where sequences have different lengths, and which tiles hold a visible pair.

Letters: a sequence is a batch entry or a document of a packed row; Nq and Nk are its queries and keys, query i stands
at position i + Nk - Nq. A causal query sees keys up to its position, with a window the last ``window`` of them and the
first ``sinks`` (:func:`.flash_attention.flash_attention`).

What a tile of queries sees is then an interval of keys, and the tiles of the sinks before it. Tiles begin at multiples
of their size in both directions. So the tiles that a pass visits are those with a visible pair, and no others: a window
makes the work of a row of tiles independent of the sequence's length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solutions.lab3_flash_attention.flash_forward_simple import attention_mask, causal_key_range
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .grouped_matmul import group_of

import triton  # isort: skip
import triton.language as tl  # isort: skip


class Kind(NamedTuple):
    """What a kernel is compiled for: a causal mask, a window, and documents of packed rows.

    ``sequences`` is the least power of two that is not below the number of documents, 1 where rows are not packed.
    """

    causal: bool
    window: bool
    packed: bool
    sequences: int


def table_of(starts_q: Tensor, starts_k: Tensor, lengths_of: Tensor, block: int) -> Tensor:
    """What :func:`sequence_of` reads: tiles before each of S documents, first queries and first keys, (3, S + 1) int32.

    Args:
        starts_q, starts_k: (S + 1,) int32, where documents begin, and the end of the last.
        lengths_of: which of the two is cut into tiles.
        block: rows of a tile.
    """
    tiles = (lengths_of.diff() + (block - 1)) // block
    before = torch.nn.functional.pad(tiles.cumsum(0, dtype=torch.int32), (1, 0))
    return torch.stack((before, starts_q, starts_k))


def most_tiles(rows: int, documents: int, block: int) -> int:
    """As many tiles as documents of ``rows`` rows together may have, however long each is: nobody waits for the GPU."""
    return rows // block + documents


@triton.jit
def sequence_of(t, table_ptr, sizes, KIND: tl.constexpr):
    """The sequence of the t-th tile, counted over all sequences.

    Returns:
        The batch entry; the tile's number and how many its sequence has; its first query and Nq; its first key and Nk.
        Beyond the last tile Nq and Nk are 0, so that nothing is loaded and nothing stored.
    """
    sequences, tiles, Nq, Nk = sizes[0], sizes[1], sizes[2], sizes[3]
    if KIND.packed:
        sequence = group_of(t, table_ptr + 1, sequences, KIND.sequences)
        there = sequence < sequences
        entry_ptr = table_ptr + sequence
        before = tl.load(entry_ptr)
        end = tl.load(entry_ptr + 1, mask=there, other=0)
        first_q = tl.load(entry_ptr + sequences + 1)
        end_q = tl.load(entry_ptr + sequences + 2, mask=there, other=0)
        first_k = tl.load(entry_ptr + 2 * sequences + 2)
        end_k = tl.load(entry_ptr + 2 * sequences + 3, mask=there, other=0)
        batch, tile, own_tiles = t * 0, tl.where(there, t - before, 0), tl.where(there, end - before, 1)
        Nq, Nk = tl.where(there, end_q - first_q, 0), tl.where(there, end_k - first_k, 0)
    else:
        batch, tile, own_tiles, first_q, first_k = t // tiles, t % tiles, tiles, 0, 0
    return batch, tile, own_tiles, first_q, Nq, first_k, Nk


@triton.jit
def visible(offs_m, offs_n, Nq, Nk, window, sinks, KIND: tl.constexpr):
    """Which of the keys ``offs_n`` the queries ``offs_m`` see, of shapes that broadcast."""
    seen = attention_mask(offs_m, offs_n, Nq, Nk, KIND.causal)
    if KIND.window:
        seen = seen & ((offs_n > offs_m + (Nk - Nq - window)) | (offs_n < sinks))
    return seen


@triton.jit
def key_tiles(start_m, Nq, Nk, window, sinks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """Tiles of keys that the queries from ``start_m`` on see.

    Returns:
        How many tiles of sinks come first; the first tile of the interval behind them, and its end; and between which
        keys, the second not included, all queries see all.
    """
    unmasked_end, key_end = causal_key_range(start_m, Nq, Nk, BLOCK_M, KIND.causal)
    end = tl.cdiv(tl.maximum(key_end, 0), BLOCK_N)
    sink_tiles, first, unmasked_from = 0, 0, 0
    if KIND.window:
        first = tl.maximum(start_m + Nk - Nq - window + 1, 0) // BLOCK_N
        sink_tiles = tl.minimum(tl.cdiv(tl.minimum(sinks, Nk), BLOCK_N), first)
        unmasked_from = start_m + BLOCK_M + Nk - Nq - window
    return sink_tiles, first, end, unmasked_from, unmasked_end


@triton.jit
def key_of(step, sink_tiles, first, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """First key of the tile of this step: tiles of sinks, then those of the interval."""
    if KIND.window:
        tile = tl.where(step < sink_tiles, step, step - sink_tiles + first)
    else:
        tile = step
    return tile * BLOCK_N


@triton.jit
def query_range(start_n, Nq, Nk, window, sinks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """Queries that see one of the keys from ``start_n`` on, from a multiple of BLOCK_M.

    Returns:
        The first and the end; and between which queries, the second not included, all see all of the keys.
    """
    begin, end, unmasked_from, unmasked_end = 0, Nq, 0, Nq
    if KIND.causal:
        begin = tl.maximum(start_n - (Nk - Nq), 0) // BLOCK_M * BLOCK_M
        unmasked_from = start_n + BLOCK_N - 1 - (Nk - Nq)
    if KIND.window:
        unmasked_end = start_n - (Nk - Nq) + window
        end = tl.where(start_n < sinks, Nq, tl.minimum(Nq, unmasked_end + BLOCK_N - 1))
    return begin, end, unmasked_from, unmasked_end
