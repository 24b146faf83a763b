"""A scenario of exercise 5.6: greedy text by drafts is the target's own, and no cache keeps a rejected token."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch

from utils.checks.core import classic, listed
from utils.serving import SamplingParams

from .scenarios import CheckMismatch
from .spied_model import SpiedModel, tiny_model, without_cache

KEPT = classic("a rejected token stays in the cache: keep what was accepted, less the newest token", 8)


def drafts_are_dropped(answer: Mapping[str, Callable], rng: random.Random) -> None:
    """A draft that is right now and then."""
    target = tiny_model(rng)
    draft = almost(target, rng)
    prompt = [rng.randrange(target.config.vocab_size) for _ in range(rng.randint(1, 6))]
    new, k = rng.randint(12, 20), rng.randint(1, 5)
    right = [*prompt, *without_cache(target, prompt, new)]
    target.forget()
    draft.forget()
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    got = answer["speculative_generate"](target, draft, list(prompt), params, k)
    where = f"prompt of {len(prompt)} tokens, {new} new ones, {k} drafted a round"
    judged = [asked.number for asked in target.notes.passes]
    _judge_reading("target", target, right, judged, where)
    _judge_reading("draft", draft, right, judged, where)
    if list(got.tokens) != right[len(prompt) :]:
        raise CheckMismatch(
            f"the text is {listed(got.tokens)}",
            "greedy decoding by drafts gives the tokens of the target alone",
            f"expected {listed(right[len(prompt) :])}",
            where,
        )


def almost(target: SpiedModel, rng: random.Random) -> SpiedModel:
    """The target with some noise on its weights: it agrees now and then."""
    draft = SpiedModel(target.config).double().eval()
    draft.load_state_dict(target.state_dict())
    noise = torch.Generator().manual_seed(rng.getrandbits(60))
    with torch.no_grad():
        draft.lm_head.weight += 0.35 * torch.randn(
            draft.lm_head.weight.shape, generator=noise, dtype=draft.lm_head.weight.dtype
        )
    return draft


def _judge_reading(name: str, model: SpiedModel, right: list[int], judged: list[int], where: str) -> None:
    """What a model has read before each round is text that stays, and nothing is read twice.

    Args:
        judged: numbers of the target's passes: between two of them the draft builds on its own guesses.
    """
    cache: dict[int, int] = {}
    last = -1
    for index, asked in enumerate(model.notes.passes):
        tokens, positions = asked.tokens.flatten().tolist(), asked.positions.flatten().tolist()
        if not positions:
            raise CheckMismatch(
                f"pass {index + 1} of the {name} reads nothing: its cache is longer than the text", KEPT, where
            )
        first, new_round = positions[0], any(last < number <= asked.number for number in judged)
        last = asked.number
        for position in range(first if new_round else 0):
            text = right[position] if position < len(right) else "nothing"
            if cache.get(position) != text:
                raise CheckMismatch(
                    f"pass {index + 1} of the {name} goes on at position {first}, and its cache holds token "
                    f"{cache.get(position, 'nothing')} at position {position}, where the text has {text}",
                    KEPT,
                    where,
                )
        if new_round and first < len(right) and cache.get(first) == right[first]:
            raise CheckMismatch(
                f"pass {index + 1} of the {name} reads position {first} again, with the token that it has read there",
                classic("more is dropped than was rejected: all but the newest token of the text have been read", 8),
                where,
            )
        cache.update(zip(positions, tokens, strict=True))
