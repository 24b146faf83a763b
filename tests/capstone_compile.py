"""Compiles the Gluon kernels of the capstone and of lab 6 for sm_90 in a process of its own.

A line of orders comes in, a line of answers goes out: what the compiler spent on each kernel. Each line is answered by
a fork of this process, which has imported PyTorch and Triton, so that no order finds what another one left behind.

Nothing of the course's runtime is imported, so that Triton is here as on a GPU.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
import traceback
import types
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks import hopper_races

FOLDER = Path(__file__).resolve().parent.parent / "solutions" / "capstone_hopper"
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


#: What is kept on disk between runs, beside what Triton keeps for launches.
KEPT = Path(triton.knobs.cache.dir) / "without_cubin"


def module(name: str) -> types.ModuleType:
    """A module of the capstone without the package's own ``__init__``, which brings in the runtime."""
    if "capstone" not in sys.modules:
        package = types.ModuleType("capstone")
        package.__path__ = [str(FOLDER)]
        sys.modules["capstone"] = package
    return importlib.import_module(f"capstone.{name}")


def tiles(rows: int, columns: int, kind: str) -> str:
    """The type of a descriptor of tiles (1, 1, rows, columns)."""
    block = [1, 1, rows, columns]
    return f"tensordesc<{kind}{block},{module('parts').layout(block, TYPES[kind])!r}>"


def forward(head_dim: int, causal: bool, kind: str, ragged: bool = False) -> dict:
    """The forward kernel as ``launch`` specialises it; ``ragged``: the last tile of keys is not full."""
    tile = module("tuning").forward(head_dim, causal)
    types_ = {
        "q_desc": tiles(64, head_dim, kind), "k_desc": tiles(tile.columns, head_dim, kind),
        "v_desc": tiles(tile.columns, head_dim, kind), "o_desc": tiles(64, min(head_dim, 128), kind),
        "lse_ptr": "*fp32", "tiles_ptr": "*i32", "counts_ptr": "*i32", "scale": "fp32",
    }  # fmt: skip
    constants = {
        "G": tile.warpgroups, "N": tile.columns, "S": tile.stages, "CAUSAL": causal, "MASKED": causal or ragged,
        "PINGPONG": tile.pingpong,
        "RESCALE_AFTER_MMA": tile.rescale_after_mma, "PARTIAL": tile.partial_sums, "B": tile.num_q_buffers,
        "SLACK": 8, "MASK_APART": tile.mask_apart,
        "REGISTERS": tile.registers,
    }  # fmt: skip
    return compiled(module("forward").hopper_forward_kernel, types_, constants, tile.launch_maxnreg)


def backward(head_dim: int, causal: bool, kind: str, sum_dq: bool) -> dict:
    """The backward kernel for a head_dim of 64 or 128, as ``launch`` specialises it."""
    tile = module("tuning").backward(head_dim)
    types_ = backward_types(head_dim, kind) | {
        "dq_desc": tiles(64, head_dim * tile.rows // 128, "fp32"), "scale": "fp32", "scale_log2": "fp32",
    }  # fmt: skip
    constants = {"M": tile.rows, "N": tile.columns, "S": tile.stages, "CAUSAL": causal, "DQ": sum_dq}
    constants |= {"EARLY": tile.early, "REGISTERS": tile.registers}
    return compiled(module("backward").hopper_backward_kernel, types_, constants, tile.launch_maxnreg)


def backward_types(head_dim: int, kind: str) -> dict[str, str]:
    """The types of the descriptors that all backward kernels have."""
    tile = module("tuning").backward(head_dim)
    rows = f"tensordesc<fp32[1, {tile.rows}],{module('parts').ROW_LAYOUT!r}>"
    return {
        "q_desc": tiles(tile.rows, head_dim, kind), "k_desc": tiles(tile.columns, head_dim, kind),
        "v_desc": tiles(tile.columns, head_dim, kind), "do_desc": tiles(tile.rows, head_dim, kind), "lse_desc": rows,
        "delta_desc": rows, "dk_desc": tiles(64, head_dim, kind), "dv_desc": tiles(64, head_dim, kind),
    }  # fmt: skip


def wide(causal: bool, kind: str, ordered: bool, ragged: bool = False) -> dict:
    """The backward kernel for a head_dim of 256, as ``launch_wide`` specialises it."""
    tile = module("tuning").backward(256)
    types_ = backward_types(256, kind) | {
        "sums": tiles(tile.rows, 256, "fp32"), "turns": "*i32", "scale": "fp32", "scale_log2": "fp32",
    }  # fmt: skip
    constants = {"S": tile.stages, "CAUSAL": causal, "RAGGED": ragged, "ORDERED": ordered}
    return compiled(
        module("backward_wide").hopper_wide_backward_kernel, types_, constants, tile.launch_maxnreg, tile.warps
    )


def reordered(head_dim: int, causal: bool, kind: str, step: str, keys: int = 256) -> dict:
    """The reordered backward kernel of one step, as its launch specialises it for so many keys."""
    launch, gl_layout = module("launch_reordered"), module("parts").ROW_LAYOUT
    tile, change = module("tuning").backward(head_dim), launch.Step[step.upper()]
    constants = launch.constants(tile, causal, keys, change)
    sums = f"tensordesc<fp32[128, 32],{gl_layout!r}>" if change >= launch.Step.LINEAR else tiles(64, 64, "fp32")
    types_ = backward_types(head_dim, kind) | {
        "sums": "*fp32" if change >= launch.Step.RED else sums, "turns": "*i32", "scale_log2": "fp32",
    }  # fmt: skip
    return compiled(launch.reordered_backward_kernel, types_, constants, tile.launch_maxnreg)


def scaled(kind: str, scales: str) -> dict:
    """Lab 6's product of e4m3 matrices with scales for rows (``row``) or for each 128 of K (``block``)."""
    given = {
        "solutions.capstone_hopper.parts": module("parts"),
        "lab6.square_blocks": types.SimpleNamespace(SquareBlocks=None),
        "lab6.tiles": types.SimpleNamespace(programs=None),
    }
    package = types.ModuleType("lab6")
    package.__path__ = [str(FOLDER.parent / "lab6_frontiers")]
    sys.modules |= {"lab6": package} | given
    lab6, shared = (importlib.import_module(f"lab6.hopper_{name}") for name in (f"{scales}_scaled", "products"))

    def operand(dtype: torch.dtype, name: str, rows: int, columns: int) -> str:
        return f"tensordesc<{name}[{rows}, {columns}],{shared.layout(rows, columns, dtype)!r}>"

    types_ = {
        "a_desc": operand(torch.float8_e4m3fn, "fp8e4nv", shared.M, shared.K),
        "b_desc": operand(torch.float8_e4m3fn, "fp8e4nv", shared.N, shared.K),
        "c_desc": operand(TYPES[kind], kind, 64, 64), "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32",
    }  # fmt: skip
    constants = {"S": shared.STAGES, "TOGETHER": shared.TOGETHER, "REGISTERS": lab6.MULTIPLYING}
    strides = {"row": ("a_stride", "b_stride"), "block": ("a_stride_m", "b_stride_k")}
    constants |= dict.fromkeys(strides[scales], 1)
    return compiled(getattr(lab6, f"hopper_{scales}_scaled_kernel"), types_, constants, shared.LAUNCHED)


def latents(kind: str, split: bool) -> dict:
    """Lab 6's decode attention over latents, in one part or split."""
    package = types.ModuleType("lab6")
    package.__path__ = [str(FOLDER.parent / "lab6_frontiers")]
    given = {f"solutions.capstone_hopper.{name}": module(name) for name in ("parts", "softmax")}
    sys.modules |= {"lab6": package} | given
    lab6 = importlib.import_module("lab6.hopper_mla_decode")

    def operand(columns: int) -> str:
        block = [1, 64, columns]
        return f"tensordesc<{kind}{block},{module('parts').layout(block, TYPES[kind])!r}>"

    types_ = {
        "q_desc": operand(256), "q_rope_desc": operand(64), "c_desc": operand(256), "c_rope_desc": operand(64),
        "block_tables_ptr": "*i32", "context_lens_ptr": "*i32", "o_ptr": "*fp32" if split else f"*{kind}",
        "lse_ptr": "*fp32", "scale": "fp32",
    }  # fmt: skip
    constants = {"S": lab6.STAGES, "BLOCK_SIZE": 64, "SPLIT": split, "REGISTERS": lab6.SUMS}
    constants |= {"stride_bb": 1, "stride_cs": 1}
    return compiled(lab6.hopper_mla_decode_kernel, types_, constants, lab6.LAUNCHED)


def grouped(kind: str, product: str) -> dict:
    """Lab 6's product of an expert layer: ``forward``, ``dx`` (transposed matrices) or ``dweights``."""
    package = types.ModuleType("lab6")
    package.__path__ = [str(FOLDER.parent / "lab6_frontiers")]
    given = {
        "solutions.capstone_hopper.parts": module("parts"),
        "lab6.expert_tables": types.SimpleNamespace(tile_table=None, largest_first=None),
        "lab6.tiles": types.SimpleNamespace(describable=None, programs=None),
    }
    sys.modules |= {"lab6": package} | given
    lab6 = importlib.import_module("lab6.hopper_grouped_matmul")

    def operand(rows: int, columns: int) -> str:
        return f"tensordesc<{kind}[{rows}, {columns}],{module('parts').layout([rows, columns], TYPES[kind])!r}>"

    types_ = {
        "x_desc": operand(64, 64), "weights_desc": operand(256, 64) if product == "dx" else operand(64, 256),
        "dout_desc": operand(64, 256), "out_desc": operand(64, 128), "out_ptr": f"*{kind}", "table_ptr": "*i32",
        "tiles_ptr": "*i32",
    }  # fmt: skip
    constants = {"S": lab6.STAGES, "REGISTERS": lab6.MULTIPLYING}
    if product == "dweights":
        kernel = importlib.import_module("lab6.hopper_grouped_gradient").hopper_grouped_gradient_kernel
    else:
        kernel = lab6.hopper_grouped_matmul_kernel
        constants |= {"TRANSPOSED": product == "dx", "TOGETHER": lab6.TOGETHER}
    return compiled(kernel, types_, constants, lab6.LAUNCHED)


def longest_chain(ptx: str, name: str) -> int:
    """How many instructions of this name there are, at most, of which each takes the result of the one before."""
    lengths: dict[str, int] = {}
    for result, *taken in re.findall(rf"\t{re.escape(name)} \t(%\w+), (%\w+), (%\w+);", ptx):
        lengths[result] = 1 + max(lengths.get(each, 0) for each in taken)
    return max(lengths.values(), default=0)


def assembled(ptx: str) -> dict:
    """What the capstone's ``assemble`` says of a kernel; it is asked once for the same text, assembler and code."""
    compiler = module("steps.compiler")
    from utils import triton_versions

    assembler = Path(triton_versions.ptxas(90)).resolve()
    state = assembler.stat()
    about = [ptx, str(assembler), state.st_size, state.st_mtime_ns, Path(compiler.__file__).read_text()]
    path = KEPT / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(compiler.assemble(ptx)))
        half.replace(path)
    return json.loads(path.read_text())


def compiled(kernel, types_: dict, constants: dict, maxnreg: int, warps: int = 4) -> dict:
    """Registers at the start, bytes spilled, shared memory, and instructions: their order, and those of Hopper."""
    names = kernel.arg_names
    signature = {n: types_.get(n, "constexpr" if n in constants else "i32") for n in names}
    constexprs = {(names.index(n),): value for n, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = GluonASTSource(kernel, signature, constexprs, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "maxnreg": maxnreg})
    used = assembled(made.asm["ptx"])
    return {
        "registers": used["registers"],
        "spilled": used["spilled_bytes"],
        "serialised": "wgmma.mma_async instructions are serialized" in used["text"],
        "advisories": sorted(set(re.findall(r"C75\d\d", used["text"]))),
        "shared": made.metadata.shared,
        "maxima_in_a_row": longest_chain(made.asm["ptx"], "max.f32"),
        "atomic_starts": hopper_races.atomic_starts(made.asm["ptx"], warps).count("atom.shared.or.b32"),
        "instructions": [
            name
            for name in (
                "wgmma.mma_async",
                "cp.async.bulk.tensor",
                "cp.reduce.async.bulk.tensor",
                "setmaxnreg",
                "global.gpu.relaxed.add.v4.f32",  # atom, and from Triton 3.9 on red
            )
            if name in made.asm["ptx"]
        ],
    }


KERNELS = {
    "forward": forward, "backward": backward, "wide": wide, "reordered": reordered, "scaled": scaled,
    "latents": latents, "grouped": grouped,
}  # fmt: skip


def answer(orders: list) -> list[dict] | dict:
    """What the compiler spends on each order, or the error of the first that fails."""
    try:
        return [KERNELS[name](*arguments) for name, *arguments in orders]
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    triton.knobs.cache.dir = str(KEPT)
    CUDABackend.make_cubin = lambda *_: b""  # ``assemble`` makes it: the assembler would run twice
    triton.runtime.cache.triton_key()  # takes a second, and is remembered
    answers = os.dup(1)
    os.dup2(2, 1)  # what the compiler prints is no answer
    for line in sys.stdin:
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            if status:
                os.write(answers, json.dumps({"error": f"the compiler ended with status {status}"}).encode() + b"\n")
        else:
            with os.fdopen(answers, "w") as out:
                print(json.dumps(answer(json.loads(line))), file=out)
            os._exit(0)


if __name__ == "__main__":
    main()
