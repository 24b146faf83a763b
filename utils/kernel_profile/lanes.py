"""Which element each lane of a load or store points to: what the drawings of programs over a tensor are made from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from utils.interpreter import Access
from utils.kernel_profile.findings import Program
from utils.kernel_profile.memory import slots_of
from utils.kernel_profile.profile import Profile
from utils.kernel_profile.recorder import Recorder


@dataclass(frozen=True, eq=False)
class Lanes:
    """One load, store or atomic of one program.

    Attributes:
        kernel: Name of the kernel.
        program: Its ``program_id`` triple.
        argument: Name of the tensor argument that the lanes point into.
        access: ``read``, ``write`` or ``atomic``.
        elements: int64, in the shape of the kernel's block: the element that each lane points to, counted in memory
            from the argument's pointer. Lanes that are masked off have one too.
        mask: bool, of the same shape: whether the lane takes part.
    """

    kernel: str
    program: Program
    argument: str
    access: str
    elements: np.ndarray = field(repr=False)
    mask: np.ndarray = field(repr=False)

    @property
    def active(self) -> int:
        """Lanes that take part."""
        return int(np.count_nonzero(self.mask))

    @property
    def masked(self) -> int:
        """Lanes that are masked off."""
        return self.mask.size - self.active

    def corner(self, strides: tuple[int, int]) -> tuple[int, int, int, int]:
        """Row and column of the block's first lane in a matrix, and how many rows and columns of it the block spans.

        The block may stick out of the matrix: what sticks out is masked, or out of bounds.

        Args:
            strides: Of the matrix, in elements; the larger one first counts rows, as in memory.

        Raises:
            ValueError: The lanes are no rectangle of such a matrix.
        """
        block = self.elements if self.elements.ndim == 2 else self.elements.reshape(1, -1)
        if block.ndim != 2 or strides[0] < 1 or strides[1] < 1:
            raise ValueError(
                f"needs a block of one or two axes and positive strides, got {self.elements.shape} and {strides}"
            )
        first = int(block[0, 0])
        steps = [int(block[1, 0]) - first if len(block) > 1 else None, None]
        steps[1] = int(block[0, 1]) - first if block.shape[1] > 1 else None
        across = [None if step is None else strides.index(step) if step in strides else -1 for step in steps]
        rows, columns = block.shape
        if across[0] == 1 or across[1] == 0:  # the block's axes lie the other way round
            block, rows, columns = block.T, columns, rows
        expected = first + np.arange(rows)[:, None] * strides[0] + np.arange(columns)[None, :] * strides[1]
        if -1 in across or not np.array_equal(block, expected):
            raise ValueError(f"the lanes of {self.argument} are no rectangle of a matrix with strides {strides}")
        larger = max(strides)
        major, minor = divmod(first, larger)
        minor //= min(strides)
        row, column = (major, minor) if strides[0] >= strides[1] else (minor, major)
        return row, column, rows, columns


class _LaneRecorder(Recorder):
    """A recorder that also notes every lane."""

    def __init__(self) -> None:
        super().__init__(True, True, True, {}, 1000)
        self.lanes: list[Lanes] = []

    def access(self, access: Access) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        mask = np.broadcast_to(access.mask, access.addresses.shape)
        slot = int(slots_of(access.addresses.flat[int(mask.argmax()) if mask.any() else 0]))
        if 0 <= slot < len(self._regions):
            region = self._regions[slot]
            away = access.addresses.astype(np.int64) - region.pointer
            verb = "atomic" if access.atomic else "write" if access.writes else "read"
            self.lanes.append(
                Lanes(self._launch.kernel, self._program, region.name, verb, away // region.itemsize, np.array(mask))
            )
        return super().access(access)


class LaneTrace:
    """What :func:`trace_lanes` saw: ``lanes`` in order, and the usual profile of the same launches."""

    def __init__(self, recorder: _LaneRecorder, profile: Profile) -> None:
        self._recorder = recorder
        self.profile = profile

    @property
    def lanes(self) -> list[Lanes]:
        """Every load, store and atomic, in the order in which the interpreter carried them out."""
        return self._recorder.lanes

    def of(self, argument: str, access: str | None = None) -> list[Lanes]:
        """Those that touch one argument, and of one kind if ``access`` is given.

        Raises:
            ValueError: No lane touched an argument of that name in that way.
        """
        found = [x for x in self.lanes if x.argument == argument and access in (None, x.access)]
        if not found:
            names = ", ".join(sorted({x.argument for x in self.lanes})) or "nothing"
            raise ValueError(f"no {access or 'access'} of {argument!r} was seen; the kernels touched: {names}")
        return found


@contextmanager
def trace_lanes() -> Iterator[LaneTrace]:
    """Watch every Triton kernel launched inside the block as ``profile_kernel`` does, and keep each lane's element.

    It holds every address of every access: meant for small tensors, to draw or to count what programs share.
    """
    recorder = _LaneRecorder()
    with Profile(recorder) as profile:
        yield LaneTrace(recorder, profile)
