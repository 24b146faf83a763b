"""The process that compiles for :mod:`utils.compile_only`: orders on standard input, answers on standard output.

It imports nothing of the course, so that Triton is here as on a GPU, whatever the course's runtime decided.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # nobody reads it here, and it takes a third of the time

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import cache


def _key_of_this_triton() -> str:
    """What Triton's cache knows this installation by: upstream reads all of its library for it, a second a process."""
    library = Path(triton._C.libtriton.__file__).stat()
    return f"{triton.__version__} {library.st_size} {library.st_mtime_ns}"


cache.triton_key = _key_of_this_triton


def compile_one(order: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """Compile one order; return the fields of a ``ResourceUsage``."""
    path = folder / f"kernel_{number}.py"
    path.write_text(order["source"])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    signature, constants, divisible = {}, {}, [(index,) for index in order["divisible"]]
    for index, (name, kind) in enumerate(order["signature"].items()):
        if isinstance(kind, list):  # of a tuple
            constants |= {(index, i): item for i, item in enumerate(kind) if isinstance(item, int)}
            divisible += [(index, i) for i, item in enumerate(kind) if str(item).endswith(":16")]
            kind = tuple("constexpr" if isinstance(item, int) else item.removesuffix(":16") for item in kind)
        signature[name] = kind
    source = ASTSource(
        getattr(module, order["name"]),
        signature=signature,
        constexprs={name: _value(value) for name, value in order["constexprs"].items()} | constants,
        attrs={path: [["tt.divisibility", 16]] for path in divisible},
    )
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = order["warnings"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        compiled = triton.compile(source, target=GPUTarget("cuda", order["capability"], 32), options=order["options"])
    cubin = folder / f"kernel_{number}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    registers, stack, static = _resources(cubin)
    warps = getattr(compiled.metadata, "num_warps", order["options"]["num_warps"])
    return {
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": max(static, compiled.metadata.shared),
        "threads": 32 * warps,
        "capability": order["capability"],
        "name": order["name"],
        "warnings": re.findall(r"(?:warning|info)\s*: (\(C\d+\).*)", said.getvalue()),
    }


def _value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "fields" in value:
        fields = value["fields"]
        return collections.namedtuple("Fields", fields)(*map(_value, fields.values()))
    return tl.dtype(value["dtype"])


def _resources(cubin: Path) -> tuple[int, int, int]:
    """Registers, stack bytes and static shared bytes, as ``cuobjdump`` reads them from the binary."""
    shipped = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = str(shipped) if shipped.exists() else shutil.which("cuobjdump")
    if tool is None:
        raise FileNotFoundError("cuobjdump is neither in the triton package nor on PATH")
    printed = subprocess.run([tool, "--dump-resource-usage", str(cubin)], capture_output=True, text=True, check=True)
    fields = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", printed.stdout))
    return int(fields["REG"]), int(fields["STACK"]), int(fields["SHARED"])


def main() -> None:
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for number, order in enumerate(json.load(sys.stdin)):
            try:
                answers.append(compile_one(order, Path(folder), number))
            except Exception as error:  # whatever the compiler raises is the answer
                answers.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
