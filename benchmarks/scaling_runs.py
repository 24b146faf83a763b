"""Losses of a family of small models over their parameters and training tokens: what a scaling law is fitted to.

Each setting is a size of :mod:`utils.gpt` and a number of tokens (here characters of the course's books, see
:mod:`utils.serving.training`); its budget is C = 6 N D. A setting is trained several times, from different seeds and
with different peak learning rates, all at once: parameters are stacked along a first axis M, and ``torch.vmap`` runs
the model over it. Learning rates rise over the first 5 % of the steps and fall on a cosine that ends with the run, as
Hoffmann et al. (2022, section 3) find necessary. Every run is recorded, also those with a worse learning rate.

A setting that is done is kept in ``build/scaling_runs.jsonl`` until all are: an interrupted measurement goes on there.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import benchmark_cli
from utils import fingerprint, runtime
from utils.gpt import GPT, GPTConfig
from utils.record_schemas import COUNT, POSITIVE, SIZE, each
from utils.scaling_laws import TRAINING_FLOPS
from utils.serving.training.books import read_books
from utils.serving.training.corpus import split
from utils.transformer_math import ServedModel

CONTEXT, ROWS = 128, 8  # tokens of a window, windows of a step
#: hidden size and layers of each model; heads have 32 numbers, or up to 48 where 32 do not divide the hidden size.
SHAPES = ((24, 2), (32, 2), (40, 2), (48, 3), (64, 4), (80, 4), (96, 4), (120, 4), (128, 5), (160, 5), (192, 6))
#: FLOPs of the runs that a law is fitted to, and of those that are held out.
BUDGETS, HELD_OUT_BUDGET = (1e12, 3e12, 1e13, 3e13), 1e14
#: Text is read four times at most: up to there it is worth nearly as much as new text (Muennighoff et al. 2023).
MOST_EPOCHS = 4
#: Settings outside are far from the best of their budget, and are not trained.
TOKENS_PER_PARAMETER = (2, 700)
#: Peak learning rates are these times ``BASE_RATE / sqrt(hidden)``.
RATES, BASE_RATE = (0.5, 1.0, 2.0), 0.03
SEEDS = (0, 1)
BETAS, WEIGHT_DECAY, LARGEST_NORM = (0.9, 0.95), 0.1, 1.0  # of AdamW, and of a gradient
PROGRESS = Path(fingerprint.ROOT) / "build" / "scaling_runs.jsonl"


@dataclass(frozen=True)
class Text:
    """Characters as numbers, int64 (T,): ``training`` and ``held_out``; and how many different ones there are."""

    training: Tensor
    held_out: Tensor
    characters: int


@cache
def books() -> Text:
    """The course's books, every 40th chapter held out; a character rarer than 1 in 100,000 is read as "?"."""
    parts = ["\n".join(documents).encode("latin-1", "replace") for documents in split(read_books())]
    raw = [torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts]
    counts = torch.bincount(raw[0], minlength=256)
    kept = (counts > len(raw[0]) * 1e-5).nonzero()[:, 0]
    table = torch.full((256,), int((kept == ord("?")).nonzero()))
    table[kept] = torch.arange(len(kept))
    return Text(table[raw[0]], table[raw[1]], len(kept))


def model_config(hidden: int, layers: int, text: Text, context: int = CONTEXT) -> GPTConfig:
    """A model of the family: heads of some 32, no biases, one table for embedding and head."""
    return GPTConfig(text.characters, context, layers, max(1, hidden // 32), hidden, bias=False, frozen_positions=False)


def new_model(config: GPTConfig, seed: int, dtype: torch.dtype = torch.float32) -> GPT:
    """A model whose weights have the deviation 1/2 / sqrt(hidden): GPT-2's 0.02 at a width of 625, more below it."""
    # drawn in float64: in float32 the last digit depends on the CPU, and training magnifies it
    model, random = GPT(config, dtype=torch.float64), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                adds = name.endswith(("output.weight", "down.weight"))
                parameter.normal_(
                    0, 0.5 / math.sqrt(config.hidden * (2 * config.layers if adds else 1)), generator=random
                )
    return model.to(dtype)


def size(config: GPTConfig) -> int:
    """N: the parameters that multiply each token, all but the table of positions."""
    return ServedModel.of(config).multiplied


class Ensemble:
    """M models of one configuration with their own weights, trained together.

    Attributes:
        weights: (M, P), a model per row; P parameters.
    """

    def __init__(self, config: GPTConfig, seeds: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        models = [new_model(config, seed, dtype) for seed in seeds]
        trained = [[p.detach() for p in model.parameters()] for model in models]
        self.names = [name for name, _ in models[0].named_parameters()]
        self.shapes = [p.shape for p in trained[0]]
        self.weights = torch.stack([torch.cat([p.flatten() for p in one]) for one in trained]).to(device)
        self.skeleton = GPT(config, device="meta")
        decays = [torch.full((p.numel(),), float(p.ndim == 2), dtype=dtype) for p in trained[0]]  # not the norms
        self.decay = WEIGHT_DECAY * torch.cat(decays).to(device)
        self.first, self.second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)  # Adam's moments
        self.steps = torch.zeros((), dtype=dtype, device=device)  # done so far

    def _views(self) -> list[Tensor]:
        parts = self.weights.split([shape.numel() for shape in self.shapes], dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _losses(self, views: list[Tensor], tokens: Tensor, shared: bool) -> Tensor:
        def one(parameters: dict[str, Tensor], windows: Tensor) -> Tensor:
            return torch.func.functional_call(self.skeleton, parameters, (windows[:, :-1], windows[:, 1:]))

        with sdpa_kernel(SDPBackend.MATH):  # the other ones have no rule for vmap
            return torch.vmap(one, in_dims=(0, None if shared else 0))(
                dict(zip(self.names, views, strict=True)), tokens
            )

    @torch.no_grad()
    def losses(self, windows: Tensor) -> Tensor:
        """Mean loss of each model on the same windows (B, N + 1): (M,), nats per token."""
        return self._losses(self._views(), windows, shared=True)

    def step(self, windows: Tensor, rates: Tensor) -> None:
        """One step of AdamW on windows (M, B, N + 1), with the learning rate of each model (M,)."""
        views = [view.requires_grad_() for view in self._views()]
        loss = self._losses(views, windows, shared=False).sum()  # no model's gradient depends on the others
        gradient = torch.cat([part.flatten(1) for part in torch.autograd.grad(loss, views)], dim=1)  # (M, P)
        gradient *= (LARGEST_NORM / gradient.norm(dim=1, keepdim=True)).clamp(max=1)
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.lerp_(gradient.square(), 1 - BETAS[1])
        self.steps += 1
        mean, square = (x / (1 - beta**self.steps) for x, beta in zip((self.first, self.second), BETAS, strict=True))
        self.weights -= rates[:, None] * (mean / (square.sqrt() + 1e-8) + self.decay * self.weights)

    def steps_on(self, windows: Iterator[Tensor], rates: Iterator[Tensor]) -> None:
        """A step on each of the windows, with its learning rates: on a GPU as a graph that is captured once.

        A step of a small model launches hundreds of kernels that take less time than their launches.
        """
        if not self.weights.is_cuda:
            for some, rate in zip(windows, rates, strict=True):
                self.step(some, rate)
            return
        state = self.weights, self.first, self.second, self.steps
        begin = [x.clone() for x in state]
        given, graph = [next(windows).clone(), next(rates).clone()], torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # what is done once only must be done before the capture
            self.step(*given)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.step(*given)
        for x, value in zip(state, begin, strict=True):
            x.copy_(value)
        graph.replay()
        for arguments in zip(windows, rates, strict=True):
            for place, value in zip(given, arguments, strict=True):
                place.copy_(value)
            graph.replay()


def schedule(steps: int) -> Iterator[float]:
    """Share of the peak learning rate in each step: up over 5 % of the steps, then down to a tenth on a cosine."""
    rise = max(1, steps // 20)
    for step in range(steps):
        yield min(1.0, (step + 1) / rise) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    config: GPTConfig, tokens: int, rates: Sequence[float], seeds: Sequence[int], text: Text,
    *, rows: int = ROWS, device: torch.device | None = None, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Held-out losses (M,) after training on ``tokens`` characters, nats per character; model m has rate and seed m.

    Windows begin anywhere in the text; models of one seed read the same ones.

    Raises:
        ValueError: rates and seeds of different numbers, fewer tokens than a step has.
    """
    if len(rates) != len(seeds) or not seeds:
        raise ValueError(f"every model needs a rate and a seed, got {len(rates)} rates and {len(seeds)} seeds")
    steps, device = tokens // (rows * config.context), device or runtime.DEVICE
    if steps < 1:
        raise ValueError(f"a step has {rows * config.context} tokens, got only {tokens} to train on")
    ensemble = Ensemble(config, seeds, device, dtype)
    along = torch.arange(config.context + 1, device=device)
    shares = torch.tensor(list(schedule(steps)), dtype=dtype)
    all_rates = (shares[:, None] * torch.tensor(rates, dtype=dtype)).to(device)  # (steps, M)
    limit, generators = len(text.training) - config.context, [torch.Generator().manual_seed(seed) for seed in seeds]
    drawn = [torch.randint(limit, (steps, rows), generator=random) for random in generators]
    starts = torch.stack(drawn, dim=1).to(device)  # (steps, M, rows)
    training = text.training.to(device)
    ensemble.steps_on((training[each[:, :, None] + along] for each in starts), iter(all_rates))
    return evaluate(ensemble, text, config.context, device)


def evaluate(ensemble: Ensemble, text: Text, context: int, device: torch.device, most: int = 1 << 16) -> Tensor:
    """Mean loss (M,) over the first ``most`` held-out characters, in windows without overlap."""
    count = min(most, len(text.held_out) - 1) // context
    starts = torch.arange(count)[:, None] * context
    parts = text.held_out[starts + torch.arange(context + 1)].to(device).split(64)
    return sum(len(part) * ensemble.losses(part) for part in parts) / count


def settings(
    text: Text, budget: float, shapes: Sequence[tuple[int, int]] = SHAPES, context: int = CONTEXT
) -> list[tuple[GPTConfig, int]]:
    """Configurations and tokens of a budget, those within the limits above."""
    found = []
    for hidden, layers in shapes:
        config = model_config(hidden, layers, text, context)
        n = size(config)
        tokens = int(budget / (TRAINING_FLOPS * n))
        low, high = TOKENS_PER_PARAMETER
        if low <= tokens / n <= high and tokens <= MOST_EPOCHS * len(text.training):
            found.append((config, tokens))
    return found


def train_setting(config: GPTConfig, tokens: int, budget: float, text: Text, rows: int = ROWS) -> dict[str, Any]:
    """All runs of one setting, with the seconds that they took together."""
    pairs = [(rate * BASE_RATE / math.sqrt(config.hidden), seed) for rate in RATES for seed in SEEDS]
    begun = time.monotonic()
    rates, seeds = zip(*pairs, strict=True)
    losses = train(config, tokens, rates, seeds, text, rows=rows).tolist()
    return {
        **{"budget": budget, "hidden": config.hidden, "layers": config.layers},
        "parameters": size(config),
        "tokens": tokens,
        "steps": tokens // (rows * config.context),
        "seconds": time.monotonic() - begun,
        "runs": [{"rate": r, "seed": s, "loss": loss} for (r, s), loss in zip(pairs, losses, strict=True)],
    }


SCHEMA = {
    "text": each(SIZE, "training", "held_out", "characters"),
    **each(SIZE, "context", "rows"),
    "held_out_budget": POSITIVE,
    "settings": [
        {
            "budget": POSITIVE,
            **each(SIZE, "hidden", "layers", "parameters", "tokens", "steps"),
            "seconds": POSITIVE,
            "runs": [{"rate": POSITIVE, "seed": COUNT, "loss": POSITIVE}],
        }
    ],
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    budgets: Sequence[float] = (*BUDGETS, HELD_OUT_BUDGET),
    text: Text | None = None,
    context: int = CONTEXT,
    rows: int = ROWS,
    progress: Path | None = PROGRESS,
) -> dict[str, Any]:
    """Train the family; ``quick`` trains the two smallest budgets and keeps no progress."""
    text, budgets, progress = text or books(), budgets[:2] if quick else budgets, None if quick else progress
    torch.set_float32_matmul_precision("high")  # TF32
    source = fingerprint.fingerprint(benchmark_cli.sources("scaling_runs"))
    done = _done(progress, source)
    family = [(budget, *each) for budget in budgets for each in settings(text, budget, shapes, context)]
    keys = [f"{source} {budget:g} {config.hidden} {config.layers}" for budget, config, _ in family]
    for key, (budget, config, tokens) in zip(keys, family, strict=True):
        if key not in done:
            done[key] = train_setting(config, tokens, budget, text, rows)
            _keep(progress, key, done[key])
        print(_line(done[key]), flush=True)
    if progress is not None:
        progress.unlink(missing_ok=True)
    return {
        "text": {"training": len(text.training), "held_out": len(text.held_out), "characters": text.characters},
        "context": context,
        "rows": rows,
        "held_out_budget": HELD_OUT_BUDGET,
        "settings": [done[key] for key in keys],
    }


def _done(progress: Path | None, source: str) -> dict[str, dict[str, Any]]:
    """Settings that an interrupted measurement of the same source left."""
    if progress is None or not progress.is_file():
        return {}
    lines = [json.loads(line) for line in progress.read_text(encoding="utf-8").splitlines()]
    return {line["key"]: line["setting"] for line in lines if line["key"].startswith(source)}


def _keep(progress: Path | None, key: str, setting: dict[str, Any]) -> None:
    if progress is not None:
        progress.parent.mkdir(parents=True, exist_ok=True)
        with progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "setting": setting}) + "\n")


def best(setting: dict[str, Any]) -> tuple[float, list[float]]:
    """The peak learning rate with the least mean loss, and the losses of its seeds."""
    runs = setting["runs"]
    of_rate = {run["rate"]: [other["loss"] for other in runs if other["rate"] == run["rate"]] for run in runs}
    rate = min(of_rate, key=lambda rate: sum(of_rate[rate]) / len(of_rate[rate]))
    return rate, of_rate[rate]


def _line(setting: dict[str, Any]) -> str:
    rate, losses = best(setting)
    spent = f"C {setting['budget']:.0e}  N {setting['parameters']:>9,}  D {setting['tokens']:>10,}"
    return f"{spent}  loss {sum(losses) / len(losses):.4f}  rate {rate:.1e}  {setting['seconds']:.0f} s"


def table(results: dict[str, Any]) -> str:
    """One line a setting: the loss of the best learning rate."""
    return "\n".join(_line(setting) for setting in results["settings"])


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("scaling_runs", measure, table, SCHEMA))
