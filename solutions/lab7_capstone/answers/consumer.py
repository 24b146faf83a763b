"""Answers to exercise 7.1: a right one that counts stage and phase along, and what goes wrong on the way to it."""

from __future__ import annotations

from utils.checks.answers import Answers

ANSWERS = Answers()
PLACE = "7.1: the consumer"

WAIT = "mbarrier.wait(full.index(stage), phase)"
ISSUE = (
    "acc = warpgroup_mma(a_tiles.index(stage), b_tiles.index(stage).permute((1, 0)), acc, use_acc=i > 0, is_async=True)"
)
DONE, RELEASE = "acc = warpgroup_mma_wait(1, deps=[acc])", "mbarrier.arrive(empty.index(before), pred=i > 0)"
LAST, SUM = "acc = warpgroup_mma_wait(0, deps=[acc])", "c_tile.store(acc.to(gl.bfloat16))"
TWO_BEFORE = "mbarrier.arrive(empty.index((i + STAGES - 2) % STAGES), pred=i > 1)"
FENCE, STORE = "fence_async_shared()", "tma.async_copy_shared_to_global(c_desc, [row, column], c_tile)"
ANSWERS.right[PLACE] = f"""\
stage = 0
phase = 0
before = STAGES - 1
for i in range(num_tiles):
    {WAIT}
    {ISSUE}
    {DONE}
    {RELEASE}
    before = stage
    stage = stage + 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
{LAST}
{SUM}
{FENCE}
{STORE}
tma.store_wait(0)
"""


def wrong(name: str, edits: dict[str, str], *says: str, classic: int = 0) -> None:
    """Edits of the right answer, and what the check says: words, and the number in the notebook's list."""
    ANSWERS.wrong(PLACE, name, *says, *([f'"classic wrong answers" {classic}'] if classic else []), edits=edits)


wrong("no wait", {WAIT: "pass"}, "product 0 is issued without a wait at full[0]", classic=1)
wrong("waits at one barrier", {WAIT: "mbarrier.wait(full.index(0), phase)"},
      "for tile 1 the consumer waits at full[0], expected full[1]", classic=1)  # fmt: skip
wrong("waits at empty", {WAIT: "mbarrier.wait(empty.index(stage), phase ^ 1)"}, "waits at empty[0], expected full[0]",
      classic=1)  # fmt: skip
wrong("parity turned round", {WAIT: "mbarrier.wait(full.index(stage), phase ^ 1)"}, "expected 0", classic=2)
wrong("parity of the tile", {WAIT: "mbarrier.wait(full.index(stage), i & 1)"},
      "for tile 1 the consumer waits at full[1] with parity 1, expected 0", classic=2)  # fmt: skip
wrong("parity never changes", {"phase = phase ^ 1": "pass"}, "with parity 0, expected 1",
      "is number 1 in stage 0, counted from 0", classic=2)  # fmt: skip
wrong("the round itself as parity", {WAIT: "mbarrier.wait(full.index(stage), i // STAGES)"},
      "a parity is 0 or 1", "is waited for with 2", classic=2)  # fmt: skip
wrong("released at once", {DONE: "mbarrier.arrive(empty.index(stage))", RELEASE: DONE},
      "while product 0 may still read it", "product 0 must be waited for before", classic=3)  # fmt: skip
wrong("the stage just issued is released", {RELEASE: "mbarrier.arrive(empty.index(stage))"},
      "while product 0 may still read it", classic=3)  # fmt: skip
wrong("the first stage is always released", {RELEASE: "mbarrier.arrive(empty.index(0), pred=i > 0)"},
      "while product 2 may still read it", "product 1 is done, and has read stage 1", classic=5)  # fmt: skip
wrong("released before tile 0", {RELEASE: "mbarrier.arrive(empty.index((i - 1) % STAGES))"},
      "empty[-1] does not exist: empty has 2", "-1 % STAGES is -1", classic=3)  # fmt: skip
wrong("released twice", {RELEASE: f"{RELEASE}\n    {RELEASE}"},
      "before product 2 is issued", "once for each tile", classic=3)  # fmt: skip
wrong("never released", {RELEASE: "pass"}, "product 0 is done, and nobody arrives at empty[0]",
      "deadlock: consumer waits at full[0] with parity 1 for phase 1", "producer waits at empty[0]",
      classic=4)  # fmt: skip
wrong("one stage only is released", {"pred=i > 0": "pred=i == 1"}, "nobody arrives at empty[1]", classic=4)
wrong("arrives at full", {RELEASE: "mbarrier.arrive(full.index(before), pred=i > 0)"}, "arrives at full[0]", classic=4)
wrong("always the first stage", {"stage = stage + 1": "pass"}, "product 1 reads a_tiles[0] and b_tiles[0]", classic=5)
wrong("reads the first stage", {"a_tiles.index(stage), b_tiles.index(stage)": "a_tiles.index(0), b_tiles.index(0)"},
      "product 1 reads a_tiles[0] and b_tiles[0], expected a_tiles[1] and b_tiles[1]", classic=5)  # fmt: skip
wrong("b of another stage", {"b_tiles.index(stage)": "b_tiles.index(0)"}, "product 1 reads a_tiles[1] and b_tiles[0]",
      classic=5)  # fmt: skip
wrong(
    "one tile too many", {"range(num_tiles)": "range(num_tiles + 1)"}, "once more after the last of 2 tiles", classic=5
)
wrong("one tile too few", {"range(num_tiles)": "range(num_tiles - 1)"}, "stores its sum after 1 of 2 products",
      classic=5)  # fmt: skip
wrong("starts anew", {"use_acc=i > 0": "use_acc=False"}, "product 1 does not add to the sum", classic=6)
wrong("never starts to add", {"use_acc=i > 0": "use_acc=i > 1"}, "product 1 does not add", classic=6)
wrong("result thrown away", {ISSUE: ISSUE.removeprefix("acc = ")}, "product 1 does not add", classic=6)
wrong("what the wait returns is thrown away", {DONE: DONE.removeprefix("acc = ")}, "does not compile it for sm_90",
      "keep what warpgroup_mma_wait returns")  # fmt: skip
wrong("last product not waited for", {LAST: "pass"}, "is read (.to) while a product that adds to it is under way",
      classic=7)  # fmt: skip
wrong("one product under way at the end", {LAST: LAST.replace("0", "1")}, "is read (.to) while", classic=7)
wrong("no fence", {FENCE: "pass"}, "TMA reads c_tile without a fence", classic=8)
wrong("fence before the store", {SUM: FENCE, FENCE: SUM},
      "without a fence after the stores", classic=8)  # fmt: skip
wrong("the store is not waited for", {"tma.store_wait(0)": "pass"}, "before TMA has read the tile", classic=8)
wrong("column before row", {"[row, column]": "[column, row]"}, "program (0, 1) stores c_tile at [128, 0]", classic=8)
wrong("in turn", {DONE: DONE.replace("1", "0")}, "expected product 0 to be under way", classic=9)
wrong("synchronous products", {", is_async=True": ""}, "expected product 0 to be under way", classic=9)
wrong("two products under way", {DONE: DONE.replace("1", "2"), RELEASE: TWO_BEFORE},
      "all 2 stages are held by products under way", classic=9)  # fmt: skip
wrong("b as it lies", {".permute((1, 0))": ""}, "got (128, 64) by (128, 64)", "consumer: acc = warpgroup_mma(")
wrong("nothing is stored in c_tile", {SUM: "pass"}, "TMA stores c_tile, which nothing has written", classic=8)
wrong("the tile's own number as stage", {"before = stage\n": "before = i\n"}, "empty[2] does not exist", classic=5)
wrong("the tile's number taken from 1", {RELEASE: "mbarrier.arrive(empty.index((1 - i) % STAGES), pred=i > 0)"},
      "empty[-1] does not exist: empty has 2", "a number below 0", classic=5)  # fmt: skip
wrong("two tiles before is released", {RELEASE: "mbarrier.arrive(empty.index((i - 2) % STAGES), pred=i > 0)"},
      "empty[-1] does not exist", "that of the product that is done", classic=5)  # fmt: skip
wrong("waits for the tile before", {WAIT: "mbarrier.wait(full.index((i - 1) % STAGES), phase)"},
      "full[-1] does not exist", "tile i lies in stage i % STAGES", classic=5)  # fmt: skip
wrong("what Gluon does not know", {"acc.to(gl.bfloat16)": "acc.bfloat16()"},
      "Triton does not compile it for sm_90", "acc.bfloat16()")  # fmt: skip
wrong("the sum is read in the loop", {DONE: f"{DONE}\n    acc = acc * 0.5"}, "is read (mul)", classic=7)
