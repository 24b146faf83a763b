"""Lab 6, exercises 6.5 and 6.7: packed documents and ragged groups of rows, against the package's tuned kernels."""

from __future__ import annotations

import pytest
import torch
from parameters import thorough_but

from solutions.lab6_frontiers import (
    document_attention,
    documents_simple,
    expert_matmul,
    experts_simple,
    flash_attention,
    grouped_matmul,
)
from solutions.lab6_frontiers.exercises import document_mask, document_traffic, expert_rows
from utils import runtime
from utils.checks.cases import Case
from utils.compile_only import Request, resource_usages
from utils.kernel_profile import profile_kernel

dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def starts_of(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(runtime.DEVICE, torch.int32)


def counts_of(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32, device=runtime.DEVICE)


# ---- 6.5: documents in one row
@dtypes
def test_attention_of_documents_is_the_tuned_one(dtype):
    torch.manual_seed(5)
    lengths = (40, 0, 1, 33, 0, 7)
    q, k, v = (torch.randn(sum(lengths), 2, 24).to(runtime.DEVICE, dtype) for _ in range(3))
    found = document_attention(q, k, v, starts_of(*lengths))
    tuned = flash_attention(q, k, v, causal=True, cu_seqlens_q=starts_of(*lengths))
    assert torch.allclose(found.float(), tuned.float(), atol=4 * torch.finfo(dtype).eps)


def test_a_document_does_not_see_the_ones_beside_it():
    torch.manual_seed(6)
    q, k, v = (torch.randn(70, 1, 16).to(runtime.DEVICE, torch.float16) for _ in range(3))
    starts = starts_of(20, 30, 20)
    found = document_attention(q, k, v, starts)
    k[:20], v[50:] = 9.0, 9.0
    assert torch.equal(document_attention(q, k, v, starts)[20:50], found[20:50])


def test_the_right_mask_of_the_check_is_that_of_each_document_alone():
    starts = starts_of(3, 0, 4).cpu()
    seen = document_mask.visible(7, starts)
    assert seen[:3, :3].equal(torch.ones(3, 3).tril().bool()) and seen[3:, 3:].equal(torch.ones(4, 4).tril().bool())
    assert not seen[:3, 3:].any() and not seen[3:, :3].any()


@pytest.mark.interpreted
def test_tiles_of_a_document_that_no_query_needs_are_not_read():
    size = 32
    q, k, v = (torch.randn(4 * size, 1, 16).to(runtime.DEVICE, torch.float16) for _ in range(3))
    read = {}
    for documents in (1, 2, 4):
        with profile_kernel() as profile:
            document_attention(q, k, v, starts_of(*[4 * size // documents] * documents))
        read[documents] = profile.by_argument["k_ptr"].bytes_loaded // (size * 32)
    assert read == {1: 1 + 2 + 3 + 4, 2: 2 * (1 + 2), 4: 4}


def test_what_may_be_read_is_counted_in_tiles():
    case = Case("equal documents", {"T": 96, "S": 3, "H": 1, "D": 16})
    assert document_traffic._keys(case, 32, 32) == 96 and document_traffic._steps(case, 32, 16) == 6
    whole = Case("one document", {"T": 96, "S": 1, "H": 1, "D": 16})
    assert document_traffic._keys(whole, 32, 32) == 32 + 64 + 96


@pytest.mark.parametrize(
    ("name", "change", "error", "says"),
    [
        ("q", torch.Tensor.float, TypeError, "q must be a tensor of torch.float16 or torch.bfloat16"),
        ("k", torch.Tensor.bfloat16, TypeError, "k must be a tensor of torch.float16"),
        ("v", lambda x: x[:1], ValueError, r"v must have shape \(4, 2, 16\)"),
        ("k", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "heads in one piece"),
        ("cu_seqlens", torch.Tensor.long, TypeError, "cu_seqlens must be a tensor of torch.int32"),
        ("cu_seqlens", lambda x: x[:1], ValueError, r"cu_seqlens must have shape \(2,\)"),
    ],
)
def test_documents_that_do_not_fit_are_refused(name, change, error, says):
    given = {each: torch.zeros(4, 2, 16, device=runtime.DEVICE).half() for each in "qkv"} | {"cu_seqlens": starts_of(4)}
    with pytest.raises(error, match=says):
        document_attention(**given | {name: change(given[name])})


# ---- 6.7: the grouped product
@dtypes
@pytest.mark.parametrize("counts", [(5, 0, 40, 0, 19), (0, 0, 64), (1, 1, 1, 1)])
def test_the_grouped_product_is_the_tuned_one(dtype, counts):
    torch.manual_seed(7)
    x = torch.randn(sum(counts), 50).to(runtime.DEVICE, dtype)
    weights = (torch.randn(len(counts), 50, 37) / 7).to(runtime.DEVICE, dtype)
    found, tuned = (f(x, weights, counts_of(*counts)) for f in (expert_matmul, grouped_matmul))
    assert torch.allclose(found.float(), tuned.float(), atol=4 * torch.finfo(dtype).eps)


@pytest.mark.interpreted
def test_an_expert_without_rows_is_never_read():
    x = torch.randn(40, 32).to(runtime.DEVICE, torch.float16)
    weights = torch.randn(64, 32, 32).to(runtime.DEVICE, torch.float16)
    weights[1:63] = torch.nan
    with profile_kernel() as profile:
        found = expert_matmul(x, weights, counts_of(20, *[0] * 62, 20))
    assert found.isfinite().all()
    assert profile.by_argument["weights_ptr"].bytes_loaded == 2 * 32 * 32 * 2
    assert profile.by_argument["x_ptr"].bytes_loaded == x.nbytes


def test_the_right_product_of_the_check_goes_expert_by_expert():
    x, weights = torch.randn(6, 4).double(), torch.randn(4, 4, 3).double()
    right = torch.cat([x[:1] @ weights[0], x[1:] @ weights[2]])
    assert torch.allclose(expert_rows.product(x, weights, torch.tensor([1, 0, 5, 0])), right)


@pytest.mark.parametrize(
    ("name", "change", "error", "says"),
    [
        ("x", torch.Tensor.float, TypeError, "x must be a tensor of torch.float16 or torch.bfloat16"),
        ("x", lambda x: x.T.contiguous().T, ValueError, "rows of neighbouring numbers"),
        ("x", lambda x: x[:0], ValueError, "x and weights must have elements"),
        ("weights", torch.Tensor.bfloat16, TypeError, "weights must be a tensor of torch.float16"),
        ("weights", lambda x: x.mT, ValueError, r"weights must have shape \(3, 8, 8\) and be contiguous"),
        ("counts", torch.Tensor.long, TypeError, "counts must be a tensor of torch.int32"),
        ("counts", lambda x: x[:2], ValueError, r"counts must have shape \(3,\)"),
    ],
)
def test_groups_that_do_not_fit_are_refused(name, change, error, says):
    given = {"x": torch.zeros(4, 8).half(), "weights": torch.zeros(3, 8, 8).half(), "counts": counts_of(1, 0, 3)}
    given = {key: value.to(runtime.DEVICE) for key, value in given.items()}
    with pytest.raises(error, match=says):
        expert_matmul(**given | {name: change(given[name])})


# ---- compiled
@pytest.mark.slow
@pytest.mark.parametrize("architecture", thorough_but((80, 90, 100), 90))
def test_the_kernels_compile_for_every_architecture_and_spill_nothing(architecture):
    tensors = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*bf16") | {"cu_seqlens_ptr": "*i32"}
    strides = dict.fromkeys(("stride_q", "stride_k", "stride_v"), ("i32:16", "i32:16"))
    requests = [
        Request(
            documents_simple.document_kernel,
            tensors | {"documents": "i32", "T": "i32"} | strides | {"scale_log2": "fp32"},
            {"HEAD_DIM": D, "BLOCK_D": D, "BLOCK_S": 32, "BLOCK_M": 64, "BLOCK_N": 64}, capability,
            divisible_by_16=tuple(tensors),
        )
        for D, capability in ((128, 80), (64, 90), (128, 90), (128, 100))
    ]  # fmt: skip
    tensors = dict.fromkeys(("x_ptr", "weights_ptr", "out_ptr"), "*bf16") | {"counts_ptr": "*i32"}
    requests += [
        Request(
            experts_simple.expert_kernel, tensors | dict.fromkeys(("E", "N", "K", "stride_x"), "i32"),
            {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}, capability, num_warps=8,
            divisible_by_16=(*tensors, "N", "K", "stride_x"),
        )
        for capability in (80, 90, 100)
    ]  # fmt: skip
    requests = [asked for asked in requests if asked.capability == architecture]
    assert requests and not any(used.spills for used in resource_usages(requests))
