"""Lab 3's kernels compile for Ampere, Hopper and Blackwell as they are tuned; what spills is listed here, with why."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import re

import pytest
import torch
from parameters import few_on_hopper, thorough_but

from solutions.capstone_hopper.steps import wall_kernel
from solutions.lab3_flash_attention.exercises.anchored import compiles_anchored
from solutions.lab3_flash_attention.tiles import Access
from utils.compile_only import CompileError, Request, resource_usages
from utils.environment import version_tuple

import triton  # isort: skip
import triton.language as tl  # isort: skip

PACKAGE = "solutions.lab3_flash_attention"
#: Compute capability times ten -> bytes of shared memory that one program may take.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
#: Those that the kernels are compiled for: of each generation the one for data centers.
CAPABILITIES = (80, 90, 100)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Kernel -> its module, the (B, H, N, D) tensors that it takes, those of them that it loads tiles of, and its table.
KERNELS = {
    "flash_forward_kernel": ("flash_forward", "q k v o", "q k v", "forward"),
    "dkdv_kernel": ("flash_backward", "q k v do dk dv", "q k v do", "dkdv"),
    "dq_kernel": ("flash_backward", "q k v do dq", "q k v do", "dq"),
}
#: Kernel, dtype and head_dim -> bytes of its registers that a thread keeps in memory, on some architecture: tiles that
#: were measured faster than those without.
SPILLS = {
    ("flash_forward_kernel", "fp32", 128): 520,  # takes 30 to 45 % less time all the same, as tuning.py says
    ("dkdv_kernel", "bf16", 256): 272,  # 17 to 26 %; so does 192, whose tile it is
    # through pointers: 17 to 70 % less time than tiles that keep more registers free
    **{("dkdv_kernel", "bf16", head_dim): spilled for head_dim, spilled in ((60, 16), (100, 48), (180, 80))},
    ("dq_kernel", "bf16", 180): 8,
}
#: Of the forward kernel with an anchor, dtype and head_dim -> the same: addresses, kept from the beginning of a program
#: to its end and not in its loops; it takes 20 to 30 % less time than the loop with a running maximum.
ANCHORED_SPILLS = {("bf16", 80): 24, ("bf16", 128): 24, ("fp16", 128): 24}
VERSION = version_tuple(triton.__version__)
#: Triton before 3.7 keeps up to this much more of some tiles in memory on sm_100, for which nothing is tuned yet.
OLD_TRITON_SM100 = 24 if VERSION < (3, 7) else 0
HEAD_DIMS = (64, 80, 128, 256)
#: The architecture that tiles were measured on.
MEASURED = 90


def masks(capability):
    """Without and with a causal mask; with one, which needs more registers, where tiles were not measured."""
    return (False, True) if capability == MEASURED else (True,)


def kernel(module, name):
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


def request(
    tuning, name, capability, dtype, head_dim, causal, group=1, whole=True, strided=False, single=False, anchored=None
):
    """One kernel as its launch specialises it for large tensors: sizes are multiples of 16.

    Tensors are contiguous; ``strided``: the columns of q lie apart, so that nothing has a descriptor. ``single``: there
    is one query and one key, numbers that Triton compiles in. ``anchored``: False is the forward kernel's tile where
    there is no anchored loop, True asks for that loop on any GPU, as the check of exercise 3.9 does.
    """
    module, tensors, tiled, table = KERNELS[name]
    without = anchored is False or single  # so short a row is not anchored
    wanted = (not without,) if table == "forward" else ()
    tile = getattr(tuning, table)(head_dim, DTYPES[dtype], causal, divmod(capability, 10), not strided, *wanted)
    if anchored:
        tile = tile._replace(anchored=True)
    block_d = tuning.block_d(head_dim)
    signature = {f"{x}_ptr": f"*{dtype}" for x in tensors.split()}
    if tile.descriptors:
        rows = {"q": tile.m, "do": tile.m, "k": tile.n, "v": tile.n}
        signature |= {f"{x}_ptr": f"tensordesc<{dtype}[1, 1, {rows[x]}, {block_d}]>" for x in tiled.split()}
    signature |= {"lse_ptr": "*fp32"} | ({} if table == "forward" else {"delta_ptr": "*fp32", "scale": "fp32"})
    length = 1 if single else "i32:16"
    signature |= {f"stride_{x}": ("i32:16", "i32:16", "i32:16", 1) for x in tensors.split()}
    signature |= {"sizes": ("i32", "i32", length, length), "scale_log2": "fp32", "nheads_in_l2": "i32"}
    if strided:
        signature["stride_q"] = ("i32",) * 4
    hints = (tile.loads_first, tile.masked or not whole) if table == "dkdv" else ()
    access = Access(head_dim, tl.int32, tile.descriptors, *hints)
    constants = {
        "BLOCK_D": block_d, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "GQA_GROUP_SIZE": group, "CAUSAL": causal,
        "EVEN_M" if table == "dkdv" else "EVEN_N": whole, "ACCESS": access,
    }  # fmt: skip
    if table == "forward":
        constants |= {"PRESCALE": False, "ANCHORED": tile.anchored}
    aligned = [key for key, kind in signature.items() if str(kind).startswith("*")]
    return Request(
        kernel(module, name), signature, constants, capability, tile.warps, tile.stages, aligned, tile.registers,
        warnings=capability == MEASURED,
    )  # fmt: skip


def assert_fit(requests):
    """Every kernel fits an SM and keeps its values in registers."""
    for asked, used in zip(requests, resource_usages(requests), strict=True):
        case = {key: asked.constexprs[key] for key in ("ACCESS", "CAUSAL", "BLOCK_M", "BLOCK_N", "GQA_GROUP_SIZE")}
        case |= {"q": asked.signature["q_ptr"], "capability": asked.capability}
        assert not any("serialized" in words for words in used.warnings), f"{used.warnings}: {case}"
        assert used.registers * used.threads <= 65536, f"{used.name} does not fit an SM: {used}"
        assert used.shared_bytes <= SHARED_MEMORY[asked.capability], f"{used.name} takes too much shared memory: {used}"
        dtype = re.search(r"(bf16|fp16|fp32)", asked.signature["q_ptr"])[0]
        allowed = SPILLS.get((used.name, dtype, asked.constexprs["ACCESS"].head_dim), 0)
        if asked.constexprs.get("ANCHORED"):
            allowed = ANCHORED_SPILLS.get((dtype, asked.constexprs["ACCESS"].head_dim), 0)
        allowed += OLD_TRITON_SM100 if asked.capability == 100 else 0
        assert used.stack_bytes <= allowed, f"{used.name} spills {used.stack_bytes} bytes a thread: {case}"


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(CAPABILITIES))
def test_no_kernel_of_half_precision_spills(tuned, capability, few, name):
    head_dims = (128,) if few else HEAD_DIMS if capability == MEASURED else (64, 128, 256)
    requests = [request(tuned, name, capability, "bf16", D, causal) for D in head_dims for causal in masks(capability)]
    if capability == MEASURED and not few:
        requests += [request(tuned, name, capability, "fp16", 128, True)]
    assert_fit(requests)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("capability", thorough_but(CAPABILITIES, MEASURED))
def test_no_kernel_of_grouped_heads_and_ragged_lengths_spills(tuned, capability, name):
    assert_fit([request(tuned, name, capability, "bf16", 128, True, group=4, whole=False)])


@pytest.mark.thorough
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_kernel_of_float32_spills(tuned, capability, name):
    head_dims = (64, 128, 256) if capability == MEASURED else (64, 256)
    requests = [request(tuned, name, capability, "fp32", D, causal) for D in head_dims for causal in masks(capability)]
    assert_fit(requests)


@pytest.mark.slow
@pytest.mark.parametrize("capability", thorough_but(CAPABILITIES, MEASURED))
def test_the_simple_forward_kernel_fits_an_sm(tuned, capability):
    config = tuned.forward(128, torch.bfloat16, True, divmod(capability, 10), described=False, anchored=False)
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*bf16") | {"lse_ptr": "*fp32"}
    signature |= {f"stride_{x}": ("i32:16", "i32:16", "i32:16", 1) for x in "qkvo"}
    signature |= {"num_heads": "i32", "Nq": "i32", "Nk": "i32", "scale_log2": "fp32"}
    constants = {
        "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": config.m, "BLOCK_N": config.n, "GQA_GROUP_SIZE": 1,
        "CAUSAL": True,
    }  # fmt: skip
    simple, pointers = kernel("flash_forward_simple", "flash_forward_simple_kernel"), [*signature][:5]
    asked = Request(simple, signature, constants, capability, config.warps, config.stages, pointers)
    (used,) = resource_usages([asked])
    assert not used.spills and used.shared_bytes <= SHARED_MEMORY[capability], used


#: Kernels of the sliding window: the (B, H, N, D) tensors that each takes, its other arguments, and its table.
WINDOW_KERNELS = {
    "window_forward_kernel": ("q k v o", {"lse_ptr": "*fp32", "scale_log2": "fp32"}, "forward"),
    "window_dkdv_kernel": ("q k v do dk dv", {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "scale": "fp32"}, "dkdv"),
    "window_dq_kernel": ("q k v do dq", {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "scale": "fp32"}, "dq"),
}


@pytest.mark.thorough
def test_the_kernels_of_the_sliding_window_fit_an_sm(tuned):
    requests = []
    for name, (tensors, others, table) in WINDOW_KERNELS.items():
        for capability, dtype in (*itertools.product(CAPABILITIES, ("bf16",)), (MEASURED, "fp32")):
            with_anchor = (False,) if table == "forward" else ()
            tile = getattr(tuned, table)(64, DTYPES[dtype], True, divmod(capability, 10), False, *with_anchor)
            signature = {f"{x}_ptr": f"*{dtype}" for x in tensors.split()} | others
            signature |= {f"stride_{x}": ("i32:16", "i32:16", "i32:16", 1) for x in tensors.split()}
            signature |= {"Nq": "i32", "Nk": "i32", "window": "i32"}
            constants = {"HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK_M": tile.m, "BLOCK_N": tile.n}
            pointers = [argument for argument in signature if argument.endswith("_ptr")]
            own = kernel("window", name)
            requests.append(Request(own, signature, constants, capability, tile.warps, tile.stages, pointers))
    for asked, used in zip(requests, resource_usages(requests), strict=True):
        assert used.registers * used.threads <= 65536 and used.shared_bytes <= SHARED_MEMORY[asked.capability], used


@pytest.mark.thorough
@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_of_tensors_without_descriptors_spills(tuned, name):
    cases = [(D, causal) for D in (60, 100, 180) for causal in masks(MEASURED)]
    asked = [request(tuned, name, MEASURED, "bf16", *case, whole=False, strided=True) for case in cases]
    assert not any(each.constexprs["ACCESS"].use_tma for each in asked)
    assert_fit(asked)


@pytest.mark.parametrize("table", ["forward", "dkdv", "dq"])
def test_tensors_without_descriptors_have_tiles_of_their_own(tuned, table):
    for head_dim in (60, 100, 180):
        for causal in (False, True):
            hopper, pointers, blackwell, ampere = (
                getattr(tuned, table)(head_dim, torch.bfloat16, causal, capability, described)
                for capability, described in (((9, 0), True), ((9, 0), False), ((10, 0), False), ((8, 0), True))
            )
            assert hopper.descriptors and not pointers.descriptors and blackwell == ampere
            assert pointers[5:] == tuned.Tile(0, 0, 0, 0)[5:]  # nothing that was measured with descriptors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "causal"), [(128, True), *(pytest.param(*c, marks=pytest.mark.thorough) for c in ((64, 0), (256, 1)))]
)
def test_the_running_maximum_that_hopper_has_before_exercise_3_9_does_not_spill(tuned, head_dim, causal):
    case = ("bf16", head_dim, bool(causal))
    asked = request(tuned, "flash_forward_kernel", MEASURED, *case, whole=False, anchored=False)
    assert not asked.constexprs["ANCHORED"]
    assert_fit([asked])


@pytest.mark.thorough
def test_the_anchored_loop_fits_where_the_check_of_3_9_alone_asks_for_it(tuned):
    cases = [(86, "bf16", 64), (86, "bf16", 128), (80, "fp16", 128), (100, "fp32", 16), (MEASURED, "fp32", 16)]
    assert all(compiles_anchored(DTYPES[dtype], divmod(capability, 10)) for capability, dtype, _ in cases)
    requests = [
        request(tuned, "flash_forward_kernel", capability, dtype, D, True, whole=False, anchored=True)
        for capability, dtype, D in cases
    ]
    for asked, used in zip(requests, resource_usages(requests), strict=True):
        assert asked.constexprs["ANCHORED"] and used.shared_bytes <= SHARED_MEMORY[asked.capability]


@pytest.mark.slow
def test_the_anchored_loop_in_16_bits_for_blackwell_is_asked_for_where_this_triton_compiles_it(tuned):
    compiles = compiles_anchored(torch.bfloat16, (10, 0))
    with contextlib.nullcontext() if compiles else pytest.raises(CompileError):
        resource_usages([request(tuned, "flash_forward_kernel", 100, "bf16", 64, True, anchored=True)])


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_one_query_and_one_key_fit(tuned, name):
    assert_fit([request(tuned, name, MEASURED, "bf16", 128, False, whole=False, single=True)])


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_hopper_multiplies_by_warpgroups_and_loads_tiles_by_tma(tuned, monkeypatch, tmp_path, name):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    resource_usages([request(tuned, name, 90, "bf16", 128, True)])
    (ptx,) = tmp_path.rglob("*.ptx")
    products = set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\b", ptx.read_text()))
    assert products == {"wgmma.mma_async"}, products
    assert "cp.async.bulk.tensor" in ptx.read_text() and "cp.async.cg" not in ptx.read_text()


@pytest.mark.slow
def test_what_the_assembler_warns_of_is_told_if_it_is_asked():
    signature = dict.fromkeys(("q_desc", "k_desc", "v_desc", "o_desc"), "tensordesc<bf16[128, 128]>")
    signature |= {"k_desc": "tensordesc<bf16[64, 128]>", "v_desc": "tensordesc<bf16[64, 128]>"}
    asked = Request(
        wall_kernel.attention_kernel, {**signature, "scale": "fp32", "length": "i32"},
        {"D": 128, "M": 128, "N": 64, "OVERLAP": True}, num_stages=2, divisible_by_16=["length"], warnings=True,
    )  # fmt: skip
    again, unasked = (
        resource_usages([asked, asked])[1],
        resource_usages([dataclasses.replace(asked, warnings=False)])[0],
    )
    told = [True] if VERSION < (3, 8) else []  # from 3.8 on Triton leaves nothing to warn of here
    assert [bool(re.match(r"\(C75\d\d\).* serialized", words)) for words in again.warnings] == told
    assert unasked == dataclasses.replace(again, warnings=())
