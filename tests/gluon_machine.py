"""The machine under :mod:`gluon_emulator`: partitions that run by turns, barriers, shared memory, descriptors."""

from __future__ import annotations

import math
import random
import threading
import types
from collections.abc import Callable

import torch


class Stuck(AssertionError):
    """Every partition waits, and nothing is under way that could wake one."""


class Machine:
    """One multiprocessor: partitions that run by turns, and what runs beside them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.under_way: list[Callable[[], None]] = []
        self.waiting: dict[str, Callable[[], bool]] = {}
        self.batons: dict[str, threading.Semaphore] = {}
        self.current = "main"
        self.failure: BaseException | None = None

    def add(self, action: Callable[[], None]) -> None:
        """Something that happens at some later moment."""
        self.under_way.append(action)

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let others go on; come back when ``until`` holds."""
        me = self.current
        self.waiting[me] = until
        self._choose()
        self.batons[me].acquire()
        if self.failure:
            raise SystemExit
        self.current = me

    def _choose(self) -> None:
        """Hand over to somebody who can go on, after some of what is under way has happened."""
        while True:
            while self.under_way and self.random.random() < 0.4:
                self.under_way.pop(self.random.randrange(len(self.under_way)))()
            ready = [name for name, until in self.waiting.items() if until()]
            if ready:
                chosen = self.random.choice(ready)
                del self.waiting[chosen]
                self.batons[chosen].release()
                return
            if not self.under_way:
                if self.waiting:
                    self._fail(Stuck(f"nobody can go on: {', '.join(self.waiting)}"))
                return
            self.under_way.pop(self.random.randrange(len(self.under_way)))()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        for baton in self.batons.values():
            baton.release()

    def run(self, partitions: dict[str, Callable[[], None]]) -> None:
        """Run all of them to their end.

        Raises:
            Stuck: they wait for each other.
        """
        threads = []
        for name, work in partitions.items():
            self.batons[name] = threading.Semaphore(0)
            self.waiting[name] = lambda: True

            def body(name: str = name, work: Callable[[], None] = work) -> None:
                self.batons[name].acquire()
                self.current = name
                try:
                    if not self.failure:
                        work()
                        self._choose()
                except SystemExit:
                    pass
                except BaseException as error:
                    self._fail(error)

            threads.append(threading.Thread(target=body, daemon=True))
        for thread in threads:
            thread.start()
        self._choose()
        for thread in threads:
            thread.join()
        self.batons.clear()
        self.waiting.clear()
        if self.failure:
            raise self.failure


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes are there."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = 0
        self.phase = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals in a phase than the barrier was made for"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Shared:
    """A tile of shared memory, or an array of them."""

    def __init__(self, data: torch.Tensor | list, flags: dict | None = None) -> None:
        self.data = data
        #: Whether there are stores that TMA has not been fenced against.
        self.flags = {"unfenced": False} if flags is None else flags

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: int) -> Shared | Barrier:
        if isinstance(self.data, list):
            return self.data[i]
        assert 0 <= i < self.data.shape[0], i
        return Shared(self.data[i], self.flags)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order), self.flags)

    def slice(self, first: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, first, length), self.flags)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        assert dtype == self.dtype
        return Shared(self.data.view(shape), self.flags)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)
        self.flags["unfenced"] = True


class Pointer:
    """A pointer to the elements of a tensor."""

    def __init__(self, tensor: torch.Tensor, offset: int | torch.Tensor = 0) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, more: int | torch.Tensor) -> Pointer:
        return Pointer(self.tensor, self.offset + more)


class Descriptor:
    """Hands out tiles (..., rows, columns) of a tensor; what lies beyond its ends reads as 0 and is not written.

    Args:
        tensor: Any number of axes.
        block: Extent of a tile on each.
    """

    def __init__(self, tensor: torch.Tensor, block: list[int]) -> None:
        self.tensor, self.block_shape = tensor, block
        self.dtype, self.layout = tensor.dtype, None
        self.block_type = types.SimpleNamespace(nbytes=math.prod(block) * tensor.element_size())

    def _places(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where the part of a tile that exists lies in the tensor, and in the tile."""
        assert len(at) == len(self.block_shape) and min(at) >= 0, at
        sizes = [max(0, min(n, size - x)) for x, n, size in zip(at, self.block_shape, self.tensor.shape)]
        return tuple(slice(x, x + n) for x, n in zip(at, sizes)), tuple(slice(0, n) for n in sizes)

    def read(self, at: list[int]) -> torch.Tensor:
        """The tile at these coordinates."""
        there, here = self._places(at)
        tile = torch.zeros(self.block_shape, dtype=self.dtype)
        tile[here] = self.tensor[there]
        return tile

    def write(self, at: list[int], tile: torch.Tensor, add: bool = False) -> None:
        """Put the tile there, or add it, as far as there is anything."""
        there, here = self._places(at)
        self.tensor[there] = tile[here] + (self.tensor[there] if add else 0)


def larger(a: int | torch.Tensor, b: int | torch.Tensor) -> int | torch.Tensor:
    """The maximum, element by element where there are elements."""
    tensors = isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b)) if tensors else max(a, b)


def smaller(a: int | torch.Tensor, b: int | torch.Tensor) -> int | torch.Tensor:
    """The minimum, likewise."""
    tensors = isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b)) if tensors else min(a, b)


def either(condition: bool | torch.Tensor, a, b):
    """``a`` where the condition holds, else ``b``."""
    return torch.where(condition, a, b) if isinstance(condition, torch.Tensor) else a if condition else b
