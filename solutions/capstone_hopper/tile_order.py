"""Which program works on which tiles, in which order: decided on the host, once for each shape."""

from __future__ import annotations

import functools
import heapq

import torch


@functools.lru_cache(maxsize=64)
def tile_order(
    heads: int, queries: int, keys: int, rows: int, columns: int, causal: bool, programs: int, together: int
) -> tuple[tuple[int, ...], ...]:
    """Tiles of each of ``programs`` programs: the next tile goes to whoever is done first.

    Tile ``head * tiles_a_head + i`` holds queries ``i * rows`` to ``(i + 1) * rows`` of a head. Under a causal mask the
    tiles of a head differ in work, and the longest come first; ``together`` heads go side by side, so that their keys
    and values stay in the L2 cache. Where a head's last tile is not full and no mask makes it the longest, it comes
    after all full ones, and fills up the programs' lists evenly.

    Args:
        heads: Query heads of the whole batch.
        rows, columns: Queries and keys of a tile; 64 queries a warpgroup.

    Returns:
        One tuple of tiles for each program that has any.
    """
    tiles = -(-queries // rows)
    programs = min(programs, heads * tiles)

    def work(i: int) -> float:
        seen = min(keys, max((i + 1) * rows + keys - queries, 0)) if causal else keys
        busy = -(-min(rows, queries - i * rows) // 64) * 64 / rows  # the part of the warpgroups that has queries
        return -(-seen // columns) * busy + 1  # one more for the tile's beginning and end

    full = queries // rows
    if causal:
        rounds = [range(tiles - 1, -1, -1)]
    else:
        rounds = [range(full), range(full, tiles)]
    free = [(0.0, program) for program in range(programs)]
    lists: list[list[int]] = [[] for _ in range(programs)]
    for order in rounds:
        for first in range(0, heads, together):
            for i in order:
                for head in range(first, min(first + together, heads)):
                    when, program = heapq.heappop(free)
                    lists[program].append(head * tiles + i)
                    heapq.heappush(free, (when + work(i), program))
    return tuple(map(tuple, lists))


@functools.lru_cache(maxsize=64)
def tile_table(device: torch.device, *shape: int | bool) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`tile_order` on a device: tiles (programs, longest list + 1) and their counts (programs,), int32."""
    lists = tile_order(*shape)
    width = max(map(len, lists)) + 1
    table = torch.tensor([[*each, *[0] * (width - len(each))] for each in lists], dtype=torch.int32, device=device)
    return table, torch.tensor([len(each) for each in lists], dtype=torch.int32, device=device)
