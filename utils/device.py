"""Decides once, before Triton is imported, whether kernels run on a GPU or in Triton's interpreter.

:mod:`utils.runtime` is what the course imports; this is the part of it that the patches of Triton need as well.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

# PyTorch stays once it is loaded, so it is set aside from Python's garbage collector: that would look through all of it
# several times while it loads, and once more when the process ends, for half a second together.
_collects = gc.isenabled()
gc.disable()
try:
    import torch
except ImportError:  # `python -m utils.runtime` then says so in words
    torch = None
finally:
    gc.freeze()
    if _collects:
        gc.enable()

#: Triton compiles for NVIDIA GPUs from this compute capability on (Ampere).
OLDEST_CAPABILITY = (8, 0)

_DEVICE_SETTINGS = ("", "auto", "cpu", "cuda")


@dataclass(frozen=True)
class Decision:
    """Where kernels run, and why: ``reason`` completes the sentence "kernels run there because ..."."""

    gpu_index: int | None
    reason: str


def decide(gpus: Sequence[tuple[str, tuple[int, int]]], setting: str = "", interpret_setting: str = "") -> Decision:
    """Choose between a GPU and the interpreter from what the machine has.

    Args:
        gpus: Name and compute capability of each visible CUDA GPU, in CUDA's order.
        setting: Value of ``MLF_DEVICE``: empty or ``auto``, ``cpu`` or ``cuda``.
        interpret_setting: Value of ``TRITON_INTERPRET``; ``1`` asks for the interpreter as ``MLF_DEVICE=cpu`` does.

    Raises:
        ValueError: ``setting`` is none of these.
        RuntimeError: ``setting`` is ``cuda`` and no GPU is new enough.
    """
    setting = setting.strip().lower()
    if setting not in _DEVICE_SETTINGS:
        raise ValueError(f"MLF_DEVICE must be cpu, cuda, auto or unset, got {setting!r}")
    if setting == "cpu":
        return Decision(None, "MLF_DEVICE=cpu asks for the interpreter")
    usable = [index for index, (_, capability) in enumerate(gpus) if capability >= OLDEST_CAPABILITY]
    if setting == "cuda":
        if not usable:
            seen = ", ".join(f"{name} ({major}.{minor})" for name, (major, minor) in gpus) or "none"
            raise RuntimeError(
                f"MLF_DEVICE=cuda needs a CUDA GPU of compute capability 8.0 or newer, found: {seen} "
                "(unset MLF_DEVICE to run kernels in the interpreter)"
            )
        return Decision(usable[0], "MLF_DEVICE=cuda asks for it")
    if usable and interpret_setting.strip().lower() in ("1", "true", "on", "yes", "y"):
        return Decision(None, f"TRITON_INTERPRET={interpret_setting.strip()} was set before the course started")
    if usable:
        name, (major, minor) = gpus[usable[0]]
        return Decision(usable[0], f"{name} has compute capability {major}.{minor}")
    if gpus:
        name, (major, minor) = gpus[0]
        return Decision(
            None, f"{name} has compute capability {major}.{minor}, and Triton no longer supports GPUs before 8.0"
        )
    return Decision(None, "PyTorch sees no CUDA GPU")


def visible_gpus() -> list[tuple[str, tuple[int, int]]]:
    """Name and compute capability of each CUDA GPU that PyTorch can use; empty for a CPU or ROCm build."""
    if torch is None or torch.version.cuda is None:
        return []
    with warnings.catch_warnings():  # PyTorch warns about old drivers and old GPUs; the report says it in words
        warnings.simplefilter("ignore")
        try:
            if not torch.cuda.is_available():
                return []
            count = torch.cuda.device_count()
            return [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count)]
        except Exception:  # a driver that answers the first question and fails the second, a build with parts missing
            return []


def _check_triton_agrees(interpret: bool) -> None:
    """Raise RuntimeError when Triton was imported before, with the other decision: it cannot change afterwards."""
    triton = sys.modules.get("triton")
    if triton is None or not hasattr(triton, "language"):
        return
    compiled = isinstance(triton.language.cdiv, triton.JITFunction)
    if compiled == interpret:
        was, is_needed = ("compiler", "interpreter") if compiled else ("interpreter", "compiler")
        raise RuntimeError(
            f"Triton was imported before utils.runtime and uses its {was}, but this machine needs its {is_needed}: "
            "restart Python (in a notebook: restart the kernel) and import utils.runtime before triton"
        )


#: What was decided for this process.
DECISION = decide(visible_gpus(), os.environ.get("MLF_DEVICE", ""), os.environ.get("TRITON_INTERPRET", ""))
#: True when kernels are compiled for a CUDA GPU of compute capability 8.0 or newer.
HAS_GPU: bool = DECISION.gpu_index is not None
#: True when kernels run in Triton's interpreter on the CPU.
INTERPRET: bool = not HAS_GPU
#: Where tensors for kernels belong: ``cuda:i`` or ``cpu`` (None only where PyTorch is not installed).
DEVICE: torch.device = (
    None if torch is None else torch.device("cuda", DECISION.gpu_index) if HAS_GPU else torch.device("cpu")
)

# Triton 3.9 warns that 3.10 will no longer fuse a product and a sum on its own: kernels go on as they were measured.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

_check_triton_agrees(INTERPRET)
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"
elif torch is not None:
    torch.cuda.set_device(DEVICE)
