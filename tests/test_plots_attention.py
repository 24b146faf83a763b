"""The drawers of attention, forward and backward: from real accesses and tiles, small, said in alternative text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.attention_blocks import tile_of_forward
from solutions.lab3_flash_attention import flash_forward
from utils import example_kernels as ek
from utils import plots, runtime
from utils.attention_math import AttentionShape, causal_tiles, flash2_traffic, on_chip_bytes
from utils.kernel_profile.lanes import trace_lanes
from utils.plots import attention, gradients


@pytest.fixture(scope="module")
def accesses():
    q, k, v = (torch.zeros(1, 1, n, 16, dtype=torch.float16, device=runtime.DEVICE) for n in (40, 48, 48))
    with tile_of_forward((16, 16, 4, 1)), trace_lanes() as trace:
        flash_forward(q, k, v)
    return attention.tile_accesses(trace.lanes, head_dim=16, element_size=2)


def walk(accesses, **options):
    given = {"num_queries": 40, "num_keys": 48, "on_chip": {"Q": 512, "O": 1024}} | options
    return attention.tile_walk_animation(
        accesses, title="A walk over tiles", alt="Tiles that pass by one another.", **given
    )


def test_the_accesses_of_a_kernel_are_the_formulas_bytes_tensor_by_tensor(accesses):
    traffic = flash2_traffic(AttentionShape(1, 1, 40, 16, num_keys=48), 16, 16, "fp16")
    for tensor, bytes_of in (
        ("Q", traffic.q),
        ("K", traffic.k),
        ("V", traffic.v),
        ("O", traffic.o),
        ("L", traffic.lse),
    ):
        assert sum(one.bytes for one in accesses if one.tensor == tensor) == bytes_of
    last = [one for one in accesses if one.tensor == "Q"][-1]
    assert (last.program, last.first, last.last) == (2, 32, 40)  # the ragged tile


@pytest.mark.slow
def test_the_walk_shows_every_tile_once_and_counts_all_bytes(accesses):
    frames = attention._frames(accesses)
    assert len(frames) == 3 * (1 + 3 + 1)
    assert frames[-1].moved == sum(one.bytes for one in accesses)
    assert len(frames[-1].done) == 9
    assert [one.tensor for one in frames[1].moves] == ["K", "V"]
    made = walk(accesses, on_chip=on_chip_bytes(16, 16, 16)["registers"])
    assert len(made.html) < 300_000 and "Tiles that pass by" in made.html


def test_the_causal_map_says_how_many_tiles_are_skipped():
    fig = attention.causal_tile_map(
        {"square": causal_tiles(64, 64, 16, 16), "wide": causal_tiles(32, 64, 16, 16)}, title="Tiles"
    )
    assert "square: 6 full, 4 on the diagonal, 6 skipped" in fig.alt and "wide: 5 full" in fig.alt
    assert len(plots.png(fig)) > 1000


def test_bars_of_traffic_name_their_sums_and_the_published_figure():
    rows = {"standard": {"scores": 4e9, "inputs": 1e9}, "flash": {"inputs": 2e9}}
    fig = plots.memory_bars(rows, marks={"flash": (1.5e9, "published")}, name="HBM traffic", title="Less traffic")
    assert "standard: 5 GB" in fig.alt and "published 1.5 GB" in fig.alt
    assert len(plots.png(fig)) > 1000


def test_the_map_of_rates_names_the_tiles_that_spill_or_were_refused():
    fig = attention.tile_rates(
        {(64, 64): (4e14, False), (128, 64): (2e14, True), (64, 128): (3e14, False)}, title="Rates"
    )
    assert "64 x 64: 400; 128 x 64: 200, spills" in fig.alt
    assert len(plots.png(fig)) > 1000


def test_accesses_outside_of_the_matrices_are_refused(accesses):
    with pytest.raises(ValueError, match="outside of its 20"):
        walk(accesses, num_keys=20)


# ---- the backward pass ----

TILE, HEAD_DIM, N = 16, 16, 48


def traced(way, causal=True):
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, 1, N, HEAD_DIM, generator=generator).to(runtime.DEVICE) for _ in range(4))
    o, lse = ek.flash_attention_forward(q, k, v, causal=causal)
    with trace_lanes() as trace:
        ek.flash_attention_backward(q, k, v, o, lse, do, causal, way=way, tile=(TILE, TILE, 4, 1))
    return trace.lanes


def writes(lanes):
    return {
        name: [x for x in lanes if x.argument == f"{name}_ptr" and x.access != "read"] for name in ("dk", "dv", "dq")
    }


def of_kernel(lanes, name):
    return [x for x in lanes if x.kernel == name]


def test_the_jacobian_is_drawn_for_probabilities_only():
    fig = gradients.softmax_jacobian([0.5, 0.3, 0.2], title="A row's Jacobian")
    assert "p = (0.50, 0.30, 0.20)" in fig.alt and plots.png(fig)


@pytest.mark.slow
def test_the_block_picture_counts_what_lies_outside_of_the_blocks():
    s = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, -1), s).reshape(12, 12).numpy()
    fig = gradients.block_jacobian(jacobian, 4, title="Blocks")
    assert "3 blocks of 4 by 4" in fig.alt and "0 of 96 entries" in fig.alt and plots.png(fig)
    assert "96 of 96 entries" in gradients.block_jacobian(np.ones((12, 12)), 4, title="No blocks").alt


@pytest.mark.slow
def test_several_writers_of_a_tile_are_counted_and_hatched():
    designs = {"one kernel": writes(traced("atomics")), "two kernels": writes(traced("second pass"))}
    fig = gradients.gradient_writers(designs, head_dim=HEAD_DIM, tile=TILE, title="Who writes what")
    assert "one kernel, dq: 2 of 3 tiles written by several programs" in fig.alt  # the first tile has one key tile
    assert "one kernel, dk: 0 of 3" in fig.alt and "two kernels, dq: 0 of 3" in fig.alt
    assert plots.png(fig)


@pytest.mark.slow
def test_a_walk_visits_the_tiles_that_the_kernel_visits():
    lanes = traced("second pass")
    main = gradients.walk(of_kernel(lanes, "flash_attention_backward_kernel"), HEAD_DIM, TILE, "k_ptr")
    assert [step.tile for step in main] == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]
    assert main[0].read == [("k_ptr", 0), ("v_ptr", 0), ("q_ptr", 0), ("do_ptr", 0)]
    assert [step.written for step in main if step.written] == [[("dk_ptr", j), ("dv_ptr", j)] for j in range(3)]
    second = gradients.walk(of_kernel(lanes, "flash_attention_dq_kernel"), HEAD_DIM, TILE, "q_ptr")
    assert [step.tile for step in second] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert second[1].read == [("q_ptr", 1), ("do_ptr", 1), ("k_ptr", 0), ("v_ptr", 0)]
    assert second[2].read == [("k_ptr", 1), ("v_ptr", 1)] and second[2].written == [("dq_ptr", 1)]
    animation = gradients.tile_walk(
        {"dK and dV": main, "dQ": second},
        (3, 3),
        title="Two walks",
        alt="Tiles of the scores are visited in two orders.",
    )
    assert animation._repr_mimebundle_()
