"""A ring of tiles behaves as Hopper's barriers make it, and the figures of lecture 14 say what they show."""

import pytest

from utils import plots
from utils.plots import hopper, ring
from utils.simt.ring import Barrier, RingError, run_ring

SEQUENTIAL = {
    "producer": [("copy", 0, 0.0, 50.0), ("copy", 1, 60.0, 90.0)],
    "consumer 0": [
        ("scores", 0, 0.0, 20.0), ("waiting", 0, 0.0, 20.0), ("softmax", 0, 20.0, 60.0), ("output", 0, 60.0, 80.0),
    ],
    "consumer 1": [("scores", 0, 10.0, 30.0), ("softmax", 0, 30.0, 70.0), ("output", 0, 70.0, 100.0)],
}  # fmt: skip
LADDER = {"D = 128": {"full": [0.5, 0.6, 1.02], "causal": [0.4, None, 1.1]}}


def test_one_arrival_too_many_is_an_error():
    barrier = Barrier(1)
    barrier.expect(8)
    with pytest.raises(RingError, match="more than 1 arrivals in phase 0"):
        barrier.arrive()


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_every_consumer_reads_every_tile_once_and_in_order(stages, consumers):
    run = run_ring(11, stages, consumers=consumers, read=tuple(range(1, consumers + 1)))
    for c in range(consumers):
        assert [w.tile for w in run.work if w.actor == f"consumer {c}" and w.kind == "read"] == list(range(11))
    last = run.frames[-1].stages
    assert all(stage.full[0] == stage.empty[0] == len(range(s, 11, stages)) for s, stage in enumerate(last))


def test_stages_hide_the_copy_until_there_are_enough_of_them():
    ends = [run_ring(16, stages, copy=3, read=2).end for stages in (1, 2, 3, 4)]
    assert ends == [16 * 5, 42, 3 + 16 * 2, 3 + 16 * 2]
    assert run_ring(16, 3, copy=3, read=2).waited("consumer 0") == 3


def test_a_producer_that_starts_with_parity_0_hangs_and_everybody_is_named():
    with pytest.raises(
        RingError, match=r"nobody can go on at tick 0: producer waits for empty\[0\], parity 0; consumer 0"
    ):
        run_ring(8, 3, first_parity=0)


def test_a_producer_that_does_not_wait_overwrites_what_is_read():
    with pytest.raises(RingError, match="tile 2 overwrites tile 0 in stage 0 while it is being read"):
        run_ring(8, 2, copy=1, read=4, wait_for_empty=False)
    with pytest.raises(RingError, match="tile 2 overwrites tile 0 in stage 0 before it has arrived"):
        run_ring(8, 2, copy=9, wait_for_empty=False)


@pytest.mark.slow
def test_the_ring_is_drawn_with_its_phases_and_who_waits():
    run = run_ring(6, 3)
    frame = run.frames[4]
    _, ax = plots.figure("A ring")
    ring.draw_ring(ax, frame=frame)
    written = {text.get_text() for text in ax.texts}
    assert {"full[0]", "empty[2]", "tile 0", "producer"} <= written
    film = ring.ring_animation(run, title="A ring", alt="Six tiles pass through a ring of three stages", most=5)
    assert f"Tick {frame.time}: producer {frame.doing[0]}; consumer 0 {frame.doing[1]}" in film.html
    assert "Six tiles pass" in film.alt and len(film.poster) > 1000


def test_time_under_way_is_that_of_anybody_and_counted_once():
    assert hopper.under_way(SEQUENTIAL) == 30 + 40
    assert hopper.under_way(SEQUENTIAL, ("softmax",)) == 50
    cut = hopper.clipped(SEQUENTIAL, 15, 65)
    assert cut["consumer 0"][0] == ("scores", 0, 0, 5) and hopper.under_way(cut) == 15 + 5


@pytest.mark.slow
def test_the_timeline_says_how_long_the_tensor_cores_work():
    figure = hopper.sm_timeline({"in turn": SEQUENTIAL, "cut": hopper.clipped(SEQUENTIAL, 0, 50)}, title="Turns")
    assert "in turn: a product is under way 70 % of the time, a softmax 50 %." in figure.alt
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["in turn", "cut"]
    assert len(plots.png(figure)) > 1000


def test_a_ladder_has_a_line_a_series_and_leaves_out_what_was_not_measured():
    figure = hopper.ladder(LADDER, ["a", "b", "c"], title="Three steps")
    assert "D = 128, full: 0.5, 0.6, 1.02; D = 128, causal: 0.4, 1.1." in figure.alt
    lines = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
    assert [list(line.get_xdata()) for line in lines] == [[0, 1, 2], [0, 2]]


def test_ratios_beside_a_peer_show_their_spread():
    rows = {"N 2048": {"bf16": (1.02, 1.0, 1.05), "fp16": (0.98, 0.97, 0.99)}}
    figure = hopper.speedup_bars({"forward": rows, "backward": rows}, title="Beside")
    assert "forward, N 2048, bf16: 1.02; forward, N 2048, fp16: 0.98" in figure.alt
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() and len(plots.png(figure)) > 1000
