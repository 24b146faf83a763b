"""What a student's Python computes while a launch is under way is heard as at any other time."""

from array import array
from contextlib import nullcontext
from functools import partial
from operator import itemgetter

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from grading.scenarios import observations
from utils import runtime
from utils.checks.forbid import Rules, broken_rule, record_calls
from utils.checks.tensors import plain_outputs
from utils.kernel_profile import profile_kernel

X, Y = torch.rand(8, 8, device=runtime.DEVICE), torch.rand(8, 8, device=runtime.DEVICE)


@triton.jit
def copy(x_ptr, out_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out_ptr + lanes, tl.load(x_ptr + lanes))


def in_a_callable_grid(x, out):
    def grid(meta):
        out.copy_(torch.nn.functional.gelu(x))
        return (1,)

    copy[grid](x, out, BLOCK=64)


def by_an_operator_of_no_family(x, out):
    copy[lambda meta: (1 + 0 * len(torch.add(x, x, out=out)),)](x, out, BLOCK=64)


def in_numpy(x, out):
    copy[lambda meta: (1 + 0 * len(x.cpu().numpy()),)](x, out, BLOCK=64)


def in_a_hook_of_a_configuration(x, out):
    config = triton.Config({"BLOCK": 64}, pre_hook=lambda arguments: arguments["out_ptr"].copy_(torch.exp(x)))
    triton.autotune([config], key=[])(copy)[(1,)](x, out)


def in_a_heuristic(x, out):
    triton.heuristics({"BLOCK": lambda arguments: 64 + 0 * len(torch.mm(x, x))})(copy)[(1,)](x, out)


def in_a_hook_of_the_kernel(x, out):
    hooked = triton.jit(copy.fn)
    hooked.add_pre_run_hook(lambda *args, **kwargs: torch.mm(x, x)) if hasattr(hooked, "add_pre_run_hook") else (
        hooked.pre_run_hooks.append(lambda *args, **kwargs: torch.mm(x, x))
    )
    hooked[(1,)](x, out, BLOCK=64)


@triton.jit
def with_pytorch_inside(x_ptr, out_ptr, BLOCK: tl.constexpr):
    torch.mm(X, Y)
    lanes = tl.arange(0, BLOCK)
    tl.store(out_ptr + lanes, tl.load(x_ptr + lanes))


def in_the_kernel(x, out):
    with_pytorch_inside[(1,)](x, out, BLOCK=64)


class Numbers(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.data_ptr:
            torch.mm(X, Y)
        return super().__torch_function__(func, types, args, kwargs or {})


def in_a_subclass(x, out):
    copy[(1,)](x.as_subclass(Numbers), out, BLOCK=64)


WAYS = (
    in_a_callable_grid,
    by_an_operator_of_no_family,
    in_numpy,
    in_a_hook_of_a_configuration,
    in_a_heuristic,
    in_a_hook_of_the_kernel,
    in_the_kernel,
    in_a_subclass,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_computed_during_a_launch_is_heard(way):
    with record_calls() as seen:
        way(X, torch.empty_like(X))
    assert seen.launching == 0
    problem = broken_rule(Rules(), seen)
    assert problem is not None and "test_checks_launch_hooks.py, line" in problem.headline


def test_a_launch_that_computes_nothing_beside_its_kernel_breaks_no_rule():
    x = X.clone()  # NumPy has seen the memory of X
    with record_calls() as seen:
        copy[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, torch.empty_like(x), BLOCK=64)
        copy[(1,)](x.t(), torch.empty_like(x), BLOCK=64)
    assert broken_rule(Rules(), seen) is None


def shared_with_numpy(x, out):
    kept = np.zeros((8, 8), np.float32)
    torch.from_numpy(kept).copy_(x)
    out.copy_(torch.from_numpy(np.tanh(kept)))


def shared_with_an_array(x, out):
    kept = array("f", bytes(256))
    torch.asarray(kept).copy_(x.view(-1))


def handed_to_a_kernel(x, out):
    copy[(1,)](x, torch.from_numpy(np.zeros((8, 8), np.float32)), BLOCK=64)


def applied(x, out):
    out.copy_(x.clone().apply_(lambda value: 2 * value))


def mapped(x, out):
    out.copy_(x.clone().map_(x, lambda value, _: 2 * value))


def written_as_a_list(x, out):
    out.copy_(torch.tensor([0.5 * place for place in range(64)]).view(8, 8))


def written_one_by_one(x, out):
    for place in range(64):
        out.view(-1)[place] = 0.5 * place


def written_one_by_one_and_stacked(x, out):
    out.copy_(torch.stack([torch.full((), 0.5 * place) for place in range(64)]).view(8, 8))


def written_as_padding(x, out):
    pad = torch.nn.functional.pad
    out.view(-1).copy_(torch.cat([pad(x[:0, 0], (1, 0), value=0.5 * place) for place in range(64)]))


def compared_one_by_one(x, out):
    for place in range(64):
        torch.equal(x.view(-1)[place], out.view(-1)[place])


def read_as_bits(x, out):
    repr(x.view(torch.int32))


def fetched_in_a_grid(x, out):
    copy[lambda meta: (1 + 0 * len([value.item() for value in x.view(-1)]),)](x, out, BLOCK=64)


def in_a_grid_written_in_c(x, out):
    steps = map(itemgetter(1), zip(map(partial(torch.mm, x), [x]), [(1,)]))
    copy[partial(next, steps)](x, out, BLOCK=64)


UNHEARD_ONCE = (
    shared_with_numpy,
    shared_with_an_array,
    handed_to_a_kernel,
    applied,
    mapped,
    written_as_a_list,
    written_one_by_one,
    written_one_by_one_and_stacked,
    written_as_padding,
    compared_one_by_one,
    read_as_bits,
    fetched_in_a_grid,
    in_a_grid_written_in_c,
    in_a_callable_grid,
    in_a_heuristic,
)


@pytest.mark.parametrize("profiled", (False, True), ids=("alone", "profiled"))
@pytest.mark.parametrize("way", UNHEARD_ONCE, ids=lambda way: way.__name__)
def test_values_that_leave_and_come_back_beside_the_kernel_are_heard(way, profiled):
    x = X.clone()
    out = torch.zeros_like(x)
    with record_calls() as seen, profile_kernel() if profiled else nullcontext():
        copy[(1,)](x, torch.empty_like(x), BLOCK=64)
        assert broken_rule(Rules(), seen) is None
        way(x, out)
    assert broken_rule(Rules(), seen) is not None


def test_beginning_with_the_same_number_in_many_places_breaks_no_rule():
    x = X.clone()
    with record_calls() as seen:
        out = torch.empty_like(x)
        for row in range(64):
            out.view(-1)[row] = float("nan") if row % 2 else 0.0
            out[row % 8].fill_(-torch.inf)
        out[:, :2].copy_(torch.FloatTensor([0.5, 1.0]))
        copy[(1,)](x, out, BLOCK=64)
    assert broken_rule(Rules(), seen) is None


def test_a_result_is_what_it_holds_whatever_its_methods_say():
    class Late(torch.Tensor):
        def detach(self):
            raise AssertionError

    held = torch.ones(3)
    late = held.as_subclass(Late)
    held.detach = lambda: torch.zeros(3)
    for value in (held, late):
        (plain,) = plain_outputs(value)
        assert type(plain) is torch.Tensor and plain.detach().tolist() == [1.0, 1.0, 1.0]
        assert observations.plain(value).tolist() == [1.0, 1.0, 1.0]
