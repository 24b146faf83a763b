"""GeLU in CUDA C++ (``benchmarks/cuda/gelu.cu``) as a Python function, compiled by nvcc on first use."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import cuda_program
from utils import runtime
from utils.fingerprint import ROOT, fingerprint

SOURCE = "benchmarks/cuda/gelu.cu"


def source() -> str:
    """The CUDA C++ source."""
    return (ROOT / SOURCE).read_text(encoding="utf-8")


def command(library: Path, capability: tuple[int, int], nvcc: str) -> list[str]:
    """What compiles the source into a shared library for GPUs of ``capability``."""
    program, *rest = cuda_program.command(ROOT / SOURCE, library, capability, nvcc)
    return [program, "-shared", "-Xcompiler", "-fPIC", *rest]


@functools.cache
def compiled() -> Callable[[torch.Tensor], torch.Tensor]:
    """GeLU of a contiguous float32 tensor on the GPU, any shape, from the compiled source.

    Raises:
        RuntimeError: there is no GPU, no nvcc, or the source does not compile.
    """
    nvcc = cuda_program.compiler()
    if not runtime.HAS_GPU or nvcc is None:
        missing = "nvcc, which is not here" if runtime.HAS_GPU else "a CUDA GPU and none is in use"
        raise RuntimeError(
            f"the CUDA C++ kernel needs {missing}: show the recorded measurement, utils.records.load('gelu_five_ways')"
        )
    capability = torch.cuda.get_device_capability(runtime.DEVICE)
    folder = ROOT / "build" / "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"libgelu-sm{capability[0]}{capability[1]}-{fingerprint([SOURCE])[:16]}.so"
    if not library.is_file():
        unfinished = library.with_name(f"{library.name}.{os.getpid()}")
        done = subprocess.run(command(unfinished, capability, nvcc), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"gelu.cu does not compile:\n{done.stderr.strip()}")
        unfinished.replace(library)
    launch = ctypes.CDLL(str(library)).gelu
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_void_p]

    def gelu(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or not x.is_cuda or not x.is_contiguous():
            raise ValueError(f"x must be a contiguous float32 tensor on the GPU, got {x.dtype} on {x.device}")
        y = torch.empty_like(x)
        if x.numel():
            error = launch(x.data_ptr(), y.data_ptr(), x.numel(), torch.cuda.current_stream(x.device).cuda_stream)
            if error:
                raise RuntimeError(f"CUDA refused to launch gelu_kernel: error {error}")
        return y

    return gelu
