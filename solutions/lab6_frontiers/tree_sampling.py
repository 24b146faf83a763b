"""Which path of a tree of candidates is accepted, so that the text has the target's own distribution.

The candidates behind a node are drawn from the draft *without replacement*: the second from what the draft's
distribution is once the first is taken out of it, and so on. They are tried in this order. A candidate is accepted with
probability min(1, p / q), where q is the distribution that it was drawn from; if it is not, p becomes the residual
max(p - q, 0) / sum, and the next one is tried against that. When none is left, the added token comes from the last p.
Each try is the rule of lecture 13, and its residual makes up for what the try gives away, so by induction the token
behind a node has the target's distribution whatever the draft is (recursive rejection sampling: Jeon et al. 2024, arXiv
2402.14160, section 3.2; Yang et al. 2024, arXiv 2401.06706; with replacement it is SpecInfer's rule, Miao et al. 2023,
algorithm 2). The shape of the tree must not depend on the tokens drawn behind the same node.

With temperature 0 the target puts everything on one token: a candidate is accepted if it is this token.

Letters: n nodes of the tree, I of them with children, m children, V vocabulary, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from solutions.lab5_serving.speculative import draw, residual

from .draft_tree import Tree

#: In a table of candidates: no token.
NONE = -1


def draw_candidates(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens (..., m) drawn from distributions (..., V) without replacement; :data:`NONE` when nothing is left.

    Args:
        probs: (..., V), the draft's.
        uniforms: (..., m) in [0, 1): one for each candidate.
    """
    left, tokens = probs.double().clone(), []
    for number in uniforms.unbind(-1):
        token = draw(left, number)
        tokens.append(token.masked_fill(left.sum(-1) == 0, NONE))
        left.scatter_(-1, token.unsqueeze(-1), 0.0)
    return torch.stack(tokens, -1)


def tree_sample(
    tree: Tree, tokens: Tensor, target_probs: Tensor, draft_probs: Tensor, uniforms: Tensor
) -> tuple[list[int], int]:
    """The accepted path of one tree, as nodes, and the token that is added behind it.

    Args:
        tree: its shape.
        tokens: (n,) integers; the root's does not matter. :data:`NONE`: there is no such candidate, nor any behind it.
        target_probs: (n, V), the target's distribution behind each node, after the sampling parameters.
        draft_probs: (I, V), what the children of each of ``tree.inner`` were drawn from without replacement.
        uniforms: (n,) in [0, 1): number i decides on node i, number 0 draws the added token.

    Raises:
        ValueError: shapes that do not belong together, or a candidate that the draft could not have drawn.
    """
    _check(tree, tokens[None], target_probs[None], draft_probs[None], uniforms[None])
    rows = {node: row for row, node in enumerate(tree.inner)}
    node, path = 0, []
    while True:
        p, accepted = target_probs[node].double(), None
        q = draft_probs[rows[node]].double().clone() if node in rows else None
        for child in tree.children[node]:
            token = int(tokens[child])
            if token == NONE:
                continue
            if not q[token] > 0:
                raise ValueError(f"candidate {token} of node {child} has probability 0 in the draft, or came before")
            q = q / q.sum()
            if uniforms[child] * q[token] < p[token]:  # with probability min(1, p / q)
                accepted = child
                break
            p = residual(p, q)
            q[token] = 0.0
        if accepted is None:
            return path, int(draw(p, uniforms[0]))
        node = accepted
        path.append(node)


def verify_trees(
    tree: Tree, tokens: Tensor, target_probs: Tensor, draft_probs: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`tree_sample` of S trees of one shape at once, without reading a GPU back.

    Args:
        tree, tokens (S, n), target_probs (S, n, V), draft_probs (S, I, V), uniforms (S, n): as for :func:`tree_sample`.

    Returns:
        The accepted nodes (S, depth), -1 behind the last, and the added tokens (S,), both int64. A candidate of
        probability 0 in the draft is never accepted.
    """
    _check(tree, tokens, target_probs, draft_probs, uniforms)
    device, every = target_probs.device, torch.arange(len(tokens), device=target_probs.device)
    uniforms, tokens = uniforms.to(device=device, dtype=torch.float64), tokens.to(device)
    children = torch.tensor(_table(tree), device=device)  # (n, most children)
    inner = {node: row for row, node in enumerate(tree.inner)}
    rows = torch.tensor([inner.get(node, 0) for node in range(len(tree) + 1)], device=device)
    node, path = torch.zeros_like(every), []
    p = target_probs[:, 0].double()
    for depth in range(tree.depth):
        q = draft_probs[every, rows[node]].double()
        accepted = torch.zeros_like(every)
        for rank in range(max(len(own) for own, at in zip(tree.children, tree.depths) if at == depth)):
            child = children[node, rank]
            token = tokens[every, child.clamp(min=0)]
            there = (child > 0) & (token != NONE) & (accepted == 0)
            token = token.clamp(min=0)
            total = q.sum(-1, keepdim=True)
            q = q / total.masked_fill(total == 0, 1.0)
            passed = there & (q[every, token] > 0)
            passed &= uniforms[every, child.clamp(min=0)] * q[every, token] < p[every, token]
            accepted = torch.where(passed, child, accepted)
            refused = (there & ~passed).unsqueeze(-1)
            p = torch.where(refused, residual(p, q), p)
            q = torch.where(refused, q.scatter(-1, token.unsqueeze(-1), 0.0), q)
        going = accepted > 0
        # A sequence that has stopped keeps its p; where it stands, no child may be tried again.
        p = torch.where(going.unsqueeze(-1), target_probs[every, accepted].double(), p)
        node = torch.where(going, accepted, len(tree))
        path.append(accepted.masked_fill(~going, -1))
    nodes = torch.stack(path, 1) if path else every.new_empty(len(tokens), 0)
    return nodes, draw(p, uniforms[:, 0])


def _table(tree: Tree) -> list[list[int]]:
    """Children of each node, padded with -1, and behind the nodes a row without any for sequences that have stopped."""
    width = max(1, *map(len, tree.children)) if len(tree) > 1 else 1
    return [list(own) + [-1] * (width - len(own)) for own in (*tree.children, ())]


def _check(tree: Tree, tokens: Tensor, target_probs: Tensor, draft_probs: Tensor, uniforms: Tensor) -> None:
    S, n, vocabulary = len(tokens), len(tree), target_probs.shape[-1]
    for name, value, shape in (
        ("tokens", tokens, (S, n)),
        ("target_probs", target_probs, (S, n, vocabulary)),
        ("draft_probs", draft_probs, (S, len(tree.inner), vocabulary)),
        ("uniforms", uniforms, (S, n)),
    ):
        if value.shape != shape:
            raise ValueError(
                f"{name} of a tree of {n} nodes, {len(tree.inner)} with children, must end in {shape[1:]}, "
                f"got {tuple(value.shape[1:])}"
            )
