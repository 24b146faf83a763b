"""What differs between the versions of Triton that the Gluon kernels of the course run on: names, and where ptxas is.

Importing this module gives the Triton at hand whichever name of a renamed function it lacks, so that a kernel may use
either name on each of them: one source for 3.6, 3.7, 3.8 and 3.9, and answers written after either documentation.

It imports nothing of the course, because the processes that compile for a GPU that is not there import it too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import triton.experimental.gluon.language as gl
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon.language.nvidia.hopper import tma


class Renamed(NamedTuple):
    """A function of Gluon: where it is, its name before and its name from a version of Triton on."""

    owner: Any
    before: str
    after: str
    version: str


RENAMED = (
    Renamed(gl, "thread_barrier", "barrier", "3.7"),
    Renamed(gl.shared_memory_descriptor, "_reinterpret", "reinterpret", "3.9"),
    Renamed(tma, "async_copy_global_to_shared", "async_load", "3.8"),
    Renamed(tma, "async_copy_shared_to_global", "async_store", "3.8"),
)


def give_both_names(renamed: Iterable[Renamed]) -> None:
    """Make both names of each function lead to the one that this Triton has.

    Some versions keep the name of before for a function that only says what it is called now: the later name decides.

    Raises:
        AttributeError: This Triton has neither name.
    """
    for owner, before, after, _ in renamed:
        function = getattr(owner, after) if hasattr(owner, after) else getattr(owner, before)
        setattr(owner, before, function)
        setattr(owner, after, function)


def ptxas(capability: int = 90) -> str:
    """Path of the assembler with which this Triton makes code for one GPU architecture (90: Hopper).

    A version of Triton may ship several, and the text that it writes for one is too new for another.
    """
    return get_ptxas(capability).path


give_both_names(RENAMED)
