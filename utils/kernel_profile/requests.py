"""How the lanes of one load or store become requests of warps, and requests become 32-byte sectors.

A block of addresses is laid out over lanes as Triton's coalescing pass does: along the axis whose neighbours are
neighbours in memory (the last axis if there is none), 32 lanes to a warp, each lane one element. A compiler may give
a lane several neighbouring elements (vector loads); a warp then takes several such runs with one instruction, and
where the runs start on sector boundaries the count of sectors is the same.

What the hardware adds: a scalar, or a block smaller than the program's threads, is loaded again by each warp that has
no element of its own (stores are not repeated), and tensor descriptors on Hopper bypass L1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LANES = 32
_SHIFT = np.uint64(5)  # log2 of a sector's 32 bytes
_NOWHERE = np.uint64(2**64 - 1)


class Requests(NamedTuple):
    """What one instruction of one program asks for.

    ``sectors`` and ``elements``: distinct ones, summed over warps. ``ids``: the sectors (address / 32), in lane order;
    one that several warps touch appears several times.
    """

    sectors: int
    elements: int
    ids: np.ndarray


def lane_axes(addresses: np.ndarray, itemsize: int) -> tuple[int, ...] | None:
    """The block's axes from the slowest lane to the fastest; None when they are in order already."""
    if addresses.ndim < 2:
        return None
    origin = (0,) * addresses.ndim
    for axis in range(addresses.ndim - 1, -1, -1):
        if addresses.shape[axis] < 2:
            continue
        neighbour = (*origin[:axis], 1, *origin[axis + 1 :])
        if int(addresses[neighbour]) - int(addresses[origin]) == itemsize:
            if axis == addresses.ndim - 1:
                return None
            return (*range(axis), *range(axis + 1, addresses.ndim), axis)
    return None


#: Counts of accesses that came before: programs load the same tiles again and again. As many as fit 32 MB.
_KNOWN: dict[tuple, Requests] = {}
_MOST_KNOWN, _LARGEST_KNOWN = 2**11, 2**10


def requests(addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> Requests:
    """Count the sectors of one load or store.

    Args:
        addresses: uint64, any shape: one address per element of the block.
        mask: bool, same shape, or None when every lane takes part.
        itemsize: Bytes per element.
    """
    if addresses.size > _LARGEST_KNOWN:
        return _counted(addresses, mask, itemsize)
    key = addresses.tobytes(), addresses.shape, None if mask is None else mask.tobytes(), itemsize
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) == _MOST_KNOWN:
            _KNOWN.clear()
        found = _KNOWN[key] = _counted(addresses, mask, itemsize)
    return found


def _counted(addresses: np.ndarray, mask: np.ndarray | None, itemsize: int) -> Requests:
    axes = lane_axes(addresses, itemsize)
    if axes is not None:
        addresses = addresses.transpose(axes)
        mask = None if mask is None else mask.transpose(axes)
    flat = addresses.reshape(-1)
    if mask is not None:
        flat = np.where(mask.reshape(-1), flat, _NOWHERE)
    if flat.size > LANES and flat.size % LANES:
        flat = np.concatenate([flat, np.full(-flat.size % LANES, _NOWHERE)])
        mask = np.zeros(0, dtype=bool)  # there are lanes that go nowhere
    warps = flat.reshape(-1, min(LANES, flat.size))
    if warps.shape[1] > 1 and (warps[:, 1:] < warps[:, :-1]).any():
        warps = np.sort(warps, axis=1)
    sectors = warps >> _SHIFT
    new_sector = np.ones(warps.shape, dtype=bool)
    np.not_equal(sectors[:, 1:], sectors[:, :-1], out=new_sector[:, 1:])
    elements = warps.shape[0] + int(np.count_nonzero(warps[:, 1:] != warps[:, :-1]))
    ids = sectors[new_sector]
    if mask is not None:
        idle = int(np.count_nonzero(warps[:, -1] == _NOWHERE))  # warps with a lane that goes nowhere, sorted last
        elements -= idle
        ids = ids[ids != _NOWHERE >> _SHIFT]
    return Requests(ids.size, elements, ids)
