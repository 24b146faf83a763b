"""The machine under :mod:`utils.gluon.emulator`: partitions that take turns, shared memory, descriptors."""

from __future__ import annotations

import math
import random
import sys
import threading
import types
from collections.abc import Callable

import torch

from utils.simt.ring import Barrier


class Fault(AssertionError):
    """What would be a race, a hang or garbage on a GPU.

    Attributes:
        kind: which of them, in a word or two (``"deadlock"``).
        place: the barrier or tile that it is about, by the kernel's own name for it (``"full[1]"``).
    """

    def __init__(self, kind: str, text: str, place: str = "") -> None:
        super().__init__(text)
        self.kind, self.place = kind, place


class Machine:
    """One multiprocessor: partitions of which one runs at a time, and copies and products that run beside them.

    Args:
        seed: Draws which partition goes on, and what of the rest happens in between.
        first: By position, the partition that always goes on if it can. Copies then arrive only when nobody can go on,
            and products end only when they are waited for.
    """

    def __init__(self, seed: int, first: int | None = None) -> None:
        self.random, self.first = random.Random(seed), first
        self.under_way: list[Callable[[], None]] = []
        self.waiting: dict[str, tuple[Callable[[], bool], Callable[[], str]]] = {}
        self.order: list[str] = []
        self.batons: dict[str, threading.Semaphore] = {}
        self.current = "main"
        self.failure: BaseException | None = None

    def add(self, action: Callable[[], None]) -> None:
        """Something that happens at some later moment."""
        self.under_way.append(action)

    def pause(self, until: Callable[[], bool] = lambda: True, why: Callable[[], str] = str) -> None:
        """Let others go on; come back when ``until`` holds. ``why`` says what is waited for."""
        me = self.current
        self.waiting[me] = until, why
        self._choose()
        self.batons[me].acquire()
        if self.failure:
            raise SystemExit
        self.current = me

    def _choose(self) -> None:
        """Hand over to a partition that can go on, after some of what is under way has happened."""
        while True:
            while self.under_way and self.first is None and self.random.random() < 0.4:
                self._happen()
            ready = [name for name, (until, _) in self.waiting.items() if until()]
            if ready:
                ready.sort(key=self.order.index, reverse=self.first == -1)
                chosen = self.random.choice(ready) if self.first is None else ready[0]
                del self.waiting[chosen]
                self.batons[chosen].release()
                return
            if not self.under_way:
                if self.waiting:
                    who = "; ".join(f"{name} {why()}" for name, (_, why) in sorted(self.waiting.items()))
                    self._fail(Fault("deadlock", f"deadlock: {who}"))
                return
            self._happen()

    def _happen(self) -> None:
        at = self.random.randrange(len(self.under_way)) if self.first is None else 0
        try:
            self.under_way.pop(at)()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        for baton in self.batons.values():
            baton.release()

    def run(self, partitions: dict[str, Callable[[], None]]) -> None:
        """Run all of them to their end.

        Raises:
            Fault: they wait for each other, or one of them does what a GPU must not.
        """
        self.order = list(partitions)
        threads = []
        for name, work in partitions.items():
            self.batons[name] = threading.Semaphore(0)
            self.waiting[name] = (lambda: True), str

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


class Integer(int):
    """An integer of a kernel: ``//`` and ``%`` round towards zero, as they do in C and in Triton."""

    def __floordiv__(self, other: int) -> Integer:
        return Integer(abs(self) // abs(other) * (1 if (self < 0) == (other < 0) else -1))

    def __mod__(self, other: int) -> Integer:
        return Integer(int(self) - int(self // other) * int(other))


def _kept(name: str) -> Callable[[Integer, int], Integer]:
    plain = getattr(int, name)
    return lambda self, other: NotImplemented if (value := plain(self, other)) is NotImplemented else Integer(value)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand", "or", "ror", "xor", "rxor"):
    setattr(Integer, f"__{_name}__", _kept(f"__{_name}__"))


class Use:
    """Who uses a tile of shared memory now.

    Attributes:
        filling: Copies into it that are under way.
        readers: Products under way that read it.
        written: Whether anything was ever written there.
        unfenced: Whether there are stores that TMA and the tensor cores have not been fenced against.
        parts: The uses of its parts.
    """

    def __init__(self) -> None:
        self.filling = 0
        self.readers: list[object] = []
        self.parts: list[Use] = []
        self.written = self.unfenced = False

    def fence(self) -> None:
        """TMA and the tensor cores now see what was stored in it and in its parts."""
        self.unfenced = False
        for part in self.parts:
            part.fence()


class Shared:
    """A tile of shared memory or an array of them, or an array of barriers."""

    def __init__(self, data: torch.Tensor | list[Barrier], use: Use | None = None) -> None:
        self.data, self.use = data, use or Use()
        self.parts: dict[int, Shared] = {}

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: int) -> Shared | Barrier:
        """Part ``i`` of an array.

        Raises:
            Fault: there is no such part.
        """
        if not 0 <= i < len(self.data):
            name = name_of(self)
            raise Fault("bounds", f"{name}[{int(i)}] does not exist: {name} has {len(self.data)}", f"{name}[{int(i)}]")
        if isinstance(self.data, list):
            return self.data[i]
        if i not in self.parts:
            self.parts[i] = Shared(self.data[i])
            self.use.parts.append(self.parts[i].use)
        return self.parts[i]

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order), self.use)

    def slice(self, first: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, first, length), self.use)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        assert dtype == self.dtype
        return Shared(self.data.view(shape), self.use)

    reinterpret = _reinterpret

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        if value.dtype != self.dtype:
            raise TypeError(f"{name_of(self)} holds {self.dtype}, got {value.dtype}: convert it with .to(...)")
        self.data.copy_(value)
        self.use.written = self.use.unfenced = True


def name_of(thing: Shared | Barrier) -> str:
    """What the kernel that is running calls a barrier or tile, ``full[1]``: looked up among its variables."""
    frame, frames = sys._getframe(1), []
    while frame is not None:
        if "__name__" not in frame.f_globals:  # a bound kernel's
            frames.insert(0, frame)
        frame = frame.f_back
    for name, value in (item for frame in frames for item in frame.f_locals.items()):
        if not isinstance(value, Shared):
            continue
        parts = dict(enumerate(value.data)) if isinstance(value.data, list) else value.parts
        for at, part in parts.items():
            if part is thing or _same(part, thing):
                return f"{name}[{int(at)}]"
        if _same(value, thing):
            return name
    return "shared memory"


def _same(one: Shared | Barrier, other: Shared | Barrier) -> bool:
    """Whether two are views of one tile, or one array of barriers."""
    return isinstance(one, Shared) and isinstance(other, Shared) and one.use is other.use


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
        if len(at) != len(self.block_shape) or min(at) < 0:
            raise Fault("bounds", f"a tile at {[int(x) for x in at]} of a tensor of shape {tuple(self.tensor.shape)}")
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
