"""A device with a clock of its own, simulated on a CPU, to see when an engine's device computes and when it waits.

On a CPU a launch returns when the work is done, so nothing overlaps there, whatever an engine does. Here the tokens are
really computed and the time is made up: a launch returns at once, the step takes so many seconds of a virtual clock
behind what was launched before, and whoever asks for its values moves the clock on to its end. The engine's code is the
real one, and so is the order in which it launches and waits. The seconds are given, not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor

from solutions.lab5_serving.block_manager import BlockManager
from solutions.lab5_serving.scheduler import Step
from utils.serving import Decoder

from .overlapped_runner import OverlappedRunner, Read

#: Seconds that every step takes, or what gives the seconds of a step.
Seconds = float | Callable[[Step], float]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step on the virtual clock, in seconds.

    Attributes:
        host_start, host_end: the host hands out the tokens that it has read, schedules the step and launches it.
        device_start, device_end: the device computes it.
    """

    host_start: float
    host_end: float
    device_start: float
    device_end: float


def device_gaps(times: Sequence[StepTimes]) -> list[float]:
    """Seconds that the device waits between each step and the next: of T steps T - 1 gaps."""
    return [after.device_start - before.device_end for before, after in pairwise(times)]


def waiting_share(times: Sequence[StepTimes]) -> float:
    """Which part of the time from the first step's start to the last one's end the device waits, 0 to 1.

    Raises:
        ValueError: no steps.
    """
    if not times:
        raise ValueError("without a step there is no time to share")
    return sum(device_gaps(times)) / (times[-1].device_end - times[0].device_start)


class VirtualClock:
    """Seconds that pass only when somebody says so; an engine's ``clock``."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def wait_until(self, seconds: float) -> None:
        """Time passes to that point, if it is not past already."""
        self._now = max(self._now, seconds)


class DeviceTensor(Tensor):
    """A tensor of the simulated device: who asks for its values waits for all that was launched, as on a GPU."""

    synchronize: ClassVar[Callable[[], None]]
    #: What needs values, or a size that depends on them.
    ASKING: ClassVar[frozenset[str]] = frozenset({
        "tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "allclose",
        "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    })  # fmt: skip

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict | None = None
    ) -> Any:
        """Do what every tensor does, and wait first if it needs values."""
        if func.__name__ in cls.ASKING:
            cls.synchronize()
        return super().__torch_function__(func, types, args, kwargs or {})


class SimulatedRunner(OverlappedRunner):
    """An :class:`.overlapped_runner.OverlappedRunner` on the simulated device; for ``Engine`` and ``OverlappedEngine``.

    Args:
        model, num_blocks, block_size: as for :class:`solutions.lab5_serving.ModelRunner`.
        clock: of this device; the engine's, too.
        host_seconds: the host's time for a step, all of which passes before its launch: for handing out the tokens
            that were read last, for scheduling and for launching.
        device_seconds: the device's time for a step.

    Attributes:
        times: a :class:`StepTimes` for each launch.
        synchronized: how often somebody waited for all that was launched.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int = 16,
        *,
        clock: VirtualClock,
        host_seconds: Seconds,
        device_seconds: Seconds,
    ) -> None:
        super().__init__(model, num_blocks, block_size)
        self.clock, self.host_seconds, self.device_seconds = clock, host_seconds, device_seconds
        self.times: list[StepTimes] = []
        self.synchronized = 0
        self._tensor = type("DeviceTensor", (DeviceTensor,), {"synchronize": self._synchronize})

    def run(self, step: Step, manager: BlockManager, rows: str = "last") -> Tensor:
        """Launch a step: logits (R, V) whose values are there when the device's time has come."""
        host_start = self.clock()
        self.clock.wait_until(host_start + _of(self.host_seconds, step))
        host_end = self.clock()
        device_start = max(host_end, self._free_at)
        self.times.append(StepTimes(host_start, host_end, device_start, device_start + _of(self.device_seconds, step)))
        return super().run(step, manager, rows).as_subclass(self._tensor)

    def keep(self, found: Tensor) -> Read:
        """As :meth:`.overlapped_runner.OverlappedRunner.keep`: waits for what is launched by now, and no longer."""
        read, ready = super().keep(found.as_subclass(Tensor)), self._free_at

        def wait() -> list[list[int]]:
            self.clock.wait_until(ready)
            return read()

        return wait

    @property
    def _free_at(self) -> float:
        """When all that was launched is done."""
        return self.times[-1].device_end if self.times else 0.0

    def _synchronize(self) -> None:
        self.synchronized += 1
        self.clock.wait_until(self._free_at)


def _of(seconds: Seconds, step: Step) -> float:
    return seconds(step) if callable(seconds) else seconds
