"""What holds the capstone's kernels: registers, spills and shared memory of each, and clock and power beside cuDNN's.

``kernels`` is what the compiler spent: the assembler's own report (``ptxas -v``) on each kernel that a launch compiled.
``alone`` is what the forward pass reaches when it has the card for itself, and at which clock and power, like the
readings of :mod:`benchmarks.attention_speed`; a large matrix product is read beside them.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention_speed, benchmark_cli, power
from benchmarks.attention_speed import Shape
from benchmarks.hopper_implementations import need_hopper
from solutions import capstone_hopper
from utils import runtime
from utils.record_schemas import COUNT, SIZE, TEXT, each

# Lab 3 stands in on other GPUs, which are refused here.
SOURCES = ["!solutions/lab3_flash_attention/"]

HEAD_DIMS = (64, 128, 256)
#: Shapes at which clock and power are read.
ALONE: tuple[Shape, ...] = tuple((2, 2048 // d, 8192, d, causal) for d in (64, 128) for causal in (False, True))
#: Side of the square matrices whose product is read beside them.
SIDE = 8192
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores")


def report(ptx: str, architecture: str = "sm_90a") -> dict[str, int]:
    """Registers of a thread at the start, and bytes that a thread spills, as the assembler reports them.

    Raises:
        RuntimeError: it refuses the text; its own words.
    """
    from utils import triton_versions

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [triton_versions.ptxas(90), f"-arch={architecture}", "-v", source, "-o", source.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(said)
    return numbers(said)


def numbers(said: str) -> dict[str, int]:
    """The figures in an assembler's report; spills of several functions add up.

    Raises:
        RuntimeError: the report has none.
    """
    used = _USED.findall(said)
    if not used:
        raise RuntimeError(f"the assembler does not say how many registers it used: {said[-400:]!r}")
    return {"registers": max(map(int, used)), "spilled_bytes": sum(map(int, _SPILLED.findall(said)))}


def compiled(kernel: Any) -> dict[Any, Any]:
    """What Triton has compiled of ``kernel`` in this process for the GPU in use, by its key."""
    return dict(kernel.device_caches[torch.cuda.current_device()][0])


def kernels(head_dims: Sequence[int] = HEAD_DIMS, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """What each kernel of the package occupies, compiled for the GPU in use: forward, and both modes of backward."""
    from solutions.capstone_hopper import backward_reordered, backward_wide, forward

    found: list[dict[str, Any]] = []
    seen: set[Any] = set()

    def note(name: str, kernel: Any, head_dim: int, causal: bool) -> None:
        """Add what ``kernel`` was compiled to since the last time."""
        for key, made in compiled(kernel).items():
            if key not in seen:
                seen.add(key)
                found.append(
                    {"pass": name, "head_dim": head_dim, "causal": causal, **report(made.asm["ptx"]),
                     "shared_bytes": int(made.metadata.shared), **consumers(name, head_dim, causal)}
                )  # fmt: skip

    for head_dim in head_dims:
        for causal in (False, True):
            for seq_len, which in ((512, "forward"), (8192, "forward, long")):  # these may be configured differently
                q, k, v, do = (torch.randn(1, 2, seq_len, head_dim, device=runtime.DEVICE).to(dtype) for _ in range(4))
                for deterministic, name in ((True, "backward"), (False, "backward, fast")):
                    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                    o = capstone_hopper.flash_attention(*leaves, causal, deterministic=deterministic)
                    note(which, forward.hopper_forward_kernel, head_dim, causal)
                    torch.autograd.grad(o, leaves, do)
                    note(name, backward_reordered.reordered_backward_kernel, head_dim, causal)
                    note(name, backward_wide.hopper_wide_backward_kernel, head_dim, causal)
    return found


def consumers(name: str, head_dim: int, causal: bool) -> dict[str, int]:
    """How many consumer warpgroups a kernel has, and the registers a thread of theirs has after the redistribution."""
    from solutions.capstone_hopper import tuning

    if name.startswith("forward"):
        tile = tuning.forward(head_dim, causal)
        return {"warpgroups": tile.warpgroups, "consumer_registers": tile.registers}
    return {"warpgroups": 2, "consumer_registers": tuning.backward(head_dim).registers}


def alone(shapes: Sequence[Shape] = ALONE, side: int = SIDE, **options: Any) -> list[dict[str, Any]]:
    """Rate, clock and power of our forward pass and cuDNN's at each shape, and of a matrix product, one at a time.

    Args:
        options: for :func:`benchmarks.power.alone`.
    """
    found = []
    attentions = {
        "ours": capstone_hopper.flash_attention,
        "cudnn": attention_speed.baseline(attention_speed.BASELINES["cudnn"]),
    }
    for shape in shapes:
        batch, heads, seq_len, head_dim, causal = shape
        q, k, v = (torch.randn(batch, heads, seq_len, head_dim, device=runtime.DEVICE).bfloat16() for _ in range(3))
        for name, attention in attentions.items():
            reading = power.alone(functools.partial(attention, q, k, v, causal), **options)
            found.append(_row(name, shape, reading, attention_speed.flops(shape, "forward")))
    a, b = (torch.randn(side, side, device=runtime.DEVICE).bfloat16() for _ in range(2))
    found.append(
        _row(
            "matmul",
            (1, 1, side, side, False),
            power.alone(functools.partial(torch.matmul, a, b), **options),
            2 * side**3,
        )
    )
    return found


def _row(name: str, shape: Shape, reading: Mapping[str, float], flops: int) -> dict[str, Any]:
    where = dict(zip(("batch", "heads", "seq_len", "head_dim", "causal"), shape, strict=True))
    return {"name": name, **where, **reading, "flops_per_second": flops / reading["seconds"]}


SCHEMA = {
    "kernels": [
        {
            "pass": TEXT,
            "head_dim": SIZE,
            "causal": bool,
            "registers": SIZE,
            "spilled_bytes": COUNT,
            **each(SIZE, "shared_bytes", "warpgroups", "consumer_registers"),
        }
    ],
    "alone": [attention_speed.ALONE_LAYOUT],
}


def measure(quick: bool = False) -> dict[str, Any]:
    """Every kernel's report, and the readings; ``quick`` takes one head_dim and one shape.

    Raises:
        RuntimeError: there is no GPU here, or it is not one of Hopper's.
    """
    need_hopper()
    if not runtime.HAS_GPU:
        raise RuntimeError("the compiler's report and the readings need a Hopper GPU")
    return {"kernels": kernels(HEAD_DIMS[:1] if quick else HEAD_DIMS), "alone": alone(ALONE[:1] if quick else ALONE)}


def table(results: Mapping[str, Any]) -> str:
    """The kernels, then the readings."""
    rows = [
        [f"{k['pass']}, D {k['head_dim']}, {'causal' if k['causal'] else 'full'}", k["registers"],
         k["consumer_registers"], k["spilled_bytes"], k["shared_bytes"]]
        for k in results["kernels"]
    ]  # fmt: skip
    lines = [benchmark_cli.text_table(["kernel", "registers", "a consumer's", "spilled", "shared"], rows)]
    for item in results["alone"]:
        lines.append(
            f"alone, {item['name']}, D {item['head_dim']}, {'causal' if item['causal'] else 'full'}: "
            f"{item['flops_per_second'] / 1e12:.0f} TFLOP/s at {item['clock_hz'] / 1e9:.2f} GHz, {item['watts']:.0f} W"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("hopper_limits", measure, table, SCHEMA))
