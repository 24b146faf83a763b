"""Lab 5's engine: each request gets its own tokens whatever is beside it, and nothing is left behind."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from parameters import thorough_but
from token_identity import disturbed, draw_workload, play, tiny_model

from solutions.lab5_serving import (
    BlockManager,
    Engine,
    EngineFull,
    ModelRunner,
    Request,
    SpeculativeEngine,
    Status,
    Step,
)
from utils.serving import MODELS, SamplingParams, generate, load_model, load_tokenizer

# ---- token identity --------------------------------------------------------------------------------------------------


def prompts_of(count: int, longest: int = 12, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(61) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_workload_gives_each_request_its_unbatched_decode(seed):
    play(draw_workload(seed, tiny_model()), tiny_model())


@pytest.mark.slow
def test_a_random_workload_of_greedy_requests_is_the_same_with_a_draft_model():
    model = tiny_model()
    workload = draw_workload(20, model)  # a draft for a prompt of one token that the step then has no room for
    for ask in workload.asks:
        ask.params = replace(ask.params, temperature=0.0)
    play(workload, model, partial(SpeculativeEngine, draft_model=disturbed(model)))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", thorough_but([range(2, 10), range(2, 100)], range(2, 10)))
def test_random_workloads_give_each_request_its_unbatched_decode(seeds):
    counts = Counter()
    for seed in seeds:
        counts += play(draw_workload(seed, tiny_model()), tiny_model())
    # The sample covers what it is for.
    for name in ("preemptions", "cached_tokens", "abort", "error", "stop"):
        assert counts[name] > 0, name


@pytest.mark.slow
def test_the_shipped_model_says_the_same_in_a_small_pool_as_alone():
    model, tokenizer = load_model(MODELS / "target").float(), load_tokenizer(MODELS / "target")
    texts = ["It is a truth universally acknowledged,", "It is a truth", "In the beginning", "She was"]
    prompts, params = [tokenizer.encode(text) for text in texts], SamplingParams(max_new_tokens=20)
    expected = [generate(model, prompt, params) for prompt in prompts]
    for scheduler in ("continuous", "static"):
        engine = Engine(model, num_blocks=10, block_size=4, max_batch=3, token_budget=6, scheduler=scheduler)
        assert engine.generate(prompts, params) == expected
        assert engine.stats()["preemptions"] > 0 or scheduler == "static"
        assert engine.manager.num_used == 0


@pytest.mark.slow
def test_a_seeded_request_draws_the_same_tokens_beside_any_others():
    model, prompts = tiny_model(), prompts_of(6)
    params = [
        SamplingParams(max_new_tokens=12, temperature=0.9, top_k=top_k, top_p=top_p, seed=seed, ignore_eos=True)
        for seed, (top_k, top_p) in enumerate([(0, 1.0), (0, 1.0), (5, 1.0), (0, 0.8), (5, 0.8), (0, 1.0)])
    ]
    together = Engine(model).generate(prompts, params)
    squeezed = Engine(model, num_blocks=6, block_size=4, max_batch=3, token_budget=5).generate(prompts, params)
    alone = [generate(model, prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    assert together == squeezed == alone
    assert generate(model, prompts[0], params[0]) != generate(model, prompts[0], params[1])


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_prompts_that_cannot_be_served_are_refused_and_leave_nothing():
    engine = Engine(tiny_model(), num_blocks=4, block_size=4)
    for prompt, says in (
        ([], "at least one token"),
        ([61], "outside the vocabulary of 61"),
        ([1] * 96, "shorter than max_seq_len = 96"),
        ([1] * 17, r"may grow to 81 tokens \(its prompt has 17\)"),
    ):
        with pytest.raises(ValueError, match=says):
            engine.add(prompt)
    assert not engine.has_work and engine.step() == []
    with pytest.raises(ValueError, match="scheduler must be one of continuous, static, got 'none'"):
        Engine(tiny_model(), scheduler="none")


def test_a_full_engine_says_so_and_an_id_is_unique_while_it_lives():
    engine = Engine(tiny_model(), max_waiting=2)
    params = SamplingParams(max_new_tokens=1)
    engine.add([1], params, id="a")
    with pytest.raises(ValueError, match="'a' is not finished yet"):
        engine.add([1], params, id="a")
    engine.add([2], params)
    with pytest.raises(EngineFull, match="2 requests wait, and no more than 2 may"):
        engine.add([3], params)
    engine.step()
    assert engine.add([1], params, id="a") == "a"


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_an_abort_at_any_moment_frees_the_memory_at_once_and_is_reported(steps):
    """Waiting (0 steps), amid its prompt (1), about to decode (3), decoding (6)."""
    model = tiny_model()
    engine = Engine(model, num_blocks=20, block_size=4, max_batch=2, token_budget=6)
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    engine.add([5, 6, 7], params, id="other")
    engine.add(list(range(12)), params, id="given up")
    outputs = [output for _ in range(steps) for output in engine.step()]
    held = len(engine.manager.sequences.get("other").blocks) if steps else 0
    assert engine.abort("given up")
    assert engine.manager.num_used == held
    while engine.has_work:
        outputs += engine.step()
        engine.manager.check()
    assert not engine.abort("given up")
    ends = {output.id: output for output in outputs if output.finished}
    assert (ends["given up"].finish_reason, ends["given up"].error) == ("abort", None)
    assert ends["other"].request.output == generate(model, [5, 6, 7], params).tokens
    assert engine.manager.num_used == 0


class Faulty(ModelRunner):
    """Fails, or computes nonsense, when the marked token is in a step."""

    def __init__(self, kind: str, token: int = 60) -> None:
        super().__init__(tiny_model(), 64, 4)
        self.kind, self.token = kind, token

    def run(self, step: Step, manager: BlockManager, rows: str = "last") -> torch.Tensor:
        bad = [self.token in chunk.request.tokens for chunk in step.chunks if chunk.samples]
        if self.kind == "raises" and any(self.token in chunk.request.tokens for chunk in step.chunks):
            raise ArithmeticError("injected")
        logits = super().run(step, manager, rows)
        logits[torch.tensor(bad, dtype=torch.bool)] = torch.nan
        return logits


@pytest.mark.parametrize(("kind", "says"), [("raises", "model failed: ArithmeticError: injected"), ("nan", "finite")])
def test_a_request_that_fails_inside_the_model_is_reported_alone(kind, says):
    model, params = tiny_model(), SamplingParams(max_new_tokens=6)
    engine = Engine(model, runner=Faulty(kind))
    prompts = {"before": [1, 2, 3], "bad": [4, 60, 5, 6], "after": [6, 7]}
    for id, prompt in prompts.items():
        engine.add(prompt, params, id=id)
    ends = {output.id: output for _ in range(10) for output in engine.step() if output.finished}
    assert (ends["bad"].finish_reason, ends["bad"].request.output) == ("error", [])
    assert says in ends["bad"].error
    for id in ("before", "after"):
        expected = generate(model, prompts[id], params)
        assert (ends[id].request.output, ends[id].finish_reason) == (expected.tokens, expected.finish_reason)
    assert engine.manager.num_used == 0 and not engine.has_work
    engine.manager.check()
    assert engine.manager.cached_prefix([*prompts["bad"], 8, 9])[0] == []  # nobody reuses what a failure has written
    assert engine.manager.cached_prefix([*ends["before"].request.tokens, 8, 9])[0] != []
    assert engine.generate([[1, 2, 3]], params)[0].tokens == ends["before"].request.output


def test_a_sampler_that_fails_ends_its_own_request_alone():
    model = tiny_model()
    engine = Engine(model)
    params = [SamplingParams(max_new_tokens=6, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    ids = [engine.add([1, 2, 3], own) for own in params]
    broken = engine.requests[ids[1]]
    broken.generator = "no generator"
    ends = {output.id: output for _ in range(10) for output in engine.step() if output.finished}
    assert ends[ids[1]].finish_reason == "error" and "sampling failed: TypeError" in ends[ids[1]].error
    for index in (0, 2):
        assert ends[ids[index]].request.output == generate(model, [1, 2, 3], params[index]).tokens
    assert engine.manager.num_used == 0


def test_blocks_that_two_requests_share_are_copied_once_before_either_writes_also_in_a_step_that_fails():
    model, params = tiny_model(), SamplingParams(max_new_tokens=8, ignore_eos=True)
    engine = Engine(model, runner=Faulty("raises"))
    parent = engine.requests[engine.add([1, 2, 3, 4, 5, 6], params)]
    engine.step()
    child = Request("child", list(parent.tokens), params, status=Status.RUNNING, computed=parent.computed)
    engine.manager.fork(parent.id, child.id)
    engine.requests[child.id] = child
    engine.scheduler.running.append(child)
    used, bad = engine.manager.num_used, engine.add([60], params)
    ends = {output.id: output for output in engine.step() if output.finished}
    assert ends[bad].finish_reason == "error" and engine.manager.num_used == used + 1
    while engine.has_work:
        engine.step()
        engine.manager.check()
    assert parent.output == generate(model, parent.prompt, params).tokens
    assert child.output == generate(model, child.prompt, params).tokens


def test_a_device_that_is_lost_fails_every_request_and_not_the_engine():
    engine = Engine(tiny_model(), runner=Faulty("raises", token=1))
    for id in "ab":
        engine.add([1], id=id)
    outputs = engine.step()
    assert sorted((output.id, output.finish_reason) for output in outputs) == [("a", "error"), ("b", "error")]
    assert engine.manager.num_used == 0 and not engine.has_work


def test_a_stream_gives_tokens_as_they_come_and_stopping_it_aborts_the_request():
    model, params = tiny_model(), SamplingParams(max_new_tokens=8, ignore_eos=True)
    engine = Engine(model)
    expected = generate(model, [1, 2], params).tokens
    one, two = engine.stream([1, 2], params), engine.stream([3], params)
    assert [next(one) for _ in range(3)] == expected[:3]
    assert engine.stats()["steps"] == 3
    assert next(two) == generate(model, [3], params).tokens[0]
    two.close()
    assert len(engine.requests) == 1
    assert [*one] == expected[3:]
    assert engine.manager.num_used == 0
    with pytest.raises(ValueError, match="at least one token"):
        engine.stream([])
    with pytest.raises(RuntimeError, match="failed: the model failed: ArithmeticError: injected"):
        list(Engine(model, runner=Faulty("raises")).stream([60]))


def test_generate_serves_all_or_none():
    engine = Engine(tiny_model(), runner=Faulty("raises"))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.generate([[1], [99]])
    assert engine.requests == {} and engine.stats()["abort"] == 1
    with pytest.raises(RuntimeError, match="failed: the model failed: ArithmeticError: injected"):
        engine.generate([[1], [60]], SamplingParams(max_new_tokens=2))


def test_a_common_beginning_is_computed_once():
    model, beginning = tiny_model(), list(range(40))
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    prompts = [[*beginning, number] for number in range(4)]
    engine = Engine(model, block_size=8, max_batch=4)
    engine.generate(prompts[:1], params)
    assert engine.generate(prompts[1:], params) == [generate(model, prompt, params) for prompt in prompts[1:]]
    stats = engine.stats()
    assert (stats["cached_tokens"], stats["computed_tokens"]) == (3 * 40, 41 + 3 + 4 * 2)


def test_times_and_history_say_what_happened():
    ticks = iter(range(10_000))
    engine = Engine(tiny_model(), block_size=4, num_blocks=30, token_budget=64, clock=lambda: next(ticks))
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    engine.add([1, 2, 3, 4, 5], params, id="a", arrival=-1)
    request = engine.requests["a"]
    engine.step()
    engine.add([6], params, id="b")
    while engine.has_work:
        engine.step()
    assert [step.tokens for step in engine.history] == [{"a": 5}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, {"b": 1}]
    assert [step.finished for step in engine.history] == [(), (), ("a",), ("b",)]
    assert [(step.batch, step.used + step.free) for step in engine.history] == [(1, 30), (2, 30), (2, 30), (1, 30)]
    assert request.arrival < request.first_scheduled < request.first_token == request.token_times[0]
    assert request.token_times == sorted(request.token_times) and request.token_times[-1] <= request.finished
    stats = engine.stats()
    assert (stats["steps"], stats["computed_tokens"], stats["generated_tokens"], stats["length"]) == (4, 10, 6, 2)
    short = Engine(tiny_model(), history=2)
    short.generate([[1]], params)
    assert len(short.history) == 2
