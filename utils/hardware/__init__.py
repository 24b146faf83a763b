"""One table of GPUs, TPUs and a CPU: every hardware figure in the course comes from here, with its source.

``gpu("H100").memory_bandwidth`` is 3.35e12 bytes/s, and ``gpu("H100").sources["memory_bandwidth"]`` says who says so.
"""

from __future__ import annotations

from utils.hardware.device import CPU, GPU, TPU
from utils.hardware.table import CPUS, GPUS, TPUS


def _look_up(name: str, table, kind: str):
    if not isinstance(name, str):
        raise TypeError(f"the name of a {kind} is a string such as {next(iter(table))!r}, got {name!r}")
    wanted = name.strip().lower()
    for known, device in table.items():
        if known.lower() == wanted:
            return device
    raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(table)}")


def gpu(name: str) -> GPU:
    """The GPU called ``name`` (upper or lower case); ``"A100"`` is the SXM model with 80 GB, ``"A100-40GB"`` the first.

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: the name is not in the table; the message lists those that are.
    """
    return _look_up(name, GPUS, "GPU")


def tpu(name: str) -> TPU:
    """The TPU called ``name``, such as ``"TPU v5e"``; errors as in :func:`gpu`."""
    return _look_up(name, TPUS, "TPU")


def cpu(name: str) -> CPU:
    """The CPU called ``name``, such as ``"EPYC 9654"``; errors as in :func:`gpu`."""
    return _look_up(name, CPUS, "CPU")


def match(device_name: str, memory_bytes: float, sms: int) -> GPU | None:
    """The entry for a device that its driver calls ``device_name``, or None when no entry describes it.

    Name, SMs and memory (within 15%) must all agree: a PCIe card, a laptop's GPU or a slice of a GPU is another device
    than the one whose name it bears.

    Raises:
        TypeError: ``device_name`` is not a string.
    """
    if not isinstance(device_name, str):
        raise TypeError(f"device_name must be a string, as the driver gives it, got {device_name!r}")
    words = _words(device_name)
    for device in GPUS.values():
        same_name = _words(device.name) <= words and ("PCIE" in words) <= ("PCIE" in _words(device.full_name))
        same_memory = abs(memory_bytes - device.memory_bytes) <= 0.15 * device.memory_bytes
        if same_name and same_memory and sms == device.sms:
            return device
    return None


def _words(name: str) -> set[str]:
    return set(name.upper().replace("-", " ").split())


def this_gpu() -> GPU | None:
    """The entry for the CUDA device in use, or None without one or when the table does not know it."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return match(properties.name, properties.total_memory, properties.multi_processor_count)
