"""In a GPU session kernels are compiled; the profiler then runs their interpreted kernels and leaves no trace.

A child process pretends to have a GPU: Triton is imported without its interpreter, and tensors stay on the CPU, which
no compiled launch could take. What a launch inside the block does is therefore the interpreted kernel's doing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.compat

PRETEND = """
import json
import torch

torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_name = lambda *index: "Pretend GPU"
torch.cuda.get_device_capability = lambda *index: (9, 0)
torch.cuda.set_device = lambda *index: None
torch.UntypedStorage.cpu = lambda self: self.clone()  # as from a GPU: the interpreter gets a copy
from utils import runtime

assert runtime.HAS_GPU and not runtime.INTERPRET and runtime.gpu_name() == "Pretend GPU"
runtime.DEVICE = torch.device("cpu")
import triton
import triton.language as tl
from utils import example_kernels as ek
from utils.kernel_profile import profile_kernel

assert isinstance(tl.cdiv, triton.JITFunction)
torch.manual_seed(6)
"""


def child(code: str) -> dict:
    """Run ``code`` after the pretence, in a process of its own; return what it puts into ``result``."""
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "MLF_DEVICE")}
    program = PRETEND + textwrap.dedent(code) + "\nprint(json.dumps(result))\n"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results() -> dict:
    return child(
        """
        result = {}
        TILE = (32, 32, 32, 4, 4, 1)

        def error(a, b):
            return float((a.double() - b.double()).abs().max())

        a, b = torch.randn(50, 40, dtype=torch.bfloat16), torch.randn(40, 24, dtype=torch.bfloat16)
        with profile_kernel() as profile:
            c = ek.tiled_matmul(a, b, TILE)
        result["matmul"] = [error(c, (a.float() @ b.float()).bfloat16()), profile.bytes_loaded, profile.flops]
        result["matmul formula"] = [ek.tiled_matmul_traffic(50, 24, 40, 2, TILE).bytes_loaded]
        result["matmul formula"] += [ek.tiled_matmul_traffic(50, 24, 40, 2, TILE).flops]

        q, k, v = (torch.randn(1, 2, 100, 32) for _ in range(3))
        with profile_kernel() as profile:
            o, _ = ek.flash_attention_forward(q, k, v, causal=True, tile=(64, 64, 4, 1))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result["attention"] = [error(o, expected), profile.bytes_moved, len(profile.findings)]
        result["attention formula"] = ek.flash_attention_forward_traffic(
            1, 2, 100, 32, 4, causal=True, tile=(64, 64, 4, 1)
        ).bytes_moved

        x = torch.randn(5, 100)
        before = (tl.load, tl.core.load, tl.core.program_id, tl.reduce, tl.tensor.__dict__["sum"], tl.max)
        with profile_kernel() as profile:
            y = ek.softmax(x)
        after = (tl.load, tl.core.load, tl.core.program_id, tl.reduce, tl.tensor.__dict__["sum"], tl.max)
        result["softmax"] = [error(y, x.softmax(1)), profile.bytes_loaded]
        result["restored"] = before == after

        x = torch.randint(0, 9, (300,), dtype=torch.int32)
        with profile_kernel() as profile:
            counts = ek.histogram(x, 9)
        result["histogram"] = bool(torch.equal(counts, torch.bincount(x, minlength=9).int()))

        with profile_kernel() as profile:
            q[0, 0] = 0
            out = torch.empty(3000)
            ek.copy(out[:2000], out=out[1000:])
        found = [(f.argument, f.index, f.program, f.other_program) for f in profile.races]
        result["race"] = found
        result["uninitialized"] = [(f.argument, f.index, f.count) for f in profile.uninitialized_reads]

        try:
            tl.cdiv(5, 2)
        except RuntimeError as refused:
            result["device function"] = str(refused)
        """
    )


@pytest.mark.slow
def test_a_twin_computes_what_the_kernel_would(results):
    assert results["matmul"][0] <= 2**-4
    assert results["attention"][0] < 1e-5
    assert results["softmax"][0] < 1e-6
    assert results["histogram"]


@pytest.mark.slow
def test_a_twin_is_counted_exactly(results):
    assert results["matmul"][1:] == results["matmul formula"]
    assert results["attention"][1:] == [results["attention formula"], 0]
    assert results["softmax"][1] == 5 * 100 * 4


@pytest.mark.slow
def test_findings_name_what_the_caller_passed_though_the_twin_works_on_copies(results):
    assert results["race"] == [["x_ptr", 1024, [1, 0, 0], [0, 0, 0]]]
    assert results["uninitialized"] == [["x_ptr", 0, 1024]]  # program 0 wrote what program 1 reads


def test_the_language_is_as_it_was_after_the_block(results):
    assert results["restored"]
    assert "outside of the scope of a kernel" in results["device function"]


MODULE = """
import triton
import triton.language as tl


@triton.jit
def shifted(x, n):
    return x.sum(axis=0) + x.max(axis=0) + n


@triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (64, 128)], key=["n"])
@triton.heuristics({"TWICE": lambda args: 2 * args["n"]})
@triton.jit
def tuned_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(out_ptr + tl.program_id(0), shifted(x, n) + TWICE + BLOCK)


@triton.jit
def broken_kernel(x_ptr, N: tl.constexpr):
    tl.assume(tl.program_id(0) != 1)
    tl.store(x_ptr + tl.arange(0, N), 1.0)
"""


@pytest.fixture(scope="module")
def module_results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("interpreted")
    (folder / "twin_kernels.py").write_text(MODULE)
    return child(
        f"""
        import sys

        sys.path.insert(0, {str(folder)!r})
        import twin_kernels as tk

        result = {{}}
        x, out = torch.arange(10.0), torch.zeros(3)
        with profile_kernel() as profile:
            tk.tuned_kernel[(3,)](x, out, 10)
        result["tuned"] = [out.tolist(), len(profile.launches), len(tk.tuned_kernel.cache)]

        x = torch.zeros(4)
        try:
            with profile_kernel() as profile:
                tk.broken_kernel[(3,)](x, N=4)
        except triton.InterpreterError as error:
            result["error"] = str(error)
        result["partial"] = profile.bytes_stored

        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = ASTSource(
            ek.softmax_kernel,
            signature={{"x_ptr": "*fp32", "out_ptr": "*fp32", "columns": "i32", "stride_x": "i32",
                        "stride_out": "i32", "BLOCK": "constexpr"}},
            constexprs={{"BLOCK": 128}},
        )
        result["compiles"] = len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]) > 0
        """
    )


@pytest.mark.slow
def test_autotuned_kernels_nested_functions_and_tensor_methods_have_twins(module_results):
    out, launches, remembered = module_results["tuned"]
    assert out == [45 + 9 + 10 + 20 + 64] * 3
    assert launches == 1
    assert remembered == 0  # the GPU's own tuning must still happen


@pytest.mark.slow
def test_an_error_in_a_twin_names_the_program_and_keeps_partial_counts(module_results):
    assert "broken_kernel raised AssertionError in program (1, 0, 0)" in module_results["error"]
    assert module_results["partial"] == 16


@pytest.mark.slow
def test_compiling_works_after_a_block(module_results):
    assert module_results["compiles"]


# ---- a launch of few elements far apart copies the elements, not the gigabytes between them ----


@pytest.fixture(scope="module")
def sparse_results() -> dict:
    return child(
        """
        from utils.interpreter import copies

        # a tensor that pretends to be on a GPU; a host tensor is its own copy on the host
        copies._elsewhere = lambda tensor: True
        torch.UntypedStorage.cpu = lambda self: self
        copies.LARGE = 2**20
        reserved = []
        reserve = copies._reserve
        copies._reserve = lambda tensors: reserved.append(len(tensors)) or reserve(tensors)

        def far(values, stride):
            home = torch.full(((len(values) - 1) * stride + values[0].numel(),), float("nan"))
            return home.as_strided(values.shape, (stride, 1)).copy_(values)

        result = {}
        x = torch.arange(12.0).reshape(3, 4)
        rows, out = far(x, 2**20), far(torch.zeros(3, 4), 2**20)
        flat = torch.as_strided(rows, (2 * 2**20 + 4,), (1,))
        with profile_kernel() as profile:
            y = ek.softmax(rows)
        result["softmax"] = torch.allclose(y, x.softmax(1)) and torch.equal(rows, x)
        result["findings"] = [str(finding) for finding in profile.findings]
        result["reserved"] = list(reserved)

        with profile_kernel() as profile:
            ek.copy(rows[0], out=out[2])
        result["copied"] = torch.equal(out[2], x[0]) and bool((out[:2] == 0).all())
        result["gap untouched"] = bool(flat[4:2**20].isnan().all())

        expanded = far(x, 2**20)[1:2].expand(5, 4)
        with profile_kernel() as profile:
            y = ek.softmax(expanded)
        result["expanded"] = bool(torch.allclose(y, x[1].softmax(0).expand(5, 4)))

        before = len(reserved)
        dense = torch.randn(600, 600)
        with profile_kernel() as profile:
            ek.gelu(dense)
        result["dense"] = len(reserved) - before
        """
    )


@pytest.mark.slow
def test_a_sparse_argument_is_read_and_left_as_it_was(sparse_results):
    assert sparse_results["softmax"] and sparse_results["findings"] == []
    assert sparse_results["reserved"] == [1]


@pytest.mark.slow
def test_what_a_kernel_writes_comes_back_and_gaps_stay_as_they_are(sparse_results):
    assert sparse_results["copied"] and sparse_results["gap untouched"]


@pytest.mark.slow
def test_rows_that_repeat_are_copied_once_and_a_dense_allocation_is_left_to_upstream(sparse_results):
    assert sparse_results["expanded"] and sparse_results["dense"] == 0
