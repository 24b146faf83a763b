"""The engine with a draft: the target's own tokens for every request, in fewer steps, and no block left behind."""

from __future__ import annotations

import random

import pytest
import torch
from parameters import thorough_but
from test_lab5_speculative import KEPT, REFUSED, next_probabilities, pairs, related, small_pair, tiny

from solutions.lab5_serving import Engine, ModelRunner
from solutions.lab5_serving.speculative_engine import SpeculativeEngine
from utils.chi_square import chi_square
from utils.serving import SamplingParams, generate


def workload(seed):
    """Prompts with shared beginnings and parameters, and an engine's settings, some of them tight."""
    draw = random.Random(seed)
    base = [draw.randrange(2, 61) for _ in range(20)]
    prompts = [
        base[: draw.randrange(20)] + [draw.randrange(2, 61) for _ in range(draw.randrange(1, 10))] for _ in range(10)
    ]
    params = [SamplingParams(max_new_tokens=draw.randrange(1, 35)) for _ in prompts]
    settings = {
        "draft_tokens": draw.choice([1, 3, 6]), "num_blocks": draw.choice([9, 30]), "block_size": 8, "max_batch": 6,
        "token_budget": draw.choice([6, 40]), "scheduler": draw.choice(["continuous", "continuous", "static"]),
    }  # fmt: skip
    return prompts, params, settings


def run(engine):
    """Step to the end with all books checked; every output, by request."""
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
        engine.manager.check()
        engine.drafter.manager.check()
    assert engine.manager.num_used == engine.drafter.manager.num_used == 0
    return outputs


def tokens_of(outputs):
    return [token for output in outputs for token in output.new_tokens]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_each_request_gets_the_tokens_that_the_target_gives_it_alone(seed):
    prompts, params, settings = workload(seed)
    engine = SpeculativeEngine(tiny(0), related(0, 3.0), **settings)
    engine.one_by_one = seed % 2 == 0
    ids = [engine.add(prompt, own) for prompt, own in zip(prompts, params)]
    outputs = run(engine)
    for id, prompt, own in zip(ids, prompts, params, strict=True):
        expected = generate(tiny(0), prompt, own)
        assert (tokens_of(outputs[id]), outputs[id][-1].finish_reason) == (expected.tokens, expected.finish_reason)
    stats = engine.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


@pytest.mark.slow
def test_steps_padded_to_the_size_of_a_recorded_one_give_the_same_tokens():
    prompts, params, settings = workload(1)
    sizes = 30, 8
    runners = {
        "runner": ModelRunner(tiny(0), *sizes, cuda_graphs=True, graph_chunks=[4]),
        "draft_runner": ModelRunner(related(0, 3.0), *sizes, cuda_graphs=True, graph_chunks=[2]),
    }
    settings |= {"draft_tokens": 3, "num_blocks": sizes[0]}
    engines = SpeculativeEngine(tiny(0), related(0, 3.0), **settings, **runners), Engine(tiny(0))
    found, plain = (
        [generation.tokens for generation in engine.generate(prompts[:6], params[:6])] for engine in engines
    )
    assert found == plain
    for name, chunk in (("runner", 4), ("draft_runner", 2)):
        assert chunk in {tokens for _, tokens, _ in runners[name].graphs.recorded}, name


def test_drafts_verified_one_by_one_or_as_a_batch_give_the_same_tokens():
    prompts = [[3, 4, 5], [6], [7, 8]]
    params = [SamplingParams(max_new_tokens=14, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 1.0, 1.0)]
    found = []
    for one_by_one in (True, False):
        engine = SpeculativeEngine(tiny(0), related(0, 2.0), draft_tokens=3, num_blocks=30)
        engine.one_by_one = one_by_one
        found.append([generation.tokens for generation in engine.generate(prompts, params)])
        assert 0 < sum(engine.accepted) < sum(engine.drafted)
    assert found[0] == found[1]


def test_a_runner_brings_the_sizes_of_its_cache_to_the_draft_too():
    runners = ModelRunner(tiny(0), 12, 4), ModelRunner(related(0, 1.0), 10, 4)
    engine = SpeculativeEngine(tiny(0), related(0, 1.0), runner=runners[0], draft_runner=runners[1])
    assert (engine.drafter.manager.num_blocks, engine.drafter.manager.block_size) == (10, 4)


def test_a_draft_that_is_always_right_divides_the_steps():
    prompts, own = [[5, 6], [7], [8, 9, 10]], SamplingParams(max_new_tokens=26, ignore_eos=True)
    plain, drafting = Engine(tiny(0), num_blocks=40), SpeculativeEngine(tiny(0), tiny(0), draft_tokens=4, num_blocks=40)
    assert drafting.generate(prompts, own) == plain.generate(prompts, own)
    assert plain.stats()["steps"] == 26 and drafting.stats()["steps"] == 1 + 25 // 5
    assert drafting.accepted == drafting.drafted == [15] * 4


def test_a_preempted_request_drops_its_draft_and_loses_no_token():
    engine = SpeculativeEngine(tiny(0), related(0, 1.0), draft_tokens=3, num_blocks=8, block_size=4, max_batch=4)
    own = SamplingParams(max_new_tokens=20, ignore_eos=True)
    ids = [engine.add([3, 4, n], own) for n in (5, 6, 7)]
    outputs = run(engine)
    assert engine.stats()["preemptions"] > 0
    for id, n in zip(ids, (5, 6, 7), strict=True):
        assert tokens_of(outputs[id]) == generate(tiny(0), [3, 4, n], own).tokens


def test_an_aborted_request_leaves_neither_cache_anything():
    engine = SpeculativeEngine(tiny(0), related(0, 1.0), draft_tokens=3, num_blocks=30)
    own = SamplingParams(max_new_tokens=30, ignore_eos=True)
    gone, stays = engine.add([3, 4, 5], own), engine.add([6, 7], own)
    for _ in range(3):
        engine.step()
    assert engine.drafter.manager.num_used > 1 and engine.abort(gone)
    outputs = run(engine)
    assert outputs[gone][-1].finish_reason == "abort"
    assert engine.requests == {} and outputs[stays][-1].request.output == generate(tiny(0), [6, 7], own).tokens


def test_a_draft_that_fails_or_has_no_room_costs_speed_and_no_token():
    own = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected = generate(tiny(0), [3, 4], own).tokens
    failing = SpeculativeEngine(tiny(0), related(0, 1.0), num_blocks=30)
    real = failing.drafter.runner.run

    def sometimes(step, manager, **options):
        if len(step.chunks[0].request.tokens) == 9:
            raise RuntimeError("no draft today")
        return real(step, manager, **options)

    failing.drafter.runner.run = sometimes
    cramped = SpeculativeEngine(tiny(0), related(0, 1.0), num_blocks=30, block_size=4, draft_blocks=2)
    for engine in (failing, cramped):
        id = engine.add([3, 4], own)
        assert tokens_of(run(engine)[id]) == expected
        assert 0 < engine.stats()["drafted_tokens"] < 40
    assert failing.stats()["failed_drafts"] > 0


def test_a_request_whose_logits_are_not_finite_fails_alone():
    engine = SpeculativeEngine(tiny(0), related(0, 1.0), num_blocks=30)
    own = SamplingParams(max_new_tokens=12, ignore_eos=True)
    bad, good = engine.add([3, 4], own), engine.add([5, 6], own)
    real = engine.runner.run

    def poisoned(step, manager, **options):
        logits = real(step, manager, **options)
        return logits.fill_(torch.nan) if any(c.request.id == bad and c.start > 6 for c in step.chunks[:1]) else logits

    engine.runner.run = poisoned
    outputs = run(engine)
    assert outputs[bad][-1].finish_reason == "error" and "not finite" in outputs[bad][-1].error
    assert outputs[good][-1].finished


@pytest.mark.slow
@pytest.mark.parametrize("samples", thorough_but((400, 1000), 400))
def test_sampled_text_of_a_batch_has_the_targets_distribution(samples):
    target, draft = small_pair()
    settings = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 2.0, "top_p": 0.9}
    engine = SpeculativeEngine(target, draft, draft_tokens=2, num_blocks=300, max_batch=256)
    engine.one_by_one = False
    found = torch.zeros(7, 7)
    answers = engine.generate([[4, 5]] * samples, [SamplingParams(seed=seed, **settings) for seed in range(samples)])
    for answer in answers:  # the first token comes from the prompt's own step: the next two were drafted
        found[answer.tokens[1], answer.tokens[2]] += 1
    first = next_probabilities(target, [4, 5], SamplingParams(**settings))
    expected = sum(first[t] * pairs(target, [4, 5, t], SamplingParams(**settings)) for t in range(7))
    alone = sum(first[t] * pairs(draft, [4, 5, t], SamplingParams(**settings)) for t in range(7))
    fit = chi_square(found, expected)
    assert fit.degrees > 10 and fit.p_value > KEPT, str(fit)
    assert chi_square(found, alone).p_value < REFUSED
