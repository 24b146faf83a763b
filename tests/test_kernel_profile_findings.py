"""What the profiler finds wrong: out of bounds, uninitialised, racing; by argument, index and program."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from utils import example_kernels as ek
from utils import interpreter, runtime
from utils.kernel_profile import profile_kernel

import triton  # isort: skip
import triton.language as tl  # isort: skip

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def on_device():
    with runtime.DEVICE:
        yield


@triton.jit
def unmasked_kernel(x_ptr, out_ptr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets + SHIFT))


def test_a_read_past_the_end_is_reported_and_gives_nan():
    x, out = torch.ones(100), torch.zeros(128)
    with profile_kernel() as profile:
        unmasked_kernel[(4,)](x, out, SHIFT=0, BLOCK=32)
    (finding,) = profile.out_of_bounds
    assert (finding.argument, finding.index, finding.program) == ("x_ptr", 100, (3, 0, 0))
    assert (finding.access, finding.count, finding.kernel) == ("read", 28, "unmasked_kernel")
    assert out[:100].eq(1).all() and out[100:].isnan().all()
    assert str(finding) == (
        "unmasked_kernel: program (3, 0, 0) read x_ptr[100], outside of its shape (100,); 27 more lanes like it"
    )


@triton.jit
def search_kernel(x_ptr):
    place = 0
    while tl.load(x_ptr + place) == 0:
        place += 1


def test_a_loop_that_goes_on_outside_of_an_argument_is_ended():
    with profile_kernel() as profile, pytest.raises(triton.InterpreterError, match="2,000 accesses outside of x_ptr"):
        search_kernel[(1,)](torch.zeros(8, dtype=torch.int32))
    (finding,) = profile.out_of_bounds
    assert (finding.argument, finding.index, finding.count) == ("x_ptr", 8, 2000)


@pytest.mark.parametrize(
    ("size", "shift", "index", "count"),
    [(64, -3, -3, 3), (64, 2**30, 2**30, 32), (0, 0, 0, 32), *((64, far, far, 32) for far in (2**41, 2**48, -(2**44)))],
)
def test_a_read_before_the_start_far_away_or_of_nothing_is_laid_to_its_argument(size, shift, index, count):
    with profile_kernel() as profile:
        unmasked_kernel[(1,)](torch.ones(size), torch.zeros(32), SHIFT=shift, BLOCK=32)
    (finding,) = profile.out_of_bounds
    assert (finding.argument, finding.index, finding.count) == ("x_ptr", index, count)


@pytest.mark.parametrize(("dtype", "shift"), [(torch.int8, 98), (torch.float32, -3)])
def test_a_sector_that_is_half_outside_counts_once(dtype, shift):
    x = torch.ones(100).to(dtype)
    with profile_kernel() as profile:
        unmasked_kernel[(1,)](x, torch.zeros(32, dtype=dtype), SHIFT=shift, BLOCK=32)
    touched = {(lane + shift) * x.itemsize // 32 for lane in range(32)}
    assert profile.out_of_bounds and profile.sectors_loaded == len(touched)


def test_a_write_past_the_end_is_reported_and_dropped():
    memory = torch.full((200,), 7.0)
    x, out = torch.ones(128), torch.zeros(100)
    with profile_kernel() as profile:
        unmasked_kernel[(4,)](x, out, SHIFT=0, BLOCK=32)
    (finding,) = profile.out_of_bounds
    assert (finding.argument, finding.index, finding.program, finding.access) == ("out_ptr", 100, (3, 0, 0), "write")
    assert out.eq(1).all() and memory.eq(7).all()


@pytest.mark.parametrize(("dtype", "given"), [(torch.int32, 0), (torch.bfloat16, float("nan"))])
def test_integers_read_out_of_bounds_are_zero_and_floats_nan(dtype, given):
    out = torch.ones(16, dtype=dtype)
    with profile_kernel() as profile:
        unmasked_kernel[(1,)](torch.ones(10, dtype=dtype), out, SHIFT=0, BLOCK=16)
    torch.testing.assert_close(out, torch.tensor([1] * 10 + [given] * 6, dtype=dtype), equal_nan=True)
    assert profile.out_of_bounds[0].count == 6


def test_an_overrun_into_the_next_allocation_names_the_argument_it_came_from():
    arena = torch.arange(128.0)  # x and out in one allocation, as an allocator may place them
    x, out = arena[:50], arena[64:128]
    with profile_kernel() as profile:
        unmasked_kernel[(2,)](x, out, SHIFT=0, BLOCK=32)
    assert {(f.argument, f.index) for f in profile.out_of_bounds} == {("x_ptr", 50)}


def test_the_gap_between_rows_of_a_view_is_out_of_bounds_and_named_by_axis():
    wide = torch.zeros(8, 40)
    with profile_kernel() as profile:
        unmasked_kernel[(4,)](wide[:, :20], torch.zeros(128), SHIFT=0, BLOCK=32)
    first = profile.out_of_bounds[0]
    assert (first.argument, first.index, first.position, first.count) == ("x_ptr", 20, (0, 20), 12)
    assert "x_ptr[0, 20] (element 20), outside of its shape (8, 20) with strides (40, 1)" in str(first)


def test_memory_around_a_view_is_reported_but_really_accessed():
    storage = torch.arange(64.0)
    out = torch.zeros(32)
    with profile_kernel() as profile:
        unmasked_kernel[(1,)](storage[:20], out, SHIFT=0, BLOCK=32)
    assert torch.equal(out, storage[:32])
    assert profile.out_of_bounds[0].index == 20
    assert "in the memory around it" in str(profile.out_of_bounds[0])


def test_bounds_can_be_left_unchecked_and_stay_harmless():
    with profile_kernel(check_bounds=False) as profile:
        unmasked_kernel[(4,)](torch.ones(100), torch.zeros(100), SHIFT=0, BLOCK=32)
    assert profile.findings == []


@triton.jit
def masked_sum_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes, mask=lanes < n, other=OTHER)
    tl.store(out_ptr, tl.sum(x, axis=0))


@pytest.mark.parametrize(("n", "other", "total"), [(20, 0.0, 20.0), (20, None, float("nan")), (32, None, 32.0)])
def test_a_lane_that_a_mask_leaves_out_is_nan_unless_other_says_what_it_is(n, other, total):
    out = torch.zeros(1)
    with profile_kernel() as profile:
        masked_sum_kernel[(1,)](torch.ones(32), out, n, BLOCK=32, OTHER=other)
    torch.testing.assert_close(out, torch.full((1,), total), equal_nan=True)
    assert profile.findings == []


@triton.jit
def one_lane_kernel(x_ptr, out_ptr, n, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    if BLOCK == 0:  # a scalar
        tl.store(out_ptr, tl.load(x_ptr + n, mask=n < n, other=OTHER))
    else:
        lane = n + tl.arange(0, BLOCK)
        tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + lane, mask=lane < n, other=OTHER))


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize(("other", "value"), [(0.0, 0.0), (2.5, 2.5), (None, float("nan"))])
def test_a_single_lane_that_is_left_out_is_what_other_says_too(block, other, value):
    out = torch.ones(max(1, block))
    with profile_kernel():
        one_lane_kernel[(1,)](torch.ones(4), out, 4, OTHER=other, BLOCK=block)
    torch.testing.assert_close(out, torch.full_like(out, value), equal_nan=True)


@triton.jit
def mixed_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    pointers = tl.where(offsets % 2 == 0, x_ptr + offsets, y_ptr + offsets)
    tl.store(out_ptr + offsets, tl.load(pointers))


def test_one_load_from_two_arguments_is_told_apart_lane_by_lane():
    x, y, out = torch.zeros(32), torch.ones(20), torch.zeros(32)
    with profile_kernel() as profile:
        mixed_kernel[(1,)](x, y, out, BLOCK=32)
    (finding,) = profile.out_of_bounds
    assert (finding.argument, finding.index, finding.count) == ("y_ptr", 21, 6)
    assert profile.by_argument["x_ptr"].bytes_loaded == profile.by_argument["y_ptr"].bytes_loaded == 64
    assert out[:20].tolist() == [0.0, 1.0] * 10


@triton.jit
def atomic_kernel(x_ptr, index_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(x_ptr + tl.load(index_ptr + tl.arange(0, BLOCK)), 1.0)
    tl.atomic_cas(x_ptr + 99, 0.0, 1.0)


def test_atomics_out_of_bounds_are_reported_and_dropped():
    x = torch.zeros(4)
    with profile_kernel() as profile:
        atomic_kernel[(1,)](x, torch.tensor([0, 1, 1, 4], dtype=torch.int32), BLOCK=4)
    assert [(f.index, f.access) for f in profile.out_of_bounds] == [(4, "atomic")]
    assert profile.out_of_bounds[0].count == 2  # one of the adds, and the compare-and-swap at 99
    assert x.tolist() == [1, 2, 0, 0]


# ---- uninitialised memory ----


@triton.jit
def accumulate_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    out = tl.load(out_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, out + tl.load(x_ptr + offsets, mask=mask), mask=mask)


def accumulate(x: torch.Tensor, out: torch.Tensor) -> None:
    accumulate_kernel[(triton.cdiv(x.numel(), 32),)](x, out, x.numel(), BLOCK=32)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda x: torch.empty(x.shape),
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(x.shape),
        lambda x: torch.empty_strided(x.shape, (1,)),
        lambda x: torch.empty(2, 70)[1],
    ],
)
def test_memory_from_empty_is_uninitialised_until_written(allocate):
    x = torch.ones(70)
    with profile_kernel() as profile:
        accumulate(x, allocate(x))
    first = profile.uninitialized_reads[0]
    assert (first.argument, first.index, first.program, first.count) == ("out_ptr", 0, (0, 0, 0), 32)
    assert [f.count for f in profile.uninitialized_reads] == [32, 32, 6]


def test_an_uninitialised_read_gives_nan_so_that_the_result_is_wrong_every_time():
    x = torch.ones(40)
    with profile_kernel():
        out = torch.empty(40)
        accumulate(x, out)
    assert out.isnan().all()


@pytest.mark.parametrize(
    "write",
    [
        lambda out: out.fill_(0),
        lambda out: out.zero_(),
        lambda out: out.copy_(torch.zeros(70)),
        lambda out: out.__setitem__(slice(None), 0.0),
        lambda out: torch.mul(torch.zeros(70), 2, out=out),
        lambda out: out.normal_(),
        lambda out: torch.nn.init.zeros_(out),
        lambda out: out.view(7, 10).fill_(0),
        lambda out: out.view(torch.int16).zero_(),
        lambda out: torch._foreach_zero_([out]),
    ],
)
def test_what_torch_writes_is_initialised(write):
    x = torch.ones(70)
    with profile_kernel() as profile:
        out = torch.empty(70)
        write(out)
        accumulate(x, out)
    assert profile.findings == []


@pytest.mark.skipif(runtime.HAS_GPU, reason="NumPy writes into the host's memory only")
@pytest.mark.parametrize("view", [lambda out: out.numpy(), np.asarray, np.from_dlpack])
def test_what_numpy_may_have_written_is_initialised(view):
    x = torch.ones(70)
    with profile_kernel() as profile:
        out = torch.empty(70)
        view(out)[...] = 2.0
        accumulate(x, out)
    assert profile.findings == []
    assert out.eq(3).all()


def test_memory_that_was_given_back_by_a_resize_is_not_watched_any_more():
    with profile_kernel() as profile:
        tensors = [torch.empty(64) for _ in range(20)]
        for tensor in tensors:
            tensor.resize_(4096)
        for _ in range(20):
            tensors.append(torch.ones(64))
            accumulate(tensors[-1], tensors[-1])
    assert profile.uninitialized_reads == []


def test_what_a_kernel_writes_is_initialised_for_the_next():
    x = torch.ones(70)
    with profile_kernel() as profile:
        out = ek.copy(x)  # allocates with empty_like
        accumulate(x, out)
    assert profile.findings == [] and out.eq(2).all()


def test_only_the_part_that_was_written_counts():
    x = torch.ones(70)
    with profile_kernel() as profile:
        out = torch.empty(70)
        out[:50] = 0
        accumulate(x, out)
    assert [(f.index, f.count, f.program) for f in profile.uninitialized_reads] == [
        (50, 14, (1, 0, 0)),
        (64, 6, (2, 0, 0)),
    ]


def test_a_column_that_torch_wrote_leaves_the_others_unwritten():
    with profile_kernel() as profile:
        out = torch.empty(16, 4)
        out[:, 1] = 0
        accumulate(torch.ones(64), out)
    assert sum(f.count for f in profile.uninitialized_reads) == 48


def test_memory_from_before_the_block_counts_as_initialised():
    out = torch.empty(70)
    with profile_kernel() as profile:
        accumulate(torch.ones(70), out)
    assert profile.uninitialized_reads == []


def test_memory_freed_and_allocated_again_is_not_taken_for_the_old():
    with profile_kernel() as profile:
        for _ in range(20):
            torch.empty(70)
            accumulate(torch.ones(70), torch.zeros(70))
    assert profile.findings == []


# ---- races ----


@triton.jit
def last_writer_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)  # neighbours overlap in one element
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


def test_two_programs_that_write_one_element_race():
    with profile_kernel() as profile:
        last_writer_kernel[(3,)](torch.zeros(64), torch.ones(64), BLOCK=16)
    assert [(f.argument, f.index, f.other_program, f.program) for f in profile.races] == [
        ("out_ptr", 15, (0, 0, 0), (1, 0, 0)),
        ("out_ptr", 30, (1, 0, 0), (2, 0, 0)),
    ]
    assert "the first wrote it, the second wrote it" in str(profile.races[0])
    assert profile.findings == profile.races


@triton.jit
def neighbour_kernel(x_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    right = tl.load(x_ptr + (pid + 1) * BLOCK + offsets)
    tl.store(x_ptr + pid * BLOCK + offsets, right)


def test_a_read_of_what_a_later_program_writes_is_a_race():
    with profile_kernel() as profile:
        neighbour_kernel[(3,)](torch.zeros(64), BLOCK=16)
    assert [(f.index, f.count, f.other_program, f.program) for f in profile.races] == [
        (16, 16, (0, 0, 0), (1, 0, 0)),
        (32, 16, (1, 0, 0), (2, 0, 0)),
    ]
    assert "the first read it, the second wrote it" in str(profile.races[0])


@triton.jit
def sum_race_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    total = tl.sum(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), axis=0)
    if ATOMIC:
        tl.atomic_add(out_ptr, total)
    else:
        tl.store(out_ptr, tl.load(out_ptr) + total)


def test_an_unprotected_sum_races_and_an_atomic_one_does_not():
    for atomic in (False, True):
        out = torch.zeros(1)
        with profile_kernel() as profile:
            sum_race_kernel[(4,)](out, torch.ones(64), BLOCK=16, ATOMIC=atomic)
        assert out.item() == 64
        assert bool(profile.races) == (not atomic)
    with profile_kernel(check_races=False) as profile:
        sum_race_kernel[(4,)](torch.zeros(1), torch.ones(64), BLOCK=16, ATOMIC=False)
    assert profile.findings == []


@triton.jit
def half_atomic_kernel(out_ptr):
    if tl.program_id(0) == 0:
        tl.atomic_add(out_ptr, 1.0)
    else:
        tl.store(out_ptr, 2.0)


def test_an_atomic_races_with_a_plain_write():
    with profile_kernel() as profile:
        half_atomic_kernel[(2,)](torch.zeros(1))
    assert "the first atomically updated it, the second wrote it" in str(profile.races[0])


def test_two_launches_do_not_race_with_each_other():
    x = torch.zeros(64)
    with profile_kernel() as profile:
        for _ in range(2):
            ek.copy(torch.ones(64), out=x)
    assert profile.findings == []


def test_two_arguments_on_one_storage_race_through_it():
    x = torch.zeros(64)
    with profile_kernel() as profile:
        unmasked_kernel[(2,)](x[16:48], x[:32], SHIFT=0, BLOCK=16)
    assert [(f.argument, f.index, f.count) for f in profile.races] == [("out_ptr", 16, 16)]


def test_elements_of_different_widths_race_where_their_bytes_overlap():
    x = torch.zeros(64)
    with profile_kernel() as profile:
        last_writer_kernel[(2,)](x.view(torch.int16)[:60], torch.zeros(60, dtype=torch.int16), BLOCK=16)
        half_atomic_kernel[(1,)](x)
    assert [(f.argument, f.index) for f in profile.races] == [("out_ptr", 15)]


def test_a_strided_element_is_named_by_its_axes():
    x = torch.zeros(4, 6).t()
    with profile_kernel() as profile:
        last_writer_kernel[(2,)](x, torch.zeros(40), BLOCK=8)
    assert profile.races[0].position == (1, 1) and profile.races[0].index == 7


# ---- the block itself ----


@triton.jit
def failing_kernel(out_ptr):
    pid = tl.program_id(0)
    tl.store(out_ptr + pid, 1.0)
    tl.assume(pid != 2)


def test_a_kernel_that_raises_is_named_with_its_program_and_counted_up_to_there():
    out = torch.zeros(5)
    raises = pytest.raises(triton.InterpreterError, match=r"failing_kernel raised .* in program \(2, 0, 0\)")
    with raises, profile_kernel() as profile:
        failing_kernel[(5,)](out)
    assert profile.bytes_stored == 3 * 4
    assert isinstance(profile.launches[0].error, triton.InterpreterError)
    assert "raised an error" in profile.report()
    with profile_kernel() as again:
        ek.copy(torch.ones(8))
    assert again.bytes_loaded == 32


def test_a_missing_argument_is_named():
    with profile_kernel(), pytest.raises(TypeError, match="BLOCK"):
        neighbour_kernel[(1,)](torch.zeros(8))


def test_a_block_inside_a_block_is_refused():
    refused = pytest.raises(RuntimeError, match="close the open profile_kernel block")
    with profile_kernel() as outer, refused, profile_kernel():
        pass
    with profile_kernel():
        pass
    assert outer.findings == []


def test_a_profile_serves_one_block():
    profile = profile_kernel()
    with pytest.raises(RuntimeError, match="never opened"):
        _ = profile.bytes_loaded
    with profile:
        pass
    with pytest.raises(RuntimeError, match="one block"), profile:
        pass


def test_launches_outside_of_the_block_are_not_counted():
    with profile_kernel() as profile:
        pass
    ek.copy(torch.ones(8))
    assert profile.bytes_loaded == 0
    assert not interpreter.in_launch()


def test_findings_beyond_the_limit_are_counted_not_kept():
    with profile_kernel(max_findings=2) as profile:
        unmasked_kernel[(8,)](torch.zeros(1), torch.zeros(256), SHIFT=0, BLOCK=32)
    assert len(profile.findings) == 2
    assert profile.findings_left_out == 6
    said = "these are the first 2 findings; 6 later occurrences are not listed"
    assert said in profile.report() and said in profile._repr_html_()


@pytest.mark.parametrize("limit", [0, -1, 2.5, True])
def test_a_bad_limit_is_refused_by_value(limit):
    with pytest.raises(ValueError, match=f"max_findings must be a positive integer, got {limit}"):
        profile_kernel(max_findings=limit)


@pytest.mark.parametrize("switch", ["check_races", "check_bounds", "check_uninitialized"])
def test_a_switch_that_is_neither_on_nor_off_is_refused_by_value(switch):
    with pytest.raises(TypeError, match=f"{switch} must be True or False, got 'no'"):
        profile_kernel(**{switch: "no"})


def test_memory_must_be_tensors():
    with pytest.raises(TypeError, match="memory must map names to tensors, got list"):
        profile_kernel(memory=["table"])
    with pytest.raises(TypeError, match=r"memory\['table'\] must be a torch.Tensor, got list"):
        profile_kernel(memory={"table": [1, 2]})
