"""Kernels compile for GPUs that are not there; what they occupy can be read, and mistakes are named."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from parameters import few_on_hopper

from utils import example_kernels as ek
from utils.compile_only import CompileError, Request, resource_usage, resource_usages
from utils.compile_only.source import standalone_source
from utils.example_kernels.attention import GPU_TILES

import triton  # isort: skip
import triton.language as tl  # isort: skip

pytestmark = pytest.mark.compat

COPY = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
FACTOR = tl.constexpr(3)


@triton.jit
def scaled(x):
    return x * FACTOR


@triton.jit
def calling_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = scaled(tl.load(x_ptr + offsets, mask=offsets < n)).to(DTYPE)
    tl.store(out_ptr + offsets, x, mask=offsets < n)


@triton.jit
def wrong_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, n)))


class Options(NamedTuple):
    dtype: tl.dtype
    block: int


@triton.jit
def tuple_kernel(x_ptr, out_ptr, strides, OPTIONS: tl.constexpr):
    stride_row, stride_column = strides
    row = tl.arange(0, OPTIONS.block)[:, None]
    offsets = row * stride_row + tl.arange(0, 8)[None, :] * stride_column
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(OPTIONS.dtype))


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def tuned_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.sqrt(tl.load(x_ptr + offsets, mask=offsets < n)), mask=offsets < n)


@pytest.mark.slow
def test_items_of_tuples_are_specialised_as_a_launch_does():
    constants = {"OPTIONS": Options(tl.float16, 128)}
    pointers = {"x_ptr": "*fp16", "out_ptr": "*fp16"}
    whole, any_stride = resource_usages(
        [
            Request(tuple_kernel, {**pointers, "strides": strides}, constants)
            for strides in (("i32:16", 1), ("i32", "i32"))
        ]
    )
    assert whole.registers < any_stride.registers  # eight numbers in one load
    with pytest.raises(
        ValueError, match=r"items of strides must be like 'i32', 'i32:16' or a number, got \('int', 1\)"
    ):
        resource_usage(tuple_kernel, {**pointers, "strides": ("int", 1)}, constants)


@pytest.mark.slow
def test_resources_of_several_kernels_are_read_from_their_binaries():
    small, large, tuned, helper = resource_usages(
        [
            Request(ek.copy_kernel, COPY, {"BLOCK": 1024}, num_warps=4),
            Request(ek.copy_kernel, COPY, {"BLOCK": 16384}, num_warps=4, capability=80),
            Request(tuned_kernel, COPY, {"BLOCK": 64}, num_warps=2),
            Request(calling_kernel, {**COPY, "out_ptr": "*bf16"}, {"BLOCK": 256, "DTYPE": tl.bfloat16}),
        ]
    )
    assert (small.name, small.threads, small.capability) == ("copy_kernel", 128, 90)
    assert 8 <= small.registers < large.registers <= 255
    assert not small.spills and small.shared_bytes == 0
    assert (large.capability, tuned.threads, helper.name) == (80, 64, "calling_kernel")


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_named_with_the_compilers_words():
    with pytest.raises(CompileError, match=r"wrong_kernel does not compile for sm_90: CompilationError(.|\n)*arange"):
        resource_usage(wrong_kernel, COPY, {"BLOCK": 64})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": {**COPY, "m": "i32"}}, r"copy_kernel has no argument 'm', only x_ptr, out_ptr, n, BLOCK"),
        ({"constexprs": {}}, "copy_kernel needs a type or a constexpr value for its argument 'BLOCK'"),
        ({"signature": {**COPY, "n": "int"}}, "type of n must be like"),
        ({"signature": {**COPY, "BLOCK": "i32"}}, "BLOCK is given both a type"),
        ({"capability": 75}, "capability must be one of 80, 86, 89, 90, 100, 103, 120, got 75"),
        ({"num_warps": 3}, "num_warps must be a power of two from 1 to 32, got 3"),
        ({"num_stages": 0}, "num_stages must be a positive integer, got 0"),
        ({"divisible_by_16": ["y"]}, "divisible_by_16 names 'y'"),
    ],
)
def test_a_bad_request_is_refused_by_value(change, message):
    arguments = {"signature": COPY, "constexprs": {"BLOCK": 1024}, **change}
    with pytest.raises(ValueError, match=message):
        resource_usage(ek.copy_kernel, **arguments)


@pytest.mark.parametrize("kernel", [math.sqrt, "copy", lambda x: x])
def test_what_is_no_kernel_is_refused(kernel):
    with pytest.raises(TypeError, match=r"kernel must be a @triton\.jit function, got"):
        resource_usage(kernel, {})


def test_a_constexpr_that_cannot_be_sent_is_refused_by_name():
    with pytest.raises(TypeError, match=r"constexpr BLOCK must be a number, .* a tl dtype or a named tuple"):
        resource_usage(ek.copy_kernel, COPY, {"BLOCK": object()})


def test_standalone_source_brings_functions_and_constants_along():
    source = standalone_source(calling_kernel.fn)
    assert source.index("def scaled") < source.index("def calling_kernel")
    assert "FACTOR = tl.constexpr(3)" in source
    assert source.count("import triton.language as tl") == 1


x = object()  # a notebook's variable that happens to have the name of a kernel's own


@triton.jit
def shadowing_kernel(x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(x_ptr + tl.arange(0, BLOCK), FACTOR * x)


def test_a_kernels_own_variable_is_not_taken_for_a_global_of_the_same_name():
    source = standalone_source(shadowing_kernel.fn)
    assert "FACTOR = tl.constexpr(3)" in source
    assert source.count("x =") == 1


def attention_types(dtype: str) -> dict[str, str]:
    strides = [f"stride_{t}{axis}" for t in "qkvo" for axis in "bhn"]
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), f"*{dtype}") | {"lse_ptr": "*fp32"}
    return types | dict.fromkeys((*strides, "heads", "N_q", "N_k"), "i32") | {"scale_log2": "fp32"}


BACKWARD_TYPES = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "do_ptr", "dq_ptr"), "*bf16"),
    **dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32"),
    **{"N_q": "i32", "N_k": "i32", "scale": "fp32", "scale_log2": "fp32"},
}
BACKWARD_TILE = {"HEAD_DIM": 32, "BLOCK_M": 64, "BLOCK_N": 64, "CAUSAL": True, "PRECISION": "ieee"}


def matmul_types(dtype: str, strides: tuple[str, ...]) -> dict[str, str]:
    types = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), f"*{dtype}")
    return types | dict.fromkeys(("M", "N", "K", *(f"stride_{s}" for s in strides)), "i32")


def vectors(*names: str) -> dict[str, str]:
    return {**{f"{name}_ptr": "*bf16" for name in names}, "n": "i32"}


PAIR = {"x_ptr": "*bf16", "out_ptr": "*bf16"}
UNIT_STRIDES = {"stride_ak": 1, "stride_bn": 1}  # a launch treats an argument that is 1 as a constant
MATMUL_TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "PRECISION": "ieee"}
ROWS = PAIR | dict.fromkeys(("columns", "stride_x", "stride_out"), "i32")
KERNELS = [
    (ek.copy_kernel, PAIR | {"n": "i32"}, {"BLOCK": 1024}, 4, 3),
    (ek.strided_copy_kernel, PAIR | {"n_out": "i32", "stride": "i32"}, {"BLOCK": 1024}, 4, 3),
    (ek.gelu_kernel, PAIR | {"n": "i32"}, {"BLOCK": 1024}, 4, 3),
    (ek.gelu_tanh_kernel, PAIR | {"n": "i32"}, {"BLOCK": 1024}, 4, 3),
    (ek.relu_kernel, PAIR | {"n": "i32"}, {"BLOCK": 1024}, 4, 3),
    (ek.add_kernel, vectors("x", "y", "out"), {"BLOCK": 1024}, 4, 3),
    (ek.add_relu_kernel, vectors("x", "y", "out"), {"BLOCK": 1024}, 4, 3),
    (ek.chain_kernel, PAIR | {"n": "i32", "scale": "fp32", "shift": "fp32"}, {"LINKS": 8, "BLOCK": 1024}, 4, 3),
    (ek.sigmoids_forward_kernel, vectors("x", "s1", "s2", "y"), {"KEEP": True, "BLOCK": 1024}, 4, 3),
    (ek.sigmoids_backward_kept_kernel, vectors("dy", "s1", "s2", "dx"), {"BLOCK": 1024}, 4, 3),
    (ek.sigmoids_backward_kernel, vectors("dy", "x", "dx"), {"BLOCK": 1024}, 4, 3),
    (
        ek.gather_kernel,
        {"table_ptr": "*bf16", "index_ptr": "*i64", "out_ptr": "*bf16", "width": "i32", "stride_table": "i32"},
        {"BLOCK": 1024},
        4,
        3,
    ),
    (ek.naive_transpose_kernel, PAIR | {"rows": "i32", "columns": "i32"}, {"BLOCK": 256}, 4, 3),
    (ek.tiled_transpose_kernel, PAIR | {"rows": "i32", "columns": "i32"}, {"TILE": 32}, 4, 3),
    (ek.softmax_kernel, ROWS, {"BLOCK": 4096}, 8, 3),
    (ek.softmax_long_kernel, ROWS, {"BLOCK": 4096}, 8, 3),
    (
        ek.dot_partial_kernel,
        {"x_ptr": "*fp16", "y_ptr": "*fp16", "partial_ptr": "*fp32", "n": "i32"},
        {"BLOCK": 1024},
        4,
        3,
    ),
    (ek.sum_kernel, {"partial_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}, {"BLOCK": 1024}, 4, 3),
    (ek.histogram_kernel, {"x_ptr": "*i32", "counts_ptr": "*i32", "n": "i32", "bins": "i32"}, {"BLOCK": 1024}, 4, 3),
    (ek.naive_matmul_kernel, matmul_types("fp32", ("am", "ak", "bk", "bn")), {"BLOCK": 256}, 4, 3),
    (ek.tiled_matmul_kernel, matmul_types("bf16", ("am", "bk", "cm")), UNIT_STRIDES | MATMUL_TILE, 8, 3),
    (ek.descriptor_matmul_kernel, matmul_types("bf16", ("am", "bk", "cm")), MATMUL_TILE, 8, 3),
    *(
        (
            ek.flash_attention_forward_kernel,
            attention_types("bf16"),
            {"HEAD_DIM": head_dim, "BLOCK_M": m, "BLOCK_N": n, "CAUSAL": causal, "PRECISION": "ieee"},
            warps,
            stages,
        )
        for head_dim, (m, n, warps, stages) in GPU_TILES.items()
        for causal in (False, True)
    ),
    (
        ek.attention_delta_kernel,
        {"o_ptr": "*bf16", "do_ptr": "*bf16", "delta_ptr": "*fp32", "rows": "i32"},
        {"HEAD_DIM": 32, "BLOCK": 32},
        4,
        3,
    ),
    (
        ek.flash_attention_backward_kernel,
        {**BACKWARD_TYPES, "dk_ptr": "*bf16", "dv_ptr": "*bf16"},
        {**BACKWARD_TILE, "DQ": "none"},
        4,
        2,
    ),
    (ek.flash_attention_dq_kernel, BACKWARD_TYPES, BACKWARD_TILE, 4, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper([80, 90, 100]))
def test_every_example_kernel_compiles_without_a_gpu(capability, few):
    def asked(kernel, constexprs):
        if few and kernel is ek.flash_attention_forward_kernel and constexprs["HEAD_DIM"] != 64:
            return False
        masked = constexprs.get("CAUSAL", True)  # a mask takes more registers than none
        return masked or (capability == 90 and not few)

    usages = resource_usages(
        [
            Request(
                kernel, types, constexprs, capability, warps, stages, [n for n in types if "_ptr" in n or "stride" in n]
            )
            for kernel, types, constexprs, warps, stages in KERNELS
            if asked(kernel, constexprs)
        ]
    )
    assert {usage.name for usage in usages} == {name for name in vars(ek) if name.endswith("_kernel")}
    for usage in usages:
        assert usage.capability == capability
        assert usage.stack_bytes <= 16, f"{usage.name} spills {usage.stack_bytes} bytes a thread on sm_{capability}"
        assert usage.shared_bytes <= {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}[capability], usage
