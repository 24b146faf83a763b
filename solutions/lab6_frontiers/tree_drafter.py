"""Drafts of trees by a draft head: from the last hidden state of the target and the newest token, depth by depth."""

from __future__ import annotations

import torch
from torch import Tensor

from utils.serving import Decoder, SamplingParams, probabilities
from utils.serving.heads import DraftHead

from .draft_tree import Tree
from .tree_sampling import draw_candidates


class TreeDrafter:
    """A draft head that fills a tree with candidates for many sequences at a time; it keeps no cache.

    Args:
        target: whose embedding and output matrix the head uses.
        head: made for it.
        tree: its shape.

    Raises:
        ValueError: a head for another hidden size.
    """

    def __init__(self, target: Decoder, head: DraftHead, tree: Tree) -> None:
        if head.hidden_size != target.config.hidden_size:
            raise ValueError(
                f"the head is made for a hidden size of {head.hidden_size}, the target has {target.config.hidden_size}"
            )
        self.target, self.head, self.tree = target, head, tree
        self.rows = {node: row for row, node in enumerate(tree.inner)}

    @torch.no_grad()
    def draft(self, states: Tensor, newest: Tensor, params: SamplingParams, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of S sequences, and the distributions that they were drawn from.

        With temperature 0 they are the likeliest tokens, otherwise they are drawn without replacement from the head's
        distributions under the sampling parameters.

        Args:
            states: (S, C), the target's hidden state behind which each newest token was chosen.
            newest: (S,) integers.
            params: of all these sequences.
            numbers: (S, n) float64 in [0, 1), one for each node.

        Returns:
            Tokens (S, n), the root's the newest one, :data:`.tree_sampling.NONE` where a distribution has no more; and
            (S, I, V) float32, a row for each of ``tree.inner``.
        """
        tree, numbers = self.tree, numbers.to(newest.device)
        tokens = newest.long().unsqueeze(1).repeat(1, len(tree))
        probs = states.new_zeros(len(newest), len(tree.inner), self.target.config.vocab_size, dtype=torch.float32)
        reached = {-1: states}  # by node, (S, C): what is known where its children's draft begins
        smooth = SamplingParams(temperature=1.0) if params.greedy else params
        for depth in range(tree.depth):
            nodes = [node for node in tree.inner if tree.depths[node] == depth]
            before = torch.stack([reached[tree.parents[node]] for node in nodes], 1)
            after, scores = self.head.step(before, tokens[:, nodes].clamp(min=0), self.target)
            reached |= dict(zip(nodes, after.unbind(1), strict=True))
            drawn_from = probabilities(scores, smooth)
            probs[:, [self.rows[node] for node in nodes]] = drawn_from
            for column, node in enumerate(nodes):
                children, q = list(tree.children[node]), drawn_from[:, column]
                if params.greedy:
                    tokens[:, children] = q.topk(len(children)).indices
                else:
                    tokens[:, children] = draw_candidates(q, numbers[:, children])
        return tokens, probs
