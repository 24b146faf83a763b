"""Causal attention of one long sequence on two GPUs beside one, and what a model's blocks then keep on each GPU.

Attention has the shape of Llama 3 8B (32 heads of queries, 8 of keys and values, head dimension 128), bf16. One GPU
computes the whole sequence by lab 3's kernels; two GPUs compute it by lab 6's ring in zig-zag and by its all-to-all.
Everything is measured in one run:

- ``errors``: of a shorter sequence, output and gradients against float32. Two GPUs are allowed twice the error of one;
  otherwise nothing is timed.
- ``points``: times of the forward pass and of both passes by interleaved rounds, each as long as on the slowest rank,
  and ``speedups``, one GPU's time over that of two. While one GPU's time is taken, both compute the whole sequence.
  ``sent_bytes`` is what a rank sends by the log of its messages, beside the formula.
- ``memory``: what two blocks of the model, norms and MLPs included, keep between forward and backward pass on a rank
  that has the whole sequence and on one that has half of it, beside the formula; and the peak of both passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import benchmark_cli, ranks
from solutions.lab2_triton_kernels import rms_norm
from solutions.lab3_flash_attention import flash_attention
from solutions.lab6_frontiers import context_parallel as cp
from utils import distributed, timing
from utils.attention_math import FLASH_BACKWARD_MATMULS, FORWARD_MATMULS, AttentionShape, attention_flops
from utils.record_schemas import COUNT, NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each
from utils.serving import ModelConfig
from utils.serving.model import DecoderLayer
from utils.transformer_math import (
    all_to_all_attention_bytes,
    context_parallel_activations,
    ring_attention_bytes,
)

WORLD_SIZE = 2
#: Llama 3 8B (its config.json).
LLAMA_3_8B = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, max_seq_len=8192, rms_norm_eps=1e-5, rope_theta=5e5,
)  # fmt: skip
#: The model whose attention and whose blocks are measured, with so many blocks as are kept in memory.
CONFIG = replace(LLAMA_3_8B, num_layers=2)
#: Tokens of the whole sequence; the memory is that of the longest.
TOKENS, QUICK_TOKENS = (32_768, 131_072), (16_384,)
#: Tokens of the sequence that is compared with float32.
CHECKED = 2048
WARMUP, ROUNDS, QUICK_ROUNDS = 1, 6, 2

ONE, RING, ALL_TO_ALL = "one GPU", "ring", "all-to-all"
#: Which tokens are a rank's, by the way of computing.
LAYOUTS = {RING: "zigzag", ALL_TO_ALL: "contiguous"}
FORWARD, BOTH = "forward", "forward and backward"
TENSORS = ("o", "dq", "dk", "dv")

Results = dict[str, Any]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ways() -> dict[str, Attend]:
    """How attention is computed: ``attend(q, k, v)`` of the whole sequence, or of this rank's part."""
    group = dist.group.WORLD
    return {
        ONE: lambda q, k, v: flash_attention(q, k, v, True),
        RING: lambda q, k, v: cp.ring_attention(q, k, v, True, group, LAYOUTS[RING]),
        ALL_TO_ALL: lambda q, k, v: cp.all_to_all_attention(q, k, v, True, group),
    }


def drawn(config: ModelConfig, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the output's gradient of a whole sequence, (1, heads, N, D), the same on all ranks."""
    device = distributed.device()
    source = torch.Generator(device).manual_seed(tokens)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads)
    return [
        torch.randn((1, count, tokens, config.head_dim), generator=source, device=device, dtype=dtype)
        for count in heads
    ]


def own_part(x: Tensor, way: str, dim: int = 2) -> Tensor:
    """This rank's tokens of a whole sequence; all of them on one GPU."""
    if way == ONE:
        return x
    return cp.cut_sequence(x, dist.get_world_size(), LAYOUTS[way], dim)[dist.get_rank()].contiguous()


@torch.no_grad()
def forward_pass(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output alone."""
    return attend(q, k, v)


def both_passes(attend: Attend, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


# ---- results ---------------------------------------------------------------------------------------------------------


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with the whole matrix of scores, differentiable."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[3] ** 0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def errors(config: ModelConfig, tokens: int) -> Results:
    """How far output and gradients are from float32's, |x - x32| / |x32| over all ranks, beside one GPU's.

    Raises:
        AssertionError: one is further away than allowed, on all ranks at once.
    """
    whole = drawn(config, tokens, torch.bfloat16)
    right = both_passes(plain_attention, *(x.float() for x in whole))
    attends = ways()
    alone = both_passes(attends[ONE], *whole)
    found: Results = {}
    for way in LAYOUTS:
        part = functools.partial(own_part, way=way)
        got = both_passes(attends[way], *map(part, whole))
        sums = torch.stack([_squares(mine, part(one), part(true)) for mine, one, true in zip(got, alone, right)])
        dist.all_reduce(sums)
        found[way] = {}
        for name, (ours, one, true) in zip(TENSORS, sums.sqrt().tolist(), strict=True):
            error = {"error": ours / true, "one_gpu_error": one / true, "allowed": 2 * one / true + 1e-6}
            found[way][name] = error
            if not error["error"] <= error["allowed"]:
                raise AssertionError(
                    f"{way}: {name} is {error['error']:.2e} from float32's, allowed {error['allowed']:.2e}, twice the "
                    "error of one GPU"
                )
        ranks.note(f"{way}: " + ", ".join(f"{name} {e['error']:.2e}" for name, e in found[way].items()))
    return found


def _squares(mine: Tensor, one: Tensor, true: Tensor) -> Tensor:
    """Sums of squares, (3,) float64: how far this rank's tensor is from the true one, how far one GPU's; the true."""
    mine, one, true = (x.double() for x in (mine, one, true))
    return torch.stack([(mine - true).square().sum(), (one - true).square().sum(), true.square().sum()])


# ---- times -----------------------------------------------------------------------------------------------------------


def timed(config: ModelConfig, tokens: int, warmup: int, rounds: int) -> Results:
    """Samples of each pass and way on this rank, and the bytes that it sends."""
    whole = drawn(config, tokens, torch.bfloat16)
    parts = {way: [own_part(x, way) for x in whole] for way in (ONE, *LAYOUTS)}
    found: Results = {"sent": {}, "samples": {}}
    forward: dict[str, Callable[[], object]] = {}
    both: dict[str, Callable[[], object]] = {}
    for way, attend in ways().items():
        both[way] = functools.partial(both_passes, attend, *parts[way])
        forward[way] = functools.partial(forward_pass, attend, *parts[way][:3])
        with distributed.record_collectives() as log:
            both[way]()
        found["sent"][way] = round(log.bytes("send") + log.sent_bytes("all_to_all"))
    ranks.note(f"{tokens:,} tokens")
    for name, steps in ((FORWARD, forward), (BOTH, both)):
        found["samples"][name] = ranks.compare_aligned(steps, warmup=warmup, rounds=rounds)
    return found


# ---- memory ----------------------------------------------------------------------------------------------------------


def blocks_of(config: ModelConfig, dtype: torch.dtype) -> list[DecoderLayer]:
    """The model's blocks, their norms computed by lab 2's kernel, with gradients that are there already."""
    torch.manual_seed(0)
    with distributed.device():
        layers = [DecoderLayer(config, index).to(dtype) for index in range(config.num_layers)]
    for layer in layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = functools.partial(_normed, norm)
        for weight in layer.parameters():
            weight.grad = torch.zeros_like(weight)
    return layers


def _normed(norm: torch.nn.Module, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps)


def kept_bytes(forward: Callable[[], Tensor], own: Sequence[Tensor]) -> int:
    """Bytes that autograd keeps after ``forward()``, which also makes its own input; the result is not counted.

    Args:
        own: tensors that were there before. On a CPU, where nobody counts what is allocated, they are left out of
            what autograd saves.
    """
    if distributed.device().type == "cuda":
        base = ranks.allocated()
        result = forward()
        return ranks.allocated() - base - result.nbytes
    there = {x.untyped_storage()._cdata for x in own}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in there:
            saved[storage._cdata] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = forward()
    return sum(storage.nbytes() for storage in saved.values())


def memory(config: ModelConfig, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Results]:
    """What blocks keep on this rank and what they have at most, with the whole sequence and with its own part."""
    layers, attends = blocks_of(config, dtype), ways()
    device, found = distributed.device(), []
    for way in (ONE, RING):
        positions = own_part(torch.arange(tokens, device=device), way, dim=0)
        cos, sin = (torch.ones((len(positions), 1, config.head_dim), dtype=dtype, device=device) for _ in range(2))

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor, way: str = way) -> Tensor:
            return attends[way](*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)))[0].transpose(0, 1)

        def forward(n: int = len(positions), turns: tuple[Tensor, Tensor] = (cos, sin), attend=attend) -> Tensor:
            x = torch.randn((n, config.hidden_size), dtype=dtype, device=device, requires_grad=True)
            for layer in layers:
                x = layer(x, *turns, attend)
            return x

        def step(forward: Callable[[], Tensor] = forward) -> None:
            y = forward()
            y.backward(y.detach())

        kept = kept_bytes(forward, [cos, sin, *(weight for layer in layers for weight in layer.parameters())])
        peak = ranks.peak(step, ranks.allocated(), repeats=1)
        found.append({"tokens": len(positions), "kept": kept, "peak": peak})
        ranks.note(f"{len(positions):,} tokens a rank: {kept / 1e9:.2f} GB kept, peak {peak / 1e9:.2f} GB")
        ranks.release()
    return found


# ---- the record ------------------------------------------------------------------------------------------------------


def on_rank(config: ModelConfig, tokens: Sequence[int], checked: int, warmup: int, rounds: int) -> Results:
    """Everything that one rank measures."""
    ranks.settle()
    found: Results = {"errors": errors(config, checked)}
    ranks.release()
    found["points"] = []
    for count in tokens:
        found["points"].append(timed(config, count, warmup, rounds))
        ranks.release()
    return found | {"memory": memory(config, max(tokens))}


def flops_of(config: ModelConfig, tokens: int, name: str) -> int:
    """Operations of a pass over the whole sequence, as FlashAttention computes it."""
    shape = AttentionShape(1, config.num_heads, tokens, config.head_dim, kv_heads=config.num_kv_heads)
    matmuls = FORWARD_MATMULS + (FLASH_BACKWARD_MATMULS if name == BOTH else 0)
    return attention_flops(shape, matmuls, causal=True)


def formula_bytes(config: ModelConfig, tokens: int, world_size: int) -> dict[str, int]:
    """Bytes that a rank sends in both passes of each way by the formulas."""
    kv = (config.num_kv_heads, config.head_dim)
    ring = sum(ring_attention_bytes(tokens, world_size, *kv, backward=backward) for backward in (False, True))
    exchanged = 2 * all_to_all_attention_bytes(tokens, world_size, config.num_heads, *kv)
    return {ONE: 0, RING: round(ring), ALL_TO_ALL: round(exchanged)}


def point(config: ModelConfig, tokens: int, world_size: int, of_ranks: Sequence[Results]) -> Results:
    """One length of the record, from what the ranks found."""
    passes = []
    for name in (FORWARD, BOTH):
        times = ranks.slowest([found["samples"][name] for found in of_ranks])
        passes.append(
            {
                "pass": name,
                "flops": flops_of(config, tokens, name),
                "timed": {way: t.as_dict() for way, t in times.items()},
                "speedups": {way: timing.ratio(times[ONE], times[way]).as_dict() for way in LAYOUTS},
            }
        )
    sent = {way: [found["sent"][way] for found in of_ranks] for way in of_ranks[0]["sent"]}
    return {
        "tokens": tokens,
        "passes": passes,
        "sent_bytes": sent,
        "formula_bytes": formula_bytes(config, tokens, world_size),
    }


def memory_points(config: ModelConfig, tokens: int, of_ranks: Sequence[Sequence[Results]]) -> list[Results]:
    """What each number of ranks keeps, the most on any rank, beside the formula."""
    found = []
    for size, facts in zip((1, len(of_ranks)), zip(*of_ranks, strict=True), strict=True):
        kept = max(fact["kept"] for fact in facts)
        formula = sum(context_parallel_activations(config, tokens, size).values())
        found.append(
            {
                "ranks": size,
                "tokens": max(fact["tokens"] for fact in facts),
                "kept_bytes": kept,
                "formula_bytes": formula,
                "memory_ratio": kept / formula,
                "peak_bytes": max(fact["peak"] for fact in facts),
            }
        )
    return found


SCHEMA = {
    "dtype": TEXT,
    "world_size": SIZE,
    "model": {"name": TEXT, **each(SIZE, "num_heads", "kv_heads", "head_dim", "hidden", "intermediate", "layers")},
    "checked_tokens": SIZE,
    "errors": {str: {str: each(NOT_NEGATIVE, "error", "one_gpu_error", "allowed")}},
    "points": [
        {
            "tokens": SIZE,
            "passes": [{"pass": TEXT, "flops": SIZE, "timed": {str: TIMING}, "speedups": {str: RATIO}}],
            "sent_bytes": {str: [COUNT]},
            "formula_bytes": {str: COUNT},
        }
    ],
    "memory": [
        {**each(SIZE, "ranks", "tokens", "kept_bytes", "formula_bytes", "peak_bytes"), "memory_ratio": POSITIVE}
    ],
}


def measure(
    quick: bool = False,
    config: ModelConfig = CONFIG,
    tokens: Sequence[int] | None = None,
    checked: int = CHECKED,
    warmup: int = WARMUP,
    rounds: int | None = None,
) -> Results:
    """Everything in the record's schema; ``quick`` takes one shorter sequence and few rounds.

    Args:
        config: heads of the attention, and the blocks whose memory is measured.
        tokens: of the whole sequences; twice the number of ranks divides them.
        checked: tokens of the sequence that is compared with float32.
    """
    tokens = tuple(tokens or (QUICK_TOKENS if quick else TOKENS))
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    found = ranks.launch_briefly(on_rank, config, tokens, checked, warmup, rounds, world_size=WORLD_SIZE)
    points = zip(tokens, zip(*(each["points"] for each in found), strict=True), strict=True)
    return {
        "dtype": "bf16",
        "world_size": WORLD_SIZE,
        "model": {
            "name": "Llama 3 8B shape",
            "num_heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden": config.hidden_size,
            "intermediate": config.intermediate_size,
            "layers": config.num_layers,
        },
        "checked_tokens": checked,
        "errors": found[0]["errors"],
        "points": [point(config, count, WORLD_SIZE, of_ranks) for count, of_ranks in points],
        "memory": memory_points(config, max(tokens), [each["memory"] for each in found]),
    }


def table(results: Mapping[str, Any]) -> str:
    """One line a length and pass; then bytes and memory."""
    rows, lines = [], []
    for item in results["points"]:
        for of_pass in item["passes"]:
            rows.append(
                [
                    f"{item['tokens']:,} {of_pass['pass']}",
                    *(f"{of_pass['timed'][way]['seconds'] * 1e3:.2f}" for way in (ONE, *LAYOUTS)),
                    *(f"{of_pass['speedups'][way]['ratio']:.3f}" for way in LAYOUTS),
                ]
            )
        sent = ", ".join(
            f"{way} {max(item['sent_bytes'][way]) / 1e6:.2f} MB, by the formula {item['formula_bytes'][way] / 1e6:.2f}"
            for way in LAYOUTS
        )
        lines.append(f"{item['tokens']:,} tokens, a rank sends in both passes: {sent}")
    for item in results["memory"]:
        kept = f"{item['kept_bytes'] / 1e9:.3f} GB kept, {item['memory_ratio']:.4f} of the formula"
        lines.append(f"{item['ranks']} ranks: {kept}; peak {item['peak_bytes'] / 1e9:.2f} GB")
    headings = ["tokens and pass", f"{ONE} ms", f"{RING} ms", f"{ALL_TO_ALL} ms", f"{RING} x", f"{ALL_TO_ALL} x"]
    return "\n".join([benchmark_cli.text_table(headings, rows), *lines])


if __name__ == "__main__":
    raise SystemExit(ranks.run_on(WORLD_SIZE, "context_parallel", measure, table, SCHEMA))
