"""The process that compiles for :mod:`utils.compile_only`: a line of orders comes in, a line of answers goes out.

It imports nothing of the course's runtime, so that Triton is here as on a GPU, whatever was decided there.
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
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.compiler.errors import CompilationError
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import cache

from utils import triton_versions  # the names that kernels use, on each version of Triton


def _key_of_this_triton() -> str:
    """What Triton's cache knows this installation by: upstream reads all of its library for it, a second a process."""
    library = Path(triton._C.libtriton.__file__).stat()
    return f"{triton.__version__} {library.st_size} {library.st_mtime_ns}"


cache.triton_key = triton_versions.key_with_reductions(_key_of_this_triton)


def source_of(order: dict[str, Any], folder: Path, number: int) -> ASTSource:
    """What is compiled for one order."""
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
    kernel = getattr(module, order["name"])
    return (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        signature=signature,
        constexprs={name: _value(value) for name, value in order["constexprs"].items()} | constants,
        attrs={path: [["tt.divisibility", 16]] for path in divisible},
    )


def compile_one(order: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """Compile one order; return the fields of a ``ResourceUsage``."""
    source = source_of(order, folder, number)
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


def read_one(order: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """Let the compiler read one order's source, without making code of it; return the fields of a ``Reading``."""
    target = GPUTarget("cuda", order["capability"], 32)
    backend = make_backend(target)
    options = backend.parse_options(order["options"])
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    lines = order["source"].splitlines()
    triton.knobs.compilation.disable_line_info = False
    try:
        source = source_of(order, folder, number)
        codegen = backend.get_codegen_implementation(options)
        module = source.make_ir(target, options, codegen, backend.get_module_map(), context)
    except CompilationError as error:
        while isinstance(error.__cause__, CompilationError):  # in a function that the kernel calls
            error = error.__cause__
        said = (error.error_message or str(error.__cause__ or error))[:2000]
        source, line = (error.src or "").splitlines(), getattr(error.node, "lineno", 0)
        return {
            "name": order["name"],
            "error": said[:2000],
            "line": source[line - 1].strip() if line else "",
            "products": [],
        }
    return {"name": order["name"], "error": "", "line": "", "products": _products(str(module), lines)}


def _products(text: str, lines: list[str]) -> list[tuple[str, str, str]]:
    """(dtype of the operands, precision, line of the source) of each ``tl.dot`` in Triton's intermediate language."""
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def line(place: str) -> str:
        while not (found := re.match(r'"[^"]*":(\d+):', place)):
            inner = re.search(r"#loc\d*", place)
            if inner is None or inner[0] not in places:
                return ""
            place = places[inner[0]]
        return lines[int(found[1]) - 1].strip()

    dots = re.findall(r"tt\.dot (.*?) : tensor<(?:\d+x)+(\w+)> \* .* loc\((.*)\)$", text, re.MULTILINE)
    precisions = (re.search(r"inputPrecision = (\w+)", attributes) for attributes, _, _ in dots)
    return [(dtype, found[1] if found else "ieee", line(place)) for (_, dtype, place), found in zip(dots, precisions)]


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


def answer(order: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """What the compiler says of an order."""
    try:
        with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope():
            return (read_one if order["read"] else compile_one)(order, folder, number)
    except Exception as error:  # whatever the compiler raises is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    with open(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what the compiler prints is no answer
        for line in sys.stdin:
            with tempfile.TemporaryDirectory() as folder:
                found = [answer(order, Path(folder), number) for number, order in enumerate(json.loads(line))]
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
