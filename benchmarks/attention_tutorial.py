"""Lab 3's attention beside the fused attention of Triton's own tutorials, number 06, in bf16 and in the same rounds.

The tutorial is not part of the course, and no copy of it is here. Its file is in Triton's sources, in
``python/tutorials``; where it lies is said with ``TRITON_TUTORIAL``::

    TRITON_TUTORIAL=06-fused-attention.py python -m benchmarks.attention_tutorial

An edition for Triton 3.4 or newer is right for the Triton of this course. The record keeps the file's SHA-256. Three
things let it take part in what :mod:`benchmarks.attention_speed` measures:

- it is written for fp16, so each ``tl.float16`` of its source is read as ``tl.bfloat16``;
- batch and heads are one axis for it, the same memory: an edition of 2025 mixes the two axes up;
- it is loaded anew for each shape. So its own search for the fastest tile runs for each, also with and without a mask,
  which its key leaves out.

Its results are compared with lab 3's before anything is timed. An output that is not the same stops the benchmark. A
direction whose gradients are not the same is not timed, and the record says why: there are editions whose backward pass
masks as causal attention does, whatever was asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import attention_speed, benchmark_cli, sustained
from benchmarks.attention_determinism import relative_distance
from benchmarks.attention_speed import DIRECTIONS, OURS, Attention, Shape
from benchmarks.thermal_warmup import thermal_warmup
from utils.record_schemas import NOT_NEGATIVE, TEXT

VARIABLE = "TRITON_TUTORIAL"
TUTORIAL = "tutorial"
#: What the tutorial computes in, and what it is read as.
WRITTEN, READ = "tl.float16", "tl.bfloat16"
#: How far its results may be from lab 3's, as a share of their norm. Rounding to bf16 leaves about 0.004.
FAR = 0.02
ROUNDS = 8


def tutorial_file() -> Path:
    """The file that ``TRITON_TUTORIAL`` names.

    Raises:
        FileNotFoundError: the variable is not set, or there is no such file.
    """
    named = os.environ.get(VARIABLE, "")
    if not named or not Path(named).is_file():
        what = f"{named} is not a file" if named else f"{VARIABLE} is not set"
        raise FileNotFoundError(
            f"{what}: set {VARIABLE} to 06-fused-attention.py from python/tutorials of Triton's sources"
        )
    return Path(named)


@contextlib.contextmanager
def loaded(path: Path) -> Iterator[ModuleType]:
    """The tutorial as a module of its own, in bf16; another one each time, with its own search for tiles.

    Raises:
        ValueError: the file computes nothing in fp16, or has no ``attention``.
    """
    text = path.read_text(encoding="utf-8")
    if WRITTEN not in text:
        raise ValueError(f"{path}: no {WRITTEN} in it, so this is not the tutorial, or one that chooses its dtype")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "triton_tutorial_06.py"  # Triton reads a kernel's source from its file
        copy.write_text(text.replace(WRITTEN, READ), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(copy.stem, copy)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not callable(getattr(module, "attention", None)):
            raise ValueError(f"{path}: no function attention(q, k, v, causal, sm_scale) in it")
        yield module


def attention_of(module: ModuleType) -> Attention:
    """The tutorial's attention of q, k, v (B, H, N, D) with scale 1/sqrt(D)."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        one_axis = (x.flatten(0, 1)[None] for x in (q, k, v))
        return module.attention(*one_axis, causal, q.shape[-1] ** -0.5).view(q.shape)

    return attention


def distances(shape: Shape, attention: Attention) -> dict[str, float]:
    """Direction -> how far its results are from lab 3's, as a share of their norm; backward the worst of the three."""
    q, k, v, do = attention_speed.inputs(shape)
    results = []
    for run in (attention, attention_speed.ours):
        o = run(q, k, v, shape[4])
        results.append((o.detach(), *torch.autograd.grad(o, (q, k, v), do)))
    forward, *backward = (relative_distance(theirs, right) for theirs, right in zip(*results, strict=True))
    return {"forward": forward, "backward": max(backward)}


SCHEMA = {
    "dtype": TEXT,
    "sha256": TEXT,
    "farthest": NOT_NEGATIVE,
    "points": [attention_speed.POINT_LAYOUT],
    "left_out": {str: TEXT},
}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    path: Path | None = None,
    shapes: Sequence[Shape] | None = None,
    rounds: int = ROUNDS,
    seconds: float | None = None,
    lap_seconds: float = sustained.LAP_SECONDS,
) -> dict[str, Any]:
    """The shapes of :mod:`benchmarks.attention_speed` in each direction that the tutorial has; ``quick`` takes two.

    Args:
        path: The tutorial's file; what ``TRITON_TUTORIAL`` names by default.
        seconds: How long the card is warmed before each shape.
        lap_seconds: Work of the faster one in one lap; 0 for single calls.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is not the tutorial.
        RuntimeError: its output is not that of attention, or there is no GPU here.
    """
    path = path or tutorial_file()
    points, left_out, far = [], {}, []
    for shape in shapes or (attention_speed.SHAPES[1::4] if quick else attention_speed.SHAPES):
        with loaded(path) as module:
            theirs = attention_of(module)
            distance = distances(shape, theirs)
            if not distance["forward"] <= FAR:
                raise RuntimeError(
                    f"{path}: its output for {shape} is {distance['forward']:.2g} of its size away from lab 3's, so it "
                    "cannot stand beside it: is this an edition for this Triton?"
                )
            found, missing = attention_speed.calls(shape, {OURS: attention_speed.ours, TUTORIAL: theirs})
            if missing:
                raise RuntimeError(f"{path}: {missing[TUTORIAL]}")
            thermal_warmup(found["both", OURS], *(() if seconds is None else (seconds,)))
            for direction in DIRECTIONS:
                if distance[direction] <= FAR:
                    points.append(attention_speed.point(shape, direction, found, rounds, lap_seconds))
                    far.append(distance[direction])
                else:
                    left_out[row_name(shape, direction)] = (
                        f"its gradients are {distance[direction]:.2f} of their size away from lab 3's"
                    )
    return {
        "dtype": "bf16",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "farthest": max(far),
        "points": points,
        "left_out": left_out,
    }


def row_name(shape: Shape, direction: str) -> str:
    """A row in words, as :func:`benchmarks.attention_speed.name_of` has it."""
    names = ("batch", "heads", "seq_len", "head_dim", "causal")
    return attention_speed.name_of({"direction": direction, **dict(zip(names, shape, strict=True))})


def table(results: dict[str, Any]) -> str:
    """One line a row: TFLOP/s of both, and how many times as fast as the tutorial lab 3 is."""
    rows = []
    for item in results["points"]:
        rates = [f"{item['timed'][name]['flops_per_second'] / 1e12:.0f}" for name in (OURS, TUTORIAL)]
        rows.append([attention_speed.name_of(item), *rates, f"{item['ours_over'][TUTORIAL]['ratio']:.2f}"])
    text = benchmark_cli.text_table(["TFLOP/s", OURS, TUTORIAL, "x tutorial"], rows)
    why = "".join(f"\n{name}: not timed, {reason}" for name, reason in results["left_out"].items())
    return f"{text}\ntutorial of SHA-256 {results['sha256'][:16]}..., results within {results['farthest']:.2g}{why}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and record, or say which file is missing; return an exit status."""
    try:
        tutorial_file()
    except FileNotFoundError as error:
        print(f"attention_tutorial: {error}")
        return 1
    return benchmark_cli.run("attention_tutorial", measure, table, SCHEMA, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
