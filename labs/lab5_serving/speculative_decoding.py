"""Speculative decoding of one sequence: draft, verify, drop (exercise 5.6); each model has a contiguous cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from utils.serving import Decoder, KVCache, SamplingParams, probabilities
from utils.serving.generate import check_prompt

from .speculative import draw, speculative_sample


@dataclass(frozen=True)
class Round:
    """One pass of the target: what was drafted for it, how many of these it accepted, and the token that it added.

    ``tokens`` are what the round adds to the text. An end-of-text token ends them, so it may be the last ``accepted``
    one, and ``added`` then None.
    """

    drafted: tuple[int, ...]
    accepted: int
    added: int | None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The accepted tokens and the added one."""
        return self.drafted[: self.accepted] + (() if self.added is None else (self.added,))


@dataclass(frozen=True)
class SpeculativeGeneration:
    """``tokens`` and ``finish_reason`` as of :class:`utils.serving.Generation`, and the ``rounds`` they came in."""

    tokens: list[int]
    finish_reason: str
    rounds: list[Round]


class CachedModel:
    """A decoder and the cache of one sequence, which reads what it has not read yet."""

    def __init__(self, model: Decoder, capacity: int) -> None:
        self.model = model
        self.cache = KVCache(model.config, capacity, model.dtype, model.device)

    def logits(self, tokens: Sequence[int], rows: int = 1) -> Tensor:
        """Scores of the token after each of the last ``rows`` of ``tokens``, (rows, V)."""
        start = self.cache.length
        ids = torch.tensor(tokens[start:], device=self.model.device)
        positions = torch.arange(start, len(tokens), device=self.model.device)
        hidden = self.model.hidden(ids, positions, self.cache)
        self.cache.advance(len(ids))
        return self.model.logits(hidden[-rows:])

    def keep(self, length: int) -> None:
        """Drop what was read behind the first ``length`` tokens."""
        self.cache.advance(min(0, length - self.cache.length))


def check_pair(target: Decoder, draft: Decoder, draft_tokens: int) -> None:
    """Refuse models that do not share a vocabulary, and a negative number of draft tokens, with a ValueError."""
    sizes = target.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(f"target and draft must share one vocabulary, got {sizes[0]:,} and {sizes[1]:,} tokens")
    if not isinstance(draft_tokens, int) or draft_tokens < 0:
        raise ValueError(f"draft_tokens must be an integer of at least 0, got {draft_tokens!r}")


def speculative_rounds(
    target: Decoder,
    draft: Decoder,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    draft_tokens: int = 4,
) -> Iterator[Round]:
    """The rounds of speculative decoding, each as soon as it is known.

    With temperature 0 the tokens are those of :func:`utils.serving.stream` with the target. Otherwise they have the
    same distribution, but are other ones: more random numbers are drawn. With ``draft_tokens=0`` they are the same.

    Args:
        target, draft: in evaluation mode, with one vocabulary.
        prompt: at least one token.
        params: apply to both models' distributions; greedy, 64 tokens, by default.
        draft_tokens: k, drafted in each round; fewer where fewer are wanted.

    Raises:
        ValueError: as :func:`check_pair`; a prompt that one of the models cannot continue.
    """
    params = params or SamplingParams()
    check_pair(target, draft, draft_tokens)
    tokens = check_prompt(target, prompt)
    room = min(len(tokens) + params.max_new_tokens, target.config.max_seq_len)
    return _rounds(target, draft, tokens, params, room, draft_tokens)


@torch.no_grad()
def _rounds(
    target: Decoder, draft: Decoder, tokens: list[int], params: SamplingParams, room: int, draft_tokens: int
) -> Iterator[Round]:
    generator = torch.Generator().manual_seed(params.seed)
    checker, drafter = CachedModel(target, room), CachedModel(draft, min(room, draft.config.max_seq_len))
    stops = () if params.ignore_eos else target.config.eos_token_ids
    while len(tokens) < room:
        # A round adds one token more than it drafts, and the draft cannot read beyond its own positions.
        k = max(0, min(draft_tokens, room - len(tokens) - 1, drafter.cache.capacity - len(tokens)))
        drafted, draft_probs = [], []
        for _ in range(k):
            draft_probs.append(probabilities(drafter.logits(tokens + drafted)[0], params))
            uniform = torch.zeros(()) if params.greedy else torch.rand((), dtype=torch.float64, generator=generator)
            drafted.append(int(draw(draft_probs[-1], uniform)))
        target_probs = probabilities(checker.logits(tokens + drafted, rows=k + 1), params)
        q = torch.stack(draft_probs) if k else target_probs[:0]
        chosen = speculative_sample(target_probs, q, torch.tensor(drafted, dtype=torch.int64), generator)
        end = next((i + 1 for i, token in enumerate(chosen) if token in stops), len(chosen))
        accepted = min(len(chosen) - 1, end)
        yield Round(tuple(drafted), accepted, chosen[-1] if end == len(chosen) else None)
        tokens = tokens + chosen[:end]
        if tokens[-1] in stops:
            return
        # Neither cache may hold a rejected token; the newest one has not been read by anybody.
        raise NotImplementedError("Lab 5, exercise 5.6: drop what was rejected")


def speculative_generate(
    target: Decoder,
    draft: Decoder,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    draft_tokens: int = 4,
) -> SpeculativeGeneration:
    """All rounds of :func:`speculative_rounds`, their tokens, and why they ended (``"stop"`` or ``"length"``)."""
    params = params or SamplingParams()
    rounds = list(speculative_rounds(target, draft, prompt, params, draft_tokens))
    tokens = [token for each in rounds for token in each.tokens]
    stopped = tokens[-1] in target.config.eos_token_ids and not params.ignore_eos
    return SpeculativeGeneration(tokens, "stop" if stopped else "length", rounds)
