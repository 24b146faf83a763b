"""A scenario of exercise 5.8: greedy text by trees of drafts is the target's own, and the cache keeps the path."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from utils.checks.core import classic, listed
from utils.checks.hidden import Observation
from utils.serving import Attend
from utils.serving.model import causal_attention

from .scenarios import CheckMismatch
from .spied_model import tiny_model, without_cache
from .tree_rules import drawn_tree, right_path

Answer = Mapping[str, Callable]

SLOT = classic("node i of this pass lies in slot past + i: keep the slots of the root and of the path", 5)
ROOT = classic("this pass has read the root, which is the newest token of the text: keep its slot too", 5)
OTHERS = classic("keep the root's slot and the path's, and no other: the rest belongs to other texts", 5)
TEXT = classic("the text before the root stays by itself: keep slots of this pass, which begin with past", 5)
ORDER = classic("keep the slots in the order of the text: the root's first, then the path's", 5)
NOTHING = classic("nothing of the pass is kept, so the next one misses what it needs", 5)
ADDED = classic("behind the path comes the target's own choice after its last node: it is free", 6)
OF_ROOT = classic("the token behind the path is the choice after the path's last node, not after the root", 6)
PATH = classic("the tokens of the accepted nodes come before the target's own choice", 6)
AGAIN = classic("the root is in the text already", 6)


class Watched:
    """A target, trees for its text, and what must hold before each pass.

    Attributes:
        model: the target; its passes are noted.
        right: prompt and greedy text.
        trees: of each pass, parents, tokens and the path to be accepted.
    """

    def __init__(self, rng: random.Random, new: int, length: int) -> None:
        self.rng, self.new = rng, new
        self.model = tiny_model(rng)
        self.prompt = [rng.randrange(self.model.config.vocab_size) for _ in range(length)]
        self.right = [*self.prompt, *without_cache(self.model, self.prompt, new)]
        self.trees: list[tuple[list[int], list[int], list[int]]] = []
        self.keys = self._keys()
        self.written: Tensor | None = None  # keys of the last layer in the newest pass
        hidden = self.model.hidden

        def watched(tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
            if len(self.trees) > 1:
                self._judge_cache(attend)
            found = hidden(tokens, positions, attend)
            self.written = attend.layers[len(self.model.layers) - 1][0].clone()
            return found

        self.model.hidden = watched

    @property
    def where(self) -> str:
        """What is decoded, for a message."""
        return f"prompt of {len(self.prompt)} tokens, {self.new} new ones"

    @torch.no_grad()
    def _keys(self) -> Tensor:
        """The last layer's keys (N, G, D) of the right text."""
        found: dict[int, Tensor] = {}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found[layer] = k
            return causal_attention(q, k, v)

        self.model(torch.tensor(self.right), torch.arange(len(self.right)), attend)
        self.model.forget()
        return found[len(self.model.layers) - 1]

    # ---- trees
    def propose(self, text: list[int]) -> tuple[list[int], list[int]]:
        """A tree behind a text, right now and then."""
        self._judge_text(text)
        rng, vocabulary = self.rng, self.model.config.vocab_size
        first = not self.trees  # the path of the first tree is 2, 4: two nodes, and neither is a first child
        parents = [-1, 0, 0, 1, 2, 1, 3, 6] if first else drawn_tree(rng, rng.choice((1, 4, 6, 7)))
        tokens, goes_on, taken = [text[-1]], {0: len(text)}, set()
        for node in range(1, len(parents)):
            parent = parents[node]
            place = goes_on.get(parent, len(self.right))  # in the right text, if all before it is right
            right = self.right[place] if place < len(self.right) else None
            if right is not None and parent not in taken and (node in (2, 4) if first else rng.random() < 0.6):
                tokens.append(right)
                goes_on[node] = place + 1
                taken.add(parent)
            else:
                tokens.append(rng.choice([token for token in range(vocabulary) if token != right]))
        choices = [
            self.right[goes_on[node]] if goes_on.get(node, 99) < len(self.right) else -1 for node in range(len(parents))
        ]
        self.trees.append((parents, tokens, right_path(parents, tokens, choices)))
        return parents, tokens

    # ---- what must hold
    def _judge_text(self, text: list[int]) -> None:
        """The text so far is the right one: the prompt, and what each pass must have brought."""
        if not self.trees:
            self.past = len(text) - 1
            return
        parents, tokens, path = self.trees[-1]
        before, self.past = self.past + 1, self.past + 1 + len(path)
        got, wanted = text[before:], self.right[before : self.past + 1]
        if text == self.right[: self.past + 1]:
            return
        cause = ""
        if got == wanted[:-1]:
            cause = ADDED
        elif got == [tokens[0], *wanted]:
            cause = AGAIN
        elif got == wanted[-1:]:
            cause = PATH
        elif got[:-1] == wanted[:-1]:
            cause = OF_ROOT
        raise CheckMismatch(
            f"pass {len(self.trees)} brings {listed(got)}, expected {listed(wanted)}",
            cause,
            f"the tree's parents are {parents}, the accepted path is {path}",
            self.where,
        )

    def _judge_cache(self, attend: Any) -> None:
        """The cache holds the text but its newest token."""
        parents, _, path = self.trees[-2]
        past = self.past - len(path) - 1  # of the pass before
        name = f"after pass {len(self.trees) - 1}"
        details = (f"the tree's parents are {parents}, the accepted path is {path}", self.where)
        if attend.length != self.past:
            kept = attend.length - past
            cause = NOTHING if kept == 0 else ROOT if kept == len(path) else OTHERS
            again = attend.layers[len(self.model.layers) - 1][0][past : 2 * past]
            if kept >= past > 0 and _alike(again, self.keys[:past]).all():
                cause = TEXT
            raise CheckMismatch(f"{name} the cache holds {attend.length} tokens, expected {self.past}", cause, *details)
        keys = attend.layers[len(self.model.layers) - 1][0][: self.past]
        right = _alike(keys, self.keys[: self.past])
        if right.all():
            return
        slot = int((~right).nonzero()[0])
        held = _alike(self.written, keys[slot]).nonzero().flatten().tolist()  # slots of the pass before
        cause = classic("what a node writes depends on what it sees", 2)
        if held:
            cause = SLOT if held[0] < past <= slot else ORDER if self._kept(keys, past) == {0, *path} else OTHERS
        raise CheckMismatch(
            f"{name} slot {slot} of the cache holds {_name(held[0], past) if held else 'what no node wrote'}, expected "
            f"{_name(slot if slot < past else past + [0, *path][slot - past], past)}",
            cause,
            *details,
        )

    def _kept(self, keys: Tensor, past: int) -> set[int]:
        """The nodes of the pass before whose keys are in the cache, behind the text before it."""
        return {slot - past for key in keys[past:] for slot in _alike(self.written, key).nonzero().flatten().tolist()}


def _alike(keys: Tensor, other: Tensor) -> Tensor:
    """Which of some keys (N, G, D) equal others up to rounding, (N,)."""
    return torch.isclose(keys, other, rtol=1e-8, atol=1e-8).flatten(1).all(1)


def _name(slot: int, past: int) -> str:
    return f"token {slot} of the text" if slot < past else f"node {slot - past}"


def trees_are_verified(answer: Answer, rng: random.Random) -> None:
    """Trees that are right now and then: the target's text, in as few passes as they allow."""
    watched = Watched(rng, rng.randint(9, 14), rng.randint(2, 6))
    _decode(answer, watched)


def a_single_token(answer: Answer, rng: random.Random) -> None:
    """Nothing stands before the root."""
    _decode(answer, Watched(rng, rng.randint(3, 6), 1))


def _decode(answer: Answer, watched: Watched) -> None:
    got = answer["tree_decode"](watched.model, watched.propose, list(watched.prompt), watched.new)
    right = watched.right[len(watched.prompt) :]
    if list(got.tokens) != right:
        raise CheckMismatch(
            f"the text is {listed(got.tokens)}",
            "trees never change the text",
            f"expected {listed(right)}",
            watched.where,
        )


def observe_text(answer: Answer, rng: random.Random, name: str) -> Iterator[tuple[str, Observation]]:
    """Hidden cases: a text by trees, what each pass brought, and how much the target read."""
    watched = Watched(rng, rng.randint(10, 16), rng.randint(1, 6))
    got = answer["tree_decode"](watched.model, watched.propose, list(watched.prompt), watched.new)
    yield f"{name}: tokens", list(got.tokens)
    yield f"{name}: tokens of each pass", list(got.passes)
    yield f"{name}: tokens that the target read", watched.model.notes.tokens
