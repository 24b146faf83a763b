"""One step of training through attention, as exercise 3.8 takes it, and what it keeps between its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from utils.checks.cases import Case
from utils.checks.core import classic
from utils.checks.diagnoses import CaseResult
from utils.checks.problem import Problem

from . import shapes

Tensor = torch.Tensor
Attention = Callable[..., Any]


@dataclass(frozen=True)
class Kept:
    """What one call keeps for its backward pass, in elements.

    ``copies``: of tensors whose memory is that of no input and no output; ``attributes``: of those that are attributes
    of ``ctx``, past ``save_for_backward``.
    """

    elements: int
    copies: int
    attributes: int


def reference(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor, causal: bool = False, scale: float | None = None,
    upstream: str = "both", asks: str = "qkv", between: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output, logsumexp and gradients by autograd through plain attention; zeros for inputs that do not ask for one."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    shared = q.shape[1] // max(1, k.shape[1])
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.repeat_interleave(shared, 1).transpose(-1, -2) * factor).to(wide)
    if causal:
        seen = shapes.visible(q.shape[2], k.shape[2], device=q.device)
        # rows that see nothing: finite scores, and a weight of zero for all that follows
        some = seen.any(-1)
        scores = scores.masked_fill(~(seen | ~some[:, None]), -torch.inf)
    else:
        some = torch.ones(q.shape[2], dtype=torch.bool, device=q.device)
    lse = torch.logsumexp(scores, -1)
    p = torch.where(some[:, None], torch.softmax(scores, -1), 0.0).to(q.dtype)
    o = p @ v.repeat_interleave(shared, 1)
    loss = o.new_zeros((), dtype=wide)
    if upstream in ("both", "o"):
        loss = loss + (o.to(wide) * do.to(wide)).sum()
    if upstream in ("both", "lse"):
        loss = loss + (lse * torch.where(some, dlse.to(wide), 0.0)).sum()
    found = torch.autograd.grad(loss, (q, k, v), allow_unused=True)
    found = [torch.zeros_like(x) if g is None or n not in asks else g for n, x, g in zip("qkv", (q, k, v), found)]
    return o.detach(), torch.where(some, lse, -torch.inf).detach(), *found


class _Arrives(torch.autograd.Function):
    """A number that passes given gradients on to the tensors that it is made of, as they are."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


def _gradients(outputs: Sequence[Any], inputs: Sequence[Tensor], arriving: Sequence[Tensor]) -> tuple:
    """What ``torch.autograd.grad`` gives for them, which imports SymPy where it is given gradients."""
    expected = all(
        type(x) is Tensor and x.requires_grad and x.shape == gradient.shape for x, gradient in zip(outputs, arriving)
    )
    if expected:
        return torch.autograd.grad(_Arrives.apply(arriving, *outputs), inputs, allow_unused=True)
    return torch.autograd.grad(outputs, inputs, arriving, allow_unused=True)  # says what is wrong with the outputs


def stepping(attention: Attention, flash_attention: Attention, kept: dict[int, Kept]) -> Attention:
    """One step of training through an operator: output, logsumexp and the three gradients.

    ``kept`` receives what each call keeps for its backward pass, by the address of its q. ``between``: another forward
    pass, of other tensors, comes before the backward one.
    """

    def step(q, k, v, do, dlse, causal=False, scale=None, upstream="both", asks="qkv", between=False):
        q, k, v = (x.detach().requires_grad_(name in asks) for name, x in zip("qkv", (q, k, v)))
        if upstream == "timed":
            return torch.autograd.grad(flash_attention(q, k, v, causal, scale), (q, k, v), do)
        held: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            held[x.untyped_storage().data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            if upstream == "o":
                o, lse = flash_attention(q, k, v, causal, scale), None
            else:
                o, lse = attention(q, k, v, causal, scale)
        if lse is not None:
            kept[q.data_ptr()] = _kept(held, o, (q, k, v, o, lse))
        if between:
            attention(*(x.detach().requires_grad_() for x in (do, v, k)), not causal, 0.7)
        outputs = [x for x, name in ((o, "o"), (lse, "lse")) if upstream in ("both", name)]
        arriving = [x for x, name in ((do, "o"), (dlse, "lse")) if upstream in ("both", name)]
        asking = [x for x in (q, k, v) if x.requires_grad]
        with torch.autograd.set_multithreading_enabled(False):  # on this thread, where a check compiles ahead
            given = iter(_gradients(outputs, asking, arriving))
        found = (next(given) if x.requires_grad else None for x in (q, k, v))
        dq, dk, dv = (torch.zeros_like(x) if g is None else g for x, g in zip((q, k, v), found))
        if lse is None:
            with torch.no_grad():
                lse = attention(q, k, v, causal, scale)[1]
        return o.detach(), lse.detach(), dq, dk, dv

    return step


def _kept(held: dict[int, int], o: Tensor, known: tuple[Tensor, ...]) -> Kept:
    """``held``: elements by memory of what ``save_for_backward`` was given; ``known``: inputs and outputs."""
    beside = {
        x.untyped_storage().data_ptr(): x.numel()
        for x in torch.utils._pytree.tree_leaves(dict(getattr(o.grad_fn, "__dict__", {})))
        if isinstance(x, Tensor)
    }
    everything, memory = held | beside, {x.untyped_storage().data_ptr() for x in known}
    copies = sum(numel for address, numel in everything.items() if address not in memory)
    return Kept(sum(everything.values()), copies, sum(beside.values()))


def inputs(case: Case) -> tuple[Tensor, ...]:
    q, k, v, do = shapes.with_do(case)
    if case.kind == "gradient of a sum":
        do = torch.ones((), dtype=q.dtype, device=q.device).expand(q.shape)
    dlse = case.tensor("dlse", "B", "Nq", "Hq", dtype=torch.float32, layout="contiguous").transpose(1, 2)
    if case.layout == "contiguous":
        dlse = dlse.contiguous()
    if case.kind == "no gradient where no key":
        dlse[:, :, : case.sizes["Nq"] - case.sizes["Nk"]] = torch.nan
    return q, k, v, do, dlse


def keeps_little(kept: dict[int, Kept]) -> Callable[[CaseResult], Problem | None]:
    """An inspection: what a call keeps is q, k, v, o and the logsumexp, no copies of them."""

    def inspect(trial: CaseResult) -> Problem | None:
        case, found = trial.case, kept.get(trial.args[0].data_ptr())
        if found is None or not case.numel(*case.sizes) or trial.case.options.get("asks", "qkv") != "qkv":
            return None
        needed = 2 * case.numel("B", "Hq", "Nq", "D") + 2 * case.numel("B", "Hkv", "Nk", "D")
        needed += case.numel("B", "Hq", "Nq")
        if found.elements > needed:
            return Problem(
                f"{found.elements:,} elements are kept for the backward pass, {needed:,} are needed: q, k, v, o and "
                "the logsumexp",
                classic("the backward pass computes the probabilities again: nothing else has to wait for it", 7),
            )
        if found.copies:
            return Problem(
                f"{found.copies:,} elements that are kept for the backward pass are copies beside the inputs",
                classic("keep q, k, v, o and the logsumexp as they are: the kernels take any strides", 7),
            )
        return None

    return inspect


def notices_changes(attention: Attention, kept: dict[int, Kept]) -> Callable[[CaseResult], Problem | None]:
    """An inspection of one case: an input that is changed in place before the backward pass makes that pass fail."""

    def unnoticed(trial: CaseResult, place: int) -> bool:
        inputs = [x.detach().clone().requires_grad_() for x in trial.args[:3]]
        o = attention(*inputs)[0]
        with torch.no_grad():
            inputs[place].add_(1)
        try:
            _gradients([o], inputs, [trial.args[3]])
        except RuntimeError as error:
            return "inplace" not in str(error)
        return True

    def inspect(trial: CaseResult) -> Problem | None:
        if trial.case.kind != "both":
            return None
        for place, name in enumerate("qkv"):
            if unnoticed(trial, place):
                found = kept.get(trial.args[0].data_ptr())
                how = "tensors are kept as attributes of ctx" if found and found.attributes else "a tensor is kept"
                return Problem(
                    f"{name} is changed in place between forward and backward, and backward does not notice",
                    classic(f"{how} where autograd does not watch it: keep it by ctx.save_for_backward", 8),
                )
        return None

    return inspect
