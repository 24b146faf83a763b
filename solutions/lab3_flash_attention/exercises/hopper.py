"""Launches with the tiles of a Hopper GPU, in the interpreter: operands are descriptors there."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from utils.checks.compiled import Launched
from utils.kernel_profile import profile_kernel

#: Why a kernel that runs with pointers may not compile with descriptors.
DESCRIBED = (
    "on a Hopper GPU the operands are descriptors, whose tiles come by TMA: load_rows takes both, pointer arithmetic "
    "does not"
)


@contextlib.contextmanager
def hopper(tuning: ModuleType) -> Iterator[None]:
    """Inside, a package's kernels get the tiles that its table has for compute capability 9.0."""
    chosen, decided = tuning.capability_of, tuning.runtime
    tuning.capability_of = lambda device: (9, 0)
    tuning.runtime = SimpleNamespace(INTERPRET=False, pick=lambda cpu, gpu: gpu)
    try:
        yield
    finally:
        tuning.capability_of, tuning.runtime = chosen, decided


def _tuning(of: Callable[..., Any]) -> ModuleType:
    """The table of tiles that lies beside a student's function."""
    return importlib.import_module(f"{of.__module__.rpartition('.')[0]}.tuning")


def with_hoppers_tiles(function: Callable[..., Any], of: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose kernels get the tiles of a Hopper GPU; ``of`` is the student's function."""
    tuning = _tuning(of)

    def run(*args: Any, **options: Any) -> Any:
        with hopper(tuning):
            return function(*args, **options)

    return run


def launched_on_hopper(
    function: Callable[..., Any], args: Sequence[Any], kernel: str, of: Callable[..., Any]
) -> list[Launched]:
    """The launch of ``kernel`` that a call leads to, with the dtype of its tensors; nothing where it raises before.

    ``of`` is the student's function, beside whose module the table of tiles lies.
    """
    tuning = _tuning(of)
    dtype = next(value.dtype for value in args if isinstance(value, torch.Tensor))
    # what raises is seen by the compiler too
    with hopper(tuning), contextlib.suppress(Exception), profile_kernel(check_races=False) as profile:
        function(*args)
    return [(dtype, launch) for launch in profile.launches if launch.kernel == kernel]
