"""The operators of a transformer encoder layer in training, one table row each: the class, the FLOPs, what moves.

The layer is BERT's (post-norm, dropout on), forward and backward, as Ivanov et al. 2021 ("Data Movement Is All You
Need", MLSys) list it. Elements of an operator cost what that paper's own counter charges: adding, multiplying,
dividing, exponentiating one; comparing and selecting (the softmax's maximum, ReLU and its gradient) nothing. Where a
formula can be arranged in several ways, the comment in the table says which arrangement is counted. Scale and dropout
of the scores count as parts of the softmax, which the paper treats as one operator.
"""

from __future__ import annotations

from utils.dataflow import CLASSES, Array, Operator, fuse_between_contractions
from utils.operators import element_size, require_sizes

# Operations of the activation on one element, forward and backward. GeLU (tanh form) backward, with u = x (c + 0.044715
# c x^2) and t = tanh(u): x^2 1, u 3, t 1, 1 - t^2 2, du/dx = c + 0.134145 c x^2 2, 0.5 (1 + t) 2, 0.5 x (1 - t^2) du/dx
# 3, their sum 1, times the incoming gradient 1.
ACTIVATION_FLOPS = {"relu": (0, 0), "gelu": (9, 16)}

_CONTRACTION, _NORMALISATION, _ELEMENT_WISE = CLASSES

_Row = tuple[str, str, int, str, str]  # name, class, FLOPs, names of the arrays read, of those written


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
    normalisation and 0.03% element-wise, as in their table 1.

    Args:
        batch, seq_len: sequences, and tokens of each.
        hidden: width of the residual stream.
        heads: attention heads; each has ``hidden / heads`` dimensions.
        dtype: format of activations and weights; dropout masks take 1 byte an element, statistics of LayerNorm 4.
        feed_forward: inner width of the feed-forward block, ``4 * hidden`` unless given.
        activation: ``"relu"`` (the paper's) or ``"gelu"`` (BERT's own, in its tanh form).
        backward: False leaves the forward pass of a training step, which still writes what a backward pass would read.
        fused: False: each operator is a kernel of its own and passes its result through memory. True: the operators
            between two contractions are one kernel.

    Raises:
        TypeError: a size that is not an integer.
        ValueError: a size below 1, ``heads`` that do not divide ``hidden``, an unknown dtype or activation.
    """
    feed_forward = 4 * hidden if feed_forward is None else feed_forward
    require_sizes(batch=batch, seq_len=seq_len, hidden=hidden, heads=heads, feed_forward=feed_forward)
    if hidden % heads:
        raise ValueError(f"heads must divide hidden, got hidden {hidden} and heads {heads}")
    if activation not in ACTIVATION_FLOPS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATION_FLOPS)}, got {activation!r}")
    tokens = batch * seq_len
    tn, tf, scores = tokens * hidden, tokens * feed_forward, batch * heads * seq_len * seq_len
    arrays = _arrays(tokens, hidden, feed_forward, scores, element_size(dtype))
    operators = []
    for phase, rows in (
        ("forward", _forward(tn, tf, scores, hidden, seq_len, activation)),
        ("backward", _backward(tn, tf, scores, hidden, seq_len, activation)),
    ):
        for name, operator_class, flops, reads, writes in rows:
            read, written = (tuple(_find(arrays, each) for each in names.split()) for names in (reads, writes))
            operators.append(Operator(name, operator_class, flops, read, written, phase, (name,)))
    if fused:
        operators = fuse_between_contractions(operators)
    return [each for each in operators if backward or each.phase == "forward"]


def _arrays(tokens: int, hidden: int, feed_forward: int, scores: int, size: int) -> dict[str, Array]:
    """Every array of the layer by name; T tokens, N hidden, F feed-forward, S scores (batch, heads, length, length)."""
    elements = {
        "x q_raw k_raw v_raw q k v context o_raw o o_dropped sum_1 y_1 z_raw z z_dropped sum_2 y_2": tokens * hidden,
        "y_1_branch x_branch": tokens * hidden,
        "h_raw h a a_dropped": tokens * feed_forward,
        "s_raw s p p_dropped": scores,
        "W_qkv": 3 * hidden * hidden,
        "b_qkv": 3 * hidden,
        "W_o": hidden * hidden,
        "W_1 W_2": hidden * feed_forward,
        "b_o b_2 gamma_1 beta_1 gamma_2 beta_2": hidden,
        "b_1": feed_forward,
    }
    arrays = {name: Array(name, count, size) for names, count in elements.items() for name in names.split()}
    masks = {"p_mask": scores, "o_mask": tokens * hidden, "a_mask": tokens * feed_forward, "z_mask": tokens * hidden}
    arrays |= {name: Array(name, count, 1) for name, count in masks.items()}
    arrays |= {name: Array(name, 2 * tokens, 4) for name in ("stats_1", "stats_2")}
    return arrays


def _find(arrays: dict[str, Array], name: str) -> Array:
    """The array called ``name``; ``d_x`` is the gradient of ``x`` and has its size."""
    if name.startswith("d_"):
        of = arrays[name.removeprefix("d_")]
        return Array(name, of.elements, of.element_size)
    return arrays[name]


def _forward(tn: int, tf: int, scores: int, hidden: int, seq_len: int, activation: str) -> list[_Row]:
    square, wide = 2 * tn * hidden, 2 * tf * hidden  # (T, N) @ (N, N) and (T, N) @ (N, F)
    product = 2 * tn * seq_len  # QK^T, and PV, of all heads
    return [
        ("Q, K, V", _CONTRACTION, 3 * square, "x W_qkv", "q_raw k_raw v_raw"),
        ("input bias", _ELEMENT_WISE, 3 * tn, "q_raw k_raw v_raw b_qkv", "q k v"),
        ("QK^T", _CONTRACTION, product, "q k", "s_raw"),
        ("scale", _NORMALISATION, scores, "s_raw", "s"),
        # subtract the maximum, exponentiate, sum, divide
        ("softmax", _NORMALISATION, 4 * scores, "s", "p"),
        ("attention dropout", _NORMALISATION, scores, "p", "p_dropped p_mask"),
        ("PV", _CONTRACTION, product, "p_dropped v", "context"),
        ("output", _CONTRACTION, square, "context W_o", "o_raw"),
        ("output bias", _ELEMENT_WISE, tn, "o_raw b_o", "o"),
        ("output dropout", _ELEMENT_WISE, tn, "o", "o_dropped o_mask"),
        ("residual 1", _ELEMENT_WISE, tn, "o_dropped x", "sum_1"),
        # sum, subtract the mean, square, sum, times 1/std, times gamma, plus beta
        ("layernorm 1", _NORMALISATION, 7 * tn, "sum_1 gamma_1 beta_1", "y_1 stats_1"),
        ("linear 1", _CONTRACTION, wide, "y_1 W_1", "h_raw"),
        ("linear 1 bias", _ELEMENT_WISE, tf, "h_raw b_1", "h"),
        (activation, _ELEMENT_WISE, ACTIVATION_FLOPS[activation][0] * tf, "h", "a"),
        ("linear 1 dropout", _ELEMENT_WISE, tf, "a", "a_dropped a_mask"),
        ("linear 2", _CONTRACTION, wide, "a_dropped W_2", "z_raw"),
        ("linear 2 bias", _ELEMENT_WISE, tn, "z_raw b_2", "z"),
        ("linear 2 dropout", _ELEMENT_WISE, tn, "z", "z_dropped z_mask"),
        ("residual 2", _ELEMENT_WISE, tn, "z_dropped y_1", "sum_2"),
        ("layernorm 2", _NORMALISATION, 7 * tn, "sum_2 gamma_2 beta_2", "y_2 stats_2"),
    ]


def _backward(tn: int, tf: int, scores: int, hidden: int, seq_len: int, activation: str) -> list[_Row]:
    square, wide, product = 2 * tn * hidden, 2 * tf * hidden, 2 * tn * seq_len
    return [
        # gamma: subtract the mean, times 1/std, times dy, sum; beta: sum
        ("layernorm 2 dW", _NORMALISATION, 5 * tn, "d_y_2 sum_2 stats_2", "d_gamma_2 d_beta_2"),
        # g = dy gamma, its sum, x - mean, their product, its sum; then g/std - (x - mean) c - m (c, m one a row) is 4
        ("layernorm 2 dX", _NORMALISATION, 9 * tn, "d_y_2 sum_2 gamma_2 stats_2", "d_sum_2"),
        ("linear 2 dropout dX", _ELEMENT_WISE, tn, "d_sum_2 z_mask", "d_z"),
        ("linear 2 bias dW", _NORMALISATION, tn, "d_z", "d_b_2"),
        ("linear 2 dX", _CONTRACTION, wide, "d_z W_2", "d_a_dropped"),
        ("linear 2 dW", _CONTRACTION, wide, "d_z a_dropped", "d_W_2"),
        ("linear 1 dropout dX", _ELEMENT_WISE, tf, "d_a_dropped a_mask", "d_a"),
        (f"{activation} dX", _ELEMENT_WISE, ACTIVATION_FLOPS[activation][1] * tf, "d_a h", "d_h"),
        ("linear 1 bias dW", _NORMALISATION, tf, "d_h", "d_b_1"),
        ("linear 1 dX", _CONTRACTION, wide, "d_h W_1", "d_y_1_branch"),
        ("linear 1 dW", _CONTRACTION, wide, "d_h y_1", "d_W_1"),
        ("residual 2 dX", _ELEMENT_WISE, tn, "d_y_1_branch d_sum_2", "d_y_1"),
        ("layernorm 1 dW", _NORMALISATION, 5 * tn, "d_y_1 sum_1 stats_1", "d_gamma_1 d_beta_1"),
        ("layernorm 1 dX", _NORMALISATION, 9 * tn, "d_y_1 sum_1 gamma_1 stats_1", "d_sum_1"),
        ("output dropout dX", _ELEMENT_WISE, tn, "d_sum_1 o_mask", "d_o"),
        ("output bias dW", _NORMALISATION, tn, "d_o", "d_b_o"),
        ("output dX", _CONTRACTION, square, "d_o W_o", "d_context"),
        ("output dW", _CONTRACTION, square, "d_o context", "d_W_o"),
        ("PV dX1", _CONTRACTION, product, "d_context v", "d_p_dropped"),
        ("PV dX2", _CONTRACTION, product, "p_dropped d_context", "d_v"),
        # dS = scale/(1 - rate) P (dP' - rowsum(P dP')), with dP' = dP where the mask keeps it: the mask selects and its
        # factor joins the scale, so the three operators take 0, 4 (times P, sum, subtract, times P) and 1
        ("attention dropout dX", _NORMALISATION, 0, "d_p_dropped p_mask", "d_p"),
        ("softmax dX", _NORMALISATION, 4 * scores, "d_p p", "d_s"),
        ("scale dX", _NORMALISATION, scores, "d_s", "d_s_raw"),
        ("QK^T dX1", _CONTRACTION, product, "d_s_raw k", "d_q"),
        ("QK^T dX2", _CONTRACTION, product, "d_s_raw q", "d_k"),
        ("input bias dW", _NORMALISATION, 3 * tn, "d_q d_k d_v", "d_b_qkv"),
        ("Q, K, V dX", _CONTRACTION, 3 * square, "d_q d_k d_v W_qkv", "d_x_branch"),
        ("Q, K, V dW", _CONTRACTION, 3 * square, "d_q d_k d_v x", "d_W_qkv"),
        ("residual 1 dX", _ELEMENT_WISE, tn, "d_x_branch d_sum_1", "d_x"),
    ]
