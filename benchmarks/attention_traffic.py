"""Bytes of attention, three times: by formula, by the course's profiler, and by the hardware's counters.

``cases`` are small calls of lab 3's forward kernel: the formula of ``utils.attention_math``, the profiler's count in
the interpreter, and what Nsight Compute counts for the same tile on the GPU. ``large`` are calls that the interpreter
would take hours for: eager attention kernel by kernel, and the tiled kernels; formula against counters, at two places:
what crosses from L2 to the multiprocessors and back, and what HBM delivers and takes. Caches are flushed before every
kernel.
"""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import attention_implementations, benchmark_cli, profiler_truth
from benchmarks.attention_blocks import Tiles, tile_of_forward
from solutions import lab3_flash_attention as lab
from utils import runtime
from utils.attention_math import AttentionShape, flash2_traffic, standard_cost
from utils.fingerprint import ROOT
from utils.record_schemas import COUNT, SIZE, TEXT, each

SECTOR = 32
DTYPE, DTYPE_NAME = torch.float16, "fp16"


@dataclass(frozen=True)
class Case:
    """One call of the forward kernel, small enough to interpret."""

    name: str
    shape: AttentionShape
    causal: bool
    tile: Tiles

    @property
    def size(self) -> str:
        """The shape in words."""
        s = self.shape
        heads = f"{s.heads} heads" + (f" on {s.key_heads}" if s.key_heads != s.heads else "")
        lengths = f"{s.seq_len}" + (f" queries, {s.keys} keys" if s.keys != s.seq_len else " tokens")
        return f"{heads}, {lengths}, D = {s.head_dim}, {'causal' if self.causal else 'full'}"


CASES = (
    Case("full", AttentionShape(1, 4, 512, 64), False, (64, 64, 4, 2)),
    Case("full, taller tile", AttentionShape(1, 4, 512, 64), False, (128, 64, 4, 2)),
    Case("causal", AttentionShape(1, 4, 512, 64), True, (64, 64, 4, 2)),
    Case("ragged, causal", AttentionShape(1, 2, 300, 64, num_keys=500), True, (64, 32, 4, 2)),
    Case("four query heads a key head", AttentionShape(1, 8, 256, 64, kv_heads=2), False, (64, 64, 4, 2)),
    Case("D = 128", AttentionShape(1, 2, 512, 128), False, (128, 64, 4, 2)),
)
#: Large calls: name -> way of :data:`benchmarks.attention_implementations.IMPLEMENTATIONS`, all not causal.
LARGE_SHAPE = AttentionShape(1, 16, 4096, 64)
LARGE: dict[str, str] = {"eager": "eager", "ours": "ours", "flash": "flash"}
#: Metric -> key of a large call's record, in sectors of 32 bytes.
LARGE_METRICS = {
    "l1tex__m_xbar2l1tex_read_sectors.sum": "sm_bytes_read",
    "lts__t_sectors_srcunit_tex_op_write.sum": "sm_bytes_written",
    "dram__sectors_read.sum": "hbm_bytes_read",
    "dram__sectors_write.sum": "hbm_bytes_written",
}
_MARKER = "spin_kernel"  # what torch.cuda._sleep launches: it separates calls in ncu's table


def inputs(shape: AttentionShape, chance: torch.Generator) -> list[torch.Tensor]:
    """q (B, H, Nq, D), k and v (B, Hkv, Nk, D), the same on every machine."""
    sizes = [(shape.heads, shape.seq_len)] + [(shape.key_heads, shape.keys)] * 2
    return [
        torch.randn(shape.batch, *size, shape.head_dim, generator=chance).to(DTYPE).to(runtime.DEVICE) for size in sizes
    ]


def small_calls(cases: Sequence[Case] = CASES) -> list[Callable[[], object]]:
    """One function a case, which runs the forward kernel with the case's tile."""
    chance = torch.Generator().manual_seed(20260706)

    def build(case: Case) -> Callable[[], object]:
        tensors = inputs(case.shape, chance)

        def run() -> object:
            with tile_of_forward(case.tile):
                return lab.flash_forward(*tensors, causal=case.causal, anchored=True)

        return run

    return [build(case) for case in cases]


def large_calls() -> list[Callable[[], object]]:
    """One function for each of :data:`LARGE`, without gradients."""
    q, k, v = inputs(LARGE_SHAPE, torch.Generator().manual_seed(20260707))
    calls = []
    for way in LARGE.values():
        attention = attention_implementations.forward(way)
        calls.append(lambda attention=attention: attention(q, k, v))
    return calls


def count(cases: Sequence[Case] = CASES) -> list[dict[str, int]]:
    """Each case in the interpreter under the course's profiler; ``bytes_q`` and so on are single tensors'."""
    from utils.kernel_profile import profile_kernel

    found = []
    for run in small_calls(cases):
        with profile_kernel(check_races=False) as profile:
            run()
        counts = {name: int(getattr(profile, name)) for name in profiler_truth.COUNTS}
        for name in ("q", "k", "v", "o", "lse"):
            moved = profile.by_argument[f"{name}_ptr"]
            counts[f"bytes_{name}"] = int(moved.bytes_loaded + moved.bytes_stored)
        found.append(counts)
    return found


def launch_for_counters() -> None:
    """Run every call once to compile it, then once with Nsight Compute watching, a marker kernel before each."""
    calls = [*small_calls(), *large_calls()]
    with torch.no_grad():
        for call in calls:
            call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        for call in calls:
            torch.cuda._sleep(1)
            call()
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def read_groups(text: str, groups: int) -> list[dict[str, int]]:
    """Sum ncu's counters over the kernels after each marker: metric -> sectors, and ``kernels``, their number.

    Raises:
        RuntimeError: ncu printed no table, another number of groups, or a group without kernels.
    """
    start = text.find('"ID"')
    if start < 0:
        raise RuntimeError(f"ncu printed no table: {text.strip()[-500:]}")
    found: list[dict[str, int]] = []
    last, marker = None, False
    for row in csv.DictReader(io.StringIO(text[start:])):
        if not (row.get("ID") or "").isdigit() or not row.get("Metric Name"):
            continue
        if row["ID"] != last:
            last, marker = row["ID"], _MARKER in row["Kernel Name"]
            if marker:
                found.append({"kernels": 0})
            elif found:
                found[-1]["kernels"] += 1
        value = (row["Metric Value"] or "").replace(",", "")
        if found and not marker and value not in ("", "n/a"):
            metric = row["Metric Name"]
            found[-1][metric] = found[-1].get(metric, 0) + round(float(value))
    if len(found) != groups or not all(group["kernels"] for group in found):
        raise RuntimeError(f"ncu should have seen {groups} calls, it saw kernels {[g['kernels'] for g in found]}")
    return found


def counters(groups: int) -> list[dict[str, int]]:
    """Run every call on the GPU under Nsight Compute, caches flushed before each kernel, clocks left alone.

    Raises:
        RuntimeError: ncu is missing, fails, or lacks a counter.
    """
    ncu = profiler_truth.nsight_compute()
    listing = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    metrics = profiler_truth.available_metrics(listing.stdout)
    options = {
        "--print-units": "base",
        "--profile-from-start": "off",
        "--cache-control": "all",
        "--clock-control": "none",
        "--kernel-name-base": "function",
        "--metrics": ",".join(metrics),
    }
    program = [sys.executable, "-m", "benchmarks.attention_traffic", "--launch"]
    command = [ncu, "--csv", *(word for option in options.items() for word in option), *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ncu failed with status {done.returncode}: {(done.stdout + done.stderr).strip()[-1500:]}")
    return read_groups(done.stdout, groups)


def counts_in_interpreter() -> list[dict[str, int]]:
    """:func:`count` in a process whose kernels run in the interpreter.

    Raises:
        RuntimeError: it fails, with what it said.
    """
    command = [sys.executable, "-m", "benchmarks.attention_traffic", "--count"]
    environment = {**os.environ, "MLF_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"counting in the interpreter failed: {done.stderr.strip()[-1500:]}")
    return json.loads(done.stdout)


def formula_bytes(name: str, shape: AttentionShape = LARGE_SHAPE) -> int:
    """What the formula says that a large call moves: eager with the kernel that scales q, or tiles of queries.

    For PyTorch's flash backend, whose tile is its own affair, the formula takes 128 queries.
    """
    if name == "eager":
        return standard_cost(shape, DTYPE_NAME).bytes + 2 * shape.query_elements * DTYPE.itemsize
    block_m, block_n = (128, 128)
    if name == "ours":
        tuning = sys.modules["solutions.lab3_flash_attention.tuning"]
        tile = tuning.forward(shape.head_dim, DTYPE, False, tuning.capability_of(runtime.DEVICE))
        block_m, block_n = tile.m, tile.n
    return flash2_traffic(shape, block_m, block_n, DTYPE_NAME).total


SCHEMA = {
    "dtype": TEXT,
    "cases": [
        {
            "name": TEXT,
            "size": TEXT,
            "tile": [SIZE],
            "formula": each(SIZE, "q", "k", "v", "o", "lse", "flops"),
            "counted": {str: COUNT},
            "measured": {str: COUNT},
        }
    ],
    "large_shape": each(SIZE, "batch", "heads", "seq_len", "head_dim"),
    "large": [
        {
            "name": TEXT,
            "kernels": SIZE,
            "formula_bytes": SIZE,
            **each(COUNT, "sm_bytes_read", "sm_bytes_written", "hbm_bytes_read", "hbm_bytes_written"),
        }
    ],
}


def measure(quick: bool = False) -> dict[str, Any]:
    """All three counts (there is no quicker set).

    Raises:
        RuntimeError: there is no GPU, no Nsight Compute, or one of the two runs fails.
    """
    del quick
    if not runtime.HAS_GPU:
        raise RuntimeError(
            "the hardware's counters need a CUDA GPU and none is in use (python -m utils.runtime says why): "
            "show the recorded table instead, utils.records.load('attention_traffic')"
        )
    return assemble(counts_in_interpreter(), counters(len(CASES) + len(LARGE)))


def assemble(counted: Sequence[Mapping[str, int]], measured: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """The record from the counts of the cases and the counters of all calls, in their order."""
    cases = []
    for case, counts, seen in zip(CASES, counted, measured, strict=False):
        traffic = flash2_traffic(case.shape, case.tile[0], case.tile[1], DTYPE_NAME, causal=case.causal)
        cases.append(
            {
                "name": case.name,
                "size": case.size,
                "tile": list(case.tile),
                "formula": asdict(traffic),
                "counted": dict(counts),
                "measured": {key: value for key, value in seen.items() if key != "kernels"},
            }
        )
    large = []
    for name, seen in zip(LARGE, measured[len(CASES) :], strict=True):
        moved = {key: SECTOR * seen.get(metric, 0) for metric, key in LARGE_METRICS.items()}
        large.append({"name": name, "kernels": seen["kernels"], "formula_bytes": formula_bytes(name), **moved})
    s = LARGE_SHAPE
    shape = {"batch": s.batch, "heads": s.heads, "seq_len": s.seq_len, "head_dim": s.head_dim}
    return {"dtype": DTYPE_NAME, "cases": cases, "large_shape": shape, "large": large}


def table(results: Mapping[str, Any]) -> str:
    """Both tables: bytes loaded by formula, profiler and hardware; and the large calls in MB."""
    from benchmarks import truth

    rows = []
    for case in results["cases"]:
        formula = case["formula"]
        loaded = sum(formula[name] for name in ("q", "k", "v"))
        rows.append([case["name"], "loaded", f"{loaded:,}", f"{case['counted']['bytes_loaded']:,}", "", "", ""])
        rows += [
            ["", row.what, "", f"{row.counted:,}", f"{row.measured:,}", row.ratio_text, row.explanation]
            for row in truth.rows(case)
        ]
    names = list(LARGE_METRICS.values())
    large = [
        [
            item["name"],
            item["kernels"],
            f"{item['formula_bytes'] / 1e6:,.1f}",
            *(f"{item[n] / 1e6:,.1f}" for n in names),
        ]
        for item in results["large"]
    ]
    return (
        benchmark_cli.text_table(["case", "what", "formula", "profiler", "hardware", "ratio", "because"], rows)
        + "\n\nMB\n"
        + benchmark_cli.text_table(["call", "kernels", "formula", *names], large)
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--launch"]:
        launch_for_counters()
    elif sys.argv[1:] == ["--count"]:
        print(json.dumps(count()))
    else:
        raise SystemExit(benchmark_cli.run("attention_traffic", measure, table, SCHEMA))
