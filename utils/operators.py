"""What an operator costs on paper: its floating-point operations and the bytes it must move, counted exactly.

Bytes are the *least traffic*: each input read once, each output written once. Operations are counted as the roofline
literature counts them: an addition, a multiplication, a division, an exponential, a tanh each cost one, a multiply-add
two. A comparison counts as one where it is all an operator does (ReLU) and nothing as part of a longer operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ELEMENT_SIZE: Mapping[str, int] = MappingProxyType(
    {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
)
"""Bytes of one element in memory, by number format (tf32 is stored in four bytes)."""


@dataclass(frozen=True)
class Cost:
    """Operations and bytes of some work; costs add up with ``+`` and repeat with ``*``."""

    flops: int
    bytes: int

    def __post_init__(self) -> None:
        for name in ("flops", "bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP per byte; infinite when nothing is moved."""
        if self.bytes == 0:
            return float("inf") if self.flops else 0.0
        return self.flops / self.bytes

    def __add__(self, other: Cost) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __radd__(self, other: int) -> Cost:
        return self if other == 0 else NotImplemented

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times)

    __rmul__ = __mul__


def element_size(dtype: str) -> int:
    """Bytes of one element of ``dtype``.

    Raises:
        ValueError: the format is unknown; the message lists the known ones.
    """
    if not isinstance(dtype, str) or dtype not in ELEMENT_SIZE:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(ELEMENT_SIZE)}")
    return ELEMENT_SIZE[dtype]


def require_sizes(**sizes: int) -> None:
    """Refuse sizes that are not positive integers, naming the first offender."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def elementwise(n: int, dtype: str, *, flops_per_element: int, inputs: int = 1, outputs: int = 1) -> Cost:
    """Any operator that treats ``n`` elements one by one: reads ``inputs`` tensors of n, writes ``outputs``."""
    require_sizes(n=n)
    return Cost(flops_per_element * n, (inputs + outputs) * n * element_size(dtype))


def copy(n: int, dtype: str = "bf16") -> Cost:
    """y = x for n elements: no operation, one read and one write an element."""
    return elementwise(n, dtype, flops_per_element=0)


def relu(n: int, dtype: str = "bf16") -> Cost:
    """y = max(0, x) for n elements: one operation (the comparison), one read, one write: 0.125 FLOP/B in fp32."""
    return elementwise(n, dtype, flops_per_element=1)


def add(n: int, dtype: str = "bf16") -> Cost:
    """z = x + y for n elements: one operation, two reads, one write."""
    return elementwise(n, dtype, flops_per_element=1, inputs=2)


def gelu(n: int, dtype: str = "bf16") -> Cost:
    """GeLU (tanh form) of n elements in one kernel: nine operations an element, one read, one write.

    0.5 x (1 + tanh(c (x + 0.044715 x^3))): x*x*x 2, times 0.044715 1, plus x 1, times c 1, tanh 1, plus 1 1, times x 1,
    times 0.5 1.
    """
    return elementwise(n, dtype, flops_per_element=9)


def dot_product(n: int, dtype: str = "bf16") -> Cost:
    """Dot product of two vectors of n elements: 2n operations, (2n + 1) elements moved (the sum is written too).

    In 16 bit that is 2n / (4n + 2), just under 0.5 FLOP/B.
    """
    require_sizes(n=n)
    return Cost(2 * n, (2 * n + 1) * element_size(dtype))


def matmul(m: int, k: int, n: int, dtype: str = "bf16") -> Cost:
    """(m, k) @ (k, n) -> (m, n): 2mkn operations; both inputs read once, the output written once."""
    require_sizes(m=m, k=k, n=n)
    return Cost(2 * m * k * n, (m * k + k * n + m * n) * element_size(dtype))


def tiled_matmul_bytes(m: int, k: int, n: int, block_m: int, block_n: int, dtype: str = "bf16") -> int:
    """Bytes that (m, k) @ (k, n) asks of memory when each program computes a (block_m, block_n) tile of the output.

    A tile needs ``block_m`` rows of the first matrix and ``block_n`` columns of the second, so the first is read once
    for each column of tiles, the second once for each row of tiles. The output is written once. What a cache serves
    counts too.
    """
    require_sizes(m=m, k=k, n=n, block_m=block_m, block_n=block_n)
    rows, columns = -(-m // block_m), -(-n // block_n)
    return (m * k * columns + k * n * rows + m * n) * element_size(dtype)


def softmax(rows: int, cols: int, dtype: str = "bf16") -> Cost:
    """Row softmax of (rows, cols) in one pass over memory: 4 operations an element, one read, one write.

    Subtract the maximum, exponentiate, sum, divide; finding the maximum is comparisons only.
    """
    require_sizes(rows=rows, cols=cols)
    return elementwise(rows * cols, dtype, flops_per_element=4)


def layer_norm(rows: int, cols: int, dtype: str = "bf16") -> Cost:
    """LayerNorm of (rows, cols) with weight and bias (cols,): 7 operations an element.

    Sum, subtract the mean, square, sum, scale, times weight, plus bias. Reads x, weight, bias; writes y.
    """
    require_sizes(rows=rows, cols=cols)
    return Cost(7 * rows * cols, (2 * rows * cols + 2 * cols) * element_size(dtype))


def causal_pairs(num_queries: int, num_keys: int) -> int:
    """Query-key pairs that a causal mask leaves, aligned bottom-right: query i sees key j iff j - i <= Nk - Nq."""
    require_sizes(num_queries=num_queries, num_keys=num_keys)
    hidden_rows = max(0, num_queries - num_keys)
    rows = num_queries - hidden_rows
    first = num_keys - rows + 1
    return rows * (first + num_keys) // 2


def attention(
    batch: int,
    heads: int,
    seq_len: int,
    head_dim: int,
    dtype: str = "bf16",
    causal: bool = False,
    materialize: bool = True,
    kv_heads: int | None = None,
    kv_len: int | None = None,
) -> Cost:
    """Forward attention of ``(batch, heads, seq_len, head_dim)``, its two products and its softmax.

    The products take 4 N^2 D operations a head, the softmax 5 a score (scale, subtract, exponentiate, sum, divide).

    Args:
        causal: count only the pairs the mask leaves (bottom-right aligned) and their softmax. Materialised scores are
            still written and read in full, as the textbook algorithm does.
        materialize: True: textbook passes, S = QK^T written, read by the softmax, P written, read by PV: 4 N^2 elements
            a head beside Q, K, V, O. False: flash attention's least traffic, Q, K, V, O once and a logsumexp in fp32.
        kv_heads, kv_len: heads and length of K and V where they differ (grouped queries, a cache).

    Raises:
        ValueError: a size below 1, an unknown dtype, heads that are not a multiple of ``kv_heads``.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    kv_len = seq_len if kv_len is None else kv_len
    require_sizes(batch=batch, heads=heads, seq_len=seq_len, head_dim=head_dim, kv_heads=kv_heads, kv_len=kv_len)
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    size = element_size(dtype)
    pairs = causal_pairs(seq_len, kv_len) if causal else seq_len * kv_len
    flops = batch * heads * pairs * (4 * head_dim + 5)
    qkvo = 2 * batch * heads * seq_len * head_dim + 2 * batch * kv_heads * kv_len * head_dim
    scores = batch * heads * seq_len * kv_len
    moved = (qkvo + 4 * scores) * size if materialize else qkvo * size + 4 * batch * heads * seq_len
    return Cost(flops, moved)
