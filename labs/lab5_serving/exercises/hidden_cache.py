"""Hidden scenarios of exercise 5.1: where tokens stand, what a cache keeps, what is seen, and what is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from utils.checks.hidden import Draw, Observation, collected

from .hidden_model import CountingModel, tiny_model

#: What stands in slots that nobody has written: a mask hides it, and whoever sees it all the same is far off.
OLD = 25.0


@collected
def kv_cache(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Positions, single calls of the attention over pasts of several lengths, and texts decoded side by side."""
    draw = Draw(seed, "5.1")
    yield "CachedAttention.positions", [_positions(package, draw) for _ in range(4)]
    for what, pasts, count in (
        ("in a first step", [0] * draw.between(2, 3), draw.between(2, 6)),
        ("of one new token each", draw.random.sample(range(1, 15, 2), 3), 1),
        ("of several new tokens each", draw.random.sample(range(1, 13, 3), 3), draw.between(2, 5)),
        ("of one sequence", [draw.between(4, 11)], draw.between(1, 4)),
    ):
        for name, value in _call(package, draw, pasts, count).items():
            yield f"CachedAttention {what}: {name}", value
    for number in range(4):
        yield from _decoded(package, draw, f"decode, batch {number + 1}", ends=bool(number % 2)).items()


def _positions(package: ModuleType, draw: Draw) -> Observation:
    pasts, count = draw.random.sample(range(0, 20), draw.between(1, 4)), draw.between(1, 5)
    cache = package.CachedAttention(tiny_model(draw).config, len(pasts), 40)
    cache.lengths = torch.tensor(pasts)
    return cache.positions(count).tolist()


def _call(package: ModuleType, draw: Draw, pasts: list[int], count: int) -> dict[str, Observation]:
    """Two layers of one step: the result, what the cache holds afterwards, and what must not change."""
    config = tiny_model(draw).config
    capacity = max(pasts) + count + draw.between(1, 4)
    cache = package.CachedAttention(config, len(pasts), capacity, dtype=torch.float64)
    cache.keys.fill_(OLD)
    cache.values.fill_(OLD)
    cache.lengths = torch.tensor(pasts)
    for b, past in enumerate(pasts):
        for kept in (cache.keys, cache.values):
            kept[:, b, :past] = draw.normal(
                config.num_layers, past, config.num_kv_heads, config.head_dim, dtype=torch.float64
            )
    seen: dict[str, Observation] = {}
    for layer in (1, 0):
        q = draw.normal(len(pasts), count, config.num_heads, config.head_dim, dtype=torch.float64)
        k, v = (
            draw.normal(len(pasts), count, config.num_kv_heads, config.head_dim, dtype=torch.float64) for _ in range(2)
        )
        given = q.clone(), k.clone(), v.clone()
        seen[f"result of layer {layer}"] = cache(layer, *given)
        seen[f"keys after layer {layer}"], seen[f"values after layer {layer}"] = (
            cache.keys.clone(),
            cache.values.clone(),
        )
        seen[f"lengths after layer {layer}"] = cache.lengths.tolist()
        seen[f"q, k and v stay as they are in layer {layer}"] = all(map(torch.equal, given, (q, k, v)))
    return seen


def _decoded(package: ModuleType, draw: Draw, name: str, ends: bool) -> dict[str, Observation]:
    """Prompts of several lengths decoded together; with ``ends`` some texts end before the others."""
    model = tiny_model(draw, vocabulary=11 if ends else 31, eos=(draw.between(0, 10),) if ends else ())
    lengths = [*draw.random.sample(range(2, 12), 3), 1]
    draw.random.shuffle(lengths)
    prompts = [[draw.random.randrange(model.config.vocab_size) for _ in range(length)] for length in lengths]
    given, new = [list(prompt) for prompt in prompts], draw.between(5, 8)
    texts = package.decode(model, given, new)
    steps = max(map(len, texts))
    return {
        f"{name}: tokens": [[int(token) for token in text] for text in texts],
        f"{name}: the prompts stay as they are": given == prompts,
        f"{name}: only new tokens go through the model": _new_alone(model, len(prompts), max(lengths), steps),
    }


def _new_alone(model: CountingModel, batch: int, longest: int, steps: int) -> bool:
    """Whether one pass read the padded prompts, and each later one a token of every sequence."""
    return model.tokens <= batch * (longest + steps - 1)
