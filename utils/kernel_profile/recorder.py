"""Watches interpreted launches: counts what they move, and checks each access."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from utils.interpreter import Access, Argument, Launch
from utils.kernel_profile.allocations import Allocations, Written
from utils.kernel_profile.counters import SECTOR, Counters
from utils.kernel_profile.findings import Finding, OutOfBounds, Program, Race, UninitializedRead
from utils.kernel_profile.launches import LaunchProfile
from utils.kernel_profile.memory import Region, Storage, slots_of
from utils.kernel_profile.requests import requests

ELSEWHERE = "(no argument)"
#: Accesses of a program outside of its arguments, after which it is ended.
MOST_OUTSIDE = 2000


class Recorder:
    """The observer behind :func:`utils.kernel_profile.profile_kernel`."""

    def __init__(
        self,
        check_races: bool,
        check_bounds: bool,
        check_uninitialized: bool,
        memory: Mapping[str, torch.Tensor],
        max_findings: int,
    ) -> None:
        self.check_races = check_races
        self.check_bounds = check_bounds
        self.check_uninitialized = check_uninitialized
        self.memory = dict(memory)
        self.max_findings = max_findings
        self.launches: list[LaunchProfile] = []
        self.findings: dict[tuple, Finding] = {}
        self.findings_left_out = 0
        self.allocations = Allocations()
        self._storages: dict[int, Storage] = {}
        self._keep: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    # ---- launches and programs ----

    def launch_begins(self, launch: Launch) -> None:
        extra = tuple(self._on_host(name, tensor, launch.arguments) for name, tensor in self.memory.items())
        self._launch = LaunchProfile(
            launch.kernel, scalars=dict(launch.scalars), function=launch.function, given=launch.given
        )
        self._launch.tensors = tuple((a.name, tuple(a.given.shape), a.given.dtype) for a in launch.arguments)
        self.launches.append(self._launch)
        self._regions: list[Region] = []
        self._written: list[Written | None] = []
        self._slot: dict[int, int] = {}
        used: dict[int, list[int]] = {}
        for slot, argument in enumerate(launch.arguments + extra):
            storage = argument.given.untyped_storage()
            key = storage.data_ptr()
            if key not in self._storages or self._storages[key].nbytes != storage.nbytes():
                self._storages[key] = Storage(storage.nbytes())
                self._keep.append(argument.given)  # so that this address stays this storage
            used.setdefault(key, []).append(argument.given.element_size())
            self._regions.append(Region(argument, slot, self._storages[key]))
            self._written.append(self.allocations.of(argument.given) if self.check_uninitialized else None)
            self._slot[id(argument.host)] = slot
        for key, sizes in used.items():
            self._storages[key].begin(min(sizes))
        self._number = 0
        self._outside = 0
        self._program: Program = (0, 0, 0)
        self._programs: list[Program] = []

    def launch_ends(self, error: BaseException | None) -> None:
        self._launch.error = error
        self._launch.programs = self._number
        self._launch.done = True
        for given, host in self._copies:
            given.untyped_storage().copy_(host.untyped_storage())
        self._copies.clear()

    def _on_host(self, name: str, tensor: torch.Tensor, arguments: tuple[Argument, ...]) -> Argument:
        """A tensor that is reached through an address: its host copy, shared with arguments on the same storage."""
        if tensor.device.type == "cpu":
            return Argument(name, tensor, tensor)
        key = tensor.untyped_storage().data_ptr()
        shared = (a.host.untyped_storage() for a in arguments if a.given.untyped_storage().data_ptr() == key)
        storage = next(shared, None)
        host = torch.empty(0, dtype=tensor.dtype, device="cpu")
        host.set_(storage or tensor.untyped_storage().cpu(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if storage is None:
            self._copies.append((tensor, host))
        return Argument(name, host, tensor)

    def grid(self, shape: tuple[int, int, int]) -> None:
        self._launch.grid = tuple(int(n) for n in shape)

    def program(self, index: tuple[int, int, int]) -> None:
        self._program = index
        self._programs.append(index)
        self._number += 1
        self._outside = 0

    def address(self, tensor: torch.Tensor) -> int:
        return self._regions[self._slot[id(tensor)]].pointer

    def dot(self, batch: int, m: int, n: int, k: int) -> None:
        flops = self._launch.flops
        flops[self._program] = flops.get(self._program, 0) + 2 * batch * m * n * k

    def release(self) -> None:
        """The block is closed: memory held for it may go."""
        self._storages.clear()
        self._keep.clear()
        self._regions = []
        self._written = []
        self.allocations.empty.clear()

    # ---- accesses ----

    def access(self, access: Access) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        addresses, mask = access.addresses, access.mask
        if mask.shape != addresses.shape:
            mask = np.broadcast_to(mask, addresses.shape)
        everywhere = bool(mask.all())
        if not everywhere and not mask.any():
            return addresses, mask, None
        first = addresses.flat[0 if everywhere else int(mask.argmax())]
        slot = int(slots_of(first))
        if 0 <= slot < len(self._regions):
            region = self._regions[slot]
            inside = region.contains(addresses, access.itemsize)
            if inside.all() or (not everywhere and (inside | ~mask).all()):
                poison = self._inside(access, region, None if everywhere else mask)
                return addresses + region.to_real, mask, poison
        return self._mixed(access, addresses, mask)

    def _cell(self, argument: str) -> Counters:
        key = (self._program, argument)
        cell = self._launch.cells.get(key)
        if cell is None:
            cell = self._launch.cells[key] = Counters()
        return cell

    def _count(self, access: Access, argument: str, mask: np.ndarray | None) -> tuple[Counters, np.ndarray]:
        """Add one instruction to an argument's counts; return them and the ids of its sectors."""
        sectors, elements, ids = requests(access.addresses, mask, access.itemsize)
        nbytes = access.itemsize * (access.addresses.size if mask is None else int(np.count_nonzero(mask)))
        cell = self._cell(argument)
        if access.addresses.size > math.prod(self._launch.blocks.get(argument, (0,))):
            self._launch.blocks[argument] = access.addresses.shape
        if access.reads:
            cell.bytes_loaded += nbytes
            cell.sectors_loaded += sectors
            cell.useful_bytes_loaded += elements * access.itemsize
        if access.writes:
            cell.bytes_stored += nbytes
            cell.sectors_stored += sectors
            cell.useful_bytes_stored += elements * access.itemsize
            cell.l2_sectors_stored += sectors
        if access.atomic:
            cell.bytes_atomic += nbytes
            cell.sectors_atomic += sectors
            if access.reads:
                cell.l2_sectors_loaded += sectors
        return cell, ids

    def _inside(self, access: Access, region: Region, mask: np.ndarray | None) -> np.ndarray | None:
        """Count and check an access whose lanes all lie in ``region``'s storage; return lanes to poison."""
        cell, ids = self._count(access, region.name, mask)
        return self._check(access, region, mask, cell, (ids - (region.start >> np.uint64(5))).astype(np.int64))

    def _check(
        self, access: Access, region: Region, mask: np.ndarray | None, cell: Counters, ids: np.ndarray
    ) -> np.ndarray | None:
        """Check lanes that lie in ``region``'s storage, where they touch sectors ``ids``; return lanes to poison."""
        storage = region.storage
        if access.reads:
            new_to_program, new_to_launch = storage.loaded_sectors(ids, self._number)
            cell.dram_sectors_loaded += new_to_launch
            if not access.atomic:
                cell.l2_sectors_loaded += new_to_program
        if access.writes:
            cell.dram_sectors_stored += storage.stored_sectors(ids)
        written = self._written[region.slot]
        if not self.check_races and written is None:
            return None
        flat = access.addresses.reshape(-1) if mask is None else access.addresses[mask]
        offsets = (flat - region.start).astype(np.int64)
        if access.writes:
            self._note_written(region, flat)
        if self.check_races:
            units = storage.indices(offsets, access.itemsize)
            for racing, earlier, verb in storage.touch(units, self._number, access.writes, access.atomic):
                self._report_races(access, region, racing, earlier, verb)
        return None if written is None else self._check_written(access, region, written, offsets, mask)

    def _note_written(self, region: Region, addresses: np.ndarray) -> None:
        key = (self._program, region.name)
        first, last = region.element(int(addresses.min())), region.element(int(addresses.max()))
        before = self._launch.written.get(key, (first, last))
        self._launch.written[key] = (min(first, before[0]), max(last, before[1]))

    def _report_races(self, access: Access, region: Region, units: np.ndarray, earlier: np.ndarray, verb: str) -> None:
        for other in np.unique(earlier):
            lanes = units[earlier == other]
            address = int(region.start) + int(lanes[0]) * region.storage.unit
            finding = self._find(Race, access, region, address, verb, self._programs[int(other) - 1])
            if (finding.access, finding.detail) == (_verb(access), verb):  # two programs race once, however they do it
                finding.count += lanes.size

    def _check_written(
        self, access: Access, region: Region, written: Written, offsets: np.ndarray, mask: np.ndarray | None
    ) -> np.ndarray | None:
        """Note what is written; report what is read before. Returns the lanes that read it."""
        units = written.units(offsets, access.itemsize)
        poison = None
        if access.reads:
            known = written.flags[units]
            if not known.all():
                lanes = ~known.reshape(offsets.size, -1).all(axis=1)
                address = int(region.start) + int(offsets[int(lanes.argmax())])
                self._find(UninitializedRead, access, region, address).count += int(np.count_nonzero(lanes))
                poison = np.zeros(access.addresses.shape, dtype=bool)
                poison[np.ones_like(poison) if mask is None else mask] = lanes
        if access.writes:
            written.flags[units] = True
        return poison

    def _mixed(
        self, access: Access, addresses: np.ndarray, mask: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """An access that leaves its argument, or spans several: each lane is judged by the argument it points into."""
        slots = slots_of(addresses)
        foreign = mask & ((slots < 0) | (slots >= len(self._regions)))
        if foreign.any():  # addresses that the kernel loaded from memory, as the caller stored them there
            addresses = self._resolve(addresses, foreign)
            access = replace(access, addresses=addresses, mask=mask)
            slots = slots_of(addresses)
        real = addresses.copy()
        allowed = mask.copy()
        poison = np.zeros(addresses.shape, dtype=bool)
        for slot in np.unique(slots[mask]):
            lanes = mask & (slots == slot)
            if not 0 <= slot < len(self._regions):
                allowed &= ~lanes
                poison |= lanes
                self._count(access, ELSEWHERE, lanes)
                finding = self._find(OutOfBounds, access, None, int(addresses[lanes][0]), "an address in no argument")
                finding.count += int(np.count_nonzero(lanes))
                continue
            region = self._regions[int(slot)]
            inside = region.contains(addresses, access.itemsize)
            in_storage = region.in_storage(addresses, access.itemsize)
            outside = lanes & ~inside
            if self.check_bounds and outside.any():
                self._end_if_lost(region)
                self._report_outside(access, region, addresses[outside], in_storage[outside])
            safe = lanes & in_storage
            real = np.where(lanes, addresses + region.to_real, real)
            cell, ids = self._count(access, region.name, lanes)
            if safe.any():
                ids = (ids - (region.start >> np.uint64(5))).astype(np.int64)
                ids = ids[(ids >= 0) & (ids < -(-region.storage.nbytes // SECTOR))]
                unknown = self._check(access, region, safe, cell, ids)
                if unknown is not None:
                    poison |= unknown
            lost = lanes & ~in_storage
            allowed &= ~lost
            poison |= lost
        return real, allowed, poison if access.reads and poison.any() else None

    def _resolve(self, addresses: np.ndarray, foreign: np.ndarray) -> np.ndarray:
        """Replace the caller's own addresses by those that stand for the argument they point into."""
        resolved = addresses.copy()
        for region in self._regions:
            lanes = foreign & (addresses - np.uint64(region.given) < np.uint64(region.storage.nbytes))
            resolved[lanes] = addresses[lanes] - np.uint64(region.given) + region.start
        return resolved

    def _end_if_lost(self, region: Region) -> None:
        """End a loop that has long left an argument, and that numbers from outside of it may never end."""
        self._outside += 1
        if self._outside > MOST_OUTSIDE:
            raise IndexError(f"{MOST_OUTSIDE:,} accesses outside of {region.name}: a loop that goes beyond its end?")

    def _report_outside(self, access: Access, region: Region, addresses: np.ndarray, in_storage: np.ndarray) -> None:
        shape = f"outside of its shape {region.shape}"
        if not region.contiguous:
            shape += f" with strides {region.strides}"
        for lanes, where in ((addresses[in_storage], ", in the memory around it"), (addresses[~in_storage], "")):
            if lanes.size:
                self._find(OutOfBounds, access, region, int(lanes[0]), shape + where).count += lanes.size

    def _find(
        self,
        kind: type[Finding],
        access: Access,
        region: Region | None,
        address: int,
        detail: str = "",
        other: Program | None = None,
    ) -> Finding:
        """The finding that lanes of this kind share, made if this is the first of them."""
        verb = _verb(access)
        argument = region.name if region else ELSEWHERE
        how = () if kind is Race else (verb, detail)
        key = (kind, len(self.launches), argument, self._program, other, *how)
        if key not in self.findings:
            element = region.element(address) if region else address
            position = region.position(element) if region else None
            finding = kind(self._launch.kernel, argument, element, position, self._program, verb, other, 0, detail)
            if len(self.findings) >= self.max_findings:
                self.findings_left_out += 1
                return finding
            self.findings[key] = finding
        return self.findings[key]


def _verb(access: Access) -> str:
    return "atomic" if access.atomic else "write" if access.writes else "read"
