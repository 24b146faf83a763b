"""What the consumer did at the ring's barriers, held against what the ring allows: the first step that is not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from utils.checks.core import classic
from utils.checks.problem import Problem
from utils.gluon import Emulator, Fault

CONSUMER = "consumer"
#: Kind of a fault, where no step at the barriers explains it -> the likely cause.
CAUSES = {
    "arrivals": classic("a stage is released once for each tile", 3),
    "unfinished": classic("the sum may be read when no product is under way: after warpgroup_mma_wait(0, [acc])", 7),
    "product left": classic("after the loop the last product must be waited for: warpgroup_mma_wait(0, [acc])", 7),
    "unwritten": classic("c_tile.store(...) comes before TMA's copy of it", 8),
    "unfenced": classic("fence_async_shared() belongs between the store to c_tile and TMA's copy of it", 8),
    "store left": classic("tma.store_wait(0) is the last line: until then c_tile must stay", 8),
    "copy left": classic("the loop ends before all tiles have come", 5),
    "parity": classic("the parity is one bit of the round: (i // STAGES) & 1", 2),
}


@dataclass
class Steps:
    """The consumer's steps so far.

    Attributes:
        stages: Of the ring.
        issued: Products issued, and ``done`` how many of them have been waited for.
        released: Arrivals at ``empty``, by stage.
        stored: Whether the sum has been handed to TMA.
        waits: (barrier, parity) of the waits since the last product.
    """

    stages: int
    issued: int = 0
    done: int = 0
    released: Counter[int] = field(default_factory=Counter)
    waits: list[tuple[str, int]] = field(default_factory=list)
    stored: bool = False

    def waited(self) -> Problem | None:
        """What is wrong with the waits for the tile whose turn it is."""
        stage, parity = self.issued % self.stages, self.issued // self.stages & 1
        barrier = f"full[{stage}]"
        if not self.waits:
            cause = classic(f"tile {self.issued} is there when {barrier} has completed a phase, and not before", 1)
            return Problem(f"product {self.issued} is issued without a wait at {barrier}", cause)
        where, with_parity = self.waits[-1]
        if where != barrier:
            headline = f"for tile {self.issued} the consumer waits at {where}, expected {barrier}"
            cause = "each stage has a barrier of its own: tile i's is full[i % STAGES]"
            return Problem(headline, classic(cause, 1))
        if with_parity != parity:
            headline = (
                f"for tile {self.issued} the consumer waits at {barrier} with parity {with_parity}, expected {parity}"
            )
            cause = f"tile {self.issued} is number {self.issued // self.stages} in stage {stage}, counted from 0"
            return Problem(headline, classic(f"{cause}, and its parity is that of this number", 2))
        return None

    def product(self, where: str) -> Problem | None:
        """What is wrong with a product that reads these tiles."""
        stage = self.issued % self.stages
        expected = f"a_tiles[{stage}] and b_tiles[{stage}]"
        if where != expected:
            cause = classic("tile i lies in stage i % STAGES, of both arrays", 5)
            return Problem(f"product {self.issued} reads {where}, expected {expected}", cause)
        problem = self.waited()
        self.waits.clear()
        self.issued += 1
        return problem

    def arrival(self, where: str) -> Problem | None:
        """What is wrong with an arrival at a barrier."""
        if not where.startswith("empty["):
            cause = classic("full is completed by TMA; the consumer says at empty that it has read a stage", 4)
            return Problem(f"the consumer arrives at {where}, expected a barrier of empty", cause)
        stage = int(where[len("empty[") : -1])
        tile = stage + self.stages * self.released[stage]
        self.released[stage] += 1
        if tile < self.done:
            return None
        if tile >= self.issued:
            cause = classic(
                "a stage is released after its tile's product, once for each tile, and each has a product", 3
            )
            return Problem(f"stage {stage} is released before product {tile} is issued", cause)
        due = self.released.total() - 1  # the tile whose release this should be
        if due < self.done and stage != due % self.stages:
            cause = classic(f"product {due} is done, and has read stage {due % self.stages}", 5)
            return Problem(f"stage {stage} is released while product {tile} may still read it", cause)
        cause = f"a product that is issued reads its tiles later: product {tile} must be waited for before"
        return Problem(f"stage {stage} is released while product {tile} may still read it", classic(cause, 3))

    def end(self, tiles: int) -> Problem | None:
        """Why nothing goes on, or what is missing when it has ended; None where that is not known."""
        if self.stored and self.issued < tiles:
            headline = f"the consumer stores its sum after {self.issued} of {tiles} products"
            return Problem(headline, classic("there is one tile, one wait and one product for each i", 5))
        if self.waits and self.issued == tiles:
            headline = f"the consumer waits at {self.waits[-1][0]} once more after the last of {tiles} tiles"
            return Problem(headline, classic("there is one tile, one wait and one product for each i", 5))
        if self.waits and (problem := self.waited()):
            return problem
        unreleased = next((i for i in range(self.issued) if self.released[i % self.stages] <= i // self.stages), None)
        if self.waits and unreleased is not None and unreleased < self.done:
            stage = unreleased % self.stages
            headline = f"product {unreleased} is done, and nobody arrives at empty[{stage}]: no tile can follow"
            return Problem(headline, classic("each stage is released as soon as its product is done", 4))
        if self.waits and unreleased is not None and self.issued - unreleased == self.stages:
            headline = (
                f"all {self.stages} stages are held by products under way, and the consumer waits for another tile"
            )
            return Problem(
                headline, classic("with one product under way, all earlier ones are done: release theirs", 9)
            )
        return None


def explained(run: Emulator, stages: int, tiles: int) -> Problem | None:
    """The first step of the consumer that the ring does not allow; None if all were right.

    Args:
        run: A program that has run, perhaps not to its end.
        stages: Of the ring.
        tiles: That pass through it.
    """
    steps = Steps(stages)
    for who, what, where, further in run.events:
        problem = None
        if who != CONSUMER:
            continue
        if what == "wait":
            steps.waits.append((where, further))
        elif what == "product":
            problem = steps.product(where)
        elif what == "products done":
            steps.done = max(steps.done, steps.issued - further)
        elif what == "arrive":
            problem = steps.arrival(where)
        elif what == "store":
            steps.stored = True
        if problem:
            return problem
    return steps.end(tiles)


def of_fault(fault: Fault, run: Emulator, stages: int, tiles: int) -> Problem:
    """What a fault is, with the step that led to it where one did."""
    known = explained(run, stages, tiles)
    if known:
        return Problem(known.headline, known.cause, (f"what follows on a GPU: {fault}",))
    if fault.kind == "bounds":
        before = classic("before tile 0 there is no tile to release; in Triton, as in C, -1 % STAGES is -1", 3)
        beyond = classic(
            "tile i lies in stage i % STAGES, and the stage to release is that of the product that is done; below 0, "
            "as in C, Triton's % gives a number below 0",
            5,
        )
        first = [(who, what) for who, what, *_ in run.events].count((CONSUMER, "product")) < 2
        return Problem(str(fault), before if fault.place.startswith("empty[-") and first else beyond)
    return Problem(str(fault), CAUSES.get(fault.kind, ""))
