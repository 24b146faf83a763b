"""What each family of recorded measurements holds: the layout a record must have when it is saved and when it is read.

A layout is plain data. A dict names the keys that must be there (and no others), a list of one layout means a list of
at least one such item, ``{str: layout}`` a dict with any names, and the constants below say what a value may be.
:func:`check` walks a layout and a value together and says where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A finite number of at least ``least`` (above it when ``strict``); whole numbers only when ``whole``."""

    what: str
    least: float
    strict: bool = False
    whole: bool = False

    def problem(self, value: object) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"must be {self.what}, got {value!r}"
        if not math.isfinite(value) or (self.whole and not isinstance(value, int)):
            return f"must be {self.what}, got {value!r}"
        if value < self.least or (self.strict and value == self.least):
            return f"must be {self.what}, got {value!r}"
        return None


POSITIVE = Number("a positive finite number", 0, strict=True)
NOT_NEGATIVE = Number("a finite number that is not negative", 0)
NUMBER = Number("a finite number", -math.inf)
COUNT = Number("a whole number that is not negative", 0, whole=True)
SIZE = Number("a whole number of at least 1", 1, whole=True)
TEXT = str

#: A timing as ``utils.timing.Timing.as_dict`` gives it, in seconds.
TIMING = {"seconds": POSITIVE, "low": POSITIVE, "high": POSITIVE, "rounds": SIZE}
RATIO = {"ratio": POSITIVE, "ratio_low": POSITIVE, "ratio_high": POSITIVE}


def check(value: object, layout: object, where: str) -> list[str]:
    """What is wrong with ``value``, as sentences that begin with the place; empty when it has the layout.

    Args:
        value: Parsed JSON.
        layout: One of this module's layouts.
        where: The place's name, such as ``"results.copy[3].seconds"``.
    """
    if isinstance(layout, Number):
        problem = layout.problem(value)
        return [f"{where} {problem}"] if problem else []
    if layout is str:
        return [] if isinstance(value, str) and value else [f"{where} must be a text that is not empty, got {value!r}"]
    if layout is bool:
        return [] if isinstance(value, bool) else [f"{where} must be true or false, got {value!r}"]
    if isinstance(layout, list):
        if not isinstance(value, list) or not value:
            return [f"{where} must be a list of at least one item, got {_short(value)}"]
        return [p for i, item in enumerate(value) for p in check(item, layout[0], f"{where}[{i}]")]
    if not isinstance(value, Mapping):
        return [f"{where} must be an object, got {_short(value)}"]
    if set(layout) == {str}:
        return [p for key in value for p in check(value[key], layout[str], f"{where}.{key}")]
    problems = [f"{where}.{key} is not part of the layout" for key in value if key not in layout]
    for key, inner in layout.items():
        problems += check(value[key], inner, f"{where}.{key}") if key in value else [f"{where}.{key} is missing"]
    return problems


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_CYCLES = {"cycles": POSITIVE, "seconds": POSITIVE, "steps": SIZE}
_HISTOGRAM = {"working_set": SIZE, "bin_cycles": SIZE, "counts": [COUNT]}
_BANDWIDTH_POINT = {"working_set": SIZE, "bytes_per_second": POSITIVE, **TIMING, "bytes_per_cycle_per_sm": POSITIVE}
_OPERATOR = {
    "name": TEXT,
    "kind": TEXT,
    "dtype": TEXT,
    "params": {str: COUNT},
    "flops": COUNT,
    "bytes": SIZE,
    "intensity": NOT_NEGATIVE,
    **TIMING,
    "flops_per_second": NOT_NEGATIVE,
    "bytes_per_second": POSITIVE,
}
_CLASSES = {"contraction": NOT_NEGATIVE, "normalisation": NOT_NEGATIVE, "element-wise": NOT_NEGATIVE}
_SECTORS = {str: COUNT}
#: What a compiled kernel occupies: registers and spilled registers of a thread, shared memory of a program in bytes.
_RESOURCES = {"registers": COUNT, "spills": COUNT, "shared_bytes": COUNT}

_ATTENTION_SHAPE = {"batch": SIZE, "heads": SIZE, "seq_len": SIZE, "head_dim": SIZE, "causal": bool}
_ATTENTION = {
    "direction": TEXT,
    **_ATTENTION_SHAPE,
    "flops": SIZE,
    "calls_a_lap": SIZE,
    "timed": {str: {**TIMING, "flops_per_second": POSITIVE}},
    "ours_over": {str: RATIO},
}
#: An attention function with the card for itself.
_ALONE = {
    "name": TEXT,
    **_ATTENTION_SHAPE,
    "seconds": POSITIVE,
    "flops_per_second": POSITIVE,
    "clock_hz": POSITIVE,
    "watts": POSITIVE,
    "celsius": POSITIVE,
}
#: A point of the capstone: its dtype, and how its second mode compares.
_HOPPER = {"dtype": TEXT, **_ATTENTION, "fast_over": {str: RATIO}}
#: What a check of the capstone was tried on.
_TRIED = {"mode": TEXT, "dtype": TEXT, "shape": TEXT, "head_dim": SIZE, "causal": bool}
_ERROR = {"error": NOT_NEGATIVE, "torch_error": NOT_NEGATIVE, "allowed": NOT_NEGATIVE}

#: What a model of a parallel measurement is made of.
_GPT = dict.fromkeys(("parameters", "layers", "heads", "hidden", "vocabulary", "context"), SIZE)
#: Kind of collective -> calls of one step on rank 0, elements of their full tensors, bytes.
_COLLECTIVES = {str: {"calls": SIZE, "elements": COUNT, "bytes": COUNT}}
_SPAN = {"lane": TEXT, "phase": TEXT, "name": TEXT, "start": NOT_NEGATIVE, "end": POSITIVE, "kernels": SIZE}
#: Decode attention of a few sequences, in parts and in one.
_SPLIT = {
    "batch": SIZE,
    "context": SIZE,
    "bytes": SIZE,
    "splits": SIZE,
    "timed": {str: {**TIMING, "bytes_per_second": POSITIVE}},
    **RATIO,
}

#: A workload under one scheduler: its steps, and the mean share of the batch's places that were taken.
_SCHEDULED = {**TIMING, "tokens_per_second": POSITIVE, "steps": SIZE, "slots": POSITIVE}

#: Family -> layout of its results. Sizes are in bytes or elements, times in seconds, rates per second.
LAYOUTS: dict[str, object] = {
    "ceilings": {
        "copy": [{"bytes": SIZE, **TIMING, "bytes_per_second": POSITIVE}],
        "matmul": [{"dtype": TEXT, "n": SIZE, **TIMING, "flops_per_second": POSITIVE}],
        "unavailable": {str: TEXT},
        "launch": TIMING,
        "best": {"copy_bytes_per_second": POSITIVE, "matmul_flops_per_second": {str: POSITIVE}},
    },
    "latency": {
        "through_l1": [{"working_set": SIZE, **_CYCLES}],
        "past_l1": [{"working_set": SIZE, **_CYCLES}],
        "pages": [{"pages": SIZE, **_CYCLES}],
        "distribution": {"l1": _HISTOGRAM, "l2": _HISTOGRAM, "hbm": _HISTOGRAM},
        "one_line_from_each_sm": [POSITIVE],
        "by_index": {"shared_cycles": POSITIVE, "l1_cycles": POSITIVE},
        "shared": {
            "load_cycles": POSITIVE,
            "store_then_load_cycles": POSITIVE,
            "store_then_fence_cycles": POSITIVE,
            "fence_cycles": NOT_NEGATIVE,
        },
    },
    "bandwidth": {"through_l1": [_BANDWIDTH_POINT], "past_l1": [_BANDWIDTH_POINT], "shared": _BANDWIDTH_POINT},
    "access": {
        "points": [
            {
                "pattern": TEXT,
                "level": TEXT,
                "element_size": SIZE,
                "count": SIZE,
                "stride": SIZE,
                "offset": COUNT,
                **TIMING,
                "useful_bytes_per_second": POSITIVE,
                "sector_efficiency": POSITIVE,
            }
        ]
    },
    "operators": {"points": [_OPERATOR], "held_out": [_OPERATOR]},
    "matmul_sweep": {
        "dtype": TEXT,
        "cublas": [
            {"n": SIZE, **TIMING, "flops_per_second": POSITIVE, "kernel": TEXT, "grid": [SIZE], "launches": SIZE}
        ],
        "fixed_tile": [
            {
                "tile": [SIZE],
                "k": SIZE,
                "points": [{"n": SIZE, "tiles": SIZE, **TIMING, "flops_per_second": POSITIVE}],
            }
        ],
    },
    "alignment": {
        "dtype": TEXT,
        "base": SIZE,
        "points": [
            {
                "axis": TEXT,
                "divisor": SIZE,
                "m": SIZE,
                "k": SIZE,
                "n": SIZE,
                **TIMING,
                "flops_per_second": POSITIVE,
                **RATIO,
                "kernel": TEXT,
            }
        ],
    },
    "vocabulary": {
        "dtype": TEXT,
        "sizes": [SIZE],
        "points": [
            {
                "tokens": SIZE,
                "hidden": SIZE,
                "pass": TEXT,
                "times": [{"vocabulary": SIZE, **TIMING, "flops_per_second": POSITIVE, "kernels": [TEXT]}],
                **RATIO,
            }
        ],
    },
    "operator_classes": {
        "shape": {"batch": SIZE, "seq_len": SIZE, "hidden": SIZE, "heads": SIZE},
        "dtype": TEXT,
        "variants": {
            str: {
                "classes": _CLASSES,
                "shares": _CLASSES,
                "kernel_seconds": POSITIVE,
                "step": TIMING,
                "step_launched": TIMING,
                "kernels": [{"name": TEXT, "class": TEXT, "calls": SIZE, "seconds": POSITIVE}],
            }
        },
    },
    "tuning": {
        "dtype": TEXT,
        "matmul": [
            {
                "name": TEXT,
                "m": SIZE,
                "n": SIZE,
                "k": SIZE,
                "points": [{"tile": [SIZE], **_RESOURCES, **TIMING, "flops_per_second": POSITIVE}],
                "refused": {str: TEXT},
            }
        ],
        "softmax": [
            {"rows": SIZE, "columns": SIZE, "warps": SIZE, **_RESOURCES, **TIMING, "bytes_per_second": POSITIVE}
        ],
        "gelu": [{"block": SIZE, "warps": SIZE, **_RESOURCES, **TIMING, "bytes_per_second": POSITIVE}],
    },
    "tile_order": {
        "dtype": TEXT,
        "tile": [SIZE],
        "points": [
            {
                "n": SIZE,
                "group": SIZE,
                "dram_sectors_read": COUNT,
                "l2_sectors_read": COUNT,
                "l1_sectors_received": COUNT,
                **TIMING,
                "flops_per_second": POSITIVE,
            }
        ],
    },
    "weight_gradient": {
        "dtype": TEXT,
        "points": [
            {
                "rows": SIZE,
                "columns": SIZE,
                "method": TEXT,
                "rows_per_program": SIZE,
                "programs_per_element": SIZE,
                **TIMING,
                "bytes_per_second": POSITIVE,
                "repeats": SIZE,
                "distinct_results": SIZE,
            }
        ],
    },
    "profiler_truth": {"kernels": [{"name": TEXT, "size": TEXT, "counted": _SECTORS, "measured": _SECTORS}]},
    # ---- lab 2 ----
    "fused_operators": {
        "dtype": TEXT,
        "elements": SIZE,
        "points": [
            {
                "name": TEXT,
                "direction": TEXT,
                "shape": [SIZE],
                "bytes": SIZE,
                "timed": {str: {**TIMING, "bytes_per_second": POSITIVE}},
                "of_copy": RATIO,
                "of_peer": {str: RATIO},
            }
        ],
    },
    "gemm": {
        "dtype": TEXT,
        "points": [
            {
                "n": SIZE,
                "layout": TEXT,
                "timed": {str: {**TIMING, "flops_per_second": POSITIVE}},
                "of_cublas": RATIO,
            }
        ],
    },
    "kernel_errors": {
        "factor": POSITIVE,
        "points": [
            {
                "operator": TEXT,
                "dtype": TEXT,
                "shapes": TEXT,
                "strides": TEXT,
                **_ERROR,
            }
        ],
        "large": [{"operator": TEXT, "elements": SIZE, **_ERROR}],
    },
    "attention_errors": {
        "factor": POSITIVE,
        "points": [
            {
                "dtype": TEXT,
                "shape": TEXT,
                "head_dim": SIZE,
                "causal": bool,
                "layout": TEXT,
                "scale": TEXT,
                "outputs": {"o": _ERROR, "lse": _ERROR, "dq": _ERROR, "dk": _ERROR, "dv": _ERROR},
            }
        ],
    },
    # ---- notebook 03 ----
    "number_formats": {
        "element_wise": [{"dtype": TEXT, "bytes": SIZE, **TIMING, "bytes_per_second": POSITIVE, **RATIO}],
        "n": SIZE,
        "products": [{"format": TEXT, **TIMING, "flops_per_second": POSITIVE, **RATIO, "error": POSITIVE}],
        "unavailable": {str: TEXT},
        "shape": {"batch": SIZE, "seq_len": SIZE, "hidden": SIZE, "heads": SIZE},
        "step": [{"format": TEXT, **TIMING, **RATIO}],
    },
    "chains": {
        "dtype": TEXT,
        "elements": SIZE,
        "fused": [{"operations": SIZE, **TIMING}],
        "eager": [{"operations": SIZE, **TIMING}],
        "relu_of_sum": [{"name": TEXT, "kernels": SIZE, **TIMING, **RATIO}],
        "sin2_cos2": [{"name": TEXT, "kernels": SIZE, **TIMING, **RATIO}],
    },
    "gelu_five_ways": {
        "dtype": TEXT,
        "elements": SIZE,
        "ways": [
            {
                "name": TEXT,
                "kernels": SIZE,
                "longest": TEXT,
                "kernel_seconds": POSITIVE,
                "bytes": SIZE,
                **TIMING,
                "bytes_per_second": POSITIVE,
                **RATIO,
            }
        ],
        "unavailable": {str: TEXT},
    },
    "checkpointing": {
        "dtype": TEXT,
        "shape": {"batch": SIZE, "seq_len": SIZE, "hidden": SIZE, "heads": SIZE, "layers": SIZE},
        "input_bytes": SIZE,
        "layer_bytes": SIZE,
        "variants": [{"segment": COUNT, "peak_bytes": SIZE, **TIMING, **RATIO}],
    },
    "recomputation": {
        "dtype": TEXT,
        "elements": SIZE,
        "variants": [
            {"name": TEXT, "accesses": SIZE, "kernels": SIZE, **TIMING, "bytes_per_second": POSITIVE, **RATIO}
        ],
    },
    "tiling": {
        "matmul": [
            {
                "kernel": TEXT,
                "dtype": TEXT,
                "n": SIZE,
                "tile": COUNT,
                "bytes_loaded": COUNT,
                **TIMING,
                "flops_per_second": POSITIVE,
            }
        ],
        "transpose": [{"kernel": TEXT, "n": SIZE, **TIMING, "bytes_per_second": POSITIVE, **RATIO}],
    },
    # ---- notebook 07 ----
    "attention_speed": {
        "dtype": TEXT,
        "points": [_ATTENTION],
        "long": _ATTENTION,
        "alone": [_ALONE],
        "unavailable": {str: TEXT},
    },
    "attention_tutorial": {
        "dtype": TEXT,
        "sha256": TEXT,
        "farthest": NOT_NEGATIVE,
        "points": [_ATTENTION],
        "left_out": {str: TEXT},
    },
    "attention_determinism": {
        "dtype": TEXT,
        "points": [
            {
                **_ATTENTION_SHAPE,
                "way": TEXT,
                **TIMING,
                "flops_per_second": POSITIVE,
                **RATIO,
                "repeats": SIZE,
                "distinct_dq": SIZE,
                "distinct_dk_dv": SIZE,
                "elements": SIZE,
                "elements_differ": COUNT,
                "largest_difference": NOT_NEGATIVE,
                "from_second_pass": NOT_NEGATIVE,
            }
        ],
    },
    # ---- notebook 06 ----
    "attention_memory": {
        "dtype": TEXT,
        "shape": {"batch": SIZE, "heads": SIZE, "head_dim": SIZE},
        "memory": [{"way": TEXT, "pass": TEXT, "seq_len": SIZE, "peak_bytes": SIZE}],
        "times": [{"way": TEXT, "pass": TEXT, "seq_len": SIZE, **TIMING, "flops_per_second": POSITIVE}],
        "refused": {str: TEXT},
        "published": {
            "shape": {"batch": SIZE, "heads": SIZE, "seq_len": SIZE, "head_dim": SIZE},
            "dtype": TEXT,
            "ways": [{"name": TEXT, "peak_bytes": SIZE, "flops": SIZE, **TIMING, **RATIO}],
        },
    },
    "attention_anchor": {
        "dtype": TEXT,
        "first_keys": SIZE,
        "growth": POSITIVE,
        "points": [
            {
                **_ATTENTION_SHAPE,
                "flops": SIZE,
                "calls_a_lap": SIZE,
                "timed": {str: {**TIMING, "flops_per_second": POSITIVE}},
                "anchored_over": {str: RATIO},
            }
        ],
        "alone": [_ALONE],
        "unavailable": {str: TEXT},
    },
    "attention_blocks": {
        "dtype": TEXT,
        "shapes": [{"batch": SIZE, "heads": SIZE, "seq_len": SIZE, "head_dim": SIZE}],
        "points": [
            {
                "head_dim": SIZE,
                "tile": [SIZE],
                **_RESOURCES,
                **TIMING,
                "flops_per_second": POSITIVE,
                "chosen": bool,
            }
        ],
        "refused": {str: TEXT},
    },
    "attention_stability": {
        "heads": SIZE,
        "head_dim": SIZE,
        "points": [
            {
                "inputs": TEXT,
                "dtype": TEXT,
                "seq_len": SIZE,
                "method": TEXT,
                "softmax": TEXT,
                "tile": COUNT,
                "rms": POSITIVE,
                "largest": POSITIVE,
            }
        ],
        "rounded_result": [{"inputs": TEXT, "dtype": TEXT, "seq_len": SIZE, "rms": POSITIVE}],
    },
    "attention_traffic": {
        "dtype": TEXT,
        "cases": [
            {
                "name": TEXT,
                "size": TEXT,
                "tile": [SIZE],
                "formula": {"q": SIZE, "k": SIZE, "v": SIZE, "o": SIZE, "lse": SIZE, "flops": SIZE},
                "counted": _SECTORS,
                "measured": _SECTORS,
            }
        ],
        "large_shape": {"batch": SIZE, "heads": SIZE, "seq_len": SIZE, "head_dim": SIZE},
        "large": [
            {
                "name": TEXT,
                "kernels": SIZE,
                "formula_bytes": SIZE,
                "sm_bytes_read": COUNT,
                "sm_bytes_written": COUNT,
                "hbm_bytes_read": COUNT,
                "hbm_bytes_written": COUNT,
            }
        ],
    },
    # ---- parallel training (notebooks 08 and 09) ----
    "parallel_training": {
        "dtype": TEXT,
        "model": _GPT,
        "rows": SIZE,
        "shallow_layers": SIZE,
        "points": [
            {
                "world_size": SIZE,
                "activations_bytes": SIZE,
                "methods": [
                    {
                        "name": TEXT,
                        "stage": COUNT,
                        **TIMING,
                        "formula_bytes": SIZE,
                        "peak_bytes": SIZE,
                        "memory_ratio": POSITIVE,
                        "peak_dropped_bytes": SIZE,
                        "collectives": _COLLECTIVES,
                        "sent_elements": NOT_NEGATIVE,
                        "formula_elements": NOT_NEGATIVE,
                    }
                ],
                "ratios": {str: RATIO},
                "overlap": {str: TIMING},
                "timelines": {str: [_SPAN]},
            }
        ],
    },
    "model_parallel": {
        "dtype": TEXT,
        "model": _GPT,
        "rows": SIZE,
        "points": [
            {
                "world_size": SIZE,
                "tensor": SIZE,
                "data": SIZE,
                "pipeline": SIZE,
                "schedule": TEXT,
                "micro_batches": SIZE,
                **TIMING,
                "tokens_per_second": POSITIVE,
                **RATIO,
                "parameters": [SIZE],
                "peak_bytes": [SIZE],
                "in_flight": [SIZE],
                "sent_elements": [NOT_NEGATIVE],
                "collectives": _COLLECTIVES,
            }
        ],
    },
    "decoding": {
        "dtype": TEXT,
        "model": {"name": TEXT, "parameters": SIZE, "layers": SIZE, "cache_bytes_per_token": SIZE},
        "contexts": [{"context": SIZE, "cached": TIMING, "recomputed": TIMING, **RATIO}],
        "steps": [
            {
                "batch": SIZE,
                "context": SIZE,
                "flops": SIZE,
                "bytes": SIZE,
                **TIMING,
                "bytes_per_second": POSITIVE,
                "tokens_per_second": POSITIVE,
            }
        ],
        "launched": {"batch": SIZE, "context": SIZE, **TIMING},
    },
    "collectives": {
        "dtype": TEXT,
        "points": [
            {
                "world_size": SIZE,
                "kind": TEXT,
                "bytes": SIZE,
                "sent_bytes": POSITIVE,
                "calls_a_lap": SIZE,
                "timed": {str: {**TIMING, "bus_bytes_per_second": POSITIVE}},
                **RATIO,
            }
        ],
    },
    # ---- notebook 11 ----
    "serving_throughput": {
        "dtype": TEXT,
        "model": {"parameters": SIZE, "layers": SIZE, "cache_bytes_per_token": SIZE},
        "requests": SIZE,
        "prompt_tokens": SIZE,
        "output_tokens": SIZE,
        "token_budget": SIZE,
        "blocks": SIZE,
        "block_size": SIZE,
        "logits": dict.fromkeys(("prefill_error", "decode_error", "torch_error", "allowed"), NOT_NEGATIVE),
        "tokens": {"checked": SIZE, "equal": COUNT, "largest_gap": NOT_NEGATIVE},
        "ours": {**TIMING, "tokens_per_second": POSITIVE},
        "bytes": SIZE,
        "bandwidth": {"peak": POSITIVE, "copy": POSITIVE},
        "bound_seconds": {"peak": POSITIVE, "copy": POSITIVE},
        "of_bound": {"peak": POSITIVE, "copy": POSITIVE},
        "decode": {"steps": SIZE, "seconds": POSITIVE, "bytes_per_second": POSITIVE},
        "mixed": {"steps": SIZE, "seconds": POSITIVE},
        "steps": [{"sequences": SIZE, "tokens": SIZE, "seconds": POSITIVE, "bytes": SIZE}],
        "theirs": {"version": TEXT, **TIMING, "tokens_per_second": POSITIVE, "same_first_token": COUNT, **RATIO},
        "kernels": {
            "launches": SIZE,
            "seconds": {str: POSITIVE},
            "longest": [{"name": TEXT, "launches": SIZE, "seconds": POSITIVE}],
        },
    },
    "batching": {
        "dtype": TEXT,
        "requests": SIZE,
        "max_batch": SIZE,
        "token_budget": SIZE,
        "prompts": [SIZE],
        "spreads": [
            {
                "name": TEXT,
                "mean": POSITIVE,
                "variation": NOT_NEGATIVE,
                "longest": SIZE,
                "output_tokens": SIZE,
                "continuous": _SCHEDULED,
                "static": _SCHEDULED,
                **RATIO,
                "steps_ratio": POSITIVE,
            }
        ],
        "capacity": POSITIVE,
        "loads": [
            {
                "share": POSITIVE,
                "rate": POSITIVE,
                "duration": POSITIVE,
                "request_rate": POSITIVE,
                "tokens_per_second": POSITIVE,
                "slots": POSITIVE,
                "ttft": {str: POSITIVE},
                "tpot": {str: POSITIVE},
                "latency": {str: POSITIVE},
            }
        ],
    },
    # ---- notebook 12 ----
    "paged_attention": {
        "dtype": TEXT,
        "shape": {"heads": SIZE, "kv_heads": SIZE, "head_dim": SIZE, "block_size": SIZE},
        "batched": {
            "batch": SIZE,
            "context": SIZE,
            "bytes": SIZE,
            "splits": SIZE,
            "timed": {str: {**TIMING, "bytes_per_second": POSITIVE}},
            "of_copy": RATIO,
            "over_gathered": RATIO,
        },
        "long": _SPLIT,
        "points": [_SPLIT],
        "by_splits": [{"splits": SIZE, **TIMING, "bytes_per_second": POSITIVE}],
    },
    # ---- notebook 13 ----
    "speculation": {
        "dtype": TEXT,
        "target": {"parameters": SIZE, "layers": SIZE},
        "draft": {"parameters": SIZE, "layers": SIZE},
        "prompt_tokens": SIZE,
        "sequences": SIZE,
        "acceptance": {
            str: [
                {"draft_tokens": COUNT, "rounds": SIZE, "tokens_per_round": POSITIVE, "accepted": {str: NOT_NEGATIVE}}
            ]
        },
        "timed_way": TEXT,
        "rounds": [{"batch": SIZE, "draft_tokens": COUNT, **TIMING, "tokens_per_second": POSITIVE, **RATIO}],
        "context": SIZE,
        "passes": [{"model": TEXT, "parameters": SIZE, "batch": SIZE, "tokens": SIZE, **TIMING}],
    },
    # ---- notebook 14 ----
    "hopper_attention": {
        "points": [_HOPPER],
        "long": [_HOPPER],
        "lap_seconds": {str: NOT_NEGATIVE},
        "unavailable": {str: TEXT},
    },
    "hopper_limits": {
        "kernels": [
            {
                "pass": TEXT,
                "head_dim": SIZE,
                "causal": bool,
                "registers": SIZE,
                "spilled_bytes": COUNT,
                "shared_bytes": SIZE,
                "warpgroups": SIZE,
                "consumer_registers": SIZE,
            }
        ],
        "alone": [_ALONE],
    },
    "attention_steps": {
        "dtype": TEXT,
        "steps": [
            {
                "number": SIZE,
                "name": TEXT,
                "kind": TEXT,
                "changes": TEXT,
                "kernels": [
                    {
                        "head_dim": SIZE,
                        "causal": bool,
                        "registers": SIZE,
                        "spilled_bytes": COUNT,
                        "shared_bytes": SIZE,
                    }
                ],
            }
        ],
        "checks": [
            {
                "name": TEXT,
                "head_dim": SIZE,
                "causal": bool,
                "largest_error": NOT_NEGATIVE,
                "allowed": NOT_NEGATIVE,
                "largest_lse_error": NOT_NEGATIVE,
            }
        ],
        "points": [
            {
                **_ATTENTION_SHAPE,
                "flops": SIZE,
                "calls_a_lap": SIZE,
                "timed": {str: {**TIMING, "flops_per_second": POSITIVE}},
                "over_cudnn": {str: RATIO},
            }
        ],
        "traces": [
            {
                "name": TEXT,
                **_ATTENTION_SHAPE,
                "program": COUNT,
                "cost": POSITIVE,
                "events": {str: {str: [NOT_NEGATIVE]}},
            }
        ],
    },
    "hopper_errors": {
        "factor": POSITIVE,
        "points": [
            {
                **_TRIED,
                "layout": TEXT,
                "scale": TEXT,
                "outputs": {"o": _ERROR, "lse": _ERROR, "dq": _ERROR, "dk": _ERROR, "dv": _ERROR},
            }
        ],
        "poisoned": [{**_TRIED, "elements": SIZE, "bad": COUNT}],
        "repeats": [
            {**_TRIED, "runs": SIZE, "differ": {"o": COUNT, "lse": COUNT, "dq": COUNT, "dk": COUNT, "dv": COUNT}}
        ],
        "sanitizer": {str: {"status": COUNT, "summary": TEXT, "cases": COUNT, "races": COUNT}},
        "beside": {str: COUNT},
    },
}
