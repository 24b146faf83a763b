"""When collectives are waited for: how often, and of each all-gather when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from utils.checks.ranks.gathers import each_gather


@dataclass
class WaitLog:
    """``count``: how often collectives have been waited for, by ``wait()`` or by calling them without ``async_op``.

    ``futures`` says whether one has been asked for its future, by which one may wait unnoticed.
    """

    count: int = 0
    futures: bool = False

    def missing(self, called: int) -> int:
        """How many of the collectives that were ``called`` have not been waited for."""
        return 0 if self.futures else max(0, called - self.count)


@contextmanager
def record_waits(then: Callable[[dist.Work], object] = lambda work: None) -> Iterator[WaitLog]:
    """Count what is waited for in the block; call ``then`` with each collective that has been."""
    waits, wait, get_future = WaitLog(), dist.Work.wait, dist.Work.get_future

    def counted(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        waits.count += 1
        found = wait(work, *args, **kwargs)
        then(work)
        return found

    def noted(work: dist.Work) -> Any:
        waits.futures = True
        then(work)
        return get_future(work)

    dist.Work.wait, dist.Work.get_future = counted, noted
    try:
        yield waits
    finally:
        dist.Work.wait, dist.Work.get_future = wait, get_future


@contextmanager
def record_gathers(note: Callable[[str, int], object]) -> Iterator[None]:
    """Call ``note("start", elements)`` for each all-gather of the block, and ``note("arrive", elements)`` after it has
    been waited for."""
    under_way: list[tuple[dist.Work, int]] = []

    def arrived(work: dist.Work) -> None:
        for k, (other, elements) in enumerate(under_way):
            if other is work:
                del under_way[k]
                note("arrive", elements)
                return

    def noted(method: Callable) -> Callable:
        def gather(group: dist.ProcessGroup, output: Any, *args: Any, **kwargs: Any) -> Any:
            elements = (
                output.numel() if isinstance(output, torch.Tensor) else sum(t.numel() for ts in output for t in ts)
            )
            note("start", elements)
            work = method(group, output, *args, **kwargs)
            if work is None:
                note("arrive", elements)
            elif all(other is not work for other, _ in under_way):
                under_way.append((work, elements))
            return work

        return gather

    with each_gather(noted), record_waits(arrived):
        yield
