"""The operator table of a transformer layer: which class of operators does the arithmetic (exercise 1.10)."""

from utils.operators import require_sizes

from .operators import matmul_flops

CLASSES = ("contraction", "normalisation", "element-wise")


def layer_flops(batch: int, seq_len: int, hidden: int, heads: int, backward: bool) -> dict[str, int]:
    """FLOPs of one transformer encoder layer in training, summed by class of operator.

    The layer is BERT's: self-attention, an output projection, and a feed-forward block of two linear layers that is
    ``4 * hidden`` wide inside. The notebook lists its operators and what an element of each costs. The backward pass of
    a matrix product is two products with as many FLOPs each: one for the gradient of each input.

    Args:
        batch: sequences.
        seq_len: tokens of a sequence.
        hidden: width of the residual stream.
        heads: attention heads, each of ``hidden / heads`` dimensions.
        backward: whether the backward pass is added to the forward pass.

    Returns:
        The FLOPs under each of ``CLASSES``.

    Raises:
        ValueError: a size is below 1, or ``heads`` does not divide ``hidden``.
    """
    require_sizes(batch=batch, seq_len=seq_len, hidden=hidden, heads=heads)
    if hidden % heads:
        raise ValueError(f"heads must divide hidden, got hidden {hidden} and heads {heads}")
    raise NotImplementedError("Lab 1, exercise 1.10: FLOPs of a layer by class")


def shares(amounts: dict[str, int]) -> dict[str, float]:
    """Each entry's share of the sum of all, under the entry's own name; the shares add up to 1.

    Args:
        amounts: what is shared (FLOPs, bytes, seconds), by name; any names and any number of them.

    Raises:
        ValueError: there is no entry, one is negative, or all are zero.
    """
    if not amounts or min(amounts.values()) < 0 or sum(amounts.values()) == 0:
        raise ValueError(f"amounts must not be negative and not all zero, got {amounts}")
    raise NotImplementedError("Lab 1, exercise 1.10: shares")
