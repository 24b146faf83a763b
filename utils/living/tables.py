"""What the living figures compute with, from `utils`: devices, models, formats, recipes and operators, with sources.

Each number is written once, in `utils`; pages and notebooks get it from here as plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from utils.hardware import CPUS, GPUS, TPUS
from utils.living.kernels import recorded
from utils.operators import ELEMENT_SIZE
from utils.transformer_math import SERVED_MODELS, SHARDED_FROM, STAGES, memory

NETWORK = 400e9 / 8  # bytes/s of one 400 Gb/s card for each GPU, one way

#: The sources of figures that an explorer shows, by their names in `utils` and on the page.
_SOURCES = {
    "peakFlops": ("peak_flops", "flops_per_core_cycle"),
    "memoryBandwidth": ("memory_bandwidth",),
    "memoryBytes": ("memory_bytes",),
    "linkBandwidth": ("link_bandwidth",),
    "pcieBandwidth": ("pcie_bandwidth",),
}

_RECIPES = {
    "mixed_adam": ("MIXED_ADAM", "16-bit weights and gradients, Adam in fp32"),
    "bf16_moments": ("BF16_MOMENTS", "16-bit weights, gradients and moments, fp32 masters"),
    "fp32_gradients": ("FP32_GRADIENTS", "16-bit weights, gradients and Adam in fp32"),
    "fp32_adam": ("FP32_ADAM", "everything in fp32, Adam"),
    "pure_bf16": ("PURE_BF16", "everything in bf16, Adam"),
    "mixed_momentum": ("MIXED_MOMENTUM", "16-bit weights and gradients, momentum only"),
}

_STAGE_NAMES = ("0: plain data parallelism", "1: optimizer divided", "2: and gradients", "3: and parameters")


def _size(name: str, label: str, initial: int, hint: str = "", least: int = 1, most: float = 1e9) -> dict[str, Any]:
    return {"id": name, "label": label, "initial": str(initial), "hint": hint, "least": least, "most": most}


def _flag(name: str, label: str, initial: bool) -> dict[str, Any]:
    return {"id": name, "label": label, "initial": "1" if initial else "0", "flag": True}


_ELEMENTS = _size("elements", "Elements n", 2**24, most=1e15) | {"argument": "n"}
_ROWS = [_size("rows", "Rows", 16384), _size("cols", "Columns", 4096)]

#: Operators of `utils.operators`: what the page calls them, what is counted, the sizes in the order of their arguments.
OPERATORS: Mapping[str, dict[str, Any]] = {
    "matmul": {
        "label": "matrix product (m, k) × (k, n)", "name": "the product",
        "counts": "2 m k n FLOP; (m k + k n + m n) e B",
        "sizes": [_size("m", "Rows m", 4096), _size("k", "Inner k", 4096), _size("n", "Columns n", 4096)],
    },
    "attention": {
        "label": "attention, forward", "name": "attention",
        "counts": "(4 D + 5) FLOP a pair; Q, K, V, O once, and the scores where they are written",
        "sizes": [
            _size("batch", "Batch B", 4), _size("heads", "Heads H", 32), _size("seq_len", "Queries N", 4096),
            _size("head_dim", "Head dimension D", 128), _size("kv_heads", "Heads of keys G", 32, "must divide H"),
            _size("kv_len", "Keys", 4096), _flag("causal", "causal mask", False),
            _flag("materialize", "scores written to memory", False),
        ],
    },
    "softmax": {"label": "softmax of rows", "name": "softmax", "counts": "4 FLOP an element; 2 e B", "sizes": _ROWS},
    "layer_norm": {
        "label": "LayerNorm", "name": "LayerNorm", "counts": "7 FLOP an element; 2 e B, weight, bias",
        "sizes": _ROWS,
    },
    "gelu": {"label": "GeLU", "name": "GeLU", "counts": "9 FLOP an element; 2 e B", "sizes": [_ELEMENTS]},
    "relu": {"label": "ReLU", "name": "ReLU", "counts": "1 FLOP an element; 2 e B", "sizes": [_ELEMENTS]},
    "add": {"label": "addition", "name": "addition", "counts": "1 FLOP an element; 3 e B", "sizes": [_ELEMENTS]},
    "copy": {"label": "copy", "name": "a copy", "counts": "no FLOP; 2 e B an element", "sizes": [_ELEMENTS]},
    "dot_product": {
        "label": "dot product", "name": "the dot product", "counts": "2 n FLOP; (2 n + 1) e B", "sizes": [_ELEMENTS],
    },
    "elementwise": {
        "label": "element-wise, of your own", "name": "your operator", "counts": "as you say",
        "sizes": [
            _ELEMENTS, _size("flops_per_element", "FLOPs an element", 10, least=0),
            _size("inputs", "Tensors read", 2, least=0, most=1000), _size("outputs", "Tensors written", 1, most=1000),
        ],
    },
}  # fmt: skip


def _device(device: Any, kind: str) -> dict[str, Any]:
    """A device's figures as the page needs them; what it does not have is absent."""
    names = {"memoryBytes": "memory_bytes", "linkBandwidth": "link_bandwidth", "pcieBandwidth": "pcie_bandwidth"}
    memory_bytes = getattr(device, "memory_bytes", None)
    found = {
        "name": device.name,
        "label": f"{device.name}, {memory_bytes / 1e9:g} GB" if memory_bytes else device.name,
        "fullName": getattr(device, "full_name", device.name),
        "kind": kind,
        "group": {"GPU": "GPUs", "TPU": "TPUs, one chip", "CPU": "CPUs, one socket"}[kind],
        "memoryBandwidth": device.memory_bandwidth,
        **(
            {"sharedMemory": device.max_shared_memory_per_block, "registers": 4 * device.registers_per_sm}
            if kind == "GPU"
            else {}
        ),
        "peakFlops": dict(device.peak_flops),
        **{name: value for name, field in names.items() if (value := getattr(device, field, None)) is not None},
    }
    known = {name: [device.sources[f] for f in fields if f in device.sources] for name, fields in _SOURCES.items()}
    return found | {"sources": {name: texts[0] for name, texts in known.items() if texts}}


def _models() -> dict[str, dict[str, Any]]:
    papers = {"GPT-2": "Radford et al. 2019; weights as released", "GPT-3": "Brown et al. 2020, table 2.1"}
    released = "the released config.json; weights counted matrix by matrix in utils/transformer_math"
    return {
        name: vars(model) | {"source": next((text for key, text in papers.items() if name.startswith(key)), released)}
        for name, model in SERVED_MODELS.items()
    }


def _precisions() -> dict[str, dict[str, Any]]:
    found = {}
    for key, (constant, label) in _RECIPES.items():
        precision: memory.Precision = getattr(memory, constant)
        source = f"utils.transformer_math.{constant}; Rajbhandari et al. 2020, section 3.1, counts in the same way"
        found[key] = {"label": f"{label}: {precision.total} B", "bytes": precision.components(), "source": source}
    return found


def data() -> dict[str, Any]:
    """Everything that the explorers compute with, as plain data; each figure is that of `utils`."""
    devices = [(each, kind) for table, kind in ((GPUS, "GPU"), (TPUS, "TPU"), (CPUS, "CPU")) for each in table.values()]
    return {
        "elementSize": dict(ELEMENT_SIZE),
        "shardedFrom": dict(SHARDED_FROM),
        "stages": {str(stage): _STAGE_NAMES[stage] for stage in STAGES},
        "devices": {each.name: _device(each, kind) for each, kind in devices},
        "models": _models(),
        "precisions": _precisions(),
        "operators": OPERATORS,
        "kernels": recorded(),
        "links": {
            "nvlink": {"label": "NVLink", "name": "NVLink", "of": "linkBandwidth"},
            "pcie": {"label": "PCIe", "name": "PCIe of its own", "of": "pcieBandwidth"},
            "network": {
                "label": "a network card, 400 Gb/s", "bandwidth": NETWORK,
                "source": "one 400 Gb/s card for each GPU, as in lecture 08, section 9",
            },
            "own": {"label": "of my own speed"},
        },
    }  # fmt: skip
