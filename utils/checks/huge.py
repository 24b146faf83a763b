"""Offsets that no case is large enough for: tensors of more than 2^31 elements, of which the last program alone runs.

Such a tensor takes addresses; memory only where something is touched. Values are not compared: what is seen is whether
an address leaves its tensor, as it does when a 32-bit integer has overflowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from utils import runtime
from utils.checks.problem import Problem
from utils.checks.traffic import OVERFLOW

#: What the last programs may take: few do not share out the work, and each of them walks through many rows.
SECONDS = 15.0
#: Programs along axes 1 and 2 of a grid that a GPU launches at most (CUDA C++ Programming Guide, compute capabilities).
GRID = 65_535


def everywhere(number: float, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A tensor that holds one number in each element, in the memory of one."""
    return torch.full((1,), number, dtype=dtype, device=runtime.DEVICE).expand(shape)


def overflow(
    student: Callable[..., Any], inputs: Callable[[], Sequence[torch.Tensor]], seconds: float = SECONDS
) -> Problem | None:
    """What goes wrong in the last programs of a function's launches on tensors that are huge; None where nothing does.

    Grids are seen too, on tensors that fill memory of their own, as a GPU's would: the interpreter runs grids that no
    GPU launches. Also None where this machine does not have the addresses.

    Raises:
        TimeIsUp: the last programs take longer than ``seconds``.
    """
    from utils.interpreter import last_programs
    from utils.kernel_profile import profile_kernel

    try:
        with last_programs(seconds), profile_kernel(check_races=False, check_uninitialized=False) as profile:
            args = tuple(inputs())
            student(*args)
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return None
    found = profile.out_of_bounds
    shapes = ", ".join(str(tuple(value.shape)) for value in args if isinstance(value, torch.Tensor))
    if not found:
        real = not any(0 in value.stride() for value in args if isinstance(value, torch.Tensor))
        return _too_many([launch.grid for launch in profile.launches], shapes) if real else None
    times = sum(finding.count for finding in found)
    return Problem(
        f"{times:,} out-of-bounds access{'es' if times > 1 else ''} in tensors of more than 2^31 elements",
        OVERFLOW,
        (
            *(str(finding) for finding in found[:3]),
            f"the inputs' shapes: {shapes}; the last program that writes was run alone",
        ),
    )


def _too_many(grids: Sequence[tuple[int, int, int]], shapes: str) -> Problem | None:
    """That a GPU refuses the first of the grids that has too many programs along axis 1 or 2; None where none has."""
    grid = next((grid for grid in grids if max(grid[1:]) > GRID), None)
    if grid is None:
        return None
    return Problem(
        f"a grid of {' x '.join(f'{n:,}' for n in grid)} programs, which no GPU launches",
        f"along axes 1 and 2 a grid has at most {GRID:,} programs, along axis 0 up to 2^31 - 1: put on axis 0 what can "
        "be large, or give each program a loop",
        (f"the inputs' shapes: {shapes}",),
    )
