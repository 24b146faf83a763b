"""The capstone's attention: who runs where, which tiles a program gets, and what the kernels cost when compiled."""

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parameters import thorough_but

from solutions import capstone_hopper
from solutions.capstone_hopper import attention, tuning
from solutions.capstone_hopper.tile_order import tile_order, tile_table
from solutions.lab3_flash_attention import flash_attention_with_lse
from utils import runtime
from utils.runtime import DEVICE

SHARED_MEMORY = 227 * 1024


def tensors(*shape: int, dtype=torch.float16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(3)]


def test_it_says_why_the_portable_kernels_run(monkeypatch):
    q, k, v = tensors(1, 2, 5, 64)
    monkeypatch.setattr(runtime, "INTERPRET", True)
    assert "interpreter" in capstone_hopper.why_portable(q, k, v)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "said"),
    [
        (torch.float16, 64, (8, 0), "no Hopper GPU"),
        (torch.float32, 64, (9, 0), "not float32"),
        (torch.bfloat16, 80, (9, 0), "head_dim 80"),
        (torch.bfloat16, 128, (9, 0), None),
    ],
)
def test_hopper_takes_half_precision_of_three_head_dims(monkeypatch, dtype, head_dim, capability, said):
    class Somewhere:
        """A tensor as far as the question goes."""

        def __init__(self, shape):
            self.shape, self.dtype, self.device = shape, dtype, torch.device("cuda")

    monkeypatch.setattr(runtime, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    why = capstone_hopper.why_portable(*[Somewhere((1, 2, 33, head_dim))] * 3)
    assert why is None if said is None else said in why


def test_where_the_portable_kernels_run_results_are_theirs():
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 33, 64, dtype=torch.float32))
    got = capstone_hopper.flash_attention_with_lse(q, k, v, True, 0.3)
    want = flash_attention_with_lse(q, k, v, True, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    do = torch.randn_like(got[0])
    gradients = [torch.autograd.grad(o, (q, k, v), do) for o in (got[0], want[0])]
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_bad_input_is_refused_on_entry():
    q, k, v = tensors(1, 2, 5, 64)
    with pytest.raises(ValueError, match="head_dim must be from 16 to 256"):
        capstone_hopper.flash_attention(q[..., :8], k[..., :8], v[..., :8])
    with pytest.raises(TypeError, match="scale must be a number"):
        capstone_hopper.flash_attention(q, k, v, scale="one")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 300, 700), (32, 2048, 2048), (3, 700, 300), (7, 129, 128)])
@pytest.mark.parametrize("together", [1, 8])
def test_every_tile_belongs_to_one_program(shape, causal, together):
    heads, queries, keys = shape
    lists = tile_order(heads, queries, keys, 128, 64, causal, 132, together)
    assert sorted(tile for each in lists for tile in each) == list(range(heads * -(-queries // 128)))
    assert len(lists) == min(132, heads * -(-queries // 128))


@pytest.mark.parametrize("heads", [16, 32, 100, 128])
def test_no_program_works_much_longer_than_the_others(heads):
    lists = tile_order(heads, 2048, 2048, 128, 128, True, 132, 8)
    work = [sum(tile % 16 + 2 for tile in each) for each in lists]
    longest_tile = 17
    assert max(work) <= sum(work) / 132 + longest_tile


def test_the_longest_causal_tiles_come_first():
    lists = tile_order(8, 2048, 2048, 128, 128, True, 132, 8)
    assert {each[0] % 16 for each in lists if each[0] % 16 >= 8} == set(range(8, 16))
    assert all(each[0] % 16 >= each[-1] % 16 for each in lists)


def test_the_table_holds_the_lists_and_one_entry_more():
    table, counts = tile_table(torch.device("cpu"), 5, 300, 700, 128, 64, False, 4, 1)
    lists = tile_order(5, 300, 700, 128, 64, False, 4, 1)
    assert table.dtype == counts.dtype == torch.int32
    assert table.shape == (4, max(map(len, lists)) + 1)
    assert [tuple(row[:n]) for row, n in zip(table.tolist(), counts.tolist())] == list(lists)


def test_the_copy_engine_gets_strides_that_it_can_read():
    copyable = pytest.importorskip("solutions.capstone_hopper.parts", reason="this Triton has no Gluon").copyable
    x = torch.randn(2, 3, 40, 64, dtype=torch.float16)
    for view in (x, x.transpose(1, 2), x[:, :, ::2], x[:1], x[:, 1:2]):
        got = copyable(view)
        assert torch.equal(got, view) and got.data_ptr() == view.data_ptr()
        assert all(stride > 0 and stride % 8 == 0 for stride in got.stride()[:3]) and got.stride(3) == 1
    for view in (
        x[..., 1:],
        x[..., ::2],
        x.mT,
        x[:1].expand(2, 3, 40, 64),
        x.flatten()[4:-60].view(-1)[:7680].view(2, 3, 20, 64),
    ):
        got = copyable(view)
        assert torch.equal(got, view) and got.is_contiguous() and got.data_ptr() % 16 == 0


@functools.cache
def compiler() -> subprocess.Popen:
    """The process that compiles, started once."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("capstone_compile.py")
    pipe = subprocess.PIPE
    started = subprocess.Popen([sys.executable, "-P", script], env=environment, stdin=pipe, stdout=pipe, text=True)
    atexit.register(started.kill)
    return started


def compile_orders(*orders: tuple) -> list[dict]:
    """What the compiler spends on each of these kernels, which :mod:`tests.capstone_compile` makes."""
    process = compiler()
    process.stdin.write(json.dumps(orders) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline() or '{"error": "the compiler\'s process has ended"}')
    assert "error" not in answer, answer["error"][-3000:]
    return answer


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", thorough_but(attention.HEAD_DIMS, 128))
@pytest.mark.parametrize("masks", thorough_but([((0, 0), (0, 1)), ((1, 0),)], ((1, 0),)))
def test_the_forward_kernel_compiles_for_hopper_and_its_values_stay_in_registers(head_dim: int, masks: tuple):
    """``masks``: whether there is a causal mask, and ragged lengths."""
    cases = [(head_dim, causal, ragged) for causal, ragged in masks]
    orders = [("forward", d, bool(causal), "bf16", bool(ragged)) for d, causal, ragged in cases]
    for case, used in zip(cases, compile_orders(*orders)):
        assert used["shared"] <= SHARED_MEMORY, (case, used)
        assert used["spilled"] == 0, (case, used)
        assert used["atomic_starts"] == 1, (case, used)
        assert not used["serialised"], case
        # from the first of its columns to the last, not pairwise: utils.triton_versions says what depends on it
        assert used["maxima_in_a_row"] >= tuning.forward(*case[:2]).columns // 4 - 1, (case, used)
        assert {"wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"} <= set(used["instructions"]), case


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", thorough_but((64, 128), 128))
def test_the_first_backward_kernel_compiles_for_hopper_and_its_values_stay_in_registers(head_dim: int):
    cases = [(head_dim, sum_dq) for sum_dq in (False, True)]
    for case, used in zip(cases, compile_orders(*[("backward", d, True, "fp16", sum_dq) for d, sum_dq in cases])):
        assert used["shared"] <= SHARED_MEMORY, (case, used)
        assert used["spilled"] == 0, (case, used)
        assert used["atomic_starts"] == 1, (case, used)
        assert not used["serialised"], case
        assert ("cp.reduce.async.bulk.tensor" in used["instructions"]) == case[1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", thorough_but(("bf16", "fp16"), "bf16"))
@pytest.mark.parametrize("scales", ["row", "block"])
def test_lab_6s_products_of_e4m3_compile_for_hopper_and_their_sums_stay_in_registers(scales: str, dtype: str):
    (used,) = compile_orders(("scaled", dtype, scales))
    assert used["spilled"] == 0 and not used["serialised"]
    assert used["shared"] <= 232_448
    assert used["instructions"] == ["wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", thorough_but([("bf16", False), ("bf16", True), ("fp16", False), ("fp16", True)], ("bf16", True))
)
def test_lab_6s_attention_over_latents_compiles_for_hopper_and_its_sums_stay_in_registers(form: tuple[str, bool]):
    for used in compile_orders(("latents", *form)):
        assert used["spilled"] == 0 and not used["serialised"]
        assert used["shared"] <= SHARED_MEMORY
        assert used["instructions"] == ["wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", thorough_but(("bf16", "fp16"), "bf16"))
def test_lab_6s_product_of_an_expert_layer_compiles_for_hopper_and_its_sums_stay_in_registers(dtype: str):
    products = ("forward", "dx", "dweights")
    for product, used in zip(products, compile_orders(*[("grouped", dtype, product) for product in products])):
        assert used["spilled"] == 0 and not used["serialised"], (product, used)
        assert used["shared"] <= SHARED_MEMORY, (product, used)
        assert used["instructions"] == ["wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"], (product, used)


def test_a_factor_that_is_not_positive_is_put_into_the_queries(monkeypatch):
    taken = []

    class Recorded:
        """Takes the place of the kernels."""

        @staticmethod
        def apply(q, k, v, causal, scale, deterministic):
            taken.append((q, scale))
            return q, q

    monkeypatch.setattr(attention, "why_portable", lambda *tensors: None)
    monkeypatch.setattr(attention, "HopperAttention", Recorded)
    q, k, v = tensors(1, 2, 5, 64)
    for scale in (0.3, -0.3, 0.0):
        capstone_hopper.flash_attention(q, k, v, scale=scale)
        found, positive = taken.pop()
        assert positive > 0
        torch.testing.assert_close(found * positive, q * scale)
