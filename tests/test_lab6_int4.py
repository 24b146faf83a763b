"""Lab 6's product with 4-bit weights: right on ragged cases, exact in what it moves, clear about what it refuses."""

from __future__ import annotations

import random

import pytest
import torch

from solutions.lab6_frontiers import int4_tuning
from solutions.lab6_frontiers.int4_expand import expand_int4
from solutions.lab6_frontiers.int4_matmul import int4_matmul
from solutions.lab6_frontiers.int4_packing import PackedInt4, pack_int4
from solutions.lab6_frontiers.int4_tuning import Int4Tile
from utils import runtime
from utils.formats import Quantized, quantize
from utils.kernel_profile import profile_kernel

HALVES = (torch.float16, torch.bfloat16)
NARROW, SPLIT, WIDE = Int4Tile(16, 16, 1, 2, 1), Int4Tile(16, 16, 3, 2, 1), Int4Tile(32, 32, 1, 2, 1)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(runtime.DEVICE)


def weight_of(N: int, K: int, seed: int = 0) -> Quantized:
    return quantize(normal(N, K, seed=seed), "int4", 128)


def assert_right(x: torch.Tensor, weight: Quantized, tile: Int4Tile | None = None) -> None:
    """No further from float64 of the dequantised weight than twice what PyTorch errs in x's dtype."""
    dense = weight.dequantize()
    exact = x.double() @ dense.double().T
    theirs = (x @ dense.to(x.dtype).T).double()
    found = int4_matmul(x, pack_int4(weight), tile=tile)
    assert found.dtype == x.dtype and found.shape == exact.shape and found.is_contiguous()
    allowed = 2 * (theirs - exact).abs().max() + 2 * torch.finfo(x.dtype).eps * exact.abs().max()
    assert (found.double() - exact).abs().max() <= allowed


def drawn(number: int) -> tuple[torch.Tensor, Quantized, Int4Tile | None]:
    """A random ragged case: activations in some layout, a weight, and a tile or the table's own."""
    draw = random.Random(f"int4 {number}")
    M, N, K = draw.choice((1, 2, draw.randint(3, 40))), draw.randint(1, 70), 128 * draw.randint(1, 5)
    x = normal(M, K, dtype=HALVES[number % 2], seed=number)
    if draw.random() < 0.3:
        x = x.repeat(1, 2)[:, ::2] if draw.random() < 0.5 else x.t().contiguous().t()
    tile = Int4Tile(draw.choice((16, 32)), draw.choice((16, 32)), draw.randint(1, 3), draw.choice((2, 4)), 1)
    return x, weight_of(N, K, number), draw.choice((None, tile))


# ---- right ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(20))
def test_random_ragged_products_err_no_more_than_twice_what_pytorch_does(number):
    assert_right(*drawn(number))


@pytest.mark.thorough
def test_200_random_ragged_products_err_no_more_than_twice_what_pytorch_does():
    for number in range(20, 220):
        assert_right(*drawn(number))


@pytest.mark.parametrize(("dtype", "N", "K"), [(torch.float16, 40, 384), (torch.bfloat16, 7, 128)])
def test_weights_are_expanded_for_many_activations(dtype, N, K):
    weight = weight_of(N, K)
    assert torch.equal(expand_int4(pack_int4(weight), dtype), weight.dequantize().to(dtype))
    assert_right(normal(int4_tuning.EXPANDED + 1, K, dtype=dtype), weight)


@pytest.mark.parametrize("tile", [NARROW, SPLIT, WIDE])
def test_all_codes_come_out_of_every_nibble(tile):
    codes = torch.arange(-8, 8).repeat(16 * 256 // 16).view(16, 256)
    packed = torch.where(codes < 0, codes + 16, codes).to(torch.uint8)
    values = packed[:, ::2] | packed[:, 1::2] << 4
    weight = Quantized(values.to(runtime.DEVICE), torch.ones(16, 2, device=runtime.DEVICE), "int4", 128)
    one = torch.eye(256, dtype=torch.float16, device=runtime.DEVICE)
    found = int4_matmul(one, pack_int4(weight), tile=tile)
    assert torch.equal(found.T.cpu(), codes.half())


def test_packing_keeps_every_number():
    weight = weight_of(24, 512)
    packed = pack_int4(weight)
    assert packed.shape == (24, 512) and packed.nbytes == weight.nbytes
    assert torch.equal(packed.dequantize(), weight.dequantize())


def test_a_quantized_weight_is_packed_on_the_way():
    x, weight = normal(2, 256, dtype=torch.bfloat16), weight_of(16, 256)
    assert torch.equal(int4_matmul(x, weight), int4_matmul(x, pack_int4(weight)))


def test_parts_are_added_in_the_same_order_each_time():
    x, packed = normal(3, 1024, dtype=torch.float16), pack_int4(weight_of(32, 1024))
    found = [int4_matmul(x, packed, tile=SPLIT) for _ in range(3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_no_row_and_no_output_give_nothing(shape):
    M, N = shape
    packed = pack_int4(weight_of(16, 128))
    packed = PackedInt4(packed.codes[:, :N], packed.scales[:, :N])
    assert int4_matmul(normal(M, 128, dtype=torch.float16), packed).shape == shape


# ---- no byte more --------------------------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("tile", [NARROW, SPLIT, WIDE])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 48, 512), (11, 40, 640)])
def test_each_weight_is_read_once_a_tile_of_rows(tile, M, N, K):
    x, packed = normal(M, K, dtype=torch.bfloat16), pack_int4(weight_of(N, K))
    with profile_kernel(check_races=True) as profile:
        int4_matmul(x, packed, tile=tile)
    assert not profile.findings, profile.report()
    read = {name: counters.bytes_loaded for name, counters in profile.by_argument.items() if counters.bytes_loaded}
    rows, columns = -(-M // tile.m), -(-N // tile.n)
    expected = {"codes_ptr": rows * N * K // 2, "scales_ptr": rows * N * K // 128 * 4, "x_ptr": columns * M * K * 2}
    stored = M * N * 2
    if tile.splits > 1:
        expected["parts_ptr"] = tile.splits * M * N * 4
        stored += tile.splits * M * N * 4
    assert read == expected and profile.bytes_stored == stored


# ---- numbers that tune ---------------------------------------------------------------------------------------------


def test_every_product_gets_a_tile_that_holds_it(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRET", False)
    for rows in (1, 4, 5, 16, 17, 64, 65, 500):
        for outputs, groups in ((16, 1), (4096, 32), (28672, 32), (4096, 112), (6144, 3)):
            tile = int4_tuning.int4(rows, outputs, groups, 132)
            assert tile.m >= min(rows, 64) and 1 <= tile.splits <= groups
            assert int4_tuning.few(outputs, 132) in int4_tuning.FEW.values()


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "weight", "error", "text"),
    [
        (normal(2, 128), weight_of(16, 128), TypeError, "x must be a float16 or bfloat16 tensor, got torch.float32"),
        (None, weight_of(16, 128), TypeError, "got NoneType"),
        (normal(2, 256, dtype=torch.float16), weight_of(16, 128), ValueError, r"x must have shape \(M, 128\)"),
        (normal(128, dtype=torch.float16), weight_of(16, 128), ValueError, r"got \(128,\)"),
        (normal(2, 128, dtype=torch.float16), normal(16, 128), TypeError, "weight must be a utils.formats.Quantized"),
        (
            normal(2, 128, dtype=torch.float16),
            quantize(normal(16, 128), "int4", 64),
            ValueError,
            "weight must be int4 in blocks of 128, got int4 with block=64",
        ),
        (
            normal(2, 128, dtype=torch.float16),
            quantize(normal(16, 128), "int8", 128),
            ValueError,
            "got int8 with block=128",
        ),
        (
            normal(2, 128, dtype=torch.float16),
            quantize(normal(2, 16, 128), "int4", 128),
            ValueError,
            r"weight must have shape \(N, K\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(x, weight, error, text):
    with pytest.raises(error, match=text):
        int4_matmul(x, weight)
