"""A stopwatch and a power meter for tests of benchmarks: they need no GPU, and what they say is known."""

import itertools

#: Clock, power and temperature as the meter prints them; the last reading is cut off.
READINGS = ["1500, 690.5, 60", "1600, 700.0, 61", "1600, 701.5, 61", "16"]


class FakeStopwatch:
    """Runs each call and says that the i-th one took 10, 11, 12, 10... microseconds."""

    def __init__(self) -> None:
        self.times = itertools.cycle([10e-6, 11e-6, 12e-6])
        self.laps: list[float] = []

    def lap(self, fn, flush_l2):
        fn()
        self.laps.append(next(self.times))

    def seconds(self):
        laps, self.laps = self.laps, []
        return laps
