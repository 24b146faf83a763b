"""Lets racecheck follow how Triton starts partitions, so that whatever it still reports is about the kernel.

Triton tells a waiting warp which partition to run by a byte of shared memory, which the first warps write and all warps
meet over at barrier 1 of the block (``barrier.sync 1``). racecheck reports that byte as a race, in some blocks of a
launch of any kernel with ``warp_specialize``: its own trace of synchronisation (``--racecheck-trace-sync yes``, version
2025.3) lists a warp's arrival at the barrier after the reads by warps that can only have passed once it had arrived.
Delays in the kernel, the barrier's other spellings and the tool's options change how many blocks it reports, no more.

What racecheck does follow is atomics. So the kernels that it watches are compiled as always, but for these bytes
(:func:`atomic_starts`): the first warps exchange them, and a waiting warp reads its own by an atomic OR with 0. The
barriers and every access of the kernel's own stay as they were. The same kernels without that change are watched too,
and counted: that the reports are gone when nothing but these bytes has changed says what they were about, and that the
tool does look.

Controls say what its silence is worth: small kernels of which it is known whether they have a race. They are written
down beside the kernels' reports, not asked for, for on an H100 racecheck is right about one of five. It is silent where
warps of a partition meet at a barrier of the block, and as silent where that barrier is taken out; it reports a tile
that one partition hands to another with an ``mbarrier``, and none that is read without a wait. The emulator in the
course's tests is there for that: it plays the kernels in random orders, with tiles that are poison until their copy has
come, and finds planted mistakes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import triton


class Control(NamedTuple):
    """What is known of a control: is there a race, does a tile go from one partition to another by an ``mbarrier``, by
    instructions for matrices."""

    race: bool
    mbarrier: bool = True
    matrices: bool = False

    @property
    def barrier_removed(self) -> bool:
        """Whether a race is to be made by taking out the block's barriers."""
        return self.race and not self.mbarrier


#: By what they do.
CONTROLS = {
    "meets at a barrier": Control(race=False, mbarrier=False),
    "does not meet": Control(race=True, mbarrier=False),
    "waits": Control(race=False),
    "does not wait": Control(race=True),
    "does not wait, matrices": Control(race=True, matrices=True),
}
#: A block has so many warps at most, and a start for each has a byte.
WARPS = 32

_PARTITIONS = re.compile(r"\bbarrier\.sync\s+1;")
_READ = re.compile(
    r"(\bbarrier\.sync\s+1;(?:\s+(?:\.loc\s[^\n]*|//[^\n]*|(?:mov|add|cvt)\.[^;\n]*;))*\s+)"
    r"ld\.shared\.[bu]8\s+%(rs?)(\d+), \[(%\w+)\+(\d+)\];"
)
_WRITE = re.compile(r"\bst\.shared(?:\.v[24])?\.(\w+)\s+\[global_smem\+(\d+)\], (\{[^}]*\}|[^;\s]+);")


def atomic_starts(ptx: str, warps: int) -> str:
    """A kernel whose waiting warps are told by atomics which partition to run; one without partitions as it was.

    Args:
        ptx: The kernel as Triton compiles it.
        warps: Those that run before the partitions do.

    Raises:
        ValueError: the kernel has partitions, and the byte's reads and writes are not what they are known to be.
    """
    if not _PARTITIONS.search(ptx):
        return ptx
    found = _READ.findall(ptx)
    if len(found) != 1:
        raise ValueError(f"waiting warps read {len(found)} bytes that say what to run, and not one")
    first = int(found[0][4]) + warps
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

    def read(match: re.Match[str]) -> str:
        before, kind, number, base, offset = match.groups()
        take = "cvt.u16.u32" if kind == "rs" else "mov.b32"
        return (
            f"{before}{{ .reg .b32 place, word, bits; add.u32 place, {base}, {offset}; and.b32 word, place, -4; "
            f"and.b32 bits, place, 3; shl.b32 bits, bits, 3; atom.shared.or.b32 word, [word], 0; "
            f"shr.u32 word, word, bits; and.b32 word, word, 255; {take} %{kind}{number}, word; }}"
        )

    ptx = _READ.sub(read, _WRITE.sub(exchanged, ptx))
    if written < 2:
        raise ValueError(f"starts are written {written} times, and not for the partitions and for the end")
    return ptx


def without_barriers(ptx: str) -> str:
    """A kernel without the barriers at which some of a block's warps meet.

    Raises:
        ValueError: it has none.
    """
    changed, count = re.subn(r"\bbar\.sync\s+\d+, \d+;", "", ptx)
    if not count:
        raise ValueError("there is no barrier to take out")
    return changed


def install(change: Callable[[str], str] | None = None) -> None:
    """From here on, kernels of this process are compiled with :func:`atomic_starts`, and kept in a cache of their own.

    Args:
        change: Made to them as well.
    """
    name = "_".join(["atomic_starts", *([change.__name__] if change else [])])

    def hook(
        backend: Any = None, stages: dict[str, Callable[..., str]] | None = None, options: Any = None, *others: Any
    ) -> tuple[str, str] | None:
        """Called by Triton with a compilation's stages; without them, for its part of the cache's key (since 3.7)."""
        if stages is None:
            return name, name
        make_ptx = stages["ptx"]

        def made(source: Any, metadata: Mapping[str, Any]) -> str:
            ptx = atomic_starts(make_ptx(source, metadata), options.num_warps)
            return change(ptx) if change else ptx

        stages["ptx"] = made
        return None

    triton.knobs.runtime.add_stages_inspection_hook = hook
    if os.path.basename(triton.knobs.cache.dir) != name:
        triton.knobs.cache.dir = os.path.join(triton.knobs.cache.dir, name)
