"""Lab 6's products, decode kernels and grouped products beside their baselines: random inputs, calls, what is right.

Each function yields cases (:class:`benchmarks.frontier_timing.Case`). With ``only`` it runs one function of them once,
so that its kernels are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.frontier_timing import CALLS, GRAPH, SEVERAL, Call, Case, Comparison, relative_error
from solutions.lab5_serving.paged_decode import paged_attention_decode as paged_attention_decode_16
from solutions.lab6_frontiers.fp8_cache import quantize_cache
from solutions.lab6_frontiers.grouped_matmul import grouped_matmul
from solutions.lab6_frontiers.int4_matmul import int4_matmul
from solutions.lab6_frontiers.int4_packing import GROUP, PackedInt4, pack_int4
from solutions.lab6_frontiers.mla_decode import mla_decode
from solutions.lab6_frontiers.mla_torch import latent_attention
from solutions.lab6_frontiers.paged_attention_fp8 import paged_attention_decode
from solutions.lab6_frontiers.quantize_kernels import quantize_blocks, quantize_rows
from solutions.lab6_frontiers.scaled_matmul import scaled_matmul
from utils import runtime
from utils.formats import Quantized, quantize

FP8, INT4, CACHE, LATENTS, GROUPED = "fp8 products", "int4 weights", "fp8 cache", "latents", "grouped products"
FORWARD, BACKWARD = "forward", "backward"
OURS, COPY, LARGE_COPY, BF16 = "ours", "copy", "large copy", "bf16"
ROWS, SQUARES, BLOCKS = "ours, rows", "ours, squares", "ours, blocks"
FAST, EXACT = "_scaled_mm, fast", "_scaled_mm, exact"
#: Rows of a product, and sequences of a step of decode, that are held against float64.
CHECKED_ROWS, CHECKED_SEQUENCES = 32, 2


class CacheShape(NamedTuple):
    """A step of decode over a paged cache."""

    sequences: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int


class LatentShape(NamedTuple):
    """A step of decode over latents."""

    sequences: int
    context: int
    heads: int
    latent_dim: int
    rope_dim: int
    block_size: int


def normal(*size: int) -> Tensor:
    """Random bf16."""
    return torch.randn(size, device=runtime.DEVICE, dtype=torch.bfloat16)


def several(call: Call) -> Callable[[], list[Call]]:
    """What :meth:`Case.add` takes: one call, several times."""
    return lambda: [call] * SEVERAL


def copies_of(nbytes: int, number: int = 1) -> list[Call]:
    """Copies that read and write ``nbytes`` in all, each of other memory."""
    source = torch.randint(0, 256, (number, nbytes // 2), dtype=torch.uint8, device=runtime.DEVICE)
    target = torch.empty_like(source)
    return [functools.partial(target[i].copy_, source[i]) for i in range(number)]


# ---- products --------------------------------------------------------------------------------------------------------


def _right_rows(a: Quantized | Tensor, b: Quantized | Tensor) -> Callable[[Tensor], float]:
    """How far some rows of a product a b^T are from float64 of the operands, dequantised."""

    def error(c: Tensor) -> float:
        some = slice(0, None, max(1, len(c) // CHECKED_ROWS))
        left, right = (x if isinstance(x, Tensor) else x.dequantize() for x in (a, b))
        return relative_error(c[some], left[some].double() @ right.double().T)

    return error


def products(n: int, hows: Sequence[str] = (GRAPH, CALLS), only: str | None = None) -> Iterator[Case]:
    """e4m3 matrices (n, n) with scales of rows, of 128 columns, and of squares of the second, beside PyTorch."""
    a, b = normal(n, n), normal(n, n)
    a_rows, b_rows = quantize_rows(a), quantize_rows(b)
    a_blocks, b_blocks, b_squares = quantize_blocks(a), quantize_blocks(b), quantize_blocks(b, square=True)
    scale_a, scale_b = a_rows.scales.reshape(-1, 1).contiguous(), b_rows.scales.reshape(1, -1).contiguous()

    def scaled_mm(fast: bool) -> Tensor:
        return torch._scaled_mm(
            a_rows.values, b_rows.values.T, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )  # fmt: skip

    flops = 2 * n**3
    for how in hows:
        case = Case(FP8, f"{n} square", FORWARD, how, only)
        for name, x, w in ((ROWS, a_rows, b_rows), (SQUARES, a_blocks, b_squares), (BLOCKS, a_blocks, b_blocks)):
            case.add(name, several(functools.partial(scaled_matmul, x, w)), flops, error=_right_rows(x, w))
        for name, fast in ((FAST, True), (EXACT, False)):
            case.add(name, several(functools.partial(scaled_mm, fast)), flops, error=_right_rows(a_rows, b_rows))
        case.add(BF16, several(lambda: a @ b.T), flops, error=_right_rows(a, b))
        case.over = {
            f"{mine} / {other}": Comparison(mine, other)
            for mine in (ROWS, SQUARES, BLOCKS)
            for other in (FAST, EXACT, BF16)
        }
        yield case


def small_batches(
    weight: tuple[int, int], batches: Sequence[int], rotated_bytes: int, large_copy: int, only: str | None = None
) -> Iterator[Case]:
    """Weights (N, K) of 4 bits beside bf16 ones, at each batch; at a batch of 1 beside copies of as many bytes.

    Calls of a graph read one weight after another, ``rotated_bytes`` of 4-bit weights in all, so that the L2 cache
    holds none of them when its turn comes.
    """
    N, K = weight
    dense = normal(N, K)
    packed = pack_int4(quantize(dense, "int4", GROUP))
    number = 1 if only else max(2, -(-rotated_bytes // packed.nbytes))
    packs = [packed, *(PackedInt4(packed.codes.clone(), packed.scales.clone()) for _ in range(number - 1))]
    weights = [dense, *(dense.clone() for _ in range(number - 1))]
    right = None if only else packed.dequantize().double()
    for batch in batches:
        x = normal(batch, K)
        case = Case(INT4, f"{N} x {K}, batch {batch}", FORWARD, GRAPH, only)

        def wrong(o: Tensor, x: Tensor = x) -> float:
            return relative_error(o, x.double() @ right.T)

        case.add(OURS, lambda x=x: [functools.partial(int4_matmul, x, w) for w in packs], packed.nbytes, "byte", wrong)
        case.add(BF16, lambda x=x: [functools.partial(F.linear, x, w) for w in weights], dense.nbytes, "byte")
        case.over = {f"{OURS} / {BF16}": Comparison(OURS, BF16)}
        if batch == 1:
            case.add(COPY, lambda: copies_of(packed.nbytes, number), packed.nbytes, "byte")
            case.add(LARGE_COPY, lambda: copies_of(large_copy), large_copy, "byte")
            case.over["of a copy"] = Comparison(OURS, COPY)
            case.over["of a large copy"] = Comparison(OURS, LARGE_COPY, packed.nbytes / large_copy)
        yield case


# ---- decode ----------------------------------------------------------------------------------------------------------


def _tables(sequences: int, context: int, block_size: int) -> tuple[Tensor, Tensor, int]:
    """Block tables in random order, lengths, and the number of blocks: each is in use, once."""
    blocks = -(-context // block_size)
    order = torch.randperm(sequences * blocks, device=runtime.DEVICE)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=runtime.DEVICE)
    return order.view(sequences, blocks).int(), lengths, sequences * blocks


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float64 attention of queries (H, D) over keys and values (N, G, D)."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v))
    weights = torch.einsum("hd,nhd->hn", q, k).div(q.shape[1] ** 0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v)


def cached_decode(shape: CacheShape, only: str | None = None) -> Iterator[Case]:
    """Decode attention over a cache of e4m3 beside a copy of as many bytes, and beside lab 5's over one of bf16."""
    S, context, H, G, D, block_size = shape
    tables, lengths, blocks = _tables(S, context, block_size)
    q = normal(S, H, D)
    keys, values = normal(blocks, block_size, G, D), normal(blocks, block_size, G, D)
    cache = quantize_cache(keys, values)

    def right(of: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], float]:
        """``of``: keys and values of some blocks, (blocks, block_size, G, D) each."""

        def error(o: Tensor) -> float:
            some = range(min(S, CHECKED_SEQUENCES))
            contexts = ([x.flatten(0, 1)[:context] for x in of(tables[s].long())] for s in some)
            return relative_error(o[: len(some)], torch.stack([_attend(q[s], *kv) for s, kv in zip(some, contexts)]))

        return error

    def dequantized(b: Tensor) -> tuple[Tensor, Tensor]:
        both = (cache.keys, cache.k_scale), (cache.values, cache.v_scale)
        return tuple(codes[b].float() * scale[b][:, None, :, None] for codes, scale in both)

    numbers = 2 * S * context * G * D
    nbytes = numbers + 2 * 4 * blocks * G  # scales are read as well
    case = Case(CACHE, f"{S} x {context}, {H}/{G} heads, D {D}", FORWARD, GRAPH, only)
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    call = functools.partial(paged_attention_decode, q, cache.keys, cache.values, tables, lengths, **scales)
    case.add(OURS, several(call), nbytes, "byte", right(dequantized))
    call = functools.partial(paged_attention_decode_16, q, keys, values, tables, lengths)
    case.add(BF16, several(call), 2 * numbers, "byte", right(lambda b: (keys[b], values[b])))
    case.add(COPY, lambda: copies_of(nbytes) * SEVERAL, nbytes, "byte")
    case.over = {"of a copy": Comparison(OURS, COPY), f"{OURS} / {BF16}": Comparison(OURS, BF16)}
    yield case


def latent_decode(shape: LatentShape, matrix: int, only: str | None = None) -> Iterator[Case]:
    """Decode attention over latents beside its two bounds: a copy of the cache's bytes, and the rate of a product."""
    S, context, H, latent, rope, block_size = shape
    tables, lengths, blocks = _tables(S, context, block_size)
    q_latent, q_rope, cache = normal(S, H, latent), normal(S, H, rope), normal(blocks, block_size, latent + rope)
    scale = (128 + rope) ** -0.5  # 128: head_dim before absorption, as in DeepSeek-V3

    def error(o: Tensor) -> float:
        some = range(min(S, CHECKED_SEQUENCES))
        tokens = (cache[tables[s].long()].flatten(0, 1)[:context].double().split((latent, rope), 1) for s in some)
        want = [latent_attention(q_latent[s].double(), q_rope[s].double(), *t, scale) for s, t in zip(some, tokens)]
        return relative_error(o[: len(some)], torch.stack(want))

    flops, nbytes = 2 * S * H * context * (2 * latent + rope), S * context * cache.shape[2] * cache.element_size()
    case = Case(LATENTS, f"{S} x {context}, {H} heads", FORWARD, GRAPH, only)
    call = functools.partial(mla_decode, q_latent, q_rope, cache, tables, lengths, scale)
    case.add(OURS, several(call), flops, error=error)
    case.add(COPY, lambda: copies_of(nbytes) * SEVERAL, nbytes, "byte")
    a, b = normal(matrix, matrix), normal(matrix, matrix)
    case.add("bf16 product", several(lambda: a @ b.T), 2 * matrix**3)
    case.over = {
        "of the bound by bytes": Comparison(OURS, COPY),
        "of the bound by FLOPs": Comparison(OURS, "bf16 product", flops / (2 * matrix**3)),
    }
    case.bounds = tuple(case.over)
    yield case


# ---- experts ---------------------------------------------------------------------------------------------------------


def uneven_counts(rows: int, experts: int) -> list[int]:
    """Rows of each expert: random shares, of which the largest are many times the smallest."""
    shares = torch.randn(experts, generator=torch.Generator().manual_seed(0)).mul(0.6).softmax(0)
    counts = (shares * rows).floor().int().tolist()
    counts[0] += rows - sum(counts)
    return counts


def grouped(
    shape: tuple[int, int, int], experts: int, directions: Sequence[str] = (FORWARD, BACKWARD), only: str | None = None
) -> Iterator[Case]:
    """Rows (T, K) of ``experts`` uneven groups times a matrix (K, N) each, beside one dense product of the same FLOPs.

    Backward is both gradients, in plain calls: they take milliseconds.
    """
    T, K, N = shape
    sizes = uneven_counts(T, experts)
    counts = torch.tensor(sizes, dtype=torch.int32, device=runtime.DEVICE)
    ends = counts.cumsum(0, dtype=torch.int32)
    x, dout = normal(T, K).requires_grad_(), normal(T, N)
    weights, one = normal(experts, K, N).mul_(K**-0.5).requires_grad_(), normal(K, N).mul_(K**-0.5).requires_grad_()
    last = int(ends[-2])  # the last expert is held against float64
    functions: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        OURS: (lambda: grouped_matmul(x, weights, counts), weights),
        "dense": (lambda: x @ one, one),
        "loop": (lambda: torch.cat([r @ w for r, w in zip(x.split(sizes), weights.unbind())]), weights),
        "_grouped_mm": (lambda: torch._grouped_mm(x, weights, offs=ends), weights),
    }

    def wrong(result: Any) -> float:
        rows, matrix, given = x[last:].double(), weights[-1].double(), dout[last:].double()
        if isinstance(result, Tensor):
            return relative_error(result[last:], rows @ matrix)
        dx, dw = result
        return max(relative_error(dx[last:], given @ matrix.T), relative_error(dw[-1], rows.T @ given))

    def forward(call: Callable[[], Tensor]) -> list[Call]:
        return [call] * SEVERAL

    def backward(call: Callable[[], Tensor], matrix: Tensor) -> list[Call]:
        out = call()
        return [lambda: torch.autograd.grad(out, (x, matrix), dout, retain_graph=True)] * SEVERAL

    for direction in directions:
        case = Case(
            GROUPED, f"{experts} experts, {T} x {K} x {N}", direction, GRAPH if direction == FORWARD else CALLS, only
        )
        for name, (call, matrix) in functions.items():
            make = (
                functools.partial(forward, call) if direction == FORWARD else functools.partial(backward, call, matrix)
            )
            flops = (2 if direction == FORWARD else 4) * T * K * N
            case.add(name, make, flops, error=None if name == "dense" else wrong)
        case.over = {f"{OURS} / {other}": Comparison(OURS, other) for other in ("dense", "loop", "_grouped_mm")}
        yield case
