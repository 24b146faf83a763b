"""The benchmarks of notebook 03 without a GPU: small sizes, known times, filled layouts, and the right results."""

from __future__ import annotations

import pytest
import torch
from parameters import few_on_hopper

from benchmarks import (
    chains,
    checkpointing,
    cuda_gelu,
    cuda_program,
    gelu_five_ways,
    number_formats,
    recomputation,
    tiling,
)
from benchmarks.benchmark_cli import problems
from utils import example_kernels as ek
from utils import runtime
from utils.compile_only import Request, resource_usages
from utils.example_kernels.matmul import tiled_matmul, tiled_matmul_kernel
from utils.kernel_profile import profile_kernel

import triton  # isort: skip


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11)).to(runtime.DEVICE)


def test_chains_fill_their_schema(known_times):
    results = chains.measure(
        elements=100, links=[1, 3], operations=[1, 2], variants=chains.VARIANTS[:3], sine_variants=chains.SINES[:1]
    )
    assert problems("chains", results) == []
    assert [p["operations"] for p in results["fused"]] == [2, 6]
    assert "fused, 6 operations" in chains.table(results) and "one kernel" in chains.table(results)


@pytest.mark.parametrize("variant", chains.VARIANTS[:3])
def test_each_relu_of_a_sum_computes_it(variant):
    x, b = random(1001), random(1001).flip(0)
    assert torch.equal(chains.relu_of_sum(variant, x, b)(), torch.relu(x + b))


def test_sines_are_one():
    torch.testing.assert_close(chains.sines(chains.SINES[0], random(100))(), torch.ones(100, device=runtime.DEVICE))


@pytest.mark.slow
def test_gelu_five_ways_fill_their_schema_and_name_what_is_missing(known_times, monkeypatch):
    monkeypatch.setattr(cuda_program, "compiler", lambda: None)
    cuda_gelu.compiled.cache_clear()
    results = gelu_five_ways.measure(elements=2000, ways=gelu_five_ways.WAYS[:4])
    assert problems("gelu_five_ways", results) == []
    assert list(results["unavailable"]) == ["CUDA C++"]
    assert [way["bytes"] for way in results["ways"]] == [22 * 8000, 2 * 8000, 2 * 8000]
    assert "needs" in gelu_five_ways.table(results)


def test_gelu_in_triton_is_the_tanh_form():
    x = 4 * random(1030)
    torch.testing.assert_close(ek.gelu_tanh(x), torch.nn.functional.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_checkpointing_fills_its_schema(known_times, monkeypatch):
    monkeypatch.setattr(checkpointing, "peak_bytes", lambda run: run() or 1000)
    shape = {"batch": 2, "seq_len": 4, "hidden": 16, "heads": 2, "layers": 3}
    results = checkpointing.measure(shape=shape, segments=(0, 1, 2))
    assert problems("checkpointing", results) == []
    assert results["input_bytes"] == 2 * 4 * 16 * 2 and results["layer_bytes"] > 8 * results["input_bytes"]
    assert "layers a segment" in checkpointing.table(results)


def test_segments_change_memory_but_no_gradient():
    shape = {"batch": 2, "seq_len": 4, "hidden": 16, "heads": 2, "layers": 3}
    layers, x = checkpointing.stack(shape, torch.float32)
    gradients, kept = {}, {}
    for segment in (0, 1, 2):
        y = checkpointing.forward(layers, x, segment)
        gradients[segment] = torch.autograd.grad(y.square().sum(), [x, *layers.parameters()])
        kept[segment] = checkpointing.saved_bytes(
            lambda segment=segment: checkpointing.forward(layers, x, segment), list(layers.parameters())
        )
    for segment in (1, 2):
        for ours, plain in zip(gradients[segment], gradients[0], strict=True):
            torch.testing.assert_close(ours, plain)
    assert kept[2] <= kept[1] < kept[0] / 5


def test_recomputation_fills_its_schema(known_times):
    results = recomputation.measure(elements=100, variants=("eager", "kept", "recomputed"))
    assert problems("recomputation", results) == []
    assert [v["accesses"] for v in results["variants"]] == [15, 8, 5]
    assert "recomputed" in recomputation.table(results)


@pytest.mark.parametrize("variant", recomputation.VARIANTS[:3])
def test_each_gradient_of_three_sigmoids_is_autograds(variant):
    x, dy = random(1030).requires_grad_(), random(1030).flip(0)
    run, _ = recomputation.call(variant, x.detach(), dy)
    (expected,) = torch.autograd.grad(recomputation.stacked(x), x, dy)
    torch.testing.assert_close(run(), expected)


def test_accesses_follow_from_what_autograd_saves():
    # eager sigmoids save their three outputs: y needs no write of its own, all three are read again
    assert recomputation.saved_accesses(recomputation.stacked, random(8).requires_grad_()) == 9


def test_number_formats_fill_their_schema(known_times):
    shape = {"batch": 1, "seq_len": 4, "hidden": 16, "heads": 2}
    results = number_formats.measure(elements=100, n=16, shape=shape)
    assert problems("number_formats", results) == []
    errors = {p["format"]: p["error"] for p in results["products"]}
    assert errors["fp32"] < errors["fp16"] < errors["bf16"]
    assert "product bf16" in number_formats.table(results)


def test_a_setting_for_products_is_put_back():
    former = torch.backends.cuda.matmul.fp32_precision
    with number_formats.products_in("tf32"):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == former


@pytest.mark.slow
def test_tiling_fills_its_schema(known_times):
    results = tiling.measure(quick=True, sizes=[20], sides=[16, 32], transpose_size=33)
    assert problems("tiling", results) == []
    loads = {(p["dtype"], p["tile"]): p["bytes_loaded"] for p in results["matmul"] if p["kernel"] in ("naive", "tiled")}
    assert loads["fp32", 1] == 2 * 20**3 * 4 and loads["fp32", 16] == 2 * 2 * 20**2 * 4
    assert "tiled fp32 20" in tiling.table(results)


@pytest.mark.parametrize("side", sorted(tiling.TILES))
def test_every_tile_of_the_sweep_multiplies(side):
    a, b = random(40, 50), random(50, 33)
    torch.testing.assert_close(tiled_matmul(a, b, tiling.TILES[side]), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper([80, 90]))
def test_the_kernels_of_the_sweeps_compile_without_spills(capability, few):
    sizes = dict.fromkeys(("M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm"), "i32")
    chain = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "scale": "fp32", "shift": "fp32"}
    vectors = {**dict.fromkeys(("dy_ptr", "s1_ptr", "s2_ptr", "dx_ptr"), "*fp32"), "n": "i32"}
    requests = [
        Request(ek.chain_kernel, chain, {"LINKS": 512, "BLOCK": 1024}, capability),
        Request(ek.sigmoids_backward_kept_kernel, vectors, {"BLOCK": 1024}, capability),
    ]
    tiles = [tiling.TILES[side] for side in ((min(tiling.TILES), max(tiling.TILES)) if few else tiling.TILES)]
    for block_m, block_n, block_k, group_m, warps, stages in tiles:
        for kind in ("*bf16",) if few else ("*fp32", "*bf16"):
            blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": group_m}
            signature = {**dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), kind), **sizes}
            blocks["PRECISION"] = "ieee"
            requests.append(Request(tiled_matmul_kernel, signature, blocks, capability, warps, stages))
    before_3_7 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)  # it keeps a few values in memory
    for usage in resource_usages(requests):
        assert usage.stack_bytes <= (24 if before_3_7 else 0), usage


# ---- the example kernels that the benchmarks time -------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 1025])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_profiler_counts_three_and_five_accesses_of_relu_of_a_sum(n, dtype):
    x, b = random(n).to(dtype), random(n).flip(0).to(dtype)
    with profile_kernel() as fused:
        assert torch.equal(ek.add_relu(x, b), torch.relu(x + b))
    with profile_kernel() as unfused:
        ek.relu(ek.add(x, b))
    for profile, is_fused in ((fused, True), (unfused, False)):
        expected = ek.add_relu_traffic(n, x.element_size(), fused=is_fused)
        assert (profile.bytes_loaded, profile.bytes_stored) == (expected.bytes_loaded, expected.bytes_stored)


def test_relu_keeps_a_nan():
    x = torch.tensor([float("nan"), -1.0, 2.0], device=runtime.DEVICE)
    for y in (ek.relu(x), ek.add_relu(x, torch.zeros_like(x))):
        assert y[0].isnan() and y[1:].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("n", [0, 1, 1025])
def test_the_profiler_counts_eight_and_five_accesses_of_three_sigmoids(n):
    x, dy = random(n), random(n).flip(0)
    with profile_kernel() as kept:
        y, s1, s2 = ek.sigmoids_forward_kept(x)
        dx = ek.sigmoids_backward_kept(dy, s1, s2)
    with profile_kernel() as recomputed:
        assert torch.equal(ek.sigmoids_forward(x), y)
        torch.testing.assert_close(ek.sigmoids_backward(dy, x), dx)
    for profile, is_kept, accesses in ((kept, True, 8), (recomputed, False, 5)):
        expected = ek.sigmoids_traffic(n, 4, is_kept)
        assert (profile.bytes_loaded, profile.bytes_stored) == (expected.bytes_loaded, expected.bytes_stored)
        assert expected.bytes_moved == accesses * n * 4


@pytest.mark.parametrize("links", [1, 7])
def test_a_chain_is_its_links_one_after_the_other(links):
    x = random(1030)
    expected = x.double()
    for _ in range(links):
        expected = expected * 0.875 + 0.125
    with profile_kernel() as profile:
        torch.testing.assert_close(ek.chain(x, links).double(), expected, rtol=1e-5, atol=1e-6)
    formula = ek.chain_traffic(1030, 4)
    assert (profile.bytes_loaded, profile.bytes_stored) == (formula.bytes_loaded, formula.bytes_stored)


def test_wrong_vectors_are_refused_by_name():
    x = random(8)
    with pytest.raises(ValueError, match="y must have x's shape"):
        ek.add(x, random(9))
    with pytest.raises(ValueError, match="x must have stride 1, got 2"):
        ek.relu(x[::2])
    with pytest.raises(ValueError, match="links must be at least 1, got 0"):
        ek.chain(x, 0)
    with pytest.raises(ValueError, match="s2 must be contiguous"):
        ek.sigmoids_backward_kept(x, x, random(9))
    with pytest.raises(TypeError, match="must have x's dtype"):
        ek.add_relu(x, x.half())
