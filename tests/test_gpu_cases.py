"""Which cases a GPU runs: those that bring something new, and those that need no further compilation."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from utils.checks.gpu_cases import for_gpu, form
from utils.kernel_profile import profile_kernel
from utils.runtime import DEVICE

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def shift_kernel(x_ptr, out_ptr, n, strides, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets * strides[0], mask=offsets < n, other=0.0)
    tl.store(out_ptr + offsets, x + 1 if CAUSAL else x, mask=offsets < n)


def trial(n: int, dtype: torch.dtype = torch.float32, causal: bool = False, stride: int = 1):
    x = torch.ones(n * stride, dtype=dtype, device=DEVICE)[::stride]
    with profile_kernel(check_races=False) as profile:
        shift_kernel[(1,)](x, torch.empty_like(x), n, x.stride(), CAUSAL=causal, BLOCK=64)
    return SimpleNamespace(case=SimpleNamespace(dtype=dtype), profile=profile)


FP16 = torch.float16


def test_a_case_that_needs_another_compilation_and_brings_nothing_new_is_left_to_the_interpreter():
    whole, ragged, causal = trial(32), trial(33), trial(32, causal=True)
    assert for_gpu([whole, ragged, causal, trial(34, causal=True)]) == [0, 1, 2]  # ragged and causal are both known
    assert for_gpu([whole, trial(48)]) == [0, 1]  # the same form: nothing to compile


def test_each_dtype_meets_each_flag_and_each_kind_of_number_is_met_once():
    cases = [trial(32), trial(32, causal=True), trial(32, FP16), trial(33, FP16), trial(32, FP16, causal=True)]
    assert for_gpu(cases) == [0, 1, 2, 3, 4]
    assert for_gpu([*cases, trial(33, FP16, causal=True), trial(33, causal=True)]) == [0, 1, 2, 3, 4]
    assert for_gpu([trial(32), trial(32, stride=3), trial(33, stride=3)]) == [0, 1, 2]


def test_of_the_kernels_of_other_exercises_each_dtype_and_each_flag_are_met_once():
    cases = [trial(32), trial(33), trial(32, causal=True), trial(32, FP16), trial(32, FP16, causal=True)]
    assert for_gpu(cases, others=True) == [0, 2, 3]


def test_numbers_that_triton_tells_apart_give_another_form():
    forms = [form(trial(n).profile.launches[0]) for n in (16, 32, 33, 35, 1)]
    assert forms[0] == forms[1] and forms[2] == forms[3] and len(set(forms)) == 3


def test_a_case_without_launches_runs():
    nothing = SimpleNamespace(case=SimpleNamespace(dtype=FP16), profile=SimpleNamespace(launches=[]))
    assert for_gpu([trial(32), nothing]) == [0, 1]
