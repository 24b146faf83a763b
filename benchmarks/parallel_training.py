"""Training a GPT of 1.4 billion parameters on 2 and 4 GPUs: step times beside PyTorch's, memory, and what is sent.

Each rank trains on 8 rows of 1024 tokens in bf16 with fp32 master weights and AdamW. Everything is measured in one run:

- time of a step by interleaved rounds of ours and PyTorch's (``ratios``: ours over PyTorch's; each round as long as on
  the slowest rank);
- the peak of allocated memory beside its prediction: the formula of each stage plus the activations, which are measured
  on the plain model. The formula's gradients are there while activations are largest only if they are kept, as when
  they are accumulated over micro-batches: so here ``zero_grad`` fills them with zeros. (``peak_dropped_bytes``: with
  gradients that ``zero_grad`` lets go of.)
- the collectives of one step by the log, beside the formulas' 2, 2, 2 and 3 Psi (N - 1) / N elements;
- what DDP's overlap hides: steps whose all-reduces follow the backward pass, steps without any, the all-reduces alone;
- a timeline of one step of a shallower model, from PyTorch's profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from benchmarks import benchmark_cli, overlap, ranks
from benchmarks import data_parallel_methods as methods
from utils import distributed, gpt, timing
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each
from utils.transformer_math import communication_volume, memory_per_rank

CONFIG = gpt.GPT_1_4B
#: Few blocks, so that one step is few enough kernels to look at.
SHALLOW = CONFIG.replace(layers=4)
ROWS = 8
WARMUP, ROUNDS = 3, 10
OVERLAP_ROUNDS = 6
#: Methods whose step is also shown as a timeline.
TIMELINES = ("ddp", "zero3")

Results = dict[str, Any]


def on_rank(
    config: gpt.GPTConfig, shallow: gpt.GPTConfig, rows: int, warmup: int, rounds: int, overlap_rounds: int
) -> Results:
    """Everything that one rank measures."""
    ranks.settle()
    device, rank = distributed.device(), dist.get_rank()
    tokens, targets = gpt.batch(config, rows, seed=rank, device=device)
    found: Results = {"activations": methods.activations(config, device, tokens, targets)}
    ranks.note(f"activations: {found['activations'] / 1e9:.2f} GB")
    found |= {"methods": {}, "samples": {}, "timelines": {}}
    for together in methods.TOGETHER:
        built: dict[str, methods.Method] = {}
        steps: dict[str, Callable[[], None]] = {}
        for name in together:
            built[name], found["methods"][name] = account(methods.METHODS[name][1], config, tokens, targets)
            ranks.note(f"{name}: peak {found['methods'][name]['peak'] / 1e9:.2f} GB")
            steps[name] = lambda method=built[name]: method.step(tokens, targets)
        if "ddp" in built:
            more = methods.overlap_steps(built["ddp"], tokens, targets)
            found["overlap"] = ranks.compare({"ddp": steps["ddp"], **more}, warmup=1, rounds=overlap_rounds)
        found["samples"] |= ranks.compare(steps, warmup=warmup, rounds=rounds)
        built, steps, more = {}, {}, {}
        ranks.release()
    for name in TIMELINES if device.type == "cuda" else ():
        method = methods.METHODS[name][1](shallow, device)
        method.step(tokens, targets)
        found["timelines"][name] = overlap.timeline(lambda method=method: method.step(tokens, targets))
        ranks.note(f"{name}: timeline of {len(found['timelines'][name])} spans")
        del method
        ranks.release()
    return found


def account(
    build: Callable[..., methods.Method], config: gpt.GPTConfig, tokens: Any, targets: Any
) -> tuple[methods.Method, Results]:
    """Build a method; its peak memory beyond what was there before, and the collectives of one step."""
    base = ranks.allocated()
    method = build(config, tokens.device)

    def kept() -> None:
        method.step(tokens, targets, keep=True)

    def dropped() -> None:
        method.step(tokens, targets)

    kept()
    kept()
    facts: Results = {"peak": ranks.peak(kept, base)}
    with distributed.record_collectives() as log:
        dropped()
    facts["peak dropped"] = ranks.peak(dropped, base)
    facts["collectives"], facts["sent"] = ranks.counted(log), log.volume()
    return method, facts


def point(world_size: int, parameters: int, of_ranks: Sequence[Results]) -> Results:
    """What the ranks found, as one point of the record."""
    timed = ranks.slowest([found["samples"] for found in of_ranks])
    hidden = ranks.slowest([found["overlap"] for found in of_ranks])
    activations = max(found["activations"] for found in of_ranks)
    entries = []
    for name, (stage, _) in methods.METHODS.items():
        facts = [found["methods"][name] for found in of_ranks]
        formula = sum(memory_per_rank(parameters, world_size, stage).values())
        peak = max(fact["peak"] for fact in facts)
        entries.append(
            {
                "name": name,
                "stage": stage,
                **timed[name].as_dict(),
                "formula_bytes": round(formula),
                "peak_bytes": peak,
                "memory_ratio": peak / (formula + activations),
                "peak_dropped_bytes": max(fact["peak dropped"] for fact in facts),
                "collectives": facts[0]["collectives"],
                "sent_elements": facts[0]["sent"],
                "formula_elements": sum(communication_volume(parameters, world_size, stage).values()),
            }
        )
    return {
        "world_size": world_size,
        "activations_bytes": activations,
        "methods": entries,
        "ratios": {ours: timing.ratio(timed[ours], timed[peer]).as_dict() for ours, peer in methods.BASELINES.items()},
        "overlap": {name: t.as_dict() for name, t in hidden.items()},
        "timelines": of_ranks[0]["timelines"],
    }


_SPAN = {**each(TEXT, "lane", "phase", "name"), "start": NOT_NEGATIVE, "end": POSITIVE, "kernels": SIZE}
SCHEMA = {
    "dtype": TEXT,
    "model": ranks.GPT_LAYOUT,
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
                    "collectives": ranks.COLLECTIVES_LAYOUT,
                    "sent_elements": NOT_NEGATIVE,
                    "formula_elements": NOT_NEGATIVE,
                }
            ],
            "ratios": {str: RATIO},
            "overlap": {str: TIMING},
            "timelines": {str: [_SPAN]},
        }
    ],
}


def measure(
    quick: bool = False,
    world_sizes: Sequence[int] | None = None,
    config: gpt.GPTConfig = CONFIG,
    shallow: gpt.GPTConfig = SHALLOW,
    rows: int = ROWS,
    warmup: int = WARMUP,
    rounds: int = ROUNDS,
    overlap_rounds: int = OVERLAP_ROUNDS,
) -> Results:
    """All methods on each world size; ``quick`` takes fewer rounds.

    Args:
        world_sizes: by default those that this machine has GPUs for.
        shallow: the model of the timelines.
        rows: rows of a rank's batch.

    Raises:
        RuntimeError: there are no GPUs here and no world sizes are given.
    """
    rounds, overlap_rounds = (min(rounds, 5), min(overlap_rounds, 3)) if quick else (rounds, overlap_rounds)
    parameters = sum(p.numel() for p in gpt.GPT(config, device="meta").parameters())
    points = []
    for world_size in world_sizes or ranks.world_sizes():
        arguments = (config, shallow, rows, warmup, rounds, overlap_rounds)
        points.append(point(world_size, parameters, ranks.launch(on_rank, *arguments, world_size=world_size)))
    return {
        "dtype": "bf16",
        "model": {
            "parameters": parameters,
            **{name: getattr(config, name) for name in ("layers", "heads", "hidden", "vocabulary", "context")},
        },
        "rows": rows,
        "shallow_layers": shallow.layers,
        "points": points,
    }


def table(results: Mapping[str, Any]) -> str:
    """One line a method and world size; then the ratios, and what overlap hides."""
    rows, lines = [], []
    for item in results["points"]:
        for method in item["methods"]:
            rows.append(
                [
                    f"{item['world_size']} x {method['name']}",
                    f"{method['seconds'] * 1e3:.1f}",
                    f"{method['peak_bytes'] / 1e9:.2f}",
                    f"{(method['formula_bytes'] + item['activations_bytes']) / 1e9:.2f}",
                    f"{method['memory_ratio']:.3f}",
                    f"{method['peak_dropped_bytes'] / 1e9:.2f}",
                    f"{method['sent_elements'] / method['formula_elements']:.4f}",
                ]
            )
        ratios = ", ".join(
            f"{name} {r['ratio']:.3f} ({r['ratio_low']:.3f} to {r['ratio_high']:.3f})"
            for name, r in item["ratios"].items()
        )
        hidden = ", ".join(f"{name} {t['seconds'] * 1e3:.1f}" for name, t in item["overlap"].items())
        counts = ", ".join(f"{name} {len(found)}" for name, found in item["timelines"].items())
        lines += [f"{item['world_size']} GPUs, ours over PyTorch's: {ratios}", f"  overlap, ms: {hidden}"]
        lines.append(f"  activations {item['activations_bytes'] / 1e9:.2f} GB; spans of the timelines: {counts}")
    headings = ["N x method", "ms a step", "peak GB", "predicted", "ratio", "dropped", "sent/formula"]
    return "\n".join([benchmark_cli.text_table(headings, rows), *lines])


if __name__ == "__main__":
    raise SystemExit(ranks.run("parallel_training", measure, table, SCHEMA))
