"""The course's profiler against the hardware: sectors that it counts, and what Nsight Compute's counters say.

Each kernel of ``utils.example_kernels`` runs twice on the same inputs with the same tiles: in the interpreter under
``profile_kernel``, in a process of its own, and on the GPU under ``ncu``. Three levels are compared: what warps ask
of L1, what L1 asks of L2, what L2 asks of memory. The record holds raw counts; ``benchmarks.truth`` makes the table
of ratios and explains each deviation from the counters themselves.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import benchmark_cli
from benchmarks.truth_cases import cases
from utils import runtime
from utils.fingerprint import ROOT
from utils.record_schemas import COUNT, TEXT

_KERNELS = {
    "elementwise.py": ("copy_kernel", "strided_copy_kernel", "gelu_kernel", "gather_kernel"),
    "transpose.py": ("naive_transpose_kernel", "tiled_transpose_kernel"),
    "reductions.py": ("softmax_kernel", "dot_partial_kernel", "sum_kernel", "histogram_kernel"),
    "matmul.py": ("naive_matmul_kernel", "grouped_tile", "tiled_matmul_kernel", "descriptor_matmul_kernel"),
    "attention.py": ("flash_attention_forward_kernel",),
}
# Cases give tiles themselves: of the example kernels it is the kernels that are measured.
SOURCES = [
    *(f"utils/example_kernels/{file}::{kernel}" for file, kernels in _KERNELS.items() for kernel in kernels),
    "!utils/example_kernels/",
    "!benchmarks/truth.py",
]

#: What the interpreter's counters are called (utils.kernel_profile), all in sectors of 32 bytes but the last three.
COUNTS = (
    "sectors_loaded", "sectors_stored", "sectors_atomic", "l2_sectors_loaded", "l2_sectors_stored",
    "dram_sectors_loaded", "dram_sectors_stored", "bytes_loaded", "bytes_stored", "flops",
)  # fmt: skip

#: Counters of Nsight Compute. Those that a GPU lacks are left out; the first six must be there.
METRICS = (
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "dram__sectors_read.sum",
    "dram__sectors_write.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_atom.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_access.sum",
    "l1tex__m_xbar2l1tex_read_sectors.sum",
    "l1tex__m_xbar2l1tex_read_sectors_mem_lg_op_ld.sum",
    "l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld.sum",
    "l1tex__m_l1tex2xbar_write_sectors.sum",
    "l1tex__m_l1tex2xbar_write_sectors_mem_lg_op_st.sum",
    "l1tex__m_l1tex2xbar_write_sectors_mem_global_op_tma_st.sum",
    "lrc__lts2lrc_sectors_op_read.sum",
    "lrc__xbar2gpc_sectors_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_red.sum",
    "lts__t_sectors_srcunit_tex_op_atom.sum",
    "lts__t_sectors_op_red.sum",
)
REQUIRED = METRICS[:6]


def count(chosen: Iterable[str] | None = None) -> dict[str, dict[str, int]]:
    """Run each case in the interpreter under the course's profiler: name -> counts."""
    from utils.kernel_profile import profile_kernel

    counts = {}
    for case in cases():
        run = case.build()
        if chosen is not None and case.name not in chosen:
            continue
        with profile_kernel(check_races=False) as profile:
            run()
        counts[case.name] = {name: int(getattr(profile, name)) for name in COUNTS}
    return counts


def launch_for_counters() -> None:
    """Run each case once to compile it, then once with Nsight Compute watching (``--profile-from-start off``)."""
    runs = [case.build() for case in cases()]
    for run in runs:
        run()
    torch.cuda.synchronize()
    for run in runs:
        torch.cuda.cudart().cudaProfilerStart()
        run()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def nsight_compute() -> str:
    """Path of ``ncu``, from ``PATH`` or the CUDA toolkit's folder.

    Raises:
        RuntimeError: it is not installed.
    """
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    found = shutil.which("ncu") or shutil.which("ncu", path=f"{home}/bin")
    if found is None:
        folders = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))
        found = str(folders[-1]) if folders else None
    if found is None:
        raise RuntimeError("the hardware's counters need Nsight Compute (ncu), which is not installed here")
    return found


def available_metrics(listing: str, wanted: Sequence[str] = METRICS) -> list[str]:
    """Those of ``wanted`` whose base name ``ncu --query-metrics`` lists.

    Raises:
        RuntimeError: one of :data:`REQUIRED` is not among them.
    """
    names = {line.split()[0] for line in listing.splitlines() if line.split()}
    found = [metric for metric in wanted if metric.rpartition(".")[0] in names]
    missing = [metric for metric in REQUIRED if metric not in found]
    if missing:
        raise RuntimeError(f"this GPU's counters do not include {', '.join(missing)}")
    return found


def read_counters(text: str, expected: Sequence[tuple[str, tuple[str, ...]]]) -> dict[str, dict[str, int]]:
    """Sum the counters of each case's kernels from ``ncu --csv`` output: name -> metric -> sectors.

    Args:
        text: What ncu printed; lines before the table are skipped.
        expected: Each case's name and kernels, in the order in which they ran.

    Raises:
        RuntimeError: the kernels in the table are not those expected.
    """
    start = text.find('"ID"')
    if start < 0:
        raise RuntimeError(f"ncu printed no table: {text.strip()[-500:]}")
    launches: dict[int, tuple[str, dict[str, int]]] = {}
    for row in csv.DictReader(io.StringIO(text[start:])):
        if not (row.get("ID") or "").isdigit() or not row.get("Metric Name"):
            continue
        name = row["Kernel Name"].split("(")[0]
        value = (row["Metric Value"] or "").replace(",", "")
        _, metrics = launches.setdefault(int(row["ID"]), (name, {}))
        if value not in ("", "n/a"):
            metrics[row["Metric Name"]] = round(float(value))
    queue = [launches[key] for key in sorted(launches)]
    wanted = [kernel for _, kernels in expected for kernel in kernels]
    if [name for name, _ in queue] != wanted:
        raise RuntimeError(f"ncu should have seen the kernels {wanted}, it saw {[name for name, _ in queue]}")
    found: dict[str, dict[str, int]] = {}
    for case, kernels in expected:
        total: dict[str, int] = {}
        for _ in kernels:
            for metric, value in queue.pop(0)[1].items():
                total[metric] = total.get(metric, 0) + value
        found[case] = total
    return found


def counters() -> dict[str, dict[str, int]]:
    """Run each case on the GPU under Nsight Compute, caches flushed before each pass, clocks left alone.

    Raises:
        RuntimeError: ncu is missing, fails, or lacks a counter.
    """
    ncu = nsight_compute()
    listing = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    metrics = available_metrics(listing.stdout)
    expected = [(case.name, case.kernels) for case in cases()]
    names = "|".join(sorted({kernel for _, kernels in expected for kernel in kernels}))
    options = {
        "--print-units": "base",
        "--profile-from-start": "off",
        "--cache-control": "all",
        "--clock-control": "none",
        "--kernel-name-base": "function",
        "--kernel-name": f"regex:^({names})$",
        "--metrics": ",".join(metrics),
    }
    program = [sys.executable, "-m", "benchmarks.profiler_truth", "--launch"]
    command = [ncu, "--csv", *(word for option in options.items() for word in option), *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ncu failed with status {done.returncode}: {(done.stdout + done.stderr).strip()[-1500:]}")
    return read_counters(done.stdout, expected)


def counts_in_interpreter() -> dict[str, dict[str, int]]:
    """:func:`count` in a process whose kernels run in the interpreter.

    Raises:
        RuntimeError: it fails, with what it said.
    """
    environment: Mapping[str, str] = {**os.environ, "MLF_DEVICE": "cpu"}
    command = [sys.executable, "-m", "benchmarks.profiler_truth", "--count"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"counting in the interpreter failed: {done.stderr.strip()[-1500:]}")
    return json.loads(done.stdout)


SCHEMA = {"kernels": [{"name": TEXT, "size": TEXT, "counted": {str: COUNT}, "measured": {str: COUNT}}]}


def measure(quick: bool = False) -> dict[str, Any]:
    """Both counts of every case (there is no quicker set: the kernels are small).

    Raises:
        RuntimeError: there is no GPU, no Nsight Compute, or one of the two runs fails.
    """
    del quick
    if not runtime.HAS_GPU:
        raise RuntimeError(
            "the hardware's counters need a CUDA GPU and none is in use (python -m utils.runtime says why): "
            "show the recorded table instead, utils.records.load('profiler_truth')"
        )
    counted, measured = counts_in_interpreter(), counters()
    return {
        "kernels": [
            {"name": case.name, "size": case.size, "counted": counted[case.name], "measured": measured[case.name]}
            for case in cases()
        ]
    }


def table(results: dict[str, Any]) -> str:
    """Loads and stores at L1, loads at L2 and from memory: counted, measured, ratio, and why."""
    from benchmarks import truth

    rows = [
        [row.kernel, row.what, f"{row.counted:,}", f"{row.measured:,}", row.ratio_text, row.explanation]
        for row in truth.comparison(results)
    ]
    return benchmark_cli.text_table(["kernel", "sectors", "counted", "measured", "ratio", "because"], rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--launch"]:
        launch_for_counters()
    elif sys.argv[1:] == ["--count"]:
        print(json.dumps(count()))
    else:
        raise SystemExit(benchmark_cli.run("profiler_truth", measure, table, SCHEMA))
