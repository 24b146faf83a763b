"""Lab 6's kernels compile for Ampere, Hopper and Blackwell, where the formats exist, and keep values in registers."""

from __future__ import annotations

import importlib
import itertools
import re

import pytest
import torch
from parameters import few_on_hopper

from utils.compile_only import Request, resource_usages

import triton.language as tl  # isort: skip

PACKAGE = "solutions.lab6_frontiers"
#: Compute capability times ten -> bytes of shared memory that one program may take.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
#: Format -> the kernels' dtype, its largest number, and the type of a pointer to codes; Ampere has no 8-bit floats.
FORMATS = {
    "e4m3": (tl.float8e4nv, 448.0, "*fp8e4nv"),
    "e5m2": (tl.float8e5, 57344.0, "*fp8e5"),
    "int8": (tl.int8, 127.0, "*i8"),
}
OUT = {"bf16": (torch.bfloat16, tl.bfloat16), "fp32": (torch.float32, tl.float32)}


def kernel(module, name):
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


def request(asked, types, constants, capability, warps, stages=3):
    """Pointers and integers are multiples of 16, as those of large tensors are."""
    types = {name: kind for name, kind in types.items() if name in asked.arg_names and name not in constants}
    constants = {name: value for name, value in constants.items() if name in asked.arg_names}
    aligned = [name for name, kind in types.items() if kind == "i32" or kind[0] == "*"]
    return Request(asked, types, constants, capability, warps, stages, aligned)


def quantizing(tuning, capability, format):
    """The quantising kernels with a scale for each row and for each block."""
    quantize_kernels = importlib.import_module(f"{PACKAGE}.quantize_kernels")
    dtype, largest, codes = FORMATS[format]
    types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "codes_ptr": codes, "scales_ptr": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(("num_rows", "columns", "stride_row", "stride_sr", "stride_sb"), "i32")
    constants = {"stride_col": 1, "LARGEST": largest, "DTYPE": dtype}
    yield request(
        kernel("quantize_kernels", "quantize_squares_kernel"), types, {**constants, "BLOCK": 128}, capability, 8
    )
    widths = (4096, quantize_kernels.LONGEST_ROW) if format == "e4m3" or capability == 80 else (4096,)
    names = ("quantize", "swiglu_quantized", "rms_norm_quantized")
    for name, columns, block in itertools.product(names, widths, (None, 128)):
        asked = kernel("quantize_kernels" if name == "quantize" else "fused_quantize", f"{name}_kernel")
        parts = block and name != "rms_norm_quantized"
        rows, width, warps = tuning.column_tile(columns) if parts else tuning.row_tile(columns)
        tile = {"stride_sr": 1, "ROWS": rows, "BLOCK": width, "GROUPS": width // block if block else 1}
        if columns == 4096 or not parts:  # parts of rows are the same for all widths
            yield request(asked, types, {**constants, **tile}, capability, warps)


def product(tuning, capability, kind, described=True, c_described=True, out="bf16"):
    """A product as its launch specialises it for large matrices."""
    torch_dtype, dtype = OUT[out]
    types = {"a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32"}
    types |= dict.fromkeys(("M", "N", "K", "stride_a", "stride_b"), "i32")
    if kind == "row":
        tile = tuning.scaled_matmul(described, torch_dtype, divmod(capability, 10))
        asked, columns = kernel("scaled_matmul", "scaled_matmul_kernel"), tile.n // 2 if tile.halves else tile.n
        types |= {"stride_as": "i32", "stride_bs": "i32"}
    else:
        tile = tuning.block_scaled_matmul(kind == "square", divmod(capability, 10))
        asked, columns = kernel("scaled_matmul", "block_scaled_matmul_kernel"), tile.n
        types |= {"strides_as": (1, "i32:16"), "strides_bs": ("i32", 1) if kind == "square" else (1, "i32:16")}
    constants = {
        "stride_as": 1, "stride_bs": 1, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k,
        "GROUP_M": tile.group, "DESCRIBED": described, "C_DESCRIBED": c_described, "HALVES": tile.halves,
        "FLATTEN": tile.flatten, "DTYPE": dtype, "SQUARE": kind == "square",
    }  # fmt: skip
    for name, rows in (("a", tile.m), ("b", tile.n)):
        types[name] = f"tensordesc<fp8e4nv[{rows}, {tile.k}]>" if described else "*fp8e4nv"
    types["c"] = f"tensordesc<{out}[{tile.m}, {columns}]>" if c_described else f"*{out}"
    return request(asked, types, constants, capability, tile.warps, tile.stages)


def grouped(tuning, capability, dtype):
    """The product of an expert layer as forward and backward launch it, and the gradient of its weights."""
    size, types = (4 if dtype == "fp32" else 2), {"row_ends_ptr": "*i32", "tile_ends_ptr": "*i32"}
    types |= dict.fromkeys(("x_ptr", "weights_ptr", "out_ptr", "dout_ptr", "dweights_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("experts", "N", "K", "stride_x", "stride_do", "stride_we", "stride_wk", "stride_wn"), "i32")
    tile = tuning.grouped_matmul(size, divmod(capability, 10))
    sides = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": tile.group}
    for contiguous in ("stride_wn", "stride_wk"):
        constants = {**sides, "EXPERTS": 64, "EVEN_K": True, contiguous: 1}
        asked = kernel("grouped_matmul", "grouped_matmul_kernel")
        yield request(asked, types, constants, capability, tile.warps, tile.stages)
    tile = tuning.grouped_weight_gradient(size, divmod(capability, 10))
    sides = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    asked = kernel("grouped_matmul", "grouped_weight_gradient_kernel")
    yield request(asked, types, sides, capability, tile.warps, tile.stages)
    if capability == 90:  # only Hopper's kernels take tiles from tables
        types = {"counts_ptr": "*i64", "table_ptr": "*i32", "tiles_ptr": "*i32", "experts": "i32", "length": "i32"}
        for name in ("tile_table_kernel", "largest_first_kernel"):
            constants = {"EXPERTS": 64, "BLOCK_M": 128, "ENTRIES": 128}
            yield request(kernel("expert_tables", name), types, constants, capability, 1)


def assert_fit(requests):
    """Every kernel fits an SM and keeps its values in registers."""
    for asked, used in zip(requests, resource_usages(requests), strict=True):
        case = f"{used.name} for sm_{asked.capability}: {dict(asked.constexprs)}"
        assert used.registers * used.threads <= 65536, f"{case} does not fit an SM: {used}"
        assert used.shared_bytes <= SHARED_MEMORY[asked.capability], f"{case} takes too much shared memory: {used}"
        assert used.stack_bytes == 0, f"{case} spills {used.stack_bytes} bytes a thread"


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_no_quantising_kernel_spills(tuned, capability, few):
    formats = ("int8",) if capability == 80 else ("e4m3",) if few else FORMATS
    assert_fit([each for format in formats for each in quantizing(tuned, capability, format)])


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper([90, 100]))
def test_no_product_spills(tuned, capability, few):
    outs = ("bf16",) if few else OUT
    requests = [product(tuned, capability, kind, out=out) for kind in ("row", "block", "square") for out in outs]
    if not few:
        requests += [product(tuned, capability, "row", described, False) for described in (True, False)]
        requests.append(product(tuned, capability, "square", False, False))
    assert_fit(requests)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_no_product_of_an_expert_layer_spills(tuned, capability, few):
    dtypes = ("bf16",) if few else ("bf16", "fp32")
    assert_fit([each for dtype in dtypes for each in grouped(tuned, capability, dtype)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["row", "square"])
def test_hopper_multiplies_8_bit_numbers_in_its_tensor_cores_as_they_are(tuned, monkeypatch, tmp_path, kind):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    asked = product(tuned, 90, kind)
    resource_usages([asked])
    (ptx,) = (path.read_text() for path in tmp_path.rglob("*.ptx"))
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx)
    assert products == [f"m64n{asked.constexprs['BLOCK_N']}k32.f32.e4m3.e4m3"] * 4  # 128 of K, 32 at a time
    assert not re.search(r"cvt\S*e4m3", ptx), "operands are converted before they are multiplied"
    assert ptx.count("cp.async.bulk.tensor.2d.shared") >= 2
