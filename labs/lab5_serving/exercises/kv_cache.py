"""The check of exercise 5.1: keys and values kept, positions, what each query sees, and decoding with it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from utils.checks.core import Exercise, classic, listed
from utils.checks.hidden import Observation, collected
from utils.serving import ModelConfig

from .decode_scenarios import ends_apart, observe_decode, one_after_another, side_by_side
from .scenarios import CheckMismatch, CheckScenario, check_scenarios
from .spied_model import tiny_config

Answer = Mapping[str, Callable]

_READY_MADE = tuple(f"utils.serving.{name}" for name in ("KVCache", "generate", "stream", "model.KVCache"))
#: What stands in slots that nobody has written: finite, so that a mask hides it; large, so that nobody overlooks it.
POISON = 40.0


def _cache(answer: Answer, config: ModelConfig, lengths: list[int], capacity: int) -> Any:
    """A cache of sequences of these lengths, all slots poisoned."""
    cache = answer["CachedAttention"](config, len(lengths), capacity, dtype=torch.float64)
    cache.keys.fill_(POISON)
    cache.values.fill_(POISON)
    cache.lengths = torch.tensor(lengths)
    return cache


# ---- position ids
def _positions(answer: Answer, rng: random.Random) -> None:
    for count in (rng.randint(2, 6), 1):
        _next_positions(answer, rng, count)


def _next_positions(answer: Answer, rng: random.Random, count: int) -> None:
    batch = rng.randint(2, 5)
    lengths = rng.sample(range(1, 20), batch)
    cache = _cache(answer, tiny_config(rng), lengths, 40)
    got = cache.positions(count)
    right = torch.tensor(lengths)[:, None] + torch.arange(count)
    if not isinstance(got, Tensor) or got.shape != right.shape or got.dtype.is_floating_point:
        shape = f"a tensor of {tuple(got.shape)}, {got.dtype}" if isinstance(got, Tensor) else repr(got)
        raise CheckMismatch(
            f"positions({count}) gives {shape}", f"expected one integer for each new token, ({batch}, {count})"
        )
    if torch.equal(got.cpu().long(), right):
        return
    cause = ""
    for wrong, text in (
        (torch.arange(count).expand(batch, -1), "positions restart at 0 in each step: they go on behind the past"),
        (right + 1, "positions count from 0: the token after n others stands at n"),
        (right - 1, "positions start one too early: the token after n others stands at n"),
        (right[:, :1].expand(-1, count), "all new tokens of a sequence stand at the same place"),
        (max(lengths) + torch.arange(count).expand(batch, -1), "every sequence has a past of its own"),
        (right[0].expand(batch, -1), "every sequence has a past of its own: this is the first one's"),
    ):
        if torch.equal(got.cpu().long(), wrong):
            cause = classic(text, 1)
            break
    b = int((got.cpu() != right).any(-1).nonzero()[0])
    raise CheckMismatch(
        f"the next {count} positions of a sequence with {lengths[b]} tokens are {listed(got[b].tolist())}",
        cause,
        f"expected {listed(right[b].tolist())}; lengths of all sequences: {listed(lengths)}",
    )


# ---- one call of the attention
def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """(B, T, H, D) over (B, N, G, D), written out; rows that see nothing give 0."""
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    scores = torch.einsum("bthd,bnhd->bhtn", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhtn,bnhd->bthd", weights, v)


def _each_layer(answer: Answer, rng: random.Random, lengths: list[int], count: int) -> Iterator[tuple]:
    """One step, layer by layer: the cache, the layer, what it was given and how that is afterwards, its result, and the
    keys and values that the cache must hold then."""
    config = tiny_config(rng)
    draw = torch.Generator().manual_seed(rng.getrandbits(60))
    batch, capacity = len(lengths), max(lengths) + count + rng.randint(1, 5)
    cache = _cache(answer, config, lengths, capacity)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    for b, length in enumerate(lengths):
        cache.keys[:, b, :length] = drawn(config.num_layers, length, config.num_kv_heads, config.head_dim)
        cache.values[:, b, :length] = drawn(config.num_layers, length, config.num_kv_heads, config.head_dim)
    keys, values = cache.keys.clone(), cache.values.clone()
    for layer in (1, 0):
        q = drawn(batch, count, config.num_heads, config.head_dim)
        k, v = (drawn(batch, count, config.num_kv_heads, config.head_dim) for _ in range(2))
        for b, length in enumerate(lengths):
            keys[layer, b, length : length + count], values[layer, b, length : length + count] = k[b], v[b]
        given = q.clone(), k.clone(), v.clone()
        got = cache(layer, *given)
        yield cache, layer, (q, k, v), given, got, keys, values


def _one_call(answer: Answer, rng: random.Random, lengths: list[int], count: int) -> None:
    for cache, layer, (q, k, v), given, got, keys, values in _each_layer(answer, rng, lengths, count):
        where = f"lengths {listed(lengths)}, T={count}, H={q.shape[2]}, G={k.shape[2]}, capacity {keys.shape[2]}"
        if any(not torch.equal(old, new) for old, new in zip((q, k, v), given, strict=True)):
            raise CheckMismatch("q, k or v is changed in place", "the model still needs them", where)
        if cache.lengths.tolist() != lengths:
            raise CheckMismatch(
                f"lengths are {listed(cache.lengths.tolist())} after layer {layer} was called",
                classic("every layer of a step has the same past: advance is called once a step, by decode", 5),
                where,
            )
        _judge_kept(cache, keys, values, lengths, count, layer, where)
        _judge_seen(got, q, keys[layer], values[layer], lengths, count, where)


def _judge_kept(
    cache: Any, keys: Tensor, values: Tensor, lengths: list[int], count: int, layer: int, where: str
) -> None:
    for name, kept, right in (("keys", cache.keys, keys), ("values", cache.values, values)):
        if torch.equal(kept, right):
            continue
        wrong = (kept != right).flatten(3).any(-1)  # (layers, B, capacity)
        at, b, slot = wrong.nonzero()[0].tolist()
        cause = _why_kept(kept[at, b], right[at, b], slot, lengths[b], max(lengths), count)
        if at != layer:
            cause = f"layer {layer} was called, and layer {at} has changed: each layer keeps its own"
        elif name == "values" and torch.equal(kept[at, b, slot], keys[at, b, slot]):
            cause = "the values' place holds the keys"
        rows = "".join("X" if wrong[at, b, s] else "." for s in range(wrong.shape[2]))
        raise CheckMismatch(
            f"the {name} of sequence {b}, layer {at}, slot {slot} are not what belongs there",
            classic(cause, 3),
            f"slots of that sequence: {rows}   ('.' right, 'X' wrong), {lengths[b]} tokens are its past",
            where,
        )


def _why_kept(kept: Tensor, right: Tensor, slot: int, length: int, longest: int, count: int) -> str:
    """Why one sequence's slots (capacity, G, D) of a layer are not as they should be."""
    first = [s for s in range(len(kept)) if torch.equal(kept[s], right[length])]  # where the first new token went
    if slot < length:
        return "the past is overwritten: new tokens go behind the lengths[b] that are there"
    if slot >= length + count:
        return "more is written than the new tokens: slots lengths[b] .. lengths[b] + T - 1"
    if first and first[0] == longest > length:
        return (
            "every sequence has a past of its own: new tokens go to slot lengths[b] + t, not all to the longest one's"
        )
    if first and first[0] != length:
        return f"the first new token went to slot {first[0]}, slot lengths[b] = {length} is its own"
    if (kept[slot] == POISON).all():
        return "nothing is kept there: slot lengths[b] + t of sequence b holds its new token t"
    if any(torch.equal(kept[slot], right[s]) for s in range(len(right)) if s != slot):
        return "another token's keys or values stand in that slot: token t goes to lengths[b] + t"
    return (
        "what stands in that slot is not what was given of its token: slot lengths[b] + t of sequence b holds token t"
    )


def _judge_seen(
    got: object, q: Tensor, keys: Tensor, values: Tensor, lengths: list[int], count: int, where: str
) -> None:
    if not isinstance(got, Tensor) or got.shape != q.shape:
        shape = f"a tensor of {tuple(got.shape)}" if isinstance(got, Tensor) else repr(got)
        raise CheckMismatch(f"the attention returns {shape}", f"expected {tuple(q.shape)}, the shape of q", where)
    past, slot = torch.tensor(lengths)[:, None, None], torch.arange(keys.shape[1])
    own = past + torch.arange(count)[:, None]  # (B, T, 1): where each query stands
    right = _attend(q, keys, values, slot <= own)
    bad = ~torch.isclose(got, right, rtol=1e-8, atol=1e-8)
    if not bad.any():
        return
    longest, end = max(lengths), max(lengths) + count
    cause = ""
    for visible, number, text in (
        ((slot < end).expand(len(lengths), count, -1), 2, "no slot is hidden: shorter sequences see what nobody wrote"),
        (slot < past + count, 2, "a query sees the tokens after it: query t sees 0..lengths[b] + t"),
        (slot < own, 2, "a query does not see its own token: its key is in the cache already"),
        (slot <= own + 1, 2, "one slot too many is visible: query t sees 0..lengths[b] + t"),
        ((slot < past).expand(-1, count, -1), 2, "only the past is visible: new tokens see each other and themselves"),
        ((slot <= own) & (slot >= past), 2, "the past is invisible: only this step's tokens see each other"),
        ((slot <= longest + torch.arange(count)[:, None]).expand(len(lengths), -1, -1), 2,
         "every sequence has a past of its own: the longest one's is visible in all"),
        ((slot <= torch.arange(count)[:, None]).expand(len(lengths), -1, -1), 2,
         "the mask starts at slot 0: it forgets that lengths[b] tokens come before"),
        (slot > own, 2, "the mask is upside down: True is what a query sees"),
    ):  # fmt: skip
        if torch.allclose(got, _attend(q, keys, values, visible & (slot < end)), rtol=1e-7, atol=1e-7):
            cause = classic(text, number)
            break
    b, t, h, _ = bad.nonzero()[0].tolist()
    rows = "".join("X" if bad[b, i].any() else "." for i in range(count))
    raise CheckMismatch(
        f"{int(bad.sum()):,} of {bad.numel():,} elements of the attention's result differ",
        cause,
        f"first: sequence {b} (lengths[{b}] = {lengths[b]}), query t={t}, head {h}: got {got[b, t, h, 0]:.4g}, "
        f"expected {right[b, t, h, 0]:.4g}",
        f"queries of that sequence: {rows}   ('.' right, 'X' wrong)",
        where,
    )


def _lengths(rng: random.Random) -> list[int]:
    """Of several sequences, no two of them neighbours."""
    return [2 * length + 1 for length in rng.sample(range(0, 7), rng.randint(2, 4))]


def _first_step(answer: Answer, rng: random.Random) -> None:
    _one_call(answer, rng, [0] * rng.randint(1, 3), rng.randint(1, 6))


def _decode_step(answer: Answer, rng: random.Random) -> None:
    _one_call(answer, rng, _lengths(rng), 1)


def _several_new(answer: Answer, rng: random.Random) -> None:
    _one_call(answer, rng, _lengths(rng), rng.randint(2, 5))


_RAISED = {
    "Boolean value of Tensor": "a tensor of several sequences' lengths has no single truth: compare element by element",
    "shape mismatch": (
        "sequences (B, 1) and slots (B, T) are the indices of (B, T) places, each of which takes one token's (G, D)"
    ),
}
_TOO_FAR = {
    "the cache is reserved for": classic(
        "the cache moves on too far, or too early: advance(counts) once a step, after the model has read", 5
    )
}
_SCENARIOS = (
    CheckScenario("position ids", _positions, times=3),
    CheckScenario("several new tokens each", _several_new, _RAISED, times=3),
    CheckScenario("one new token each", _decode_step, _RAISED, times=3),
    CheckScenario("a first step", _first_step, _RAISED, times=2),
    CheckScenario("decode one prompt", one_after_another, _TOO_FAR, times=2),
    CheckScenario("decode prompts of several lengths", side_by_side, _TOO_FAR, times=3),
    CheckScenario("texts that end at different steps", ends_apart, _TOO_FAR, times=2),
)


# ---- hidden cases
@collected
def observe(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Hidden cases: positions, the check's calls of the attention with another seed, and texts decoded side by side."""
    rng = random.Random(f"{seed}/5.1")
    answer = vars(package)
    pasts = [rng.sample(range(20), rng.randint(1, 4)) for _ in range(4)]
    caches = [_cache(answer, tiny_config(rng), past, 40) for past in pasts]
    yield "CachedAttention.positions", [cache.positions(rng.randint(1, 5)).tolist() for cache in caches]
    for what, lengths, count in (
        ("in a first step", [0] * rng.randint(2, 3), rng.randint(2, 6)),
        ("of one new token each", _lengths(rng), 1),
        ("of several new tokens each", _lengths(rng), rng.randint(2, 5)),
        ("of one sequence", [rng.randint(4, 11)], rng.randint(1, 4)),
    ):
        for cache, layer, inputs, given, got, *_ in _each_layer(answer, rng, lengths, count):
            name = f"CachedAttention {what}, layer {layer}"
            yield f"{name}: result", got
            yield f"{name}: keys and values", [cache.keys.clone(), cache.values.clone()]
            yield f"{name}: lengths", cache.lengths.tolist()
            yield f"{name}: q, k and v stay as they are", all(map(torch.equal, given, inputs))
    for number in range(4):
        yield from observe_decode(answer, rng, f"decode, batch {number + 1}", ends=bool(number % 2))


KV_CACHE = Exercise(
    "5.1",
    "KV-cached decode",
    points=12,
    observe=observe,
)


@KV_CACHE.checked_by
def check_kv_cache(CachedAttention: Callable, decode: Callable, seed: int | None = None) -> None:
    """Exercise 5.1: attention that keeps keys and values, and decoding with it.

    Raises:
        CheckFailed: the answer is wrong; the text says where and why.
    """
    check_scenarios(
        KV_CACHE,
        {"CachedAttention": CachedAttention, "decode": decode},
        _SCENARIOS,
        seed,
        "the tokens are those of decoding without a cache, and each step computes one token a sequence",
        _READY_MADE,
    )
