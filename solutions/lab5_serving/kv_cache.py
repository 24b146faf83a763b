"""Decoding with a key-value cache, several sequences of different lengths side by side (exercise 5.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from utils.serving import Decoder, ModelConfig


class CachedAttention:
    """Keys and values of B sequences, each in a row of its own, and the attention that reads them.

    It is what a :class:`utils.serving.Decoder` calls as ``attend``. A step brings T new tokens of every sequence, which
    come behind the ``lengths[b]`` tokens that sequence b has in the cache. Where a sequence has fewer than T, the step
    is padded at its end; :meth:`advance` says how many of the tokens were real, so that the next ones overwrite the
    padding's keys and values.

    Attributes:
        keys, values: (layers, B, capacity, G, D).
        lengths: (B,) int64, tokens of each sequence in the cache: the same for all layers.

    Args:
        config: sizes of the model.
        batch: B, number of sequences.
        capacity: tokens reserved for each.
        dtype, device: of the model.

    Raises:
        ValueError: a batch or a capacity below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"batch and capacity must be at least 1, got {batch} and {capacity}")
        shape = (config.num_layers, batch, capacity, config.num_kv_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        """Tokens reserved for each sequence."""
        return self.keys.shape[2]

    def positions(self, count: int) -> Tensor:
        """Where the next ``count`` tokens of each sequence stand in it, (B, count) int64, from 0."""
        ### BEGIN SOLUTION 5.1: position ids
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)
        ### END SOLUTION

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the queries of T new tokens see of their sequence's past and of each other.

        Args:
            layer: which layer of the model calls.
            q: (B, T, H, D).
            k, v: (B, T, G, D), kept behind what the cache holds; ``lengths`` stays as it is.

        Returns:
            (B, T, H, D): query t of sequence b sees the tokens 0..lengths[b] + t of that sequence.

        Raises:
            ValueError: more tokens than reserved.
        """
        batch, count = k.shape[:2]
        end = int(self.lengths.max()) + count  # slots from here on hold nothing yet, in any row
        if end > self.capacity:
            raise ValueError(f"the cache is reserved for {self.capacity} tokens per sequence, {end} are wanted")
        ### BEGIN SOLUTION 5.1: keep keys and values
        rows = torch.arange(batch, device=k.device)[:, None]  # (B, 1)
        slots = self.positions(count)  # (B, T)
        self.keys[layer, rows, slots] = k
        self.values[layer, rows, slots] = v
        ### END SOLUTION
        ### BEGIN SOLUTION 5.1: what each query sees
        visible = torch.arange(end, device=k.device) <= self.positions(count)[:, :, None]  # (B, T, end)
        ### END SOLUTION
        return masked_attention(q, self.keys[layer, :, :end], self.values[layer, :, :end], visible)

    def advance(self, counts: Tensor) -> None:
        """Make ``counts[b]`` (B,) tokens of the last step part of sequence b; what is behind them was padding."""
        self.lengths = self.lengths + counts.to(self.lengths)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention of (B, T, H, D) over (B, N, G, D) where ``visible`` (B, T, N) is True; (B, T, H, D)."""
    share = q.shape[2] // k.shape[2]  # query head h reads key head h // share
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None]).transpose(1, 2)


def padded(sequences: Sequence[Sequence[int]], device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Sequences of tokens as one (B, T) tensor, the shorter ones filled up at their end, and their lengths (B,)."""
    counts = torch.tensor([len(tokens) for tokens in sequences], device=device)
    step = torch.zeros(len(sequences), int(counts.max()), dtype=torch.int64, device=device)
    for row, tokens in zip(step, sequences, strict=True):
        row[: len(tokens)] = torch.tensor(list(tokens), device=device)
    return step, counts


@torch.no_grad()
def decode(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy continuations of several prompts, decoded together.

    The first step brings the prompts (prefill), each later one a single token of every sequence. Sequences that have
    ended stay in the batch until the last one ends, and what is computed for them is thrown away: static batching.

    Args:
        model: in evaluation mode.
        prompts: at least one, of at least one token each.
        max_new_tokens: tokens to generate for each at most; an end of text, which is kept, ends a sequence earlier.

    Raises:
        ValueError: no prompt, an empty one, or one that leaves no room for a token.
    """
    longest, limit = max(map(len, prompts), default=0), model.config.max_seq_len
    if not prompts or not all(map(len, prompts)) or longest >= limit or max_new_tokens < 1:
        raise ValueError(
            f"decode takes prompts of 1 to {limit - 1} tokens and max_new_tokens of at least 1, got "
            f"{[len(prompt) for prompt in prompts]} tokens and {max_new_tokens}"
        )
    cache = CachedAttention(model.config, len(prompts), longest + max_new_tokens, model.dtype, model.device)
    texts: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(prompts)))
    step, counts = padded(prompts, model.device)  # (B, T) tokens, and how many of each row are real
    while True:
        ### BEGIN SOLUTION 5.1: one step
        hidden = model.hidden(step, cache.positions(step.shape[1]), cache)  # (B, T, C)
        rows = torch.arange(len(prompts), device=model.device)
        last = hidden[rows, counts - 1]  # (B, C), of each sequence's last real token
        tokens = model.logits(last).argmax(-1)  # (B,)
        cache.advance(counts)
        ### END SOLUTION
        for b in sorted(going):
            texts[b].append(int(tokens[b]))
            room = min(len(prompts[b]) + max_new_tokens, limit) - len(prompts[b])
            if len(texts[b]) == room or texts[b][-1] in model.config.eos_token_ids:
                going.remove(b)
        if not going:
            return texts
        step, counts = tokens[:, None], torch.ones_like(counts)
