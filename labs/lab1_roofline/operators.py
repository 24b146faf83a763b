"""What operators cost on paper: floating-point operations and bytes of HBM traffic (exercises 1.1 to 1.4).

How this lab counts. Operations: a multiplication, an addition, a subtraction, a division, an exponential are one FLOP
each, whatever they cost in hardware; a comparison is one where it is all that an operator does (ReLU) and free inside
a longer one (the maximum in a softmax). Bytes: what crosses between HBM and the chip. A kernel reads each element of
its inputs once and writes each element of its output once; nothing stays on the chip from one kernel to the next.

All counts are exact Python integers.
"""

from utils.operators import require_sizes


def dot_product_flops(n: int) -> int:
    """FLOPs of a dot product of two vectors of ``n`` elements: the sum starts at zero, each product is added to it.

    Raises:
        ValueError: ``n`` is below 1.
    """
    require_sizes(n=n)
    raise NotImplementedError("Lab 1, exercise 1.1: FLOPs of a dot product")


def dot_product_bytes(n: int, element_size: int) -> int:
    """Bytes that a dot product of two vectors of ``n`` elements moves; its result is one element in HBM.

    Args:
        n: elements of each vector.
        element_size: bytes of one element (2 for bf16 and fp16, 4 for fp32).

    Raises:
        ValueError: an argument is below 1.
    """
    require_sizes(n=n, element_size=element_size)
    raise NotImplementedError("Lab 1, exercise 1.1: bytes of a dot product")


def matmul_flops(m: int, k: int, n: int) -> int:
    """FLOPs of (m, k) @ (k, n) -> (m, n).

    Raises:
        ValueError: a size is below 1.
    """
    require_sizes(m=m, k=k, n=n)
    raise NotImplementedError("Lab 1, exercise 1.2: FLOPs of a matmul")


def matmul_bytes(m: int, k: int, n: int, element_size: int) -> int:
    """Bytes that (m, k) @ (k, n) -> (m, n) must move at least: one kernel, each element read or written once.

    Raises:
        ValueError: an argument is below 1.
    """
    require_sizes(m=m, k=k, n=n, element_size=element_size)
    raise NotImplementedError("Lab 1, exercise 1.2: bytes of a matmul")


def relu_flops(n: int) -> int:
    """FLOPs of y = max(x, 0) on ``n`` elements.

    Raises:
        ValueError: ``n`` is below 1.
    """
    require_sizes(n=n)
    raise NotImplementedError("Lab 1, exercise 1.3: FLOPs of a ReLU")


def relu_bytes(n: int, element_size: int) -> int:
    """Bytes that y = max(x, 0) on ``n`` elements moves.

    Raises:
        ValueError: an argument is below 1.
    """
    require_sizes(n=n, element_size=element_size)
    raise NotImplementedError("Lab 1, exercise 1.3: bytes of a ReLU")


def softmax_flops(rows: int, cols: int) -> int:
    """FLOPs of y = exp(x - max) / sum(exp(x - max)) over the rows of a (rows, cols) matrix, nothing computed twice.

    Raises:
        ValueError: a size is below 1.
    """
    require_sizes(rows=rows, cols=cols)
    raise NotImplementedError("Lab 1, exercise 1.3: FLOPs of a softmax")


def softmax_bytes(rows: int, cols: int, element_size: int, method: str) -> int:
    """Bytes that a softmax over the rows of a (rows, cols) matrix moves, by how it is carried out.

    Args:
        rows: rows of the matrix.
        cols: elements of a row.
        element_size: bytes of one element, of the row statistics too.
        method: ``"fused"``: one kernel, a row stays on the chip between its read and its write.
            ``"three_pass"``: one kernel, but a row is too long to stay: it is read for the maximum, again for the sum,
            and again for the result, which is written. The two statistics of the row stay on the chip.
            ``"eager"``: five kernels, one an operation: row maximum; x - maximum; exponential; row sum; division. Each
            reads all its inputs from HBM and writes its result there, the statistics (one element a row) too.

    Raises:
        ValueError: a size is below 1, or ``method`` is none of the three.
    """
    require_sizes(rows=rows, cols=cols, element_size=element_size)
    if method not in ("fused", "three_pass", "eager"):
        raise ValueError(f"method must be 'fused', 'three_pass' or 'eager', got {method!r}")
    raise NotImplementedError("Lab 1, exercise 1.3: bytes of a softmax")


def attention_flops(batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, causal: bool) -> int:
    """FLOPs of softmax(Q K^T / sqrt(head_dim)) V, only of the pairs of a query and a key that the mask leaves.

    Per pair: the dot product of q and k, scaling the score, the softmax (as :func:`softmax_flops` counts it), and the
    pair's share of the weighted sum of V.

    Args:
        batch: sequences.
        heads: heads of Q, K and V alike.
        seq_q: queries a head; Q is (batch, heads, seq_q, head_dim).
        seq_k: keys a head; K and V are (batch, heads, seq_k, head_dim).
        head_dim: elements of one query, key or value.
        causal: the last query sees all keys, the one before it all but the last, and so on: query i sees key j when
            j - seq_k <= i - seq_q. A query that sees no key costs nothing.

    Raises:
        ValueError: a size is below 1.
    """
    require_sizes(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    raise NotImplementedError("Lab 1, exercise 1.4: FLOPs of attention")


def attention_bytes(
    batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, element_size: int, materialize: bool
) -> int:
    """Bytes that attention moves, with or without the score matrix in HBM.

    Args:
        batch: sequences.
        heads: heads of Q, K and V alike.
        seq_q: queries a head.
        seq_k: keys a head.
        head_dim: elements of one query, key or value.
        element_size: bytes of one element.
        materialize: True: three kernels, S = Q K^T, P = softmax(S) and O = P V, with S and P, (seq_q, seq_k) a head, in
            HBM between them; they are stored in full, whatever a mask hides. False: one kernel, S and P never leave the
            chip; beside O it writes the log-sum-exp of each query, one float32 (4 bytes), for the backward pass.

    Raises:
        ValueError: a size is below 1.
    """
    require_sizes(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, element_size=element_size)
    raise NotImplementedError("Lab 1, exercise 1.4: bytes of attention")
