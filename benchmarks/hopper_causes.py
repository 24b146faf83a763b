"""What two differences between attention kernels are worth, on a Hopper GPU, bf16: one thing is changed at a time.

* ``slack``: the capstone's forward pass beside itself with the true maximum of each row, which is rescaled whenever it
  grows (:func:`solutions.capstone_hopper.softmax.online_softmax`). Before they are timed, both are held against float64
  on rows whose maxima grow from tile to tile, which random scores do not do.
* ``tiles``: FlashAttention-4 beside itself with the capstone's tile, where its own is another: 80 queries a step in the
  backward pass of a head_dim of 128 without a mask, and 80 keys a step in the forward pass of 256. Triton's tiles are
  powers of two. Before they are timed, both give results that are right by lab 3's rule.

Shapes, laps and rounds are those of :mod:`benchmarks.hopper_attention`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks import attention_speed, benchmark_cli, hopper_attention, hopper_implementations, hopper_peers
from benchmarks.attention_speed import Attention, Shape
from benchmarks.hopper_implementations import FAST, OURS
from benchmarks.thermal_warmup import thermal_warmup
from solutions.capstone_hopper import tuning
from utils import reference
from utils.record_schemas import TEXT

DTYPE = "bf16"
TRUE_MAXIMUM, PEER, OUR_TILE = "true maximum", "fa4", "fa4, our tile"
#: Where FlashAttention-4 has another tile: the direction and the shapes.
TILE_SHAPES: dict[str, tuple[Shape, ...]] = {
    "backward": tuple(s for s in hopper_attention.SHAPES if s[3] == 128 and not s[4]),
    "forward": tuple(s for s in hopper_attention.SHAPES if s[3] == 256),
}
EFFORT = hopper_attention.Effort(rounds=6, lap_seconds=0.05, warm_seconds=0.5)


def slack_calls(shape: Shape) -> dict[tuple[str, str], Callable[[], object]]:
    """The forward pass as it is and with the true maximum."""
    from solutions.capstone_hopper.launch import hopper_forward  # Gluon's kernels exist only where there is a GPU

    q, k, v, _ = hopper_implementations.inputs(shape, hopper_implementations.DTYPES[DTYPE])
    forward = functools.partial(hopper_forward, q.detach(), k.detach(), v.detach(), shape[4], shape[3] ** -0.5)
    return {("forward", OURS): forward, ("forward", TRUE_MAXIMUM): functools.partial(forward, slack=0)}


def check_growing(head_dims: Sequence[int]) -> None:
    """Hold the forward pass, with slack and without, against float64 where the maxima of every third row grow by far.

    Raises:
        RuntimeError: it is wrong; the message says for which head_dim and slack, and by how much.
    """
    from solutions.capstone_hopper.launch import hopper_forward

    for head_dim in head_dims:
        q, k, v, _ = hopper_implementations.inputs((2, 3, 1024, head_dim, False), hopper_implementations.DTYPES[DTYPE])
        with torch.no_grad():
            q[:, :, ::3] *= 9
            k *= torch.linspace(4, 0.5, 1024, device=k.device)[:, None].to(
                k.dtype
            )  # tiles go from the last to the first
        exact = [x.detach().double() for x in (q, k, v)]
        for causal, slack in ((False, 8), (False, 0), (True, 8), (True, 0)):
            want, want_lse = reference.attention(*exact, causal)
            o, lse = hopper_forward(q.detach(), k.detach(), v.detach(), causal, head_dim**-0.5, slack)
            errors = (o.cpu() - want.cpu()).abs().max().item(), (lse.cpu() - want_lse.cpu()).abs().max().item()
            if not (errors[0] < 0.03 and errors[1] < 1e-3):
                raise RuntimeError(f"D {head_dim}, causal {causal}, slack {slack}: off by {errors} (output, logsumexp)")


@contextlib.contextmanager
def our_tile() -> Iterator[None]:
    """Inside the block FlashAttention-4 takes the capstone's tile, backward at a head_dim of 128, forward at 256."""
    interface = importlib.import_module("flash_attn.cute.interface")
    forward, backward = interface._tile_size_fwd_sm90, interface._tile_size_bwd_sm90

    def forward_tile(*arguments: Any, **more: Any) -> Any:
        return dataclasses.replace(forward(*arguments, **more), n_block_size=tuning.forward(256, False).columns)

    def backward_tile(*arguments: Any, **more: Any) -> Any:
        rows = tuning.backward(128).rows
        return dataclasses.replace(backward(*arguments, **more), m_block_size=rows, dQ_swapAB=False)

    with mock.patch.multiple(interface, _tile_size_fwd_sm90=forward_tile, _tile_size_bwd_sm90=backward_tile):
        yield


def tile_calls(shape: Shape, direction: str, peer: Attention) -> dict[tuple[str, str], Callable[[], object]]:
    """FlashAttention-4 with its own tile and with the capstone's, and the capstone."""
    ours = OURS if direction == "forward" else FAST
    everybody = {ours: hopper_implementations.functions()[ours], PEER: peer}
    if ours == FAST:
        everybody[OURS] = hopper_implementations.functions()[OURS]
    found, _ = hopper_implementations.calls(shape, hopper_implementations.DTYPES[DTYPE], everybody)
    own = found[direction, PEER]

    def with_our_tile() -> None:
        with our_tile():
            own()

    return {(direction, ours): found[direction, ours], (direction, PEER): own, (direction, OUR_TILE): with_our_tile}


_POINTS = hopper_attention.SCHEMA["points"]
SCHEMA = {"package": TEXT, "slack": _POINTS, "tiles": _POINTS}


@benchmark_cli.quiet()
def measure(
    quick: bool = False,
    shapes: Sequence[Shape] | None = None,
    tile_shapes: dict[str, Sequence[Shape]] | None = None,
    cases: Sequence[tuple] = hopper_peers.CASES,
    effort: hopper_attention.Effort = EFFORT,
) -> dict[str, Any]:
    """Both comparisons; ``quick`` takes three shapes of the first and one of each direction of the second.

    Raises:
        RuntimeError: there is no GPU here, it is not one of Hopper's, FlashAttention-4 cannot be used, or the capstone
            is wrong.
        EntryError: FlashAttention-4 is wrong with one of its tiles.
    """
    hopper_implementations.need_hopper()
    shapes = shapes or (hopper_attention.SHAPES[1::4] if quick else hopper_attention.SHAPES)
    tile_shapes = tile_shapes or {d: s[:1] if quick else s for d, s in TILE_SHAPES.items()}
    packages, broken = hopper_peers.installed()
    if PEER not in packages:
        raise RuntimeError(f"FlashAttention-4 cannot be used: {broken.get(PEER, 'it is not installed')}")
    head_dims = sorted({shape[3] for group in tile_shapes.values() for shape in group})
    check_growing(sorted({shape[3] for shape in shapes}))
    hopper_peers.check(PEER, packages[PEER], head_dims, cases)
    with our_tile():
        hopper_peers.check(OUR_TILE, packages[PEER], head_dims, cases)

    def point(shape: Shape, direction: str, calls: dict[tuple[str, str], Callable[[], object]]) -> dict[str, Any]:
        thermal_warmup(next(iter(calls.values())), effort.warm_seconds)
        measured = hopper_attention.point(shape, DTYPE, direction, calls, effort)
        print(f"{attention_speed.name_of(measured)}: done", flush=True)
        return measured

    return {
        "package": hopper_peers.version(hopper_peers.PACKAGES[PEER][0]),
        "slack": [point(shape, "forward", slack_calls(shape)) for shape in shapes],
        "tiles": [
            point(shape, direction, tile_calls(shape, direction, packages[PEER]))
            for direction, group in tile_shapes.items()
            for shape in group
        ],
    }


def table(results: dict[str, Any]) -> str:
    """One line a point: TFLOP/s of each, and of the one that has both tiles how much its own is worth."""
    lines = []
    for part in ("slack", "tiles"):
        names = list(dict.fromkeys(name for item in results[part] for name in item["timed"]))
        rows = []
        for item in results[part]:
            rates = {name: t["flops_per_second"] / 1e12 for name, t in item["timed"].items()}
            first, second = (OURS, TRUE_MAXIMUM) if part == "slack" else (PEER, OUR_TILE)
            shown = [f"{rates[name]:.0f}" if name in rates else "" for name in names]
            rows.append([attention_speed.name_of(item), *shown, f"{rates[first] / rates[second]:.3f}"])
        last = f"{OURS} x {TRUE_MAXIMUM}" if part == "slack" else f"{PEER} x {OUR_TILE}"
        lines.append(benchmark_cli.text_table(["TFLOP/s", *names, last], rows))
    return "\n".join([*lines, f"{PEER} is {hopper_peers.PACKAGES[PEER][0]} {results['package']}"])


if __name__ == "__main__":
    raise SystemExit(benchmark_cli.run("hopper_causes", measure, table, SCHEMA))
