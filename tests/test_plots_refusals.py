"""What no figure of the course draws: refused with the value that is wrong, before anything is drawn."""

from types import SimpleNamespace

import numpy as np
import pytest

from utils import plots
from utils.hardware import GPUS, gpu
from utils.kernel_profile.lanes import Lanes
from utils.plots import attention, gradients, hopper
from utils.plots.anatomy import chip_anatomy
from utils.plots.blocks import block_animation, pool_state
from utils.plots.cache import DecodeStep, decode_animation, request_timeline
from utils.plots.exchange import before_and_after
from utils.plots.memory_map import block_history, memory_map, share_bars, slot_kinds
from utils.plots.programs import program_owners, programs_animation, tile_orders
from utils.plots.ring import ring_animation
from utils.schedules import gpipe, simulate
from utils.simt import Placement, occupancy
from utils.simt.ring import Barrier, run_ring
from utils.simt.warp import WarpTrace

H100 = gpu("H100")
ALT = "A text that says what the figure shows"


def drawn(draw, *data, **options):
    return lambda: draw(*data, title="A title", **options)


def sweep_of(series, x=(1, 2, 3), **options):
    return drawn(plots.sweep, x, series, xlabel="x", ylabel="y", **options)


def decoding(tokens, **runs):
    return drawn(decode_animation, tokens, runs, alt=ALT)


def lanes(argument="q_ptr", touched=True):
    return Lanes("kernel", (0, 0, 0), argument, "read", np.array([0]), np.array([touched]))


STEP = SimpleNamespace(chunks=[("A", 0, 1), ("B", 0, 1)], finished=())
POOL = SimpleNamespace(sequences=(), num_blocks=17, block_size=4)
STATES = [SimpleNamespace(block_size=size, references=(0,)) for size in (2, 4)]
TRACE = SimpleNamespace(maps=[()], steps=1, capacity=8)
TWO, THREE = (simulate(gpipe(stages, 2)) for stages in (2, 3))
PANEL = {"a": {"b": [("copy", 0, 2, 1)]}}

NOTHING = {
    "coalescing_map": [], "memory_pyramid": [], "latency_ranges": [], "occupancy_bars": ({}, H100), "tile_map": [],
    "sm_waves": ([], 4), "sm_waves_animation": ([], 4), "class_shares": {}, "memory_bars": {}, "state_bars": {},
    "memory_over_ranks": {}, "mesh_plot": [], "overlap_timeline": [], "pipeline_timeline": [], "in_flight_plot": {},
    "bubble_plot": {}, "slot_timeline": {}, "ragged_batch": {}, "reservation_plot": ({}, 8), "drafted_text": [],
    "generations": [],
}  # fmt: skip
BROADCAST = [([1, 1], [1, 1]), ([0, 0], [1, 1])]
REFUSED = {
    f"nothing: {name}": (drawn(getattr(plots, name), *(data if isinstance(data, tuple) else (data,))), "got|at least")
    for name, data in NOTHING.items()
} | {
    "nothing: tile_rates": (drawn(attention.tile_rates, {}), "tile_rates needs at least one entry"),
    "nothing: causal_tile_map": (drawn(attention.causal_tile_map, {}), "causal_tile_map needs at least one"),
    "nothing: tile_accesses": (lambda: attention.tile_accesses([], 16, 2), "tile_accesses needs at least one"),
    "nothing: sm_timeline": (drawn(hopper.sm_timeline, {}), "sm_timeline needs at least one"),
    "nothing: ladder": (drawn(hopper.ladder, {}, []), "ladder needs at least one"),
    "nothing: request_timeline": (drawn(request_timeline, {}), "request_timeline needs at least one"),
    "nothing: block_history": (drawn(block_history, [], 3, 4), "block_history needs at least one"),
    "nothing: memory_map": (drawn(memory_map, {}, {}), "memory_map needs at least one"),
    "nothing: share_bars": (drawn(share_bars, {}), "share_bars needs at least one"),
    "nothing: gradient_writers": (drawn(gradients.gradient_writers, {}, head_dim=16, tile=16), "at least one entry"),
    "nothing: before_and_after": (drawn(before_and_after, {}), "before_and_after needs at least one"),
    "a number that no sum gives": (
        drawn(before_and_after, {"broadcast": BROADCAST, "odd": [([1, 1], [4, 3]), ([2, 2], [3, 3])]}), "no sum"
    ),
    "other numbers of chunks": (
        drawn(before_and_after, {"broadcast": BROADCAST, "ragged": [([1, 1], [1, 1]), ([0], [1])]}), "chunks each"
    ),
    "nothing: block_animation": (drawn(block_animation, [], alt=ALT), "block_animation needs at least one"),
    "nothing: programs_animation": (drawn(programs_animation, [], (6, 20), alt=ALT), "programs_animation needs"),
    "nothing: program_owners": (drawn(program_owners, {}), "program_owners needs at least one"),
    "nothing: owners of a panel": (drawn(program_owners, {"none": ([], (2, 10))}), "panel 'none' needs at least one"),
    "nothing: tile_orders": (drawn(tile_orders, {}, 4), "tile_orders needs at least one"),
    "nothing: slots_of": (lambda: plots.slots_of([], 2), "slots_of needs at least one"),
    "nothing: trace": (drawn(plots.warp_timeline, WarpTrace((), 32)), "no steps"),
    "nothing: series": (sweep_of([]), "at least one series"),
    "nan": (drawn(plots.ragged_batch, {"a": float("nan")}), "ragged_batch needs numbers, got nan"),
    "nan in x": (sweep_of([plots.Series("a", [1, 2])], x=np.array([1, np.nan])), "sweep needs numbers, got nan"),
    # --- the hardware ---
    "a name for a GPU": (lambda: chip_anatomy("H100", 128), "'H100'"),
    "lanes of an SM": (lambda: chip_anatomy(H100, 130), "multiple of 4 schedulers, got 130"),
    "one level": (drawn(plots.memory_pyramid, [plots.MemoryLevel("L2", 10)], subtitle="s"), "between 2 and 12, got 1"),
    "upside down": (
        drawn(plots.memory_pyramid, [plots.MemoryLevel(n, c) for n, c in (("a", 9), ("b", 3))], subtitle="s"),
        "'b' is sm",
    ),
    "capacity": (
        drawn(plots.memory_pyramid, [plots.MemoryLevel("L1", -1), plots.MemoryLevel("L2", 9)], subtitle="s"),
        "capacity of a level must be positive, got -1",
    ),
    "latency": (lambda: plots.LatencyRange("L1", 50, 40, "x"), "50 and 40"),
    "one GPU": (drawn(plots.generations, [H100]), r"different years, got H100 \(2022\)"),
    "no rate": (drawn(plots.generations, [GPUS["K20X"], H100]), "K20X has no 16-bit arithmetic"),
    "warps": (drawn(plots.occupancy_bars, {"k": occupancy(H100, 256, 32)}, GPUS["T4"]), "T4 must be between 0 and 32"),
    "tile": (lambda: plots.TileGrid(1, 1, 0, 1, 1), "size of a grid must be positive, got 0"),
    "time": (drawn(plots.sm_waves, [Placement(0, 0, 1.0, 1.0)], 4), "start < end, got 1.0 to 1.0"),
    "SM": (drawn(plots.sm_waves, [Placement(4, 0, 0.0, 1.0)], 4), "between 0 and 3, got 4"),
    "idle pattern": (drawn(plots.coalescing_map, [plots.Pattern("none", [None] * 32)]), "'none' has no thread"),
    "order": (drawn(tile_orders, {"twice": [(0, 0), (0, 0), (1, 1), (1, 0)]}, 4), "'twice' must visit each"),
    "wave": (drawn(tile_orders, {"rows": [(0, 0)]}, 0), "wave must be positive, got 0"),
    "cells": (drawn(programs_animation, [lanes()], (60, 200), alt=ALT), "between 1 and 2048, got 12000"),
    "stages of a ring": (drawn(ring_animation, run_ring(8, 6), alt=ALT), "between 1 and 5, got 6"),
    "ceiling": (lambda: plots.Ceilings(-1.0, 2.0, "x"), "roof of 'x' must be positive, got -1"),
    "no flops": (drawn(plots.roofline_plot, H100, [plots.Point("copy", 0.0)]), "'copy'"),
    "limits": (drawn(plots.roofline_plot, H100, limits=(3, 2)), "limits"),
    "lower roof": (drawn(plots.roofline_plot, H100, lower_roofs={"fp8": 1979e12}), "'fp8' must be below 9.89e\\+14"),
    # --- curves and bars ---
    "lengths": (sweep_of([plots.Series("a", [1, 2])]), "'a' has 2 values for 3"),
    "log of zero": (sweep_of([plots.Series("a", [0, 1, 2])]), "positive"),
    "scale": (sweep_of([plots.Series("a", [1, 1, 2])], xscale="cubic"), "cubic"),
    "nan in a series": (lambda: plots.Series("a", [1, float("nan")]), "finite"),
    "half a band": (lambda: plots.Series("a", [1], low=[1]), "both low and high"),
    "kind": (lambda: plots.Series("a", [1], kind="thick"), "thick"),
    "grid": (lambda: plots.figure("A title", grid="all"), "'all'"),
    "share": (drawn(plots.class_shares, {"a": {"x": -1}}), "not negative, got -1"),
    "row of nothing": (drawn(plots.state_bars, {"a": {"x": 0}}), "the sum of 'a' must be positive, got 0"),
    "mark": (drawn(plots.memory_bars, {"x": {"y": 1}}, marks={"z": (1, "?")}), "'z', which is no row"),
    "shares": (drawn(share_bars, {"run": {"used": 0.9}}), r"must add up to 1, got 0\.9"),
    "no row": (lambda: plots.table([]), "at least one row"),
    "no names": (lambda: plots.table([(1, 2)]), "columns"),
    "long row": (lambda: plots.table([(1, 2)], ["a"]), "a row needs 1 values"),
    "other keys": (lambda: plots.table([{"a": 1}, {"b": 2}]), "'b'"),
    "unit of no column": (lambda: plots.table([{"a": 1}], units={"x": "s"}), "no column named 'x'"),
    "no frames": (drawn(plots.animate, [], alt=ALT), "2 to 120 frames, got 0"),
    "many frames": (drawn(plots.animate, [print] * 121, alt=ALT), "got 121"),
    "captions": (drawn(plots.animate, [print] * 2, alt=ALT, captions=("one",)), "one caption for each of the 2"),
    "short alt": (drawn(plots.animate, [print] * 2, alt="short"), "alt must say"),
    "pace": (drawn(plots.animate, [print] * 2, alt=ALT, seconds_per_frame=0), "seconds_per_frame"),
    # --- attention ---
    "argument": (lambda: attention.tile_accesses([lanes("x_ptr")], 16, 2), "one of q_ptr, .* got 'x_ptr'"),
    "empty access": (lambda: attention.tile_accesses([lanes(touched=False)], 16, 2), "access to Q needs at least one"),
    "panels": (drawn(attention.causal_tile_map, {name: [["full"]] for name in "abcd"}), "between 1 and 3, got 4"),
    "ragged rows": (drawn(attention.causal_tile_map, {"odd": [["full"], []]}), r"'odd' must have the same.*\[1, 0\]"),
    "kind of tile": (drawn(attention.causal_tile_map, {"odd": [["half"]]}), "skip, diagonal, full, got 'half'"),
    "tiles": (drawn(attention.causal_tile_map, {"fine": [["full"] * 41]}), "between 1 and 40, got 41"),
    "rate": (drawn(attention.tile_rates, {(1, 1): (0.0, False)}), "rate of a tile must be positive, got 0"),
    "probabilities": (drawn(gradients.softmax_jacobian, [0.5, 0.6]), "p must be probabilities"),
    "negative": (drawn(gradients.softmax_jacobian, [1.5, -0.5]), "p must be probabilities"),
    "nine": (drawn(gradients.softmax_jacobian, [1 / 9] * 9), "between 1 and 8, got 9"),
    "columns": (drawn(gradients.block_jacobian, np.eye(6), 5), "jacobian must be square with a multiple of 5"),
    "not square": (drawn(gradients.block_jacobian, np.eye(8)[:4], 4), r"got shape \(4, 8\)"),
    "large": (drawn(gradients.block_jacobian, np.eye(100), 10), "between 1 and 96, got 100"),
    "designs": (drawn(gradients.gradient_writers, {"a": {}, "b": {}}, head_dim=16, tile=16), "same gradients"),
    "own": (lambda: gradients.walk([lanes()], 16, 16, "v_ptr"), "k_ptr, q_ptr, got 'v_ptr'"),
    "interval": (drawn(hopper.sm_timeline, {"a": {"b": [("sleep", 0, 0, 1)]}}), "got 'sleep'"),
    "backwards": (drawn(hopper.sm_timeline, PANEL), "ends before it starts: 2 to 1"),
    "panel": (drawn(hopper.speedup_bars, {"forward": {}}), "panel 'forward' needs at least one"),
    "no tiles": (lambda: run_ring(0, 2), "tiles"),
    "one time": (lambda: run_ring(4, 2, read=(1, 2, 3)), "one for each of 2 consumers"),
    "parity": (lambda: Barrier(1).passes(2), "a parity is 0 or 1"),
    "steps": (drawn(hopper.ladder, {"a": {"b": [1, 2, 3]}}, ["a"]), "one value for each of 1 steps, got 3"),
    # --- many GPUs ---
    "names": (drawn(plots.pipeline_timeline, TWO, names=["a", "b"]), r"names and timelines must .* got \[2, 1\]"),
    "stages": (drawn(plots.in_flight_plot, {"a": TWO, "b": THREE}), r"same number of stages, got \[2, 3\]"),
    "bubble": (drawn(plots.bubble_plot, {"one stage": {4: 0.0}}), "'one stage' must be positive, got 0"),
    "formulas": (drawn(plots.bubble_plot, {"a": {4: 0.1}}, formulas={"1F1B": {}}), "formulas for 1F1B"),
    "curves": (drawn(plots.memory_over_ranks, {name: {1: 1} for name in "abcde"}), "between 1 and 4, got 5"),
    "one GPU a machine": (drawn(plots.rails_plot, 1, 450e9, 50e9), "gpus must be between 2 and 16, got 1"),
    "flat mesh": (drawn(plots.mesh_plot, [[0, 1], [2, 3]]), r"got shape \(2, 2\)"),
    "rank twice": (drawn(plots.mesh_plot, [[[0, 1], [1, 2]]]), "must be distinct numbers"),
    "span": (drawn(plots.overlap_timeline, [("a", "x", 2, 1)]), "span 'a' on 'x' needs start <= end, got 2 to 1"),
    # --- serving ---
    "queries": (lambda: DecodeStep(3, 2), "between 1 and 2 queries"),
    "keys": (decoding("a" * 9, a=[DecodeStep(3, 3), DecodeStep(1, 5)]), "3 keys is followed by one of 5"),
    "tokens": (decoding("abc", a=[DecodeStep(2, 2), DecodeStep(1, 3)]), "name the 3 positions and the one after"),
    "many tokens": (decoding("a" * 30, a=[DecodeStep(3, 3)]), "24 at most, got 30"),
    "no steps": (decoding("abc", a=[]), "steps of the runs must have the same length"),
    "one token": (drawn(request_timeline, {"a": [0.1]}), "at least two times that rise"),
    "time 0": (drawn(request_timeline, {"a": [0.0, 0.1]}), "at least two times that rise"),
    "falling": (drawn(request_timeline, {"a": [0.2, 0.1]}), "at least two times that rise"),
    "blocks": (lambda: pool_state(POOL, {}), "between 1 and 16, got 17"),
    "pools": (drawn(block_animation, STATES, alt=ALT), "one pool"),
    "block": (drawn(block_history, [{3: ("a", 1)}], 3, 4), "is not in a pool of 3 x 4"),
    "overfull": (drawn(block_history, [{0: ("a", 5)}], 3, 4), "is not in a pool of 3 x 4"),
    "no maps": (lambda: slot_kinds(SimpleNamespace(maps=[]), 0), "keep_maps=True"),
    "step": (lambda: slot_kinds(TRACE, 4), "step must be between 0 and 0, got 4"),
    "slots": (lambda: plots.slots_of([STEP], 1), "requests in a step must be between 0 and 1, got 2"),
    "arrivals": (drawn(plots.pool_animation, [STEP], {"A": 0}, {"A": 3}, 2), "one of A, got 'B'"),
    "request": (drawn(plots.ragged_batch, {"A": 0}), "tokens of a request must be positive, got 0"),
    "accepted": (lambda: plots.DraftedRound(("a",), 2, "b"), "between 0 and 1 drafted tokens, got 2"),
    "draft": (drawn(plots.drafted_text, [plots.DraftedRound(("a",) * 13, 0, "b")]), "between 0 and 12, got 13"),
    "two models": (drawn(plots.overlap_bars, [0.5], [0.5, 0.5], ["a"]), r"same length, at least 1, got \[1, 2, 1\]"),
    "probability": (drawn(plots.overlap_bars, [1.5], [0.5], ["a"]), "between 0 and 1, got 1.5"),
}  # fmt: skip


@pytest.mark.parametrize(("draw", "words"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_with_the_offending_value(draw, words):
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        draw()
    assert type(caught.value) is (TypeError if words == "'H100'" else ValueError)
