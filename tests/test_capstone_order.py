"""The capstone's kernels in whatever order their barriers allow: ragged lengths, grouped heads, empty rows."""

import itertools
import types

import gluon_emulator
import pytest
import torch

from utils import reference
from utils.fingerprint import ROOT
from utils.gluon.machine import Descriptor, Pointer

pytestmark = pytest.mark.slow

launch = pytest.importorskip("solutions.capstone_hopper.launch", reason="this Triton has no Gluon")
FORWARD = launch.hopper_forward_kernel
BACKWARD = launch.hopper_backward_kernel
#: (batch, query heads, key heads, queries, keys)
SHAPES = [(1, 2, 1, 1, 77), (2, 2, 2, 300, 300), (1, 2, 2, 65, 515), (1, 2, 1, 515, 65), (1, 3, 3, 200, 384)]


def tensors(seed: int, batch: int, heads: int, kv_heads: int, queries: int, keys: int, head_dim: int):
    """q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    return [torch.randn((batch, *shape, head_dim), generator=generator).bfloat16() for shape in shapes]


class Emulated:
    """Stands where a kernel is launched; each program runs in the emulator."""

    def __init__(self, kernel, seed: int) -> None:
        self.name, self.seed = kernel.fn.__name__, seed
        self.path = ROOT.joinpath(*kernel.fn.__module__.split(".")).with_suffix(".py")

    def __getitem__(self, grid):
        return lambda *arguments, num_warps, maxnreg, **constants: self.run(grid, arguments, constants)

    def run(self, grid: tuple[int, ...], arguments: tuple, constants: dict) -> None:
        emulator = gluon_emulator.Emulator(self.seed)
        names = gluon_emulator.kernel_of(self.path, emulator.names())
        arguments = [self.argument(each) for each in arguments]
        for emulator.program in itertools.product(*map(range, grid)):
            emulator.run(lambda: names[self.name](*arguments, **constants))

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
        monkeypatch.setattr(launch, "hopper_forward_kernel", Emulated(FORWARD, seed))
        q, k, v, _ = tensors(seed, batch, heads, kv_heads, queries, keys, head_dim)
        o, lse = launch.hopper_forward(q, k, v, causal, head_dim**-0.5)
        want, want_lse = reference.attention(q.double(), k.double(), v.double(), causal)
        assert (o.double() - want).abs().max() < 2e-2
        assert torch.equal(lse.isinf(), want_lse.isinf())
        assert (lse.double() - want_lse)[want_lse.isfinite()].abs().amax() < 1e-3


@pytest.mark.parametrize("slack", [0, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_whose_maximum_grows_by_far_are_rescaled(monkeypatch, head_dim, slack):
    """From the last tile of keys to the first, scores of every third row grow, and all of the others' stay small."""
    card = types.SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(launch, "hopper_forward_kernel", Emulated(FORWARD, 0))
    q, k, v, _ = tensors(0, 1, 1, 1, 70, 512, head_dim)
    k *= torch.linspace(4, 0.5, 512)[:, None]
    q *= 0.3
    q[:, :, ::3] *= 30
    scores = (q.double() @ k.double().mT * head_dim**-0.5).unflatten(3, (4, 128)).amax(4).flip(3)
    grown = scores.cummax(3).values.diff(dim=3) / 0.6931
    assert (grown > 8).any(3)[:, :, ::3].double().mean() > 0.9 and (grown[:, :, 1::3] < 8).all()
    o, lse = launch.hopper_forward(q, k, v, False, head_dim**-0.5, slack)
    want, want_lse = reference.attention(q.double(), k.double(), v.double(), False)
    assert (o.double() - want).abs().max() < 2e-2 and (lse.double() - want_lse).abs().max() < 1e-3


@pytest.mark.parametrize("sum_dq", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_backward_kernel_is_right_in_whatever_order_things_happen(monkeypatch, head_dim, causal, sum_dq):
    for seed, (batch, heads, kv_heads, queries, keys) in enumerate((SHAPES[0], *SHAPES[2:4])):
        monkeypatch.setattr(launch, "hopper_backward_kernel", Emulated(BACKWARD, seed))
        q, k, v, do = tensors(seed, batch, heads, kv_heads, queries, keys, head_dim)
        exact = [x.double() for x in (q, k, v)]
        o, lse = reference.attention(*exact, causal)
        wanted = reference.attention_backward(*exact, do.double(), causal)
        got = launch.hopper_backward(q, k, v, o.bfloat16(), lse.float(), do, None, causal, head_dim**-0.5, sum_dq)
        assert (got[0] is None) == (not sum_dq)
        for name, mine, want in zip("qkv", got, wanted):
            if mine is not None:
                assert (mine.double() - want).abs().max() < 0.06, (name, seed)
