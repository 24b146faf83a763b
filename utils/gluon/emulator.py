"""Runs a Gluon kernel in Python: what its barriers order is kept, all else is made to go wrong.

A partition (the producer warp, a consumer warpgroup) is a thread, and one runs at a time. Which one goes on is open at
every barrier, copy and product. A copy fills its tile with NaN at once and brings the data at some later moment; an
asynchronous product reads shared memory at some moment before it is waited for. A tile that is read while it is being
filled, or filled while it is being read, is a :class:`~utils.gluon.machine.Fault`, and so is a cycle of waits. Within a
warpgroup nothing is modelled: fences are checked, layouts are ignored.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from utils.gluon.machine import (
    Descriptor,
    Fault,
    Integer,
    Machine,
    Pointer,
    Shared,
    either,
    larger,
    name_of,
    smaller,
)  # fmt: skip
from utils.simt.ring import Barrier, RingError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int64": torch.int64}


class Product:
    """The result of a product that may still be under way; until it is done, only another product may use it."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None

    def done(self, use: str) -> torch.Tensor:
        """The finished result.

        Raises:
            Fault: the product is under way.
        """
        if self.value is None:
            raise Fault("unfinished", f"the accumulator is read ({use}) while a product that adds to it is under way")
        return self.value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.done(f".{name}"), name)


def _operator(name: str) -> Callable[[Product, Any], Any]:
    def apply(self: Product, other: Any) -> Any:
        return getattr(self.done(name.strip("_")), name)(other.done(name) if isinstance(other, Product) else other)

    return apply


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"):
    setattr(Product, _name, _operator(_name))


class Namespace(types.SimpleNamespace):
    """A module of Gluon, as far as it is emulated."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(key for key in vars(self) if not key.startswith("_"))
        raise AttributeError(f"the emulator knows no {name!r} here, but {known}")


def _nothing(*_: object, **__: object) -> None:
    """What has no effect here: layouts, and barriers among the warps of one warpgroup."""


def _load(pointer: Pointer) -> Integer | float | torch.Tensor:
    """What a pointer points to: a number, or one for each element of its offset."""
    value = pointer.tensor.view(-1)[pointer.offset]
    if isinstance(pointer.offset, torch.Tensor):
        return value
    return value.item() if value.is_floating_point() else Integer(value)


_LAYOUTS = (
    "AutoLayout BlockedLayout DistributedLinearLayout DotOperandLayout NVMMADistributedLayout NVMMASharedLayout "
    "SliceLayout SwizzledSharedLayout"
)
#: Names of ``triton.experimental.gluon.language`` that need no machine.
LANGUAGE = {
    **DTYPES,
    **dict.fromkeys(f"{_LAYOUTS} barrier thread_barrier static_assert static_print device_assert".split(), _nothing),
    "constexpr": lambda x: x,
    "static_range": range,
    "cdiv": lambda a, b: -(-a // b),
    "arange": lambda a, b, layout=None: torch.arange(a, b),
    "zeros": lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    "full": lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    "max": lambda x, axis: x.amax(axis),
    "sum": lambda x, axis: x.sum(axis),
    "exp2": torch.exp2,
    "log2": torch.log2,
    "maximum": larger,
    "minimum": smaller,
    "where": either,
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "reshape": lambda x, shape: x.reshape(tuple(shape)),
    "permute": torch.permute,
    "split": lambda x: x.unbind(-1),
    "load": _load,
}


class Emulator:
    """Names that a kernel's source uses, for one program of the grid on a :class:`Machine`.

    Attributes:
        program: ``program_id`` on each axis.
        events: What its partitions did, in order: (partition, what, where, further). Further are the parity of a
            ``wait``, the phases completed before an ``arrive``, whether a ``product`` adds to the one before it, how
            many may be under way after ``products done``, and the coordinates of a ``store``.
        most_in_flight: Products of one partition that were under way at the same time, at most.
    """

    def __init__(self, seed: int, first: int | None = None) -> None:
        self.machine = Machine(seed, first)
        self.program: int | tuple[int, ...] = 0
        self.products: dict[str, list[Callable[[], None]]] = {}
        self.last: dict[str, Product] = {}
        self.stores: dict[str, list[Callable[[], None]]] = {}
        self.made: list[Shared] = []
        self.events: list[tuple[str, str, str, Any]] = []
        self.most_in_flight = self.loading = 0

    def _note(self, what: str, where: str, further: Any = None) -> None:
        self.events.append((self.machine.current, what, where, further))

    # ---- copies and barriers ----

    def wait(self, barrier: Barrier, phase: int, pred: bool = True, deps: Sequence = ()) -> None:
        if not pred:
            return
        name = name_of(barrier)
        if phase not in (0, 1):
            raise Fault("parity", f"a parity is 0 or 1, and {name} is waited for with {int(phase)}", name)
        self._note("wait", name, int(phase))

        def why() -> str:
            lacks = f"{barrier.pending} of {barrier.arrivals} arrivals"
            lacks += f" and {barrier.missing:,} bytes" if barrier.missing else ""
            return f"waits at {name} with parity {int(phase)} for phase {barrier.completed}, which lacks {lacks}"

        self.machine.pause(lambda: barrier.passes(phase), why)

    def arrive(self, barrier: Barrier, *, count: int = 1, pred: bool = True) -> None:
        self.machine.pause()
        if not pred:
            return
        self._note("arrive", name_of(barrier), barrier.completed)
        for _ in range(count):
            self._arrive(barrier, barrier.arrive)

    @staticmethod
    def _arrive(barrier: Barrier, how: Callable[..., None], *arguments: int) -> None:
        try:
            how(*arguments)
        except RingError as error:
            raise Fault("arrivals", f"{name_of(barrier)}: {error}", name_of(barrier)) from None

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.arrivals = barrier.pending = count

    def expect(self, barrier: Barrier, size: int, pred: bool = True) -> None:
        if pred:
            self._arrive(barrier, barrier.expect, size)

    def load_tile(self, descriptor: Descriptor, at: list[int], full: Barrier, tile: Shared, pred: bool = True) -> None:
        if not pred:
            return
        name = name_of(tile)
        if tile.use.readers:
            raise Fault("overwritten", f"TMA overwrites {name} while a product that reads it is under way", name)
        tile.data.fill_(float("nan"))
        tile.use.filling, tile.use.written, self.loading = tile.use.filling + 1, True, self.loading + 1

        def done() -> None:
            tile.data.copy_(descriptor.read(at))
            self.loading -= 1
            tile.use.filling -= 1
            full.landed(descriptor.block_type.nbytes)

        self.machine.add(done)
        self.machine.pause()

    def store_tile(self, descriptor: Descriptor, at: list[int], tile: Shared, add: bool = False) -> None:
        if not tile.use.written:
            raise Fault("unwritten", f"TMA stores {name_of(tile)}, which nothing has written")
        if tile.use.unfenced:
            raise Fault("unfenced", f"TMA reads {name_of(tile)} without a fence after the stores to it")
        waiting = [True]

        def done() -> None:
            if waiting:
                waiting.pop()
                descriptor.write(at, tile.data, add)

        self._note("store", name_of(tile), [int(x) for x in at])
        self.stores.setdefault(self.machine.current, []).append(done)
        self.machine.add(done)
        self.machine.pause()

    def store_wait(self, pendings: int) -> None:
        mine = self.stores.get(self.machine.current, [])
        while len(mine) > _not_negative(pendings):
            mine.pop(0)()

    def program_id(self, axis: int) -> Integer:
        return Integer(self.program[axis] if isinstance(self.program, tuple) else self.program)

    def run(self, kernel: Callable[[], None]) -> None:
        """One program from its beginning to its end.

        Raises:
            Fault: something in it would be a race, a hang or garbage on a GPU.
        """
        self.machine.run({"kernel": kernel})
        self.end()

    def end(self) -> None:
        """What must hold when a program ends: its shared memory is given to another."""
        if self.loading:
            raise Fault("copy left", "the program ends while TMA writes to its shared memory")
        if any(self.products.values()):
            raise Fault("product left", "the program ends while a product is under way")
        if any(self.stores.values()):
            raise Fault("store left", "the program ends before TMA has read the tile that it is to store")

    # ---- products ----

    def multiply(self, a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
        shared = [operand for operand in (a, b) if isinstance(operand, Shared)]
        before = self.last.get(self.machine.current)
        adds = use_acc and (isinstance(acc, Product) or (before is not None and acc is before.value))
        self._note("product", " and ".join(map(name_of, shared)), adds)
        for operand in shared:
            name = name_of(operand)
            if operand.use.unfenced:
                raise Fault("unfenced", "the tensor cores read what was stored without a fence")
            if operand.use.filling or not operand.use.written:
                raise Fault("early", f"a product reads {name} before TMA has written it", name)
        if a.shape[-1] != b.shape[0]:
            raise ValueError(f"warpgroup_mma multiplies (M, K) by (K, N), got {tuple(a.shape)} by {tuple(b.shape)}")
        self.last[self.machine.current] = result = Product()
        uses = [operand.use for operand in shared]
        start = acc.clone() if isinstance(acc, torch.Tensor) else acc

        def done() -> None:
            left = a.data if isinstance(a, Shared) else a
            product = left.float() @ b.data.float()
            result.value = start + product if use_acc else product
            for use in uses:
                use.readers.remove(result)

        for use in uses:
            use.readers.append(result)
        mine = self.products.setdefault(self.machine.current, [])
        mine.append(done)
        self.most_in_flight = max(self.most_in_flight, len(mine))
        if not is_async:
            self.finish(0)
            self._note("products done", "", 0)
            return result.value

        def next_one() -> None:  # products of a warpgroup end in order
            if mine:
                mine.pop(0)()

        if self.machine.first is None:
            self.machine.add(next_one)
        self.machine.pause()
        return result

    def finish(self, outstanding: int) -> None:
        mine = self.products.get(self.machine.current, [])
        while len(mine) > _not_negative(outstanding):
            mine.pop(0)()

    def multiply_wait(self, num_outstanding: int = 0, deps: Sequence[Product | torch.Tensor] = ()):
        self.machine.pause()
        self.finish(num_outstanding)
        self._note("products done", "", num_outstanding)
        kept = [dep.value if isinstance(dep, Product) and dep.value is not None else dep for dep in deps]
        return kept[0] if len(kept) == 1 else tuple(kept)

    # ---- the rest ----

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        data = (
            [Barrier(1) for _ in range(shape[0])] if dtype == torch.int64 else torch.full(shape, torch.nan, dtype=dtype)
        )
        self.made.append(Shared(data))
        return self.made[-1]

    def specialize(self, partitions: list, warps: list[int], registers: list[int]) -> None:
        assert len(partitions) == len(warps) + 1 == len(registers) + 1
        before, called = self.machine, [function.__name__ for function, _ in partitions]
        names = [
            name if called.count(name) == 1 else f"{name} {called[:i].count(name)}" for i, name in enumerate(called)
        ]
        self.machine = Machine(before.random.randrange(2**30), before.first)
        self.machine.run({name: lambda f=f, a=a: f(*a) for name, (f, a) in zip(names, partitions)})
        self.machine = before

    def fence(self) -> None:
        for shared in self.made:
            shared.use.fence()

    def store(self, pointer: Pointer, value, mask=True) -> None:
        if isinstance(pointer.offset, torch.Tensor):
            kept = torch.as_tensor(mask).expand(pointer.offset.shape)
            pointer.tensor.view(-1)[pointer.offset[kept]] = torch.as_tensor(value).expand(kept.shape)[kept]
        elif mask:
            pointer.tensor.view(-1)[pointer.offset] = value

    def names(self) -> dict[str, Any]:
        """What a kernel's source finds under the names of Gluon: modules, and functions of the Hopper module."""
        stateful = {
            "program_id": self.program_id,
            "allocate_shared_memory": self.allocate,
            "warp_specialize": self.specialize,
            "store": self.store,
        }
        return {
            "gl": Namespace(**LANGUAGE, **stateful),
            "range": lambda *bounds: map(Integer, range(*bounds)),
            "mbarrier": Namespace(
                init=self.init, expect=self.expect, wait=self.wait, arrive=self.arrive, invalidate=_nothing,
                MBarrierLayout=_nothing,
            ),
            "tma": Namespace(
                async_copy_global_to_shared=self.load_tile, async_copy_shared_to_global=self.store_tile,
                async_load=self.load_tile, async_store=self.store_tile, store_wait=self.store_wait,
            ),
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_init": lambda value: value,
            "warpgroup_mma_wait": self.multiply_wait,
            "fence_async_shared": self.fence,
        }  # fmt: skip


def _not_negative(count: int) -> int:
    if count < 0:
        raise ValueError(f"a wait is for 0 or more that may still be under way, got {count}")
    return count
