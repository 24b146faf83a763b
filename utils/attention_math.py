"""Attention on paper: the kernels of the standard algorithm, FlashAttention's traffic in both loop orders, and FLOPs.

Bytes are HBM traffic as the FlashAttention papers count it: what lies in HBM and is needed by a kernel, or by a step of
its outer loop, is read; nothing is served from the L2 cache. Caches can only make it less.

Sources: Dao et al. 2022 (FlashAttention, algorithms 0 to 4), Dao 2023 (FlashAttention-2, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from utils.dataflow import Array, Operator
from utils.operators import Cost, element_size, require_sizes

#: Products of N x N x D in each pass; a backward pass that kept P needs four, one that recomputes S needs five.
FORWARD_MATMULS = 2
STANDARD_BACKWARD_MATMULS = 4
FLASH_BACKWARD_MATMULS = 5
#: Row statistics (maximum, sum, logsumexp) are kept in float32.
STATISTIC_BYTES = 4


@dataclass(frozen=True)
class AttentionShape:
    """An attention call: q (B, H, Nq, D), k and v (B, Hkv, Nk, D); Nk is Nq and Hkv is H unless given."""

    batch: int
    heads: int
    seq_len: int
    head_dim: int
    num_keys: int | None = None
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        require_sizes(batch=self.batch, heads=self.heads, seq_len=self.seq_len, head_dim=self.head_dim)
        require_sizes(num_keys=self.keys, kv_heads=self.key_heads)
        if self.heads % self.key_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.key_heads}")

    @property
    def keys(self) -> int:
        """Nk."""
        return self.seq_len if self.num_keys is None else self.num_keys

    @property
    def key_heads(self) -> int:
        """Hkv."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def score_elements(self) -> int:
        """Elements of S, of P and of their gradients: B H Nq Nk."""
        return self.batch * self.heads * self.seq_len * self.keys

    @property
    def query_elements(self) -> int:
        """Elements of q, o and their gradients: B H Nq D."""
        return self.batch * self.heads * self.seq_len * self.head_dim

    @property
    def key_elements(self) -> int:
        """Elements of k, of v and of their gradients: B Hkv Nk D."""
        return self.batch * self.key_heads * self.keys * self.head_dim

    @property
    def rows(self) -> int:
        """Rows of scores: B H Nq."""
        return self.batch * self.heads * self.seq_len

    def matmul_flops(self, causal: bool = False) -> int:
        """Operations of one product over the scores, 2 B H Nq Nk D; causal counts visible pairs only."""
        pairs = self.score_elements
        if causal:
            pairs = self.batch * self.heads * visible_pairs(self.seq_len, self.keys)
        return 2 * pairs * self.head_dim


#: GPT-2 medium as the FlashAttention paper times it on an A100, forward and backward in fp16 (2022, figure 2, left).
GPT2_MEDIUM = AttentionShape(batch=64, heads=16, seq_len=1024, head_dim=64)
#: What that figure states of standard attention and FlashAttention: operations, bytes read and written, seconds.
PUBLISHED = MappingProxyType(
    {
        "standard": MappingProxyType({"flops": 66.6e9, "bytes": 40.3e9, "seconds": 41.7e-3}),
        "flash": MappingProxyType({"flops": 75.2e9, "bytes": 4.4e9, "seconds": 7.3e-3}),
    }
)


def visible_pairs(num_queries: int, num_keys: int) -> int:
    """Pairs (i, j) with j <= i + Nk - Nq, the causal mask aligned bottom right."""
    require_sizes(num_queries=num_queries, num_keys=num_keys)
    full = max(0, num_queries - num_keys)  # queries that see no key come first
    seen = num_queries - full
    return seen * num_keys - seen * (seen - 1) // 2


def standard_attention(
    shape: AttentionShape, dtype: str = "fp16", *, backward: bool = False, masked: bool = False, dropout: bool = False
) -> list[Operator]:
    """The kernels of attention that writes its N x N intermediates, with what each reads from and writes to HBM.

    Dao et al. 2022, algorithm 0 (forward) and algorithm 3 (backward). ``masked`` and ``dropout`` add the kernels that
    an eager implementation runs for them; the dropout mask takes a byte for each score. The scale is folded into Q.
    FLOPs are those of the products.

    Returns:
        The kernels in order; ``sum(each.cost for each in kernels)`` is the total.
    """
    e = element_size(dtype)
    n2, nd, kd = shape.score_elements, shape.query_elements, shape.key_elements

    def scores(name: str, size: int = e) -> Array:
        return Array(name, n2, size)

    q, o, dq, do = (Array(name, nd, e) for name in ("Q", "O", "dQ", "dO"))
    k, v, dk, dv = (Array(name, kd, e) for name in ("K", "V", "dK", "dV"))
    keep = scores("dropout mask", 1)
    matmul = shape.matmul_flops()
    phase = "forward"
    kernels: list[Operator] = []

    def add(name: str, kind: str, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        flops = matmul if kind == "contraction" else 0
        kernels.append(Operator(name, kind, flops, tuple(reads), tuple(writes), phase, (name,)))

    weights = "P"
    add("S = Q K^T", "contraction", [q, k], [scores("S")])
    if masked:
        add("mask S", "element-wise", [scores("S")], [scores("S, masked")])
    add("P = softmax(S)", "normalisation", [scores("S, masked" if masked else "S")], [scores("P")])
    if dropout:
        weights = "P, dropped"
        add("dropout P", "element-wise", [scores("P")], [scores(weights), keep])
    add("O = P V", "contraction", [scores(weights), v], [o])
    if not backward:
        return kernels
    phase = "backward"
    add("dV = P^T dO", "contraction", [scores(weights), do], [dv])
    add("dP = dO V^T", "contraction", [do, v], [scores("dP, dropped" if dropout else "dP")])
    if dropout:
        add("dropout dP", "element-wise", [scores("dP, dropped"), keep], [scores("dP")])
    add("dS from P, dP", "normalisation", [scores("P"), scores("dP")], [scores("dS, masked" if masked else "dS")])
    if masked:
        add("mask dS", "element-wise", [scores("dS, masked")], [scores("dS")])
    add("dQ = dS K", "contraction", [scores("dS"), k], [dq])
    add("dK = dS^T Q", "contraction", [scores("dS"), q], [dk])
    return kernels


def flash1_bytes(
    shape: AttentionShape, block_n: int, dtype: str = "fp16", *, backward: bool = False, statistics: bool = False
) -> int:
    """HBM bytes of the first FlashAttention, whose outer loop goes over tiles of ``block_n`` keys.

    Forward (Dao et al. 2022, algorithm 1): K and V once; for each tile of keys Q and O are read and O is written.
    Backward (algorithm 4) adds: K and V once, dK and dV once; for each tile of keys Q, O, dO and dQ are read and dQ is
    written.

    Args:
        backward: Forward and backward together instead of the forward pass.
        statistics: Count the float32 maxima and sums of the rows too: read and written for each tile in the forward
            pass, read in the backward pass.
    """
    require_sizes(block_n=block_n)
    e, tiles = element_size(dtype), -(-shape.keys // block_n)
    elements = 2 * shape.key_elements + 3 * tiles * shape.query_elements
    passes = 4 * tiles
    if backward:
        elements += 4 * shape.key_elements + 5 * tiles * shape.query_elements
        passes += 2 * tiles
    return elements * e + (passes * shape.rows * STATISTIC_BYTES if statistics else 0)


@dataclass(frozen=True)
class ForwardTraffic:
    """What FlashAttention-2's forward kernel asks of memory, in bytes by tensor, and the FLOPs of its two products.

    FLOPs are those of whole tiles, with ``head_dim`` padded to a power of two of at least 16, as the tensor cores do
    them; bytes are those of elements that exist.
    """

    q: int
    k: int
    v: int
    o: int
    lse: int
    flops: int

    @property
    def loaded(self) -> int:
        """Bytes of q, k and v."""
        return self.q + self.k + self.v

    @property
    def stored(self) -> int:
        """Bytes of o and the logsumexp."""
        return self.o + self.lse

    @property
    def total(self) -> int:
        """Loaded and stored."""
        return self.loaded + self.stored


def flash2_traffic(
    shape: AttentionShape, block_m: int, block_n: int, dtype: str = "bf16", *, causal: bool = False
) -> ForwardTraffic:
    """Traffic of FlashAttention-2's forward pass, whose outer loop goes over tiles of ``block_m`` queries.

    Q is read once; K and V once for each tile of queries of each query head, when causal in whole tiles of ``block_n``
    keys up to the one with the tile's last visible key; O and a float32 logsumexp of each row are written once (Dao
    2023, algorithm 1 and section 3.1).
    """
    require_sizes(block_m=block_m, block_n=block_n)
    e, offset = element_size(dtype), shape.keys - shape.seq_len
    rows = tiles = 0
    for first in range(0, shape.seq_len, block_m):
        seen = max(0, min(shape.keys, first + block_m + offset)) if causal else shape.keys
        steps = -(-seen // block_n)
        rows += min(shape.keys, steps * block_n)
        tiles += steps
    sequences = shape.batch * shape.heads
    keys = sequences * rows * shape.head_dim * e
    padded = max(16, 1 << (shape.head_dim - 1).bit_length())
    return ForwardTraffic(
        q=shape.query_elements * e,
        k=keys,
        v=keys,
        o=shape.query_elements * e,
        lse=shape.rows * STATISTIC_BYTES,
        flops=FORWARD_MATMULS * 2 * sequences * tiles * block_m * block_n * padded,
    )


def flash2_bytes(shape: AttentionShape, block_m: int, dtype: str = "fp16") -> int:
    """HBM bytes of FlashAttention-2's forward pass, not causal, in closed form: see :func:`flash2_traffic`."""
    require_sizes(block_m=block_m)
    tiles = -(-shape.seq_len // block_m)
    keys = shape.batch * shape.heads * shape.keys * shape.head_dim  # a group's heads each read their K and V
    elements = 2 * shape.query_elements + 2 * tiles * keys
    return elements * element_size(dtype) + shape.rows * STATISTIC_BYTES


def flash1_blocks(sram_bytes: int, head_dim: int, dtype: str = "fp16") -> tuple[int, int]:
    """(Br, Bc) that the first paper chooses for on-chip memory of ``sram_bytes``: Bc = ceil(M / 4d), Br = min(Bc, d).

    M is the memory in elements (Dao et al. 2022, algorithm 1): four tiles, of Q, K, V and O, share it.
    """
    require_sizes(sram_bytes=sram_bytes, head_dim=head_dim)
    block_n = -(-(sram_bytes // element_size(dtype)) // (4 * head_dim))
    return min(block_n, head_dim), block_n


def attention_flops(shape: AttentionShape, matmuls: int = FORWARD_MATMULS, *, causal: bool = False) -> int:
    """Operations of ``matmuls`` products over the scores; the softmax is not counted, as in the papers."""
    require_sizes(matmuls=matmuls)
    return matmuls * shape.matmul_flops(causal)


def standard_cost(shape: AttentionShape, dtype: str = "fp16", **options: bool) -> Cost:
    """FLOPs and HBM bytes of :func:`standard_attention`, summed."""
    return sum((each.cost for each in standard_attention(shape, dtype, **options)), Cost(0, 0))


def on_chip_bytes(
    block_m: int, block_n: int, head_dim: int, dtype: str = "bf16", stages: int = 1
) -> dict[str, dict[str, int]]:
    """What a program of FlashAttention-2's forward pass holds on the chip: place -> tensor -> bytes.

    Tiles of Q, K and V in the inputs' format, K and V once for each of ``stages`` in flight, are counted to shared
    memory; scores, the accumulator and the row statistics in float32 to registers. A compiler may place them
    otherwise.
    """
    require_sizes(block_m=block_m, block_n=block_n, head_dim=head_dim, stages=stages)
    e = element_size(dtype)
    return {
        "shared memory": {
            "Q": block_m * head_dim * e, "K": stages * block_n * head_dim * e, "V": stages * block_n * head_dim * e
        },
        "registers": {"S, P": block_m * block_n * 4, "O": block_m * head_dim * 4, "m, d": 2 * block_m * 4},
    }  # fmt: skip


def causal_tiles(num_queries: int, num_keys: int, block_m: int, block_n: int) -> list[list[str]]:
    """What a causal kernel does with each tile of the scores, row by row: ``skip``, ``diagonal`` or ``full``.

    Aligned bottom right. ``skip``: no query of the tile sees one of its keys. ``full``: every query sees every key, so
    that no causal mask is needed. ``diagonal``: the rest.
    """
    require_sizes(num_queries=num_queries, num_keys=num_keys, block_m=block_m, block_n=block_n)
    offset = num_keys - num_queries
    found = []
    for first in range(0, num_queries, block_m):
        last = min(first + block_m, num_queries) - 1
        row = []
        for start in range(0, num_keys, block_n):
            end = min(start + block_n, num_keys) - 1
            row.append("skip" if start > last + offset else "full" if end <= first + offset else "diagonal")
        found.append(row)
    return found
