"""What a check sees of kernels by compiling them for a GPU that is not there."""

from __future__ import annotations

import pytest
import torch

from utils.checks.cases import Cases
from utils.checks.compiled import Compiled
from utils.checks.core import CheckFailed, Exercise
from utils.checks.forbid import Rules
from utils.checks.kernel import check_kernel
from utils.compile_only import process
from utils.runtime import DEVICE

import triton  # isort: skip
import triton.language as tl  # isort: skip

pytestmark = pytest.mark.compat

TWO = 2.0
CONSTANT = tl.constexpr(2.0)


@triton.jit
def doubled(x):
    return x * TWO


@triton.jit
def square_kernel(x_ptr, out_ptr, n, strides, HOW: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    offsets = row * strides[0] + column * strides[1]
    mask = (row < n) & (column < n)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    if HOW == "rounded":
        product = tl.dot(x, x)
    elif HOW == "wide and rounded":
        product = tl.dot(x.to(tl.float32), x.to(tl.float32))
    elif HOW == "wide":
        product = tl.dot(x.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(x, x, input_precision="ieee")
    if HOW == "global":
        product = doubled(product) / 2
    elif HOW == "constant":
        product = product * CONSTANT / 2
    elif HOW == "narrower in the loop":
        for _ in range(0, 1 + n // 64):
            product = product.to(x_ptr.dtype.element_ty)
    tl.store(out_ptr + row * n + column, product, mask=mask)


def square(x: torch.Tensor, how: str) -> torch.Tensor:
    """x @ x, for a square x of at most 32 rows."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    square_kernel[(1,)](x, out, x.shape[0], x.stride(), HOW=how, BLOCK=32)
    return out


def check(how: str, compiled: Compiled | None = Compiled(), **cases) -> None:  # noqa: B008  (frozen)
    check_kernel(
        Exercise("9.9", "square"),
        lambda x: square(x, how),
        lambda x: x @ x,
        Cases({"n": range(3, 33)}, layouts=("transposed",), **cases),
        lambda case: (case.tensor("x", "n", "n"),),
        factor=20,
        forbidden=Rules(),
        compiled=compiled,
        seed=4,
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("rounded", ["square_kernel: a GPU rounds a float32 product to TF32", "at: product = tl.dot(x, x)", '" 7']),
        ("wide", ["expected products of float16, as the inputs are, got a product of float32", "tl.float32", '" 8']),
        ("global", ["compiles on no GPU", "cannot read the Python global TWO", "at: return x * TWO"]),
        ("narrower in the loop", ["compiles on no GPU", "product"]),
    ],
)
def test_what_only_a_compiler_sees_is_told_with_its_line(how, words):
    with pytest.raises(CheckFailed) as failed:
        check(how, Compiled(tf32=7, wide=8))
    assert all(word in str(failed.value) for word in words), failed.value


def test_a_wide_product_is_not_told_how_to_become_an_exact_one():
    with pytest.raises(CheckFailed, match=r"expected products of float16.*got a product of float32"):
        check("wide and rounded", Compiled(tf32=7, wide=8), dtypes=(torch.float16,))


def test_a_kernel_is_given_what_a_compiler_takes_and_no_object_of_python():
    with pytest.raises(
        CheckFailed, match=r"square_kernel is given a frozenset as HOW\n.*no compiled kernel takes that"
    ):
        check(frozenset())


@pytest.mark.parametrize("how", ["plain", "constant", "wide"])
def test_a_kernel_that_compiles_passes_and_wide_products_where_they_are_allowed(how, capsys):
    check(how)
    assert "✓ exercise 9.9" in capsys.readouterr().out


def test_kernels_of_another_exercise_are_not_compiled(capsys):
    check("global", compiled=None)
    assert "✓" in capsys.readouterr().out


def test_further_launches_are_compiled_with_those_of_the_cases():
    def further():
        from utils.kernel_profile import profile_kernel

        with profile_kernel() as profile:
            square(torch.ones(4, 4, device=DEVICE), "global")
        return [(torch.float32, launch) for launch in profile.launches]

    with pytest.raises(CheckFailed, match="compiles on no GPU"):
        check("plain", Compiled(further=further))


def test_where_the_compiler_itself_fails_nothing_is_said_of_the_kernel(monkeypatch, capsys):
    process.end()
    monkeypatch.setattr(process, "_CHILD", "/nowhere/child.py")
    check("global")
    assert "✓" in capsys.readouterr().out
