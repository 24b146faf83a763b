"""Lab 6's attention of windows and documents beside lab 3's and FlexAttention: calls, tiles, what is right.

Whoever skips tiles is judged by the tiles that are left. ``computed`` counts the FLOPs on all tiles that a pass visits,
masked pairs of them included: two products forward, three for dQ, and four for dK and dV. The same is counted of lab
3's causal attention over all tokens, with its own tiles. FlexAttention has the same mask, so the times are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from benchmarks.frontier_timing import CALLS, GRAPH, SEVERAL, Call, Case, Comparison, beside, relative_error
from solutions import lab3_flash_attention as lab3
from solutions.lab3_flash_attention import tuning as lab3_tuning
from solutions.lab6_frontiers import long_tuning, tuning
from solutions.lab6_frontiers.flash_attention import flash_attention
from utils import runtime

ATTENTION = "attention"
FORWARD, BACKWARD = "forward", "backward"
OURS, LAB3, FLEX = "ours", "lab 3, causal", "FlexAttention"
#: Passes of each direction, and products of each pass.
PASSES = {FORWARD: {"forward": 2}, BACKWARD: {"dq": 3, "dkdv": 4}}
#: Products of each direction that a mask asks for.
PRODUCTS = {FORWARD: 2, BACKWARD: 5}


class Masked(NamedTuple):
    """A causal mask: with a window, or of documents; without either, the plain one."""

    name: str
    window: int | None = None
    documents: tuple[int, ...] = ()


def short_documents(tokens: int) -> tuple[int, ...]:
    """Lengths of about 200."""
    chance = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(int(torch.randint(150, 251, (), generator=chance)), tokens - sum(lengths)))
    return tuple(lengths)


MASKS = (
    Masked("window 1024", 1024),
    Masked("window 4096", 4096),
    Masked("long documents", None, (3584, 2303, 4096, 2817, 3584)),
    Masked("short documents", None, short_documents(16384)),
)


# ---- tiles -----------------------------------------------------------------------------------------------------------


def visible_pairs(mask: Masked, tokens: int) -> int:
    """Pairs of a query and a key that it sees, of one head."""
    window = mask.window or tokens
    return sum(sum(min(i + 1, window) for i in range(length)) for length in mask.documents or (tokens,))


def computed_pairs(mask: Masked, tokens: int, m: int, n: int, of_keys: bool) -> int:
    """Pairs in all tiles of m queries x n keys that a pass visits, of one head; ``of_keys``: programs own keys."""
    total = 0
    for length in mask.documents or (tokens,):
        window = mask.window or length
        for start in range(0, length, n if of_keys else m):
            if of_keys:
                first, end, step = start // m * m, min(length, start + window + n - 1), m
            else:
                first, end, step = max(start - window + 1, 0) // n * n, min(length, start + m), n
            total += (n if of_keys else m) * (-(-(end - first) // step) * step)
    return total


def computed_flops(mask: Masked, tokens: int, head_dim: int, heads: int, direction: str, ours: bool) -> int:
    """FLOPs on all tiles that a direction visits, with the tiles of this GPU: lab 6's, or lab 3's."""
    total = 0
    for name, count in PASSES[direction].items():
        about = head_dim, torch.bfloat16, True
        if ours:
            capability = tuning.capability_of(runtime.DEVICE)
            length = tokens // (len(mask.documents) or 1)
            tile = long_tuning.flash(name, *about, capability, capability is not None, mask.window, length)
        else:
            tile = getattr(lab3_tuning, name)(*about, lab3_tuning.capability_of(runtime.DEVICE))
        total += count * computed_pairs(mask, tokens, tile.m, tile.n, name == "dkdv")
    return 2 * head_dim * heads * total


# ---- FlexAttention ---------------------------------------------------------------------------------------------------


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention, compiled: each mask anew, in this process, and for backward passes that keep their graph."""
    if not runtime.HAS_GPU:
        return flex.flex_attention
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False
    torch._inductor.config.compile_threads = 1
    return torch.compile(flex.flex_attention, dynamic=False)


@functools.cache
def flex_mask(mask: Masked, tokens: int) -> Any:
    """The mask as FlexAttention's blocks."""
    if mask.window is not None:
        window = mask.window

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (query - key < window)

    else:
        lengths = torch.tensor(mask.documents, device=runtime.DEVICE)
        document = torch.arange(len(lengths), device=runtime.DEVICE).repeat_interleave(lengths)

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document[query] == document[key])

    return flex.create_block_mask(visible, None, None, tokens, tokens, device=runtime.DEVICE)


# ---- cases -----------------------------------------------------------------------------------------------------------


def _right(mask: Masked, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of the first head, (N, D) each, in float32."""
    q, k, v = (x[0, 0].detach().float().requires_grad_() for x in (q, k, v))
    place = torch.arange(len(q), device=q.device)
    seen = place[:, None] >= place
    if mask.window is not None:
        seen &= place[:, None] - place < mask.window
    if mask.documents:
        lengths = torch.tensor(mask.documents, device=q.device)
        document = torch.arange(len(lengths), device=q.device).repeat_interleave(lengths)
        seen &= document[:, None] == document
    o = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), do[0, 0].float()))


class Operands(NamedTuple):
    """q, k and v that ask for gradients, and the output's gradient."""

    inputs: tuple[Tensor, Tensor, Tensor]
    do: Tensor

    def packed(self) -> Operands:
        """(N, H, D) instead of (1, H, N, D)."""
        q, k, v, do = (x.detach()[0].transpose(0, 1).contiguous() for x in (*self.inputs, self.do))
        return Operands((q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), do)


def operands(tokens: int, heads: int, head_dim: int) -> Operands:
    """Random bf16, (1, heads, tokens, head_dim)."""
    q, k, v, do = (
        torch.randn((1, heads, tokens, head_dim), device=runtime.DEVICE, dtype=torch.bfloat16) for _ in range(4)
    )
    return Operands((q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), do)


def functions(mask: Masked, given: Operands) -> dict[str, tuple[Callable[[], Tensor], Operands]]:
    """What is compared, by name: the forward pass, and what it is called with."""
    own, tokens = given, given.do.shape[2]
    if mask.documents:
        own = given.packed()
        starts = torch.tensor((0, *mask.documents), device=runtime.DEVICE).cumsum(0).int()
        ours = functools.partial(flash_attention, *own.inputs, causal=True, cu_seqlens_q=starts)
    else:
        ours = functools.partial(flash_attention, *own.inputs, causal=True, window=mask.window)
    return {
        OURS: (ours, own),
        LAB3: (functools.partial(lab3.flash_attention, *given.inputs, causal=True), given),
        FLEX: (lambda: compiled_flex()(*given.inputs, block_mask=flex_mask(mask, tokens)), given),
    }


def _calls(forward: Callable[[], Tensor], given: Operands, direction: str, how: str) -> list[Call]:
    if direction == FORWARD:
        return [forward] * SEVERAL
    o = beside(forward) if how == GRAPH else forward()
    return [lambda: torch.autograd.grad(o, given.inputs, given.do, retain_graph=True)] * SEVERAL


def attention(
    mask: Masked, tokens: int, heads: int, head_dim: int, directions: Sequence[str] = (FORWARD, BACKWARD),
    hows: Sequence[str] | None = None, only: str | None = None,
) -> Iterator[Case]:  # fmt: skip
    """One mask and head_dim: in graphs, and documents also as plain calls, which cost the host most."""
    given = operands(tokens, heads, head_dim)
    compared = functions(mask, given)
    right = None if only else _right(mask, *given.inputs, given.do)

    def wrong(result: Any) -> float:
        found = (result,) if isinstance(result, Tensor) else result
        first = [x[0, 0] if x.ndim == 4 else x[:, 0] for x in found]
        return max(relative_error(got, want) for got, want in zip(first, right[:1] if len(first) == 1 else right[1:]))

    for direction in directions:
        flops = {OURS: 2 * PRODUCTS[direction] * head_dim * heads * visible_pairs(mask, tokens)}
        flops |= {FLEX: flops[OURS]}
        flops[LAB3] = 2 * PRODUCTS[direction] * head_dim * heads * visible_pairs(Masked("causal"), tokens)
        for how in hows or ((GRAPH, CALLS) if mask.documents else (GRAPH,)):
            case = Case(ATTENTION, f"{mask.name}, D {head_dim}", direction, how, only)
            for name, (forward, of) in compared.items():
                make = functools.partial(_calls, forward, of, direction, how)
                case.add(name, make, flops[name], error=None if name == LAB3 else wrong)
            shape = tokens, head_dim, heads, direction
            case.computed = {
                OURS: computed_flops(mask, *shape, ours=True),
                LAB3: computed_flops(Masked("causal"), *shape, ours=False),
            }
            case.over = {
                "of lab 3, per computed tile": Comparison(OURS, LAB3, case.computed[OURS] / case.computed[LAB3]),
                f"{OURS} / {FLEX}": Comparison(OURS, FLEX),
            }
            yield case
