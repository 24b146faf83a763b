"""A tree of drafted tokens that one pass of the target verifies (exercise 5.8, voluntary).

A chain of drafts is lost from its first wrong token on. A tree has second and third choices too, and one pass verifies
all of its paths (SpecInfer, Miao et al. 2024, section 4). Node 0, the root, is the newest token of the text, which no
pass has read yet. Every other node is a candidate for the place behind its parent.

Letters: n nodes of a tree, the root included; H query heads, G key and value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from utils.serving import Decoder, attend_causally

from .kv_cache import masked_attention

#: Gives, for a text, a tree behind it: parents and tokens (n each). Its root is the newest token of the text.
Propose = Callable[[list[int]], tuple[Sequence[int], Sequence[int]]]


def tree_positions(parents: Sequence[int], past: int) -> Tensor:
    """Where each node stands in its text, (n,) int64: the root at ``past``, a node one place behind its parent.

    Args:
        parents: n numbers; ``parents[i]`` is the parent of node i and less than i. That of node 0, the root, is -1.
        past: how many tokens stand before the root.
    """
    raise NotImplementedError("Lab 5, exercise 5.8: positions of the nodes")


def tree_mask(parents: Sequence[int], past: int) -> Tensor:
    """Who sees whom, (n, past + n) bool: row i is True where node i sees a key.

    The keys of the text before the root come first, then those of the n nodes. A node sees the whole text, its
    ancestors and itself.

    Args:
        parents, past: as for :func:`tree_positions`.
    """
    raise NotImplementedError("Lab 5, exercise 5.8: who sees whom")


def accepted_path(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    """The accepted nodes from the root's child to the last, without the root; empty if none is accepted.

    A node is accepted if its parent is (the root always is) and its token is the one that the target chooses after the
    parent. Of several such children of one parent, the first is accepted.

    Args:
        parents: as for :func:`tree_positions`.
        tokens: n tokens, one for each node.
        choices: n tokens; ``choices[i]`` is what the target chooses after node i.
    """
    raise NotImplementedError("Lab 5, exercise 5.8: the accepted path")


class TreeCache:
    """Keys and values of one text and, in a pass, of what it reads; it is what a ``Decoder`` calls as ``attend``.

    Attributes:
        length: tokens of the text whose keys and values are kept. What a pass reads gets the slots from there on.
        mask: (n, length + n) bool, what the n tokens of the next pass see.
        layers: keys and values (length + n, G, D) of each layer.
    """

    def __init__(self) -> None:
        self.length = 0
        self.mask = torch.ones(0, 0, dtype=torch.bool)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a pass's queries (n, H, D) over the text and the pass's own keys and values (n, G, D)."""
        if layer in self.layers:
            k, v = (torch.cat((old[: self.length], new)) for old, new in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = k, v
        return masked_attention(q[None], k[None], v[None], self.mask[None].to(q.device))[0]

    def keep(self, slots: Sequence[int]) -> None:
        """Keep the text and, behind it, these slots in their order; all others are dropped."""
        index = [*range(self.length), *slots]
        self.layers = {layer: (k[index], v[index]) for layer, (k, v) in self.layers.items()}
        self.length = len(index)


@dataclass
class TreeText:
    """Generated tokens, and how many each pass of the target brought."""

    tokens: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)


@torch.no_grad()
def tree_decode(model: Decoder, propose: Propose, prompt: Sequence[int], max_new_tokens: int) -> TreeText:
    """The target's own greedy text, several tokens of it in a pass.

    Args:
        model: the target, in evaluation mode.
        propose: drafts a tree for the text so far.
        prompt: at least one token.
        max_new_tokens: tokens to generate at most; an end of text, which is kept, ends it earlier.

    Raises:
        ValueError: an empty prompt, or a tree whose root is not the newest token.
    """
    if not prompt:
        raise ValueError("a prompt holds at least one token, got none")
    cache, text, found = TreeCache(), list(prompt), TreeText()
    if len(prompt) > 1:  # all but the newest token
        count = len(prompt) - 1
        cache.mask = torch.ones(count, count, dtype=torch.bool).tril()
        _read(model, cache, prompt[:-1], torch.arange(count))
        cache.keep(range(count))
    while True:
        past = cache.length
        parents, tokens = propose(list(text))
        if tokens[0] != text[-1]:
            raise ValueError(f"the root is the newest token of the text, {text[-1]}, got {tokens[0]}")
        cache.mask = tree_mask(parents, past)
        hidden = _read(model, cache, tokens, tree_positions(parents, past))  # (n, C)
        choices = model.logits(hidden).argmax(-1).tolist()  # after each node
        path = accepted_path(parents, tokens, choices)
        raise NotImplementedError("Lab 5, exercise 5.8: keep the path")
        found.passes.append(0)
        for token in new:
            text.append(token)
            found.tokens.append(token)
            found.passes[-1] += 1
            if len(found.tokens) == max_new_tokens or token in model.config.eos_token_ids:
                return found


def _read(model: Decoder, cache: TreeCache, tokens: Sequence[int], positions: Tensor) -> Tensor:
    """Hidden vectors (n, C) of tokens behind the text in the cache, under the cache's mask."""
    return model.hidden(torch.tensor(tokens, device=model.device), positions.to(model.device), cache)


def likeliest_tree(draft: Decoder, parents: Sequence[int]) -> Propose:
    """Trees of one shape, filled by a draft model: a node's first child is its likeliest next token, and so on.

    The draft reads the path to each node that has children, without a cache.
    """

    @torch.no_grad()
    def propose(text: list[int]) -> tuple[Sequence[int], Sequence[int]]:
        paths, choices = [list(text)], {}  # of each node its text; of each parent its next tokens, the likeliest first
        for parent in parents[1:]:
            if parent not in choices:
                path = torch.tensor(paths[parent], device=draft.device)
                scores = draft(path, torch.arange(len(path), device=draft.device), attend_causally)[-1]
                choices[parent] = iter(scores.argsort(descending=True).tolist())
            paths.append([*paths[parent], next(choices[parent])])
        return parents, [path[-1] for path in paths]

    return propose
