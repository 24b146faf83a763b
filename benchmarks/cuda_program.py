"""Builds and runs the CUDA C++ benchmarks: one program a source file, which prints one JSON object."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from utils import runtime
from utils.fingerprint import ROOT, fingerprint

FOLDER = "benchmarks/cuda"
_BUILD = ROOT / "build" / "cuda"


def compiler() -> str | None:
    """Path of the CUDA compiler ``nvcc``, from ``PATH`` or the toolkit's usual folder; None where there is none."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def command(source: Path, program: Path, capability: tuple[int, int], nvcc: str) -> list[str]:
    """What compiles ``source`` for GPUs of ``capability``."""
    arch = f"{capability[0]}{capability[1]}"
    return [nvcc, "-O3", "-std=c++17", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-o", str(program), str(source)]


def sources(name: str) -> list[str]:
    """The measured source of one program: its own file and the header that all share."""
    return [f"{FOLDER}/{name}.cu", f"{FOLDER}/common.cuh"]


def build(name: str) -> Path:
    """Compile ``benchmarks/cuda/<name>.cu`` for this machine's GPU, unless that was done before; return the program.

    Raises:
        RuntimeError: there is no GPU, no compiler, or the source does not compile.
    """
    if not runtime.HAS_GPU:
        raise RuntimeError(
            f"{name} needs a CUDA GPU and none is in use (python -m utils.runtime says why): "
            f"show the recorded measurement instead, utils.records.load({name!r})"
        )
    nvcc = compiler()
    if nvcc is None:
        raise RuntimeError(
            f"{name} is measured in CUDA C++ and needs nvcc, which is not here: install the CUDA toolkit, "
            f"or show the recorded measurement, utils.records.load({name!r})"
        )
    capability = torch.cuda.get_device_capability(runtime.DEVICE)
    program = _BUILD / f"{name}-sm{capability[0]}{capability[1]}-{fingerprint(sources(name))[:16]}"
    if program.is_file():
        return program
    _BUILD.mkdir(parents=True, exist_ok=True)
    unfinished = program.with_name(f"{program.name}.{os.getpid()}")
    done = subprocess.run(
        command(ROOT / FOLDER / f"{name}.cu", unfinished, capability, nvcc), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}.cu does not compile:\n{done.stderr.strip()}")
    unfinished.replace(program)
    return program


def run(name: str, **options: int) -> dict[str, Any]:
    """Build and run one program and return what it printed. ``count=5`` becomes the option ``--count 5``.

    The program gets the GPU that ``runtime.DEVICE`` names, and only that one.

    Raises:
        RuntimeError: as :func:`build`; or the program failed, with what it said.
    """
    program = build(name)
    arguments = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = runtime.DEVICE.index or 0
    chosen = visible[index] if index < len(visible) and visible[index] else str(index)
    done = subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": chosen},
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed with status {done.returncode}: {done.stderr.strip() or done.stdout[-500:]}")
    return json.loads(done.stdout)
