"""Hidden scenarios of exercise 5.3: every step that the two schedulers make of drawn workloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from utils.checks.hidden import Draw, Observation, collected
from utils.serving import SamplingParams

#: No workload here takes a right scheduler half as many steps.
MOST_STEPS = 400


@collected
def schedulers(package: ModuleType, seed: int) -> Iterator[tuple[str, Observation]]:
    """Blocks enough and too few, prompts in chunks and whole, beginnings in the cache, clients that give up."""
    draw = Draw(seed, "5.3")
    for static, times in ((False, 3), (True, 2)):
        name = "StaticScheduler" if static else "Scheduler"
        for what, settings in (
            ("with many blocks", {"blocks": 400, "size": 4, "batch": draw.between(2, 4)}),
            ("with few blocks", {"blocks": draw.between(12, 15), "size": 2, "batch": 6, "prompt": 8, "new": 14}),
            ("with blocks of one token", {"blocks": draw.between(24, 27), "size": 1, "batch": 6, "prompt": 8}),
            (
                "with a long prompt among short ones",
                {"blocks": 30, "size": 4, "batch": 4, "long": draw.between(50, 80)},
            ),
            ("with beginnings in the cache", {"blocks": 50, "size": 4, "batch": 4, "prompt": 16, "cached": True}),
            ("with prompts that may not be split", {"blocks": 60, "size": 4, "batch": 4, "prompt": 14, "whole": True}),
            ("with clients that give up", {"blocks": 14, "size": 2, "batch": 4, "leave": 0.3}),
        ):
            for number in range(times):
                workload = f"{name} {what}, workload {number + 1}"
                yield from _shift(package, draw, name, workload, **settings).items()


def _shift(
    package: ModuleType, draw: Draw, scheduler_name: str, name: str, *, blocks: int, size: int, batch: int,
    prompt: int = 9, new: int = 9, long: int = 0, cached: bool = False, whole: bool = False, leave: float = 0.0,
) -> dict[str, Observation]:  # fmt: skip
    """One workload, played to its end: chunks, admissions and preemptions of each step."""
    random = draw.random
    saved = {f"r{number}": random.choice((0, size, 2 * size)) if cached else 0 for number in range(12)}
    pool = _Pool(blocks, size, saved)
    budget = random.choice((batch + 2, 2 * batch + 1, 40))
    scheduler = getattr(package, scheduler_name)(pool, max_batch=batch, token_budget=budget, chunked_prefill=not whole)
    arrivals = {
        f"r{number}": (
            long if long and number == 3 else random.randint(1, prompt), random.randint(1, new),
            random.choice((0, 0, 1, 2, 5)), random.random() < leave,
        )
        for number in range(10)
    }  # fmt: skip
    steps: list[Observation] = []
    error = ""
    try:
        _play(package, scheduler, pool, arrivals, steps)
    except NotImplementedError:
        raise
    except Exception as raised:
        error = type(raised).__name__
    return {f"{name}: steps": steps, f"{name}: error": error, f"{name}: blocks in use at the end": pool.num_used}


def _play(
    package: ModuleType, scheduler: object, pool: _Pool, arrivals: Mapping[str, tuple[int, int, int, bool]],
    steps: list[Observation],
) -> None:  # fmt: skip
    requests = {}
    for id, (prompt, new, turns, leaves) in arrivals.items():
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        requests[id] = package.Request(id=id, prompt=list(range(1, prompt + 1)), params=params)
        scheduler.add(requests[id])
        for _ in range(turns):
            if scheduler.has_work:
                _step(scheduler, pool, steps)
        if leaves and requests[id].status.name != "FINISHED":
            scheduler.remove(requests[id])
    while scheduler.has_work and len(steps) < MOST_STEPS:
        _step(scheduler, pool, steps)


def _step(scheduler: object, pool: _Pool, steps: list[Observation]) -> None:
    """One step, played as an engine plays it, without a model."""
    pool.calls.clear()
    step = scheduler.schedule()
    steps.append(
        [
            sorted([chunk.request.id, chunk.start, chunk.count] for chunk in step.chunks),
            [id for name, id in pool.calls if name == "allocate"],
            [id for name, id in pool.calls if name == "free"],
            sorted([id, length] for id, length in pool.lengths.items()),
        ]
    )
    for chunk in step.chunks:
        request = chunk.request
        request.computed = chunk.start + chunk.count
        if request.computed == len(request.tokens):
            request.append(0, 0.0)
            if len(request.tokens) >= request.limit:
                scheduler.remove(request)


class _NoBlocks(RuntimeError):
    """More blocks were asked for than are free."""


class _Pool:
    """A block manager's interface that only counts: so exercise 5.3 does not need 5.2.

    Args:
        num_blocks, block_size: of the pool.
        saved: how many tokens of a sequence are in the cache when it comes.

    Attributes:
        lengths: tokens of each sequence that have a slot.
        calls: (name, sequence) of each call that gave or took all blocks of a sequence.
    """

    prefix_caching = True

    def __init__(self, num_blocks: int, block_size: int, saved: Mapping[str, int]) -> None:
        self.num_blocks, self.block_size, self.saved = num_blocks, block_size, saved
        self.lengths: dict[str, int] = {}
        self.calls: list[tuple[str, str]] = []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_used(self) -> int:
        return sum(map(self.blocks_for, self.lengths.values()))

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    def length(self, id: str) -> int:
        return self.lengths[id]

    def can_allocate(self, tokens: Sequence[int], reserve: int = 0) -> bool:
        return self.blocks_for(len(tokens)) + reserve <= self.num_free

    def allocate(self, id: str, tokens: Sequence[int]) -> int:
        if id in self.lengths or not self.can_allocate(tokens):
            raise _NoBlocks(f"{len(tokens)} tokens of {id!r}, {self.num_free} blocks are free")
        self.lengths[id] = len(tokens)
        self.calls.append(("allocate", id))
        return min(self.saved.get(id, 0), len(tokens) - 1) // self.block_size * self.block_size

    def can_append(self, id: str, count: int = 1) -> bool:
        return self.blocks_for(self.lengths[id] + count) - self.blocks_for(self.lengths[id]) <= self.num_free

    def append(self, id: str, tokens: Sequence[int]) -> list[tuple[int, int]]:
        if not self.can_append(id, len(tokens)):
            raise _NoBlocks(f"{len(tokens)} more tokens of {id!r}, {self.num_free} blocks are free")
        self.lengths[id] += len(tokens)
        return []

    def truncate(self, id: str, length: int) -> None:
        self.lengths[id] = length

    def commit(self, id: str, computed: int) -> None:
        """Nothing is shared, so nothing is noted."""

    def free(self, id: str) -> None:
        del self.lengths[id]
        self.calls.append(("free", id))
