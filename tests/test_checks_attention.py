"""The checks on the kernel that the course is about: classic mistakes in an attention forward are told apart."""

import functools
import math

import pytest
import torch

from utils.checks.cases import Case, Cases
from utils.checks.core import CheckFailed, Exercise
from utils.checks.diagnoses import same_as
from utils.checks.forbid import Rules
from utils.checks.kernel import check_kernel
from utils.checks.tiling import Tiling
from utils.checks.traffic import Budget, Passes

import triton  # isort: skip
import triton.language as tl  # isort: skip

BLOCK = 16


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, stride_q, stride_k, scale, Nq, Nk,
    D: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row, d = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    in_q = (row < Nq)[:, None]
    q = tl.load(q_ptr + head * stride_q + row[:, None] * D + d[None, :], mask=in_q, other=0.0)
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    accumulator = tl.zeros((BLOCK, D), tl.float32)
    shift = 0 if BUG == "mask at the top left" else Nk - Nq
    last = Nk if not CAUSAL else tl.minimum(Nk, tl.maximum(0, (tile + 1) * BLOCK + shift))
    if BUG == "all key blocks":
        last = Nk
    for start in range(0, last, BLOCK):
        col = start + tl.arange(0, BLOCK)
        k = tl.load(k_ptr + head * stride_k + col[:, None] * D + d[None, :], mask=(col < Nk)[:, None], other=0.0)
        v = tl.load(v_ptr + head * stride_k + col[:, None] * D + d[None, :], mask=(col < Nk)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (col < Nk)[None, :] if BUG != "padded keys" else (col < Nk + BLOCK)[None, :]
        if CAUSAL:
            seen = seen & (col[None, :] <= row[:, None] + shift)
        s = tl.where(seen, s, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(s, 1))
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = tl.exp(s - finite[:, None])
        rescale = tl.exp(maximum - finite)
        total = total * (1.0 if BUG == "sum not rescaled" else rescale) + tl.sum(p, 1)
        if BUG != "accumulator not rescaled":
            accumulator = accumulator * rescale[:, None]
        accumulator += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum
    o = accumulator / tl.where(total == 0, 1.0, total)[:, None]
    lse = tl.log(total) if BUG == "logsumexp without maximum" else maximum + tl.log(total)
    tl.store(o_ptr + head * Nq * D + row[:, None] * D + d[None, :], o.to(o_ptr.dtype.element_ty), mask=in_q)
    tl.store(lse_ptr + head * Nq + row, lse, mask=row < Nq)


def attention(q, k, v, causal=False, bug=""):
    """Attention of q (b, h, nq, d) with k and v (b, h, nk, d), and its logsumexp (b, h, nq) in float32."""
    b, h, nq, d = q.shape
    o, lse = torch.empty_like(q), torch.empty(b, h, nq, dtype=torch.float32, device=q.device)
    if bug == "writes the scores":
        torch.zeros(b, h, nq, k.shape[2], device=q.device)
    scale = 1.0 if bug == "no scale" else d**-0.5
    attention_kernel[(triton.cdiv(nq, BLOCK), b * h)](
        q, k, v, o, lse, q.stride(1), k.stride(1), scale, nq, k.shape[2], D=d, BLOCK=BLOCK, CAUSAL=causal, BUG=bug
    )
    return o, lse


def scores(q, k, causal, scale=None, top_left=False):
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    nq, nk = s.shape[-2:]
    seen = torch.ones(nq, nk, dtype=torch.bool, device=q.device).tril(0 if top_left else nk - nq)
    return s.masked_fill(~seen, -math.inf) if causal else s


def reference(q, k, v, causal=False, **changes):
    s = scores(q, k, causal, **changes)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v, torch.logsumexp(s.float() if s.dtype.itemsize < 4 else s, -1)


EXERCISE = {
    "exercise": Exercise("3.2", "forward kernel"),
    "reference": reference,
    "cases": Cases(
        {"b": range(1, 2), "h": range(2, 3), "q": BLOCK, "k": BLOCK, "d": (16,)},
        dtypes=(torch.float32, torch.bfloat16),
        layouts=(),
        count=1,
        options={"causal": (False, True)},
        fixed=[("many keys", {"b": 1, "h": 2, "q": 20, "k": 4 * BLOCK, "d": 16})],
    ),
    "inputs": lambda case: (
        case.tensor("q", "b", "h", "q", "d"),
        case.tensor("k", "b", "h", "k", "d"),
        case.tensor("v", "b", "h", "k", "d"),
    ),
    "outputs": ("o", "lse"),
    "tiling": {
        "o": Tiling("b h q d", tiles={"q": BLOCK}, grid=("q", "b*h"), noun="query tile", loops={"k": BLOCK}),
        "lse": Tiling("b h q", tiles={"q": BLOCK}, grid=("q", "b*h"), noun="query tile", loops={"k": BLOCK}),
    },
    "diagnose": (
        same_as(lambda q, k, v, causal: reference(q, k, v, causal, scale=1.0), "the scores are not divided by sqrt(d)"),
        same_as(
            lambda q, k, v, causal: reference(q, k, v, causal, top_left=True),
            "the causal mask starts at the top left; with Nq != Nk it ends at the bottom right",
        ),
        (
            lambda e: (
                e.difference.name == "lse" and e.close(e.right - scores(*e.args64[:2], **e.case.options).amax(-1))
            ),
            "the logsumexp lacks the maximum: it is m + log(sum)",
        ),
    ),
    "budget": Budget(
        {"q_ptr": Passes("b", "h", "q", "d")},
        {"o_ptr": Passes("b", "h", "q", "d"), "lse_ptr": Passes("b", "h", "q", element_size=4)},
        flops=lambda case: flops(case),
        exact=True,
    ),
    "forbidden": Rules(largest=lambda case: case.numel("b", "h", "q", "d")),
}


def flops(case: Case) -> int:
    """Two dots for each tile of scores that holds an unmasked element."""
    nq, nk, d = (case.sizes[name] for name in "qkd")
    tiles = 0
    for first in range(0, nq, BLOCK):
        last = min(nk, max(0, first + BLOCK + nk - nq)) if case.options["causal"] else nk
        tiles += math.ceil(last / BLOCK)
    return case.numel("b", "h") * tiles * 4 * BLOCK * BLOCK * d


def check(bug: str = "", seed: int = 1729) -> None:
    check_kernel(student=functools.partial(attention, bug=bug), seed=seed, **EXERCISE)


def test_a_right_attention_passes_in_both_dtypes_causal_or_not():
    check(seed=3)


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        ("sum not rescaled", "right while one tile covers k, wrong from the second tile on"),
        ("accumulator not rescaled", "right while one tile covers k, wrong from the second tile on"),
        ("no scale", "the scores are not divided by sqrt(d)"),
        ("mask at the top left", "the causal mask starts at the top left"),
        ("padded keys", "only sizes that are no multiple of the tile fail"),
        ("logsumexp without maximum", "the logsumexp lacks the maximum"),
        ("all key blocks", "some tiles that are multiplied cannot change the result: skip them"),
        ("writes the scores", "keep one tile of it on chip"),
    ],
)
def test_a_classic_mistake_is_told_its_cause(bug, says):
    with pytest.raises(CheckFailed) as failure:
        check(bug)
    text = str(failure.value)
    print(text)
    assert says in text
    if "elements differ" in text:
        name = "lse" if "logsumexp" in bug else "o"
        assert (
            f"first mismatch: {name}[b=0, h=0, q=" in text and ": query tile q " in text and "wrong query tiles" in text
        )
    if "mask" in bug or "blocks" in bug:
        assert "causal=True" in text.splitlines()[-1]
