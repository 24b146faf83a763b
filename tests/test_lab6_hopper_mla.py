"""Lab 6's attention over latents for Hopper: in the emulator of Gluon, and compiled for sm_90."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from gluon_emulator import Emulator, kernel_of
from paged_cases import assert_close, normal, paged
from parameters import thorough_but

from solutions.lab6_frontiers import hopper_mla_decode
from solutions.lab6_frontiers.mla_torch import latent_attention
from utils.gluon.machine import Descriptor, Pointer

LATENT, ROPE = hopper_mla_decode.LATENT_DIM, hopper_mla_decode.ROPE_DIM
KERNEL = Path(hopper_mla_decode.__file__)
CAPSTONE = KERNEL.parents[1] / "capstone_hopper"


class Machine(Emulator):
    """The emulator, which also sees that the warpgroups take turns at the tensor cores.

    Its store converts numbers to the type of what they are stored in, as Gluon's does.

    Args:
        slow: a partition that pauses long behind each barrier, or ``products``: they end when they are waited for, or
            ``copies``: some arrive long after those that began later.
    """

    def __init__(self, seed: int, slow: str) -> None:
        super().__init__(seed)
        self.slow = slow

    def begin(self, program: tuple[int, int, int], count: int) -> None:
        """The next program has ``count`` tiles."""
        self.program, self.count, self.begun = program, count, Counter()

    def ended(self, partition: str) -> int:
        """Products of a partition that are no longer under way."""
        return self.begun[partition] - len(self.products.get(partition, ()))

    def in_turn(self) -> None:
        """A product of left or right is not issued before its turn.

        Left (``summing 0``) starts a tile when all but one of the four products of the next tile's scores are done, and
        right when the first of left's two is. A kernel without turns is slower but right: only this finds it.
        """
        tile, second = divmod(self.begun[self.machine.current], 2)
        if self.machine.current == "summing 0" and not second:
            assert self.ended("scoring") >= min(4 * (tile + 2) - 1, 4 * self.count), "left before its turn"
        if self.machine.current == "summing 1" and not second:
            assert self.ended("summing 0") >= 2 * tile + 1, "right before its turn"
        self.begun[self.machine.current] += 1

    def wait(self, *arguments, **more):
        super().wait(*arguments, **more)
        for _ in range(20 * (self.machine.current == self.slow)):
            self.machine.pause()

    def load_tile(self, *arguments, **more):
        if self.slow == "copies" and self.machine.random.random() < 0.5:
            self.machine.add = lambda end: delattr(self.machine, "add") or self.late(end, 20)  # the next action
        super().load_tile(*arguments, **more)

    def late(self, end, draws: int) -> None:
        """Something that happens when it has been drawn so many times."""
        self.machine.add(end if draws == 1 else lambda: self.late(end, draws - 1))

    def multiply(self, *arguments, **more):
        self.in_turn()
        if self.slow == "products":
            self.machine.add = lambda end: delattr(self.machine, "add")  # the next action is not one of its own
        return super().multiply(*arguments, **more)

    def store(self, pointer, value, mask=True):
        super().store(pointer, torch.as_tensor(value).to(pointer.tensor.dtype), mask)


def emulated(contexts, H, parts, seed, block_size=64, slow="", path=KERNEL):
    """Outputs (S, H, parts, 512) and logsumexps (S, H, parts) by the kernel of ``path``, and what it was given."""
    given = paged(contexts, 1, LATENT + ROPE, block_size, torch.bfloat16, "token-major", seed)
    cache, S = given.k_cache.squeeze(2).cpu(), len(contexts)
    q_latent, q_rope = (normal(S, H, dim, dtype=torch.bfloat16, seed=seed + dim).cpu() for dim in (LATENT, ROPE))
    scale = 1 / math.sqrt(LATENT + ROPE)
    o = torch.full((S, H, parts, LATENT), float("nan"), dtype=torch.float32 if parts > 1 else torch.bfloat16)
    lse = torch.full((S, H, parts), float("nan"))
    tables, lengths = given.block_tables.cpu(), given.context_lens.cpu()
    machine = Machine(seed, slow)
    names = kernel_of(CAPSTONE / "softmax.py", machine.names(), constants=False)
    for name in ("barriers", "by_eights"):
        names[name] = kernel_of(CAPSTONE / "parts.py", dict(names), constants=False)[name]
    names = kernel_of(path, names, constants=False)
    for s in range(S):
        tiles = -(-contexts[s] // 64)
        for part in range(parts):
            for block in range(-(-H // 64)):
                machine.begin((block, part, s), tiles * (part + 1) // parts - tiles * part // parts)
                machine.run(lambda: names["hopper_mla_decode_kernel"](
                    Descriptor(q_latent, [1, 64, 256]), Descriptor(q_rope, [1, 64, 64]),
                    Descriptor(cache, [1, 64, 256]), Descriptor(cache, [1, 64, 64]), Pointer(tables), Pointer(lengths),
                    Pointer(o), Pointer(lse), scale * 1.4426950408889634, *tables.stride(), *lengths.stride(), H, parts,
                    S=hopper_mla_decode.STAGES, BLOCK_SIZE=block_size, SPLIT=parts > 1,
                    REGISTERS=hopper_mla_decode.SUMS,
                ))  # fmt: skip
    tokens = [each.squeeze(1).cpu() for each in given.keys]
    return o, lse, q_latent, q_rope, tokens, scale


def in_torch(q_latent, q_rope, tokens, scale, dtype):
    found = torch.zeros(q_latent.shape, dtype=dtype)
    for s, each in enumerate(tokens):
        if len(each):
            latents, keys = each.to(dtype).split([LATENT, ROPE], 1)
            found[s] = latent_attention(q_latent[s].to(dtype), q_rope[s].to(dtype), latents, keys, scale)
    return found


def holds(o, given):
    assert_close(o.squeeze(2), in_torch(*given, torch.float64), in_torch(*given, torch.bfloat16))


#: Which partition goes on is drawn from a seed, with each of them slow, or the tensor cores, or nothing.
SLOW = ("", "scoring", "summing 0", "summing 1", "producer", "products", "copies")
ORDERS = [{"seed": seed, "slow": slow} for seed in range(20) for slow in SLOW]


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", thorough_but(ORDERS[:21], *ORDERS[:21:5]), ids=lambda order: "{seed}-{slow}".format(**order)
)
def test_ragged_contexts_in_any_order_of_events(order):
    o, _, *given = emulated([0, 1, 64, 130, 333], 5, 1, **order)
    holds(o, given)


def test_more_heads_than_a_program_has_and_blocks_of_two_tiles():
    o, _, *given = emulated([200], 70, 1, 4, block_size=128)
    holds(o, given)


def test_parts_weighted_by_their_logsumexps_are_the_whole():
    o, lse, *given = emulated([70, 300], 3, 3, 5)
    assert (lse[0, :, 0] == -math.inf).all()  # two tiles in three parts
    whole = (o * lse.softmax(-1)[..., None]).sum(2).bfloat16()
    assert_close(whole, in_torch(*given, torch.float64), in_torch(*given, torch.bfloat16))


#: What keeps the partitions in order: (function, line, what stands there instead).
BARRIERS = [
    ("producer", "mbarrier.wait(right_empty.index(s), (((i + 1) // S) & 1) ^ 1)", "pass"),
    ("producer", "mbarrier.wait(rope_empty.index(r), (((i + 1) // 2) & 1) ^ 1)", "pass"),
    ("producer", "mbarrier.wait(left_empty.index(p), ((i // 2) & 1) ^ 1)", "pass"),
    ("hide_rows", "fence_async_shared()", "pass"),
    ("take_queries", "mbarrier.wait(right_full.index(0), 0)", "pass"),
    ("take_queries", "mbarrier.wait(rope_full.index(0), 0)", "pass"),
    ("take_queries", "mbarrier.arrive(right_empty.index(0))", "pass"),
    ("take_queries", "mbarrier.arrive(rope_empty.index(0))", "pass"),
    ("take_queries", "mbarrier.wait(q_full.index(0), 0)", "pass"),
    ("begin_scores", "mbarrier.wait(right_full.index(s), ((i + 1) // S) & 1)", "pass"),
    ("begin_scores", "mbarrier.wait(rope_full.index(r), ((i + 1) // 2) & 1)", "pass"),
    ("begin_scores", "mbarrier.wait(left_full.index(p), (i // 2) & 1)", "pass"),
    ("hand_over", "mbarrier.wait(p_empty.index(p), ((i // 2) & 1) ^ 1)", "pass"),
    ("hand_over", "fence_async_shared()", "pass"),
    ("hand_over", "mbarrier.arrive(p_full.index(p))", "pass"),
    ("scoring", "warpgroup_mma_wait(0, [begin_scores(held, rings, 0, SCORES, S)])",
     "warpgroup_mma_wait(1, [begin_scores(held, rings, 0, SCORES, S)])"),
    ("scoring", "mbarrier.arrive(rope_empty.index(1))", "pass"),
    ("scoring", "warpgroup_mma_wait(1, [begin_scores(held, rings, i, SCORES, S)])",
     "warpgroup_mma_wait(2, [begin_scores(held, rings, i, SCORES, S)])"),
    ("scoring", "mbarrier.arrive(turn_left.index((i - 1) % 2))", "pass"),
    ("scoring", "scores = warpgroup_mma_wait(0, [scores])", "scores = warpgroup_mma_wait(1, [scores])"),
    ("scoring", "mbarrier.arrive(rope_empty.index((i + 1) % 2))", "pass"),
    ("scoring", "mbarrier.arrive(turn_left.index((count - 1) % 2))", "pass"),
    ("scoring", "mbarrier.wait(p_empty.index(count % 2), ((count // 2) & 1) ^ 1)", "pass"),
    ("scoring", "mbarrier.arrive(p_full.index(count % 2))", "pass"),
    ("summing", "mbarrier.wait(p_full.index(p), (i // 2) & 1)", "pass"),
    ("summing", "mbarrier.wait(turn_left.index(p), (i // 2) & 1)", "pass"),
    ("summing", "mbarrier.wait(turn_right.index(p), (i // 2) & 1)", "pass"),
    ("summing", "warpgroup_mma_wait(1, [one, two])", "warpgroup_mma_wait(2, [one, two])"),
    ("summing", "mbarrier.arrive(turn_right.index(p))", "pass"),
    ("summing", "one, two = warpgroup_mma_wait(0, [one, two])", "one, two = warpgroup_mma_wait(1, [one, two])"),
    ("summing", "mbarrier.arrive(p_empty.index(p))", "pass"),
    ("summing", "mbarrier.arrive(empty.index(s))", "pass"),
    ("summing", "mbarrier.wait(p_full.index(count % 2), (count // 2) & 1)", "pass"),
]  # fmt: skip


def without(function: str, line: str, instead: str) -> str:
    """The kernel's source with another line in one function."""
    before, name, rest = KERNEL.read_text(encoding="utf-8").partition(f"def {function}(")
    body, decorator, after = rest.partition("@gluon.jit")
    assert name and body.count(line) == 1
    return before + name + body.replace(line, instead) + decorator + after


@pytest.mark.slow
@pytest.mark.parametrize("change", thorough_but(BARRIERS, *BARRIERS[::6]), ids=lambda change: "-".join(change[:2]))
def test_a_kernel_without_one_of_its_barriers_is_found_out(change, tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(without(*change), encoding="utf-8")
    with pytest.raises(AssertionError):
        for order in ORDERS:
            o, _, *given = emulated([1, 200, 333], 5, 1, **order, path=path)
            holds(o, given)


def test_queries_that_tma_cannot_read_are_copied():
    numbers = torch.randn(1 + 2 * 3 * 8, dtype=torch.bfloat16)
    shifted = numbers[1:].view(2, 3, 8)
    assert shifted.is_contiguous() and shifted.data_ptr() % 16
    for queries in (shifted, numbers[:48].view(2, 8, 3).transpose(1, 2)):
        copy = hopper_mla_decode.queries_for_tma(queries)
        assert copy.data_ptr() % 16 == 0 and copy.is_contiguous() and torch.equal(copy, queries)
    heads_first = copy.transpose(0, 1)  # rows without gaps, whole units of 16 bytes apart
    assert hopper_mla_decode.queries_for_tma(heads_first).data_ptr() == heads_first.data_ptr()


def test_a_cache_without_blocks_goes_to_the_kernel_for_every_gpu():
    q, q_rope = torch.zeros(1, 1, LATENT, dtype=torch.bfloat16), torch.zeros(1, 1, ROPE, dtype=torch.bfloat16)
    cache = torch.zeros(2, 64, LATENT + ROPE, dtype=torch.bfloat16)
    assert hopper_mla_decode.why_portable(q, q_rope, cache, 1.0) == ""
    assert hopper_mla_decode.why_portable(q, q_rope, cache[:0], 1.0) == "the cache has no blocks"
