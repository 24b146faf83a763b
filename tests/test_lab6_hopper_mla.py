"""Lab 6's attention over latents for Hopper: in the emulator of Gluon, and compiled for sm_90."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from gluon_emulator import Emulator, kernel_of
from paged_cases import assert_close, normal, paged

from solutions.lab6_frontiers import hopper_mla_decode
from solutions.lab6_frontiers.mla_torch import latent_attention
from utils.gluon.machine import Descriptor, Pointer

LATENT, ROPE = hopper_mla_decode.LATENT_DIM, hopper_mla_decode.ROPE_DIM
KERNEL = Path(hopper_mla_decode.__file__)
CAPSTONE = KERNEL.parents[1] / "capstone_hopper"


class Machine(Emulator):
    """The emulator with a store that converts numbers to the type of what they are stored in, as Gluon's does.

    Args:
        slow: a partition that pauses long behind each barrier, or ``products``: they end when they are waited for.
    """

    def __init__(self, seed: int, slow: str) -> None:
        super().__init__(seed)
        self.slow = slow

    def wait(self, *arguments, **more):
        super().wait(*arguments, **more)
        for _ in range(20 * (self.machine.current == self.slow)):
            self.machine.pause()

    def multiply(self, *arguments, **more):
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
        for part in range(parts):
            for block in range(-(-H // 64)):
                machine.program = (block, part, s)
                machine.run(lambda: names["hopper_mla_decode_kernel"](
                    Descriptor(q_latent, [1, 64, 256]), Descriptor(q_rope, [1, 64, 64]),
                    Descriptor(cache, [1, 64, 256]), Descriptor(cache, [1, 64, 64]), Pointer(tables), Pointer(lengths),
                    Pointer(o), Pointer(lse), scale * 1.4426950408889634, *tables.stride(), *lengths.stride(), H, parts,
                    S=2, BLOCK_SIZE=block_size, SPLIT=parts > 1, REGISTERS=216,
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
SLOW = ("", "left", "right", "producer", "products")
ORDERS = [{"seed": seed, "slow": slow} for seed in range(20) for slow in SLOW]


@pytest.mark.parametrize("order", ORDERS[:15], ids=lambda order: "{seed}{slow}".format(**order))
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


#: What keeps left, right and the warp that loads in order: (function, line, what stands there instead).
BARRIERS = [
    ("producer", "mbarrier.wait(empty.index(s), parity)", "pass"),
    ("producer", "mbarrier.wait(empty.index(S + s), parity)", "pass"),
    ("hide_rows", "fence_async_shared()", "pass"),
    ("begin_scores", "mbarrier.wait(full.index(s), phase)", "pass"),
    ("begin_scores", "mbarrier.wait(full.index(S + s), phase)", "pass"),
    ("end_scores", "mbarrier.wait(full.index(2 * S + s), (i // S) & 1)", "pass"),
    ("hand_over", "mbarrier.wait(p_empty.index(0), (i & 1) ^ 1)", "pass"),
    ("hand_over", "fence_async_shared()", "pass"),
    ("hand_over", "mbarrier.arrive(p_full.index(0))", "pass"),
    ("left", "mbarrier.wait(q_tiles[3].index(0), 0)", "pass"),
    ("left", "out = warpgroup_mma_wait(2, [out])", "out = warpgroup_mma_wait(3, [out])"),
    ("left", "mbarrier.arrive(empty.index(S + last))", "pass"),
    ("left", "mbarrier.wait(p_empty.index(0), (count & 1) ^ 1)", "pass"),
    ("right", "mbarrier.wait(p_full.index(0), i & 1)", "pass"),
    ("right", "mbarrier.wait(p_full.index(0), count & 1)", "pass"),
    ("right", "mbarrier.arrive(p_empty.index(0))", "pass"),
    ("right", "mbarrier.arrive(empty.index(s))", "pass"),
]


def without(function: str, line: str, instead: str) -> str:
    """The kernel's source with another line in one function."""
    before, name, rest = KERNEL.read_text(encoding="utf-8").partition(f"def {function}(")
    body, decorator, after = rest.partition("@gluon.jit")
    assert name and body.count(line) == 1
    return before + name + body.replace(line, instead) + decorator + after


@pytest.mark.parametrize("change", BARRIERS, ids=lambda change: "-".join(change[:2]))
def test_a_kernel_without_one_of_its_barriers_is_found_out(change, tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(without(*change), encoding="utf-8")
    with pytest.raises(AssertionError):
        for order in ORDERS:
            o, _, *given = emulated([1, 200, 333], 5, 1, **order, path=path)
            holds(o, given)
