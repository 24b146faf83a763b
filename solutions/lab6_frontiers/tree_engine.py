"""The engine with a draft head: each step verifies a tree of candidates of every running request in one batch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from solutions.lab5_serving.drafts import DraftScheduler, StaticDraftScheduler
from solutions.lab5_serving.engine import Engine
from solutions.lab5_serving.memory import default_num_blocks
from solutions.lab5_serving.request import Request, RequestOutput, Status
from solutions.lab5_serving.scheduler import Chunk, Scheduler, Step
from solutions.lab5_serving.speculative_engine import by_params, uniforms
from utils.serving import Decoder, probabilities
from utils.serving.heads import DraftHead

from .draft_tree import Tree
from .tree_batch import NO_TREE, TreeRequest
from .tree_drafter import TreeDrafter
from .tree_runner import TreeRunner
from .tree_sampling import NONE, verify_trees


class StaticTreeScheduler(StaticDraftScheduler):
    """Static batching of requests that may have trees."""

    def schedule(self) -> Step:
        """As :meth:`StaticDraftScheduler.schedule`; a tree that was dropped for want of room is not computed."""
        step = super().schedule()
        step.chunks = [
            Chunk(request, start, min(count, request.num_tokens - start)) for request, start, count in step.chunks
        ]
        return step


class TreeEngine(Engine):
    """An :class:`Engine` whose running requests may gain several tokens in a step.

    Greedy requests get the tokens that :class:`Engine` gives them; the others get tokens of the same distribution. The
    candidates that are accepted move together in the cache, the others are dropped from it; the head has no cache.

    Args:
        model: the target.
        head: made for it.
        tree: what is drafted for each request before each step; see :func:`.draft_tree.grow`.
        settings: of :class:`Engine`; a ``runner`` is a :class:`TreeRunner`.

    Attributes:
        tried, accepted: by node of the tree, how often it was verified behind an accepted parent, and how often it was
            accepted.
    """

    request_type: ClassVar[type[Request]] = TreeRequest
    schedulers: ClassVar[dict[str, type[Scheduler]]] = {"continuous": DraftScheduler, "static": StaticTreeScheduler}

    def __init__(
        self,
        model: Decoder,
        head: DraftHead,
        tree: Tree,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch: int = 64,
        runner: TreeRunner | None = None,
        **settings: Any,
    ) -> None:
        self.drafter, self.tree = TreeDrafter(model, head, tree), tree
        if num_blocks is None:
            num_blocks = default_num_blocks(model, block_size, max_batch)
        runner = runner or TreeRunner(model, num_blocks, block_size, graph_chunks=[len(tree)])
        super().__init__(model, runner=runner, max_batch=max_batch, **settings)
        self.tried, self.accepted = [0] * len(tree), [0] * len(tree)
        self._draft_probs: dict[str, Tensor] = {}  # (I, V) of the whole tree, by request id
        self._moves: list[tuple[int, int]] = []

    def step(self) -> list[RequestOutput]:
        """Draft for the requests that decode, one step of the target for all, and order in the cache."""
        self._draft()
        outputs = super().step()
        self.runner.move(self._moves)  # before anything is written to a block that was given back
        self._moves = []
        return outputs

    # ---- drafting ------------------------------------------------------------------------------------------------

    def _draft(self) -> None:
        """Give each request that decodes a tree: as deep as it may be, and as large as the free blocks allow."""
        ready: list[TreeRequest] = []
        self._draft_probs = {}
        for request in self.scheduler.running:
            request.draft, request.tree, request.nodes = [], NO_TREE, [0]
            if request.pending == 1 and request.state is not None and request.limit - len(request.tokens) > 1:
                ready.append(request)
        spare = self.manager.num_free
        for group, _ in by_params(ready):
            try:
                tokens, probs = self.drafter.draft(
                    torch.stack([request.state for request in group]),
                    torch.tensor([request.tokens[-1] for request in group], device=self.model.device),
                    group[0].params,
                    uniforms(group, len(self.tree)),
                )
            except Exception:  # drafts are guesses: no request depends on them
                self._totals["failed_drafts"] += 1
                continue
            for request, row, own in zip(group, tokens.tolist(), probs, strict=True):
                spare -= self._plant(request, row, own, spare)

    def _plant(self, request: TreeRequest, tokens: list[int], probs: Tensor, spare: int) -> int:
        """Give a request the part of its tree that it has room for; how many blocks it will take."""
        deepest = request.limit - len(request.tokens) - 1
        wanted = [i for i, token in enumerate(tokens) if token != NONE and self.tree.depths[i] <= deepest]
        tree, nodes = (self.tree, wanted) if len(wanted) == len(self.tree) else self.tree.only(wanted)
        known, table = len(request.tokens), len(self.manager.table(request.id))
        blocks = self.manager.blocks_for(known + len(tree) - 1) - table
        if blocks > spare:
            return 0
        request.draft, request.tree, request.nodes = [tokens[node] for node in nodes[1:]], tree, nodes
        self._draft_probs[request.id] = probs
        return max(0, blocks)

    # ---- verification --------------------------------------------------------------------------------------------

    def _choose(self, sampling: list[Chunk], logits: Tensor, failed: dict[str, str]) -> list[tuple[list[int], int]]:
        """Of each chunk's request, the accepted nodes of its tree, and the token that is added."""
        chosen: dict[str, tuple[list[int], int]] = {}
        starts, at = {}, 0
        for chunk in sampling:
            starts[chunk.request.id] = at
            at += 1 + len(chunk.request.draft)
        finite = logits.max(-1).values.isfinite().tolist() if sampling else []
        for chunk in sampling:
            start = starts[chunk.request.id]
            if not all(finite[start : start + 1 + len(chunk.request.draft)]):
                failed[chunk.request.id] = "sampling failed: its logits are not finite"
        for group, _ in by_params([chunk.request for chunk in sampling if chunk.request.id not in failed]):
            try:
                self._verify(group, logits, starts, chosen)
            except Exception as error:
                failed.update((request.id, f"sampling failed: {error}") for request in group)
        return [chosen.get(chunk.request.id, ([], 0)) for chunk in sampling]

    def _verify(
        self, group: list[TreeRequest], logits: Tensor, starts: dict[str, int], chosen: dict[str, tuple[list[int], int]]
    ) -> None:
        """Verify the trees of requests with equal parameters as one batch, as parts of the drafter's tree."""
        tree, vocabulary = self.tree, logits.shape[-1]
        tokens = torch.full((len(group), len(tree)), NONE, dtype=torch.int64)
        rows = torch.empty_like(tokens)
        draft_probs = torch.zeros(len(group), len(tree.inner), vocabulary, device=logits.device)
        for i, request in enumerate(group):
            nodes = request.nodes = request.nodes[: 1 + len(request.draft)]  # the budget may have cut the draft
            tokens[i, nodes] = torch.tensor([request.tokens[-1], *request.draft])
            rows[i] = starts[request.id]
            rows[i, nodes] += torch.arange(len(nodes))
            if request.draft:
                draft_probs[i] = self._draft_probs[request.id]
        target_probs = probabilities(logits[rows.to(logits.device)], group[0].params)
        paths, added = verify_trees(tree, tokens, target_probs, draft_probs, uniforms(group, len(tree)))
        for request, path, token in zip(group, paths.tolist(), added.tolist(), strict=True):
            path = [node for node in path if node > 0]
            self._tally(request, path)
            chosen[request.id] = [request.nodes.index(node) for node in path], token

    def _tally(self, request: TreeRequest, path: list[int]) -> None:
        """Count who was tried and who was accepted, by node of the drafter's tree."""
        nodes = set(request.nodes)
        for parent in (0, *path):
            for child in self.tree.children[parent]:
                self.tried[child] += child in nodes
        for node in path:
            self.accepted[node] += 1

    def _accept(self, request: TreeRequest, chosen: tuple[list[int], int], now: float) -> RequestOutput:
        """A request has its next tokens: the accepted candidates move behind the text, the others are dropped."""
        path, added = chosen
        tokens = [*(request.draft[node - 1] for node in path), added]
        known, manager = len(request.tokens), self.manager
        for place, node in enumerate(path, known):
            source = known - 1 + node
            if source != place:
                self._moves.append((manager.slot(request.id, source), manager.slot(request.id, place)))
        if request.draft:
            manager.sequence(request.id).tokens[known : known + len(path)] = tokens[:-1]
        manager.truncate(request.id, known + len(path))
        request.computed = known + len(path)
        request.state = request.hidden[path[-1] if path else 0].clone()
        request.draft, request.tree, request.nodes = [], NO_TREE, [0]
        new: list[int] = []
        for token in tokens:
            output = super()._accept(request, token, now)
            new += output.new_tokens
            if request.status is Status.FINISHED:
                break
        return RequestOutput(request.id, new, output.finished, output.finish_reason, output.error, request)

    def stats(self) -> dict[str, Any]:
        """As :meth:`Engine.stats`, and how many candidates were accepted."""
        return super().stats() | {"accepted_tokens": sum(self.accepted)}
