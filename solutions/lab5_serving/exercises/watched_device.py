"""A device that watches what exercise 5.9's host launches and reads, and knows what it should."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from utils.checks.core import classic, listed
from utils.serving.virtual_device import Chunk, VirtualDevice

from .scenarios import CheckMismatch

VOCABULARY = 23
#: Launches and reads with which a right answer serves any work of the exercise.
MOST_CALLS = 400

ALTERNATES = classic(
    "a step is launched before the one before it is read (does `flight` hold the new one already?): while the host "
    "reads, the device waits", 1,
)  # fmt: skip
AHEAD = classic("before a step is launched, all but the newest one are read: else the device gets two steps ahead", 1)
READS = classic("each step is read once, in order; the last one too", 1)
STALE = classic("this token has been run: the one behind it is in flight, and only a placeholder stands for it", 2)
ROWS = classic("a placeholder names a row of the step before: rows move up when a request leaves", 2)
WHOLE = classic("the device has the request's text already: only its newest token is new", 2)
PROMPT = classic("a request that was not in the step before brings its tokens, none of which is in flight", 2)
LENGTH = classic("its last token by limit is in flight, and the host knows that: it needs no further step", 3)
ENDED = classic("its text has ended, and the host has read that: it takes part no more", 3)
PLACE = classic("who has all tokens, read or in flight, leaves its place: admit fills it in this very step", 3)
RUNS = classic("every running request takes part in every step", 3)
SURPLUS = classic("a text that has ended gets no more tokens: what the step in flight gives it is dropped", 4)
MIXED = classic("row r of a step is the token of the request that was row r when it was launched", 4)
LOST = classic("every token that is read goes to its request: accept appends it", 4)


def next_token(text: Sequence[int]) -> int:
    """The token after a text: a number to which every token and its place matter."""
    return sum((i * i + 3 * i + 5) * (token + 1) + i for i, token in enumerate(text)) % VOCABULARY


@dataclass(eq=False)
class PlainRequest:
    """What serving needs of a request: the lab's own, less what an engine adds.

    ``limit`` counts the prompt; ``tokens`` are prompt and ``output``; ``token_times`` are those of ``output``.
    """

    id: str
    prompt: list[int]
    limit: int
    output: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    status: object = None
    finished: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def append(self, token: int, now: float) -> None:
        """The next token has been read."""
        self.output.append(token)
        self.tokens.append(token)
        self.token_times.append(now)


class Work:
    """Requests that are there from the beginning, and what serving them must give.

    Attributes:
        requests: in the order of their arrival.
        ends: tokens that end a text; empty if all end by their length.
        texts: id -> its generated tokens.
        steps: the ids of the requests in each step, with overlap.
    """

    def __init__(self, rng: random.Random, count: int, max_batch: int, *, ends: bool) -> None:
        self.max_batch = max_batch
        prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))] for _ in range(count)]
        self.requests = [
            PlainRequest(f"r{i}", prompt, len(prompt) + rng.choice((1, 2, 3, 5, 7))) for i, prompt in enumerate(prompts)
        ]
        whole = {request.id: _continued(request, ()) for request in self.requests}
        early = [token for text in whole.values() for token in text[:-1]]
        self.ends = tuple(rng.sample(early, 1)) if ends and early else ()
        self.texts = {request.id: _continued(request, self.ends) for request in self.requests}
        surplus = {request.id: _ends_early(request, self.texts[request.id]) for request in self.requests}
        left = {id: len(text) + surplus[id] for id, text in self.texts.items()}
        self.steps: list[list[str]] = []
        waiting, running = deque(left), []
        while waiting or running:
            while waiting and len(running) < max_batch:
                running.append(waiting.popleft())
            self.steps.append(list(running))
            left |= {id: left[id] - 1 for id in running}
            running = [id for id in running if left[id]]

    @property
    def where(self) -> str:
        """The work, for a message."""
        sizes = " ".join(f"{r.id}: {len(r.prompt)}+{r.limit - len(r.prompt)}" for r in self.requests)
        return f"max_batch {self.max_batch}, ends {self.ends}, prompt + most new tokens of each: {sizes}"

    def started(self, id: str) -> int:
        """The first step of a request."""
        return next(number for number, ids in enumerate(self.steps) if id in ids)


def _continued(request: PlainRequest, ends: Sequence[int]) -> list[int]:
    text = list(request.prompt)
    while len(text) < request.limit and (len(text) == len(request.prompt) or text[-1] not in ends):
        text.append(next_token(text))
    return text[len(request.prompt) :]


def _ends_early(request: PlainRequest, text: list[int]) -> bool:
    return len(request.prompt) + len(text) < request.limit


class LoggingDevice(VirtualDevice):
    """Writes down launches and reads.

    Attributes:
        log: ``("launch", 0)``, ``("read", 0)`` and so on, in their order.
        rows: of each step, the ids in the order of its chunks.
        read_at: step -> the host's time when it had read it.
    """

    def __init__(self, look_up: Callable, **times: float) -> None:
        super().__init__(next_token, look_up, **times)
        self.log: list[tuple[str, int]] = []
        self.rows: list[list[str]] = []
        self.read_at: dict[int, float] = {}

    def launch(self, chunks: Sequence[Chunk]) -> int:
        self._note("launch", len(self.rows))
        self.rows.append([id for id, _ in chunks])
        return super().launch(chunks)

    def read(self, step: int) -> list[int]:
        self._note("read", step)
        found = super().read(step)
        self.read_at[step] = self.now
        return found

    def _note(self, what: str, step: int) -> None:
        self.log.append((what, step))
        if len(self.log) > MOST_CALLS:
            raise RuntimeError(f"after {MOST_CALLS} launches and reads there is still a request that is not served")


class WatchedDevice(LoggingDevice):
    """Stops at the first launch or read that is not as it should be.

    Args:
        look_up: the student's.
        work: what is served.
    """

    def __init__(self, look_up: Callable, work: Work, **times: float) -> None:
        super().__init__(look_up, **times)
        self.work = work

    def launch(self, chunks: Sequence[Chunk]) -> int:
        number, steps = len(self.rows), self.work.steps
        read = [step for what, step in self.log if what == "read"]
        if number and number - 1 in read:
            raise self._mismatch(f"step {number - 1} is read before step {number} is launched", ALTERNATES)
        if number > 1 and number - 2 not in read:
            raise self._mismatch(f"step {number} is launched, and step {number - 2} is not read yet", AHEAD)
        self._judge_outputs()
        ids, wanted = [id for id, _ in chunks], steps[number] if number < len(steps) else []
        if len(set(ids)) < len(ids):
            raise self._mismatch(f"step {number} has {listed(ids)}: one of them twice", "a request has one chunk")
        if sorted(ids) != sorted(wanted):
            raise self._mismatch(
                f"step {number} has {listed(ids)}, expected {listed(wanted)}", self._why_ids(ids, wanted)
            )
        for id, tokens in chunks:
            self._judge_tokens(number, id, list(tokens), ids)
        return super().launch(chunks)

    def read(self, step: int) -> list[int]:
        done = [number for what, number in self.log if what == "read"]
        if step in done or step != len(done):
            raise self._mismatch(f"step {step} is read, expected step {len(done)}", READS)
        if step + 1 == len(self.rows) < len(self.work.steps):
            raise self._mismatch(f"step {step} is read before step {step + 1} is launched", ALTERNATES)
        return super().read(step)

    def _why_ids(self, ids: list[str], wanted: list[str]) -> str:
        seen = {id for rows in self.rows for id in rows}
        if any(id in seen and id not in ids for id in wanted):
            return RUNS
        for id in ids:
            if id not in wanted and id not in seen:
                return f"max_batch is {self.work.max_batch}: no more requests run at a time"
            if id not in wanted:
                request = next(request for request in self.work.requests if request.id == id)
                return ENDED if _ends_early(request, self.work.texts[id]) else LENGTH
        return PLACE

    def _judge_tokens(self, number: int, id: str, tokens: list[int], ids: list[str]) -> None:
        request = next(request for request in self.work.requests if request.id == id)
        if number == 0 or id not in self.rows[-1]:
            expected, cause = request.prompt, PROMPT
        else:
            expected, cause = [-1 - self.rows[-1].index(id)], ""
            known = self.work.texts[id][: len([rows for rows in self.rows[:-1] if id in rows])]
            if tokens == [-1 - ids.index(id)] or (tokens and tokens[0] < 0):
                cause = ROWS
            elif tokens and tokens[-1] == [*request.prompt, *known][-1]:
                cause = STALE
            elif tokens[-1:] == expected:
                cause = WHOLE
        if tokens != expected:
            raise self._mismatch(
                f"step {number}: {id} brings {listed(tokens)}, expected {listed(expected)}",
                cause,
                f"the step before had {listed(self.rows[-1])}, this one has {listed(ids)}" if number else "",
            )

    def judge_end(self) -> None:
        """All steps are read, and every request has its text."""
        unread = [step for step in range(len(self.rows)) if step not in self.read_at]
        if len(self.rows) < len(self.work.steps) or unread:
            done = f"{len(self.rows)} steps are launched, of which {len(unread)} are not read"
            raise self._mismatch(f"{done}; expected {len(self.work.steps)}, all read", READS)
        self._judge_outputs()
        for request in self.work.requests:
            first = self.work.started(request.id)
            times = [self.read_at[first + place] for place in range(len(request.output))]
            if request.token_times != times:
                raise self._mismatch(
                    f"the tokens of {request.id} came at {listed(request.token_times)} s, expected {listed(times)}",
                    "a token is there when its step is read: now is the device's time then",
                )

    def _judge_outputs(self) -> None:
        """Every request has the tokens of the steps that are read."""
        wrong = []  # request, the tokens that it must have, and why it has others
        for request in self.work.requests:
            text = self.work.texts[request.id]
            right = text[: sum(request.id in self.rows[step] for step in self.read_at)]
            if request.output == right:
                continue
            cause = LOST if request.output == right[: len(request.output)] else MIXED
            wrong.append((request, right, SURPLUS if right == text == request.output[: len(text)] else cause))
        if wrong:
            request, right, cause = next((each for each in wrong if each[2] is MIXED), wrong[0])
            raise self._mismatch(
                f"after step {len(self.read_at) - 1} is read, {request.id} has {listed(request.output)}, expected "
                f"{listed(right)}",
                cause,
            )

    def _mismatch(self, headline: str, cause: str, *details: str) -> CheckMismatch:
        log = ", ".join(f"{what} {step}" for what, step in self.log[-6:])
        said = [text for text in details if text]
        return CheckMismatch(headline, cause, *said, *([f"before that: {log}"] if log else []), self.work.where)


class DeviceTensor(Tensor):
    """A tensor that notes when the host asks for its values, for which it would wait on a GPU."""

    asked: ClassVar[list[str]] = []
    #: What needs values, or a shape that depends on them.
    ASKING: ClassVar[frozenset[str]] = frozenset({
        "tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "allclose",
        "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    })  # fmt: skip

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict | None = None
    ) -> Any:
        """Do what every tensor does, and note what needs values."""
        name = func.__name__
        if name in cls.ASKING or (name == "where" and len(args) == 1 and not kwargs):
            cls.asked.append(name)
        if name in ("__getitem__", "__setitem__") and _is_mask(args[1]):
            cls.asked.append("an index of truth values")
        return super().__torch_function__(func, types, args, kwargs or {})


def _is_mask(index: object) -> bool:
    return any(isinstance(i, Tensor) and not i.dtype.is_floating_point and i.dtype.itemsize == 1
               for i in (index if isinstance(index, tuple) else (index,)))  # fmt: skip
