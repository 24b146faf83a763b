"""The course's GPT trained with products in fp8: without scales, with current and with delayed ones, beside bf16.

Nothing is timed, so this runs on any machine: fp8 and bf16 are emulated, as :mod:`utils.quantization.products` says.
The model predicts the next byte of the excerpt of the training text that comes with the course. Embedding, head, norms,
attention, weights and optimizer are in fp32 in all runs; only the factors of the blocks' linear layers are rounded.
Each step's loss is divided by ``DIVISOR`` before the backward pass, as if its batch was one of so many micro-batches of
a step. Adam divides gradients by their typical size, so without rounding the divisor changes nothing. Two more ways
round the blocks' weights themselves to e4m3 after each step, so that no weight in fp32 is left. Runs of one seed start
from the same weights and see the same batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks import benchmark_cli
from utils.formats import quantize
from utils.gpt import GPT, GPTConfig
from utils.quantization import Fp8Scaling, round_products
from utils.record_schemas import NOT_NEGATIVE, POSITIVE, SIZE, TEXT, each
from utils.serving.training.excerpts import excerpt

CONFIG = GPTConfig(
    vocabulary=256, context=64, layers=3, heads=4, hidden=96, tied=False, frozen_positions=False, bias=True
)
#: By name: the products, as :func:`utils.quantization.round_products` knows them, and how weights are stored.
WAYS: Mapping[str, tuple[str, str | None]] = {
    "bf16": ("bf16", None),
    "fp8, current scaling": ("current", None),
    "fp8, delayed scaling": ("delayed", None),
    "fp8, no scales": ("none", None),
    "weights in e4m3, to nearest": ("current", "nearest"),
    "weights in e4m3, stochastic": ("current", "stochastic"),
}
SEEDS = (0, 1, 2)
STEPS, BATCH, DIVISOR = 400, 8, 4096
LEARNING_RATE, WARM_UP = 2e-3, 20
#: Losses are recorded as means of so many steps.
MEAN_OF = 20


@cache
def text(name: str) -> torch.Tensor:
    """The bytes of an excerpt, (T,) int64."""
    return torch.tensor(list("".join(excerpt(name)).encode()))


def windows(name: str, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of an excerpt from some positions on, (B, context) each."""
    rows = text(name)[starts[:, None] + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]


def train(way: str, seed: int, steps: int = STEPS, config: GPTConfig = CONFIG) -> tuple[GPT, list[float]]:
    """A model and the loss of each step's batch, nats per byte.

    Args:
        way: a name of :data:`WAYS`.
        seed: of the weights and of the batches.
    """
    products, storage = WAYS[way]
    model = GPT(config, seed=seed)
    round_products(model.blocks, products)
    adam = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-13, weight_decay=0)
    generator, noise = (torch.Generator().manual_seed(start + seed) for start in (1000, 2000))
    losses = []
    for step in range(steps):
        adam.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
        starts = torch.randint(len(text("training")) - config.context, (BATCH,), generator=generator)
        loss = model(*windows("training", starts, config.context))
        adam.zero_grad()
        (loss / DIVISOR).backward()
        adam.step()
        if storage:
            store(model, noise if storage == "stochastic" else None)
        losses.append(loss.item())
    return model, losses


@torch.no_grad()
def store(model: GPT, stochastic: torch.Generator | None) -> None:
    """Round the weights of the blocks' linear layers to e4m3, each matrix with one scale."""
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(quantize(module.weight, "e4m3", stochastic=stochastic).dequantize())


@torch.no_grad()
def held_out_loss(model: GPT, count: int = 256) -> float:
    """Mean loss over windows spread over the held-out excerpt, nats per byte."""
    context = model.config.context
    return float(
        model(*windows("held_out", torch.linspace(0, len(text("held_out")) - context - 1, count).long(), context))
    )


def shares(model: GPT) -> dict[str, float]:
    """Of all numbers but zeros of gradients that were rounded to fp8: what share became zero, and what was clipped."""
    scalings = [m.rounding for m in model.modules() if isinstance(getattr(m, "rounding", None), Fp8Scaling)]
    numbers = sum(each.numbers["gradient"] for each in scalings)
    if not numbers:
        return {"zeroed": 0.0, "clipped": 0.0}
    return {
        "zeroed": sum(each.zeroed["gradient"] for each in scalings) / numbers,
        "clipped": sum(each.clipped["gradient"] for each in scalings) / numbers,
    }


SCHEMA = {
    "model": each(SIZE, "parameters", "layers", "heads", "hidden", "context"),
    **each(SIZE, "batch", "divisor", "steps", "mean_of"),
    "runs": [
        {"way": TEXT, "seed": NOT_NEGATIVE, "losses": [POSITIVE], "held_out": POSITIVE,
         **each(NOT_NEGATIVE, "zeroed", "clipped")}
    ],
}  # fmt: skip


def measure(
    quick: bool = False, steps: int = STEPS, seeds: Sequence[int] = SEEDS, ways: Sequence[str] = tuple(WAYS)
) -> dict[str, Any]:
    """Everything in the record's schema; ``quick`` takes one seed and few steps."""
    steps, seeds = (2 * MEAN_OF, seeds[:1]) if quick else (steps, seeds)
    runs = []
    for seed in seeds:
        for name in ways:
            model, losses = train(name, seed, steps)
            held_out = held_out_loss(model)  # rounds no gradient
            means = torch.tensor(losses).view(-1, MEAN_OF).mean(1).tolist()
            runs.append({"way": name, "seed": seed, "losses": means, "held_out": held_out, **shares(model)})
            print(f"{name}, seed {seed}: {means[-1]:.4f}, held out {held_out:.4f}", flush=True)
    sizes = {name: getattr(CONFIG, name) for name in ("layers", "heads", "hidden", "context")}
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "model": {"parameters": parameters, **sizes},
        "batch": BATCH,
        "divisor": DIVISOR,
        "steps": steps,
        "mean_of": MEAN_OF,
        "runs": runs,
    }


def table(results: dict[str, Any]) -> str:
    """Loss at the end, in training and held out, and what became of the gradients."""
    rows = [
        [f"{run['way']}, seed {run['seed']}", f"{run['losses'][-1]:.4f}", f"{run['held_out']:.4f}",
         f"{run['zeroed']:.1%}", f"{run['clipped']:.2e}"]
        for run in results["runs"]
    ]  # fmt: skip
    return benchmark_cli.text_table(["way", "loss", "held out", "zeroed", "clipped"], rows)


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("fp8_training", measure, table, SCHEMA, needs_gpu=False))
