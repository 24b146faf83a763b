"""A device on a virtual clock: a launch returns at once, a read waits, and placeholders become tokens on the device."""

from __future__ import annotations

import pytest

from solutions.lab5_serving.overlap import look_up
from utils.serving.virtual_device import VirtualDevice


def device() -> VirtualDevice:
    return VirtualDevice(lambda text: sum(text) % 50, look_up, host_seconds=3, device_seconds=7)


def test_a_launch_returns_at_once_and_a_read_waits_until_its_step_is_done():
    made = device()
    first, second = made.launch([("a", [1, 2])]), made.launch([("a", [-1])])
    assert made.now == 6
    assert (made.read(first), made.now) == ([3], 10)
    assert (made.read(second), made.now) == ([6], 17)
    assert made.waited == 0 and made.texts == {"a": [1, 2, 3]}


def test_a_device_waits_while_its_host_reads_before_it_launches():
    made = device()
    made.read(made.launch([("a", [1, 2])]))
    made.read(made.launch([("a", [3])]))
    assert made.waited == 3 and made.now == 20


def test_a_placeholder_is_the_token_that_the_last_step_gave_that_row():
    made = device()
    made.launch([("a", [1]), ("b", [2])])
    made.launch([("b", [-2]), ("a", [-1]), ("c", [9, 8])])
    assert made.texts == {"a": [1, 1], "b": [2, 2], "c": [9, 8]}


@pytest.mark.parametrize("chunks", [[], [("a", [])], [(str(i), [1]) for i in range(65)]])
def test_a_step_without_a_token_or_with_too_many_rows_is_refused(chunks):
    with pytest.raises(ValueError, match="a step has 1 to 64 chunks of at least one token"):
        device().launch(chunks)
