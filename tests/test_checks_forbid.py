"""An answer that lets a library do the work is told which line did; everything is restored afterwards."""

import functools
import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checked_kernels import EXERCISES, check, message, scale
from triton.runtime.jit import KernelInterface

from utils import runtime
from utils.checks.core import CheckFailed
from utils.checks.forbid import OPERATOR_GROUPS, Rules, broken_rule, find_library, kernel_name, record_calls

X = torch.ones(8, 8)
compiled_earlier = None  # by the test that needs it

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


def problem_of(function, rules=None):
    with record_calls() as seen:
        function(X)
    return broken_rule(rules or Rules(kernel=False), seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: torch.softmax(x, -1), "torch.softmax is called by <lambda> (test_checks_forbid.py, line"),
        (lambda x: F.softmax(x, -1), "torch.nn.functional.softmax"),
        (lambda x: x.softmax(-1), "torch.Tensor.softmax"),
        (lambda x: torch.nn.Softmax(-1)(x), "softmax"),
        (lambda x: torch.logsumexp(x, -1), "torch.logsumexp"),
        (lambda x: x @ x, "torch.Tensor.matmul"),
        (lambda x: torch.matmul(x, x), "torch.matmul"),
        (lambda x: torch.einsum("ij,jk->ik", x, x), "einsum"),
        (lambda x: F.linear(x, x), "torch.nn.functional.linear"),
        (lambda x: torch.ops.aten.mm(x, x), "aten.mm"),
        (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), "scaled_dot_product_attention"),
        (lambda x: F.gelu(x), "gelu"),
        (lambda x: torch.relu(x), "torch.relu"),
        (lambda x: F.layer_norm(x, (8,)), "layer_norm"),
        (lambda x: torch.compile(lambda y: y + 1), "torch.compile is called by"),
        (lambda x: torch.from_numpy(np.exp(x.numpy())), "numpy"),
        (lambda x: torch.tensor(x.tolist()), "tolist"),
    ],
)
def test_a_ready_made_operator_is_named_with_the_line_that_calls_it(function, says):
    problem = problem_of(function)
    assert says in problem.headline and ("the host waits" if says == "tolist" else "yourself") in problem.cause


def test_an_operator_inside_a_backward_pass_is_found_too():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient @ x

    problem = problem_of(lambda x: Product.apply(x.clone().requires_grad_()).backward(x))
    assert "mm is called by backward (test_checks_forbid.py" in problem.headline


def test_one_operator_can_be_allowed_and_one_family_alone_forbidden():
    assert problem_of(lambda x: x @ x, Rules(kernel=False, allow=("matmul", "mm"))) is None
    assert problem_of(lambda x: x @ x, Rules(groups=("softmax",), kernel=False)) is None
    assert problem_of(lambda x: x.softmax(-1), Rules(groups=("softmax",), kernel=False)) is not None


def test_an_unknown_family_is_refused_by_name():
    with pytest.raises(ValueError, match="'sofmax' is not a group of operators: choose from softmax, matmul"):
        Rules(groups=("sofmax",))


# ---- memory


def attention_with_scores(x):
    scores = torch.empty(x.shape[0], x.shape[0])
    return x.clone() + scores[0, 0] * 0


def test_an_n_by_n_intermediate_is_named_with_its_shape_and_line():
    rules = Rules(kernel=False, largest=lambda case: 4 * case)
    with record_calls() as seen:
        attention_with_scores(torch.ones(64, 4))
    problem = broken_rule(rules, seen, case=64 * 4)
    assert problem.headline == ("largest allocation: expected at most 1,024 elements, got 4,096 (64 x 64)")
    assert "attention_with_scores (test_checks_forbid.py, line" in problem.details[0]
    assert "keep one part of it, a tile, at a time" in problem.cause


def test_a_view_of_an_input_is_no_allocation_and_a_hidden_one_is_measured_by_its_memory():
    assert problem_of(lambda x: x.expand(100, 8, 8).transpose(0, 1), Rules(kernel=False, largest=10)) is None
    hidden = problem_of(lambda x: torch.empty(10_000)[:4], Rules(kernel=False, largest=10))
    assert "got 10,000 (10000)" in hidden.headline


def test_a_kernel_that_materialises_a_square_intermediate_is_caught():
    text = message("matmul", "square intermediate", budget=None)
    assert "largest allocation: expected at most 256 elements, got 4,096 (256 x 16)" in text


# ---- kernels of one's own


@pytest.mark.parametrize(
    ("name", "bug", "says"),
    [
        ("add", "no launch", "no Triton kernel is launched"),
        ("softmax", "calls torch", "torch.softmax is called by row_softmax (checked_kernels.py, line"),
        ("row sum", "copies", "PyTorch computes part of the result: aten.add is called by row_sum"),
    ],
)
def test_an_answer_whose_kernel_does_not_do_the_work_is_caught(name, bug, says):
    assert says in message(name, bug, budget=None)


def test_a_kernel_of_the_courses_library_is_not_the_students():
    def student(x):
        return scale(x)

    kernel = EXERCISES["scale"]["student"].__globals__["scale_kernel"]
    function = kernel.fn
    home, function.__module__ = function.__module__, "utils.example_kernels.copy"
    try:
        text = message("scale", student=student)
    finally:
        function.__module__ = home
    assert "the kernel scale_kernel from utils.example_kernels.copy is launched" in text


def test_a_kernel_is_known_by_its_python_function():
    kernel = EXERCISES["scale"]["student"].__globals__["scale_kernel"]
    assert kernel_name(kernel) == ("scale_kernel", "checked_kernels")


def uses_compile(x):
    return torch.compile(scale)(x)


def uses_compiled_earlier(x):
    return compiled_earlier(x)


def imports_a_library(x):
    from flash_attn import flash_attn_func

    return flash_attn_func(x)


def calls_one_that_does(x):
    return imports_a_library(x)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (uses_compile, "torch.compile"),
        (uses_compiled_earlier, "compiled by torch.compile"),
        (imports_a_library, "flash_attn"),
        (calls_one_that_does, "flash_attn"),
        (functools.partial(uses_compile), "torch.compile"),
        (scale, None),
    ],
)
def test_ready_made_libraries_and_compilers_are_found_in_the_source(function, names, monkeypatch):
    if function is uses_compiled_earlier:
        monkeypatch.setitem(globals(), "compiled_earlier", torch.compile(lambda x: x * 3))
    found = find_library(function)
    assert found is None if names is None else names in found


def test_an_answer_that_uses_one_is_told_so():
    def student(x):
        if x.numel() > 10**9:
            import xformers

            return xformers.scale(x)
        return scale(x)

    assert "student uses a built-in solution, xformers" in message("scale", student=student)


# ---- restoring


def test_launches_are_seen_after_thousands_of_checks():
    """CPython 3.13 loses track of a class whose ``__getitem__`` is replaced again and again."""
    x = torch.zeros(4, 4, device=runtime.DEVICE)
    for _ in range(3):
        scale(x)
    for _ in range(1500):
        with record_calls():
            pass
    with record_calls() as seen:
        scale(x)
    assert seen.kernels == [("scale_kernel", "checked_kernels")]
    assert seen.launching == 0


def test_everything_is_restored_also_after_an_exception():
    before = (KernelInterface.__getitem__, torch.compile)
    with pytest.raises(RuntimeError, match="inside"), record_calls():
        raise RuntimeError("inside")
    with pytest.raises(CheckFailed):
        check("add", "raises")
    assert (KernelInterface.__getitem__, torch.compile) == before
    with record_calls() as seen:
        pass
    torch.softmax(X, -1)
    gc.collect()
    assert seen.calls == [] and seen.largest is None
    assert not torch.utils._python_dispatch._len_torch_dispatch_stack()


def test_the_families_do_not_overlap():
    names = [name for group in OPERATOR_GROUPS.values() for name in group]
    assert len(names) == len(set(names))


def test_an_answer_that_python_computes_element_by_element_is_found():
    few = problem_of(lambda x: [x.view(-1)[i].item() for i in range(16)], Rules())
    assert few.headline == "no Triton kernel is launched"

    x = X.clone()  # NumPy has seen the memory of X
    with record_calls() as seen:
        scale(x)
        values = [value.item() for value in x.view(-1)]
    assert len(values) == 64
    problem = broken_rule(Rules(), seen)
    assert "64 single elements are fetched into Python by" in problem.headline and "inside the kernel" in problem.cause
