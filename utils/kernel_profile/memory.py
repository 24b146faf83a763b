"""Memory as a profile sees it: storages with their shadows, and the arguments that point into them.

Every tensor argument of a launch gets an address range of its own, far from all others, so that an address says which
argument it was computed from, however far it strayed. A storage starts on a boundary of 512 bytes or more, as PyTorch's
allocations on a GPU do, so that sectors do not depend on where the host's allocator put it.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from utils.interpreter import Argument

#: Addresses the kernel sees: FIRST + slot * SPAN + SPAN / 2 is the start of the storage behind argument ``slot``.
FIRST = 1 << 60
SPAN = 1 << 52
_SLOT_SHIFT = np.uint64(52)


def slot_start(slot: int) -> int:
    """Address that stands for the first byte of the storage behind argument number ``slot``."""
    return FIRST + slot * SPAN + SPAN // 2


def slots_of(addresses: np.ndarray) -> np.ndarray:
    """Argument number behind each address; negative for an address that belongs to no argument."""
    return (addresses >> _SLOT_SHIFT).astype(np.int64) - (FIRST // SPAN)


class Storage:
    """One allocation, whichever tensors view it: who touched which part of it in the running launch.

    Programs are numbered from 1 in the order in which the interpreter runs them, one after the other; 0 is nobody. So
    it is enough to remember the *first* program that read, wrote or atomically updated a unit: if it is not the one
    that runs now, another one did, and if it is, no other did.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.unit = 8  # bytes per entry of the shadows below; the smallest element that the launch's arguments have
        self.first_read: np.ndarray | None = None
        self.first_write: np.ndarray | None = None
        self.first_atomic: np.ndarray | None = None
        self.last_load: np.ndarray | None = None  # by sector: the last program that loaded it
        self.stored: np.ndarray | None = None  # by sector: whether any program stored it

    def begin(self, unit: int) -> None:
        """Forget the last launch."""
        self.unit = unit
        self.first_read = self.first_write = self.first_atomic = self.last_load = self.stored = None

    def refine(self, unit: int) -> None:
        """Continue with a smaller unit: an access is narrower than any argument's element."""
        ratio = self.unit // unit
        for name in ("first_read", "first_write", "first_atomic"):
            shadow = getattr(self, name)
            if shadow is not None:
                setattr(self, name, np.repeat(shadow, ratio))
        self.unit = unit

    def indices(self, offsets: np.ndarray, itemsize: int) -> np.ndarray:
        """Units that elements at byte ``offsets`` (int64, (n,)) occupy."""
        if itemsize < self.unit:
            self.refine(itemsize)
        first = offsets // self.unit
        if itemsize == self.unit:
            return first
        return (first[:, None] + np.arange(itemsize // self.unit)).reshape(-1)

    def touch(
        self, units: np.ndarray, program: int, writes: bool, atomic: bool
    ) -> list[tuple[np.ndarray, np.ndarray, str]]:
        """Note that ``program`` touches ``units`` (int64, (n,)); return the races that this completes.

        Each race is (units, the program that touched each of them before, what that one did in words). Two reads do not
        race, nor do two atomics.
        """
        reads = ("read", self.first_read) if writes else None
        updates = ("atomically updated", self.first_atomic) if not atomic else None
        races = []
        for before in (("wrote", self.first_write), reads, updates):
            if before is None or before[1] is None:
                continue
            earlier = before[1][units]
            most = earlier.max()
            if most == 0 or (most == program and earlier.min() == program):
                continue
            racing = (earlier != 0) & (earlier != program)
            if racing.any():
                races.append((units[racing], earlier[racing], before[0]))
        name = "first_atomic" if atomic else "first_write" if writes else "first_read"
        shadow = getattr(self, name)
        if shadow is None:
            shadow = np.zeros(-(-self.nbytes // self.unit), dtype=np.int32)
            setattr(self, name, shadow)
        untouched = shadow[units] == 0
        if untouched.any():
            shadow[units[untouched]] = program
        return races

    def loaded_sectors(self, ids: np.ndarray, program: int) -> tuple[int, int]:
        """Note that ``program`` loads sectors ``ids``; return how many are new to it, and how many to the launch."""
        if self.last_load is None:
            self.last_load = np.zeros(-(-self.nbytes // 32), dtype=np.int32)
        fresh = ids[self.last_load[ids] != program]
        if fresh.size == 0:
            return 0, 0
        if fresh.size > 1 and not (fresh[1:] > fresh[:-1]).all():
            fresh = np.unique(fresh)
        new_to_launch = int(np.count_nonzero(self.last_load[fresh] == 0))
        self.last_load[fresh] = program
        return fresh.size, new_to_launch

    def stored_sectors(self, ids: np.ndarray) -> int:
        """Note that sectors ``ids`` are stored; return how many are new to the launch."""
        if self.stored is None:
            self.stored = np.zeros(-(-self.nbytes // 32), dtype=bool)
        fresh = ids[~self.stored[ids]]
        if fresh.size == 0:
            return 0
        self.stored[fresh] = True
        return np.unique(fresh).size


class Region:
    """The part of a storage that one argument may touch: the elements of its view."""

    def __init__(self, argument: Argument, slot: int, storage: Storage) -> None:
        tensor = argument.host
        self.name = argument.name
        self.slot = slot
        self.storage = storage
        self.itemsize = tensor.element_size()
        self.shape = tuple(tensor.shape)
        self.strides = tuple(tensor.stride())
        self.contiguous = tensor.is_contiguous()
        self.numel = tensor.numel()
        self.begin = tensor.storage_offset() * self.itemsize  # bytes from the start of the storage
        reach = sum((length - 1) * stride for length, stride in zip(self.shape, self.strides)) + 1 if self.numel else 0
        self.nbytes = reach * self.itemsize
        self.start = np.uint64(slot_start(slot))  # address of the storage's first byte
        self.pointer = slot_start(slot) + self.begin
        self.given = argument.given.untyped_storage().data_ptr()  # where the caller's addresses start
        self.to_real = np.uint64((tensor.untyped_storage().data_ptr() - slot_start(slot)) % 2**64)
        self._inside = self._gaps(tensor, reach)

    def _gaps(self, tensor: torch.Tensor, reach: int) -> np.ndarray | None:
        """Which elements between the view's first and last belong to it, or None when all do."""
        once = [length if stride else 1 for length, stride in zip(self.shape, self.strides)]
        if math.prod(once) >= reach:
            return None
        inside = np.zeros(reach, dtype=bool)  # untouched pages cost nothing, however far apart the rows lie
        np.lib.stride_tricks.as_strided(inside, once, self.strides)[...] = True
        return inside

    @property
    def dense(self) -> bool:
        """Whether every element between the view's first and last belongs to it."""
        return self._inside is None

    def contains(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Which addresses are elements of the view."""
        relative = addresses - np.uint64(self.pointer)
        inside = relative < np.uint64(max(0, self.nbytes - itemsize + 1))
        if self._inside is not None:
            elements = np.where(inside, relative // np.uint64(self.itemsize), np.uint64(0)).astype(np.int64)
            inside &= self._inside[elements]
        return inside

    def in_storage(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Which addresses lie in the storage, whether or not in this view."""
        return (addresses - self.start) < np.uint64(max(0, self.storage.nbytes - itemsize + 1))

    def element(self, address: int) -> int:
        """Index of the element at ``address``, counted in memory from the argument's pointer."""
        return (int(address) - self.pointer) // self.itemsize

    def position(self, element: int) -> tuple[int, ...] | None:
        """One index per axis for an element, outside of the shape where the element is. None if no axis leads there."""
        if not self.shape:
            return None
        axes = sorted(
            (i for i, s in enumerate(self.strides) if s and self.shape[i] > 1), key=lambda i: -self.strides[i]
        )
        position = [0] * len(self.shape)
        rest = element
        for axis in axes:
            position[axis], rest = divmod(rest, self.strides[axis])
        return None if rest else tuple(position)
