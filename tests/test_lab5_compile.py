"""Lab 5's kernels compile for Ampere, Hopper and Blackwell as they are tuned, and keep their values in registers."""

from __future__ import annotations

import importlib
import importlib.util
import re

import pytest
import torch
from parameters import few_on_hopper, thorough_but

from utils.compile_only import Request, resource_usages

PACKAGE = "solutions.lab5_serving"
#: Compute capability times ten -> bytes of shared memory that one program may take.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POINTERS = {"block_tables_ptr": "*i32", "context_lens_ptr": "*i32", "query_starts_ptr": "*i32", "slots_ptr": "*i64"}
FLOAT_POINTERS = ("lse_ptr", "logsumexps_ptr", "outputs_ptr")
#: Strides that are 1 where tensors are contiguous; those that no launch specialises.
UNIT = ("d", "stride_bb", "stride_cs", "stride_ss", "stride_slot", "stride_lp")
#: Axes of the tensors whose strides are a tuple; the last one's stride is 1.
AXES = {"stride_q": 3, "stride_k": 4, "stride_v": 4, "stride_o": 4}
LOOSE = ("stride_bs", "stride_ls", "stride_lh")


def request(tuning, name, capability, dtype="bf16", head_dim=128, group=2, split=False):
    """One kernel as its launch specialises it for large contiguous tensors: strides are multiples of 16."""
    module = {"merge_parts_kernel": "merge", "write_kv_kernel": "cache_write"}.get(name, name.removesuffix("_kernel"))
    kernel = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    block_d = tuning.block_d(head_dim)
    constants = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_SIZE": 16, "GROUP": group, "PRECISION": "ieee"}
    target = divmod(capability, 10)
    if name == "paged_decode_kernel":
        tile = tuning.decode(head_dim, DTYPES[dtype], group, target)
        constants |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "SPLIT": split}
    elif name == "paged_extend_kernel":
        tile = tuning.extend(head_dim, DTYPES[dtype], group, target)
        constants |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "PADDED": tuning.power_of_two(group)}
    elif name == "merge_parts_kernel":
        tile = tuning.merge(48, block_d)
        constants |= {"BLOCK_P": tile.n}
    else:
        tile = tuning.write(8, block_d)
        constants |= {"BLOCK_G": tile.n}
    signature, used, aligned = {}, {}, []
    for argument in kernel.arg_names:
        if argument in constants:
            used[argument] = constants[argument]
        elif argument in AXES:
            axes = AXES[argument] - (argument == "stride_o" and name == "paged_extend_kernel")
            signature[argument] = ("i32:16",) * (axes - 1) + (1,)
        elif argument.startswith("stride") and (argument.endswith(UNIT[0]) or argument in UNIT):
            used[argument] = 1
        elif argument.endswith("_ptr"):
            wide = argument in FLOAT_POINTERS or (argument == "o_ptr" and split)
            signature[argument] = POINTERS.get(argument, "*fp32" if wide else f"*{dtype}")
            aligned.append(argument)
        else:
            signature[argument] = "fp32" if argument == "scale_log2" else "i32"
            if argument.startswith("stride") and argument not in LOOSE:
                aligned.append(argument)
    return Request(kernel, signature, used, capability, tile.warps, tile.stages, aligned)


def assert_fit(requests):
    """Every kernel fits an SM and keeps its values in registers."""
    for asked, used in zip(requests, resource_usages(requests), strict=True):
        case = f"{used.name} for sm_{asked.capability}: {dict(asked.constexprs)}"
        assert used.registers * used.threads <= 65536, f"{case} does not fit an SM: {used}"
        assert used.shared_bytes <= SHARED_MEMORY[asked.capability], f"{case} takes too much shared memory: {used}"
        assert used.stack_bytes == 0, f"{case} spills {used.stack_bytes} bytes a thread"


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_no_kernel_spills(tuned, capability, few):
    forms = (("bf16", 128, 2), ("bf16", 256, 4), ("fp32", 128, 1))
    requests = [
        request(tuned, name, capability, dtype, D, group)
        for name in ("paged_decode_kernel", "paged_extend_kernel")
        for dtype, D, group in forms[: 1 if few else None]
    ]
    assert_fit([*requests, request(tuned, "paged_decode_kernel", capability, split=True)])


#: Number formats, head dimensions and heads of queries for each of keys, of other models.
OTHERS = (("fp16", 40, 3), ("bf16", 64, 8), ("fp32", 256, 4))


@pytest.mark.slow
@pytest.mark.parametrize("form", thorough_but(OTHERS, OTHERS[0]))
def test_kernels_of_other_head_dimensions_fit_hopper(tuned, form):
    assert_fit([request(tuned, name, 90, *form) for name in ("paged_decode_kernel", "paged_extend_kernel")])


@pytest.mark.slow
def test_the_small_kernels_fit_hopper(tuned):
    assert_fit([request(tuned, name, 90) for name in ("merge_parts_kernel", "write_kv_kernel")])


@pytest.mark.slow
def test_hopper_loads_keys_and_values_16_bytes_at_a_time_and_ahead_of_their_use(tuned, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    resource_usages([request(tuned, "paged_decode_kernel", 90)])
    (ptx,) = tmp_path.rglob("*.ptx")
    copies = set(
        re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)", ptx.read_text())
    )
    assert {int(size, 0) for size in copies} == {4, 16}, copies  # entries of the block table, and rows of the cache
