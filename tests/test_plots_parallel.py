"""Figures of parallel training: drawn from simulated and recorded data, told in words, and refused when impossible."""

import copy
import itertools
from functools import cache

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from tests.drawn import boxes, picture_of, pixels_of, player_data
from utils import plots
from utils.gpt import TINY
from utils.plots.animate import LARGEST
from utils.plots.collectives import RANK_COLOURS, Move
from utils.plots.exchange import before_and_after
from utils.plots.schedule import KIND_COLOURS
from utils.schedules import gpipe, interleaved, naive, one_f_one_b, simulate, zero_bubble
from utils.transformer_math import Placement, memory_per_rank

PSI = 7_500_000_000
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


# ---- schedules ----


def test_every_action_is_a_box_from_its_start_to_its_end_on_its_stage():
    timeline = simulate(zero_bubble(3, 4))
    ax = plots.pipeline_timeline(timeline).axes[0]
    for kind, colour in KIND_COLOURS.items():
        expected = {(w.start, w.stage, w.end - w.start) for w in timeline.work if w.action.kind == kind}
        assert {tuple(np.round(box, 6)) for box in boxes(ax, colour)} == expected
    assert sorted(t.get_text() for t in ax.texts) == sorted(str(w.action.micro_batch) for w in timeline.work)


@pytest.mark.slow
def test_several_schedules_share_one_axis_and_say_their_bubbles():
    fig = plots.pipeline_timeline(
        [simulate(s) for s in (naive(4, 4), gpipe(4, 4), interleaved(4, 4, 2))], title="Three"
    )
    assert len(fig.axes) == 3 and len({ax.get_xlim() for ax in fig.axes}) == 1
    assert "naive: bubble 300 %, up to 1 micro-batch in flight; makespan 48, p = 4, m = 4" in fig.alt
    assert "GPipe: bubble 75 %" in fig.alt and "interleaved 1F1B, v = 2: bubble 37.5 %" in fig.alt
    assert "lighter: later chunk of layers" in {t.get_text() for t in fig.axes[-1].get_legend().get_texts()}
    picture_of(fig)


def test_a_schedule_without_a_title_says_how_long_it_idles():
    fig = plots.pipeline_timeline(simulate(one_f_one_b(4, 8)))
    assert fig.title == "1F1B idles for 37.5 % of the time it works"
    assert "bubble 12.5 % (between a stage's first and last action 0 %)" in (
        plots.pipeline_timeline(simulate(zero_bubble(4, 8, extra_memory=True))).alt
    )


def test_numbers_that_do_not_fit_are_left_out():
    ax = plots.pipeline_timeline(simulate(one_f_one_b(2, 128))).axes[0]
    assert not ax.texts and len(boxes(ax, KIND_COLOURS["F"])) == 256


def test_what_is_in_flight_is_drawn_over_time_and_by_stage():
    fig = plots.in_flight_plot(
        {s.name: simulate(s) for s in (gpipe(4, 8), one_f_one_b(4, 8), interleaved(4, 8, 2))}, title="Peaks"
    )
    peaks = {tuple(line.get_ydata()) for line in fig.axes[1].lines}
    assert peaks == {(8, 8, 8, 8), (4, 3, 2, 1), (5.5, 4.5, 3.5, 2.5)}
    assert "1F1B: peaks 4, 3, 2, 1 on stages 0 to 3" in fig.alt
    picture_of(fig)


def test_bubbles_are_points_with_the_formula_as_a_line():
    found = {m: simulate(gpipe(4, m)).bubble for m in (4, 8, 16)}
    fig = plots.bubble_plot({"GPipe": found}, formulas={"GPipe": {m: 3 / m for m in found}}, title="Half each time")
    points, line = fig.axes[0].lines
    np.testing.assert_allclose(points.get_ydata(), line.get_ydata())
    assert "GPipe: 75 % at 4, 37.5 % at 8, 18.8 % at 16" in fig.alt
    picture_of(fig)


# ---- memory ----


def test_the_bars_of_the_stages_add_up_to_the_published_totals():
    rows = {name: memory_per_rank(PSI, 64, stage) for stage, name in enumerate(STAGES)}
    fig = plots.state_bars(rows, limit=(80e9, "H100 80 GB"), title="Each stage divides one part more")
    for total in ("DDP: 120 GB", "ZeRO-1: 31.4 GB", "ZeRO-2: 16.6 GB", "ZeRO-3: 1.88 GB", "limit: H100 80 GB"):
        assert total in fig.alt
    ends = [
        max(p.get_x() + p.get_width() for p in fig.axes[0].patches if round(p.get_y() + 0.34) == y) for y in range(4)
    ]
    np.testing.assert_allclose(ends, [sum(row.values()) for row in rows.values()])
    picture_of(fig)


def test_components_of_a_placement_and_unknown_ones_are_drawn_too():
    rows = {"stage 0": Placement(TINY, 5, 5, 1, global_batch=2).memory(0) | {"buffers": 1e3}}
    fig = plots.state_bars(rows, title="A stage")
    assert {t.get_text() for t in fig.axes[0].get_legend().get_texts()} >= {"activations", "buffers"}
    picture_of(fig)


def test_curves_over_ranks_say_from_how_many_on_a_model_fits():
    ranks = [2**k for k in range(9)]
    memory = {name: {n: sum(memory_per_rank(PSI, n, k).values()) for n in ranks} for k, name in enumerate(STAGES)}
    fig = plots.memory_over_ranks(memory, limits={"T4": 16e9}, title="Only ZeRO-3 keeps falling")
    assert "DDP never fits into T4." in fig.alt and "ZeRO-3 fits into T4 from 8 on." in fig.alt
    assert "ZeRO-2 fits into T4 from 128 on." in fig.alt
    rings = [tuple(line.get_xydata()[0]) for line in fig.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert rings == [(128, memory["ZeRO-2"][128]), (8, memory["ZeRO-3"][8])]
    picture_of(fig)


# ---- meshes ----


@pytest.mark.slow
def test_a_mesh_colours_the_three_groups_of_a_rank():
    place = Placement(TINY, tensor=5, pipeline=5, data=3, global_batch=3)
    fig = plots.mesh_plot(place.ranks, title="75 ranks")
    stage, replica, part = place.coordinates(0)
    assert "A mesh of 75 ranks: 5 stages of the pipeline, 3 replicas, 5 parts of each layer" in fig.alt
    for group in (
        [place.rank(stage, replica, k) for k in range(5)],
        [place.rank(stage, k, part) for k in range(3)],
        [place.rank(k, replica, part) for k in range(5)],
    ):
        assert ", ".join(map(str, group)) in fig.alt
    assert {str(rank) for rank in range(75)} <= {t.get_text() for t in fig.axes[0].texts}
    picture_of(fig)


@pytest.mark.slow
def test_a_thousand_ranks_are_drawn_without_numbers():
    mesh = np.arange(1024).reshape(8, 16, 8)
    fig = plots.mesh_plot(mesh, title="1,024 ranks")
    assert "300" not in {t.get_text() for t in fig.axes[0].texts}
    assert "sums gradients with 0, 8, 16, ..., 120" in fig.alt
    picture_of(fig)


def test_a_mesh_of_two_dimensions_names_no_pipeline():
    fig = plots.mesh_plot([[[0, 1], [2, 3]]], title="Tensor and data parallel")
    assert [t.get_text() for t in fig.axes[0].get_legend().get_texts()] == [
        "rank 0", "its tensor group (2)", "its replicas (2)",
    ]  # fmt: skip
    picture_of(fig)


# ---- overlap ----

STEP = [
    ("forward", "compute", 1.0, 2.0),
    ("backward", "compute", 2.0, 4.0),
    ("ncclDevKernel_AllReduce_Sum_f32", "link", 3.0, 4.5),
    ("ncclDevKernel_AllReduce_Sum_f32", "link", 4.5, 5.0),
    ("adamw", "compute", 5.0, 5.5),
]


def test_what_runs_beside_computation_is_hidden_and_the_rest_exposed():
    found = plots.overlap_of(STEP)
    assert found == (2.0, 3.5, 1.0) and found.hidden_share == 0.5 and found.exposed == 1.0
    assert plots.overlap_of(STEP[:2]).hidden_share == 1


def test_spans_that_overlap_on_one_lane_or_repeat_on_another_count_once():
    assert plots.overlap_of([*STEP, *[(name, f"{lane} 2", a, b) for name, lane, a, b in STEP]]) == plots.overlap_of(
        STEP
    )
    assert plots.overlap_of([("a", "x", 0, 4), ("b", "x", 1, 2), ("gloo:all_reduce", "y", 1, 6)]) == (5, 4, 3)


def test_the_timeline_draws_each_span_from_the_first_ones_start():
    fig = plots.overlap_timeline(STEP, title="Half of it hides")
    ax = fig.axes[0]
    corners = [
        (path.vertices[:, 0].min(), path.vertices[:, 0].max())
        for c in ax.collections if isinstance(c, PolyCollection) for path in c.get_paths()
    ]  # fmt: skip
    assert sorted(corners) == [(start - 1, end - 1) for _, _, start, end in STEP]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["compute", "link", "communication"]
    assert "Communication takes 2 s, 50 % of it beside computation, 1 s exposed." in fig.alt
    assert "compute 77.8 %, link 44.4 %" in fig.alt
    picture_of(fig)


@pytest.mark.slow
def test_thousands_of_kernels_are_drawn_without_names():
    many = [(f"kernel number {k}", "stream 7", k * 1e-5, k * 1e-5 + 8e-6) for k in range(2000)]
    fig = plots.overlap_timeline(many, title="Many kernels")
    assert all("kernel" not in t.get_text() for t in fig.axes[0].texts)
    picture_of(fig)


# ---- collectives ----


def ring_all_reduce(n):
    """Numbers of the chunks on each rank after each step, of a ring in which rank r starts with 2**r everywhere."""
    state = [[2**rank] * n for rank in range(n)]
    states = [copy.deepcopy(state)]
    for step in range(2 * n - 2):
        before, gathers = copy.deepcopy(state), step >= n - 1
        for rank in range(n):
            chunk = (rank + 1 - (step - n + 1) if gathers else rank - step) % n
            to = (rank + 1) % n
            state[to][chunk] = before[rank][chunk] + (0 if gathers else before[to][chunk])
        states.append(copy.deepcopy(state))
    return states


@cache
def played(n):
    return plots.collective_animation(plots.contributions(ring_all_reduce(n)), title="Ring all-reduce")


def test_powers_of_two_tell_which_ranks_a_chunk_contains():
    assert plots.contributions([[[0, 1, 5], [2, 3, 6], [4, 7, 7]]]) == [
        [[set(), {0}, {0, 2}], [{1}, {0, 1}, {1, 2}], [{2}, {0, 1, 2}, {0, 1, 2}]]
    ]
    with pytest.raises(ValueError, match="step 0, rank 1, chunk 0: 4 is no sum of distinct contributions 1, 2"):
        plots.contributions([[[1], [4]]])


@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_message_of_a_ring_goes_to_the_next_rank(n):
    states = plots.contributions(ring_all_reduce(n))
    for before, after in itertools.pairwise(states):
        moves = plots.moves_between(before, after)
        assert len(moves) == n and all(m.target == (m.source + 1) % n for m in moves)
        assert all(m.carried == before[m.source][m.chunk] for m in moves)
    assert all(len(held) == n for row in states[-1] for held in row)


def test_a_broadcast_from_one_rank_is_two_messages_of_it():
    before, after = plots.contributions([[[1], [2], [4]], [[1], [1], [1]]])
    assert plots.moves_between(before, after) == [Move(0, 1, 0, frozenset({0})), Move(0, 2, 0, frozenset({0}))]


@pytest.mark.slow
def test_a_ring_is_played_from_its_start_to_full_sums_and_stays_small():
    made = played(2)
    captions = player_data(made)["captions"]
    assert len(captions) == 1 + 2 * 2
    assert captions[0] == "Before: 0 of 4 chunks hold the data of all 2 ranks."
    assert captions[1].startswith("Step 1 of 2: rank 1 sends chunk 1 to rank 0; rank 0 sends chunk 0 to rank 1")
    assert captions[-1] == "After step 2: 4 of 4 chunks hold the data of all 2 ranks."
    assert "2 ranks in a ring exchange chunks in 2 steps; at the end 4 of 4" in made.alt
    assert len(made.html.encode()) < LARGEST / 3


def test_the_still_shows_chunks_in_the_colours_of_their_ranks():
    assert all(pixels_of(played(2).poster, colour, within=6) > 500 for colour in RANK_COLOURS[:2])


def test_states_that_no_messages_explain_are_refused():
    a, b = frozenset({0}), frozenset({1})
    with pytest.raises(ValueError, match=r"rank 0, chunk 0: no rank could have turned \{0\} into \{0, 2\} in one step"):
        plots.moves_between([[a], [b], [b]], [[frozenset({0, 2})], [b], [b]])
    with pytest.raises(ValueError, match="step 1 must have 2 ranks of 1 chunks each"):
        plots.collective_animation([[[a], [b]], [[a, b], [b]]], title="t")
    with pytest.raises(ValueError, match="there must be 2 to 6 ranks, got 7"):
        plots.collective_animation([[[a]] * 7] * 2, title="t")
    with pytest.raises(ValueError, match=r"rank 1, chunk 0: \{5\} are not all ranks"):
        plots.collective_animation([[[a], [frozenset({5})]]] * 2, title="t")
    with pytest.raises(ValueError, match="before and after at least one step, got 1"):
        plots.collective_animation([[[a], [b]]], title="t")


# ---- collectives before and after ----


def test_each_collective_is_a_frame_and_the_alternative_text_says_who_holds_what():
    collectives = {
        "broadcast": [([1, 1], [1, 1]), ([0, 0], [1, 1])],
        "all-reduce": [([1, 1], [3, 3]), ([2, 2], [3, 3])],
    }
    drawn = before_and_after(collectives, title="Two collectives")
    assert "broadcast: ranks hold 0 | 0; - | - before and 0 | 0; 0 | 0 after" in drawn.alt
    assert "all-reduce: ranks hold 0 | 0; 1 | 1 before and 01 | 01; 01 | 01 after" in drawn.alt
    assert "2 of 4 chunks hold something else afterwards" in drawn.html
    assert len(drawn.html) < 100_000


def test_rails_join_the_cards_of_equal_number_and_the_rates_are_those_given():
    fig = plots.rails_plot(4, 450e9, 50e9, title="Two machines")
    (ax,) = fig.axes
    written = [text.get_text() for text in ax.texts]
    assert [written.count(f"GPU {k}") for k in range(5)] == [2, 2, 2, 2, 0] and written.count("card") == 8
    assert "NVLink: each GPU sends 450 GB/s" in written and "network: each\ncard sends\n50 GB/s" in written
    assert "Two machines of 4 GPUs" in fig.alt and "50 GB/s" in fig.alt
