"""The capstone's forward kernel in whatever order its barriers allow: ragged lengths, grouped heads, empty rows."""

import types

import gluon_emulator
import pytest
import torch
from gluon_machine import Descriptor, Pointer

from utils.fingerprint import ROOT

launch = pytest.importorskip("solutions.capstone_hopper.launch", reason="this Triton has no Gluon")
#: (batch, query heads, key heads, queries, keys)
SHAPES = [(1, 2, 1, 1, 77), (2, 2, 2, 300, 300), (1, 2, 2, 65, 515), (1, 2, 1, 515, 65), (1, 3, 3, 200, 384)]


def exact(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[3] ** -0.5
    if causal:
        queries, keys = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries), float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse.where(lse.isfinite(), 0)[..., None]).exp() @ v, lse


class Emulated:
    """Stands where a kernel is launched; each program runs in the emulator."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __getitem__(self, grid):
        return lambda *arguments, num_warps, maxnreg, **constants: self.run(grid[0], arguments, constants)

    def run(self, programs: int, arguments: tuple, constants: dict) -> None:
        emulator = gluon_emulator.Emulator(self.seed)
        names = gluon_emulator.kernel_of(ROOT / "solutions" / "capstone_hopper" / "forward.py", emulator.names())
        arguments = [self.argument(each) for each in arguments]
        for emulator.program in range(programs):
            emulator.run(lambda: names["hopper_forward_kernel"](*arguments, **constants))

    @staticmethod
    def argument(each):
        """A launch's argument as the emulator takes it."""
        if hasattr(each, "block_shape"):
            return Descriptor(each.base, each.block_shape)
        return Pointer(each) if isinstance(each, torch.Tensor) else each


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_forward_kernel_is_right_in_whatever_order_things_happen(monkeypatch, head_dim, causal):
    card = types.SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for seed, (batch, heads, kv_heads, queries, keys) in enumerate(SHAPES):
        monkeypatch.setattr(launch, "hopper_forward_kernel", Emulated(seed))
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn((batch, heads, queries, head_dim), generator=generator).bfloat16()
        k, v = (torch.randn((batch, kv_heads, keys, head_dim), generator=generator).bfloat16() for _ in "kv")
        o, lse = launch.hopper_forward(q, k, v, causal, head_dim**-0.5)
        want, want_lse = exact(q, k, v, causal)
        assert (o.double() - want).abs().max() < 2e-2
        assert torch.equal(lse.isinf(), want_lse.isinf())
        assert (lse.double() - want_lse)[want_lse.isfinite()].abs().amax() < 1e-3
