"""Which cases of a check a GPU runs: each is compiled anew where its sizes differ in a way that Triton compiles for.

Triton compiles a kernel for each dtype, for each value of a constant, and for each number that is 1 or a multiple of
16. The cases of a check, which have all run in the interpreter, meet most combinations of these; a GPU runs the cases
that bring something new, and those for which nothing more has to be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from utils.checks.diagnoses import CaseResult
from utils.kernel_profile import LaunchProfile

from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip


def for_gpu(trials: Sequence[CaseResult], others: bool = False) -> list[int]:
    """The places of the cases that are to run compiled, of those that ran under the profiler.

    ``others``: the kernels are those of other exercises, whose checks run them in all their forms.
    """
    compiled: set[tuple] = set()
    met: set[tuple] = set()
    chosen = []
    for place, trial in enumerate(trials):
        launches = trial.profile.launches if trial.profile is not None else ()
        forms = {form(launch) for launch in launches}
        features = {feature for launch in launches for feature in _features(launch, trial.case.dtype, others)}
        if forms <= compiled or not features <= met:
            compiled |= forms
            met |= features
            chosen.append(place)
    return chosen


def form(launch: LaunchProfile) -> tuple:
    """What a launch is compiled for: two launches of one form share their code."""
    return launch.kernel, *((name, _kind(value)) for name, value in launch.given.items()), *_constants(launch)


def _features(launch: LaunchProfile, dtype: torch.dtype, others: bool) -> Iterator[tuple]:
    """What is to be met once: each kind of each number, and with each dtype each kind of operand and each flag.

    Of kernels of ``others``: each dtype, and each flag.
    """
    yield launch.kernel, dtype
    for name, value in launch.given.items():
        if others:
            if isinstance(value, (bool, str)):
                yield launch.kernel, name, value
            continue
        for place, item in enumerate(value if isinstance(value, tuple) else (value,)):
            together = dtype if isinstance(item, (bool, str, torch.Tensor, TensorDescriptor)) else None
            yield launch.kernel, together, name, place, _rough(item)


def _constants(launch: LaunchProfile) -> Iterator[tuple]:
    for name, value in launch.given.items():
        if name.isupper():
            yield name, str(value)


def _kind(value: Any) -> Any:
    """How Triton tells values of an argument apart."""
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return "descriptor", value.base.dtype, tuple(value.block_shape)
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, int):
        return 1 if value == 1 else "multiple" if value % 16 == 0 else "wide" if abs(value) >= 2**31 else "number"
    return type(value).__name__


def _rough(value: Any) -> Any:
    """The same, for numbers that are constants too: whether one is a power of two."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return _kind(value), value & (value - 1) == 0
    return _kind(value)
