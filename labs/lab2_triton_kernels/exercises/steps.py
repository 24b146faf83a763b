"""One step of training through an operator of the student's own: its output, its gradients, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from utils.checks.diagnoses import CaseResult
from utils.checks.problem import Problem

#: Elements and dtype of each tensor that waits for a backward pass, by the id of the first tensor of the call.
Kept = dict[int, list[tuple[int, torch.dtype]]]
#: Ways to call an operator besides one forward and one backward pass.
TWO_AT_ONCE = "two forwards, then their backwards, the first one's twice"
ALONE = "one gradient at a time"


def step(
    function: Callable[..., torch.Tensor],
    given: Sequence[torch.Tensor],
    grad: torch.Tensor,
    calls: str,
    kept: Kept,
) -> tuple[torch.Tensor, ...]:
    """The output of ``function(*given)`` and the gradients of the floating-point tensors in ``given``.

    ``kept`` receives, by the id of the first tensor, what waits for the backward pass beside ``given``.
    """
    floats = [number for number, tensor in enumerate(given) if tensor.is_floating_point()]

    def forward(tensors: Sequence[torch.Tensor], asking: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [tensor.detach() for tensor in tensors]
        asked = [leaves[number].requires_grad_() for number in asking]
        return function(*leaves), asked

    if calls == ALONE:
        runs = [forward(given, [number]) for number in floats]
        return runs[0][0].detach(), *(torch.autograd.grad(out, asked, grad)[0] for out, asked in runs)
    with kept_beside(given) as held:
        out, asked = forward(given, floats)
        kept[id(given[0])] = [*held(), *_on_ctx(out, given)]
    if calls == TWO_AT_ONCE:
        first = given[0]
        other, asked_too = forward([first[..., :1].expand(first.shape), *given[1:]], floats)
        torch.autograd.grad(out, asked, grad, retain_graph=True)
        torch.autograd.grad(other, asked_too, grad)
    return out.detach(), *torch.autograd.grad(out, asked, grad)


@contextmanager
def kept_beside(given: Sequence[torch.Tensor]) -> Iterator[Callable[[], list[tuple[int, torch.dtype]]]]:
    """Elements and dtype of each tensor that ``save_for_backward`` keeps in the block, beside ``given``."""
    held: dict[int, tuple[int, torch.dtype]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.numel(), tensor.dtype
        return tensor

    homes = {tensor.untyped_storage().data_ptr() for tensor in given}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: [size for home, size in held.items() if home not in homes]


def _on_ctx(out: torch.Tensor, given: Sequence[torch.Tensor]) -> list[tuple[int, torch.dtype]]:
    """The same of the tensors that wait as attributes of ctx, past ``save_for_backward``."""
    homes = {tensor.untyped_storage().data_ptr() for tensor in given}
    leaves = torch.utils._pytree.tree_leaves(dict(getattr(out.grad_fn, "__dict__", {})))
    waiting = {t.untyped_storage().data_ptr(): (t.numel(), t.dtype) for t in leaves if isinstance(t, torch.Tensor)}
    return [size for home, size in waiting.items() if home not in homes]


def keeps(trial: CaseResult, kept: Kept, most: int, cause: str) -> Problem | None:
    """Where more than ``most`` elements wait for the backward pass beside the inputs, or shorter ones than float32."""
    waiting = kept.get(id(trial.args[0]), [])
    count = sum(numel for numel, _ in waiting)
    if count <= most:
        short = next((dtype for numel, dtype in waiting if dtype.is_floating_point and dtype.itemsize < 4), None)
        if short is None:
            return None
        name = str(short).removeprefix("torch.")
        return Problem(
            f"what waits for the backward pass is {name}, expected float32", "allocate it with dtype=torch.float32"
        )
    return Problem(
        f"expected at most {most:,} elements kept for the backward pass beside the inputs, got {count:,}", cause
    )
