"""Lab 2's kernels compile for Ampere, Hopper and Blackwell as they are tuned, and no register spills."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re

import pytest
from parameters import few_on_hopper, thorough_but

from utils.compile_only import Request, readings, resource_usages

import triton.language as tl  # isort: skip

PACKAGE = "solutions.lab2_triton_kernels"
#: Compute capability times ten -> bytes of shared memory that one program may take.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
#: A contiguous tensor: one leading axis and a stride of 1, as the launcher specialises them.
CONTIGUOUS = {"size_1": 1, "size_2": 1, "stride_1": 0, "stride_2": 0, "stride_col": 1}
TL_DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def kernel(module, name):
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


def request(module, name, capability, types, constants, warps, stages=3):
    """Pointers and sizes are multiples of 16, as those of large tensors are."""
    signature = {key: kind for key, kind in types.items() if key not in constants}
    return Request(kernel(module, name), signature, constants, capability, warps, stages, _aligned(signature))


def _aligned(signature):
    return [name for name, kind in signature.items() if kind[0] == "*" or name in ("columns", "stride_0")]


def row_requests(tuning, capability, dtype, columns):
    """The kernels that work on rows of ``columns``."""
    pointer, size = f"*{dtype}", 4 if dtype == "fp32" else 2
    sizes = {"num_rows": "i32", "columns": "i32", "stride_0": "i32"}
    x_out = {"x_ptr": pointer, "out_ptr": pointer}

    def constants(tile, **more):
        return {**CONTIGUOUS, "ROWS": tile.rows, "BLOCK": tile.block, "INT64": False, **more}

    tile = tuning.gelu(columns)
    flat = {**CONTIGUOUS, "BLOCK": tile.block, "INT64": False}
    yield request("gelu", "gelu_kernel", capability, {**x_out, "columns": "i32", "stride_0": "i32"}, flat, tile.warps)
    tile = tuning.bias_relu(columns)
    types = {**x_out, "bias_ptr": pointer, **sizes}
    yield request("bias_relu", "bias_relu_kernel", capability, types, constants(tile, stride_bias=1), tile.warps)
    tile = tuning.bias_relu_backward(columns)
    types = {"dout_ptr": pointer, "out_ptr": pointer, "dx_ptr": pointer, "partial_ptr": "*fp32", **sizes}
    types["tiles_per_split"] = "i32"
    staged = constants(tile, STAGES=tile.stages)
    yield request("bias_relu", "bias_relu_backward_kernel", capability, types, staged, tile.warps)
    tile = tuning.weighted_sum(columns, divmod(capability, 10))
    types = {**x_out, "weight_ptr": pointer, **sizes}
    known = constants(tile, stride_weight=1, columns=columns)
    yield request("weighted_sum", "weighted_sum_kernel", capability, types, known, tile.warps)
    tile = tuning.weighted_sum_dx(columns)
    types = {"dout_ptr": pointer, "weight_ptr": pointer, "dx_ptr": pointer, "num_rows": "i32", "columns": "i32"}
    plain = {"stride_weight": 1, "ROWS": tile.rows, "BLOCK": tile.block, "INT64": False}
    yield request("weighted_sum", "weighted_sum_dx_kernel", capability, types, plain, tile.warps)
    tile = tuning.weighted_sum_dweight(columns)
    types = {"dout_ptr": pointer, "x_ptr": pointer, "partial_ptr": "*fp32", **sizes, "tiles_per_split": "i32"}
    staged = constants(tile, STAGES=tile.stages)
    yield request("weighted_sum", "weighted_sum_dweight_kernel", capability, types, staged, tile.warps)
    tile = tuning.online_softmax(columns)
    flat = {**CONTIGUOUS, "BLOCK": tile.block, "INT64": False}
    types = {**x_out, "columns": "i32", "stride_0": "i32"}
    yield request("softmax", "softmax_long_kernel", capability, types, flat, tile.warps)
    if tuning.softmax_fits(columns, size):
        tile = tuning.softmax_short(columns)
        yield request("softmax", "softmax_short_kernel", capability, {**x_out, **sizes}, constants(tile), tile.warps)
    else:
        types = {**x_out, "words_ptr": "*i64", "columns": "i32", "parts": "i32", "stride_0": "i32"}
        for pairs in (False, True) if size == 2 else (False,):
            shared = tuning.multi_cta_softmax(columns, pairs)
            values = {**CONTIGUOUS, "BLOCK": shared.block, "PARTS": tuning.power_of_two(-(-columns // shared.block))}
            if pairs:
                del values["stride_col"]
                values["NOTHING"] = -8323200
            else:
                values["INT64"] = False
            name = "multi_cta_pairs_softmax_kernel" if pairs else "multi_cta_softmax_kernel"
            asked = request("multi_cta_softmax", name, capability, types, values, shared.warps)
            yield dataclasses.replace(asked, maxnreg=shared.registers)


def step_requests(tuning, capability, dtype, columns):
    """RMSNorm, where a row fits, and cross-entropy; ``tuning`` is asked for as it says that a GPU is there."""
    rms_norm, cross_entropy = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("rms_norm", "cross_entropy"))
    pointer, layout = f"*{dtype}", (1, 1, "i32:16", 0, 0, 1)  # a contiguous tensor
    sizes = {"num_rows": "i32", "columns": "i32", "x_layout": layout}
    if columns <= rms_norm.LONGEST_ROW:
        rows, block, warps = rms_norm.row_tile(columns)
        tensors = {"x_ptr": pointer, "weight_ptr": pointer, "rstd_ptr": "*fp32"}
        constants = {"stride_weight": 1, "ROWS": rows, "BLOCK": block}
        forward = {**tensors, "out_ptr": pointer, **sizes, "eps": "fp32"}
        yield request("rms_norm", "rms_norm_kernel", capability, forward, constants, warps)
        backward = {**tensors, "dout_ptr": pointer, "dx_ptr": pointer, "partial_ptr": "*fp32", **sizes}
        backward |= {"dout_layout": layout, "tiles_per_split": "i32"}
        staged = {**constants, "STAGES": 2}
        yield request("rms_norm", "rms_norm_backward_kernel", capability, backward, staged, warps)
    rows, block = cross_entropy.logit_tile(columns)
    constants = {"ROWS": rows, "BLOCK": block}
    shared = {"x_ptr": pointer, "target_ptr": "*i64", "lse_ptr": "*fp32", **sizes, "ignore_index": "i32"}
    name = "cross_entropy_kernel"
    yield request("cross_entropy", name, capability, {**shared, "loss_ptr": "*fp32"}, constants, 8)
    more = {"dloss_ptr": "*fp32", "dx_ptr": pointer}
    yield request("cross_entropy", "cross_entropy_backward_kernel", capability, {**shared, **more}, constants, 8)


def matmul_requests(tuning, capability, dtype):
    size = 4 if dtype == "fp32" else 2
    tile = tuning.tiled_matmul(size, divmod(capability, 10))
    names = ("M", "N", "K", "stride_am", "stride_bk", "stride_cm")
    types = {"a_ptr": f"*{dtype}", "b_ptr": f"*{dtype}", "c_ptr": f"*{dtype}", **dict.fromkeys(names, "i32")}
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": tile.group}
    constants = {"stride_ak": 1, "stride_bn": 1, **blocks, "INT64": False}
    pointers = [*(f"{matrix}_ptr" for matrix in "abc"), *names]
    product = kernel("tiled_matmul", "tiled_matmul_kernel")
    yield Request(product, types, constants, capability, tile.warps, tile.stages, pointers)
    if capability < 90:
        return  # there matmul goes through pointers
    tile = tuning.descriptor_matmul(size)
    blocks = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": tile.group}
    for a_col_major, b_col_major in ((False, False), (True, True)):
        a = (tile.k, tile.m) if a_col_major else (tile.m, tile.k)
        b = (tile.n, tile.k) if b_col_major else (tile.k, tile.n)
        c = (tile.m, tile.n // 2 if tile.subtile else tile.n)
        types = {f"{name}_desc": f"tensordesc<{dtype}[{x[0]}, {x[1]}]>" for name, x in (("a", a), ("b", b), ("c", c))}
        types |= {"M": "i32", "N": "i32", "K": "i32"}
        constants = {
            **blocks, "A_COL_MAJOR": a_col_major, "B_COL_MAJOR": b_col_major, "SUBTILE": tile.subtile,
            "FLATTEN": tile.flatten,
            "DTYPE": TL_DTYPES[dtype],
        }  # fmt: skip
        product = kernel("matmul", "descriptor_matmul_kernel")
        yield Request(product, types, constants, capability, tile.warps, tile.stages, [])


def assert_no_spills(requests):
    usages = resource_usages(requests)
    for asked, used in zip(requests, usages, strict=True):
        assert not used.spills, f"{used.name} spills {used.stack_bytes} bytes a thread: {asked.constexprs}"
        assert used.registers * used.threads <= 65536, f"{used.name} does not fit an SM: {used}"
        assert used.shared_bytes <= SHARED_MEMORY[asked.capability], (
            f"{used.name} asks for too much shared memory: {used}"
        )
    return usages


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_no_kernel_on_rows_spills(tuned, capability, few):
    widths = {"bf16": (1024, 8192, 32768, 65536, 262144), "fp32": (8192, 65536), "fp16": (8192,)}
    if few:
        widths = {"bf16": (8192, 65536)}
    elif capability != 90:  # tiles were measured there: elsewhere the widths that take another path
        widths = {"bf16": (8192, 65536), "fp32": (65536,)}
    requests = [
        asked
        for dtype, of_dtype in widths.items()
        for columns in of_dtype
        for asked in row_requests(tuned, capability, dtype, columns)
    ]
    assert_no_spills(requests)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_no_kernel_of_a_step_of_training_spills(tuned, capability, few):
    widths = {"bf16": (4096, 50_304)} if few else {"bf16": (100, 4096, 8192, 50_304), "fp32": (8192,)}
    requests = [
        asked
        for dtype, of_dtype in widths.items()
        for columns in of_dtype
        for asked in step_requests(tuned, capability, dtype, columns)
    ]
    assert_no_spills(requests)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_no_matrix_product_spills(tuned, capability, few):
    dtypes = ("bf16",) if few else ("bf16", "fp16", "fp32")
    requests = [asked for dtype in dtypes for asked in matmul_requests(tuned, capability, dtype)]
    assert_no_spills(requests)


@pytest.mark.slow
@pytest.mark.parametrize("capability", thorough_but(SHARED_MEMORY, 90))
def test_a_matrix_product_of_float32_adds_a_sum_for_each_step_to_its_total(tuned, monkeypatch, tmp_path, capability):
    for number, asked in enumerate(matmul_requests(tuned, capability, "fp32")):
        cache = tmp_path / str(number)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
        (used,) = resource_usages([asked])
        (ptx,) = cache.rglob("*.ptx")
        sums = asked.constexprs["BLOCK_M"] * asked.constexprs["BLOCK_N"] // used.threads  # in each thread
        fused = _count_float32("fma", ptx.read_text())
        assert _count_float32("add", ptx.read_text()) == sums, "the compiler made one chain of the steps' sums"
        assert fused == sums * asked.constexprs["BLOCK_K"]


@pytest.mark.slow
def test_the_compiler_reads_that_no_float32_product_is_rounded_to_tf32(tuned):
    """As a check asks it, also of products that say how many of them may be added up."""
    for found in readings(list(matmul_requests(tuned, 90, "fp32"))):
        assert [(product.dtype, product.precision) for product in found.products] == [("f32", "ieee")], found.name


def _count_float32(operation, ptx):
    """Float32 operations of one kind in a program's text; some instructions do two."""
    found = re.findall(rf"\b{operation}(?:\.rn)?\.f32(x2)?\b", ptx)
    return sum(2 if pair else 1 for pair in found)


@pytest.mark.slow
def test_as_many_programs_of_the_multi_cta_softmax_fit_an_sm_as_its_launch_counts_on(tuned):
    for dtype, columns in (("bf16", 65536), ("fp16", 65536), ("bf16", 262144), ("fp32", 65536)):
        requests = [each for each in row_requests(tuned, 90, dtype, columns) if "PARTS" in each.constexprs]
        for asked, used in zip(requests, assert_no_spills(requests), strict=True):
            shared = tuned.multi_cta_softmax(columns, "NOTHING" in asked.constexprs)
            assert used.registers <= shared.registers
            assert shared.programs_per_sm * used.threads * shared.registers <= 65536
            assert shared.programs_per_sm * used.threads <= 1536  # the fewest threads that an SM since Ampere holds
