"""Wrong answers to exercise 5.2, each with one mistake, and what the check must say of it: edits of plain answers."""

from __future__ import annotations

import functools

from .right import ANSWERS

ALLOCATE, APPEND, FORK, FREE = "5.2: allocate", "5.2: append", "5.2: fork", "5.2: free"

wrong = functools.partial(ANSWERS.wrong, ALLOCATE)
wrong("not shared", "references", "share it, before any is taken", edits={"self.pool.share(block)": "pass"})
wrong(
    "shared too late",
    "before any is taken",
    instead="""
        blocks = list(cached)
        while len(blocks) < self.blocks_for(len(tokens)):
            blocks.append(self.pool.take())
        for block in cached:
            self.pool.share(block)
        self.sequences[id] = Sequence(list(tokens), blocks, digests)
        return len(cached) * self.block_size
        """,
)
wrong("blocks for tokens", "this counts blocks", edits={"len(cached) * self.block_size": "len(cached)"})
wrong(
    "never reused",
    "that are in the cache",
    "used again",
    edits={"blocks = list(cached)": "cached, digests, blocks = [], [], []"},
)
wrong("nothing said", "that are in the cache", edits={"len(cached) * self.block_size": "0"})
wrong(
    "a block too many",
    "n tokens need ceil(n / block_size) blocks",
    edits={"self.blocks_for(len(tokens))": "len(tokens) // self.block_size + 1"},
)
wrong(
    "a block too few",
    "n tokens need ceil(n / block_size) blocks",
    edits={"self.blocks_for(len(tokens))": "max(1, len(tokens) // self.block_size)"},
)
wrong(
    "found blocks come on top",
    "those found by their prefix included",
    edits={"while len(blocks)": "while len(blocks) - len(cached)"},
)
wrong("the caller's list", "keeps a list of its own", edits={"Sequence(list(tokens)": "Sequence(tokens"})
wrong(
    "committed at once",
    "once commit says that it is written",
    '"classic wrong answers" 8',
    edits={"return len": "self.commit(id, len(tokens))\n        return len"},
)
wrong(
    "all in the cache",
    "one token at least goes through the model",
    edits={"return len(cached) * self.block_size": "return len(tokens) if cached else 0"},
)

NEWEST = "self.pool._free.move_to_end(next(reversed(self.pool._free)), last=False)"
wrong(
    "newest free block",
    "given back longest ago",
    '"classic wrong answers" 9',
    edits={"blocks.append(": f"{NEWEST}\n            blocks.append("},
)

wrong = functools.partial(ANSWERS.wrong, APPEND)
wrong(
    "copies for nothing",
    "without tokens nothing is written",
    '"classic wrong answers" 2',
    edits={"if tokens and self": "if self"},
)
wrong(
    "forgets for nothing",
    "forgotten when its content changes",
    '"classic wrong answers" 8',
    edits={"elif tokens and": "elif"},
)
wrong(
    "no copy on write",
    "copy it first (copy-on-write)",
    '"classic wrong answers" 2',
    edits={"if tokens and self.writes_shared(id)": "if False"},
)
wrong("pair not returned", "return the pair (old, new)", edits={"copies = [(old, new)]": "pass"})
wrong("pair upside down", "return the pair (old, new)", edits={"(old, new)": "(new, old)"})
wrong("source kept", "held by one table less", edits={"self.pool.give_back(old)": "pass"})
wrong("not forgotten", "must not be found by its old prefix", edits={"self.pool.forget(sequence.blocks[-1])": "pass"})
wrong(
    "tokens not kept",
    "append adds its tokens to the sequence's own",
    edits={
        "sequence.tokens += tokens": "pass",
        "self.blocks_for(len(sequence.tokens))": "self.blocks_for(len(sequence.tokens) + len(tokens))",
    },
)
wrong(
    "the new tokens alone",
    "are the list that was given",
    "append adds its tokens to the sequence's own",
    edits={"sequence.tokens += tokens": "sequence.tokens = tokens"},
)
wrong(
    "a block early",
    "mind a length that fills its last block",
    edits={"self.blocks_for(len(sequence.tokens))": "len(sequence.tokens) // self.block_size + 1"},
)
wrong("one block at most", "n tokens need ceil(n / block_size) blocks", edits={"while len(": "if len("})
wrong(
    "always copies",
    "for nothing",
    edits={"tokens and self.writes_shared(id)": "tokens and len(sequence.tokens) % self.block_size and self.num_free"},
)
wrong("copies full blocks", "for nothing", edits={"self.writes_shared(id)": "self.references(sequence.blocks[-1]) > 1"})

wrong = functools.partial(ANSWERS.wrong, FORK)
wrong("not counted", "held by one more table", edits={"self.pool.share(block)": "pass"})
wrong("one list of tokens", "a list of tokens of its own", edits={"list(original.tokens)": "original.tokens"})
wrong("one list", "a table of its own", edits={"list(original.blocks)": "original.blocks"})
wrong("last block not counted", "held by one more table", edits={"in original.blocks": "in original.blocks[:-1]"})
wrong(
    "one list of digests",
    "a list of digests of its own",
    edits={"list(original.blocks), []": "list(original.blocks), original.digests"},
)
wrong(
    "copies at once",
    "a fork shares all blocks",
    instead="""
        blocks = [self.pool.take() for _ in original.blocks]
        self.sequences[child] = Sequence(list(original.tokens), blocks, [])
        """,
)

wrong = functools.partial(ANSWERS.wrong, FREE)
wrong("leak", "given back once", '"classic wrong answers" 1', edits={"self.pool.give_back(block)": "pass"})
wrong("last block leaks", "given back once", edits={"in sequence.blocks[::-1]": "in sequence.blocks[:-1]"})
wrong("not forgotten", "a double free an error", edits={"del self.sequences[id]": "pass"})
wrong(
    "shared blocks kept",
    "given back once",
    edits={"self.pool.give_back(block)": "if self.references(block) == 1:\n                self.pool.give_back(block)"},
)
wrong(
    "beginnings first",
    "free gives the last block of a table back first",
    '"classic wrong answers" 9',
    edits={"in sequence.blocks[::-1]": "in sequence.blocks"},
)
