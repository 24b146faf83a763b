"""The operators of a transformer layer: FLOPs by formulas that are executed and counted; arrays and fusion."""

import math
import random

import pytest
import torch

from utils import operators
from utils.dataflow import Array, Operator, class_totals, flop_shares, fuse
from utils.encoder_layer import transformer_layer
from utils.hardware import gpu
from utils.operators import Cost, matmul
from utils.roofline import class_seconds

SEED = 20264


def sizes(count, highest, draws=20):
    generator = random.Random(SEED)
    return [tuple(generator.randint(1, highest) for _ in range(count)) for _ in range(draws)]


# ---- FLOPs ----


class Counted:
    """A float64 tensor that counts what is done to it as the table does: one an element and operation.

    What is left after a sum, one number a row or a column, is no longer an array of elements and is computed for free.
    """

    def __init__(self, value, tally):
        self.value, self.tally = value, tally

    def _done(self, value):
        if value.dim() == 2 and 1 not in value.shape:
            self.tally.append(value.numel())
        return Counted(value, self.tally)

    def _with(self, other, function):
        return self._done(function(self.value, other.value if isinstance(other, Counted) else other))

    def __add__(self, other):
        return self._with(other, torch.add)

    def __sub__(self, other):
        return self._with(other, torch.sub)

    def __mul__(self, other):
        return self._with(other, torch.mul)

    def __truediv__(self, other):
        return self._with(other, torch.div)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other):
        return self._with(other, lambda a, b: b - a)

    def exp(self):
        return self._done(self.value.exp())

    def tanh(self):
        return self._done(self.value.tanh())

    def sum(self, dim=1):
        self.tally.append(self.value.numel())
        return Counted(self.value.sum(dim, keepdim=True), self.tally)


ROWS, COLS, EPS = 6, 10, 1e-5
C, D = math.sqrt(2 / math.pi), 0.044715


def drawn(count):
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(ROWS, COLS, generator=generator, dtype=torch.float64) for _ in range(count)]


def per_element(tally):
    assert sum(tally) % (ROWS * COLS) == 0
    return sum(tally) // (ROWS * COLS)


def table(name, **options):
    """FLOPs an element of the operator called ``name``, whose arrays are all of one size here."""
    batch, seq_len, hidden, heads = 2, 8, 8, 1  # as many scores as activations, and the feed-forward block no wider
    layer = transformer_layer(batch, seq_len, hidden, heads, feed_forward=hidden, **options)
    return next(each.flops for each in layer if each.name == name) // (batch * seq_len * hidden)


def gradients(function, inputs, dy):
    inputs = [each.clone().requires_grad_() for each in inputs]
    return torch.autograd.grad((function(*inputs) * dy).sum(), inputs)


def test_softmax_forward_and_backward_take_the_flops_of_the_table():
    x, dy = drawn(2)
    tally = []
    shifted = (Counted(x, tally) - x.amax(1, keepdim=True)).exp()
    p = shifted / shifted.sum()
    torch.testing.assert_close(p.value, torch.softmax(x, 1))
    assert per_element(tally) == table("softmax") == 4

    tally = []
    dp, p = Counted(dy, tally), Counted(torch.softmax(x, 1), tally)
    ds = p * (dp - (p * dp).sum())
    torch.testing.assert_close(ds.value, gradients(lambda x: torch.softmax(x, 1), [x], dy)[0])
    assert per_element(tally) == table("softmax dX") == 4


def test_the_dropout_behind_a_softmax_costs_its_gradient_nothing_but_the_scale():
    x, dy = drawn(2)
    rate, scale, keep = 0.3, 0.125, torch.rand(ROWS, COLS, generator=torch.Generator().manual_seed(SEED)) > 0.3
    (expected,) = gradients(lambda x: torch.softmax(scale * x, 1) * keep / (1 - rate), [x], dy)
    tally = []
    p, dp = Counted(torch.softmax(scale * x, 1), tally), Counted(torch.where(keep, dy, 0.0), tally)
    ds = p * (dp - (p * dp).sum()) * (scale / (1 - rate))
    torch.testing.assert_close(ds.value, expected)
    assert per_element(tally) == table("attention dropout dX") + table("softmax dX") + table("scale dX") == 5


def test_layer_norm_forward_takes_the_flops_of_the_table():
    (x,), gamma, beta = drawn(1), torch.linspace(0.5, 2, COLS).double(), torch.linspace(-1, 1, COLS).double()
    tally = []
    counted = Counted(x, tally)
    centred = counted - counted.sum() / COLS
    variance = (centred * centred).sum() / COLS
    y = centred * (variance.value + EPS).rsqrt() * gamma + beta
    torch.testing.assert_close(y.value, torch.nn.functional.layer_norm(x, (COLS,), gamma, beta, EPS))
    assert per_element(tally) == table("layernorm 1") == table("layernorm 2") == 7


def test_layer_norm_backward_takes_the_flops_of_the_table():
    (x, dy), gamma, beta = drawn(2), torch.linspace(0.5, 2, COLS).double(), torch.linspace(-1, 1, COLS).double()
    dx, dgamma, dbeta = gradients(
        lambda x, gamma, beta: torch.nn.functional.layer_norm(x, (COLS,), gamma, beta, EPS), [x, gamma, beta], dy
    )
    mean, rstd = x.mean(1, keepdim=True), (x.var(1, keepdim=True, correction=0) + EPS).rsqrt()

    tally = []
    g = Counted(dy, tally) * gamma
    centred = Counted(x, tally) - mean
    m, c = rstd * g.sum().value / COLS, rstd**3 * (g * centred).sum().value / COLS
    torch.testing.assert_close((g * rstd - centred * c - m).value, dx)
    assert per_element(tally) == table("layernorm 1 dX") == 9

    tally = []
    normalised = (Counted(x, tally) - mean) * rstd
    torch.testing.assert_close((normalised * dy).sum(0).value[0], dgamma)
    torch.testing.assert_close(Counted(dy, tally).sum(0).value[0], dbeta)
    assert per_element(tally) == table("layernorm 1 dW") == 5


def test_gelu_forward_and_backward_take_the_flops_of_the_table():
    x, dy = drawn(2)
    tally = []
    counted = Counted(x, tally)
    y = 0.5 * (counted * (1 + (C * (counted + D * (counted * counted * counted))).tanh()))
    torch.testing.assert_close(y.value, torch.nn.functional.gelu(x, approximate="tanh"))
    assert per_element(tally) == table("gelu", activation="gelu") == operators.gelu(1).flops == 9

    tally = []
    counted, dy_counted = Counted(x, tally), Counted(dy, tally)
    square = counted * counted
    t = (counted * (C + C * D * square)).tanh()
    slope = 0.5 * (1 + t) + 0.5 * counted * (1 - t * t) * (C + 3 * C * D * square)
    expected = gradients(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), [x], dy)[0]
    torch.testing.assert_close((dy_counted * slope).value, expected)
    assert per_element(tally) == table("gelu dX", activation="gelu") == 16


def test_relu_selects_and_costs_nothing_and_the_gradient_of_a_bias_is_a_sum():
    assert table("relu") == table("relu dX") == 0
    assert table("linear 1 bias") == table("linear 1 bias dW") == table("output dropout") == table("residual 1") == 1
    assert table("input bias") == table("input bias dW") == 3  # of q, k and v
    assert table("scale") + table("softmax") + table("attention dropout") == 6


def test_a_bert_layer_has_the_published_flop_shares():
    shares = flop_shares(transformer_layer())
    published = {"contraction": 0.9980, "normalisation": 0.0017, "element-wise": 0.0003}  # Ivanov et al. 2021, table 1
    assert {name: round(share, 4) for name, share in shares.items()} == published
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(("batch", "seq_len", "head_dim", "heads"), sizes(4, 12, draws=10))
def test_the_contractions_of_a_layer_follow_the_textbook_count(batch, seq_len, head_dim, heads):
    hidden, tokens = head_dim * heads, batch * seq_len
    total = class_totals(transformer_layer(batch, seq_len, hidden, heads))["contraction"].flops
    parameters = 12 * hidden * hidden
    assert total == 3 * (2 * tokens * parameters + 4 * batch * seq_len**2 * hidden)


def test_the_forward_pass_is_a_third_of_the_contractions():
    full, forward = transformer_layer(), transformer_layer(backward=False)
    assert full[: len(forward)] == forward
    totals = [class_totals(each)["contraction"].flops for each in (full, forward)]
    assert totals[0] == 3 * totals[1]


# ---- arrays and fusion ----


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_every_array_is_written_once_before_it_is_read(activation):
    inputs = {"x", "d_y_2"}
    parameters = {f"{letter}_{of}" for letter in ("W", "b") for of in ("qkv", "o", "1", "2")}
    parameters |= {f"{letter}_{index}" for letter in ("gamma", "beta") for index in (1, 2)}
    for fused in (False, True):
        known = set(inputs | parameters)
        sizes_seen = {}
        for operator in transformer_layer(activation=activation, fused=fused):
            assert {array.name for array in operator.reads} <= known, operator.name
            written = [array.name for array in operator.writes]
            assert not known & set(written), operator.name
            known |= set(written)
            for array in (*operator.reads, *operator.writes):
                assert sizes_seen.setdefault(array.name, array) == array
        assert {f"d_{name}" for name in parameters} <= known  # every parameter has a gradient
        assert {"y_2", "d_x"} <= known


def test_a_contraction_costs_what_the_matmul_of_its_shapes_costs():
    batch, seq_len, hidden, heads = 2, 24, 64, 4
    tokens, head_dim = batch * seq_len, hidden // heads
    by_name = {each.name: each.cost for each in transformer_layer(batch, seq_len, hidden, heads)}
    assert by_name["Q, K, V"] == matmul(tokens, hidden, 3 * hidden, "fp16")
    assert by_name["output"] == matmul(tokens, hidden, hidden, "fp16")
    assert by_name["linear 1"] == matmul(tokens, hidden, 4 * hidden, "fp16")
    assert by_name["linear 2 dX"] == matmul(tokens, hidden, 4 * hidden, "fp16")
    assert by_name["linear 2 dW"] == matmul(4 * hidden, tokens, hidden, "fp16")
    assert by_name["QK^T"] == batch * heads * matmul(seq_len, head_dim, seq_len, "fp16")
    assert by_name["PV"] == batch * heads * matmul(seq_len, seq_len, head_dim, "fp16")


def test_fusing_keeps_the_flops_and_saves_bytes():
    apart, fused = transformer_layer(), transformer_layer(fused=True)
    before, after = (sum((each.cost for each in operators), Cost(0, 0)) for operators in (apart, fused))
    assert after.flops == before.flops
    assert 0.6 < after.bytes / before.bytes < 0.8
    assert [part for each in fused for part in each.parts] == [each.name for each in apart]
    unchanged = [each for each in apart if each.operator_class == "contraction"]
    assert [each for each in fused if each.operator_class == "contraction"] == unchanged


def test_a_fused_kernel_neither_writes_nor_reads_what_only_it_needs():
    x, y, z, w, b = (Array(name, 100, 2) for name in "xyzwb")
    first = Operator("add", "element-wise", 100, (x, b), (y,), "forward", ("add",))
    second = Operator("mul", "element-wise", 100, (y, b), (z,), "forward", ("mul",))
    later = Operator("use", "contraction", 100, (y, z), (w,), "forward", ("use",))
    alone = fuse([first, second], [first, second])
    assert (alone.reads, alone.writes, alone.flops) == ((x, b), (z,), 200)
    assert alone.cost.bytes == 600
    assert fuse([first, second, later], [first, second]).writes == (y, z)  # y is needed elsewhere
    assert fuse([first, second, later], [later]) is later


def test_a_forward_pass_alone_still_writes_what_the_backward_pass_reads():
    written = {array.name for each in transformer_layer(backward=False, fused=True) for array in each.writes}
    assert {"p", "p_mask", "stats_1", "sum_1", "h", "a_mask"} <= written
    assert not {"s", "a", "z_dropped", "o"} & written


def test_the_time_bounds_of_a_v100_come_near_the_published_shares():
    seconds = class_seconds(transformer_layer(), gpu("V100"), "fp16")
    total = sum(seconds.values())
    published = {"contraction": 0.61, "normalisation": 0.255, "element-wise": 0.135}
    for name, share in published.items():
        assert seconds[name] / total == pytest.approx(share, abs=0.03)


def test_fusion_moves_time_towards_the_contractions():
    for name in ("V100", "A100", "H100"):
        apart, fused = (class_seconds(transformer_layer(fused=fused), gpu(name), "fp16") for fused in (False, True))
        assert fused["contraction"] == apart["contraction"]
        assert fused["normalisation"] + fused["element-wise"] < 0.6 * (apart["normalisation"] + apart["element-wise"])


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: transformer_layer(hidden=100, heads=16), r"heads must divide hidden, got hidden 100 and heads 16"),
        (lambda: transformer_layer(batch=-8), r"batch must be at least 1, got -8"),
        (lambda: transformer_layer(activation="tanh"), r"activation must be one of relu, gelu, got 'tanh'"),
        (lambda: transformer_layer(dtype="half"), r"unknown dtype 'half'"),
    ],
)
def test_bad_values_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_size_that_is_no_integer_is_refused_by_name():
    with pytest.raises(TypeError, match=r"seq_len must be an integer, got 512.0"):
        transformer_layer(seq_len=512.0)
