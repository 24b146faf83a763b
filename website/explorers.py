"""Stages what the explorers compute with, from `utils`, and the answers that their pages give.

The explorers' formulas are written twice, here in Python and in ``static/explorers/formulas.js``; a test holds both
against each other. Figures (devices, models, formats, recipes) are written once: ``data.js`` is generated from `utils`.
The pages in ``pages/explorers`` ask questions; ``{{name}}`` in them stands for a figure, ``{{set:name}}`` for a link
that sets the explorer to what the question is about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from utils import roofline
from utils import transformer_math as tm
from utils.hardware import CPUS, GPUS, TPUS, gpu
from utils.operators import ELEMENT_SIZE
from utils.transformer_math import SERVED_MODELS, SHARDED_FROM, STAGES, memory
from utils.units import number, quantity

STATIC = "_static/explorers"
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


# ---- questions and answers ----

_FEW_ROWS, _PROMPT, _NEW = 16, 1792, 256
_FULL = tm.largest_batch(SERVED_MODELS["Llama 3 8B"], gpu("H100").memory_bytes, _PROMPT + _NEW)
_REQUESTS = {"gpu": "H100", "prompt": _PROMPT, "new": _NEW}
#: What the questions of the pages are about: settings of the explorers by name.
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "ridge": {"gpu": "H100", "op": "matmul", "dtype": "bf16", "m": 256, "k": 4096, "n": 4096},
    "scores": {"gpu": "H100", "op": "attention", "dtype": "bf16", "materialize": 1, "causal": 0},
    "newer": {"gpu": "H200", "op": "matmul", "dtype": "bf16", "m": _FEW_ROWS, "k": 4096, "n": 4096},
    "stages": {"model": "GPT-3 13B", "ranks": 8, "gpu": "H100", "stage": 1},
    "large": {"model": "GPT-3 175B", "ranks": 1024, "gpu": "H100", "stage": 2},
    "network": {"model": "own", "psi": "7.5e9", "ranks": 64, "gpu": "H100", "stage": 3, "link": "network"},
    "full": {"model": "Llama 3 8B", "batch": _FULL, **_REQUESTS},
    "eight": {"model": "Llama 3 8B", "batch": 1, **_REQUESTS, "weights": "int8"},
    "grouped": {"model": "Llama 2 7B", "batch": 16, **_REQUESTS},
}


def _product(device: str, rows: int) -> float:
    return roofline.time_bounds(roofline.matmul(rows, 4096, 4096), gpu(device)).overlapped


def _roofline_answers() -> dict[str, str]:
    h100, sizes = gpu("H100"), (4, 32, 4096, 128)
    textbook, flash = (roofline.attention(*sizes, materialize=each) for each in (True, False))
    slow, fast = (roofline.time_bounds(each, h100).overlapped for each in (textbook, flash))
    rows = roofline.crossover_batch(4096, 4096, h100)
    return {
        "ridge.rows": number(rows),
        "ridge.intensity": number(roofline.matmul(256, 4096, 4096).intensity, 4),
        "ridge.ridge": number(roofline.ridge(h100), 4),
        "scores.intensity": number(textbook.intensity, 3),
        "scores.flash": number(flash.intensity, 3),
        "scores.slow": quantity(slow, "s", 4),
        "scores.fast": quantity(fast, "s", 4),
        "scores.times": number(slow / fast, 2),
        "newer.few": number(_product("H100", _FEW_ROWS) / _product("H200", _FEW_ROWS), 3),
        "newer.many": number(_product("H100", 4096) / _product("H200", 4096), 3),
    }


def _memory_answers() -> dict[str, str]:
    h100, psi, ranks = gpu("H100"), 7_500_000_000, 64
    medium = tm.total_parameters(tm.MODELS["GPT-3 13B"])
    kept = [sum(tm.memory_per_rank(medium, 8, stage).values()) for stage in STAGES]
    fewest = [tm.fewest_ranks(medium, h100.memory_bytes, stage) for stage in STAGES]
    gpt3 = tm.total_parameters(tm.MODELS["GPT-3 175B"])
    peak = h100.peak_flops["bf16"]
    sent = 2 * sum(tm.communication_volume(psi, ranks, 3).values()) / NETWORK
    step = tm.rule_of_thumb(psi, 8192) / peak
    shares = 3 * (ranks - 1) / ranks
    hide = (tm.tokens_to_hide(peak, link, volume=shares) for link in (NETWORK, h100.link_bandwidth / 2))
    return {
        **{f"stages.kept{stage}": quantity(float(size), "B", 3) for stage, size in enumerate(kept)},
        **{f"stages.fewest{stage}": "no number" if n is None else number(n) for stage, n in enumerate(fewest)},
        "large.parameters": quantity(2.0 * gpt3, "B", 3),
        "large.fewest": number(tm.fewest_ranks(gpt3, h100.memory_bytes, 3)),
        "network.sent": quantity(sent, "s", 3),
        "network.step": quantity(step, "s", 3),
        **dict(zip(("network.tokens", "nvlink.tokens"), (number(each, 4) for each in hide), strict=True)),
    }


def _serving_answers() -> dict[str, str]:
    h100, llama, old = gpu("H100"), SERVED_MODELS["Llama 3 8B"], SERVED_MODELS["Llama 2 7B"]
    tokens, middle = _PROMPT + _NEW, _PROMPT + _NEW / 2
    alone, full = (tm.decode_bounds(llama, h100, batch, middle) for batch in (1, _FULL))
    eight = [tm.decode_bounds(llama, h100, batch, middle, weights="int8") for batch in (1, _FULL)]
    return {
        "full.batch": number(_FULL),
        "full.tpot": number(full.seconds / alone.seconds, 3),
        "full.rate": number(_FULL * alone.seconds / full.seconds, 3),
        "full.first": quantity(tm.prefill_bounds(llama, h100, _PROMPT, _FULL).seconds, "s", 3),
        "eight.alone": number(alone.seconds / eight[0].seconds, 3),
        "eight.full": number(full.seconds / eight[1].seconds, 3),
        "eight.batch": number(tm.largest_batch(llama, h100.memory_bytes, tokens, weights="int8")),
        "grouped.old": number(tm.largest_batch(old, h100.memory_bytes, tokens)),
        "grouped.bytes": quantity(float(old.kv_bytes_per_token()), "B", 3),
        "grouped.today": quantity(float(llama.kv_bytes_per_token()), "B", 3),
    }


def answers() -> dict[str, str]:
    """The figures in the pages' answers, by name, as text; computed from `utils`."""
    return _roofline_answers() | _memory_answers() | _serving_answers()


def setting(state: Mapping[str, object]) -> str:
    """The part of a page's address that sets its explorer: ``#gpu=H100&op=matmul``."""
    return f"#{urlencode({name: str(value) for name, value in state.items()})}"


def fill(text: str, shown: Mapping[str, str]) -> str:
    """A page with its figures and links put in; KeyError for a name that nobody computes."""

    def replace(found: re.Match[str]) -> str:
        if found[1]:
            address = setting(SETTINGS[found[2]]).replace("&", "&amp;")
            return f'<a class="mlf-try" href="{address}">Set the explorer to this</a>'
        return shown[found[2]]

    return re.sub(r"\{\{(set:)?([\w.]+)\}\}", replace, text)


def write(source: Path) -> None:
    """Stage the explorers' data and fill in their pages, which lie in ``source/explorers`` already."""
    target = source / STATIC / "data.js"
    target.parent.mkdir(parents=True, exist_ok=True)
    plain = json.dumps(data(), ensure_ascii=False, indent=1)
    target.write_text(f"/* Generated from utils by website/explorers.py. */\nglobalThis.MLF_DATA = {plain};\n", "utf-8")
    shown = answers()
    for page in sorted((source / "explorers").glob("*.md")):
        page.write_text(fill(page.read_text("utf-8"), shown), "utf-8")
