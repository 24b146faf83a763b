"""The profiler's counts: bytes, sectors, FLOPs, by argument, program and kernel, against closed formulas."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from utils import example_kernels as ek
from utils import runtime
from utils.kernel_profile import profile_kernel

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

pytestmark = pytest.mark.compat

SEED = 20
TILE = (32, 32, 32, 4, 4, 1)
ATTENTION_TILE = (64, 64, 4, 1)


@pytest.fixture(autouse=True)
def on_device():
    """Tensors are made where kernels take them: on a GPU the profiler runs interpreted kernels on copies."""
    with runtime.DEVICE:
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(SEED), device="cpu")
    return values.to(runtime.DEVICE, dtype)


def integers(low: int, high: int, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    values = torch.randint(low, high, (n,), generator=torch.Generator("cpu").manual_seed(SEED), device="cpu")
    return values.to(runtime.DEVICE, dtype)


def assert_counts(profile, traffic: ek.Traffic) -> None:
    """Counted and predicted are equal, byte for byte and FLOP for FLOP, and nothing was found wrong."""
    counted = ek.Traffic(profile.bytes_loaded, profile.bytes_stored, profile.flops, profile.bytes_atomic)
    assert counted == traffic
    assert profile.findings == []


def launches() -> Iterator[tuple[str, Callable, Callable, ek.Traffic]]:
    """Name, kernel's function, what makes its arguments, and what the closed formula says that it moves."""
    for n, dtype in itertools.product((1, 31, 1024, 1025, 5000), (torch.float32, torch.bfloat16, torch.int64)):
        yield (
            f"copy {n} {dtype}",
            ek.copy,
            lambda n=n, t=dtype: [torch.arange(n).to(t)],
            ek.copy_traffic(n, dtype.itemsize),
        )
    for n, stride in ((1, 1), (1000, 2), (4099, 7), (100, 200)):
        traffic = ek.strided_copy_traffic(n, stride, 4)
        yield f"stride {stride}", ek.strided_copy, lambda n=n, s=stride: [torch.zeros(n), s], traffic
    for transpose, shape in itertools.product(
        (ek.naive_transpose, ek.tiled_transpose), ((1, 1), (32, 32), (33, 65), (100, 70))
    ):
        yield f"{transpose.__name__} {shape}", transpose, lambda s=shape: [random(*s)], ek.transpose_traffic(*shape, 4)
    for n in (1, 1000, 2049):
        yield f"gelu {n}", ek.gelu, lambda n=n: [random(n, dtype=torch.float16)], ek.gelu_traffic(n, 2)
    for n, width in ((1, 1), (5, 33), (7, 1500)):
        arguments = lambda n=n, w=width: [random(20, w), integers(0, 20, n)]  # noqa: E731
        yield f"gather {n} x {width}", ek.gather, arguments, ek.gather_traffic(n, width, 4)
    for shape, widest in itertools.product(((1, 1), (7, 300), (3, 129), (5, 1024)), (100, 4096)):
        softmax, traffic = partial(ek.softmax, widest_row=widest), ek.softmax_traffic(*shape, 4, widest_row=widest)
        yield f"softmax {shape}, {widest} at once", softmax, lambda s=shape: [random(*s)], traffic
    for n in (0, 1, 1024, 5000):
        yield f"dot product {n}", ek.dot_product, lambda n=n: [random(n), random(n)], ek.dot_product_traffic(n, 4)
    for m, n, k in ((1, 1, 1), (17, 30, 9), (40, 33, 21)):
        traffic = ek.naive_matmul_traffic(m, n, k, 4)
        yield f"naive matmul {m, n, k}", ek.naive_matmul, matrices(m, n, k, torch.float32), traffic
    tiled, described = partial(ek.tiled_matmul, tile=TILE), partial(ek.descriptor_matmul, tile=TILE)
    for sizes, dtype in itertools.product(
        ((1, 1, 1), (64, 64, 64), (100, 70, 50), (33, 200, 31)), (torch.float32, torch.bfloat16)
    ):
        traffic = ek.tiled_matmul_traffic(*sizes, dtype.itemsize, TILE)
        yield f"tiled matmul {sizes} {dtype}", tiled, matrices(*sizes, dtype), traffic
    for sizes in ((8, 8, 8), (100, 72, 56)):
        traffic = ek.tiled_matmul_traffic(*sizes, 2, TILE)
        yield f"descriptor matmul {sizes}", described, matrices(*sizes, torch.float16), traffic
    for shape, causal in itertools.product(((1, 1, 1, 16), (2, 1, 113, 32), (1, 2, 203, 64)), (False, True)):
        attention = partial(ek.flash_attention_forward, causal=causal, tile=ATTENTION_TILE)
        traffic = ek.flash_attention_forward_traffic(*shape, 2, causal=causal, tile=ATTENTION_TILE)
        arguments = lambda s=shape: [random(*s, dtype=torch.float16) for _ in range(3)]  # noqa: E731
        yield f"attention {shape}{' causal' * causal}", attention, arguments, traffic
    more_keys = lambda: [random(1, 1, n, 32) for n in (70, 133, 133)]  # noqa: E731
    traffic = ek.flash_attention_forward_traffic(1, 1, 70, 32, 4, num_keys=133, tile=ATTENTION_TILE)
    yield "attention to more keys", partial(ek.flash_attention_forward, tile=ATTENTION_TILE), more_keys, traffic


def matrices(m: int, n: int, k: int, dtype: torch.dtype) -> Callable[[], list[torch.Tensor]]:
    return lambda: [random(m, k, dtype=dtype), random(k, n, dtype=dtype)]


@pytest.mark.parametrize(
    ("function", "arguments", "traffic"), [pytest.param(*rest, id=name) for name, *rest in launches()]
)
def test_a_kernel_moves_what_its_closed_formula_says(function, arguments, traffic):
    with profile_kernel() as profile:
        function(*arguments())
    assert_counts(profile, traffic)


@pytest.mark.parametrize("n", [1, 1024, 3001])
def test_histogram_equals_its_formula(n):
    x = integers(-2, 20, n, torch.int32)
    with profile_kernel() as profile:
        ek.histogram(x, 16)
    assert_counts(profile, ek.histogram_traffic(n, int(((x >= 0) & (x < 16)).sum())))


# ---- sectors ----


def test_a_misaligned_copy_touches_five_sectors_a_warp_instead_of_four():
    with profile_kernel() as profile:
        ek.copy(random(4097)[1:])
    x = profile.by_argument["x_ptr"]
    assert x.sectors_loaded == 4096 // 32 * 5
    assert x.l2_sectors_loaded == 4 * (1024 * 4 // 32 + 1)  # each of four programs once, with L1 in between
    assert x.dram_sectors_loaded == 4096 * 4 // 32 + 1
    assert x.coalescing == pytest.approx(4 / 5)


def test_a_naive_transpose_writes_one_sector_per_element_and_a_tiled_one_does_not():
    x = random(128, 128)
    with profile_kernel() as naive:
        ek.naive_transpose(x)
    with profile_kernel() as tiled:
        ek.tiled_transpose(x)
    assert naive.by_argument["out_ptr"].sectors_stored == 128 * 128
    assert tiled.by_argument["out_ptr"].sectors_stored == 128 * 128 * 4 // 32
    assert naive.dram_sectors_stored == tiled.dram_sectors_stored == 128 * 128 * 4 // 32


@triton.jit
def column_tile_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out_ptr + i * N + j, tl.load(x_ptr + j * N + i))  # neighbours of the load lie along its first axis


def test_lanes_run_along_the_axis_whose_neighbours_are_neighbours_in_memory():
    with profile_kernel() as profile:
        column_tile_kernel[(1,)](random(32, 32), torch.zeros(32, 32), N=32)
    assert profile.sectors_loaded == 32 * 32 * 4 // 32


@triton.jit
def permuted_kernel(x_ptr, index_ptr, out_ptr, n, N: tl.constexpr):
    lanes = tl.arange(0, N)
    index = tl.load(index_ptr + lanes, mask=lanes % 3 != 1, other=0)
    tl.store(out_ptr + lanes, tl.load(x_ptr + index, mask=lanes % 3 != 1), mask=lanes < n)


@pytest.mark.parametrize("lanes", [1, 16, 32, 128])
@pytest.mark.parametrize("stride", [0, 1, 2, 4, 7, None])
def test_sectors_and_coalescing_of_masked_lanes_equal_a_count_by_hand(lanes, stride):
    index = torch.randperm(1000, generator=torch.Generator("cpu").manual_seed(SEED), device="cpu")[:lanes]
    if stride is not None:
        index = stride * torch.arange(lanes, device="cpu")
    index = index.to(runtime.DEVICE, torch.int32)
    active = [lane for lane in range(lanes) if lane % 3 != 1]
    expected = sum(
        len({int(index[lane]) * 4 // 32 for lane in active if lane // 32 == warp}) for warp in range(-(-lanes // 32))
    )
    with profile_kernel() as profile:
        permuted_kernel[(1,)](random(1000), index, torch.zeros(lanes), lanes, N=lanes)
    x = profile.by_argument["x_ptr"]
    assert (x.sectors_loaded, x.bytes_loaded) == (expected, 4 * len(active))
    assert x.coalescing == x.useful_bytes_loaded / (32 * expected)


def test_programs_that_read_the_same_data_share_dram_sectors_but_not_l2_sectors():
    with profile_kernel() as profile:
        ek.tiled_matmul(random(64, 32), random(32, 96), TILE)
    a = profile.by_argument["a_ptr"]
    assert a.bytes_loaded == 3 * 64 * 32 * 4
    assert a.l2_sectors_loaded == 3 * a.dram_sectors_loaded == 3 * 64 * 32 * 4 // 32


# ---- break-downs ----


def test_counts_of_arguments_and_of_programs_add_up_to_the_whole():
    with profile_kernel() as profile:
        ek.tiled_matmul(random(70, 50), random(50, 90), TILE)
    for parts in (profile.by_argument, profile.by_program, profile.by_kernel):
        assert sum(p.bytes_loaded for p in parts.values()) == profile.bytes_loaded
        assert sum(p.sectors_stored for p in parts.values()) == profile.sectors_stored
    assert sum(p.flops for p in profile.by_program.values()) == profile.flops == 2 * 96 * 96 * 64
    assert set(profile.by_argument) == {"a_ptr", "b_ptr", "c_ptr"}
    assert len(profile.by_program) == 9


def test_a_program_is_named_by_its_three_ids():
    with profile_kernel() as profile:
        ek.flash_attention_forward(*(random(1, 2, 100, 16) for _ in range(3)), tile=ATTENTION_TILE)
    assert set(profile.by_program) == {(x, y, 0) for x in range(2) for y in range(2)}
    assert profile.by_program[(1, 0, 0)].bytes_stored == 36 * (16 * 4 + 4)


def test_several_kernels_in_one_block_are_kept_apart():
    with profile_kernel() as profile:
        ek.dot_product(random(3000), random(3000))
    assert [launch.kernel for launch in profile.launches] == ["dot_partial_kernel", "sum_kernel"]
    assert profile.by_kernel["sum_kernel"].bytes_loaded == 3 * 4
    assert profile.launches[0].grid == (3, 1, 1)


def test_arithmetic_intensity_is_flops_per_byte_moved():
    with profile_kernel() as profile:
        ek.tiled_matmul(random(64, 64), random(64, 64), TILE)
    traffic = ek.tiled_matmul_traffic(64, 64, 64, 4, TILE)
    assert profile.arithmetic_intensity == traffic.flops / traffic.bytes_moved


def test_a_block_without_a_launch_counts_nothing_and_says_so():
    with profile_kernel() as profile:
        pass
    assert profile.bytes_loaded == profile.flops == 0
    assert profile.arithmetic_intensity == 0.0 and profile.coalescing == 1.0
    assert profile.report() == "no kernel was launched inside the block"


@triton.jit
def first_programs_kernel(x_ptr, o_ptr, n, programs, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < n) & (tl.program_id(0) < programs)
    tl.store(o_ptr + i, tl.load(x_ptr + i, mask=mask, other=0.0), mask=mask)


def test_a_mask_may_combine_a_tensor_and_a_scalar():
    x, o = random(30), torch.zeros(30)
    with profile_kernel() as profile:
        first_programs_kernel[(4,)](x, o, 30, 2, BLOCK=8)
    assert torch.equal(o, torch.where(torch.arange(30) < 16, x, 0.0))
    assert (profile.bytes_loaded, profile.bytes_stored, profile.findings) == (64, 64, [])


@triton.jit
def two_stores_kernel(out_ptr, n, BLOCK: tl.constexpr):
    """Each program writes its block in two halves, the later one first."""
    first = tl.program_id(0) * BLOCK
    half = tl.arange(0, BLOCK // 2)
    tl.store(out_ptr + first + BLOCK // 2 + half, half, mask=first + BLOCK // 2 + half < n)
    tl.store(out_ptr + first + half, half, mask=first + half < n)


def test_a_launch_says_what_it_was_given_and_which_elements_each_program_wrote():
    out = torch.zeros(3, 7, dtype=torch.int32)
    with profile_kernel() as profile:
        two_stores_kernel[(4,)](out, out.numel(), BLOCK=8)
    launch = profile.launches[0]
    assert (launch.scalars["n"], launch.scalars["BLOCK"]) == (21, 8)
    written = {program[0]: span for (program, argument), span in launch.written.items() if argument == "out_ptr"}
    assert written == {0: (0, 7), 1: (8, 15), 2: (16, 20)}  # program 3 lies beyond the end


@triton.jit
def squares(x):
    return x * x


@triton.jit
def helper_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(out_ptr, tl.sum(squares(tl.load(x_ptr + offsets)), axis=0))


def test_nested_functions_are_counted_with_their_kernel():
    x, out = random(64), torch.zeros(1)
    with profile_kernel() as profile:
        helper_kernel[(1,)](x, out, SIZE=64)
    assert out.item() == pytest.approx((x.double() ** 2).sum().item())
    assert (profile.bytes_loaded, profile.bytes_stored) == (256, 4)


@triton.autotune(configs=[triton.Config({"BLOCK": b}, num_warps=4) for b in (64, 256)], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def tuned_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x + EVEN, mask=offsets < n)


def test_an_autotuned_kernel_is_counted_once():
    out = torch.zeros(100)
    with profile_kernel() as profile:
        tuned_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](torch.zeros(100), out, 100)
    assert len(profile.launches) == 1 and profile.launches[0].grid == (2, 1, 1)
    assert (profile.bytes_loaded, profile.bytes_stored) == (400, 400)
    assert out.eq(1).all()


@triton.jit
def host_descriptor_kernel(x_desc, out_desc, BLOCK: tl.constexpr):
    i, j = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    out_desc.store([i, j], x_desc.load([i, j]))


def test_descriptors_made_on_the_host_are_counted_by_argument():
    x, out = random(40, 24), torch.zeros(40, 24)
    descriptors = [TensorDescriptor.from_tensor(t, [16, 16]) for t in (x, out)]
    with profile_kernel() as profile:
        host_descriptor_kernel[(3, 2)](*descriptors, BLOCK=16)
    assert torch.equal(out, x)
    assert profile.by_argument["x_desc"].bytes_loaded == profile.by_argument["out_desc"].bytes_stored == 40 * 24 * 4
    assert profile.findings == []


@triton.jit
def cas_kernel(lock_ptr, count_ptr):
    previous = tl.atomic_cas(lock_ptr, 0, 1)
    tl.atomic_add(count_ptr, previous + 1)
    tl.atomic_xchg(lock_ptr, 0)


def test_atomics_count_as_read_and_written_and_do_not_race():
    lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with profile_kernel() as profile:
        cas_kernel[(5,)](lock, count)
    assert count.item() == 5
    assert profile.bytes_loaded == profile.bytes_stored == profile.bytes_atomic == 5 * 3 * 4
    assert profile.findings == []


@triton.jit
def table_kernel(table_ptr, out_ptr, N: tl.constexpr):
    which = tl.program_id(0)
    base = tl.load(table_ptr + which).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr + which * N + tl.arange(0, N), tl.load(base + tl.arange(0, N)))


def test_tensors_reached_through_a_table_of_addresses_can_be_named():
    parts, out = [random(16), random(16) + 1], torch.zeros(2, 16)
    table = torch.tensor([part.data_ptr() for part in parts])
    with profile_kernel(memory={"first": parts[0], "second": parts[1]}) as profile:
        table_kernel[(2,)](table, out, N=16)
    assert torch.equal(out, torch.stack(parts))
    assert profile.by_argument["first"].bytes_loaded == profile.by_argument["second"].bytes_loaded == 64
    assert profile.findings == []


def test_views_of_one_storage_are_arguments_of_their_own():
    qkv = random(3, 1, 1, 64, 16)
    with profile_kernel() as profile:
        ek.flash_attention_forward(qkv[0], qkv[1], qkv[2], tile=ATTENTION_TILE)
    assert_counts(profile, ek.flash_attention_forward_traffic(1, 1, 64, 16, 4, tile=ATTENTION_TILE))
    assert {n: c.bytes_loaded for n, c in profile.by_argument.items() if c.bytes_loaded} == dict.fromkeys(
        ("q_ptr", "k_ptr", "v_ptr"), 64 * 16 * 4
    )


def test_the_same_tensor_as_two_arguments_is_counted_under_both_names():
    x = random(256)
    with profile_kernel() as profile:
        ek.copy(x, out=x)
    assert profile.by_argument["x_ptr"].bytes_loaded == profile.by_argument["out_ptr"].bytes_stored == 1024
    assert profile.findings == []


def test_the_report_shows_arguments_counts_and_verdict():
    with profile_kernel() as profile:
        ek.tiled_matmul(random(64, 64), random(64, 64), TILE)
    text = profile.report()
    assert text.splitlines()[0] == ("tiled_matmul_kernel, 4 programs (grid 4x1x1); 524,288 FLOPs in dots, 6.40 FLOP/B")
    assert text.splitlines()[2].split() == ["a_ptr", "32,768", "0", "2.00", "1,024", "0", "100%"]
    assert text.endswith("no access out of bounds, no uninitialised read, no race")
    assert str(profile) == repr(profile) == text
    html = profile._repr_html_()
    assert html.count("<tr>") == 5 and "32,768" in html


@pytest.mark.slow
def test_the_first_profile_of_a_process_does_not_wait_for_torchs_compiler():
    code = (
        "from utils import runtime\nfrom utils.kernel_profile import profile_kernel\nimport sys, torch\n"
        "with profile_kernel():\n    torch.empty(8).fill_(1)\nassert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
