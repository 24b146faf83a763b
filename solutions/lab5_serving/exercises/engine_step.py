"""Steps of an engine whose runner has no model: what exercise 5.7 is checked by, request by request."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from utils.checks.core import classic
from utils.checks.hidden import Observation
from utils.serving import SamplingParams

from .fake_runner import CANNOT, FakeRunner
from .scenarios import Answer, CheckMismatch
from .stateful import Call, Machine

#: Steps in which a right engine finishes all requests of a run.
MOST_STEPS = 200
VOCABULARY, END = 31, 7

COUNTED = classic("what was run is computed now: request.computed is first + count", 1)
COMMITTED = classic("commit tells the manager which tokens are written, so that others find their blocks", 2)
AMID = classic("a request in the middle of its prompt gets no token: only chunks that sample do", 3)
FAILED = classic("a request that fails ends with the reason 'error' and is in no other step; the others go on", 4)
NO_ROW = classic("a chunk whose request has failed has no row in logits: it is not in sampling", 4)
SAYS = "failed has a text for each request that failed, by its id: its output's error is this text"
NEXT = "a request with all tokens computed gets its next one: its chunk is in sampling, and _accept appends it"
APPENDED = classic("_accept appends a token, ends a request that has all of its own, and gives its output to return", 5)


@dataclass
class Before:
    """A request before a step: its tokens, and how many of them were computed."""

    tokens: list[int]
    computed: int


class EngineMachine(Machine):
    """Requests that come, share beginnings, end by length or by the end of text, and fail.

    Args:
        blocks: of the pool, the least and the most.
        failing: the share of steps before which a request fails: no more chunks of it run, or no finite logits.
        roomy: whether no block is ever taken that holds a prefix: then each prefix must be found.
        requests: how many arrive.
    """

    def __init__(
        self, answer: Answer, key: str, *, blocks: tuple[int, int], failing: float = 0.0, roomy: bool = False,
        requests: int = 6,
    ) -> None:  # fmt: skip
        super().__init__(answer, key)
        drawn = self.random.randint
        size, batch = drawn(2, 4), drawn(2, 4)
        self.runner = FakeRunner(drawn(*blocks), size, VOCABULARY)
        budget = batch + drawn(0, 5)
        config = SimpleNamespace(max_seq_len=200, vocab_size=VOCABULARY, eos_token_ids=(END,))
        self.shown.append(
            f"Engine({self.runner.num_blocks} blocks of {size}, max_batch={batch}, token_budget={budget})"
        )
        self.engine = answer["Engine"](
            SimpleNamespace(config=config), runner=self.runner, max_batch=batch, token_budget=budget
        )
        self.failing, self.roomy, self.left, self.steps, self.wait = failing, roomy, requests, 0, 0
        self.begin = [drawn(1, VOCABULARY - 1) for _ in range(2 * size)]
        self.seen: Observation = None

    # ---- which call is next
    def draw(self) -> Call | None:
        """A request arrives, fails, or the engine makes a step, until all have arrived and are finished."""
        random, ids = self.random, list(self.engine.requests)
        if self.engine.has_work and (self.wait > 0 or not self.left):
            self.wait -= 1
            if ids and random.random() < self.failing:
                return random.choice(("stop_running", "lose_logits")), random.choice(ids)
            return ("step",)
        if not self.left:
            return None if self.steps < 0 else ("finish",)
        self.left, self.wait = self.left - 1, random.choice((0, 0, 1, 3))
        shared = self.begin[: random.choice((0, len(self.begin)))]
        prompt = [*shared, *(random.randint(1, VOCABULARY - 1) for _ in range(random.randint(1, 7)))]
        return "add", f"r{self.left}", prompt, random.randint(1, 8)

    def is_possible(self, rule: str, *arguments: Any) -> bool:
        """Only a request that is not finished fails."""
        if rule in ("stop_running", "lose_logits"):
            return arguments[0] in self.engine.requests
        return rule == "add" or self.engine.has_work == (rule == "step")

    # ---- the rules
    def add(self, id: str, prompt: list[int], new: int) -> None:
        """A request arrives."""
        params = SamplingParams(max_new_tokens=new)
        self.shown.append(f"add({id}: {len(prompt)} tokens, {new} new)")
        self.engine.add(prompt, params, id=id)
        self.seen = None

    def stop_running(self, id: str) -> None:
        """From now on a request's chunks raise an error."""
        self.shown.append(f"from here on {id} cannot be computed")
        self.runner.failing.add(id)
        self.seen = None

    def lose_logits(self, id: str) -> None:
        """From now on a request's logits are no numbers."""
        self.shown.append(f"from here on the logits of {id} are not finite")
        self.runner.not_finite.add(id)
        self.seen = None

    def step(self) -> None:
        """One step, and what it must have done to every request."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise CheckMismatch(f"{' '.join(self.engine.requests)} not finished after {MOST_STEPS} steps")
        requests = dict(self.engine.requests)
        before = {id: Before(list(request.tokens), request.computed) for id, request in requests.items()}
        self.runner.ran.clear()
        self.runner.failed.clear()
        self.began = self.engine.clock()
        outputs = self.call(self.engine.step, shown=_shown)
        if not isinstance(outputs, list):
            raise CheckMismatch(f"step returns {outputs!r}", "expected the list outputs")
        ran = {id: (first, count) for id, first, count in self.runner.ran}
        self.shown[-1] += "   (ran: " + (" ".join(f"{i}[{a}:{a + n}]" for i, (a, n) in ran.items()) or "nothing") + ")"
        self.amid = any(sum(ran[id]) < len(before[id].tokens) for id in ran)  # a chunk that brings no token
        if len(ran) < len(self.runner.ran):
            raise CheckMismatch("a chunk is run twice in a step", "self._run runs each chunk of the step once")
        for id, request in requests.items():
            mine = [output for output in outputs if output.id == id]
            self._check_request(id, request, before[id], ran.get(id), mine)
        self.seen = [
            sorted([o.id, list(o.new_tokens), o.finish_reason] for o in outputs),
            sorted(map(list, self.runner.ran)),
        ]

    def finish(self) -> None:
        """Nothing is left."""
        self.steps, self.seen = -1, None
        if self.engine.requests:
            raise CheckMismatch(f"{' '.join(self.engine.requests)} not finished, and the scheduler has no work")
        if used := self.engine.manager.num_used:
            raise CheckMismatch(f"block leak: {used} blocks in use after the last request")

    # ---- what must hold of a request after a step
    def _check_request(self, id: str, request: Any, before: Before, ran: tuple[int, int] | None, mine: list) -> None:
        end = sum(ran) if ran else None
        if id in self.runner.failed or (id in self.runner.not_finite and end == len(before.tokens)):
            self._check_failed(id, mine)
            return
        if [output for output in mine if output.error]:
            cause = FAILED if self.runner.failed else AMID if self.amid else ""
            raise CheckMismatch(f"request {id} ends with an error: {mine[0].error}", cause)
        self._check_tokens(id, request, before, end, mine)
        if end is not None and id in self.engine.requests:
            self._check_cache(id, request, end)

    def _check_failed(self, id: str, mine: list) -> None:
        if id in self.engine.requests:
            raise CheckMismatch(f"request {id} failed in this step, and is not ended", FAILED)
        if len(mine) != 1 or mine[0].finish_reason != "error" or not mine[0].error or mine[0].new_tokens:
            raise CheckMismatch(f"request {id} failed: expected one output with its error, got {_shown(mine)}", FAILED)
        if not isinstance(error := mine[0].error, str) or (id in self.runner.failed and CANNOT not in error):
            cause = NO_ROW if str(error).startswith("sampling failed") else SAYS
            raise CheckMismatch(f"request {id} failed: expected what failed says of it, got {error!r}", cause)

    def _check_tokens(self, id: str, request: Any, before: Before, end: int | None, mine: list) -> None:
        """Who had all its tokens run gets the next one, and nobody else."""
        given = [token for output in mine for token in output.new_tokens]
        if end != len(before.tokens):
            if given or len(request.tokens) > len(before.tokens):
                known = f"{len(before.tokens)} tokens, {before.computed if end is None else end} of them computed"
                raise CheckMismatch(f"request {id} has {known}, and gets another one", AMID)
            return
        expected = self.runner.next_token(before.tokens)
        if request.tokens != [*before.tokens, expected]:
            after = request.tokens[len(before.tokens) :]
            cause = FAILED if self.runner.failed else "" if after else NEXT
            raise CheckMismatch(f"request {id}: expected token {expected} behind its {end}, got {after}", cause)
        if given != [expected]:
            raise CheckMismatch(f"request {id} got token {expected}, and the outputs say {given}", APPENDED)
        when = request.token_times[-1]
        if not isinstance(when, float) or not self.began <= when <= self.engine.clock():
            raise CheckMismatch(
                f"token {expected} of request {id} came at {when!r:.60}, expected this step's now", APPENDED
            )
        over = "stop" if expected == END else "length" if len(request.tokens) >= request.limit else None
        if mine[-1].finish_reason != over or (id in self.engine.requests) != (over is None):
            state = "goes on" if id in self.engine.requests else "is gone"
            raise CheckMismatch(f"request {id} {state}: expected finish_reason {over!r}", APPENDED)

    def _check_cache(self, id: str, request: Any, end: int) -> None:
        """What was run counts as computed, and others find it."""
        if request.status.name == "RUNNING" and request.computed != end:
            raise CheckMismatch(
                f"request {id}: expected computed {end} after this step, got {request.computed}", COUNTED
            )
        if not self.roomy:
            return
        size = self.runner.block_size
        found = len(self.engine.manager.cached_prefix([*request.tokens[:end], 0])[0])
        if found != end // size:
            raise CheckMismatch(
                f"{end} tokens of {id} are computed: expected others to find {end // size} of its blocks, got {found}",
                COMMITTED,
            )

    def observation(self) -> Observation:
        """What a step gave, and what it ran."""
        return self.seen


def _shown(outputs: Any) -> str:
    """Outputs as a message shows them: ``r1: 17, r2: 5 length``."""
    if not isinstance(outputs, list):
        return repr(outputs)
    said = (f"{o.id}: {' '.join(map(str, [*o.new_tokens, o.finish_reason or '']))}".rstrip() for o in outputs)
    return ", ".join(said) or "nothing"
