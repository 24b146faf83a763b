"""One GPU in a simulation: which tokens go through its model in each step, by the rules of lab 5's scheduler.

Only lengths matter here, so a request is a few integers and the times of its tokens. A request that decodes gets one
token in each step, so it is known beforehand in which step it ends: a step costs the simulation the same few operations
whatever the size of the batch.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from .step_time import Work


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way: ``prompt`` and ``output`` in tokens, times in seconds of the simulation.

    Args:
        computed: tokens of the prompt whose keys and values are in a cache.
        times: when each token came; those of a decode phase are filled in at its end.
    """

    id: str
    arrival: float
    prompt: int
    output: int
    computed: int = 0
    times: list[float] = field(default_factory=list)


class Worker:
    """A GPU with a scheduler of continuous batching and chunked prefill, first come first served.

    Each step runs one token of every job that decodes, and gives what is left of the token budget to prompts, oldest
    first. That is the schedule of lab 5 (exercise 5.3) with one difference: a job is admitted when the cache has room
    for its last token as well, so that nothing is preempted.

    Args:
        token_budget: tokens in a step at most; not less than ``max_batch`` where jobs decode.
        max_batch: jobs at a time at most.
        cache_tokens: tokens whose keys and values fit into the GPU's memory.
        most_output: tokens of a job that this worker generates at most; 1 for a prefill worker.

    Attributes:
        step_ends: when each step ended.
        busy: seconds of all steps.
        link_free: when the GPU's network link is free.
    """

    def __init__(self, token_budget: int, max_batch: int, cache_tokens: int, most_output: int | None = None) -> None:
        self.token_budget, self.max_batch, self.cache_tokens = token_budget, max_batch, cache_tokens
        self.most_output = most_output
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self.step_ends: list[float] = []
        self.busy, self.link_free = 0.0, 0.0
        self.idle = True
        self._reserved, self._admitted = 0, 0
        self._decoding: list[tuple[int, int, int, Job]] = []  # heap of (last step, order, first step, job)
        self._context = 0  # keys and values that the next step's decoding jobs read
        self._started, self._joined = 0, 0
        self._prompts: list[tuple[Job, int]] = []  # of the step under way

    @property
    def jobs(self) -> int:
        """Jobs that wait here or hold a place."""
        return len(self.waiting) + self._admitted

    @property
    def steps(self) -> int:
        """Steps that are over."""
        return len(self.step_ends)

    def goal(self, job: Job) -> int:
        """Tokens that a job has when it leaves this worker."""
        return job.output if self.most_output is None else min(job.output, self.most_output)

    def room(self, job: Job) -> int:
        """Tokens of the cache that a job needs here; its last token is never run through the model."""
        return job.prompt + self.goal(job) - 1

    def fits(self, job: Job) -> bool:
        """Whether there are a place and memory for a job now."""
        return self._admitted < self.max_batch and self._reserved + self.room(job) <= self.cache_tokens

    def admit(self, job: Job) -> None:
        """Keep a place and memory for a job until :meth:`release`."""
        self._admitted += 1
        self._reserved += self.room(job)

    def release(self, job: Job) -> None:
        """Give back what :meth:`admit` kept."""
        self._admitted -= 1
        self._reserved -= self.room(job)

    def decode(self, job: Job) -> None:
        """From the next step on a job, which has its first token, gets one token per step."""
        last = self._started + self.goal(job) - len(job.times) - 1
        heapq.heappush(self._decoding, (last, self._joined, self._started, job))
        self._joined += 1
        self._context += job.prompt + len(job.times)

    def schedule(self) -> Work:
        """Begin the next step, which is under way until :meth:`finish`; a work of 0 sequences if nothing is to do."""
        decoding = len(self._decoding)
        work = Work(decoding, decoding, self._context, self._context)
        self._context += decoding
        budget = self.token_budget - decoding
        if budget > 0 and (self.prefilling or self.waiting):
            self._prompts = self._choose_prompts(budget)
            work = work + Work.of((job.computed, count) for job, count in self._prompts)
        if work.sequences:
            self._started, self.idle = self._started + 1, False
        return work

    def _choose_prompts(self, budget: int) -> list[tuple[Job, int]]:
        """Which prompts the rest of the budget goes to, and how many tokens of each."""
        chosen = []
        for job in self.prefilling:
            count = min(job.prompt - job.computed, budget)
            if count:
                chosen.append((job, count))
                budget -= count
        while self.waiting and budget > 0 and self.fits(self.waiting[0]):
            job = self.waiting.popleft()
            self.admit(job)
            self.prefilling.append(job)
            count = min(job.prompt, budget)
            chosen.append((job, count))
            budget -= count
        return chosen

    def finish(self, now: float, seconds: float) -> list[Job]:
        """End the step that is under way, which took so many seconds; every job in it whose tokens are computed has one
        more.

        Returns:
            The jobs that have what this worker gives them. They have left the batch, but not been released.
        """
        step = self.steps
        self.step_ends.append(now)
        self.busy += seconds
        self.idle = True
        leaving = []
        while self._decoding and self._decoding[0][0] == step:
            _, _, first, job = heapq.heappop(self._decoding)
            job.times += self.step_ends[first:]
            self._context -= job.prompt + len(job.times)
            leaving.append(job)
        for job, count in self._prompts:
            job.computed += count
            if job.computed == job.prompt:
                self.prefilling.popleft()  # prompts are computed in order
                job.times.append(now)
                if len(job.times) == self.goal(job):
                    leaving.append(job)
                else:
                    self.decode(job)
        self._prompts = []
        return leaving
