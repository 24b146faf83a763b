"""The step time of lab 5's engine on an H100, fitted to what was measured there.

Two records give the four coefficients of :class:`StepTime`:

- ``serving_throughput``: the engine's 273 steps with 256 requests, seconds of each. From decode steps of 6 to 256
  sequences and steps of 8,192 tokens that mix prompts and decoding come ``base``, ``token`` and ``context``.
- ``decoding``: whole prompts of 128 to 16,384 tokens, one at a time, through the same model in plain PyTorch. Their
  time grows faster than their length, and from that comes ``pair``. The engine's prompts are too short to show it.

The record of the engine's steps does not say which prompts were in them. :func:`engine_steps` finds out by playing the
same 256 requests through a :class:`Worker`, and refuses if that does not give the recorded steps one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from utils import records

from .step_time import StepTime, Work
from .workers import Job, Worker

#: Of ``benchmarks/serving_throughput.py``: shortest and longest prompt, and the seed of their lengths.
PROMPTS, SEED = (100, 1024), 0


@dataclass(frozen=True)
class Sample:
    """A step's work, and the seconds that it was measured to take."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A fitted step time with what it was fitted to.

    Attributes:
        step_time: the four coefficients.
        steps: the engine's steps, of the record ``serving_throughput``.
        prompts: whole prompts, of the record ``decoding``. The model that ran them has other kernels than the engine,
            so ``prompt_time`` fits them: its ``base`` and ``token`` are its own, ``pair`` is shared.
        bytes_per_token: of keys and values, of the measured model.
        source: devices and dates of both records.
    """

    step_time: StepTime
    steps: tuple[Sample, ...]
    prompt_time: StepTime
    prompts: tuple[Sample, ...]
    bytes_per_token: int
    source: str

    def residuals(self) -> np.ndarray:
        """(steps,) float64: what the fit says of each of the engine's steps, over what was measured, less 1."""
        return _residuals(self.step_time, self.steps)

    def prompt_residuals(self) -> np.ndarray:
        """(prompts,) float64: the same of the whole prompts."""
        return _residuals(self.prompt_time, self.prompts)

    def __str__(self) -> str:
        time = self.step_time
        lines = [
            f"{self.source}:",
            f"seconds = {time.base:.3g} + {time.token:.3g} x tokens + {time.context:.3g} x context"
            f" + {time.pair:.3g} x pairs",
        ]
        for name, off in (("steps", self.residuals()), ("whole prompts", self.prompt_residuals())):
            lines.append(
                f"{len(off)} {name}: off by {np.median(abs(off)):.1%} (median) and {abs(off).max():.0%} at most"
            )
        return "\n".join(lines)


def fit_step_time() -> Fit:
    """The step time of lab 5's engine with a model of 0.6 billion weights in bfloat16 on an H100.

    Both fits minimise the sum of squared relative errors.

    Raises:
        ValueError, RecordError: as :func:`utils.records.load`; the steps played are not those recorded.
    """
    engine, decoding = records.load("serving_throughput"), records.load("decoding")
    bytes_per_token = engine.results["model"]["cache_bytes_per_token"]
    if decoding.results["model"]["cache_bytes_per_token"] != bytes_per_token:
        raise ValueError("the records serving_throughput and decoding are not of the same model")
    prompts = tuple(
        Sample(Work.of([(0, entry["context"])]), entry["recomputed"]["seconds"])
        for entry in decoding.results["contexts"]
    )
    prompt_time = fit(prompts, ("base", "token", "pair"))
    steps = engine_steps(engine)
    step_time = fit(steps, ("base", "token", "context"), pair=prompt_time.pair)
    source = f"lab 5's engine ({engine.label}), whole prompts ({decoding.label})"
    return Fit(step_time, steps, prompt_time, prompts, bytes_per_token, source)


def fit(samples: Sequence[Sample], free: Sequence[str], **known: float) -> StepTime:
    """The coefficients ``free`` of a step time, by least squares of the relative errors; the others are ``known`` or 0.

    Raises:
        ValueError: fewer samples than coefficients, or samples that do not determine them; a coefficient that comes
            out negative.
    """
    columns = {"base": lambda work: 1, "token": lambda work: work.tokens, "context": lambda work: work.context,
               "pair": lambda work: work.pairs}  # fmt: skip
    seconds = np.array([sample.seconds for sample in samples])
    rest = seconds - [sum(value * columns[name](s.work) for name, value in known.items()) for s in samples]
    table = np.array([[columns[name](s.work) for name in free] for s in samples], dtype=float)
    scale = table.max(axis=0, initial=0)
    if len(samples) < len(free) or np.linalg.matrix_rank(table / np.where(scale > 0, scale, 1)) < len(free):
        raise ValueError(f"{len(samples)} samples do not determine {', '.join(free)}: measure other steps as well")
    found = np.linalg.lstsq(table / scale / seconds[:, None], rest / seconds, rcond=None)[0] / scale
    return StepTime(**dict(zip(free, found.tolist(), strict=True)), **known)


def engine_steps(record: records.Record) -> tuple[Sample, ...]:
    """The steps of the record ``serving_throughput`` with their whole work.

    Raises:
        ValueError: the simulated worker's steps differ from the recorded ones.
    """
    results = record.results
    chance = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(PROMPTS[0], PROMPTS[1] + 1, (results["requests"],), generator=chance).tolist()
    output = results["output_tokens"] // results["requests"]
    worker = Worker(results["token_budget"], results["requests"], results["blocks"] * results["block_size"])
    worker.waiting.extend(Job(str(i), 0.0, prompt, output) for i, prompt in enumerate(lengths))
    weights, samples = 2 * results["model"]["parameters"], []
    for number, entry in enumerate(results["steps"]):
        work = worker.schedule()
        moved = weights + work.context * results["model"]["cache_bytes_per_token"]
        if (work.sequences, work.tokens, moved) != (entry["sequences"], entry["tokens"], entry["bytes"]):
            raise ValueError(f"step {number} of the record is {entry}, the simulated worker's is {work}")
        for job in worker.finish(0.0, 0.0):
            worker.release(job)
        samples.append(Sample(work, entry["seconds"]))
    return tuple(samples)


def _residuals(step_time: StepTime, samples: Sequence[Sample]) -> np.ndarray:
    return np.array([step_time(sample.work) / sample.seconds - 1 for sample in samples])
