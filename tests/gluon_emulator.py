"""Runs a Gluon kernel of the capstone in Python: what its barriers order is kept, all else is made to go wrong.

A partition (the producer warp, a consumer warpgroup) is a thread, and one runs at a time. Which one goes on is drawn at
random at every barrier, copy and product. A copy fills its tile with NaN at once and brings the data at some later
moment; an asynchronous product reads shared memory at some moment before it is waited for. So a wait that is missing,
a wrong parity or a stage handed back too early gives NaN or another result under some seed, and a cycle of waits is
found and reported. Within a warpgroup nothing is modelled: fences are checked, layouts are ignored.
"""

from __future__ import annotations

import ast
import re
import struct
import types
from collections.abc import Callable
from pathlib import Path

import torch
from gluon_machine import Barrier, Descriptor, Machine, Pointer, Shared, either, larger, smaller

from solutions.capstone_hopper.steps.patch import source_of

#: Functions of the capstone that are instructions or views here.
OURS = ("exp2", "matrix")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int64": torch.int64}


class Product:
    """The result of a product that may still be under way."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None


class Emulator:
    """Names that a kernel's source uses, for one program of the grid on a :class:`Machine`."""

    def __init__(self, seed: int) -> None:
        self.machine = Machine(seed)
        self.program: int | tuple[int, ...] = 0
        self.products: dict[str, list[Callable[[], None]]] = {}
        self.stores: dict[str, list[Callable[[], None]]] = {}
        self.clock = self.loading = 0

    # ---- copies and barriers ----

    def wait(self, barrier: Barrier, parity: int) -> None:
        assert parity in (0, 1), parity
        self.machine.pause(lambda: barrier.phase != parity)

    def arrive(self, barrier: Barrier) -> None:
        self.machine.pause()
        barrier.pending -= 1
        barrier.settle()

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.bytes += size
        barrier.pending -= 1
        barrier.settle()

    def load_tile(self, descriptor: Descriptor, at: list[int], full: Barrier, tile: Shared) -> None:
        tile.data.fill_(float("nan"))
        self.loading += 1

        def done() -> None:
            tile.data.copy_(descriptor.read(at))
            self.loading -= 1
            full.bytes -= descriptor.block_type.nbytes
            full.settle()

        self.machine.add(done)
        self.machine.pause()

    def add_tile(self, descriptor: Descriptor, at: list[int], tile: Shared) -> None:
        self.store_tile(descriptor, at, tile, add=True)

    def store_tile(self, descriptor: Descriptor, at: list[int], tile: Shared, add: bool = False) -> None:
        assert not tile.flags["unfenced"], "TMA may not see what was stored: no fence"
        waiting = [True]

        def done() -> None:
            if waiting:
                waiting.pop()
                descriptor.write(at, tile.data, add)

        self.stores.setdefault(self.machine.current, []).append(done)
        self.machine.add(done)
        self.machine.pause()

    def store_wait(self, pending: int) -> None:
        mine = self.stores.get(self.machine.current, [])
        while len(mine) > pending:
            mine.pop(0)()

    def program_id(self, axis: int) -> int:
        return self.program[axis] if isinstance(self.program, tuple) else self.program

    def run(self, kernel: Callable[[], None]) -> None:
        """One program from its beginning to its end."""
        self.machine.run({"kernel": kernel})
        self.end()

    def end(self) -> None:
        """What must hold when a program ends: its shared memory is given to another."""
        assert self.loading == 0, "a program ended while TMA was writing to its shared memory"
        assert not any(self.stores.values()), "a program ended before TMA had read its output"

    # ---- products ----

    def multiply(self, a, b, acc, use_acc=True, is_async=False):
        for operand in (a, b):
            fenced = not (isinstance(operand, Shared) and operand.flags["unfenced"])
            assert fenced, "the tensor cores may not see what was stored: no fence"
        result = Product()
        start = acc.clone() if use_acc else torch.zeros_like(acc)

        def done() -> None:
            if result.value is None:
                left = a.data if isinstance(a, Shared) else a
                result.value = start + left.float() @ b.data.float()

        if not is_async:
            self.finish(0)
            done()
            return result.value
        mine = self.products.setdefault(self.machine.current, [])

        def next_one() -> None:  # products of a warpgroup end in order
            if mine:
                mine.pop(0)()

        mine.append(done)
        self.machine.add(next_one)
        self.machine.pause()
        return result

    def finish(self, outstanding: int) -> None:
        mine = self.products.get(self.machine.current, [])
        while len(mine) > outstanding:
            mine.pop(0)()

    def multiply_wait(self, outstanding: int, results: list[Product]) -> torch.Tensor:
        self.machine.pause()
        self.finish(outstanding)
        assert results[0].value is not None, "a product is read before it is waited for"
        return results[0].value

    # ---- the rest ----

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        if dtype == torch.int64:
            return Shared([Barrier() for _ in range(shape[0])])
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def specialize(self, partitions: list, warps: list[int], registers: list[int]) -> None:
        assert len(partitions) == len(warps) + 1 == len(registers) + 1
        before = self.machine
        self.machine = Machine(before.random.randrange(2**30))
        self.machine.run({f"partition {i}": lambda f=f, a=a: f(*a) for i, (f, a) in enumerate(partitions)})
        self.machine = before

    def fence(self) -> None:
        for shared in self.made:
            shared.flags["unfenced"] = False

    def store(self, pointer: Pointer, value, mask=True) -> None:
        if isinstance(pointer.offset, torch.Tensor):
            kept = torch.as_tensor(mask).expand(pointer.offset.shape)
            pointer.tensor.view(-1)[pointer.offset[kept]] = torch.as_tensor(value).expand(kept.shape)[kept]
        elif mask:
            pointer.tensor.view(-1)[pointer.offset] = value

    def assembly(self, text: str, constraints: str, arguments: list, dtype: torch.dtype, is_pure: bool, pack: int):
        """The few instructions that steps write themselves."""
        if "clock64" in text:
            self.clock += 1
            return torch.full_like(arguments[0], self.clock, dtype=torch.int64) if arguments else self.clock
        (x,) = arguments
        if "nanosleep" in text:
            return x
        words = [struct.unpack(">f", bytes.fromhex(digits))[0] for digits in re.findall(r"0f([0-9A-F]{8})", text)]
        low, shift, _, c3, c2, c1, c0 = words
        bounded = x.float().clamp_min(low)
        shifted = bounded + shift
        f = bounded - (shifted - shift)
        p = ((c3 * f + c2) * f + c1) * f + c0
        bits = p.view(torch.int32) + (shifted.view(torch.int32) << 23)
        fourth = (torch.arange(x.shape[-1]) % pack == pack - 1).expand_as(x)
        return torch.where(fourth, bits.view(torch.float32), torch.exp2(x))

    def names(self) -> dict[str, object]:
        """What a kernel's source finds under the names that it imports."""
        self.made: list[Shared] = []

        def allocate(*arguments: object) -> Shared:
            self.made.append(self.allocate(*arguments))
            return self.made[-1]

        def nothing(*_: object, **__: object) -> None:
            return None

        def jit(function: Callable | None = None, **_: object) -> Callable:
            return function if function else lambda f: f

        tl = types.SimpleNamespace(
            **DTYPES, constexpr=lambda x: x, static_range=range, cdiv=lambda a, b: -(-a // b),
            program_id=self.program_id, arange=lambda a, b, layout=None: torch.arange(a, b),
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
            max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2, log2=torch.log2,
            maximum=larger, minimum=smaller, where=either, convert_layout=lambda x, layout: x,
            reshape=lambda x, shape: x.reshape(tuple(shape)),
            permute=torch.permute, split=lambda x: x.unbind(-1), SliceLayout=nothing, NVMMADistributedLayout=nothing,
            DotOperandLayout=nothing, DistributedLinearLayout=nothing, NVMMASharedLayout=nothing,
            SwizzledSharedLayout=nothing,
            allocate_shared_memory=allocate, warp_specialize=self.specialize, inline_asm_elementwise=self.assembly,
            load=lambda pointer: int(pointer.tensor.view(-1)[pointer.offset]), store=self.store,
        )  # fmt: skip
        return {
            "tl": tl,
            "gl": tl,
            "exp2": torch.exp2,
            "matrix": lambda tile, rows, columns: Shared(tile.data.view(rows, columns), tile.flags),
            "gluon": types.SimpleNamespace(jit=jit),
            "mbarrier": types.SimpleNamespace(
                init=self.init, expect=self.expect, wait=self.wait, arrive=self.arrive, MBarrierLayout=nothing
            ),
            "tma": types.SimpleNamespace(
                async_copy_global_to_shared=self.load_tile,
                async_copy_shared_to_global=self.store_tile,
                store_wait=self.store_wait,
            ),
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.multiply_wait,
            "fence_async_shared": self.fence,
            "wait_for_all": nothing,
            "add_to_global": self.add_tile,
        }


def kernel_of(path: Path, names: dict[str, object], constants: bool = True) -> dict[str, object]:
    """``names`` and what a file adds to them: its kernels and constants, and the kernels of its neighbours it imports.

    Args:
        constants: Whether its constants come along.
    """
    text = source_of(path).replace(".type.layout", ".layout").replace(".to(gl.int64)", "")
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            neighbour = path.parents[node.level - 1] / f"{node.module}.py"
            if neighbour.is_file():
                kernel_of(neighbour, names, constants=False)

    def wanted(node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef):
            return node.name not in OURS and any("gluon.jit" in ast.unparse(d) for d in node.decorator_list)
        return constants and isinstance(node, ast.Assign)

    kept = ast.Module([node for node in tree.body if wanted(node)], [])
    exec(compile(kept, str(path), "exec"), names)
    return names


def forward(
    path: Path, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, seed: int, *,
    together: int = 1, lists: torch.Tensor | None = None, **more: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """o and the logsumexp by the kernel of one file, with the order of events drawn from ``seed``.

    Args:
        q, k, v: Contiguous (B, H, N, D) on the CPU.
        together: Heads side by side.
        lists: Tiles of each program (count, tiles...), for a kernel that takes them.
        more: Further arguments of the kernel by name.
    """
    emulator = Emulator(seed)
    names = kernel_of(path, emulator.names())
    tile = names["TILES"][q.shape[3]]
    o, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"))
    batch, heads, length, head_dim = q.shape
    arguments = {
        **{
            f"{name}_desc": Descriptor(x.view(-1, head_dim), [tile["N" if name in "kv" else "M"], head_dim])
            for name, x in zip("qkvo", (q, k, v, o))
        },
        "lse_ptr": Pointer(lse), "scale": head_dim**-0.5 * 1.4426950408889634,
        "length": length, "D": head_dim, "CAUSAL": causal, **tile, **more,
    }  # fmt: skip
    if lists is None:
        groups = 1 if "producer" not in names else 2
        programs, arguments["together"] = batch * heads * length // (groups * tile["M"]), together
    else:
        programs, arguments["width"], arguments["tiles_ptr"] = len(lists), lists.shape[1], Pointer(lists)
    for emulator.program in range(programs):
        emulator.run(lambda: names["attention_kernel"](**arguments))
    return o, lse
