"""When an answer waits for the collectives that it has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass
class WaitLog:
    """``count``: how often collectives have been waited for, by ``wait()`` or by calling them without ``async_op``.

    ``futures`` says whether somebody has asked one for its future, by which one may wait unnoticed.
    """

    count: int = 0
    futures: bool = False


@contextmanager
def record_waits() -> Iterator[WaitLog]:
    """Count what is waited for in the block."""
    waits, wait, get_future = WaitLog(), dist.Work.wait, dist.Work.get_future

    def counted(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        waits.count += 1
        return wait(work, *args, **kwargs)

    def noted(work: dist.Work) -> Any:
        waits.futures = True
        return get_future(work)

    dist.Work.wait, dist.Work.get_future = counted, noted
    try:
        yield waits
    finally:
        dist.Work.wait, dist.Work.get_future = wait, get_future
