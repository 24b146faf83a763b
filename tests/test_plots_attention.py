"""The drawers of attention's forward pass: from real accesses and tiles, small, with alternative text, clear errors."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention_blocks import tile_of_forward
from solutions.lab3_flash_attention import flash_forward
from utils import plots, runtime
from utils.attention_math import AttentionShape, causal_tiles, flash2_traffic, on_chip_bytes
from utils.kernel_profile.lanes import trace_lanes
from utils.plots import attention


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
