"""Compiles a step for Hopper without a GPU, and reads what ptxas says of it. Runs as a script in a process of its own.

Nothing of the course's runtime is imported there, so that Triton is as it is on a GPU even where kernels are
interpreted otherwise.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def assemble(ptx: str) -> dict[str, Any]:
    """What ptxas spends on a kernel for sm_90a: registers a thread at the start, spilled_bytes a thread, its text.

    Raises:
        RuntimeError: ptxas refuses it; the message is its own.
    """
    from utils import triton_versions

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [triton_versions.ptxas(90), "-arch=sm_90a", "-v", source.name, "-o", "kernel.cubin"], cwd=folder,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    lines = (done.stdout + done.stderr).splitlines()
    said = "\n".join(line for line in lines if "Compile time" not in line)
    if done.returncode:
        raise RuntimeError(said)
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", said)),
        "text": said,
    }


def module(name: str) -> types.ModuleType:
    """A module of this package by its last name, without the packages' own ``__init__`` and the course's runtime."""
    for package, folder in (("capstone", PACKAGE), ("capstone.steps", PACKAGE / "steps")):
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(folder)]
    if "utils.runtime" not in sys.modules:
        runtime = types.ModuleType("utils.runtime")
        sys.modules["utils"] = types.ModuleType("utils")
        sys.modules["utils"].__path__ = [str(PACKAGE.parents[1] / "utils")]
        sys.modules["utils"].runtime = sys.modules["utils.runtime"] = runtime
    return importlib.import_module(f"capstone.steps.{name}")


def signature(kernel: Any, kind: str, constants: dict[str, Any], gluon: bool) -> dict[str, str]:
    """Types of a step's arguments, which follow from their names."""
    found = {}
    for name in kernel.arg_names:
        if name in constants:
            found[name] = "constexpr"
        elif name.endswith("_desc"):
            block = [constants["N" if name[0] in "kv" else "M"], constants["D"]]
            found[name] = f"tensordesc<{kind}{block}>"
            if gluon:
                import torch

                layout = importlib.import_module("capstone.parts").layout(block, getattr(torch, TYPES[kind]))
                found[name] = f"tensordesc<{kind}{block},{layout!r}>"
        elif name.endswith("_ptr"):
            found[name] = {"lse_ptr": "*fp32", "tiles_ptr": "*i32", "counts_ptr": "*i32", "times_ptr": "*i64"}.get(
                name, f"*{kind}"
            )
        else:
            found[name] = "fp32" if name == "scale" else "i32"
    return found


def compiled(name: str, head_dim: int, kind: str = "bf16", **constants: Any) -> dict[str, Any]:
    """Registers, spilled_bytes, shared_bytes, ptxas's text and the PTX of one step.

    Args:
        name: The module's last name.
        kind: "bf16" or "fp16".
        constants: Further compile-time constants, such as CAUSAL.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    step = module(name)
    kernel = step.attention_kernel
    tile = step.TILES[head_dim]
    options = {**step.OPTIONS, **{key: value for key, value in tile.items() if key == "num_stages"}}
    constants = {"D": head_dim, **{key: value for key, value in tile.items() if key not in options}, **constants}
    gluon = "Gluon" in type(kernel).__name__
    types_ = signature(kernel, kind, constants, gluon)
    names = kernel.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types_[n].startswith("*") or n == "length"
    }
    constexprs = {(names.index(n),): value for n, value in constants.items()}
    source = (GluonASTSource if gluon else ASTSource)(kernel, types_, constexprs, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {**assemble(made.asm["ptx"]), "shared_bytes": made.metadata.shared, "ptx": made.asm["ptx"]}


def compile_apart(*orders: dict[str, Any], ptx: bool = False) -> list[dict[str, Any]]:
    """:func:`compiled` for each order, in a process of its own.

    Args:
        orders: Arguments of :func:`compiled` by name.
        ptx: Whether the PTX comes along.

    Raises:
        RuntimeError: one of them does not compile; the message has the compiler's last words.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__)), *(["ptx"] if ptx else [])], input=json.dumps(orders),
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the compiler failed: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    answers = [compiled(**order) for order in json.loads(sys.stdin.read())]
    for answer in answers:
        if "ptx" not in sys.argv[1:]:
            del answer["ptx"]
    print(json.dumps(answers))
