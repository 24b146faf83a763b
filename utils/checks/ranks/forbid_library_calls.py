"""Refuses PyTorch's ready-made solutions while an answer runs, however it got hold of them.

What an answer's source names is found without running it (`library_use`); this is for what it does not name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

#: Module, class and method that every use of a ready-made solution goes through. DistributedDataParallel and
#: ZeroRedundancyOptimizer are joinable; fully_shard makes a subclass of FSDPModule for each class that it shards.
_GATES = (
    ("torch.distributed.algorithms.join", "Joinable", "__init__"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "__init__"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "__init__"),
    ("torch.distributed.fsdp", "FSDPModule", "__init_subclass__"),
    ("torch.distributed.tensor.parallel", "ColwiseParallel", "__init__"),
    ("torch.distributed.tensor.parallel", "RowwiseParallel", "__init__"),
)


class ReadyMade(RuntimeError):
    """An answer uses a ready-made solution; the text is its name."""


def _refuse(gate: type) -> Callable[..., None]:
    """A method that refuses; it names the class that is made, or that ``gate`` is a mixin of."""

    def refuse(made: Any, *args: Any, **kwargs: Any) -> None:
        kinds = () if isinstance(made, type) else type(made).__mro__
        theirs = next((kind for kind in kinds if kind.__module__.startswith("torch.")), gate)
        raise ReadyMade(f"{theirs.__module__}.{theirs.__name__}")

    return refuse


@contextmanager
def forbid_library_calls() -> Iterator[None]:
    """Constructing one of PyTorch's ready-made solutions raises :class:`ReadyMade` in this context.

    Modules that are not imported yet are left so: the server of ranks on CPUs has all of them.
    """
    with ExitStack() as undo:
        for module, name, method in _GATES:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is None:
                continue
            own = vars(kind).get(method)
            setattr(kind, method, classmethod(_refuse(kind)) if method == "__init_subclass__" else _refuse(kind))
            if own is None:
                undo.callback(delattr, kind, method)
            else:
                undo.callback(setattr, kind, method, own)
        yield
