"""What exercise 5.8's functions must give for a drawn tree, and what each known mistake gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: What a function must give, or what a mistake makes of it: what is said of the mistake, and its number in the
#: notebook's list.
Mistake = tuple[Callable[..., object], str, int]


def drawn_tree(rng: random.Random, nodes: int | None = None) -> list[int]:
    """Parents of a tree: bushy, deep, a chain, a star or a root alone."""
    nodes = rng.choice((1, 4, 6, 8, 11)) if nodes is None else nodes
    kind = rng.choice(("any", "any", "deep", "deep", "chain", "star"))
    first = {"any": lambda i: 0, "deep": lambda i: max(0, i - 3), "chain": lambda i: i - 1, "star": lambda i: 0}[kind]
    return [-1, *(rng.randint(first(i), 0 if kind == "star" else i - 1) for i in range(1, nodes))]


def forked_tree(rng: random.Random) -> list[int]:
    """Parents of a tree that tells every known mistake from what is right: forks at two depths, and five levels."""
    parents = [-1, 0, 0, 1, 2, 1, 3, 6]
    for _ in range(rng.randint(0, 3)):
        parents.append(rng.randrange(len(parents)))
    return parents


def line(parents: Sequence[int], node: int) -> list[int]:
    """A node and its ancestors, up to the root."""
    return [node] if node == 0 else [node, *line(parents, parents[node])]


def _by_rule(parents: Sequence[int], past: int, sees: Callable[[int, int], bool], text: bool = True) -> Tensor:
    """A mask whose node i sees node j where ``sees(i, j)``, and the text."""
    n = len(parents)
    nodes = torch.tensor([[sees(i, j) for j in range(n)] for i in range(n)]).view(n, n)
    return torch.cat((torch.full((n, past), text), nodes), dim=1)


def right_positions(parents: Sequence[int], past: int) -> Tensor:
    """The number of a node's ancestors behind the root's place."""
    return torch.tensor([past + len(line(parents, node)) - 1 for node in range(len(parents))])


def right_mask(parents: Sequence[int], past: int) -> Tensor:
    """Text, ancestors, and the node itself."""
    return _by_rule(parents, past, lambda i, j: j in line(parents, i))


POSITIONS: tuple[Mistake, ...] = (
    (lambda parents, past: past + torch.arange(len(parents)),
     "these are the numbers of the nodes: siblings are candidates for one place, and share its position", 1),
    (lambda parents, past: right_positions(parents, 0), "the root stands behind the text, at position past", 1),
    (lambda parents, past: right_positions(parents, past + 1), "positions count from 0: the root stands at past", 1),
    (lambda parents, past: right_positions(parents, past - 1), "one too early: the root stands at past", 1),
    (lambda parents, past: torch.full((len(parents),), past), "every node stands at the root's place", 1),
    (lambda parents, past: past + 1 + torch.tensor(parents),
     "a node stands one place behind its parent's place, not one behind its parent's number", 1),
)  # fmt: skip
MASKS: tuple[Mistake, ...] = (
    (lambda parents, past: _by_rule(parents, past, lambda i, j: j <= i),
     "the mask is causal: a node sees all nodes before it, also those of other paths, which are other texts", 2),
    (lambda parents, past: _by_rule(parents, past, lambda i, j: True), "all nodes see one another", 2),
    (lambda parents, past: ~right_mask(parents, past), "the mask is upside down: True is what a node sees", 2),
    (lambda parents, past: _by_rule(parents, past, lambda i, j: i in line(parents, j)),
     "rows and columns are swapped: a node sees its descendants, and row i is what node i sees", 2),
    (lambda parents, past: _by_rule(parents, past, lambda i, j: j in line(parents, i) or parents[i] == parents[j]),
     "a node sees its siblings: they are other candidates for its own place", 2),
    (lambda parents, past: _by_rule(parents, past, lambda i, j: i != j and j in line(parents, i)),
     "a node does not see itself", 3),
    (lambda parents, past: _by_rule(parents, past, lambda i, j: j in (i, parents[i])),
     "a node sees its parent, and not its parent's parent: it sees all ancestors up to the root", 3),
    (lambda parents, past: _by_rule(parents, past, lambda i, j: j in (i, 0)),
     "a node sees the root and itself: it sees all ancestors between them too", 3),
    (lambda parents, past: _by_rule(parents, past, lambda i, j: i == j), "a node sees no other node", 3),
    (lambda parents, past: _by_rule(parents, past, lambda i, j: j in line(parents, i) and (j > 0 or i == 0)),
     "the root is hidden: it is the newest token of the text, and every node sees it", 3),
    (lambda parents, past: _by_rule(parents, past, lambda i, j: j in line(parents, i) and j > 0),
     "the root is hidden: it is the newest token of the text, and every node sees it", 3),
    (lambda parents, past: _by_rule(parents, past, lambda i, j: j in line(parents, i), text=False),
     "the text is hidden: every node sees all tokens before the root", 3),
    (lambda parents, past: torch.cat((right_mask(parents, 0), torch.ones(len(parents), past, dtype=torch.bool)), 1),
     "the keys of the text come first, those of the nodes behind them", 3),
)  # fmt: skip


# ---- the accepted path
def right_path(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    """From the root on, always the first child whose token the target has chosen."""
    found, node = [], 0
    while node is not None:
        children = [child for child, parent in enumerate(parents) if parent == node]
        node = next((child for child in children if tokens[child] == choices[node]), None)
        found += [] if node is None else [node]
    return found


def _first_child(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    found, node = [], 0
    while node in parents:
        node = list(parents).index(node)
        if tokens[node] != choices[parents[node]]:
            break
        found.append(node)
    return found


def _last_child(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    found, node = [], 0
    while node is not None:
        children = [child for child, parent in enumerate(parents) if parent == node and tokens[child] == choices[node]]
        node = children[-1] if children else None
        found += children[-1:]
    return found


def _own_choice(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    found, node = [], 0
    while node is not None:
        node = next((i for i in range(1, len(parents)) if parents[i] == node and tokens[i] == choices[i]), None)
        found += [] if node is None else [node]
    return found


def _wherever(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    return [node for node in range(1, len(parents)) if tokens[node] == choices[parents[node]]]


def _all_accepted(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    """All nodes whose whole path is accepted, of every equal child."""
    good = [0]
    for node in range(1, len(parents)):
        if parents[node] in good and tokens[node] == choices[parents[node]]:
            good.append(node)
    return good[1:]


PATHS: tuple[Mistake, ...] = (
    (lambda *given: [0, *right_path(*given)], "the root is in the text already: the path begins with its child", 4),
    (lambda *given: right_path(*given)[::-1], "the path goes from the root's child to its last node", 4),
    (lambda parents, tokens, choices: [tokens[node] for node in right_path(parents, tokens, choices)],
     "these are tokens: the path consists of the numbers of nodes", 4),
    (_first_child, "only the first child is tried: if it is refused, its siblings are candidates too", 4),
    (_wherever, "a node is accepted only if its parent is", 4),
    (lambda *given: right_path(*given)[:1], "the path ends after its first node: go on with the children of that", 4),
    (_last_child, "of several equal children, the first is accepted", 4),
    (_all_accepted, "a parent has one accepted child, the first: its equal siblings are left out", 4),
    (_own_choice,
     "choices[i] comes after node i, so it decides on the children of node i", 4),
    (lambda parents, tokens, choices: right_path(parents, tokens, [choices[0]] * len(choices)),
     "each node has a choice of its own: choices[i] decides on the children of node i", 4),
)  # fmt: skip


def drawn_choices(rng: random.Random, parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens of a tree and the target's choices, which agree often; now and then two siblings are equal."""
    tokens = [rng.randrange(1, 9) for _ in parents]
    choices = [rng.randrange(1, 9) for _ in parents]
    for node in range(1, len(parents)):
        if rng.random() < 0.6:
            tokens[node] = choices[parents[node]]
    return tokens, choices


def same(one: object, other: object) -> bool:
    """Whether two results, tensors or lists, are equal."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return one == other
