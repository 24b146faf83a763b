"""Scenarios of exercise 5.1 that decode: the same tokens as without a cache, and one token a step and sequence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import torch

from utils.checks.core import classic, listed
from utils.checks.hidden import Observation
from utils.serving import Decoder

from .scenarios import CheckMismatch
from .spied_model import Asked, SpiedModel, tiny_model, without_cache

Answer = Mapping[str, Callable]


def _prompts(rng: random.Random, lengths: list[int], vocabulary: int) -> list[list[int]]:
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]


def one_after_another(answer: Answer, rng: random.Random) -> None:
    """A single sequence."""
    model = tiny_model(rng)
    _judge(answer, model, _prompts(rng, [rng.randint(1, 9)], model.config.vocab_size), rng.randint(2, 8))


def side_by_side(answer: Answer, rng: random.Random) -> None:
    """Sequences of different lengths, one of a single token, and the same ones in another order."""
    model, new = tiny_model(rng), rng.randint(3, 7)
    prompts = _prompts(rng, [*rng.sample(range(2, 12), rng.randint(1, 3)), 1], model.config.vocab_size)
    rng.shuffle(prompts)
    _judge(answer, model, prompts, new)
    model.forget()
    _judge(answer, model, prompts[::-1], new)


def ends_apart(answer: Answer, rng: random.Random) -> None:
    """An end of text that some sequences reach."""
    plain = tiny_model(rng)
    prompts = _prompts(rng, rng.sample(range(1, 10), 3), plain.config.vocab_size)
    texts = [without_cache(plain, prompt, 6) for prompt in prompts]
    model = SpiedModel(plain.config.__class__(**{**vars(plain.config), "eos_token_ids": (texts[0][2],)})).double()
    model.load_state_dict(plain.state_dict())
    model.forget()
    _judge(answer, model.eval(), prompts, 6)


def observe_decode(answer: Answer, rng: random.Random, name: str, ends: bool) -> Iterator[tuple[str, Observation]]:
    """Hidden cases: prompts of several lengths decoded together; with ``ends`` some texts end before the others."""
    model = tiny_model(rng, (rng.randint(0, 10),) if ends else (), vocabulary=11 if ends else 31)
    lengths = [*rng.sample(range(2, 12), 3), 1]
    rng.shuffle(lengths)
    prompts = _prompts(rng, lengths, model.config.vocab_size)
    given = [list(prompt) for prompt in prompts]
    texts = answer["decode"](model, given, rng.randint(5, 8))
    yield f"{name}: tokens", [[int(token) for token in text] for text in texts]
    yield f"{name}: the prompts stay as they are", given == prompts
    allowed = len(prompts) * (max(lengths) + max(map(len, texts)) - 1)
    yield f"{name}: only new tokens go through the model", model.notes.tokens <= allowed


def _judge(answer: Answer, model: SpiedModel, prompts: list[list[int]], new: int) -> None:
    right = [without_cache(model, prompt, new) for prompt in prompts]
    model.forget()
    given = [list(prompt) for prompt in prompts]
    got = answer["decode"](model, given, new)
    where = f"prompts of {listed(map(len, prompts))} tokens, {new} new ones"
    notes = model.notes
    if given != prompts:
        raise CheckMismatch("decode changes the prompts that it is given", "its caller still needs them", where)
    steps = max(map(len, right))
    _judge_passes(model, notes.passes[:1], prompts, right, where)
    _judge_rows(notes, prompts, where)
    _judge_passes(model, notes.passes, prompts, right, where)
    longest = max(map(len, prompts))
    allowed = len(prompts) * (longest + steps - 1)
    if notes.tokens > allowed:
        cause = classic("text that is in the cache goes through the model again", 4)
        raise CheckMismatch(f"{notes.tokens} tokens go through the model, {allowed} are enough", cause, where)
    if not isinstance(got, list) or [list(map(int, text)) for text in got] != right:
        b = next((b for b, text in enumerate(right) if b >= len(got) or list(map(int, got[b])) != text), 0)
        found = listed(got[b]) if b < len(got) else "nothing"
        raise CheckMismatch(
            f"sequence {b} of {len(prompts)} continues {found}",
            "the steps look right: how are the tokens chosen and kept?",
            f"expected {listed(right[b])}",
            where,
        )


def _judge_passes(
    model: SpiedModel, passes: list[Asked], prompts: list[list[int]], right: list[list[int]], where: str
) -> None:
    """Each pass has the tokens and the positions that belong there, as far as they are real."""
    longest = max(map(len, prompts))
    for step, asked in enumerate(passes):
        if asked.tokens.dim() != 2 or len(asked.tokens) != len(prompts):
            continue  # another way to lay out a step: its tokens and its budget are judged
        if step and asked.tokens.shape[1] > 1:
            cause = "text that is in the cache goes through the model again: a step brings the newest token alone"
            raise CheckMismatch(
                f"step {step + 1} brings {asked.tokens.shape[1]} tokens of each sequence", classic(cause, 4), where
            )
        for b, prompt in enumerate(prompts):
            text = [*prompt, *right[b]]
            if step > len(right[b]) - 1:
                continue  # it has ended
            begin = len(prompt) + step - 1 if step else 0
            expected = list(range(begin, len(prompt) + step))
            count = len(expected)
            at = asked.positions[b, :count].tolist()
            if at != expected:
                raise CheckMismatch(
                    f"step {step + 1}: the token of sequence {b} stands at position {listed(at)}, "
                    f"{listed(expected)} {'is' if count == 1 else 'are'} right",
                    _why_position(at[0], begin, longest + step - 1, passes[step - 1] if step else None, b, len(prompt)),
                    where,
                )
            found = asked.tokens[b, :count].tolist()
            wanted = [text[i] for i in expected]
            if found != wanted:
                raise CheckMismatch(
                    f"step {step + 1} brings token {listed(found)} of sequence {b}, expected {listed(wanted)}",
                    _why_token(model, passes[step - 1], b, found) if step else "",
                    where,
                )


def _why_position(got: int, expected: int, padded: int, before: Asked | None, b: int, count: int) -> str:
    if before is None:
        early = classic("the first token stands at position 0: advance(counts) comes after the model has read", 5)
        return early if got == count else "the first token stands at position 0"
    if got == padded:
        return classic("padding counts as tokens: advance by counts, the real tokens of each sequence", 5)
    if got == int(before.positions[b, 0]) and got != expected:
        return classic("the cache does not move on: advance(counts) once a step", 5)
    if got == 0:
        return classic("positions restart at 0 in each step: they go on behind the past", 1)
    if got > expected:
        return classic("the cache moves on too far: advance(counts) once a step", 5)
    return classic("the token after n others stands at position n", 1)


def _why_token(model: SpiedModel, before: Asked, b: int, found: list[int]) -> str:
    if before.hidden.dim() == 3 and Decoder.logits(model, before.hidden[b, -1]).argmax().item() == found[0]:
        return classic("the next token comes from the last *real* row of each sequence, not from the padded one", 6)
    return "the next token is the likeliest one after the newest"


def _judge_rows(notes, prompts: list[list[int]], where: str) -> None:
    """The rows of which logits are taken."""
    if not notes.passes or not notes.rows:
        raise CheckMismatch("decode does not ask the model: no pass, or no logits", "", where)
    asked, rows = notes.passes[0], notes.rows[0]
    if asked.hidden.dim() != 3 or rows.shape != (len(prompts), asked.hidden.shape[-1]):
        return
    for b, prompt in enumerate(prompts):
        if torch.equal(rows[b], asked.hidden[b, len(prompt) - 1]):
            continue
        found = [t for t in range(asked.hidden.shape[1]) if torch.equal(rows[b], asked.hidden[b, t])]
        which = f"row {found[0]}" if found else "no row of its own"
        raise CheckMismatch(
            f"logits of sequence {b} are taken of {which}, its last token is row {len(prompt) - 1}",
            classic("the next token comes from the last *real* row of each sequence: counts - 1", 6),
            where,
        )
