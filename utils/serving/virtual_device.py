"""A device on a virtual clock: launches return at once, and reading waits (exercise 5.9 serves requests on it).

On a CPU a launch returns when the work is done, so nothing overlaps there. Here each step takes so many seconds of a
clock of its own, and the tokens are really computed. The seconds are given, not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

#: What a request adds to a step: its id, and tokens or placeholders.
Chunk = tuple[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When the host had launched a step, and when the device computed it, in seconds of the virtual clock."""

    launched: float
    device_start: float
    device_end: float


class VirtualDevice:
    """Runs steps in the order of their launch, one at a time.

    It keeps the text of each request. A step adds each chunk's tokens to its request's text, and gives one token per
    chunk, the next one of that text, in the order of the chunks: row r is that of chunk r.

    Args:
        next_token: the model: the token after a text.
        look_up: gives a step's tokens (T,) int64 with its placeholders, which are negative, replaced from ``newest``.
        host_seconds: the host's time for a step, which passes before its launch.
        device_seconds: the device's time for a step.
        max_rows: most chunks of a step.

    Attributes:
        now: the host's time, in seconds.
        times: a :class:`StepTimes` for each step.
        texts: id -> the tokens that the device has of that request.
        newest: (max_rows,) int64, the token that the last step gave each row; what is behind its rows is older.
    """

    def __init__(
        self,
        next_token: Callable[[list[int]], int],
        look_up: Callable[[Tensor, Tensor], Tensor],
        *,
        host_seconds: float,
        device_seconds: float,
        max_rows: int = 64,
    ) -> None:
        self.next_token, self.look_up = next_token, look_up
        self.host_seconds, self.device_seconds = host_seconds, device_seconds
        self.now = 0.0
        self.times: list[StepTimes] = []
        self.texts: dict[str, list[int]] = {}
        self.newest = torch.zeros(max_rows, dtype=torch.int64)
        self._rows: list[list[int]] = []  # of each step, its tokens

    def launch(self, chunks: Sequence[Chunk]) -> int:
        """Launch a step and return its number, from 0; nothing is waited for.

        Raises:
            ValueError: no chunk, more than ``max_rows``, or one without a token.
        """
        if not 1 <= len(chunks) <= len(self.newest) or not all(len(tokens) for _, tokens in chunks):
            shown = [(id, len(tokens)) for id, tokens in chunks]
            raise ValueError(f"a step has 1 to {len(self.newest)} chunks of at least one token, got {shown}")
        self.now += self.host_seconds
        start = max(self.now, self.times[-1].device_end if self.times else 0.0)
        self.times.append(StepTimes(self.now, start, start + self.device_seconds))
        flat = torch.tensor([token for _, tokens in chunks for token in tokens])
        parts = self.look_up(flat, self.newest).split([len(tokens) for _, tokens in chunks])
        for (id, _), part in zip(chunks, parts, strict=True):
            self.texts.setdefault(id, []).extend(part.tolist())
        self._rows.append([self.next_token(self.texts[id]) for id, _ in chunks])
        self.newest[: len(chunks)] = torch.tensor(self._rows[-1])
        return len(self._rows) - 1

    def read(self, step: int) -> list[int]:
        """Wait until the device has computed a step; its tokens, one per chunk."""
        self.now = max(self.now, self.times[step].device_end)
        return list(self._rows[step])

    @property
    def waited(self) -> float:
        """Seconds that the device waited between its first step and its last."""
        return sum(after.device_start - before.device_end for before, after in pairwise(self.times))
