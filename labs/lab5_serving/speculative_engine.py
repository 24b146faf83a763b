"""The engine with a draft model: every step verifies the drafts of all running requests in one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from utils.serving import Decoder, SamplingParams, probabilities

from .block_manager import BlockManager, OutOfBlocks
from .drafts import DraftedRequest, DraftScheduler, StaticDraftScheduler
from .engine import Engine, default_num_blocks
from .request import Request, RequestOutput, Status
from .runner import ModelRunner
from .scheduler import Chunk, Scheduler, Step
from .speculative import draw, speculative_sample, verify
from .speculative_decoding import check_pair


class Drafter:
    """A draft model with a paged cache of its own, one sequence a request.

    Drafting is a service: a request that finds no room here, or none in the model's positions, is left without a
    draft, and the target goes on alone.

    Args:
        model: the draft, in evaluation mode.
        num_blocks, block_size: of its cache. A ``runner`` brings its own.
        runner: what computes its steps; a :class:`ModelRunner` of the model by default.
    """

    def __init__(self, model: Decoder, num_blocks: int, block_size: int, runner: ModelRunner | None = None) -> None:
        self.model = model
        if runner is not None:
            num_blocks, block_size = runner.num_blocks, runner.block_size
        self.manager = BlockManager(num_blocks, block_size)
        # Mostly one token is missing; after a draft that was accepted whole, two.
        self.runner = runner or ModelRunner(model, num_blocks, block_size, graph_chunks=[2])
        self._held: set[str] = set()  # requests that have blocks here

    @torch.no_grad()
    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """``counts[i]`` tokens for each request, and the distributions that they were drawn from, (k, V), by id."""
        shadows = [self._shadow(request) for request in requests]
        room = self.model.config.max_seq_len
        wanted = {
            request.id: min(count, room - len(request.tokens) + 1)
            for request, count in zip(requests, counts, strict=True)
        }
        rows: dict[str, list[Tensor]] = {request.id: [] for request in requests}
        for number in range(max(wanted.values(), default=0)):
            step, going = Step(), [shadow for shadow in shadows if number < wanted[shadow.id]]
            for shadow in going:
                self._extend(shadow, step)
            if not step.chunks:
                break
            logits = self.runner.run(step, self.manager)
            for group, index in by_params([chunk.request for chunk in step.chunks]):
                probs = probabilities(logits[index], group[0].params)
                tokens = draw(probs, uniforms(group, 1)[:, 0].to(probs.device)).tolist()
                for shadow, token, row in zip(group, tokens, probs, strict=True):
                    shadow.append(token, 0.0)
                    rows[shadow.id].append(row)
            for chunk in step.chunks:
                self.manager.commit(chunk.request.id, chunk.start + chunk.count)
        return [shadow.output for shadow in shadows], {id: torch.stack(found) for id, found in rows.items() if found}

    def _shadow(self, request: Request) -> Request:
        """A request of the same tokens, to which drafted ones can be added without touching the real one."""
        return Request(request.id, list(request.tokens), request.params, generator=request.generator)

    def _extend(self, shadow: Request, step: Step) -> None:
        """Blocks and a chunk for what the cache has not read of a sequence; nothing if there are no blocks for it."""
        manager, id = self.manager, shadow.id
        try:
            if id in self._held:
                start = manager.length(id)
                step.copies += manager.append(id, shadow.tokens[start:])
            else:
                start = manager.allocate(id, shadow.tokens)
                self._held.add(id)
        except OutOfBlocks:
            return
        step.chunks.append(Chunk(shadow, start, len(shadow.tokens) - start))

    def keep(self, id: str, length: int) -> None:
        """Forget what was read of a sequence behind its first ``length`` tokens."""
        if id not in self._held or self.manager.length(id) <= length:
            return
        if length:
            self.manager.truncate(id, length)
        else:  # a prompt of one token, drafted for before the target had room for it in a step
            self.manager.free(id)
            self._held.remove(id)

    def keep_only(self, ids: set[str]) -> None:
        """Free the sequences of all other requests."""
        for id in self._held - ids:
            self.manager.free(id)
        self._held &= ids


class SpeculativeEngine(Engine):
    """An :class:`Engine` whose running requests may gain several tokens in a step.

    Greedy requests get the tokens that :class:`Engine` gives them; the others get tokens of the same distribution.

    Args:
        model: the target.
        draft_model: with the target's vocabulary.
        draft_tokens: k, drafted for each running request before each step.
        draft_blocks: blocks of the draft's cache; None: as many as the target's.
        draft_runner: as ``runner``, for the draft.
        settings: of :class:`Engine`.

    Attributes:
        drafted, accepted: tokens so far, by place in the draft: ``accepted[i] / drafted[i]`` is the share of accepted
            ones among the tokens drafted at place i (those behind a rejected one count as not accepted).
        one_by_one: whether drafts are verified request by request; on a CPU they are.
    """

    request_type: ClassVar[type[Request]] = DraftedRequest
    schedulers: ClassVar[dict[str, type[Scheduler]]] = {"continuous": DraftScheduler, "static": StaticDraftScheduler}

    def __init__(
        self,
        model: Decoder,
        draft_model: Decoder,
        *,
        draft_tokens: int = 4,
        draft_blocks: int | None = None,
        draft_runner: ModelRunner | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch: int = 64,
        **settings: Any,
    ) -> None:
        check_pair(model, draft_model, draft_tokens)
        if num_blocks is None:
            num_blocks = default_num_blocks(model, block_size, max_batch)
        if settings.get("runner") is None:
            settings["runner"] = ModelRunner(model, num_blocks, block_size, graph_chunks=[draft_tokens + 1])
        super().__init__(model, num_blocks=num_blocks, block_size=block_size, max_batch=max_batch, **settings)
        self.draft_tokens = draft_tokens
        self.one_by_one = model.device.type == "cpu"
        self.drafter = Drafter(draft_model, draft_blocks or num_blocks, block_size, draft_runner)
        self.drafted, self.accepted = [0] * draft_tokens, [0] * draft_tokens
        self._draft_probs: dict[str, Tensor] = {}

    def step(self) -> list[RequestOutput]:
        """Draft for the requests that decode, then one step of the target for all."""
        self._draft()
        return super().step()

    def _draft(self) -> None:
        """Give each request that decodes a draft: as long as it may be, and as the free blocks allow."""
        running, spare = self.scheduler.running, self.manager.num_free
        self.drafter.keep_only({request.id for request in running})
        self._draft_probs, requests, counts = {}, [], []
        for request in running:
            request.draft = []
            self.drafter.keep(request.id, len(request.tokens) - 1)  # a draft that no step took up
            count = min(self.draft_tokens, request.limit - len(request.tokens) - 1)
            blocks = self.manager.blocks_for(len(request.tokens) + count) - len(self.manager.table(request.id))
            if request.pending == 1 and count > 0 and blocks <= spare:
                spare -= blocks
                requests.append(request)
                counts.append(count)
        try:
            drafts, self._draft_probs = self.drafter.draft(requests, counts)
        except Exception:  # drafts are guesses: no request depends on them
            self.drafter.keep_only(set())  # but what is in their cache is not known any more
            self._totals["failed_drafts"] += 1
            return
        for request, draft in zip(requests, drafts, strict=True):
            request.draft = draft

    def _run(self, step: Step) -> tuple[Tensor | None, dict[str, str]]:
        for chunk in step.chunks:  # the budget may have cut a draft short
            chunk.request.draft = chunk.request.draft[: max(0, chunk.start + chunk.count - len(chunk.request.tokens))]
        return super()._run(step)

    def _choose(self, sampling: list[Chunk], logits: Tensor | None, failed: dict[str, str]) -> list[list[int]]:
        """The next tokens of each chunk's request, from its rows of the logits: one for each drafted token, and one."""
        if not sampling:
            return []
        chosen: dict[str, list[int]] = {}
        starts, at = {}, 0
        for chunk in sampling:
            starts[chunk.request.id] = at
            at += 1 + len(chunk.request.draft)
        finite = logits.max(-1).values.isfinite().tolist()
        for chunk in sampling:
            start = starts[chunk.request.id]
            if not all(finite[start : start + 1 + len(chunk.request.draft)]):
                failed[chunk.request.id] = "sampling failed: its logits are not finite"
        good = [chunk.request for chunk in sampling if chunk.request.id not in failed]
        for group, _ in by_params(good):
            try:
                self._verify(group, logits, starts, chosen)
            except Exception as error:
                failed.update((request.id, f"sampling failed: {error}") for request in group)
        return [chosen.get(chunk.request.id, []) for chunk in sampling]

    def _verify(
        self, group: list[DraftedRequest], logits: Tensor, starts: dict[str, int], chosen: dict[str, list[int]]
    ) -> None:
        """Verify the drafts of requests with equal parameters.

        One request after the other by :func:`speculative_sample`, or, where a GPU must not be waited for, as one batch
        by :func:`verify`, padded to the longest draft.
        """
        if self.one_by_one:
            for request in group:
                start, k = starts[request.id], len(request.draft)
                target_probs = probabilities(logits[start : start + k + 1], request.params)
                draft_probs = self._draft_probs[request.id][:k] if k else target_probs[:0]
                generator = request.generator or torch.Generator()  # whose numbers do not matter to greedy requests
                drafted = torch.tensor(request.draft, dtype=torch.int64)
                chosen[request.id] = speculative_sample(target_probs, draft_probs, drafted, generator)
            return
        k, vocabulary = max(len(request.draft) for request in group), logits.shape[-1]
        rows = torch.tensor(
            [[starts[r.id] + min(i, len(r.draft)) for i in range(k + 1)] for r in group], device=logits.device
        )
        target_probs = probabilities(logits[rows], group[0].params)
        draft_probs = torch.zeros(len(group), k, vocabulary, device=logits.device)
        for i, request in enumerate(group):
            if request.draft:
                draft_probs[i, : len(request.draft)] = self._draft_probs[request.id][: len(request.draft)]
        drafted = torch.tensor([r.draft + [0] * (k - len(r.draft)) for r in group], dtype=torch.int64)
        numbers = torch.zeros(len(group), k + 1, dtype=torch.float64)
        for i, request in enumerate(group):  # no more of a request's numbers than it uses alone
            own = uniforms([request], len(request.draft) + 1)[0]
            numbers[i, : len(request.draft)], numbers[i, k] = own[:-1], own[-1]
        accepted, added = verify(target_probs, draft_probs, drafted.to(logits.device), numbers)
        for request, count, token in zip(group, accepted.tolist(), added.tolist(), strict=True):
            chosen[request.id] = [*request.draft[:count], token]

    def _accept(self, request: DraftedRequest, tokens: list[int], now: float) -> RequestOutput:
        """A request has its next tokens: the caches forget what was rejected."""
        known, accepted = len(request.tokens), len(tokens) - 1
        for i in range(len(request.draft)):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted
        request.draft = []
        request.computed = known + accepted
        self.manager.truncate(request.id, known + accepted)
        self.drafter.keep(request.id, known + accepted)
        new: list[int] = []
        for token in tokens:
            output = super()._accept(request, token, now)
            new += output.new_tokens
            if request.status is Status.FINISHED:
                break
        return RequestOutput(request.id, new, output.finished, output.finish_reason, output.error, request)

    def _end(self, request: Request, *args: Any, **kwargs: Any) -> RequestOutput:
        output = super()._end(request, *args, **kwargs)
        self.drafter.keep_only({other.id for other in self.scheduler.running})
        return output

    def stats(self) -> dict[str, Any]:
        """As :meth:`Engine.stats`, and how many tokens were drafted and accepted."""
        return super().stats() | {"drafted_tokens": sum(self.drafted), "accepted_tokens": sum(self.accepted)}


def by_params(requests: Sequence[Request]) -> list[tuple[list[Request], list[int]]]:
    """Requests whose distributions are computed alike, together, each with its index: equal but for seed and length."""
    groups: dict[tuple, tuple[list[Request], list[int]]] = {}
    for index, request in enumerate(requests):
        params: SamplingParams = request.params
        group = groups.setdefault((params.temperature, params.top_k, params.top_p), ([], []))
        group[0].append(request)
        group[1].append(index)
    return list(groups.values())


def uniforms(requests: Sequence[Request], count: int) -> Tensor:
    """``count`` numbers of each request's own generator, (S, count) float64; zeros for greedy ones, which draw none."""
    return torch.stack(
        [
            torch.zeros(count, dtype=torch.float64)
            if request.params.greedy
            else torch.rand(count, dtype=torch.float64, generator=request.generator)
            for request in requests
        ]
    )
