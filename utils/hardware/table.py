"""The table: every hardware figure of the course, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from utils.hardware.device import CPU, GPU, TPU

KIB, MIB = 1024, 1024**2
KILO, MEGA, GIGA, TERA = 1e3, 1e6, 1e9, 1e12

GUIDE = "CUDA C++ Programming Guide, table 'Technical Specifications per Compute Capability'"
OCCUPANCY = "CUDA toolkit, cuda_occupancy.h"

# Limits of an SM by compute capability: warps, blocks, KiB of shared memory per SM and per block, allocation unit of
# shared memory in bytes, bytes reserved per block (1 KiB from 8.0 on), schedulers.
_LIMITS = {
    (3, 5): (64, 16, 48, 48, 256, 0, 4),
    (6, 0): (64, 32, 64, 48, 256, 0, 2),
    (7, 0): (64, 32, 96, 96, 256, 0, 4),
    (7, 5): (32, 16, 64, 64, 256, 0, 4),
    (8, 0): (64, 32, 164, 163, 128, KIB, 4),
    (8, 6): (48, 16, 100, 99, 128, KIB, 4),
    (8, 9): (48, 24, 100, 99, 128, KIB, 4),
    (9, 0): (64, 32, 228, 227, 128, KIB, 4),
    (10, 0): (64, 32, 228, 227, 128, KIB, 4),
}


def _gpu(
    name: str, capability: tuple[int, int], source: str, sources: Mapping[str, str] | None = None, **figures
) -> GPU:
    """A GPU from its own figures and the limits of its capability; ``source`` covers what ``sources`` does not name."""
    warps, blocks, per_sm, per_block, unit, reserved, schedulers = _LIMITS[capability]
    guide = {
        "max_warps_per_sm": warps,
        "max_blocks_per_sm": blocks,
        "shared_memory_per_sm": per_sm * KIB,
        "max_shared_memory_per_block": per_block * KIB,
        "reserved_shared_memory_per_block": reserved,
    }
    calculator = {"shared_memory_allocation_unit": unit, "schedulers_per_sm": schedulers}
    same_everywhere = ("warp_size", "max_threads_per_block", "registers_per_sm", "max_registers_per_thread")
    known = dict.fromkeys((*guide, *same_everywhere, "compute_capability", "max_threads_per_sm"), GUIDE)
    known |= dict.fromkeys((*calculator, "register_allocation_unit"), OCCUPANCY)
    known |= dict.fromkeys(figures, source) | dict(sources or {})
    return GPU(name=name, compute_capability=capability, sources=known, **guide, **calculator, **figures)


_ALL = (
    _gpu(
        "K20X", (3, 5), "NVIDIA Tesla K20X board specification and Kepler GK110 whitepaper (2012)",
        full_name="NVIDIA Tesla K20X", year=2012, architecture="Kepler", sms=14, clock_hz=732 * MEGA,
        l1_bytes_per_sm=64 * KIB, l2_bytes=1536 * KIB, memory_bytes=6 * GIGA, memory_bandwidth=250 * GIGA,
        peak_flops={"fp64": 1.31 * TERA, "fp32": 3.95 * TERA}, has_tensor_cores=False, pcie_bandwidth=16 * GIGA,
    ),
    _gpu(
        "P100", (6, 0), "NVIDIA Tesla P100 whitepaper (2016) and data sheet",
        {"memory_bandwidth": "NVIDIA Tesla P100 data sheet: 732 GB/s (the whitepaper rounds to 720)"},
        full_name="NVIDIA Tesla P100 SXM2 16GB", year=2016, architecture="Pascal", sms=56, clock_hz=1480 * MEGA,
        l1_bytes_per_sm=24 * KIB, l2_bytes=4096 * KIB, memory_bytes=16 * GIGA, memory_bandwidth=732 * GIGA,
        peak_flops={"fp64": 5.3 * TERA, "fp32": 10.6 * TERA, "fp16": 21.2 * TERA}, has_tensor_cores=False,
        link_bandwidth=160 * GIGA, pcie_bandwidth=32 * GIGA,
    ),
    _gpu(
        "V100", (7, 0), "NVIDIA Tesla V100 whitepaper (2017) and data sheet",
        full_name="NVIDIA Tesla V100 SXM2 16GB", year=2017, architecture="Volta", sms=80, clock_hz=1530 * MEGA,
        l1_bytes_per_sm=128 * KIB, l2_bytes=6144 * KIB, memory_bytes=16 * GIGA, memory_bandwidth=900 * GIGA,
        peak_flops={"fp64": 7.8 * TERA, "fp32": 15.7 * TERA, "fp16": 125 * TERA}, has_tensor_cores=True,
        link_bandwidth=300 * GIGA, pcie_bandwidth=32 * GIGA,
    ),
    _gpu(
        "T4", (7, 5), "NVIDIA T4 data sheet and Turing whitepaper (2018)",
        {"peak_flops": "NVIDIA T4 data sheet; fp64 by the Turing whitepaper's 2 units an SM: 40 x 2 x 2 x 1.59 GHz"},
        full_name="NVIDIA T4 16GB", year=2018, architecture="Turing", sms=40, clock_hz=1590 * MEGA,
        l1_bytes_per_sm=96 * KIB, l2_bytes=4096 * KIB, memory_bytes=16 * GIGA, memory_bandwidth=320 * GIGA,
        peak_flops={"fp64": 0.2544 * TERA, "fp32": 8.1 * TERA, "fp16": 65 * TERA, "int8": 130 * TERA},
        has_tensor_cores=True, pcie_bandwidth=32 * GIGA,
    ),
    _gpu(
        "A100", (8, 0), "NVIDIA A100 data sheet (80 GB SXM) and Ampere whitepaper (2020)",
        {"latency_cycles": "Abdelkhalik et al. 2022, 'Demystifying the Nvidia Ampere Architecture through "
                           "Microbenchmarking and Instruction-level Analysis', table IV"},
        full_name="NVIDIA A100 SXM4 80GB", year=2020, architecture="Ampere", sms=108, clock_hz=1410 * MEGA,
        l1_bytes_per_sm=192 * KIB, l2_bytes=40 * MIB, memory_bytes=80 * GIGA, memory_bandwidth=2039 * GIGA,
        peak_flops={"fp64": 9.7 * TERA, "fp64_tensor": 19.5 * TERA, "fp32": 19.5 * TERA, "tf32": 156 * TERA,
                    "bf16": 312 * TERA, "fp16": 312 * TERA, "int8": 624 * TERA},
        peak_flops_sparse={"tf32": 312 * TERA, "bf16": 624 * TERA, "fp16": 624 * TERA, "int8": 1248 * TERA},
        has_tensor_cores=True, link_bandwidth=600 * GIGA, pcie_bandwidth=64 * GIGA,
        latency_cycles={"global": 290, "l2": 200, "l1": 33, "shared_load": 23, "shared_store": 19},
    ),
    _gpu(
        "A100-40GB", (8, 0), "NVIDIA A100 data sheet (40 GB SXM) and Ampere whitepaper (2020)",
        {"latency_cycles": "Abdelkhalik et al. 2022, 'Demystifying the Nvidia Ampere Architecture through "
                           "Microbenchmarking and Instruction-level Analysis', table IV"},
        full_name="NVIDIA A100 SXM4 40GB", year=2020, architecture="Ampere", sms=108, clock_hz=1410 * MEGA,
        l1_bytes_per_sm=192 * KIB, l2_bytes=40 * MIB, memory_bytes=40 * GIGA, memory_bandwidth=1555 * GIGA,
        peak_flops={"fp64": 9.7 * TERA, "fp64_tensor": 19.5 * TERA, "fp32": 19.5 * TERA, "tf32": 156 * TERA,
                    "bf16": 312 * TERA, "fp16": 312 * TERA, "int8": 624 * TERA},
        peak_flops_sparse={"tf32": 312 * TERA, "bf16": 624 * TERA, "fp16": 624 * TERA, "int8": 1248 * TERA},
        has_tensor_cores=True, link_bandwidth=600 * GIGA, pcie_bandwidth=64 * GIGA,
        latency_cycles={"global": 290, "l2": 200, "l1": 33, "shared_load": 23, "shared_store": 19},
    ),
    _gpu(
        "A10", (8, 6), "NVIDIA A10 data sheet (2021) and GA102 whitepaper",
        full_name="NVIDIA A10 24GB", year=2021, architecture="Ampere", sms=72, clock_hz=1695 * MEGA,
        l1_bytes_per_sm=128 * KIB, l2_bytes=6144 * KIB, memory_bytes=24 * GIGA, memory_bandwidth=600 * GIGA,
        peak_flops={"fp32": 31.2 * TERA, "tf32": 62.5 * TERA, "bf16": 125 * TERA, "fp16": 125 * TERA,
                    "int8": 250 * TERA},
        peak_flops_sparse={"tf32": 125 * TERA, "bf16": 250 * TERA, "fp16": 250 * TERA, "int8": 500 * TERA},
        has_tensor_cores=True, pcie_bandwidth=64 * GIGA,
    ),
    _gpu(
        "H100", (9, 0), "NVIDIA H100 SXM data sheet and Hopper whitepaper (2022)",
        {"peak_flops": "NVIDIA H100 SXM data sheet, halved where it prints rates with sparsity (1,979 for bf16); the "
                       "Hopper whitepaper prints 989.4 dense; the course uses 989e12",
         "memory_bandwidth": "NVIDIA H100 SXM data sheet: 3.35 TB/s (lectures also print 3.36)",
         "clock_hz": "highest SM clock the driver of an H100 SXM offers, 1,980 MHz; the fp32 rate follows from it, the "
                     "tensor-core rates from 1,830 MHz",
         "latency_cycles": "pointer chasing by others: Luo et al. 2024, 'Benchmarking and Dissecting the Nvidia Hopper "
                           "GPU Architecture via Microbenchmarking' (shared, L1, low end of L2 and global); Chips and "
                           "Cheese 2023, 'Nvidia's H100: Funny L2, and Tons of Bandwidth' (high end)"},
        full_name="NVIDIA H100 SXM5 80GB", year=2022, architecture="Hopper", sms=132, clock_hz=1980 * MEGA,
        l1_bytes_per_sm=256 * KIB, l2_bytes=50 * MIB, memory_bytes=80 * GIGA, memory_bandwidth=3.35 * TERA,
        peak_flops={"fp64": 34 * TERA, "fp64_tensor": 67 * TERA, "fp32": 67 * TERA, "tf32": 494.5 * TERA,
                    "bf16": 989 * TERA, "fp16": 989 * TERA, "fp8": 1979 * TERA, "int8": 1979 * TERA},
        peak_flops_sparse={"tf32": 989 * TERA, "bf16": 1979 * TERA, "fp16": 1979 * TERA, "fp8": 3958 * TERA,
                           "int8": 3958 * TERA},
        has_tensor_cores=True, link_bandwidth=900 * GIGA, pcie_bandwidth=128 * GIGA,
        latency_cycles={"global": (480, 690), "l2": (260, 280), "l1": 41, "shared": 29},
    ),
    _gpu(
        "RTX 4090", (8, 9), "NVIDIA Ada GPU architecture whitepaper, appendix A (2022); tensor rates with fp32 sums",
        full_name="NVIDIA GeForce RTX 4090 24GB", year=2022, architecture="Ada", sms=128, clock_hz=2520 * MEGA,
        l1_bytes_per_sm=128 * KIB, l2_bytes=72 * MIB, memory_bytes=24 * GIGA, memory_bandwidth=1008 * GIGA,
        peak_flops={"fp32": 82.6 * TERA, "tf32": 82.6 * TERA, "bf16": 165.2 * TERA, "fp16": 165.2 * TERA,
                    "fp8": 330.3 * TERA, "int8": 660.6 * TERA},
        peak_flops_sparse={"tf32": 165.2 * TERA, "bf16": 330.4 * TERA, "fp16": 330.4 * TERA, "fp8": 660.6 * TERA,
                           "int8": 1321.2 * TERA},
        has_tensor_cores=True, pcie_bandwidth=64 * GIGA,
    ),
    _gpu(
        "L4", (8, 9), "NVIDIA L4 data sheet (2023) and Ada whitepaper",
        {"peak_flops": "NVIDIA L4 data sheet, halved where it prints rates with sparsity",
         **dict.fromkeys(("sms", "clock_hz", "l2_bytes"), "as its driver reports it (cudaDeviceProp)")},
        full_name="NVIDIA L4 24GB", year=2023, architecture="Ada", sms=58, clock_hz=2040 * MEGA,
        l1_bytes_per_sm=128 * KIB, l2_bytes=48 * MIB, memory_bytes=24 * GIGA, memory_bandwidth=300 * GIGA,
        peak_flops={"fp32": 30.3 * TERA, "tf32": 60 * TERA, "bf16": 121 * TERA, "fp16": 121 * TERA,
                    "fp8": 242.5 * TERA, "int8": 242.5 * TERA},
        peak_flops_sparse={"tf32": 120 * TERA, "bf16": 242 * TERA, "fp16": 242 * TERA, "fp8": 485 * TERA,
                           "int8": 485 * TERA},
        has_tensor_cores=True, pcie_bandwidth=64 * GIGA,
    ),
    _gpu(
        "H200", (9, 0), "NVIDIA H200 SXM data sheet (2023) and Hopper whitepaper",
        {"peak_flops": "NVIDIA H200 SXM data sheet, halved where it prints rates with sparsity; the same as an H100's",
         "l2_bytes": "as its driver reports it (cudaDeviceProp.l2CacheSize): all 60 MiB of a GH100, the H100 has 50"},
        full_name="NVIDIA H200 SXM 141GB", year=2023, architecture="Hopper", sms=132, clock_hz=1980 * MEGA,
        l1_bytes_per_sm=256 * KIB, l2_bytes=60 * MIB, memory_bytes=141 * GIGA, memory_bandwidth=4.8 * TERA,
        peak_flops={"fp64": 34 * TERA, "fp64_tensor": 67 * TERA, "fp32": 67 * TERA, "tf32": 494.5 * TERA,
                    "bf16": 989 * TERA, "fp16": 989 * TERA, "fp8": 1979 * TERA, "int8": 1979 * TERA},
        peak_flops_sparse={"tf32": 989 * TERA, "bf16": 1979 * TERA, "fp16": 1979 * TERA, "fp8": 3958 * TERA,
                           "int8": 3958 * TERA},
        has_tensor_cores=True, link_bandwidth=900 * GIGA, pcie_bandwidth=128 * GIGA,
    ),
    _gpu(
        "B200", (10, 0), "NVIDIA HGX B200 data sheet (2024), one GPU of eight",
        {"l2_bytes": "NVIDIA Blackwell tuning guide: 126 MB", "l1_bytes_per_sm": "NVIDIA Blackwell tuning guide",
         "sms": "as its driver reports it (cudaDeviceProp.multiProcessorCount)",
         "clock_hz": "highest SM clock its driver offers; 148 SMs x 128 x 2 x 1.965 GHz is the printed fp32 rate",
         "memory_bandwidth": "NVIDIA HGX B200 data sheet: 8 TB/s; the driver's bus width and clock give 7.7"},
        full_name="NVIDIA B200 SXM 180GB", year=2024, architecture="Blackwell", sms=148, clock_hz=1965 * MEGA,
        l1_bytes_per_sm=256 * KIB, l2_bytes=126 * MIB, memory_bytes=180 * GIGA, memory_bandwidth=8 * TERA,
        peak_flops={"fp64": 37 * TERA, "fp32": 75 * TERA, "tf32": 1.1e15,
                    "bf16": 2.25e15, "fp16": 2.25e15, "fp8": 4.5e15, "int8": 4.5e15, "fp4": 9e15},
        peak_flops_sparse={"tf32": 2.2e15, "bf16": 4.5e15, "fp16": 4.5e15, "fp8": 9e15, "int8": 9e15, "fp4": 18e15},
        has_tensor_cores=True, link_bandwidth=1.8 * TERA, pcie_bandwidth=128 * GIGA,
    ),
)  # fmt: skip

GPUS: Mapping[str, GPU] = MappingProxyType({each.name: each for each in _ALL})

_CLOUD = "Google Cloud TPU documentation"
TPUS: Mapping[str, TPU] = MappingProxyType(
    {
        each.name: each
        for each in (
            TPU(
                name="TPU v5e", year=2023, peak_flops={"bf16": 197 * TERA, "int8": 393 * TERA}, memory_bytes=16 * GIGA,
                memory_bandwidth=819 * GIGA, matrix_unit=(128, 128), link_bandwidth=400 * GIGA,
                sources=dict.fromkeys(
                    ("year", "peak_flops", "memory_bytes", "memory_bandwidth", "matrix_unit", "link_bandwidth"),
                    f"{_CLOUD}, 'TPU v5e'"),
            ),
            TPU(
                name="TPU v6e", year=2024, peak_flops={"bf16": 918 * TERA, "int8": 1836 * TERA}, memory_bytes=32 * GIGA,
                memory_bandwidth=1638 * GIGA, matrix_unit=(256, 256), link_bandwidth=800 * GIGA,
                sources=dict.fromkeys(
                    ("year", "peak_flops", "memory_bytes", "memory_bandwidth", "matrix_unit", "link_bandwidth"),
                    f"{_CLOUD}, 'TPU v6e' (lectures print its 918e12 as 9.1e14)"),
            ),
        )
    }
)  # fmt: skip

CPUS: Mapping[str, CPU] = MappingProxyType(
    {
        each.name: each
        for each in (
            CPU(
                name="EPYC 9654", year=2022, cores=96, threads_per_core=2, clock_hz=2.4 * GIGA,
                flops_per_core_cycle={"fp64": 16, "fp32": 32}, memory_bandwidth=460.8 * GIGA,
                sources={
                    "year": "AMD EPYC 9654 product page", "cores": "AMD EPYC 9654 product page",
                    "threads_per_core": "AMD EPYC 9654 product page",
                    "clock_hz": "AMD EPYC 9654 product page: base clock, for all cores; one alone reaches 3.7 GHz",
                    "flops_per_core_cycle": "AMD Zen 4 software optimization guide: two 256-bit multiply-adds a cycle",
                    "memory_bandwidth": "AMD EPYC 9654 product page: twelve channels of DDR5-4800, 8 bytes wide",
                },
            ),
        )
    }
)  # fmt: skip
