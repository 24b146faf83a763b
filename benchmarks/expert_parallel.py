"""A layer of experts on two GPUs beside the same layer on one, bf16, and how much of the time its all-to-alls take.

Each of two GPUs has half of the experts and half of the tokens; one GPU has all of both. The layers (``LAYERS``) are
those of OLMoE (Muennighoff et al. 2024: 64 experts of 1024 inner numbers, hidden size 2048, 8 chosen) and one with 64
of DeepSeek-V3's 256 experts, which have 2048 inner numbers at a hidden size of 7168. Routers and tokens are random, so
experts are nearly equally busy. Of each layer:

- ``errors``: of few tokens, output and gradients against a plain loop over the experts in float32. Two GPUs are allowed
  twice the error of one; otherwise nothing is timed.
- ``passes``: the forward pass and both passes by interleaved rounds, each as long as on the slowest rank; ``speedup``
  is one GPU's time over that of two. The all-to-alls are also timed alone, with the counts of the same tokens;
  ``exchange_share`` is their time over that of the layer on two GPUs.
- ``sent_bytes``: what each rank sends in both passes, beside the formula for equal counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import benchmark_cli, ranks
from solutions.lab6_frontiers.mixture_of_experts import MixtureOfExperts, MoEConfig
from solutions.lab6_frontiers.rows_to_ranks import all_to_all
from utils import distributed, timing
from utils.record_schemas import NOT_NEGATIVE, POSITIVE, RATIO, SIZE, TEXT, TIMING, each
from utils.transformer_math import all_to_all_bytes, rank_imbalance

WORLD_SIZE = 2
#: Name -> sizes, and tokens of each rank.
LAYERS = {
    "OLMoE": (MoEConfig(hidden=2048, inner=1024, experts=64, chosen=8, balance="none"), 16_384),
    "DeepSeek-V3, 64 experts": (MoEConfig(hidden=7168, inner=2048, experts=64, chosen=8, balance="none"), 8192),
}
#: Tokens of each rank that are compared with float32.
CHECKED = 256
WARMUP, ROUNDS, QUICK_ROUNDS = 2, 12, 3

ONE, TWO, EXCHANGES = "one GPU", "two GPUs", "all-to-alls alone"
FORWARD, BOTH = "forward", "forward and backward"
TENSORS = ("out", "dx", "dgate", "dup", "ddown")

Results = dict[str, Any]
Layer = Callable[[Tensor], Tensor]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters are of ``dtype``: no float32 copy of a large layer comes first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Layers:
    """A layer with all experts, the same on every rank, and this rank's part of it.

    Attributes:
        one: the whole layer.
        two: the layer over all ranks; this one has the experts ``mine``.
    """

    def __init__(self, config: MoEConfig) -> None:
        rank, ranks_ = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        with default_dtype(torch.bfloat16), distributed.device():
            self.one = MixtureOfExperts(config)
            self.two = MixtureOfExperts(config, dist.group.WORLD)
        self.mine = slice(rank * config.experts // ranks_, (rank + 1) * config.experts // ranks_)
        with torch.no_grad():
            self.two.router.load_state_dict(self.one.router.state_dict())
            self.two.up.copy_(self.one.up[self.mine])
            self.two.down.copy_(self.one.down[self.mine])


def tokens_of(config: MoEConfig, tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs and gradients of the outputs of all ranks' tokens, (ranks * tokens, hidden), the same on all ranks."""
    device = distributed.device()
    source = torch.Generator(device).manual_seed(tokens)
    shape = (dist.get_world_size() * tokens, config.hidden)
    x, dout = (torch.randn(shape, generator=source, device=device, dtype=torch.bfloat16) for _ in range(2))
    return x, dout


def own(x: Tensor) -> Tensor:
    """This rank's tokens of all of them."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def both_passes(layer: Layer, weights: Sequence[Tensor], x: Tensor, dout: Tensor) -> list[Tensor]:
    """The output and the gradients of x and of the weights."""
    x = x.detach().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *weights], dout)]


@torch.no_grad()
def forward_pass(layer: Layer, x: Tensor) -> Tensor:
    """The output alone."""
    return layer(x)


def weights_of(layer: MixtureOfExperts) -> list[Tensor]:
    """Those of the router, and of the experts both matrices."""
    return [layer.router.gate.weight, layer.up, layer.down]


# ---- results ---------------------------------------------------------------------------------------------------------


def in_float32(layer: MixtureOfExperts, x: Tensor, dout: Tensor) -> list[Tensor]:
    """What :func:`both_passes` of the whole layer gives, by a loop over the experts in float32."""
    gate, up, down = (weight.detach().float().requires_grad_() for weight in weights_of(layer))

    def looped(x: Tensor) -> Tensor:
        scores = F.linear(x, gate).softmax(-1)
        best, experts = scores.topk(layer.config.chosen)
        weights = best / best.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in range(layer.config.experts):
            rows, places = (experts == expert).nonzero(as_tuple=True)
            opened, let_by = (x[rows] @ up[expert]).chunk(2, -1)
            result = (F.silu(opened) * let_by) @ down[expert]
            out = out.index_add(0, rows, result * weights[rows, places].unsqueeze(-1))
        return out

    return both_passes(looped, [gate, up, down], x.float(), dout.float())


def errors(layers: Layers, tokens: int) -> Results:
    """How far output and gradients are from float32's, |x - x32| / |x32| over all ranks, beside one GPU's.

    Raises:
        AssertionError: one is further away than allowed, on all ranks at once.
    """
    x, dout = tokens_of(layers.one.config, tokens)
    right = in_float32(layers.one, x, dout)
    alone = both_passes(layers.one, weights_of(layers.one), x, dout)
    got = both_passes(layers.two, weights_of(layers.two), own(x), own(dout))
    gate = got[2].float()
    dist.all_reduce(gate)  # each rank has the gradient of its own tokens
    got[2] = gate
    found, sums = {}, []
    for name, mine, *whole in zip(TENSORS, got, alone, right, strict=True):
        if name in ("out", "dx"):
            whole = [own(each_) for each_ in whole]
        elif name != "dgate":
            whole = [each_[layers.mine] for each_ in whole]
        one, true = whole
        sums.append(torch.stack([_squares(mine - true), _squares(one - true), _squares(true)]))
    together = torch.stack(sums)
    dist.all_reduce(together)
    for name, (ours, one, true) in zip(TENSORS, together.sqrt().tolist(), strict=True):
        found[name] = {"error": ours / true, "one_gpu_error": one / true, "allowed": 2 * one / true + 1e-6}
        if not found[name]["error"] <= found[name]["allowed"]:
            raise AssertionError(
                f"{name} is {found[name]['error']:.2e} from float32's, allowed {found[name]['allowed']:.2e}, twice the "
                "error of one GPU"
            )
    ranks.note(", ".join(f"{name} {error['error']:.2e}" for name, error in found.items()))
    return found


def _squares(x: Tensor) -> Tensor:
    """The sum of squares, a scalar in float64."""
    return x.float().square().sum(dtype=torch.float64)


# ---- times -----------------------------------------------------------------------------------------------------------


def exchanges(rows: Tensor, sent: Sequence[int], received: Sequence[int], round_trips: int) -> None:
    """A layer's all-to-alls: rows (n, hidden) go to the ranks of their experts and come back."""
    for _ in range(round_trips):
        there = all_to_all(rows, sent, received, dist.group.WORLD)
        all_to_all(there, received, sent, dist.group.WORLD)


def timed(layers: Layers, tokens: int, warmup: int, rounds: int) -> Results:
    """Samples of each pass on this rank, its counts of tokens by expert, and the bytes that it sends in both passes."""
    config, world_size = layers.one.config, dist.get_world_size()
    x, dout = tokens_of(config, tokens)
    mine, its_gradient = own(x).contiguous(), own(dout).contiguous()
    forward_pass(layers.two, mine)
    counts = layers.two.routed.counts
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    sent, received = (each_.view(world_size, -1).sum(1).tolist() for each_ in (counts, theirs))
    rows = torch.randn((sum(sent), config.hidden), device=x.device, dtype=x.dtype)
    passes = {
        FORWARD: {
            ONE: functools.partial(forward_pass, layers.one, x),
            TWO: functools.partial(forward_pass, layers.two, mine),
            EXCHANGES: functools.partial(exchanges, rows, sent, received, 1),
        },
        BOTH: {
            ONE: functools.partial(both_passes, layers.one, weights_of(layers.one), x, dout),
            TWO: functools.partial(both_passes, layers.two, weights_of(layers.two), mine, its_gradient),
            EXCHANGES: functools.partial(exchanges, rows, sent, received, 2),
        },
    }
    away = sum(sent) - sent[dist.get_rank()], sum(received) - received[dist.get_rank()]
    of_counts = counts.nbytes // world_size * (world_size - 1)
    return {
        "samples": {name: ranks.compare_aligned(steps, warmup=warmup, rounds=rounds) for name, steps in passes.items()},
        "counts": counts.tolist(),
        "sent": 2 * sum(away) * config.hidden * rows.element_size() + of_counts,
    }


def on_rank(chosen: Mapping[str, tuple[MoEConfig, int]], checked: int, warmup: int, rounds: int) -> list[Results]:
    """Everything that one rank measures, layer by layer."""
    ranks.settle()
    found = []
    for name, (config, tokens) in chosen.items():
        ranks.note(name)
        layers = Layers(config)
        errs = errors(layers, checked)
        ranks.release()
        found.append({"errors": errs, **timed(layers, tokens, warmup, rounds)})
        del layers
        ranks.release()
    return found


# ---- the record ------------------------------------------------------------------------------------------------------


def point(name: str, config: MoEConfig, tokens: int, of_ranks: Sequence[Results]) -> Results:
    """One layer of the record, from what the ranks found."""
    world_size = len(of_ranks)
    passes = []
    for of_pass, factor, training in ((FORWARD, 1, False), (BOTH, 3, True)):
        times = ranks.slowest([found["samples"][of_pass] for found in of_ranks])
        products = 2 * config.chosen * config.expert_parameters * tokens * world_size
        passes.append(
            {
                "pass": of_pass,
                "flops": factor * products,
                "formula_bytes": all_to_all_bytes(config, tokens, world_size, 2, training=training),
                "timed": {way: t.as_dict() for way, t in times.items()},
                "speedup": timing.ratio(times[ONE], times[TWO]).as_dict(),
                "exchange_share": timing.ratio(times[EXCHANGES], times[TWO]).as_dict(),
            }
        )
    counts = [sum(of_expert) for of_expert in zip(*(found["counts"] for found in of_ranks), strict=True)]
    return {
        "name": name,
        **{key: getattr(config, key) for key in ("hidden", "inner", "experts", "chosen")},
        "parameters": config.parameters,
        "tokens_per_rank": tokens,
        "errors": of_ranks[0]["errors"],
        "passes": passes,
        "sent_bytes": [found["sent"] for found in of_ranks],
        "imbalance": rank_imbalance(counts, world_size),
    }


SCHEMA = {
    "dtype": TEXT,
    "world_size": SIZE,
    "checked_tokens": SIZE,
    "layers": [
        {
            "name": TEXT,
            **each(SIZE, "hidden", "inner", "experts", "chosen", "parameters", "tokens_per_rank"),
            "errors": {str: each(NOT_NEGATIVE, "error", "one_gpu_error", "allowed")},
            "passes": [
                {
                    "pass": TEXT,
                    **each(SIZE, "flops", "formula_bytes"),
                    "timed": {str: TIMING},
                    "speedup": RATIO,
                    "exchange_share": RATIO,
                }
            ],
            "sent_bytes": [SIZE],
            "imbalance": POSITIVE,
        }
    ],
}


def measure(
    quick: bool = False,
    layers: Mapping[str, tuple[MoEConfig, int]] = LAYERS,
    checked: int = CHECKED,
    warmup: int = WARMUP,
    rounds: int | None = None,
) -> Results:
    """Everything in the record's schema; ``quick`` takes the first layer and few rounds.

    Args:
        layers: name -> sizes, softmax routers without a shared expert, and tokens of each rank.
        checked: tokens of each rank that are compared with float32.
    """
    chosen = dict(list(layers.items())[:1] if quick else layers)
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    found = ranks.launch_briefly(on_rank, chosen, checked, warmup, rounds, world_size=WORLD_SIZE)
    points = [
        point(name, *sizes, of_ranks)
        for (name, sizes), of_ranks in zip(chosen.items(), zip(*found, strict=True), strict=True)
    ]
    return {"dtype": "bf16", "world_size": WORLD_SIZE, "checked_tokens": checked, "layers": points}


def table(results: Mapping[str, Any]) -> str:
    """One line a layer and pass."""
    rows = [
        [
            f"{layer['name']}, {of_pass['pass']}",
            *(f"{of_pass['timed'][way]['seconds'] * 1e3:.3f}" for way in (ONE, TWO, EXCHANGES)),
            f"{of_pass['speedup']['ratio']:.3f}",
            f"{of_pass['exchange_share']['ratio']:.1%}",
            f"{of_pass['formula_bytes'] / 1e6:.1f}",
            f"{layer['imbalance']:.3f}",
        ]
        for layer in results["layers"]
        for of_pass in layer["passes"]
    ]
    headings = ["layer, pass", f"{ONE} ms", f"{TWO} ms", "all-to-alls ms", "x", "share", "MB sent", "imbalance"]
    return benchmark_cli.text_table(headings, rows)


if __name__ == "__main__":
    from benchmarks.expert_parallel import measure  # a rank imports it by this name

    raise SystemExit(ranks.run_on(WORLD_SIZE, "expert_parallel", measure, table, SCHEMA))
