"""What a rank does in a ring, exercise 6.6: its messages, its products, and their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from utils.distributed import calls

#: PyTorch's matrix products by their names, and which argument is the first factor.
_FACTOR = {"matmul": 0, "__matmul__": 0, "mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1}


@dataclass
class Watch(TorchFunctionMode):
    """What a rank does in a ring: ``products`` (their FLOPs), and each ``event``, a message, a wait or a product."""

    products: int = 0
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _FACTOR:
            self.products += 2 * out.numel() * args[_FACTOR[name]].shape[-1]
        elif name == "einsum":
            factors = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
            letters = args[0].replace(" ", "").split("->")[0].split(",")
            sizes = {letter: n for of, x in zip(letters, factors) for letter, n in zip(of, x.shape)}
            self.products += 2 * math.prod(sizes.values())
        if name in _FACTOR or name == "einsum":
            self.events.append("product")
        return out

    def overlapped(self) -> bool:
        """Whether each message that is waited for was under way during a product."""
        under_way, met, hops = False, False, []
        for event in self.events:
            if event == "message" and not under_way:
                under_way, met = True, False
            elif event == "product":
                met = True
            elif event == "wait" and under_way:
                under_way, hops = False, [*hops, met]
        return all(hops)


@dataclass
class Outcome:
    """What a rank has of one sequence, and what it did for it."""

    o: Any
    kept: bool
    sent: int
    peers: dict[str, set[int | None]]
    further: list[str]
    products: int
    overlapped: bool
    missing: int


def watched(function: Callable, given: tuple[Tensor, ...], options: Mapping[str, Any]) -> Outcome:
    """Call ``ring_forward``; what comes of it, and what it did."""
    watch, messages, wait, get_future = Watch(), [], dist.Work.wait, dist.Work.get_future
    copies = [x.clone() for x in given]

    def noted(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        watch.events.append("wait")
        return wait(work, *args, **kwargs)

    def asked(work: dist.Work) -> Any:
        watch.events.append("wait")
        return get_future(work)

    def message(call: calls.Call) -> None:
        messages.append(call)
        if call.kind in ("send", "recv"):
            watch.events.append("message")

    dist.Work.wait, dist.Work.get_future = noted, asked
    try:
        with calls.listen(message), watch:
            o = function(*given, **options)
    finally:
        dist.Work.wait, dist.Work.get_future = wait, get_future
    peers = {kind: {call.peer for call in messages if call.kind == kind} for kind in ("send", "recv")}
    sent = sum(call.elements for call in messages if call.kind == "send")
    others = [call.kind for call in messages if call.kind not in ("send", "recv")]
    kept = all(torch.equal(x, copy) for x, copy in zip(given, copies, strict=True))
    missing = len(messages) - watch.events.count("wait")
    further = others[1:]  # the first is that of lengths_of
    return Outcome(o, kept, sent, peers, further, watch.products, watch.overlapped(), missing)
