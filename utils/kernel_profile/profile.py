"""The profile of a block of kernel launches, and the block itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType

import torch

from utils import interpreter
from utils.kernel_profile.counters import Counters, total
from utils.kernel_profile.findings import Finding, OutOfBounds, Program, Race, UninitializedRead
from utils.kernel_profile.launches import LaunchProfile
from utils.kernel_profile.recorder import Recorder
from utils.kernel_profile.report import as_html, as_text


class Profile:
    """What the kernels launched inside a ``with profile_kernel() as profile:`` block did, exactly.

    Every attribute of :class:`Counters` can be read off the profile itself (``profile.bytes_loaded``): the sum over all
    launches. ``by_argument``, ``by_program``, ``by_kernel`` and ``launches`` break the sum down.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stack: ExitStack | None = None
        self._closed = False

    def __enter__(self) -> Profile:
        if self._stack is not None or self._closed:
            raise RuntimeError("a profile serves one block: call profile_kernel() again for another")
        with ExitStack() as stack:
            stack.enter_context(interpreter.observe(self._recorder))
            stack.enter_context(interpreter.interpret_launches())
            stack.enter_context(self._recorder.allocations)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        self._stack.close()
        self._recorder.release()

    def _opened(self) -> Recorder:
        if self._stack is None:
            raise RuntimeError(
                "the profile was never opened: write `with profile_kernel() as profile:` around the launch"
            )
        return self._recorder

    @property
    def launches(self) -> list[LaunchProfile]:
        """One entry per launch, in order."""
        return self._opened().launches

    @property
    def counters(self) -> Counters:
        """Sum over all launches."""
        return total(launch.counters for launch in self.launches)

    @property
    def by_argument(self) -> dict[str, Counters]:
        """Counts by name of the tensor argument, summed over launches; FLOPs belong to no argument."""
        return _merged(launch.by_argument for launch in self.launches)

    @property
    def by_program(self) -> dict[Program, Counters]:
        """Counts by ``program_id`` triple, summed over launches."""
        return _merged(launch.by_program for launch in self.launches)

    @property
    def by_kernel(self) -> dict[str, Counters]:
        """Counts by name of the kernel."""
        return _merged({launch.kernel: launch.counters} for launch in self.launches)

    @property
    def findings(self) -> list[Finding]:
        """Everything that was found wrong, in the order in which it happened."""
        return list(self._opened().findings.values())

    @property
    def out_of_bounds(self) -> list[OutOfBounds]:
        """Reads and writes outside of an argument."""
        return [finding for finding in self.findings if isinstance(finding, OutOfBounds)]

    @property
    def uninitialized_reads(self) -> list[UninitializedRead]:
        """Reads of memory that came from ``torch.empty`` inside the block and that nothing had written."""
        return [finding for finding in self.findings if isinstance(finding, UninitializedRead)]

    @property
    def races(self) -> list[Race]:
        """Elements that two programs of one launch touched, at least one of them writing, not both atomically."""
        return [finding for finding in self.findings if isinstance(finding, Race)]

    @property
    def findings_left_out(self) -> int:
        """Occurrences beyond ``max_findings`` that are not in the lists."""
        return self._opened().findings_left_out

    def report(self) -> str:
        """A table of what moved, by kernel and argument, and what was found wrong, with advice."""
        return as_text(self._opened())

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return self.report() if self._stack is not None else "<Profile, not opened>"

    def _repr_html_(self) -> str | None:
        return as_html(self._recorder) if self._stack is not None else None


def _counter(name: str) -> property:
    def value(self: Profile) -> int | float:
        return getattr(self.counters, name)

    return property(value, doc=f"``{name}`` of all launches; see :class:`Counters`.")


for _name in (*Counters.__dataclass_fields__, "bytes_moved", "sectors_moved", "coalescing", "arithmetic_intensity"):
    setattr(Profile, _name, _counter(_name))


def _merged(parts) -> dict:
    result: dict = {}
    for part in parts:
        for key, counters in part.items():
            result.setdefault(key, Counters()).add(counters)
    return result


def profile_kernel(
    check_races: bool = True,
    check_bounds: bool = True,
    check_uninitialized: bool = True,
    memory: Mapping[str, torch.Tensor] | None = None,
    max_findings: int = 1000,
) -> Profile:
    """Watch every Triton kernel launched inside the block, in the interpreter, and count exactly what it does.

    ::

        with profile_kernel() as profile:
            kernel[grid](x, out, n, BLOCK=128)
        profile.bytes_loaded, profile.by_argument["x_ptr"].sectors_loaded, profile.races

    The launch has its usual effects. In a GPU session the kernel is interpreted on copies, and what it wrote is copied
    back. A lane that leaves its argument is reported; if it leaves the tensor's memory as well it is not
    carried out: a read gives NaN (0 for integers), a write is dropped. A lane that the mask of a load leaves out gives
    NaN too where ``other`` is not given: on a GPU it may be anything.

    Args:
        check_races: Report elements that two programs of a launch touch, one of them writing, not both atomically.
            Programs that take turns by atomics of their own (a lock, a counter of finished blocks) are reported too.
        check_bounds: Report accesses outside of an argument; they are harmless either way.
        check_uninitialized: Report reads of memory from ``torch.empty`` (``empty_like``, ``new_empty``,
            ``empty_strided``) called inside the block, until a kernel or a PyTorch operation writes it or NumPy is
            given it.
        memory: Tensors that a kernel reaches without having them as arguments (through a table of addresses), by the
            name that reports give them.
        max_findings: Longest list of findings that is kept.

    Raises:
        RuntimeError: The block is opened inside another one, or one profile is opened twice.
        TypeError, ValueError: An argument is not what it should be.
    """
    if not isinstance(max_findings, int) or isinstance(max_findings, bool) or max_findings < 1:
        raise ValueError(f"max_findings must be a positive integer, got {max_findings!r}")
    switches = {
        "check_races": check_races,
        "check_bounds": check_bounds,
        "check_uninitialized": check_uninitialized,
    }
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise TypeError(f"{name} must be True or False, got {switch!r}")
    if memory is not None and not isinstance(memory, Mapping):
        raise TypeError(f"memory must map names to tensors, got {type(memory).__name__}")
    for name, tensor in (memory or {}).items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"memory[{name!r}] must be a torch.Tensor, got {type(tensor).__name__}")
    return Profile(Recorder(check_races, check_bounds, check_uninitialized, memory or {}, max_findings))
