"""Which tile of scores a program owns where sequences have different lengths, and which tiles hold a visible pair.

Letters: a sequence is a batch entry or a document of a packed row; Nq and Nk are its queries and keys, query i stands
at position i + Nk - Nq. A causal query sees keys up to its position, with a window the last ``window`` of them and the
first ``sinks`` (:func:`.flash_attention.flash_attention`).

What a tile of queries sees is then an interval of keys, and the tiles of the sinks before it. Tiles begin at multiples
of their size in both directions. So the tiles that a pass visits are those with a visible pair, and no others: a window
makes the work of a row of tiles independent of the sequence's length.

Documents differ in length, and so do their programs. Programs start in the order of their number (nothing guarantees
it), so one kernel makes a plan first: the tiles of all documents, those with the most work in front. A long document
behind many short ones would otherwise begin late, and be computed alone at the end.

L and delta of a head begin at a multiple of 128 numbers, and so do those of each document: the compiler then loads them
in wide accesses, and a tile of queries may be loaded whole, whatever its last rows are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solutions.lab3_flash_attention.flash_forward_simple import causal_key_range
from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip


class Kind(NamedTuple):
    """What a kernel is compiled for: a causal mask, a window, sinks beside it, and documents of packed rows."""

    causal: bool
    window: bool
    sinks: bool
    packed: bool


#: L and delta of a head or a document begin at a multiple of so many numbers; a power of two, no tile has more rows.
ALIGNMENT = 128


def lse_rows(rows: int, documents: int | None) -> int:
    """Numbers that L of a head has for ``rows`` queries, as :data:`ALIGNMENT` asks; ``documents``: None of a batch."""
    return (rows // ALIGNMENT + documents if documents else -(-rows // ALIGNMENT)) * ALIGNMENT


def most_tiles(rows: int, documents: int, block: int) -> int:
    """As many tiles as documents of ``rows`` rows together may have, however long each is: nobody waits for the GPU."""
    return rows // block + documents


def plan_of(starts_q: Tensor, starts_k: Tensor, of_keys: bool, rows: int, block: int) -> Tensor:
    """The tiles of all documents in the order of their programs, (tiles, 8) int32; :func:`tile_of` reads a row.

    Args:
        starts_q, starts_k: (S + 1,) int32, where documents begin, and the end of the last.
        of_keys: whether the keys are cut into tiles, or the queries.
        rows: of all documents together.
        block: rows of a tile.
    """
    documents = len(starts_q) - 1
    tiles = most_tiles(rows, documents, block)
    plan = torch.empty(tiles, 8, dtype=torch.int32, device=starts_q.device)
    plan_kernel[(documents,)](
        starts_q, starts_k, starts_k if of_keys else starts_q, plan, documents, tiles,
        OF_KEYS=of_keys, BLOCK=block, BLOCK_T=64, BLOCK_S=64, ALIGNMENT=ALIGNMENT,
    )  # fmt: skip
    return plan


@triton.jit(do_not_specialize=["documents", "slots"])
def plan_kernel(
    starts_q_ptr, starts_k_ptr, starts_ptr, plan_ptr, documents, slots,
    OF_KEYS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """One program: the tiles of one document, each in the row behind all tiles that have more work.

    Under a causal mask the last tile of queries, and the first tile of keys, has the most. Let its ``rank`` among the
    tiles of its document be the number of tiles with less work. A tile of rank r then stands behind the tiles of higher
    rank, of which a document of n tiles has max(0, n - 1 - r), and behind those of rank r of the documents before it.

    The first program also writes the rows that no tile takes: they have no queries and no keys.
    """
    document = tl.program_id(0)
    first_q, first_k = tl.load(starts_q_ptr + document), tl.load(starts_k_ptr + document)
    Nq, Nk = tl.load(starts_q_ptr + document + 1) - first_q, tl.load(starts_k_ptr + document + 1) - first_k
    tiles = tl.cdiv(Nk if OF_KEYS else Nq, BLOCK)
    place = first_q // ALIGNMENT + document
    taken = 0
    for begin in range(0, tl.maximum(tiles, 1), BLOCK_T):
        rank = begin + tl.arange(0, BLOCK_T)
        row = tl.zeros((BLOCK_T,), tl.int32)
        taken = 0
        for other in range(0, documents, BLOCK_S):
            each = other + tl.arange(0, BLOCK_S)
            there = each < documents
            end = tl.load(starts_ptr + each + 1, mask=there, other=0)
            theirs = tl.cdiv(end - tl.load(starts_ptr + each, mask=there, other=0), BLOCK)  # (BLOCK_S,)
            higher = tl.maximum(theirs[None, :] - 1 - rank[:, None], 0)  # (BLOCK_T, BLOCK_S)
            equal = (theirs[None, :] > rank[:, None]) & (each < document)[None, :]
            row += tl.sum(higher + equal.to(tl.int32), 1)
            taken += tl.sum(theirs, 0)
        start = (tiles - 1 - rank if OF_KEYS else rank) * BLOCK
        store_plan(plan_ptr, row, first_q, Nq, first_k, Nk, start, place, (rank < tiles) & (row < slots))
    if document == 0:
        for begin in range(taken, slots, BLOCK_T):
            row = begin + tl.arange(0, BLOCK_T)
            store_plan(plan_ptr, row, 0, 0, 0, 0, row * 0, 0, row < slots)


@triton.jit
def store_plan(plan_ptr, row, first_q, Nq, first_k, Nk, start, place, there):
    """Write the rows ``row`` (BLOCK_T,) of a plan, where ``there`` is true."""
    entry_ptr = plan_ptr + row * 8
    nothing = start * 0
    tl.store(entry_ptr, nothing + first_q, mask=there)
    tl.store(entry_ptr + 1, nothing + Nq, mask=there)
    tl.store(entry_ptr + 2, nothing + first_k, mask=there)
    tl.store(entry_ptr + 3, nothing + Nk, mask=there)
    tl.store(entry_ptr + 4, start, mask=there)
    tl.store(entry_ptr + 5, nothing + place, mask=there)


@triton.jit
def tile_of(t, plan_ptr, sizes, LAST_FIRST: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """The t-th tile of all sequences; LAST_FIRST: those of a batch entry from its end on.

    Returns:
        The batch entry and the tile's first row; its sequence's first query and Nq, its first key and Nk; and which of
        a head's numbers in L and delta is the sequence's first. Beyond the last tile of all documents Nq and Nk are 0,
        so that nothing is loaded and nothing stored.
    """
    tiles, Nq, Nk = sizes[0], sizes[1], sizes[2]
    if KIND.packed:
        entry_ptr = plan_ptr + t * 8
        batch, start = t * 0, tl.load(entry_ptr + 4)
        first_q, Nq = tl.load(entry_ptr), tl.load(entry_ptr + 1)
        first_k, Nk = tl.load(entry_ptr + 2), tl.load(entry_ptr + 3)
        place = tl.load(entry_ptr + 5) * 128  # ALIGNMENT, as a number that the compiler knows
    else:
        batch, tile = t // tiles, t % tiles
        if LAST_FIRST:
            tile = tiles - 1 - tile
        start, first_q, first_k, place = tile * BLOCK, 0, 0, 0
    return batch, start, first_q, Nq, first_k, Nk, place


@triton.jit
def visible(offs_m, offs_n, Nq, Nk, window, sinks, KIND: tl.constexpr):
    """Which of the keys ``offs_n`` the queries ``offs_m`` see, of shapes that broadcast.

    For queries from the Nq-th on, whose results nobody stores, it may be anything.
    """
    if KIND.causal:
        ago = offs_m - (offs_n - (Nk - Nq))  # 0 is the query's own position; none of these is behind the last key
        if KIND.window:
            longest = window
            if KIND.sinks:
                longest = tl.where(offs_n < sinks, 2147483647, window)
            # 0 <= ago < longest in one comparison: below 0, an unsigned number is larger than any window
            seen = ago.to(tl.uint32, bitcast=True) < tl.cast(longest, tl.uint32)
        else:
            seen = ago >= 0
    else:
        seen = (offs_n < Nk) & (offs_m >= 0)  # the second is always true: it makes the shape
    return seen


@triton.jit
def key_tiles(start_m, Nq, Nk, window, sinks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """Tiles of keys that the queries from ``start_m`` on see; they begin at multiples of BLOCK_N.

    Returns:
        How many keys they have together; the first key of the tile that comes first, of the interval's first tile, and
        of the tile behind its last; and between which keys, the second not included, all queries see all. In the tile
        that comes first each query that sees any key sees one, if there is no window or one of BLOCK_M keys or more.
    """
    unmasked_end, key_end = causal_key_range(start_m, Nq, Nk, BLOCK_M, KIND.causal)
    end = tl.cdiv(tl.maximum(key_end, 0), BLOCK_N) * BLOCK_N
    first, anchor, unmasked_from, keys_of_sinks = 0, 0, 0, 0
    if KIND.window:
        first = tl.maximum(start_m + Nk - Nq - window + 1, 0) // BLOCK_N * BLOCK_N
        anchor = tl.maximum(unmasked_end - 1, 0) // BLOCK_N * BLOCK_N  # where the first query's own key is
        unmasked_from = start_m + BLOCK_M + Nk - Nq - window
        if KIND.sinks:
            keys_of_sinks = tl.minimum(tl.cdiv(tl.minimum(sinks, Nk), BLOCK_N) * BLOCK_N, first)
    return end - first + keys_of_sinks, anchor, first, end, unmasked_from, unmasked_end


@triton.jit
def key_of(step, anchor, first, end, KIND: tl.constexpr):
    """First key of a tile, ``step`` being the keys of the tiles before it in this order: the interval from the tile
    ``anchor`` on, its tiles before that, then the tiles of the sinks."""
    start_n = step
    if KIND.window:
        start_n = anchor + step
        start_n = tl.where(start_n >= end, start_n - (end - first), start_n)
        if KIND.sinks:
            start_n = tl.where(step >= end - first, step - (end - first), start_n)
    return start_n


@triton.jit
def query_range(start_n, Nq, Nk, window, sinks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """Queries that see one of the keys from ``start_n`` on, from a multiple of BLOCK_M.

    Returns:
        The first and the end; and between which queries, the second not included and at most Nq, all see all keys.
    """
    begin, end, unmasked_from, unmasked_end = 0, Nq, 0, Nq
    if KIND.causal:
        begin = tl.maximum(start_n - (Nk - Nq), 0) // BLOCK_M * BLOCK_M
        unmasked_from = start_n + BLOCK_N - 1 - (Nk - Nq)
    if KIND.window:
        unmasked_end = tl.minimum(start_n - (Nk - Nq) + window, Nq)
        end = tl.where(start_n < sinks, Nq, tl.minimum(Nq, start_n - (Nk - Nq) + window + BLOCK_N - 1))
    return begin, end, unmasked_from, unmasked_end
