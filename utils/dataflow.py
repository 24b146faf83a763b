"""A transformer layer as a graph of operators: what each computes, which arrays it reads and writes, and fusion.

The layer is the encoder layer of BERT in training, forward and backward, operator by operator as Ivanov et al. 2021 ("Data
Movement Is All You Need", MLSys) list it; they sort operators into three classes:

- ``contraction``: matrix products;
- ``normalisation``: whatever reduces over an axis, softmax and LayerNorm (with the scale and the dropout of the scores,
  which belong to the softmax) and the gradients of biases, which are sums over the tokens;
- ``element-wise``: the rest: biases, dropout, activation, residual connections.

FLOPs per element follow the count of that paper. Adding, multiplying, dividing, exponentiating cost one; comparing and
selecting (the softmax's maximum, ReLU and its gradient) cost nothing. Where an operator's formula can be arranged in
several ways, the comment at the operator says which arrangement is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from utils.operators import Cost, element_size, require_sizes

CLASSES = ("contraction", "normalisation", "element-wise")

# Operations of the activation for one element, forward and backward. The backward of the tanh GeLU, given u = c (x +
# 0.044715 x^3) and t = tanh(u): x*x 1, u 3 (times 0.044715 c, plus c, times x), t 1, 1 - t*t 2, du/dx 2 (times 0.134145 c,
# plus c), 0.5 (1 + t) 2, 0.5 x (1 - t^2) du/dx 3, sum 1, times the incoming gradient 1.
ACTIVATION_FLOPS = {"relu": (0, 0), "gelu": (9, 16)}


@dataclass(frozen=True)
class Array:
    """An array in memory: its name, its elements, bytes of an element."""

    name: str
    elements: int
    element_size: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return self.elements * self.element_size


@dataclass(frozen=True)
class Operator:
    """One kernel: its class, its FLOPs, the arrays it reads and writes, each once and in full.

    ``phase`` is ``"forward"`` or ``"backward"``; ``parts`` names the operators that a fused one stands for.
    """

    name: str
    operator_class: str
    flops: int
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    phase: str
    parts: tuple[str, ...]

    @property
    def cost(self) -> Cost:
        """FLOPs, and bytes of everything read and written."""
        return Cost(self.flops, sum(array.bytes for array in (*self.reads, *self.writes)))


def fuse(operators: Sequence[Operator], run: Sequence[Operator]) -> Operator:
    """One operator that does the work of ``run``, a part of ``operators``, in a single kernel.

    What one member writes and only members read stays on chip: neither written nor read. An array that several members
    read is read once. FLOPs stay as they are.
    """
    if len(run) == 1:
        return run[0]
    written = {array: None for each in run for array in each.writes}
    needed = {array for each in operators if each not in run for array in each.reads}
    used_somewhere = {array for each in operators for array in each.reads}
    classes = {each.operator_class for each in run}
    return Operator(
        name=" + ".join(each.name for each in run),
        operator_class=next(each for each in CLASSES if each in classes),
        flops=sum(each.flops for each in run),
        reads=tuple(dict.fromkeys(array for each in run for array in each.reads if array not in written)),
        writes=tuple(array for array in written if array in needed or array not in used_somewhere),
        phase=run[0].phase,
        parts=tuple(part for each in run for part in each.parts),
    )


def fuse_between_contractions(operators: Sequence[Operator]) -> list[Operator]:
    """Fuse each run of neighbours of one phase that are no contractions into one kernel; contractions stay alone."""
    fused: list[Operator] = []
    for (contraction, _), run in groupby(operators, lambda each: (each.operator_class == "contraction", each.phase)):
        members = list(run)
        fused.extend(members if contraction else [fuse(operators, members)])
    return fused


def class_totals(operators: Iterable[Operator]) -> dict[str, Cost]:
    """The summed cost of each of the three classes."""
    totals = dict.fromkeys(CLASSES, Cost(0, 0))
    for each in operators:
        totals[each.operator_class] += each.cost
    return totals


def flop_shares(operators: Iterable[Operator]) -> dict[str, float]:
    """Each class's share of all FLOPs, adding up to 1."""
    totals = class_totals(operators)
    total = sum(cost.flops for cost in totals.values())
    return {name: cost.flops / total for name, cost in totals.items()}


class _Builder:
    """Collects operators; arrays are named once and made on first use."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.operators: list[Operator] = []
        self.phase = "forward"

    def array(self, name: str, elements: int, size: int | None = None) -> Array:
        return Array(name, elements, self.size if size is None else size)

    def add(self, name: str, operator_class: str, flops: int, reads: Sequence[Array], *writes: Array) -> None:
        self.operators.append(Operator(name, operator_class, flops, tuple(reads), writes, self.phase, (name,)))


def transformer_layer(
    batch: int = 8,
    seq_len: int = 512,
    hidden: int = 1024,
    heads: int = 16,
    dtype: str = "fp16",
    *,
    feed_forward: int | None = None,
    activation: str = "relu",
    backward: bool = True,
    fused: bool = False,
) -> list[Operator]:
    """The operators of one BERT encoder layer in training, in the order in which they run.

    The defaults are BERT-large as Ivanov et al. 2021 measured it; of the FLOPs 99.80% are then contractions, 0.17%
    normalisation and 0.03% element-wise (their table 1).

    Args:
        batch, seq_len: sequences and tokens of each.
        hidden: width of the residual stream.
        heads: attention heads; each has ``hidden / heads`` dimensions.
        dtype: format of activations and weights. Dropout masks take one byte an element, statistics of LayerNorm four.
        feed_forward: inner width of the feed-forward block, ``4 * hidden`` unless given.
        activation: ``"relu"`` (the paper's) or ``"gelu"`` (BERT's own, tanh form).
        backward: with the backward pass; without, the forward pass of a training step alone.
        fused: False: each operator is a kernel of its own and passes its result through memory. True: all operators
            between two contractions are one kernel.

    Raises:
        TypeError, ValueError: a size that is not a positive integer, ``heads`` that do not divide ``hidden``, an unknown
            dtype or activation.
    """
    feed_forward = 4 * hidden if feed_forward is None else feed_forward
    require_sizes(batch=batch, seq_len=seq_len, hidden=hidden, heads=heads, feed_forward=feed_forward)
    if hidden % heads:
        raise ValueError(f"heads must divide hidden, got hidden {hidden} and heads {heads}")
    if activation not in ACTIVATION_FLOPS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATION_FLOPS)}, got {activation!r}")
    build = _Builder(element_size(dtype))
    array, add = build.array, build.add
    tokens = batch * seq_len
    tn, tf = (
        tokens * hidden,
        tokens * feed_forward,
    )  # elements of an activation, and of one inside the feed-forward block
    scores = batch * heads * seq_len * seq_len
    square, wide = 2 * tn * hidden, 2 * tn * feed_forward  # FLOPs of a (T, N) @ (N, N) and of a (T, N) @ (N, F) product
    product = 2 * tn * seq_len  # FLOPs of Q K^T, and of P V, over all heads
    activation_flops = ACTIVATION_FLOPS[activation]

    x = array("x", tn)
    w_qkv, b_qkv = array("W_qkv", 3 * hidden * hidden), array("b_qkv", 3 * hidden)
    w_o, b_o = array("W_o", hidden * hidden), array("b_o", hidden)
    w_1, b_1 = array("W_1", hidden * feed_forward), array("b_1", feed_forward)
    w_2, b_2 = array("W_2", feed_forward * hidden), array("b_2", hidden)
    norms = [
        (array(f"gamma_{i}", hidden), array(f"beta_{i}", hidden), array(f"stats_{i}", 2 * tokens, 4)) for i in (1, 2)
    ]

    projected = [array(f"{name} without bias", tn) for name in "qkv"]
    q, k, v = (array(name, tn) for name in "qkv")
    raw, scaled, p, dropped_p = (array(name, scores) for name in ("QK^T", "S", "P", "dropped P"))
    mask_p = array("mask of P", scores, 1)
    context = array("PV", tn)
    add("Q, K, V", "contraction", 3 * square, [x, w_qkv], *projected)
    add("input bias", "element-wise", 3 * tn, [*projected, b_qkv], q, k, v)
    add("QK^T", "contraction", product, [q, k], raw)
    add("scale", "normalisation", scores, [raw], scaled)
    add("softmax", "normalisation", 4 * scores, [scaled], p)  # subtract the maximum, exponentiate, sum, divide
    add("attention dropout", "normalisation", scores, [p], dropped_p, mask_p)
    add("PV", "contraction", product, [dropped_p, v], context)

    def half_block(index: int, name: str, source: Array, weight: Array, bias: Array, skip: Array, flops: int):
        """A product back to (T, N), then bias, dropout, residual and LayerNorm; returns what the backward pass needs."""
        gamma, beta, stats = norms[index - 1]
        out, biased, dropped = (array(f"{name}{suffix}", tn) for suffix in ("", " + bias", " dropped"))
        mask, total, y = array(f"mask of {name}", tn, 1), array(f"residual sum {index}", tn), array(f"y_{index}", tn)
        add(name, "contraction", flops, [source, weight], out)
        add(f"{name} bias", "element-wise", tn, [out, bias], biased)
        add(f"{name} dropout", "element-wise", tn, [biased], dropped, mask)
        add(f"residual {index}", "element-wise", tn, [dropped, skip], total)
        # sum, subtract the mean, square, sum, times 1/std, times gamma, plus beta
        add(f"layernorm {index}", "normalisation", 7 * tn, [total, gamma, beta], y, stats)
        return mask, total, y

    mask_1, total_1, y_1 = half_block(1, "output", context, w_o, b_o, x, square)
    h, h_biased, a, dropped_a = (array(name, tf) for name in ("h without bias", "h", "a", "dropped a"))
    mask_a = array("mask of a", tf, 1)
    add("linear 1", "contraction", wide, [y_1, w_1], h)
    add("linear 1 bias", "element-wise", tf, [h, b_1], h_biased)
    add(activation, "element-wise", activation_flops[0] * tf, [h_biased], a)
    add("linear 1 dropout", "element-wise", tf, [a], dropped_a, mask_a)
    mask_2, total_2, _ = half_block(2, "linear 2", dropped_a, w_2, b_2, y_1, wide)

    build.phase = "backward"

    def gradient(of: Array) -> Array:
        return array(f"d({of.name})", of.elements)

    def half_block_backward(index: int, name: str, dy: Array, total: Array, mask: Array, bias: Array):
        """LayerNorm, dropout and bias backwards; returns the gradients that enter the product and the residual."""
        gamma, beta, stats = norms[index - 1]
        d_total, d_out = gradient(total), array(f"d({name})", tn)
        # gamma: subtract the mean, times 1/std, times dy, sum; beta: sum
        add(f"layernorm {index} dW", "normalisation", 5 * tn, [dy, total, stats], gradient(gamma), gradient(beta))
        # g = dy gamma, sum g, x - mean, g (x - mean), its sum; then g/std - (x - mean) c - m with c and m one a row: 4
        add(f"layernorm {index} dX", "normalisation", 9 * tn, [dy, total, gamma, stats], d_total)
        add(f"{name} dropout dX", "element-wise", tn, [d_total, mask], d_out)
        add(f"{name} bias dW", "normalisation", tn, [d_out], gradient(bias))
        return d_total, d_out

    d_total_2, d_z = half_block_backward(2, "linear 2", array("dy", tn), total_2, mask_2, b_2)
    d_dropped_a, d_a, d_h = gradient(dropped_a), gradient(a), gradient(h)
    add("linear 2 dX", "contraction", wide, [d_z, w_2], d_dropped_a)
    add("linear 2 dW", "contraction", wide, [d_z, dropped_a], gradient(w_2))
    add("linear 1 dropout dX", "element-wise", tf, [d_dropped_a, mask_a], d_a)
    add(f"{activation} dX", "element-wise", activation_flops[1] * tf, [d_a, h_biased], d_h)
    add("linear 1 bias dW", "normalisation", tf, [d_h], gradient(b_1))
    d_branch, d_y_1 = array("d(y_1) of the branch", tn), gradient(y_1)
    add("linear 1 dX", "contraction", wide, [d_h, w_1], d_branch)
    add("linear 1 dW", "contraction", wide, [d_h, y_1], gradient(w_1))
    add("residual 2 dX", "element-wise", tn, [d_branch, d_total_2], d_y_1)

    d_total_1, d_out = half_block_backward(1, "output", d_y_1, total_1, mask_1, b_o)
    d_context = gradient(context)
    add("output dX", "contraction", square, [d_out, w_o], d_context)
    add("output dW", "contraction", square, [d_out, context], gradient(w_o))
    d_dropped_p, d_p, d_scaled, d_raw = (gradient(each) for each in (dropped_p, p, scaled, raw))
    d_q, d_k, d_v = gradient(q), gradient(k), gradient(v)
    add("PV dX1", "contraction", product, [d_context, v], d_dropped_p)
    add("PV dX2", "contraction", product, [dropped_p, d_context], d_v)
    # dS = scale/(1 - rate) P (dP' - rowsum(P dP')) with dP' = dP where the mask keeps it: the mask selects, and its factor
    # joins the scale, so that the three operators take 0, 4 (times P, sum, subtract, times P) and 1
    add("attention dropout dX", "normalisation", 0, [d_dropped_p, mask_p], d_p)
    add("softmax dX", "normalisation", 4 * scores, [d_p, p], d_scaled)
    add("scale dX", "normalisation", scores, [d_scaled], d_raw)
    add("QK^T dX1", "contraction", product, [d_raw, k], d_q)
    add("QK^T dX2", "contraction", product, [d_raw, q], d_k)
    add("input bias dW", "normalisation", 3 * tn, [d_q, d_k, d_v], gradient(b_qkv))
    d_input = array("d(x) of the branch", tn)
    add("Q, K, V dX", "contraction", 3 * square, [d_q, d_k, d_v, w_qkv], d_input)
    add("Q, K, V dW", "contraction", 3 * square, [d_q, d_k, d_v, x], gradient(w_qkv))
    add("residual 1 dX", "element-wise", tn, [d_input, d_total_1], gradient(x))

    operators = fuse_between_contractions(build.operators) if fused else build.operators
    return [each for each in operators if backward or each.phase == "forward"]
