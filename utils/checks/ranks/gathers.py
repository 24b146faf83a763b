"""All-gathers on their way: what may look at each of them, and one way to have none under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

#: Methods of a process group that start an all-gather; which there are depends on PyTorch's version.
_GATHERS = ("all_gather_single", "_allgather_base", "allgather")


@contextmanager
def each_gather(through: Callable[[Callable], Callable]) -> Iterator[None]:
    """Let every all-gather of the block go through what ``through`` makes of the method that starts it."""
    before = {name: vars(dist.ProcessGroup)[name] for name in _GATHERS if name in vars(dist.ProcessGroup)}
    for name in before:
        setattr(dist.ProcessGroup, name, through(getattr(dist.ProcessGroup, name)))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


@contextmanager
def gathered_at_once() -> Iterator[None]:
    """No all-gather of the block is under way when its call returns.

    One that writes to memory which an answer has freed ends the process: not this one, where the student's notebook is.
    """
    wait = dist.Work.wait

    def at_once(method: Callable) -> Callable:
        def gather(*args: Any, **kwargs: Any) -> Any:
            if (work := method(*args, **kwargs)) is not None:
                wait(work)
            return work

        return gather

    with each_gather(at_once):
        yield
