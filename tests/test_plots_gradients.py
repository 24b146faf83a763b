"""Pictures of the backward pass are drawn from what was computed, and say it in their alternative text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from utils import example_kernels as ek
from utils import plots, runtime
from utils.kernel_profile.lanes import trace_lanes
from utils.plots import gradients

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


def test_the_block_picture_counts_what_lies_outside_of_the_blocks():
    s = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, -1), s).reshape(12, 12).numpy()
    fig = gradients.block_jacobian(jacobian, 4, title="Blocks")
    assert "3 blocks of 4 by 4" in fig.alt and "0 of 96 entries" in fig.alt and plots.png(fig)
    assert "96 of 96 entries" in gradients.block_jacobian(np.ones((12, 12)), 4, title="No blocks").alt


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
