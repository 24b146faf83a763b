"""Right answers to exercise 7.1 that few would write: other ways to count stages, phases and rounds."""

from __future__ import annotations

from utils.checks.answers import Answers

from .consumer import DONE, PLACE, RELEASE

ANSWERS = Answers()
COUNTING = """\
    before = stage
    stage = stage + 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
"""
ANSWERS.also_right("a phase from the number of the tile", {
    PLACE: {"for i in range(num_tiles):\n": "for i in range(num_tiles):\n    stage = i % STAGES\n"
                                           "    phase = (i // STAGES) % 2\n    before = (i + STAGES - 1) % STAGES\n",
            COUNTING: ""},
})  # fmt: skip
ANSWERS.also_right("one arrival in a condition", {
    PLACE: {RELEASE: "if i > 0:\n        mbarrier.arrive(empty.index(before))"},
})  # fmt: skip
ANSWERS.also_right("rounds with a name", {
    PLACE: {"for i in range(num_tiles):\n": "for i in range(num_tiles):\n    done_rounds = i // STAGES\n"
                                           "    stage = i - done_rounds * STAGES\n    phase = done_rounds & 1\n",
            RELEASE: "if i != 0:\n        mbarrier.arrive(empty.index((stage - 1 + STAGES) % STAGES))", COUNTING: ""},
})  # fmt: skip
ANSWERS.also_right("a ring by subtraction", {
    PLACE: {"if stage == STAGES:\n        stage = 0\n        phase = phase ^ 1":
            "if stage >= STAGES:\n        stage -= STAGES\n        phase = 1 - phase",
            "pred=i > 0": "pred=i >= 1", DONE: "acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])"},
})  # fmt: skip
