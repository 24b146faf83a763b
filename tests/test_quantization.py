"""Rounding with calibration data and products in fp8, held against formulas, search, and PyTorch's own gradients."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from utils.formats import quantize
from utils.gpt import GPT, GPTConfig
from utils.gpt import batch as gpt_batch
from utils.quantization import (
    Fp8Scaling,
    awq,
    bits_per_weight,
    calibrate,
    gptq,
    output_error,
    quantize_decoder,
    round_products,
    round_to_nearest,
    window_losses,
)
from utils.serving import Decoder, ModelConfig, attend_causally
from utils.serving.training.train import evaluate

SEED = 20261128
TINY = ModelConfig(
    family="qwen3", vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_seq_len=64, rope_theta=1e4, qk_norm=True, tied_head=True,
)  # fmt: skip


def draw(*shape, seed=SEED):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(tokens=256, channels=64, seed=SEED):
    """Inputs of which few directions carry most, and of which four channels are large."""
    x = draw(tokens, channels, seed=seed) @ (
        draw(channels, channels, seed=1) * torch.logspace(0.5, -1, channels)[:, None]
    )
    x[:, ::16] *= 8
    return x


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(SEED)
    model = Decoder(TINY).eval().requires_grad_(False)
    for layer in model.layers:  # norms that are not 1, as AWQ's factors go into them
        layer.input_layernorm.weight.copy_(1 + 0.1 * draw(32))
    return model


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(50, (6, 24), generator=torch.Generator().manual_seed(SEED))


# ---- one weight ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "format"), [(8, "int8"), (4, "int4")])
@pytest.mark.parametrize("group", [16, 64])
def test_rounding_to_nearest_is_the_librarys_integers_but_for_scales_in_fp16(bits, format, group):
    weight = draw(8, 64)
    kept, library = round_to_nearest(weight, bits=bits, group=group), quantize(weight, format, group)
    assert (kept - library.dequantize()).abs().max() <= 1.01 * library.scales.max()  # a tie may fall to the other side
    assert float((kept - weight).norm()) == pytest.approx(float((library.dequantize() - weight).norm()), rel=0.01)


@pytest.mark.parametrize("method", [round_to_nearest, gptq])
def test_numbers_of_a_group_are_few_integers_times_one_scale(method):
    kept = method(draw(8, 64), calibrate(correlated()), bits=3, group=16).unflatten(1, (-1, 16))
    shares = kept.abs() / kept.abs().amax(-1, keepdim=True)  # of 3, of 2 or of 1: sixths at any rate
    torch.testing.assert_close(6 * shares, (6 * shares).round(), rtol=0, atol=1e-4)
    assert max(len(group.abs().unique()) for group in kept.flatten(0, 1)) == 4  # 0, 1, 2 and 3


def test_a_group_of_zeros_stays_zeros():
    weight = draw(4, 32)
    weight[1, :16] = 0
    for method in (round_to_nearest, gptq, awq):
        kept = method(weight, calibrate(correlated(channels=32)), bits=4, group=16)
        assert torch.isfinite(kept).all()
    assert (round_to_nearest(weight, bits=4, group=16)[1, :16] == 0).all()


@pytest.mark.parametrize(("bits", "group", "message"), [(1, 16, "bits must be at least 2"), (4, 24, "divide the 64")])
def test_what_cannot_be_rounded_is_refused(bits, group, message):
    for method in (round_to_nearest, gptq, awq):
        with pytest.raises(ValueError, match=message):
            method(draw(4, 64), calibrate(correlated()), bits=bits, group=group)


def test_the_output_error_is_that_of_the_products_themselves():
    x, weight, kept = correlated().double(), draw(8, 64).double(), draw(8, 64, seed=3).double()
    direct = (x @ (kept - weight).T).norm() / (x @ weight.T).norm()
    assert output_error(weight, kept, calibrate(x)) == pytest.approx(float(direct), rel=1e-4)


@pytest.mark.parametrize("group", [16, 64])
def test_gptq_without_correlations_is_rounding_to_nearest(group):
    weight, alike = draw(8, 64), calibrate(8 * torch.eye(64))
    assert torch.equal(gptq(weight, alike, bits=4, group=group), round_to_nearest(weight, bits=4, group=group))


def test_gptq_carries_each_error_to_where_it_minimises_the_error_of_the_outputs():
    """Column by column with a solver of least squares in place of the Cholesky factor."""
    x, weight = correlated(channels=16).double(), draw(4, 16).double()
    scales = (weight.abs().amax(1, keepdim=True).float() / 7).half().double()
    left, damped = weight.clone(), (x.T @ x) / len(x)
    damped = damped.float().double() + 0.01 * damped.diagonal().mean() * torch.eye(16, dtype=torch.float64)
    for j in range(15):
        rounded = (left[:, [j]] / scales).round().clamp(-7, 7) * scales
        error = rounded - left[:, [j]]
        # minimise the quadratic form over the columns to come, given this column's error
        rest = torch.linalg.solve(damped[j + 1 :, j + 1 :], -damped[j + 1 :, [j]]).T * error
        left[:, j], left[:, j + 1 :] = rounded[:, 0], left[:, j + 1 :] + rest
    left[:, [15]] = (left[:, [15]] / scales).round().clamp(-7, 7) * scales
    torch.testing.assert_close(gptq(weight, calibrate(x), bits=4, group=16).double(), left, rtol=0, atol=1e-5)


def test_on_new_inputs_with_correlations_gptq_errs_less_and_awq_no_more_than_rounding_to_nearest():
    weight, seen, new = draw(32, 64), calibrate(correlated()), calibrate(correlated(seed=2))
    errors = {
        method: output_error(weight, method(weight, seen, bits=4, group=16), new)
        for method in (round_to_nearest, gptq, awq)
    }
    assert errors[gptq] < 0.8 * errors[round_to_nearest]
    assert errors[awq] < 0.95 * errors[round_to_nearest]


# ---- a model ---------------------------------------------------------------------------------------------------------


def test_a_model_keeps_what_is_not_a_linear_layer_and_is_not_changed_itself(decoder, tokens):
    before = copy.deepcopy(decoder.state_dict())
    quantized = quantize_decoder(decoder, tokens, partial(round_to_nearest, bits=4, group=16))
    for name, weight in decoder.state_dict().items():
        assert torch.equal(weight, before[name])
        linear = weight.ndim == 2 and name.startswith("layers")
        kept = round_to_nearest(weight, bits=4, group=16) if linear else weight
        assert torch.equal(quantized.state_dict()[name], kept), name


def test_each_layer_is_calibrated_on_what_the_rounded_layers_before_it_make(decoder, tokens):
    seen = []

    def rounding(weight, calibration):
        seen.append(calibration)
        return round_to_nearest(weight, bits=3, group=16)

    quantized = quantize_decoder(decoder, tokens, rounding)
    inputs = {}
    for n, layer in enumerate(quantized.layers):
        layer.register_forward_pre_hook(lambda _, x, n=n: inputs.update({n: x[0]}))
    with torch.no_grad():
        quantized(tokens, torch.arange(24).expand_as(tokens), attend_causally)
        wanted = calibrate(quantized.layers[1].input_layernorm(inputs[1]))
    assert len(seen) == 8  # four stacks in each of two layers
    torch.testing.assert_close(seen[4].second_moment, wanted.second_moment)


def test_awqs_factors_go_into_the_operation_before_each_product(decoder):
    """The inputs of a product divided by factors, and its columns multiplied: nothing changes."""
    folded, x = copy.deepcopy(decoder), torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    for n, layer in enumerate(folded.layers):
        factors = [torch.rand(size, generator=torch.Generator().manual_seed(n)) + 0.5 for size in (32, 16, 32, 48)]
        attention, mlp = layer.self_attn, layer.mlp
        layer.input_layernorm.weight /= factors[0]
        for module in (attention.q_proj, attention.k_proj, attention.v_proj):
            module.weight *= factors[0]
        attention.v_proj.weight /= factors[1][:, None]  # one factor for the query heads that read a value head
        attention.o_proj.weight *= factors[1].view(2, 1, 8).expand(2, 2, 8).flatten()
        layer.post_attention_layernorm.weight /= factors[2]
        mlp.gate_proj.weight *= factors[2]
        mlp.up_proj.weight *= factors[2]
        mlp.up_proj.weight /= factors[3][:, None]
        mlp.down_proj.weight *= factors[3]
    places = torch.arange(9).expand_as(x)
    torch.testing.assert_close(folded(x, places, attend_causally), decoder(x, places, attend_causally))


def test_heads_that_read_one_value_head_get_one_factor(decoder, tokens):
    seen = []
    quantize_decoder(decoder, tokens, lambda weight, calibration: seen.append(calibration) or weight)
    heads = seen[1].magnitude.view(2, 2, 8)  # of the output projection
    assert torch.equal(heads[:, 0], heads[:, 1])


def test_the_loss_of_windows_is_that_of_the_training(decoder, tokens):
    text = tokens.flatten()
    mean = float(window_losses(decoder, text, 24).mean())
    assert mean == pytest.approx(evaluate(decoder, text[: 5 * 24 + 1], 24)["loss"], rel=1e-5)


def test_bits_count_the_scales(decoder):
    assert bits_per_weight(decoder, 4, 16) == 5
    inner, outer = 2 * 48 * 32 + (32 + 2 * 16 + 32) * 32, 48 * 32  # numbers of matrices with 32 and 48 columns
    assert bits_per_weight(decoder, 4, None) == pytest.approx(4 + 16 * (inner / 32 + outer / 48) / (inner + outer))


# ---- products in fp8 -------------------------------------------------------------------------------------------------


def test_current_scaling_is_the_librarys_scale_for_the_tensor():
    scaling, x = Fp8Scaling("current"), draw(8, 32)
    for role, format in (("input", "e4m3"), ("weight", "e4m3"), ("gradient", "e5m2")):
        torch.testing.assert_close(scaling(x, role), quantize(x, format).dequantize(), rtol=1e-6, atol=0)


def test_delayed_scaling_takes_the_largest_of_the_last_16_steps_and_clips_what_is_beyond():
    scaling, ones = Fp8Scaling("delayed"), torch.ones(4)
    assert scaling(2 * ones, "gradient").tolist() == [2] * 4
    assert scaling(8 * ones, "gradient").tolist() == [2] * 4  # the history knows of 2 only
    assert scaling.clipped["gradient"] == 4
    for _ in range(16):
        assert scaling(ones, "gradient").tolist() == [1] * 4
    assert scaling(8 * ones, "gradient").tolist() == [1] * 4  # 8 has left the history


def test_without_scales_small_numbers_become_zero_and_are_counted():
    scaling = Fp8Scaling("none")
    x = torch.tensor([2.0**-18, 2.0**-16, 0.0, 1e6])
    assert scaling(x, "gradient").tolist() == [0, 2.0**-16, 0, 57344]
    assert (scaling.zeroed["gradient"], scaling.clipped["gradient"], scaling.numbers["gradient"]) == (1, 1, 3)
    with pytest.raises(ValueError, match="none, current, delayed"):
        Fp8Scaling("block")


@pytest.mark.parametrize("products", ["bf16", "current", "delayed", "none"])
def test_gradients_are_those_of_the_rounded_factors(products):
    layer = torch.nn.Linear(24, 16)
    plain = copy.deepcopy(layer)
    round_products(layer, products)
    x = draw(3, 5, 24).requires_grad_()
    layer(x).backward(gradient := draw(3, 5, 16, seed=4))
    rounding = (lambda t, _: t.bfloat16().float()) if products == "bf16" else Fp8Scaling(products)
    a, b, c = rounding(x, "input"), rounding(plain.weight, "weight"), rounding(gradient, "gradient")
    torch.testing.assert_close(layer(x), F.linear(a, b, plain.bias))
    torch.testing.assert_close(x.grad, c @ b)
    torch.testing.assert_close(layer.weight.grad, torch.einsum("btn,btk->nk", c, a))
    torch.testing.assert_close(layer.bias.grad, gradient.sum((0, 1)))


@pytest.mark.slow
def test_only_the_blocks_of_a_model_are_rounded_and_it_learns_with_scales():
    config = GPTConfig(vocabulary=16, context=16, layers=1, heads=2, hidden=16)
    ends = {}
    for products in ("exact", "current", "delayed"):
        model = GPT(config, seed=1)
        round_products(model.blocks, products)
        assert not hasattr(model.head, "rounding")
        adam = torch.optim.Adam(model.parameters(), 1e-2)
        for step in range(60):
            loss = model(*gpt_batch(config, 16, seed=step))
            adam.zero_grad()
            loss.backward()
            adam.step()
        ends[products] = loss.item()
    assert ends["exact"] < 1.6  # at first it is log 16 = 2.77
    assert ends["current"] < 1.1 * ends["exact"] and ends["delayed"] < 1.1 * ends["exact"]
