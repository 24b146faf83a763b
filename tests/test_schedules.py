"""Pipeline schedules: orders as PyTorch has them, bubbles and memory as the papers have them, deadlocks told."""

import itertools
import random
from fractions import Fraction

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from utils.schedules import (
    Action,
    Deadlock,
    Schedule,
    from_orders,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    simulate,
    zero_bubble,
)

SEED = 20266
SIZES = [(1, 1), (1, 5), (2, 4), (3, 7), (4, 4), (4, 8), (4, 2), (5, 3), (8, 16)]
EVERY = [naive, gpipe, one_f_one_b, zero_bubble, lambda p, m: zero_bubble(p, m, extra_memory=True)]


def torchs(name, p, m, v=None):
    """Orders of PyTorch's own schedule as tuples (kind, micro-batch, chunk); idle slots and reductions left out."""
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    return [
        [
            (kinds[op.computation_type.name], op.microbatch_index, op.stage_index // p)
            for op in rank
            if op is not None and op.computation_type.name in kinds
        ]
        for rank in get_schedule_ops(name, p, m, v)
    ]


def tuples(schedule):
    return [[tuple(action) for action in order] for order in schedule.orders]


# ---- orders ----


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_is_pytorchs(p, m):
    assert tuples(gpipe(p, m)) == torchs("GPipe", p, m)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 4, 2), (3, 6, 3), (4, 8, 2), (4, 4, 3), (4, 16, 2)])
def test_interleaved_1f1b_is_pytorchs(p, m, v):
    assert tuples(interleaved(p, m, v)) == torchs("Interleaved1F1B", p, m, v)


def test_1f1b_alternates_between_warm_up_and_cool_down():
    kinds = ["".join(a.kind for a in order) for order in one_f_one_b(3, 5).orders]
    assert kinds == ["FFFBFBFBBB", "FFBFBFBFBB", "FBFBFBFBFB"]


def test_zero_bubble_puts_gradients_of_weights_off_by_the_stage():
    assert [" ".join(map(str, order)) for order in zero_bubble(2, 3).orders] == [
        "F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_schedule_starts_actions_after_what_they_need_and_one_at_a_time(make, p, m):
    schedule = make(p, m)
    timeline = simulate(schedule, forward=1.25, backward=2.5)
    assert len(timeline.work) == sum(map(len, schedule.orders))
    done = {(w.stage, w.action): w for w in timeline.work}
    for w in timeline.work:
        for stage, action in schedule.needs(w.stage, w.action):
            assert w.start >= done[stage, action].end
    for stage in range(p):
        own = timeline.of(stage)
        assert tuple(w.action for w in own) == schedule.orders[stage]
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))


# ---- bubbles ----


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_bubble_of_gpipe_and_1f1b_is_p_minus_1_over_m_whatever_a_pass_takes(make, p, m):
    for forward, backward in ((1, 2), (1, 1), (0.5, 3)):
        timeline = simulate(make(p, m), forward, backward)
        assert timeline.makespan == (m + p - 1) * (forward + backward)
        assert timeline.bubble == pytest.approx((p - 1) / m, abs=1e-12)
        assert timeline.idle_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_without_overlap_a_stage_idles_p_minus_1_times_as_long_as_it_works(p, m):
    assert simulate(naive(p, m)).bubble == p - 1


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 16, 4), (8, 16, 2), (3, 3, 5), (1, 3, 2)]
)
def test_the_bubble_of_interleaving_is_p_minus_1_over_v_m(p, m, v):
    timeline = simulate(interleaved(p, m, v), forward=Fraction(1), backward=Fraction(2))
    assert timeline.bubble == pytest.approx((p - 1) / (v * m), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 4), (3, 7), (4, 4), (4, 8), (8, 16), (8, 64)])
def test_zero_bubble_h1_idles_a_third_of_1f1b_at_the_memory_of_its_first_stage(p, m):
    timeline = simulate(zero_bubble(p, m))
    assert timeline.bubble == timeline.own_bubble == pytest.approx((p - 1) / (3 * m), abs=1e-12)
    assert timeline.peak_in_flight == (p,) * p


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 7), (4, 7), (4, 8), (8, 16), (8, 64)])
def test_zero_bubble_h2_never_idles_between_a_stages_first_and_last_action(p, m):
    timeline = simulate(zero_bubble(p, m, extra_memory=True))
    assert timeline.own_bubble == 0
    assert timeline.peak_in_flight == (2 * p - 1,) * p
    assert timeline.makespan == 3 * m + p - 1


# ---- memory ----


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_in_flight_are_m_with_gpipe_and_p_minus_stage_with_1f1b(p, m):
    assert simulate(gpipe(p, m)).peak_in_flight == (m,) * p
    assert simulate(one_f_one_b(p, m)).peak_in_flight == tuple(min(p - s, m) for s in range(p))
    assert simulate(naive(p, m)).peak_in_flight == (1,) * p


@pytest.mark.parametrize("make", [*EVERY, lambda p, m: interleaved(p, p * m, 2)])
def test_the_curve_of_what_is_in_flight_reaches_the_peak_and_ends_at_none(make):
    timeline = simulate(make(4, 6))
    for stage in range(4):
        times, counts = timeline.in_flight(stage)
        assert max(counts) == timeline.peak_in_flight[stage] and counts[-1] == 0
        assert times == sorted(set(times)) and times[-1] == timeline.of(stage)[-1].end


# ---- durations ----


def test_the_slowest_stage_sets_the_pace():
    timeline = simulate(one_f_one_b(3, 30), forward=[1, 1.5, 1], backward=[2, 3, 2])
    # stage 0 before and after it, and one wait of stage 1 for the first backward pass
    assert timeline.makespan == 30 * 4.5 + (1 + 2) + 1.5
    assert timeline.busy == (90, 135, 90)


def test_the_time_of_the_weights_is_taken_from_the_backward_pass_only_where_it_is_apart():
    apart, whole = (simulate(make(1, 2), forward=1, backward=3, weight=1) for make in (zero_bubble, gpipe))
    assert {(w.action.kind, w.end - w.start) for w in apart.work} == {("F", 1), ("B", 2), ("W", 1)}
    assert {(w.action.kind, w.end - w.start) for w in whole.work} == {("F", 1), ("B", 3)}
    assert apart.makespan == whole.makespan == 8


def test_the_time_of_a_micro_batch_is_shared_by_its_chunks():
    timeline = simulate(interleaved(2, 2, 4), forward=1, backward=2)
    assert {w.end - w.start for w in timeline.work} == {0.25, 0.5}
    assert timeline.busy == (6, 6)


@pytest.mark.parametrize(
    ("durations", "words"),
    [
        ({"forward": -1}, "forward must be a time, or one for each of the 2 stages"),
        ({"backward": [1, 2, 3]}, "backward must be a time, or one for each of the 2 stages"),
        ({"weight": 5}, "weight must be between 0 and the backward pass, 2, got 5"),
    ],
)
def test_impossible_durations_are_refused_by_name(durations, words):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        simulate(gpipe(2, 3), **durations)


# ---- deadlocks and malformed orders ----


def test_a_backward_before_its_forward_deadlocks_and_is_told():
    schedule = from_orders("wrong", [[("B", 0), ("F", 0)], [("F", 0), ("B", 0)]])
    with pytest.raises(
        Deadlock, match="wrong deadlocks: stage 0 at B0 waits for F0 of stage 0; stage 1 at F0 waits"
    ) as e:
        simulate(schedule)
    assert e.value.waiting[1] == (Action("F", 0), 0, Action("F", 0))


def test_stages_that_disagree_about_the_order_deadlock():
    schedule = from_orders(
        "crossed", [[("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 1), ("F", 0), ("B", 0), ("B", 1)]]
    )
    with pytest.raises(Deadlock, match="stage 0 at B0 waits for B0 of stage 1; stage 1 at F1 waits for F1 of stage 0"):
        simulate(schedule)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 4), (4, 8)])
def test_pytorchs_exported_1f1b_is_ours_or_refused_for_what_it_lacks(p, m):
    exported = torchs("1F1B", p, m)
    if exported != tuples(one_f_one_b(p, m)):  # PyTorch 2.13: micro-batches beyond the last, and the first ones missing
        with pytest.raises(ValueError, match="lacks"):
            from_orders("PyTorch's 1F1B", exported)


def test_shuffled_orders_either_finish_or_are_called_deadlocks():
    draw, deadlocks = random.Random(SEED), 0
    for _ in range(60):
        orders = [list(order) for order in one_f_one_b(3, 3).orders]
        stage = draw.randrange(3)
        first = draw.randrange(5)
        orders[stage][first : first + 2] = reversed(orders[stage][first : first + 2])
        try:
            assert len(simulate(from_orders("shuffled", orders)).work) == 18
        except Deadlock as deadlock:
            deadlocks += 1
            assert deadlock.waiting
    assert 0 < deadlocks < 60


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ([[("F", 0), ("B", 0)], [("F", 0)]], "mine: stage 1 lacks B0"),
        ([[("F", 0), ("B", 0), ("B", 0)]], "mine: stage 0 repeats B0"),
        ([[("F", 0), ("B", 0), ("X", 0)]], "mine: stage 0 cannot have X0"),
        ([[("F", 0), ("B", 0), ("W", 0)], [("F", 0), ("B", 0)]], "mine: stage 1 lacks W0"),
        ([[("F", 0), ("B", 0), ("F", 0, 1)]], "mine: stage 0 cannot have F0.1"),
        ([[], []], "mine: no stage has an action"),
    ],
)
def test_an_order_that_lacks_repeats_or_invents_an_action_is_refused(orders, words):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        from_orders("mine", orders)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="stages must be at least 1, got 0"):
        gpipe(0, 3)
    with pytest.raises(ValueError, match="micro_batches must be a multiple of the 4 stages, got 6"):
        interleaved(4, 6, 2)
    with pytest.raises(ValueError, match="chunks must be at least 1"):
        Schedule("none", ((Action("F", 0), Action("B", 0)),), 1, 0)
