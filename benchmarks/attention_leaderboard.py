"""A leaderboard of attention kernels: is yours right, and how fast is it beside cuDNN, FA2, lab 3 and the capstone?

::

    python -m benchmarks.attention_leaderboard mine.py --name "two warpgroups"
    python -m benchmarks.attention_leaderboard solutions.lab3_flash_attention
    python -m benchmarks.attention_leaderboard mine.py --forward-only --shapes 128x8192 128x8192:causal
    python -m benchmarks.attention_leaderboard

The last one only prints the board. What is measured is a file or a module with lab 3's interface,
``flash_attention(q, k, v, causal=False, scale=None)`` on tensors (batch, heads, tokens, head_dim), and
``flash_attention_with_lse`` if it has one.

**Right first.** Ragged cases, shared key heads, masks, strides and gradients are held against float64: the error may be
twice that of plain PyTorch in the same dtype (lab 3's rule). Who is wrong gets no row, and is told in which case, by
how much and where. ``--forward-only`` asks for no gradients.

**Then fast.** Shapes are ``head_dim x tokens``, ``:causal`` for a causal mask; each has 16,384 tokens and a hidden size
of 2048 in all. The default is lab 3's eight. All take turns on a warm card, and a figure is the median of ratios within
rounds: times as fast as cuDNN (as FA2 where there is no cuDNN). Results on these shapes are compared with lab 3's too.

**Then recorded**, in ``leaderboard.json`` where you are, or in ``--board FILE``: name, date, device, versions, times
and ratios, and the SHA-256 of your source, so that a row can be told from the next version's. A name's newest row
counts. Rows of other devices, dtypes or shapes have a table of their own.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    attention_board,
    attention_entry,
    attention_speed,
    benchmark_cli,
    blocked_stream,
    hopper_implementations,
    sustained,
)
from benchmarks.attention_board import YOURS, BoardError
from benchmarks.attention_determinism import relative_distance
from benchmarks.attention_entry import Entry, EntryError
from benchmarks.attention_speed import Shape
from benchmarks.hopper_attention import whole_rounds
from benchmarks.thermal_warmup import thermal_warmup
from utils import records, runtime, timing

#: What the participants of :mod:`benchmarks.hopper_implementations` are called here.
NAMES = {hopper_implementations.OURS: "capstone", hopper_implementations.FAST: "capstone, fast"}
RESERVED = (*NAMES.values(), hopper_implementations.LAB, *hopper_implementations.BASELINES, YOURS)
LONGEST_NAME = 40
#: Rounds of every comparison, at least, and seconds of work in a lap.
ROUNDS = 5
LAP_SECONDS = 0.05
WARM_SECONDS = 0.5
#: Results on the timed shapes may differ from lab 3's by this share of their norm.
FAR_OFF = 0.02


def shape_of(text: str) -> Shape:
    """``128x8192:causal`` as (batch, heads, seq_len, head_dim, causal).

    Raises:
        ArgumentTypeError: it is no such text, or the sizes do not divide 16,384 tokens and a hidden size of 2048.
    """
    sizes, _, mask = text.partition(":")
    head_dim, _, seq_len = sizes.partition("x")
    if mask not in ("", "causal", "full") or not (head_dim.isascii() and head_dim.isdigit() and seq_len.isdigit()):
        raise argparse.ArgumentTypeError(f"a shape is written 128x8192 or 128x8192:causal, got {text!r}")
    d, n = int(head_dim), int(seq_len)
    if not (16 <= d <= 256 and n >= 1) or attention_speed.HIDDEN % d or attention_speed.TOKENS % n:
        raise argparse.ArgumentTypeError(
            f"head_dim must be from 16 to 256 and divide {attention_speed.HIDDEN}, tokens must divide "
            f"{attention_speed.TOKENS}, got {text!r}"
        )
    return attention_speed.TOKENS // n, attention_speed.HIDDEN // d, n, d, mask == "causal"


def name_of(text: str) -> str:
    """A row's name as it was given.

    Raises:
        ArgumentTypeError: it is empty, too long, not printable, or the name of one that is always there.
    """
    name = text.strip()
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise argparse.ArgumentTypeError(f"a name has 1 to {LONGEST_NAME} printable characters, got {text!r}")
    if name in RESERVED:
        raise argparse.ArgumentTypeError(f"the name {name!r} is taken: choose another than {', '.join(RESERVED)}")
    return name


def far_off(entry: Entry, shape: Shape, dtype: torch.dtype, directions: Sequence[str]) -> None:
    """Compare the results on a timed shape with lab 3's.

    Raises:
        EntryError: they are further apart than rounding explains.
    """
    q, k, v, do = hopper_implementations.inputs(shape, dtype)
    results = []
    for attention in (lambda *tensors: entry.attention(*tensors[:3], causal=tensors[3]), attention_speed.ours):
        o = attention(q, k, v, shape[4])
        results.append((o, *(torch.autograd.grad(o, (q, k, v), do) if "backward" in directions else ())))
    for name, mine, right in zip(("o", "dq", "dk", "dv"), *results):
        distance = relative_distance(mine, right)
        if not distance <= FAR_OFF:
            raise EntryError(f"{name} is {distance:.1%} away from lab 3's (rounding explains {FAR_OFF:.0%} at most)")


def measure(entry: Entry, shapes: Sequence[Shape], dtype: str, directions: Sequence[str]) -> list[dict[str, Any]]:
    """Points of a row: everybody's time, and how many times as fast as cuDNN (or FA2) it is, ``over`` the base.

    Raises:
        EntryError: the entry fails on a shape or gives other results than lab 3's.
    """
    points = []
    attentions = {
        YOURS: lambda q, k, v, causal: entry.attention(q, k, v, causal=causal),
        **hopper_implementations.functions(),
    }
    if "backward" not in directions:
        del attentions[hopper_implementations.FAST]
    for shape in shapes:
        words = f"D {shape[3]}, N {shape[2]}, {'causal' if shape[4] else 'full'}"
        try:
            far_off(entry, shape, hopper_implementations.DTYPES[dtype], directions)
            found, _ = hopper_implementations.calls(shape, hopper_implementations.DTYPES[dtype], attentions, directions)
            thermal_warmup(found["forward", YOURS], WARM_SECONDS)
            for direction in directions:
                points.append(point(shape, direction, found))
        except EntryError as error:
            raise EntryError(f"{words}: {error}") from error
        except Exception as error:
            raise EntryError(f"{words}: timing ends with {attention_entry.said(error)}") from error
        print(f"  {words}: done", flush=True)
    return points


def point(shape: Shape, direction: str, found: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """Measure one direction of one shape."""
    chosen = {NAMES.get(name, name): call for (which, name), call in found.items() if which == direction}
    timed, calls_a_lap = sustained.compare(
        chosen,
        rounds=whole_rounds(list(chosen), ROUNDS),
        stopwatch=blocked_stream.stopwatch(),
        lap_seconds=LAP_SECONDS,
    )
    amount = attention_speed.flops(shape, direction)
    batch, heads, seq_len, head_dim, causal = shape
    return {
        "direction": direction,
        "batch": batch,
        "heads": heads,
        "seq_len": seq_len,
        "head_dim": head_dim,
        "causal": causal,
        "flops": amount,
        "calls_a_lap": calls_a_lap,
        "timed": {name: {**t.as_dict(), "flops_per_second": amount / t.median} for name, t in timed.items()},
        "over": {
            base: {name: timing.ratio(timed[base], timed[name]).as_dict() for name in chosen if name != base}
            for base in hopper_implementations.BASELINES
            if base in chosen
        },
    }


def row_of(
    entry: Entry, name: str, dtype: str, points: Sequence[Mapping[str, Any]], device: str, versions: Mapping[str, str]
) -> dict[str, Any]:
    """A row of the board, over cuDNN where it ran on every point, else over FA2.

    Raises:
        EntryError: neither of them ran on every point.
    """
    bases = [
        base for base in reversed(hopper_implementations.BASELINES) if all(base in each["over"] for each in points)
    ]
    if not bases:
        raise EntryError("neither cuDNN nor FA2 runs on all of these shapes here: there is nothing to compare with")
    return {
        "name": name,
        "target": entry.target,
        "sha256": entry.sha256,
        "date": datetime.date.today().isoformat(),
        "device": device,
        "versions": dict(versions),
        "dtype": dtype,
        "base": bases[0],
        "points": [{**each, "over": each["over"][bases[0]]} for each in points],
    }


def table(row: Mapping[str, Any]) -> str:
    """A row's points: TFLOP/s of everybody, and times as fast as the base."""
    names = list(dict.fromkeys(name for item in row["points"] for name in item["timed"]))
    lines = []
    for item in row["points"]:
        rates = [f"{t['flops_per_second'] / 1e12:.0f}" if t else "" for t in map(item["timed"].get, names)]
        lines.append([attention_speed.name_of(item), *rates, f"{item['over'][YOURS]['ratio']:.3f}"])
    headings = ["TFLOP/s", *(row["name"] if name == YOURS else name for name in names), f"x {row['base']}"]
    return benchmark_cli.text_table(headings, lines)


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_leaderboard", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("target", nargs="?", metavar="MODULE_OR_FILE", help="what to measure; without it, the board")
    parser.add_argument("--name", type=name_of, help="its name on the board; by default the module's or file's")
    parser.add_argument("--forward-only", action="store_true", help="without gradients")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=list(attention_speed.SHAPES), metavar="DxN")
    parser.add_argument("--dtype", choices=tuple(hopper_implementations.DTYPES), default="bf16")
    parser.add_argument("--board", type=Path, default=Path("leaderboard.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    if options.target is not None and options.name is None:
        try:
            options.name = name_of(options.target.removesuffix(".py").replace("/", ".").rpartition(".")[2])
        except argparse.ArgumentTypeError as error:
            parser.error(f"--name is needed: {error}")
    options.shapes = list(dict.fromkeys(options.shapes))
    return options


def enter(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Try, measure and record what the command line names; return the board's rows.

    Raises:
        EntryError, BoardError: as the messages say.
    """
    attention_board.read(options.board)  # a damaged board is told before anything is measured
    entry = attention_entry.load(options.target)
    if not runtime.HAS_GPU:
        raise EntryError("the leaderboard needs a CUDA GPU and none is in use here (python -m utils.runtime says why)")
    directions = attention_speed.DIRECTIONS[: 1 if options.forward_only else 2]
    head_dims = sorted({shape[3] for shape in options.shapes})
    print(f"{options.name} on {runtime.gpu_name()}", flush=True)
    tried = attention_entry.check(
        entry, [hopper_implementations.DTYPES[options.dtype]], head_dims, "backward" in directions
    )
    print(f"right in {tried} ragged cases", flush=True)
    workers = min(hopper_implementations.WORKERS, os.cpu_count() or 1)
    hopper_implementations.compile_first(options.shapes, [options.dtype], workers, directions)
    points = measure(entry, options.shapes, options.dtype, directions)
    row = row_of(entry, options.name, options.dtype, points, runtime.gpu_name(), records.versions())
    rows = attention_board.add(options.board, row)
    print(f"\n{table(row)}\nrecorded in {options.board}\n")
    return rows


@benchmark_cli.quiet()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when a row was recorded, or the board printed."""
    options = arguments_of(arguments)
    try:
        rows = attention_board.read(options.board) if options.target is None else enter(options)
    except (EntryError, BoardError) as error:
        print(f"attention_leaderboard: no row: {error}" if options.target else error, file=sys.stderr)
        return 1
    print(attention_board.boards(rows) if rows else f"nothing is recorded in {options.board} yet")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
