"""Where KV memory goes under four ways to allocate it, simulated over one workload.

Memory is counted in slots: room for one token's keys and values in all layers. A step generates one token for each
running request, and requests are admitted first come, first served, as soon as their memory is there. At any step each
slot is one of: *used* (it holds a token), *reserved* (it will hold a token of its request), *internal* (allocated to a
request that will never use it), or *external* (allocated to nobody: free, or in pieces that fit nobody). The words and
the systems are those of Kwon et al. 2023, section 3 and figure 2; what a buddy allocator rounds up beyond what a
policy asked for is *external* there and here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Extent:
    """A request's contiguous piece of memory: ``size`` slots from ``start``, ``tokens`` in use, ``needed`` in the end.

    ``asked`` is what its policy wanted; a buddy allocator may give more.
    """

    id: int
    start: int
    size: int
    asked: int
    tokens: int
    needed: int


@dataclass(frozen=True)
class MemoryTrace:
    """Slots over the steps of a simulation, arrays of one length; the four kinds sum to ``capacity`` at each step.

    ``waiting`` and ``running`` count requests, ``largest_waste`` is the most internal slots of any one request.
    ``maps`` holds the pieces of memory at each step, if they were asked for: extents, or for paging lists of
    (block, request, tokens in the block).
    """

    policy: str
    capacity: int
    used: np.ndarray
    reserved: np.ndarray
    internal: np.ndarray
    external: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    largest_waste: np.ndarray
    preemptions: int = 0
    maps: tuple[Sequence[object], ...] = ()

    @property
    def steps(self) -> int:
        """Length of the simulation."""
        return len(self.used)

    @property
    def loaded(self) -> np.ndarray:
        """Which steps count: those at which a request waits, since an idle system's empty memory is no waste."""
        return self.waiting > 0

    def shares(self) -> dict[str, float]:
        """Mean shares of the capacity while requests wait: used, reserved, internal, external.

        Raises:
            ValueError: no request ever waited: the load is too low to say anything.
        """
        loaded = self.loaded
        if not loaded.any():
            raise ValueError("no request ever had to wait: use more requests, or less memory")
        names = ("used", "reserved", "internal", "external")
        return {name: float(getattr(self, name)[loaded].mean()) / self.capacity for name in names}

    @property
    def used_of_allocated(self) -> float:
        """Tokens over the slots that are allocated to requests, over the whole run."""
        return float(self.used.sum() / (self.capacity - self.external).sum())


class OutOfMemory(ValueError):
    """A request needs more memory than there is."""


class Buddy:
    """A buddy allocator over ``capacity`` slots: pieces are powers of two, halved on demand and joined when both free.

    A capacity that is no power of two is cut into the powers of two that add up to it (Knuth 1997, section 2.5).
    """

    def __init__(self, capacity: int) -> None:
        self.free: dict[int, set[int]] = {}
        start = 0
        for order in reversed(range(capacity.bit_length())):
            if capacity >> order & 1:
                self.free.setdefault(order, set()).add(start)
                start += 1 << order

    def allocate(self, size: int) -> tuple[int, int] | None:
        """The start and the size of a piece of at least ``size`` slots, or None if there is none: the lowest start."""
        order = max(size - 1, 0).bit_length()
        found = min((o for o, starts in self.free.items() if o >= order and starts), default=None)
        if found is None:
            return None
        start = min(self.free[found])
        self.free[found].remove(start)
        while found > order:
            found -= 1
            self.free.setdefault(found, set()).add(start + (1 << found))
        return start, 1 << order

    def release(self, start: int, size: int) -> None:
        """Give a piece back; it joins its buddy as often as that is free."""
        order = size.bit_length() - 1
        while start ^ (1 << order) in self.free.get(order, ()):
            buddy = start ^ (1 << order)
            self.free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self.free.setdefault(order, set()).add(start)


def power_of_two(value: int) -> int:
    """The least power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


#: What each contiguous policy asks for, of prompt length, output length and the model's context.
POLICIES: dict[str, Callable[[int, int, int], int]] = {
    "maximum": lambda prompt, output, context: context,
    "power of two": lambda prompt, output, context: min(prompt + power_of_two(output), context),
    "oracle": lambda prompt, output, context: prompt + output,
}


def reserve_maximum(lengths: Sequence[tuple[int, int]], capacity: int, context: int, **options: object) -> MemoryTrace:
    """Each request gets the model's whole context in one piece, since nobody knows how long its answer will be."""
    return _contiguous("maximum", lengths, capacity, context, **options)


def reserve_power_of_two(
    lengths: Sequence[tuple[int, int]], capacity: int, context: int, **options: object
) -> MemoryTrace:
    """Each request gets its prompt and its output rounded up to a power of two, as if that much were known."""
    return _contiguous("power of two", lengths, capacity, context, **options)


def oracle(lengths: Sequence[tuple[int, int]], capacity: int, context: int, **options: object) -> MemoryTrace:
    """Each request gets exactly what it will need, in one piece: the best that contiguous memory can do."""
    return _contiguous("oracle", lengths, capacity, context, **options)


class _Ledger:
    """What is noted at each step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        self.maps: list[Sequence[object]] = []

    def trace(self, policy: str, capacity: int, preemptions: int = 0) -> MemoryTrace:
        used, reserved, internal, running, waiting, largest = np.array(self.rows, dtype=np.int64).T
        external = capacity - used - reserved - internal
        return MemoryTrace(
            policy, capacity, used, reserved, internal, external, running, waiting, largest, preemptions,
            tuple(self.maps),
        )  # fmt: skip


def _checked(lengths: Sequence[tuple[int, int]], arrivals: Sequence[int] | None) -> deque[tuple[int, int, int, int]]:
    """The requests as (arrival in steps, id, prompt, output), in order."""
    times = [0] * len(lengths) if arrivals is None else [int(a) for a in arrivals]
    if not lengths or len(times) != len(lengths):
        raise ValueError(f"give at least one request and one arrival each, got {len(lengths)} and {len(times)}")
    for prompt, output in lengths:
        if prompt < 1 or output < 1:
            raise ValueError(f"prompts and outputs have at least one token, got {prompt} and {output}")
    return deque(sorted((time, i, *map(int, lengths[i])) for i, time in enumerate(times)))


def _contiguous(
    policy: str,
    lengths: Sequence[tuple[int, int]],
    capacity: int,
    context: int,
    *,
    arrivals: Sequence[int] | None = None,
    keep_maps: bool = False,
) -> MemoryTrace:
    coming, memory, ledger = _checked(lengths, arrivals), Buddy(capacity), _Ledger()
    running: list[list[int]] = []  # start, size, asked, tokens, needed, id
    waiting: deque[tuple[int, int, int, int]] = deque()
    step = 0
    while coming or waiting or running:
        while coming and coming[0][0] <= step:
            waiting.append(coming.popleft())
        while waiting:
            _, id, prompt, output = waiting[0]
            if prompt + output > context:
                raise OutOfMemory(f"request {id} grows to {prompt + output} tokens; the context is {context}")
            asked = POLICIES[policy](prompt, output, context)
            piece = memory.allocate(asked)
            if piece is None:
                if not running:
                    raise OutOfMemory(f"request {id} asks for {asked} slots in one piece; {capacity} are too few")
                break
            waiting.popleft()
            running.append([*piece, asked, prompt, prompt + output, id])
        used = sum(r[3] for r in running)
        reserved = sum(r[4] - r[3] for r in running)
        waste = [r[2] - r[4] for r in running]
        ledger.rows.append((used, reserved, sum(waste), len(running), len(waiting), max(waste, default=0)))
        if keep_maps:
            ledger.maps.append([Extent(r[5], r[0], r[1], r[2], r[3], r[4]) for r in running])
        for r in running:
            r[3] += 1
        for r in [r for r in running if r[3] >= r[4]]:
            memory.release(r[0], r[1])
            running.remove(r)
        step += 1
    return ledger.trace(policy, capacity)


def paged(
    lengths: Sequence[tuple[int, int]],
    capacity: int,
    context: int,
    *,
    block_size: int = 16,
    watermark: float = 0.01,
    arrivals: Sequence[int] | None = None,
    keep_maps: bool = False,
) -> MemoryTrace:
    """Blocks of ``block_size`` slots, taken one at a time when a token needs it; nothing is reserved.

    Nobody knows the answer's length, so memory can run out while requests grow: then the newest gives its blocks back
    and waits, first in the queue, to be computed again (Kwon et al. 2023, section 4.5). A request is admitted when its
    blocks are free and the share ``watermark`` of all blocks besides, so that this is rare.
    """
    if block_size < 1 or capacity < block_size:
        raise ValueError(f"block_size must be between 1 and the capacity {capacity}, got {block_size}")
    coming, ledger = _checked(lengths, arrivals), _Ledger()
    free, running, waiting = list(range(capacity // block_size))[::-1], [], deque()
    spare = math.ceil(watermark * len(free))
    preemptions, step = 0, 0

    def blocks(tokens: int) -> int:
        return -(-tokens // block_size)

    while coming or waiting or running:
        while coming and coming[0][0] <= step:
            _, id, prompt, output = coming.popleft()
            if prompt + output > context:
                raise OutOfMemory(f"request {id} grows to {prompt + output} tokens; the context is {context}")
            if (needed := blocks(prompt + output)) > capacity // block_size:
                raise OutOfMemory(f"request {id} needs {needed} blocks; there are {capacity // block_size}")
            waiting.append([id, prompt, prompt + output, []])
        for r in list(running):  # room for the token of this step, oldest first
            while r in running and len(r[3]) < blocks(r[1]):
                if free:
                    r[3].append(free.pop())
                    continue
                newest = running.pop()
                free += newest[3][::-1]
                newest[3] = []
                waiting.appendleft(newest)
                preemptions += 1
        while waiting and len(free) >= blocks(waiting[0][1]) + (spare if running else 0):
            r = waiting.popleft()
            r[3] = [free.pop() for _ in range(blocks(r[1]))]
            running.append(r)
        waste = [len(r[3]) * block_size - r[1] for r in running]
        ledger.rows.append(
            (sum(r[1] for r in running), 0, sum(waste), len(running), len(waiting), max(waste, default=0))
        )
        if keep_maps:
            sizes = [[min(block_size, r[1] - i * block_size) for i in range(len(r[3]))] for r in running]
            ledger.maps.append(
                [(b, r[0], n) for r, held in zip(running, sizes, strict=True) for b, n in zip(r[3], held, strict=True)]
            )
        for r in running:
            r[1] += 1
        for r in [r for r in running if r[1] >= r[2]]:
            free += r[3][::-1]
            running.remove(r)
        step += 1
    return ledger.trace(f"paged, blocks of {block_size}", capacity, preemptions)
