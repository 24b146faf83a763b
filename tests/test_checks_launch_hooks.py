"""What a student's Python computes while a launch is under way is heard as at any other time."""

import pytest
import torch
import triton
import triton.language as tl

from utils import runtime
from utils.checks.forbid import Rules, broken_rule, record_calls

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
    with record_calls() as seen:
        copy[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](X, torch.empty_like(X), BLOCK=64)
        copy[(1,)](X.t(), torch.empty_like(X), BLOCK=64)
    assert broken_rule(Rules(), seen) is None
