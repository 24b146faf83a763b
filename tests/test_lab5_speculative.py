"""Speculative sampling keeps the target's distribution, and the loop decodes as the target does."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from solutions.lab5_serving.speculative import draw, speculative_sample, verify
from solutions.lab5_serving.speculative_decoding import speculative_generate, speculative_rounds
from utils.chi_square import chi_square
from utils.serving import (
    Decoder,
    KVCache,
    ModelConfig,
    SamplingParams,
    generate,
    probabilities,
)

SEED = 20231
VOCABULARY, DRAFTED, LENGTH = 5, 2, 3
KEPT, REFUSED = 1e-3, 1e-9  # p-values: nothing speaks against the target's distribution; it is out of the question
TINY = ModelConfig("qwen3", 61, 32, 48, 2, 4, 2, 8, 64, qk_norm=True, tied_head=True, eos_token_ids=(1,))


def numbers(seed):
    return torch.Generator().manual_seed(seed)


# ---- plain distributions ---------------------------------------------------------------------------------------------


def chain(seed):
    """Distributions of the next token after each token, (V, V), some of them with zeros."""
    logits = 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=numbers(seed), dtype=torch.float64)
    logits[seed % VOCABULARY, (seed + 1) % VOCABULARY] = -torch.inf
    return logits.softmax(-1)


def first_tokens(judge, samples, seed, q):
    """The first LENGTH tokens of ``samples`` texts that start at token 0, decoded in rounds, as counts (V, ..., V)."""
    p, generator = chain(1), numbers(seed)
    text = torch.zeros(samples, 1 + LENGTH + LENGTH * (DRAFTED + 1), dtype=torch.int64)
    length, every = torch.ones(samples, dtype=torch.int64), torch.arange(samples)
    for _ in range(LENGTH):  # each round adds a token at least
        states = [text[every, length - 1]]
        for _ in range(DRAFTED):
            states.append(draw(q[states[-1]], torch.rand(samples, generator=generator, dtype=torch.float64)))
        drafted = torch.stack(states[1:], 1)
        uniforms = torch.rand(samples, DRAFTED + 1, generator=generator, dtype=torch.float64)
        accepted, added = judge(p[torch.stack(states, 1)], q[torch.stack(states[:-1], 1)], drafted, uniforms)
        for i in range(DRAFTED):
            text[every, length + i] = drafted[:, i]
        length = length + accepted
        text[every, length] = added
        length = length + 1
    cells = (text[:, 1 : 1 + LENGTH] * VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
    return cells.bincount(minlength=VOCABULARY**LENGTH).view((VOCABULARY,) * LENGTH)


def texts():
    """The probability of each text of LENGTH tokens under the target alone."""
    p = chain(1)
    return p[0, :, None, None] * p[:, :, None] * p[None]


@pytest.mark.parametrize("draft", ["another", "the same", "a point", "uniform"])
def test_a_hundred_thousand_texts_have_the_targets_distribution_whatever_the_draft(draft, seed=1):
    q = {
        "another": chain(2),
        "the same": chain(1),
        "a point": torch.eye(VOCABULARY, dtype=torch.float64).roll(1, 1),
        "uniform": torch.full((VOCABULARY, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64),
    }[draft]
    fit = chi_square(first_tokens(verify, 100_000, seed, q), texts())
    assert fit.degrees > 90 and fit.p_value > KEPT, f"seed {seed}: {fit}"


def test_one_sequence_at_a_time_gives_what_the_batch_gives_from_the_same_random_numbers():
    generator = numbers(3)
    states = torch.randint(0, VOCABULARY, (300, DRAFTED + 1), generator=generator)
    p, q = chain(1)[states], chain(2)[states[:, :-1]]
    drafted = draw(q, torch.rand(300, DRAFTED, generator=generator, dtype=torch.float64))
    accepted, added = verify(p, q, drafted, torch.rand(300, DRAFTED + 1, generator=numbers(SEED), dtype=torch.float64))
    one = numbers(SEED)
    for i in range(300):
        expected = [*drafted[i, : accepted[i]].tolist(), int(added[i])]
        assert speculative_sample(p[i], q[i], drafted[i], one) == expected
    assert {0, 1, 2} == set(accepted.tolist())


def test_a_round_accepts_as_many_tokens_as_the_formula_says_when_acceptances_are_independent():
    p, q = chain(1)[:1].expand(VOCABULARY, -1), chain(2)[:1].expand(VOCABULARY, -1)
    states = torch.zeros(100_000, 5, dtype=torch.int64)
    drafted = draw(q[states[:, 1:]], torch.rand(100_000, 4, generator=numbers(4), dtype=torch.float64))
    uniforms = torch.rand(100_000, 5, generator=numbers(5), dtype=torch.float64)
    accepted, _ = verify(p[states], q[states[:, 1:]], drafted, uniforms)
    a = float(torch.minimum(p[0], q[0]).sum())
    assert float((accepted + 1).double().mean()) == pytest.approx((1 - a**5) / (1 - a), rel=0.01)


def test_a_row_of_zeros_drafts_nothing():
    p = chain(1)[torch.zeros(4000, 3, dtype=torch.int64)]
    accepted, added = verify(
        p,
        torch.zeros(4000, 2, VOCABULARY, dtype=torch.float64),
        torch.zeros(4000, 2, dtype=torch.int64),
        torch.rand(4000, 3, generator=numbers(6), dtype=torch.float64),
    )
    assert not accepted.any() and chi_square(added.bincount(minlength=VOCABULARY), chain(1)[0]).p_value > KEPT


@pytest.mark.parametrize(
    ("shapes", "drafted", "message"),
    [
        (((2, 5), (2, 5)), [0, 1], r"the target has \(k \+ 1, V\)"),
        (((3, 5), (2, 4)), [0, 1], r"got \(2,\), \(3, 5\) and \(2, 4\)"),
        (((2, 5), (1, 5)), [5], r"lie in 0\.\.4, got \[5\]"),
        (((2, 5), (1, 5)), [2], "drafted token 2 has probability 0 in the draft"),
    ],
)
def test_what_does_not_belong_together_is_refused(shapes, drafted, message):
    p, q = (torch.full(shape, 1 / shape[-1]) for shape in shapes)
    q[..., 2] = 0.0
    with pytest.raises(ValueError, match=message):
        speculative_sample(p, q, torch.tensor(drafted), numbers(0))


# ---- the loop --------------------------------------------------------------------------------------------------------


@cache
def tiny(seed):
    torch.manual_seed(seed)
    return Decoder(TINY).eval().requires_grad_(False)


def related(seed, noise):
    """A draft that mostly agrees with tiny(seed): its weights with a little noise."""
    torch.manual_seed(seed + 1000)
    model = Decoder(TINY).eval().requires_grad_(False)
    weights = {name: w + noise * w.std() * torch.randn_like(w) for name, w in tiny(seed).state_dict().items()}
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("noise", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("k", [1, 4])
def test_greedy_speculative_output_is_the_targets_own(k, noise):
    target, draft = tiny(0), related(0, noise)
    for prompt, new in (([5], 12), (list(range(2, 50)), 100), ([7, 7, 7], 1)):
        params = SamplingParams(max_new_tokens=new)
        expected = generate(target, prompt, params)
        found = speculative_generate(target, draft, prompt, params, k)
        assert (found.tokens, found.finish_reason) == (expected.tokens, expected.finish_reason)
        assert all(len(each.drafted) <= k and each.accepted <= len(each.drafted) for each in found.rounds)
        if noise == 0:  # the target drafts for itself
            assert len(found.rounds) == -(-len(found.tokens) // (k + 1))


def test_without_drafting_the_sampled_tokens_are_the_targets_own():
    params = SamplingParams(max_new_tokens=30, temperature=0.9, top_p=0.8, seed=5)
    found = speculative_generate(tiny(0), tiny(1), [3, 4], params, 0)
    assert found.tokens == generate(tiny(0), [3, 4], params).tokens and len(found.rounds) == len(found.tokens)


def test_an_end_of_text_ends_a_round_wherever_it_is():
    target = tiny(0)
    plain = generate(target, [9], SamplingParams(max_new_tokens=30, ignore_eos=True)).tokens
    for stop in sorted(set(plain)):
        config = target.config
        target.config = ModelConfig(**{**config.__dict__, "eos_token_ids": (stop,)})
        try:
            expected = generate(target, [9], SamplingParams(max_new_tokens=30))
            for draft in (related(0, 0.0), related(0, 3.0)):
                found = speculative_generate(target, draft, [9], SamplingParams(max_new_tokens=30), 4)
                assert found.tokens == expected.tokens and found.finish_reason == "stop"
                assert found.rounds[-1].tokens[-1] == stop
        finally:
            target.config = config


def test_a_draft_with_fewer_positions_stops_drafting_and_the_target_goes_on():
    torch.manual_seed(3)
    short = Decoder(ModelConfig(**{**TINY.__dict__, "max_seq_len": 16})).eval().requires_grad_(False)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    found = speculative_generate(tiny(0), short, list(range(2, 12)), params, 4)
    assert found.tokens == generate(tiny(0), list(range(2, 12)), params).tokens
    assert len(found.rounds[0].drafted) == 4 and found.rounds[-1].drafted == ()


def test_models_that_do_not_belong_together_are_refused():
    other = Decoder(ModelConfig(**{**TINY.__dict__, "vocab_size": 60}))
    with pytest.raises(ValueError, match="must share one vocabulary, got 61 and 60 tokens"):
        speculative_rounds(tiny(0), other, [1])
    with pytest.raises(ValueError, match="draft_tokens must be an integer of at least 0, got -1"):
        speculative_rounds(tiny(0), tiny(1), [1], draft_tokens=-1)
    with pytest.raises(ValueError, match="a prompt holds at least one token"):
        speculative_rounds(tiny(0), tiny(1), [])


@pytest.mark.slow
def test_sampled_speculative_text_has_the_targets_distribution():
    """The first two tokens of many runs of the real loop, against the exact distribution of pairs."""
    target, draft = small_pair()
    settings = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 2.0, "top_p": 0.9}
    found = torch.zeros(7, 7)
    for seed in range(600):
        pair = speculative_generate(target, draft, [4, 5], SamplingParams(seed=seed, **settings), 1).tokens
        found[pair[0], pair[1]] += 1
    expected = pairs(target, [4, 5], SamplingParams(**settings))
    alone = next_probabilities(draft, [4, 5], SamplingParams(**settings))
    fit = chi_square(found, expected)
    assert fit.degrees > 10 and fit.p_value > KEPT, str(fit)
    assert chi_square(found.sum(1), alone).p_value < REFUSED  # the draft alone would be seen


def small_pair():
    """A target and a draft of 7 tokens, few enough to count pairs of them."""
    few = ModelConfig(**{**TINY.__dict__, "vocab_size": 7})
    models = tuple(Decoder(few).eval().requires_grad_(False) for _ in range(2))
    for seed, model in enumerate(models):
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=numbers(seed)) * (0.6 if weight.dim() > 1 else 1.0))
    return models


def next_probabilities(model, tokens, params):
    with torch.no_grad():
        cache = KVCache(model.config, len(tokens), model.dtype)
        logits = model(torch.tensor(tokens), torch.arange(len(tokens)), cache)
    return probabilities(logits[-1], params).double()


def pairs(model, prompt, params):
    """The probability of each pair of next tokens, (V, V)."""
    first = next_probabilities(model, prompt, params)
    table = torch.zeros(len(first), len(first), dtype=torch.float64)
    for token in first.nonzero()[:, 0].tolist():
        table[token] = first[token] * next_probabilities(model, [*prompt, token], params)
    return table
