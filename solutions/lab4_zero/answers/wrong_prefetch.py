"""Wrong answers to exercise 4.10, ZeRO-3 with prefetch: edits of the plain answers."""

from __future__ import annotations

from .right import ANSWERS

wrong = ANSWERS.wrong
START, ARRIVE, HOOKS, BEFORE = (
    "4.10: start to gather",
    "4.10: wait for the weights",
    "4.10: the hooks of a block",
    "4.10: before a block computes",
)
GATHER = "self.pending = all_gather(self.full, self.shard, self.group)"
wrong(
    BEFORE,
    "nothing ahead",
    "forward pass: block 1's gather starts after block 0 has computed",
    '"classic wrong answers" 1',
    edits={"blocks[ahead].start()": "pass"},
)
wrong(
    BEFORE,
    "ahead in the forward pass alone",
    "backward pass: block 4's gather starts after block 5 has computed",
    '"classic wrong answers" 1',
    edits={"blocks[ahead].start()": "_ = None if self.in_backward else blocks[ahead].start()"},
)
wrong(
    HOOKS,
    "ahead after the forward pass of a block",
    "gather starts after block 0 has computed",
    '"classic wrong answers" 1',
    edits={
        "unit.free()": "unit.free(); k + 1 < len(self.blocks) and self.blocks[k + 1].start()",
        "def before(*_):\n            self._before(k)": (
            "def before(*_):\n            self._before(k) if self.in_backward else unit.gather()"
        ),
    },
)
wrong(
    START,
    "waits at once",
    "block 1 is waited for before block 0 computes",
    '"classic wrong answers" 2',
    edits={GATHER: "all_gather(self.full, self.shard, self.group).wait()"},
)
wrong(
    BEFORE,
    "waits for the next one too",
    "block 1 is waited for before block 0 computes",
    '"classic wrong answers" 2',
    edits={"blocks[ahead].start()": "blocks[ahead].gather()"},
)
wrong(
    ARRIVE,
    "never waited for",
    "wait for a block's gather before it computes",
    '"classic wrong answers" 3',
    edits={"self.pending.wait()": "pass"},
)
wrong(
    BEFORE,
    "waited for after the computation",
    "block 0 computes (forward) before its gather has been waited for",
    '"classic wrong answers" 3',
    edits={"blocks[k].gather()": "blocks[k].start()"},
)
wrong(
    BEFORE,
    "not gathered",
    "a weight is used while its memory is freed",
    '"classic wrong answers" 3',
    instead="pass",
)
wrong(
    BEFORE,
    "two ahead",
    "3 blocks have memory while block 0 computes (forward): 0, 1, 2",
    '"classic wrong answers" 4',
    edits={"blocks[ahead].start()": "[block.start() for block in blocks[k + 1 : k + 3]]"},
)
wrong(
    BEFORE,
    "all at the start",
    "6 blocks have memory while block 0 computes (forward)",
    '"classic wrong answers" 4',
    edits={"blocks[ahead].start()": "[block.start() for block in blocks]"},
)
wrong(
    BEFORE,
    "forward order in the backward pass",
    "is gathered again in the backward pass, after it has computed (backward)",
    '"classic wrong answers" 5',
    edits={"k - 1": "k + 1"},
)
wrong(
    BEFORE,
    "backward order in the forward pass",
    "block 0 is gathered again in the forward pass, after it has computed (forward)",
    '"classic wrong answers" 5',
    edits={"k + 1": "k - 1"},
)
wrong(
    HOOKS,
    "freed after the second forward pass",
    "its weights stay for its own backward",
    '"classic wrong answers" 6',
    edits={"if not self.in_backward:": "if True:"},
)
wrong(
    HOOKS,
    "second forward pass taken for the first",
    "is gathered again in the backward pass, after it has computed (backward)",
    '"classic wrong answers" 6',
    edits={
        "forward_pre_hook(before)": (
            "forward_pre_hook(lambda *_: [b.start() for b in self.blocks[k : k + 2]] and unit.gather())"
        )
    },
)
wrong(
    START,
    "asks for what is pending alone",
    "is gathered again in the backward pass, while it has its weights",
    '"classic wrong answers" 7',
    edits={"if not self.has_memory:": "if self.pending is None:"},
)
wrong(
    ARRIVE,
    "gathered again",
    "block 0 is gathered 2 times in the forward pass",
    '"classic wrong answers" 7',
    instead="""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        self.full.untyped_storage().resize_(self.full.nbytes)
        all_gather(self.full, self.shard, self.group).wait()
        """,
)
wrong(
    HOOKS,
    "not freed after the forward pass",
    "3 blocks have memory while block 1 computes (forward): 0, 1, 2",
    '"classic wrong answers" 8',
    edits={"unit.free()": "pass"},
)
wrong(
    START,
    "ranks of the whole job",
    "only a group of some ranks goes wrong",
    '"classic wrong answers" 9',
    edits={"self.shard, self.group": "self.shard, None"},
)
