"""Lab 6's kernels for few bits compile for Ampere, Hopper and Blackwell as they are tuned, and spill nothing."""

from __future__ import annotations

import re

import pytest
from parameters import few_on_hopper

from solutions.lab6_frontiers import fp8_tuning, int4_tuning
from solutions.lab6_frontiers.fp8_write import write_kv_fp8_kernel
from solutions.lab6_frontiers.int4_expand import expand_int4_kernel
from solutions.lab6_frontiers.int4_matmul import add_parts_kernel
from solutions.lab6_frontiers.int4_rows import AFTER, int4_rows_kernel
from solutions.lab6_frontiers.int4_wide import int4_matmul_wide_kernel
from solutions.lab6_frontiers.paged_attention_fp8 import paged_decode_fp8_kernel
from solutions.lab6_frontiers.paged_extend_fp8 import paged_extend_fp8_kernel
from utils import runtime
from utils.compile_only import Request, resource_usages

#: Compute capability times ten -> bytes of shared memory that one program may take.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
STRIDES = {
    "stride_q": ("i32:16", "i32:16", 1),
    "stride_k": ("i32:16", "i32:16", "i32:16", 1, "i32", 1),  # a cache's, then its scales'
    "stride_v": ("i32:16", 1, "i32:16", "i32:16", "i32", 1),
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """The tuning tables answer as on a GPU."""
    monkeypatch.setattr(runtime, "INTERPRET", False)


def int4_request(batch, capability, dtype="bf16", even=True, outputs=4096):
    """The product of a batch as its launch specialises it."""
    tile = int4_tuning.int4(batch, outputs, 32, 132)
    split = tile.splits > 1
    constants = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "EVEN": even, "SPLIT": split, "ASSEMBLY": True, "stride_xk": 1}
    signature = {
        "x_ptr": f"*{dtype}", "codes_ptr": "*i16", "scales_ptr": "*fp32", "o_ptr": "*fp32" if split else f"*{dtype}",
        "stride_xm": "i32", "M": "i32", "N": "i32", "groups": "i32", "splits": "i32",
    }  # fmt: skip
    aligned = ["x_ptr", "codes_ptr", "scales_ptr", "o_ptr", "stride_xm", *(["N"] if even else [])]
    return Request(int4_matmul_wide_kernel, signature, constants, capability, tile.warps, tile.stages, aligned)


def few_request(outputs, capability, dtype="bf16", aligned=True):
    """The product of up to 8 activations; from Hopper on it may start early."""
    tile = int4_tuning.few(outputs, 132)
    constants = {
        "BLOCK_G": tile.groups, "STAGES": tile.stages, "DTYPE": "bf16" if dtype == "bf16" else "f16",
        "NEXT": tile.next if capability >= 90 else AFTER, "WARPS": tile.warps,
    }  # fmt: skip
    signature = {
        "x_ptr": "*i32", "codes_ptr": "*i32", "scales_ptr": "*fp32", "o_ptr": f"*{dtype}", "M": "i32", "N": "i32",
        "groups": "i32",
    }  # fmt: skip
    names = ["x_ptr", "codes_ptr", "scales_ptr", "o_ptr", *(["N"] if aligned else [])]
    return Request(int4_rows_kernel, signature, constants, capability, tile.warps, 1, names)


def pointers(dtype, code, split=False):
    """Types of the pointers of all fp8 kernels."""
    names = {
        "q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "k_cache_ptr": code, "v_cache_ptr": code,
        "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32", "block_tables_ptr": "*i32", "context_lens_ptr": "*i32",
        "query_starts_ptr": "*i32", "slots_ptr": "*i32", "o_ptr": "*fp32" if split else f"*{dtype}", "lse_ptr": "*fp32",
    }  # fmt: skip
    return names


def fp8_request(kernel, capability, dtype="bf16", head_dim=128, group=4, split=False, key_heads=8):
    """One kernel over an fp8 cache as its launch specialises it for the cache that is allocated here."""
    native = capability >= 89
    constants = {
        "GROUP": group, "PADDED": fp8_tuning.power_of_two(group), "BLOCK_SIZE": 16, "HEAD_DIM": head_dim,
        "BLOCK_D": fp8_tuning.block_d(head_dim), "SPLIT": split, "NATIVE": native, "stride_slot": 1,
    }  # fmt: skip
    types = pointers(dtype, "*fp8e4nv" if native else "*u8", split) | {"scale_log2": "fp32"} | STRIDES
    warps, stages, registers = 4, 3, None
    if kernel is paged_decode_fp8_kernel:
        m, n, warps, stages, registers = fp8_tuning.decode(head_dim, group, key_heads, 132)
        constants |= {"M": m, "WARPS": warps, "N": n}
        types["stride_k"] = (16 * 8 * head_dim, 8 * head_dim, head_dim, 1, 8, 1)  # of 8 key heads
        types["stride_v"] = (16 * 8 * head_dim, 1, 16 * head_dim, 16, 8, 1)
    elif kernel is paged_extend_fp8_kernel:
        m, n, warps, stages = fp8_tuning.extend(head_dim, fp8_tuning.power_of_two(group), 16, native)
        constants |= {"BLOCK_M": m, "BLOCK_N": n}
    if kernel is write_kv_fp8_kernel:
        cache_strides = {"stride_kc": STRIDES["stride_k"], "stride_vc": STRIDES["stride_v"]}
        types |= {"stride_k": STRIDES["stride_q"], "stride_v": STRIDES["stride_q"], **cache_strides}
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: types.get(name, "i32") for name in names}
    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    aligned = [name for name in names if name.endswith("_ptr")]
    return Request(kernel, signature, used, capability, warps, stages, aligned, registers)


def assert_fit(requests):
    """Every kernel fits an SM and keeps its values in registers."""
    for asked, used in zip(requests, resource_usages(requests), strict=True):
        case = f"{used.name} for sm_{asked.capability}: {dict(asked.constexprs)}"
        assert used.registers * used.threads <= 65536, f"{case} does not fit an SM: {used}"
        assert used.shared_bytes <= SHARED_MEMORY[asked.capability], f"{case} takes too much shared memory: {used}"
        assert used.stack_bytes == 0, f"{case} spills {used.stack_bytes} bytes a thread"


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_no_product_with_4_bit_weights_spills(capability, few):
    requests = [int4_request(batch, capability) for batch in ([64] if few else int4_tuning.TILES)]
    requests += [few_request(outputs, capability) for outputs in ([4096] if few else (4096, 14336, 28672))]
    if not few:
        requests += [int4_request(64, capability, "fp16", even=False), few_request(4096, capability, "fp16", False)]
        requests += [int4_request(256, capability), int4_request(256, capability, outputs=1024)]
    expanded = {"codes_ptr": "*i16", "scales_ptr": "*fp32", "o_ptr": "*bf16", "N": "i32"}
    requests.append(Request(expand_int4_kernel, expanded, {"BLOCK_N": 32, "ASSEMBLY": True}, capability))
    parts = {"parts_ptr": "*fp32", "o_ptr": "*bf16", "size": "i32"}
    requests.append(Request(add_parts_kernel, parts, {"PARTS": 4, "BLOCK": 1024}, capability))
    assert_fit(requests)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "few"), few_on_hopper(SHARED_MEMORY))
def test_no_kernel_over_an_fp8_cache_spills(capability, few):
    forms = (("bf16", 128, 4), ("fp16", 64, 8), ("bf16", 256, 4), ("bf16", 128, 16), ("fp16", 256, 16))
    requests = [
        fp8_request(kernel, capability, dtype, head_dim, group)
        for kernel in (paged_decode_fp8_kernel, paged_extend_fp8_kernel)
        for dtype, head_dim, group in forms[: 1 if few else None]
    ]
    requests.append(fp8_request(paged_decode_fp8_kernel, capability, split=True))
    requests += [  # one warp a program
        fp8_request(paged_decode_fp8_kernel, capability, *form, key_heads=2048) for form in forms[: 1 if few else None]
    ]
    assert_fit([*requests, fp8_request(write_kv_fp8_kernel, capability)])


@pytest.mark.slow
def test_hopper_unpacks_in_registers_and_loads_16_bytes_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    resource_usages([int4_request(64, 90), few_request(4096, 90)])
    for path in tmp_path.rglob("*.ptx"):
        ptx = path.read_text()
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)", ptx)
        sizes = {int(size, 0) for size in copies}
        assert sizes == ({4, 16} if "m16n8k16" in ptx else {16})  # where activations are few, scales are copied, too
        loop = ptx[ptx.index("lop3.b32") : ptx.rindex("lop3.b32")]
        assert "st.shared" not in loop and "cvt" not in loop  # from shared memory to a product without a detour


@pytest.mark.slow
def test_hopper_converts_two_numbers_of_the_cache_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    resource_usages([fp8_request(paged_decode_fp8_kernel, 90)])
    (ptx,) = (path.read_text() for path in tmp_path.rglob("*.ptx"))
    assert "cvt.rn.f16x2.e4m3x2" in ptx and "bf16x2.e4m3" not in ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)", ptx)
    assert 16 in {int(size, 0) for size in copies}
