"""The engine with a draft head: the target's own tokens for every request, in fewer steps, and no block left behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from parameters import thorough_but
from test_lab5_speculative import KEPT, REFUSED, next_probabilities, pairs, small_pair
from token_identity import WatchedRunner, draw_workload, play, tiny_model

from solutions.lab5_serving import Engine
from solutions.lab6_frontiers.draft_tree import Tree, grow
from solutions.lab6_frontiers.tree_drafter import TreeDrafter
from solutions.lab6_frontiers.tree_engine import TreeEngine
from solutions.lab6_frontiers.tree_runner import TreeRunner
from solutions.lab6_frontiers.tree_sampling import NONE
from utils.chi_square import chi_square
from utils.serving import SamplingParams, generate
from utils.serving.heads import DraftHead

TREE = Tree((-1, 0, 0, 1, 0, 1, 3, 2, 4, 0, 6, 8))


class Forgetful:
    """A head that is the model itself, reading each token as if nothing stood before it: sometimes right."""

    def __init__(self, model):
        self.hidden_size = model.config.hidden_size

    def step(self, state, tokens, target):
        alone = tokens.reshape(-1, 1)

        def attend(layer, q, k, v):
            return v.repeat_interleave(q.shape[-2] // v.shape[-2], -2)

        hidden = target.hidden(alone, torch.zeros_like(alone), attend).view(*tokens.shape, -1)
        return hidden, target.logits(hidden)


class WatchedTreeRunner(WatchedRunner, TreeRunner):
    """A runner with trees that looks at what it is asked to write, and that fails where a workload says so."""


def watched(model, runner, **settings):
    own = WatchedTreeRunner(model, runner.num_blocks, runner.block_size, runner.fails_at)
    return TreeEngine(model, Forgetful(model), TREE, runner=own, **settings)


def greedy_workload(seed, model):
    workload = draw_workload(seed, model)
    for ask in workload.asks:
        ask.params = replace(ask.params, temperature=0.0)
    return workload


def engine_of(model, tree=TREE, **settings):
    return TreeEngine(model, Forgetful(model), tree, **{"num_blocks": 40, "block_size": 4} | settings)


def run(engine):
    """Step to the end with all books checked; every output, by request."""
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
        engine.manager.check()
    assert engine.manager.num_used == 0
    return outputs


def tokens_of(outputs):
    return [token for output in outputs for token in output.new_tokens]


# ---- token identity --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("five", thorough_but(range(200), 0))
def test_random_workloads_of_greedy_requests_are_the_same_with_trees(five):
    """Pools as small as one request, chunks, aborts, failures, shared beginnings: every token is the target's own."""
    for seed in range(5 * five, 5 * five + 5):
        play(greedy_workload(seed, tiny_model()), tiny_model(), watched)


@pytest.mark.thorough
def test_random_workloads_cover_what_they_are_for():
    counts = Counter()
    for seed in range(40, 60):
        counts += play(greedy_workload(seed, tiny_model()), tiny_model(), watched)
    for name in ("preemptions", "cached_tokens", "abort", "error", "stop", "accepted_tokens"):
        assert counts[name] > 0, name


def test_a_batch_beside_a_long_prompt_gets_the_targets_tokens_in_fewer_steps():
    model, own = tiny_model(), SamplingParams(max_new_tokens=24, ignore_eos=True)
    prompts = [[3, 4, 5], [6], list(range(2, 40)), [7, 8]]
    plain, trees = (
        Engine(model, num_blocks=80, block_size=4, token_budget=40, max_batch=8),
        engine_of(model, num_blocks=80, token_budget=40, max_batch=8),
    )
    assert trees.generate(prompts, own) == plain.generate(prompts, own)
    stats = trees.stats()
    assert stats["steps"] < plain.stats()["steps"] and stats["generated_tokens"] == 4 * 24
    assert 0 < stats["accepted_tokens"] == sum(trees.accepted)


def test_accepted_candidates_that_stood_apart_are_read_from_their_new_place():
    """The keys and values in the cache after each step are those of the text, as plain decoding leaves them."""
    model, own = tiny_model(), SamplingParams(max_new_tokens=12, ignore_eos=True)
    engine, moved = engine_of(model), []
    real = engine.runner.move
    engine.runner.move = lambda pairs: (moved.extend(pairs), real(pairs))
    engine.add([3, 4, 5], own, id="a")
    while engine.has_work:
        engine.step()
        if "a" not in engine.requests:
            break
        text = engine.requests["a"].tokens
        computed = engine.requests["a"].computed
        fresh = Engine(model, num_blocks=40, block_size=4)
        fresh.add(text[:computed], own, id="a")
        fresh.step()
        for place in range(computed):
            found, right = (divmod(each.manager.slot("a", place), 4) for each in (engine, fresh))
            for name in ("key_cache", "value_cache"):
                caches = getattr(engine.runner, name), getattr(fresh.runner, name)
                torch.testing.assert_close(caches[0][:, *found], caches[1][:, *right], rtol=1e-4, atol=1e-5)
    assert moved


def test_without_the_move_the_text_is_another():
    model, own = tiny_model(), SamplingParams(max_new_tokens=40, ignore_eos=True)
    found = []
    for broken in (False, True):
        engine = engine_of(model)
        if broken:
            engine.runner.move = lambda pairs: None
        found.append([each.tokens for each in engine.generate([[3, 4, 5], [6], [9, 2]], own)])
    assert found[0] == [generate(model, prompt, own).tokens for prompt in ([3, 4, 5], [6], [9, 2])] != found[1]


# ---- room ------------------------------------------------------------------------------------------------------------


def test_a_budget_cuts_a_tree_to_its_first_nodes():
    model, own = tiny_model(), SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine = engine_of(model, token_budget=9, max_batch=2)
    ids = [engine.add(prompt, own) for prompt in ([3, 4], [5, 6])]
    outputs = run(engine)
    assert [tokens_of(outputs[id]) for id in ids] == [generate(model, p, own).tokens for p in ([3, 4], [5, 6])]
    sizes = {count for step in engine.history for _, _, count in step.chunks}
    assert any(1 < size < len(TREE) for size in sizes) and max(sizes) <= 9


def test_a_preempted_request_drops_its_tree_and_loses_no_token():
    model, own = tiny_model(), SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine = engine_of(model, num_blocks=8, max_batch=4)
    ids = [engine.add([3, 4, n], own) for n in (5, 6, 8)]
    outputs = run(engine)
    assert engine.stats()["preemptions"] > 0
    for id, n in zip(ids, (5, 6, 8), strict=True):
        assert tokens_of(outputs[id]) == generate(model, [3, 4, n], own).tokens


def test_no_candidate_is_drafted_behind_the_last_token_that_is_wanted():
    model = tiny_model()
    for new in (1, 2, 3):
        engine = engine_of(model)
        own = SamplingParams(max_new_tokens=new, ignore_eos=True)
        assert engine.generate([[5, 6]], own)[0].tokens == generate(model, [5, 6], own).tokens
        deepest = max((TREE.depths[node] for node, tried in enumerate(engine.tried) if tried), default=0)
        assert deepest <= max(0, new - 2)


def test_an_aborted_request_leaves_nothing():
    model, own = tiny_model(), SamplingParams(max_new_tokens=30, ignore_eos=True)
    engine = engine_of(model)
    gone, stays = engine.add([3, 4, 5], own), engine.add([6, 8], own)
    for _ in range(3):
        engine.step()
    assert engine.abort(gone)
    outputs = run(engine)
    assert outputs[gone][-1].finish_reason == "abort" and engine.requests == {}
    assert outputs[stays][-1].request.output == generate(model, [6, 8], own).tokens


def test_a_head_that_fails_costs_speed_and_no_token():
    model, own = tiny_model(), SamplingParams(max_new_tokens=12, ignore_eos=True)
    engine = engine_of(model)
    real, calls = engine.drafter.head.step, []

    def sometimes(*arguments):
        calls.append(arguments[0])
        if len(calls) > 9:
            raise RuntimeError("no draft today")
        return real(*arguments)

    engine.drafter.head.step = sometimes
    id = engine.add([3, 4], own)
    assert tokens_of(run(engine)[id]) == generate(model, [3, 4], own).tokens
    assert engine.stats()["failed_drafts"] > 0


def test_a_request_whose_logits_are_not_finite_fails_alone():
    model, own = tiny_model(), SamplingParams(max_new_tokens=12, ignore_eos=True)
    engine = engine_of(model)
    bad, good = engine.add([3, 4], own), engine.add([5, 6], own)
    real = engine.runner.run

    def poisoned(step, manager, **options):
        logits = real(step, manager, **options)
        if any(chunk.request.id == bad and chunk.start > 5 for chunk in step.chunks[:1]):
            logits[:1].fill_(torch.nan)
        return logits

    engine.runner.run = poisoned
    outputs = run(engine)
    assert outputs[bad][-1].finish_reason == "error" and "not finite" in outputs[bad][-1].error
    assert tokens_of(outputs[good]) == generate(model, [5, 6], own).tokens


def test_steps_padded_to_the_size_of_a_recorded_one_give_the_same_tokens():
    model, own = tiny_model(), SamplingParams(max_new_tokens=16, ignore_eos=True)
    runner = TreeRunner(model, 60, 4, cuda_graphs=True, graph_chunks=[len(TREE)])
    engine = TreeEngine(model, Forgetful(model), TREE, runner=runner)
    prompts = [[3, 4], [5], [6, 8, 9]]
    assert engine.generate(prompts, own) == [generate(model, prompt, own) for prompt in prompts]
    assert len(TREE) in {tokens for _, tokens, _ in runner.graphs.recorded}


def test_the_kernels_and_the_fused_layers_give_the_same_tokens():
    from serving_runs import tiny_model as sixteen  # heads of 16: the least that the kernels take

    model, own = sixteen(), SamplingParams(max_new_tokens=8, ignore_eos=True)
    expected = [generate(model, prompt, own) for prompt in ([3, 4], [5])]
    for options in ({"attention": "triton"}, {"attention": "triton", "fused": True}):
        runner = TreeRunner(model, 20, 4, **options)
        engine = TreeEngine(model, Forgetful(model), grow([[0.4, 0.2], [0.4, 0.2]], 5), runner=runner)
        assert engine.generate([[3, 4], [5]], own) == expected, options
        assert engine.stats()["accepted_tokens"] > 0


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_a_seeded_request_draws_the_same_text_beside_any_others():
    model = tiny_model()
    own = SamplingParams(max_new_tokens=14, ignore_eos=True, temperature=1.0, seed=3)
    alone, crowd = engine_of(model), engine_of(model, num_blocks=80)
    others = [SamplingParams(max_new_tokens=9, temperature=t, seed=1) for t in (0.0, 1.0, 0.7)]
    expected = alone.generate([[3, 4, 5]], own)[0]
    assert crowd.generate([[5], [3, 4, 5], [8], [9]], [others[0], own, *others[1:]])[1] == expected


@pytest.mark.slow
@pytest.mark.parametrize("samples", thorough_but([1000, 6000], 1000))
def test_sampled_text_of_a_batch_has_the_targets_distribution(samples):
    target, draft = small_pair()
    settings = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 2.0, "top_p": 0.9}
    engine = TreeEngine(target, Forgetful(target), Tree((-1, 0, 0, 1, 1, 2)), num_blocks=600, max_batch=256)
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


def test_a_draft_has_the_newest_token_at_its_root_and_no_candidate_twice():
    model = tiny_model()
    drafter = TreeDrafter(model, Forgetful(model), TREE)
    numbers = torch.rand(5, len(TREE), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    newest = torch.tensor([3, 9, 9, 20, 1])
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=2)):
        tokens, probs = drafter.draft(torch.zeros(5, 32), newest, params, numbers)
        assert torch.equal(tokens[:, 0], newest) and probs.shape == (5, len(TREE.inner), 61)
        torch.testing.assert_close(probs.sum(-1), torch.ones(5, len(TREE.inner)))
        for row in tokens.tolist():
            for own in TREE.children:
                there = [row[child] for child in own if row[child] != NONE]
                assert len(set(there)) == len(there) and len(there) == min(len(own), params.top_k or 61)


def test_a_head_of_another_size_is_refused():
    with pytest.raises(ValueError, match="hidden size of 16, the target has 32"):
        TreeEngine(tiny_model(), DraftHead(16, 16), TREE, num_blocks=9)
