"""The hardware table: complete, sourced, consistent with itself, and clear about what it does not know."""

import dataclasses
import types

import pytest

from utils import hardware
from utils.hardware import CPUS, GPUS, TPUS, cpu, gpu, this_gpu, tpu

# Ordinary fp32 cores of an SM by compute capability (CUDA C++ Programming Guide, arithmetic instructions).
CORES = {
    (3, 5): 192,
    (6, 0): 64,
    (7, 0): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
}


@pytest.mark.parametrize("name", GPUS)
def test_every_figure_names_its_source(name):
    device = GPUS[name]
    for field in dataclasses.fields(device):
        value = getattr(device, field.name)
        if (
            field.name in ("name", "sources")
            or value is None
            or (isinstance(value, types.MappingProxyType) and not value)
        ):
            continue
        assert len(device.sources.get(field.name, "")) > 10, f"{name}.{field.name} has no source"


@pytest.mark.parametrize("device", [*TPUS.values(), *CPUS.values()], ids=lambda device: device.name)
def test_every_figure_of_a_tpu_or_cpu_names_its_source(device):
    fields = {field.name for field in dataclasses.fields(device)} - {"name", "sources"}
    assert fields == set(device.sources)


def test_a_cpu_has_few_threads_and_a_low_roof():
    socket, device = cpu("EPYC 9654"), gpu("H100")
    assert socket.threads == 192
    assert socket.peak_flops["fp32"] == pytest.approx(7.37e12, rel=0.001)
    assert device.sms * device.max_threads_per_sm > 1000 * socket.threads
    assert device.peak_flops["bf16"] > 100 * socket.peak_flops["fp32"]


@pytest.mark.parametrize("name", GPUS)
def test_the_fp32_rate_follows_from_cores_and_clock(name):
    device = GPUS[name]
    computed = device.sms * CORES[device.compute_capability] * 2 * device.clock_hz
    assert computed == pytest.approx(device.peak_flops["fp32"], rel=0.015)


@pytest.mark.parametrize("name", GPUS)
def test_a_narrower_format_is_never_slower_and_sparsity_doubles_the_rate(name):
    device = GPUS[name]
    order = [key for key in ("fp64", "fp32", "tf32", "fp16", "fp8", "fp4") if key in device.peak_flops]
    rates = [device.peak_flops[key] for key in order]
    assert rates == sorted(rates)
    if "bf16" in device.peak_flops:
        assert device.peak_flops["bf16"] == device.peak_flops["fp16"]
    for key, rate in device.peak_flops_sparse.items():
        assert rate == pytest.approx(2 * device.peak_flops[key], rel=0.002), key


@pytest.mark.parametrize("name", GPUS)
def test_the_limits_of_an_sm_fit_together(name):
    device = GPUS[name]
    assert device.max_threads_per_sm == 32 * device.max_warps_per_sm
    assert device.max_threads_per_block <= device.max_threads_per_sm
    reserved = device.reserved_shared_memory_per_block
    assert device.max_shared_memory_per_block + reserved <= device.shared_memory_per_sm
    assert device.shared_memory_per_sm % device.shared_memory_allocation_unit == 0
    if device.compute_capability >= (7, 0):  # shared memory is cut from the same array as L1
        assert device.shared_memory_per_sm <= device.l1_bytes_per_sm
    assert device.registers_per_sm * 4 == 256 * 1024
    assert device.l2_bytes < device.memory_bytes


def test_the_figures_that_the_course_quotes():
    h100, a100 = gpu("H100"), gpu("A100")
    assert (h100.sms, h100.peak_flops["bf16"], h100.memory_bandwidth) == (132, 989e12, 3.35e12)
    assert (a100.sms, a100.peak_flops["bf16"], a100.memory_bytes) == (108, 312e12, 80e9)
    assert dict(a100.latency_cycles) == {"global": 290, "l2": 200, "l1": 33, "shared_load": 23, "shared_store": 19}
    assert h100.latency_range("global") == (480, 690)
    assert a100.latency_range("global") == (290, 290)


def test_the_thousandfold_compares_unlike_formats():
    first, last = gpu("K20X"), gpu("H100")
    assert last.year - first.year == 10
    assert last.peak_flops_sparse["fp8"] / first.peak_flops["fp32"] > 1000
    assert last.peak_flops["fp32"] / first.peak_flops["fp32"] < 20


def test_generations_come_in_the_order_of_their_years():
    years = [device.year for device in GPUS.values()]
    assert years == sorted(years)
    assert {"P100", "V100", "T4", "A100", "L4", "H100", "H200", "B200"} <= set(GPUS)


def test_a_name_is_found_in_either_case():
    assert gpu("h100") is gpu(" H100 ") is GPUS["H100"]
    assert tpu("tpu v6e").peak_flops["bf16"] == pytest.approx(9.1e14, rel=0.01)


def test_an_unknown_gpu_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match=r"unknown GPU 'H1000'; known: .*A100.*H100"):
        gpu("H1000")
    with pytest.raises(ValueError, match="unknown TPU 'H100'"):
        tpu("H100")
    with pytest.raises(TypeError, match="got 100"):
        gpu(100)


def test_a_latency_that_nobody_published_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no latency of 'l3' is listed for A100 \(listed: global, l2"):
        gpu("A100").latency_range("l3")
    with pytest.raises(ValueError, match="listed: none"):
        gpu("T4").latency_range("global")


def test_the_table_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpu("H100").sms = 1
    with pytest.raises(TypeError):
        gpu("H100").peak_flops["bf16"] = 1.0
    with pytest.raises(TypeError):
        GPUS["H100"] = gpu("A100")
    assert dataclasses.replace(gpu("H100"), sms=144).sms == 144
    assert len({gpu("H100"), gpu("H100"), gpu("A100")}) == 2


@pytest.mark.parametrize(
    ("device_name", "memory", "sms", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0e9, 132, "H100"),
        ("NVIDIA H200", 150.1e9, 132, "H200"),
        ("NVIDIA A100-SXM4-80GB", 85.1e9, 108, "A100"),
        ("NVIDIA A100-SXM4-40GB", 42.3e9, 108, "A100-40GB"),
        ("Tesla T4", 15.8e9, 40, "T4"),
        ("Tesla V100-SXM2-16GB", 16.9e9, 80, "V100"),
        ("NVIDIA L4", 23.7e9, 58, "L4"),
        ("NVIDIA B200", 191.5e9, 148, "B200"),
        ("NVIDIA GeForce RTX 4090", 25.4e9, 128, "RTX 4090"),
        ("NVIDIA A10", 23.7e9, 72, "A10"),
        ("NVIDIA H100 PCIe", 85.0e9, 114, None),
        ("NVIDIA A100-PCIE-40GB", 42.3e9, 108, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17.0e9, 76, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10.5e9, 16, None),
        ("NVIDIA A10G", 23.7e9, 80, None),
        ("Radeon", 16e9, 60, None),
    ],
)
def test_a_live_device_is_matched_by_name_memory_and_sms(device_name, memory, sms, expected):
    found = hardware.match(device_name, memory, sms)
    assert (found and found.name) == expected


def test_this_gpu_is_none_without_a_device(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert this_gpu() is None


def test_this_gpu_reads_the_device_in_use(monkeypatch):
    import torch

    seen = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_017_493_504, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    assert this_gpu() is gpu("H100")


def test_a_device_without_a_name_is_refused_by_value():
    with pytest.raises(TypeError, match="device_name must be a string, as the driver gives it, got None"):
        hardware.match(None, 80e9, 132)
