"""Runs the capstone's kernels in the course's emulator of Gluon, with what they need beyond it.

Their files are read and run with the emulator's names, so that tests can change a line first.
"""

from __future__ import annotations

import ast
import functools
import re
import struct
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from solutions.capstone_hopper.steps.patch import source_of
from utils.fingerprint import ROOT
from utils.gluon import emulator
from utils.gluon.machine import Descriptor, Pointer, Shared

PARTS = ROOT / "solutions" / "capstone_hopper" / "parts.py"
#: Functions of the capstone that are instructions or views here.
OURS = ("exp2", "matrix", "rescaled")


class Emulator(emulator.Emulator):
    """The emulator with sums by TMA, and with the few instructions that kernels write themselves."""

    clock = 0

    def add_tile(self, descriptor: Descriptor, at: list[int], tile: Shared) -> None:
        self.store_tile(descriptor, at, tile, add=True)

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

    def names(self) -> dict[str, Any]:
        """What a kernel's source finds under the names that it imports."""

        def jit(function: Callable | None = None, **_: object) -> Callable:
            return function if function else lambda f: f

        names = super().names()
        names["gl"].inline_asm_elementwise = self.assembly
        return names | {
            "tl": names["gl"],
            "exp2": torch.exp2,
            "rescaled": lambda out, shrink: out * shrink[:, None],
            "matrix": lambda tile, rows, columns: tile._reinterpret(tile.dtype, [rows, columns], None),
            "gluon": types.SimpleNamespace(jit=jit),
            "wait_for_all": lambda: None,
            "add_to_global": self.add_tile,
        }


def kernel_of(path: Path, names: dict[str, object], constants: bool = True) -> dict[str, object]:
    """``names`` and what a file adds to them: its kernels and constants, and the kernels of its neighbours it imports.

    Args:
        constants: Whether its constants come along.
    """
    neighbours, code = _code(source_of(path), path, constants)
    for neighbour in neighbours:
        kernel_of(neighbour, names, constants=False)
    exec(code, names)
    return names


@functools.cache
def _code(source: str, path: Path, constants: bool) -> tuple[list[Path], types.CodeType]:
    """The neighbours that a file imports, and what it adds to the names, compiled once while it says the same."""
    tree = ast.parse(source.replace(".type.layout", ".layout").replace(".to(gl.int64)", ""))
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level and node.module]
    neighbours = [path.parents[node.level - 1] / f"{node.module}.py" for node in imported]

    def wanted(node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef):
            return node.name not in OURS and any("gluon.jit" in ast.unparse(d) for d in node.decorator_list)
        return constants and isinstance(node, ast.Assign)

    kept = ast.Module([node for node in tree.body if wanted(node)], [])
    return [each for each in neighbours if each.is_file()], compile(kept, str(path), "exec")


def run_programs(
    path: Path,
    name: str,
    arguments: Sequence[object],
    programs: int,
    seed: int,
    first: int | None = None,
    **constants: object,
) -> None:  # fmt: skip
    """Run each program of a one-dimensional grid of a kernel of lab 6, which uses the capstone's barriers.

    Args:
        path: The kernel's file.
        arguments: Of the launch, as the emulator takes them.
        first: Which partition goes on if it can, as :class:`utils.gluon.emulator.Emulator` takes it.
        constants: The kernel's further arguments by name.
    """
    machine = Emulator(seed, first)
    names = machine.names()
    names["gl"].num_programs = lambda axis: programs
    names["barriers"] = kernel_of(PARTS, dict(names), constants=False)["barriers"]
    names = kernel_of(path, names, constants=False)
    for machine.program in range(programs):
        machine.run(lambda: names[name](*arguments, **constants))


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
    machine = Emulator(seed)
    names = kernel_of(path, machine.names())
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
    for machine.program in range(programs):
        machine.run(lambda: names["attention_kernel"](**arguments))
    return o, lse
