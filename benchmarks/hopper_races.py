"""Lets racecheck follow how Triton starts partitions, so that whatever it still reports is about the kernel.

Triton tells a waiting warp which partition to run by a byte of shared memory, which the first warps write and all warps
meet over at barrier 1 of the block (``barrier.sync 1``). racecheck reports that byte as a race, in some blocks of a
launch of any kernel with ``warp_specialize``: its own trace of synchronisation (``--racecheck-trace-sync yes``, version
2025.3) lists a warp's arrival at the barrier after the reads by warps that can only have passed once it had arrived.
Delays in the kernel, the barrier's other spellings and the tool's options change how many blocks it reports, no more.

What racecheck does follow is atomics. So the kernels that it watches are compiled as always, but for these bytes
(:func:`atomic_starts`): the first warps exchange them, and a waiting warp reads its own by an atomic OR with 0. Barriers
and every access of the kernel's own stay as they were. The same kernels without that change are watched too, and
counted: that the reports are gone when nothing but these bytes has changed says what they were about, and that the tool
does look.

Controls say what its silence is worth: kernels of which one is right and two have a race. They are written down beside
the kernels' reports, not asked for, for on an H100 racecheck is wrong about all three: it reports the tile that is
handed over with an ``mbarrier``, and not the ones that are read without a wait. The emulator in the course's tests is
there for that: it plays the kernels in random orders, with tiles that are poison until their copy has come, and finds
planted mistakes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import triton

#: The controls' names -> whether the reader waits, and whether the tile moves by instructions for matrices.
CONTROLS = {"waits": (True, False), "does not wait": (False, False), "does not wait, matrices": (False, True)}
#: Bytes after the first start's in which there may be others: a block has 32 warps at most.
WARPS = 32

_BRANCH = re.compile(r"\bbrx\.idx\s+(%\w+),")
_WRITE = re.compile(r"\bst\.shared(?:\.v[24])?\.(\w+)\s+\[global_smem\+(\d+)\], (\{[^}]*\}|[^;\s]+);")


def atomic_starts(ptx: str, warps: int) -> str:
    """A kernel whose waiting warps are told by atomics which partition to run; one without partitions as it was.

    Args:
        ptx: The kernel as Triton compiles it.
        warps: Those that run before the partitions do.

    Raises:
        ValueError: the kernel has partitions, and the byte's reads and writes are not what they are known to be.
    """
    branches = _BRANCH.findall(ptx)
    if not branches:
        return ptx
    read = re.compile(rf"\bld\.shared\.[bu]8\s+{re.escape(branches[0])}, \[(%\w+)\+(\d+)\];")
    found = read.findall(ptx)
    if len(branches) != 1 or len(found) != 1:
        raise ValueError(f"{len(branches)} branches to partitions and {len(found)} reads of a byte that says which")
    first = int(found[0][1]) + warps
    written = 0

    def exchanged(match: re.Match[str]) -> str:
        nonlocal written
        kind, place, values = match[1], int(match[2]), match[3].strip("{} ").split(",")
        if not first <= place < first + WARPS:
            return match[0]
        if kind not in ("b32", "u32"):
            raise ValueError(f"starts are written as {kind}, of which there are no atomics")
        written += 1
        words = "".join(
            f"mov.b32 new, {value.strip()}; atom.shared.exch.b32 old, [global_smem+{place + 4 * index}], new; "
            for index, value in enumerate(values)
        )
        return f"{{ .reg .b32 new, old; {words}}}"

    ptx = _WRITE.sub(exchanged, ptx)
    if written < 2:
        raise ValueError(f"starts are written {written} times, and not for the partitions and for the end")
    return read.sub(
        rf"{{ .reg .b32 place, word, bits; add.u32 place, \1, \2; and.b32 word, place, -4; and.b32 bits, place, 3; "
        rf"shl.b32 bits, bits, 3; atom.shared.or.b32 word, [word], 0; shr.u32 word, word, bits; "
        rf"and.b32 {branches[0]}, word, 255; }}",
        ptx,
    )


def install() -> None:
    """From here on, kernels of this process are compiled with :func:`atomic_starts`, and kept in a cache of their own."""
    if triton.knobs.runtime.add_stages_inspection_hook is not _hook:
        triton.knobs.runtime.add_stages_inspection_hook = _hook
        triton.knobs.cache.dir = os.path.join(triton.knobs.cache.dir, "atomic_starts")


def _hook(
    backend: Any = None, stages: dict[str, Callable[..., str]] | None = None, options: Any = None, *others: Any
) -> tuple[str, str] | None:
    """Called by Triton with a compilation's stages; without them, for its part of the cache's key (since 3.7)."""
    if stages is None:
        return "atomic_starts", "atomic_starts"
    make_ptx = stages["ptx"]

    def made(source: Any, metadata: Mapping[str, Any]) -> str:
        return atomic_starts(make_ptx(source, metadata), options.num_warps)

    stages["ptx"] = made
    return None
