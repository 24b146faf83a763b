"""What this machine has, and what that means for the course: the lines behind ``python -m utils.runtime``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from utils import device

Level = Literal["ok", "warn", "fail"]

#: The versions that the whole course was tested with, oldest first. Between two of them it is expected to work too.
TESTED_PYTHON = ((3, 11), (3, 12), (3, 13), (3, 14))
TESTED_TORCH = ((2, 11), (2, 13), (2, 15))
TESTED_TRITON = ((3, 6), (3, 7), (3, 9))
#: On this version the forward pass of attention is slower on a Hopper GPU (compute capability 9.0) than on 3.6.
SLOW_ON_HOPPER = (3, 9)
#: The oldest version that requirements.txt allows.
OLDEST_TORCH = (2, 9)
#: From this NumPy on, Triton 3.6's interpreter fails on loops whose bound is a tensor, unless repaired.
NUMPY_WITHOUT_TENSOR_BOUNDS = (2, 4)
ENOUGH_MEMORY = 4 * 2**30


@dataclass(frozen=True)
class Line:
    """One line of the report. ``level``: ``ok``, ``warn`` (works, with less) or ``fail``; ``advice``: what to do."""

    level: Level
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"[{self.level}] {self.text}" + (f"\n       -> {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Device:
    """A CUDA GPU as PyTorch sees it; ``memory`` in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int = 0


@dataclass(frozen=True)
class Facts:
    """What :func:`describe` reports on. Versions are None where a package is missing; memory is in bytes."""

    python: tuple[int, int, int] = (3, 12, 0)
    system: str = "Linux"
    machine: str = "x86_64"
    course: str | None = None
    torch: str | None = "2.13.0"
    torch_cuda: str | None = None
    triton: str | None = "3.7.1"
    numpy: str | None = "2.4.6"
    devices: tuple[Device, ...] = ()
    nvidia_driver: bool = False
    has_gpu: bool = False
    reason: str = "PyTorch sees no CUDA GPU"
    nvcc: str | None = None
    memory: int | None = None
    cpus: int = 1
    patches: tuple[str, ...] = ()
    patch_error: str | None = None

    @property
    def missing(self) -> list[str]:
        """Names of the packages that every kernel needs and that are not there."""
        packages = {"PyTorch": self.torch, "Triton": self.triton, "NumPy": self.numpy}
        return [name for name, version in packages.items() if version is None]


def version_tuple(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``"2.13.0+cpu"`` gives ``(2, 13, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def expectation(version: str, tested: Sequence[tuple[int, int]]) -> tuple[Level, str]:
    """What to expect of a version: ("ok", "") of a tested one, else the level and the end of a sentence about it.

    Args:
        version: Of a package or of Python, ``"3.8.0"``.
        tested: The tested versions, oldest first.
    """
    this = version_tuple(version)[:2]
    if this in tested:
        return "ok", ""
    older, newer = [each for each in tested if each < this], [each for each in tested if each > this]
    if older and newer:
        return "ok", f" (not tested; expected to work as the tested {_dotted(older[-1])} and {_dotted(newer[0])} do)"
    known = f"the course is tested with ({', '.join(map(_dotted, tested))})"
    return "warn", f" is {'newer' if older else 'older'} than the versions that {known}"


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def describe(facts: Facts) -> list[Line]:
    """Turn facts into lines for a reader; nothing is looked up here."""
    lines = [_course(facts), _python(facts), _system(facts), _torch(facts)]
    lines += [_triton(facts), *_numpy(facts), _gpu(facts), *_repairs(facts), _nvcc(facts), *_memory(facts)]
    return lines


def as_text(lines: Sequence[Line]) -> str:
    """The report as it is printed, with a verdict at the end."""
    failed = sum(line.level == "fail" for line in lines)
    if failed:
        verdict = f"{failed} {'thing' if failed == 1 else 'things'} must be put right before the course runs here."
    elif any(line.level == "warn" for line in lines):
        verdict = "The course runs here; the [warn] lines say what is missing."
    else:
        verdict = "The course runs here."
    return "\n".join([*map(str, lines), verdict])


def _course(facts: Facts) -> Line:
    return Line("ok", f"Making LLMs Fast {facts.course or '(version unknown: run from a copy that is not installed)'}")


def _python(facts: Facts) -> Line:
    text = f"Python {_dotted(facts.python)}"
    if facts.python[:2] < TESTED_PYTHON[0]:
        return Line("fail", f"{text} is too old", f"install Python {_dotted(TESTED_PYTHON[-1])}")
    level, more = expectation(_dotted(facts.python), TESTED_PYTHON)
    advice = "expect everything to work once its packages install: PyTorch and Triton must have a build for it"
    return Line(level, f"{text}{more}", advice if level == "warn" else "")


def _system(facts: Facts) -> Line:
    text = f"{facts.system} on {facts.machine}, {facts.cpus} CPU core{'s' if facts.cpus != 1 else ''}"
    if facts.system == "Linux" or facts.triton is not None:
        return Line("ok", text)
    ways = "open the course in its dev container (a browser is enough), or use a Linux machine or a hosted notebook"
    if facts.system == "Windows":
        ways = "use WSL (Windows Subsystem for Linux), or " + ways
    return Line("fail", f"{text}: Triton's packages are made for Linux only", ways)


def _torch(facts: Facts) -> Line:
    if facts.torch is None:
        return Line("fail", "PyTorch is not installed", "run `make lab`, or `pip install -r requirements.txt`")
    rocm = "rocm" in facts.torch
    build = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built for ROCm" if rocm else "CPU build"
    text = f"PyTorch {facts.torch}, {build}"
    if version_tuple(facts.torch) < OLDEST_TORCH:
        return Line("warn", f"{text} is older than the course allows", "pip install -U 'torch>=2.9'")
    if facts.nvidia_driver and facts.torch_cuda is None:
        advice = "install a CUDA build of PyTorch (pytorch.org lists the command) to use the GPU"
        return Line("warn", f"{text}, but this machine has an NVIDIA driver", advice)
    if rocm:
        return Line("warn", f"{text}: the course's GPU kernels are for NVIDIA GPUs, here they are interpreted")
    level, more = expectation(facts.torch, TESTED_TORCH)
    advice = (
        "expect lectures and labs to work, with PyTorch's own messages and choices of kernels perhaps different from "
        "those shown"
    )
    return Line(level, f"{text}{more}", advice if level == "warn" else "")


def _triton(facts: Facts) -> Line:
    if facts.triton is None:
        where = "on Linux " if facts.system == "Linux" else "in one of the places named above "
        return Line("fail", "Triton is not installed", f"{where}run `make lab`, or `pip install 'triton>=3.6'`")
    if version_tuple(facts.triton) < TESTED_TRITON[0]:
        return Line("fail", f"Triton {facts.triton} is too old", "pip install -U 'triton>=3.6'")
    level, more = expectation(facts.triton, TESTED_TRITON)
    if version_tuple(facts.triton)[:2] == SLOW_ON_HOPPER and any(d.capability[0] == 9 for d in facts.devices):
        slow = "everything works; lab 3's forward pass at head_dim 128 is up to 30 % slower than with Triton 3.6"
        return Line("ok", f"Triton {facts.triton}: {slow}", "for timings of attention, use Triton 3.6 or 3.7")
    advice = (
        "expect kernels in Triton to compile for a GPU; what uses Triton's internals may fail: the interpreter, the "
        f"profiler, and lab 7, which is written in Gluon. If something fails: {_install_tested_triton()}"
    )
    return Line(level, f"Triton {facts.triton}{more}", advice if level == "warn" else "")


def _install_tested_triton() -> str:
    """The command that installs a Triton that the course is tested with."""
    oldest, (major, minor) = TESTED_TRITON[0], TESTED_TRITON[-1]
    return f"pip install 'triton>={_dotted(oldest)},<{major}.{minor + 1}'"


def _numpy(facts: Facts) -> list[Line]:
    if facts.numpy is None:
        return [Line("fail", "NumPy is not installed", "run `make lab`, or `pip install -r requirements.txt`")]
    text = f"NumPy {facts.numpy}"
    bad = (
        facts.triton is not None
        and version_tuple(facts.triton)[:2] == (3, 6)
        and version_tuple(facts.numpy) >= NUMPY_WITHOUT_TENSOR_BOUNDS
    )
    if not bad:
        return [Line("ok", text)]
    text += " with Triton 3.6: loops whose bound is a tensor fail in the interpreter"
    if "loop bounds" in facts.patches:
        return [Line("ok", f"{text}; the course patches it")]
    return [Line("warn", text, "the course patches it wherever it interprets; else use Triton 3.7 or NumPy < 2.4")]


def _gpu(facts: Facts) -> Line:
    if facts.has_gpu:
        usable = next((d for d in facts.devices if d.capability >= device.OLDEST_CAPABILITY), facts.devices[0])
        others = f" (and {len(facts.devices) - 1} more)" if len(facts.devices) > 1 else ""
        return Line("ok", f"kernels run on the GPU: {_device(usable)}{others}")
    if facts.missing:
        return Line("warn", f"no kernel runs here yet: {' and '.join(facts.missing)} must be installed first")
    text = f"kernels run in Triton's interpreter, on the CPU: {facts.reason}"
    too_old = [d for d in facts.devices if d.capability < device.OLDEST_CAPABILITY]
    if too_old and len(too_old) == len(facts.devices):
        advice = (
            f"{_device(too_old[0])} is too old for Triton; PyTorch may still use it. Every notebook and lab works; "
            "measured plots show the recorded H100. For live measurements use an Ampere GPU or newer"
        )
        return Line("warn", text, advice)
    if facts.nvidia_driver and facts.torch_cuda and not facts.devices:
        advice = (
            "this machine has an NVIDIA driver: see that `nvidia-smi` lists the GPU, that CUDA_VISIBLE_DEVICES does "
            f"not hide it and that the driver is new enough for CUDA {facts.torch_cuda} (update it, or install a "
            "PyTorch built for an older CUDA). Until then every notebook and lab works in the interpreter"
        )
        return Line("warn", text, advice)
    return Line("ok", f"{text}. Every notebook and lab works; measured plots show the recorded H100")


def _device(gpu: Device) -> str:
    memory = f", {gpu.memory / 2**30:.0f} GiB" if gpu.memory else ""
    return f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}{memory}"


def _repairs(facts: Facts) -> list[Line]:
    if facts.missing:
        return []
    if facts.patches:
        return [Line("ok", f"interpreter patched: {', '.join(facts.patches)}")]
    if facts.has_gpu:
        return [Line("ok", "interpreter repaired when the profiler uses it")]
    text = "the interpreter's patches are not in place"
    if facts.patch_error is not None:
        return [Line("fail", f"{text}: {facts.patch_error}", _install_tested_triton())]
    return [Line("fail", text, "import utils.runtime before triton")]


def _nvcc(facts: Facts) -> Line:
    if facts.nvcc is not None:
        return Line("ok", f"nvcc {facts.nvcc}: the CUDA C++ examples compile here")
    return Line("ok", "nvcc not found: the few CUDA C++ examples show their recorded results instead")


def _memory(facts: Facts) -> list[Line]:
    if facts.memory is None:
        return []
    text = f"{facts.memory / 2**30:.0f} GiB of memory"
    if facts.memory < ENOUGH_MEMORY:
        return [Line("warn", text, "the notebooks want 4 GiB; close other programs or run one notebook at a time")]
    return [Line("ok", text)]


def gather() -> Facts:
    """Look at this machine. Imports Triton, where it is installed, to see that the interpreter is repaired."""
    torch = device.torch
    triton_version, numpy_version = _installed("triton"), _installed("numpy")
    patches: tuple[str, ...] = ()
    patch_error = None
    if device.INTERPRET and None not in (torch, triton_version, numpy_version):
        try:
            from utils import interpreter

            patches = interpreter.patches()
        except Exception as error:  # a Triton that is too old or too new for them: the report must say so, not fail
            patch_error = f"{type(error).__name__}: {error}"
    return Facts(
        python=sys.version_info[:3],
        system={"Darwin": "macOS"}.get(platform.system(), platform.system()),
        machine=platform.machine(),
        course=_installed("making-llms-fast"),
        torch=None if torch is None else torch.__version__,
        torch_cuda=None if torch is None else torch.version.cuda,
        triton=triton_version,
        numpy=numpy_version,
        devices=tuple(
            Device(name, capability, torch.cuda.get_device_properties(i).total_memory)
            for i, (name, capability) in enumerate(device.visible_gpus())
        ),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
        has_gpu=device.HAS_GPU,
        reason=device.DECISION.reason,
        nvcc=_nvcc_version(),
        memory=_physical_memory(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        patches=patches,
        patch_error=patch_error,
    )


def _installed(package: str) -> str | None:
    """Installed version of a package, None when it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvcc_version() -> str | None:
    """Version of the CUDA compiler on PATH or under CUDA_HOME; None when there is none that runs."""
    cuda_home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(cuda_home, "bin"))
    if nvcc is None:
        return None
    try:
        printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+\.\d+)", printed)
    return match.group(1) if match else None


def _physical_memory() -> int | None:
    """Physical memory in bytes, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
