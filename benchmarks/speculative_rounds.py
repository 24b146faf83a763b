"""Rounds of speculative decoding that never leave the GPU, for a batch of sequences: what is timed, and counted.

A round is k passes of the draft, one of the target over k + 1 tokens, and their verification; all of it, the random
numbers too, is one piece of work without a word to the host, so that it can be replayed as a CUDA graph. With k = 0 it
is plain decoding. Each sequence has its own length; attention reads a cache of fixed size under a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from solutions.lab5_serving.speculative import draw, verify
from utils import runtime
from utils.serving import Attend, Decoder, ModelConfig, SamplingParams, probabilities


class BatchCache:
    """Keys and values of ``batch`` sequences of at most ``capacity`` tokens."""

    def __init__(self, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype) -> None:
        shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=runtime.DEVICE, dtype=dtype) for _ in range(2))
        self.sequences = torch.arange(batch, device=runtime.DEVICE).unsqueeze(1)
        self.slots = torch.arange(capacity, device=runtime.DEVICE)
        self.share = config.num_heads // config.num_kv_heads

    def at(self, positions: Tensor) -> Attend:
        """The :data:`Attend` of tokens at ``positions`` (S, T): each sees the slots up to its own."""
        mask = (self.slots <= positions.unsqueeze(-1)).repeat_interleave(self.share, 1).unsqueeze(1)  # (S, 1, T H/G, N)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]  # (S, G, N, D)
            keys[self.sequences, :, positions], values[self.sequences, :, positions] = k, v
            # (S, T, H, D) to (S, G, T H/G, D): the query heads that share a key head are rows of one matrix
            packed = q.unflatten(2, (-1, self.share)).transpose(1, 2).flatten(2, 3)
            seen = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask)
            return seen.unflatten(2, (-1, self.share)).transpose(1, 2).flatten(2, 3)

        return attend


class Rounds:
    """Decoding of a batch, a round a call.

    Args:
        target, draft: in evaluation mode on ``runtime.DEVICE``.
        prompts: (S, P) tokens, P >= 2.
        draft_tokens: k.
        params: of both models' distributions.

    Attributes:
        text: (S, max_seq_len) tokens; ``length``: (S,) of them known.
        accepted: (S,) of the last round.
    """

    def __init__(
        self, target: Decoder, draft: Decoder, prompts: Tensor, draft_tokens: int, params: SamplingParams
    ) -> None:
        self.target, self.draft, self.k, self.params = target, draft, draft_tokens, params
        batch, known = prompts.shape
        self.capacity = min(target.config.max_seq_len, draft.config.max_seq_len)
        self.text = torch.zeros(batch, self.capacity, dtype=torch.int64, device=runtime.DEVICE)
        self.text[:, :known] = prompts
        self.length = torch.full((batch,), known, device=runtime.DEVICE)
        self.accepted = torch.zeros_like(self.length)
        self.caches = [BatchCache(model.config, batch, self.capacity, model.dtype) for model in (target, draft)]
        positions = torch.arange(known, device=runtime.DEVICE).expand(batch, -1)
        for model, cache in zip((target, draft), self.caches, strict=True):
            model.hidden(self.text[:, :known], positions, cache.at(positions))

    def __call__(self) -> None:
        """One round of every sequence; one that has no room for k + 1 more tokens stays as it is."""
        k, checker, drafter = self.k, *self.caches
        last = self.length.clamp(max=self.capacity - k - 1).unsqueeze(1) - 1  # (S, 1): the newest token's position
        uniforms = torch.rand(len(last), 2 * k + 1, dtype=torch.float64, device=runtime.DEVICE)
        ahead = torch.arange(k + 1, device=runtime.DEVICE)
        # The draft may not have read the token before the newest; to read it again changes nothing.
        positions, q, drafted = last - 1 + ahead[:2] if k else last, [], []
        step = self.text.gather(1, positions)
        for i in range(k):
            logits = self.draft(step, positions, drafter.at(positions))[:, -1]
            q.append(probabilities(logits, self.params))
            drafted.append(draw(q[-1], uniforms[:, i]))
            step, positions = drafted[-1].unsqueeze(1), last + 1 + i
        guesses = torch.stack(drafted, 1) if k else step[:, :0]  # (S, k)
        positions = last + ahead
        logits = self.target(torch.cat((self.text.gather(1, last), guesses), 1), positions, checker.at(positions))
        p = probabilities(logits, self.params)
        accepted, added = verify(p, torch.stack(q, 1) if k else p[:, :0], guesses, uniforms[:, k:])
        self.text.scatter_(1, last + 1 + ahead[:k], guesses)
        self.text.scatter_(1, last + 1 + accepted.unsqueeze(1), added.unsqueeze(1))
        self.accepted.copy_(accepted)
        self.length.copy_(last.squeeze(1) + 2 + accepted)

    def count(self, rounds: int, play: Callable[[], object] | None = None) -> Tensor:
        """The accepted tokens of so many rounds, (rounds, S); ``play`` plays one, by default without a graph."""
        found = []
        for _ in range(rounds):
            (play or self)()
            found.append(self.accepted.clone())
        return torch.stack(found)


def whole_pass(model: Decoder, cache: BatchCache, batch: int, tokens: int) -> Callable[[], Tensor]:
    """A function that runs ``tokens`` new tokens of each of ``batch`` sequences, the last ones that the cache holds."""
    context = len(cache.slots)
    ids = torch.randint(model.config.vocab_size, (batch, tokens), device=runtime.DEVICE)
    positions = torch.arange(context - tokens, context, device=runtime.DEVICE).expand(batch, -1)
    attend = cache.at(positions)
    return lambda: model(ids, positions, attend).argmax(-1)


def prompts_of(texts: Sequence[Sequence[int]], batch: int, length: int) -> Tensor:
    """The beginnings of some texts, taken in turn, as (batch, length) tokens.

    Raises:
        ValueError: a text of fewer tokens.
    """
    for text in texts:
        if len(text) < length:
            raise ValueError(f"each text needs at least {length} tokens, got one of {len(text)}")
    rows = [list(texts[i % len(texts)][:length]) for i in range(batch)]
    return torch.tensor(rows, device=runtime.DEVICE)
