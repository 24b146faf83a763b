"""Decides once, before Triton is imported, whether kernels run on a GPU or in Triton's interpreter.

Import this module before anything that imports Triton::

    from utils import runtime
    import triton
    import triton.language as tl

With a CUDA GPU of compute capability 8.0 or newer, kernels are compiled for it. Without one (a laptop, or a T4, which
Triton no longer supports) they run in Triton's interpreter: the same kernels on the CPU, slow but exact, with the
repairs that ``utils.interpreter.patches`` lists. ``MLF_DEVICE=cpu`` in the environment forces the interpreter where
there is a GPU.

``python -m utils.runtime`` prints what works on this machine and what to do about what does not.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING, TypeVar

try:
    from utils.device import DEVICE, HAS_GPU, INTERPRET, OLDEST_CAPABILITY, Decision, decide, torch
except (ValueError, RuntimeError) as refusal:
    if __name__ != "__main__":
        raise
    print(f"[fail] {refusal}")  # `python -m utils.runtime` answers in words
    sys.exit(1)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from utils.environment import Facts, Line

__all__ = ["DEVICE", "HAS_GPU", "INTERPRET", "OLDEST_CAPABILITY", "Decision", "decide", "gpu_name", "pick", "report"]

T = TypeVar("T")


class _RepairAfterImport(importlib.abc.MetaPathFinder):
    """Repairs Triton's interpreter the moment ``import triton`` is done, so that this module itself stays light."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None):
        if fullname != "triton":
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: importlib.machinery.ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            if hasattr(spec.loader, "exec_module"):
                spec.loader.exec_module = _then_repair(spec.loader.exec_module)
            return spec
        return None


def _then_repair(run_module: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        run_module(module)
        _repair()

    return exec_module


def _repair() -> None:
    import utils.interpreter  # noqa: F401  (importing it repairs, also when it is itself what imported Triton)


if INTERPRET:
    if "triton" in sys.modules:
        _repair()
    elif not any(type(finder).__name__ == _RepairAfterImport.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _RepairAfterImport())


def pick(*, cpu: T, gpu: T) -> T:
    """Return ``gpu`` when kernels run on a GPU and ``cpu`` otherwise: problem sizes, dtypes, numbers of rounds."""
    return gpu if HAS_GPU else cpu


def gpu_name() -> str | None:
    """Name of the GPU that kernels run on, such as ``"NVIDIA H100 80GB HBM3"``; None in the interpreter."""
    return torch.cuda.get_device_name(DEVICE) if HAS_GPU else None


def report(facts: Facts | None = None) -> list[Line]:
    """What works on this machine, and what to do about what does not, in plain words.

    Args:
        facts: What to report on; by default what ``utils.environment.gather`` finds here.
    """
    from utils import environment

    return environment.describe(environment.gather() if facts is None else facts)


def main() -> int:
    """Print the report; return 1 when a line says [fail], else 0."""
    from utils import environment

    lines = report()
    print(environment.as_text(lines))
    return int(any(line.level == "fail" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
